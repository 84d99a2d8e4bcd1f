"""The price of every change of layout at once: the steps of `walks`, on one grid and machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..cost import collective_seconds, link_seconds, per_unit
from ..grid import REPLICAS, Grid
from ..hardware import Hardware
from ..redistribute import State, route, scatter_atom, sent, transfers
from .walks import (
    CUT,
    CUT_VARYING,
    EXCHANGE,
    FORK,
    GATHER,
    GATHER_VARYING,
    REDUCE,
    REGROUP,
    SCATTER,
    Walks,
    walks,
)

PHASES = ("forward", "backward", "regather")

# Per kind of step and phase: collectives, and in units of `(g-1)/g` of what the axis's ranks hold together, bytes sent
# (`redistribute.transfers` says the same of one step).
_SENDS = {
    GATHER: ((1, 1), (0, 0), (1, 1)),
    GATHER_VARYING: ((1, 1), (1, 1), (1, 1)),
    CUT: ((0, 0), (1, 1), (0, 0)),
    SCATTER: ((1, 1), (1, 1), (0, 0)),
    EXCHANGE: ((1, 1), (1, 1), (0, 0)),
    REGROUP: ((2, 2), (2, 2), (1, 1)),
    REDUCE: ((1, 2), (0, 0), (0, 0)),
    FORK: ((0, 0), (1, 2), (0, 0)),
}


@dataclass(frozen=True)
class PriceTable:
    """For placements of a value with a given number of atoms: `latency[p, c]` seconds whatever the size, and
    `inverse_bandwidth[p, c]` seconds per byte of the *global* tensor, for p of forward, backward, regather, and ways
    of class c (`walks.classes`)."""

    walks: Walks
    grid: Grid
    latency: np.ndarray
    inverse_bandwidth: np.ndarray
    alpha: tuple[float, ...]
    beta: tuple[float, ...]

    @property
    def index(self) -> dict[State, int]:
        return self.walks.index

    def price(
        self,
        sources: np.ndarray,
        targets: np.ndarray,
        size: float,
        *,
        atoms: Sequence[int] | None = None,
        grad: bool,
        regather: bool,
    ) -> np.ndarray:
        """Seconds, [len(sources), len(targets)], for a value of `size` bytes.

        Args:
            atoms: lengths of the value's atoms; None takes all to be divisible.
        """
        phases = [0] + [1] * grad + [2] * (grad and regather)
        by_class: np.ndarray = sum(
            collective_seconds(1, size, self.latency[p], self.inverse_bandwidth[p]) for p in phases
        )
        total: np.ndarray = by_class[self.walks.classes[np.ix_(sources, targets)]]
        if atoms is not None:
            whole = self._unscatterable(atoms)
            if whole.any():
                total = total + self._all_reduced(sources, targets, size, whole, phases)
        return total

    def _unscatterable(self, atoms: Sequence[int]) -> np.ndarray:
        """[S, axes]: whether, in a placement that is legal, no atom can be cut by one more axis."""
        w, grid = self.walks, self.grid
        sizes = np.array([grid.axis_size(a) for a in w.axes], dtype=np.int64)
        legal = np.ones(len(w.held), dtype=bool)
        found = np.ones(w.held.shape, dtype=bool)
        for i, n in enumerate(atoms):
            extent = np.where(w.held == 3 + i, sizes, 1).prod(axis=1)
            legal &= n % extent == 0
            found &= n % (extent[:, None] * sizes) != 0
        return found & legal[:, None]

    def _all_reduced(
        self, sources: np.ndarray, targets: np.ndarray, size: float, whole: np.ndarray, phases: list[int]
    ) -> np.ndarray:
        """Seconds to add where a sum is finished by an all_reduce, for want of an atom to scatter it over."""
        w = self.walks
        if not w.axes:
            return np.zeros((len(sources), len(targets)))
        now = np.broadcast_to(sources[:, None], (len(sources), len(targets)))
        goal = np.broadcast_to(targets[None, :], now.shape)
        alpha, beta = np.array(self.alpha), np.array(self.beta)
        total = np.zeros(now.shape)
        while (now != goal).any():
            step = w.step[now, goal]
            axis = w.axis_of(step)
            hit = (w.kind_of(step) == REGROUP) & whole[now, axis] & (now != goal)
            if hit.any():
                # One call instead of two, and the result is kept: nothing is gathered again.
                saved = alpha[axis] * sum(p in phases for p in (0, 1, 2))
                if 2 in phases:
                    saved = saved + size * beta[axis] * _part(self.grid, w.axes)[axis, step & ((1 << len(w.axes)) - 1)]
                total -= np.where(hit, saved, 0.0)
            now = w.following[now, goal]
        return total


@lru_cache(maxsize=512)
def price_table(atoms: int, grid: Grid, hardware: Hardware) -> PriceTable:
    """Prices between all placements of a value with `atoms` atoms."""
    ways = walks(atoms, grid.axes)
    axes, n = grid.axes, len(grid.axes)
    links = [hardware.link(a, grid) for a in axes]
    alpha, beta = [k.latency for k in links], [1.0 / k.bandwidth for k in links]
    part = _part(grid, axes)
    steps = ways.counts.shape[1]
    latency, per_byte = np.zeros((3, steps)), np.zeros((3, steps))
    for kind, phases in _SENDS.items():
        for a in range(n):
            for sharded in range(1 << n):
                step = (kind * n + a << n) + sharded
                # A gather's result is what the ranks of the axis hold together; other steps start from that much.
                held = sharded & ~(1 << a) if kind in (GATHER, GATHER_VARYING) else sharded
                for p, (calls, units) in enumerate(phases):
                    latency[p, step] = calls * alpha[a]
                    per_byte[p, step] = units * beta[a] * part[a, held]
    return PriceTable(ways, grid, latency @ ways.counts.T, per_byte @ ways.counts.T, tuple(alpha), tuple(beta))


def forked(
    table: PriceTable, sources: np.ndarray, targets: np.ndarray, size: float, grid: Grid, hardware: Hardware
) -> np.ndarray:
    """Seconds that replicas add where a value comes whole over them and its readers' work is split: those of the
    all_reduce of its gradient, where `redistribute.route` has it. `[sources, targets]` on one replica.
    """
    w = table.walks
    now = np.broadcast_to(sources[:, None], (len(sources), len(targets)))
    goal = np.broadcast_to(targets[None, :], now.shape)
    moving = np.ones(now.shape, dtype=bool)
    while moving.any():
        kind = w.kind_of(w.step[now, goal])
        cut = np.isin(kind, (CUT, CUT_VARYING))
        summed = (w.is_partial[now] & ~w.is_partial[goal]).any(axis=-1)
        moving = (now != goal) & (cut | (summed & ~np.isin(kind, (FORK, GATHER, GATHER_VARYING))))
        now = np.where(moving, w.following[now, goal], now)
    sizes = np.array([table.grid.axis_size(a) for a in w.axes], dtype=np.int64)
    share = np.where(w.is_sharded, sizes, 1).prod(axis=1)
    link = hardware.link(REPLICAS, grid)
    moved = sent("all_reduce", grid.replicas, size / share[now])
    found: np.ndarray = collective_seconds(1, moved, link.latency, per_unit(link.bandwidth))
    return found


def travelled(
    ways: Sequence[tuple[State, State]],
    atoms: Sequence[int],
    size: float,
    grid: Grid,
    hardware: Hardware,
    *,
    grad: bool,
    regather: bool,
) -> np.ndarray:
    """Seconds of ways that a table does not have, one by one: `redistribute.route` and what its steps send."""
    phases = ["forward"] + ["backward"] * grad + ["regather"] * (grad and regather)
    found = np.zeros(len(ways))
    for i, (source, target) in enumerate(ways):
        now = source
        for step in route(source, target):
            scatterable = scatter_atom(atoms, now, step.axis, grid) is not None
            for t in transfers(step, now, size, grid, scatterable=scatterable):
                if t.phase in phases:
                    found[i] += link_seconds(hardware.link(t.axis, grid), t.elements)
            now = step.after
    return found


def _part(grid: Grid, axes: Sequence[str]) -> np.ndarray:
    """[axes, sharded]: `(g-1)/g` of one device's share of a value sharded over these axes."""
    found = np.zeros((len(axes), 1 << len(axes)))
    for a, axis in enumerate(axes):
        g = grid.axis_size(axis)
        for sharded in range(1 << len(axes)):
            found[a, sharded] = (g - 1) / g / grid.extent([b for i, b in enumerate(axes) if sharded >> i & 1])
    return found
