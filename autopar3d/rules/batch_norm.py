"""batch_norm over a sharded batch: in training, the statistics of the whole batch, as on one device."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from .core import RULES, Dims, Exchange, LocalOp, Lowered, OpSpec, argument, operands, results
from .lowering import Groups, all_reduces, given, psum, widen

aten = torch.ops.aten


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
    """batch_norm in training of a batch that is split over the groups.

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
    out = (y.to(x.dtype), mean.detach(), rstd.detach())
    if running is None:
        return out
    # The running variance is the unbiased one.
    news = (mean.detach(), var.detach() * (count / (count - 1)))
    return out + tuple((old + momentum * (new - old)).to(old.dtype) for old, new in zip(running, news, strict=True))


def batch_norm_result(*args: Any) -> Tensor:
    """`batch_norm_part` without the statistics."""
    return batch_norm_part(*args)[0]


@RULES.builder(
    aten.batch_norm.default,
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.no_stats,
)
def batch_norm(node: Node) -> OpSpec:
    """n c ..., c?, c?, c?, c? -> n c ..., c, c, c, c (in training n and ... exchange statistics, complete)"""
    x = operands(node)[0].meta["val"]
    sizes = {f"d{i}": int(n) for i, n in enumerate(x.shape)}
    dims = [(f,) for f in sizes]
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
        padded=frozenset(sizes) - whole if not argument(node, "training") else frozenset({"d1"}),
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
