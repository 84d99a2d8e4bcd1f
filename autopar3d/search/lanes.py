"""Lanes: a rank's part of the batch in two halves through the same gathered weights.

A lane behaves like one more axis of the grid (`grid.LaneGrid`) over the batch, whose collectives are local ops. So a
plan is carried out in lanes by adding that axis to the strategies of all ops that have the batch as a factor; rules,
routes and the rewrite do the rest. What does not depend on the batch is done once, and one half's collectives can run
while the other half computes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from torch.fx import Node

from ..errors import PlanError
from ..grid import LANE, LaneGrid
from ..plan import Decisions
from ..program import Program, module_path
from ..redistribute import State
from ..rules import LocalOp, operands
from .factors import Factors
from .padding import places_of
from .strategies import Strategy

_At = tuple[Node, int]  # a value and the number of an atom


def in_lanes(program: Program, factors: Factors, decisions: Decisions, lanes: int = 2) -> Decisions:
    """The decisions with the batch split over lanes.

    Raises:
        PlanError: it cannot be; the message says why.
    """
    batch = _batch(program, factors)
    own = decisions.grid
    grid = LaneGrid(*own.sizes, own.ranks, lanes, replicas=own.replicas)
    found = {n: f for n, s in factors.specs.items() if (f := _factor_of(n, factors, batch)) and f not in s.whole}
    axes = {n: decisions.strategies[n.name].axes_of.get(f, ()) for n, f in found.items()}
    # All ranks halve the same rows: the lanes lie inside the axes that cut the batch everywhere, and around all others.
    planned = [a for n, a in axes.items() if n.name in decisions.seconds]
    around = _common_start(planned)

    def lift(held: tuple[str, ...], length: int) -> tuple[str, ...] | None:
        if held[: len(around)] != around or length % grid.extent((*held, LANE)):
            return None
        return (*around, LANE, *held[len(around) :])

    strategies = dict(decisions.strategies)
    problems = []
    for node, spec in factors.specs.items():
        if node not in found:
            if spec.flops and _factor_of(node, factors, batch):
                problems.append(f"{_name(node)} mixes the rows of the batch")
            continue
        f = found[node]
        lifted = lift(axes[node], spec.sizes[f])
        if lifted is None or f in spec.true:
            if spec.flops and node.name in decisions.seconds:
                why = "is padded" if f in spec.true else f"is cut over {''.join(axes[node]) or 'no axis'}"
                length = spec.true.get(f, spec.sizes[f])
                parts = grid.extent(axes[node])
                problems.append(f"{_name(node)}: the batch of {length} {why}, {length} / {parts} has no two halves")
            continue
        assigned = {**decisions.strategies[node.name].axes_of, f: lifted}
        strategy = Strategy(tuple(assigned.items()), decisions.strategies[node.name].through)
        if spec.exchange is None or not any(
            e.axis == LANE for e in spec.exchange(LocalOp(node, spec, strategy.axes_of, grid))
        ):
            strategies[node.name] = strategy
    if problems:
        more = f"; and {len(problems) - 1} more like it" if problems[1:] else ""
        raise PlanError(f"the batch cannot be split into lanes: {problems[0]}{more}")

    nodes = {n.name: n for n in program.graph.graph.nodes}

    def lifted_copy(name: str, state: State) -> State:
        value = nodes[name]
        atoms = list(state.atoms)
        for i, held in enumerate(atoms):
            inside = lift(held, factors.values[value].atoms[i]) if (value, i) in batch else None
            if inside is not None and not any(LANE in a for a in atoms):
                atoms[i] = inside
        return state._replace(atoms=tuple(atoms))

    return replace(
        decisions,
        grid=grid,
        strategies=strategies,
        copies={name: lifted_copy(name, state) for name, state in decisions.copies.items()},
        groups={key: lifted_copy(key[0], state) for key, state in decisions.groups.items()},
    )


def _common_start(lists: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    first = min(lists, key=len, default=())
    return next((first[:n] for n in range(len(first), 0, -1) if all(a[:n] == first[:n] for a in lists)), ())


def before_lanes(state: State) -> State:
    """What of a placement can be had without a lane: an input is cut so outside of the graph, and further inside."""

    def kept(axes: tuple[str, ...]) -> tuple[str, ...]:
        return axes[: axes.index(LANE)] if LANE in axes else axes

    return State(tuple(map(kept, state.atoms)), tuple(a for a in state.partial if a != LANE))


def _batch(program: Program, factors: Factors) -> Collection[_At]:
    """The atoms that are the batch: those that ops connect with the first dim of some input, most work first.

    Raises:
        PlanError: there are none.
    """
    parent: dict[_At, _At] = {}

    def root(x: _At) -> _At:
        while parent.setdefault(x, x) is not x:
            parent[x] = parent[parent[x]]
            x = parent[x]
        return x

    work: dict[_At, float] = {}
    for node, spec in factors.specs.items():
        for f, places in places_of(node, spec).items():
            if f not in spec.whole:
                for other in places[1:]:
                    parent[root(other)] = root(places[0])
    for node, spec in factors.specs.items():
        for f, places in places_of(node, spec).items():
            if f not in spec.whole:
                work[root(places[0])] = work.get(root(places[0]), 0.0) + spec.flops
    nodes = {n.name: n for n in program.graph.graph.nodes}
    firsts: Sequence[_At] = [
        (node, 0)
        for a in program.arguments_of("input")
        if (node := nodes[a.node]) in factors.values and factors.values[node].dims and factors.values[node].dims[0]
    ]
    best = max((root(at) for at in firsts), key=lambda at: work.get(at, 0.0), default=None)
    if best is None or not work.get(best):
        raise PlanError("the batch cannot be split into lanes: no matmul has the first dim of an input as a factor")
    atoms = [(value, i) for value, shape in factors.values.items() for i in range(len(shape.atoms))]
    return {at for at in atoms if root(at) == best}


def _factor_of(node: Node, factors: Factors, batch: Collection[_At]) -> str | None:
    """The factor of an op that is the batch; one that may be sharded, where it has several."""
    spec = factors.specs[node]
    found = [f for f, places in places_of(node, spec).items() if any(at in batch for at in places)]
    return next((f for f in found if f not in spec.whole), found[0] if found else None)


def _name(node: Node) -> str:
    return f"{module_path(node) or '(model)'}, {node.name}" if operands(node) else node.name
