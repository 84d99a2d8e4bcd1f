"""Applying the last two passes to a step's graphs: bucket and overlap."""

from __future__ import annotations

import math
from dataclasses import replace

from torch.fx import GraphModule

from .grid import Grid
from .hardware import Hardware
from .passes.bucket import bucket
from .passes.overlap import overlap
from .progress import stage
from .step import Step
from .timeline import timeline

# The predicted peak of memory may rise by this much in all, and by these shares of it for buckets, bold to timid.
_MEMORY = 0.10
_BUCKETS = (0.03, 0.01, 0.0)


@stage("scheduling")
def scheduled(step: Step, mode: bool | str = "auto") -> Step:
    """The step with its graphs reordered so that collectives run beside compute.

    Args:
        mode: see `compile(overlap=)`.
    """
    if mode is False:
        return step
    grid, hardware, runs = step.decisions.grid, step.decisions.hardware, step.runs

    def apply(graph: GraphModule) -> GraphModule:
        return schedule(graph, grid, hardware, anyway=mode is True)

    return replace(
        step,
        runs=replace(
            runs,
            forward=apply(runs.forward),
            inference=apply(runs.inference),
            backward=runs.backward and apply(runs.backward),
        ),
    )


def schedule(graph: GraphModule, grid: Grid, hardware: Hardware, *, anyway: bool = False) -> GraphModule:
    """A forward or backward graph with its small collectives merged, in an order that hides communication.

    Args:
        anyway: also where the predicted time does not get shorter.
    """
    before = timeline(graph, grid, hardware)
    bound = (1.0 + _MEMORY) * before.peak_bytes
    best, least = graph, math.inf if anyway else before.seconds
    for share in _BUCKETS:
        merged = bucket(graph, grid, hardware, memory=share) if share else graph
        if share and merged is graph:
            continue
        room = bound / max(1, timeline(merged, grid, hardware).peak_bytes) - 1.0
        found = overlap(merged, grid, hardware, memory=room, anyway=anyway)
        after = timeline(found, grid, hardware)
        # Usually the first is the best. Where it is not, buckets took the memory that the order needs.
        if after.seconds <= (1.0 if best is graph else 0.99) * least:
            best, least = found, after.seconds
        if after.exposed_seconds <= 0.5 * before.exposed_seconds:
            break
    return best
