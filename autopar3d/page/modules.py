"""The model as a tree that folds: per module its parameters and ops, with layouts, bytes, memory and time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING

from autopar3d.reports.tables import byte_text, second_text

if TYPE_CHECKING:
    from autopar3d.plan import OpPlan, ParameterPlan, Plan

_OPEN = 2  # levels that are unfolded at first


@dataclass
class _Module:
    name: str
    parts: dict[str, _Module] = field(default_factory=dict)
    parameters: list[ParameterPlan] = field(default_factory=list)
    ops: list[OpPlan] = field(default_factory=list)

    def at(self, path: str) -> _Module:
        here = self
        for name in path.split(".") if path else ():
            here = here.parts.setdefault(name, _Module(name))
        return here

    def all(self) -> list[_Module]:
        return [self, *(m for part in self.parts.values() for m in part.all())]


def tree(plan: Plan) -> str:
    """Nested `details`, the root open."""
    root = _Module("model")
    for parameter in plan.parameters:
        root.at(parameter.names[0].rpartition(".")[0]).parameters.append(parameter)
    for op in plan.ops:
        root.at(op.module).ops.append(op)
    return _module(root, 0)


def _module(module: _Module, depth: int) -> str:
    everything = module.all()
    stored = sum(_stored(p) for m in everything for p in m.parameters)
    sent = sum(s.bytes for m in everything for o in m.ops for s in o.sent)
    time = sum(o.seconds for m in everything for o in m.ops)
    totals = f"{byte_text(stored)} stored, {byte_text(sent)} sent, {second_text(time)}"
    inside = _parameters(module) + _ops(module)
    inside += "".join(_module(part, depth + 1) for part in module.parts.values())
    unfolded = " open" if depth < _OPEN and len(module.parts) <= 24 else ""
    title = f"<code>{escape(module.name)}</code><span class='ap3d-sum'>{totals}</span>"
    return f"<details{unfolded}><summary>{title}</summary>{inside}</details>"


def _parameters(module: _Module) -> str:
    rows = [
        (
            f"<code>{escape(p.names[0].rpartition('.')[2])}</code>"
            + "".join(f" = <code>{escape(n)}</code>" for n in p.names[1:]),
            _shape(p.shape),
            p.dtype,
            f"<code>{escape(p.layout)}</code>",
            _shape(p.local_shape),
            byte_text(_stored(p)),
            "".join(p.gathered) or "-",
            ("".join(p.reduced) or "-") if p.trained else "no gradient",
        )
        for p in module.parameters
    ]
    header = ("parameter", "shape", "dtype", "stored as", "local", "a rank", "gathered", "grad summed")
    return table(header, rows, right=(5,))


def _ops(module: _Module) -> str:
    rows = [
        (
            f"<span title='{escape(o.source)}'>{escape(o.op)}</span>",
            _shape(o.shape),
            f"<code>{escape(o.layout)}</code>",
            _shape(o.local_shape),
            escape(o.roles or "-"),
            byte_text(sum(s.bytes for s in o.sent)) if o.sent else "-",
            second_text(o.seconds),
        )
        for o in module.ops
    ]
    return table(("op", "result", "layout", "local", "roles", "sent", "time"), rows, right=(5, 6))


def table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]], right: tuple[int, ...] = ()) -> str:
    """An HTML table that scrolls by itself where the page is narrow; cells are HTML."""
    if not rows:
        return ""

    def cells(tag: str, row: tuple[str, ...]) -> str:
        return "".join(f"<{tag}{' class=ap3d-n' if i in right else ''}>{c}</{tag}>" for i, c in enumerate(row))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    head = f"<thead><tr>{cells('th', header)}</tr></thead>"
    return f"<div class='ap3d-wide'><table>{head}<tbody>{body}</tbody></table></div>"


def _stored(p: ParameterPlan) -> int:
    digits = "".join(c for c in p.dtype if c.isdigit())
    return math.prod(p.local_shape) * (int(digits) // 8 if digits else 1)


def _shape(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape)) or "scalar"
