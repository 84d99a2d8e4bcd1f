"""Draws and dropout under every placement: each rank's part is its part of the whole, exactly."""

from __future__ import annotations

import pytest
import torch

from autopar3d.grid import Grid
from autopar3d.layout import Layout
from autopar3d.proof import OneOp, Sample
from autopar3d.rules import LocalOp
from autopar3d.search.strategies import Strategy, given

aten = torch.ops.aten
CPU = torch.device("cpu")


def _draw(what: str, shape: list[int]) -> OneOp:
    dtype = torch.bool if what == "keep" else torch.float64
    return OneOp(Sample(torch.ops.autopar3d.draw.default, (torch.tensor([7, 3]), 5, what, 0.4, shape, dtype, CPU)))


def _part(one: OneOp, grid: Grid, strategy: Strategy, rank: int, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """What the lowering computes on a rank."""
    at = {grid.alias(a): c for a, c in grid.coordinates(rank).items()}
    monkeypatch.setattr("autopar3d.rules.random.coordinate", lambda group, device: torch.tensor([at[group]]))
    key = one.inputs[0]
    op = LocalOp(one.node, one.spec, strategy.axes_of, grid, (key, *one.node.args[1:]))
    assert one.spec.lower is not None
    target, args, kwargs = one.spec.lower(op)
    return target(*args, **kwargs)


@pytest.mark.parametrize("grid", [Grid(2, 2, 2), Grid(2, 3, 1), Grid(1, 2, 4)], ids=str)
@pytest.mark.parametrize("shape", [[4, 6, 8], [8, 144], [24]], ids=str)
def test_every_placement(grid: Grid, shape: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    one = _draw("uniform", shape)
    (whole,) = one.results
    found = one.strategies(grid)
    assert len(found) > 3
    for strategy in found:
        layout: Layout = one.factors.values[one.node].layout(given(one.spec, strategy, 0), grid)
        for rank in range(grid.size):
            assert _part(one, grid, strategy, rank, monkeypatch).equal(layout.shard(whole, grid, rank)), strategy


@pytest.mark.parametrize("what", ["keep", "normal", "exponential"])
def test_every_kind_through_the_passes(what: str) -> None:
    one, grid = _draw(what, [8, 12]), Grid(2, 2, 2)
    for strategy in one.strategies(grid)[::9]:
        one.check(grid, strategy)


def test_only_the_mask_is_saved_for_backward() -> None:
    """One byte an element; and the gradient goes through the same mask."""
    x = torch.ones(64, 64, dtype=torch.float64, requires_grad=True)
    from autopar3d.rules.random import dropped

    keep = torch.rand(64, 64, generator=torch.Generator().manual_seed(0)) < 0.5
    saved: list[torch.Tensor] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = dropped(x, keep, 2.0)
    assert [t.dtype for t in saved] == [torch.bool]
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert grad.equal(2.0 * keep.double())
    assert y.equal(grad)
