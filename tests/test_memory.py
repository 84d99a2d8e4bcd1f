"""Predicted memory beside the bytes that are alive while one rank runs the emitted graphs."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

import autopar3d
from autopar3d.grid import Grid
from autopar3d.hardware import PROFILES
from autopar3d.passes.canonicalize import canonicalize
from autopar3d.passes.trace import trace
from autopar3d.plan import Plan
from autopar3d.search.bounded import solve_within
from autopar3d.search.estimate import saved_shards
from autopar3d.search.factors import Factors
from autopar3d.search.footprint import footprint
from autopar3d.step import Options, Step, choices
from tests.live import Live, arguments_like, run_alone
from tests.models import MODELS, loss_of

Sizes = tuple[int, int, int]

# One grid a model in the quick suite, all of them in the slow one.
CASES = [
    pytest.param(name, sizes, regather, marks=[] if (name, sizes, regather) in quick else pytest.mark.slow)
    for quick in [{("mlp", (4, 1, 1), "none"), ("gpt", (2, 2, 2), "all"), ("llama", (1, 2, 4), "all")}]
    for name in ("mlp", "gpt", "llama")
    for sizes in ((2, 2, 2), (1, 2, 4), (4, 1, 1))
    for regather in ("all", "none")
]


@functools.cache
def module(name: str, sizes: Sizes, regather: str, budget: int | None = None) -> autopar3d.ParallelModule:
    make_model, make_inputs = MODELS[name]
    args, kwargs = make_inputs(torch.float32)
    how: dict[str, Any] = {"regather": regather, "memory_budget": budget, "hardware": "h100"}
    return autopar3d.simulate(make_model(torch.float32), sizes, args, kwargs, **how)


def planned(name: str, sizes: Sizes, regather: str) -> tuple[Step, Plan]:
    par = module(name, sizes, regather)
    return par._prepared.step, par.plan


def counted(step: Step, plan: Plan) -> tuple[int, int, int]:
    """Peaks of the forward graph, of the backward graph (all that is passed to them counts), and of a training step."""
    grid, runs = step.decisions.grid, step.runs
    assert runs.backward is not None
    forward, backward, whole = Live(), Live(), Live()
    whole.hold(optimizer := [torch.zeros(plan.memory["optimizer"], dtype=torch.uint8)])
    arguments = arguments_like(runs.forward)
    out = run_alone(runs.forward, grid, arguments, forward, whole)
    saved = out[runs.results :]
    seeds = [torch.ones_like(out[i]) for i in runs.tangents]
    del out
    run_alone(runs.backward, grid, [*saved, *seeds], backward, whole)
    del optimizer
    return forward.peak, backward.peak, whole.peak


@pytest.mark.parametrize("name, sizes, regather", CASES)
def test_the_predicted_peak_is_that_of_a_run(name: str, sizes: Sizes, regather: str) -> None:
    step, plan = planned(name, sizes, regather)
    forward, backward, whole = counted(step, plan)
    assert plan.memory["peak forward"] == pytest.approx(forward, rel=0.1)
    assert plan.memory["peak backward"] == pytest.approx(backward, rel=0.1)
    # "needed" holds all gradients throughout; a run that begins without any may take less, by so much.
    assert whole * 0.98 <= plan.memory["needed"] <= whole * 1.1 + plan.memory["gradients"]


# -- a bound on it -----------------------------------------------------------------------------------------------------


def gradients_of(par: autopar3d.ParallelModule, name: str) -> dict[str, torch.Tensor]:
    args, kwargs = MODELS[name][1](torch.float32)
    par.zero_grad()
    loss_of(par(*args, **kwargs)).backward()
    return {n: p.grad for n, p in par.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "name, sizes, regather, share",
    [
        ("gpt", (2, 2, 2), "all", 0.95),
        pytest.param("gpt", (2, 2, 2), "all", 0.88, marks=pytest.mark.slow),
        pytest.param("llama", (1, 2, 4), "all", 0.8, marks=pytest.mark.slow),
        pytest.param("llama", (1, 2, 4), "none", 0.7, marks=pytest.mark.slow),
    ],
)
def test_a_bound_holds_on_a_given_grid(name: str, sizes: Sizes, regather: str, share: float) -> None:
    """Values are computed again, and nothing else changes: not a bit of a gradient, and no collective."""
    step, free = planned(name, sizes, regather)
    stays = sum(free.memory[k] for k in ("parameters", "gradients", "optimizer", "buffers"))
    budget = stays + int(share * (free.memory["needed"] - stays))
    par = module(name, sizes, regather, budget)
    assert par.plan.memory["needed"] <= budget < free.memory["needed"]
    assert counted(par._prepared.step, par.plan)[2] <= budget * 1.05
    (note,) = (n for n in par.plan.notes if n.startswith("memory_budget"))
    assert "the gap is at most" in note
    assert par.plan.objective >= free.objective * (1 - 1e-9)
    again = Plan.from_dict(par.plan.to_dict())
    assert again.free == par.plan.free and again.digest == par.plan.digest
    if par.plan.free:
        assert par.plan.traffic == free.traffic
    before, after = gradients_of(module(name, sizes, regather), name), gradients_of(par, name)
    assert before.keys() == after.keys()
    for n, grad in before.items():
        if par.plan.free:
            assert torch.equal(grad, after[n]), n
        else:
            torch.testing.assert_close(grad, after[n])


@pytest.mark.parametrize("regather", ["all", "none"])
def test_the_footprint_is_what_is_kept(regather: str) -> None:
    """Near what is kept, of the best choice and of those that keep less."""
    make_model, make_inputs = MODELS["gpt"]
    program = canonicalize(trace(make_model(torch.float32), *make_inputs(torch.float32)))
    factors, grid, options = Factors(program.graph.graph), Grid(2, 2, 2), Options(regather=regather)
    search = choices(program, factors, grid, PROFILES["h100"], options)
    held = footprint(search)
    solution = search.problem.solve()
    most = held.value(solution.choice)
    for share in (0.0, 0.05, 0.1):
        found = solve_within(search.problem, held, most * (1 - share), solves=8)
        if found.choice is None:
            break
        decisions = search.decisions(replace(solution, choice=found.choice, cost=found.cost))
        kept = sum(saved_shards(program, factors, decisions, regather).values())
        assert found.memory == pytest.approx(kept, rel=0.15)
        assert found.bound >= solution.cost * (1 - 1e-9)
    assert share > 0.0
