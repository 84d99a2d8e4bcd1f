"""Choosing the grid: every way to lay so many devices out, planned and compared by predicted step time.

Each grid, with every number of replicas, is planned exactly. The plans with the least objective, as many as a model of
this size allows, are written out and their step is estimated (`estimate`), with what runs beside what. The best few of
these are emitted and scheduled, and the fastest is taken. Grids whose axes have the same sizes on the same links are
one candidate. What would not fit into a device's memory comes last.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..errors import GridError, PlanError
from ..grid import REPLICAS, Grid, factorisations
from ..hardware import Hardware
from ..passes.rewrite import moves
from ..plan import Candidate, Decisions
from ..program import Program
from ..progress import stage
from ..reports.report import make_plan
from ..reports.tables import byte_text, second_text
from ..schedule import in_best_lanes
from ..step import Options, Step, build_step, decide, decide_within
from ..timelines.timeline import timeline
from . import padding
from .estimate import Estimate, estimate, memory
from .factors import Factors

# So many candidates are scheduled: up to `_MOST`, of graphs with this many nodes together.
_MOST = 4
_NODES = 4000
# So many have their step estimated: at least these, and of graphs with this many nodes together.
_FEWEST = 12
_ESTIMATED = 30_000
# With a memory budget, so many that should fit are emitted in search of one that does.
_TRIES = 6
# So often is one of them made smaller, until it fits.
_ATTEMPTS = 4


@dataclass(frozen=True)
class Chosen:
    """The winner, emitted and scheduled, and all candidates, best first."""

    grid: Grid
    options: Options
    step: Step
    candidates: tuple[Candidate, ...]
    note: str = ""


@dataclass(frozen=True)
class _Trial:
    grid: Grid
    options: Options
    factors: Factors
    decisions: Decisions
    memory: dict[str, int]  # as `Estimate.memory`
    estimate: Estimate | None  # None where the objective alone put it behind
    same: tuple[str, ...]
    how: str = ""  # what makes it smaller than the fastest plan

    @property
    def fixed(self) -> int:
        return sum(self.memory[k] for k in ("parameters", "gradients", "optimizer"))

    @property
    def kept(self) -> int:
        return sum(self.memory.values())

    @property
    def rank(self) -> tuple[float, ...]:
        """Sorts by predicted time. What was not estimated comes behind, by objective."""
        if self.estimate is None:
            return (1.0, self.decisions.cost)
        return (0.0, self.estimate.seconds)


@dataclass(frozen=True)
class _Built:
    """A trial, emitted and scheduled; `memory` as in a plan, where there is a budget."""

    trial: _Trial
    step: Step
    seconds: float
    memory: dict[str, int]

    @property
    def needed(self) -> int:
        return self.memory.get("needed", 0)

    @property
    def recomputing(self) -> float:
        """Seconds in which backward computes values again that were not saved."""
        return self.step.runs.recomputing


def choose(
    program: Program, grids: Sequence[tuple[Grid, tuple[str, ...]]], hardware: Hardware, options: Options
) -> Chosen:
    """Of some grids, and with regather="auto" of all ways to keep or gather again, the shortest predicted step.

    Args:
        grids: each with those it stands for, see `distinct`.

    Raises:
        PlanError: as `build_step`; or nothing fits into `options.memory_budget`.
    """
    factors = Factors(program.graph.graph)
    groups = functools.cache(lambda: padding.classes(factors))
    levels = ("none", "weights", "all") if options.regather == "auto" else (options.regather,)
    trials = []
    with stage("comparing grids", len(grids)) as step_done:
        for number, (grid, same) in enumerate(grids):
            step_done(number)
            for level in levels:
                trials.append(_tried(program, grid, same, hardware, replace(options, regather=level), factors, groups))
        nodes = max(1, len(program.graph.graph.nodes))
        room = hardware.capacity if options.memory_budget is None else math.inf
        trials.sort(key=lambda t: (t.kept > room, t.decisions.cost))
        compared = max(_FEWEST, _ESTIMATED // nodes)
        trials = [_estimated(program, t) if i < compared else t for i, t in enumerate(trials)]
    trials.sort(key=lambda t: (t.kept > hardware.capacity, t.rank, t.kept, t.grid.replicas, t.grid.sizes))
    count = max(1, min(_MOST, _NODES // nodes))
    budget = options.memory_budget
    built = _fitting(program, hardware, trials, count, budget)
    found = [b for b in built if budget is None or b.needed <= budget]
    if not found:
        assert budget is not None
        raise PlanError(_too_large(min(built, key=lambda b: b.needed), budget))
    found.sort(key=lambda b: b.seconds)
    first = found[0]
    rest = sorted((b for b in built if b not in found), key=lambda b: b.seconds)
    emitted = {(b.trial.grid, b.trial.options.regather) for b in built}
    others = [(t, None) for t in trials if (t.grid, t.options.regather) not in emitted]
    ranked = [*((b.trial, b) for b in (*found, *rest)), *others]
    candidates = tuple(_candidate(t, b, first, budget, hardware) for t, b in ranked)
    note = ""
    if budget is not None:
        note = _note(first, trials, budget)
    return Chosen(first.trial.grid, first.trial.options, first.step, candidates, note)


def _note(first: _Built, trials: Sequence[_Trial], budget: int) -> str:
    """What the bound on memory has cost."""
    how = f", {first.trial.how}" if first.trial.how else ""
    if first.recomputing:
        how += f" ({second_text(first.recomputing)} of computation)"
    said = f"memory_budget {byte_text(budget)}: {byte_text(first.needed)} are needed, with regather="
    said += f"{first.trial.options.regather!r}{how}. "
    least, decisions = min(t.decisions.bound for t in trials), first.trial.decisions
    cost = decisions.cost + first.recomputing
    above = 100.0 * (cost / least - 1.0) if least > 0.0 else 0.0
    said += f"The planner's objective is {second_text(cost)}; no plan that fits has less than {second_text(least)}, "
    said += f"the least without a budget: the gap is at most {max(0.0, above):.1f}%."
    if first.trial.how.startswith("layouts"):
        said += f" Of layouts that keep no more, none has less than {second_text(decisions.bound)}."
    return said


def _fitting(
    program: Program, hardware: Hardware, trials: list[_Trial], count: int, budget: int | None
) -> list[_Built]:
    """The first candidates that fit, emitted, and those that turned out not to on the way."""
    built: list[_Built] = []
    if budget is None:
        with stage("emitting the best grids", min(count, len(trials))) as step_done:
            for number, trial in enumerate(trials[:count]):
                step_done(number)
                built.append(_emit(program, hardware, trial))
        return built
    order = [t for t in trials if t.fixed <= budget]
    # Last, what needs least: whether anything fits hangs on it.
    least = min(trials, key=lambda t: t.kept)
    for trial in [*[t for t in order if t is not least][:_TRIES], least]:
        if sum(b.needed <= budget for b in built) >= count:
            break
        whole = _emit(program, hardware, trial)
        built.append(whole)
        if whole.needed > budget and trial.fixed <= budget:
            built += _smaller(program, hardware, whole, budget)
    if all(b.needed > budget for b in built):  # say how little it could be
        built.append(_emit(program, hardware, _less(program, hardware, least, math.inf, recompute=True)))
    return built


def _smaller(program: Program, hardware: Hardware, whole: _Built, budget: int) -> list[_Built]:
    """A plan that is too large in other layouts, or computing values again in backward, so that it fits if it can.

    Both are weighed by what they free; what they free of the peak is seen when the graphs are there.
    """
    made = [
        _until_it_fits(program, hardware, whole, budget, recompute=True),
        _until_it_fits(program, hardware, whole, budget, recompute=False),
    ]
    if all(b is whole or b.needed > budget for b in made) and made[1] is not whole:
        made.append(_until_it_fits(program, hardware, made[1], budget, recompute=True))
    best = min(made, key=lambda b: b.needed)
    if best.needed > budget and whole.trial.options.overlap is not False:
        # What is started early takes memory, up to a tenth of the peak.
        trial = best.trial
        how = f"{trial.how}, nothing started early" if trial.how else "nothing started early"
        plain = _emit(program, hardware, replace(trial, options=replace(trial.options, overlap=False), how=how))
        made += [plain, _until_it_fits(program, hardware, plain, budget, recompute=True)]
    return [b for b in {id(b): b for b in made}.values() if b is not whole]


def _until_it_fits(program: Program, hardware: Hardware, whole: _Built, budget: int, *, recompute: bool) -> _Built:
    less, best = whole.trial.options.free + whole.needed - budget, whole
    if whole.needed <= budget or (recompute and whole.needed - budget > whole.memory["activations"]):
        return whole  # it does, or would not even with nothing saved
    for _ in range(_ATTEMPTS):
        try:
            made = _emit(program, hardware, _less(program, hardware, whole.trial, less, recompute=recompute))
        except PlanError:  # no layouts keep that little
            break
        stuck = made.needed >= best.needed
        best = min(best, made, key=lambda b: b.needed)
        if made.needed <= budget or stuck:
            break
        less += 1.1 * (made.needed - budget)
    return best


def _less(program: Program, hardware: Hardware, trial: _Trial, less: float, *, recompute: bool) -> _Trial:
    """The trial with so many bytes less kept for backward.

    Raises:
        PlanError: no layouts do that.
    """
    if recompute:
        again = "values computed again in backward"
        how = trial.how if again in trial.how else ", ".join(h for h in (trial.how, again) if h)
        return replace(trial, options=replace(trial.options, free=less), how=how)
    decisions = decide_within(program, trial.factors, trial.grid, hardware, trial.options, less)
    kept = memory(program, trial.factors, decisions, trial.options.regather)
    fewer = replace(trial, decisions=decisions, memory=kept, estimate=None, how="layouts that keep less")
    return _estimated(program, fewer)


def _estimated(program: Program, trial: _Trial) -> _Trial:
    made = moves(program, trial.factors, trial.decisions, regather=trial.options.regather)
    return replace(trial, estimate=estimate(program, trial.decisions, made, trial.memory))


def _too_large(best: _Built, budget: int) -> str:
    """Why nothing fits, and what would."""
    memory, grid = best.memory, best.trial.grid
    fixed = sum(memory[k] for k in ("parameters", "gradients", "optimizer", "buffers"))
    parts = [f"{byte_text(memory[k])} {k}" for k in ("parameters", "gradients", "optimizer", "buffers") if memory[k]]
    parts.append(f"{byte_text(best.needed - fixed)} saved activations and working set")
    devices = 1 << (math.ceil(grid.size * best.needed / budget) - 1).bit_length()
    ways = [f"a grid of some {devices} devices"]
    if budget > fixed:
        share = (budget - fixed) / (best.needed - fixed)
        ways.append(f"some {math.floor(100 * share)}% of this batch")
    return (
        f"memory_budget={budget} ({byte_text(budget)}) is too small: the least that was found to be needed is "
        f"{byte_text(best.needed)} per device, on grid {grid} with regather={best.trial.options.regather!r}: "
        f"{', '.join(parts)}. What would fit: {', or '.join(ways)}"
    )


def _tried(
    program: Program,
    grid: Grid,
    same: tuple[str, ...],
    hardware: Hardware,
    options: Options,
    factors: Factors,
    groups: Callable[[], list[padding.FactorClass]],
) -> _Trial:
    found, decisions = padding.best(
        factors, grid, lambda trial: decide(program, trial, grid, hardware, options), groups
    )
    kept = memory(program, found, decisions, options.regather)
    return _Trial(grid, options, found, decisions, kept, None, same)


def distinct(world_size: int, hardware: Hardware) -> Iterator[tuple[Grid, tuple[str, ...]]]:
    """Every grid that differs from the others in more than the order of its axes, and those it stands for; with one
    replica, then with two, and so on."""
    if world_size < 1:
        raise GridError(f"world_size={world_size}: it needs at least one device")
    alike: dict[object, list[Grid]] = {}
    for replicas in (r for r in range(1, world_size + 1) if world_size % r == 0):
        for sizes in sorted(factorisations(world_size // replicas), reverse=True):
            grid = Grid(*sizes, replicas=replicas)
            links = [(grid.axis_size(a), hardware.link(a, grid)) for a in grid.one_replica.axes]
            between = hardware.link(REPLICAS, grid)
            key = (replicas, between, tuple(sorted((n, k.latency, k.bandwidth) for n, k in links)))
            alike.setdefault(key, []).append(grid)
    for first, *others in alike.values():
        yield first, tuple(str(g) for g in others)


def _emit(program: Program, hardware: Hardware, trial: _Trial) -> _Built:
    if trial.estimate is None:
        trial = _estimated(program, trial)
    decided = trial.factors, trial.decisions
    step = in_best_lanes(build_step(program, trial.grid, hardware, trial.options, decided=decided), trial.options)
    peaks = make_plan(step, options=trial.options).memory if trial.options.memory_budget is not None else {}
    return _Built(trial, step, _seconds(step), peaks)


def _seconds(step: Step) -> float:
    graphs = [step.runs.forward, *([step.runs.backward] if step.runs.backward is not None else [])]
    return sum(timeline(g, step.decisions.grid, step.decisions.hardware).seconds for g in graphs)


def _candidate(trial: _Trial, built: _Built | None, best: _Built, budget: int | None, hardware: Hardware) -> Candidate:
    e = trial.estimate
    needed = built.needed if built is not None else trial.kept
    if built is best:
        why = f"chosen, with {trial.how}" if trial.how else "chosen"
    elif budget is not None and needed > budget:
        why = f"needs {byte_text(needed)}: {byte_text(needed - budget)} too much"
    elif budget is None and trial.kept > hardware.capacity >= best.trial.kept:
        why = f"keeps {byte_text(trial.kept)}, a device has {byte_text(hardware.capacity)}"
    elif e is None:
        cost, least = trial.decisions.cost, best.trial.decisions.cost
        why = f"objective {second_text(cost)}, {cost / least:.2f} times that of the chosen: not estimated"
    elif built is not None and best.trial.estimate is not None and e.seconds <= best.trial.estimate.seconds:
        why = f"{second_text(built.seconds - best.seconds)} slower when scheduled"
    else:
        why = _why(e, best.trial.estimate)
    return Candidate(
        grid=trial.grid.sizes,
        replicas=trial.grid.replicas,
        regather=trial.options.regather,
        objective=trial.decisions.cost,
        seconds=None if e is None else e.seconds,
        scheduled=built.seconds if built is not None else None,
        compute=trial.decisions.compute if e is None else e.compute,
        exposed=None if e is None else sum(e.exposed.values()),
        bytes=None if e is None else sum(e.bytes.values()),
        memory=trial.kept,
        why=why,
        same=trial.same,
    )


def _why(mine: Estimate, least: Estimate | None) -> str:
    """What costs a candidate its time, the largest first."""
    assert least is not None  # the chosen one was emitted, and what is emitted was estimated
    parts = [(mine.compute - least.compute, "more computation")]
    waits, least_waits = sum(mine.exposed.values()), sum(least.exposed.values())
    worst = max(mine.exposed, key=lambda a: mine.exposed[a], default="")
    parts.append((waits - least_waits, f"more waiting, most for {worst}"))
    said = [f"{second_text(t)} {what}" for t, what in sorted(parts, reverse=True) if t > 0.01 * least.seconds]
    if not said:
        more = sum(mine.bytes.values()) - sum(least.bytes.values())
        return f"sends {byte_text(more)} more" if more > 0 else "as good"
    return ", ".join(said)
