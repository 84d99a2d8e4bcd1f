"""Normalisations: rows are independent; over a sharded normalised dim only the rows' statistics are exchanged."""

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


# -- layer_norm, rms_norm ---------------------------------------------------------------------------------------------


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
    return y.to(x.dtype), mean, rstd


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
    return y.to(x.dtype), rstd


def rms_norm_rows(
    x: Tensor, weight: Tensor | None, eps: float | None, dims: int, count: int, groups: Groups
) -> Tensor:
    """`rms_norm_part` without the statistics."""
    return rms_norm_part(x, weight, eps, dims, count, groups)[0]


@RULES.builder(
    aten.layer_norm.default, aten.native_layer_norm.default, aten.rms_norm.default, aten._fused_rms_norm.default
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


# -- group_norm, instance_norm ----------------------------------------------------------------------------------------


@RULES.builder(aten.group_norm.default)
def group_norm(node: Node) -> OpSpec:
    """n (g c) ..., (g c)?, (g c)? -> n (g c) ... | c, ..."""
    x = operands(node)[0].meta["val"]
    sizes, dims = _numbered(x.shape)
    g = int(argument(node, "num_groups"))
    sizes |= {"g": g, "c": sizes.pop("d1") // g}
    dims[1] = ("g", "c")
    inputs = (tuple(dims), *((dims[1],) for _ in operands(node)[1:]))
    whole = frozenset(sizes) - {"d0", "g"}
    return OpSpec(sizes, inputs, (tuple(dims),), whole, lower=lambda op: again(op, num_groups=op.local("g")))


@RULES.builder(aten.native_group_norm.default)
def native_group_norm(node: Node) -> OpSpec:
    """n (g c) ..., (g c)?, (g c)? -> n (g c) ..., n g, n g | c, ..."""
    spec = group_norm_like(node)
    return OpSpec(spec.sizes, spec.inputs, spec.outputs, spec.whole, lower=_lower_native_group_norm)


def group_norm_like(node: Node) -> OpSpec:
    x = operands(node)[0].meta["val"]
    sizes, dims = _numbered(x.shape)
    g = int(argument(node, "group"))
    sizes |= {"g": g, "c": sizes.pop("d1") // g}
    dims[1] = ("g", "c")
    inputs = (tuple(dims), *((dims[1],) for _ in operands(node)[1:]))
    stats: Dims = (("d0",), ("g",))
    return OpSpec(sizes, inputs, (tuple(dims), stats, stats), frozenset(sizes) - {"d0", "g"})


def _lower_native_group_norm(op: LocalOp) -> Lowered:
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


# -- batch_norm -------------------------------------------------------------------------------------------------------


def batch_norm_part(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running: tuple[Tensor, Tensor] | None,
    momentum: float,
    eps: float,
    count: int,
    groups: Groups,
) -> tuple[Tensor, ...]:
    """batch_norm in training of a batch that is split over the groups: statistics of the whole batch, as on one device.

    Returns the result, mean and 1/std, and the new running mean and variance where there are any.
    """
    over = [0, *range(2, x.dim())]

    def wide(v: Tensor) -> Tensor:
        return v.reshape([1, -1] + [1] * (x.dim() - 2))

    data = widen(x)
    mean = psum(data.sum(over) / count, groups, varying=True)
    centred = data - wide(mean)
    var = psum((centred * centred).sum(over) / count, groups, varying=True)
    rstd = (var + eps).rsqrt()
    y = centred * wide(rstd)
    if weight is not None:
        y = y * wide(weight)
    if bias is not None:
        y = y + wide(bias)
    out = (y.to(x.dtype), mean, rstd)
    if running is None:
        return out
    # The running variance is the unbiased one.
    news = (mean.detach(), var.detach() * (count / (count - 1)))
    return out + tuple((old + momentum * (new - old)).to(old.dtype) for old, new in zip(running, news, strict=True))


def batch_norm_result(*args: Any) -> Tensor:
    """`batch_norm_part` without the statistics."""
    return batch_norm_part(*args)[0]


@RULES.builder(
    aten.batch_norm.default, aten._native_batch_norm_legit_functional.default, aten._native_batch_norm_legit.no_stats
)
def batch_norm(node: Node) -> OpSpec:
    """n c ..., c?, c?, c?, c? -> n c ..., c, c, c, c (in training n and ... exchange statistics, complete)"""
    x = operands(node)[0].meta["val"]
    sizes, dims = _numbered(x.shape)
    outputs: list[Dims] = [tuple(dims)]
    whole: set[str] = set()
    for i, r in enumerate(results(node)[1:]):
        if r.numel() == 0:  # evaluation returns no batch statistics
            sizes[f"none{i}"] = 0
            whole.add(f"none{i}")
            outputs.append(((f"none{i}",),))
        else:
            outputs.append((dims[1],))
    inputs = (tuple(dims), *((dims[1],) for _ in operands(node)[1:]))
    rest = frozenset(f"d{i}" for i in range(x.dim()) if i != 1)
    if node.target is aten.batch_norm.default and argument(node, "training") and argument(node, "running_mean"):
        whole |= rest  # this form writes its running statistics in place; export emits the functional one instead
    return OpSpec(
        sizes,
        inputs,
        tuple(outputs),
        whole=frozenset(whole),
        complete=rest,
        lower=_lower_batch_norm,
        exchange=_exchange_batch_norm,
    )


def _batch(op: LocalOp) -> list[str]:
    return [f"d{i}" for i in range(len(op.spec.inputs[0])) if i != 1]


def _lower_batch_norm(op: LocalOp) -> Lowered:
    groups = op.groups(*_batch(op))
    if not groups or not argument(op.node, "training"):
        return op.node.target, op.args, dict(op.kwargs)
    running = (given(op, "running_mean"), given(op, "running_var"))
    args = (
        given(op, "input"),
        given(op, "weight"),
        given(op, "bias"),
        None if running[0] is None else running,
        given(op, "momentum"),
        given(op, "eps"),
        math.prod(op.size(f) for f in _batch(op)),
        groups,
    )
    return batch_norm_result if op.node.target is aten.batch_norm.default else batch_norm_part, args, {}


def _exchange_batch_norm(op: LocalOp) -> list[Exchange]:
    if not argument(op.node, "training"):
        return []
    return all_reduces(op, _batch(op), op.local("d1"), forward=2, backward=2)
