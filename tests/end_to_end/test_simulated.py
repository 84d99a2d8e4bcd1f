"""Every model trains on a simulated grid as on one device.

The full matrix of models and grids is `examples/benchmarks/equality_matrix.py`; its result stands in
docs/equality.md.
"""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch
from torch.fx import GraphModule

from autopar3d import collectives
from autopar3d.testing import assert_trains_like_one_device
from tests.models import MODELS

from .cases import GLOO_GRIDS, Sizes, case, simulated

torch.set_num_threads(1)

# On one device equal to rounding, not bit for bit: GPT-2's addmm is planned as a matmul and an add; Llama's and T5's
# clones go, and with them strides and the order in which gradients are added.
ROUNDED = ("gpt2", "llama", "t5")

FEW: list[Sizes] = [(2, 2, 2), (2, 3, 4), (1, 1, 1)]


def check(name: str, grid: Sizes, *, steps: int = 5, dtype: torch.dtype = torch.float64, **options: str) -> None:
    found = simulated(name, grid, dtype, steps, **options)
    assert not found.failures, str(found)
    kinds = {"loss", "output", "gradient", "parameter"}
    assert kinds <= set(found.worst)


@pytest.mark.parametrize("grid", FEW, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_every_model_trains_as_on_one_device(name: str, grid: Sizes) -> None:
    check(name, grid)


@pytest.mark.parametrize("grid", [g for g in GLOO_GRIDS if g not in FEW], ids=str)
@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_on_grids_of_every_shape(name: str, grid: Sizes) -> None:
    check(name, grid)


@pytest.mark.parametrize("name", ["mlp", "gpt", "gpt2"])
def test_on_64_ranks(name: str) -> None:
    check(name, (4, 4, 4), steps=1)


@pytest.mark.parametrize("name", ["gpt", "bert", "resnet"])
def test_in_single_precision(name: str) -> None:
    """To 1e-5; but AdamW divides a gradient by its own size.

    Where that is the size of rounding (a key's bias has no gradient at all in exact arithmetic), the step is noise, on
    one device too. There a parameter may be as far off as one device is from its own float64 twin.
    """
    found = simulated(name, (2, 2, 2), torch.float32)
    assert {d.kind for d in found.failures} <= {"parameter"}, str(found)
    for d in found.failures:
        assert d.error <= 4 * rounding(name), str(d)


@cache
def rounding(name: str) -> float:
    """How far one device's parameters are from float64's after as many steps."""
    single, double = (
        dict(simulated(name, (1, 1, 1), dtype).module.named_parameters()) for dtype in (torch.float32, torch.float64)
    )
    return max((single[n] - p).abs().max().item() for n, p in double.items())


def test_in_half_precision() -> None:
    check("gpt", (2, 2, 2), dtype=torch.bfloat16)


@pytest.mark.parametrize("scheme", ["3d", "2d", "1d", "zero3", "zero3x1d"])
def test_schemes(scheme: str) -> None:
    check("gpt", (2, 2, 2), steps=2, scheme=scheme)


@pytest.mark.parametrize("regather", ["weights", "none"])
def test_regather(regather: str) -> None:
    check("gpt", (2, 2, 2), steps=2, regather=regather)


# -- what the graphs hold ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_no_op_is_without_a_rule(name: str) -> None:
    assert not simulated(name, (2, 2, 2)).module._prepared.step.factors.without_rule


@pytest.mark.parametrize("grid", FEW[:2], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_the_plan_counts_what_the_graphs_send(name: str, grid: Sizes) -> None:
    module = simulated(name, grid).module
    found: Counter[tuple[str, str]] = Counter()
    for graph in (module.forward_graph, module.backward_graph):
        assert graph is not None
        for c in collectives(graph):
            found[c.axis, c.kind] += c.bytes  # type: ignore[assignment]
    assert module.plan.bytes == pytest.approx(dict(found), rel=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_one_device_is_the_plain_model(name: str) -> None:
    found = simulated(name, (1, 1, 1))
    for graph in graphs(name):
        assert collectives(graph) == []
        assert not any("_c10d" in str(n.target) or "autopar3d" in str(n.target) for n in graph.graph.nodes)
    if name not in ROUNDED:
        assert not [str(d) for d in found.differences if d.error], "not bit for bit"


def graphs(name: str) -> tuple[GraphModule, GraphModule]:
    module = simulated(name, (1, 1, 1)).module
    assert module.backward_graph is not None
    return module.forward_graph, module.backward_graph


# -- the helper itself -------------------------------------------------------------------------------------------


def test_a_model_that_is_not_seeded_is_refused() -> None:
    with pytest.raises(ValueError, match="two models that differ in weight; seed it"):
        assert_trains_like_one_device(lambda: torch.nn.Linear(4, 4), torch.randn(8, 4), (2, 1, 1))


def test_what_differs_is_listed_with_its_layout() -> None:
    make, (args, kwargs) = case("mlp", torch.float32)
    with pytest.raises(AssertionError) as failed:
        assert_trains_like_one_device(make, args, (2, 2, 2), example_kwargs=kwargs, steps=2, tol=1e-12)
    message = str(failed.value)
    assert "on grid (2, 2, 2) beside one device (tolerance 1e-12)" in message
    layout = simulated("mlp", (2, 2, 2)).plan.storage["p_up_weight"]
    assert f"gradient up.weight {layout}: off by" in message


def test_loss_fn_and_inputs_that_want_a_gradient() -> None:
    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8)).double()

    x = torch.randn(8, 16, dtype=torch.float64, requires_grad=True)
    labels = torch.arange(8) % 8
    found = assert_trains_like_one_device(
        make,
        (x,),
        (2, 2, 2),
        example_kwargs={"targets": (labels,)},
        loss_fn=torch.nn.functional.cross_entropy,
        steps=2,
    )
    assert "of input 0" in [d.name for d in found.differences]
    assert x.grad is None


def test_outputs_without_a_loss() -> None:
    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Linear(16, 32).double()

    found = assert_trains_like_one_device(make, torch.randn(8, 16, dtype=torch.float64), (2, 2, 2), steps=2)
    assert found.worst.keys() == {"loss", "output", "gradient", "parameter"}
