"""What each axis of the grid does in a plan."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from autopar3d.reports.tables import byte_text, second_text

from .modules import table
from .style import AXIS_COLOURS

if TYPE_CHECKING:
    from autopar3d.plan import Plan

_ROLES = {"a": "gathers inputs", "b": "gathers weights", "c": "reduces results"}


def named(plan: Plan, times: str) -> str:
    """The grid as `4 x 2 x 1`, `times` between."""
    more = f", {plan.replicas} replicas" if plan.replicas > 1 else ""
    return times.join(map(str, plan.grid)) + more


def axes(plan: Plan) -> str:
    """A table: a line an axis."""
    rows = []
    sizes = {**({"r": plan.replicas} if plan.replicas > 1 else {}), **dict(zip("xyz", plan.grid, strict=True))}
    for axis, size in sizes.items():
        colour = f"<i style='display:inline-block;width:12px;height:12px;background:{AXIS_COLOURS[axis]}'></i>"
        name = f"<span style='white-space:nowrap'>{colour} <b>{axis}</b> = {size}</span>"
        if size == 1:
            rows.append((name, "not used: its size is 1", "-", "-", "-"))
            continue
        sent = sum(b for (a, _), b in plan.bytes.items() if a == axis)
        stored = sum(axis in re.sub(r"\d+", "", p.layout.partition(" +")[0]) for p in plan.parameters)
        rows.append(
            (
                name,
                does(plan, axis),
                f"{stored} of {len(plan.parameters)} parameters",
                f"{byte_text(sent)}, {plan.calls.get(axis, 0)} calls",
                second_text(plan.exposed.get(axis, 0.0)),
            )
        )
    return table(("axis", "in products and attention", "cuts", "sends a step", "compute waits"), rows)


def does(plan: Plan, axis: str) -> str:
    """Its work in products and attention in words, the most frequent first."""
    found: Counter[str] = Counter()
    for op in plan.ops:
        if not op.flops:
            continue
        for word, axes_of in re.findall(r"(\S+?)[=:]([rxyz]+)", op.roles):
            if axis in axes_of:
                role = "sums gradients" if axis == "r" and word == "b" else _ROLES.get(word, f"cuts {word}")
                found["repeats work" if word == "repeat" else role] += 1
    return ", ".join(f"{what} ({n})" for what, n in found.most_common()) or "-"
