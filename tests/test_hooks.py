"""Hooks on gradients: part of the graph, cut where they treat every element alone, refused where they only look."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar3d
from autopar3d.errors import TraceError


class Hooked(nn.Module):
    def __init__(self, hook: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.up, self.down, self.hook = nn.Linear(8, 16), nn.Linear(16, 8), hook

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        h.register_hook(self.hook)
        return self.down(h)  # type: ignore[no-any-return]


def compiled(model: nn.Module) -> autopar3d.ParallelModule:
    return autopar3d.simulate(model, (2, 2, 2), torch.randn(8, 8))


def test_an_elementwise_hook_is_cut() -> None:
    assert not compiled(Hooked(lambda g: g * 3)).plan.without_rule
    assert compiled(Hooked(lambda g: g / g.norm())).plan.without_rule == {"HookedGradient": 1}


def test_what_no_graph_can_call_is_refused() -> None:
    seen: list[Tensor] = []
    with pytest.raises(TraceError, match="hook on a tensor in forward returns no gradient, but only looks at it"):
        compiled(Hooked(seen.append))
    with pytest.raises(TraceError, match=r"cannot be traced \(DataDependentOutputException.*look at no value"):
        compiled(Hooked(lambda g: g * g.max().item()))
    model = Hooked(lambda g: g)
    model.up.weight.register_hook(lambda g: None)
    with pytest.raises(TraceError, match="hook on the parameter up.weight returns no gradient"):
        compiled(model)
    model = Hooked(lambda g: g)
    model.up.weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(TraceError, match="the parameter up.weight has a hook .*register_post_accumulate_grad_hook"):
        compiled(model)


class ReadsLater(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        later = torch.tanh(h)
        h.register_hook(lambda g: g * later)
        return h + later  # type: ignore[no-any-return]


def test_a_hook_that_reads_what_comes_after_its_tensor_is_refused() -> None:
    with pytest.raises(TraceError, match="reads tanh, which is computed after that tensor"):
        compiled(ReadsLater())
