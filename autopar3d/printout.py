"""How a plan prints: tables of at most 120 columns, identical layers on one line, human units."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from tabulate import tabulate

if TYPE_CHECKING:
    from .plan import OpPlan, OutputPlan, ParameterPlan, Plan, Sent

WIDTH = 120

_SHORT = {"all_gather": "AG", "reduce_scatter": "RS", "all_reduce": "AR", "all_to_all": "A2A"}
_SHORT_DTYPES = {"float": "f", "bfloat": "bf", "complex": "c", "int": "i", "uint": "u"}

_BYTES = (" B", " kB", " MB", " GB", " TB")

Row = tuple[str, ...]  # the first cell is a module path, or what else the line is about


def render(plan: Plan) -> str:
    """The whole printout."""
    sections = [_head(plan), _parameters(plan), _ops(plan), _light(plan), _totals(plan), _traffic(plan), _outputs(plan), _notes(plan)]
    text = "\n\n".join(s for s in sections if s)
    return "\n".join(line.rstrip() for line in text.split("\n"))


# -- sections ----------------------------------------------------------------------------------------------------------


def _head(plan: Plan) -> str:
    axes = " ".join(f"{a}={n}" for a, n in zip("xyz", plan.grid, strict=True))
    options = [f"{k} {v}" for k, v in (("scheme", plan.scheme), ("regather", plan.regather)) if v]
    if plan.inputs:
        options.append(f"{plan.inputs} inputs")
    where = f"grid {axes}: {plan.devices} device{'s' if plan.devices > 1 else ''}"
    found = "proven minimal" if plan.exact else "not proven minimal"
    lines = [
        f"Plan {plan.hash[:12]}  " + ", ".join([where, f"hardware {plan.hardware}", *options]),
        f"Predicted step {_seconds(plan.seconds)}: compute {_seconds(plan.compute)}, exposed communication "
        f"{_seconds(sum(plan.exposed.values()))}. Planner's objective {_seconds(plan.cost)}, {found}.",
    ]
    if plan.devices > 1:
        lines.append(_wrapped(_LEGEND, WIDTH))
    return "\n".join(lines)


_LEGEND = (
    "Layouts name the axes over each dim, outer first; '-' is whole, '+{x}' still a sum over x. Roles: a gathers the "
    "input, b gathers the weight, c reduces the result. Sent: bytes per rank and step, backward included; AG "
    "all-gather, RS reduce-scatter, AR all-reduce, A2A all-to-all."
)


def _parameters(plan: Plan) -> str:
    rows = [_parameter_row(p) for p in plan.parameters]
    header = ("parameter", "shape", "dtype", "stored as", "local", "gathered", "grad summed", "sent")
    return _table("Parameters", header, rows, wrap=(0, 7), right=())


def _parameter_row(p: ParameterPlan) -> Row:
    name = p.names[0] + "".join(f" = {n}" for n in p.names[1:])
    shared = "".join(p.reduced) or "-"
    return (
        name,
        _shape(p.shape),
        _dtype(p.dtype),
        p.layout,
        _shape(p.local_shape),
        "".join(p.gathered) or "-",
        shared if p.trained else "no gradient",
        _sent(p.sent),
    )


def _ops(plan: Plan) -> str:
    rows = [_op_row(o) for o in plan.ops if o.flops]
    header = ("module", "op", "result", "layout", "local", "roles", "FLOPs", "sent", "time")
    title = "Matmuls, convolutions, attention (a copy that several ops read is counted at the first; FLOPs of forward)"
    return _table(title, header, rows, wrap=(0, 7, 5), right=(6, 8))


def _op_row(o: OpPlan) -> Row:
    return (
        o.module or "(model)",
        _op_name(o.op),
        _shape(o.shape),
        o.layout,
        _shape(o.local_shape),
        o.roles or "-",
        _count(o.flops),
        _sent(o.sent),
        _seconds(o.seconds),
    )


def _light(plan: Plan) -> str:
    """The other ops that send, a line for each module."""
    modules: dict[str, list[OpPlan]] = {}
    for o in plan.ops:
        if not o.flops:
            modules.setdefault(o.module or "(model)", []).append(o)
    rows = [
        (m, _counted(_op_name(o.op) for o in ops), _sent(s for o in ops for s in o.sent), _seconds(sum(o.seconds for o in ops)))
        for m, ops in modules.items()
    ]
    return _table("Other ops that send", ("module", "ops", "sent", "time"), rows, wrap=(0, 1, 2), right=(3,))


def _totals(plan: Plan) -> str:
    sizes = {_MEMORY.get(name, name): _bytes(n) for name, n in plan.memory.items() if n}
    memory = _table("Memory per rank", tuple(sizes), [tuple(sizes.values())], wrap=range(len(sizes)), right=(), fold=False)
    times = {
        "FLOPs forward": _count(plan.forward_flops),
        "backward": _count(plan.backward_flops),
        f"x one device / {plan.devices}": f"{plan.flops / plan.ideal_flops:.3f}" if plan.ideal_flops else "-",
        "compute": _seconds(plan.compute),
        "communication": "\n".join(f"{a} {_seconds(s)}" for a, s in plan.communication.items()) or "-",
        "exposed": "\n".join(f"{a} {_seconds(s)}" for a, s in plan.exposed.items()) or "-",
        "step": _seconds(plan.seconds),
    }
    time = _table("Work per rank", tuple(times), [tuple(times.values())], wrap=(), right=(), fold=False)
    return f"{memory}\n\n{time}"


_MEMORY = {"optimizer": "AdamW", "activations": "saved for backward"}


def _traffic(plan: Plan) -> str:
    if not plan.traffic:
        return ""
    kinds = [k for k in _SHORT if any(s.kind == k for s in plan.traffic)]
    axes = [a for a in "xyz" if any(s.axis == a for s in plan.traffic)]
    rows = []
    for axis in [*axes, "all"] if len(axes) > 1 else axes:
        mine = [s for s in plan.traffic if axis in (s.axis, "all")]
        row = [axis, str(sum(s.calls for s in mine))]
        for kind in kinds:
            both = [sum(s.bytes for s in mine if s.kind == kind and (s.phase == "forward") is f) for f in (True, False)]
            row.append(" + ".join(_bytes(n) for n in both) if any(both) else "-")
        row.append(_bytes(sum(s.bytes for s in mine)))
        rows.append(tuple(row))
    header = ("axis", "calls", *(k.replace("_", "-") for k in kinds), "total")
    right = tuple(range(1, len(header)))
    return _table("Bytes sent, forward + backward", header, rows, wrap=(), right=right, fold=False)


def _outputs(plan: Plan) -> str:
    if not plan.outputs:
        return ""
    rows = [_output_row(o) for o in plan.outputs]
    return _table("Outputs", ("output", "leaves", "shape", "layout", "sent"), rows, wrap=(0, 4), right=())


def _output_row(o: OutputPlan) -> Row:
    return (o.name or "(result)", o.mode, _shape(o.shape), o.layout, _sent(o.sent))


def _notes(plan: Plan) -> str:
    whole = _table("", ("", ""), list(plan.whole.items()), wrap=(0, 1), right=())
    lines = [f"Kept whole:\n{_indent(whole)}" if whole else "Kept whole: nothing."]
    if plan.repeated:
        rows: dict[tuple[str, str, str], list[str]] = {}
        for r in plan.repeated:
            # Where masks and positions are made interests nobody.
            where = [] if r.free else [row[0] for row in _fold([(m or "(model)",) for m in r.modules])]
            uses = f"{_op_name(r.op)} x{len(r.modules)}" if len(r.modules) > 1 else _op_name(r.op)
            rows.setdefault((r.axes, r.why, ", ".join(where)), []).append(uses)
        table = [(axes, why, ", ".join(ops) + (f" in {at}" if at else "")) for (axes, why, at), ops in rows.items()]
        lines.append("Computed by every rank along some axes:")
        lines.append(_indent(_table("", ("axes", "why", "ops"), table, wrap=(1, 2), right=(), fold=False)))
    if plan.without_rule:
        uses = ", ".join(f"{op} ({n} use{'s' if n > 1 else ''})" for op, n in plan.without_rule.items())
        lines.append(_wrapped(f"Without a rule, so computed whole: {uses}.", WIDTH))
    else:
        lines.append("Without a rule: nothing.")
    return "\n".join(lines)


def _counted(names: Iterable[str]) -> str:
    return ", ".join(f"{name} x{n}" if n > 1 else name for name, n in Counter(names).items())


# -- tables ------------------------------------------------------------------------------------------------------------


def _table(
    title: str,
    header: Sequence[str],
    rows: Sequence[Row],
    *,
    wrap: Sequence[int],
    right: Sequence[int],
    fold: bool = True,
) -> str:
    """A table that fits. `wrap` are the columns whose cells may be broken into lines, `right` those aligned right."""
    if not rows:
        return ""
    folded = _fold(rows) if fold else list(rows)
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
    cells = [tuple(_wrapped(c, w) for c, w in zip(r, columns, strict=True)) for r in folded]
    if any(header):
        # As rows: tabulate would make every column two wider than its header.
        heads = tuple(_wrapped(h, w) for h, w in zip(header, columns, strict=True))
        widths = [max(len(line) for r in (heads, *cells) for line in r[i].split("\n")) for i in range(len(header))]
        cells = [heads, tuple("-" * w for w in widths), *cells]
    align = ["right" if i in right else "left" for i in range(len(header))]
    text = tabulate(cells, tablefmt="plain", disable_numparse=True, colalign=align)
    return f"{title}\n{text}" if title else text


def _indent(text: str) -> str:
    return "\n".join("  " + line for line in text.split("\n"))


def _wrapped(cell: str, width: int) -> str:
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


def _fold(rows: Iterable[Row]) -> list[Row]:
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
    """"0-3" of 0, 1, 2, 3; "0,2-4" of 0, 2, 3, 4."""
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


# -- cells -------------------------------------------------------------------------------------------------------------


def _sent(sent: Iterable[Sent]) -> str:
    """"AG x 12.6, y 3.10 MB": a line per kind of collective, forward and backward together."""
    together: dict[str, dict[str, float]] = {}
    for s in sent:
        by_axis = together.setdefault(_SHORT[s.kind], {})
        by_axis[s.axis] = by_axis.get(s.axis, 0.0) + s.bytes
    lines = []
    for kind in _SHORT.values():
        if kind in together:
            axes = sorted(together[kind])
            numbers, unit = _together([together[kind][a] for a in axes])
            lines.append(f"{kind} " + ", ".join(f"{a} {n}" for a, n in zip(axes, numbers, strict=True)) + unit)
    return "\n".join(lines) or "-"


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _dtype(name: str) -> str:
    match = re.fullmatch(r"([a-z]+)(\d+)", name)
    return _SHORT_DTYPES[match[1]] + match[2] if match and match[1] in _SHORT_DTYPES else name


def _op_name(name: str) -> str:
    return {"scaled_dot_product_attention": "attention", "cross_entropy_loss": "cross_entropy"}.get(name, name)


def _bytes(n: float) -> str:
    return _scaled(n, _BYTES)


def _count(n: float) -> str:
    return _scaled(n, ("", "k", "M", "G", "T", "P", "E"))


def _scaled(n: float, units: Sequence[str]) -> str:
    """Three digits and a unit, by thousands."""
    (number,), unit = _together([n], units)
    return number + unit


def _together(numbers: Sequence[float], units: Sequence[str] = _BYTES) -> tuple[list[str], str]:
    """Several numbers in the unit of the largest."""
    unit, most = 0, max(numbers)
    while most >= 999.5 and unit < len(units) - 1:
        most, unit = most / 1000, unit + 1
    return [_digits(n / 1000**unit) for n in numbers], units[unit]


def _digits(n: float) -> str:
    return f"{n:.{0 if n >= 99.95 or n == int(n) else 1 if n >= 9.995 else 2}f}"


def _seconds(s: float) -> str:
    if s == 0:
        return "0"
    for unit, size in ((" s", 1.0), (" ms", 1e-3), (" us", 1e-6)):
        if s >= 0.9995 * size:
            break
    return _digits(s / size) + unit
