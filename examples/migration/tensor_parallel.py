"""From Megatron-style tensor parallelism, as DTensor has it, with FSDP2 around it: the same training, before and after.

torchrun --nproc-per-node 4 examples/migration/tensor_parallel.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, DistributedSampler

import autopar3d

sys.path.insert(0, str(Path(__file__).parent))
from small import make, rows, show  # noqa: E402


def before(batch: int = 16, tensor: int = 2) -> list[float]:
    data = rows()
    model = make()
    mesh = init_device_mesh("cpu", (dist.get_world_size() // tensor, tensor), mesh_dim_names=("data", "tensor"))
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    sampler = DistributedSampler(data, mesh["data"].size(), mesh["data"].get_local_rank(), seed=0)
    loader = DataLoader(data, batch // mesh["data"].size(), sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss := loss.detach() / dist.get_world_size())
        losses.append(loss.item())
    return losses


def after(batch: int = 16, tensor: int = 2) -> list[float]:
    data = rows()
    x, y = (whole[:batch] for whole in data.tensors)  # an example, of global shape
    grid = (dist.get_world_size() // tensor, tensor, 1)
    par = autopar3d.compile(make(), grid, x, {"targets": (y,)}, loss_fn=nn.functional.mse_loss, scheme="zero3x1d")
    # Every rank passes the same batch, and uses its part.
    loader = DataLoader(data, batch, sampler=DistributedSampler(data, num_replicas=1, rank=0, seed=0))
    optimizer = torch.optim.AdamW(par.parameters(), lr=1e-2, foreach=True)
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        loss = par(x, targets=(y,))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    show(before, after)
