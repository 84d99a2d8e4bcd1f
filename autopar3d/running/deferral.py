"""Gradients that `ParallelModule.no_sync` holds back, unreduced, until a backward outside of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..errors import StateError
from ..passes.defer import Deferred

Run = Callable[[Any, Sequence[Any]], list[Any]]


@dataclass
class Held:
    """Sums of unreduced values; `versions` of the parameters when they were made, `finish` turns one that is reduced
    into the gradient of which parameter."""

    values: list[Any]
    versions: list[int]
    now: Callable[[], list[int]]
    finish: Callable[[int, Any], tuple[Tensor, Tensor]]


@dataclass
class Deferral:
    """Of one module: whether gradients are held back now, and what is held, by the graphs that reduce it."""

    on: bool = False
    held: dict[Deferred, Held] = field(default_factory=dict)

    def backward(self, split: Deferred, run: Run, values: Sequence[Any], held: Held) -> dict[int, Any]:
        """Run a backward: the gradients that are complete, by their position.

        Args:
            held: with no values yet.

        Raises:
            StateError: parameters were changed while gradients were held.
        """
        if any(h.now() != h.versions for h in self.held.values()):
            self.held.clear()
            raise StateError(
                "parameters were changed while no_sync() held gradients back, which no optimizer has seen: run the "
                "last micro-batch's backward outside of no_sync(), and then optimizer.step(). What was held is dropped"
            )
        out = run(split.local, values)
        grads = dict(zip(split.kept, out, strict=False))
        held.values = out[len(split.kept) :]
        before = self.held.pop(split, None)
        if before is not None:
            held.values = [_sum(a, b) for a, b in zip(before.values, held.values, strict=True)]
        if self.on:
            if split.deferred:
                self.held[split] = held
            return grads
        if split.deferred:
            grads.update(zip(split.deferred, run(split.reduce, held.values), strict=True))
        # Calls of other shapes, whose values add up with these only when reduced.
        for other, left in self.held.items():
            for position, value in zip(other.deferred, run(other.reduce, left.values), strict=True):
                parameter, grad = left.finish(position, value)
                parameter.grad = grad if parameter.grad is None else parameter.grad + grad
        self.held.clear()
        return grads


def _sum(a: Any, b: Any) -> Any:
    """Of a local tensor, or one per rank."""
    return [x + y for x, y in zip(a, b, strict=True)] if isinstance(a, list) else a + b
