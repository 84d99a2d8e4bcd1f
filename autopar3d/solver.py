"""Exact minimisation over a graph of choices: vertices with costs per state, edges with costs per pair of states.

Vertices of degree 0, 1 and 2 are folded into their neighbours by min-plus products, as in PBQP register allocators
(Scholz and Eckstein, LCTES 2002). A planner's graph of a transformer folds away completely. What remains entangled is
decided by the PBQP heuristic and improved by re-choosing one vertex at a time; `Solution.exact` says which it was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Solution:
    """`choice[vertex]` is the index of its state; `cost` the sum; `exact` whether the sum is proven minimal."""

    choice: dict[Hashable, int]
    cost: float
    exact: bool


@dataclass
class Problem:
    """Minimise `sum costs[v][s_v] + sum edges[u, v][s_u, s_v]` over a state for each vertex."""

    costs: dict[Hashable, np.ndarray] = field(default_factory=dict)
    edges: dict[Hashable, dict[Hashable, np.ndarray]] = field(default_factory=dict)
    products: dict[bytes, np.ndarray] = field(default_factory=dict)

    def vertex(self, name: Hashable, costs: np.ndarray) -> None:
        self.costs[name] = np.asarray(costs, dtype=np.float64)
        self.edges.setdefault(name, {})

    def edge(self, u: Hashable, v: Hashable, costs: np.ndarray) -> None:
        """Add `costs[s_u, s_v]`; several edges between two vertices add up."""
        if v in self.edges[u]:
            self.edges[u][v] = self.edges[u][v] + costs
            self.edges[v][u] = self.edges[u][v].T
        else:
            self.edges[u][v], self.edges[v][u] = costs, costs.T

    def value(self, choice: dict[Hashable, int]) -> float:
        total = sum(float(c[choice[v]]) for v, c in self.costs.items())
        seen = set()
        for u, around in self.edges.items():
            seen.add(u)
            total += sum(float(m[choice[u], choice[v]]) for v, m in around.items() if v not in seen)
        return total

    def solve(self) -> Solution:
        work = Problem(dict(self.costs), {u: dict(around) for u, around in self.edges.items()})
        folded: list[tuple[Hashable, np.ndarray, dict[Hashable, np.ndarray]]] = []
        fixed: dict[Hashable, int] = {}
        exact = True
        waiting = _Buckets(work)
        while work.costs:
            v = waiting.pop()
            around = work.edges[v]
            if len(around) <= 2:
                folded.append((v, work.costs[v], dict(around)))
                work._fold(v, waiting)
            else:
                exact = False
                fixed[v] = work._guess(v)
                work._fix(v, fixed[v], waiting)
        choice = dict(fixed)
        for v, costs, around in reversed(folded):
            total = costs.copy()
            for u, matrix in around.items():
                total += matrix[:, choice[u]]
            choice[v] = int(total.argmin())
        if not exact:
            self._improve(choice)
        return Solution(choice, self.value(choice), exact)

    # -- folding ------------------------------------------------------------------------------------

    def _remove(self, v: Any) -> None:
        for u in self.edges.pop(v):
            del self.edges[u][v]
        del self.costs[v]

    def _fold(self, v: Any, waiting: _Buckets) -> None:
        costs, around = self.costs[v], list(self.edges[v].items())
        self._remove(v)
        if len(around) == 1:
            ((u, matrix),) = around
            self.costs[u] = self.costs[u] + (costs[:, None] + matrix).min(axis=0)
        elif len(around) == 2:
            (u, a), (w, b) = around
            self.edge(u, w, self._through(costs, a, b))
        for u, _ in around:
            waiting.push(u)

    def _through(self, costs: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """The edge that stands for a folded vertex between two others; equal ones, as in equal layers, only once."""
        shapes = repr((a.shape, b.shape)).encode()  # equal bytes of another shape are another product
        key = hashlib.blake2b(shapes + costs.tobytes() + a.tobytes() + b.tobytes()).digest()
        if key not in self.products:
            self.products[key] = min_plus((costs[:, None] + a).T, b)
        return self.products[key]

    def _guess(self, v: Any) -> int:
        total = self.costs[v].copy()
        for u, matrix in self.edges[v].items():
            total += (matrix + self.costs[u][None, :]).min(axis=1)
        return int(total.argmin())

    def _fix(self, v: Any, state: int, waiting: _Buckets) -> None:
        around = list(self.edges[v].items())
        self._remove(v)
        for u, matrix in around:
            self.costs[u] = self.costs[u] + matrix[state]
            waiting.push(u)

    def _improve(self, choice: dict[Hashable, int]) -> None:
        """Re-choose one vertex at a time, the others held, until nothing gets better."""
        better = True
        while better:
            better = False
            for v, costs in self.costs.items():
                total = costs.copy()
                for u, matrix in self.edges[v].items():
                    total += matrix[:, choice[u]]
                best = int(total.argmin())
                if total[best] < total[choice[v]] * (1 - 1e-12) - 1e-18:
                    choice[v], better = best, True


class _Buckets:
    """Vertices by degree, smallest first; ties in the order in which they were added, so that all ranks agree."""

    def __init__(self, problem: Problem) -> None:
        import heapq

        self.problem, self.heapq = problem, heapq
        self.number = {v: i for i, v in enumerate(problem.costs)}
        self.names = list(problem.costs)
        self.heap = [(len(problem.edges[v]), i) for v, i in self.number.items()]
        heapq.heapify(self.heap)

    def push(self, v: Hashable) -> None:
        self.heapq.heappush(self.heap, (len(self.problem.edges[v]), self.number[v]))

    def pop(self) -> Hashable:
        while True:
            degree, i = self.heapq.heappop(self.heap)
            v = self.names[i]
            if v in self.problem.costs and len(self.problem.edges[v]) == degree:
                return v


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
