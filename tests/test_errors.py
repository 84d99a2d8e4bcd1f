"""Every error class, by one message of its kind: the thing, the sizes, the axis, the reason, and what to do next."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar3d
from autopar3d import errors
from autopar3d.errors import AutoPar3DError
from autopar3d.ranks.launch import Pool
from autopar3d.rules.core import parse_rule

X = torch.ones(8, 8)


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def _unlike() -> None:
    """Rank 1 asks for something else."""
    autopar3d.compile(nn.Linear(8, 8), (2, 1, 1), X, seed=dist.get_rank())


def _divides() -> float:
    return 1 / dist.get_rank()


def _planned() -> autopar3d.ParallelModule:
    return autopar3d.simulate(nn.Linear(8, 8), (2, 1, 1), X)


# Error -> how to get it, and what its message says, in this order.
MESSAGES: dict[type[AutoPar3DError], tuple[Callable[[Pool], Any], list[str]]] = {
    errors.GridError: (
        lambda _: autopar3d.plan(nn.Linear(8, 8), (4, 2, 2), X, world_size=8),
        ["grid (4, 2, 2)", "4*2*2 = 16 ranks", "world size is 8", "start 16 ranks, or use one of", "(2, 2, 2)"],
    ),
    errors.LaunchError: (
        lambda _: autopar3d.compile(nn.Linear(8, 8), (2, 2, 2), X),
        ["grid (2, 2, 2) needs 8 ranks", "no process group", "torchrun", "autopar3d.launch"],
    ),
    errors.RankError: (
        lambda ranks: ranks.run(_divides, ranks=2),
        ["rank 0 of 2", "ZeroDivisionError", "Traceback", "return 1 / dist.get_rank()"],
    ),
    errors.TraceError: (
        lambda _: autopar3d.plan(Branches(), (2, 1, 1), X),
        ["cannot trace Branches", "test_errors.py:", "x.sum() > 0", "depends on a tensor's values", "torch.where"],
    ),
    errors.LayoutError: (
        lambda _: autopar3d.Layout.parse("[(2 3:x), -]", sizes={}).check((6, 8), autopar3d.Grid(2, 1, 1)),
        [
            "layout [(2 3:x), -]",
            "dim 0 of shape (6, 8)",
            "3 over axes x of size 2",
            "3 % 2 = 1",
            "use axes that divide",
        ],
    ),
    errors.PlanError: (
        lambda _: autopar3d.plan(nn.Linear(6, 10), (4, 1, 1), torch.ones(8, 6), strict=True),
        ["strict=True", "grid (4, 1, 1)", "weight: whole over x", "(10, 6)", "bias: whole over x"],
    ),
    errors.RuleError: (
        lambda _: parse_rule("m k, k n - m n"),
        ["rule 'm k, k n - m n'", "no '->'", "as in 'm k, k n -> m n'"],
    ),
    errors.InputError: (
        lambda _: _planned()(torch.ones(8, 4)),
        ["args[0]", "(8, 4)", "planned was", "(8, 8)"],
    ),
    errors.MismatchError: (
        lambda ranks: ranks.run(lambda: pytest.raises(errors.MismatchError, _unlike).value, ranks=2)[0],
        ["compile of rank 0 differs from that of rank 1", "seed=0", "seed=1", "same arguments"],
    ),
    errors.StateError: (
        lambda _: list(autopar3d.simulate(nn.Linear(8, 8), (2, 1, 1)).parameters()),
        ["nothing is planned yet", "example_inputs=", "call the module once"],
    ),
}


def test_every_error_class_is_listed() -> None:
    found = {c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, AutoPar3DError)}
    assert found - {AutoPar3DError} == set(MESSAGES)


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_its_message_says_what_to_do(kind: type[AutoPar3DError], ranks: Pool) -> None:
    provoke, says = MESSAGES[kind]
    try:
        error = provoke(ranks)
    except kind as raised:
        error = raised
    assert type(error) is kind, error
    message = str(error)
    at = 0
    for part in says:
        assert part in message[at:], f"{part!r} is not in its place in:\n{message}"
        at = message.index(part, at)
    assert len(inspect.getdoc(kind) or "") > 30
