"""Predicted memory beside the bytes that are alive while one rank runs the emitted graphs."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import autopar3d
from autopar3d.plan import Plan
from autopar3d.step import Step
from tests.live import Live, arguments_like, run_alone
from tests.models import MODELS

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
def planned(name: str, sizes: Sizes, regather: str) -> tuple[Step, Plan]:
    make_model, make_inputs = MODELS[name]
    args, kwargs = make_inputs(torch.float32)
    how: dict[str, Any] = {"regather": regather, "hardware": "h100"}
    par = autopar3d.simulate(make_model(torch.float32), sizes, args, kwargs, **how)
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
