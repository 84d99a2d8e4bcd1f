"""Changes of layout, proved: every step, every pair of placements, and every mix of readers of one value.

What is proved of one step is this. Forward: given *any* pieces that represent a value in the placement before
(arbitrary addends where it is partial), the pieces after represent the same value. Backward: given any pieces
that represent a gradient (arbitrary addends where the reader is V), the result represents the same gradient
before. Both are what the next step assumes, so routes of such steps are right, and so are sums over several
readers.

The steps are run as the rewrite emits them, differentiated, on all ranks in lock-step, in whole numbers.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import Graph, GraphModule

from autopar3d.collectives import Collective, collectives, gather, regroup
from autopar3d.grid import Grid
from autopar3d.hardware import PROFILES
from autopar3d.passes.differentiate import differentiate
from autopar3d.passes.rewrite import LocalProgram, rewrite
from autopar3d.plan import Decisions
from autopar3d.program import Argument, Program, Result
from autopar3d.redistribute import State, Step, Transfer, route, transfers
from autopar3d.running.lockstep import run_lockstep
from autopar3d.search.factors import Factors, ValueShape
from autopar3d.search.strategies import states
from autopar3d.testing import grids

Dims = tuple[tuple[int, ...], ...]


class Journey(NamedTuple):
    """A value that starts in one placement and is read in others; through a shared copy in `copy`, if any."""

    home: State
    targets: tuple[State, ...]
    copy: State | None = None


# -- values on a grid ----------------------------------------------------------------------------------------


def shape_of(dims: Dims) -> tuple[int, ...]:
    return tuple(math.prod(d) for d in dims)


def numbers(dims: Dims, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(-99, 100, shape_of(dims), generator=generator).double()


def represent(
    tensor: torch.Tensor, dims: Dims, state: State, grid: Grid, generator: torch.Generator
) -> list[torch.Tensor]:
    """Pieces by rank: shards, equal copies, and arbitrary addends over the partial axes."""
    whole = ValueShape(dims, tensor.dtype).layout(State(state.atoms), grid)
    places = list(itertools.product(*(range(grid.axis_size(a)) for a in state.partial)))
    addends = {p: numbers(dims, generator) for p in places[1:]}
    addends[places[0]] = tensor - sum(addends.values())
    found = []
    for rank in range(grid.size):
        at = grid.coordinates(rank)
        found.append(whole.shard(addends[tuple(at[a] for a in state.partial)], grid, rank))
    return found


def represents(pieces: Sequence[torch.Tensor], tensor: torch.Tensor, dims: Dims, state: State, grid: Grid) -> bool:
    layout = ValueShape(dims, tensor.dtype).layout(State(state.atoms, state.partial), grid)
    for rank in range(grid.size):
        first = grid.index(
            {a: 0 if a in layout.replicated_axes(grid) else i for a, i in grid.coordinates(rank).items()}
        )
        if not torch.equal(pieces[rank], pieces[first]):
            return False
    return torch.equal(layout.assemble(pieces, tensor.shape, grid), tensor)


def of_gradient(state: State) -> State:
    """The placement of a value's gradient: S -> S, R -> R, V -> P, P -> R."""
    return State(state.atoms, state.varying)


# -- programs that do nothing but move values ----------------------------------------------------------------


class Moved(NamedTuple):
    forward: GraphModule
    backward: GraphModule
    saved: slice
    results: int
    planned: list[Transfer]


def program_of(dims: Dims, journeys: Sequence[Journey], grid: Grid) -> tuple[Program, Factors, Decisions]:
    """A placeholder per journey, whose targets are results of the program."""
    graph = Graph()
    like = torch.empty(shape_of(dims), dtype=torch.float64)
    arguments, results, outputs, result_states = [], [], [], []
    for i, journey in enumerate(journeys):
        node = graph.placeholder(f"v{i}")
        node.meta["val"] = like
        arguments.append(Argument(node.name, "parameter", (node.name,), requires_grad=True))
        for target in journey.targets:
            results.append(Result("output", f"[{len(results)}]", node.name))
            outputs.append(node)
            result_states.append(target)
    graph.output(tuple(outputs))
    program = Program(GraphModule(torch.nn.Module(), graph), tuple(arguments), tuple(results), None, None)  # type: ignore[arg-type]
    factors = Factors(graph)
    value = ValueShape(dims, torch.float64)
    factors.values = {n: value for n in graph.nodes if n.op == "placeholder"}  # cut as the test wants it
    decisions = Decisions(
        grid,
        PROFILES["cpu"],
        {},
        {f"v{i}": j.home for i, j in enumerate(journeys)},
        {f"v{i}": j.copy for i, j in enumerate(journeys) if j.copy is not None},
        tuple(result_states),
    )
    return program, factors, decisions


def move(dims: Dims, journeys: Sequence[Journey], grid: Grid) -> Moved:
    """The journeys as one program, differentiated."""
    like = torch.empty(shape_of(dims), dtype=torch.float64)
    local = rewrite(*program_of(dims, journeys, grid))
    cut = differentiate(local, [like] * len(journeys), [True] * len(journeys))
    assert cut.backward is not None and cut.gradients == tuple(range(len(journeys)))
    # A copy that no reader takes is emitted and planned, and dropped by differentiate: see the last test.
    emitted = [n for n in local.graph.graph.nodes if n.op == "call_function"]
    dead: set[Any] = set()
    for node in reversed(emitted):
        if all(user in dead for user in node.users):
            dead.add(node)
    live = [m for n, m in zip(emitted, local.movements, strict=True) if n not in dead]
    planned = [t for m in live for t in m.transfers]
    return Moved(cut.forward, cut.backward, slice(cut.results, None), cut.results, planned)


def wrong(dims: Dims, journeys: Sequence[Journey], grid: Grid, moved: Moved, seed: int = 0) -> list[str]:
    """Journeys that do not end with the value they began with, or whose gradient is not the readers' sum."""
    generator = torch.Generator().manual_seed(seed)
    values = [numbers(dims, generator) for _ in journeys]
    inputs = [represent(v, dims, j.home, grid, generator) for v, j in zip(values, journeys, strict=True)]
    out = run_lockstep(moved.forward, grid, inputs)
    ends = iter(range(moved.results))
    tangents, totals, bad = [], [], []
    for value, journey in zip(values, journeys, strict=True):
        total = torch.zeros_like(value)
        for target in journey.targets:
            end = next(ends)
            if not represents([o[end] for o in out], value, dims, target, grid):
                bad.append(f"forward {journey.home} -> {target}")
            gradient = numbers(dims, generator)
            tangents.append(represent(gradient, dims, of_gradient(target), grid, generator))
            total += gradient
        totals.append(total)
    saved = [list(column) for column in zip(*(o[moved.saved] for o in out), strict=True)]
    gradients = run_lockstep(moved.backward, grid, saved + tangents)
    for i, (total, journey) in enumerate(zip(totals, journeys, strict=True)):
        if not represents([g[i] for g in gradients], total, dims, of_gradient(journey.home), grid):
            bad.append(f"backward {journey}")
    return bad


def batches(items: Iterable[Any], size: int) -> Iterable[list[Any]]:
    rest = list(items)
    return (rest[i : i + size] for i in range(0, len(rest), size))


def prove(dims: Dims, journeys: Iterable[Journey], grid: Grid) -> None:
    for batch in batches(journeys, 200):
        moved = move(dims, batch, grid)
        assert not wrong(dims, batch, grid, moved)
        assert counted(moved) == totals(moved.planned)


def totals(planned: Iterable[Transfer]) -> Counter[tuple[str, str, str]]:
    """Elements by kind, axis, and forward or backward."""
    found: Counter[tuple[str, str, str]] = Counter()
    for t in planned:
        found[t.kind, t.axis, "forward" if t.phase == "forward" else "backward"] += t.elements  # type: ignore[assignment]
    return found


def counted(moved: Moved) -> Counter[tuple[str, str, str]]:
    found: Counter[tuple[str, str, str]] = Counter()
    for graph, phase in ((moved.forward, "forward"), (moved.backward, "backward")):
        for c in collectives(graph):
            found[c.kind, c.axis, phase] += c.elements  # type: ignore[assignment]
    return found


# -- every step ----------------------------------------------------------------------------------------------


def steps_between(pairs: Iterable[tuple[State, State]]) -> dict[tuple[State, State], Step]:
    """(before, after) -> step, of the routes of these pairs of placements."""
    steps: dict[tuple[State, State], Step] = {}
    for source, target in pairs:
        now = source
        for step in route(source, target):
            assert step.after != now
            steps[now, step.after] = step
            now = step.after
        assert now == target
    return steps


def prove_steps(dims: Dims, grid: Grid, sample: int | None = None) -> set[str]:
    """The kinds of steps between all placements; with `sample`, of so many steps of as many routes."""
    found = states(tuple(n for d in dims for n in d), grid, "RPV")
    draw = random.Random(0)
    if sample is None:
        steps = steps_between(itertools.product(found, repeat=2))
    else:
        steps = steps_between([(draw.choice(found), draw.choice(found)) for _ in range(sample)])
        steps = {pair: steps[pair] for pair in draw.sample(list(steps), sample)}
    assert all(route(before, after) == (step,) for (before, after), step in steps.items())
    prove(dims, [Journey(before, (after,)) for before, after in steps], grid)
    return {step.kind for step in steps.values()}


KINDS = {"gather", "cut", "scatter", "regroup", "reduce", "exchange", "fork", "unfork", "mask", "embed"}


@pytest.mark.parametrize("sizes", [(2, 3, 1), (1, 4, 1)])
def test_every_step_of_a_vector(sizes: tuple[int, int, int]) -> None:
    assert prove_steps(((24,),), Grid(*sizes)) == KINDS - {"exchange"}


def test_steps_of_a_vector_on_three_axes() -> None:
    assert prove_steps(((24,),), Grid(2, 2, 2), sample=100) >= KINDS - {"exchange", "fork"}


@pytest.mark.parametrize("dims", [((6,), (12,)), ((6, 12),)], ids=["matrix", "packed"])
def test_every_step_of_two_atoms_on_two_axes(dims: Dims) -> None:
    """As two dims, and as the factors of one, where the pieces of the inner one are strided."""
    assert prove_steps(dims, Grid(2, 3, 1)) == KINDS


def test_steps_of_two_atoms_on_three_axes() -> None:
    assert prove_steps(((8,), (8,)), Grid(2, 2, 2), sample=100) >= KINDS - {"fork"}


@pytest.mark.parametrize("dims", [((3, 8, 2), (8,)), ((2,), (8, 3, 8))], ids=["qkv", "heads"])
def test_steps_of_many_atoms(dims: Dims) -> None:
    assert prove_steps(dims, Grid(2, 2, 2), sample=60) >= KINDS - {"regroup", "mask", "fork"}


# -- routes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("atoms", "stride"), [((), 1), ((8,), 1), ((8, 8), 1), ((8, 8, 8), 211)])
def test_every_pair_of_placements_has_a_short_route(atoms: tuple[int, ...], stride: int) -> None:
    """Nobody goes round in circles: at most a gather, a sum and a cut for each axis."""
    found = states(atoms, Grid(2, 2, 2), "RPV")
    for number, (source, target) in enumerate(itertools.product(found, repeat=2)):
        if number % stride == 0:
            steps = route(source, target)
            assert (steps == ()) == (source == target)
            seen = [source, *(s.after for s in steps)]
            assert seen[-1] == target and len(set(seen)) == len(seen) and len(steps) <= 9


def test_routes_move_the_smallest_tensors_they_can() -> None:
    assert [s.kind for s in route(State((("x",), ())), State(((), ("x",))))] == ["exchange"]
    assert [s.kind for s in route(State(((),), ("x",)), State((("x",),)))] == ["scatter"]
    both = route(State((("x",), ())), State(((), ("y",)), (), ("x",)))
    assert [(s.kind, s.axis, s.varying) for s in both] == [("cut", "y", False), ("gather", "x", True)]


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_any_redistribution_of_any_value(data: Any) -> None:
    """Whole routes, on any grid, with any factors of a dim."""
    grid = data.draw(grids(8))
    dims = data.draw(st.sampled_from([((24,),), ((3, 8), (4,)), ((4, 6),), ((2, 3, 4), (12,)), ((), (12,)), ()]))
    found = states(tuple(n for d in dims for n in d), grid, "RPV")
    pairs = data.draw(st.lists(st.tuples(st.sampled_from(found), st.sampled_from(found)), min_size=1, max_size=6))
    prove(dims, [Journey(a, (b,)) for a, b in pairs], grid)


# -- mixed readers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(2, 1, 1), (1, 3, 1)])
def test_every_mix_of_readers_along_an_axis(sizes: tuple[int, int, int]) -> None:
    """R, V, S and P readers of one value, one to three of them, from every home; design 4.5."""
    grid = Grid(*sizes)
    found = states((6,), grid, "RPV")
    assert len(found) == 4
    mixes = [
        Journey(home, targets)
        for home in found
        for count in (1, 2, 3)
        for targets in itertools.combinations_with_replacement(found, count)
    ]
    assert len(mixes) == 4 * (4 + 10 + 20)
    prove(((6,),), mixes, grid)


def test_every_mix_of_readers_through_a_shared_copy() -> None:
    """The copy that readers share is R or V, or itself sharded."""
    grid = Grid(2, 1, 1)
    found, copies = states((4,), grid, "RPV"), states((4,), grid, "RV")
    mixes = [
        Journey(home, targets, copy)
        for home in found
        for copy in copies
        for targets in itertools.combinations(found, 2)
    ]
    prove(((4,),), mixes, grid)


def test_pairs_of_readers_on_two_axes() -> None:
    grid = Grid(2, 2, 1)
    found = states((4, 4), grid, "RPV")
    mixes = [
        Journey(home, targets) for home in states((4, 4), grid, "RP") for targets in itertools.combinations(found, 2)
    ]
    prove(((4,), (4,)), mixes[:: len(mixes) // 60], grid)


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_any_mix_of_readers(data: Any) -> None:
    grid = data.draw(grids(8))
    dims = data.draw(st.sampled_from([((8,), (12,)), ((3, 4), (4,)), ((4, 6),), ((24,),)]))
    atoms = tuple(n for d in dims for n in d)
    found = st.sampled_from(states(atoms, grid, "RPV"))
    journey = st.builds(
        Journey,
        st.sampled_from(states(atoms, grid, "RP")),
        st.lists(found, min_size=1, max_size=5).map(tuple),
        st.none() | st.sampled_from(states(atoms, grid, "RV")),
    )
    prove(dims, data.draw(st.lists(journey, min_size=1, max_size=3)), grid)


def test_readers_that_share_a_placement_share_its_collectives() -> None:
    """A gather for q, k and v, and one reduction of their gradients, however many read."""
    grid = Grid(2, 2, 2)
    shard, copy = State((("y", "x"), ("z",))), State((("y",), ("z",)), (), ("x",))
    one, three = (move(((8,), (8,)), [Journey(shard, (copy,) * n)], grid) for n in (1, 3))
    assert counted(one) == counted(three) == {("all_gather", "x", "forward"): 8, ("reduce_scatter", "x", "backward"): 8}


# -- prices --------------------------------------------------------------------------------------------------


def read_nonlinearly(dims: Dims, source: State, target: State, grid: Grid) -> tuple[list[Collective], list[Collective]]:
    """Collectives of forward and backward where the reader's backward needs the moved value."""
    graph = Graph()
    node = local = graph.placeholder("v")
    value, now = ValueShape(dims, torch.float64), source
    local.meta["shape"] = value.layout(source, grid).local_shape(shape_of(dims), grid)
    (step,) = route(source, target)
    group, size = grid.alias(step.axis), grid.axis_size(step.axis)
    atom = step.atom if step.kind == "gather" else 0
    dim, position = value.place(atom)
    first = atom - position
    outer = math.prod(n // grid.extent(a) for n, a in zip(value.atoms[first:atom], now.atoms[first:atom], strict=True))
    if step.kind == "gather":
        local = graph.call_function(gather, (node, dim, outer, group, size, step.varying))
    else:
        local = graph.call_function(regroup, (node, dim, outer, group, size))
    local.meta["regather"] = True
    graph.output((graph.call_function(torch.ops.aten.sin.default, (local,)),))

    program = LocalProgram(GraphModule(torch.nn.Module(), graph), (), (), ())
    cut = differentiate(program, [torch.empty(shape_of(dims), dtype=torch.float64)], [True])
    assert cut.backward is not None
    return collectives(cut.forward), collectives(cut.backward)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (State((("x",), ())), State(((), ()), (), ("x",))),
        (State((("x",), ())), State(((), ()))),
        (State((("y",), ("z", "x"))), State((("y",), ("z",)), (), ("x",))),
        (State(((), ()), ("x",)), State(((), ()), (), ("x",))),
        (State((("y",), ("z",)), ("x",)), State((("y",), ("z",)), (), ("x",))),
    ],
    ids=str,
)
@pytest.mark.parametrize("dims", [((8,), (12,)), ((8, 12),)], ids=["matrix", "packed"])
def test_a_dropped_copy_is_gathered_again(dims: Dims, source: State, target: State) -> None:
    """What `transfers` calls regather is what the backward does in addition, exactly."""
    grid = Grid(2, 2, 2)
    (step,) = route(source, target)
    expected = transfers(step, source, math.prod(shape_of(dims)), grid)
    forward, backward = read_nonlinearly(dims, source, target, grid)
    found = Counter((c.kind, c.axis, c.elements) for c in forward)
    assert found == Counter((t.kind, t.axis, t.elements) for t in expected if t.phase == "forward")
    found = Counter((c.kind, c.axis, c.elements) for c in backward)
    assert found == Counter((t.kind, t.axis, t.elements) for t in expected if t.phase != "forward")


def test_a_regroup_that_finds_nothing_to_scatter_over_reduces() -> None:
    grid = Grid(2, 1, 1)
    journey = Journey(State(((),), ("x",)), (State(((),), (), ("x",)),))
    moved = move(((3,),), [journey], grid)
    assert not wrong(((3,),), [journey], grid, moved)
    assert counted(moved) == {("all_reduce", "x", "forward"): 3, ("all_reduce", "x", "backward"): 3}
    assert counted(moved) == totals(moved.planned)


def test_a_shared_copy_that_no_reader_takes_costs_nothing() -> None:
    """Home and both readers are partial, which the shared copy may not be: they take the home value."""
    home = State(((),), ("x",))
    grid, dims = Grid(2, 1, 1), ((4,),)
    local = rewrite(*program_of(dims, [Journey(home, (home, home), State(((),)))], grid))
    assert [t for m in local.movements for t in m.transfers] == []
