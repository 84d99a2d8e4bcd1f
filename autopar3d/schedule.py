"""Applying the overlap pass to a step's graphs."""

from __future__ import annotations

from dataclasses import replace

from .passes.overlap import overlap
from .step import Step


def scheduled(step: Step) -> Step:
    """The step with its graphs reordered so that collectives run beside compute."""
    grid, hardware, runs = step.decisions.grid, step.decisions.hardware, step.runs
    return replace(
        step,
        runs=replace(
            runs,
            forward=overlap(runs.forward, grid, hardware),
            inference=overlap(runs.inference, grid, hardware),
            backward=runs.backward and overlap(runs.backward, grid, hardware),
        ),
    )
