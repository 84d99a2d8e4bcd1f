"""The two cost functions, and the account that they make of a step.

Each takes numbers, numpy arrays or sympy expressions: arrays decide (a planner prices all strategies at once), symbols
print. Machines enter as seconds per unit, so that what costs nothing is a zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np

from .hardware import Link


def compute_seconds(flops: Any, moved: Any, per_flop: Any, per_byte: Any) -> Any:
    """A roofline: the longer of its floating point operations and of the bytes it moves to and from memory."""
    return larger(flops * per_flop, moved * per_byte)


def collective_seconds(calls: Any, sent: Any, alpha: Any, beta: Any) -> Any:
    """Collectives one after the other: `alpha` seconds a call, and `beta` seconds per byte that a rank sends."""
    return calls * alpha + sent * beta


def link_seconds(link: Link, sent: float, *, idle: bool = False) -> float:
    """One collective alone on its link.

    Args:
        idle: whether nothing was sent on the link for a while, so that its burst comes on top.
    """
    limited = larger(sent - link.burst, 0.0) if idle else sent
    return float(collective_seconds(1, limited, link.latency, per_unit(link.bandwidth)))


def larger(a: Any, b: Any) -> Any:
    """The larger of two numbers, entry by entry of arrays, or `Max` of expressions."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.maximum(a, b)
    if hasattr(a, "free_symbols") or hasattr(b, "free_symbols"):
        import sympy  # takes long to import, and only printing needs it

        return sympy.Max(a, b)
    return max(a, b)


def per_unit(rate: float) -> float:
    """Seconds per unit at so many units a second; 0 at an infinite rate."""
    return 0.0 if math.isinf(rate) else 1.0 / rate


@dataclass(frozen=True)
class Cost:
    """What one step costs one rank, forward and backward: numbers, or sympy expressions with their `values`.

    Args:
        seconds: computation and exposed communication.
        compute: seconds of computation, op by op.
        communication: per axis, seconds of its collectives one after the other.
        exposed: seconds of communication that compute waits for, by the schedule's share per axis.
        bytes: per axis, bytes that a rank sends.
        flops: of matmuls, convolutions and attention.
        memory: bytes of parameters, gradients, AdamW's state, and of what is kept for backward.
        ops: the same per op, by node name; those of nodes that cost something. Empty in the costs of an op.
        values: per symbol, its value in this plan.
    """

    seconds: Any
    compute: Any
    communication: Mapping[str, Any]
    exposed: Any
    bytes: Mapping[str, Any]
    flops: Any
    memory: Any
    ops: Mapping[str, Cost] = field(default_factory=dict)
    values: Mapping[Any, Any] = field(default_factory=dict)

    def at(self, **values: Any) -> Cost:
        """The cost with symbols replaced by numbers: those given by name (`batch=32, gx=4`), the others by this plan's.

        Only what is left out of the plan's own choices changes: strategies stay as they are.
        """
        known = {s: _exact(values[str(s)]) if str(s) in values else v for s, v in self.values.items()}
        unknown = set(values) - {str(s) for s in self.values}
        if unknown:
            raise KeyError(f"no symbol {', '.join(sorted(unknown))}; there are {', '.join(map(str, self.values))}")

        def number(x: Any) -> float:
            return float(x.xreplace(known)) if hasattr(x, "xreplace") else float(x)

        return Cost(
            number(self.seconds),
            number(self.compute),
            {a: number(x) for a, x in self.communication.items()},
            number(self.exposed),
            {a: number(x) for a, x in self.bytes.items()},
            number(self.flops),
            number(self.memory),
            {name: replace(c, values=self.values).at(**values) for name, c in self.ops.items()},
        )

    def __str__(self) -> str:
        lines = [f"{name:14} {getattr(self, name)}" for name in ("seconds", "compute", "exposed", "flops", "memory")]
        for name in ("communication", "bytes"):
            lines += [f"{name + ' ' + axis:14} {x}" for axis, x in getattr(self, name).items()]
        return "\n".join(lines)


def _exact(value: Any) -> Any:
    import sympy

    exact = Fraction(value)
    return sympy.Rational(exact.numerator, exact.denominator)
