"""Ops that make tensors from nothing: constants and counters; and what is made by place."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx import Node

from .core import RULES, LocalOp, Lowered, OpSpec, argument, operands, results
from .lowering import Pieces, again, pieces_of, positions

aten = torch.ops.aten


def arange_part(start: int, step: int, dtype: torch.dtype, device: torch.device, places: Pieces) -> Tensor:
    """Some elements of an integer arange."""
    return (positions(places, device) * step + start).to(dtype)


def _local_size(op: LocalOp) -> Lowered:
    return again(op, size=list(op.out_shape()))


@RULES.builder(
    aten.zeros.default,
    aten.ones.default,
    aten.full.default,
    aten.empty.memory_format,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.new_empty.default,
    pads=True,
)
def constant(node: Node) -> OpSpec:
    """-> d0 d1 (new_zeros and the like read nothing of their operand: it may lie anywhere)"""
    out = results(node)[0]
    sizes = {f"d{i}": int(n) for i, n in enumerate(out.shape)}
    dims = tuple((f,) for f in sizes)
    inputs = []
    for k, o in enumerate(operands(node)):
        shape = o.meta["val"].shape
        like = {f"s{k}_{i}": int(n) for i, n in enumerate(shape)}
        sizes |= like
        inputs.append(tuple((f,) for f in like))
    # The operand's factors count as reduced and complete: nothing is read, so nothing is missing.
    complete = frozenset(sizes) - {f for (f,) in dims}
    return OpSpec(sizes, tuple(inputs), (dims,), complete=complete, lower=_local_size)


@RULES.builder(aten.arange.default, aten.arange.start, aten.arange.start_step)
def arange(node: Node) -> OpSpec:
    """-> d0 (whole when it counts in floating point)"""
    out = results(node)[0]
    whole = frozenset({"d0"} if out.dtype.is_floating_point else ())
    return OpSpec({"d0": int(out.shape[0])}, (), ((("d0",),),), whole=whole, lower=_lower_arange)


def _lower_arange(op: LocalOp) -> Lowered:
    if op.single("d0"):
        return op.node.target, op.args, dict(op.kwargs)
    out = results(op.node)[0]
    start, step = int(argument(op.node, "start", 0)), int(argument(op.node, "step", 1))
    return arange_part, (start, step, out.dtype, out.device, pieces_of(op, "d0")), {}


def _made_whole(text: str) -> Callable[[Node], OpSpec]:
    def build(node: Node) -> OpSpec:
        sizes: dict[str, int] = {}

        def dims(tensor: Tensor, tag: str) -> tuple[tuple[str, ...], ...]:
            names = {f"{tag}{i}": int(n) for i, n in enumerate(tensor.shape)}
            sizes.update(names)
            return tuple((f,) for f in names)

        inputs = tuple(dims(o.meta["val"], f"i{k}_") for k, o in enumerate(operands(node)))
        outputs = tuple(dims(r, f"o{k}_") for k, r in enumerate(results(node)))
        return OpSpec(sizes, inputs, outputs, whole=frozenset(sizes))

    build.__doc__ = text
    return build


# Cheap tables.
RULES.builder(
    aten.scalar_tensor.default,
    aten.linspace.default,
    aten.eye.default,
    aten.eye.m,
    aten.tril_indices.default,
    aten.triu_indices.default,
)(_made_whole("computed whole"))


@RULES.builder(aten.tril.default, aten.triu.default, pads=True)
def triangle(node: Node) -> OpSpec:
    """... m n -> ... m n | m, n"""
    x = operands(node)[0].meta["val"]
    sizes = {f"d{i}": int(n) for i, n in enumerate(x.shape)}
    dims = tuple((f,) for f in sizes)
    whole = frozenset(f for (f,) in dims[-2:])
    return OpSpec(sizes, (dims,), (dims,), whole=whole, linear=x.dtype.is_floating_point)


@RULES.builder(aten.broadcast_tensors.default, pads=True)
def broadcast_tensors(node: Node) -> OpSpec:
    """d0 1, d1 -> d0 d1, d0 d1"""
    out = results(node)[0]
    sizes = {f"d{i}": int(n) for i, n in enumerate(out.shape)}
    dims = tuple((f,) for f in sizes)
    inputs = []
    for o in operands(node):
        shape = o.meta["val"].shape
        aligned = zip(dims[len(dims) - len(shape) :], shape, strict=True)
        inputs.append(tuple(d if int(n) == sizes[d[0]] else () for d, n in aligned))
    return OpSpec(sizes, tuple(inputs), (dims,) * len(results(node)))


@RULES.builder(aten.meshgrid.indexing, aten.meshgrid.default)
def meshgrid(node: Node) -> OpSpec:
    """d0, d1 -> d0 d1, d0 d1"""
    lengths = [int(o.meta["val"].numel()) for o in operands(node)]
    sizes = {f"d{i}": n for i, n in enumerate(lengths)}
    inputs = tuple(((f"d{i}",),) * o.meta["val"].dim() for i, o in enumerate(operands(node)))
    order = list(range(len(lengths)))
    if argument(node, "indexing") == "xy" and len(order) > 1:
        order[:2] = [1, 0]
    dims = tuple((f"d{i}",) for i in order)
    return OpSpec(sizes, inputs, (dims,) * len(results(node)))
