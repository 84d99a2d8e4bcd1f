"""The least cost of a graph of choices whose memory must fit into a given room.

Memory adds up over the same vertices and edges as cost. With a price per byte the two are one sum, which `solver`
minimises exactly; whatever the price, that minimum less the price of the room is a lower bound on all choices that fit
(Lagrange; Everett, Operations Research 1963). The best price is found by cutting planes. What lies between the bound
and the best choice found is closed by branch and bound: states of one vertex, those that take little memory and those
that take much, are tried apart.

The work is limited by a number of minimisations and not by a clock, as all ranks must come to the same plan.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from .solver import Problem

# Prices tried for one set of states, and the relative rise of the bound below which no other is tried.
_PRICES = 24
_RISE = 1e-9

Choice = dict[Any, int]
Allowed = Mapping[Any, np.ndarray]
"""Vertex -> which of its states may be taken; all of a vertex that is not in it."""


@dataclass(frozen=True)
class Bounded:
    """A choice that fits, or what is known of there being none.

    Attributes:
        choice: per vertex its state; None when nothing fits.
        cost, memory: of the choice; infinite when nothing fits.
        bound: no choice that fits costs less.
        least: no choice takes less memory.
        solves: minimisations that it took.
    """

    choice: Choice | None
    cost: float
    memory: float
    bound: float
    least: float
    solves: int

    @property
    def gap(self) -> float:
        """By what share of the bound the cost can be above the minimum at most."""
        if self.cost <= self.bound:
            return 0.0
        return self.cost / self.bound - 1.0 if self.bound > 0.0 else math.inf


def solve_within(problem: Problem, memory: Problem, room: float, *, solves: int = 60) -> Bounded:
    """The cheapest choice whose memory is at most `room`.

    Args:
        memory: the same vertices, their bytes; edges may be left out where they take none.
        solves: minimisations after which the best found so far is taken, with a true bound.
    """
    return _Search(problem, memory, room, solves).run()


class _Point(NamedTuple):
    cost: float
    memory: float
    choice: Choice


@dataclass(order=True)
class _Node:
    """States to be searched. `bound`: no choice among them that fits costs less; `price` gave it."""

    bound: float
    number: int
    allowed: Allowed = field(compare=False)
    price: float = field(compare=False)
    points: list[_Point] = field(compare=False)


class _Search:
    def __init__(self, problem: Problem, memory: Problem, room: float, solves: int) -> None:
        self.problem, self.memory, self.room, self.left = problem, memory, room, solves
        self.most = solves
        self.best: _Point | None = None
        self.least = math.inf
        self.numbers = itertools.count()
        self.around: dict[Any, list[tuple[Any, np.ndarray, np.ndarray]]] = {v: [] for v in problem.costs}
        pairs = dict.fromkeys([*problem.edges, *memory.edges])
        for u, v in pairs:
            cost, held = (_total(p.edges.get((u, v), ())) for p in (problem, memory))
            shape = next(m.shape for m in (cost, held) if m is not None)
            cost = np.zeros(shape) if cost is None else cost
            held = np.zeros(shape) if held is None else held
            self.around[u].append((v, cost, held))
            self.around[v].append((u, cost.T, held.T))

    def run(self) -> Bounded:
        root = self._explore({}, 0.0, [])
        queue = [] if root is None else [root]
        while queue and self.left > 0 and not self._closed(queue[0].bound):
            node = heapq.heappop(queue)
            parts = list(self._split(node))
            if not parts:  # nothing tells its choices apart: its bound is met, or cannot be raised
                heapq.heappush(queue, node)
                break
            for allowed in parts:
                points = [p for p in node.points if all(a[p.choice[v]] for v, a in allowed.items())]
                child = self._explore(allowed, node.price, points, node.bound)
                if child is not None:
                    heapq.heappush(queue, child)
        if self.best is None:
            return Bounded(None, math.inf, math.inf, queue[0].bound if queue else math.inf, self.least, self._spent())
        bound = min([self.best.cost, *(n.bound for n in queue[:1])])
        return Bounded(self.best.choice, self.best.cost, self.best.memory, bound, self.least, self._spent())

    def _spent(self) -> int:
        return self.most - self.left

    def _closed(self, bound: float) -> bool:
        return self.best is not None and bound >= self.best.cost - 1e-9 * abs(self.best.cost)

    # -- one set of states ---------------------------------------------------------------------------------------------

    def _explore(self, allowed: Allowed, price: float, points: list[_Point], bound: float = -math.inf) -> _Node | None:
        """The best bound that a price gives; None when no choice in here fits and is better than the best."""
        points = list(points)
        for _ in range(_PRICES):
            if self.left <= 0:
                break
            low, point = self._least(allowed, price)
            points.append(point)
            before, bound = bound, max(bound, low - price * self.room)
            if self._closed(bound):
                return None
            fits = [p for p in points if p.memory <= self.room]
            others = [p for p in points if p.memory > self.room]
            if not others:
                if price == 0.0:
                    return None  # the best of all in here, and it is known now
                price = 0.0
            elif not fits:
                least, smallest = self._smallest(allowed)
                if not allowed:
                    self.least = least
                if least > self.room:
                    return None
                if smallest.memory > self.room:
                    break  # an entangled graph: it is not known whether anything fits
                points.append(smallest)
                price = self._crossing([smallest], others)
            else:
                following = self._crossing(fits, others)
                if following == price or (before > -math.inf and 0.0 <= bound - before <= _RISE * abs(bound)):
                    break
                price = following
        fits = [p for p in points if p.memory <= self.room]
        others = [p for p in points if p.memory > self.room]
        if fits and others:
            self._take(self._between(min(others, key=lambda p: p.memory), max(fits, key=lambda p: p.memory)))
        if self._closed(bound):
            return None
        return _Node(bound, next(self.numbers), allowed, price, points)

    def _crossing(self, fits: list[_Point], others: list[_Point]) -> float:
        """The price at which the least of the lines `cost + price * (memory - room)` is greatest."""
        best = (-math.inf, 0.0)
        for p, q in itertools.product(fits, others):
            price = max(0.0, (p.cost - q.cost) / (q.memory - p.memory))
            low = min(x.cost + price * (x.memory - self.room) for x in (*fits, *others))
            best = max(best, (low, price))
        return best[1]

    def _least(self, allowed: Allowed, price: float) -> tuple[float, _Point]:
        """A lower bound on cost with memory at a price, and a choice near it (of it, where the graph folds)."""
        self.left -= 1
        made: dict[tuple[int, int], np.ndarray] = {}  # equal arrays stay one object, which is folded once

        def mixed(cost: np.ndarray, held: np.ndarray | None) -> np.ndarray:
            if held is None or price == 0.0:
                return cost
            key = (id(cost), id(held))
            if key not in made:
                made[key] = cost + price * held
            return made[key]

        p = Problem()
        for v, cost in self.problem.costs.items():
            p.vertex(v, _only(mixed(cost, self.memory.costs.get(v)), allowed.get(v)))
        for pair in dict.fromkeys([*self.problem.edges, *self.memory.edges]):
            costs, held = self.problem.edges.get(pair, []), self.memory.edges.get(pair, [])
            if len(costs) == len(held):
                parts = [mixed(c, h) for c, h in zip(costs, held, strict=True)]
            else:
                parts = [*costs, *(made.setdefault((id(h), 0), price * h) for h in held)]
            for m in parts:
                p.edge(*pair, m)
        found = p.solve()
        point = self._point(found.choice)
        self._take(point)
        return found.bound, point

    def _smallest(self, allowed: Allowed) -> tuple[float, _Point]:
        """The least memory: a lower bound and a choice."""
        self.left -= 1
        p = Problem()
        for v, cost in self.problem.costs.items():
            held = self.memory.costs.get(v)
            p.vertex(v, _only(np.zeros(len(cost)) if held is None else held, allowed.get(v)))
        for pair, matrices in self.memory.edges.items():
            for m in matrices:
                p.edge(*pair, m)
        for pair, matrices in self.problem.edges.items():
            for m in matrices:
                if not np.isfinite(m).all():  # what is forbidden stays so
                    p.edge(*pair, np.where(np.isfinite(m), 0.0, np.inf))
        found = p.solve()
        point = self._point(found.choice)
        self._take(point)
        return found.bound, point

    def _point(self, choice: Mapping[Hashable, int]) -> _Point:
        known = dict(choice)
        return _Point(self.problem.value(known), self.memory.value(known), known)

    # -- choices that fit ----------------------------------------------------------------------------------------------

    def _take(self, point: _Point | None) -> None:
        if point is None or point.memory > self.room:
            return
        if self.best is None or point.cost < self.best.cost:
            point = self._improved(point)
        if self.best is None or (point.cost, point.memory) < (self.best.cost, self.best.memory):
            self.best = point

    def _between(self, large: _Point, small: _Point) -> _Point | None:
        """A choice that fits, from one that does not: parts of it that are independent of each other are made as in
        the small one, the cheapest first (of equal layers, as many as must)."""
        choice, memory = dict(large.choice), large.memory
        parts: list[tuple[float, float, list[Any]]] = []
        for part in self._parts([v for v in choice if choice[v] != small.choice[v]]):
            cost, held = self._around(part, choice)
            other_cost, other_held = self._around(part, {**choice, **{v: small.choice[v] for v in part}})
            if other_held < held:
                parts.append(((other_cost - cost) / (held - other_held), held - other_held, part))
        for _, freed, part in sorted(parts, key=lambda p: p[0]):
            if memory <= self.room:
                break
            choice |= {v: small.choice[v] for v in part}
            memory -= freed
        return self._point(choice)

    def _parts(self, vertices: list[Any]) -> Iterator[list[Any]]:
        """Groups of vertices with no edge between them."""
        left = dict.fromkeys(vertices)
        while left:
            todo, part = [next(iter(left))], []
            while todo:
                v = todo.pop()
                if v in left:
                    del left[v]
                    part.append(v)
                    todo += [u for u, _, _ in self.around[v]]
            yield part

    def _around(self, part: list[Any], choice: Choice) -> tuple[float, float]:
        """Cost and memory of some vertices and of all edges at them."""
        cost = held = 0.0
        inside = set(part)
        for v in part:
            s = choice[v]
            cost += float(self.problem.costs[v][s])
            held += float(self.memory.costs[v][s]) if v in self.memory.costs else 0.0
            for u, c, m in self.around[v]:
                half = 0.5 if u in inside else 1.0
                cost += half * float(c[s, choice[u]])
                held += half * float(m[s, choice[u]])
        return cost, held

    def _improved(self, point: _Point) -> _Point:
        """Re-choose one vertex at a time, within the room, as long as that is cheaper."""
        choice, memory = dict(point.choice), point.memory
        for _ in range(4):
            better = False
            for v, costs in self.problem.costs.items():
                cost = costs.copy()
                held = self.memory.costs[v].copy() if v in self.memory.costs else np.zeros(len(costs))
                for u, c, m in self.around[v]:
                    cost += c[:, choice[u]]
                    held += m[:, choice[u]]
                now = choice[v]
                cost[memory - held[now] + held > self.room] = np.inf
                state = int(cost.argmin())
                if cost[state] < cost[now] * (1 - 1e-12) - 1e-18:
                    memory += float(held[state] - held[now])
                    choice[v], better = state, True
            if not better:
                break
        found = self._point(choice)
        return found if found.memory <= self.room else point

    # -- branching -----------------------------------------------------------------------------------------------------

    def _split(self, node: _Node) -> Iterator[Allowed]:
        """Two sets of states that part a choice that fits from one that does not, by the vertex that frees most."""
        fits = [p for p in node.points if p.memory <= self.room]
        others = [p for p in node.points if p.memory > self.room]
        if not fits or not others:
            return
        small, large = max(fits, key=lambda p: p.memory), min(others, key=lambda p: p.memory)
        best: tuple[float, Any, np.ndarray] | None = None
        for v in self.problem.costs:
            a, b = small.choice[v], large.choice[v]
            if a == b:
                continue
            held = self._own(v)
            part = held <= (held[a] + held[b]) / 2 if held[a] != held[b] else np.arange(len(held)) == a
            if best is None or abs(held[a] - held[b]) > best[0]:
                best = (abs(held[a] - held[b]), v, part)
        if best is None:
            return
        _, v, part = best
        allowed = node.allowed.get(v, np.ones(len(part), dtype=bool))
        for side in (part, ~part):
            yield {**node.allowed, v: allowed & side}

    def _own(self, v: Any) -> np.ndarray:
        """Per state, the least memory of the vertex and its edges."""
        held = self.memory.costs[v].copy() if v in self.memory.costs else np.zeros(len(self.problem.costs[v]))
        for _, _, m in self.around[v]:
            held += m.min(axis=1)
        return held


def _total(matrices: Any) -> np.ndarray | None:
    return sum(matrices[1:], start=matrices[0]) if matrices else None


def _only(costs: np.ndarray, allowed: np.ndarray | None) -> np.ndarray:
    return costs if allowed is None else np.where(allowed, costs, np.inf)
