"""overlap: an emitted graph in an order that hides communication under compute. Only the order changes, no value.

A list schedule in three steps, all on predicted times (`autopar3d.timelines.timing`), the same on every rank:

1. *Work*: compute and the collectives that depend on it are put in order as a simulated machine would meet them. Of
   what is ready, starts go first, then what lies on the longest path to the end. So the path of the activations'
   gradients leads, and weights' gradients fill the time in which it waits. Nodes that are only another form of what a
   collective brought (waits, views, reshuffles) go right before their first reader, so that none waits early.
2. *Prefetch*: gathers of what is there from the beginning (weights, saved shards) are moved up, from the last to the
   first: before at least one heavy op (matmul, convolution, attention), and further while the link needs the time.
3. *Check*: where the predicted peak of memory rises above the bound, or the step does not get shorter, a more timid
   schedule is tried, at last the graph's own order.
"""

from __future__ import annotations

import heapq
import itertools
import operator
from collections import defaultdict, deque
from collections.abc import Iterable

from torch.fx import Graph, GraphModule, Node

from autopar3d.grid import ALL_AXES, Grid
from autopar3d.hardware import Hardware
from autopar3d.timelines.timeline import Forecast, Network, Storage, live_bytes, start_of, timeline_of
from autopar3d.timelines.timing import (
    axis_of,
    changes_form,
    is_heavy,
    is_random,
    is_start,
    is_wait,
    mutates,
    prepares,
    seconds,
)

# (heavy ops by which a node may overtake another, heavy ops by which a prefetch may lead its reader), bold to timid;
# None: the work stays in the given order.
_LADDER = ((8, 4), (4, 2), (2, 1), (0, 1), (None, 1))

# A gather is prefetched this many times its predicted duration before its reader: predictions are not exact.
_SLACK = 1.5


def overlap(
    module: GraphModule, grid: Grid, hardware: Hardware, *, memory: float = 0.10, anyway: bool = False
) -> GraphModule:
    """Reorder a forward or backward graph so that its collectives run while it computes.

    Args:
        memory: the predicted peak of live bytes may rise by at most this fraction of the given order's peak.
        anyway: take the boldest order that fits into memory, whatever its predicted time.
    """
    given = list(module.graph.nodes)
    if any(mutates(n) for n in given):
        return _rebuild(module, given)
    before = timeline_of(given, grid, hardware)
    bound = (1.0 + memory) * before.peak_bytes
    facts = _Facts(given, grid, hardware)
    for lag, lead in _LADDER:
        if lag is None:
            order = _prefetch(facts, given, facts.times(given), lead, bound)
        else:
            work = _Work(facts, lag, (before.peak_bytes + bound) / 2)
            order = _prefetch(facts, work.order, work.time, lead, bound)
        after = timeline_of(order, grid, hardware)
        if after.peak_bytes <= bound and (anyway or after.seconds <= before.seconds * (1.0 + 1e-9)):
            return _rebuild(module, order)
    return _rebuild(module, given)


def _rebuild(module: GraphModule, order: Iterable[Node]) -> GraphModule:
    graph = Graph()
    copied: dict[Node, Node] = {}
    for node in order:
        copied[node] = graph.node_copy(node, lambda n: copied[n])
    graph.lint()
    result = GraphModule(module, graph)
    result.meta.update(module.meta)
    return result


class _Facts:
    """What all steps read of a graph.

    Attributes:
        lazy: nodes that are not scheduled themselves, but emitted when a reader needs them: waits, views, reshuffles,
            the starts in `ahead`, and small work on inputs of the graph (masks, say), which can always be done later.
        sources: what a node waits for through lazy nodes: compute that must have run, collectives that must be through.
        ahead: starts that depend on inputs of the graph only, and are read late enough to be prefetched.
        depth: heavy ops before a node in the given order.
        late: waits that only the output reads; they may be anywhere after their starts.
        plain: the given order, but every lazy node right before its first reader; what a schedule departs from.
        urgency: seconds of the longest path from a node's start to the end of the graph.
    """

    def __init__(self, nodes: list[Node], grid: Grid, hardware: Hardware) -> None:
        self.nodes, self.grid, self.hardware = nodes, grid, hardware
        self.index = {n: i for i, n in enumerate(nodes)}
        self.seconds = {n: seconds(n, hardware, grid) for n in nodes}
        self.heavy = {n for n in nodes if is_heavy(n)}
        self.storage = Storage(nodes)
        self.body = [n for n in nodes if n.op not in ("placeholder", "get_attr", "output")]
        self.depth: dict[Node, int] = {}
        depth = 0
        for node in nodes:
            self.depth[node] = depth
            depth += node in self.heavy
        self.urgency: dict[Node, float] = {}
        for node in reversed(nodes):
            self.urgency[node] = self.seconds[node] + max((self.urgency[u] for u in node.users), default=0.0)
        self.ahead = self._ahead()
        self.lazy: set[Node] = set()
        self.sources: dict[Node, tuple[Node, ...]] = {}
        self._dependences()
        self.work = [n for n in self.body if n not in self.lazy]
        self.late = self._late()
        self.late_waits: dict[Node | None, list[Node]] = defaultdict(list)
        for node in self.body:
            if node in self.late:
                self.late_waits[start_of(node)].append(node)
        self.plain = self._plain()

    def _ahead(self) -> set[Node]:
        """Starts to prefetch; of a chain of gathers, each needs a heavy op of its own to hide under."""
        links: dict[Node, int] = {}  # nodes that come of inputs only -> starts before them
        for node in self.nodes:
            if node.op in ("placeholder", "get_attr"):
                links[node] = 0
                continue
            form = changes_form(node) or prepares(node) or is_start(node)
            if form and node.all_input_nodes and all(n in links for n in node.all_input_nodes):
                links[node] = max(links[n] + is_start(n) for n in node.all_input_nodes)
        first: dict[Node, int] = {}  # such a node -> heavy ops before its first reader
        for node in reversed(self.body):
            if node in links:
                readers = (first[u] if u in links else self.depth[u] for u in node.users)
                first[node] = min(readers, default=0)
        starts = {n: _starts_before(n) for n in self.body if n in links and is_start(n)}
        found = {n for n in starts if first[n] > links[n]}
        # A chain of which some start has too few heavy ops before it is left whole to the first step.
        while True:
            whole = {n for n in found if found.issuperset(starts[n])}
            whole.difference_update(m for n in starts if n not in whole for m in starts[n])
            if whole == found:
                return found
            found = whole

    def _dependences(self) -> None:
        seeded: Node | None = None
        for node in self.nodes:
            found: dict[Node, None] = {}
            for n in node.all_input_nodes:
                if n in self.lazy:
                    found.update(dict.fromkeys(self.sources[n]))
                elif n.op == "call_function":
                    found[n] = None
            random = is_random(node)
            computes = node.op == "call_function"  # the output comes last, whatever it reads
            small = computes and not (found or random or is_start(node) or node in self.heavy)
            if changes_form(node) or node in self.ahead or small:
                self.lazy.add(node)
            elif random:
                # Random numbers come in the order in which they are drawn.
                if seeded is not None:
                    found[seeded] = None
                seeded = node
            self.sources[node] = tuple(found)

    def _late(self) -> set[Node]:
        read_by_work: set[Node] = set()
        for node in reversed(self.body):
            if node not in self.lazy or any(u in read_by_work for u in node.users):
                read_by_work.add(node)
        return {n for n in self.body if is_wait(n) and n not in read_by_work and self.sources[n]}

    def _plain(self) -> list[Node]:
        order = {n: None for n in self.nodes if n.op in ("placeholder", "get_attr")}
        for node in (*self.body, self.nodes[-1]):
            if node not in order and (node not in self.lazy or node in self.late):
                order.update(dict.fromkeys((*self.closure(node, order), node)))
                order.update(dict.fromkeys(self.late_readers(node) if node in self.late else self.items(node)))
        unread = {n: None for n in self.body if n not in order}
        return [*list(order)[:-1], *unread, self.nodes[-1]]

    def times(self, order: list[Node]) -> list[float]:
        """When each node runs if nothing waits."""
        return list(itertools.accumulate((0.0 if is_start(n) else self.seconds[n] for n in order[:-1]), initial=0.0))

    def items(self, node: Node) -> list[Node]:
        """The items of a tuple: they are taken at once, so that the others need not be kept."""
        return [u for u in node.users if u.target is operator.getitem and u in self.lazy]

    def late_readers(self, wait: Node) -> list[Node]:
        """What follows a late wait: run with it, so that no more than the result is kept."""
        found: dict[Node, None] = {}
        todo = [wait]
        while todo:
            for user in todo.pop().users:
                if user not in found and user.op != "output":
                    found[user] = None
                    todo.append(user)
        return sorted(found, key=self.index.__getitem__)

    def closure(self, node: Node, emitted: Iterable[Node]) -> list[Node]:
        """The lazy nodes that a node needs and that are not yet emitted, in an order that works."""
        found: dict[Node, None] = {}
        todo = [n for n in node.all_input_nodes if n in self.lazy and n not in emitted]
        while todo:
            n = todo.pop()
            if n not in found:
                found[n] = None
                todo += [m for m in n.all_input_nodes if m in self.lazy and m not in emitted]
        return sorted(found, key=self.index.__getitem__)


def _starts_before(node: Node) -> list[Node]:
    """The collectives whose results a collective of inputs of the graph works on."""
    found, todo = [], list(node.all_input_nodes)
    while todo:
        n = todo.pop()
        if is_start(n):
            found.append(n)
        todo += n.all_input_nodes
    return found


class _Work:
    """Step 1.

    Attributes:
        order: every node of the graph.
        time: when each is met, in seconds, aligned with `order`.
    """

    def __init__(self, facts: _Facts, lag: int, bound: float) -> None:
        self.facts, self.lag, self.bound = facts, lag, bound
        self.order: list[Node] = []
        self.time: list[float] = []
        self.emitted: set[Node] = set()
        self.now = 0.0
        self.heavies = 0
        self.network = Network(facts.hardware, facts.grid)
        self.memory = Forecast(facts.plain, facts.late, facts.storage)
        self.unmet = {n: len(facts.sources[n]) for n in facts.work}
        self.readers: dict[Node, list[Node]] = defaultdict(list)
        for node in facts.work:
            for source in facts.sources[node]:
                self.readers[source].append(node)
        self.ready_starts: list[tuple[float, int]] = []
        self.ready: list[tuple[float, int]] = []
        self.parked: list[tuple[int, int]] = []  # ready, but too far ahead: by depth
        self.draining: deque[tuple[Node, float, int]] = deque()  # starts that only the output reads
        self.reserve: Node | None = None  # the last heavy op, and what may still start before it
        self.to_hide: deque[Node] = deque()
        self._frontier = 0
        self._run()

    def _run(self) -> None:
        facts = self.facts
        for given in facts.nodes:
            if given.op in ("placeholder", "get_attr"):
                self._append(given)
        for first in facts.work:
            if not self.unmet[first]:
                self._arrive(first)
        while (frontier := self._find_frontier()) is not None:
            self._met(self.network.advance(self.now))
            self._drain(2)
            node: Node | None = self._next_start() or self._next_compute()
            if node is None and not self.network.busy:
                node = frontier
            if node is not None:
                self._emit(node)
                continue
            if self.draining and not self._fits(frontier):
                self._finish(self.draining.popleft()[0])
                continue
            self._met(self.network.advance_to_next())
            self.now = max(self.now, self.network.now)
        while self.draining:
            self._finish(self.draining.popleft()[0])
        for rest in facts.plain:
            if rest not in self.emitted:
                self._append(rest)

    # -- choosing --------------------------------------------------------------------------------------------------

    def _find_frontier(self) -> Node | None:
        """The first node in the given order that is not yet scheduled: always allowed, so there is no dead end."""
        work = self.facts.work
        while self._frontier < len(work) and work[self._frontier] in self.emitted:
            self._frontier += 1
        return work[self._frontier] if self._frontier < len(work) else None

    def _arrive(self, node: Node) -> None:
        key = (-self.facts.urgency[node], self.facts.index[node])
        heapq.heappush(self.ready_starts if is_start(node) else self.ready, key)

    def _met(self, sources: Iterable[Node]) -> None:
        for source in sources:
            for node in self.readers[source]:
                self.unmet[node] -= 1
                if not self.unmet[node]:
                    self._arrive(node)

    def _next_start(self) -> Node | None:
        node = self._top(self.ready_starts)
        return node if node is not None and self._fits(node) else None

    def _next_compute(self) -> Node | None:
        frontier = self._find_frontier()
        assert frontier is not None
        furthest = self.facts.depth[frontier] + self.lag
        while self.parked and self.parked[0][0] <= furthest:
            self._arrive(self.facts.nodes[heapq.heappop(self.parked)[1]])
        held: Node | None = None
        while (node := self._top(self.ready)) is not None:
            if self.facts.depth[node] > furthest:
                heapq.heappush(self.parked, (self.facts.depth[node], self.facts.index[node]))
            elif self._held_back(node):
                held = node
            else:
                break
            heapq.heappop(self.ready)
        if held is not None:
            self._arrive(held)
        if node is None:
            return None
        if self._fits(node):
            return node
        # Short of memory: let go what can be, else go back to the given order.
        self._drain(1)
        if self._fits(node):
            return node
        return frontier if not self.unmet[frontier] and self._fits(frontier) else None

    def _top(self, heap: list[tuple[float, int]]) -> Node | None:
        while heap and self.facts.nodes[heap[0][1]] in self.emitted:
            heapq.heappop(heap)
        return self.facts.nodes[heap[0][1]] if heap else None

    def _held_back(self, node: Node) -> bool:
        """Whether this is the last heavy op, and other collectives can still start to run under it."""
        if node not in self.facts.heavy or self.heavies + 1 < len(self.facts.heavy):
            return False
        if self.reserve is None:
            self.reserve, below = node, {node}
            for n in self.facts.nodes[self.facts.index[node] :]:
                if not below.isdisjoint(n.all_input_nodes):
                    below.add(n)
            self.to_hide = deque(n for n in self.facts.work if is_start(n) and n not in below)
        while self.to_hide and self.to_hide[0] in self.emitted:
            self.to_hide.popleft()
        return bool(self.to_hide)

    def _fits(self, node: Node) -> bool:
        """Whether a node may run now: there is room for it, and will be for what it overtakes, when that runs."""
        return self.memory.needed(node, self._with(node)) <= self.bound

    # -- emitting --------------------------------------------------------------------------------------------------

    def _with(self, node: Node) -> list[Node]:
        """A node with all that must run before it, and the items of tuples among them."""
        all_of = (m for n in (*self.facts.closure(node, self.emitted), node) for m in (n, *self.facts.items(n)))
        return [m for m in dict.fromkeys(all_of) if m not in self.emitted]

    def _emit(self, node: Node) -> None:
        for n in self._with(node):
            self._append(n)
        if is_start(node):
            self.network.advance(self.now)
            self.network.start(node)
            if not self.readers[node]:
                self.draining.append((node, self.now, self.heavies))
        else:
            self.heavies += node in self.facts.heavy
            self._met([node])

    def _append(self, node: Node) -> None:
        self.emitted.add(node)
        self.order.append(node)
        self.time.append(self.now)
        if not is_start(node):
            self.now += self.facts.seconds[node]
        self.memory.run(node)

    def _drain(self, heavies: int) -> None:
        """Wait for gradients that must long be through: until then their whole, unreduced forms are kept."""
        while self.draining:
            start, began, before = self.draining[0]
            done = self.network.done.get(start)
            if done is None or self.now < began + 2 * (done - began) or self.heavies < before + heavies:
                return
            self._finish(self.draining.popleft()[0])

    def _finish(self, start: Node) -> None:
        while start not in self.network.done:
            self._met(self.network.advance_to_next())
        self.now = max(self.now, self.network.now)
        for wait in self.facts.late_waits[start]:
            for node in (wait, *self.facts.late_readers(wait)):
                if node not in self.emitted:
                    self._append(node)


def _prefetch(facts: _Facts, order: list[Node], time: list[float], lead: int, bound: float) -> list[Node]:
    """Step 2: the order, whose nodes run at the times given, with the starts in `facts.ahead` moved up."""
    live = live_bytes(order, facts.storage).astype(float)
    busy = _busy(facts, order)
    position = {n: i for i, n in enumerate(order)}
    need: dict[Node, int] = {}  # before which position a start's result is read
    free_until: dict[str, float] = {}  # when the next collective that was moved up needs its axis
    slots: dict[int, list[Node]] = defaultdict(list)
    chain: dict[Node, list[Node]] = {}
    for start in reversed([n for n in order if n in facts.ahead]):
        axis = axis_of(start)
        before = chain[start] = facts.closure(start, ())
        # Until it is waited for, a collective holds its result and what it reads.
        extra = sum(facts.storage.size[n] for n in (start, *facts.items(start))) + sum(
            facts.storage.size[n] for n in facts.storage.reads[start] if n.op == "call_function"
        )
        at = end = need.get(start, position[start])
        latest = min(time[min(end, len(time) - 1)], free_until.get(axis, float("inf")))
        wanted = _SLACK * facts.seconds[start]
        passed = 0
        while at > 0 and order[at - 1].op == "call_function":
            heavy = order[at - 1] in facts.heavy
            enough = latest - time[at] - (busy[axis][end] - busy[axis][at]) >= wanted
            if (passed and enough) or (heavy and passed >= lead) or live[at - 1] + extra > bound:
                break
            at -= 1
            passed += heavy
        live[at:end] += extra
        free_until[axis] = min(latest, time[at] + facts.seconds[start])
        slots[at].append(start)
        for n in before:
            if n in facts.ahead:
                need[n] = min(need.get(n, end), at)
    moved: dict[Node, None] = {}
    for i, node in enumerate(order):
        # Of several chains that start in one place, all first links go before the second ones.
        for start in sorted(reversed(slots[i]), key=lambda n: sum(m in facts.ahead for m in chain[n])):
            moved.update(dict.fromkeys((*facts.closure(start, moved), start)))
        if node not in facts.ahead:
            moved.update(dict.fromkeys((*facts.closure(node, moved), node)))
    return list(moved)


def _busy(facts: _Facts, order: list[Node]) -> dict[str, list[float]]:
    """Per axis, seconds of collectives that the first step started before each position."""
    total = dict.fromkeys(ALL_AXES, 0.0)
    found: dict[str, list[float]] = {axis: [0.0] for axis in total}
    for node in order:
        if is_start(node) and node not in facts.ahead:
            total[axis_of(node)] += facts.seconds[node]
        for axis, seen in found.items():
            seen.append(total[axis])
    return found
