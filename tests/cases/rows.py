"""A file of cases: how a row becomes a model, what runs around it, and when two answers are the same.

A row has `id`, `grids` and `model_code`, which defines `make() -> (model, args, kwargs, loss_fn)`; it may have
`driver_code`, which defines `drive(model, args, kwargs, loss_fn, api) -> dict`, `tol`, and `expect_error` with
`error_should_say`.
"""

from __future__ import annotations

import json
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Made = tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any], Callable[[Any], Tensor]]

_TOLERANCES = {torch.float64: 1e-10, torch.complex128: 1e-10, torch.float32: 1e-5, torch.complex64: 1e-5}
_COARSE = 2e-2  # bfloat16 and float16


@dataclass(frozen=True)
class Case:
    """One row."""

    id: str
    grids: tuple[tuple[int, ...], ...]
    model_code: str
    driver_code: str = ""
    tol: float | None = None
    expect_error: bool = False
    error_should_say: str = ""
    inputs: str = ""

    @property
    def world(self) -> int | None:
        """The number of ranks that the row asks for, whatever the grid."""
        found = re.search(r"run with (\d+) ranks", self.inputs)
        return int(found[1]) if found else None

    @property
    def differs_by_rank(self) -> bool:
        """Whether the ranks' own environment decides what they compute, so that one process cannot show it."""
        return "RANK" in self.model_code

    def make(self) -> Made:
        """Model, inputs and loss, the same at every call."""
        return _module(self.id, self.model_code)["make"]()

    def drive(self, made: Made, api: Any) -> dict[str, Any]:
        """What the row's driver reports, nothing where there is none."""
        if not self.driver_code:
            return {}
        return dict(_module(f"{self.id} (driver)", self.driver_code)["drive"](*made, api))


def load(path: Path) -> list[Case]:
    """The rows of a file."""
    fields = set(Case.__dataclass_fields__)
    cases = []
    for line in path.read_text().splitlines():
        if line.strip():
            row = {k: v for k, v in json.loads(line).items() if k in fields}
            cases.append(Case(**{**row, "grids": tuple(map(tuple, row["grids"]))}))
    return cases


def _module(name: str, code: str) -> dict[str, Any]:
    """The code, run as a module of its own: dataclasses look theirs up in `sys.modules`."""
    module = types.ModuleType(f"case_{abs(hash((name, code)))}")
    sys.modules[module.__name__] = module
    exec(compile(code, f"<{name}>", "exec"), module.__dict__)
    return module.__dict__


def differences(name: str, found: Any, wanted: Any, tol: float | None, scale: float = 0.0) -> list[str]:
    """Where an answer is not the wanted one: tensors within a tolerance, everything else exactly.

    Args:
        tol: of `max|found - wanted| / max(max|wanted|, scale)`; by dtype where None.
        scale: see `tol`.
    """
    if isinstance(wanted, Tensor) or isinstance(found, Tensor):
        return _tensors(name, found, wanted, tol, scale)
    if isinstance(wanted, Mapping) and isinstance(found, Mapping):
        if list(map(str, wanted)) != list(map(str, found)) and set(wanted) != set(found):
            return [f"{name}: has {sorted(map(str, found))}, not {sorted(map(str, wanted))}"]
        return [d for k in wanted for d in differences(f"{name}.{k}", found[k], wanted[k], tol, scale)]
    if isinstance(wanted, (list, tuple)) and isinstance(found, (list, tuple)):
        if len(wanted) != len(found) or type(wanted) is not type(found):
            return [f"{name}: {type(found).__name__} of {len(found)}, not {type(wanted).__name__} of {len(wanted)}"]
        pairs = enumerate(zip(found, wanted, strict=True))
        return [d for i, (f, w) in pairs for d in differences(f"{name}.{i}", f, w, tol, scale)]
    if hasattr(wanted, "__dataclass_fields__") and type(wanted) is type(found):
        return differences(name, vars(found), vars(wanted), tol, scale)
    if type(wanted).__name__ != type(found).__name__ or found != wanted:
        return [f"{name}: {found!r}, not {wanted!r}"]
    return []


def coarsest(values: Iterable[Any]) -> float | None:
    """The widest of the values' tolerances: a double is no better than the floats that it was computed from."""
    dtypes = {v.dtype for v in values if isinstance(v, Tensor) and (v.is_floating_point() or v.is_complex())}
    return max((_TOLERANCES.get(dtype, _COARSE) for dtype in dtypes), default=None)


def _tensors(name: str, found: Any, wanted: Any, tol: float | None, scale: float) -> list[str]:
    if not (isinstance(found, Tensor) and isinstance(wanted, Tensor)):
        return [f"{name}: {_kind(found)}, not {_kind(wanted)}"]
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return [f"{name}: {_kind(found)}, not {_kind(wanted)}"]
    found, wanted = found.detach().cpu(), wanted.detach().cpu()
    if torch.equal(found, wanted):
        return []
    if not (wanted.is_floating_point() or wanted.is_complex()):
        return [f"{name}: {int((found != wanted).sum())} of {wanted.numel()} differ"]
    if not torch.equal(found.isnan(), wanted.isnan()) or not torch.equal(found.isinf(), wanted.isinf()):
        return [f"{name}: not finite where it should be, or the reverse"]
    wide = torch.complex128 if wanted.is_complex() else torch.float64
    finite = wanted.isfinite()
    gap = (found.to(wide) - wanted.to(wide))[finite].abs()
    error = float(gap.max()) if gap.numel() else 0.0
    size = max(float(wanted[finite].abs().max()) if finite.any() else 0.0, scale)
    allowed = (_TOLERANCES.get(wanted.dtype, _COARSE) if tol is None else tol) * size
    return [] if error <= allowed else [f"{name}: off by {error:.2e} where {allowed:.2e} is allowed"]


def _kind(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def says(message: str, wanted: str) -> str:
    """What of an expectation in prose an error lacks: "" where it names all that is quoted and speaks of the rest.

    A name in single quotes must stand in the message; of the other words of some length, one in three.
    """
    for name in re.findall(r"'([\w.\[\]]+)'", wanted):
        if name not in message:
            return f"does not name {name!r}"
    stems = {word[:5] for word in re.findall(r"[a-z]{5,}", wanted.lower())}
    spoken = {word[:5] for word in re.findall(r"[a-z]{5,}", message.lower())}
    if stems and len(stems & spoken) * 3 < len(stems):
        return f"speaks of {sorted(stems & spoken)} only, out of {sorted(stems)}"
    return ""
