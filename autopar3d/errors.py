"""Every error this library raises on purpose: one class per kind.

A message names the thing (argument, tensor, module), its sizes, the grid axis, the arithmetic that failed, and what to
change. Problems of one kind are collected and raised together where that is possible.
"""

from __future__ import annotations


class AutoPar3DError(Exception):
    """Base class: `except AutoPar3DError` catches everything this library raises on purpose."""


class GridError(AutoPar3DError, ValueError):
    """A grid that does not fit: wrong length, an axis below 1, or a product that is not the world size."""


class LaunchError(AutoPar3DError, RuntimeError):
    """There is no usable process group, or a local launch could not start."""


class RankError(AutoPar3DError, RuntimeError):
    """A rank of a local launch raised, died or did not finish in time. Names the rank and holds its traceback."""


class TraceError(AutoPar3DError, RuntimeError):
    """The model cannot be captured as a graph. Names the user's line and the reason."""


class LayoutError(AutoPar3DError, ValueError):
    """A layout that is not legal for a tensor and a grid, or text that is not a layout."""


class PlanError(AutoPar3DError, ValueError):
    """The request cannot be planned: an unknown scheme, hardware or option, or `strict=True` met a whole tensor."""


class RuleError(AutoPar3DError, ValueError):
    """An op's rule is malformed or does not fit the op it is applied to."""


class InputError(AutoPar3DError, ValueError):
    """A call's inputs do not fit: structure, shape, dtype, or values that differ between ranks."""


class MismatchError(AutoPar3DError, RuntimeError):
    """Ranks disagree about the program (plan hash or graph text), which would hang in a collective."""


class StateError(AutoPar3DError, RuntimeError):
    """Parameters or state were asked for, or loaded, in a way that this module cannot honour."""
