"""grid="auto": every grid is considered, the fastest is taken, and the plan says why."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar3d
from autopar3d.errors import GridError, InputError, LaunchError, PlanError
from autopar3d.grid import Grid, factorisations
from autopar3d.hardware import PROFILES
from autopar3d.passes.rewrite import rewrite
from autopar3d.plan import Plan
from autopar3d.program import Program
from autopar3d.ranks.launch import Pool
from autopar3d.search import grids
from autopar3d.search.estimate import estimate, memory
from autopar3d.search.factors import Factors
from autopar3d.search.grids import distinct
from autopar3d.step import Options, decide
from tests.models import MODELS
from tests.test_plan import planned, traced


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


HOW = {"example_inputs": torch.zeros(512, 64), "outputs": "sharded"}


@pytest.mark.parametrize("devices", [1, 8, 12, 64])
@pytest.mark.parametrize("hardware", ["cpu", "h100"])
def test_every_grid_is_a_candidate_or_the_same_as_one(devices: int, hardware: str) -> None:
    found = list(distinct(devices, PROFILES[hardware]))
    named = [str(g) for g, _ in found] + [s for _, same in found for s in same]
    counts = [r for r in range(1, devices + 1) if devices % r == 0]
    assert sorted(named) == sorted(str(Grid(*g, replicas=r)) for r in counts for g in factorisations(devices // r))


@pytest.mark.parametrize("hardware", ["cpu", "h100"])
def test_grids_that_are_the_same_cost_the_same(hardware: str) -> None:
    program = traced("mlp")
    factors = Factors(program.graph.graph)
    for grid, same in distinct(16, PROFILES[hardware]):
        if grid.replicas > 2:
            continue
        first = decide(program, factors, grid, PROFILES[hardware], Options()).cost
        for text in same:
            x, y, z, *replicas = map(int, re.findall(r"\d+", text))
            other = Grid(x, y, z, replicas=(*replicas, 1)[0])
            cost = decide(program, factors, other, PROFILES[hardware], Options()).cost
            assert cost == pytest.approx(first, rel=1e-9), (grid, other)


def test_the_fastest_is_taken_and_the_others_say_what_they_lack() -> None:
    plan = autopar3d.plan(mlp(), "auto", world_size=8, hardware="h100", **HOW)
    first, *others = plan.candidates
    assert first.grid == plan.grid and first.why == "chosen" and first.scheduled == pytest.approx(plan.seconds)
    assert math.prod(plan.grid) * plan.replicas == 8
    assert {c.replicas for c in plan.candidates} == {1, 2, 4, 8}
    assert all(c.scheduled is None or c.scheduled >= first.scheduled for c in others)
    assert all(c.why and c.why != "chosen" for c in others)
    left = [c.seconds for c in others if c.scheduled is None]
    assert left == sorted(left)
    text = str(plan)
    assert "Grids considered" in text and all(
        f"{Grid(*c.grid)}{f' x{c.replicas}' * (c.replicas > 1)} " in text for c in plan.candidates
    )
    assert max(map(len, text.split("\n"))) <= 120
    assert Plan.from_dict(plan.to_dict()) == plan


def test_no_single_grid_is_predicted_to_be_faster() -> None:
    best = autopar3d.plan(mlp(), "auto", world_size=4, hardware="cpu", **HOW)
    for grid in [*factorisations(4), Grid(2, 1, 1, replicas=2), Grid(1, 1, 1, replicas=4)]:
        plan = autopar3d.plan(mlp(), grid, hardware="cpu", **HOW)
        assert best.seconds <= plan.seconds * (1 + 1e-9)


def test_what_is_not_estimated_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    full = autopar3d.plan(mlp(), "auto", world_size=16, hardware="h100", **HOW)
    assert all(c.seconds is not None for c in full.candidates)
    monkeypatch.setattr(grids, "_FEWEST", 4)
    monkeypatch.setattr(grids, "_ESTIMATED", 0)
    quick = autopar3d.plan(mlp(), "auto", world_size=16, hardware="h100", **HOW)
    assert (quick.grid, quick.replicas, quick.hash) == (full.grid, full.replicas, full.hash)
    behind = [c for c in quick.candidates if c.seconds is None]
    assert len(behind) == len(full.candidates) - 4 and quick.candidates[4:] == tuple(behind)
    costs = [c.objective for c in behind]
    assert costs == sorted(costs) and costs[0] >= max(c.objective for c in quick.candidates[:4])
    assert all("not estimated" in c.why for c in behind)
    assert "not estimated" in str(quick) and "not estimated" in quick.to_html()
    assert Plan.from_dict(quick.to_dict()) == quick


def test_it_runs_in_simulation() -> None:
    sim = autopar3d.simulate(mlp(), "auto", torch.ones(8, 64), world_size=4)
    assert torch.allclose(sim(torch.ones(8, 64)), mlp()(torch.ones(8, 64)), atol=1e-6)
    assert sim.plan.candidates and sim.plan.devices == 4


def test_what_it_needs() -> None:
    with pytest.raises(GridError, match="world_size="):
        autopar3d.plan(mlp(), "auto", **HOW)
    with pytest.raises(GridError, match="'best' is not known"):
        autopar3d.plan(mlp(), "best", **HOW)
    with pytest.raises(GridError, match="a whole number of at least 1"):
        autopar3d.plan(mlp(), "auto", world_size=0, **HOW)
    with pytest.raises(InputError, match="example_inputs"):
        autopar3d.simulate(mlp(), "auto", world_size=4)
    with pytest.raises(LaunchError, match="process group"):
        autopar3d.compile(mlp(), "auto", torch.ones(8, 64))


def estimated(program: Program, grid: Grid, regather: str) -> tuple[float, int]:
    factors = Factors(program.graph.graph)
    decisions = decide(program, factors, grid, PROFILES["cpu"], Options(regather=regather))
    local = rewrite(program, factors, decisions, regather=regather)
    found = estimate(program, decisions, local.movements, memory(program, factors, decisions, regather))
    assert found.compute <= found.seconds <= decisions.cost + found.compute
    return found.seconds, found.memory["activations"]


@pytest.mark.parametrize("name", ["gpt", "llama", "mlp"])
@pytest.mark.parametrize("regather", ["all", "none"])
def test_the_estimate_is_near_the_emitted_graphs(name: str, regather: str) -> None:
    grid = (8, 1, 1)
    _, plan = planned(name, grid, "auto", regather)
    seconds, activations = estimated(traced(name), Grid(*grid), regather)
    assert seconds == pytest.approx(plan.seconds, rel=0.3)
    assert activations == pytest.approx(plan.memory["activations"], rel=0.15)


def test_what_does_not_fit_into_the_device_comes_last() -> None:
    free = autopar3d.plan(mlp(), "auto", world_size=8, hardware="h100", **HOW)
    most = max(c.memory for c in free.candidates)
    small = dataclasses.replace(PROFILES["h100"], capacity=most - 1)
    plan = autopar3d.plan(mlp(), "auto", world_size=8, hardware=small, **HOW)
    large = [c.memory > small.capacity for c in plan.candidates]
    assert any(large) and large == sorted(large)
    assert all("a device has" in c.why for c, much in zip(plan.candidates, large, strict=True) if much)


def _on_ranks() -> Any:
    torch.manual_seed(dist.get_rank())
    x = torch.ones(8, 64)
    model = mlp() if dist.get_rank() == 0 else nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    par = autopar3d.compile(model, "auto", x, hardware="h100")
    par(x).sum().backward()
    return par.plan.grid, par.plan.replicas, par.plan.hash, [p.grad.full_tensor() for p in par.parameters()]


def test_all_ranks_choose_the_same_grid(ranks: Pool) -> None:
    found = ranks.run(_on_ranks, ranks=4)
    alone = autopar3d.plan(mlp(), "auto", torch.ones(8, 64), hardware="h100", world_size=4)
    one = mlp()
    one(torch.ones(8, 64)).sum().backward()
    for grid, replicas, digest, grads in found:
        assert (grid, replicas, digest) == (alone.grid, alone.replicas, alone.hash)
        torch.testing.assert_close(grads, [p.grad for p in one.parameters()], rtol=1e-4, atol=1e-4)


# -- what to keep, and a bound on memory -------------------------------------------------------------------------


def gpt(**options: object) -> Plan:
    make_model, make_inputs = MODELS["gpt"]
    args, kwargs = make_inputs(torch.float32)
    return autopar3d.plan(make_model(torch.float32), (1, 8, 1), args, kwargs, **options)  # type: ignore[arg-type]


def test_without_a_bound_keeping_everything_is_fastest() -> None:
    best, kept = gpt(regather="auto"), gpt(regather="none")
    assert best.regather == "none" and best.seconds == pytest.approx(kept.seconds)
    assert [c.regather for c in best.candidates][0] == "none"
    assert {c.regather for c in best.candidates} == {"none", "weights", "all"}


def test_a_bound_on_memory_holds() -> None:
    dropped, kept = gpt(regather="all"), gpt(regather="none")
    assert dropped.memory["needed"] < kept.memory["needed"]
    budget = (dropped.memory["needed"] + kept.memory["needed"]) // 2
    plan = gpt(regather="auto", memory_budget=budget)
    assert plan.memory["needed"] <= budget
    assert plan.regather == "all" or plan.free > 0.0
    assert plan.seconds <= dropped.seconds * (1 + 1e-9)
    assert any("too much" in c.why for c in plan.candidates)
    assert any(note.startswith("memory_budget") for note in plan.notes)


def test_what_does_not_fit_says_what_would() -> None:
    least = gpt(regather="all").memory["needed"]
    with pytest.raises(PlanError, match=r"too small: the least .* is .* per device, on grid \(1, 8, 1\)") as caught:
        gpt(regather="auto", memory_budget=least // 2)
    assert "a grid of some 16 devices" in str(caught.value) and "optimizer" in str(caught.value)
    with pytest.raises(PlanError, match="number of bytes"):
        gpt(memory_budget=0)
    with pytest.raises(PlanError, match="'some' is not known"):
        gpt(regather="some")


def test_needed_is_what_stays_and_the_larger_working_set() -> None:
    memory = gpt().memory
    stays = sum(memory[k] for k in ("parameters", "gradients", "optimizer", "buffers"))
    assert stays < memory["needed"] <= stays + max(memory["peak forward"], memory["peak backward"])
    assert memory["needed"] >= memory["optimizer"] + memory["peak backward"]


def test_a_bound_goes_with_the_choice_of_the_grid() -> None:
    make_model, make_inputs = MODELS["mlp"]
    args, kwargs = make_inputs(torch.float32)
    free = autopar3d.plan(make_model(torch.float32), "auto", args, kwargs, world_size=8, regather="auto")
    budget = max(c.memory for c in free.candidates)
    bound = autopar3d.plan(
        make_model(torch.float32), "auto", args, kwargs, world_size=8, regather="auto", memory_budget=2 * budget
    )
    assert bound.memory["needed"] <= 2 * budget
    assert bound.seconds >= free.seconds * (1 - 1e-9)
