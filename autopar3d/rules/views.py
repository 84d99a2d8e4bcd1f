"""Ops that only move elements: reshapes, permutations, expansions, slices, splits, concatenations.

A reshape regroups factors and never forces a gather: both sides are cut at the same places of the flattened tensor, and
what lies between two common places is one factor. Where the two sides do not line up, only that group stays whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.fx import Node

from .core import RULES, Dims, LocalOp, Lowered, OpSpec, argument, operands, results

aten = torch.ops.aten


def _local_reshape(op: LocalOp) -> Lowered:
    return aten.reshape.default, (op.args[0], list(op.out_shape())), {}


@RULES.builder(
    aten.reshape.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.view_as.default,
    aten.reshape_as.default,
    pads=True,
)
def reshape(node: Node) -> OpSpec:
    """(a b) c -> a (b c): common factors of both shapes; a group that does not line up stays whole"""
    before, after = operands(node)[0].meta["val"].shape, results(node)[0].shape
    sizes, left, right, whole = regroup([int(n) for n in before], [int(n) for n in after])
    inputs = [left]
    for other in operands(node)[1:]:  # view_as: the second operand gives its shape only
        inputs.append(tuple((f"s{i}",) for i in range(other.meta["val"].dim())))
        sizes.update({f"s{i}": int(n) for i, n in enumerate(other.meta["val"].shape)})
        whole |= {f"s{i}" for i in range(other.meta["val"].dim())}
    return OpSpec(sizes, tuple(inputs), (right,), whole=frozenset(whole), linear=True, lower=_local_reshape)


def regroup(before: Sequence[int], after: Sequence[int]) -> tuple[dict[str, int], Dims, Dims, set[str]]:
    """Factors of a reshape: (sizes, dims before, dims after, factors that must stay whole)."""
    sizes: dict[str, int] = {}
    left: list[list[str]] = [[] for _ in before]
    right: list[list[str]] = [[] for _ in after]
    whole: set[str] = set()
    i = j = 0
    rest_left = before[0] if before else 1
    rest_right = after[0] if after else 1

    def fresh(n: int) -> str:
        name = f"f{len(sizes)}"
        sizes[name] = n
        return name

    while i < len(before) or j < len(after):
        if i < len(before) and rest_left == 1:
            i += 1
            rest_left = before[i] if i < len(before) else 1
            continue
        if j < len(after) and rest_right == 1:
            j += 1
            rest_right = after[j] if j < len(after) else 1
            continue
        if 0 in (rest_left, rest_right):  # an empty tensor: nothing to share
            break
        common = math.gcd(rest_left, rest_right)
        if common in (rest_left, rest_right):
            name = fresh(common)
            left[i].append(name)
            right[j].append(name)
            rest_left //= common
            rest_right //= common
            continue
        # The sides do not nest. Their outermost common part may still be sharded; the rest of the group is whole.
        if common > 1:
            name = fresh(common)
            left[i].append(name)
            right[j].append(name)
            rest_left //= common
            rest_right //= common
        product_left, product_right = rest_left, rest_right
        left[i].append(fresh(rest_left))
        right[j].append(fresh(rest_right))
        whole |= {left[i][-1], right[j][-1]}
        rest_left = rest_right = 1
        while product_left != product_right:
            if product_left < product_right:
                i += 1
                product_left *= before[i]
                left[i].append(fresh(before[i]))
                whole.add(left[i][-1])
            else:
                j += 1
                product_right *= after[j]
                right[j].append(fresh(after[j]))
                whole.add(right[j][-1])
    for k, n in enumerate(before):
        if n == 0:
            left[k] = [fresh(0)]
            whole.add(left[k][0])
    for k, n in enumerate(after):
        if n == 0:
            right[k] = [fresh(0)]
            whole.add(right[k][0])
    return sizes, tuple(map(tuple, left)), tuple(map(tuple, right)), whole


def _named(shape: Sequence[int]) -> tuple[dict[str, int], list[tuple[str, ...]]]:
    return {f"d{i}": int(n) for i, n in enumerate(shape)}, [(f"d{i}",) for i in range(len(shape))]


@RULES.builder(
    aten.permute.default, aten.transpose.int, aten.t.default, aten.movedim.int, aten.numpy_T.default, pads=True
)
def permute(node: Node) -> OpSpec:
    """d0 d1 d2 -> d2 d0 d1"""
    x, out = operands(node)[0].meta["val"], results(node)[0]
    sizes, dims = _named(x.shape)
    n = x.dim()
    if node.target is aten.permute.default:
        order = [int(d) % n for d in argument(node, "dims")]
    elif node.target is aten.movedim.int:
        order = [i for i in range(n) if i != int(argument(node, "source")) % n]
        order.insert(int(argument(node, "destination")) % n, int(argument(node, "source")) % n)
    elif node.target is aten.transpose.int:
        order = list(range(n))
        a, b = int(argument(node, "dim0")) % n, int(argument(node, "dim1")) % n
        order[a], order[b] = b, a
    else:
        order = list(reversed(range(n)))
    assert tuple(out.shape) == tuple(x.shape[i] for i in order)
    return OpSpec(sizes, (tuple(dims),), (tuple(dims[i] for i in order),), linear=True)


def _local_expand(op: LocalOp) -> Lowered:
    return aten.expand.default, (op.args[0], list(op.out_shape())), {}


@RULES.builder(aten.expand.default, aten.expand_as.default, aten.broadcast_to.default, pads=True)
def expand(node: Node) -> OpSpec:
    """1 d1 -> d0 d1"""
    x, out = operands(node)[0].meta["val"], results(node)[0]
    sizes, dims = _named(out.shape)
    lead = out.dim() - x.dim()
    operand = tuple(() if int(n) == 1 else dims[lead + i] for i, n in enumerate(x.shape))
    inputs = (operand, tuple(dims)) if len(operands(node)) > 1 else (operand,)
    return OpSpec(sizes, inputs, (tuple(dims),), linear=len(inputs) == 1, lower=_local_expand)


@RULES.builder(aten.slice.Tensor, pads=True)
def slice_(node: Node) -> OpSpec:
    """(o r) -> r when the slice is one of equal chunks; else the dim stays whole"""
    x, out = operands(node)[0].meta["val"], results(node)[0]
    sizes, dims = _named(x.shape)
    dim = int(argument(node, "dim")) % x.dim()
    n, length = int(x.shape[dim]), int(out.shape[dim])
    start, step = argument(node, "start") or 0, argument(node, "step")
    start = int(start) + n if int(start) < 0 else int(start)
    outputs = list(dims)
    if length == n:
        return OpSpec(sizes, (tuple(dims),), (tuple(dims),), linear=True, lower=_identity)
    if step == 1 and length and n % length == 0 and start % length == 0:
        del sizes[f"d{dim}"]
        sizes.update({"o": n // length, "r": length})
        dims[dim], outputs[dim] = ("o", "r"), ("r",)
        return OpSpec(sizes, (tuple(dims),), (tuple(outputs),), frozenset("o"), linear=True, lower=_local_slice)
    sizes["out"], outputs[dim] = length, ("out",)
    return OpSpec(sizes, (tuple(dims),), (tuple(outputs),), frozenset({f"d{dim}", "out"}), linear=True)


def _identity(op: LocalOp) -> Lowered:
    return aten.alias.default, (op.args[0],), {}


def _local_slice(op: LocalOp) -> Lowered:
    dim, start = op.args[1], int(op.args[2] or 0)
    n = op.size("o") * op.size("r")
    chunk = (start + n if start < 0 else start) // op.size("r")
    return aten.slice.Tensor, (op.args[0], dim, chunk * op.local("r"), (chunk + 1) * op.local("r")), {}


@RULES.builder(aten.select.int, pads=True)
def select(node: Node) -> OpSpec:
    """d0 d1 -> d1, the chosen dim whole"""
    x = operands(node)[0].meta["val"]
    sizes, dims = _named(x.shape)
    dim = int(argument(node, "dim")) % x.dim()
    outputs = tuple(d for i, d in enumerate(dims) if i != dim)
    return OpSpec(sizes, (tuple(dims),), (outputs,), whole=frozenset({f"d{dim}"}), linear=True)


@RULES.builder(
    aten.split.Tensor,
    aten.unsafe_split.Tensor,
    aten.split_with_sizes.default,
    aten.chunk.default,
    pads=True,
)
def split(node: Node) -> OpSpec:
    """(o r) -> r, r, ... for equal parts; else the dim stays whole"""
    x, outs = operands(node)[0].meta["val"], results(node)
    sizes, dims = _named(x.shape)
    dim = int(argument(node, "dim", 0)) % x.dim()
    lengths = {int(o.shape[dim]) for o in outs}
    if len(lengths) == 1:
        del sizes[f"d{dim}"]
        sizes.update({"o": len(outs), "r": lengths.pop()})
        one = (*dims[:dim], ("r",), *dims[dim + 1 :])
        dims[dim] = ("o", "r")
        return OpSpec(sizes, (tuple(dims),), (one,) * len(outs), frozenset("o"), linear=True, lower=_local_split)
    outputs = []
    for i, o in enumerate(outs):
        sizes[f"p{i}"] = int(o.shape[dim])
        outputs.append((*dims[:dim], (f"p{i}",), *dims[dim + 1 :]))
    whole = frozenset({f"d{dim}", *(f"p{i}" for i in range(len(outs)))})
    return OpSpec(sizes, (tuple(dims),), tuple(outputs), whole, linear=True)


def _local_split(op: LocalOp) -> Lowered:
    dim = int(argument(op.node, "dim", 0))
    return aten.split_with_sizes.default, (op.args[0], [op.local("r")] * op.size("o"), dim), {}


@RULES.builder(aten.unbind.int, pads=True)
def unbind(node: Node) -> OpSpec:
    """d0 d1 -> d1, d1, ..., the chosen dim whole"""
    x = operands(node)[0].meta["val"]
    sizes, dims = _named(x.shape)
    dim = int(argument(node, "dim", 0)) % x.dim()
    one = tuple(d for i, d in enumerate(dims) if i != dim)
    return OpSpec(sizes, (tuple(dims),), (one,) * len(results(node)), frozenset({f"d{dim}"}), linear=True)


@RULES.builder(aten.cat.default, pads=True)
def cat(node: Node) -> OpSpec:
    """r, r -> (o r) for equal parts; else the dim stays whole"""
    tensors = [o.meta["val"] for o in operands(node)]
    out = results(node)[0]
    sizes, dims = _named(out.shape)
    dim = int(argument(node, "dim", 0)) % out.dim()
    if any(t.dim() != out.dim() for t in tensors):  # legacy: an empty 1-D tensor is ignored
        from .core import whole_spec

        return whole_spec(node)
    lengths = [int(t.shape[dim]) for t in tensors]
    outputs = list(dims)
    if len(set(lengths)) == 1 and lengths[0] > 0:
        del sizes[f"d{dim}"]
        sizes.update({"o": len(tensors), "r": lengths[0]})
        outputs[dim] = ("o", "r")
        one = (*dims[:dim], ("r",), *dims[dim + 1 :])
        return OpSpec(sizes, (one,) * len(tensors), (tuple(outputs),), whole=frozenset("o"), linear=True)
    inputs = []
    for i, n in enumerate(lengths):
        sizes[f"p{i}"] = n
        inputs.append((*dims[:dim], (f"p{i}",), *dims[dim + 1 :]))
    whole = frozenset({f"d{dim}", *(f"p{i}" for i in range(len(lengths)))})
    return OpSpec(sizes, tuple(inputs), (tuple(outputs),), whole, linear=True)


@RULES.builder(aten.stack.default, pads=True)
def stack(node: Node) -> OpSpec:
    """d0 d1, d0 d1 -> o d0 d1, the new dim whole"""
    out = results(node)[0]
    sizes, dims = _named(out.shape)
    dim = int(argument(node, "dim", 0)) % out.dim()
    one = tuple(d for i, d in enumerate(dims) if i != dim)
    return OpSpec(sizes, (one,) * len(operands(node)), (tuple(dims),), whole=frozenset({f"d{dim}"}), linear=True)


@RULES.builder(aten.flip.default, aten.roll.default, pads=True)
def flip(node: Node) -> OpSpec:
    """d0 d1 -> d0 d1, the moved dims whole"""
    x = operands(node)[0].meta["val"]
    sizes, dims = _named(x.shape)
    moved = argument(node, "dims") or range(x.dim())
    whole = frozenset(f"d{int(d) % x.dim()}" for d in moved)
    return OpSpec(sizes, (tuple(dims),), (tuple(dims),), whole, linear=True)


@RULES.builder(aten.repeat.default, pads=True)
def repeat(node: Node) -> OpSpec:
    """d -> (o d): tiles"""
    x, out = operands(node)[0].meta["val"], results(node)[0]
    lead = out.dim() - x.dim()
    sizes: dict[str, int] = {}
    operand: list[tuple[str, ...]] = []
    output: list[tuple[str, ...]] = []
    for i, times in enumerate(int(r) for r in argument(node, "repeats")):
        dim: tuple[str, ...] = ()
        if times != 1:
            sizes[f"o{i}"] = times
            dim += (f"o{i}",)
        if i >= lead:
            sizes[f"d{i}"] = int(x.shape[i - lead])
            operand.append((f"d{i}",))
            dim += (f"d{i}",)
        output.append(dim)
    return OpSpec(sizes, (tuple(operand),), (tuple(output),), linear=True, lower=_local_repeat)


def _local_repeat(op: LocalOp) -> Lowered:
    lead = len(op.out_shape()) - len(op.in_shape(0))
    inner = (1,) * lead + op.in_shape(0)
    return aten.repeat.default, (op.args[0], [o // i for o, i in zip(op.out_shape(), inner, strict=True)]), {}


@RULES.builder(aten.repeat_interleave.self_int, pads=True)
def repeat_interleave(node: Node) -> OpSpec:
    """d -> (d o): each element several times in a row"""
    x, out = operands(node)[0].meta["val"], results(node)[0]
    if argument(node, "dim") is None:
        from .core import whole_spec

        return whole_spec(node)
    sizes, dims = _named(x.shape)
    dim = int(argument(node, "dim")) % x.dim()
    sizes["o"] = int(out.shape[dim]) // int(x.shape[dim])
    outputs = list(dims)
    outputs[dim] = (f"d{dim}", "o")
    return OpSpec(sizes, (tuple(dims),), (tuple(outputs),), frozenset("o"), linear=True)
