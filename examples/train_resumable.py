"""A run that is killed and goes on: torchrun starts the ranks again, and they continue from the last checkpoint.

    torchrun --standalone --nproc-per-node 4 --max-restarts 2 examples/train_resumable.py --grid 1,2,2 --kill-at 7

A checkpoint is written beside the last one and takes its place only when every rank is done, so a rank that dies while
saving leaves the last one whole. It holds parameters, optimizer state, the step, and the state of random numbers; on
the same grid the run goes on bit for bit as if nothing had happened, and it may go on on another grid.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import autopar3d


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The data of a step depends on its number alone, so a run that is continued sees what it would have seen."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(32, 64, generator=generator)
    return x, x.roll(1, dims=1)


def join() -> None:
    """Join the other ranks of this life. Under torchrun the store outlives the ranks, and with it the addresses of the
    dead (torch 2.13 with gloo would wait for them), so each life has keys of its own."""
    life = os.environ["TORCHELASTIC_RESTART_COUNT"]
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    dist.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo",
        store=dist.PrefixStore(f"life{life}", store),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )


def save(folder: Path, par: autopar3d.ParallelModule, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write a checkpoint of all ranks; every rank must call it."""
    model, optim = get_state_dict(par, optimizer)
    new, last, old = folder / "new", folder / "last", folder / "old"
    dcp.save({"model": model, "optim": optim, "step": step, "random": par.random_state()}, checkpoint_id=new)
    dist.barrier()  # `new` is complete
    if dist.get_rank() == 0:
        shutil.rmtree(old, ignore_errors=True)
        if last.exists():
            last.rename(old)
        new.rename(last)
    dist.barrier()


def load(folder: Path, par: autopar3d.ParallelModule, optimizer: torch.optim.Optimizer) -> int:
    """The number of steps that were done; 0 where there is no checkpoint."""
    # Between its two renames a rank may have died: then the last one is still called old.
    found = next((folder / name for name in ("last", "old") if (folder / name / ".metadata").exists()), None)
    if found is None:
        return 0
    model, optim = get_state_dict(par, optimizer)
    state: dict[str, Any] = {"model": model, "optim": optim, "step": 0, "random": par.random_state()}
    dcp.load(state, checkpoint_id=found)
    set_state_dict(par, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    par.set_random_state(state["random"])
    return int(state["step"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", default="1,2,2", help="sizes of the axes x,y,z")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--every", type=int, default=3, help="steps between checkpoints")
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
    parser.add_argument("--kill-at", type=int, default=-1, help="at this step, in the first life, rank 1 dies")
    options = parser.parse_args()
    join()
    grid = tuple(int(n) for n in options.grid.split(","))
    x, y = batch(0)
    par = autopar3d.compile(make(), grid, x, {"targets": (y,)}, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(par.parameters(), lr=1e-3, foreach=True)
    done = load(options.folder, par, optimizer)
    first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if dist.get_rank() == 0:
        print(f"starting at step {done}", flush=True)
    for step in range(done, options.steps):
        if step == options.kill_at and first_life and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        x, y = batch(step)
        optimizer.zero_grad()
        loss = par(x, targets=(y,))
        loss.backward()
        nn.utils.clip_grad_norm_(par.parameters(), 1.0)
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step:3d}   loss {loss.item():.17g}", flush=True)
        if (step + 1) % options.every == 0:
            save(options.folder, par, optimizer, step + 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
