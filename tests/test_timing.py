"""timing and timeline: what a node takes, and what a graph takes, on machines small enough to check by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from autopar3d.grid import Grid
from autopar3d.hardware import Hardware, Link
from autopar3d.timelines.timeline import Network, live_bytes, timeline
from autopar3d.timelines.timing import axis_of, flops, is_heavy, is_start, is_view, seconds, sent_bytes

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

GRID = Grid(2, 2, 2)
# One element a second: 4 flops, 8 bytes of float64; the links send 2 bytes a second after a latency of 3 seconds.
MACHINE = Hardware("toy", {"": 4.0}, 8.0, Link(3.0, 2.0), Link(3.0, 2.0), 1 << 30)


def group(axis: str) -> str:
    return GRID.alias(axis)


def graph_of(function: Callable[..., Any], *shapes: tuple[int, ...]) -> GraphModule:
    inputs = [torch.randn(s, dtype=torch.float64) for s in shapes]
    return make_fx(function, tracing_mode="fake")(*inputs)


def node_of(module: GraphModule, target: Any) -> Node:
    return next(n for n in module.graph.nodes if n.target is target)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0]


@pytest.mark.parametrize(
    ("function", "shapes", "expected"),
    [
        (lambda x, w: x @ w, [(3, 4), (4, 5)], 2 * 3 * 4 * 5),
        (torch.addmm, [(5,), (3, 4), (4, 5)], 2 * 3 * 4 * 5),
        (torch.bmm, [(2, 3, 4), (2, 4, 5)], 2 * 2 * 3 * 4 * 5),
        (lambda x, w: torch.conv2d(x, w), [(1, 2, 4, 4), (3, 2, 3, 3)], 2 * 2 * 2 * 3 * 2 * 9),
        (attend, [(2, 3, 8, 4)] * 3, 4 * 2 * 3 * 8 * 8 * 4),
        (lambda x, w: torch.relu(x + w), [(3, 4), (3, 4)], 0),
    ],
    ids=["mm", "addmm", "bmm", "convolution", "attention", "elementwise"],
)
def test_flops(function: Callable[..., Any], shapes: list[tuple[int, ...]], expected: int) -> None:
    assert sum(flops(n) for n in graph_of(function, *shapes).graph.nodes) == expected


def test_flops_of_backward_are_torchs_count() -> None:
    def step(x: Tensor, w: Tensor, kernel: Tensor) -> list[Tensor]:
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (x, w, kernel)]
            image = (leaves[0] @ leaves[1]).reshape(1, 1, 6, 4)
            return list(torch.autograd.grad(torch.conv2d(image, leaves[2]).sum(), leaves))

    inputs = [torch.randn(s) for s in ((4, 5), (5, 6), (2, 1, 3, 3))]
    with FlopCounterMode(display=False) as counter:
        step(*inputs)
    traced = make_fx(step, tracing_mode="fake")(*inputs)
    assert sum(flops(n) for n in traced.graph.nodes) == counter.get_total_flops()


def test_attention_backward_does_five_products() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (q, k, v)]
            return list(torch.autograd.grad(attend(*leaves).sum(), leaves))

    module = graph_of(step, (2, 3, 8, 4), (2, 3, 8, 4), (2, 3, 8, 4))
    forward, backward = [f for n in module.graph.nodes if (f := flops(n))]
    assert backward == forward * 5 // 2


def test_seconds_are_a_roofline() -> None:
    module = graph_of(lambda x, w: (x @ w, x + x, x.t()), (2, 4), (4, 2))
    mm = node_of(module, aten.mm.default)
    assert seconds(mm, MACHINE, GRID) == max(2 * 2 * 4 * 2 / 4, (8 + 8 + 4) * 8 / 8)
    assert is_heavy(mm)
    add = node_of(module, aten.add.Tensor)
    assert seconds(add, MACHINE, GRID) == 16.0
    assert not is_heavy(add)
    view = node_of(module, aten.t.default)
    assert is_view(view) and seconds(view, MACHINE, GRID) == 0.0


def test_lookup_reads_what_it_gives() -> None:
    module = make_fx(torch.embedding, tracing_mode="fake")(
        torch.randn(1000, 2, dtype=torch.float64), torch.zeros(3, dtype=torch.int64)
    )
    node = node_of(module, aten.embedding.default)
    assert seconds(node, MACHINE, GRID) == 3 + 6 + 6


@pytest.mark.parametrize(
    ("call", "elements"),
    [
        (lambda x: c10d.all_gather_into_tensor(x, 2, group("y")), 8),
        (lambda x: c10d.reduce_scatter_tensor(x, "sum", 2, group("y")), 4),
        (lambda x: c10d.all_reduce(x, "sum", group("y")), 8),
        (lambda x: c10d.all_to_all_single(x, [2, 2], [2, 2], group("y")), 4),
        (lambda x: c10d.all_gather_into_tensor_coalesced([x, x], 2, group("y"))[1], 16),
    ],
    ids=["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "coalesced"],
)
def test_collectives(call: Callable[[Tensor], Tensor], elements: int) -> None:
    module = graph_of(lambda x: c10d.wait_tensor(call(x)), (4, 2))
    start = next(n for n in module.graph.nodes if is_start(n))
    assert axis_of(start) == "y"
    assert sent_bytes(start, GRID) == elements * 8
    assert seconds(start, MACHINE, GRID) == 3.0 + elements * 8 / 2
    assert seconds(node_of(module, c10d.wait_tensor.default), MACHINE, GRID) == 0.0
    assert timeline(module, GRID, MACHINE).seconds == pytest.approx(3.0 + elements * 8 / 2)


def test_timeline_counts_what_compute_does_not_hide() -> None:
    def one(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        start = c10d.all_reduce(w, "sum", group("z"))  # 2 elements, 16 bytes: 3 + 8 seconds
        y = x + x  # 4 seconds
        return y, c10d.wait_tensor(start)

    found = timeline(graph_of(one, (2,), (2,)), GRID, MACHINE)
    assert found.compute == 4.0
    assert found.communication == {"x": 0.0, "y": 0.0, "z": 11.0}
    assert found.exposed == {"x": 0.0, "y": 0.0, "z": pytest.approx(7.0)}
    assert found.exposed_seconds == pytest.approx(7.0)
    assert found.seconds == pytest.approx(11.0)


def two_reduces(first: str, second: str) -> GraphModule:
    def run(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        starts = c10d.all_reduce(a, "sum", group(first)), c10d.all_reduce(b, "sum", group(second))
        return c10d.wait_tensor(starts[0]), c10d.wait_tensor(starts[1])

    return graph_of(run, (2,), (4,))


def test_one_axis_is_a_queue() -> None:
    assert timeline(two_reduces("x", "x"), GRID, MACHINE).seconds == pytest.approx((3 + 8) + (3 + 16))


def test_axes_on_one_link_share_its_bandwidth() -> None:
    # Both 3 seconds of latency, then 16 bytes each at 1 byte a second, then 16 more at 2.
    assert timeline(two_reduces("x", "y"), GRID, MACHINE).seconds == pytest.approx(3 + 16 + 8)


def test_axes_on_two_links_share_nothing() -> None:
    machine = Hardware("nodes", {"": 4.0}, 8.0, Link(3.0, 2.0), Link(3.0, 4.0), 2)
    assert timeline(two_reduces("x", "z"), GRID, machine).seconds == pytest.approx(max(3 + 4, 3 + 16))


def test_an_idle_link_lets_its_burst_through_at_once() -> None:
    link = Link(3.0, 2.0, burst=8.0)
    machine = Hardware("switched", {"": 4.0}, 8.0, link, link, 1 << 30)
    # Of the first 16 bytes 8 go at once. In the 3 seconds before the second sends its 32, the link saves up 6.
    found = timeline(two_reduces("x", "x"), GRID, machine)
    assert found.seconds == pytest.approx((3 + 8 / 2) + (3 + 26 / 2))
    # Two axes on one link have its burst once.
    assert timeline(two_reduces("x", "y"), GRID, machine).seconds == pytest.approx(3 + (16 + 32 - 8) / 2)
    # Sums count without.
    assert found.communication["x"] == pytest.approx((3 + 8) + (3 + 16))


def test_network_finishes_in_order() -> None:
    module = two_reduces("x", "x")
    first, second = (n for n in module.graph.nodes if is_start(n))
    network = Network(MACHINE, GRID)
    network.start(first)
    network.start(second)
    assert network.advance(10.0) == [] and network.busy
    assert network.advance(11.0) == [first]
    assert network.finish(second) == pytest.approx(30.0)
    assert not network.busy


def test_live_bytes() -> None:
    def run(x: Tensor, w: Tensor) -> Tensor:
        a = x + x
        b = a.reshape(4)  # a view: holds a
        c = b * 2
        start = c10d.all_reduce(c, "sum", group("x"))  # holds c until it is waited for
        d = w + 1
        return c10d.wait_tensor(start) + d

    module = graph_of(run, (2, 2), (4,))
    found = live_bytes(list(module.graph.nodes)) // 32
    # Two inputs stay; then a, a, a + c, c + start, and so on.
    assert list(found) == [2, 2, 3, 3, 4, 4, 5, 5, 5, 3]
