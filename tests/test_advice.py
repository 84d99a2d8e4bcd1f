"""`check`: what would go wrong or be slow is all told, and nothing else."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

import autopar3d
from autopar3d.cli import main

X = torch.ones(8, 8)


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class Lucky(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * random.random()


class Empty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def test_grid_and_model_are_told_together() -> None:
    found = autopar3d.check(Branches(), (2, 2, 3), X, world_size=8)
    assert [p.split(":")[0] for p in found.problems] == ["GridError", "TraceError"]
    assert not found.ok and found.plan is None and str(found).endswith("2 problems.")


def test_options_too() -> None:
    found = autopar3d.check(nn.Linear(8, 8), (2, 2, 2), X, scheme="4d", world_size=4)
    assert [p.split(":")[0] for p in found.problems] == ["GridError", "PlanError"]
    found = autopar3d.check(nn.Linear(6, 10), (4, 1, 1), torch.ones(8, 6), strict=True)
    assert found.problems[0].startswith("PlanError: strict=True") and len(found.problems) == 1


def test_a_graph_that_does_not_compute_what_the_model_does() -> None:
    found = autopar3d.check(Lucky(), (2, 1, 1), X)
    assert "does not compute what the model does" in found.problems[0] and str(found).endswith("1 problem.")
    assert autopar3d.check(Lucky(), (2, 1, 1), X, run=False).ok


def test_meta_models_need_values() -> None:
    with torch.device("meta"):
        empty, filled = Empty(), nn.Linear(8, 8)
    assert "nothing initialises weight of this meta model" in autopar3d.check(empty, (2, 1, 1), X).problems[0]
    assert autopar3d.check(filled, (2, 1, 1), X).ok


def test_what_is_slow() -> None:
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 7))
    found = autopar3d.check(model, (2, 2, 2), torch.ones(8, 6), hardware="h100")
    text = "\n".join(found.slow)
    assert found.ok and found.plan is not None and found.plan.whole
    assert "kept whole on some axes, so not 1/8" in text and all(name in text for name in found.plan.whole)
    assert "waits for communication, most for axis" in text and "pays latency, not bytes" in text
    assert "a rank needs" in found.notes[0]
    assert all(len(line) <= 120 for line in str(found).splitlines())


def test_nothing_is_slow_where_nothing_is_sent() -> None:
    # The batch is cut, the weight fits each rank: one axis of size 1 has nothing to wait for.
    found = autopar3d.check(nn.Linear(8, 8), (1, 1, 1), X)
    assert found.ok and not found.slow
    assert "nothing is slow for a reason that a grid could change." in str(found)


def test_ops_without_a_rule() -> None:
    class Sorts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.block_diag(x, x)

    found = autopar3d.check(Sorts(), (2, 1, 1), X)
    assert found.ok and any("no rule for" in text and "block_diag" in text for text in found.slow)


def test_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "tests.test_advice:fine", "--grid", "1,1,1"]) == 0
    assert "Nothing would go wrong" in capsys.readouterr().out
    assert main(["check", "tests.test_advice:fine", "--grid", "2,1,1", "--world-size", "4"]) == 1
    assert "WRONG: GridError: grid (2, 1, 1) needs" in capsys.readouterr().out


def fine() -> tuple[nn.Module, Tensor]:
    return nn.Linear(8, 8), X
