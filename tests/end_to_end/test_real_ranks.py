"""Real gloo ranks train as one device does, all run one program, and it is the one that simulate and plan show.

MLP and GPT on every grid, each other model on two, mostly of four ranks; the full matrix is
`examples/benchmarks/equality_matrix.py`.
"""

from __future__ import annotations

import hashlib
import math
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch

import autopar3d
from autopar3d.program import text
from autopar3d.ranks.launch import Pool
from autopar3d.testing import trains_like_one_device
from tests.models import MODELS

from .cases import GLOO_GRIDS, Sizes, case

ALL = [(name, grid) for name in ("mlp", "gpt") for grid in GLOO_GRIDS]
TWO = {"llama": (2, 1, 2), "t5": (2, 2, 1), "gpt2": (2, 2, 2), "bert": (1, 1, 4), "vit": (4, 1, 1), "resnet": (1, 4, 1)}
SOME = [(name, grid) for name, other in TWO.items() for grid in ((1, 2, 2), other)]


class Trained(NamedTuple):
    """What a rank says of one model: small, so that it travels."""

    worst: dict[str, float]
    failures: list[str]
    hash: str
    texts: tuple[str, str]
    elements: tuple[int, int]  # of parameters and of gradients, in this rank's memory


def train(name: str, grid: Sizes) -> Trained:
    make, (args, kwargs) = case(name)
    found = trains_like_one_device(make, args, grid, example_kwargs=kwargs, simulate=False)
    parameters = list(found.module.parameters())
    elements = held(parameters), held([p.grad for p in parameters if p.grad is not None])
    return Trained(found.worst, list(map(str, found.failures)), found.plan.hash, texts(found.module), elements)


def texts(module: autopar3d.ParallelModule) -> tuple[str, str]:
    """Of forward_graph and backward_graph: nodes with their types, and the code that runs."""
    assert module.backward_graph is not None
    both = [text(g) + g.code for g in (module.forward_graph, module.backward_graph)]
    first, second = (hashlib.sha256(t.encode()).hexdigest() for t in both)
    return first, second


def held(tensors: list[Any]) -> int:
    """Elements of the memory behind DTensors: of storages, not of views."""
    storages = {t.to_local().untyped_storage()._cdata: t.to_local() for t in tensors}
    return sum(t.untyped_storage().nbytes() // t.element_size() for t in storages.values())


@cache
def trained(pool: Pool, name: str, grid: Sizes) -> list[Trained]:
    return pool.run(train, name, grid, ranks=math.prod(grid), timeout=280)


@pytest.mark.parametrize(("name", "grid"), ALL + SOME, ids=str)
def test_ranks_train_as_one_device(ranks: Pool, name: str, grid: Sizes) -> None:
    found = trained(ranks, name, grid)
    for rank, one in enumerate(found):
        assert not one.failures, f"rank {rank}: {one.failures}"
        assert one.texts == found[0].texts, f"rank {rank} runs another program than rank 0"
        assert one.hash == found[0].hash


@pytest.mark.parametrize("grid", GLOO_GRIDS, ids=str)
def test_the_program_is_what_simulate_and_plan_show(ranks: Pool, grid: Sizes) -> None:
    make, (args, kwargs) = case("gpt")
    found = trained(ranks, "gpt", grid)[0]
    simulated = autopar3d.simulate(make(), grid, args, kwargs)
    assert texts(simulated) == found.texts
    assert simulated.plan.hash == found.hash
    if grid == (2, 2, 2):
        # Nothing but shapes is needed: no process group, and a model without weights.
        assert autopar3d.plan(make().to("meta"), grid, args, kwargs, world_size=8).hash == found.hash


@pytest.mark.parametrize("grid", GLOO_GRIDS, ids=str)
def test_a_rank_holds_1_p_of_parameters_and_gradients(ranks: Pool, grid: Sizes) -> None:
    total = sum(p.numel() for p in MODELS["gpt"][0](torch.float64).parameters())
    share = total / math.prod(grid)
    for one in trained(ranks, "gpt", grid):
        assert one.elements == (share, share)


def _optimizer_elements(grid: Sizes) -> int:
    make, (args, kwargs) = case("mlp")
    par = autopar3d.compile(make(), grid, args, kwargs)
    optimizer = torch.optim.AdamW(par.parameters())
    par(*args, **kwargs).backward()
    optimizer.step()
    return held([s[k] for s in optimizer.state.values() for k in ("exp_avg", "exp_avg_sq")])


def test_a_rank_holds_1_p_of_the_optimizers_state(ranks: Pool) -> None:
    total = sum(p.numel() for p in MODELS["mlp"][0](torch.float64).parameters())
    assert ranks.run(_optimizer_elements, (1, 2, 2), ranks=4) == [2 * total / 4] * 4
