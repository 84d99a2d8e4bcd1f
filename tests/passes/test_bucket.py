"""bucket: small collectives become one, nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from autopar3d.collectives import _all_reduce, _gather, _reduce_scatter, collectives
from autopar3d.grid import Grid
from autopar3d.hardware import PROFILES, Hardware, Link
from autopar3d.passes.bucket import bucket
from autopar3d.program import text
from autopar3d.running.lockstep import run_lockstep
from autopar3d.timelines.timeline import timeline
from autopar3d.timelines.timing import is_start

from .test_overlap import CASES, GRID, X, Y, calls_made, emitted, layers, random_graph, steps

# A latency that every small collective of these tests is below, and some that are not.
SLOW_TO_START = Hardware("toy", {"": 1e6}, 1e9, Link(1e-2, 1e5), Link(1e-2, 1e5), 1 << 30)


def graph_of(function: Any, *shapes: tuple[int, ...]) -> GraphModule:
    return make_fx(function, tracing_mode="fake")(*(torch.randn(s, dtype=torch.float64) for s in shapes))


def bucketed(module: GraphModule, memory: float = 10.0) -> GraphModule:
    return bucket(module, GRID, SLOW_TO_START, memory=memory)


def test_weights_that_are_there_are_gathered_together() -> None:
    def forward(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        h = torch.relu(x * _gather(v, 0, 1, Y, 2)) @ x
        return h * _gather(w, 0, 1, Y, 2)

    assert steps(bucketed(graph_of(forward, (8, 8), (4,), (4,)))) == (
        "%all_gather_into_tensor_coalesced_default = all_gather_into_tensor_coalesced([%v_1, %w_1], 2, ap3d_y_2x2x2)\n"
        "%all_gather_into_tensor = getitem(%all_gather_into_tensor_coalesced_default, 0)\n"
        "%all_gather_into_tensor_1 = getitem(%all_gather_into_tensor_coalesced_default, 1)\n"
        "%wait_tensor = wait_tensor(%all_gather_into_tensor)\n"
        "%mul = aten.mul.Tensor(%x_1, %wait_tensor)\n"
        "%relu = aten.relu(%mul)\n"
        "%mm = aten.mm(%relu, %x_1)\n"
        "%wait_tensor_1 = wait_tensor(%all_gather_into_tensor_1)\n"
        "%mul_1 = aten.mul.Tensor(%mm, %wait_tensor_1)\n"
        "return %mul_1"
    )


def test_gradients_are_reduced_together_when_the_last_is_ready() -> None:
    def backward(x: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        first = _reduce_scatter(grad.sum(0), 0, 1, X, 2)
        dx = grad @ x
        second = _reduce_scatter(dx.sum(0), 0, 1, X, 2)
        return first * 2, dx, second

    assert steps(bucketed(graph_of(backward, (8, 8), (8, 8)))) == (
        "%sum_1 = aten.sum.dim_IntList(%grad_1, [0])\n"
        "%view = aten.view(%sum_1, [1, 2, 4])\n"
        "%permute = aten.permute(%view, [1, 0, 2])\n"
        "%view_1 = aten.view(%permute, [2, 4])\n"
        "%mm = aten.mm(%grad_1, %x_1)\n"
        "%sum_2 = aten.sum.dim_IntList(%mm, [0])\n"
        "%view_3 = aten.view(%sum_2, [1, 2, 4])\n"
        "%permute_1 = aten.permute(%view_3, [1, 0, 2])\n"
        "%view_4 = aten.view(%permute_1, [2, 4])\n"
        "%reduce_scatter_tensor_coalesced_default ="
        " reduce_scatter_tensor_coalesced([%view_1, %view_4], sum, 2, ap3d_x_2x2x2)\n"
        "%reduce_scatter_tensor = getitem(%reduce_scatter_tensor_coalesced_default, 0)\n"
        "%reduce_scatter_tensor_1 = getitem(%reduce_scatter_tensor_coalesced_default, 1)\n"
        "%wait_tensor_1 = wait_tensor(%reduce_scatter_tensor_1)\n"
        "%view_5 = aten.view(%wait_tensor_1, [4])\n"
        "%wait_tensor = wait_tensor(%reduce_scatter_tensor)\n"
        "%view_2 = aten.view(%wait_tensor, [4])\n"
        "%mul = aten.mul.Tensor(%view_2, 2)\n"
        "return [%mul, %mm, %view_5]"
    )


def chains(v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Merged in both places, these would wait for each other in a circle."""
    return _all_reduce(_all_reduce(v, X), Y), _all_reduce(_all_reduce(w, Y), X)


@pytest.mark.parametrize(
    ("forward", "count"),
    [
        (lambda x, w: (_all_reduce(x, X), _all_reduce(w, X)), 1),
        (lambda x, w: (_all_reduce(x, X), _all_reduce(w, Y)), 2),  # of two axes
        (lambda x, w: (_all_reduce(x, X), _all_reduce(w, X, "max")), 2),  # of two kinds
        (lambda x, w: _all_reduce(_all_reduce(x, X) + w, X), 2),  # one needs the other
        (lambda x, w: (_all_reduce(x.repeat(50, 50), X), _all_reduce(w, X)), 2),  # not small
        (lambda x, w: (_all_reduce(x.float(), X), _all_reduce(w, X)), 2),  # of two dtypes
        (lambda x, w: _all_reduce(w @ w, X) * _all_reduce((w @ w) @ x, X) @ w, 2),  # a matmul apart, read in between
        (lambda x, w: (_all_reduce(w, X) * _all_reduce(x, X)) @ w, 1),
        (chains, 3),
    ],
)
def test_what_is_merged(forward: Any, count: int) -> None:
    module = graph_of(forward, (8, 8), (8, 8))
    found = bucketed(module)
    assert len(collectives(found)) == count
    assert sum(c.bytes for c in collectives(found)) == sum(c.bytes for c in collectives(module))


@pytest.mark.parametrize("seed", range(12))
def test_random_graphs(seed: int) -> None:
    module = random_graph(seed)
    generator = torch.Generator().manual_seed(seed)
    inputs = [[torch.rand(4, 4, dtype=torch.float64, generator=generator) for _ in range(GRID.size)] for _ in range(6)]
    before = text(module)
    assert "bernoulli" in before  # random numbers must be drawn in the same order
    torch.manual_seed(seed)
    expected = run_lockstep(module, GRID, inputs)
    for memory in (10.0, 0.02):
        found = bucketed(module, memory)
        assert text(module) == before
        assert text(bucketed(module, memory)) == text(found)
        assert len(collectives(found)) < len(collectives(module)) or memory < 1.0
        limit = (1 + memory) * timeline(module, GRID, SLOW_TO_START).peak_bytes
        assert timeline(found, GRID, SLOW_TO_START).peak_bytes <= limit
        torch.manual_seed(seed)
        for a, b in zip(expected, run_lockstep(found, GRID, inputs), strict=True):
            assert all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("name", "scheme"), CASES)
def test_models_keep_their_values(name: str, scheme: str) -> None:
    # In lock-step, sums are taken in one order, bucket or not. So they are equal, bit for bit.
    case = emitted(name, scheme)
    new_forward, new_backward = (bucket(g, GRID, PROFILES["cpu"]) for g in (case.forward, case.backward))
    assert len(collectives(new_forward)) < len(collectives(case.forward))
    outs = run_lockstep(case.forward, GRID, case.inputs)
    new_outs = run_lockstep(new_forward, GRID, case.inputs)
    saved = [list(column) for column in zip(*[o[case.results :] for o in outs], strict=True)]
    seeds = [[torch.ones_like(outs[0][case.loss])] * GRID.size]
    grads, new_grads = (run_lockstep(g, GRID, saved + seeds) for g in (case.backward, new_backward))
    for expected, actual in ((outs, new_outs), (grads, new_grads)):
        for a, b in zip(expected, actual, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("hardware", ["cpu", "h100"])
def test_norms_and_biases_of_a_layer_cost_one_collective_per_axis_and_direction(hardware: str) -> None:
    case = emitted("gpt", "3d")
    layers = 2
    for given, weights in ((case.forward, "placeholder"), (case.backward, "output")):
        found = bucket(given, GRID, PROFILES[hardware])
        small: dict[tuple[str, str], int] = {}
        for node in found.graph.nodes:
            if is_start(node) and _moves_vectors(node, weights):
                key = str(node.target), str(node.args[-1])
                small[key] = small.get(key, 0) + 1
        assert small and all(n <= layers for n in small.values()), small


def _moves_vectors(start: Any, weights: str) -> bool:
    """Whether a collective moves 1-d parameters, or gradients of them, alone or beside others."""
    vals = start.meta["val"] if isinstance(start.meta["val"], list) else [start.meta["val"]]
    near = start.all_input_nodes if weights == "placeholder" else start.users
    if weights == "placeholder":
        return any(v.dim() == 1 for v in vals) and all(n.op == "placeholder" for n in near)
    return any(v.numel() <= 128 for v in vals) and "reduce_scatter" in start.name


def test_large_gradients_go_in_as_many_buckets_as_cost_least() -> None:
    """All take 100 latencies to send: ten buckets pay ten, and the last of them, ten more, cannot hide."""

    def backward(x: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        found = []
        for _ in range(100):
            grad = torch.relu(grad @ x)
            found.append(_all_reduce(x.T @ grad, X))
        return tuple(found)

    link = Link(1e-2, 512 / 1e-2)  # 8 x 8 of float64, all-reduced by two ranks: 512 bytes sent
    found = bucket(graph_of(backward, (8, 8), (8, 8)), GRID, Hardware("toy", {"": 1e6}, 1e9, link, link, 8), memory=9.0)
    assert [c.bytes for c in collectives(found)] == [10 * 512] * 10


def test_items_of_a_tuple_end_one_by_one() -> None:
    """A norm's small gradient waits for others; the gradient of its input, made with it, need not be kept for that."""

    def backward(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        found = []
        for _ in range(4):
            _, mean, rstd = torch.ops.aten.native_layer_norm(x, [8], w, None, 1e-5)
            x, dw, _ = torch.ops.aten.native_layer_norm_backward(x, x, [8], mean, rstd, w, None, [True, True, False])
            found.append(_all_reduce(dw, X))
        return tuple(found)

    module = graph_of(backward, (4096, 8), (8,))
    assert len(collectives(module)) == 4 and len(collectives(bucketed(module, 0.01))) == 1


def test_work_is_linear_in_buckets() -> None:
    short, module = layers(50), layers(100)
    slow = Hardware("slow", {"": 1e6}, 1e9, Link(1.0, 1e6), Link(1.0, 1e6), 1 << 30)
    _, few = calls_made(lambda: bucket(short, GRID, slow, memory=10.0))
    found, many = calls_made(lambda: bucket(module, GRID, slow, memory=10.0))
    assert many < 2.25 * few  # twice the buckets
    assert len(collectives(found)) < 0.6 * len(collectives(module)) and len(collectives(module)) == 500


def test_attribution_names_the_layer() -> None:
    found = bucket(emitted("gpt", "3d").forward, GRID, PROFILES["cpu"])
    modules = {c.module for c in collectives(found) if "coalesced" in c.node}
    assert modules and modules <= {"", "blocks.0", "blocks.1", "blocks.0.attention", "blocks.0.mlp", "blocks.0.norm2"}


def test_a_machine_without_latency_has_no_buckets() -> None:
    module = emitted("gpt", "3d").forward
    assert bucket(module, GRID, PROFILES["bandwidth"]) is module
    assert bucket(module, Grid(1, 1, 1), PROFILES["bandwidth"]) is module
