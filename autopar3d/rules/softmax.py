"""softmax, log_softmax, logsumexp: over a sharded dim the rows' largest values and sums are exchanged."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.fx import Node

from .core import RULES, Exchange, LocalOp, Lowered, OpSpec, argument, operands, results
from .lowering import Groups, all_reduces, given, pmax, psum, widen

aten = torch.ops.aten


def softmax_part(x: Tensor, dim: int, dtype: torch.dtype, groups: Groups) -> Tensor:
    """softmax along a dim that is split over the groups."""
    wide = widen(x if x.dtype == dtype else x.to(dtype))
    # The largest value only scales numerator and sum alike: no gradient flows through it.
    exps = (wide - pmax(wide.amax(dim, keepdim=True), groups)).exp()
    return (exps / psum(exps.sum(dim, keepdim=True), groups, varying=True)).to(dtype)


def log_softmax_part(x: Tensor, dim: int, dtype: torch.dtype, groups: Groups) -> Tensor:
    """log_softmax along a dim that is split over the groups."""
    wide = widen(x if x.dtype == dtype else x.to(dtype))
    shifted = wide - pmax(wide.amax(dim, keepdim=True), groups)
    return (shifted - psum(shifted.exp().sum(dim, keepdim=True), groups, varying=True).log()).to(dtype)


def logsumexp_part(x: Tensor, dims: list[int], keepdim: bool, groups: Groups) -> Tensor:
    """logsumexp over dims that are split over the groups; complete on every rank."""
    wide = widen(x)
    top = pmax(wide.amax(dims, keepdim=True), groups)
    top = torch.where(top.isinf(), torch.zeros_like(top), top)  # a row of -inf gives -inf, not NaN
    total = psum((wide - top).exp().sum(dims, keepdim=True), groups, varying=False).log() + top
    return (total if keepdim else _squeeze(total, dims)).to(x.dtype)


def _squeeze(x: Tensor, dims: list[int]) -> Tensor:
    gone = {d % x.dim() for d in dims}
    return x.reshape([n for i, n in enumerate(x.shape) if i not in gone])


@RULES.builder(
    aten.softmax.int,
    aten.log_softmax.int,
    aten._softmax.default,
    aten._log_softmax.default,
)
def softmax(node: Node) -> OpSpec:
    """d0 d1 -> d0 d1; along a sharded softmax dim each row's maximum and sum are exchanged"""
    x = operands(node)[0].meta["val"]
    sizes = {f"d{i}": int(n) for i, n in enumerate(x.shape)}
    dims = tuple((f,) for f in sizes)
    along = [f"d{int(argument(node, 'dim')) % len(dims)}"] if dims else []
    return OpSpec(
        sizes,
        (dims,),
        (dims,),
        lower=_lower_softmax,
        exchange=_exchange_softmax,
        padded=frozenset(sizes),
        fills={f: ((0, -math.inf),) for f in along},
        # Not 0 and -inf: a reader's log, or power, would have no finite derivative there.
        leaves={f: -1.0 if "log" in str(node.target) else 0.5 for f in along},
    )


def _along(op: LocalOp) -> str | None:
    rank = len(op.spec.inputs[0])
    return f"d{int(argument(op.node, 'dim')) % rank}" if rank else None


def _lower_softmax(op: LocalOp) -> Lowered:
    along = _along(op)
    if along is None or op.single(along):
        return op.node.target, op.args, dict(op.kwargs)
    part = log_softmax_part if "log" in str(op.node.target) else softmax_part
    dtype = results(op.node)[0].dtype
    return part, (given(op, "self"), int(argument(op.node, "dim")), dtype, op.groups(along)), {}


def _exchange_softmax(op: LocalOp) -> list[Exchange]:
    along = _along(op)
    if along is None or op.single(along):
        return []
    rows = math.prod(op.in_shape(0)) // op.local(along)
    return all_reduces(op, [along], rows, forward=2, backward=1, dtype=results(op.node)[0].dtype)


@RULES.builder(aten.logsumexp.default)
def logsumexp(node: Node) -> OpSpec:
    """d0 d1 -> d0: along a sharded dim each row's maximum and sum are exchanged; the result is complete"""
    x, out = operands(node)[0].meta["val"], results(node)[0]
    sizes = {f"d{i}": int(n) for i, n in enumerate(x.shape)}
    gone = {int(d) % x.dim() for d in _dims(node)}
    dims = tuple((f,) for f in sizes)
    kept = out.dim() == x.dim()
    outputs = tuple(() if i in gone else d for i, d in enumerate(dims) if kept or i not in gone)
    return OpSpec(
        sizes,
        (dims,),
        (outputs,),
        complete=frozenset(f"d{i}" for i in gone),
        lower=_lower_logsumexp,
        exchange=_exchange_logsumexp,
        padded=frozenset(sizes),
        fills={f"d{i}": ((0, -math.inf),) for i in gone},
    )


def _dims(node: Node) -> list[int]:
    dims = argument(node, "dim")
    rank = operands(node)[0].meta["val"].dim()
    return list(dims) if dims else list(range(rank))


def _summed(op: LocalOp) -> list[str]:
    rank = len(op.spec.inputs[0])
    return [f"d{d}" for d in sorted({int(d) % rank for d in _dims(op.node)})]


def _lower_logsumexp(op: LocalOp) -> Lowered:
    groups = op.groups(*_summed(op))
    if not groups:
        return op.node.target, op.args, dict(op.kwargs)
    return logsumexp_part, (given(op, "self"), _dims(op.node), bool(argument(op.node, "keepdim")), groups), {}


def _exchange_logsumexp(op: LocalOp) -> list[Exchange]:
    return all_reduces(op, _summed(op), math.prod(op.out_shape()), forward=2)
