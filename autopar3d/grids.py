"""Choosing the grid: every way to lay so many devices out, planned and compared by predicted step time.

Each grid is planned, its layouts are written out, and its step is estimated (`estimate`). The best few, as many as a
model of this size allows, are emitted and scheduled, and of these the fastest is taken. Grids whose axes have the same
sizes on the same links are one candidate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from . import padding
from .errors import GridError
from .estimate import Estimate, estimate
from .factors import Factors
from .grid import Grid, factorisations
from .hardware import Hardware
from .passes.rewrite import rewrite
from .plan import Candidate, Decisions
from .program import Program
from .progress import stage
from .schedule import scheduled
from .step import Options, Step, build_step, decide
from .tables import byte_text, second_text
from .timeline import timeline

# So many candidates are scheduled: up to `_MOST`, of graphs with this many nodes together.
_MOST = 4
_NODES = 4000


@dataclass(frozen=True)
class Chosen:
    """The winner, emitted and scheduled, and all candidates, best first."""

    grid: Grid
    options: Options
    step: Step
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True)
class _Trial:
    grid: Grid
    options: Options
    factors: Factors
    decisions: Decisions
    estimate: Estimate
    same: tuple[str, ...]


def choose(program: Program, world_size: int, hardware: Hardware, options: Options) -> Chosen:
    """The grid of `world_size` devices with the shortest predicted step.

    Raises:
        GridError: `world_size` is not a whole number of at least 1.
        PlanError: as `build_step`.
    """
    if world_size < 1:
        raise GridError(f"world_size={world_size}: it needs at least one device")
    factors = Factors(program.graph.graph)
    trials = []
    grids = list(distinct(world_size, hardware))
    with stage("comparing grids", len(grids)) as step_done:
        for number, (grid, same) in enumerate(grids):
            step_done(number)
            trials.append(_tried(program, grid, same, hardware, options, factors))
    trials.sort(key=lambda t: (t.estimate.seconds, sum(t.estimate.memory.values()), t.grid.sizes))
    count = max(1, min(_MOST, _NODES // max(1, len(program.graph.graph.nodes))))
    built = [(t, _emit(program, hardware, t)) for t in trials[:count]]
    times = [_seconds(step) for _, step in built]
    order = sorted(range(len(built)), key=lambda i: times[i])
    first, step = built[order[0]]
    ranked = [(built[i][0], times[i]) for i in order] + [(t, None) for t in trials[count:]]
    candidates = tuple(_candidate(t, time, first, times[order[0]]) for t, time in ranked)
    return Chosen(first.grid, first.options, step, candidates)


def _tried(
    program: Program, grid: Grid, same: tuple[str, ...], hardware: Hardware, options: Options, factors: Factors
) -> _Trial:
    found, decisions = padding.best(factors, grid, partial(_decide, program, grid, hardware, options))
    local = rewrite(program, found, decisions, regather=options.regather)
    guess = estimate(program, found, decisions, local, regather=options.regather)
    return _Trial(grid, options, found, decisions, guess, same)


def _decide(program: Program, grid: Grid, hardware: Hardware, options: Options, factors: Factors) -> Decisions:
    return decide(program, factors, grid, hardware, options)


def distinct(world_size: int, hardware: Hardware) -> Iterator[tuple[Grid, tuple[str, ...]]]:
    """Every grid that differs from the others in more than the order of its axes, and those it stands for."""
    alike: dict[object, list[Grid]] = {}
    for sizes in sorted(factorisations(world_size), reverse=True):
        grid = Grid(*sizes)
        links = [(grid.axis_size(a), hardware.link(a, grid)) for a in grid.axes]
        key = tuple(sorted((n, k.latency, k.bandwidth) for n, k in links))
        alike.setdefault(key, []).append(grid)
    for first, *others in alike.values():
        yield first, tuple(str(g) for g in others)


def _emit(program: Program, hardware: Hardware, trial: _Trial) -> Step:
    decided = trial.factors, trial.decisions
    step = build_step(program, trial.grid, hardware, trial.options, decided=decided)
    return scheduled(step, trial.options.overlap)


def _seconds(step: Step) -> float:
    graphs = [step.runs.forward, *([step.runs.backward] if step.runs.backward is not None else [])]
    return sum(timeline(g, step.decisions.grid, step.decisions.hardware).seconds for g in graphs)


def _candidate(trial: _Trial, scheduled_seconds: float | None, best: _Trial, best_seconds: float) -> Candidate:
    e = trial.estimate
    if trial is best:
        why = "chosen"
    elif scheduled_seconds is not None and e.seconds <= best.estimate.seconds:
        why = f"{second_text(scheduled_seconds - best_seconds)} slower when scheduled"
    else:
        why = _why(trial, best)
    return Candidate(
        grid=trial.grid.sizes,
        regather=trial.options.regather,
        seconds=e.seconds,
        scheduled=scheduled_seconds,
        compute=e.compute,
        exposed=sum(e.exposed.values()),
        bytes=sum(e.bytes.values()),
        memory=sum(e.memory.values()),
        why=why,
        same=trial.same,
    )


def _why(trial: _Trial, best: _Trial) -> str:
    """What costs a candidate its time, the largest first."""
    mine, least = trial.estimate, best.estimate
    parts = [(mine.compute - least.compute, "more computation")]
    waits, least_waits = sum(mine.exposed.values()), sum(least.exposed.values())
    worst = max(mine.exposed, key=lambda a: mine.exposed[a], default="")
    parts.append((waits - least_waits, f"more waiting, most for {worst}"))
    said = [f"{second_text(t)} {what}" for t, what in sorted(parts, reverse=True) if t > 0.01 * least.seconds]
    if not said:
        more = sum(mine.bytes.values()) - sum(least.bytes.values())
        return f"sends {byte_text(more)} more" if more > 0 else "as good"
    return ", ".join(said)
