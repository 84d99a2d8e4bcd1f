"""The price of every change of layout at once.

`redistribute.route` says how one value travels between two placements; here the same greedy choice is made for all
pairs of placements together, on arrays. (Pair by pair in Python it would take longer than solving the plan.) A test
holds both equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .grid import Grid
from .hardware import Hardware
from .layout import ordered_assignments
from .redistribute import State

_R, _P, _V = -1, -2, -3
PHASES = ("forward", "backward", "regather")


@dataclass(frozen=True)
class PriceTable:
    """For placements of a value with a given number of atoms: `latency[p][i, j]` seconds whatever the size, and
    `inverse_bandwidth[p][i, j]` seconds per byte of the *global* tensor, for p of forward, backward, regather."""

    index: dict[State, int]
    latency: np.ndarray  # [3, S, S]
    inverse_bandwidth: np.ndarray  # [3, S, S]

    def price(self, sources: np.ndarray, targets: np.ndarray, size: int, *, grad: bool, regather: bool) -> np.ndarray:
        """Seconds, [len(sources), len(targets)], for a value of `size` bytes."""
        phases = [0] + [1] * grad + [2] * (grad and regather)
        at = np.ix_(sources, targets)
        total: np.ndarray = sum(self.latency[p][at] + size * self.inverse_bandwidth[p][at] for p in phases)
        return total


@lru_cache(maxsize=64)
def price_table(atoms: int, grid: Grid, hardware: Hardware) -> PriceTable:
    """Prices between all placements of a value with `atoms` atoms (whether or not the atoms divide)."""
    axes = grid.axes
    all_states = _all_states(atoms, axes)
    count = len(all_states)
    place = np.array([[_code(s.place(a)) for a in axes] for s in all_states], dtype=np.int8)
    order = np.array([[_position(s, a) for a in axes] for s in all_states], dtype=np.int8)
    place, order = place.reshape(count, len(axes)), order.reshape(count, len(axes))  # a grid of one has no axes
    source, target = (m.ravel() for m in np.meshgrid(np.arange(count), np.arange(count), indexing="ij"))
    walk = _Walk(place[source], order[source], place[target], order[target], atoms, grid, hardware)
    walk.run()
    shape = (3, count, count)
    return PriceTable(
        {s: i for i, s in enumerate(all_states)}, walk.latency.reshape(shape), walk.per_byte.reshape(shape)
    )


def _all_states(atoms: int, axes: Sequence[str]) -> list[State]:
    import itertools

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


def _code(place: str | int) -> int:
    return place if isinstance(place, int) else {"R": _R, "P": _P, "V": _V}[place]


def _position(state: State, axis: str) -> int:
    place = state.place(axis)
    return state.atoms[place].index(axis) if isinstance(place, int) else 0


class _Walk:
    """All pairs take their next step together until each has arrived."""

    def __init__(
        self,
        place: np.ndarray,
        order: np.ndarray,
        goal: np.ndarray,
        goal_order: np.ndarray,
        atoms: int,
        grid: Grid,
        hardware: Hardware,
    ) -> None:
        self.place, self.order, self.goal, self.goal_order = place.copy(), order.copy(), goal, goal_order
        self.atoms = atoms
        self.axes = grid.axes
        self.sizes = [grid.axis_size(a) for a in self.axes]
        links = [hardware.link(a, grid) for a in self.axes]
        self.alpha = [k.latency for k in links]
        self.beta = [1.0 / k.bandwidth for k in links]
        self.latency = np.zeros((3, len(place)))
        self.per_byte = np.zeros((3, len(place)))

    def run(self) -> None:
        live = np.arange(len(self.place))
        while True:
            differs = (self.place[live] != self.goal[live]) | (
                (self.place[live] >= 0) & (self.order[live] != self.goal_order[live])
            )
            live = live[differs.any(axis=1)]
            if not len(live):
                return
            self._step(live)

    # Views of the pairs still waiting for their step in this round.

    def _step(self, live: np.ndarray) -> None:
        for rule in (self._cut, self._embed, self._scatter, self._exchange, self._relabel, self._reduce, self._fork):
            for a in range(len(self.axes)):
                live = live[~rule(live, a)]
                if not len(live):
                    return
        for atom in range(self.atoms):
            live = live[~self._gather(live, atom)]
            if not len(live):
                return
        raise AssertionError("a pair of placements without a step between them")

    def _moving(self, rows: np.ndarray, a: int) -> np.ndarray:
        return self.place[rows, a] != self.goal[rows, a]

    def _ready(self, rows: np.ndarray, a: int) -> np.ndarray:
        atom, position = self.goal[rows, a], self.goal_order[rows, a]
        ok = atom >= 0
        for b in range(len(self.axes)):
            if b != a:
                here = self.place[rows, b] == atom
                due = (self.goal[rows, b] == atom) & (self.goal_order[rows, b] < position)
                ok &= (here == due) & (~here | (self.order[rows, b] == self.goal_order[rows, b]))
        return ok

    def _innermost(self, rows: np.ndarray, a: int) -> np.ndarray:
        ok = self.place[rows, a] >= 0
        for b in range(len(self.axes)):
            if b != a:
                inside = (self.place[rows, b] == self.place[rows, a]) & (self.order[rows, b] > self.order[rows, a])
                ok &= ~inside
        return ok

    def _share(self, rows: np.ndarray) -> np.ndarray:
        share = np.ones(len(rows))
        for b, g in enumerate(self.sizes):
            share[self.place[rows, b] >= 0] /= g
        return share

    def _pay(self, rows: np.ndarray, a: int, phase: int, fraction: np.ndarray, collectives: int = 1) -> None:
        self.latency[phase, rows] += collectives * self.alpha[a]
        self.per_byte[phase, rows] += fraction * self.beta[a]

    def _move(self, rows: np.ndarray, a: int, place: np.ndarray | int) -> None:
        if isinstance(place, np.ndarray):
            held = sum((self.place[rows, b] == place).astype(np.int8) for b in range(len(self.axes)) if b != a)
            self.order[rows, a] = held
        else:
            self.order[rows, a] = 0
        self.place[rows, a] = place

    def _cut(self, live: np.ndarray, a: int) -> np.ndarray:
        src = self.place[live, a]
        hit = ((src == _R) | (src == _V)) & (self.goal[live, a] >= 0) & self._ready(live, a)
        rows = live[hit]
        whole = rows[self.place[rows, a] == _R]
        g = self.sizes[a]
        self._pay(whole, a, 1, (g - 1) / g * self._share(whole))
        self._move(rows, a, self.goal[rows, a])
        return hit

    def _embed(self, live: np.ndarray, a: int) -> np.ndarray:
        hit = (self.goal[live, a] == _P) & self._innermost(live, a)
        self._move(live[hit], a, _P)
        return hit

    def _scatter(self, live: np.ndarray, a: int) -> np.ndarray:
        hit = (self.place[live, a] == _P) & (self.goal[live, a] >= 0) & self._ready(live, a)
        rows, g = live[hit], self.sizes[a]
        for phase in (0, 1):
            self._pay(rows, a, phase, (g - 1) / g * self._share(rows))
        self._move(rows, a, self.goal[rows, a])
        return hit

    def _exchange(self, live: np.ndarray, a: int) -> np.ndarray:
        hit = self._moving(live, a) & (self.goal[live, a] >= 0) & self._innermost(live, a) & self._ready(live, a)
        rows, g = live[hit], self.sizes[a]
        for phase in (0, 1):
            self._pay(rows, a, phase, (g - 1) / g * self._share(rows))
        self._move(rows, a, self.goal[rows, a])
        return hit

    def _relabel(self, live: np.ndarray, a: int) -> np.ndarray:
        src, dst = self.place[live, a], self.goal[live, a]
        unfork = (src == _V) & (dst == _R)
        mask = ((src == _R) | (src == _V)) & (dst == _P)
        self._move(live[unfork], a, _R)
        self._move(live[mask], a, _P)
        return unfork | mask

    def _reduce(self, live: np.ndarray, a: int) -> np.ndarray:
        hit = (self.place[live, a] == _P) & (self.goal[live, a] != _P)
        rows, g = live[hit], self.sizes[a]
        part = (g - 1) / g * self._share(rows)
        to_varying = self.goal[rows, a] == _V
        regroup, finish = rows[to_varying], rows[~to_varying]
        for phase in (0, 1):
            self._pay(regroup, a, phase, 2 * part[to_varying], collectives=2)
        self._pay(regroup, a, 2, part[to_varying])
        self._pay(finish, a, 0, 2 * part[~to_varying])
        self._move(regroup, a, _V)
        self._move(finish, a, _R)
        return hit

    def _fork(self, live: np.ndarray, a: int) -> np.ndarray:
        hit = (self.place[live, a] == _R) & (self.goal[live, a] == _V)
        rows, g = live[hit], self.sizes[a]
        self._pay(rows, a, 1, 2 * (g - 1) / g * self._share(rows))
        self._move(rows, a, _V)
        return hit

    def _gather(self, live: np.ndarray, atom: int) -> np.ndarray:
        held = self.place[live] == atom
        stays = (self.goal[live] == atom) & (self.goal_order[live] == self.order[live])
        hit = (held & ~stays).any(axis=1)
        # Chosen before any moves: moving one axis makes the next one innermost.
        chosen = [hit & held[:, a] & self._innermost(live, a) for a in range(len(self.axes))]
        for a, mine in enumerate(chosen):
            rows, g = live[mine], self.sizes[a]
            moved = (g - 1) * self._share(rows)
            varying = self.goal[rows, a] == _V
            self._pay(rows, a, 0, moved)
            self._pay(rows, a, 2, moved)
            self._pay(rows[varying], a, 1, moved[varying])
            self._move(rows[varying], a, _V)
            self._move(rows[~varying], a, _R)
        return hit
