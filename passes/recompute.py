"""recompute: which saved values the backward computes again from other saved ones, to free so many bytes.

Used by `differentiate`, on the joint graph that it traces. A value may be computed again when its op is no collective
and draws no random numbers, and when what it reads is saved, or computed again, already; or is saved from then on,
where that takes less. Collectives are never repeated for it: results of reduce_scatter and all_reduce stay saved, and
only gathers that the backward does again anyway are read. The cheapest in seconds per byte come first.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from torch import Tensor
from torch.fx import Node

from autopar3d.grid import Grid
from autopar3d.hardware import Hardware
from autopar3d.timelines.timing import is_random, is_start, is_wait, seconds


@dataclass(frozen=True)
class Machine:
    """What ops are timed on."""

    grid: Grid
    hardware: Hardware


def cheapest(
    saved: Collection[Node],
    repeatable: Collection[Node],
    again: Collection[Node],
    results: Collection[Node],
    free: float,
    machine: Machine,
) -> set[Node]:
    """Nodes to compute again, so that about `free` bytes less are saved, or as many as can be.

    Args:
        saved: what the backward reads of the forward: arguments, and results of nodes.
        repeatable: nodes that are computed again where the backward reads them.
        again: those of them that it does read.
        results: what leaves the forward anyway, so that not to save it frees nothing.
    """
    return _Recompute(saved, repeatable, again, results, machine).run(free)


class _Recompute:
    def __init__(
        self,
        saved: Collection[Node],
        repeatable: Collection[Node],
        again: Collection[Node],
        results: Collection[Node],
        machine: Machine,
    ) -> None:
        self.saved, self.repeatable, self.again = dict.fromkeys(saved), set(repeatable), set(again)
        self.results, self.machine = set(results), machine
        self.added: set[Node] = set()

    def run(self, free: float) -> set[Node]:
        queue: list[tuple[float, int, Node]] = []
        numbers: dict[Node, int] = {}
        for op in dict.fromkeys(_op(n) for n in self.saved):
            self._push(queue, numbers, op)
        while queue and free > 0:
            price, _, op = heapq.heappop(queue)
            now = self._weighed(op)
            if now is None:
                continue
            rate, freed, nodes, sources = now
            if queue and rate > queue[0][0] and rate > price:
                heapq.heappush(queue, (rate, numbers[op], op))
                continue
            free -= freed
            for n in nodes:
                self.saved.pop(n, None)
            self.added |= nodes
            self.repeatable |= nodes
            self.again |= nodes
            self.saved |= dict.fromkeys(sources)
            # What is saved from now on for this one may be computed again in its turn.
            for source in sources:
                self._push(queue, numbers, _op(source))
        return self.added

    def _push(self, queue: list[tuple[float, int, Node]], numbers: dict[Node, int], op: Node) -> None:
        found = self._weighed(op)
        if found is not None:
            numbers.setdefault(op, len(numbers))
            heapq.heappush(queue, (found[0], numbers[op], op))

    def _weighed(self, op: Node) -> tuple[float, float, set[Node], list[Node]] | None:
        """Seconds a byte, bytes freed, the nodes to compute again, and what must be saved for it."""
        if not _may_repeat(op):
            return None
        items = [n for n in _values(op) if n in self.saved]
        nodes, sources, took = {op, *items}, dict[Node, None](), 0.0
        todo = list(op.all_input_nodes)
        took += seconds(op, self.machine.hardware, self.machine.grid)
        while todo:
            n = todo.pop()
            if n in nodes or n in self.saved or n in self.again:
                continue
            if n.op != "call_function" or n not in self.repeatable:
                sources[n] = None
                continue
            if is_start(n) or is_wait(n):  # a gather that the backward does not do otherwise
                return None
            nodes.add(n)
            took += seconds(n, self.machine.hardware, self.machine.grid)
            todo += n.all_input_nodes
        freed = sum(_size(n) for n in items if n not in self.results)
        freed -= sum(_size(n) for n in sources if n.op == "call_function")
        if freed <= 0:
            return None
        return took / freed, freed, nodes, list(sources)


def _op(value: Node) -> Node:
    """The op of a result that is taken out of several."""
    while value.target is operator.getitem:
        value = value.all_input_nodes[0]
    return value


def _values(op: Node) -> Iterator[Node]:
    yield op
    for user in op.users:
        if user.target is operator.getitem:
            yield user


def _may_repeat(op: Node) -> bool:
    return op.op == "call_function" and not is_start(op) and not is_wait(op) and not is_random(op)


def _size(value: Node) -> int:
    val = value.meta.get("val")
    return val.numel() * val.dtype.itemsize if isinstance(val, Tensor) else 0
