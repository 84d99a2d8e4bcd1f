"""One planned call: from a traced program to the graphs that run. The passes in their order, and nothing else."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from numbers import Real

import torch
from torch.fx import Node

from .errors import PlanError
from .grid import Grid
from .hardware import Hardware
from .layout import Layout
from .passes.differentiate import Differentiated, differentiate
from .passes.propagate import Search, search
from .passes.recompute import Machine
from .passes.rewrite import LocalProgram, Movement, rewrite
from .passes.widen import widen
from .plan import Decisions, Plan
from .precision import MixedPrecision
from .program import Program
from .progress import stage
from .redistribute import State
from .search import padding
from .search.constraints import Pins, pins_from, pins_of
from .search.factors import Factors, ValueShape
from .search.footprint import within
from .search.lanes import before_lanes, in_lanes
from .search.readings import gradients, readings
from .search.replicas import Place, idle
from .search.strategies import needed, states

OUTPUTS = ("auto", "global", "sharded", "loss")


@dataclass(frozen=True)
class Options:
    """What a user may ask of a plan; see `compile`."""

    scheme: str = "auto"
    inputs: str = "global"
    outputs: str | Mapping[str, str] = "auto"
    regather: str = "all"
    strict: bool = False
    overlap: bool | str = "auto"
    precision: MixedPrecision = MixedPrecision()
    constraints: Mapping[str, str | Layout] | None = None
    memory_budget: int | None = None
    lanes: int | str = 1
    free: float = 0.0  # bytes that are computed again in backward rather than saved, as a memory budget has it

    def check(self) -> None:
        """Raise PlanError for values that are not known; all of them are listed."""
        problems = [
            f"{name}={value!r} is not known; choose {choices}"
            for name, value, known, choices in (
                ("inputs", self.inputs, ("global", "sharded"), "'global' or 'sharded'"),
                ("regather", self.regather, ("all", "weights", "none", "auto"), "'all', 'weights', 'none' or 'auto'"),
                ("overlap", self.overlap, (True, False, "auto"), "'auto', True or False"),
                ("lanes", self.lanes, (1, 2, "auto"), "1, 2 or 'auto'"),
                ("strict", self.strict, (True, False), "True or False"),
            )
            if not any(type(value) is type(one) and value == one for one in known)
        ]
        budget = self.memory_budget
        if budget is not None and (
            isinstance(budget, bool) or not isinstance(budget, Real) or not 0 < budget < math.inf
        ):
            problems.append(f"memory_budget={budget!r}: it is a number of bytes per device, as in 80e9")
        named = self.outputs if isinstance(self.outputs, Mapping) else {"": self.outputs}
        problems += [
            f"outputs= names {k!r}; names are text, as in {{'logits': 'global'}}" for k in named if type(k) is not str
        ]
        problems += [
            f"outputs={value!r} is not known; choose one of {', '.join(OUTPUTS)}, or a dict of these by output"
            for value in named.values()
            if value not in OUTPUTS
        ]
        wanted = self.constraints
        if wanted is not None and not isinstance(wanted, Mapping):
            problems.append(
                f"constraints= is a {type(wanted).__name__}; it must be a dict of layouts by glob, such as "
                "{'*.fc1.weight': '[z, y]'}"
            )
        else:
            problems += [
                f"constraints: {key!r}: {value!r} is no glob with a layout, as in '*.up.weight': '[z, y]'"
                for key, value in (wanted or {}).items()
                if not isinstance(key, str) or not isinstance(value, (str, Layout))
            ]
        if problems:
            raise PlanError("\n".join(problems))


@dataclass(frozen=True)
class Step:
    """A call planned and emitted.

    Attributes:
        program: the global program.
        factors, decisions, local: what the passes found.
        runs: the graphs.
        outputs: per result with a node: "global", "sharded" or "buffer".
        lower: numbers of the parameters that enter in another dtype than they are kept in, and which.
        pins, places: what was decided before, and where placeholders were placed before.
        split: the decisions as they are carried out in lanes; None where there is one lane.
        note: why there are so many lanes, where that was chosen.
    """

    program: Program
    factors: Factors
    decisions: Decisions
    local: LocalProgram
    runs: Differentiated
    outputs: tuple[str, ...]
    lower: Mapping[int, torch.dtype] = field(default_factory=dict)
    pins: Pins = field(default_factory=Pins)
    places: Mapping[str, State] = field(default_factory=dict)
    split: Decisions | None = None
    note: str = ""

    @property
    def lanes(self) -> int:
        return self.carried_out.grid.lanes

    @property
    def carried_out(self) -> Decisions:
        """The decisions, with the lanes."""
        return self.split or self.decisions

    @property
    def machine(self) -> Machine:
        return Machine(self.decisions.grid, self.decisions.hardware)

    @property
    def argument_layouts(self) -> tuple[Layout, ...]:
        return self.local.arguments

    @functools.cached_property
    def read(self) -> frozenset[str]:
        """Names of the placeholders of the program that it reads."""
        return frozenset(n.name for n in self.program.graph.graph.nodes if n.op == "placeholder" and n.users)

    def result_shape(self, i: int) -> tuple[int, ...]:
        """Global shape of result i (counted among those with a node)."""
        node = self.program.graph.graph.output_node().args[0][i]  # type: ignore[index]
        return tuple(node.meta["val"].shape)  # type: ignore[union-attr]


def build_step(
    program: Program,
    grid: Grid,
    hardware: Hardware,
    options: Options,
    pinned: Mapping[str, Layout] | None = None,
    seeds: tuple[int, ...] | None = None,
    decided: tuple[Factors, Decisions] | None = None,
    given: Plan | None = None,
) -> Step:
    """Run the passes after canonicalize, up to differentiate, in one lane.

    Args:
        pinned: layouts of parameters, and of inputs, that are decided already, by placeholder name.
        seeds: results (with a node) from which gradients will flow; None takes the loss, or else all.
        decided: what `decide` found, when it has been asked already.
        given: a plan to carry out, in place of searching for one.

    Raises:
        PlanError: unknown options; or `strict` and something is kept whole or has no rule; or constraints, or a plan,
            that do not fit.
    """
    factors, places = (decided[0], {}) if decided else _with_places(program, grid, pinned or {})
    if given is not None:
        pins = pins_from(given, program, grid)
        factors = padding.again(factors, given.pads)
        decisions = choices(program, factors, grid, hardware, options, places, pins).run()
    else:
        pins = pins_of(options.constraints or {}, program, factors, grid)
        factors, decisions = decided or padding.best(
            factors, grid, lambda trial: decide(program, trial, grid, hardware, options, places)
        )
    decisions = _place_inputs(program, factors, decisions, places, sharded=options.inputs == "sharded")
    if options.strict:
        _refuse_whole(program, factors, decisions)
    return _emitted(program, factors, decisions, options, pins, places, seeds)


def split_batch(step: Step, options: Options, lanes: int) -> Step:
    """The same step in several lanes.

    Raises:
        PlanError: the batch cannot be split.
    """
    program, factors, decisions, places = step.program, step.factors, step.decisions, step.places
    split = in_lanes(program, factors, decisions, lanes)
    if options.inputs == "global":
        split = _place_inputs(program, factors, split, places, sharded=False)
    decisions = replace(decisions, storage=split.storage)
    return _emitted(program, factors, decisions, options, step.pins, places, None, split)


def _emitted(
    program: Program,
    factors: Factors,
    decisions: Decisions,
    options: Options,
    pins: Pins,
    places: Mapping[str, State],
    seeds: tuple[int, ...] | None,
    split: Decisions | None = None,
) -> Step:
    modes = output_modes(program, options)
    with stage("rewriting"):
        local = rewrite(program, factors, split or decisions, regather=options.regather)
    with_node = [m for m, r in zip(modes, program.results, strict=True) if r.node is not None]
    machine = Machine(decisions.grid, decisions.hardware)
    runs = differentiated(program, local, options, default_seeds(program) if seeds is None else seeds, machine)
    local = replace(local, movements=tuple(_repeated(local.movements, runs)))
    low = options.precision.parameters
    lower = {i: low for i, a in enumerate(program.arguments) if a.stored is not None and low is not None}
    return Step(program, factors, decisions, local, runs, tuple(with_node), lower, pins, places, split)


@stage("differentiating")
def differentiated(
    program: Program, local: LocalProgram, options: Options, seeds: tuple[int, ...] | None, machine: Machine
) -> Differentiated:
    """The graphs for gradients that flow from these results."""
    values = [n.meta["val"] for n in program.graph.graph.nodes if n.op == "placeholder"]
    trained = [a.requires_grad for a in program.arguments]
    runs = differentiate(local, values, trained, seeds=seeds, free=options.free, machine=machine)
    wider = options.precision.reduce
    if wider is None or runs.backward is None:
        return runs
    learned = [i for i, number in enumerate(runs.gradients) if program.arguments[number].kind == "parameter"]
    return replace(runs, backward=widen(runs.backward, learned, wider))


def _repeated(movements: Iterable[Movement], runs: Differentiated) -> Iterator[Movement]:
    """The movements; in a model with activation checkpointing, with the collectives that backward really repeats."""
    left = {name: list(kinds) for name, kinds in runs.again.items()}
    for m in movements:
        if m.node not in left:
            yield m
            continue
        moved = [t for t in m.transfers if t.phase != "regather"]
        for t in m.transfers:
            if t.phase == "forward" and t.kind in left[m.node]:
                left[m.node].remove(t.kind)
                moved.append(t._replace(phase="regather"))
        yield replace(m, transfers=tuple(moved))


@stage("planning")
def decide(
    program: Program,
    factors: Factors,
    grid: Grid,
    hardware: Hardware,
    options: Options,
    pinned: Mapping[str, State] | None = None,
) -> Decisions:
    """Run propagate as the options ask; see `build_step`."""
    return choices(program, factors, grid, hardware, options, pinned).run()


def decide_within(
    program: Program, factors: Factors, grid: Grid, hardware: Hardware, options: Options, less: float
) -> Decisions:
    """As `decide`, but keeping so many bytes less for backward than the plan that it would take.

    Raises:
        PlanError: no layouts keep that little.
    """
    return within(choices(program, factors, grid, hardware, options), less)


def choices(
    program: Program,
    factors: Factors,
    grid: Grid,
    hardware: Hardware,
    options: Options,
    pinned: Mapping[str, State] | None = None,
    pins: Pins | None = None,
) -> Search:
    """What propagate decides among, as the options ask; `pins` stand in for the options' constraints."""
    modes = output_modes(program, options)
    if pins is None:
        pins = pins_of(options.constraints or {}, program, factors, grid)
    return search(
        program,
        grid,
        hardware,
        factors=factors,
        scheme=options.scheme,
        regather=options.regather,
        result_states=lambda i, shape, replicas: _result_states(modes[i], shape, grid, replicas),
        pinned=pinned,
        pins=pins,
    )


def _with_places(program: Program, grid: Grid, pinned: Mapping[str, Layout]) -> tuple[Factors, dict[str, State]]:
    """The factors of the program, and what pinned layouts are in them.

    Where a parameter is laid out in a way that its readers' factors cannot say (another program made them), the readers
    take it whole. An input is left to be placed anew.
    """
    graph = program.graph.graph
    nodes = {n.name: n for n in graph.nodes}
    whole: set[Node] = set()
    while True:
        factors = Factors(graph, whole=whole)
        places, again = {}, set()
        for argument in program.arguments:
            node = nodes[argument.node]
            if argument.node in pinned:
                state = factors.values[node].state(pinned[argument.node], grid)
                if state is not None:
                    places[argument.node] = state
                elif argument.kind == "parameter":
                    again |= {user for user in node.users if user.op == "call_function"} - whole
        if not again:
            return factors, places
        whole |= again


def output_modes(program: Program, options: Options) -> list[str]:
    """Per result: "global", "sharded", "buffer", or "dropped" for an output that "loss" leaves out."""
    losses = _losses(program)
    nodes = {n.name: n for n in program.graph.graph.nodes}
    modes = []
    for i, result in enumerate(program.results):
        wish = options.outputs if isinstance(options.outputs, str) else options.outputs.get(result.name, "auto")
        if result.kind == "buffer":
            modes.append("buffer")
        elif i in losses or (result.node is not None and nodes[result.node].meta["val"].dim() == 0):
            modes.append("global")
        elif wish == "auto":
            modes.append("sharded" if losses else "global")
        elif wish == "loss":
            if not losses:
                raise PlanError('outputs="loss" needs a scalar among the outputs; this model returns none')
            modes.append("sharded")
        else:
            modes.append(wish)
    if not isinstance(options.outputs, str):
        unknown = set(options.outputs) - {r.name for r in program.results}
        if unknown:
            names = ", ".join(repr(r.name) for r in program.results if r.kind == "output")
            raise PlanError(f"outputs= names {sorted(unknown)}; the model's outputs are {names}")
    return modes


def _losses(program: Program) -> list[int]:
    """Numbers of the results that are a loss: floating scalars that are computed and have a gradient.

    Where no result has a gradient, as of a frozen model, any floating scalar.
    """
    nodes = {n.name: n for n in program.graph.graph.nodes}
    grads = gradients(program)
    outputs = [(i, nodes[r.node]) for i, r in enumerate(program.results) if r.kind == "output" and r.node is not None]
    frozen = not any(node in grads for _, node in outputs)
    return [
        i
        for i, node in outputs
        if node.meta["val"].dim() == 0
        and node.meta["val"].is_floating_point()
        and (frozen or (node in grads and node.op != "placeholder"))
    ]


def default_seeds(program: Program) -> tuple[int, ...] | None:
    """Results (counted with a node) from which gradients flow: the losses, or None for all where there is none."""
    with_node = [i for i, r in enumerate(program.results) if r.node is not None]
    losses = _losses(program)
    return tuple(with_node.index(i) for i in losses) or None


def _result_states(mode: str, shape: ValueShape, grid: Grid, replicas: Place) -> list[State]:
    whole = State(((),) * len(shape.atoms))
    if mode != "sharded":
        return [whole]
    # A DTensor must be able to carry it.
    place = replicas if isinstance(replicas, int) else "R"
    found = [s for s in states(shape.atoms, grid, "R", place) if shape.even(s)]
    return [s for s in found if shape.layout(s, grid).is_plain] or [whole]


def _place_inputs(
    program: Program, factors: Factors, decisions: Decisions, pinned: Mapping[str, State], *, sharded: bool
) -> Decisions:
    """Let each input enter the graphs as the shard that all its readers want, so that it is cut once, outside.

    With `sharded` inputs, ranks pass their part of the first dim only, and the graph cuts the rest. An input that
    wants a gradient, or that is read in several placements, enters whole.
    """
    slots = readings(program)
    storage = dict(decisions.storage)
    nodes = {n.name: n for n in program.graph.graph.nodes}
    for argument in program.arguments_of("input"):
        node = nodes[argument.node]
        shape = factors.values.get(node)
        if shape is None or argument.requires_grad or argument.node in pinned:
            continue
        wanted = set()
        for slot in slots.get(node, ()):
            if slot.reader is None:
                wanted.add(State(((),) * len(shape.atoms)))
                continue
            strategy = decisions.strategies[slot.reader.name]
            state = needed(factors.specs[slot.reader], strategy, slot.operand, grad=False)
            if sharded and shape.dims and shape.dims[0]:
                state = State((state.atoms[0], *((),) * (len(shape.atoms) - 1)))
            # Pads are added inside the graph, to what enters whole.
            state = State(tuple(() if i in shape.pads else axes for i, axes in enumerate(state.atoms)), state.partial)
            wanted.add(before_lanes(state))
        if len(wanted) == 1 and not next(iter(wanted)).partial and (not sharded or (shape.dims and shape.dims[0])):
            storage[argument.node] = wanted.pop()
    return replace(decisions, storage=storage)


def _refuse_whole(program: Program, factors: Factors, decisions: Decisions) -> None:
    problems = [f"{name}: {why}" for name, why in decisions.whole.items()]
    problems += [f"{op} has no rule ({len(nodes)} uses)" for op, nodes in factors.without_rule.items()]
    unshared = idle(program, decisions.strategies, decisions.grid)
    problems += [unshared] if unshared else []
    if problems:
        listed = "\n  ".join(problems)
        raise PlanError(f"strict=True, but on grid {decisions.grid} these are kept whole:\n  {listed}")
