"""The factors on which a graph agrees: how a view far away cuts a weight's rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import Graph, Node

from autopar3d.grid import Grid
from autopar3d.layout import Layout
from autopar3d.redistribute import State
from autopar3d.rules import RULES, operands, whole_spec
from autopar3d.search.factors import Factors, ValueShape, is_getitem, producer
from autopar3d.search.strategies import states
from autopar3d.testing import grids, layouts

aten = torch.ops.aten


class Building:
    """A graph written by hand on meta tensors."""

    def __init__(self) -> None:
        self.graph = Graph()

    def input(self, name: str, *shape: int) -> Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = torch.empty(shape, device="meta")
        return node

    def call(self, target: Callable[..., Any], *args: Any) -> Any:
        node = self.graph.call_function(target, args)
        real = torch.fx.node.map_arg(args, lambda n: n.meta["val"])
        node.meta["val"] = target(*real)
        return node

    def item(self, node: Node, i: int) -> Node:
        import operator

        return self.call(operator.getitem, node, i)  # type: ignore[no-any-return]

    def factors(self, *outputs: Node, rules: Any = None) -> Factors:
        self.graph.output(outputs)
        found = Factors(self.graph, rules)
        agree(found)
        return found


def agree(factors: Factors) -> None:
    """The one thing everything else rests on: producer, value and every reader see the same atoms."""
    for node, spec in factors.specs.items():
        pairs = list(zip(operands(node), spec.inputs, strict=True))
        pairs += [(v, spec.outputs[producer(v)[1]]) for v in factors.values if producer(v)[0] is node]
        for value, dims in pairs:
            cut = tuple(tuple(spec.sizes[f] for f in dim) for dim in dims)
            assert cut == factors.values[value].dims, f"{node} sees {value} as {cut}"
    for node, value in factors.values.items():
        assert tuple(math.prod(d) for d in value.dims) == tuple(node.meta["val"].shape)


def test_a_fused_qkv_weight_is_cut_into_three_heads_and_dims() -> None:
    g = Building()
    x, w, b = g.input("x", 2, 5, 32), g.input("w", 96, 32), g.input("b", 96)
    fused = g.call(aten.linear.default, x, w, b)
    parts = g.call(aten.split.Tensor, fused, 32, -1)
    heads = [g.call(aten.reshape.default, g.item(parts, i), [2, 5, 4, 8]) for i in range(3)]
    turned = [g.call(aten.transpose.int, h, 1, 2) for h in heads]
    out = g.call(aten.scaled_dot_product_attention.default, *turned)
    factors = g.factors(out)
    assert factors.values[w].dims == ((3, 4, 8), (32,))
    assert factors.values[b].dims == ((3, 4, 8),)
    assert factors.values[fused].dims == ((2,), (5,), (3, 4, 8))
    assert not factors.without_rule


def test_rows_that_were_flattened_keep_their_factors() -> None:
    g = Building()
    x, w = g.input("x", 4, 6, 32), g.input("w", 32, 16)
    flat = g.call(aten.reshape.default, x, [24, 32])
    product = g.call(aten.mm.default, flat, w)
    back = g.call(aten.reshape.default, product, [4, 6, 16])
    factors = g.factors(back)
    assert factors.values[flat].dims == ((4, 6), (32,))
    assert factors.values[product].dims == ((4, 6), (16,))
    assert factors.values[x].dims == ((4,), (6,), (32,))
    assert "(m" not in str(factors.specs[product].inputs) or factors.specs[product].sizes["m/0"] == 4


def test_a_dim_nobody_cuts_has_one_atom_and_a_dim_of_one_has_none() -> None:
    g = Building()
    x = g.input("x", 4, 1, 8)
    y = g.call(aten.relu.default, x)
    factors = g.factors(y)
    assert factors.values[x].dims == ((4,), (), (8,))
    assert factors.values[x].atoms == (4, 8)
    assert factors.values[x].bytes == 4 * 4 * 8


def test_a_view_that_crosses_dims_keeps_what_it_can() -> None:
    """[4, 6] as [8, 3]: 24 = 4 * 2 * 3 serves both, the 6 is cut as 2 * 3 and the 8 as 4 * 2."""
    g = Building()
    x = g.input("x", 4, 6)
    y = g.call(aten.reshape.default, x, [8, 3])
    factors = g.factors(y)
    assert factors.values[x].dims == ((4,), (2, 3))
    assert factors.values[y].dims == ((4, 2), (3,))


def test_a_view_whose_bounds_do_not_nest_stays_whole() -> None:
    """[4, 6] as [3, 8]: nothing outside the whole 24 fits both; both sides are whole factors."""
    g = Building()
    x = g.input("x", 4, 6, 5)
    y = g.call(aten.reshape.default, x, [3, 8, 5])
    factors = g.factors(y)
    spec = factors.specs[y]
    sharded = set(spec.factors) - spec.whole
    assert math.prod(spec.sizes[f] for f in sharded) in (1, 5)


def test_grouped_queries_cut_heads_into_groups() -> None:
    """8 query heads share 2 kv heads: repeat and view say (kv rep d), also to the query's weight."""
    g = Building()
    x, wq, wk = g.input("x", 2, 5, 32), g.input("wq", 64, 32), g.input("wk", 16, 32)
    q = g.call(aten.reshape.default, g.call(aten.linear.default, x, wq), [2, 5, 8, 8])
    k = g.call(aten.reshape.default, g.call(aten.linear.default, x, wk), [2, 5, 2, 8])
    wide = g.call(aten.expand.default, g.call(aten.unsqueeze.default, k, 3), [2, 5, 2, 4, 8])
    every = g.call(aten.reshape.default, wide, [2, 5, 8, 8])
    out = g.call(aten.mul.Tensor, q, every)
    factors = g.factors(out)
    assert factors.values[every].dims == ((2,), (5,), (2, 4), (8,))
    assert factors.values[wq].dims == ((2, 4, 8), (32,))
    assert factors.values[wk].dims == ((2, 8), (32,))


def test_two_readers_that_do_not_nest_do_not_break_the_others() -> None:
    """24 as 4 * 6 and as 3 * 8: one of the views stays whole, everybody still agrees."""
    g = Building()
    x, w = g.input("x", 5, 32), g.input("w", 24, 32)
    y = g.call(aten.linear.default, x, w)
    one = g.call(aten.reshape.default, y, [5, 4, 6])
    two = g.call(aten.reshape.default, y, [5, 3, 8])
    factors = g.factors(one, two)
    assert factors.values[y].dims[1] in ((4, 6), (3, 8), (24,))
    assert factors.values[w].dims[0] == factors.values[y].dims[1]


def test_an_op_without_a_rule_is_whole_and_named() -> None:
    g = Building()
    x = g.input("x", 4, 8)
    y = g.call(aten.relu.default, x)
    z = g.call(aten.sin.default, y)
    rules = {aten.relu.default: RULES[aten.relu.default]} if aten.relu.default in RULES else {}
    factors = g.factors(z, rules=rules)
    assert z in factors.without_rule["aten.sin.default"]
    assert factors.specs[z].whole == frozenset(whole_spec(z).sizes)


def test_producers_of_results() -> None:
    g = Building()
    parts = g.call(aten.split.Tensor, g.input("x", 4), 2)
    second = g.item(parts, 1)
    assert is_getitem(second) and producer(second) == (parts, 1) and producer(parts) == (parts, 0)


# -- a value's atoms -----------------------------------------------------------------------------------------


@settings(deadline=None)
@given(grids(12), st.sampled_from([((16,), (32,)), ((3, 4, 8), (2, 6)), ((), (12,)), ((4, 2, 2),)]))
def test_a_placement_and_its_layout_invert(grid: Grid, dims: tuple[tuple[int, ...], ...]) -> None:
    """Different placements may mean one layout: what comes back then means the same one, as pieces too."""
    value = ValueShape(dims, torch.float64)
    shape = [math.prod(d) for d in dims]
    tensor = torch.arange(value.elements).reshape(shape)
    for state in states(value.atoms, grid, "RP"):
        layout = value.layout(state, grid)
        layout.check(shape, grid)
        back = value.state(layout, grid)
        assert back is not None and value.layout(back, grid) == layout, (state, layout, back)
        assert value.legal(back, grid)
        local = [n // grid.extent(a) for n, a in zip(value.atoms, state.atoms, strict=True)]
        assert math.prod(layout.local_shape(shape, grid)) == math.prod(local)
        flat = Layout.of(*("".join(a) for a in state.atoms), partial=state.partial)
        for index in range(grid.size):
            piece = flat.shard(tensor.reshape(value.atoms), grid, index)
            assert torch.equal(layout.shard(tensor, grid, index).flatten(), piece.flatten())


@settings(deadline=None)
@given(st.data())
def test_a_layout_that_cuts_finer_than_the_atoms_has_no_placement(data: Any) -> None:
    grid = data.draw(grids(12))
    value = ValueShape(((3, 4), (8,)), torch.float64)
    layout = data.draw(layouts((12, 8), grid))
    state = value.state(layout, grid)
    if state is not None:
        assert value.legal(state, grid)
        assert value.layout(state, grid) == layout


def test_places_of_atoms() -> None:
    value = ValueShape(((3, 4), (), (8,)), torch.float32)
    assert [value.place(i) for i in range(3)] == [(0, 0), (0, 1), (2, 0)]
    assert value.legal(State(((), ("x",), ())), Grid(4, 1, 1))
    assert not value.legal(State((("x",), (), ())), Grid(4, 1, 1))
