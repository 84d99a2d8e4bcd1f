"""Strategies: the whole space, only legal ones, and what they need and give."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given as hypothesis_given
from hypothesis import settings
from hypothesis import strategies as st

from autopar3d.grid import Grid
from autopar3d.redistribute import State
from autopar3d.rules import OpSpec
from autopar3d.search.strategies import MAX_FACTORS, Strategy, given, needed, shardable, states, strategies
from autopar3d.testing import grids

LINEAR = OpSpec(
    sizes={"b": 8, "s": 16, "k": 32, "n": 64},
    inputs=((("b",), ("s",), ("k",)), (("n",), ("k",)), (("n",),)),
    outputs=((("b",), ("s",), ("n",)),),
    addends=frozenset({2}),
)
INPUT, WEIGHT, BIAS = range(3)


def strategy(**axes: str) -> Strategy:
    return Strategy(tuple((f, tuple(a)) for f, a in axes.items()))


def test_a_linear_has_193_strategies_on_three_axes() -> None:
    found = strategies(LINEAR, Grid(2, 2, 2))
    assert len(found) == len(set(found)) == 193


@pytest.mark.parametrize(("sizes", "count"), [((1, 1, 1), 1), ((8, 1, 1), 5), ((4, 2, 1), 29), ((1, 2, 2), 29)])
def test_axes_of_size_one_hold_nothing(sizes: tuple[int, int, int], count: int) -> None:
    """Four factors or none; both axes: 4 * 4 places and, on one factor, two orders."""
    assert len(strategies(LINEAR, Grid(*sizes))) == count


def test_without_repeats_every_axis_splits_the_work() -> None:
    grid = Grid(2, 2, 2)
    kept = strategies(LINEAR, grid, repeat=False)
    assert kept == [s for s in strategies(LINEAR, grid) if len(s.axes) == 3]
    assert len(kept) == 6 * 20  # orders of three axes, cut into four runs


def test_work_that_no_axis_divides_is_repeated_as_little_as_can_be() -> None:
    odd = replace(LINEAR, sizes={"b": 2, "s": 3, "k": 5, "n": 7})
    assert set(strategies(odd, Grid(2, 2, 1), repeat=False)) == {strategy(b="x"), strategy(b="y")}
    assert strategies(odd, Grid(11, 1, 1), repeat=False) == [Strategy()]


@settings(deadline=None)
@hypothesis_given(grids(24), st.lists(st.sampled_from([1, 2, 3, 4, 6, 12]), min_size=4, max_size=4))
def test_all_legal_strategies_and_no_others(grid: Grid, sizes: list[int]) -> None:
    spec = replace(LINEAR, sizes=dict(zip("bskn", sizes, strict=True)))
    expected = set()
    for order in itertools.permutations(grid.axes):
        for places in itertools.product(["", *"bskn"], repeat=len(order)):
            held = {f: tuple(a for a, p in zip(order, places, strict=True) if p == f) for f in "bskn"}
            if all(spec.sizes[f] % grid.extent(axes) == 0 for f, axes in held.items()):
                expected.add(Strategy(tuple((f, axes) for f, axes in held.items() if axes)))
    assert set(strategies(spec, grid)) == expected


def test_whole_factors_stay_whole() -> None:
    spec = replace(LINEAR, whole=frozenset({"k", "s"}))
    assert shardable(spec, Grid(2, 2, 2)) == ["b", "n"]
    assert all(set(s.axes_of) <= {"b", "n"} for s in strategies(spec, Grid(2, 2, 2)))


def test_of_many_factors_the_longest_are_kept() -> None:
    names = [f"f{i}" for i in range(MAX_FACTORS + 3)]
    dims = tuple((f,) for f in names)
    spec = OpSpec({f: 2 * (i + 1) for i, f in enumerate(names)}, (dims,), (dims,))
    assert shardable(spec, Grid(2, 1, 1)) == names[3:]


def test_a_linear_op_also_passes_partial_sums() -> None:
    dims = (("b",), ("h",))
    spec = OpSpec({"b": 4, "h": 4}, (dims, dims), (dims,), linear=True)
    found = strategies(spec, Grid(2, 2, 1))
    through = [s for s in found if s.through == ("x", "y")]
    assert through == [Strategy((), ("x", "y"))]
    half = Strategy((("h", ("y",)),), ("x",))
    assert half in found and str(half) == "h:y +x"
    state = State(((), ("y",)), ("x",))
    assert needed(spec, half, 0, grad=True) == needed(spec, half, 1, grad=True) == given(spec, half, 0) == state
    assert all(not s.through for s in strategies(replace(spec, linear=False), Grid(2, 2, 1)))
    assert all(not s.through for s in strategies(spec, Grid(2, 2, 1), through=False))


# -- needed and given: the paper's roles on a linear ---------------------------------------------------------


def test_the_roles_of_a_linear() -> None:
    """y gathers X, x gathers W, z reduces Y."""
    roles = strategy(b="x", k="z", n="y")
    assert needed(LINEAR, roles, INPUT, grad=True) == State((("x",), (), ("z",)), (), ("y",))
    assert needed(LINEAR, roles, WEIGHT, grad=True) == State((("y",), ("z",)), (), ("x",))
    assert given(LINEAR, roles, 0) == State((("x",), (), ("y",)), ("z",))


def test_a_bias_is_added_once() -> None:
    roles = strategy(b="x", k="z", n="y")
    assert needed(LINEAR, roles, BIAS, grad=True) == State((("y",),), ("z",), ("x",))


def test_without_a_gradient_a_copy_is_a_copy() -> None:
    roles = strategy(b="x", k="z", n="y")
    assert needed(LINEAR, roles, INPUT, grad=False) == State((("x",), (), ("z",)))


def test_an_axis_that_the_op_does_not_use_repeats_it() -> None:
    assert needed(LINEAR, strategy(b="x"), WEIGHT, grad=True) == State(((), ()), (), ("x",))  # y and z: R
    assert given(LINEAR, Strategy(), 0) == State(((), (), ()))


def test_several_axes_keep_their_order() -> None:
    found = strategy(b="zx", k="y")
    assert needed(LINEAR, found, INPUT, grad=True) == State((("z", "x"), (), ("y",)))
    assert needed(LINEAR, found, WEIGHT, grad=True) == State(((), ("y",)), (), ("x", "z"))
    assert given(LINEAR, found, 0) == State((("z", "x"), (), ()), ("y",))


def test_a_reduction_that_the_lowering_finishes_leaves_no_partial_sum() -> None:
    spec = OpSpec({"b": 4, "h": 8}, ((("b",), ("h",)),), ((("b",),),), complete=frozenset({"h"}))
    assert given(spec, strategy(h="x"), 0) == State(((),))
    assert given(replace(spec, complete=frozenset()), strategy(h="x"), 0) == State(((),), ("x",))


# -- placements of a value -----------------------------------------------------------------------------------


def test_states_are_all_legal_placements() -> None:
    grid = Grid(2, 3, 1)
    found = states((4, 6), grid, "RPV")
    assert len(found) == len(set(found))
    # y (3) only divides 6; a used axis has one place, a free one three kinds; xy on the 6 has two orders.
    assert len(found) == 9 + 3 * (1 + 1 + 1) + (1 + 2)
    assert all(n % grid.extent(axes) == 0 for s in found for n, axes in zip((4, 6), s.atoms, strict=True))


def test_a_scalar_is_not_sharded() -> None:
    assert states((), Grid(2, 2, 1), "R") == [State(())]
    assert len(states((), Grid(2, 2, 1), "RP")) == 4


def test_an_empty_dim_is_not_sharded() -> None:
    assert states((0, 4), Grid(2, 1, 1), "R") == [State(((), ())), State(((), ("x",)))]
