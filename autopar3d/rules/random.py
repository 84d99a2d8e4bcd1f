"""Random numbers and dropout: each element's number depends on its place in the whole tensor, see `counter`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ..collectives import coordinate
from ..counter import draw_op, row_width
from .core import RULES, LocalOp, Lowered, OpSpec, argument, results
from .pointwise import pointwise

aten = torch.ops.aten
draw = torch.ops.autopar3d.draw.default
assert draw is draw_op._opoverload


def draw_part(
    key: Tensor,
    number: int,
    what: str,
    p: float,
    size: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    width: int,
    stride: Sequence[int],
    axes: Sequence[tuple[str, int]],
    shape: Sequence[int],
) -> Tensor:
    """The local part of a draw; `axes` are (group name, how far one step along it is)."""
    # On the CPU, where the number is read when the draw is launched.
    at = [coordinate(group, torch.device("cpu")) for group, _ in axes]
    part = draw(key, number, what, p, size, dtype, device, width, stride, at, [weight for _, weight in axes])
    return part if list(shape) == list(size) else part.reshape(list(shape))


@RULES.builder(draw)
def drawn(node: Node) -> OpSpec:
    """key -> d0 d1"""
    sizes = {"key": 2} | {f"d{i}": int(n) for i, n in enumerate(results(node)[0].shape)}
    dims = tuple((f,) for f in sizes if f != "key")
    return OpSpec(
        sizes,
        ((("key",),),),
        (dims,),
        whole=frozenset({"key"}),
        padded=frozenset(sizes) - {"key"},
        lower=_lower_draw,
    )


def _lower_draw(op: LocalOp) -> Lowered:
    if not any(op.axes_of.values()) and not op.spec.true:
        return op.node.target, op.args, dict(op.kwargs)
    size: list[int] = []
    strides: list[int] = []
    axes: list[tuple[str, int]] = []
    stride = 1
    for factor in reversed(op.spec.atoms(op.spec.outputs[0])):
        local = op.spec.sizes[factor]
        for axis in op.axes_of.get(factor, ()):
            local //= op.grid.axis_size(axis)
            axes.append((op.grid.alias(axis), local * stride))
        size.insert(0, local)
        strides.insert(0, stride)
        stride *= op.spec.true.get(factor, op.spec.sizes[factor])
    key, number, what, p, shape, dtype, device = op.args
    width = row_width(shape)
    return draw_part, (key, number, what, p, size, dtype, device, width, strides, axes, list(op.out_shape())), {}


class _Dropped(torch.autograd.Function):
    """x * keep * scale in one pass over memory, and the same for its gradient; torch's own derivative takes three."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(keep)
        ctx.scale = scale
        return aten.native_dropout_backward(x, keep, scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (keep,) = ctx.saved_tensors
        return aten.native_dropout_backward(grad, keep, ctx.scale), None, None


def dropped(x: Tensor, keep: Tensor, scale: float) -> Tensor:
    """Dropout with a given mask."""
    return _Dropped.apply(x, keep, scale)


@RULES.builder(aten.native_dropout_backward.default, pads=True)
def dropout(node: Node) -> OpSpec:
    """d0 d1, d0 d1 -> d0 d1"""
    return replace(pointwise(node), lower=_lower_dropout)


def _lower_dropout(op: LocalOp) -> Lowered:
    return dropped, (op.args[0], op.args[1], argument(op.node, "scale")), {}
