"""Whether data from a file has the types that a dataclass declares."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any


def problems(kind: Any, value: Any, where: str) -> list[str]:
    """What in a value is not of its declared type; JSON's ints pass for floats.

    Args:
        kind: a dataclass, int, float, str, bool, None, a tuple, a dict, or a union of these. Other kinds are not
            looked into.
        where: the value's name, for the messages.
    """
    origin, of = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        if type(value) is not kind:
            return [_said(where, kind, value)]
        hints = typing.get_type_hints(kind)
        held = {f.name: getattr(value, f.name) for f in dataclasses.fields(kind)}
        return [p for name, v in held.items() for p in problems(hints[name], v, f"{where}.{name}".lstrip("."))]
    if origin in (types.UnionType, typing.Union):
        return [] if any(not problems(k, value, where) for k in of) else [_said(where, kind, value)]
    if origin is tuple:
        kinds = of[:1] * len(value) if isinstance(value, tuple) and of[-1] is Ellipsis else of
        if not isinstance(value, (tuple, list)) or len(value) != len(kinds):
            return [_said(where, kind, value)]
        return [p for i, (k, v) in enumerate(zip(kinds, value, strict=True)) for p in problems(k, v, f"{where}[{i}]")]
    if origin is dict:
        if not isinstance(value, Mapping):
            return [_said(where, kind, value)]
        return [p for k, v in value.items() for p in problems(of[1], v, f"{where}[{k!r}]")]
    if kind is float:
        fits = isinstance(value, (int, float)) and not isinstance(value, bool)
    elif kind is int:
        fits = isinstance(value, int) and not isinstance(value, bool)
    else:
        fits = kind not in (str, bool, types.NoneType) or isinstance(value, kind)
    return [] if fits else [_said(where, kind, value)]


def _said(where: str, kind: Any, value: Any) -> str:
    name = getattr(kind, "__name__", str(kind)) if typing.get_origin(kind) is None else str(kind)
    return f"{where} is {value!r}, which is no {name}"
