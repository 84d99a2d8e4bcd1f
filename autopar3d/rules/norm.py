"""Normalisations: rows are independent; over a sharded dim only the rows' statistics are exchanged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from .core import RULES, Dims, Exchange, LocalOp, Lowered, OpSpec, argument, operands, results, whole_spec
from .lowering import Groups, again, all_reduces, given, psum, widen

aten = torch.ops.aten


def _numbered(shape: Sequence[int], tag: str = "d") -> tuple[dict[str, int], list[tuple[str, ...]]]:
    return {f"{tag}{i}": int(n) for i, n in enumerate(shape)}, [(f"{tag}{i}",) for i in range(len(shape))]


# -- layer_norm, rms_norm ------------------------------------------------------------------------------------


def _over_rows(x: Tensor, rows: int) -> Tensor:
    """Sum over the first `rows` dims; of no dims, which torch reads as all, nothing."""
    return x.sum(tuple(range(rows))) if rows else x


class _RowNorm(torch.autograd.Function):
    """layer_norm, or rms_norm (`centre=False`), of rows that are split over the groups.

    With a backward of its own, because autograd's would keep three tensors a norm where x, which is kept anyway, and
    the rows' statistics are enough. Backward: with g = dy * weight and n = (x - mean) * rstd,
    `dx = rstd * (g - mean(g) - n * mean(g * n))`, both means over whole rows in one exchange.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        dims: int,
        count: int,
        groups: Groups,
        centre: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        over = tuple(range(-dims, 0))
        wide = widen(x)
        # The mean first, then squares around it: E[x^2] - E[x]^2 would cancel.
        total = wide.sum(over, keepdim=True)
        mean = psum(total / count, groups, varying=True) if centre else torch.zeros_like(total)
        centred = wide - mean if centre else wide
        rstd = (psum((centred * centred).sum(over, keepdim=True) / count, groups, varying=True) + eps).rsqrt()
        y = centred * rstd
        if weight is not None:
            y = y * weight
        if bias is not None:
            y = y + bias
        ctx.save_for_backward(x, weight, *([mean] if centre else []), rstd)
        ctx.has_bias, ctx.rest = bias is not None, (over, count, groups, centre)
        ctx.mark_non_differentiable(mean, rstd)  # nor have torch's statistics a gradient
        return y.to(x.dtype), mean, rstd

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        over, count, groups, centre = ctx.rest
        x, weight, *means, rstd = ctx.saved_tensors
        wide, dy = widen(x), widen(grad)
        n = (wide - means[0] if centre else wide) * rstd
        g = dy if weight is None else dy * weight
        slope = (g * n).sum(over, keepdim=True)
        sums = torch.stack([g.sum(over, keepdim=True), slope]) if centre else slope[None]
        sums = psum(sums / count, groups, varying=True)
        dx = (g - sums[0] - n * sums[1] if centre else g - n * sums[0]) * rstd
        rows = x.dim() - len(over)
        dw = _over_rows(dy * n, rows).to(weight.dtype) if weight is not None else None
        db = _over_rows(dy, rows).to(grad.dtype) if ctx.has_bias else None
        return dx.to(x.dtype), dw, db, None, None, None, None, None


def layer_norm_part(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dims: int, count: int, groups: Groups
) -> tuple[Tensor, Tensor, Tensor]:
    """layer_norm of rows that are split over the groups, and its statistics; `count` is a row's global length."""
    return _RowNorm.apply(x, weight, bias, eps, dims, count, groups, True)


def layer_norm_rows(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dims: int, count: int, groups: Groups
) -> Tensor:
    """`layer_norm_part` without the statistics."""
    return layer_norm_part(x, weight, bias, eps, dims, count, groups)[0]


def rms_norm_part(
    x: Tensor, weight: Tensor | None, eps: float | None, dims: int, count: int, groups: Groups
) -> tuple[Tensor, Tensor]:
    """rms_norm of rows that are split over the groups, and its statistics."""
    small = torch.finfo(widen(x).dtype).eps if eps is None else eps
    y, _, rstd = _RowNorm.apply(x, weight, None, small, dims, count, groups, False)
    return y, rstd


def rms_norm_rows(x: Tensor, weight: Tensor | None, eps: float | None, dims: int, count: int, groups: Groups) -> Tensor:
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
        sizes,
        inputs,
        outputs,
        complete=frozenset(hidden),
        lower=_lower_row_norm,
        exchange=_exchange_row_norm,
        padded=frozenset(f for (f,) in dims),
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
    if "rms" in str(op.node.target):
        return all_reduces(op, hidden, rows, forward=1, backward=1)
    # The mean, then the variance; in backward both sums at once.
    return [
        *all_reduces(op, hidden, rows, forward=2, backward=0),
        *all_reduces(op, hidden, 2 * rows, forward=0, backward=1),
    ]


# -- group_norm, instance_norm -------------------------------------------------------------------------------


@RULES.builder(aten.group_norm.default, aten.native_group_norm.default, pads=True)
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


@RULES.builder(aten.instance_norm.default, pads=True)
def instance_norm(node: Node) -> OpSpec:
    """n c ..., c?, c? -> n c ... | ... (whole with running statistics, which mix the rows of a batch)"""
    if argument(node, "running_mean") is not None:
        return whole_spec(node)
    x = operands(node)[0].meta["val"]
    sizes, dims = _numbered(x.shape)
    inputs = (tuple(dims), *((dims[1],) for _ in operands(node)[1:]))
    return OpSpec(sizes, inputs, (tuple(dims),), whole=frozenset(sizes) - {"d0", "d1"})
