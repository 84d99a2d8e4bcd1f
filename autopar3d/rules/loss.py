"""Losses. A mean over sharded rows is a local sum over the global count: a partial sum, nothing to exchange.

cross_entropy over sharded classes exchanges, per row, the largest logit and one vector of sums.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from ..grid import LANE
from .core import RULES, Dims, Exchange, LocalOp, Lowered, OpSpec, argument, operands, whole_spec
from .lowering import (
    Groups,
    Pieces,
    again,
    all_reduces,
    given,
    locate,
    pieces_of,
    pmax,
    positions,
    psum,
    widen,
)
from .pointwise import broadcast_dims

aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2  # torch's numbers for `reduction`


# -- elementwise losses --------------------------------------------------------------------------------------


def scaled_loss(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], count: int) -> Tensor:
    """A loss summed here and divided by the global count."""
    return op(*args, **kwargs) / count


_NONE_AT_ZERO = {
    aten.mse_loss.default,
    aten.l1_loss.default,
    aten.smooth_l1_loss.default,
    aten.huber_loss.default,
    aten.binary_cross_entropy.default,
}


@RULES.builder(
    aten.mse_loss.default,
    aten.l1_loss.default,
    aten.smooth_l1_loss.default,
    aten.huber_loss.default,
    aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_with_logits.default,
    aten.kl_div.default,
    aten.soft_margin_loss.default,
    aten.hinge_embedding_loss.default,
    aten.margin_ranking_loss.default,
    aten.poisson_nll_loss.default,
)
def elementwise_loss(node: Node) -> OpSpec:
    """d0 d1, d0 d1 -> (partial over sharded dims), or -> d0 d1 without a reduction"""
    tensors = [o.meta["val"] for o in operands(node)]
    shape = torch.broadcast_shapes(*(tuple(map(int, t.shape)) for t in tensors))
    full = torch.empty(shape, device="meta")
    sizes = {f"d{i}": int(n) for i, n in enumerate(shape)}
    inputs = tuple(broadcast_dims(t, full) for t in tensors)
    reduced = argument(node, "reduction") != NONE
    # Two zeros are no loss, unless they are logits or the loss is measured against a margin.
    zero = node.target in _NONE_AT_ZERO
    fills = {f: tuple((k, 0.0) for k, dims in enumerate(inputs) if (f,) in dims) for f in sizes} if reduced else {}
    return OpSpec(
        sizes,
        inputs,
        (() if reduced else broadcast_dims(full, full),),
        lower=_lower_elementwise,
        padded=frozenset(sizes) if zero or not reduced else frozenset(),
        fills=fills,
    )


def _lower_elementwise(op: LocalOp) -> Lowered:
    cut = any(op.axes_of.get(f) for f in op.spec.sizes) or op.spec.true
    if not cut or argument(op.node, "reduction") != MEAN:
        return op.node.target, op.args, dict(op.kwargs)
    target, args, kwargs = again(op, reduction=SUM)
    return scaled_loss, (target, args, kwargs, math.prod({**op.spec.sizes, **op.spec.true}.values())), {}


# -- class losses --------------------------------------------------------------------------------------------

# Whose valid rows are counted: the targets here, of all lanes, and the axes along which ranks have others.
Counted = tuple[Sequence[Tensor], Groups]


def _picked(x: Tensor, target: Tensor, class_dim: int, classes: Pieces, count: int) -> Tensor:
    """The entry of each row's target class, zero where another rank holds it."""
    local, here = locate(target, classes, count)
    entry = x.gather(class_dim, local.unsqueeze(class_dim)).squeeze(class_dim)
    return torch.where(here, entry, torch.zeros_like(entry))


def _finish(
    rows: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore: int, counted: Counted
) -> Tensor:
    """Reduce the rows' losses. A mean divides by the number (or weight) of all valid rows of all ranks."""
    valid = target != ignore
    rows = torch.where(valid, rows, torch.zeros_like(rows))
    if reduction == NONE:
        return rows
    if reduction == SUM:
        return rows.sum()
    return rows.sum() / valid_rows(weight, rows.dtype, ignore, counted)


def valid_rows(weight: Tensor | None, dtype: torch.dtype, ignore: int, counted: Counted) -> Tensor:
    """Number (or summed class weight) of the rows that are not ignored, over all ranks."""
    targets, row_groups = counted
    found = []
    for target in targets:
        valid = target != ignore
        here = valid.to(dtype)
        if weight is not None:
            here = here * weight.detach().to(dtype)[torch.where(valid, target, torch.zeros_like(target))]
        found.append(here.sum())
    return psum(functools.reduce(torch.add, found), row_groups, varying=True)


def cross_entropy_rows(
    x: Tensor, target: Tensor, weight: Tensor | None, ignore: int, smoothing: float, counted: Counted
) -> Tensor:
    """The mean of cross_entropy where rows are split over the groups: this rank's share of it."""
    wide = widen(x)
    w = None if weight is None else weight.to(wide.dtype)
    total = F.cross_entropy(wide, target, w, ignore_index=ignore, reduction="sum", label_smoothing=smoothing)
    return (total / valid_rows(weight, wide.dtype, ignore, counted)).to(x.dtype)


def cross_entropy_classes(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore: int,
    smoothing: float,
    classes: Pieces,
    count: int,
    counted: Counted,
) -> Tensor:
    """cross_entropy where the classes are split: each row's maximum, then its sums, are exchanged.

    What follows is the same on all ranks of the class axes, so the sums' gradients need no exchange.
    """
    dim = 1 if x.dim() > 1 else 0
    groups = [g for _, axes in classes for g in axes]
    wide = widen(x)
    shifted = wide - pmax(wide.amax(dim, keepdim=True), groups)
    safe = torch.where(target != ignore, target, torch.zeros_like(target))
    parts = [shifted.exp().sum(dim), _picked(shifted, safe, dim, classes, count)]
    total: Tensor | int = math.prod(n for n, _ in classes)
    if weight is not None:
        weight = weight.detach().to(wide.dtype)
        total = weight.sum()
    if smoothing:
        shares = shifted
        if weight is not None:
            mine = weight.index_select(0, positions(classes, x.device))
            shares = shifted * mine.reshape([-1] + [1] * (x.dim() - 1 - dim))
        parts.append(shares.sum(dim))
    sums = psum(torch.stack(parts), groups, varying=False)
    log_total = sums[0].log()
    rows = log_total - sums[1]
    if weight is not None:
        rows = rows * weight[safe]
    if smoothing:
        spread = smoothing / math.prod(n for n, _ in classes)
        rows = (1 - smoothing) * rows + spread * (total * log_total - sums[2])
    return _finish(rows, target, weight, reduction, ignore, counted).to(x.dtype)


def nll_part(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore: int,
    classes: Pieces,
    count: int,
    counted: Counted,
) -> Tensor:
    """nll_loss of some rows and classes: a row counts where its target class is."""
    safe = torch.where(target != ignore, target, torch.zeros_like(target))
    rows = -_picked(widen(x), safe, 1 if x.dim() > 1 else 0, classes, count)
    if weight is not None:
        rows = rows * weight.detach().to(rows.dtype)[safe]
    return _finish(rows, target, weight, reduction, ignore, counted).to(x.dtype)


def probability_rows(x: Tensor, target: Tensor, weight: Tensor | None, smoothing: float, count: int) -> Tensor:
    """cross_entropy against class probabilities, summed here and divided by the global number of rows."""
    return F.cross_entropy(x, target, weight, reduction="sum", label_smoothing=smoothing) / count


@RULES.builder(
    aten.cross_entropy_loss.default, aten.nll_loss_nd.default, aten.nll_loss.default, aten.nll_loss2d.default
)
def class_loss(node: Node) -> OpSpec:
    """n c ..., n ..., w? -> (partial over rows) | w; cross_entropy is complete over classes"""
    x, target, *_ = tensors = [o.meta["val"] for o in operands(node)]
    if x.dim() == 1 and not target.is_floating_point() and target.dim():
        return whole_spec(node)  # one row whose target comes as [1]
    sizes: dict[str, int] = {}
    dims: list[tuple[str, ...]] = []
    at = 1 if x.dim() > 1 else 0
    for i, n in enumerate(x.shape):
        name = "c" if i == at else f"r{i}"
        sizes[name] = int(n)
        dims.append((name,))
    rows: Dims = tuple(d for i, d in enumerate(dims) if i != at)
    probabilities = target.is_floating_point()
    inputs: list[Dims] = [tuple(dims), tuple(dims) if probabilities else rows]
    whole = {"c"} if probabilities else set()
    if len(tensors) > 2:  # class weights: few, and every row may need any of them
        sizes["w"] = sizes["c"]
        whole.add("w")
        inputs.append((("w",),))
    out = rows if argument(node, "reduction") == NONE else ()
    cross = node.target is aten.cross_entropy_loss.default
    smooth = len(tensors) > 2 or (cross and float(argument(node, "label_smoothing")) > 0)
    ignored = float(argument(node, "ignore_index"))
    fills = {f: ((1, ignored),) for (f,) in rows} | {"c": ((0, -math.inf if cross else 0.0),)}
    return OpSpec(
        sizes,
        tuple(inputs),
        (out,),
        whole=frozenset(whole),
        complete=frozenset("c") if cross else frozenset(),
        lower=_lower_cross_entropy if cross else _lower_nll,
        exchange=_exchange_class_loss,
        padded=frozenset() if probabilities else frozenset(sizes) - whole - ({"c"} if smooth else set()),
        placed=frozenset("c"),
        fills=fills,
    )


def _rows(op: LocalOp) -> list[str]:
    return [f"r{i}" for i in range(len(op.spec.inputs[0])) if i != (1 if len(op.spec.inputs[0]) > 1 else 0)]


def _counted(op: LocalOp) -> list[str]:
    """Factors over which valid rows are counted."""
    target = operands(op.node)[1].meta["val"]
    return _rows(op) if argument(op.node, "reduction") == MEAN and not target.is_floating_point() else []


def _counts(op: LocalOp) -> tuple[Any, ...]:
    """The `Counted` of an op."""
    factors = _counted(op)
    in_lanes = any(a == LANE for a in op.axes(*factors))
    return op.every_lane("target") if in_lanes else [given(op, "target")], op.ranks(*factors)


def _lower_cross_entropy(op: LocalOp) -> Lowered:
    reduction, smoothing = int(argument(op.node, "reduction")), float(argument(op.node, "label_smoothing"))
    operand = (given(op, "self"), given(op, "target"), given(op, "weight"))
    ignore = int(argument(op.node, "ignore_index"))
    if not op.single("c"):
        how = (reduction, ignore, smoothing, pieces_of(op, "c"), op.size("c"), _counts(op))
        return cross_entropy_classes, (*operand, *how), {}
    if reduction != MEAN or not op.groups(*_rows(op)):
        return op.node.target, op.args, dict(op.kwargs)
    if operands(op.node)[1].meta["val"].is_floating_point():
        return probability_rows, (*operand, smoothing, math.prod(op.size(r) for r in _rows(op))), {}
    return cross_entropy_rows, (*operand, ignore, smoothing, _counts(op)), {}


def _lower_nll(op: LocalOp) -> Lowered:
    reduction = int(argument(op.node, "reduction"))
    if op.single("c") and not op.groups(*_counted(op)):
        return op.node.target, op.args, dict(op.kwargs)
    operand = (given(op, "self"), given(op, "target"), given(op, "weight"))
    ignore = int(argument(op.node, "ignore_index"))
    return nll_part, (*operand, reduction, ignore, pieces_of(op, "c"), op.size("c"), _counts(op)), {}


def _exchange_class_loss(op: LocalOp) -> list[Exchange]:
    found = [e for e in all_reduces(op, _counted(op), 1) if e.axis != LANE]
    if op.node.target is aten.cross_entropy_loss.default and not op.single("c"):
        rows = math.prod(op.in_shape(1))
        sums = 3 if argument(op.node, "label_smoothing") else 2
        found += all_reduces(op, ["c"], rows) + all_reduces(op, ["c"], sums * rows)
    return found
