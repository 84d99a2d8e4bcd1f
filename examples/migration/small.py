"""What all files here train: a small model of blocks, for one device, and rows for it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset


class Block(nn.Module):
    """A perceptron beside a skip connection."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """A linear, blocks, and a head."""

    def __init__(self, hidden: int = 16, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(hidden, hidden)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(blocks))
        self.head = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make() -> Model:
    """The model, the same on every rank."""
    torch.manual_seed(0)
    return Model()


def rows(hidden: int = 16, size: int = 64) -> TensorDataset:
    """Rows to be reversed."""
    x = torch.randn(size, hidden, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.flip(1))


def show(before: Callable[[], list[float]], after: Callable[[], list[float]]) -> None:
    """On each rank under torchrun: train both ways; rank 0 prints the losses."""
    dist.init_process_group("gloo")
    for name, losses in ("before", before()), ("after", after()):
        if dist.get_rank() == 0:
            print(f"{name:6}", " ".join(f"{loss:.6f}" for loss in losses))
    dist.destroy_process_group()
