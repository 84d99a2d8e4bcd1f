"""Random ops become draws by place: which do, what they compute, and which are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar3d.errors import TraceError
from autopar3d.passes.canonicalize import canonicalize
from autopar3d.passes.randomize import is_random, randomize
from autopar3d.passes.trace import trace
from autopar3d.program import Program, text


class Model(nn.Module):
    def __init__(self, forward: Callable[..., Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.body = forward

    def forward(self, *args: Any) -> Any:
        return self.body(args[0] * self.weight, *args[1:])


def _program(forward: Callable[..., Any], *args: Any) -> Program:
    return randomize(canonicalize(trace(Model(forward), args)))


def _run(program: Program, *args: Tensor, key: tuple[int, int] = (0, 0)) -> Tensor:
    given = iter(args)
    values = {"parameter": lambda: torch.ones(()), "input": lambda: next(given), "key": lambda: torch.tensor(key)}
    held = (program.constants[a.node] if a.kind == "constant" else values[a.kind]() for a in program.arguments)
    return program.graph(*held)[0]


X = torch.linspace(-1, 1, 200 * 50).reshape(200, 50)


def test_a_program_without_random_ops_stays_as_it_is() -> None:
    program = canonicalize(trace(Model(lambda x: F.dropout(x, 0.5, training=False)), (X,)))
    assert randomize(program) is program


def test_text() -> None:
    program = _program(lambda x: F.dropout(F.dropout(x, 0.5), 0.25), torch.ones(2, 3))
    assert text(program.graph).splitlines() == [
        "%p_weight = placeholder : float32[]",
        "%args_0 = placeholder : float32[2, 3]",
        "%random_key = placeholder : int64[2]",
        "%mul = aten.mul.Tensor(%args_0, %p_weight) : float32[2, 3]",
        "%draw_keep = autopar3d.draw(%random_key, 0, keep, 0.5, [2, 3], bool, cpu) : bool[2, 3]",
        "%dropout = aten.native_dropout_backward(%mul, %draw_keep, 2.0) : float32[2, 3]",
        "%draw_keep_1 = autopar3d.draw(%random_key, 1, keep, 0.25, [2, 3], bool, cpu) : bool[2, 3]",
        "%dropout_1 = aten.native_dropout_backward(%dropout, %draw_keep_1, 1.3333333333333333) : float32[2, 3]",
        "return [%dropout_1]",
    ]
    assert [a.kind for a in program.arguments] == ["parameter", "input", "key"]


# What each op's numbers must look like: (function, mean, standard deviation, lowest, highest).
DRAWN: dict[str, tuple[Callable[[Tensor], Tensor], float, float, float, float]] = {
    "rand": (lambda x: torch.rand(x.shape) + 0 * x, 0.5, 12**-0.5, 0, 1),
    "rand_like": (lambda x: torch.rand_like(x) + 0 * x, 0.5, 12**-0.5, 0, 1),
    "randn": (lambda x: torch.randn(x.shape) + 0 * x, 0, 1, -6, 6),
    "randn_like": (lambda x: torch.randn_like(x) + 0 * x, 0, 1, -6, 6),
    "uniform": (lambda x: torch.empty_like(x).uniform_(2, 4) + 0 * x, 3, 3**-0.5, 2, 4),
    "normal": (lambda x: torch.empty_like(x).normal_(3, 2) + 0 * x, 3, 2, -9, 15),
    "normal of numbers": (lambda x: torch.normal(3.0, 2.0, x.shape) + 0 * x, 3, 2, -9, 15),
    "normal of tensors": (lambda x: torch.normal(0 * x + 3, 0 * x.abs() + 2), 3, 2, -9, 15),
    "bernoulli": (lambda x: torch.bernoulli(0 * x + 0.3), 0.3, 0.21**0.5, 0, 1),
    "bernoulli of a number": (lambda x: torch.empty_like(x).bernoulli_(0.3) + 0 * x, 0.3, 0.21**0.5, 0, 1),
    "exponential": (lambda x: torch.empty_like(x).exponential_(2.0) + 0 * x, 0.5, 0.5, 0, 15),
    "randint": (lambda x: torch.randint(3, 8, x.shape) + 0 * x, 5, 2**0.5, 3, 7),
    "randint_like": (lambda x: torch.randint_like(x, 5) + 0 * x, 2, 2**0.5, 0, 4),
    "dropout": (lambda x: F.dropout(0 * x + 1, 0.2), 1, 0.5, 0, 1.25),
    "dropout in place": (lambda x: F.dropout(0 * x + 1, 0.2, inplace=True), 1, 0.5, 0, 1.25),
    "channel dropout": (lambda x: F.dropout2d((0 * x + 1)[:, :, None, None], 0.2)[:, :, 0, 0], 1, 0.5, 0, 1.25),
    "alpha dropout": (lambda x: F.alpha_dropout(x.sign(), 0.2, training=True), 0, 1, -3, 3),
}


@pytest.mark.parametrize("name", DRAWN)
def test_distribution(name: str) -> None:
    function, mean, deviation, low, high = DRAWN[name]
    program = _program(function, X)
    assert not any(is_random(n) for n in program.graph.graph.nodes)
    y = _run(program, X).double()
    assert y.shape == X.shape
    assert abs(float(y.mean()) - mean) < 4 * deviation / 100
    assert abs(float(y.std()) - deviation) < 0.05 * deviation
    assert low <= y.min() < y.max() <= high
    assert _run(program, X).equal(_run(program, X))
    assert not _run(program, X).equal(_run(program, X, key=(0, 1)))


def test_permutation() -> None:
    program = _program(lambda x: x[torch.randperm(x.shape[0])], X)
    y = _run(program, X)
    assert not y.equal(X)
    assert y.sort(dim=0).values.equal(X.sort(dim=0).values)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("cauchy", lambda x: x.clone().cauchy_()),
        ("poisson", lambda x: torch.poisson(x.abs())),
    ],
)
def test_refused(name: str, function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(TraceError, match=rf"{name}.* at test_randomize\.py:\d+ .* pass the result as an input"):
        _program(function, X)


def test_dropout_between_recurrent_layers() -> None:
    layer = nn.LSTM(50, 4, num_layers=2, dropout=0.5).requires_grad_(False)
    program = _program(lambda x: layer(x)[0], torch.ones(2, 50))
    assert not _run(program, torch.ones(2, 50)).equal(_run(program, torch.ones(2, 50), key=(0, 1)))
    layer.eval()
    assert torch.allclose(_run(_program(lambda x: layer(x)[0], X[:3]), X[:3]), layer(X[:3])[0], atol=1e-6)


def test_multinomial_without_replacement_draws_in_proportion() -> None:
    weights = torch.tensor([1.0, 2.0, 0.0, 5.0]).expand(4000, 4)
    program = _program(lambda x: torch.multinomial(x, 2).double(), weights)
    drawn = _run(program, weights).long()
    assert (drawn[:, 0] != drawn[:, 1]).all() and not (drawn == 2).any()
    first = torch.bincount(drawn[:, 0], minlength=4) / 4000
    assert torch.allclose(first, torch.tensor([1.0, 2.0, 0.0, 5.0]) / 8, atol=0.03)


def _attention_cases() -> dict[str, dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    see = torch.rand(5, 7, generator=generator) < 0.6
    see[2] = False  # a query that sees nothing
    bias = torch.randn(2, 1, 5, 7, generator=generator, dtype=torch.float64)
    return {
        "plain": {},
        "causal": {"is_causal": True},
        "scaled": {"scale": 0.3},
        "mask": {"attn_mask": see},
        "bias": {"attn_mask": bias},
        "bias of minus infinity": {"attn_mask": bias.masked_fill(~see, -torch.inf)},
        "grouped": {"enable_gqa": True, "is_causal": True},
    }


@pytest.mark.parametrize("name", _attention_cases())
def test_unfused_attention_computes_what_the_fused_does(name: str) -> None:
    """With a chance of dropping that rounds to none, so that both keep everything."""
    how = _attention_cases()[name]
    generator = torch.Generator().manual_seed(1)
    heads = 2 if how.get("enable_gqa") else 4
    shapes = ((2, 4, 5, 8), (2, heads, 7, 8), (2, heads, 7, 6))
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]
    program = _program(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=1e-11, **how), *tensors)
    assert "scaled_dot_product_attention(" not in text(program.graph)
    assert len(program.notes) == 1
    assert "MiB of probabilities and masks" in program.notes[0]
    values = {"parameter": [torch.ones(())], "key": [torch.tensor([0, 0])], "input": tensors}
    values["constant"] = list(program.constants.values())
    given = {kind: iter(of) for kind, of in values.items()}
    got = program.graph(*(next(given[a.kind]) for a in program.arguments))[0]
    want = F.scaled_dot_product_attention(*tensors, **how)
    assert torch.allclose(got, want, atol=1e-9)
    tangent = torch.randn(want.shape, generator=generator, dtype=torch.float64)
    grads = (torch.autograd.grad(y, tensors, tangent) for y in (got, want))
    for a, b in zip(*grads, strict=True):
        assert torch.allclose(a, b, atol=1e-9)


def test_attention_that_drops_nothing_stays_fused() -> None:
    program = _program(lambda x: F.dropout(F.scaled_dot_product_attention(x, x, x), 0.1), X)
    assert "scaled_dot_product_attention(" in text(program.graph)
    assert program.notes == ()
