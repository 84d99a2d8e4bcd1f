"""Tables of at most 120 columns, identical layers on one line, human units: what plans are printed with."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from tabulate import tabulate

WIDTH = 120

Row = tuple[str, ...]  # the first cell is a module path, or what else the line is about

_SECONDS = ((" s", 1.0), (" ms", 1e-3), (" us", 1e-6))
BYTES = (" B", " kB", " MB", " GB", " TB")


def table(
    title: str,
    header: Sequence[str],
    rows: Sequence[Row],
    *,
    wrap: Sequence[int],
    right: Sequence[int],
    folding: bool = True,
) -> str:
    """A table that fits. `wrap` are the columns whose cells may be broken into lines, `right` those aligned right."""
    if not rows:
        return ""
    folded = fold(rows) if folding else list(rows)
    width = WIDTH - 2 if not title else WIDTH
    columns = [
        max(len(line) for cell in (header[i], *(r[i] for r in folded)) for line in cell.split("\n"))
        for i in range(len(header))
    ]
    spare = width - 2 * (len(header) - 1)
    flexible = list(wrap)
    while sum(columns) > spare:
        candidates = [i for i in flexible if columns[i] > 12] or [max(range(len(columns)), key=lambda i: columns[i])]
        columns[max(candidates, key=lambda i: columns[i])] -= 1
    cells = [tuple(wrapped(c, w) for c, w in zip(r, columns, strict=True)) for r in folded]
    if any(header):
        # As rows: tabulate would make every column two wider than its header.
        heads = tuple(wrapped(h, w) for h, w in zip(header, columns, strict=True))
        widths = [max(len(line) for r in (heads, *cells) for line in r[i].split("\n")) for i in range(len(header))]
        cells = [heads, tuple("-" * w for w in widths), *cells]
    align = ["right" if i in right else "left" for i in range(len(header))]
    text = tabulate(cells, tablefmt="plain", disable_numparse=True, colalign=align)
    return f"{title}\n{text}" if title else text


def indent(text: str) -> str:
    return "\n".join("  " + line for line in text.split("\n"))


def wrapped(cell: str, width: int) -> str:
    """The cell in lines of at most `width`, broken where it reads best: after ", ", a space, or within a path."""
    lines = []
    for line in cell.split("\n"):
        while len(line) > width:
            ends = {p: [m.end() for m in re.finditer(p, line[: width + 1])] for p in (", ", " ", r"[,./}\])_]")}
            fits = [max(good) for p, found in ends.items() if (good := [e for e in found if e <= width or " " in p])]
            at = next((e for e in fits if e > width // 3), width)
            lines.append(line[:at].rstrip())
            line = line[at:].lstrip()
        lines.append(line)
    return "\n".join(lines)


def fold(rows: Iterable[Row]) -> list[Row]:
    """One row for rows that differ only in one component of the path in their first cell.

    `blocks.0.up`, ..., `blocks.11.up` become `blocks.0-11.up (x12)`; `up.weight` and `up.bias` become
    `up.{weight,bias} (x2)`.
    """
    lines = [(tuple(re.findall(r"\d+|\w+|\W+", r[0])), r[1:], 1) for r in rows]
    depth = max((len(path) for path, _, _ in lines), default=0)
    for i in range(depth):
        lines = _merge(lines, i, str.isdigit, _ranges)
    for i in reversed(range(depth)):
        lines = _merge(lines, i, lambda part: part.isidentifier(), _braces)
    return [("".join(path) + (f" (x{n})" if n > 1 else ""), *cells) for path, cells, n in lines]


_Line = tuple[tuple[str, ...], Row, int]


def _merge(
    lines: list[_Line], i: int, mergeable: Callable[[str], bool], joined: Callable[[list[str]], str]
) -> list[_Line]:
    """Merge the lines that are equal but for component `i` of their paths."""
    groups: dict[object, list[_Line]] = {}
    for number, line in enumerate(lines):
        path, cells, n = line
        alike = i < len(path) and mergeable(path[i])
        # Lines of different counts stay apart: "(x3)" of several counts would not say of what.
        key = (path[:i], path[i + 1 :], cells, n) if alike else number
        groups.setdefault(key, []).append(line)
    out = []
    for group in groups.values():
        path, cells, _ = group[0]
        if len(group) > 1:
            path = (*path[:i], joined([p[i] for p, _, _ in group]), *path[i + 1 :])
        out.append((path, cells, sum(n for _, _, n in group)))
    return out


def _ranges(parts: list[str]) -> str:
    """0, 1, 2, 3 is `0-3`; 0, 2, 3, 4 is `0,2-4`."""
    runs: list[list[int]] = []
    for n in sorted({int(p) for p in parts}):
        if runs and runs[-1][-1] == n - 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def _braces(parts: list[str]) -> str:
    names = list(dict.fromkeys(parts))
    return names[0] if len(names) == 1 else "{" + ",".join(names) + "}"


# -- units -----------------------------------------------------------------------------------------------------------


def byte_text(n: float) -> str:
    return _scaled(n, BYTES)


def count_text(n: float) -> str:
    return _scaled(n, ("", "k", "M", "G", "T", "P", "E"))


def _scaled(n: float, units: Sequence[str]) -> str:
    """Three digits and a unit, by thousands."""
    (number,), unit = in_one_unit([n], units)
    return number + unit


def in_one_unit(numbers: Sequence[float], units: Sequence[str] = BYTES) -> tuple[list[str], str]:
    """Several numbers in the unit of the largest."""
    unit, most = 0, max(numbers)
    while most >= 999.5 and unit < len(units) - 1:
        most, unit = most / 1000, unit + 1
    return [_digits(n / 1000**unit) for n in numbers], units[unit]


def _digits(n: float) -> str:
    return f"{n:.{0 if n >= 99.95 or n == int(n) else 1 if n >= 9.995 else 2}f}"


def second_text(s: float) -> str:
    if s == 0:
        return "0"
    unit, size = next((u for u in _SECONDS if s >= 0.9995 * u[1]), _SECONDS[-1])
    return _digits(s / size) + unit
