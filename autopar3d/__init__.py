"""autopar3d: a PyTorch model in, a GraphModule that trains on a 3-D grid of devices out.

The public names are loaded when they are first asked for, so that `import autopar3d` costs next to nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .advice import check
    from .api import compile, plan, simulate
    from .collectives import Collective, collectives
    from .errors import AutoPar3DError
    from .grid import Grid
    from .hardware import Hardware
    from .layout import Layout
    from .module import ParallelModule
    from .precision import MixedPrecision
    from .ranks.launch import launch
    from .running.lengths import few_lengths
    from .timelines.calibration import calibrate

__version__ = "0.1.0"

__all__ = [
    "AutoPar3DError",
    "Collective",
    "Grid",
    "Hardware",
    "Layout",
    "MixedPrecision",
    "ParallelModule",
    "check",
    "calibrate",
    "collectives",
    "compile",
    "few_lengths",
    "launch",
    "plan",
    "simulate",
]

# Public name -> the module that has it.
_HOMES = {
    "AutoPar3DError": "errors",
    "Collective": "collectives",
    "Grid": "grid",
    "Hardware": "hardware",
    "Layout": "layout",
    "MixedPrecision": "precision",
    "ParallelModule": "module",
    "check": "advice",
    "calibrate": "timelines.calibration",
    "collectives": "collectives",
    "compile": "api",
    "few_lengths": "running.lengths",
    "launch": "ranks.launch",
    "plan": "api",
    "simulate": "api",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
        globals()[name] = value
        return value
    if name.startswith("_") or importlib.util.find_spec(f"{__name__}.{name}") is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f".{name}", __name__)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "errors", "testing"})


class _Face(types.ModuleType):
    """Python binds a submodule to its name in the package when it is imported; `plan`, `launch` and `collectives` are
    functions here, whichever of them is imported first."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (isinstance(value, types.ModuleType) and name in _HOMES):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Face
