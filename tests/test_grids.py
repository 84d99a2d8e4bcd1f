"""grid="auto": every grid is considered, the fastest is taken, and the plan says why."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import autopar3d
from autopar3d.errors import GridError, InputError, LaunchError, PlanError
from autopar3d.estimate import estimate
from autopar3d.factors import Factors
from autopar3d.grid import Grid, factorisations
from autopar3d.grids import distinct
from autopar3d.hardware import PROFILES
from autopar3d.passes.rewrite import rewrite
from autopar3d.plan import Plan
from autopar3d.program import Program
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
    assert sorted(named) == sorted(str(Grid(*g)) for g in factorisations(devices))


@pytest.mark.parametrize("hardware", ["cpu", "h100"])
def test_grids_that_are_the_same_cost_the_same(hardware: str) -> None:
    program = traced("mlp")
    factors = Factors(program.graph.graph)
    for grid, same in distinct(16, PROFILES[hardware]):
        first = decide(program, factors, grid, PROFILES[hardware], Options()).cost
        for text in same:
            other = Grid(*map(int, text.strip("()").split(",")))
            cost = decide(program, factors, other, PROFILES[hardware], Options()).cost
            assert cost == pytest.approx(first, rel=1e-9), (grid, other)


def test_the_fastest_is_taken_and_the_others_say_what_they_lack() -> None:
    plan = autopar3d.plan(mlp(), "auto", world_size=8, hardware="h100", **HOW)
    first, *others = plan.candidates
    assert first.grid == plan.grid and first.why == "chosen" and first.scheduled == pytest.approx(plan.seconds)
    assert math.prod(plan.grid) == 8
    assert all(c.scheduled is None or c.scheduled >= first.scheduled for c in others)
    assert all(c.why and c.why != "chosen" for c in others)
    left = [c.seconds for c in others if c.scheduled is None]
    assert left == sorted(left)
    text = str(plan)
    assert "Grids considered" in text and all(str(Grid(*c.grid)) in text for c in plan.candidates)
    assert max(map(len, text.split("\n"))) <= 120
    assert Plan.from_dict(plan.to_dict()) == plan


def test_no_single_grid_is_predicted_to_be_faster() -> None:
    best = autopar3d.plan(mlp(), "auto", world_size=4, hardware="cpu", **HOW)
    for sizes in factorisations(4):
        plan = autopar3d.plan(mlp(), sizes, hardware="cpu", **HOW)
        assert best.seconds <= plan.seconds * (1 + 1e-9)


def test_it_runs_in_simulation() -> None:
    sim = autopar3d.simulate(mlp(), "auto", torch.ones(8, 64), world_size=4)
    assert torch.allclose(sim(torch.ones(8, 64)), mlp()(torch.ones(8, 64)), atol=1e-6)
    assert sim.plan.candidates and math.prod(sim.plan.grid) == 4


def test_what_it_needs() -> None:
    with pytest.raises(GridError, match="world_size="):
        autopar3d.plan(mlp(), "auto", **HOW)
    with pytest.raises(GridError, match="'best' is not known"):
        autopar3d.plan(mlp(), "best", **HOW)
    with pytest.raises(GridError, match="at least one"):
        autopar3d.plan(mlp(), "auto", world_size=0, **HOW)
    with pytest.raises(InputError, match="example_inputs"):
        autopar3d.simulate(mlp(), "auto", world_size=4)
    with pytest.raises(LaunchError, match="process group"):
        autopar3d.compile(mlp(), "auto", torch.ones(8, 64))


def estimated(program: Program, grid: Grid, regather: str) -> tuple[float, int]:
    factors = Factors(program.graph.graph)
    decisions = decide(program, factors, grid, PROFILES["cpu"], Options(regather=regather))
    local = rewrite(program, factors, decisions, regather=regather)
    found = estimate(program, factors, decisions, local, regather=regather)
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
