"""Recording a real step, in the form in which steps are predicted."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule, Node
from torch.profiler import ProfilerActivity, profile

from ..errors import StateError
from ..module import ParallelModule
from ..running.execute import RankExecutor
from .recording import Recording, Span, collective_span, compute_span, wait_span
from .timeline import start_of
from .timing import is_start, is_wait, sent_bytes


def measure(par: ParallelModule, step: Callable[[], object], *, warmup: int = 2) -> Recording:
    """Run a step of a compiled module under torch's profiler, and say what ran when on this rank.

    All ranks must call it. Beside the prediction: `recording.plot([par.plan.timeline, measured], path)`.

    Args:
        step: makes one call of `par` and its backward, as in training; what else it does is not recorded.
        warmup: how many times it runs before.

    Returns:
        spans of every node of `forward_graph` and `backward_graph`. A collective's span ends when it has been waited
        for: when it was through, nobody notes. Memory counts from what was alive when forward began. The profiler's own
        work makes short ops longer.

    Raises:
        StateError: the module is simulated, or the step did not run its graphs.
    """
    executor = par.__dict__["_ap3d"].engine.executor
    if not isinstance(executor, RankExecutor):
        raise StateError(
            "measure() needs a module of compile(): in simulation one process does the work of all ranks, so its times "
            "mean nothing; plan.timeline is the prediction"
        )
    for _ in range(warmup):
        step()
    # On CPU, that is; what runs on other devices is seen when it is launched.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    events = found.events() or []
    spans: list[Span] = []
    ranges = {}
    for name, graph in (("forward", par.forward_graph), ("backward", par.backward_graph)):
        around = next((e for e in events if e.name == f"autopar3d {name}"), None)
        if around is not None and graph is not None:
            ranges[name] = around
    if not ranges:
        raise StateError("the step that was to be measured did not call the module with gradients on")
    began = min(e.time_range.start for e in ranges.values())
    graphs = {"forward": par.forward_graph, "backward": par.backward_graph}
    for name, around in ranges.items():
        graph = graphs[name]
        assert graph is not None
        ops = [e for e in events if e.cpu_parent is around and not e.name.startswith("[")]
        spans += _spans(name, graph, ops, began, executor)
    memory = _memory(events, list(ranges.values()), began)
    return Recording("measured", tuple(sorted(spans, key=lambda s: s.start)), memory, tuple(executor.grid.axes))


def _spans(name: str, graph: GraphModule, ops: list[Any], began: float, executor: RankExecutor) -> list[Span]:
    """Ops run one after the other, in the order of nodes: each node's is the next of its name."""
    spans = []
    started: dict[Node, float] = {}
    following = iter(sorted(ops, key=lambda e: e.time_range.start))
    for node in graph.graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        schema = node.target._schema.name
        event = next((e for e in following if e.name == schema), None)
        if event is None:
            raise StateError(f"the profiler has no {schema} where {name}_graph has {node.name}; was it edited?")
        at, took = (event.time_range.start - began) / 1e6, event.time_range.elapsed_us() / 1e6
        start = start_of(node) if is_wait(node) else None
        if start is None:
            spans.append(compute_span(node, at, took, name))
            if is_start(node):
                started[node] = at
            continue
        spans.append(wait_span(start, at, took, name))
        if start in started:
            sent = sent_bytes(start, executor.grid)
            spans.append(collective_span(start, started[start], at + took - started.pop(start), name, sent))
    return spans


def _memory(events: list[Any], ranges: list[Any], began: float) -> tuple[tuple[float, int], ...]:
    """What ops allocate and free, and what Python frees between them."""
    changes = []
    for e in events:
        inside = any(r.time_range.start <= e.time_range.start <= r.time_range.end for r in ranges)
        if inside and e.cpu_memory_usage and (e.cpu_parent in ranges or e.name.startswith("[")):
            changes.append((e.time_range.start, e.cpu_memory_usage))
    alive, curve = 0, [(0.0, 0)]
    for at, change in sorted(changes):
        alive += change
        curve.append(((at - began) / 1e6, alive))
    return tuple(curve)
