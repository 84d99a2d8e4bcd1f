"""A rank that does not come, or goes its own way: an error on all ranks that says who, within the group's timeout."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar3d
from autopar3d.errors import InputError, MismatchError, RankError
from autopar3d.private import set_group_timeout
from autopar3d.ranks.launch import Pool

SECONDS = 4


def _strayed(how: str) -> str:
    """The error of this rank."""
    set_group_timeout(timedelta(seconds=SECONDS), dist.group.WORLD)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    par = autopar3d.compile(model, (1, 2, 1), torch.randn(8, 8), scheme="zero3", hardware="bandwidth")
    x = torch.ones(8, 8)
    par(x).sum().backward()
    try:
        if dist.get_rank() == 1:
            if how == "other shape":
                x = torch.ones(6, 8)
            elif how == "one call more":
                par(x)
            elif how in ("absent", "state"):
                return ""
        if how == "state":
            par.full_state_dict()
        par(x).sum().backward()
    except MismatchError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("how", ["other shape", "one call more", "absent", "state"])
def test_every_rank_ends_in_time(ranks: Pool, how: str) -> None:
    zero, one = ranks.run(_strayed, how, ranks=2, timeout=120)
    if how == "state":
        assert zero.startswith("rank 0: full_state_dict() waited in vain"), zero
        assert "rank 1: running its own code, or a step" in zero
        return
    part = "backward" if how == "one call more" else "forward"
    assert zero.startswith(f"rank 0: a step stopped in {part}, in a"), zero
    assert "over axis y of module" in zero
    if how == "other shape":
        assert "rank 1: " in zero and "planning of a call with args[0] (6, 8)" in zero
        assert one.startswith("rank 1: planning of a call with args[0] (6, 8) waited in vain")
        assert "rank 0: waiting: a step stopped in forward, in a" in one
    elif how == "one call more":  # its forward must not take what the other's backward sends
        assert one.startswith("rank 1: a step stopped in forward, in a")
        assert "rank 0: waiting: a step stopped in backward, in a" in one
    else:
        assert "rank 1: running its own code, or a step" in zero


def _checked() -> list[str]:
    """What check=True says, while the ranks go on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    x, odd = torch.ones(8, 8), dist.get_rank() == 1
    par = autopar3d.compile(model, (1, 2, 1), x, check=True)
    said = []

    def refused(error: type[Exception], call: Callable[[], object]) -> None:
        with pytest.raises(error) as caught:
            call()
        said.append(str(caught.value))

    par[1].train(not odd)
    refused(InputError, lambda: par(x))
    par.train()
    par[0].bias.requires_grad_(not odd)
    refused(InputError, lambda: par(x))
    par[0].bias.requires_grad_(True)
    y = par(x)
    refused(MismatchError, lambda: y.backward(torch.full_like(y, 1.0 + odd)))
    y = par(x)
    refused(MismatchError, (lambda: par(x)) if odd else (lambda: y.sum().backward()))
    with contextlib.nullcontext() if odd else par.no_sync():
        refused(InputError, lambda: par(x))
    par(x).sum().backward()
    return said


def test_a_checked_run_says_who_differs(ranks: Pool) -> None:
    zero, one = ranks.run(_checked, ranks=2, timeout=120)
    assert zero == one
    mode, trained, gradient, order, sync = zero
    assert "train/eval mode of rank 0 differs from that of rank 1 (model:train 0:train 1:train 2:train and" in mode
    assert "requires_grad of parameters of rank 0 differs from that of rank 1" in trained and "0.bias:False" in trained
    assert "the outputs' gradient 0 of rank 0 differs from that of rank 1 ((8, 8) torch.float32" in gradient
    assert "the next run of rank 0 differs from that of rank 1 (the start of backward and the comparison of" in order
    assert "no_sync() of rank 0 differs from that of rank 1 (True and False)" in sync


def test_a_checked_module_may_plan_at_its_first_call() -> None:
    model = nn.Linear(8, 8)
    par = autopar3d.compile(model, (1, 1, 1), check=True)
    assert torch.allclose(par(torch.ones(2, 8)), model(torch.ones(2, 8)))


def _dies() -> None:
    par = autopar3d.compile(nn.Linear(8, 8), (1, 2, 1), torch.randn(8, 8))
    par(torch.ones(8, 8))
    if dist.get_rank() == 1:
        os._exit(3)
    par(torch.ones(8, 8))


def test_a_dead_rank_is_named(ranks: Pool) -> None:
    with pytest.raises(RankError, match="rank 1 of 2: the process exited with status 3"):
        ranks.run(_dies, ranks=2, timeout=120)


def _groups() -> list[Any]:
    set_group_timeout(timedelta(seconds=77), dist.group.WORLD)
    par = autopar3d.compile(nn.Linear(8, 8), (2, 1, 1), torch.randn(8, 8))
    mesh = par.weight.device_mesh
    return [mesh.get_group(i)._get_backend(torch.device("cpu")).options._timeout for i in range(3)]


def test_the_groups_of_a_grid_have_the_timeout_that_was_asked_for(ranks: Pool) -> None:
    assert ranks.run(_groups, ranks=2) == [[timedelta(seconds=77)] * 3] * 2
