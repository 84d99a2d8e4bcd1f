"""overlap: the same nodes, the same values, an order that hides communication."""

from __future__ import annotations

import operator
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from autopar3d.collectives import _gather, _reduce_scatter
from autopar3d.grid import Grid
from autopar3d.hardware import PROFILES, Hardware, Link
from autopar3d.passes.canonicalize import canonicalize
from autopar3d.passes.differentiate import differentiate
from autopar3d.passes.overlap import overlap
from autopar3d.passes.propagate import search
from autopar3d.passes.rewrite import rewrite
from autopar3d.passes.trace import trace
from autopar3d.program import text
from autopar3d.redistribute import State
from autopar3d.running.lockstep import run_lockstep
from autopar3d.search.factors import Factors
from autopar3d.timelines.timeline import start_of, timeline
from autopar3d.timelines.timing import is_heavy, is_start, is_view, is_wait
from tests.models import MODELS

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

GRID = Grid(2, 2, 2)
X, Y, Z = (GRID.alias(a) for a in "xyz")
# A matmul of 8 x 8 x 8 takes some 1 ms, and a collective of as many elements too.
MACHINE = Hardware("toy", {"": 1e6}, 1e9, Link(1e-4, 5e5), Link(1e-4, 5e5), 1 << 30)


def graph_of(function: Callable[..., Any], *shapes: tuple[int, ...]) -> GraphModule:
    return make_fx(function, tracing_mode="fake")(*(torch.randn(s, dtype=torch.float64) for s in shapes))


def steps(module: GraphModule) -> str:
    """The graph without its inputs and types: `name = op` lines, with operands."""
    lines = [line.split(" : ")[0].replace("_c10d_functional.", "") for line in text(module).splitlines()]
    return "\n".join(line for line in lines if "placeholder" not in line)


def scheduled(module: GraphModule, memory: float = 1.0, hardware: Hardware = MACHINE) -> GraphModule:
    return overlap(module, GRID, hardware, memory=memory)


# -- small graphs ----------------------------------------------------------------------------------------------------


def test_weights_are_gathered_under_the_matmul_before() -> None:
    def forward(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        h = torch.relu(x @ _gather(v, 0, 1, Y, 2))
        return h @ _gather(w, 1, 1, Y, 2)

    assert steps(scheduled(graph_of(forward, (8, 8), (4, 8), (8, 4)))) == (
        "%all_gather_into_tensor = all_gather_into_tensor(%v_1, 2, ap3d_y_2x2x2)\n"
        "%wait_tensor = wait_tensor(%all_gather_into_tensor)\n"
        "%all_gather_into_tensor_1 = all_gather_into_tensor(%w_1, 2, ap3d_y_2x2x2)\n"
        "%mm = aten.mm(%x_1, %wait_tensor)\n"
        "%relu = aten.relu(%mm)\n"
        "%wait_tensor_1 = wait_tensor(%all_gather_into_tensor_1)\n"
        "%view = aten.view(%wait_tensor_1, [2, 8, 1, 4])\n"
        "%permute = aten.permute(%view, [1, 2, 0, 3])\n"
        "%clone = aten.clone(%permute, memory_format=contiguous_format)\n"
        "%_unsafe_view = aten._unsafe_view(%clone, [8, 8])\n"
        "%mm_1 = aten.mm(%relu, %_unsafe_view)\n"
        "return %mm_1"
    )


def test_gradient_of_the_input_travels_under_the_weights() -> None:
    def backward(x: Tensor, w: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        dx = _reduce_scatter(grad @ w, 0, 1, X, 2)
        dw = _reduce_scatter(x @ grad, 0, 1, Y, 2)
        return torch.relu(dx) @ w, dw

    assert steps(scheduled(graph_of(backward, (8, 8), (8, 8), (8, 8)))) == (
        "%mm = aten.mm(%grad_1, %w_1)\n"
        "%view = aten.view(%mm, [1, 2, 4, 8])\n"
        "%permute = aten.permute(%view, [1, 0, 2, 3])\n"
        "%view_1 = aten.view(%permute, [2, 4, 8])\n"
        "%reduce_scatter_tensor = reduce_scatter_tensor(%view_1, sum, 2, ap3d_x_2x2x2)\n"
        "%mm_1 = aten.mm(%x_1, %grad_1)\n"
        "%view_3 = aten.view(%mm_1, [1, 2, 4, 8])\n"
        "%permute_1 = aten.permute(%view_3, [1, 0, 2, 3])\n"
        "%view_4 = aten.view(%permute_1, [2, 4, 8])\n"
        "%reduce_scatter_tensor_1 = reduce_scatter_tensor(%view_4, sum, 2, ap3d_y_2x2x2)\n"
        "%wait_tensor = wait_tensor(%reduce_scatter_tensor)\n"
        "%view_2 = aten.view(%wait_tensor, [4, 8])\n"
        "%relu = aten.relu(%view_2)\n"
        "%mm_2 = aten.mm(%relu, %w_1)\n"
        "%wait_tensor_1 = wait_tensor(%reduce_scatter_tensor_1)\n"
        "%view_5 = aten.view(%wait_tensor_1, [4, 8])\n"
        "return [%mm_2, %view_5]"
    )


def test_random_numbers_are_drawn_in_order() -> None:
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        late = torch.bernoulli(c10d.wait_tensor(c10d.all_reduce(x, "sum", X)), 0.5)
        early = torch.bernoulli(x + 1, 0.5)
        return late, early @ x

    found = scheduled(graph_of(forward, (8, 8)))
    names = [n.args[0].name for n in found.graph.nodes if n.target is aten.bernoulli.p]
    assert names == ["wait_tensor", "add"]


def test_order_that_edges_do_not_tell_is_kept() -> None:
    def forward(x: Tensor) -> Tensor:
        y = x + 1
        z = y * 2
        y.add_(1)
        return z @ c10d.wait_tensor(c10d.all_reduce(x, "sum", X)) + y

    module = make_fx(forward, tracing_mode="fake")(torch.randn(8, 8))
    assert any(n.target is aten.add_.Tensor for n in module.graph.nodes)
    assert text(scheduled(module)) == text(module)


def random_graph(seed: int) -> GraphModule:
    """Some 150 nodes on 4 x 4 matrices that read each other as it comes."""
    draw = random.Random(seed)
    graph = Graph()
    val = torch.empty(4, 4, dtype=torch.float64, device="meta")

    def call(target: Any, *args: Any, val: Any = val) -> Node:
        node = graph.call_function(target, args)
        node.meta["val"] = val
        return node

    known = [graph.placeholder(f"x{i}") for i in range(6)]
    for node in known:
        node.meta["val"] = val
    while len(graph.nodes) < 150:
        # Mostly what came last, so that there are chains; sometimes an input, which gives something to prefetch.
        a, b = (known[-1 - min(int(draw.expovariate(0.3)), len(known) - 1)] for _ in range(2))
        kind = draw.choice(("mm", "add", "view", "reduce", "gather", "scatter", "early", "random", "halves"))
        if kind == "mm":
            known.append(call(aten.mm.default, a, b))
        elif kind == "add":
            known.append(call(aten.add.Tensor, a, b))
        elif kind == "view":
            known.append(call(aten.clone.default, call(aten.t.default, a)))
        elif kind == "random":
            known.append(call(aten.mul.Tensor, a, call(aten.bernoulli.p, b, 0.5)))
        elif kind == "halves":
            halves = val[:2]
            cut = call(aten.split.Tensor, a, 2, val=[halves, halves])
            items = [call(operator.getitem, cut, i, val=halves) for i in (1, 0)]
            known.append(call(aten.cat.default, items))
        elif kind == "scatter":
            part = call(c10d.reduce_scatter_tensor.default, a, "sum", 2, draw.choice((X, Y, Z)), val=val[:2])
            known.append(call(aten.repeat.default, call(c10d.wait_tensor.default, part, val=val[:2]), [2, 1]))
        else:
            source = graph.find_nodes(op="placeholder")[draw.randrange(6)] if kind == "early" else a
            start = call(c10d.all_reduce.default, source, "max", draw.choice((X, Y, Z)))
            known.append(call(c10d.wait_tensor.default, start))
    graph.output(tuple(known[-12:]))
    return GraphModule(torch.nn.Module(), graph)


@pytest.mark.parametrize("seed", range(12))
def test_random_graphs(seed: int) -> None:
    module = random_graph(seed)
    generator = torch.Generator().manual_seed(seed)
    inputs = [[torch.rand(4, 4, dtype=torch.float64, generator=generator) for _ in range(GRID.size)] for _ in range(6)]
    results = []
    for memory in (None, 0.0, 0.1, 10.0):
        found = module if memory is None else scheduled(module, memory)
        assert sorted(text(found).splitlines()) == sorted(text(module).splitlines())
        limit = timeline(module, GRID, MACHINE).peak_bytes * (1 + (memory or 0.0))
        assert timeline(found, GRID, MACHINE).peak_bytes <= limit
        torch.manual_seed(seed)
        results.append(run_lockstep(found, GRID, inputs))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(a, b, strict=True))


def layers(count: int) -> GraphModule:
    """A deep stack, forward and backward in one graph, built by hand because tracing takes seconds."""
    square, half = (torch.empty(shape, device="meta") for shape in ((64, 64), (32, 64)))
    graph = Graph()

    def call(target: Any, *args: Any, val: Tensor = square) -> Node:
        node = graph.call_function(target, args)
        node.meta["val"] = val
        return node

    def gathered(shard: Node) -> Node:
        whole = call(c10d.wait_tensor.default, call(c10d.all_gather_into_tensor.default, shard, 2, Y))
        return call(aten.clone.default, call(aten.t.default, whole))

    def reduced(node: Node) -> Node:
        formed = call(aten.clone.default, call(aten.t.default, node))
        start = call(c10d.reduce_scatter_tensor.default, formed, "sum", 2, X, val=half)
        return call(aten.view.default, call(c10d.wait_tensor.default, start, val=half), [32, 64], val=half)

    x = graph.placeholder("x")
    weights = [graph.placeholder(f"w{i}") for i in range(count)]
    for node, val in ((x, square), *((w, half) for w in weights)):
        node.meta["val"] = val
    saved, grads = [], []
    for w in weights:
        saved.append(x)
        part = reduced(call(aten.mm.default, x, gathered(w)))
        x = call(aten.relu.default, call(aten.repeat.default, part, [2, 1]))
    for w, before in zip(reversed(weights), reversed(saved), strict=True):
        grad = call(aten.mul.Tensor, x, before)
        x = call(aten.repeat.default, reduced(call(aten.mm.default, grad, gathered(w))), [2, 1])
        grads.append(reduced(call(aten.mm.default, call(aten.t.default, before), grad)))
    graph.output(tuple(grads))
    return GraphModule(torch.nn.Module(), graph)


def calls_made(function: Callable[[], Any]) -> tuple[Any, int]:
    """The result of `function` and how many calls of Python functions it took: exact where seconds are not."""
    calls = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        result = function()
    finally:
        sys.setprofile(before)
    return result, calls


def test_work_is_linear_in_nodes() -> None:
    short, long = layers(50), layers(200)
    assert len(long.graph.nodes) > 5_000
    _, few = calls_made(lambda: scheduled(short))
    found, many = calls_made(lambda: scheduled(long))
    assert many < 4.1 * few  # four times the nodes
    assert timeline(found, GRID, MACHINE).seconds < timeline(long, GRID, MACHINE).seconds


# -- the models ------------------------------------------------------------------------------------------------------


@dataclass
class Emitted:
    """The graphs of a model, the local inputs of each, and how many results the forward has before what it saves."""

    forward: GraphModule
    backward: GraphModule
    inputs: list[list[Any]]
    results: int
    loss: int


@cache
def emitted(name: str, scheme: str, grid: Grid = GRID) -> Emitted:
    make_model, make_inputs = MODELS[name]
    model, (args, kwargs) = make_model(torch.float64), make_inputs(torch.float64)
    program = canonicalize(trace(model, args, kwargs))
    factors = Factors(program.graph.graph)
    decisions = search(
        program,
        grid,
        PROFILES["cpu"],
        factors=factors,
        result_states=lambda i, shape, replicas: [State(((),) * len(shape.atoms))],
        scheme=scheme,
    ).run()
    local = rewrite(program, factors, decisions)
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    leaves = tree_leaves((args, kwargs))
    values = [
        leaves[a.index]
        if a.kind == "input"
        else program.constants[a.node]
        if a.kind == "constant"
        else named[a.names[0]].detach()
        for a in program.arguments
    ]
    outputs = program.graph.graph.output_node().args[0]
    loss = next(i for i, n in enumerate(outputs) if n.meta["val"].dim() == 0)  # type: ignore[union-attr,arg-type]
    found = differentiate(local, values, [a.requires_grad for a in program.arguments], seeds=[loss])
    assert found.backward is not None
    pieces = [
        [layout.shard(v, grid, r) for r in range(grid.size)] for layout, v in zip(local.arguments, values, strict=True)
    ]
    return Emitted(found.forward, found.backward, pieces, found.results, loss)


CASES = [("mlp", "3d"), ("mlp", "zero3"), ("gpt", "3d")]
OTHERS = [(name, "auto") for name in MODELS if name not in ("mlp", "gpt")]


def pairs(name: str, scheme: str, grid: Grid = GRID) -> list[tuple[GraphModule, GraphModule]]:
    case = emitted(name, scheme, grid)
    return [(g, overlap(g, grid, PROFILES["cpu"])) for g in (case.forward, case.backward)]


@pytest.mark.parametrize(
    ("name", "scheme"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)]
)
def test_no_value_changes(name: str, scheme: str) -> None:
    case = emitted(name, scheme)
    (forward, new_forward), (backward, new_backward) = pairs(name, scheme)
    outs = run_lockstep(forward, GRID, case.inputs)
    new_outs = run_lockstep(new_forward, GRID, case.inputs)
    assert_same_bits(outs, new_outs)
    saved = [list(column) for column in zip(*[o[case.results :] for o in outs], strict=True)]
    seeds = [[torch.ones_like(outs[0][case.loss])] * GRID.size]
    assert_same_bits(run_lockstep(backward, GRID, saved + seeds), run_lockstep(new_backward, GRID, saved + seeds))


def assert_same_bits(expected: list[tuple[Any, ...]], actual: list[tuple[Any, ...]]) -> None:
    for a, b in zip(expected, actual, strict=True):
        for x, y in zip(a, b, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize(("name", "scheme"), CASES)
def test_only_the_order_changes(name: str, scheme: str) -> None:
    case = emitted(name, scheme)
    for given in (case.forward, case.backward):
        before, metas = text(given), [dict(n.meta) for n in given.graph.nodes]
        found = overlap(given, GRID, PROFILES["cpu"])
        assert text(given) == before and [dict(n.meta) for n in given.graph.nodes] == metas, "the input was edited"
        assert sorted(text(found).splitlines()) == sorted(before.splitlines())
        assert before.splitlines()[-1] == text(found).splitlines()[-1]
        assert text(overlap(given, GRID, PROFILES["cpu"])) == text(found), "a second run differs"
        found.graph.lint()


@pytest.mark.parametrize(("name", "scheme"), CASES)
@pytest.mark.parametrize("memory", [0.0, 0.1])
def test_memory_stays_within_the_bound(name: str, scheme: str, memory: float) -> None:
    case = emitted(name, scheme)
    for given in (case.forward, case.backward):
        found = overlap(given, GRID, PROFILES["cpu"], memory=memory)
        before, after = (timeline(g, GRID, PROFILES["cpu"]) for g in (given, found))
        assert after.peak_bytes <= (1 + memory) * before.peak_bytes
        assert after.seconds <= before.seconds * (1 + 1e-9)


@pytest.mark.parametrize("hardware", ["cpu", "h100"])
def test_gpt_hides_its_weights_and_their_gradients(hardware: str) -> None:
    case = emitted("gpt", "3d")
    for given in (case.forward, case.backward):
        found = overlap(given, GRID, PROFILES[hardware])
        nodes = list(found.graph.nodes)
        first_heavy = next(n for n in nodes if is_heavy(n))
        gathers = [n for n in nodes if is_start(n) and of_inputs(n)]
        covered = {n: is_covered(nodes, n) for n in nodes if is_start(n)}
        early = [n for n in gathers if not covered[n]]
        # The first reader of the graph's first gathers is the first heavy op, or something before it.
        assert all(feeds(n, first_heavy) for n in early), early
        gradients = [n for n in nodes if is_start(n) and "reduce_scatter" in n.name and to_output(n)]
        assert [n for n in gradients if not covered[n]] in ([], gradients[-1:])
        assert len(early) <= 1 < 20 < len(gathers)
        before, after = (timeline(g, GRID, PROFILES[hardware]) for g in (given, found))
        assert after.exposed_seconds < before.exposed_seconds


def of_inputs(node: Node) -> bool:
    """Whether a value comes of the graph's inputs through collectives and changes of form only."""
    if node.op == "placeholder":
        return True
    form = is_start(node) or is_view(node) or node.target in (aten.clone.default, aten.reshape.default)
    return form and bool(node.all_input_nodes) and all(map(of_inputs, node.all_input_nodes))


def to_output(node: Node) -> bool:
    """Whether all that is made of a value is a result of the graph, in another form or further reduced."""
    if node.op == "output":
        return True
    form = is_start(node) or is_view(node) or node.target in (aten.clone.default, aten.reshape.default)
    return form and bool(node.users) and all(map(to_output, node.users))


def is_covered(nodes: list[Node], start: Node) -> bool:
    """Whether a heavy op stands between a start and its wait."""
    wait = next(n for n in nodes if is_wait(n) and start_of(n) is start)
    return any(map(is_heavy, nodes[nodes.index(start) : nodes.index(wait)]))


def feeds(start: Node, heavy: Node) -> bool:
    todo, seen = [start], set()
    while todo:
        n = todo.pop()
        if n is heavy:
            return True
        if n not in seen:
            seen.add(n)
            todo += n.users
    return False
