"""Profiles: measured, saved, loaded, and asked for by path."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import autopar3d
from autopar3d.errors import LaunchError, PlanError
from autopar3d.grid import Grid
from autopar3d.hardware import PROFILES, Hardware, Link, resolve
from autopar3d.ranks.launch import Pool
from autopar3d.timelines.calibration import Sample, calibrate, fit, predicted, profile

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


def samples(axis: str, latency: float, bandwidth: float) -> list[Sample]:
    return [Sample(axis, k, n, latency + n / bandwidth) for k in KINDS for n in (2e3, 2e5, 1e6)]


def test_the_fit_finds_the_link() -> None:
    link = fit(samples("y", 2e-3, 6e6))
    assert link.latency == pytest.approx(2e-3) and link.bandwidth == pytest.approx(6e6)
    assert predicted(link, 6e5) == pytest.approx(0.102)
    free = fit([Sample("y", "all_gather", n, n / 1e6) for n in (1e3, 1e6)])
    assert free.latency == pytest.approx(0.0, abs=1e-9) and free.bandwidth == pytest.approx(1e6)
    # A link that was idle lets some bytes through at once; small ones tell of the latency alone.
    sizes = (1e4, 6e4, 2.5e5, 1.2e6)
    limited = fit([Sample("y", k, n, 2e-3 + max(0.0, n - 3e4) / 6e6) for k in KINDS for n in sizes])
    assert limited.latency == pytest.approx(2e-3) and limited.burst == pytest.approx(3e4)
    assert limited.bandwidth == pytest.approx(6e6) and predicted(limited, 1.5e5) == pytest.approx(0.022)
    # The smallest size all in the burst, and faster than the bandwidth.
    quick = fit([Sample("y", k, n, 8e-4 + max(0.0, n - 3e4) / 6e6) for k in KINDS for n in sizes])
    assert quick.latency == pytest.approx(8e-4) and quick.bandwidth == pytest.approx(6e6)
    assert fit([Sample("y", "all_gather", 1e3, 2e-3)]) == Link(2e-3, float("inf"))
    # Noise that would make a number negative does not.
    odd = fit([Sample("y", "all_gather", 1e3, 2e-3), Sample("y", "all_gather", 1e6, 1e-3)])
    assert odd.latency >= 0.0 and odd.bandwidth > 0.0


def test_axes_inside_a_node_and_across() -> None:
    """In rank order z is innermost: on nodes of 4, z and y of (2, 2, 2) lie inside one, x does not."""
    found = profile("lab", Grid(2, 2, 2), samples("z", 1e-5, 1e9) + samples("x", 1e-3, 1e7), {"": 1e9}, 1e9, 4)
    grid = Grid(2, 2, 2)
    assert found.link("z", grid) == found.link("y", grid) == found.node
    assert found.link("x", grid) == found.network and math.isclose(found.network.bandwidth, 1e7, rel_tol=1e-6)
    alone = profile("lab", Grid(1, 8, 1), samples("y", 1e-5, 1e9), {"": 1e9}, 1e9, 8)
    assert alone.node == alone.network and "24" not in alone.source and "12 collectives" in alone.source


def test_profiles_have_sources_and_files(tmp_path: Path) -> None:
    for name, hardware in PROFILES.items():
        assert hardware.source, name
        hardware.save(tmp_path / f"{name}.json")
        assert Hardware.load(tmp_path / f"{name}.json") == hardware
    lab = Hardware("lab", {"": 1e9}, 1e9, Link(1e-3, 1e7), Link(1e-3, 1e7), 8, "a test")
    lab.save(tmp_path / "lab.json")
    assert resolve(str(tmp_path / "lab.json"), torch.device("cpu")) == lab
    plan = autopar3d.plan(torch.nn.Linear(8, 8), (2, 1, 1), torch.randn(8, 8), hardware=str(tmp_path / "lab.json"))
    assert plan.hardware == "lab"
    (tmp_path / "bad.json").write_text('{"name": "x"}')
    with pytest.raises(PlanError, match=r"bad.json is no hardware profile: KeyError\('node'\)"):
        Hardware.load(tmp_path / "bad.json")
    with pytest.raises(PlanError, match="hardware='lab' is not known; choose one of a100, .* or a file"):
        resolve("lab", torch.device("cpu"))


def test_calibrate_needs_ranks() -> None:
    with pytest.raises(LaunchError, match="calibrate measures the ranks of a process group"):
        calibrate()


def measured(path: str) -> Hardware:
    return calibrate((2, 1, 1), path=path, sizes=(2_000, 100_000), repeats=2)


def test_all_ranks_get_one_profile(ranks: Pool, tmp_path: Path) -> None:
    first, second = ranks.run(measured, str(tmp_path / "here.json"), ranks=2)
    assert first == second == Hardware.load(tmp_path / "here.json")
    assert first.node_size == 2 and first.node == first.network and first.node.bandwidth > 0
    assert first.flops[""] > 1e6 and first.memory > 1e6
