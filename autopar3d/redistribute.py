"""Change of layout: which steps lead from one placement of a value to another, and what each costs.

A value's dims are cut into *atoms* (the factors that the whole graph agrees on, see `passes/propagate`). A `State` says
per atom which axes shard it, and over which axes the value is P (partial) or V (varying, design 4.5); on every other
axis it is R. `route` is the one place that decides how a value travels; the rewrite emits its steps, and the planner
prices them, so price and program cannot differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Protocol

from .grid import REPLICAS

StepKind = Literal["gather", "cut", "scatter", "regroup", "reduce", "exchange", "fork", "unfork", "mask", "embed"]


class State(NamedTuple):
    """Placement of a value: `atoms[i]` lists the axes over atom i, outer first; the other two are sorted."""

    atoms: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...] = ()
    varying: tuple[str, ...] = ()

    def place(self, axis: str) -> str | int:
        """'P', 'V', 'R', or the number of the atom that the axis shards."""
        if axis in self.partial:
            return "P"
        if axis in self.varying:
            return "V"
        return next((i for i, axes in enumerate(self.atoms) if axis in axes), "R")

    @property
    def sharding(self) -> tuple[str, ...]:
        return tuple(a for axes in self.atoms for a in axes)

    def without_varying(self) -> State:
        return State(self.atoms, self.partial)

    def without_replicas(self) -> State:
        """On one replica."""
        if REPLICAS not in (*self.sharding, *self.partial, *self.varying):
            return self
        return _with(self, REPLICAS, "R")


class Step(NamedTuple):
    """One collective or local operation on one axis, and the state it leads to.

    `atom` is what is gathered, cut or scattered; for an exchange the atom that loses the axis, and `to` the one that
    gets it. `varying` says whether the replicated side is V rather than R.
    """

    kind: StepKind
    axis: str
    atom: int
    to: int
    varying: bool
    after: State


def route(source: State, target: State) -> tuple[Step, ...]:
    """Steps from `source` to `target`, each a function of the two states alone.

    Greedy, smallest tensors first: local slices, then reductions, then exchanges, then gathers; an axis is only ever
    added or removed as the innermost of its atom, so that all pieces stay nested chunks.
    """
    return _route(source, target)


@lru_cache(maxsize=200_000)
def _route(source: State, target: State) -> tuple[Step, ...]:
    steps: list[Step] = []
    now = source
    while now != target:
        step = _next(now, target)
        steps.append(step)
        now = step.after
    return tuple(steps)


def _next(now: State, target: State) -> Step:
    axes = sorted({*now.sharding, *now.partial, *now.varying, *target.sharding, *target.partial, *target.varying})
    moves = {a: (now.place(a), target.place(a)) for a in axes if now.place(a) != target.place(a)}

    def ready(axis: str) -> bool:
        atom = target.place(axis)
        assert isinstance(atom, int)
        goal = target.atoms[atom]
        return now.atoms[atom] == goal[: goal.index(axis)]

    def innermost(axis: str) -> bool:
        atom = now.place(axis)
        return isinstance(atom, int) and now.atoms[atom][-1] == axis

    for a, (src, dst) in moves.items():
        if isinstance(dst, int) and src in ("R", "V") and ready(a):
            return Step("cut", a, dst, -1, src == "V", _with(now, a, dst))
    if moves.get(REPLICAS) == ("R", "V") and not any(src == "P" for src, _ in moves.values()):
        # Of a parameter, before anything makes it larger: its gradient is reduced as the shard that is stored.
        return Step("fork", REPLICAS, -1, -1, True, _with(now, REPLICAS, "V"))
    for a, (src, dst) in moves.items():
        if isinstance(src, int) and dst == "P" and innermost(a):
            return Step("embed", a, src, -1, False, _with(now, a, "P"))
    for a, (src, dst) in moves.items():
        if src == "P" and isinstance(dst, int) and ready(a):
            return Step("scatter", a, dst, -1, False, _with(now, a, dst))
    for a, (src, dst) in moves.items():
        if isinstance(src, int) and isinstance(dst, int) and innermost(a) and ready(a):
            return Step("exchange", a, src, dst, False, _with(now, a, dst))
    for a, (src, dst) in moves.items():
        if src == "V" and dst == "R":
            return Step("unfork", a, -1, -1, True, _with(now, a, "R"))
        if src in ("R", "V") and dst == "P":
            return Step("mask", a, -1, -1, src == "V", _with(now, a, "P"))
    for a, (src, dst) in moves.items():
        if src == "P" and dst in ("R", "V"):
            return Step("regroup" if dst == "V" else "reduce", a, -1, -1, dst == "V", _with(now, a, dst))
        if src == "P":  # a shard that is not ready for it: finish the sum first
            return Step("reduce", a, -1, -1, False, _with(now, a, "R"))
    for a, (src, dst) in moves.items():
        if src == "R" and dst == "V":
            return Step("fork", a, -1, -1, True, _with(now, a, "V"))
    for atom, held in enumerate(now.atoms):
        if held and held != target.atoms[atom][: len(held)]:
            varying = target.place(held[-1]) == "V"
            return Step("gather", held[-1], atom, -1, varying, _with(now, held[-1], "V" if varying else "R"))
    raise AssertionError(f"no step from {now} to {target}")


def _with(state: State, axis: str, place: str | int) -> State:
    atoms = [tuple(a for a in axes if a != axis) for axes in state.atoms]
    partial = {a for a in state.partial if a != axis}
    varying = {a for a in state.varying if a != axis}
    if isinstance(place, int):
        atoms[place] = (*atoms[place], axis)
    elif place == "P":
        partial.add(axis)
    elif place == "V":
        varying.add(axis)
    return State(tuple(atoms), tuple(sorted(partial)), tuple(sorted(varying)))


def with_replicas(state: State, place: str | int) -> State:
    """The placement with replicas at a place, outermost where that is an atom."""
    if not isinstance(place, int):
        return _with(state, REPLICAS, place)
    atoms = tuple((REPLICAS, *axes) if i == place else axes for i, axes in enumerate(state.atoms))
    return State(atoms, state.partial, state.varying)


class Transfer(NamedTuple):
    """One collective that a step causes. `phase`: forward, backward, or regather (the forward's gather again)."""

    kind: str
    axis: str
    elements: float
    phase: Literal["forward", "backward", "regather"]


def sent(kind: str, size: Any, local: Any) -> Any:
    """Elements that one rank sends along an axis of `size` when it puts in `local` elements, by ring convention.

    all_gather `(g-1) * local`, reduce_scatter and all_to_all `(g-1)/g * local`, all_reduce twice that.
    """
    once = (size - 1) * local if kind == "all_gather" else (size - 1) * local / size
    return 2 * once if kind == "all_reduce" else once


class Sizes(Protocol):
    """Axis sizes: those of a `Grid`, or symbols."""

    def axis_size(self, axis: str) -> Any: ...

    def extent(self, axes: Sequence[str]) -> Any: ...


def scatter_atom(atoms: Sequence[int], state: State, axis: str, grid: Sizes) -> int | None:
    """The atom that a P -> V regroup scatters over: the first that one more axis divides."""
    for i, (n, held) in enumerate(zip(atoms, state.atoms, strict=True)):
        if n % grid.extent((*held, axis)) == 0:
            return i
    return None


def transfers(step: Step, before: State, elements: Any, grid: Sizes, *, scatterable: bool = True) -> list[Transfer]:
    """The collectives of one step on a value of `elements` global elements, by ring convention.

    `regather` transfers happen only when the gathered value is needed in backward and gathers are dropped; `backward`
    ones only when the value has a gradient. `scatterable` says whether a P -> V regroup finds an atom that divides.
    """
    a, g = step.axis, grid.axis_size(step.axis)
    n = elements / grid.extent(before.sharding)
    if step.kind == "gather":
        out = [Transfer("all_gather", a, (g - 1) * n, "forward"), Transfer("all_gather", a, (g - 1) * n, "regather")]
        return out + ([Transfer("reduce_scatter", a, (g - 1) * n, "backward")] if step.varying else [])
    part = (g - 1) * n / g
    if step.kind == "cut":
        return [] if step.varying else [Transfer("all_gather", a, part, "backward")]
    if step.kind == "scatter":
        return [Transfer("reduce_scatter", a, part, "forward"), Transfer("all_gather", a, part, "backward")]
    if step.kind == "regroup" and scatterable:
        both = [Transfer(k, a, part, p) for p in ("forward", "backward") for k in ("reduce_scatter", "all_gather")]
        return [*both, Transfer("all_gather", a, part, "regather")]
    if step.kind in ("reduce", "regroup"):
        out = [Transfer("all_reduce", a, 2 * part, "forward")]
        return out + ([Transfer("all_reduce", a, 2 * part, "backward")] if step.kind == "regroup" else [])
    if step.kind == "exchange":
        return [Transfer("all_to_all", a, part, "forward"), Transfer("all_to_all", a, part, "backward")]
    if step.kind == "fork":
        return [Transfer("all_reduce", a, 2 * part, "backward")]
    return []
