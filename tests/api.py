"""The API reference, from the docstrings: `docs/api.md` is what `reference()` gives, and a test holds it."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

import autopar3d
from autopar3d import errors, testing
from autopar3d.advice import Advice
from autopar3d.collectives import Collective
from autopar3d.hardware import Link
from autopar3d.plan import Candidate, OpPlan, OutputPlan, ParameterPlan, Plan, Repeated, Sent
from autopar3d.timelines.recording import Recording, Span

_HEAD = """# API reference

Made from the docstrings by `python -m tests.test_docs`. Shapes are global unless a text says local; bytes and seconds
are of one rank, and a step is one forward and one backward. The [user guide](user-guide.md) explains.
"""

SECTIONS: dict[str, list[Any]] = {
    "Ways in": [
        autopar3d.compile,
        autopar3d.simulate,
        autopar3d.plan,
        autopar3d.check,
        autopar3d.launch,
        autopar3d.few_lengths,
        autopar3d.calibrate,
    ],
    "The compiled module": [autopar3d.ParallelModule],
    "Grids, layouts, machines": [
        autopar3d.Grid,
        autopar3d.Layout,
        autopar3d.Hardware,
        Link,
        autopar3d.MixedPrecision,
    ],
    "Plans": [Plan, ParameterPlan, OpPlan, OutputPlan, Sent, Repeated, Candidate, Advice, Recording, Span],
    "Graphs": [autopar3d.collectives, Collective],
    "Testing": [
        testing.assert_trains_like_one_device,
        testing.trains_like_one_device,
        testing.grids,
        testing.layouts,
        testing.prove_rule,
    ],
    "Errors": [c for c in vars(errors).values() if inspect.isclass(c) and issubclass(c, errors.AutoPar3DError)],
}


def reference() -> str:
    """The page."""
    parts = [_HEAD]
    for title, things in SECTIONS.items():
        parts.append(f"## {title}\n")
        parts += [_class(t) if inspect.isclass(t) else _function(t, 3) for t in things]
    return "\n".join(parts).rstrip() + "\n"


def _function(function: Any, level: int, owner: str = "") -> str:
    name = f"{owner}{function.__name__}"
    text = _text(inspect.getdoc(function) or "")
    return f"{'#' * level} {name}\n\n```text\n{_signature(name, function)}\n```\n\n{text}\n"


def _class(kind: Any) -> str:
    lines = [f"### {kind.__name__}\n", _text(inspect.getdoc(kind) or "") + "\n"]
    fields = {f.name for f in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    for name, member in vars(kind).items():
        if name.startswith("_") or name in fields:
            continue
        if isinstance(member, property):
            lines.append(f"#### {kind.__name__}.{name}\n\n{_text(inspect.getdoc(member) or '')}\n")
        elif callable(member) or isinstance(member, classmethod | staticmethod):
            function = getattr(kind, name)
            if inspect.getdoc(function):
                lines.append(_function(function, 4, f"{kind.__name__}."))
    return "\n".join(lines)


def _signature(name: str, function: Any) -> str:
    """One argument a line where it is long."""
    found = inspect.signature(function)
    pieces: list[str] = []
    starred = False
    for p in found.parameters.values():
        if p.name in ("self", "cls"):
            continue
        starred = starred or p.kind is p.VAR_POSITIONAL
        if p.kind is p.KEYWORD_ONLY and not starred:
            pieces.append("*")
            starred = True
        stars = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        default = (
            "" if p.default is p.empty else f" = {p.default!r}" if p.annotation is not p.empty else f"={p.default!r}"
        )
        pieces.append(f"{stars}{p.name}{'' if p.annotation is p.empty else f': {p.annotation}'}{default}")
    arrow = "" if found.return_annotation is found.empty else f" -> {found.return_annotation}"
    one = f"{name}({', '.join(pieces)}){arrow}"
    return one if len(one) <= 110 else f"{name}(\n" + "".join(f"    {p},\n" for p in pieces) + f"){arrow}"


def _text(doc: str) -> str:
    """A docstring as Markdown: its sections as lists."""
    out: list[str] = []
    for line in doc.split("\n"):
        section = re.fullmatch(r"(Args|Raises|Returns|Attributes):", line)
        if section:
            out.append(f"**{section[1]}**\n")
        elif re.match(r"    \S", line):
            item = re.match(r"    ([\w*, ]+): (.*)", line)
            out.append(f"- `{item[1]}`: {item[2]}" if item else f"- {line.strip()}")
        elif line.startswith("        "):
            out.append("  " + line.strip())
        else:
            out.append(line)
    return "\n".join(out).replace("\n\n\n", "\n\n").rstrip()
