"""Plans, as plain data.

`Decisions` is what `passes.propagate` returns and `passes.rewrite` carries out. `Plan` is what users read: what went
where and what it costs, without a reference to any graph, so that it prints, hashes, and goes to JSON and back.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from . import page
from .cost import Cost
from .errors import PlanError
from .grid import Grid
from .hardware import Hardware
from .redistribute import State
from .reports.difference import Difference, difference
from .reports.explanation import Explanation
from .reports.printout import render
from .search.strategies import Strategy
from .timelines.recording import Recording
from .typed import problems


class Choices(Protocol):
    """What a plan was chosen from."""

    def explain(self, name: str) -> Explanation: ...

    def cost(self, shares: dict[str, float], *, symbolic: bool) -> Cost: ...


@dataclass(frozen=True)
class Decisions:
    """A strategy per op and a placement per stored value.

    Args:
        grid, hardware: what was planned for.
        strategies: op node name -> strategy.
        storage: placeholder name -> placement in which a parameter, buffer, constant or input arrives.
        copies: value name -> placement of the copy its readers share, where it has several readers.
        results: per flat result (see `Program.results`) the placement in which it leaves.
        cost: the minimised objective, in seconds.
        compute: seconds of it in which ops compute; the rest is collectives, one after the other.
        seconds: op -> its share of `compute`.
        bound: no plan in the space searched costs less; equal to `cost` when that is proven minimal.
        whole: names of values and ops kept whole -> why.
        groups: value name, reader, operand -> placement of a second copy, which readers of one kind share.
        off_scheme: ops that a named scheme should have decided, but does not fit in size: planned by cost.
    """

    grid: Grid
    hardware: Hardware
    strategies: dict[str, Strategy]
    storage: dict[str, State]
    copies: dict[str, State]
    results: tuple[State | None, ...]
    cost: float = 0.0
    bound: float = 0.0
    compute: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)
    groups: dict[tuple[str, str, int], State] = field(default_factory=dict)
    off_scheme: tuple[str, ...] = ()

    def way(self, value: str, reader: str, operand: int) -> tuple[State, ...]:
        """Placements in which a value stops on its way to a reading (of a result of the program: reader "")."""
        stops = self.copies.get(value), self.groups.get((value, reader, operand))
        return tuple(s for s in stops if s is not None)

    @property
    def exact(self) -> bool:
        """Whether the cost is proven minimal."""
        return self.cost <= self.bound * (1.0 + 1e-9)


@dataclass(frozen=True)
class Sent:
    """What each rank sends in some collectives of one step (ring convention, see `collectives.Collective`).

    Args:
        axis, kind: the grid axis; all_gather, reduce_scatter, all_reduce or all_to_all.
        phase: "forward", "backward", or "regather": a gather of the forward done again in backward.
        bytes: per rank and step, together.
        calls: number of collectives, before any are merged into buckets.
    """

    axis: str
    kind: str
    phase: str
    bytes: float
    calls: int


@dataclass(frozen=True)
class ParameterPlan:
    """Where one parameter lives, and what moves on its behalf.

    Args:
        names: all its names, when it is tied.
        layout: as it is stored, in the text form of `Layout`.
        gathered: axes over which it is gathered before use.
        reduced: axes over which its gradient is summed.
        trained: whether it has a gradient.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    layout: str
    local_shape: tuple[int, ...]
    trained: bool
    gathered: tuple[str, ...]
    reduced: tuple[str, ...]
    sent: tuple[Sent, ...]


@dataclass(frozen=True)
class OpPlan:
    """How one op runs: every matmul, convolution and attention, and every other op that sends.

    Args:
        name: of its graph node.
        module, source: path of the module and line of the code it comes from.
        op: short name.
        shape, layout, local_shape: of its (first) result.
        strategy: axes per factor, as `str(Strategy)`.
        roles: the same in words: "a=y b=x c=z" for a product with a weight (a gathers the input, b the weight, c
            reduces the result), else as "batch:x heads:y"; "repeat:z" names axes on which ranks do the same work.
        flops: floating point operations of the forward on one rank; 0 for ops that are no matmul, convolution or
            attention.
        seconds: its computation, forward and backward, and its collectives, one after the other.
        sent: collectives for its operands and its results. A copy that several ops read is counted at the first.
    """

    name: str
    module: str
    source: str
    op: str
    shape: tuple[int, ...]
    layout: str
    local_shape: tuple[int, ...]
    strategy: str
    roles: str
    flops: float
    seconds: float
    sent: tuple[Sent, ...]


@dataclass(frozen=True)
class OutputPlan:
    """How one result leaves. `mode`: "global", "sharded", or "buffer" for a buffer's new value."""

    name: str
    mode: str
    shape: tuple[int, ...]
    layout: str
    sent: tuple[Sent, ...]


@dataclass(frozen=True)
class Repeated:
    """Ops that ranks along `axes` repeat instead of sharing, and why.

    Args:
        free: they have no gradient and need no collective for it: masks, position tables.
        modules: one entry an op.
    """

    op: str
    axes: str
    why: str
    free: bool
    modules: tuple[str, ...]


@dataclass(frozen=True)
class Candidate:
    """A grid (so many `replicas` of it) that was considered. Numbers are per rank, for one forward and backward.

    Args:
        objective: what the planner minimised, the cost of all ops and collectives one after the other.
        seconds: predicted before graphs are emitted; None where the objective alone put the candidate behind.
            `scheduled`: predicted of the emitted graphs, of the best candidates only.
        compute, exposed: of `seconds`, in which compute runs, and waits.
        bytes: sent; None, as `exposed`, where `seconds` is.
        memory: bytes of parameters, gradients, optimizer state and what is saved for backward.
        why: "chosen", or what is worse than in the chosen one.
        same: grids that differ from this one in the order of their axes only.
    """

    grid: tuple[int, int, int]
    regather: str
    seconds: float | None
    scheduled: float | None
    compute: float
    exposed: float | None
    bytes: float | None
    memory: int
    why: str
    same: tuple[str, ...]
    replicas: int = 1
    objective: float = 0.0


@dataclass(frozen=True)
class Plan:
    """What went where, and what it costs: `print(plan)`. Numbers are per rank, for one forward and backward.

    Args:
        grid: sizes of the three axes; `replicas`: so many of these.
        hardware: name of the profile that costs were predicted with.
        scheme, regather, inputs: options it was made with ("" where not known).
        strategies: op -> axes per factor.
        storage, copies: placeholder -> layout it is stored in; value -> layout of the copy its readers share.
        parameters, ops, outputs: the details.
        traffic: everything sent, by axis, kind and phase.
        calls: per axis, the collectives that run, a bucket of several counted once.
        memory: bytes by purpose: parameters, gradients, optimizer (AdamW), buffers, activations (saved between forward
            and backward), inputs, outputs, peak forward, peak backward.
        forward_flops, backward_flops: matmuls, convolutions and attention in the emitted graphs.
        ideal_flops: those of one device, divided by the number of devices.
        seconds: predicted time of forward and backward as scheduled.
        compute: seconds of it in which compute runs.
        communication, exposed: per axis, seconds of its collectives, and seconds that compute waits for them.
        objective: what the planner minimised, in seconds; `bound`: no plan in the space searched has less; `exact`:
            they are equal.
        whole: tensors kept whole -> why.
        repeated: ops repeated on some axes.
        without_rule: ops computed whole for want of a rule -> number of uses.
        notes: what else a user should know, in sentences.
        timeline: what will happen when, predicted; None in a plan from a file.
        candidates: with grid="auto", the grids considered, best first.
        pads: what was made longer (see `padding.Pads`).
        lanes: parts of the batch that each rank goes through in turn.
        choices: what `explain` looks into; None of a plan that was loaded or copied.
        hash: digest of decisions, layouts and graphs: equal exactly when ranks run the same program.
    """

    grid: tuple[int, int, int]
    hardware: str
    scheme: str
    regather: str
    inputs: str
    strategies: dict[str, str]
    storage: dict[str, str]
    copies: dict[str, str]
    parameters: tuple[ParameterPlan, ...]
    ops: tuple[OpPlan, ...]
    outputs: tuple[OutputPlan, ...]
    traffic: tuple[Sent, ...]
    calls: dict[str, int]
    memory: dict[str, int]
    forward_flops: float
    backward_flops: float
    ideal_flops: float
    seconds: float
    compute: float
    communication: dict[str, float]
    exposed: dict[str, float]
    objective: float
    bound: float
    exact: bool
    whole: dict[str, str]
    repeated: tuple[Repeated, ...]
    without_rule: dict[str, int]
    hash: str
    replicas: int = 1
    notes: tuple[str, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    pads: tuple[tuple[str, int, int], ...] = ()
    lanes: int = 1
    free: float = 0.0
    timeline: Recording | None = field(default=None, compare=False, repr=False)
    choices: Choices | None = field(default=None, repr=False, compare=False)

    @property
    def devices(self) -> int:
        return math.prod(self.grid) * self.replicas

    @property
    def digest(self) -> str:
        """Of what the plan decides: equal for plans that are carried out alike."""
        parts: list[Any] = [self.grid, self.strategies, self.storage, self.copies, self.pads, self.lanes, self.free]
        parts += [self.replicas] if self.replicas > 1 else []
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    @property
    def flops(self) -> float:
        """Matmul, convolution and attention FLOPs per rank, forward and backward."""
        return self.forward_flops + self.backward_flops

    @property
    def bytes(self) -> dict[tuple[str, str], float]:
        """Bytes each rank sends per step, by (axis, kind)."""
        return self.bytes_in("forward", "backward", "regather")

    def bytes_in(self, *phases: str) -> dict[tuple[str, str], float]:
        """Bytes by (axis, kind) in some phases. What backward_graph sends is in "backward" and "regather"."""
        found: dict[tuple[str, str], float] = {}
        for s in self.traffic:
            if s.phase in phases:
                found[s.axis, s.kind] = found.get((s.axis, s.kind), 0.0) + s.bytes
        return found

    def __str__(self) -> str:
        return render(self)

    def plot_timeline(self, path: str | Path) -> None:
        """Draw what each axis and compute will do, and memory, over one step. Needs matplotlib.

        Raises:
            PlanError: the plan is from a file.
        """
        self._drawable().plot(path, f"grid {'x'.join(map(str, self.grid))}")

    def plot_memory(self, path: str | Path) -> None:
        """Draw the bytes alive on one rank over one step. Needs matplotlib.

        Raises:
            PlanError: the plan is from a file.
        """
        self._drawable().plot_memory(path, f"grid {'x'.join(map(str, self.grid))}")

    def to_html(self, path: str | Path | None = None) -> str:
        """One self-contained page: the grid, the model as a tree that folds, timeline, memory, grids considered.

        Args:
            path: where to write it too.
        """
        text = page.page(self)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def _repr_html_(self) -> str:
        return page.table(self)

    def save_trace(self, path: str | Path) -> None:
        """Write the same as a Chrome trace (JSON), for https://ui.perfetto.dev.

        Raises:
            PlanError: the plan is from a file.
        """
        self._drawable().save_trace(path)

    def _drawable(self) -> Recording:
        if self.timeline is None:
            raise PlanError("a plan from a file has no timeline; make it anew with autopar3d.plan(...)")
        return self.timeline

    def explain(self, name: str) -> Explanation:
        """The strategies of one op with their costs, and what choosing each would change elsewhere.

        Args:
            name: a module, as "blocks.3.mlp.fc1", or the name of a graph node, as in `ops`.

        Raises:
            PlanError: there is no such op, or several; or the plan comes from a file and has no graph to search.
        """
        if self.choices is None:
            raise PlanError("explain searches the graph, which is not in a plan's file: make the plan with plan(...)")
        return self.choices.explain(name)

    def cost(self) -> Cost:
        """What one step costs one rank, by the functions that the plan was decided with: op by op, collective by
        collective. `compute` and all `communication` add up to `objective`. (`seconds` of the plan itself is the
        prediction for the scheduled graphs, in which small collectives are merged.)

        Raises:
            PlanError: the plan comes from a file.
        """
        return self._cost(symbolic=False)

    def symbolic_cost(self) -> Cost:
        """The same as sympy expressions in the sizes, the axes, and the rates of the machine; `values` has the value of
        each symbol in this plan, and `at(batch=..., gx=...)` evaluates at others: this plan's strategies, other sizes.

        Raises:
            PlanError: the plan comes from a file.
        """
        return self._cost(symbolic=True)

    def _cost(self, *, symbolic: bool) -> Cost:
        if self.choices is None:
            raise PlanError("costs are counted on the graph, which is not in a plan's file: make it with plan(...)")
        shares = {a: self.exposed[a] / t if t else 0.0 for a, t in self.communication.items()}
        return self.choices.cost(shares, symbolic=symbolic)

    def diff(self, other: Plan) -> Difference:
        """What another plan of the same model does otherwise, and what each costs."""
        return difference(self, other)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "choices": None}  # pickled and copied as data

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, dicts, numbers and strings, from which `from_dict` makes an equal plan, without its timeline."""
        bare = dataclasses.replace(self, timeline=None, choices=None)
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(bare)))
        del plain["choices"], plain["timeline"]
        if self.replicas == 1:
            del plain["replicas"]
        return {"format": _FORMAT, **plain}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Plan:
        """Inverse of `to_dict`.

        Raises:
            PlanError: not a plan, or one of another format.
        """
        if plain.get("format") != _FORMAT:
            raise PlanError(f"this is no plan of format {_FORMAT}: its format is {plain.get('format')!r}")
        data: dict[str, Any] = {k: v for k, v in plain.items() if k != "format"}
        try:
            for name, kind in _PARTS.items():
                data[name] = tuple(_restored(kind, item) for item in data[name])
            fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
            fields["pads"] = tuple((str(name), int(i), int(n)) for name, i, n in fields["pads"])
            made = cls(**fields)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise PlanError(f"this plan is damaged: {error}") from error
        wrong = problems(cls, made, "")
        wrong = wrong or [f"{k} is {v}, which is less than 1" for k, v in _counts(made) if v < 1]
        if wrong:
            raise PlanError("this plan is damaged:\n  " + "\n  ".join(wrong[:10]))
        return made

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save` wrote. Runs no code.

        Raises:
            PlanError: the file holds no plan, or one of another format.
        """
        try:
            plain = json.loads(Path(path).read_text())
        except json.JSONDecodeError as error:
            raise PlanError(f"{path} is no plan: {error}") from error
        if not isinstance(plain, dict):
            raise PlanError(f"{path} is no plan: it holds a {type(plain).__name__}")
        return cls.from_dict(plain)


_FORMAT = 3


def _counts(plan: Plan) -> list[tuple[str, int]]:
    axes = [(f"grid axis {a}", n) for a, n in zip("xyz", plan.grid, strict=True)]
    return [*axes, ("replicas", plan.replicas), ("lanes", plan.lanes)]


_PARTS: dict[str, type[Any]] = {
    "parameters": ParameterPlan,
    "ops": OpPlan,
    "outputs": OutputPlan,
    "traffic": Sent,
    "repeated": Repeated,
    "candidates": Candidate,
}


def _restored(kind: type[Any], item: Mapping[str, Any]) -> Any:
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in item.items()}
    if "sent" in values:
        values["sent"] = tuple(Sent(**s) for s in values["sent"])
    return kind(**values)
