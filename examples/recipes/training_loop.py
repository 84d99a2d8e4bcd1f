"""A training loop with all that one needs: a sampler that gives each rank its samples, gradient accumulation, a
learning rate that warms up and decays, clipping, checkpoints saved while training goes on, and resuming.

    torchrun --nproc-per-node 8 examples/recipes/training_loop.py --grid 2,2,2 --folder checkpoints

Run it again and it goes on from the last checkpoint; on another grid too.
"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import autopar3d

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpt import GPT, GPTConfig  # noqa: E402


class Counting(Dataset[Tensor]):
    """Rows of numbers that count up from a random start: easy to learn, and each sample can be told by its index."""

    def __init__(self, config: GPTConfig, size: int = 512) -> None:
        self.config, self.size = config, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        return (torch.arange(self.config.block + 1) + 7 * index) % self.config.vocab


def train(
    grid: tuple[int, int, int],
    folder: Path,
    *,
    steps: int = 20,
    batch: int = 16,
    accumulate: int = 2,
    save_every: int = 10,
    device: str = "cpu",
) -> list[float]:
    """What every rank runs; the losses of the steps taken now."""
    config = GPTConfig(vocab=32, block=16, layers=2, heads=4, hidden=32)
    example = torch.empty(batch, config.block, dtype=torch.long, device=device)
    # Each rank passes its own part of the batch; the example has the shape of the whole.
    par = autopar3d.compile(GPT(config).to(device), grid, (example, example), inputs="sharded")

    optimizer = torch.optim.AdamW(par.parameters(), lr=3e-3, foreach=True)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps - 5))
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, decay], [5])

    data = Counting(config)
    # Ranks with the same data_rank read the same samples: they share the work on them.
    sampler: DistributedSampler[Tensor] = DistributedSampler(
        data, num_replicas=par.data_world_size, rank=par.data_rank, shuffle=True, seed=0
    )
    loader = DataLoader(data, batch_size=batch // par.data_world_size, sampler=sampler, drop_last=True)

    done = resume(par, optimizer, scheduler, folder)
    losses: list[float] = []
    saving: Future[Any] | None = None
    batches = endless(loader, sampler, skip=done * accumulate)
    for step in range(done, steps):
        optimizer.zero_grad()
        total = 0.0
        for _ in range(accumulate):
            rows = next(batches).to(device)
            loss = par(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) / accumulate
            loss.backward()
            total += loss.item()  # the mean over the whole batch, the same on every rank
        nn.utils.clip_grad_norm_(par.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(total)
        if (step + 1) % save_every == 0 or step + 1 == steps:
            if saving is not None:
                saving.result()
            saving = save(par, optimizer, scheduler, folder, step + 1)
    if saving is not None:
        saving.result()
    return losses


def endless(loader: DataLoader[Tensor], sampler: DistributedSampler[Tensor], skip: int) -> Any:
    """Batches, epoch after epoch, in an order of its own each; the first `skip` were read before."""
    epoch, at = divmod(skip, len(loader))
    while True:
        sampler.set_epoch(epoch)
        for number, rows in enumerate(loader):
            if number >= at:
                yield rows
        epoch, at = epoch + 1, 0


def save(par: Any, optimizer: Any, scheduler: Any, folder: Path, step: int) -> Future[Any]:
    """Start to write a checkpoint; training may go on, for the state is copied first."""
    state, optim_state = get_state_dict(par, optimizer)
    extra = {"step": step, "scheduler": scheduler.state_dict(), "random": par.random_state()}
    content = {"model": state, "optim": optim_state, "extra": extra}
    saved = dcp.async_save(content, checkpoint_id=str(folder / f"step{step:06d}"))
    return saved if isinstance(saved, Future) else saved.upload_completion


def resume(par: Any, optimizer: Any, scheduler: Any, folder: Path) -> int:
    """Load the last checkpoint that is complete, if there is one; the number of steps it had taken."""
    complete = sorted(path.parent for path in folder.glob("step*/.metadata"))
    if not complete:
        return 0
    state, optim_state = get_state_dict(par, optimizer)
    extra = {"step": 0, "scheduler": scheduler.state_dict(), "random": par.random_state()}
    content = {"model": state, "optim": optim_state, "extra": extra}
    dcp.load(content, checkpoint_id=str(complete[-1]))
    set_state_dict(par, optimizer, model_state_dict=state, optim_state_dict=optim_state)
    extra = content["extra"]
    scheduler.load_state_dict(extra["scheduler"])
    par.set_random_state(extra["random"])
    return int(extra["step"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", default="2,2,2")
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # gloo beside nccl: an asynchronous save gathers its plan on the CPU.
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    x, y, z = (int(size) for size in options.grid.split(","))
    losses = train((x, y, z), options.folder, steps=options.steps, device="cuda" if cuda else "cpu")
    if dist.get_rank() == 0:
        print("losses:", " ".join(f"{loss:.3f}" for loss in losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
