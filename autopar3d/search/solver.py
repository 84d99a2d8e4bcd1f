"""Exact minimisation over a graph of choices: vertices with costs per state, edges with costs per pair of states.

Vertices of degree 0, 1 and 2 are folded into their neighbours by min-plus products, as in PBQP register allocators
(Scholz and Eckstein, LCTES 2002). A planner's graph of a transformer folds away completely. What remains entangled goes
to `entangled`, which bounds it from below, and mostly decides it too; `Solution` says which it was.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .entangled import decide


@dataclass
class Solution:
    """`choice[vertex]` is the index of its state; `cost` the sum; `bound` what no choice goes below; `exact` whether
    the sum is proven minimal."""

    choice: dict[Hashable, int]
    cost: float
    bound: float
    exact: bool


@dataclass
class Problem:
    """Minimise `sum costs[v][s_v] + sum edges[u, v][s_u, s_v]` over a state for each vertex.

    An array that is given several times, as for equal layers, is worked on once: give the same object.
    """

    costs: dict[Any, np.ndarray] = field(default_factory=dict)
    edges: dict[tuple[Any, Any], list[np.ndarray]] = field(default_factory=dict)

    def vertex(self, name: Hashable, costs: np.ndarray) -> None:
        self.costs[name] = costs

    def edge(self, u: Hashable, v: Hashable, costs: np.ndarray) -> None:
        """Add `costs[s_u, s_v]`; several edges between two vertices add up."""
        self.edges.setdefault((u, v), []).append(costs)

    def value(self, choice: dict[Hashable, int]) -> float:
        total = sum(float(c[choice[v]]) for v, c in self.costs.items())
        for (u, v), matrices in self.edges.items():
            total += sum(float(m[choice[u], choice[v]]) for m in matrices)
        return total

    def solve(self) -> Solution:
        work = _Work(self)
        folded = work.fold_all()
        choice, bound, exact = work.rest()
        return self._unfolded(work, folded, choice, bound, exact)

    def solve_each(self, name: Hashable) -> list[Solution]:
        """For each state of one vertex, the best choice with that state: all but that vertex is folded once."""
        work = _Work(self, last=name)
        folded = work.fold_all()
        costs = work.table(work.costs[name])
        found = []
        for state in range(len(costs)):
            only = np.where(np.arange(len(costs)) == state, costs, np.inf)
            choice, bound, exact = work.rest({name: only})
            found.append(self._unfolded(work, folded, {**choice, name: state}, bound, exact))
        return found

    def _unfolded(
        self, work: _Work, folded: list[_Folded], choice: dict[Any, int], bound: float, exact: bool
    ) -> Solution:
        for v, costs, around in reversed(folded):
            total = work.table(costs).copy()
            for u, matrix in around.items():
                total += work.table(matrix)[:, choice[u]]
            choice[v] = int(total.argmin())
        cost = self.value(choice)
        return Solution({v: choice[v] for v in self.costs}, cost, cost if exact else min(bound, cost), exact)


_Folded = tuple[Any, int, dict[Any, int]]
"""A vertex that was folded, the number of its costs then, and its neighbours then."""


class _Work:
    """The graph while it is folded. Arrays go by number: what was computed from equal numbers is not computed again."""

    def __init__(self, problem: Problem, last: Any = None) -> None:
        self.last = last  # a vertex that is not folded
        self.tables: list[np.ndarray] = [np.zeros(0)]  # a number's array; -n is the transpose of n
        self.known: dict[Any, int] = {}  # how an array was made -> its number
        self.costs: dict[Any, int] = {v: self._given(c) for v, c in problem.costs.items()}
        self.around: dict[Any, dict[Any, int]] = {v: {} for v in problem.costs}
        for (u, v), matrices in problem.edges.items():
            for matrix in matrices:
                self._connect(u, v, self._given(matrix))
        self.names = list(self.costs)
        self.order = {v: i for i, v in enumerate(self.names)}
        # Smallest degree first; ties in the order in which vertices were added, so that all ranks agree.
        self.constant = 0.0  # least cost of what has folded away entirely
        self.heap = [(len(self.around[v]), i) for i, v in enumerate(self.names)]
        heapq.heapify(self.heap)

    def table(self, number: int) -> np.ndarray:
        return self.tables[number] if number >= 0 else self.tables[-number].T

    def next(self) -> Any:
        """The next vertex to fold, or None when none has less than three neighbours."""
        while self.heap and self.heap[0][0] <= 2:
            degree, i = heapq.heappop(self.heap)
            v = self.names[i]
            if v in self.costs and len(self.around[v]) == degree and v != self.last:
                return v
        return None

    def fold_all(self) -> list[_Folded]:
        """Fold while there is something to fold; what was folded, in order."""
        folded = []
        while self.costs and (v := self.next()) is not None:
            folded.append((v, self.costs[v], dict(self.around[v])))
            self.fold(v)
        return folded

    def fold(self, v: Any) -> None:
        costs, around = self.costs.pop(v), list(self.around.pop(v).items())
        for u, _ in around:
            del self.around[u][v]
        if not around:
            self.constant += float(self.table(costs).min())
        elif len(around) == 1:
            ((u, m),) = around
            self.costs[u] = self._made(("into", costs, m, self.costs[u]), self._into)
        elif len(around) == 2:
            (u, a), (w, b) = around
            if abs(a) > abs(b):  # one spelling of a product and its transpose
                (u, a), (w, b) = (w, b), (u, a)
            self._connect(u, w, self._made(("through", costs, a, b), self._through))
        for u, _ in around:
            heapq.heappush(self.heap, (len(self.around[u]), self.order[u]))

    def rest(self, other: Mapping[Any, np.ndarray] | None = None) -> tuple[dict[Any, int], float, bool]:
        """States for what did not fold, a bound on it, and whether they are minimal.

        Args:
            other: costs in place of a vertex's own.
        """
        if not self.costs:
            return {}, 0.0, True
        other = other or {}
        names = list(self.costs)
        number = {v: i for i, v in enumerate(names)}
        edges = {(number[u], number[v]): self.table(m) for u, v, m in self._edges()}
        found = decide([other[v] if v in other else self.table(self.costs[v]) for v in names], edges)
        return dict(zip(names, found.choice, strict=True)), self.constant + found.bound, found.exact

    def _edges(self) -> Iterator[tuple[Any, Any, int]]:
        for u, around in self.around.items():
            for v, m in around.items():
                if self.order[u] < self.order[v]:
                    yield u, v, m

    # -- numbered arrays -------------------------------------------------------------------------------------------

    def _given(self, array: np.ndarray) -> int:
        # By identity: the problem keeps its arrays while it is solved.
        return self._made(("given", id(array)), lambda _: np.asarray(array, dtype=np.float64))

    def _made(self, key: Any, make: Any) -> int:
        if key not in self.known:
            self.known[key] = len(self.tables)
            self.tables.append(make(key))
        return self.known[key]

    def _connect(self, u: Any, v: Any, matrix: int) -> None:
        if v in self.around[u]:
            a, b = sorted((self.around[u][v], matrix), key=lambda n: (abs(n), n))
            sign = 1 if a > 0 else -1
            matrix = sign * self._made(("sum", sign * a, sign * b), self._sum)
        self.around[u][v], self.around[v][u] = matrix, -matrix

    def _sum(self, key: tuple[str, int, int]) -> np.ndarray:
        total: np.ndarray = self.table(key[1]) + self.table(key[2])
        return total

    def _into(self, key: tuple[str, int, int, int]) -> np.ndarray:
        _, costs, matrix, other = key
        least: np.ndarray = (self.table(costs)[:, None] + self.table(matrix)).min(axis=0)
        return self.table(other) + least

    def _through(self, key: tuple[str, int, int, int]) -> np.ndarray:
        _, costs, a, b = key
        return min_plus((self.table(costs)[:, None] + self.table(a)).T, self.table(b))


def min_plus(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """`out[i, j] = min over k of a[i, k] + b[k, j]`."""
    # Only columns of `a` that are somewhere within reach matter; rows of `b` likewise. Infinite ones are dropped.
    keep = np.isfinite(a).any(axis=0) & np.isfinite(b).any(axis=1)
    a, b = a[:, keep], b[keep]
    out = np.full((a.shape[0], b.shape[1]), np.inf)
    scratch = np.empty_like(out)
    for k in range(a.shape[1]):
        np.add(a[:, k, None], b[None, k], out=scratch)
        np.minimum(out, scratch, out=out)
    return out
