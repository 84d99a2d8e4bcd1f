"""canonicalize: the same values in one spelling."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from autopar3d.passes.canonicalize import canonicalize
from autopar3d.passes.trace import trace
from autopar3d.program import Program, text
from tests.models import MODELS, loss_of
from tests.passes.programs import run, traced

aten = torch.ops.aten


class Model(nn.Module):
    """A square weight, a bias and the forward of a test."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))
        self.bias = nn.Parameter(torch.ones(4))
        self.body = forward

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


X = torch.linspace(-1, 1, 24).reshape(2, 3, 4)


def body(forward: Callable[..., Any], x: Tensor = X) -> str:
    """The canonical graph's text, from its first op on."""
    lines = text(canonicalize(trace(Model(forward), (x,))).graph).splitlines()
    return "\n".join(line for line in lines if "placeholder" not in line)


def assert_values_are_right(program: Program) -> None:
    """Every node's `val` has the shape, dtype and strides that running its op on the inputs' `val` gives."""
    for node in program.graph.graph.nodes:
        assert node.op == "output" or node.meta["val"] is not None, node
        if node.op == "call_function" and isinstance(node.meta["val"], Tensor):
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            with node.meta["val"].fake_mode:
                again = node.target(*args, **kwargs)
            value = node.meta["val"]
            assert (again.shape, again.dtype, again.stride()) == (value.shape, value.dtype, value.stride()), node


@pytest.mark.parametrize("name", MODELS)
def test_program_stays_the_model(name: str) -> None:
    make_model, make_inputs = MODELS[name]
    model, (args, kwargs) = make_model(torch.float64), make_inputs(torch.float64)
    before = text(traced(name).graph)
    program = canonicalize(traced(name))
    assert text(traced(name).graph) == before, "the input was edited"
    assert_values_are_right(program)
    targets = {node.target for node in program.graph.graph.nodes}
    assert not targets & {aten.view.default, aten.clone.default, aten.alias.default, aten.addmm.default}
    assert not any("assert" in str(target) for target in targets)

    reference = copy.deepcopy(model)
    expected = reference(*args, **kwargs)
    actual, buffers = run(program, model, args, kwargs)
    torch.testing.assert_close(tree_leaves(actual), tree_leaves(expected), rtol=1e-10, atol=1e-10)
    loss_of(actual).backward()
    loss_of(expected).backward()
    for (parameter, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-10, msg=parameter)
    for buffer, value in model.named_buffers():
        torch.testing.assert_close(buffers.get(buffer, value), reference.get_buffer(buffer))


def test_conv1d_is_a_matmul_and_one_bias() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, 4), self.weight).view(2, 3, 4)

    assert body(forward) == (
        "%matmul = aten.matmul(%x, %p_weight) : float32[2, 3, 4]\n"
        "%add = aten.add.Tensor(%matmul, %p_bias) : float32[2, 3, 4]\n"
        "return [%add]"
    )


def test_mm_between_reshapes_is_a_matmul() -> None:
    assert body(lambda self, x: torch.mm(x.reshape(6, 4), self.weight).reshape(2, 3, 4)) == (
        "%matmul = aten.matmul(%x, %p_weight) : float32[2, 3, 4]\nreturn [%matmul]"
    )


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: torch.addmm(self.bias, x.view(-1, 4), self.weight).view(3, 2, 4),
        lambda self, x: torch.addmm(self.bias, x.view(-1, 4), self.weight, beta=2).view(2, 3, 4),
        lambda self, x: torch.addmm(x.view(-1, 4), x.view(-1, 4), self.weight).view(2, 3, 4),
    ],
    ids=["other rows", "scaled", "bias by row"],
)
def test_other_addmm_stays_fused(forward: Callable[..., Any]) -> None:
    assert "addmm" in body(forward)


def test_product_read_twice_is_computed_once() -> None:
    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.mm(x.view(-1, 4), self.weight)
        return y.view(2, 3, 4), y

    assert "matmul" not in body(forward)


def test_what_changes_no_value_goes() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = x.clone().contiguous().to(torch.float32)[:, :].expand(2, 3, 4)
        torch._assert(x.shape[0] == 2, "two")
        unread = torch.relu(x)
        del unread
        x = torch.cat([torch.tensor([]), x.view(2, 3, 4).detach()], dim=-1)
        return x @ self.weight.clone()

    assert body(forward) == ("%matmul = aten.matmul(%x, %p_weight) : float32[2, 3, 4]\nreturn [%matmul]")
    program = canonicalize(trace(Model(forward), (X,)))
    assert [a.node for a in program.arguments] == ["p_weight", "p_bias", "x"] and not program.constants


def test_detach_stays_where_a_gradient_would_flow() -> None:
    assert "detach" in body(lambda self, x: (x @ self.weight).detach() @ self.weight)


def test_values_follow_dropped_copies() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return torch.relu(x.transpose(0, 1).contiguous()) @ self.weight

    program = canonicalize(trace(Model(forward), (X,)))
    assert_values_are_right(program)
    relu = next(n for n in program.graph.graph.nodes if n.target is aten.relu.default)
    assert not relu.meta["val"].is_contiguous()
