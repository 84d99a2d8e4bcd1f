"""A plan in a notebook: the numbers that matter, and a table of parameters and of heavy ops."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from autopar3d.reports.tables import byte_text, fold, second_text

from .axes import named
from .modules import table as html_table
from .style import STYLE
from .whole import tiles

if TYPE_CHECKING:
    from autopar3d.plan import Plan


def table(plan: Plan) -> str:
    """A fragment of HTML, with equal layers on one line."""
    stored = [
        (
            p.names[0],
            "x".join(map(str, p.shape)),
            p.layout,
            "x".join(map(str, p.local_shape)),
            "".join(p.gathered) or "-",
        )
        for p in plan.parameters
    ]
    heavy = [
        (
            o.module or "(model)",
            o.op,
            o.layout,
            o.roles or "-",
            byte_text(sum(s.bytes for s in o.sent)) if o.sent else "-",
            second_text(o.seconds),
        )
        for o in plan.ops
        if o.flops
    ]
    escaped = [[tuple(escape(cell) for cell in row) for row in fold(rows)] for rows in (stored, heavy)]
    parameters = html_table(("parameter", "shape", "stored as", "local", "gathered"), escaped[0])
    ops = html_table(("module", "op", "layout", "roles", "sent", "time"), escaped[1], right=(4, 5))
    title = f"Plan for a grid of {named(plan, ' × ')}, {escape(plan.hardware)}"
    folded = (("Products and attention", " open", ops), ("Parameters", "", parameters))
    parts = [f"<details{how}><summary>{name}</summary>{inside}</details>" for name, how, inside in folded]
    return f"<div class='ap3d'><style>{STYLE}</style><b>{title}</b>{tiles(plan)}{''.join(parts)}</div>"
