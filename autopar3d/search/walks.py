"""The way between every two placements of a value, all at once, whatever the sizes of tensor and grid.

`redistribute.route` says how one value travels between two placements; here the same greedy choice is made for all
pairs of placements together, on arrays. (Pair by pair in Python it would take longer than solving the plan.) Which
steps a way has depends on the number of atoms and on which axes there are, and on nothing else: so ways are found once
and priced for any grid, machine and tensor. A test holds both equal.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..layout import ordered_assignments
from ..redistribute import State

_V, _P, _R, _ATOM = 0, 1, 2, 3  # an axis's place: varying, partial, replicated, or _ATOM + number of an atom

# Kinds of steps; the free ones cost nothing in any phase.
NONE, CUT, CUT_VARYING, EMBED, SCATTER, EXCHANGE, UNFORK, MASK, REDUCE, REGROUP, FORK, GATHER, GATHER_VARYING = range(
    13
)
_KINDS = 13
_FREE = {NONE, CUT_VARYING, EMBED, UNFORK, MASK}


@dataclass(frozen=True)
class Walks:
    """The ways between all placements of a value with some number of atoms.

    A step is a number, `(kind * axes + axis) * 2**axes + sharded`, with `sharded` the axes (as bits) that shard the
    value before it. Ways with the same steps, in whatever order, are of one class: they cost the same.

    Attributes:
        index: placement -> its number.
        step, following: [S, S], the first step from i to j, and the placement after it; j's own where i is j.
        classes: [S, S], the class of the way.
        counts: [classes, steps], how many of each step the ways of a class have.
        held: [S, axes], place of an axis: below 3 V, P, R; from 3 on an atom.
    """

    axes: tuple[str, ...]
    index: dict[State, int]
    step: np.ndarray
    following: np.ndarray
    classes: np.ndarray
    counts: np.ndarray
    held: np.ndarray

    @property
    def is_partial(self) -> np.ndarray:
        """[S, axes]."""
        return self.held == _P

    @property
    def is_sharded(self) -> np.ndarray:
        """[S, axes]."""
        return self.held >= _ATOM

    def kind_of(self, step: np.ndarray) -> np.ndarray:
        return step >> len(self.axes) if not self.axes else (step >> len(self.axes)) // len(self.axes)

    def axis_of(self, step: np.ndarray) -> np.ndarray:
        return (step >> len(self.axes)) % max(len(self.axes), 1)


def all_states(atoms: int, axes: Sequence[str]) -> list[State]:
    """Every placement of a value, whether or not its atoms divide."""
    found = []
    for lists in ordered_assignments(axes, max(atoms, 1)):
        if not atoms and any(lists):
            continue
        free = [a for a in axes if all(a not in held for held in lists)]
        for letters in itertools.product("RPV", repeat=len(free)):
            partial = tuple(a for a, k in zip(free, letters, strict=True) if k == "P")
            varying = tuple(a for a, k in zip(free, letters, strict=True) if k == "V")
            found.append(State(tuple(lists[:atoms]), partial, varying))
    return found


@lru_cache(maxsize=64)
def walks(atoms: int, axes: tuple[str, ...]) -> Walks:
    """The ways between all placements of a value with `atoms` atoms on a grid with these axes."""
    states = all_states(atoms, axes)
    places = _Places(states, atoms, axes)
    step, following = _first_steps(places)
    hashes = _step_hashes(len(axes))[step]
    # Pointer doubling: each round, a way takes in the way from where it has got to.
    column = np.arange(len(states))[None, :]
    at = following
    while not (at == column).all():
        hashes += hashes[at, column]
        at = at[at, column]
    _, first, classes = np.unique(hashes, return_index=True, return_inverse=True)
    counts = _counts(step, following, *np.divmod(first, len(states)), _KINDS * len(axes) << len(axes))
    index = {s: i for i, s in enumerate(states)}
    return Walks(axes, index, step, following, classes.reshape(step.shape).astype(np.int32), counts, places.place)


class _Places:
    """Placements as arrays.

    Attributes:
        place, order: [S, axes], where an axis is, and how many axes lie outside it there.
        innermost: [S, axes], whether it shards an atom and no other axis lies inside it.
        lists: [S, atoms], the axes over an atom, outer first, as one number; `prefix`: [S, atoms, n], the first n of
            them; `outside`: [S, axes], those outside an axis in its atom; `length`: [S, atoms], how many.
        bits: [S], the axes that shard.
        after: [S, axes, places], the placement when an axis (not the outer of two) goes to a place.
    """

    def __init__(self, states: list[State], atoms: int, axes: tuple[str, ...]) -> None:
        count, n = len(states), len(axes)
        self.atoms, self.axes = atoms, axes
        place = np.full((count, n), _R, dtype=np.int64)
        order = np.zeros((count, n), dtype=np.int64)
        self.lists = np.zeros((count, max(atoms, 1)), dtype=np.int64)
        self.length = np.zeros((count, max(atoms, 1)), dtype=np.int64)
        self.prefix = np.zeros((count, max(atoms, 1), n + 1), dtype=np.int64)
        self.outside = np.zeros((count, n), dtype=np.int64)
        number = {a: i for i, a in enumerate(axes)}
        for i, s in enumerate(states):
            for letter, held in ((_P, s.partial), (_V, s.varying)):
                for a in held:
                    place[i, number[a]] = letter
            for atom, held in enumerate(s.atoms):
                code = 0
                for position, a in enumerate(held):
                    place[i, number[a]], order[i, number[a]] = _ATOM + atom, position
                    self.outside[i, number[a]] = code
                    code += (number[a] + 1) * 4**position
                    self.prefix[i, atom, position + 1 :] = code
                self.lists[i, atom], self.length[i, atom] = code, len(held)
        self.place, self.order = place, order
        sharded = place >= _ATOM
        self.bits = (sharded * (1 << np.arange(n))).sum(axis=1) if n else np.zeros(count, dtype=np.int64)
        inner = (place[:, :, None] == place[:, None, :]) & (order[:, None, :] > order[:, :, None])
        self.innermost = sharded & ~inner.any(axis=2)
        self.after = self._after(count, n)

    def _after(self, count: int, n: int) -> np.ndarray:
        width = 16 * (self.atoms + _ATOM)
        weights = width ** np.arange(n)
        key = ((self.place * 16 + self.order) * weights).sum(axis=1) if n else np.zeros(count, dtype=np.int64)
        sorter = np.argsort(key)
        found = np.zeros((count, n, self.atoms + _ATOM), dtype=np.int64)
        for a, to in itertools.product(range(n), range(self.atoms + _ATOM)):
            position = (np.delete(self.place, a, axis=1) == to).sum(axis=1) if to >= _ATOM else 0
            changed = key + (to * 16 + position - self.place[:, a] * 16 - self.order[:, a]) * weights[a]
            where = np.minimum(np.searchsorted(key, changed, sorter=sorter), count - 1)
            found[:, a, to] = sorter[where]
        return found


def _first_steps(p: _Places) -> tuple[np.ndarray, np.ndarray]:
    """The first step between each two placements, as `Walks.step` numbers it, and the placement after it."""
    count, n = p.place.shape
    kind = np.zeros((count, count), dtype=np.int16)
    following = np.repeat(np.arange(count, dtype=np.int32)[None, :], count, axis=0)

    def take(which: int, a: int, where: np.ndarray, to: np.ndarray | int) -> None:
        np.copyto(kind, which * n + a, where=where)
        after = p.after[:, a, to].astype(np.int32)
        np.copyto(following, after if after.ndim == 2 else after[:, None], where=where)

    # From the last choice to the first, so that the first overwrites.
    for atom in reversed(range(p.atoms)):
        kept = p.lists[:, atom][:, None] == p.prefix[:, atom, :][:, p.length[:, atom]].T
        for a in range(n):
            source = (p.place[:, a] == _ATOM + atom) & p.innermost[:, a]
            moving = source[:, None] & ~kept
            varying = (p.place[:, a] == _V)[None, :]
            take(GATHER, a, moving & ~varying, _R)
            take(GATHER_VARYING, a, moving & varying, _V)
    for a in reversed(range(n)):
        take(FORK, a, (p.place[:, a] == _R)[:, None] & (p.place[:, a] == _V)[None, :], _V)
    for a in reversed(range(n)):
        source, goal = (p.place[:, a] == _P)[:, None], p.place[:, a][None, :]
        take(REDUCE, a, source & (goal != _P) & (goal != _V), _R)
        take(REGROUP, a, source & (goal == _V), _V)
    for a in reversed(range(n)):
        source, goal = p.place[:, a][:, None], p.place[:, a][None, :]
        take(UNFORK, a, (source == _V) & (goal == _R), _R)
        take(MASK, a, ((source == _V) | (source == _R)) & (goal == _P), _P)
    ready = []
    for a in range(n):
        goal = np.maximum(p.place[:, a] - _ATOM, 0)
        ready.append((p.lists[:, goal] == p.outside[:, a][None, :]) & (p.place[:, a] >= _ATOM)[None, :])
    for a in reversed(range(n)):
        source = p.innermost[:, a][:, None]
        take(EXCHANGE, a, source & ready[a] & (p.place[:, a][:, None] != p.place[:, a][None, :]), p.place[:, a])
    for a in reversed(range(n)):
        take(SCATTER, a, (p.place[:, a] == _P)[:, None] & ready[a], p.place[:, a])
    for a in reversed(range(n)):
        take(EMBED, a, p.innermost[:, a][:, None] & (p.place[:, a] == _P)[None, :], _P)
    for a in reversed(range(n)):
        take(CUT, a, (p.place[:, a] == _R)[:, None] & ready[a], p.place[:, a])
        take(CUT_VARYING, a, (p.place[:, a] == _V)[:, None] & ready[a], p.place[:, a])
    return (kind << n) + p.bits[:, None].astype(np.int16), following


def _step_hashes(n: int) -> np.ndarray:
    """A random number per step, 0 for the free ones: the sum over a way tells its class. The same in each process."""
    steps = np.arange(_KINDS * max(n, 1) << n)
    hashes = np.random.default_rng(2105_14450).integers(-(2**62), 2**62, len(steps))
    hashes[np.isin((steps >> n) // max(n, 1), list(_FREE))] = 0
    return hashes


def _counts(step: np.ndarray, following: np.ndarray, now: np.ndarray, goal: np.ndarray, steps: int) -> np.ndarray:
    found = np.zeros((len(now), max(steps, 1)))
    while (now != goal).any():
        moving = now != goal
        np.add.at(found, (np.flatnonzero(moving), step[now, goal][moving]), 1)
        now = following[now, goal]
    return found
