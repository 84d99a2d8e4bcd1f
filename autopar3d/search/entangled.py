"""What is left of a graph of choices when no vertex has fewer than three neighbours: a bound, and mostly the minimum.

Three steps. A *dual ascent* moves costs between vertices and edges, which changes no choice's sum but raises the sum
of the least entries, a lower bound (sequential tree-reweighted message passing: Kolmogorov, PAMI 2006). On the way,
choices are read off, and the best one bounds the minimum from above. A state whose own bound lies above that is in no
minimum, and is dropped: of some hundred states per vertex few remain. What is then left is *eliminated* vertex by
vertex, with tables over all neighbours of a vertex at once, where these are small enough; that is exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Dual ascent: rounds at most, and the relative rise of the bound over ten rounds below which it stops.
_ROUNDS = 400
_RISE = 1e-7

# Entries of the largest table that elimination may make, and of all of them together.
_LARGEST = 4_000_000
_ALL = 40_000_000

Edges = dict[tuple[int, int], np.ndarray]


@dataclass(frozen=True)
class Decision:
    """`choice[v]`: the state of vertex v; no choice costs less than `bound`; `exact`: this one costs no more."""

    choice: list[int]
    bound: float
    exact: bool


def decide(costs: Sequence[np.ndarray], edges: Edges) -> Decision:
    """Choose a state for each vertex.

    Args:
        costs: per vertex, cost of each state.
        edges: `edges[u, v][i, j]` for u < v; infinite entries forbid a pair.
    """
    # Infinite entries would meet as inf - inf; a number above every finite sum forbids as well.
    arrays = [*costs, *edges.values()]
    wall = 1.0 + 2.0 * sum(float(np.abs(a[np.isfinite(a)]).max(initial=0.0)) for a in arrays)
    costs = [np.where(np.isfinite(c), c, wall) for c in costs]
    edges = {pair: np.where(np.isfinite(m), m, wall) for pair, m in edges.items()}
    ascent = _Ascent(costs, edges)
    ascent.run()
    best, bound = ascent.best, min(ascent.bound, ascent.best_cost)
    kept = [np.flatnonzero(k) for k in ascent.alive]
    found = _eliminate(
        [c[k] for c, k in zip(costs, kept, strict=True)],
        {(u, v): m[np.ix_(kept[u], kept[v])] for (u, v), m in edges.items()},
    )
    if found is None:
        exact = ascent.best_cost - bound <= 1e-12 * abs(bound)
        return Decision(best, bound, exact)
    choice = [int(k[s]) for k, s in zip(kept, found, strict=True)]
    cost = _value(choice, costs, edges)
    if cost > ascent.best_cost:  # equal but for rounding
        choice, cost = best, ascent.best_cost
    return Decision(choice, cost, True)


def _value(choice: Sequence[int], costs: Sequence[np.ndarray], edges: Edges) -> float:
    total = sum(float(c[s]) for c, s in zip(costs, choice, strict=True))
    return total + sum(float(m[choice[u], choice[v]]) for (u, v), m in edges.items())


class _Ascent:
    """Costs, moved between `vertex` and `edge` so that every choice keeps its sum.

    Attributes:
        bound: the best lower bound so far; `best`, `best_cost`: the best choice so far.
        alive: per vertex, which states may still be part of a minimum.
    """

    def __init__(self, costs: Sequence[np.ndarray], edges: Edges) -> None:
        self.costs, self.edges = costs, edges
        self.vertex = [c.copy() for c in costs]
        self.edge = {pair: m.copy() for pair, m in edges.items()}
        self.around: list[list[int]] = [[] for _ in costs]
        for u, v in edges:
            self.around[u].append(v)
            self.around[v].append(u)
        self.alive = [np.ones(len(c), dtype=bool) for c in costs]
        self.bound = -math.inf
        self.best = self._improved([int(c.argmin()) for c in costs])
        self.best_cost = _value(self.best, costs, edges)

    def run(self) -> None:
        order = list(range(len(self.costs)))
        marks: list[float] = []
        for turn in range(_ROUNDS):
            self._sweep(order if turn % 2 == 0 else order[::-1])
            marks.append(self.bound)
            if self.best_cost - self.bound <= 1e-12 * abs(self.bound):
                return
            if turn >= 10 and marks[-1] - marks[-11] <= _RISE * abs(marks[-1]):
                return

    def _sweep(self, order: list[int]) -> None:
        """One pass: collect at each vertex what its edges hold, read off a state, pass on along the order."""
        position = {v: i for i, v in enumerate(order)}
        least = {v: float(c.min()) for v, c in enumerate(self.vertex)}
        under = {pair: float(m.min()) for pair, m in self.edge.items()}
        total = math.fsum(least.values()) + math.fsum(under.values())
        choice: dict[int, int] = {}
        for v in order:
            for u in self.around[v]:
                table = self._seen(v, u)
                given = table.min(axis=1)
                table -= given[:, None]
                self.vertex[v] += given
                pair = (v, u) if (v, u) in under else (u, v)
                total -= under[pair]
                under[pair] = 0.0
            total += float(self.vertex[v].min()) - least[v]
            # What any choice with this state costs at least.
            own = self.vertex[v] + (total - float(self.vertex[v].min()))
            slack = 1e-9 * abs(self.best_cost)
            self.alive[v] &= own <= self.best_cost + slack
            choice[v] = self._read(v, choice)
            ahead = [u for u in self.around[v] if position[u] > position[v]]
            part = 1.0 / max(len(ahead), len(self.around[v]) - len(ahead), 1)
            passed = part * self.vertex[v]
            for u in ahead:
                table = self._seen(v, u)
                table += passed[:, None]
                pair = (v, u) if (v, u) in under else (u, v)
                under[pair] = float(table.min())
                total += under[pair]
            before = float(self.vertex[v].min())
            self.vertex[v] = self.vertex[v] - len(ahead) * passed
            least[v] = float(self.vertex[v].min())
            total += least[v] - before
        self.bound = max(self.bound, total)
        found = self._improved([choice[v] for v in range(len(self.costs))])
        cost = _value(found, self.costs, self.edges)
        if cost < self.best_cost:
            self.best, self.best_cost = found, cost

    def _seen(self, v: int, u: int) -> np.ndarray:
        """The edge's table with the states of v as rows; writing to it writes to the edge."""
        return self.edge[v, u] if (v, u) in self.edge else self.edge[u, v].T

    def _read(self, v: int, choice: dict[int, int]) -> int:
        total = self.vertex[v].copy()
        for u in self.around[v]:
            if u in choice:
                total += self._seen(v, u)[:, choice[u]]
        return int(total.argmin())

    def _improved(self, choice: list[int]) -> list[int]:
        """Re-choose one vertex at a time, the others held, until nothing gets better."""
        better = True
        while better:
            better = False
            for v, costs in enumerate(self.costs):
                total = costs.copy()
                for u in self.around[v]:
                    total += self.edges[v, u][:, choice[u]] if (v, u) in self.edges else self.edges[u, v][choice[u]]
                state = int(total.argmin())
                if total[state] < total[choice[v]] * (1 - 1e-12) - 1e-18:
                    choice[v], better = state, True
        return choice


def _eliminate(costs: list[np.ndarray], edges: Edges) -> list[int] | None:
    """The minimum, by eliminating vertices with tables over their neighbours; None where these would be too large."""
    sizes = [len(c) for c in costs]
    around: dict[int, set[int]] = {v: set() for v in range(len(costs))}
    for u, v in edges:
        around[u].add(v)
        around[v].add(u)
    factors: list[tuple[tuple[int, ...], np.ndarray]] = [((v,), c) for v, c in enumerate(costs)]
    factors += list(edges.items())
    done: list[tuple[int, list[tuple[tuple[int, ...], np.ndarray]]]] = []
    spent = 0
    while around:
        room = {v: math.prod(sizes[u] for u in near) * sizes[v] for v, near in around.items()}
        v = min(room, key=lambda w: (room[w], w))
        spent += room[v]
        near = sorted(around.pop(v))
        if room[v] > _LARGEST or spent > _ALL or len(near) > 20:
            return None
        mine = [f for f in factors if v in f[0]]
        factors = [f for f in factors if v not in f[0]]
        scope = (*near, v)
        total = np.zeros([sizes[u] for u in scope])
        for names, table in mine:
            total = total + _spread(names, table, scope)
        factors.append((tuple(near), total.min(axis=-1)))
        done.append((v, mine))
        for u in near:
            around[u] |= set(near)
            around[u] -= {u, v}
    choice = [0] * len(costs)
    for v, mine in reversed(done):
        own = np.zeros(sizes[v])
        for names, table in mine:
            own = own + table[tuple(slice(None) if u == v else choice[u] for u in names)]
        choice[v] = int(own.argmin())
    return choice


def _spread(names: tuple[int, ...], table: np.ndarray, scope: tuple[int, ...]) -> np.ndarray:
    """A table over some vertices as one over `scope`, to be broadcast."""
    order = sorted(range(len(names)), key=lambda i: scope.index(names[i]))
    shape = [1] * len(scope)
    for i in order:
        shape[scope.index(names[i])] = table.shape[i]
    return table.transpose(order).reshape(shape)
