"""A rank that does not come, or goes its own way: an error on all ranks that says who, within the group's timeout."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar3d
from autopar3d.errors import MismatchError, RankError
from autopar3d.private import set_group_timeout
from autopar3d.ranks.launch import Pool

SECONDS = 4


def _strayed(how: str) -> tuple[str, float]:
    """The error of this rank, and the seconds until it came."""
    set_group_timeout(timedelta(seconds=SECONDS), dist.group.WORLD)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    par = autopar3d.compile(model, (1, 2, 1), torch.randn(8, 8))
    x = torch.ones(8, 8)
    par(x).sum().backward()
    start = time.monotonic()
    try:
        if dist.get_rank() == 1:
            if how == "other shape":
                x = torch.ones(6, 8)
            elif how == "absent":
                time.sleep(3 * SECONDS)
                return "", 0.0
        par(x).sum().backward()
    except MismatchError as error:
        return str(error), time.monotonic() - start
    return "nothing", 0.0


@pytest.mark.parametrize("how", ["other shape", "absent"])
def test_every_rank_ends_in_time(ranks: Pool, how: str) -> None:
    (zero, took), (one, took_one) = ranks.run(_strayed, how, ranks=2, timeout=120)
    assert zero.startswith("rank 0: a step stopped in a"), zero
    assert "over axis y of module" in zero
    assert took < 3 * SECONDS + 6
    if how == "other shape":
        assert "rank 1: " in zero and "planning of a call with args[0] (6, 8)" in zero
        assert one.startswith("rank 1: planning of a call with args[0] (6, 8) waited in vain")
        assert "rank 0: waiting: a step stopped in a" in one
        assert took_one < 3 * SECONDS + 6
    else:
        assert "rank 1: running its own code, or a step" in zero


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
