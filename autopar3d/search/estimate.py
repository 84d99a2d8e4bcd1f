"""What a decided plan will take, before its graphs are emitted: to compare many grids in little time.

The planner's objective adds everything up. Here compute and communication run side by side, as they will: ops one
after the other, forward and then backward; the collectives of each link in a queue, each as soon as what it moves is
there. So gathers of weights run ahead, reductions of gradients drain, and the collectives of activations hold the
next op up. (The schedule of the emitted graphs also changes the order of ops; `timeline` predicts that one.)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.fx import Node

from ..cost import link_seconds
from ..hardware import Link
from ..passes.rewrite import Movement
from ..plan import Decisions
from ..program import Program, region
from ..redistribute import State, Transfer, route
from ..rules import operands, results
from .factors import Factors, is_getitem, producer
from .readings import drops, gradients, readings, recomputed, regathered, saved, values_of
from .saved import is_view
from .strategies import given, needed


@dataclass(frozen=True)
class Estimate:
    """Per rank, for one forward and backward.

    Args:
        seconds: of the step; `compute`: of it, in which ops run.
        exposed: per axis, seconds in which compute waits for its collectives.
        bytes: per axis, what is sent.
        memory: bytes of parameters, gradients, optimizer state (AdamW), and what is saved for backward.
    """

    seconds: float
    compute: float
    exposed: dict[str, float]
    bytes: dict[str, float]
    memory: dict[str, int]


def estimate(program: Program, decisions: Decisions, moves: Sequence[Movement], memory: dict[str, int]) -> Estimate:
    """Predict a step from what propagate and rewrite found; `memory`: see the function."""
    clock = _Clock(program, decisions, moves)
    clock.forward()
    clock.backward()
    sent = dict.fromkeys(decisions.grid.axes, 0.0)
    for m in moves:
        for t in m.transfers:
            sent[t.axis] += t.elements * m.dtype.itemsize
    return Estimate(clock.now, decisions.compute + clock.copying, clock.exposed, sent, memory)


class _Clock:
    """Time goes by. `ready`: when a value (its gradient, in backward) is there to be moved."""

    def __init__(self, program: Program, decisions: Decisions, moves: Sequence[Movement]) -> None:
        self.decisions, self.hardware = decisions, decisions.hardware
        graph = program.graph.graph
        self.ops = [n for n in graph.nodes if n.op == "call_function" and not is_getitem(n)]
        self.grads = gradients(program)
        self.before: dict[str, list[Movement]] = {}  # by the op that is the first to read what is moved
        self.inside: dict[str, list[Movement]] = {}
        self.of: dict[str, list[Movement]] = {}  # by the op whose result is moved
        makers = {n.name: producer(n)[0].name for n in graph.nodes if n.op == "call_function"}
        for m in moves:
            if m.kind == "inside":
                self.inside.setdefault(m.reader, []).append(m)
            else:
                self.before.setdefault(m.reader, []).append(m)
                self.of.setdefault(makers.get(m.value, m.value), []).append(m)
        self.makers = makers
        self.now = self.copying = 0.0
        self.free: dict[Link, float] = {}
        self.exposed = dict.fromkeys(decisions.grid.axes, 0.0)
        self.ready: dict[str, float] = {}

    def forward(self) -> None:
        for op in self.ops:
            self._hold([(m, t) for m in self.before.get(op.name, ()) for t in m.transfers if t.phase == "forward"])
            self._stop([(m, t) for m in self.inside.get(op.name, ()) for t in m.transfers if t.phase == "forward"])
            self.now += self._share(op)
            self.ready[op.name] = self.now
        self._hold([(m, t) for m in self.before.get("output", ()) for t in m.transfers if t.phase == "forward"])

    def backward(self) -> None:
        self.ready.clear()
        self.drained, self.last = self.now, ""
        done: dict[int, float] = {}  # movement -> when its gradient has been moved
        self._transpose(self.before.get("output", ()), done)
        for op in reversed(self.ops):
            for m in self.of.get(op.name, ()):  # the gradients of its result, from all readers
                if done.get(id(m), 0.0) > self.now:
                    self._wait(m.axis, done[id(m)])
            if op not in self.grads:
                continue
            self._hold([(m, t) for m in self.before.get(op.name, ()) for t in m.transfers if t.phase == "regather"])
            self._stop([(m, t) for m in self.inside.get(op.name, ()) for t in m.transfers if t.phase == "backward"])
            took = 2.0 * self._share(op)
            # The gradient of the activation comes first; that of the weight hides its reduction.
            self.now += took / 2.0
            self._transpose(self.before.get(op.name, ()), done)
            self.now += took / 2.0
        self._wait(self.last, self.drained)

    def _share(self, op: Node) -> float:
        """Seconds of the op's forward; its backward takes two times as long."""
        return self.decisions.seconds.get(op.name, 0.0) / (3.0 if op in self.grads else 1.0)

    def _send(self, m: Movement, t: Transfer, ready: float) -> float:
        """When a collective is through that can start when `ready`."""
        link = self.hardware.link(t.axis, self.decisions.grid)
        start = max(ready, self.free.get(link, 0.0))
        self.free[link] = start + link_seconds(link, t.elements * m.dtype.itemsize)
        return self.free[link]

    def _hold(self, moves: Sequence[tuple[Movement, Transfer]]) -> None:
        """Wait for what an op reads. What has no maker (weights, saved shards) was there from the beginning."""
        latest: dict[str, tuple[float, str]] = {}
        for m, t in moves:
            there = latest[m.value][0] if m.value in latest else self.ready.get(self.makers.get(m.value, ""), 0.0)
            latest[m.value] = (self._send(m, t, there), t.axis)
        for time, axis in sorted(latest.values()):
            self._wait(axis, time)
        self._reorder(moves)

    def _reorder(self, moves: Sequence[tuple[Movement, Transfer]]) -> None:
        took = sum(2.0 * m.reordered * m.dtype.itemsize / self.hardware.memory for m, _ in moves)
        self.now, self.copying = self.now + took, self.copying + took

    def _stop(self, moves: Iterable[tuple[Movement, Transfer]]) -> None:
        for m, t in moves:
            self._wait(t.axis, self._send(m, t, self.now))

    def _wait(self, axis: str, until: float) -> None:
        if until > self.now:
            self.exposed[axis] += until - self.now
            self.now = until

    def _transpose(self, moves: Iterable[Movement], done: dict[int, float]) -> None:
        """Send the gradients of what an op has read; whoever made it will wait for them."""
        for m in reversed(list(moves)):
            through = self.now
            for t in m.transfers:
                if t.phase == "backward":
                    through = self._send(m, t, through)
            self._reorder([(m, t) for t in m.transfers if t.phase == "backward"])
            done[id(m)] = through
            if through > self.drained:
                self.drained, self.last = through, m.axis


def memory(program: Program, factors: Factors, decisions: Decisions, regather: str) -> dict[str, int]:
    """Bytes of parameters, gradients, optimizer state and what is saved for backward, on one rank."""
    grid, nodes = decisions.grid, {n.name: n for n in program.graph.graph.nodes}
    parameters = trained = 0
    for argument in program.arguments:
        if argument.kind == "parameter":
            node = nodes[argument.node]
            val = node.meta["val"]
            size = val.numel() * val.dtype.itemsize
            if node in factors.values:  # else nobody reads it
                layout = factors.values[node].layout(decisions.storage[argument.node], grid)
                size = math.prod(layout.local_shape(val.shape, grid)) * val.dtype.itemsize
            parameters += size
            trained += size * argument.requires_grad
    saved = sum(saved_shards(program, factors, decisions, regather).values())
    return {"parameters": parameters, "gradients": trained, "optimizer": 2 * trained, "activations": saved}


def saved_shards(
    program: Program, factors: Factors, decisions: Decisions, regather: str
) -> dict[tuple[str, State], int]:
    """What backward keeps of the forward, by value and placement: bytes on one rank. Parameters are not counted."""
    grads, slots = gradients(program), readings(program)
    needed_again, inner = regathered(program), recomputed(program)
    found: dict[tuple[str, State], int] = {}
    for value, read in slots.items():
        shape = factors.values.get(value)
        source, result = producer(value)
        if value in inner or shape is None or source.op == "placeholder" or not isinstance(value.meta["val"], Tensor):
            continue
        if is_view(source) and operands(source)[0].op != "placeholder":
            continue  # its memory is that of what it views
        home = _home(factors, decisions, source, result)
        for slot in read:
            if slot not in needed_again or slot.reader is None:
                continue
            spec = factors.specs[slot.reader]
            target = needed(spec, decisions.strategies[slot.reader.name], slot.operand, grad=value in grads)
            kept, dropped = home, drops(regather, value)
            stops = (home, *decisions.way(value.name, slot.reader.name, slot.operand), target)
            for step in (s for a, b in itertools.pairwise(stops) for s in route(a, b)):
                if dropped and step.kind in ("gather", "regroup"):
                    break
                if region(slot.reader) is not None and step.kind not in ("scatter", "reduce"):
                    break  # a step of the reader's region
                kept = step.after
            state = kept.without_varying()
            found[value.name, state] = shape.bytes // decisions.grid.extent(state.sharding)
    for node, spec in factors.specs.items():
        if node not in grads:
            continue
        kept_of = saved(program).of(node, tuple(o in grads for o in operands(node)))
        leaving = {producer(v)[1] for v in values_of(node) if v not in inner}
        for i, val in enumerate(results(node)):
            if i in kept_of.results and (i in leaving or region(node) is None) and val is not None:
                state = given(spec, decisions.strategies[node.name], i)
                name = node.name if i == 0 else f"{node.name}.{i}"
                share = decisions.grid.extent(state.sharding)
                found.setdefault((name, state), val.numel() * val.dtype.itemsize // share)
        if kept_of.hidden and region(node) is None:
            share = decisions.grid.extent(decisions.strategies[node.name].axes)
            found[f"{node.name} (inside)", State(())] = kept_of.hidden // share
    return found


def _home(factors: Factors, decisions: Decisions, source: Node, result: int) -> State:
    return given(factors.specs[source], decisions.strategies[source.name], result)
