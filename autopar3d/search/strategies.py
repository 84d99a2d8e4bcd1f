"""All ways to run one op on a grid, and what each needs from its operands and gives as its results."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from ..grid import REPLICAS, Grid
from ..layout import ordered_assignments
from ..redistribute import State, with_replicas
from ..rules import OpSpec

# An op with more shardable factors than this has only its longest ones enumerated: at 7 factors and three axes there
# are 694 strategies, and no op of the model zoo has more that matter.
MAX_FACTORS = 7


class Strategy(NamedTuple):
    """Axes assigned to the factors of one op.

    `assigned` pairs factors with the axes over them, outer first; `through` are axes over which a linear op passes
    partial sums; an axis in neither repeats the op's work on its ranks.
    """

    assigned: tuple[tuple[str, tuple[str, ...]], ...] = ()
    through: tuple[str, ...] = ()

    @property
    def axes_of(self) -> dict[str, tuple[str, ...]]:
        return dict(self.assigned)

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(a for _, axes in self.assigned for a in axes)

    def __str__(self) -> str:
        parts = [f"{f}:{''.join(axes)}" for f, axes in self.assigned]
        return " ".join(parts + ([f"+{''.join(self.through)}"] if self.through else [])) or "-"


class Role(NamedTuple):
    """What the replicas do at one op, decided before its other axes: the factor that they shard outermost, "" for none,
    or else whether they pass partial sums `through` it."""

    factor: str = ""
    through: bool = False


def shardable(spec: OpSpec, grid: Grid) -> list[str]:
    """Factors that at least one axis divides, in order of appearance, at most the longest `MAX_FACTORS`."""
    found = [
        f
        for f in spec.factors
        if f not in spec.whole and spec.sizes[f] and any(spec.sizes[f] % grid.axis_size(a) == 0 for a in grid.axes)
    ]
    if len(found) > MAX_FACTORS:
        keep = set(sorted(found, key=lambda f: -spec.sizes[f])[:MAX_FACTORS])
        found = [f for f in found if f in keep]
    return found


def strategies(
    spec: OpSpec,
    grid: Grid,
    *,
    through: bool = True,
    repeat: bool = True,
    role: Role = Role(),  # noqa: B008  (frozen)
) -> list[Strategy]:
    """Every legal strategy of an op: all ordered assignments of axes to factors, replication included. Replicas have
    the same role in all of them.

    `through=False` leaves out those that pass partial sums through a linear op, for one that none can reach.
    `repeat=False` keeps only those that spread the op over the most devices.
    """
    if role.factor:
        return _under_replicas(spec, grid, through=through, repeat=repeat, factor=role.factor)
    grid = grid.one_replica
    passed_on = (REPLICAS,) if role.through else ()
    factors = shardable(spec, grid)
    found = []
    for lists, free in _assignments(grid.axes, len(factors)):
        if any(axes and spec.sizes[f] % grid.extent(axes) for f, axes in zip(factors, lists, strict=True)):
            continue
        assigned = tuple((f, axes) for f, axes in zip(factors, lists, strict=True) if axes)
        for k in range(len(free) + 1 if spec.linear and through else 1):
            found += [Strategy(assigned, (*passed_on, *passed)) for passed in itertools.combinations(free, k)]
    if not repeat:
        most = max(grid.extent(s.axes) for s in found)
        found = [s for s in found if grid.extent(s.axes) == most]
    return found


@lru_cache(maxsize=256)
def _assignments(axes: tuple[str, ...], places: int) -> tuple[tuple[tuple[tuple[str, ...], ...], tuple[str, ...]], ...]:
    """Axes in ordered lists at places, each time with the axes that are left."""
    if not places:
        return (((), axes),)
    used = [(lists, {a for held in lists for a in held}) for lists in ordered_assignments(axes, places)]
    return tuple((lists, tuple(a for a in axes if a not in held)) for lists, held in used)


def _under_replicas(spec: OpSpec, grid: Grid, *, through: bool, repeat: bool, factor: str) -> list[Strategy]:
    """The strategies of one replica's part of the op, the replicas added outermost to the factor that they shard."""
    part = replace(spec, sizes={**spec.sizes, factor: spec.sizes[factor] // grid.replicas})
    found = []
    for s in strategies(part, grid.one_replica, through=through, repeat=repeat):
        axes_of = {factor: (), **s.axes_of}
        axes_of[factor] = (REPLICAS, *axes_of[factor])
        # In the order of the op's factors, as without replicas.
        assigned = tuple((f, axes_of[f]) for f in spec.factors if f in axes_of)
        found.append(Strategy(assigned, s.through))
    return found


def needed(spec: OpSpec, strategy: Strategy, operand: int, *, grad: bool) -> State:
    """The placement that operand number `operand` must have. `grad`: the operand's value has a gradient."""
    axes_of = strategy.axes_of
    atoms = spec.atoms(spec.inputs[operand])
    partial, varying = set(strategy.through), set()
    for f, axes in strategy.assigned:
        if f in atoms:
            continue
        if operand in spec.addends and _summed(spec, f):
            partial |= set(axes)
        elif grad:
            varying |= set(axes)
    return State(tuple(axes_of.get(f, ()) for f in atoms), tuple(sorted(partial)), tuple(sorted(varying)))


def given(spec: OpSpec, strategy: Strategy, result: int) -> State:
    """The placement in which the op leaves its result number `result`."""
    axes_of = strategy.axes_of
    atoms = spec.atoms(spec.outputs[result])
    partial = set(strategy.through)
    for f, axes in strategy.assigned:
        if f not in atoms and _summed(spec, f):
            partial |= set(axes)
    return State(tuple(axes_of.get(f, ()) for f in atoms), tuple(sorted(partial)))


def summed_factors(spec: OpSpec) -> list[str]:
    """Factors over which sharding leaves a result partial."""
    return [f for f in spec.factors if f not in spec.whole and _summed(spec, f)]


def _summed(spec: OpSpec, factor: str) -> bool:
    """True for a factor that the op sums over: in some operand, in no result, and not finished by the lowering."""
    if factor in spec.complete:
        return False
    return not any(factor in dim for dims in spec.outputs for dim in dims)


def states(atoms: Sequence[int], grid: Grid, kinds: str, replicas: str | int = "R") -> list[State]:
    """All legal placements of a value; `kinds` are the letters of R, P, V that an unused axis may have.

    On a grid with replicas, `replicas` is their place in all of them: one of the letters, or the number of an atom.
    """
    if isinstance(replicas, int):
        atoms = [n // grid.replicas if i == replicas else n for i, n in enumerate(atoms)]
    found = []
    lifted, grid = grid.replicas > 1 and replicas != "R", grid.one_replica
    for lists in ordered_assignments(grid.axes, max(len(atoms), 1)):
        if not atoms and any(lists):
            continue
        if any(n % grid.extent(axes) for n, axes in zip(atoms, lists, strict=False)):
            continue
        if any(n == 0 and axes for n, axes in zip(atoms, lists, strict=False)):
            continue
        free = [a for a in grid.axes if all(a not in axes for axes in lists)]
        for letters in itertools.product(kinds, repeat=len(free)):
            partial = tuple(a for a, k in zip(free, letters, strict=True) if k == "P")
            varying = tuple(a for a, k in zip(free, letters, strict=True) if k == "V")
            state = State(tuple(lists[: len(atoms)]), partial, varying)
            found.append(with_replicas(state, replicas) if lifted else state)
    return found
