"""What happened, or will happen, when: compute and each axis in one step, predicted or measured, in one form.

A `Recording` is plain data. It writes a trace that Perfetto and chrome://tracing open, and a picture.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.fx import GraphModule, Node

from ..grid import Grid
from ..hardware import Hardware
from ..program import module_path
from .timeline import Network, live_bytes, start_of
from .timing import axis_of, is_heavy, is_start, is_wait, kind_of, seconds, sent_bytes


@dataclass(frozen=True)
class Span:
    """Something that takes time.

    Args:
        row: "compute", "wait" (compute stands still for a collective), or the axis of a collective.
        name: of the graph's node; of a wait, that of the start it waits for.
        kind: "matmul" (or convolution, or attention) or "other" of compute; all_gather, ... of a collective or a wait.
        start, seconds: since the step began.
        graph: "forward" or "backward".
        module: path of the module it belongs to.
        axis: of a collective or a wait.
        bytes: that a collective sends.
    """

    row: str
    name: str
    kind: str
    start: float
    seconds: float
    graph: str
    module: str
    axis: str = ""
    bytes: float = 0.0


@dataclass(frozen=True)
class Recording:
    """One forward and backward on one rank.

    Args:
        source: "predicted" or "measured".
        spans: in order of their start.
        memory: (seconds, bytes alive), where it changes. Predicted bytes include the inputs of the graphs (parameters,
            saved tensors); measured ones count from what was alive when the step began.
        axes: axes with communication.
    """

    source: str
    spans: tuple[Span, ...]
    memory: tuple[tuple[float, int], ...]
    axes: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """From the first span to the end of the last."""
        return max((s.start + s.seconds for s in self.spans), default=0.0)

    @property
    def compute(self) -> float:
        """Seconds in which compute runs."""
        return sum(s.seconds for s in self.spans if s.row == "compute")

    @property
    def exposed(self) -> dict[str, float]:
        """Per axis, seconds in which compute stands still for one of its collectives."""
        return {a: sum(s.seconds for s in self.spans if s.row == "wait" and s.axis == a) for a in self.axes}

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at once."""
        return max((n for _, n in self.memory), default=0)

    def save_trace(self, path: str | Path) -> None:
        """Write a Chrome trace (JSON), for https://ui.perfetto.dev or chrome://tracing."""
        Path(path).write_text(json.dumps(chrome_trace([self])))

    def plot(self, path: str | Path, title: str = "") -> None:
        """Draw compute, each axis and memory over time. Needs matplotlib (`pip install "autopar3d[plot]"`)."""
        plot([self], path, title)

    def plot_memory(self, path: str | Path, title: str = "") -> None:
        """Draw the bytes alive over time, forward and backward told apart. Needs matplotlib."""
        plot_memory(self, path, title)


def predict(graphs: Mapping[str, GraphModule], grid: Grid, hardware: Hardware) -> Recording:
    """What a machine will do with graphs that run one after the other, such as forward and backward.

    Args:
        graphs: by name, in order.
    """
    spans: list[Span] = []
    memory: list[tuple[float, int]] = []
    now = 0.0
    for name, graph in graphs.items():
        now = _predict(name, list(graph.graph.nodes), grid, hardware, now, spans, memory)
    return Recording("predicted", tuple(sorted(spans, key=lambda s: s.start)), tuple(memory), tuple(grid.axes))


def _predict(
    graph: str,
    nodes: Sequence[Node],
    grid: Grid,
    hardware: Hardware,
    began: float,
    spans: list[Span],
    memory: list[tuple[float, int]],
) -> float:
    network = Network(hardware, grid)
    alive = live_bytes(nodes)
    now = 0.0
    for node, held in zip(nodes, alive, strict=True):
        memory.append((began + now, int(held)))
        if is_start(node):
            network.advance(now)
            network.start(node)
        elif is_wait(node):
            start = start_of(node)
            if start is not None and (done := network.finish(start)) > now:
                spans.append(wait_span(start, began + now, done - now, graph))
                now = done
        elif took := seconds(node, hardware, grid):
            spans.append(compute_span(node, began + now, took, graph))
            now += took
    while network.advance_to_next():
        pass
    for start, done in network.done.items():
        first = network.began[start]
        spans.append(collective_span(start, began + first, done - first, graph, sent_bytes(start, grid)))
    return began + now


def compute_span(node: Node, start: float, took: float, graph: str) -> Span:
    kind = "matmul" if is_heavy(node) else "other"
    return Span("compute", node.name, kind, start, took, graph, module_path(node))


def wait_span(start: Node, at: float, took: float, graph: str) -> Span:
    return Span("wait", start.name, kind_of(start), at, took, graph, module_path(start), axis_of(start))


def collective_span(start: Node, at: float, took: float, graph: str, sent: float) -> Span:
    axis = axis_of(start)
    return Span(axis, start.name, kind_of(start), at, took, graph, module_path(start), axis, sent)


# -- out -------------------------------------------------------------------------------------------------------------


def chrome_trace(recordings: Iterable[Recording]) -> dict[str, Any]:
    """The trace of one recording, or of several side by side, as Chrome's JSON."""
    events: list[dict[str, Any]] = []
    for pid, recording in enumerate(recordings):
        rows = ["compute", *recording.axes]
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": recording.source}})
        for tid, row in enumerate(rows):
            label = row if row == "compute" else f"axis {row}"
            events.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": label}})
        for span in recording.spans:
            args = {"module": span.module, "graph": span.graph, "kind": span.kind}
            if span.bytes:
                args["bytes sent"] = f"{span.bytes:.0f}"
            events.append(
                {
                    "ph": "X",
                    "pid": pid,
                    "tid": 0 if span.row == "wait" else rows.index(span.row),
                    "name": f"wait for {span.name}" if span.row == "wait" else span.name,
                    "cat": span.row,
                    "ts": span.start * 1e6,
                    "dur": span.seconds * 1e6,
                    "args": args,
                }
            )
        for at, held in recording.memory:
            events.append({"ph": "C", "pid": pid, "name": "memory", "ts": at * 1e6, "args": {"bytes": held}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


# Of Okabe and Ito, which people with any kind of colour blindness can tell apart.
COLOURS = {
    "matmul": "#0072B2",
    "other": "#56B4E9",
    "wait": "#F0E442",
    "all_gather": "#E69F00",
    "reduce_scatter": "#009E73",
    "all_reduce": "#CC79A7",
    "all_to_all": "#D55E00",
}


def plot(recordings: Sequence[Recording], path: str | Path, title: str = "") -> None:
    """Draw recordings below each other, on one scale of time: compute, each axis, and memory."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    heights = [h for r in recordings for h in (1 + len(r.axes), 2)]
    figure, parts = pyplot.subplots(
        len(heights), 1, sharex=True, figsize=(12, 1 + 0.55 * sum(heights)), height_ratios=heights, squeeze=False
    )
    found: set[str] = set()
    for i, recording in enumerate(recordings):
        rows, below = parts[2 * i][0], parts[2 * i + 1][0]
        names = ["compute", *recording.axes]
        for at, name in enumerate(names):
            kinds: dict[str, list[tuple[float, float]]] = {}
            for span in recording.spans:
                row = "compute" if span.row == "wait" else span.row
                if row == name:
                    kind = "wait" if span.row == "wait" else span.kind
                    kinds.setdefault(kind, []).append((span.start * 1e3, span.seconds * 1e3))
            for kind, bars in kinds.items():
                colour = COLOURS[kind]
                # Edges of their own colour, so that short ones are seen.
                rows.broken_barh(bars, (at - 0.4, 0.8), facecolors=colour, edgecolor=colour, linewidth=0.8)
            found |= kinds.keys()
        rows.set_xlim(0, max(r.seconds for r in recordings) * 1e3)
        rows.set_yticks(range(len(names)), [n if n == "compute" else f"axis {n}" for n in names])
        rows.invert_yaxis()
        exposed = sum(recording.exposed.values())
        rows.set_title(
            f"{title + ', ' if title else ''}{recording.source}: step {recording.seconds * 1e3:.3g} ms, "
            f"compute {recording.compute * 1e3:.3g} ms, exposed {exposed * 1e3:.3g} ms",
            loc="left",
            fontsize=10,
        )
        if recording.memory:
            times, held = zip(*recording.memory, strict=True)
            below.step([t * 1e3 for t in times], [n / 1e6 for n in held], where="post", color="#0072B2", linewidth=1)
        below.set_ylabel("MB alive")
        below.set_ylim(bottom=0)
    parts[-1][0].set_xlabel("ms")
    labels = {"matmul": "matmul, attention", "other": "other compute", "wait": "compute waits"}
    shown = [k for k in COLOURS if k in found]
    handles = [Patch(facecolor=COLOURS[k], label=labels.get(k, k)) for k in shown]
    figure.legend(handles=handles, loc="lower center", ncols=max(1, len(handles)), frameon=False)
    figure.tight_layout(rect=(0, 0.6 / figure.get_figheight(), 1, 1))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def plot_memory(recording: Recording, path: str | Path, title: str = "") -> None:
    """Draw one recording's memory."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 4))
    times = [t * 1e3 for t, _ in recording.memory] or [0.0]
    held = [n / 1e6 for _, n in recording.memory] or [0.0]
    axes.step(times, held, where="post", color=COLOURS["matmul"], linewidth=1.5)
    axes.fill_between(times, held, step="post", color=COLOURS["other"], alpha=0.35)
    top = max(range(len(held)), key=lambda i: held[i])
    axes.plot(times[top], held[top], "o", color=COLOURS["all_to_all"])
    beside = ("right", -8) if times[top] > times[-1] / 2 else ("left", 8)
    axes.annotate(
        f"peak {held[top]:.3g} MB",
        (times[top], held[top]),
        xytext=(beside[1], 8),
        textcoords="offset points",
        ha=beside[0],
    )
    backward = min((s.start * 1e3 for s in recording.spans if s.graph == "backward"), default=None)
    if backward is not None:
        axes.axvline(backward, color="0.4", linestyle="--", linewidth=1)
        axes.annotate("backward", (backward, 0), xytext=(6, 6), textcoords="offset points", color="0.3")
    axes.set(xlabel="ms", ylabel="MB alive on a rank", title=f"{title + ', ' if title else ''}{recording.source}")
    axes.set_ylim(0, 1.15 * max(held))
    axes.set_xlim(0, max(times[-1], recording.seconds * 1e3))
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
