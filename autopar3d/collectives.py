"""The collectives of a local program, each with its transpose as its backward (design 4.5).

Along one axis a value is S (sharded), R (replicated; its gradient is complete on every rank), V (a replicated copy
whose readers' work differs by rank; its gradient is a partial sum) or P (a partial sum; its gradient is replicated).
The functions below are what a local program calls before differentiation. Tracing them leaves only plain
`torch.ops._c10d_functional` nodes, `wait_tensor`, local ops, and `autopar3d.axis_index`, the one op whose value depends
on the rank. So the traced text is the same on every rank.

`dim` is the tensor dim that is cut or joined; `outer` is the length of the part of that dim that lies outside the
factor in question (1 for a plain dim): a dim `(3, heads, 64)` gathered over its heads has `outer=3`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from .errors import InputError
from .grid import ALL_AXES, LANE
from .private import GroupName, resolve_process_group
from .redistribute import sent

c10d = torch.ops._c10d_functional

# -- the only op whose value depends on the rank -------------------------------------------------------------------


@torch.library.custom_op("autopar3d::axis_index", mutates_args=())
def axis_index(group: str, device: torch.device) -> Tensor:
    """This rank's coordinate along a group, as an int64 tensor of shape [1]."""
    # The name is looked up at run time, so that one graph text serves all ranks.
    rank = resolve_process_group(GroupName(group)).rank()
    return torch.tensor([rank], dtype=torch.int64, device=device)


@axis_index.register_fake
def _(group: str, device: torch.device) -> Tensor:
    return torch.empty([1], dtype=torch.int64, device=device)


def coordinate(group: str, device: torch.device) -> Tensor:
    """`axis_index`; of a lane (see `LaneGrid`) a constant."""
    if group.startswith(LANE):
        return torch.full([1], int(group.split("_")[1]), dtype=torch.int64, device=device)
    return axis_index(group, device)


def chunk(length: int, groups: Sequence[tuple[str, int]], device: torch.device) -> tuple[Tensor | int, int]:
    """(first element, number of elements) of this rank's part of `length` cut over axes, outer first, given as (group
    name, size)."""
    number: Tensor | int = 0
    for name, size in groups:
        number = number * size + coordinate(name, device).reshape([])
        length //= size
    return number * length, length


# -- plain (not differentiable) forms --------------------------------------------------------------------------------


def _wait(x: Tensor) -> Tensor:
    return c10d.wait_tensor(x)


def split_dim(x: Tensor, dim: int, outer: int, size: int) -> Tensor:
    """[.., outer * n, ..] -> [.., outer, size, n / size, ..]"""
    n = x.shape[dim] // (outer * size)
    return x.reshape(*x.shape[:dim], outer, size, n, *x.shape[dim + 1 :])


def join_dim(x: Tensor, dim: int) -> Tensor:
    """Inverse of `split_dim`."""
    n = x.shape[dim] * x.shape[dim + 1] * x.shape[dim + 2]
    return x.reshape(*x.shape[:dim], n, *x.shape[dim + 3 :])


def _gather(x: Tensor, dim: int, outer: int, group: str, size: int) -> Tensor:
    whole = _wait(c10d.all_gather_into_tensor(x.contiguous(), size, group))
    if dim == 0 and outer == 1:
        return whole
    parts = whole.reshape(size, *x.shape[:dim], outer, x.shape[dim] // outer, *x.shape[dim + 1 :])
    return join_dim(parts.movedim(0, dim + 1), dim)


def _reduce_scatter(x: Tensor, dim: int, outer: int, group: str, size: int) -> Tensor:
    parts = split_dim(x, dim, outer, size).movedim(dim + 1, 0).contiguous()
    if parts.dim() > 1:
        parts = parts.reshape(parts.shape[0] * parts.shape[1], *parts.shape[2:])
    mine = _wait(c10d.reduce_scatter_tensor(parts, "sum", size, group))
    n = x.shape[dim] // size
    return mine.reshape(*x.shape[:dim], n, *x.shape[dim + 1 :])


def _all_reduce(x: Tensor, group: str, op: str = "sum") -> Tensor:
    return _wait(c10d.all_reduce(x.contiguous(), op, group))


def _all_to_all(x: Tensor, cut: tuple[int, int], join: tuple[int, int], group: str, size: int) -> Tensor:
    """Shard over (dim, outer) `cut` what was sharded over `join`."""
    parts = split_dim(x, cut[0], cut[1], size).movedim(cut[0] + 1, 0).contiguous()
    flat = parts.reshape(size * parts.shape[1], *parts.shape[2:])
    rows = [parts.shape[1]] * size
    got = _wait(c10d.all_to_all_single(flat, rows, rows, group)).reshape(parts.shape)
    # got: [source rank, .., cut dim as (outer, n / size), .., joined dim, ..]
    local = got.reshape(size, *x.shape[: cut[0]], x.shape[cut[0]] // size, *x.shape[cut[0] + 1 :])
    dim, outer = join
    n = local.shape[dim + 1] // outer
    wide = local.reshape(size, *local.shape[1 : dim + 1], outer, n, *local.shape[dim + 2 :])
    return join_dim(wide.movedim(0, dim + 1), dim)


def _slice(x: Tensor, dim: int, outer: int, group: str, size: int) -> Tensor:
    index = axis_index(group, x.device)
    return (
        split_dim(x, dim, outer, size)
        .index_select(dim + 1, index)
        .reshape(*x.shape[:dim], x.shape[dim] // size, *x.shape[dim + 1 :])
    )


def _on_coordinate_zero(x: Tensor, group: str) -> Tensor:
    # `where`, not a product: a NaN or infinity on the other ranks must not survive.
    keep = axis_index(group, x.device).reshape([1] * x.dim() if x.dim() else []) == 0
    return torch.where(keep, x, torch.zeros_like(x))


def _embed(x: Tensor, dim: int, outer: int, group: str, size: int) -> Tensor:
    """The shard at its place in zeros."""
    places = torch.arange(size, device=x.device) == axis_index(group, x.device)
    shape = (*x.shape[:dim], outer, 1, x.shape[dim] // outer, *x.shape[dim + 1 :])
    wide = x.reshape(shape)
    mask = places.reshape([size if i == dim + 1 else 1 for i in range(wide.dim())])
    return join_dim(torch.where(mask, wide, torch.zeros_like(wide)), dim)


# -- differentiable forms: one class per row of the table ------------------------------------------------------------


class _Fork(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _all_reduce(grad, ctx.group), None


class _Unfork(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _on_coordinate_zero(grad, ctx.group), None


class _Gather(torch.autograd.Function):
    """S -> V (`varying`) or S -> R."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, outer: int, group: str, size: int, varying: bool) -> Tensor:
        ctx.where = (dim, outer, group, size)
        ctx.varying = varying
        return _gather(x, dim, outer, group, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        back = _reduce_scatter if ctx.varying else _slice
        return back(grad, *ctx.where), None, None, None, None, None


class _Cut(torch.autograd.Function):
    """R -> S, or V -> S (`varying`): both take the local slice; the gradient is gathered, or set into zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, outer: int, group: str, size: int, varying: bool) -> Tensor:
        ctx.where = (dim, outer, group, size)
        ctx.varying = varying
        return _slice(x, dim, outer, group, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        back = _embed if ctx.varying else _gather
        return back(grad, *ctx.where), None, None, None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, outer: int, group: str, size: int) -> Tensor:
        ctx.where = (dim, outer, group, size)
        return _reduce_scatter(x, dim, outer, group, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _gather(grad, *ctx.where), None, None, None, None


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, outer: int, group: str, size: int) -> Tensor:
        ctx.where = (dim, outer, group, size)
        return _embed(x, dim, outer, group, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _slice(grad, *ctx.where), None, None, None, None


class _Reduce(torch.autograd.Function):
    """P -> R, or P -> V (`varying`)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, varying: bool) -> Tensor:
        ctx.group, ctx.varying = group, varying
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (_all_reduce(grad, ctx.group) if ctx.varying else grad), None, None


class _Regroup(torch.autograd.Function):
    """P -> V through a shard: reduce_scatter, then all_gather, which may be dropped and done again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, outer: int, group: str, size: int) -> Tensor:
        ctx.where = (dim, outer, group, size)
        return _gather(_reduce_scatter(x, dim, outer, group, size), dim, outer, group, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _gather(_reduce_scatter(grad, *ctx.where), *ctx.where), None, None, None, None


class _Mask(torch.autograd.Function):
    """R -> P, or V -> P (`varying`): the value stays on coordinate 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, varying: bool) -> Tensor:
        ctx.group, ctx.varying = group, varying
        return _on_coordinate_zero(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (_on_coordinate_zero(grad, ctx.group) if ctx.varying else grad), None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: tuple[int, int], join: tuple[int, int], group: str, size: int) -> Tensor:
        ctx.where = (join, cut, group, size)
        return _all_to_all(x, cut, join, group, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _all_to_all(grad, *ctx.where), None, None, None, None


# The names below stand in local programs, one function per kind of step (see redistribute.Step).


def fork(x: Tensor, group: str) -> Tensor:
    """R -> V: the same value, for readers whose work differs along the axis."""
    return _Fork.apply(x, group)


def unfork(x: Tensor, group: str) -> Tensor:
    """V -> R: the same value, for a reader whose work is the same on all ranks of the axis."""
    return _Unfork.apply(x, group)


def gather(x: Tensor, dim: int, outer: int, group: str, size: int, varying: bool) -> Tensor:
    """S -> V or R: all_gather along `dim`."""
    return _Gather.apply(x, dim, outer, group, size, varying)


def cut(x: Tensor, dim: int, outer: int, group: str, size: int, varying: bool) -> Tensor:
    """R or V -> S: the local slice of `dim`."""
    return _Cut.apply(x, dim, outer, group, size, varying)


def scatter(x: Tensor, dim: int, outer: int, group: str, size: int) -> Tensor:
    """P -> S: reduce_scatter along `dim`."""
    return _Scatter.apply(x, dim, outer, group, size)


def embed(x: Tensor, dim: int, outer: int, group: str, size: int) -> Tensor:
    """S -> P: the shard at its place in zeros; no communication in either direction."""
    return _Embed.apply(x, dim, outer, group, size)


def reduce(x: Tensor, group: str, varying: bool) -> Tensor:
    """P -> R or V: all_reduce."""
    return _Reduce.apply(x, group, varying)


def regroup(x: Tensor, dim: int, outer: int, group: str, size: int) -> Tensor:
    """P -> V: all_reduce in two halves, so that only the shard between them need be kept."""
    return _Regroup.apply(x, dim, outer, group, size)


def mask(x: Tensor, group: str, varying: bool) -> Tensor:
    """R or V -> P: keep the value on coordinate 0."""
    return _Mask.apply(x, group, varying)


def exchange(x: Tensor, cut: tuple[int, int], join: tuple[int, int], group: str, size: int) -> Tensor:
    """S -> S': all_to_all; `cut` and `join` are (dim, outer) of the new and the old sharding."""
    return _Exchange.apply(x, cut, join, group, size)


# Along the axis of lanes (see `grid.LaneGrid`), where the values of all "ranks" are at hand.


def lane_cut(x: Tensor, dim: int, outer: int, lanes: int) -> tuple[Tensor, ...]:
    """R -> S: each lane's slice."""
    if outer == 1:
        return torch.chunk(x, lanes, dim)
    shape = (*x.shape[:dim], x.shape[dim] // lanes, *x.shape[dim + 1 :])
    return tuple(part.reshape(shape) for part in split_dim(x, dim, outer, lanes).unbind(dim + 1))


def lane_join(parts: Sequence[Tensor], dim: int, outer: int) -> Tensor:
    """S -> R."""
    if outer == 1:
        return torch.cat(list(parts), dim)
    return join_dim(torch.stack([split_dim(p, dim, outer, 1).squeeze(dim + 1) for p in parts], dim + 1), dim)


def lane_sum(parts: Sequence[Tensor]) -> Tensor:
    """P -> R."""
    return functools.reduce(torch.add, parts)


def lane_embed(x: Tensor, dim: int, outer: int, lanes: int, lane: int) -> Tensor:
    """S -> P: a lane's slice at its place in zeros."""
    return lane_join([x if k == lane else torch.zeros_like(x) for k in range(lanes)], dim, outer)


def reduce_max(x: Tensor, group: str) -> Tensor:
    """The largest value along the axis (no gradient)."""
    return _all_reduce(x.detach(), group, "max")


# -- reading them back from emitted graphs ---------------------------------------------------------------------------

KINDS = {
    c10d.all_gather_into_tensor.default: "all_gather",
    c10d.reduce_scatter_tensor.default: "reduce_scatter",
    c10d.all_reduce.default: "all_reduce",
    c10d.all_to_all_single.default: "all_to_all",
    # Buckets.
    c10d.all_gather_into_tensor_coalesced.default: "all_gather",
    c10d.reduce_scatter_tensor_coalesced.default: "reduce_scatter",
    c10d.all_reduce_coalesced.default: "all_reduce",
}


# What brings elements into the order that a collective puts in or leaves, and out of it again.
REORDERS = (
    c10d.wait_tensor.default,
    torch.ops.aten.reshape.default,
    torch.ops.aten.permute.default,
    torch.ops.aten.transpose.int,
    torch.ops.aten.t.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.unsqueeze.default,
    torch.ops.aten.squeeze.dims,
    torch.ops.aten.slice.Tensor,
)


@dataclass(frozen=True)
class Collective:
    """One collective of an emitted graph, in program order; a bucket of several (a coalesced node) is one.

    Args:
        kind: all_gather, reduce_scatter, all_reduce or all_to_all.
        axis: grid axis.
        elements: elements each rank sends, by ring convention: all_gather `(g-1) * local`, reduce_scatter
            `(g-1)/g * local`, all_reduce `2 (g-1)/g * local`, all_to_all `(g-1)/g * local`, where `local` is the
            number of elements a rank puts in. (All-reducing few elements over many ranks gives fractions.)
        bytes: the same in bytes.
        dtype: what travels.
        module: path of the module whose op needed it ("" is the model itself); of a bucket, of the innermost module
            that holds all of them.
        node: name of the graph node.
    """

    kind: str
    axis: str
    elements: float
    bytes: float
    dtype: torch.dtype
    module: str
    node: str


def collectives(graph: Graph | torch.fx.GraphModule) -> list[Collective]:
    """The collectives of a `forward_graph` or `backward_graph`, in program order.

    Raises:
        InputError: it is neither, as the parallel module itself.
    """
    if not isinstance(graph, (Graph, torch.fx.GraphModule)) or hasattr(graph, "forward_graph"):
        what = type(graph).__name__
        raise InputError(f"collectives got a {what}; pass a graph: par.forward_graph or par.backward_graph")
    found = []
    nodes = graph.graph.nodes if isinstance(graph, torch.fx.GraphModule) else graph.nodes
    for node in nodes:
        kind = KINDS.get(node.target)
        if kind is not None:
            found.append(_collective(node, kind))
    return found


def _collective(node: Node, kind: str) -> Collective:
    from .program import module_path

    given: Any = node.args[0]  # a tensor, or the list of a bucket
    vals = [n.meta["val"] for n in (given if isinstance(given, (list, tuple)) else (given,))]
    group = str(node.args[-1])
    axis = group.split("_")[1]
    sizes = group.split("_")[2].split("x")
    size = int(sizes[ALL_AXES[-len(sizes) :].index(axis)])
    elements = sum(sent(kind, size, v.numel()) for v in vals)
    dtype = vals[0].dtype
    return Collective(kind, axis, elements, elements * dtype.itemsize, dtype, module_path(node), node.name)
