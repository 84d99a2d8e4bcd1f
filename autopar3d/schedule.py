"""Applying the last two passes to a step's graphs: bucket and overlap; and whether to do so in one lane or in two."""

from __future__ import annotations

import math
from dataclasses import replace

from torch.fx import GraphModule

from .collectives import collectives
from .errors import PlanError
from .grid import Grid
from .hardware import Hardware
from .passes.bucket import bucket
from .passes.overlap import overlap
from .progress import stage
from .reports.tables import second_text
from .step import Options, Step, split_batch
from .timelines.timeline import timeline

# The predicted peak of memory may rise by this much in all, and by these shares of it for buckets, bold to timid.
_MEMORY = 0.10
_BUCKETS = (0.03, 0.01, 0.0)


# Two lanes must be predicted to take at most this share of one lane's time: halved ops lose a little that no
# prediction knows of.
_GAIN = 0.98


def in_best_lanes(step: Step, options: Options) -> Step:
    """A step of one lane, scheduled, in as many lanes as the options ask for.

    Raises:
        PlanError: two are asked for, and the batch cannot be split.
    """
    if options.lanes not in (1, "auto"):
        return scheduled(split_batch(step, options, int(options.lanes)), options.overlap)
    one = scheduled(step, options.overlap)
    if options.lanes == 1:
        return one
    if options.overlap is False:
        return replace(one, note="lanes: 1, as overlap=False lets nothing run beside anything")
    if not any(collectives(graph) for graph in _graphs(step)):
        return one
    try:
        two = scheduled(split_batch(step, options, 2), options.overlap)
    except PlanError as error:
        return replace(one, note=f"lanes: 1, as {error}")
    alone, together = _seconds(one), _seconds(two)
    said = f"predicted to take {second_text(together)} in two lanes and {second_text(alone)} in one"
    if together <= _GAIN * alone:
        return replace(two, note=f"lanes: 2, as the step is {said}")
    return replace(one, note=f"lanes: 1, as the step is {said}")


def _graphs(step: Step) -> list[GraphModule]:
    return [step.runs.forward, *([step.runs.backward] if step.runs.backward is not None else [])]


def _seconds(step: Step) -> float:
    return sum(timeline(g, step.decisions.grid, step.decisions.hardware).seconds for g in _graphs(step))


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
