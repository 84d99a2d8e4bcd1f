"""Matrix products: everything that is one einsum, with FLOPs = 2 x the product of all its factors."""

from __future__ import annotations

import math

import torch
from torch.fx import Node

from .core import RULES, Dims, LocalOp, Lowered, OpSpec, argument, operands, results, whole_spec

aten = torch.ops.aten

RULES.rule(aten.mm.default, text="m k, k n -> m n", flops=True, pads=True)
RULES.rule(aten.bmm.default, text="b m k, b k n -> b m n", flops=True, pads=True)
RULES.rule(aten.mv.default, text="m k, k -> m", flops=True, pads=True)
RULES.rule(aten.dot.default, text="k, k ->", flops=True, pads=True)
RULES.rule(aten.vdot.default, text="k, k ->", flops=True, pads=True)
RULES.rule(aten.outer.default, text="m, n -> m n", pads=True)
RULES.rule(aten.linear.default, text="... k, n k, n? -> ... n", flops=True, addend="bias", pads=True)
RULES.rule(aten.bilinear.default, text="... i, ... j, n i j, n? -> ... n", flops=True, addend="bias", pads=True)


@RULES.builder(aten.addmm.default, aten.baddbmm.default, pads=True)
def addmm(node: Node) -> OpSpec:
    """bias + m k @ k n -> m n (bias broadcasts)"""
    bias, a, b = (o.meta["val"] for o in operands(node))
    batch: Dims = (("b",),) if a.dim() == 3 else ()
    sizes = {"m": int(a.shape[-2]), "k": int(a.shape[-1]), "n": int(b.shape[-1])}
    if batch:
        sizes["b"] = int(a.shape[0])
    out: Dims = (*batch, ("m",), ("n",))
    aligned = out[len(out) - bias.dim() :]
    bias_dims = tuple(() if int(n) == 1 else d for n, d in zip(bias.shape, aligned, strict=True))
    inputs = (bias_dims, (*batch, ("m",), ("k",)), (*batch, ("k",), ("n",)))
    return OpSpec(sizes, inputs, (out,), addends=frozenset({0}), flops=2.0 * math.prod(sizes.values()))


@RULES.builder(aten.matmul.default, pads=True)
def matmul(node: Node) -> OpSpec:
    """... m k, ... k n -> ... m n (a vector operand lacks m or n; batch dims broadcast)"""
    a, b = (o.meta["val"] for o in operands(node))
    out = results(node)[0]
    sizes: dict[str, int] = {}
    tail_a: Dims = (("m",), ("k",)) if a.dim() > 1 else (("k",),)
    tail_b: Dims = (("k",), ("n",)) if b.dim() > 1 else (("k",),)
    tail_out = tuple(d for d in (("m",), ("n",)) if d in (*tail_a, *tail_b))
    batch = int(out.dim()) - len(tail_out)

    def dims(tensor: torch.Tensor, tail: Dims) -> Dims:
        lead = tensor.dim() - len(tail)
        names: list[tuple[str, ...]] = []
        for i in range(lead):
            n = int(tensor.shape[i])
            name = f"b{lead - 1 - i}"
            names.append((name,) if n > 1 else ())
            if n > 1:
                sizes[name] = n
        for (f,), n in zip(tail, tensor.shape[lead:], strict=True):
            sizes[f] = int(n)
        return (*names, *tail)

    inputs = (dims(a, tail_a), dims(b, tail_b))
    output = (
        *((f"b{batch - 1 - i}",) if f"b{batch - 1 - i}" in sizes else () for i in range(batch)),
        *tail_out,
    )
    return OpSpec(sizes, inputs, (output,), flops=2.0 * math.prod(sizes.values()))


@RULES.builder(aten._grouped_mm.default)
def grouped_mm(node: Node) -> OpSpec:
    """m k, g k n, g -> m n | m, g: rows sorted by expert, one weight an expert; which rows are whose is data"""
    a, b = (o.meta["val"] for o in operands(node)[:2])
    if a.dim() != 2 or b.dim() != 3 or len(operands(node)) != 3 or argument(node, "offs") is None:
        return whole_spec(node)
    sizes = {"m": int(a.shape[0]), "k": int(a.shape[1]), "g": int(b.shape[0]), "n": int(b.shape[2])}
    inputs: tuple[Dims, ...] = ((("m",), ("k",)), (("g",), ("k",), ("n",)), (("g",),))
    flops = 2.0 * sizes["m"] * sizes["k"] * sizes["n"]
    return OpSpec(sizes, inputs, ((("m",), ("n",)),), whole=frozenset("mg"), flops=flops)


@RULES.builder(aten.einsum.default, pads=True)
def einsum(node: Node) -> OpSpec:
    """an equation is its own rule"""
    equation = argument(node, "equation").replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    tensors = [o.meta["val"] for o in operands(node)]
    if "..." in equation or not arrow or any(len(set(t)) < len(t) for t in (*terms, right)):
        # Implicit output, ellipsis and diagonals: rare enough to be computed whole.
        return whole_spec(node)
    sizes = {f: int(n) for t, x in zip(terms, tensors, strict=True) for f, n in zip(t, x.shape, strict=True) if n > 1}
    for t, x in zip(terms, tensors, strict=True):
        sizes.update({f: 1 for f, n in zip(t, x.shape, strict=True) if f not in sizes})

    def dims(term: str, shape: torch.Size) -> Dims:
        return tuple((f,) if int(n) == sizes[f] else () for f, n in zip(term, shape, strict=True))

    inputs = tuple(dims(t, x.shape) for t, x in zip(terms, tensors, strict=True))
    # Several operands contract pairwise; counting the whole product would overstate the work.
    flops = 2.0 * math.prod(sizes.values()) if len(terms) <= 2 else 0.0
    return OpSpec(sizes, inputs, (dims(right, results(node)[0].shape),), flops=flops, lower=_einsum_path)


def _einsum_path(op: LocalOp) -> Lowered:
    # The recorded contraction path refers to global sizes; without it torch contracts left to right.
    return aten.einsum.default, op.args[:2], {}
