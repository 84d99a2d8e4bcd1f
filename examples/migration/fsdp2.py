"""From FSDP2: the same training, before and after.

torchrun --nproc-per-node 4 examples/migration/fsdp2.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

import autopar3d

sys.path.insert(0, str(Path(__file__).parent))
from small import make, rows, show  # noqa: E402


def before(batch: int = 16) -> list[float]:
    data = rows()
    model = make()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    sampler = DistributedSampler(data, seed=0)
    loader = DataLoader(data, batch // dist.get_world_size(), sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        dist.all_reduce(loss := loss.detach() / dist.get_world_size())
        losses.append(loss.item())
    return losses


def after(batch: int = 16) -> list[float]:
    data = rows()
    x, y = (tensor[:batch] for tensor in data.tensors)  # an example, of global shape
    grid = (dist.get_world_size(), 1, 1)
    par = autopar3d.compile(
        make(), grid, x, {"targets": (y,)}, loss_fn=nn.functional.mse_loss, scheme="zero3", inputs="sharded"
    )
    sampler = DistributedSampler(data, par.data_world_size, par.data_rank, seed=0)
    loader = DataLoader(data, batch // par.data_world_size, sampler=sampler)
    optimizer = torch.optim.AdamW(par.parameters(), lr=1e-2, foreach=True)
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        loss = par(x, targets=(y,))
        loss.backward()
        nn.utils.clip_grad_norm_(par.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    show(before, after)
