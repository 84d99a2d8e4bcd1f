"""Convolutions and norms: exact beside one device, with buffers, and none of their work repeated on ranks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from autopar3d.testing import trains_like_one_device

LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "conv1d": (nn.Conv1d(8, 16, 3, padding=1), (4, 8, 16)),
    "groups": (nn.Conv2d(8, 16, 3, groups=2), (4, 8, 8, 8)),
    "depthwise": (nn.Conv1d(8, 16, 3, groups=8, padding=1), (4, 8, 16)),
    "conv3d": (nn.Conv3d(4, 8, (1, 2, 2), stride=(1, 2, 2), bias=False), (4, 4, 4, 8, 8)),
    "dilated": (nn.Conv2d(8, 8, 3, dilation=2, padding="same", padding_mode="reflect"), (4, 8, 8, 8)),
    "transposed 1d": (nn.ConvTranspose1d(8, 16, 4, stride=2, padding=1), (4, 8, 16)),
    "transposed groups": (nn.ConvTranspose2d(8, 16, 3, groups=2, output_padding=1, stride=2), (4, 8, 8, 8)),
    "transposed 3d": (nn.ConvTranspose3d(4, 8, 2, stride=2), (4, 4, 4, 4, 4)),
    "batch norm": (nn.BatchNorm2d(16, momentum=0.3), (4, 16, 4, 4)),
    "batch norm without weights": (nn.BatchNorm1d(16, affine=False), (8, 16)),
    "group norm": (nn.GroupNorm(4, 16), (4, 16, 4, 4)),
    "one group": (nn.GroupNorm(1, 16), (4, 16, 4)),
    "instance norm": (nn.InstanceNorm2d(16, affine=True), (4, 16, 4, 4)),
    "instance norm with statistics": (nn.InstanceNorm1d(16, affine=True, track_running_stats=True), (4, 16, 4)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_exact_and_sharded(name: str) -> None:
    layer, shape = LAYERS[name]

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(shape[-1], shape[-1]), copy.deepcopy(layer)).double()

    x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = trains_like_one_device(make, x, (2, 1, 2), steps=1)
    # AdamW divides a gradient by its own size: that of a bias before a norm is rounding alone.
    wrong = [d for d in found.failures if d.kind != "parameter"]
    assert not wrong, "\n".join(map(str, wrong))
    plan = found.plan
    assert not plan.without_rule
    if getattr(layer, "groups", 1) == 1:  # torch counts more for the backward of groups than it does
        assert plan.flops <= plan.ideal_flops * (1 + 1e-9)
