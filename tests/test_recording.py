"""recording: a step as spans, predicted and measured; as a trace and as a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar3d
from autopar3d.errors import PlanError, StateError
from autopar3d.grid import Grid
from autopar3d.plan import Plan
from autopar3d.ranks.launch import Pool
from autopar3d.timelines.measure import measure
from autopar3d.timelines.recording import Recording, chrome_trace, plot, predict
from tests.test_timing import MACHINE, c10d, graph_of, group


def mlp() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 16))


X = torch.ones(8, 16)


def one(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = (c10d.all_reduce(t, "sum", group("z")) for t in (w, w))  # 2 elements, 16 bytes: 3 + 8 seconds each
    y = x + x  # 4 seconds
    return y + c10d.wait_tensor(first), c10d.wait_tensor(second)


def test_spans_by_hand() -> None:
    graph = graph_of(one, (2,), (2,))
    found = predict({"forward": graph, "backward": graph}, Grid(2, 2, 2), MACHINE)
    # Forward: 4 of compute, 7 of waiting, 6 of compute while the second (its queue lets it begin at 11) runs till 22.
    rows = [(s.row, s.graph, s.start, s.seconds) for s in found.spans if s.graph == "forward"]
    assert rows == [
        ("compute", "forward", 0.0, 4.0),
        ("z", "forward", 0.0, 11.0),
        ("wait", "forward", 4.0, 7.0),
        ("compute", "forward", 11.0, 6.0),
        ("z", "forward", 11.0, 11.0),
        ("wait", "forward", 17.0, 5.0),
    ]
    assert found.seconds == 44.0 and found.compute == 20.0
    assert found.exposed == {"x": 0.0, "y": 0.0, "z": 24.0}
    assert {s.bytes for s in found.spans if s.row == "z"} == {16.0}
    assert found.peak_bytes == max(n for _, n in found.memory) > 0


def test_a_plan_has_its_timeline() -> None:
    plan = autopar3d.plan(mlp(), (2, 2, 2), X)
    assert plan.timeline is not None
    assert plan.timeline.seconds == pytest.approx(plan.seconds)
    assert plan.timeline.compute == pytest.approx(plan.compute)
    assert plan.timeline.exposed == pytest.approx(plan.exposed)
    assert plan.timeline.peak_bytes == max(plan.memory["peak forward"], plan.memory["peak backward"])
    again = Plan.from_dict(plan.to_dict())
    assert again == plan and again.timeline is None
    with pytest.raises(PlanError, match="from a file has no timeline"):
        again.plot_timeline("never.png")


def test_trace_and_picture(tmp_path: Path) -> None:
    plan = autopar3d.plan(mlp(), (2, 2, 2), X, scheme="3d")
    plan.save_trace(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names == {"predicted", "compute", "axis x", "axis y", "axis z"}
    bars = [e for e in events if e["ph"] == "X"]
    assert plan.timeline is not None and len(bars) == len(plan.timeline.spans)
    # Perfetto nests events of one row that overlap; rows of a machine do not overlap.
    for tid in range(4):
        mine = sorted((e["ts"], e["dur"]) for e in bars if e["tid"] == tid)
        assert all(a + d <= b + 1e-3 for (a, d), (b, _) in zip(mine, mine[1:], strict=False))
    pytest.importorskip("matplotlib")
    plan.plot_timeline(tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_simulation_is_not_measured() -> None:
    sim = autopar3d.simulate(mlp(), (2, 1, 1), X)
    with pytest.raises(StateError, match="in simulation"):
        measure(sim, lambda: sim(X).sum().backward())


def _measured() -> Recording:
    par = autopar3d.compile(mlp(), (2, 1, 2), X, scheme="3d")
    found = measure(par, lambda: par(X).sum().backward())
    with pytest.raises(StateError, match="did not call"):
        measure(par, lambda: None)
    expected = predict({"forward": par.forward_graph, "backward": par.backward_graph}, Grid(2, 1, 2), MACHINE)
    for row in ("x", "z"):
        ours, theirs = ([s.name for s in r.spans if s.row == row] for r in (found, expected))
        assert sorted(ours) == sorted(theirs)
    return found


def test_real_step(ranks: Pool, tmp_path: Path) -> None:
    found: list[Any] = ranks.run(_measured, ranks=4)
    for one_rank in found:
        assert one_rank.source == "measured"
        assert {s.graph for s in one_rank.spans} == {"forward", "backward"}
        assert {s.row for s in one_rank.spans} == {"compute", "wait", "x", "z"}
        assert 0 < one_rank.compute < one_rank.seconds < 60
        assert sum(one_rank.exposed.values()) < one_rank.seconds
        assert one_rank.peak_bytes >= 8 * 64 * 4 / 4  # the hidden layer, at least
        # One thread computes: nothing overlaps.
        busy = sorted((s.start, s.seconds) for s in one_rank.spans if s.row in ("compute", "wait"))
        assert all(a + d <= b + 1e-6 for (a, d), (b, _) in zip(busy, busy[1:], strict=False))
    plan = autopar3d.plan(mlp(), (2, 1, 2), X, scheme="3d")
    assert plan.timeline is not None
    both = [plan.timeline, found[0]]
    events = chrome_trace(both)["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"predicted", "measured"}
    pytest.importorskip("matplotlib")
    plot(both, tmp_path / "both.png")
    assert (tmp_path / "both.png").stat().st_size > 10_000
