"""Normalisations: rows are independent; over a sharded dim only the rows' statistics are exchanged."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import Node

from .core import RULES, Dims, Exchange, LocalOp, Lowered, OpSpec, argument, operands, results, whole_spec
from .lowering import Groups, again, all_reduces, given, psum, widen

aten = torch.ops.aten


def _numbered(shape: Sequence[int], tag: str = "d") -> tuple[dict[str, int], list[tuple[str, ...]]]:
    return {f"{tag}{i}": int(n) for i, n in enumerate(shape)}, [(f"{tag}{i}",) for i in range(len(shape))]


# -- layer_norm, rms_norm ------------------------------------------------------------------------------------


def layer_norm_part(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dims: int, count: int, groups: Groups
) -> tuple[Tensor, Tensor, Tensor]:
    """layer_norm of rows that are split over the groups; `count` is a row's global length.

    Two passes (the mean first, then squares around it): E[x^2] - E[x]^2 would cancel.
    """
    over = tuple(range(-dims, 0))
    wide = widen(x)
    mean = psum(wide.sum(over, keepdim=True) / count, groups, varying=True)
    centred = wide - mean
    rstd = (psum((centred * centred).sum(over, keepdim=True) / count, groups, varying=True) + eps).rsqrt()
    y = centred * rstd
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    return y.to(x.dtype), mean.detach(), rstd.detach()  # torch's statistics have no gradient either


def layer_norm_rows(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dims: int, count: int, groups: Groups
) -> Tensor:
    """`layer_norm_part` without the statistics."""
    return layer_norm_part(x, weight, bias, eps, dims, count, groups)[0]


def rms_norm_part(
    x: Tensor, weight: Tensor | None, eps: float | None, dims: int, count: int, groups: Groups
) -> tuple[Tensor, Tensor]:
    """rms_norm of rows that are split over the groups."""
    over = tuple(range(-dims, 0))
    wide = widen(x)
    mean = psum((wide * wide).sum(over, keepdim=True) / count, groups, varying=True)
    rstd = (mean + (torch.finfo(wide.dtype).eps if eps is None else eps)).rsqrt()
    y = wide * rstd if weight is None else wide * rstd * weight
    return y.to(x.dtype), rstd.detach()


def rms_norm_rows(
    x: Tensor, weight: Tensor | None, eps: float | None, dims: int, count: int, groups: Groups
) -> Tensor:
    """`rms_norm_part` without the statistics."""
    return rms_norm_part(x, weight, eps, dims, count, groups)[0]


@RULES.builder(
    aten.layer_norm.default,
    aten.native_layer_norm.default,
    aten.rms_norm.default,
    aten._fused_rms_norm.default,
)
def row_norm(node: Node) -> OpSpec:
    """... h, h?, h? -> ... h (and per-row statistics, complete)"""
    x = operands(node)[0].meta["val"]
    k = len(argument(node, "normalized_shape"))
    lead = x.dim() - k
    sizes, dims = _numbered(x.shape[:lead], "b")
    hidden, tail = _numbered(x.shape[lead:], "h")
    sizes |= hidden
    stats: Dims = (*dims, *((),) * k)
    inputs = (tuple(dims + tail), *(tuple(tail) for _ in operands(node)[1:]))
    outputs = (tuple(dims + tail), *(stats for _ in results(node)[1:]))
    return OpSpec(
        sizes, inputs, outputs, complete=frozenset(hidden), lower=_lower_row_norm, exchange=_exchange_row_norm
    )


def _hidden(op: LocalOp) -> list[str]:
    return [f"h{i}" for i in range(len(argument(op.node, "normalized_shape")))]


def _lower_row_norm(op: LocalOp) -> Lowered:
    hidden = _hidden(op)
    groups = op.groups(*hidden)
    if not groups:
        return op.node.target, op.args, dict(op.kwargs)
    x, weight, eps = given(op, "input"), given(op, "weight"), given(op, "eps")
    where = (len(hidden), math.prod(op.size(h) for h in hidden), groups)
    if op.node.target is aten.rms_norm.default:
        return rms_norm_rows, (x, weight, eps, *where), {}
    if op.node.target is aten._fused_rms_norm.default:
        return rms_norm_part, (x, weight, eps, *where), {}
    single = op.node.target is aten.layer_norm.default
    return layer_norm_rows if single else layer_norm_part, (x, weight, given(op, "bias"), eps, *where), {}


def _exchange_row_norm(op: LocalOp) -> list[Exchange]:
    hidden = _hidden(op)
    rows = math.prod(op.in_shape(0)) // math.prod(op.local(h) for h in hidden)
    sums = 1 if "rms" in str(op.node.target) else 2  # the mean of squares, or the mean and the variance
    return all_reduces(op, hidden, rows, forward=sums, backward=sums)


# -- group_norm, instance_norm -------------------------------------------------------------------------------


@RULES.builder(aten.group_norm.default, aten.native_group_norm.default)
def group_norm(node: Node) -> OpSpec:
    """n (g c) ..., (g c)?, (g c)? -> n (g c) ... (and n g, n g) | c, ..."""
    x = operands(node)[0].meta["val"]
    sizes, dims = _numbered(x.shape)
    native = node.target is aten.native_group_norm.default
    g = int(argument(node, "group" if native else "num_groups"))
    sizes |= {"g": g, "c": sizes.pop("d1") // g}
    dims[1] = ("g", "c")
    inputs = (tuple(dims), *((dims[1],) for _ in operands(node)[1:]))
    stats: Dims = (("d0",), ("g",))
    outputs = (tuple(dims), *(stats for _ in results(node)[1:]))
    whole = frozenset(sizes) - {"d0", "g"}
    return OpSpec(sizes, inputs, outputs, whole, lower=_lower_group_norm)


def _lower_group_norm(op: LocalOp) -> Lowered:
    if op.node.target is aten.group_norm.default:
        return again(op, num_groups=op.local("g"))
    n, c = op.in_shape(0)[:2]
    return again(op, N=n, C=c, group=op.local("g"))


@RULES.builder(aten.instance_norm.default)
def instance_norm(node: Node) -> OpSpec:
    """n c ..., c?, c? -> n c ... | ... (whole with running statistics, which mix the rows of a batch)"""
    if argument(node, "running_mean") is not None:
        return whole_spec(node)
    x = operands(node)[0].meta["val"]
    sizes, dims = _numbered(x.shape)
    inputs = (tuple(dims), *((dims[1],) for _ in operands(node)[1:]))
    return OpSpec(sizes, inputs, (tuple(dims),), whole=frozenset(sizes) - {"d0", "d1"})
