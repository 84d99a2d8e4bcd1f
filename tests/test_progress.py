"""Progress: what is shown where, and that the times add up."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar3d
from autopar3d.progress import Watch, stage, watching

ROOT = Path(__file__).parents[1]


class Clock:
    """Time that passes when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _work(show: str, scale: float = 1.0) -> tuple[Watch, str]:
    out, clock = io.StringIO(), Clock()
    watch = Watch("compile", show, out, clock)
    with watch.stage("tracing", None):
        clock.now += 3.0 * scale
    with watch.stage("comparing grids", 4) as done:
        for i in range(4):
            done(i)
            with watch.stage("planning", None):
                clock.now += 0.5 * scale
            clock.now += 0.25 * scale
    clock.now += 1.0 * scale
    watch.close()
    return watch, out.getvalue()


def test_times_add_up_and_inner_stages_count_once() -> None:
    watch, _ = _work("off")
    assert watch.seconds == {"tracing": 3.0, "planning": 2.0, "comparing grids": 1.0}
    assert watch.elapsed == 7.0
    assert watch.summary() == "tracing 3.0, planning 2.0, comparing grids 1.0, other 1.0"


def test_lines_bar_and_silence() -> None:
    assert _work("off")[1] == ""
    lines = _work("lines")[1].splitlines()
    assert lines == [
        "autopar3d: tracing 3.0 s",
        "autopar3d: comparing grids 3.0 s",
        "autopar3d: compile took 7.0 s: tracing 3.0, planning 2.0, comparing grids 1.0, other 1.0",
    ]
    drawn = _work("bar")[1].split("\r")
    assert any(frame.startswith("autopar3d [############------------] comparing grids 2/4  4 s") for frame in drawn)
    assert drawn[-1].startswith("autopar3d: compile took 7.0 s") and not drawn[-2].strip()
    # What takes no longer than a moment is not worth a word.
    assert _work("lines", 0.1)[1] == "" and _work("bar", 0.1)[1] == ""


def test_a_long_stage_says_that_it_runs() -> None:
    for show in ("bar", "lines", "off"):
        out, clock = io.StringIO(), Clock()
        watch = Watch("compile", show, out, clock)
        with watch.stage("comparing grids", 4) as done:
            done(1)
            with watch.stage("planning", None):
                for _ in range(24):
                    clock.now += 1.0
                    watch.tick()
        said = out.getvalue()
        if show == "bar":
            frames = said.split("\r")
            assert "autopar3d [######------------------] comparing grids 1/4: planning  9 s" in map(str.rstrip, frames)
            assert len(frames) > 20
        elif show == "lines":
            assert said.splitlines()[:2] == [
                "autopar3d: comparing grids 1/4, planning, 10 s so far",
                "autopar3d: comparing grids 1/4, planning, 20 s so far",
            ]
        else:
            assert said == ""


def test_a_failure_clears_the_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("AUTOPAR3D_PROGRESS", "bar")
    monkeypatch.setattr("autopar3d.progress._MOMENT", -1.0)
    with pytest.raises(ValueError, match="of ours"), watching("plan"), stage("tracing"):
        raise ValueError("of ours")
    drawn = capsys.readouterr().err
    assert "tracing" in drawn and drawn.endswith("\r") and not drawn.split("\r")[-2].strip()


def _plan() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU())
    autopar3d.plan(model, (2, 2, 1), torch.ones(8, 8))


def test_planning_logs_its_stages_and_prints_nothing(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "autopar3d"):
        _plan()
    ours = [r for r in caplog.records if r.name == "autopar3d.compile"]
    stages = [r.args[1] for r in ours if r.levelno == logging.DEBUG]  # type: ignore[index]
    assert stages == ["tracing", "planning", "rewriting", "differentiating", "scheduling", "accounting"]
    (summary,) = [r.getMessage() for r in ours if r.levelno == logging.INFO]
    assert summary.startswith("plan took ")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("rank", "shown"), [("0", True), ("3", False)])
def test_lines_outside_of_terminals_on_rank_0_only(rank: str, shown: bool) -> None:
    code = "import autopar3d.progress as p; p._MOMENT = p._LINE = -1; from tests.test_progress import _plan; _plan()"
    there = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"} | {"RANK": rank}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=there, check=True)
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if line.startswith("autopar3d: ")]
    assert bool(lines) == shown
    if shown:
        assert lines[0].startswith("autopar3d: tracing ") and lines[-1].startswith("autopar3d: plan took ")
