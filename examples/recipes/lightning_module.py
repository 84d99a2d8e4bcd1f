"""A Lightning `Trainer` around a compiled model: its loop, callbacks, schedules, clipping, accumulation, checkpoints.

    torchrun --nproc-per-node 8 examples/recipes/lightning_module.py --grid 2,2,2 --folder trained

`ModelParallelStrategy` is Lightning's for models that are parallel by themselves: it starts no wrapper, and calls
`configure_model` when the process group is there. The model is compiled in it. With `data_parallel_size=1` all ranks
read the same batches, and each uses its part; seed the loader alike.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import autopar3d


class Regression(lightning.LightningModule):
    """Any module of yours: what is not as on one device stands in `configure_model`."""

    def __init__(self, grid: tuple[int, int, int], batch: int = 16) -> None:
        super().__init__()
        self.grid, self.batch = grid, batch
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:  # Lightning calls it for each of fit, validate and test
            rows = torch.empty(self.batch, 8, device=self.device)
            kwargs = {"targets": (rows,)}
            self.model = autopar3d.compile(
                small().to(self.device), self.grid, rows, kwargs, loss_fn=nn.functional.mse_loss
            )

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        x, y = batch
        loss: Tensor = self.model(x, targets=(y,))
        self.log("loss", loss, prog_bar=True)  # the mean over the whole batch, the same on every rank
        return loss

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        x, y = batch
        self.log("val_loss", self.model(x, targets=(y,)))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, foreach=True)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def small() -> nn.Module:
    """The model for one device."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))


def data(rows: int = 64) -> TensorDataset:
    """Rows to be reversed."""
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.flip(1))


def trainer(folder: Path, epochs: int, strategy: Any, **more: Any) -> lightning.Trainer:
    """The same on a grid and on one device, but for the strategy."""
    return lightning.Trainer(
        strategy=strategy,
        max_epochs=epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **more,
    )


def loader(batch: int = 16, *, shuffle: bool = True) -> DataLoader[Any]:
    """The same batches on every rank."""
    return DataLoader(data(), batch, shuffle=shuffle, generator=torch.Generator().manual_seed(2), drop_last=True)


def train(grid: tuple[int, int, int], folder: Path, *, epochs: int = 3, resume: Path | None = None) -> dict[str, Any]:
    """What every rank runs; what was logged last, and the whole state of the model."""
    ranks = grid[0] * grid[1] * grid[2]
    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=ranks)
    runner = trainer(folder, epochs, strategy, devices=ranks, accelerator="auto")
    module = Regression(grid)
    runner.fit(module, loader(), loader(shuffle=False), ckpt_path=resume)
    logged = {name: float(value) for name, value in runner.callback_metrics.items()}
    return {**logged, "state": module.model.full_state_dict()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", default="2,2,2")
    parser.add_argument("--folder", type=Path, default=Path("trained"))
    options = parser.parse_args()
    x, y, z = (int(size) for size in options.grid.split(","))
    found = train((x, y, z), options.folder)
    print(f"loss {found['loss']:.4f}, validation {found['val_loss']:.4f}")


if __name__ == "__main__":
    main()
