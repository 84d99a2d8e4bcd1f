"""What a step of an emitted graph takes, predicted: time, exposed communication, memory.

The graph's order is taken as it is. Compute runs node after node; a start puts its collective into its axis's queue,
which works in order; a wait holds compute until its collective is through. Collectives that are in flight at once on
one link share its bandwidth. A link that was idle lets its burst through at once, and saves up for the next.
"""

from __future__ import annotations

import operator
from collections import defaultdict, deque
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np
from torch.fx import GraphModule, Node

from ..grid import Grid
from ..hardware import Hardware, Link
from .timing import axis_of, is_start, is_view, is_wait, link_of, output_bytes, seconds, sent_bytes, value_bytes


@dataclass(frozen=True)
class Timeline:
    """Predictions for one rank and one run of a graph.

    Args:
        seconds: from the first node to the last.
        compute: seconds in which compute runs.
        communication: per axis, seconds its collectives would take one by one on an otherwise idle link.
        exposed: per axis, seconds in which compute stands still, waiting for one of its collectives.
        peak_bytes: the most bytes alive at once, inputs included.
    """

    seconds: float
    compute: float
    communication: dict[str, float]
    exposed: dict[str, float]
    peak_bytes: int

    @property
    def exposed_seconds(self) -> float:
        """Exposed seconds on all axes together."""
        return sum(self.exposed.values())


def timeline(module: GraphModule, grid: Grid, hardware: Hardware) -> Timeline:
    """Predict a `forward_graph` or `backward_graph` in the order in which its nodes stand."""
    return timeline_of(list(module.graph.nodes), grid, hardware)


def timeline_of(nodes: Sequence[Node], grid: Grid, hardware: Hardware) -> Timeline:
    """Predict all nodes of a graph in the order given (which may differ from the graph's own)."""
    network = Network(hardware, grid)
    communication = dict.fromkeys(grid.axes, 0.0)
    exposed = dict.fromkeys(grid.axes, 0.0)
    now = compute = 0.0
    for node in nodes:
        if is_start(node):
            network.advance(now)
            network.start(node)
            axis = axis_of(node)
            communication[axis] = communication.get(axis, 0.0) + seconds(node, hardware, grid)
        elif is_wait(node):
            start = start_of(node)
            done = network.finish(start) if start is not None else now
            if start is not None and done > now:
                axis = axis_of(start)
                exposed[axis] = exposed.get(axis, 0.0) + done - now
                now = done
        else:
            took = seconds(node, hardware, grid)
            now, compute = now + took, compute + took
    return Timeline(now, compute, communication, exposed, int(live_bytes(nodes).max(initial=0)))


def start_of(wait: Node) -> Node | None:
    """The start that a wait belongs to; None when it is in another graph."""
    node = wait.args[0]
    while isinstance(node, Node) and not is_start(node) and is_view(node):
        node = node.args[0]
    return node if isinstance(node, Node) and is_start(node) else None


class Network:
    """The queues of the axes, in simulated time: `start` collectives, then `advance` or `finish` them."""

    def __init__(self, hardware: Hardware, grid: Grid) -> None:
        self.hardware, self.grid = hardware, grid
        self.now = 0.0
        self.began: dict[Node, float] = {}  # when each came to the head of its queue
        self.done: dict[Node, float] = {}
        self._queues: dict[str, deque[_Flight]] = {a: deque() for a in grid.names}
        self._saved: dict[Link, float] = {}  # bytes that each link would let through at once

    @property
    def busy(self) -> bool:
        """Whether anything is in flight."""
        return any(self._queues.values())

    def start(self, node: Node) -> None:
        """Put a collective into its axis's queue, now."""
        link = link_of(node, self.hardware, self.grid)
        if not self._queues[axis_of(node)]:
            self.began[node] = self.now
        self._queues[axis_of(node)].append(_Flight(node, link, link.latency, sent_bytes(node, self.grid)))

    def advance(self, until: float) -> list[Node]:
        """Let time pass; the collectives that finish, in order."""
        finished = []
        while self.now < until or self._next() == 0.0:
            wait = self._next()
            if wait is None or self.now + wait > until:
                self._pass(until - self.now)
                self.now = until
                break
            finished += self._step(wait)
        return finished

    def advance_to_next(self) -> list[Node]:
        """Let time pass until some collective finishes; none when nothing is in flight."""
        while (wait := self._next()) is not None:
            if finished := self._step(wait):
                return finished
        return []

    def finish(self, node: Node) -> float:
        """Let time pass until a collective is through, if it is not; when it was through, in seconds."""
        while node not in self.done:
            if not self.advance_to_next():
                raise ValueError(f"{node.name} was never started")
        return self.done[node]

    def _next(self) -> float | None:
        """Seconds until a head of a queue gets through its latency or its bytes."""
        return min((f.left(s) for f, s in self._heads()), default=None)

    def _step(self, wait: float) -> list[Node]:
        through = [(f, f.latency_left > 0.0) for f, s in self._heads() if f.left(s) <= wait]
        self._pass(wait)
        self.now += wait
        finished = []
        for flight, in_latency in through:
            if in_latency:
                flight.latency_left = 0.0
                at_once = min(flight.bytes_left, self._saved.get(flight.link, flight.link.burst))
                flight.bytes_left -= at_once
                self._saved[flight.link] = self._saved.get(flight.link, flight.link.burst) - at_once
                continue
            queue = self._queues[axis_of(flight.node)]
            queue.popleft()
            self.done[flight.node] = self.now
            if queue:
                self.began[queue[0].node] = self.now
            finished.append(flight.node)
        return finished

    def _pass(self, time: float) -> None:
        sending = {f.link for f, _ in self._heads() if f.latency_left <= 0.0}
        for link, saved in self._saved.items():
            if link not in sending:
                self._saved[link] = min(link.burst, saved + time * link.bandwidth)
        for flight, sharers in self._heads():
            if flight.latency_left > 0.0:
                flight.latency_left = max(0.0, flight.latency_left - time)
            else:
                flight.bytes_left = max(0.0, flight.bytes_left - time * flight.link.bandwidth / sharers)

    def _heads(self) -> list[tuple[_Flight, int]]:
        heads = [q[0] for q in self._queues.values() if q]
        sending = [f.link for f in heads if f.latency_left <= 0.0]
        return [(f, max(1, sending.count(f.link))) for f in heads]


@dataclass
class _Flight:
    """A collective in a queue: what is left of its latency (seconds) and of its bytes."""

    node: Node
    link: Link
    latency_left: float
    bytes_left: float

    def left(self, sharers: int) -> float:
        return self.latency_left if self.latency_left > 0.0 else self.bytes_left * sharers / self.link.bandwidth


# -- memory ----------------------------------------------------------------------------------------------------------


class Storage:
    """Who owns and who reads the memory of a graph's values: `size[node]` in bytes (0 of a view), and
    `reads[node]`, the nodes whose memory it needs.

    A collective works on its input until it is waited for, so a wait counts as a reader of that too. Inputs of the
    graph belong to the caller, who keeps them: they have a size and no end. The items of a tuple end one by one, so
    each owns its memory; they must be taken right after it.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.size: dict[Node, int] = {}
        self.reads: dict[Node, tuple[Node, ...]] = {}
        owner: dict[Node, Node] = {}
        for node in nodes:
            owners = [owner[n] for n in node.all_input_nodes]
            if is_wait(node) and (start := start_of(node)) is not None:
                owners += [owner[n] for n in start.all_input_nodes]
            self.reads[node] = tuple(dict.fromkeys(owners))
            source = node.args[0] if is_view(node) else None
            if isinstance(source, Node) and node.target is operator.getitem and owner[source] is source:
                owner[node], self.size[node] = node, value_bytes(node)
                self.size[source] = max(0, self.size[source] - self.size[node])
                continue
            aliased = isinstance(source, Node)
            owner[node] = owner[source] if aliased else node  # type: ignore[index]
            self.size[node] = 0 if aliased or node.op == "output" else output_bytes(node)


def live_bytes(nodes: Sequence[Node], storage: Storage | None = None) -> np.ndarray:
    """Bytes alive while each node runs, its inputs and results included, when nodes run in the order given."""
    storage = storage or Storage(nodes)
    last = {n: i for i, n in enumerate(nodes)}
    for i, node in enumerate(nodes):
        for owner in storage.reads[node]:
            last[owner] = i
    change = np.zeros(len(nodes) + 1, dtype=np.int64)
    for i, node in enumerate(nodes):
        held = node.op in ("placeholder", "get_attr")
        change[0 if held else i] += storage.size[node]
        change[len(nodes) if held else last[node] + 1] -= storage.size[node]
    return np.cumsum(change[:-1])


class Forecast:
    """Bytes alive while a schedule departs from a plain order of the same nodes.

    Args:
        plain: the order to which the schedule can go back at any time.
        late: waits that need not run when the plain order has them; until then they hold memory.
    """

    def __init__(self, plain: Sequence[Node], late: AbstractSet[Node], storage: Storage) -> None:
        self.plain, self.late, self.storage = plain, late, storage
        self.now = 0
        # If all that is left ran in the plain order: bytes alive while its i-th node runs.
        self.later = live_bytes(plain, storage)
        self.position = {n: i for i, n in enumerate(plain)}
        self.next = 0  # position of the first node that is not run, late waits not counted
        self.held = 0  # bytes held by late waits that the plain order has behind it
        self._held_by: dict[Node, int] = {}
        self.done: set[Node] = set()
        self.readers: dict[Node, list[Node]] = defaultdict(list)
        for node in plain:
            for owner in storage.reads[node]:
                self.readers[owner].append(node)
        self.reads_left = {owner: len(nodes) for owner, nodes in self.readers.items()}

    def needed(self, node: Node, new: Sequence[Node]) -> int:
        """The peak, from now on, if a node and what must run with it (`new`, all) ran now, and all others in the plain
        order."""
        last = self.position[node]
        size = self.storage.size
        now = self.now + sum(size[n] for n in new)
        if last <= self.next:
            return now
        reads: dict[Node, int] = defaultdict(int)
        for n in new:
            for owner in self.storage.reads[n]:
                reads[owner] += 1
        change = sum(size[n] for n in new)
        change -= sum(size[n] for n, k in reads.items() if k == self.reads_left[n] and n.op == "call_function")
        return max(now, int(self.later[self.next : last].max()) + change + self.held)

    def run(self, node: Node) -> None:
        """The node runs now."""
        position, plain = self.position, self.plain
        at = position[node]
        self.done.add(node)
        if at < self.next:  # a late wait
            self.held -= self._held_by.pop(node, 0)
        self.now += self.storage.size[node]
        self.later[self.next : at] += self.storage.size[node]
        self.later[at] = 0
        for owner in self.storage.reads[node]:
            self.reads_left[owner] -= 1
            if owner.op != "call_function":
                continue
            if not self.reads_left[owner]:
                self.now -= self.storage.size[owner]
            readers = self.readers[owner]
            while readers and readers[-1] in self.done:
                readers.pop()
            end = max(self.next, position[readers[-1]] + 1) if readers else self.next
            if end <= at:
                self.later[end : at + 1] -= self.storage.size[owner]
        while self.next < len(plain) and (plain[self.next] in self.done or plain[self.next] in self.late):
            if plain[self.next] not in self.done:
                self.held += self._hold(plain[self.next])
            self.next += 1

    def _hold(self, wait: Node) -> int:
        alone = [n for n in self.storage.reads[wait] if self.readers[n][-1:] == [wait] and n.op == "call_function"]
        self._held_by[wait] = sum(self.storage.size[n] for n in alone)
        return self._held_by[wait]
