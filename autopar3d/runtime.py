"""The one seam to processes and devices: the mesh, the groups' names in graphs, and comparing ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .errors import InputError, LaunchError, MismatchError
from .grid import AXES, Grid

_LAUNCH = (
    "start the script under torchrun (torchrun --nproc-per-node 8 train.py) and call "
    "torch.distributed.init_process_group() first, or use autopar3d.launch(fn, grid=(2, 2, 2)) for local CPU ranks; "
    "autopar3d.plan and autopar3d.simulate need no processes"
)


def connect(grid: Grid, device_type: str) -> tuple[DeviceMesh, int]:
    """The grid's mesh, with each axis's group registered under the name that graphs use; and this rank's position.

    Raises:
        LaunchError: no process group.
        GridError: the grid's size is not the world size.
    """
    if grid.size == 1 and not (dist.is_available() and dist.is_initialized()):
        _single_process_group()
    if not (dist.is_available() and dist.is_initialized()):
        raise LaunchError(f"grid {grid} needs {grid.size} ranks, but there is no process group: {_LAUNCH}")
    grid.check_world(dist.get_world_size())
    ranks = torch.tensor(grid.ranks or range(grid.size)).reshape(grid.sizes)
    mesh = DeviceMesh(device_type, ranks, mesh_dim_names=AXES)
    # A DeviceMesh numbers its groups differently on each rank; graphs need one name. No public way to name a group.
    from torch._C._distributed_c10d import _register_process_group
    from torch.distributed.distributed_c10d import _resolve_process_group

    for axis in grid.axes:
        alias, group = grid.alias(axis), mesh.get_group(axis)
        try:
            known = _resolve_process_group(alias) is group
        except (RuntimeError, ValueError):
            known = False
        if not known:
            _register_process_group(alias, group)
    position = (ranks.flatten() == dist.get_rank()).nonzero()
    return mesh, int(position)


def _single_process_group() -> None:
    """A grid of one place works without a launcher."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())


def broadcast_from_first(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Rank 0's value (of the grid's first place) on all ranks."""
    tensor = tensor.contiguous()
    if dist.get_world_size() > 1:
        dist.broadcast(tensor, src=int(mesh.mesh.flatten()[0]))
    return tensor


def compare(what: str, digest: str, advice: str, error: type[Exception] = MismatchError) -> None:
    """Raise the same error on every rank when a digest is not the same on all, naming the ranks that differ."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    found: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, digest)
    if len(set(found)) > 1:
        odd = [r for r, d in enumerate(found) if d != found[0]]
        raise error(f"{what} of rank 0 differs from that of ranks {', '.join(map(str, odd))}: {advice}")


def compare_inputs(tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Raise InputError on every rank when ranks pass different values for an input that must be the same on all."""
    for path, tensor in tensors:
        data = tensor.detach().cpu().contiguous()
        digest = hashlib.blake2b(data.view(torch.uint8).numpy().tobytes() if data.numel() else b"").hexdigest()
        compare(
            f"input {path}",
            f"{tuple(tensor.shape)} {tensor.dtype} {digest}",
            'every rank must pass the same global batch (seed the sampler alike on all ranks, or broadcast the batch '
            'from rank 0), or pass its own part with inputs="sharded"',
            InputError,
        )
