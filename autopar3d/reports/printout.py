"""How a plan prints: the sections of `str(plan)`."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ..grid import ALL_AXES
from .tables import WIDTH, Row, byte_text, count_text, fold, in_one_unit, indent, second_text, table, wrapped

if TYPE_CHECKING:
    from ..plan import OpPlan, OutputPlan, ParameterPlan, Plan, Sent

_SHORT = {"all_gather": "AG", "reduce_scatter": "RS", "all_reduce": "AR", "all_to_all": "A2A"}
_SHORT_DTYPES = {"float": "f", "bfloat": "bf", "complex": "c", "int": "i", "uint": "u"}


def render(plan: Plan) -> str:
    """The whole printout."""
    sections = [
        _head(plan),
        _parameters(plan),
        _ops(plan),
        _light(plan),
        _totals(plan),
        _traffic(plan),
        _outputs(plan),
        _candidates(plan),
        _notes(plan),
    ]
    text = "\n\n".join(s for s in sections if s)
    return "\n".join(line.rstrip() for line in text.split("\n"))


# -- sections ----------------------------------------------------------------------------------------------------------


def _head(plan: Plan) -> str:
    axes = " ".join(f"{a}={n}" for a, n in zip("xyz", plan.grid, strict=True))
    axes += f" replicas={plan.replicas}" if plan.replicas > 1 else ""
    options = [f"{k} {v}" for k, v in (("scheme", plan.scheme), ("regather", plan.regather)) if v]
    if plan.lanes > 1:
        options.append(f"{plan.lanes} lanes")
    if plan.inputs:
        options.append(f"{plan.inputs} inputs")
    where = f"grid {axes}: {plan.devices} device{'s' if plan.devices > 1 else ''}"
    found = "proven minimal" if plan.exact else f"at most {_percent(plan.objective, plan.bound)} above the minimum"
    lines = [
        f"Plan {plan.hash[:12]}  " + ", ".join([where, f"hardware {plan.hardware}", *options]),
        f"Predicted step {second_text(plan.seconds)}: compute {second_text(plan.compute)}, exposed communication "
        f"{second_text(sum(plan.exposed.values()))}. Planner's objective {second_text(plan.objective)}, {found}.",
    ]
    if plan.devices > 1:
        shared = f" {plan.replicas} replicas share the batch, as its outermost axis r." if plan.replicas > 1 else ""
        lines.append(wrapped(_LEGEND + shared, WIDTH))
    return "\n".join(lines)


def _percent(cost: float, bound: float) -> str:
    if bound <= 0.0:
        return "an unknown part"
    return f"{math.ceil(1000.0 * (cost / bound - 1.0) - 1e-6) / 10.0:g}%"


_LEGEND = (
    "Layouts name the axes over each dim, outer first; '-' is whole, '+{x}' still a sum over x. Roles: a gathers the "
    "input, b gathers the weight, c reduces the result. Sent: bytes per rank and step, backward included; AG "
    "all-gather, RS reduce-scatter, AR all-reduce, A2A all-to-all."
)


def _parameters(plan: Plan) -> str:
    rows = [_parameter_row(p) for p in plan.parameters]
    header = ("parameter", "shape", "dtype", "stored as", "local", "gathered", "grad summed", "sent")
    return table("Parameters", header, rows, wrap=(0, 7), right=())


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
    return table(title, header, rows, wrap=(0, 7, 5), right=(6, 8))


def _op_row(o: OpPlan) -> Row:
    return (
        o.module or "(model)",
        _op_name(o.op),
        _shape(o.shape),
        o.layout,
        _shape(o.local_shape),
        o.roles or "-",
        count_text(o.flops),
        _sent(o.sent),
        second_text(o.seconds),
    )


def _light(plan: Plan) -> str:
    """The other ops that send, a line for each module."""
    modules: dict[str, list[OpPlan]] = {}
    for o in plan.ops:
        if not o.flops:
            modules.setdefault(o.module or "(model)", []).append(o)
    rows = [
        (
            m,
            _counted(_op_name(o.op) for o in ops),
            _sent(s for o in ops for s in o.sent),
            second_text(sum(o.seconds for o in ops)),
        )
        for m, ops in modules.items()
    ]
    return table("Other ops that send", ("module", "ops", "sent", "time"), rows, wrap=(0, 1, 2), right=(3,))


def _totals(plan: Plan) -> str:
    sizes = {_MEMORY.get(name, name): byte_text(n) for name, n in plan.memory.items() if n}
    memory = table(
        "Memory per rank", tuple(sizes), [tuple(sizes.values())], wrap=range(len(sizes)), right=(), folding=False
    )
    times = {
        "FLOPs forward": count_text(plan.forward_flops),
        "backward": count_text(plan.backward_flops),
        f"x one device / {plan.devices}": f"{plan.flops / plan.ideal_flops:.3f}" if plan.ideal_flops else "-",
        "compute": second_text(plan.compute),
        "communication": "\n".join(f"{a} {second_text(s)}" for a, s in plan.communication.items()) or "-",
        "exposed": "\n".join(f"{a} {second_text(s)}" for a, s in plan.exposed.items()) or "-",
        "step": second_text(plan.seconds),
    }
    time = table("Work per rank", tuple(times), [tuple(times.values())], wrap=(), right=(), folding=False)
    return f"{memory}\n\n{time}"


_MEMORY = {"optimizer": "AdamW", "activations": "saved for backward"}


def _traffic(plan: Plan) -> str:
    if not plan.traffic:
        return ""
    kinds = [k for k in _SHORT if any(s.kind == k for s in plan.traffic)]
    axes = [a for a in ALL_AXES if any(s.axis == a for s in plan.traffic)]
    rows = []
    for axis in [*axes, "all"] if len(axes) > 1 else axes:
        mine = [s for s in plan.traffic if axis in (s.axis, "all")]
        row = [axis, str(sum(n for a, n in plan.calls.items() if axis in (a, "all")))]
        for kind in kinds:
            both = [sum(s.bytes for s in mine if s.kind == kind and (s.phase == "forward") is f) for f in (True, False)]
            row.append(" + ".join(byte_text(n) for n in both) if any(both) else "-")
        row.append(byte_text(sum(s.bytes for s in mine)))
        rows.append(tuple(row))
    header = ("axis", "calls", *(k.replace("_", "-") for k in kinds), "total")
    right = tuple(range(1, len(header)))
    return table("Bytes sent, forward + backward", header, rows, wrap=(), right=right, folding=False)


def _outputs(plan: Plan) -> str:
    if not plan.outputs:
        return ""
    rows = [_output_row(o) for o in plan.outputs]
    return table("Outputs", ("output", "leaves", "shape", "layout", "sent"), rows, wrap=(0, 4), right=())


def _output_row(o: OutputPlan) -> Row:
    return (o.name or "(result)", o.mode, _shape(o.shape), o.layout, _sent(o.sent))


def _candidates(plan: Plan) -> str:
    rows = []
    for c in plan.candidates:
        times = f" x{c.replicas}" if c.replicas > 1 else ""
        grid = "(" + ", ".join(map(str, c.grid)) + ")" + times + (f" +{len(c.same)}" if c.same else "")
        seconds = ["-" if t is None else second_text(t) for t in (c.seconds, c.scheduled, c.compute, c.exposed)]
        sent = "-" if c.bytes is None else byte_text(c.bytes)
        rows.append((grid, *seconds, sent, byte_text(c.memory), c.why))
    title = (
        "Grids considered (xr: r replicas; +n: n others differ in the order of axes only; "
        "kept: weights, gradients, AdamW, saved)"
    )
    header = ("grid", "estimate", "scheduled", "compute", "exposed", "sent", "kept", "why")
    return table(title, header, rows, wrap=(7,), right=(1, 2, 3, 4, 5, 6), folding=False)


def _notes(plan: Plan) -> str:
    reasons: dict[str, list[str]] = {}
    for name, why in plan.whole.items():
        reasons.setdefault(why, []).append(name)
    kept: list[Row] = [(why, ", ".join(r[0] for r in fold([(n,) for n in names]))) for why, names in reasons.items()]
    whole = table("", ("why", "tensors"), kept, wrap=(0, 1), right=(), folding=False)
    lines = [f"Kept whole:\n{indent(whole)}" if whole else "Kept whole: nothing."]
    if plan.repeated:
        rows: dict[tuple[str, str], dict[str, list[str]]] = {}
        for r in plan.repeated:
            # Where masks and positions are made interests nobody.
            where = [] if r.free else [row[0] for row in fold([(m or "(model)",) for m in r.modules])]
            uses = f"{_op_name(r.op)} x{len(r.modules)}" if len(r.modules) > 1 else _op_name(r.op)
            rows.setdefault((r.axes, r.why), {}).setdefault(", ".join(where), []).append(uses)
        lines_of = [
            (*key, "; ".join(", ".join(ops) + (f" in {at}" if at else "") for at, ops in places.items()))
            for key, places in rows.items()
        ]
        lines.append("Computed by every rank along some axes:")
        lines.append(indent(table("", ("axes", "why", "ops"), lines_of, wrap=(1, 2), right=(), folding=False)))
    if plan.without_rule:
        uses = ", ".join(f"{op} ({n} use{'s' if n > 1 else ''})" for op, n in plan.without_rule.items())
        lines.append(wrapped(f"Without a rule, so computed whole: {uses}.", WIDTH))
    else:
        lines.append("Without a rule: nothing.")
    lines += [wrapped(f"Note: {note}", WIDTH) for note in plan.notes]
    return "\n".join(lines)


def _counted(names: Iterable[str]) -> str:
    return ", ".join(f"{name} x{n}" if n > 1 else name for name, n in Counter(names).items())


# -- cells -------------------------------------------------------------------------------------------------------------


def _sent(sent: Iterable[Sent]) -> str:
    """`AG x 12.6, y 3.10 MB`: a line per kind of collective, forward and backward together."""
    together: dict[str, dict[str, float]] = {}
    for s in sent:
        by_axis = together.setdefault(_SHORT[s.kind], {})
        by_axis[s.axis] = by_axis.get(s.axis, 0.0) + s.bytes
    lines = []
    for kind in _SHORT.values():
        if kind in together:
            axes = sorted(together[kind])
            numbers, unit = in_one_unit([together[kind][a] for a in axes])
            lines.append(f"{kind} " + ", ".join(f"{a} {n}" for a, n in zip(axes, numbers, strict=True)) + unit)
    return "\n".join(lines) or "-"


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _dtype(name: str) -> str:
    match = re.fullmatch(r"([a-z]+)(\d+)", name)
    return _SHORT_DTYPES[match[1]] + match[2] if match and match[1] in _SHORT_DTYPES else name


def _op_name(name: str) -> str:
    return {"scaled_dot_product_attention": "attention", "cross_entropy_loss": "cross_entropy"}.get(name, name)
