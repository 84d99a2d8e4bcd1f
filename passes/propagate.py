"""propagate: a `Program` and a grid -> `Decisions`, a strategy for every op and a layout for every stored tensor.

The objective is the predicted time of one step on one rank: compute of every op under its strategy, plus every change
of layout in forward, its transpose in backward, and the gathers repeated for backward. It is a sum over the ops and the
edges between them, minimised exactly wherever the graph folds (see `solver`).

Vertices: every op on the way from a parameter to a result (its strategies); every parameter (its fully sharded
layouts), and every input that has a gradient (whole); and, for every value with several readers, the copy that they
share (its placements), so that a gather for q, k and v is priced once, as it is emitted once. What has no gradient and
depends on no parameter (masks, position tables, most inputs) is set aside: it is complete on every rank, from which a
local slice is free, and afterwards it is computed sharded wherever all its readers agree.

Replicas have one role at each op (see `replicas`), and so one place in all placements of a value at one vertex: they
are planned with the rest, priced with the rest, and add no choices.

Left out of the space: a shared copy that is still a partial sum; and see `strategies.strategies`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from autopar3d.cost import compute_seconds, link_seconds, per_unit
from autopar3d.errors import PlanError
from autopar3d.grid import REPLICAS, Grid
from autopar3d.hardware import Hardware
from autopar3d.plan import Decisions
from autopar3d.program import Program
from autopar3d.redistribute import State, sent, with_replicas
from autopar3d.rules import LocalOp, OpSpec, operands, results
from autopar3d.search.constraints import Pins, Wish, kept_states, kept_strategies, result_of
from autopar3d.search.factors import Factors, ValueShape, is_getitem, producer
from autopar3d.search.prices import forked, price_table, travelled
from autopar3d.search.readings import Slot, drops, gradients, readings, regathered
from autopar3d.search.replicas import Place, roles
from autopar3d.search.saved import is_view
from autopar3d.search.solver import Problem, Solution
from autopar3d.search.strategies import Role, Strategy, given, needed, states, strategies, summed_factors

SCHEMES = ("auto", "3d", "2d", "1d", "zero3", "zero3x1d")
REGATHER = ("all", "weights", "none")

# Results of fewer elements may be kept whole where that saves collectives: row statistics, scalars.
_SMALL = 1024

# Weight of memory against the time in which it could be moved: decides between plans of equal time, and hardly ever
# between others.
_TIE = 1e-10


def search(
    program: Program,
    grid: Grid,
    hardware: Hardware,
    *,
    factors: Factors,
    scheme: str = "auto",
    regather: str = "all",
    result_states: Callable[[int, ValueShape, Place], list[State]],
    pinned: Mapping[str, State] | None = None,
    pins: Pins | None = None,
) -> Search:
    """The choices of a program with their costs, not yet decided.

    Args:
        factors: of `program.graph.graph`.
        result_states: for result number i, its atoms and the place of replicas where it is made, the placements in
            which it may leave.
        pinned: placements of placeholders that are already decided (parameters on a second planning).
        pins: what else is decided.

    Raises:
        PlanError: an unknown scheme or regather, or pins that cannot be met.
    """
    for name, value, known in (("scheme", scheme, SCHEMES), ("regather", regather, REGATHER)):
        if value not in known:
            raise PlanError(f"{name}={value!r} is not known; choose one of {', '.join(known)}")
    found = Search(
        program, grid, hardware, factors, scheme, regather, result_states, dict(pinned or {}), pins or Pins()
    )
    found.build()
    return found


class _End(NamedTuple):
    """One end of an edge: a vertex and the placement that each of its states means; equal keys, equal placements."""

    vertex: Any
    key: Any
    states: list[State]


class Leg(NamedTuple):
    """An edge: a change of layout of a value, for some of its readings."""

    source: _End
    target: _End
    value: Node
    slots: list[Slot]


def _signature(node: Node, spec: OpSpec) -> tuple[Any, ...]:
    """Equal for two nodes whose strategies and costs are equal."""
    plain = map_arg((node.args, dict(node.kwargs)), lambda n: _type(n.meta["val"]))
    lengths = (tuple(spec.sizes.items()), tuple(spec.true.items()))
    return (node.target, str(plain), *lengths, spec.inputs, spec.outputs, spec.whole)


def _type(val: Any) -> str:
    return f"{val.dtype}{tuple(val.shape)}" if isinstance(val, Tensor) else str(val)


class _Known(NamedTuple):
    """What ops of one kind share: their strategies; seconds with ties, the ties alone, and the computation alone."""

    options: list[Strategy]
    costs: np.ndarray
    ties: np.ndarray
    computes: np.ndarray


class Search:
    """Vertices are `("op", node)`, `("storage", node)`, `("copy", value)` and `("result", number)`.

    Attributes:
        problem: the choices; `options`: per vertex what its states are.
        legs: the edges, each for what it is.
        computes, ties: per vertex and state, seconds of computation alone, and what memory adds to the costs.
    """

    def __init__(
        self,
        program: Program,
        grid: Grid,
        hardware: Hardware,
        factors: Factors,
        scheme: str,
        regather: str,
        result_states: Callable[[int, ValueShape, Place], list[State]],
        pinned: dict[str, State],
        pins: Pins,
    ) -> None:
        self.program, self.grid, self.hardware, self.factors = program, grid, hardware, factors
        self.scheme, self.regather, self.result_states, self.pinned = scheme, regather, result_states, pinned
        self.pins, self.conflicts = pins, list[str]()
        self.off_scheme: list[str] = []  # ops planned by cost, as the scheme does not fit their sizes
        self.graph = program.graph.graph
        self.arguments = {a.node: a for a in program.arguments}
        self.roles = roles(program, factors, grid)
        self.grads = gradients(program)
        self.slots = readings(program)
        self.regathered = regathered(program)
        self.problem = Problem()
        self.legs: list[Leg] = []
        rate = hardware.memory if math.isfinite(hardware.memory) else hardware.node.bandwidth
        self.tie = _TIE / rate  # seconds per byte
        self.computes: dict[Any, np.ndarray] = {}  # op -> seconds of its computation alone
        self.ties: dict[Any, np.ndarray] = {}  # vertex -> what its states' memory adds to its costs
        self.options: dict[Any, list[Any]] = {}  # vertex -> its states
        self.known: dict[Any, _Known] = {}  # per kind of op
        self.members: dict[tuple[Node, int], list[Slot]] = {}  # a group of a value's readers -> its readings
        self.numbers: dict[Any, int] = {}  # kind of op -> its number
        self.kinds: dict[Node, int] = {}  # op -> the number of its kind
        self.beside: set[Any] = set()  # kinds of op whose sizes the scheme does not fit
        self.partial: dict[Node, bool] = {}  # value -> whether it may be a partial sum
        self.placements: dict[Any, list[State]] = {}
        self.stored: dict[Any, list[State]] = {}  # a parameter's shape -> its placements
        self.prices: dict[Any, np.ndarray] = {}
        self.held: dict[Any, np.ndarray] = {}  # a kind of shared copy -> ties of its placements
        self.zeros: dict[int, np.ndarray] = {}  # costs of a vertex without any, by number of states

    def build(self) -> None:
        """Make the vertices and edges of `problem`."""
        for node in self.graph.nodes:
            if node.op == "call_function" and not is_getitem(node) and self._planned(node):
                self._op(node)
        for node in self.graph.nodes:
            if node.op == "placeholder" and self._planned(node):
                self._stored(node)
        for value, slots in self.slots.items():
            source, _ = producer(value)
            if ("op", source) in self.options or ("storage", source) in self.options:
                self._value(value, slots)
        if self.conflicts:
            listed = "\n  ".join(dict.fromkeys(self.conflicts))
            raise PlanError(f"what is pinned cannot be met on grid {self.grid}:\n  {listed}")

    def run(self) -> Decisions:
        return self.decisions(self.problem.solve())

    def decisions(self, solution: Solution) -> Decisions:
        """What a choice means."""
        picked = {v: self.options[v][i] for v, i in solution.choice.items()}
        ties = math.fsum(t[solution.choice[v]] for v, t in self.ties.items())
        seconds = {v[1].name: float(c[solution.choice[v]]) for v, c in self.computes.items()}
        return self._decisions(picked, solution.cost - ties, solution.bound - ties, seconds)

    def _planned(self, node: Node) -> bool:
        """Set aside: what has no gradient and needs no communication to be complete on every rank."""
        if node.op == "placeholder":
            argument = self.arguments[node.name]
            return node in self.slots and (argument.kind == "parameter" or node in self.grads)
        return node in self.grads or any(self.planned_value(o) for o in operands(node))

    @cache  # noqa: B019  (lives as long as one planning)
    def planned_value(self, value: Node) -> bool:
        """Whether a vertex makes this value."""
        return self._planned(producer(value)[0])

    # -- vertices -----------------------------------------------------------------------------------

    def _op(self, node: Node) -> None:
        spec = self.factors.specs[node]
        through = spec.linear and all(self._may_be_partial(o) for o in operands(node))
        wishes = self.pins.of_op(node.name)
        role = self.roles.get(node, Role())
        kind = (_signature(node, spec), node in self.grads, through, self._weight_operand(node), wishes, role)
        if kind not in self.known:  # the same op on the same shapes, in another layer
            repeat = self._may_repeat(node, spec)
            options = strategies(spec, self.grid, through=through, repeat=repeat, role=role)
            if spec.flops:
                options, fits = self._within_scheme(node, spec, options)
                self.beside |= set() if fits else {kind}
            if any(wishes):
                shape = result_of(node, self.factors)
                options, conflict = kept_strategies(options, node, spec, shape, self.pins, self.grid)
                self.conflicts += [conflict] if conflict else []
            found = self._seconds(node, spec, options)
            ties = self.tie * found[:, 2]
            self.known[kind] = _Known(options, found[:, 0] + found[:, 1] + ties, ties, found[:, 0])
        vertex = ("op", node)
        self.kinds[node] = self.numbers.setdefault(kind, len(self.numbers))
        if kind in self.beside:
            self.off_scheme.append(node.name)
        known = self.known[kind]
        self.options[vertex], self.ties[vertex], self.computes[vertex] = known.options, known.ties, known.computes
        self.problem.vertex(vertex, known.costs)

    def _may_repeat(self, node: Node, spec: OpSpec) -> bool:
        """Whether the op may be repeated on axes that could split it.

        Matmuls, convolutions and attention never: that is what a grid is for, and costs that count bytes only would
        find it free. With regather="all" nor may any op on tensors of some size: backward keeps what it reads and
        makes, which would be whole on several ranks, where "all" promises 1/P.
        """
        if spec.flops:
            return False
        kept = [r for r in results(node) if r is not None]
        kept += [o.meta["val"] for o in operands(node) if o in self.grads and o.op != "placeholder"]
        return self.regather != "all" or all(t.numel() < _SMALL for t in kept)

    def _may_be_partial(self, value: Node) -> bool:
        """Whether a partial sum can reach a reader of this value: through single readers from an op that sums."""
        if value not in self.partial:
            source, _ = producer(value)
            found = False
            if source.op == "call_function" and len(self.slots.get(value, ())) == 1 and self._planned(source):
                spec = self.factors.specs[source]
                found = bool(summed_factors(spec)) or (
                    spec.linear and all(self._may_be_partial(o) for o in operands(source))
                )
            self.partial[value] = found
        return self.partial[value]

    def _weight_operand(self, node: Node) -> int | None:
        """Number of the operand that is a weight matrix, for the named schemes."""
        found = [i for i, o in enumerate(operands(node)) if self._is_weight(o)]
        return found[-1] if found else None

    def _within_scheme(self, node: Node, spec: OpSpec, options: list[Strategy]) -> tuple[list[Strategy], bool]:
        """The strategies that the scheme allows, or all of them and False where it allows none."""
        number = self._weight_operand(node)
        if self.scheme == "auto" or number is None:
            return options, True
        weight = set(spec.atoms(spec.inputs[number]))
        out = {f for dims in spec.outputs for f in spec.atoms(dims)}
        roles = _ROLES[self.scheme]
        legal = []
        for s in options:
            held = {"a": "", "b": "", "c": ""}
            for f, axes in s.assigned:
                own = "".join(a for a in axes if a != REPLICAS)
                held["c" if f in weight and f not in out else "a" if f in weight else "b"] += own
            key = tuple("".join(sorted(held[r])) for r in "abc")
            if key in [tuple("".join(a for a in r if a in self.grid.axes) for r in role) for role in roles]:
                legal.append(s)
        return (legal, True) if legal else (options, False)

    def _is_weight(self, node: Node) -> bool:
        return (
            node.name in self.arguments
            and self.arguments[node.name].kind == "parameter"
            and (len(self.factors.values[node].atoms) >= 2)
        )

    def _stored(self, node: Node) -> None:
        value = self.factors.values[node]
        vertex = ("storage", node)
        if node.name in self.pinned:
            self.options[vertex] = [self.pinned[node.name]]
        elif self.arguments[node.name].kind != "parameter":  # an input whose gradient the user wants whole
            self.options[vertex] = [State(((),) * len(value.atoms))]
        else:
            self.options[vertex] = self._parameter_states(node)
        options = self.options[vertex]
        self.problem.vertex(vertex, self._nothing(len(options)))

    def _parameter_states(self, node: Node) -> list[State]:
        value = self.factors.values[node]
        if node.name in self.pins.storage:
            name, wish = self.arguments[node.name].names[0], self.pins.storage[node.name]
            return self._kept(plain_states(value, self.grid), name, value, wish)
        if value not in self.stored:
            self.stored[value] = storages(value, self.grid)
        return self.stored[value]

    def _kept(self, options: list[State], name: str, value: ValueShape, wish: Wish) -> list[State]:
        found, conflict = kept_states(options, name, value, wish, self.grid)
        self.conflicts += [conflict] if conflict else []
        return found

    def _nothing(self, states: int) -> np.ndarray:
        return self.zeros.setdefault(states, np.zeros(states))

    def _value(self, value: Node, slots: list[Slot]) -> None:
        """The edges from a value to its readers, through a shared copy when there are several.

        Readers of one kind (k and v, or both operands of x + x) may share one more copy, made from that of all.
        """
        home = self._home(value)
        readers = [(slot, self._reader(value, slot)) for slot in slots]
        groups: dict[Any, list[tuple[Slot, _End]]] = {}
        for slot, reader in readers:
            groups.setdefault(tuple(reader.states), []).append((slot, reader))
        if len(slots) > 1:
            home = self._copy(("copy", value), home, value, slots)
        for number, members in enumerate(groups.values()):
            start = home
            if len(groups) > 1 and len(members) > 1:
                start = self._copy(("group", (value, number)), home, value, [slot for slot, _ in members])
                self.members[value, number] = [slot for slot, _ in members]
            for slot, reader in members:
                self._edge(start, reader, value, [slot])

    def _copy(self, vertex: Any, source: _End, value: Node, slots: list[Slot]) -> _End:
        shape = self.factors.values[value]
        kinds = "RV" if value in self.grads else "R"
        replicas = self._shared_place(source, value, slots)
        key: tuple[Any, ...] = ("copy", shape.atoms, kinds, replicas)
        if key not in self.placements:
            self.placements[key] = states(shape.atoms, self.grid, kinds, replicas)
        found = self.placements[key]
        if vertex[0] == "copy" and value.name in self.pins.copies:
            wish = self.pins.copies[value.name]
            found = self._kept(found, value.name, shape, wish)
            key = (*key, wish)
        copy = _End(vertex, key, found)
        self.options[vertex] = copy.states
        held = (key, shape.bytes)
        if held not in self.held:
            share = [1.0 / self.grid.extent(s.sharding) for s in copy.states]
            self.held[held] = self.tie * shape.bytes * np.array(share)
        self.ties[vertex] = self.held[held]
        self.problem.vertex(vertex, self.held[held])
        self._edge(source, copy, value, slots)
        return copy

    def _shared_place(self, source: _End, value: Node, slots: list[Slot]) -> Place:
        """Of replicas in a copy that several readers share: where all want it, or else where the fewest must change."""
        if self.grid.replicas == 1:
            return "R"
        wanted = {_place(self._reader(value, slot)) for slot in slots}
        if len(wanted) == 1:
            (place,) = wanted
            return "R" if place == "P" else place
        home = _place(source)
        if isinstance(home, int):
            return home
        return "V" if value in self.grads else "R"

    def _home(self, value: Node) -> _End:
        """Where the value comes from, and per state of that vertex the placement it has there."""
        source, result = producer(value)
        vertex = ("op", source)
        if vertex not in self.options:
            vertex = ("storage", source)
            options = self.options[vertex]
            return _End(vertex, ("storage", tuple(options)), options)
        key = ("given", self.kinds[source], result)
        if key not in self.placements:
            spec = self.factors.specs[source]
            self.placements[key] = [given(spec, s, result) for s in self.options[vertex]]
        return _End(vertex, key, self.placements[key])

    def _reader(self, value: Node, slot: Slot) -> _End:
        """The reader's vertex, and per state of it the placement that it needs."""
        if slot.reader is None:
            vertex: Any = ("result", slot.operand)
            targets = self.result_states(slot.operand, self.factors.values[value], _place(self._home(value)))
            if vertex not in self.options:
                self.options[vertex] = targets
                self.problem.vertex(vertex, self._nothing(len(targets)))
            return _End(vertex, ("result", tuple(targets)), targets)
        vertex = ("op", slot.reader)
        grad = value in self.grads
        key = ("needed", self.kinds[slot.reader], slot.operand, grad)
        if key not in self.placements:
            spec = self.factors.specs[slot.reader]
            self.placements[key] = [needed(spec, s, slot.operand, grad=grad) for s in self.options[vertex]]
        return _End(vertex, key, self.placements[key])

    def _edge(self, source: _End, target: _End, value: Node, slots: list[Slot]) -> None:
        self.legs.append(Leg(source, target, value, slots))
        shape = self.factors.values[value]
        grad = value in self.grads
        again = drops(self.regather, value) and any(s in self.regathered for s in slots)
        key = (source.key, target.key, shape.atoms, shape.bytes, grad, again)
        if key not in self.prices:  # equal layers have equal edges
            self.prices[key] = self._prices(source, target, shape, grad=grad, again=again)
        self.problem.edge(source.vertex, target.vertex, self.prices[key])

    def _prices(self, source: _End, target: _End, shape: ValueShape, *, grad: bool, again: bool) -> np.ndarray:
        """Per state of either end, seconds of the change of layout; `again`: what is gathered is gathered again."""
        start, goal = (_place(end) if self.grid.replicas > 1 else "R" for end in (source, target))
        table = price_table(len(shape.atoms), self.grid.one_replica, self.hardware)
        sources, targets = ([s.without_replicas() for s in end.states] for end in (source, target))
        # Few distinct placements stand behind many strategies: price those, then spread.
        left, at_left = np.unique([table.index[s] for s in sources], return_inverse=True)
        right, at_right = np.unique([table.index[s] for s in targets], return_inverse=True)
        atoms, size = shape.atoms, shape.bytes
        if start == goal and isinstance(goal, int):
            size //= self.grid.replicas
            atoms = tuple(n // self.grid.replicas if i == goal else n for i, n in enumerate(atoms))
        if start == goal or (start, goal) == ("R", "V"):
            prices = table.price(left, right, size, atoms=atoms, grad=grad, regather=again)
            if start != goal:
                prices = prices + forked(table, left, right, size, self.grid, self.hardware)
        else:
            states = list(table.index)
            ways = [(with_replicas(states[i], start), with_replicas(states[j], goal)) for i in left for j in right]
            each = travelled(ways, shape.atoms, size, self.grid, self.hardware, grad=grad, regather=again)
            prices = each.reshape(len(left), len(right))
        found: np.ndarray = prices[np.ix_(at_left, at_right)]
        return found

    def ways(self, value: Node, choice: Mapping[Any, int]) -> Iterator[tuple[State, State, list[Slot]]]:
        """The changes of layout of a planned value under a choice, and for which readers: as `_value` has edges."""
        slots = self.slots[value]
        home = self._home(value)
        now = home.states[choice[home.vertex]]
        if len(slots) > 1:
            copy = self.options["copy", value][choice["copy", value]]
            yield now, copy, slots
            now = copy
        for slot in slots:
            reader = self._reader(value, slot)
            yield now, reader.states[choice[reader.vertex]], [slot]

    # -- compute ------------------------------------------------------------------------------------

    def _seconds(self, node: Node, spec: OpSpec, options: Sequence[Strategy]) -> np.ndarray:
        """Per strategy, of one rank, forward and backward: the op's roofline time, that of the collectives inside its
        lowering, and the bytes that it reads and makes."""
        grid, hardware = self.grid, self.hardware
        backward = 2.0 if node in self.grads else 0.0
        read = operands(node)
        shapes = [self.factors.values[o] for o in read]
        tensors = [(s.bytes, spec.atoms(d)) for s, d in zip(shapes, spec.inputs, strict=True)]
        dtypes = [s.dtype for s in shapes[:1]]
        for val, dims in zip(results(node), spec.outputs, strict=False):
            if isinstance(val, Tensor):
                names = spec.atoms(dims)
                tensors.append((math.prod(spec.sizes[f] for f in names) * val.dtype.itemsize, names))
                dtypes.append(val.dtype)
        dtype = dtypes[-1]
        rates = per_unit(hardware.rate(dtype)), per_unit(hardware.memory)
        free = is_view(node)
        found = np.zeros((len(options), 3))
        for i, strategy in enumerate(options):
            parts = {f: grid.extent(axes) for f, axes in strategy.assigned}
            moved = 0.0
            for size, names in tensors:
                moved += size / math.prod(parts[f] for f in names if f in parts)
            flops = spec.flops / math.prod(parts.values())
            seconds = (1 + backward) * compute_seconds(flops, 0.0 if free else moved, *rates)
            inside = 0.0
            if spec.exchange is not None:
                for e in spec.exchange(LocalOp(node, spec, strategy.axes_of, grid)):
                    link = hardware.link(e.axis, grid)
                    if e.phase == "forward" or read[0] in self.grads:
                        moved_bytes = sent(e.kind, grid.axis_size(e.axis), e.elements) * (e.dtype or dtype).itemsize
                        inside += link_seconds(link, moved_bytes)
            found[i] = seconds, inside, moved
        return found

    # -- after solving ------------------------------------------------------------------------------

    def _decisions(self, picked: dict[Any, Any], cost: float, bound: float, seconds: dict[str, float]) -> Decisions:
        chosen: dict[str, Strategy] = {}
        storage: dict[str, State] = {}
        copies: dict[str, State] = {}
        groups: dict[tuple[str, str, int], State] = {}
        results: list[State | None] = [None] * len(self.program.results)
        for (kind, what), option in picked.items():
            if kind == "op":
                chosen[what.name] = option
            elif kind == "storage":
                storage[what.name] = option
            elif kind == "copy":
                copies[what.name] = option
            elif kind == "group":
                for slot in self.members[what]:
                    groups[what[0].name, slot.reader.name if slot.reader else "", slot.operand] = option
            else:
                results[what] = option
        self._set_aside(chosen, storage, results)
        return Decisions(
            self.grid,
            self.hardware,
            chosen,
            storage,
            copies,
            tuple(results),
            cost,
            bound,
            math.fsum(seconds.values()),
            seconds,
            self._kept_whole(storage),
            groups,
            tuple(self.off_scheme),
        )

    def _set_aside(self, chosen: dict[str, Strategy], storage: dict[str, State], results: list[State | None]) -> None:
        """Strategies for what depends on no parameter: sharded where all readers want the same shard, else whole."""
        for node in reversed(self.graph.nodes):
            if node.op == "output" or is_getitem(node):
                continue
            if node.op == "placeholder":
                if node.name not in storage:
                    atoms = len(self.factors.values[node].atoms) if node in self.factors.values else 0
                    whole = State(((),) * atoms)
                    storage[node.name] = self.pinned.get(node.name, whole)
                    if self.arguments[node.name].kind == "parameter" and node.name not in self.pinned:
                        storage[node.name] = self._parameter_states(node)[0]
                continue
            if node.name in chosen:
                continue
            chosen[node.name] = self._wanted(node, chosen) or Strategy()
        for i, result in enumerate(self.program.results):
            if result.node is not None and results[i] is None:
                node = next(n for n in self.graph.nodes if n.name == result.node)
                results[i] = self.result_states(i, self.factors.values[node], "R")[0]

    def _wanted(self, node: Node, chosen: dict[str, Strategy]) -> Strategy | None:
        spec = self.factors.specs[node]
        if len(spec.outputs) != 1 or spec.exchange is not None or node not in self.slots:
            return None
        wants: set[State] = set()
        for slot in self.slots[node]:
            if slot.reader is None:
                return None
            state = needed(self.factors.specs[slot.reader], chosen[slot.reader.name], slot.operand, grad=False)
            wants.add(state)
        if len(wants) != 1:
            return None
        (state,) = wants
        atoms = spec.atoms(spec.outputs[0])
        assigned = tuple((f, axes) for f, axes in zip(atoms, state.atoms, strict=True) if axes)
        if state.partial or any(f in spec.whole for f, _ in assigned):
            return None
        return Strategy(assigned)

    def _kept_whole(self, storage: dict[str, State]) -> dict[str, str]:
        """Parameters that are not fully sharded, and why."""
        found = {}
        nodes = {n.name: n for n in self.graph.nodes}
        for argument in self.program.arguments_of("parameter"):
            node = nodes[argument.node]
            state = storage[argument.node]
            idle = [a for a in self.grid.one_replica.axes if a not in state.sharding]
            if idle:
                found[argument.names[0]] = f"whole over {', '.join(idle)}: {self._why_whole(node, state)}"
        return found

    def _why_whole(self, node: Node, state: State) -> str:
        shape = tuple(node.meta["val"].shape)
        plain = ValueShape(tuple((int(n),) if n > 1 else () for n in shape), node.meta["val"].dtype)
        if self.grid.extent(storages(plain, self.grid)[0].sharding) == self.grid.extent(state.sharding):
            return f"no dim of {shape} is divisible by more of the grid"
        dims = " and ".join(" x ".join(map(str, d)) for d in self.factors.values[node].dims if len(d) > 1)
        return f"{shape} is also read as {dims}, whose outer part the grid does not divide"


def _place(end: _End) -> Place:
    """Of replicas: the same in all states of a vertex."""
    return end.states[0].place(REPLICAS)


# Axes of the roles (a, b, c) of design 1. A scheme may use several, and alternates as the costs say.
_ROLES: dict[str, tuple[tuple[str, str, str], ...]] = {
    "3d": (("y", "x", "z"), ("z", "x", "y")),
    "2d": (("xy", "", "z"), ("z", "", "xy")),
    "1d": (("xyz", "", ""), ("", "", "xyz")),
    "zero3": (("", "xyz", ""),),
    "zero3x1d": (("yz", "x", ""), ("", "x", "yz")),
}


def storages(value: ValueShape, grid: Grid) -> list[State]:
    """The layouts in which a parameter may be stored: sharded over as many devices as its shape allows.

    Only layouts that a DTensor carries exactly: every dim an even cut of its outermost atom.
    """
    plain = plain_states(value, grid)
    most = max(grid.extent(s.sharding) for s in plain)
    return [s for s in plain if grid.extent(s.sharding) == most]


def plain_states(value: ValueShape, grid: Grid) -> list[State]:
    """All placements that a DTensor carries exactly, replication included."""
    found = [s for s in states(value.atoms, grid, "R") if value.even(s)]
    return [s for s in found if value.layout(s, grid).is_plain]
