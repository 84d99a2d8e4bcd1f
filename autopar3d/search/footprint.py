"""What a plan keeps for backward, as a sum over the planner's vertices and edges; planning within a bound on it.

In bytes on one rank: what each reading saves of the value it reads, and what ops save that nobody reads. A value that
several readers save in different placements is counted as their mean, so that most plans keep what their footprint
says, and others somewhat more. Parameters and their copies in the optimizer are not counted: they are the same in all
plans.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import PlanError
from ..program import region
from ..reports.tables import byte_text
from ..rules import operands, results
from .bounded import solve_within
from .factors import is_getitem, producer
from .prices import price_table
from .readings import drops, recomputed, saved
from .saved import is_view
from .solver import Problem, Solution
from .strategies import given
from .walks import GATHER, GATHER_VARYING, REGROUP, Walks

if TYPE_CHECKING:
    from ..passes.propagate import Leg, Search
    from ..plan import Decisions


def within(search: Search, less: float) -> Decisions:
    """The cheapest decisions that keep so many bytes less than the cheapest of all, or as little as any where none do;
    their `bound` holds for all such.

    Raises:
        PlanError: none were found.
    """
    held, cheapest = footprint(search), search.problem.solve()
    most = held.value(cheapest.choice)
    found = solve_within(search.problem, held, most - less)
    if found.choice is None and math.isfinite(found.least):
        found = solve_within(search.problem, held, found.least + 1.0)
    if found.choice is None:
        kept, goal = byte_text(found.least), byte_text(max(0.0, most - less))
        raise PlanError(f"with any layouts at least {kept} are kept for backward, {goal} were asked for")
    return search.decisions(Solution(dict(found.choice), found.cost, found.bound, found.gap <= 1e-9))


def footprint(search: Search) -> Problem:
    """Bytes by vertex and edge of `search.problem`."""
    return _Footprint(search).problem


class _Footprint:
    def __init__(self, search: Search) -> None:
        self.search = search
        self.problem = Problem()
        self.made: dict[object, np.ndarray] = {}
        self.inner = recomputed(search.program)
        for vertex, costs in search.problem.costs.items():
            held = self._inside(vertex) if vertex[0] == "op" else None
            self.problem.vertex(vertex, self._zeros(len(costs)) if held is None else held)
        for leg in search.legs:
            held = self._saved(leg)
            if held is not None:
                self.problem.edge(leg.source.vertex, leg.target.vertex, held)

    def _zeros(self, n: int) -> np.ndarray:
        return self.made.setdefault(("zeros", n), np.zeros(n))

    def _inside(self, vertex: tuple[str, Any]) -> np.ndarray | None:
        """Per strategy, what an op saves besides its operands."""
        search, node = self.search, vertex[1]
        if node not in search.grads or region(node) is not None:
            return None
        kept = saved(search.program).of(node, tuple(o in search.grads for o in operands(node)))
        values = {producer(v)[1]: v for v in ([u for u in node.users if is_getitem(u)] or [node])}
        read = {i for i, v in values.items() if any(s in search.regathered for s in search.slots.get(v, ()))}
        own = sorted(kept.results - read)
        if not kept.hidden and not own:
            return None
        key = ("op", search.kinds[node], tuple(own))
        if key not in self.made:
            spec, grid = search.factors.specs[node], search.grid
            options = search.options[vertex]
            total = np.array([kept.hidden / grid.extent(s.axes) for s in options])
            for i in own:
                val = results(node)[i]
                if val is not None:
                    share = [1.0 / grid.extent(given(spec, s, i).sharding) for s in options]
                    total += val.numel() * val.dtype.itemsize * np.array(share)
            self.made[key] = total
        return self.made[key]

    def _saved(self, leg: Leg) -> np.ndarray | None:
        search, value = self.search, leg.value
        every = sum(s in search.regathered and s.reader is not None for s in search.slots[value])
        mine = sum(s in search.regathered and s.reader is not None for s in leg.slots)
        source, _ = producer(value)
        if not mine or value in self.inner or (is_view(source) and operands(source)[0].op != "placeholder"):
            return None  # the memory of a view is that of what it views
        shape = search.factors.values[value]
        first = leg.source.vertex[0] not in ("copy", "group")
        stored = source.op == "placeholder"
        dropped = drops(search.regather, value)
        key = (leg.source.key, leg.target.key, shape.atoms, shape.bytes, first, stored, dropped, mine / every)
        if key not in self.made:
            table = price_table(len(shape.atoms), search.grid, search.hardware)
            left = np.array([table.index[s] for s in leg.source.states])
            right = np.array([table.index[s] for s in leg.target.states])
            rows, at_row = np.unique(left, return_inverse=True)
            columns, at_column = np.unique(right, return_inverse=True)
            kept = _kept(table.walks, rows, columns, dropped)
            share = shape.bytes / self._extents(table.walks)
            held = share[kept]
            if first and stored:  # a parameter's own shard is there anyway
                held = np.where(kept == rows[:, None], 0.0, held)
            elif not first:  # what it adds to, or takes from, the copy that it starts from
                held = (held - share[rows][:, None]) * (mine / every) if not dropped else np.zeros(held.shape)
            self.made[key] = held[np.ix_(at_row, at_column)]
        return self.made[key]

    def _extents(self, walks: Walks) -> np.ndarray:
        sizes = np.array([self.search.grid.axis_size(a) for a in walks.axes], dtype=np.float64)
        extents: np.ndarray = np.where(walks.held >= 3, sizes, 1.0).prod(axis=1)
        return extents


def _kept(walks: Walks, sources: np.ndarray, targets: np.ndarray, dropped: bool) -> np.ndarray:
    """The placement that is saved of a way between two placements: the last, or the last before a gather."""
    now = np.broadcast_to(sources[:, None], (len(sources), len(targets))).copy()
    goal = np.broadcast_to(targets[None, :], now.shape)
    kept, stopped = now.copy(), np.zeros(now.shape, dtype=bool)
    while (now != goal).any():
        kind = walks.kind_of(walks.step[now, goal])
        if dropped:
            stopped |= (now != goal) & np.isin(kind, (GATHER, GATHER_VARYING, REGROUP))
        now = walks.following[now, goal]
        kept = np.where(stopped, kept, now)
    return kept
