"""The solver against brute force."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar3d.search.entangled import _Ascent
from autopar3d.search.solver import Problem, min_plus

# Whole numbers, so that ties are met and sums are exact; infinity is a choice that is not allowed.
costs = st.one_of(st.integers(0, 9), st.just(float("inf")))


def build(sizes: list[int], edges: list[tuple[int, int]], draw: Any) -> Problem:
    random = np.random.default_rng(draw(st.integers(0, 2**31)))
    values = np.array([*range(draw(st.integers(1, 10))), np.inf])

    def entries(*shape: int) -> np.ndarray:
        return values[random.integers(0, len(values), shape)]

    problem = Problem()
    for v, n in enumerate(sizes):
        problem.vertex(v, entries(n))
    for u, v in edges:
        problem.edge(u, v, entries(sizes[u], sizes[v]))
    return problem


@st.composite
def problems(draw: Any) -> Problem:
    """Up to six vertices of up to three states; any edges, several between the same two included."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=6))
    pairs = [(u, v) for u in range(len(sizes)) for v in range(len(sizes)) if u != v]
    return build(sizes, draw(st.lists(st.sampled_from(pairs), max_size=12)) if pairs else [], draw)


@st.composite
def cycles(draw: Any) -> Problem:
    """A ring with trees on it: degree-2 folding meets existing edges."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=3, max_size=6))
    ring = draw(st.integers(3, len(sizes)))
    edges = [(i, (i + 1) % ring) for i in range(ring)]
    return build(sizes, edges + [(v, draw(st.integers(0, v - 1))) for v in range(ring, len(sizes))], draw)


def brute(problem: Problem) -> float:
    vertices = list(problem.costs)
    options = (range(len(problem.costs[v])) for v in vertices)
    return min(problem.value(dict(zip(vertices, c, strict=True))) for c in itertools.product(*options))


def complete(n: int, states: int, seed: int) -> Problem:
    random = np.random.default_rng(seed)
    problem = Problem()
    for v in range(n):
        problem.vertex(v, random.random(states))
    for u, v in itertools.combinations(range(n), 2):
        problem.edge(u, v, random.random((states, states)))
    return problem


@settings(max_examples=200, deadline=None)
@given(problems())
def test_exact_means_minimal(problem: Problem) -> None:
    solution, best = problem.solve(), brute(problem)
    assert solution.choice.keys() == problem.costs.keys()
    assert solution.cost == problem.value(solution.choice)
    assert solution.cost == best if solution.exact else solution.cost >= best


@settings(max_examples=100, deadline=None)
@given(cycles())
def test_rings_fold_exactly(problem: Problem) -> None:
    solution = problem.solve()
    assert solution.exact
    assert solution.cost == brute(problem)


@settings(max_examples=200, deadline=None)
@given(problems())
def test_the_bound_is_one(problem: Problem) -> None:
    solution, best = problem.solve(), brute(problem)
    assert solution.bound <= best + 1e-9
    assert solution.exact or solution.cost >= best
    assert not solution.exact or solution.bound == solution.cost


@settings(max_examples=100, deadline=None)
@given(problems())
def test_each_state_of_a_vertex_has_its_best(problem: Problem) -> None:
    for vertex in problem.costs:
        for state, solution in enumerate(problem.solve_each(vertex)):
            alone = Problem({**problem.costs}, problem.edges)
            alone.costs[vertex] = np.where(
                np.arange(len(problem.costs[vertex])) == state, problem.costs[vertex], np.inf
            )
            assert solution.choice[vertex] == state
            assert solution.cost == brute(alone) if solution.exact else solution.cost >= brute(alone)


@pytest.mark.parametrize("seed", range(20))
def test_entangled_graphs_are_decided(seed: int) -> None:
    problem = complete(5, 3, seed)
    solution = problem.solve()
    assert solution.exact
    assert solution.cost == pytest.approx(brute(problem), rel=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_what_is_too_entangled_is_bounded(seed: int) -> None:
    """30 vertices all joined: no table holds them. The choice is no worse than any single change of it."""
    problem = complete(30, 6, seed)
    solution = problem.solve()
    assert not solution.exact
    assert 0 < solution.bound < solution.cost
    for v, n in [(v, len(c)) for v, c in problem.costs.items()]:
        for state in range(n):
            assert problem.value({**solution.choice, v: state}) >= solution.cost - 1e-12


def test_a_component_that_folds_away_is_in_the_bound() -> None:
    problem = complete(30, 6, 0)
    alone = problem.solve().bound
    problem.vertex("apart", np.array([7.0, 8.0]))
    assert problem.solve().bound == pytest.approx(alone + 7.0)


@settings(max_examples=60, deadline=None)
@given(st.integers(4, 6), st.integers(2, 3), st.integers(0, 2**31))
def test_the_ascent_bounds_and_drops_only_what_is_in_no_minimum(n: int, states: int, seed: int) -> None:
    problem = complete(n, states, seed)
    best = brute(problem)
    minima = [
        c for c in itertools.product(*(range(states) for _ in range(n)))
        if problem.value(dict(enumerate(c))) <= best + 1e-12
    ]  # fmt: skip
    ascent = _Ascent(list(problem.costs.values()), {pair: m[0] for pair, m in problem.edges.items()})
    ascent.run()
    assert ascent.bound <= best + 1e-9 <= ascent.best_cost + 2e-9
    assert all(ascent.alive[v][s] for c in minima for v, s in enumerate(c))


@settings(max_examples=50, deadline=None)
@given(problems())
def test_solving_is_deterministic_and_leaves_the_problem_as_it_is(problem: Problem) -> None:
    before = (
        {v: c.copy() for v, c in problem.costs.items()},
        {p: [m.copy() for m in e] for p, e in problem.edges.items()},
    )
    first, second = problem.solve(), problem.solve()
    assert first == second
    assert all(np.array_equal(c, before[0][v]) for v, c in problem.costs.items())
    assert all(np.array_equal(m, n) for p, e in problem.edges.items() for m, n in zip(e, before[1][p], strict=True))


def test_edges_between_the_same_two_add_up() -> None:
    problem = Problem()
    problem.vertex("a", np.array([0.0, 1.0]))
    problem.vertex("b", np.array([0.0, 0.0]))
    problem.edge("a", "b", np.array([[0.0, 5.0], [5.0, 0.0]]))
    problem.edge("b", "a", np.array([[9.0, 0.0], [0.0, 0.0]]))
    assert problem.value({"a": 0, "b": 0}) == 9
    assert problem.value({"a": 1, "b": 1}) == 1
    solution = problem.solve()
    assert (solution.cost, solution.exact, solution.choice) == (1.0, True, {"a": 1, "b": 1})


def test_a_problem_without_vertices() -> None:
    assert Problem().solve().cost == 0


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.data())
def test_min_plus(i: int, k: int, j: int, data: Any) -> None:
    def matrix(rows: int, columns: int) -> np.ndarray:
        entries = data.draw(st.lists(costs, min_size=rows * columns, max_size=rows * columns))
        return np.array(entries, dtype=float).reshape(rows, columns)

    a, b = matrix(i, k), matrix(k, j)
    assert np.array_equal(min_plus(a, b), (a[:, :, None] + b[None]).min(axis=1))
