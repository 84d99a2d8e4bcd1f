"""Why an op runs as it does: its strategies, what each costs, and what each would change elsewhere.

For every strategy of the op the whole plan is solved again, with that one pinned. All but the op's own vertex folds
once, so that this takes about as long as planning.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from ..cost import Cost, link_seconds
from ..errors import PlanError
from ..passes.propagate import Search
from ..plan import Decisions
from ..program import module_path
from ..redistribute import State, route, scatter_atom, transfers
from ..rules import operands
from ..search.factors import is_getitem
from ..search.readings import drops
from ..search.solver import Solution
from ..step import Options, Step, choices
from .account import account, numbers, symbols
from .explanation import Choice, Collected, Explanation


@dataclass(frozen=True)
class Choices:
    """What a plan was chosen from.

    Args:
        options: those that the step was planned with.
    """

    step: Step
    options: Options

    def cost(self, shares: Mapping[str, float], *, symbolic: bool) -> Cost:
        """See `Plan.cost`; `shares`: per axis, how much of its communication is exposed."""
        return account(self.step, (symbols if symbolic else numbers)(self.step, shares), self.options.regather)

    def explain(self, name: str) -> Explanation:
        """See `Plan.explain`."""
        step = self.step
        node = _find(name, step)
        search = choices(
            step.program,
            step.factors,
            step.decisions.grid,
            step.decisions.hardware,
            self.options,
            step.places,
            step.pins,
        )
        vertex = ("op", node)
        if vertex not in search.options:
            raise PlanError(
                f"{name}: {node.name} has no gradient and reads no parameter: it is computed where its readers want it"
            )
        return _Explainer(search, node, step.decisions).explain()


def _find(name: str, step: Step) -> Node:
    """The op that a name means.

    Raises:
        PlanError: none, or several.
    """
    specs = step.factors.specs
    named = [n for n in specs if n.name == name]
    inside = [n for n in specs if module_path(n) == name]
    heavy = [n for n in inside if specs[n].flops]
    for found in (named, heavy, inside):
        if len(found) == 1:
            return found[0]
        if found:
            raise PlanError(f"{name} has several ops; ask for one of {', '.join(n.name for n in found)}")
    known = list(dict.fromkeys(m for n in specs if (m := module_path(n))))
    if not isinstance(name, str):
        raise PlanError(f"explain got a {type(name).__name__}; it takes the name of a module or of a node")
    near = [m for m in known if m.startswith(name + ".")][:6] or difflib.get_close_matches(name, known, 6, 0.5)
    hint = f"; near are {', '.join(near)}" if near else ""
    raise PlanError(f"no op and no module that computes is called {name!r}{hint}")


class _Explainer:
    def __init__(self, search: Search, node: Node, decisions: Decisions) -> None:
        self.search, self.node, self.decisions = search, node, decisions
        self.vertex = ("op", node)
        self.grid, self.hardware = search.grid, search.hardware

    def explain(self) -> Explanation:
        search, vertex = self.search, self.vertex
        solutions = search.problem.solve_each(vertex)
        options = search.options[vertex]
        planned = options.index(self.decisions.strategies[self.node.name])
        base = solutions[planned]
        found = [self._choice(s, base, planned) for s in solutions if math.isfinite(s.cost)]
        ordered = tuple(sorted(found, key=lambda c: (c.total, not c.chosen)))
        return Explanation(self.node.name, module_path(self.node), str(self.node.target), ordered)

    def _choice(self, solution: Solution, base: Solution, planned: int) -> Choice:
        search, vertex = self.search, self.vertex
        state = solution.choice[vertex]
        compute, tie = float(search.computes[vertex][state]), float(search.ties[vertex][state])
        total = self._total(solution)
        changes, others = self._changes(solution, base)
        return Choice(
            strategy=str(search.options[vertex][state]),
            chosen=state == planned,
            total=total,
            extra=max(0.0, total - self._total(base)),
            compute=compute,
            inside=max(0.0, float(search.problem.costs[vertex][state]) - tie - compute),
            collectives=tuple(self._collectives(solution)),
            memory=tie / search.tie,
            changes=changes,
            others=others,
        )

    def _total(self, solution: Solution) -> float:
        """The objective, without what breaks ties."""
        return solution.cost - math.fsum(t[solution.choice[v]] for v, t in self.search.ties.items())

    def _collectives(self, solution: Solution) -> Iterator[Collected]:
        search, node = self.search, self.node
        for value in dict.fromkeys(operands(node)):
            if not search.planned_value(value):
                continue
            slots = search.slots[value]
            for source, target, readers in search.ways(value, solution.choice):
                if readers == slots or readers[0].reader is node:
                    yield from self._moved(value, source, target, readers, len(readers) > 1)
        values = [u for u in node.users if is_getitem(u)] or [node]
        for value in values:
            for source, target, readers in search.ways(value, solution.choice):
                if value in search.slots and readers == search.slots[value]:
                    yield from self._moved(value, source, target, readers, False)

    def _moved(
        self, value: Node, source: State, target: State, readers: list[Any], shared: bool
    ) -> Iterator[Collected]:
        search = self.search
        shape = search.factors.values[value]
        grad = value in search.grads
        again = drops(search.regather, value) and any(s in search.regathered for s in readers)
        now = source
        for step in route(source, target):
            scatterable = scatter_atom(shape.atoms, now, step.axis, self.grid) is not None
            for t in transfers(step, now, shape.elements, self.grid, scatterable=scatterable):
                if t.phase == "forward" or (grad and (t.phase == "backward" or again)):
                    size = t.elements * shape.dtype.itemsize
                    seconds = link_seconds(self.hardware.link(t.axis, self.grid), size)
                    yield Collected(value.name, t.kind, t.axis, t.phase, size, seconds, shared)
            now = step.after

    def _changes(self, solution: Solution, base: Solution) -> tuple[tuple[tuple[str, str, str], ...], int]:
        search = self.search
        shown, others = [], 0
        choice: Mapping[Any, int] = solution.choice
        for vertex, state in choice.items():
            before = base.choice[vertex]
            if state == before or vertex == self.vertex:
                continue
            kind, what = vertex
            options = search.options[vertex]
            if kind == "storage":
                shape = search.factors.values[what]
                name = search.arguments[what.name].names[0]
                then, now = (str(shape.layout(options[s], self.grid)) for s in (before, state))
                shown.append((name, then, now))
            elif kind == "op" and search.factors.specs[what].flops:
                shown.append((module_path(what) or what.name, str(options[before]), str(options[state])))
            else:
                others += 1
        return tuple(c for c in shown if c[1] != c[2]), others
