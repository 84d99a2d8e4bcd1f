"""What two plans of one model do otherwise: `plan.diff(other)`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import PlanError
from .tables import byte_text, count_text, second_text, table

if TYPE_CHECKING:
    from ..plan import Plan

Change = tuple[str, str, str]
"""Of what, in the first plan, in the second ("-" where it has none)."""


@dataclass(frozen=True)
class Difference:
    """Two plans side by side; empty, and false, when they decide and cost the same.

    Args:
        options: grid, hardware and options that differ.
        parameters: layouts in which they are stored that differ, by name.
        ops: roles of matmuls and of other ops that send that differ, by module (or node).
        others: how many further ops have another strategy.
        costs: predicted numbers that differ.
    """

    options: tuple[Change, ...]
    parameters: tuple[Change, ...]
    ops: tuple[Change, ...]
    others: int
    costs: tuple[Change, ...]

    def __bool__(self) -> bool:
        return bool(self.options or self.parameters or self.ops or self.others or self.costs)

    def __str__(self) -> str:
        if not self:
            return "The plans are the same."
        parts = [
            table(title, (first, "this plan", "other plan"), list(rows), wrap=(0, 1, 2), right=right, folding=folding)
            for title, first, rows, right, folding in (
                ("Options", "option", self.options, (), False),
                ("Parameters stored otherwise", "parameter", self.parameters, (), True),
                ("Ops with other roles", "module", self.ops, (), True),
                ("Predictions per rank", "of a step", self.costs, (1, 2), False),
            )
            if rows
        ]
        if self.others:
            parts.append(f"Other ops with another strategy, cheap or following from these: {self.others}.")
        return "\n".join(line.rstrip() for line in "\n\n".join(parts).split("\n"))


def difference(a: Plan, b: Plan) -> Difference:
    """What differs, this plan first.

    Raises:
        PlanError: the other is no plan.
    """
    if not isinstance(b, type(a)):
        raise PlanError(f"diff got a {type(b).__name__}; it takes another Plan, from plan(...) or Plan.load(path)")
    options = [
        (k, str(getattr(a, k)), str(getattr(b, k))) for k in ("grid", "hardware", "scheme", "regather", "inputs")
    ]
    layouts = [{p.names[0]: p.layout for p in plan.parameters} for plan in (a, b)]
    roles = [{_label(o.module, o.name, plan): o.roles or "-" for o in plan.ops} for plan in (a, b)]
    listed = [{o.name for o in plan.ops} for plan in (a, b)]
    others = [n for n in {*a.strategies, *b.strategies} - {*listed[0], *listed[1]}]
    return Difference(
        tuple(c for c in options if c[1] != c[2]),
        _changes(*layouts),
        _changes(*roles),
        sum(a.strategies.get(n) != b.strategies.get(n) for n in others),
        _changes(_numbers(a), _numbers(b)),
    )


def _label(module: str, name: str, plan: Plan) -> str:
    """The module, with the node's name where a module has several listed ops."""
    alone = sum(o.module == module for o in plan.ops) == 1
    return module if alone and module else f"{module or '(model)'} {name}"


def _changes(a: dict[str, str], b: dict[str, str]) -> tuple[Change, ...]:
    names = list(dict.fromkeys([*a, *b]))
    return tuple((n, a.get(n, "-"), b.get(n, "-")) for n in names if a.get(n, "-") != b.get(n, "-"))


def _numbers(plan: Plan) -> dict[str, str]:
    found = {
        "predicted time": second_text(plan.seconds),
        "compute": second_text(plan.compute),
        "exposed communication": second_text(sum(plan.exposed.values())),
        "planner's objective": second_text(plan.objective),
        "FLOPs": count_text(plan.flops),
    }
    sent: dict[str, float] = {}
    for (axis, _), n in plan.bytes.items():
        sent[axis] = sent.get(axis, 0.0) + n
    found |= {f"sent over {axis}": byte_text(n) for axis, n in sorted(sent.items())}
    return found | {f"memory: {name}": byte_text(n) for name, n in plan.memory.items()}
