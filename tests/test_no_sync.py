"""Gradient accumulation: under `no_sync` gradients are not reduced, and the last micro-batch's backward reduces all."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar3d
from autopar3d import collectives
from autopar3d.errors import StateError
from autopar3d.ranks.launch import Pool

MICRO = 3


class Model(nn.Module):
    """A tied matrix (two gradients that add up), a norm, biases."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(32, 16), nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        x = self.norm(x + self.down(F.gelu(self.up(x))))
        return F.cross_entropy((x @ self.tokens.weight.T).flatten(0, 1), ids.flatten())


def make() -> nn.Module:
    torch.manual_seed(0)
    return Model().double()


def batches(sizes: tuple[int, ...] = (8,) * MICRO) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(32, (n, 4), generator=generator) for n in sizes]


def accumulate(module: Any, given: list[Tensor], *, defer: bool) -> None:
    for i, ids in enumerate(given):
        held = module.no_sync() if defer and i + 1 < len(given) else nullcontext()
        with held:
            module(ids).backward()


def assert_same(par: Any, model: nn.Module) -> None:
    for (name, p), q in zip(par.named_parameters(), model.named_parameters(), strict=True):
        grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        torch.testing.assert_close(grad, q[1].grad, rtol=1e-12, atol=1e-14, msg=name)


@pytest.mark.parametrize(
    ("grid", "options"),
    [
        ((4, 1, 1), {"scheme": "zero3"}),
        ((2, 2, 2), {"scheme": "3d"}),
        ((1, 2, 2), {"outputs": "loss"}),
        (autopar3d.Grid(2, 1, 1, replicas=2), {}),
    ],
    ids=["zero3", "3d", "auto", "replicas"],
)
def test_the_same_gradients_and_no_reduction_but_the_last(grid: Any, options: dict[str, Any]) -> None:
    par, model = autopar3d.simulate(make(), grid, batches()[0], hardware="bandwidth", **options), make()
    for step in range(2):  # what is held is used up
        for module in par, model:
            module.zero_grad()
        accumulate(par, batches(), defer=True)
        accumulate(model, batches(), defer=False)
        assert_same(par, model)
        assert par.held_bytes == 0, step
    split = par._prepared.deferred()
    whole, local, late = (
        [(c.kind, c.axis, c.elements) for c in collectives(g)] for g in (par.backward_graph, split.local, split.reduce)
    )
    assert sorted(local + late) == sorted(whole)
    if options.get("scheme") == "zero3":
        # Each micro-batch gathers weights, and sums no gradient up before the last.
        assert {kind for kind, _, _ in local} <= {"all_gather", "all_to_all"}
        assert {kind for kind, _, _ in late} == {"reduce_scatter"}
        assert len(split.deferred) == len(list(model.parameters()))
    else:
        assert late


def test_what_is_held() -> None:
    par = autopar3d.simulate(make(), (4, 1, 1), batches()[0], scheme="zero3", hardware="bandwidth")
    with par.no_sync():
        par(batches()[0]).backward()
    assert all(p.grad is None for p in par.parameters())
    # zero3 computes with whole weights: their gradients are whole, too (the tied matrix has two).
    whole = sum(p.numel() for p in par.parameters())
    assert par.held_bytes >= 8 * whole
    par.zero_grad()
    assert par.held_bytes == 0


def test_a_last_batch_of_another_size_and_gradients_that_are_there() -> None:
    sizes = (8, 8, 4)
    par, model = autopar3d.simulate(make(), (2, 2, 1), batches()[0], scheme="2d", hardware="bandwidth"), make()
    for module in par, model:
        module(batches()[0]).backward()  # there before
    accumulate(par, batches(sizes), defer=True)
    accumulate(model, batches(sizes), defer=False)
    assert_same(par, model)


def test_a_step_without_the_last_micro_batch_is_an_error() -> None:
    par = autopar3d.simulate(make(), (4, 1, 1), batches()[0], scheme="zero3", hardware="bandwidth")
    with par.no_sync():
        par(batches()[0]).backward()
    with torch.no_grad():
        par.up.weight.mul_(2)
    with pytest.raises(StateError, match=r"outside of no_sync\(\), and then optimizer.step\(\)"):
        par(batches()[0]).backward()
    par(batches()[0]).backward()


def _on_ranks() -> tuple[list[Tensor], int]:
    par = autopar3d.compile(make(), (2, 1, 1), batches()[0], scheme="zero3", hardware="bandwidth")
    accumulate(par, batches(), defer=True)
    return [p.grad.full_tensor() for p in par.parameters()], par.held_bytes


def test_real_ranks(ranks: Pool) -> None:
    model = make()
    accumulate(model, batches(), defer=False)
    for grads, held in ranks.run(_on_ranks, ranks=2, timeout=120):
        assert held == 0
        for grad, p in zip(grads, model.parameters(), strict=True):
            torch.testing.assert_close(grad, p.grad, rtol=1e-12, atol=1e-14)
