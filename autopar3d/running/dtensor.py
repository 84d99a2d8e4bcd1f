"""Layouts as DTensor placements, and back.

A DTensor shards along its mesh's dims from left to right. A layout's axes may come in any order: an axis that
lies *inside* one which the mesh lists later becomes a `_StridedShard`, whose `split_factor` is the number of
pieces that those later, outer axes will make. So `k:(z, x)` on a mesh (x, y, z) is x: `_StridedShard(k,
split_factor=size of z)`, z: `Shard(k)`.

Not every layout survives: `is_exact` says which ones `full_tensor` and `torch.distributed.checkpoint` treat
right, and tests/test_dtensor.py proves it on real ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

# Private, and the only placement that says "inside an axis which the mesh lists later". FSDP2 with tensor
# parallelism makes its parameters from it, so DTensor and DCP know it well. Nothing else here imports it.
from torch.distributed.tensor.placement_types import _StridedShard

from ..errors import LayoutError
from ..grid import Grid
from ..layout import Factor, Layout


def placements(layout: Layout, grid: Grid) -> tuple[Placement, ...]:
    """One placement per mesh dim, see `Grid.names`.

    Raises:
        LayoutError: a dim is packed, such as `(3 h:y d)`; no placement says that exactly.
    """
    if not layout.is_plain:
        raise LayoutError(
            f"layout {layout} shards a part of a dim, which no DTensor says exactly; store it as plain shards"
        )
    found: dict[str, Placement] = {a: Partial("sum") for a in layout.partial}
    for d, (factor,) in enumerate(layout.dims):
        for i, axis in enumerate(factor.axes):
            later = [a for a in factor.axes[:i] if grid.names.index(a) > grid.names.index(axis)]
            pieces = grid.extent(later)
            found[axis] = _StridedShard(d, split_factor=pieces) if pieces > 1 else Shard(d)
    return tuple(found.get(a, Replicate()) for a in grid.names)


def from_placements(places: Sequence[Placement], grid: Grid, ndim: int) -> Layout:
    """The layout that a DTensor of `ndim` dims on the grid's mesh has; inverse of `placements`.

    Raises:
        LayoutError: a placement that no layout says: another reduction than a sum, or a stride that is not the
            number of pieces of some axes.
    """
    if len(places) != len(grid.names):
        raise LayoutError(
            f"{len(places)} placements {tuple(places)}; grid {grid} takes one for each of {', '.join(grid.names)}"
        )
    dims: list[list[str]] = [[] for _ in range(ndim)]
    partial = []
    # From right to left each axis goes inside the outer ones that its stride counts.
    for axis, place in reversed(list(zip(grid.names, places, strict=True))):
        if isinstance(place, Partial) and place.reduce_op == "sum":
            partial.append(axis)
        elif isinstance(place, (Shard, _StridedShard)):
            held = dims[place.dim]
            pieces = int(place.split_factor) if isinstance(place, _StridedShard) else 1
            at = next((i for i in range(len(held) + 1) if grid.extent(held[:i]) == pieces), None)
            if at is None:
                raise LayoutError(f"placements {tuple(places)} on grid {grid}: no layout has a stride of {pieces}")
            held.insert(at, axis)
        elif not isinstance(place, Replicate):
            raise LayoutError(f"placement {place} of axis {axis} has no layout; use Shard, Replicate or Partial('sum')")
    return Layout(tuple((Factor(0, tuple(d)),) for d in dims), frozenset(partial))


def is_exact(layout: Layout, shape: Sequence[int], grid: Grid) -> bool:
    """Whether a DTensor carries this layout exactly: `full_tensor`, and saving and loading with DCP.

    It does when no dim is packed, nothing is a partial sum, and every dim that its axes do not divide lists them
    in mesh order. (torch 2.13 misplaces, or refuses to save, packed dims and some uneven ones of other orders.)
    """
    if layout.partial or not layout.is_plain:
        return False
    for (factor,) in layout.factors(shape):
        order = [grid.names.index(a) for a in factor.axes if grid.axis_size(a) > 1]
        if factor.size % grid.extent(factor.axes) and order != sorted(order):
            return False
    return True


def to_dtensor(local: torch.Tensor, layout: Layout, shape: Sequence[int], grid: Grid, mesh: DeviceMesh) -> DTensor:
    """The DTensor of global `shape` whose piece on this rank is `local` (its pads, if any, are cut off).

    No data moves and nothing is checked across ranks. The result shares memory with an unpadded `local`, and
    is differentiable.
    """
    for d, n in enumerate(layout.valid_shape(shape, grid, _position(mesh, grid))):
        if local.shape[d] != n:
            local = local.narrow(d, 0, n)
    size = torch.Size(shape)
    stride = tuple(math.prod(size[d + 1 :]) for d in range(len(size)))
    return DTensor.from_local(local, mesh, placements(layout, grid), run_check=False, shape=size, stride=stride)


def local(tensor: DTensor) -> torch.Tensor:
    """This rank's piece, outside of autograd: `to_local` without what it does for gradients."""
    return tensor._local_tensor


def like_parameter(piece: torch.Tensor, parameter: DTensor) -> DTensor:
    """A gradient: the DTensor with shape, mesh and placements of a parameter whose piece on this rank is `piece`.

    Made without `from_local`'s checks, which would cost something for each parameter at every step. It shares the
    parameter's description, so that an optimizer's ops soon find the two equal.

    Args:
        piece: of the shape of the parameter's own; no gradient flows through the result.
    """
    return DTensor(piece, parameter._spec, requires_grad=False)


def to_local(tensor: DTensor, layout: Layout, grid: Grid) -> torch.Tensor:
    """This rank's buffer, padded as `Layout.local_shape` says; the same memory where nothing is padded."""
    local = tensor.to_local()
    target = layout.local_shape(tensor.shape, grid)
    if tuple(local.shape) == target:
        return local
    widths = [w for n, t in zip(reversed(local.shape), reversed(target), strict=True) for w in (0, t - n)]
    return torch.nn.functional.pad(local, widths)


def _position(mesh: DeviceMesh, grid: Grid) -> int:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise LayoutError(f"this rank is not part of the mesh {mesh}")
    return grid.index(dict(zip(grid.names, coordinate, strict=True)))
