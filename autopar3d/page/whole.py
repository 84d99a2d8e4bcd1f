"""The page: summary, cube, model, timeline, memory, ranking of grids, notes."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from autopar3d.grid import ALL_AXES
from autopar3d.reports.tables import byte_text, second_text

from . import drawings
from .axes import axes, named
from .modules import table, tree
from .style import STYLE

if TYPE_CHECKING:
    from autopar3d.plan import Plan

_NO_TIMELINE = "<p class='ap3d-faint'>A plan from a file has no timeline; make it anew with autopar3d.plan(...).</p>"


def page(plan: Plan) -> str:
    """One self-contained page: no scripts, nothing is loaded from elsewhere."""
    recording = plan.timeline if plan.timeline is not None and plan.timeline.spans else None
    sections = [
        f"<h1>Plan for a grid of {named(plan, ' × ')}</h1>",
        f"<p class='ap3d-faint'>{plan.devices} devices, hardware {escape(plan.hardware)}, scheme "
        f"{escape(plan.scheme or '-')}, regather {escape(plan.regather or '-')}, {escape(plan.inputs or '-')} inputs; "
        f"plan <code>{plan.hash[:12]}</code></p>",
        tiles(plan),
        "<h2 id='grid'>The grid</h2><div class='ap3d-cube'>",
        drawings.cube(plan.grid),
        f"<div>{axes(plan)}</div></div>",
        "<h2 id='model'>The model</h2><p class='ap3d-faint'>Layouts name the axes over each dim, outer first; '-' is "
        "whole, '+{x}' still a sum over x. Bytes and times are of one rank and step, backward included.</p>",
        f"<div class='ap3d-tree'>{tree(plan)}</div>",
        "<h2 id='timeline'>Timeline, predicted</h2>",
        drawings.timeline(recording) if recording else _NO_TIMELINE,
        "<h2 id='memory'>Memory, predicted</h2>",
        drawings.memory(recording) if recording else _NO_TIMELINE,
        _memory(plan),
        "<h2 id='sent'>Sent</h2>",
        _traffic(plan),
        _ranking(plan),
        _notes(plan),
    ]
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'><meta name='viewport' "
        "content='width=device-width, initial-scale=1'><meta name='color-scheme' content='light dark'>"
        f"<title>Plan {plan.hash[:12]}: {named(plan, ' x ')}</title><style>html, body {{ margin: 0 }} "
        f"main {{ max-width: 1200px; margin: 0 auto; padding: 20px }} {STYLE}</style></head>"
        f"<body class='ap3d'><main>{''.join(sections)}</main></body></html>\n"
    )


def tiles(plan: Plan) -> str:
    """The numbers that matter most."""
    exposed = sum(plan.exposed.values())
    kept = ("parameters", "gradients", "optimizer", "activations")
    share = f"{plan.flops / plan.ideal_flops:.2f} × an even share" if plan.ideal_flops else "-"
    numbers = {
        "predicted step": second_text(plan.seconds),
        "compute": second_text(plan.compute),
        "compute waits": f"{second_text(exposed)} ({exposed / plan.seconds:.0%})" if plan.seconds else "-",
        "sent a rank": byte_text(sum(plan.bytes.values())),
        "kept a rank": byte_text(sum(plan.memory.get(k, 0) for k in kept)),
        "FLOPs a rank": share,
    }
    made = "".join(f"<div class='ap3d-tile'><b>{v}</b>{k}</div>" for k, v in numbers.items())
    return f"<div class='ap3d-tiles'>{made}</div>"


def _memory(plan: Plan) -> str:
    names = {"optimizer": "AdamW", "activations": "saved for backward"}
    header = tuple(names.get(k, k) for k, n in plan.memory.items() if n)
    row = tuple(byte_text(n) for n in plan.memory.values() if n)
    return table(header, [row], right=tuple(range(len(row))))


def _traffic(plan: Plan) -> str:
    kinds = [
        k
        for k in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
        if any(s.kind == k for s in plan.traffic)
    ]
    rows = []
    for axis in ALL_AXES:
        mine = {k: plan.bytes.get((axis, k), 0.0) for k in kinds}
        if any(mine.values()):
            cells = [byte_text(n) if n else "-" for n in mine.values()]
            rows.append((axis, *cells, byte_text(sum(mine.values()))))
    header = ("axis", *(k.replace("_", "-") for k in kinds), "together")
    return table(header, rows, right=tuple(range(1, len(header)))) or "<p>Nothing.</p>"


def _ranking(plan: Plan) -> str:
    if not plan.candidates:
        return ""
    slowest = max(c.seconds or 0.0 for c in plan.candidates) or 1.0
    rows = []
    for c in plan.candidates:
        seconds, exposed = c.seconds or 0.0, c.exposed or 0.0
        busy, waits = 160 * (seconds - exposed) / slowest, 160 * exposed / slowest
        bars = (
            f"<div class='ap3d-bars'><div class='ap3d-bar' style='width:{busy:.0f}px'></div>"
            f"<div class='ap3d-wait' style='width:{waits:.0f}px'></div></div>"
        )
        times = ["-" if t is None else second_text(t) for t in (c.seconds, c.scheduled, c.exposed)]
        numbers = (*times, "-" if c.bytes is None else byte_text(c.bytes), byte_text(c.memory))
        replicas = f", {c.replicas} replicas" if c.replicas > 1 else ""
        rows.append((" × ".join(map(str, c.grid)) + replicas, bars, *numbers, escape(c.why)))
    header = ("grid", "", "estimate", "scheduled", "waits", "sent", "kept", "why")
    return (
        "<h2 id='grids'>Grids considered</h2><div class='ap3d-key'>"
        "<span><i style='background:#0072B2'></i>computes</span>"
        f"<span><i style='background:#E69F00'></i>waits</span></div>{table(header, rows, right=(2, 3, 4, 5, 6))}"
    )


def _notes(plan: Plan) -> str:
    lines = [f"<code>{escape(name)}</code> is kept whole: {escape(why)}" for name, why in plan.whole.items()]
    lines += [f"{escape(op)} has no rule, so it is computed whole ({n} uses)" for op, n in plan.without_rule.items()]
    lines += [
        f"{escape(r.op)} is computed by every rank along {r.axes} ({len(r.modules)} uses): {escape(r.why)}"
        for r in plan.repeated
    ]
    lines += [escape(note) for note in plan.notes]
    listed = "".join(f"<li>{line}</li>" for line in lines) or "<li>Nothing is kept whole or computed twice.</li>"
    return f"<h2 id='notes'>Notes</h2><ul>{listed}</ul>"
