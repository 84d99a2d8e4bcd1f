"""The planner against oracles that share nothing with it but the space of strategies.

*Brute force* on random small models: every combination of strategies, storages and shared copies, each priced by
walking `redistribute.route` step by step and counting what several readers share once, as the rewrite emits it.
*An integer program* on a transformer block, solved by HiGHS: one binary variable per vertex and state, of those states
that a dual bound does not rule out.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx import Node

from autopar3d.grid import Grid, GridLike
from autopar3d.hardware import PROFILES
from autopar3d.passes.canonicalize import canonicalize
from autopar3d.passes.propagate import Search, search
from autopar3d.passes.trace import trace
from autopar3d.program import Program
from autopar3d.redistribute import State, route, transfers
from autopar3d.search.factors import Factors, producer
from autopar3d.search.readings import Slot, drops
from autopar3d.search.solver import Problem
from autopar3d.search.strategies import given as given_by
from autopar3d.search.strategies import needed
from autopar3d.step import Options, _result_states, output_modes
from tests.test_best_plan import Block, Inner, program_of


def planner_of(program: Program, sizes: GridLike, hardware: str, regather: str, outputs: str) -> Search:
    grid = Grid.of(sizes)
    modes = output_modes(program, Options(outputs=outputs))
    factors = Factors(program.graph.graph)

    def states(i: int, shape: Any, replicas: Any) -> list[State]:
        return _result_states(modes[i], shape, grid, replicas)

    return search(program, grid, PROFILES[hardware], factors=factors, regather=regather, result_states=states)


class Brute:
    """Every choice, priced step by step."""

    def __init__(self, planner: Search) -> None:
        self.planner = planner
        self.paid: dict[Any, float] = {}

    def least(self) -> float:
        options = self.planner.options
        # Of choices that differ only in a storage or a second copy, the best is known value by value.
        vertices = [v for v in options if v[0] not in ("storage", "group")]
        choices = itertools.product(*(options[v] for v in vertices))
        return min(self.cost(dict(zip(vertices, c, strict=True))) for c in choices)

    def cost(self, choice: dict[Any, Any]) -> float:
        p = self.planner
        total = 0.0
        for (kind, what), option in choice.items():
            if kind == "op":
                key = (what, option)
                if key not in self.paid:
                    ((compute, inside, _),) = p._seconds(what, p.factors.specs[what], [option])
                    self.paid[key] = compute + inside
                total += self.paid[key]
        for value, slots in p.slots.items():
            source, result = producer(value)
            targets = tuple(self.target(value, slot, choice) for slot in slots)
            copy = choice.get(("copy", value))
            if ("op", source) in choice:
                homes = [given_by(p.factors.specs[source], choice["op", source], result)]
            elif ("storage", source) in p.options:
                homes = p.options["storage", source]
            else:
                continue
            total += min(self.moved(value, home, copy, tuple(slots), targets) for home in homes)
        return total

    def target(self, value: Node, slot: Slot, choice: dict[Any, Any]) -> State | None:
        if slot.reader is None:
            return choice.get(("result", slot.operand))
        strategy = choice.get(("op", slot.reader))
        if strategy is None:
            return None
        return needed(self.planner.factors.specs[slot.reader], strategy, slot.operand, grad=value in self.planner.grads)

    def moved(
        self, value: Node, home: State, copy: State | None, slots: tuple[Slot, ...], targets: tuple[State | None, ...]
    ) -> float:
        key = (value, home, copy, targets)
        if key not in self.paid:
            p = self.planner
            groups = {k: v for k, v in p.members.items() if k[0] is value}
            ways = []
            for seconds in itertools.product(*(p.options["group", k] for k in groups)):
                stops = [[] if copy is None else [copy] for _ in slots]
                for members, second in zip(groups.values(), seconds, strict=True):
                    for slot in members:
                        stops[slots.index(slot)].append(second)
                routes = [(home, *s, t) for s, t in zip(stops, targets, strict=True)]
                ways.append(self._moved(value, home, slots, routes))
            self.paid[key] = min(ways)
        return self.paid[key]

    def _moved(self, value: Node, home: State, slots: Any, routes: Any) -> float:
        """Steps to the same place are taken once; a gather is done again when a reader that saves it comes by."""
        p = self.planner
        shape, grad = p.factors.values[value], value in p.grads
        again = drops(p.regather, value)
        steps: dict[State, tuple[Any, State]] = {}
        saved: set[State] = set()
        for slot, stops in zip(slots, routes, strict=True):
            now = home
            for step in (s for a, b in itertools.pairwise(stops) for s in route(a, b)):
                if step.after != home:
                    steps.setdefault(step.after, (step, now))
                    if slot in p.regathered:
                        saved.add(step.after)
                now = step.after
        total = 0.0
        for after, (step, before) in steps.items():
            g = p.grid.axis_size(step.axis)
            cuttable = any(n % (p.grid.extent(a) * g) == 0 for n, a in zip(shape.atoms, before.atoms, strict=True))
            for t in transfers(step, before, shape.elements, p.grid, scatterable=cuttable):
                if t.phase == "forward" or (grad and (t.phase == "backward" or (again and after in saved))):
                    link = p.hardware.link(t.axis, p.grid)
                    total += link.latency + t.elements * shape.dtype.itemsize / link.bandwidth
        return total


class Random(nn.Module):
    """A few ops on [rows, 4] or [rows, 8], each reading any value before it."""

    def __init__(self, plan: list[tuple[str, int, int]]) -> None:
        super().__init__()
        self.plan = plan
        self.rows = nn.Parameter(torch.empty(8, 8))
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(8, 8)) for op, _, _ in plan if op == "linear")

    def forward(self) -> tuple[Tensor, ...]:
        values: list[Tensor] = [self.rows]
        weights = iter(self.weights)
        for op, a, b in self.plan:
            x, y = values[a % len(values)], values[b % len(values)]
            values.append({
                "linear": lambda x=x: F.linear(x, next(weights)),
                "gelu": lambda x=x: F.gelu(x),
                "add": lambda x=x, y=y: x + y,
                "softmax": lambda x=x: x.softmax(-1),
                "mm": lambda x=x, y=y: x @ y,
            }[op]())  # fmt: skip
        return (values[-1],)


ops = st.tuples(
    st.sampled_from(["linear", "linear", "gelu", "add", "softmax", "mm"]), st.integers(0, 5), st.integers(0, 5)
)


@settings(max_examples=80, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(
    plan=st.lists(ops, min_size=1, max_size=3),
    hardware=st.sampled_from(["cpu", "h100", "bandwidth"]),
    regather=st.sampled_from(["all", "weights", "none"]),
    outputs=st.sampled_from(["global", "sharded"]),
)
def test_the_planner_finds_the_least_of_all_on_one_axis(
    plan: list[tuple[str, int, int]], hardware: str, regather: str, outputs: str
) -> None:
    check(plan, (2, 1, 1), hardware, regather, outputs)


@settings(max_examples=12, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(
    plan=st.lists(ops, min_size=1, max_size=2),
    hardware=st.sampled_from(["cpu", "bandwidth"]),
    regather=st.sampled_from(["all", "none"]),
    outputs=st.sampled_from(["global", "sharded"]),
)
def test_the_planner_finds_the_least_of_all_on_two_axes(
    plan: list[tuple[str, int, int]], hardware: str, regather: str, outputs: str
) -> None:
    check(plan, (2, 4, 1), hardware, regather, outputs)


class Fed(Random):
    """The same on a batch."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        (made,) = super().forward()
        return (F.linear(x, made).square().mean(), x @ made)


@settings(max_examples=12, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(
    plan=st.lists(ops, min_size=1, max_size=2),
    hardware=st.sampled_from(["cpu", "h100", "bandwidth"]),
    regather=st.sampled_from(["all", "weights", "none"]),
    outputs=st.sampled_from(["global", "sharded"]),
)
def test_the_planner_finds_the_least_of_all_beside_replicas(
    plan: list[tuple[str, int, int]], hardware: str, regather: str, outputs: str
) -> None:
    check(plan, Grid(2, 1, 1, replicas=4), hardware, regather, outputs, fed=True)


def check(plan: Any, sizes: GridLike, hardware: str, regather: str, outputs: str, *, fed: bool = False) -> None:
    with torch.device("meta"):
        program = canonicalize(trace(Fed(plan), (torch.empty(8, 8),)) if fed else trace(Random(plan)))
    planner = planner_of(program, sizes, hardware, regather, outputs)
    found = planner.run()
    assume(math.prod(len(o) for v, o in planner.options.items() if v[0] not in ("storage", "group")) <= 2_000)  # to try
    assert found.exact
    assert found.cost == pytest.approx(Brute(planner).least(), rel=1e-7, abs=1e-15)


@pytest.mark.xfail(strict=True, reason="a fork that readers of two kinds share is priced twice (docs/how-it-works.md)")
def test_readers_of_two_kinds_share_a_fork() -> None:
    check([("mm", 2, 1), ("mm", 5, 5), ("mm", 2, 1)], (2, 1, 1), "cpu", "all", "global")


# -- the integer program ---------------------------------------------------------------------------------------


def classes_of(problem: Problem) -> Iterator[tuple[Any, Any, np.ndarray, np.ndarray, np.ndarray]]:
    """Per edge, its ends, the class of each of their states (states with equal prices are one), and prices between."""
    for (u, v), matrices in problem.edges.items():
        total = sum(matrices)
        _, first, left = np.unique(total, axis=0, return_index=True, return_inverse=True)
        _, second, right = np.unique(total, axis=1, return_index=True, return_inverse=True)
        yield u, v, left.ravel(), right.ravel(), total[np.ix_(first, second)]


def least_by_milp(problem: Problem) -> float:
    """The problem as an integer program: one state a vertex; flows between classes of states agree with both."""
    optimize = pytest.importorskip("scipy.optimize")
    sparse = pytest.importorskip("scipy.sparse")
    offset: dict[Any, int] = {}
    costs: list[float] = []
    for v, c in problem.costs.items():
        offset[v] = len(costs)
        costs += c.tolist()
    binary = len(costs)
    rows, columns, entries = [], [], []
    right_hand: list[float] = []

    def constrain(terms: list[tuple[int, float]], equals: float) -> None:
        for column, factor in terms:
            rows.append(len(right_hand))
            columns.append(column)
            entries.append(factor)
        right_hand.append(equals)

    for v, c in problem.costs.items():
        constrain([(offset[v] + i, 1.0) for i in range(len(c))], 1.0)
    for u, v, left, right, prices in classes_of(problem):
        base = len(costs)
        costs += prices.ravel().tolist()
        members: dict[Any, list[int]] = defaultdict(list)
        for side, vertex, of in (("left", u, left), ("right", v, right)):
            for state, k in enumerate(of):
                members[side, int(k)].append(offset[vertex] + state)
        for i in range(prices.shape[0]):
            flows = [(base + i * prices.shape[1] + j, 1.0) for j in range(prices.shape[1])]
            constrain([*flows, *((s, -1.0) for s in members["left", i])], 0.0)
        for j in range(prices.shape[1]):
            flows = [(base + i * prices.shape[1] + j, 1.0) for i in range(prices.shape[0])]
            constrain([*flows, *((s, -1.0) for s in members["right", j])], 0.0)
    matrix = sparse.csr_array((entries, (rows, columns)), shape=(len(right_hand), len(costs)))
    scale = max(costs)
    kind = np.zeros(len(costs))
    kind[:binary] = 1
    found = optimize.milp(
        np.array(costs) / scale,
        integrality=kind,
        bounds=optimize.Bounds(0, 1),
        constraints=optimize.LinearConstraint(matrix, right_hand, right_hand),
        options={"mip_rel_gap": 1e-9},
    )
    assert found.success, found.message
    return float(found.fun) * scale


def below(problem: Problem, value: float) -> Problem:
    """The problem with those states only that may be part of a choice of less than `value`.

    A dual bound, raised by moving costs between vertices and their edges in equal parts (min-sum diffusion), says of
    every state what any choice with it costs at least.
    """
    wall = 2.0 * value  # forbids as well as an infinity does, and can be moved about
    costs = {v: np.minimum(c, wall) for v, c in problem.costs.items()}
    tables = {pair: np.minimum(sum(matrices), wall) for pair, matrices in problem.edges.items()}
    states = {v: np.arange(len(c)) for v, c in costs.items()}
    around: dict[Any, list[tuple[Any, Any]]] = defaultdict(list)
    for pair in tables:
        for v in pair:
            around[v].append(pair)
    total = sum(float(c.min()) for c in costs.values()) + sum(float(t.min()) for t in tables.values())
    order = list(costs)
    for turn in range(300):
        dropped = 0
        for v in order if turn % 2 else reversed(order):
            total -= float(costs[v].min()) + sum(float(tables[p].min()) for p in around[v])
            for p in around[v]:
                least = tables[p].min(axis=1 if p[0] == v else 0)
                costs[v] += least
                tables[p] -= least[:, None] if p[0] == v else least[None, :]
            total += float(costs[v].min())  # the tables' least entries are 0 now
            keep = total + costs[v] - costs[v].min() < value
            if not keep.any():
                return Problem()
            if not keep.all():
                dropped += 1
                costs[v], states[v] = costs[v][keep], states[v][keep]
                for p in around[v]:
                    tables[p] = tables[p][keep] if p[0] == v else tables[p][:, keep]
            part = costs[v] / (len(around[v]) + 1)
            total -= float(costs[v].min()) + sum(float(tables[p].min()) for p in around[v])
            for p in around[v]:
                tables[p] += part[:, None] if p[0] == v else part[None, :]
            costs[v] = part.copy()
            total += float(costs[v].min()) + sum(float(tables[p].min()) for p in around[v])
        if turn > 40 and not dropped:
            break
    left = Problem()
    for v, c in problem.costs.items():
        left.vertex(v, c[states[v]])
    for (u, v), matrices in problem.edges.items():
        left.edge(u, v, sum(matrices)[np.ix_(states[u], states[v])])
    return left


@pytest.mark.parametrize("hardware", ["h100", "bandwidth"])
@pytest.mark.parametrize("sizes", [(1, 2, 4), (2, 2, 2)], ids=str)
def test_a_transformer_block_against_an_integer_program(sizes: tuple[int, int, int], hardware: str) -> None:
    """The whole program did not end on (2, 2, 2). So a dual bound first drops the states that are in no choice within
    2% of the planner's (of 3244 states some 900 are left), and the integer program finds the least of the others;
    nothing is less than the planner's, then, at all. CPU seconds: 0.1 on (1, 2, 4), 1.2 on (2, 2, 2)."""
    program = program_of(lambda: Inner(Block(256), (8, 16, 256)))
    planner = planner_of(program, sizes, hardware, "all", "sharded")
    found = planner.problem.solve()
    assert found.exact and found.cost == pytest.approx(planner.problem.value(found.choice), rel=1e-12)
    left = below(planner.problem, 1.02 * found.cost)
    assert all(len(c) for c in left.costs.values()) and len(left.costs) == len(planner.problem.costs)
    assert least_by_milp(left) == pytest.approx(found.cost, rel=1e-6)
    # Nor does the bound alone leave anything below it.
    assert not below(planner.problem, (1 - 1e-6) * found.cost).costs
