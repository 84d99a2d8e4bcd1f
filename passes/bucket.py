"""bucket: an emitted graph -> the same with small collectives merged. A merged one pays its latency once.

Collectives of one kind, axis and dtype become one coalesced collective when each is small and there is a place in the
graph where all of them may run. Three sorts are kept apart, as they are scheduled in different ways:

- *ahead*: gathers of what is there from the beginning (weights, saved shards). They run before their first reader.
- *late*: reductions that only the output reads (gradients). They run when the last of them is ready.
- what is between: they run where all are ready and none is read, and no heavy op (matmul, convolution, attention)
  stands between them.

What is small depends on the sort. On what is between a reader waits, so there it is what takes less time to send than
its latency. The first two run beside compute, all but one bucket: the first of those ahead, the last of the late ones.
If all of a sort take T to send and go in k buckets, k latencies l are paid and T/k cannot hide. That is least where a
bucket takes sqrt(T l) to send.

Gathers bring the same values, bit for bit. Sums may be taken in another order: `gloo` and `nccl` cut what they reduce
into other pieces.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from autopar3d.grid import Grid
from autopar3d.hardware import Hardware
from autopar3d.timelines.timeline import Storage, live_bytes
from autopar3d.timelines.timing import (
    axis_of,
    changes_form,
    is_heavy,
    is_random,
    is_start,
    link_of,
    mutates,
    prepares,
    sent_bytes,
)

c10d = torch.ops._c10d_functional

COALESCED = {
    c10d.all_gather_into_tensor.default: c10d.all_gather_into_tensor_coalesced.default,
    c10d.reduce_scatter_tensor.default: c10d.reduce_scatter_tensor_coalesced.default,
    c10d.all_reduce.default: c10d.all_reduce_coalesced.default,
}

# A bucket may send for so many times its latency, so that its first reader does not wait long for the others.
_FULL = 2.0

AHEAD, LATE = _HIDDEN = ("ahead", "late")


def bucket(module: GraphModule, grid: Grid, hardware: Hardware, *, memory: float = 0.05) -> GraphModule:
    """Merge small collectives of a forward or backward graph.

    Args:
        memory: the predicted peak of live bytes may rise by at most this fraction (gathered early, or not yet
            reduced, members of a bucket are held longer); buckets are made smaller until it does not.
    """
    nodes = list(module.graph.nodes)
    if any(mutates(n) for n in nodes):
        return module
    facts = _Facts(nodes, grid, hardware)
    peak = int(live_bytes(nodes).max(initial=0))
    # Several buckets hold memory at once: of each axis, gathered and not yet reduced.
    for share in (memory, memory / 2, memory / 4, memory / 16):
        buckets = _choose(facts, share * peak)
        if not buckets:
            break
        found = _emit(module, facts, buckets)
        if int(live_bytes(list(found.graph.nodes)).max(initial=0)) <= (1.0 + memory) * peak:
            return found
    return module


@dataclass(frozen=True)
class _Window:
    """Where a collective may run: after position `ready`, before `deadline`. `depth`: heavy ops up to `ready`."""

    ready: int
    deadline: int
    depth: int


class _Facts:
    """What is read of a graph once.

    Attributes:
        index: position of each node.
        tail: nodes of which nothing but the output is made, by light work.
        cost: per start that has a coalesced form, its bytes' time over its latency; `number` of each, a bit in
            `before`.
        before: per node, the starts in `cost` that it depends on, as bits.
        windows: per start in `cost` its window.
        sort: what starts of one bucket have in common; `full`, by sort: the most that a bucket of it may cost.
        starts: those in `cost` that are small, in order.
        held: bytes that each of these holds, gathered or not yet reduced.
    """

    def __init__(self, nodes: list[Node], grid: Grid, hardware: Hardware) -> None:
        self.nodes = nodes
        self.index = {n: i for i, n in enumerate(nodes)}
        self.tail = _tail(nodes)
        self.cost: dict[Node, float] = {}
        for node in nodes:
            if node.target in COALESCED:
                link = link_of(node, hardware, grid)
                if link.latency:
                    self.cost[node] = sent_bytes(node, grid) / link.bandwidth / link.latency
        number = {n: i for i, n in enumerate(self.cost)}
        self.before: dict[Node, int] = {}
        for node in nodes:
            bits = 0
            for n in node.all_input_nodes:
                bits |= self.before[n] | (1 << number[n] if n in number else 0)
            self.before[node] = bits
        self.number = number
        self.ahead, ready = self._ready()
        deadline = self._deadlines()
        depth, depths = 0, []
        for node in nodes:
            depth += is_heavy(node)
            depths.append(depth)
        self.windows = {n: _Window(r := ready[n], deadline[n], depths[r] if r >= 0 else 0) for n in self.cost}
        self.sort = {n: self._sort(n) for n in self.cost}
        total: dict[tuple[Any, ...], float] = defaultdict(float)
        for start, sort in self.sort.items():
            total[sort] += self.cost[start]
        self.full = {s: max(_FULL, math.sqrt(t)) if s[0] in _HIDDEN else _FULL for s, t in total.items()}
        self.starts = [n for n in self.cost if 2.0 * self.cost[n] < self.full[self.sort[n]]]
        storage = Storage(nodes)
        self.held = {n: self._held(n, storage) for n in self.starts}

    def _ready(self) -> tuple[set[Node], dict[Node, int]]:
        ahead: set[Node] = set()
        ready: dict[Node, int] = {}
        for node in self.nodes:
            before = max((ready[n] for n in node.all_input_nodes), default=-1)
            form = changes_form(node) or is_start(node)
            if node.op in ("placeholder", "get_attr") or (
                (form or prepares(node)) and node.all_input_nodes and all(n in ahead for n in node.all_input_nodes)
            ):
                ahead.add(node)
                ready[node] = -1
            else:
                ready[node] = before if form else self.index[node]
        return ahead, ready

    def _deadlines(self) -> dict[Node, int]:
        deadline: dict[Node, int] = {}
        for node in reversed(self.nodes):
            passes = changes_form(node) or is_start(node) or node in self.tail
            first = min((deadline[u] for u in node.users), default=len(self.nodes))
            deadline[node] = first if passes else self.index[node]
        return deadline

    def _sort(self, node: Node) -> tuple[Any, ...]:
        when = AHEAD if node in self.ahead else LATE if node in self.tail else str(self.windows[node].depth)
        return (when, node.target, axis_of(node), node.meta["val"].dtype, *map(str, node.args[1:]))

    def _held(self, node: Node, storage: Storage) -> int:
        # A gradient's reduced form is kept to the end, in a bucket or not.
        result = 0 if self.sort[node][0] == LATE else storage.size[node]
        return result + sum(storage.size[n] for n in storage.reads[node] if n.op == "call_function")


def _tail(nodes: list[Node]) -> set[Node]:
    found = {nodes[-1]}
    for node in reversed(nodes[:-1]):
        work = node.op == "call_function" and not is_heavy(node) and not is_random(node)
        if work and node.users and found.issuperset(node.users):
            found.add(node)
    return found


def _choose(facts: _Facts, room: float) -> list[list[Node]]:
    """Sets of starts to merge, each of two or more, that hold at most `room` bytes."""
    sorts: dict[tuple[Any, ...], list[Node]] = defaultdict(list)
    for start in facts.starts:
        if 2 * facts.held[start] <= room:
            sorts[facts.sort[start]].append(start)
    found: list[list[Node]] = []
    ancestors = _Ancestors(facts)
    for (when, *_), members in sorts.items():
        if when == AHEAD:
            members = sorted(members, key=lambda n: facts.windows[n].deadline)
        held: list[Node] = []
        for start in members:
            if held and not (_fit(facts, [*held, start], room) and ancestors.may_merge(held, start)):
                found.append(held)
                held = []
            if held:
                ancestors.merge(held, start)
            held = [*held, start]
        found.append(held)
    return [b for b in found if len(b) > 1]


def _fit(facts: _Facts, members: list[Node], room: float) -> bool:
    windows = [facts.windows[n] for n in members]
    together = max(w.ready for w in windows) < min(w.deadline for w in windows)
    short = sum(facts.cost[n] for n in members) <= facts.full[facts.sort[members[0]]]
    return together and short and sum(facts.held[n] for n in members) <= room


class _Ancestors:
    """Whether merging makes a circle: a bucket must not wait, through whatever other buckets, for itself."""

    def __init__(self, facts: _Facts) -> None:
        self.facts = facts
        # Per bucket by its first start: its members, and all that these depend on in the graph as it was, as bits.
        self.buckets: dict[Node, tuple[int, int]] = {}

    def may_merge(self, held: list[Node], start: Node) -> bool:
        own, reach = self._bits([*held, start])
        others = [b for first, b in self.buckets.items() if first is not held[0]]
        while True:
            # Whoever waits for a member of a bucket waits for all of them.
            met = [b for b in others if b[0] & reach]
            if not met or own & reach:
                return not own & reach
            others = [b for b in others if not b[0] & reach]
            for members, before in met:
                reach |= members | before

    def merge(self, held: list[Node], start: Node) -> None:
        self.buckets[held[0]] = self._bits([*held, start])

    def _bits(self, members: list[Node]) -> tuple[int, int]:
        own = before = 0
        for n in members:
            own |= 1 << self.facts.number[n]
            before |= self.facts.before[n]
        return own, before


def _emit(module: GraphModule, facts: _Facts, buckets: list[list[Node]]) -> GraphModule:
    """The graph with the buckets, otherwise as near to its order as can be."""
    graph = Graph()
    copied: dict[Node, Node] = {}
    bucket_of = {n: b for b in buckets for n in b}
    last = {max(b, key=facts.index.__getitem__) for b in buckets}

    def needs(node: Node) -> Iterable[Node]:
        return [m for n in bucket_of.get(node, (node,)) for m in n.all_input_nodes]

    def emit(node: Node) -> None:
        todo = [node]
        while todo:
            n = todo[-1]
            missing = [m for m in needs(n) if m not in copied] if n not in copied else []
            if missing:
                todo += sorted(missing, key=facts.index.__getitem__, reverse=True)
                continue
            todo.pop()
            if n in copied:
                continue
            if n in bucket_of:
                _merge(graph, bucket_of[n], copied)
            else:
                copied[n] = graph.node_copy(n, lambda m: copied[m])

    # Buckets that are not emitted yet, as bits: what is made of their results waits too, so that nothing runs early.
    pending = sum(1 << facts.number[n] for n in bucket_of if n not in facts.ahead)
    waiting: list[list[Node]] = []
    for node in facts.nodes[:-1]:
        if node in bucket_of:
            if node in last and node not in facts.ahead:
                waiting.append(bucket_of[node])
            for members in list(waiting):
                own = sum(1 << facts.number[n] for n in members)
                if not any(facts.before[n] & pending & ~own for n in members):
                    emit(members[0])
                    pending &= ~own
                    waiting.remove(members)
        # What only changes a form goes with its reader.
        elif (
            all(n in copied for n in node.all_input_nodes) or not (changes_form(node) or node in facts.ahead)
        ) and not (node in facts.tail and facts.before[node] & pending):
            emit(node)
    for node in facts.nodes:
        emit(node)
    graph.lint()
    result = GraphModule(module, graph)
    result.meta.update(module.meta)
    return result


def _merge(graph: Graph, members: list[Node], copied: dict[Node, Node]) -> None:
    first = members[0]
    start = graph.call_function(COALESCED[first.target], ([copied[n.args[0]] for n in members], *first.args[1:]))  # type: ignore[index]
    start.meta = {"val": [n.meta["val"] for n in members], "nn_module_stack": _common(members)}
    if "stack_trace" in first.meta:
        start.meta["stack_trace"] = first.meta["stack_trace"]
    for i, n in enumerate(members):
        copied[n] = graph.call_function(operator.getitem, (start, i), name=n.name)
        copied[n].meta = dict(n.meta)


def _common(members: list[Node]) -> dict[str, Any]:
    """The modules that all members lie in."""
    stacks = [list(n.meta.get("nn_module_stack", {}).items()) for n in members]
    shared = []
    for entries in zip(*stacks, strict=False):
        if any(e != entries[0] for e in entries):
            break
        shared.append(entries[0])
    return dict(shared)
