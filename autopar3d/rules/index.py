"""Ops that read or write at computed places: the indexed dims stay whole, everything else may be sharded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from .core import RULES, Dims, LocalOp, Lowered, OpSpec, argument, operands, results, whole_spec

aten = torch.ops.aten


def _val(x: Any) -> Tensor:
    return x.meta["val"]


# -- x[i, j] -------------------------------------------------------------------------------------------------


def _index_factors(node: Node) -> tuple[dict[str, int], Dims, list[Dims], Dims, set[str]] | None:
    """(sizes, dims of x, of each index, of x[indices], whole) for integer indices; None for masks."""
    x = _val(node.args[0])
    indices = list(argument(node, "indices"))
    if any(i is not None and _val(i).dtype in (torch.bool, torch.uint8) for i in indices):
        return None
    sizes = {f"d{i}": int(n) for i, n in enumerate(x.shape)}
    dims: Dims = tuple((f,) for f in sizes)
    at = [i for i, index in enumerate(indices) if index is not None]
    shapes = [tuple(map(int, _val(indices[i]).shape)) for i in at]
    points = torch.broadcast_shapes(*shapes)
    # Where the indices leave off each other, their dims come first in the result.
    first = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    sizes.update({f"k{i}": n for i, n in enumerate(points)})
    new: Dims = tuple((f"k{i}",) for i in range(len(points)))
    rest = [d for i, d in enumerate(dims) if i not in at]
    result = (*rest[:first], *new, *rest[first:])
    index_dims = [_aligned(shape, points, new) for shape in shapes]
    return sizes, dims, index_dims, result, {f"d{i}" for i in at}


def _aligned(shape: tuple[int, ...], full: tuple[int, ...], dims: Dims) -> Dims:
    """Factors of a tensor that broadcasts to `full`."""
    lead = len(full) - len(shape)
    return tuple(dims[lead + i] if n == full[lead + i] else () for i, n in enumerate(shape))


@RULES.builder(aten.index.Tensor, pads=True)
def index(node: Node) -> OpSpec:
    """d0 d1, k -> k d1, the indexed dims whole (masks: all whole)"""
    found = _index_factors(node)
    if found is None:
        return whole_spec(node)
    sizes, dims, index_dims, result, whole = found
    return OpSpec(sizes, (dims, *index_dims), (result,), whole=frozenset(whole))


def fill_where(x: Tensor, mask: Tensor, value: Tensor) -> Tensor:
    """x[mask] = value, one value for all places."""
    wide = mask.reshape([*mask.shape, *[1] * (x.dim() - mask.dim())])
    return torch.where(wide, value.reshape([]), x)


@RULES.builder(aten.index_put.default, pads=True)
def index_put(node: Node) -> OpSpec:
    """d0 d1, k, k d1 -> d0 d1 | d0, k; one value under a mask: every dim may be sharded"""
    x, values = _val(node.args[0]), _val(argument(node, "values"))
    indices = list(argument(node, "indices"))
    fills = len(indices) == 1 and _val(indices[0]).dtype is torch.bool and values.numel() == 1
    if fills and not argument(node, "accumulate"):
        sizes = {f"d{i}": int(n) for i, n in enumerate(x.shape)}
        dims: Dims = tuple((f,) for f in sizes)
        inputs: tuple[Dims, ...] = (dims, dims[: _val(indices[0]).dim()], ((),) * values.dim())
        return OpSpec(sizes, inputs, (dims,), lower=_lower_fill)
    found = _index_factors(node)
    if found is None:
        return whole_spec(node)
    sizes, dims, index_dims, result, whole = found
    shape = tuple(sizes[f] for (f,) in result)
    inputs = (dims, *index_dims, _aligned(tuple(map(int, values.shape)), shape, result))
    # Two ranks writing different points would each hold half of the result: points stay whole.
    whole |= {f for f in sizes if f.startswith("k")}
    return OpSpec(sizes, inputs, (dims,), whole=frozenset(whole))


def _lower_fill(op: LocalOp) -> Lowered:
    return fill_where, (op.args[0], op.args[1][0], op.args[2]), {}


# -- along one dim -------------------------------------------------------------------------------------------


def _shared(node: Node, tensors: list[Tensor], at: int) -> tuple[dict[str, int], list[Dims], set[str]]:
    """Dims of equal length are shared and free; `at`, and dims of unequal length, are each tensor's own."""
    rank = tensors[0].dim()
    sizes: dict[str, int] = {}
    found: list[list[tuple[str, ...]]] = [[] for _ in tensors]
    whole: set[str] = set()
    for i in range(rank):
        lengths = [int(t.shape[i]) for t in tensors]
        same = len(set(lengths)) == 1 and i != at
        for k, n in enumerate(lengths):
            name = f"d{i}" if same else f"d{i}_{k}"
            sizes[name] = n
            found[k].append((name,))
            if not same:
                whole.add(name)
    return sizes, [tuple(d) for d in found], whole


@RULES.builder(aten.gather.default, pads=True)
def gather(node: Node) -> OpSpec:
    """d0 d1, d0 k -> d0 k | d1"""
    x, places = _val(argument(node, "self")), _val(argument(node, "index"))
    if x.dim() == 0 or places.dim() == 0:
        return whole_spec(node)
    at = int(argument(node, "dim")) % x.dim()
    sizes, (dims, out), whole = _shared(node, [x, places], at)
    # Each place is read by itself, so a rank may read some of them: the index's own dim is free.
    return OpSpec(sizes, (dims, out), (out,), whole=frozenset(whole - {f"d{at}_1"}))


@RULES.builder(aten.take_along_dim.default, pads=True)
def take_along_dim(node: Node) -> OpSpec:
    """d0 d1, d0 k -> d0 k | d1 (broadcasting)"""
    x, places, out = _val(argument(node, "self")), _val(argument(node, "indices")), results(node)[0]
    if argument(node, "dim") is None or x.dim() != places.dim():
        return whole_spec(node)
    at = int(argument(node, "dim")) % x.dim()
    sizes = {f"d{i}": int(n) for i, n in enumerate(out.shape)}
    dims: Dims = tuple((f,) for f in sizes)
    sizes["x"] = int(x.shape[at])
    left = tuple(("x",) if i == at else dims[i] if n == out.shape[i] else () for i, n in enumerate(x.shape))
    right = tuple(dims[i] if n == out.shape[i] else () for i, n in enumerate(places.shape))
    return OpSpec(sizes, (left, right), (dims,), whole=frozenset("x"))


@RULES.builder(
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter.reduce,
    aten.scatter.value_reduce,
    aten.scatter_add.default,
    aten.scatter_reduce.two,
    aten.select_scatter.default,
    aten.slice_scatter.default,
    aten.index_add.default,
    aten.index_copy.default,
    aten.index_fill.int_Scalar,
    aten.index_fill.int_Tensor,
    pads=True,
)
def scatter(node: Node) -> OpSpec:
    """d0 d1, d0 k, d0 k -> d0 d1 | d1, k"""
    tensors = [_val(o) for o in operands(node)]
    x = tensors[0]
    if x.dim() == 0:
        return whole_spec(node)
    at = int(argument(node, "dim", 0)) % x.dim()
    alike = [t for t in tensors if t.dim() == x.dim() and not (x.dim() == 1 and t is not x)]
    sizes, shared, whole = _shared(node, alike, at)
    inputs: list[Dims] = []
    for k, t in enumerate(tensors):
        if any(t is a for a in alike):
            inputs.append(shared[next(i for i, a in enumerate(alike) if a is t)])
        elif node.target is aten.select_scatter.default:  # the source lacks the chosen dim
            inputs.append(tuple(d for i, d in enumerate(shared[0]) if i != at))
        else:  # a list of places, or a value
            names = {f"o{k}_{i}": int(n) for i, n in enumerate(t.shape)}
            sizes |= names
            whole |= set(names)
            inputs.append(tuple((f,) for f in names))
    return OpSpec(sizes, tuple(inputs), (shared[0],), whole=frozenset(whole))


# -- other ---------------------------------------------------------------------------------------------------


@RULES.builder(aten.bucketize.Tensor, aten.isin.Tensor_Tensor, pads=True)
def lookup(node: Node) -> OpSpec:
    """..., t -> ... | t"""
    x, table = (_val(o) for o in operands(node))
    sizes = {f"d{i}": int(n) for i, n in enumerate(x.shape)}
    dims: Dims = tuple((f,) for f in sizes)
    own = {f"t{i}": int(n) for i, n in enumerate(table.shape)}
    return OpSpec(sizes | own, (dims, tuple((f,) for f in own)), (dims,), whole=frozenset(own))


@RULES.builder(aten.glu.default, pads=True)
def glu(node: Node) -> OpSpec:
    """(o r) -> r: both halves keep their part of r"""
    x = operands(node)[0].meta["val"]
    at = int(argument(node, "dim")) % x.dim()
    sizes = {f"d{i}": int(n) for i, n in enumerate(x.shape) if i != at} | {"o": 2, "r": int(x.shape[at]) // 2}
    before: Dims = tuple(("o", "r") if i == at else (f"d{i}",) for i in range(x.dim()))
    after: Dims = tuple(("r",) if i == at else (f"d{i}",) for i in range(x.dim()))
    return OpSpec(sizes, (before,), (after,), whole=frozenset("o"))


@RULES.builder(aten.cosine_similarity.default, pads=True)
def cosine_similarity(node: Node) -> OpSpec:
    """d0 d1, d0 d1 -> d0 | d1 (broadcasting)"""
    tensors = [_val(o) for o in operands(node)]
    full = torch.broadcast_shapes(*(tuple(map(int, t.shape)) for t in tensors))
    at = int(argument(node, "dim")) % len(full)
    sizes = {f"d{i}": n for i, n in enumerate(full)}
    dims: Dims = tuple((f,) for f in sizes)
    inputs = tuple(_aligned(tuple(map(int, t.shape)), full, dims) for t in tensors)
    return OpSpec(sizes, inputs, (tuple(d for i, d in enumerate(dims) if i != at),), whole=frozenset({f"d{at}"}))


@RULES.builder(aten.diagonal.default, aten.unfold.default, pads=True)
def reshaped(node: Node) -> OpSpec:
    """d0 d1 d2 -> d0 n, the named dims whole"""
    x, out = operands(node)[0].meta["val"], results(node)[0]
    sizes = {f"d{i}": int(n) for i, n in enumerate(x.shape)}
    dims: Dims = tuple((f,) for f in sizes)
    if node.target is aten.diagonal.default:
        gone = {int(argument(node, d)) % x.dim() for d in ("dim1", "dim2")}
        sizes["n"] = int(out.shape[-1])
        result: Dims = (*(d for i, d in enumerate(dims) if i not in gone), ("n",))
        whole = {f"d{i}" for i in gone} | {"n"}
    else:
        at = int(argument(node, "dimension")) % x.dim()
        sizes |= {"n": int(out.shape[at]), "w": int(out.shape[-1])}
        result = (*(("n",) if i == at else d for i, d in enumerate(dims)), ("w",))
        whole = {f"d{at}", "n", "w"}
    return OpSpec(sizes, (dims,), (result,), whole=frozenset(whole), linear=x.dtype.is_floating_point)
