"""The cheapest choice that fits, against brute force over every choice of small random graphs."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from autopar3d.search.bounded import Bounded, solve_within
from autopar3d.search.solver import Problem


def drawn(rng: np.random.Generator, shape: str) -> tuple[Problem, Problem]:
    """Costs and bytes of a chain, a tree, or any graph: what is cheap takes memory, more or less."""
    n = int(rng.integers(2, 7))
    sizes = [int(rng.integers(1, 5)) for _ in range(n)]
    if shape == "chain":
        pairs = [(i, i + 1) for i in range(n - 1)]
    elif shape == "tree":
        pairs = [(int(rng.integers(0, i)), i) for i in range(1, n)]
    else:
        pairs = [p for p in itertools.combinations(range(n), 2) if rng.random() < 0.6]
    cost, memory = Problem(), Problem()
    for v, k in enumerate(sizes):
        held = rng.integers(0, 20, k).astype(float)
        cost.vertex(v, 10.0 - 0.4 * held + 4.0 * rng.random(k))
        memory.vertex(v, held)
    for u, v in pairs:
        m = 5.0 * rng.random((sizes[u], sizes[v]))
        m[rng.random(m.shape) < 0.1] = np.inf
        m[0] = 1.0  # some choice is allowed
        cost.edge(u, v, m)
        if rng.random() < 0.5:
            memory.edge(u, v, rng.integers(0, 6, m.shape).astype(float))
    return cost, memory


def all_choices(cost: Problem, memory: Problem) -> list[tuple[float, float]]:
    ranges = [range(len(c)) for c in cost.costs.values()]
    choices = (dict(zip(cost.costs, states, strict=True)) for states in itertools.product(*ranges))
    return [(cost.value(c), memory.value(c)) for c in choices]


def check(found: Bounded, every: list[tuple[float, float]], room: float) -> float:
    """What holds of any answer; the true minimum."""
    least = min((c for c, m in every if m <= room), default=math.inf)
    assert found.bound <= least * (1 + 1e-9)
    if math.isfinite(least):
        assert found.choice is not None and found.memory <= room
        assert least * (1 - 1e-9) <= found.cost
        assert found.cost <= found.bound * (1 + found.gap) * (1 + 1e-9)
    else:
        assert found.choice is None and found.least == min(m for c, m in every if math.isfinite(c)) > room
    return least


@pytest.mark.parametrize("shape", ["chain", "tree", "graph"])
def test_the_least_that_fits_is_found(shape: str) -> None:
    rng = np.random.default_rng(sum(map(ord, shape)))
    alone_missed = 0
    for _ in range(150):
        cost, memory = drawn(rng, shape)
        every = all_choices(cost, memory)
        held = [m for c, m in every if math.isfinite(c)]
        room = min(held) + (max(held) - min(held)) * rng.uniform(-0.1, 1.0)
        found = solve_within(cost, memory, room, solves=1000)
        least = check(found, every, room)
        assert found.cost == pytest.approx(least, rel=1e-9)
        # What prices alone find: points on the hull, the cheapest that fits of them.
        hull = [min(every, key=lambda p: p[0] + price * p[1]) for price in np.geomspace(1e-4, 1e3, 200)]
        alone_missed += min((c for c, m in hull if m <= room), default=math.inf) > least * (1 + 1e-9)
    assert alone_missed > 20


def test_a_search_that_is_cut_short_gives_a_true_bound() -> None:
    rng = np.random.default_rng(7)
    open_ones = 0
    for _ in range(60):
        cost, memory = drawn(rng, "chain")
        every = all_choices(cost, memory)
        held = [m for c, m in every if math.isfinite(c)]
        room = min(held) + 0.4 * (max(held) - min(held))
        found = solve_within(cost, memory, room, solves=6)
        check(found, every, room)
        open_ones += found.gap > 1e-9
    assert open_ones


def test_equal_layers_are_mixed() -> None:
    """Twenty equal layers, of which as many must save memory as the room asks for: the gap is that of one layer."""
    own, link = np.array([1.0, 3.0]), np.zeros((2, 2))
    held = np.array([10.0, 2.0])
    cost, memory = Problem(), Problem()
    for i in range(20):
        cost.vertex(("layer", i), own)
        memory.vertex(("layer", i), held)
        cost.vertex(("joint", i), np.zeros(1))
        memory.vertex(("joint", i), np.zeros(1))
        cost.edge(("layer", i), ("joint", i), link[:, :1])
        if i:
            cost.edge(("joint", i - 1), ("layer", i), link[:1])
    found = solve_within(cost, memory, 200.0 - 8.0 * 6.5, solves=40)
    assert found.cost == pytest.approx(20 + 2 * 7) and found.memory == 200 - 8 * 7
    assert found.bound == pytest.approx(20 + 2 * 6.5) or found.gap < 1e-9


def test_what_fits_anyway_takes_one_solve() -> None:
    cost, memory = drawn(np.random.default_rng(1), "chain")
    found = solve_within(cost, memory, 1e9)
    assert found.solves == 1 and found.cost == pytest.approx(cost.solve().cost) and found.gap == 0.0
