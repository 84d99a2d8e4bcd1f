"""Reductions and scans. A sum or mean over a sharded dim is a partial sum; most others keep it whole."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from .core import RULES, Dims, Exchange, LocalOp, Lowered, OpSpec, argument, operands, results
from .lowering import Groups, all_reduces, given, psum, widen

aten = torch.ops.aten


def _reduced(node: Node) -> list[int]:
    """The dims that a reduction removes."""
    rank = operands(node)[0].meta["val"].dim()
    dim = argument(node, "dim")
    if dim is None or dim == []:
        return list(range(rank))
    return sorted({int(d) % rank for d in (dim if isinstance(dim, (list, tuple)) else [dim])}) if rank else []


def _spec(node: Node, **how: Any) -> OpSpec:
    """d0 d1 -> d0: factors of a reduction over some dims."""
    x = operands(node)[0].meta["val"]
    sizes = {f"d{i}": int(n) for i, n in enumerate(x.shape)}
    dims = tuple((f,) for f in sizes)
    gone = set(_reduced(node))

    def result(r: Tensor) -> Dims:
        kept = r.dim() == x.dim()
        return tuple(() if i in gone else d for i, d in enumerate(dims) if kept or i not in gone)

    return OpSpec(sizes, (dims,), tuple(result(r) for r in results(node)), **how)


def _factors(op: LocalOp) -> list[str]:
    return [f"d{i}" for i in _reduced(op.node)]


# -- sums ----------------------------------------------------------------------------------------------------


def mean_part(x: Tensor, dims: list[int], keepdim: bool, dtype: torch.dtype, count: int) -> Tensor:
    """This rank's share of a mean over `count` elements of all ranks."""
    total = widen(x.to(dtype)).sum(dims, keepdim=keepdim) if dims else widen(x.to(dtype))
    return (total / count).to(dtype)


@RULES.builder(aten.sum.default, aten.sum.dim_IntList, pads=True)
def sum_(node: Node) -> OpSpec:
    """d0 d1 -> d0 (partial over a sharded d1)"""
    return _spec(node, linear=_keeps_dtype(node))


@RULES.builder(aten.mean.default, aten.mean.dim, pads=True)
def mean(node: Node) -> OpSpec:
    """d0 d1 -> d0 (partial over a sharded d1: local sum over global count)"""
    return _spec(node, linear=_keeps_dtype(node), lower=_lower_mean)


@RULES.builder(aten.nansum.default, pads=True)
def nansum(node: Node) -> OpSpec:
    """d0 d1 -> d0 (partial over a sharded d1)"""
    return _spec(node)


def _keeps_dtype(node: Node) -> bool:
    dtype = operands(node)[0].meta["val"].dtype
    return dtype.is_floating_point and dtype == results(node)[0].dtype


def _lower_mean(op: LocalOp) -> Lowered:
    factors = _factors(op)
    if not op.axes(*factors) and not any(f in op.spec.true for name in factors for f in op.pieces(name)):
        return op.node.target, op.args, dict(op.kwargs)
    count = math.prod(op.size(f) for f in factors)
    how = (_reduced(op.node), bool(argument(op.node, "keepdim")), results(op.node)[0].dtype, count)
    return mean_part, (given(op, "self"), *how), {}


# -- spread and length: sums that the lowering completes -----------------------------------------------------


def variance_part(x: Tensor, dims: list[int], keepdim: bool, divisor: float, count: int, groups: Groups) -> Tensor:
    """Variance over dims that are split over the groups, in two passes; complete on every rank."""
    wide = widen(x)
    centred = wide - psum(wide.sum(dims, keepdim=True) / count, groups, varying=True)
    squares = psum((centred * centred).sum(dims, keepdim=keepdim), groups, varying=False)
    return (squares / divisor).to(x.dtype)


def deviation_part(x: Tensor, dims: list[int], keepdim: bool, divisor: float, count: int, groups: Groups) -> Tensor:
    """Standard deviation, likewise."""
    return _root(variance_part(x, dims, keepdim, divisor, count, groups), at_zero=float("inf"))


def length_part(x: Tensor, dims: list[int], keepdim: bool, dtype: torch.dtype, groups: Groups) -> Tensor:
    """Euclidean length over dims that are split over the groups; complete on every rank."""
    wide = widen(x.to(dtype))
    return _root(psum((wide * wide).sum(dims, keepdim=keepdim), groups, varying=False), at_zero=0.0).to(dtype)


def _root(x: Tensor, at_zero: float) -> Tensor:
    """sqrt whose gradient at zero is 0, as torch's norm has it (torch's std has the gradient of sqrt)."""
    if at_zero:
        return x.sqrt()
    zero = x == 0
    return torch.where(zero, torch.zeros_like(x), torch.where(zero, torch.ones_like(x), x).sqrt())


@RULES.builder(
    aten.var.correction,
    aten.var.dim,
    aten.var.default,
    aten.std.correction,
    aten.std.dim,
    aten.std.default,
)
def spread(node: Node) -> OpSpec:
    """d0 d1 -> d0: over a sharded d1 sums are exchanged; the result is complete"""
    spec = _spec(node)
    complete = frozenset(f"d{i}" for i in _reduced(node))
    padded = frozenset(spec.sizes) - complete
    how: dict[str, Any] = {"lower": _lower_spread, "exchange": _exchange_spread, "padded": padded}
    how["complete"] = complete
    return OpSpec(spec.sizes, spec.inputs, spec.outputs, **how)


def _lower_spread(op: LocalOp) -> Lowered:
    factors = _factors(op)
    groups = op.groups(*factors)
    if not groups:
        return op.node.target, op.args, dict(op.kwargs)
    count = math.prod(op.size(f) for f in factors)
    correction = argument(op.node, "correction")
    if correction is None:  # `correction` itself defaults to 1, as `unbiased` does
        correction = 1 if argument(op.node, "unbiased", True) else 0
    part = deviation_part if "std" in str(op.node.target) else variance_part
    divisor = max(count - correction, 0)
    how = (_reduced(op.node), bool(argument(op.node, "keepdim")), divisor, count, groups)
    return part, (given(op, "self"), *how), {}


def _exchange_spread(op: LocalOp) -> list[Exchange]:
    rows = math.prod(op.out_shape())
    return all_reduces(op, _factors(op), rows, forward=2, backward=1)


@RULES.builder(aten.linalg_vector_norm.default)
def length(node: Node) -> OpSpec:
    """d0 d1 -> d0: over a sharded d1 the sum of squares is exchanged (orders other than 2: d1 whole)"""
    gone = frozenset(f"d{i}" for i in _reduced(node))
    if argument(node, "ord") != 2:
        return _spec(node, whole=gone)
    how = {"padded": frozenset(_spec(node).sizes), "fills": {f: ((0, 0.0),) for f in gone}}
    return _spec(node, complete=gone, lower=_lower_length, exchange=_exchange_length, **how)


def _lower_length(op: LocalOp) -> Lowered:
    groups = op.groups(*_factors(op))
    if not groups:
        return op.node.target, op.args, dict(op.kwargs)
    how = (_reduced(op.node), bool(argument(op.node, "keepdim")), results(op.node)[0].dtype, groups)
    return length_part, (given(op, "self"), *how), {}


def _exchange_length(op: LocalOp) -> list[Exchange]:
    return all_reduces(op, _factors(op), math.prod(op.out_shape()), dtype=results(op.node)[0].dtype)


# -- what is no sum ------------------------------------------------------------------------------------------


@RULES.builder(
    aten.amax.default,
    aten.amin.default,
    aten.aminmax.default,
    aten.max.dim,
    aten.max.default,
    aten.min.dim,
    aten.min.default,
    aten.argmax.default,
    aten.argmin.default,
    aten.any.default,
    aten.any.dim,
    aten.any.dims,
    aten.all.default,
    aten.all.dim,
    aten.all.dims,
    aten.prod.default,
    aten.prod.dim_int,
    aten.var_mean.correction,
    aten.std_mean.correction,
    aten.median.default,
    aten.median.dim,
    aten.mode.default,
    aten.kthvalue.default,
    aten.count_nonzero.default,
    aten.count_nonzero.dim_IntList,
    aten.norm.Scalar,
    aten.norm.ScalarOpt_dim,
    pads=True,
)
def selection(node: Node) -> OpSpec:
    """d0 d1 -> d0, the reduced dims whole"""
    return _spec(node, whole=frozenset(f"d{i}" for i in _reduced(node)))


@RULES.builder(
    aten.cumsum.default,
    aten.cumprod.default,
    aten.cummax.default,
    aten.cummin.default,
    aten.logcumsumexp.default,
    aten.sort.default,
    aten.sort.stable,
    aten.argsort.default,
    aten.argsort.stable,
    aten.topk.default,
    pads=True,
)
def scan(node: Node) -> OpSpec:
    """d0 d1 -> d0 d1, the scanned or sorted dim whole"""
    x = operands(node)[0].meta["val"]
    sizes = {f"d{i}": int(n) for i, n in enumerate(x.shape)}
    dims = [(f,) for f in sizes]
    if not dims:
        return OpSpec(sizes, ((),), ((),) * len(results(node)))
    at = int(argument(node, "dim", -1)) % x.dim()
    out = list(dims)
    if results(node)[0].shape[at] != x.shape[at]:  # topk
        sizes["k"] = int(results(node)[0].shape[at])
        out[at] = ("k",)
    linear = node.target is aten.cumsum.default and _keeps_dtype(node)
    whole = frozenset({f"d{at}", "k"})
    return OpSpec(sizes, (tuple(dims),), (tuple(out),) * len(results(node)), whole & set(sizes), linear=linear)
