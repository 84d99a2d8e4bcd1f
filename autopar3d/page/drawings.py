"""The page's drawings, as SVG: the cube, the timeline, the memory curve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from autopar3d.reports.tables import byte_text, second_text
from autopar3d.timelines.recording import COLOURS

from .style import AXIS_COLOURS

if TYPE_CHECKING:
    from autopar3d.timelines.recording import Recording, Span

_WIDTH = 1000  # of the timeline and the curve, in the drawing's own units
_LEFT = 72
_ROW = 26
_LABELS = {"matmul": "matmul, attention", "other": "other compute", "wait": "compute waits"}


def cube(grid: tuple[int, int, int]) -> str:
    """The grid as a block of devices, each axis in its colour with its size; large axes are drawn shortened."""
    shown = [min(n, 8) for n in grid]
    step = {"x": (-0.78, 0.45), "y": (1.0, 0.0), "z": (0.0, -1.0)}  # of one place along each axis, on paper
    longest = max(sum(abs(step[a][0]) * n for a, n in zip("xyz", shown, strict=True)), 4.0)
    unit = min(46.0, 250.0 / longest)
    x, y, z = shown

    def at(i: float, j: float, k: float) -> tuple[float, float]:
        return (
            unit * (step["x"][0] * i + step["y"][0] * j + step["z"][0] * k),
            unit * (step["x"][1] * i + step["y"][1] * j + step["z"][1] * k),
        )

    corners = [at(i, j, k) for i in (0, x) for j in (0, y) for k in (0, z)]
    left, top = min(c[0] for c in corners) - 60, min(c[1] for c in corners) - 28
    width, height = max(c[0] for c in corners) + 60 - left, max(c[1] for c in corners) + 34 - top

    def line(a: tuple[float, float, float], b: tuple[float, float, float], colour: str, thick: float) -> str:
        (x1, y1), (x2, y2) = at(*a), at(*b)
        return (
            f'<line x1="{x1 - left:.1f}" y1="{y1 - top:.1f}" x2="{x2 - left:.1f}" y2="{y2 - top:.1f}" '
            f'stroke="{colour}" stroke-width="{thick}" stroke-linecap="round"/>'
        )

    thin: list[str] = []
    for i in range(x + 1):  # the top face, then the front and the right one
        thin.append(line((i, 0, z), (i, y, z), "currentColor", 0.6))
        thin.append(line((i, y, 0), (i, y, z), "currentColor", 0.6))
    for j in range(y + 1):
        thin.append(line((0, j, z), (x, j, z), "currentColor", 0.6))
        thin.append(line((x, j, 0), (x, j, z), "currentColor", 0.6))
    for k in range(z + 1):
        thin.append(line((x, 0, k), (x, y, k), "currentColor", 0.6))
        thin.append(line((0, y, k), (x, y, k), "currentColor", 0.6))
    edges = {
        "x": ((0, y, 0), (x, y, 0), (10, 14)),
        "y": ((x, 0, 0), (x, y, 0), (-8, 20)),
        "z": ((x, 0, 0), (x, 0, z), (-50, 4)),
    }
    thick, labels = [], []
    for (axis, (a, b, (dx, dy))), size in zip(edges.items(), grid, strict=True):
        thick.append(line(a, b, AXIS_COLOURS[axis], 5))
        (x1, y1), (x2, y2) = at(*a), at(*b)
        more = " (8 drawn)" if size > 8 else ""
        where = f'x="{(x1 + x2) / 2 - left + dx:.1f}" y="{(y1 + y2) / 2 - top + dy:.1f}"'
        labels.append(f"<text {where}><tspan font-weight='bold'>{axis}</tspan> = {size}{more}</text>")
    title = f"a grid of {' x '.join(map(str, grid))} devices"
    return (
        f'<svg class="ap3d-grid" role="img" aria-label="{title}" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}">{"".join([*thin, *thick, *labels])}</svg>'
    )


def timeline(recording: Recording) -> str:
    """Compute and each axis as a row over time; what is under the pointer says what it is."""
    rows = ["compute", *recording.axes]
    total = recording.seconds or 1.0
    scale = (_WIDTH - _LEFT) / total
    height = _ROW * len(rows) + 26
    parts = []
    for i, row in enumerate(rows):
        label = row if row == "compute" else f"axis {row}"
        parts.append(f'<text x="0" y="{_ROW * i + 17}">{label}</text>')
        mine = [s for s in recording.spans if ("compute" if s.row == "wait" else s.row) == row]
        for span, count in _drawn(mine, 0.7 / scale):
            kind = "wait" if span.row == "wait" else span.kind
            wide = max(0.7, span.seconds * scale)
            parts.append(
                f'<rect x="{_LEFT + span.start * scale:.1f}" y="{_ROW * i + 3}" width="{wide:.1f}" height="{_ROW - 6}" '
                f'fill="{COLOURS.get(kind, COLOURS["other"])}"><title>{escape(_said(span, count))}</title></rect>'
            )
    parts.append(_ticks(total, scale, _ROW * len(rows)))
    found = {("wait" if s.row == "wait" else s.kind) for s in recording.spans}
    key = "".join(
        f'<span><i style="background:{colour}"></i>{_LABELS.get(k, k.replace("_", "-"))}</span>'
        for k, colour in COLOURS.items()
        if k in found
    )
    label = f"timeline of a step of {second_text(recording.seconds)}"
    return (
        f'<svg class="ap3d-timeline" role="img" aria-label="{label}" viewBox="0 0 {_WIDTH} {height}">{"".join(parts)}'
        f'</svg><div class="ap3d-key">{key}</div>'
    )


def memory(recording: Recording) -> str:
    """Bytes alive over time, with the peak named."""
    total, peak = recording.seconds or 1.0, max(1, recording.peak_bytes)
    scale, top, bottom = (_WIDTH - _LEFT) / total, 24, 164  # above is room for the peak's label
    points, before = [], 0
    for at, held in recording.memory:
        x = _LEFT + at * scale
        points += [(x, before), (x, held)]
        before = held
    points.append((_LEFT + total * scale, before))
    shown = _thinned([(x, bottom - (bottom - top) * n / peak) for x, n in points])
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in shown)
    edge = _LEFT + max(recording.memory, key=lambda m: m[1])[0] * scale
    anchor = "end" if edge > _WIDTH / 2 else "start"
    return (
        f'<svg class="ap3d-memory" role="img" aria-label="memory over a step, at most {byte_text(peak)}" '
        f'viewBox="0 0 {_WIDTH} {bottom + 26}"><text x="0" y="{top + 6}">{byte_text(peak)}</text>'
        f'<text x="0" y="{bottom}">0</text>'
        f'<polygon points="{_LEFT},{bottom} {path} {_WIDTH},{bottom}" fill="{COLOURS["other"]}" '
        f'fill-opacity="0.35"/><polyline points="{path}" fill="none" stroke="var(--curve)" stroke-width="1.5"/>'
        f'<circle cx="{edge:.1f}" cy="{top}" r="4" fill="{COLOURS["all_to_all"]}"/><text x="{edge:.1f}" y="10" '
        f'dx="{-8 if anchor == "end" else 8}" text-anchor="{anchor}">peak {byte_text(peak)}</text>'
        f"{_ticks(total, scale, bottom)}</svg>"
    )


def _drawn(spans: Sequence[Span], least: float) -> list[tuple[Span, int]]:
    """Spans to draw, with how many each stands for: those too short to be seen are joined to the one before."""
    found: list[tuple[Span, int]] = []
    for span in spans:
        if found and span.seconds < least and span.start - found[-1][0].start < least:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((span, 1))
    return found


def _said(span: Span, count: int) -> str:
    what = f"wait for {span.kind} on {span.axis}" if span.row == "wait" else span.kind.replace("_", "-")
    sent = f", sends {byte_text(span.bytes)}" if span.bytes else ""
    more = f" (and {count - 1} more)" if count > 1 else ""
    return f"{span.graph}: {what} {second_text(span.seconds)}{sent}\n{span.module or '(model)'} {span.name}{more}"


def _ticks(total: float, scale: float, at: float) -> str:
    step = 10 ** math.floor(math.log10(total))
    step *= next(m for m in (0.2, 0.5, 1.0, 2.0) if total / (step * m) <= 8)
    parts = []
    for i in range(int(total / step) + 1):
        x = _LEFT + i * step * scale
        parts.append(
            f'<line x1="{x:.1f}" y1="{at}" x2="{x:.1f}" y2="{at + 5}" stroke="currentColor"/>'
            f'<text class="ap3d-faint" x="{x:.1f}" y="{at + 19}" text-anchor="middle">{second_text(i * step)}</text>'
        )
    return "".join(parts)


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most four points for each unit of width: the first, the lowest, the highest and the last; steps stay steps."""
    if len(points) <= 2 * _WIDTH:
        return points
    found: list[tuple[float, float]] = []
    column: list[tuple[float, float]] = []
    for point in points:
        if column and int(point[0]) != int(column[0][0]):
            heights = [y for _, y in column]
            kept = {0, len(column) - 1, heights.index(min(heights)), heights.index(max(heights))}
            found += [column[i] for i in sorted(kept)]
            column = []
        column.append(point)
    return found + column
