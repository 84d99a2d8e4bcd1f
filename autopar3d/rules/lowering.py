"""What lowerings share: sums over several axes, places of a shard's elements, arguments by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..collectives import chunk, reduce, reduce_max
from ..private import assert_async
from .core import Exchange, LocalOp, Lowered, operands

Groups = Sequence[tuple[str, int]]  # (group name, size), outer axis first
Pieces = Sequence[tuple[int, Groups]]  # a factor as finer ones, outer first: (global length, the axes over it)

_HALF = (torch.float16, torch.bfloat16)

# -- in the local program ------------------------------------------------------------------------------------


def psum(x: Tensor, groups: Groups, varying: bool) -> Tensor:
    """Sum over the axes; `varying`: what reads it differs along them, so its gradient is summed as well."""
    for name, _ in groups:
        x = reduce(x, name, varying)
    return x


def pmax(x: Tensor, groups: Groups) -> Tensor:
    """Largest value over the axes (no gradient)."""
    x = x.detach()
    for name, _ in groups:
        x = reduce_max(x, name)
    return x


def positions(pieces: Pieces, device: torch.device) -> Tensor:
    """The global index of every local element of a factor, ascending."""
    found = torch.zeros([1], dtype=torch.int64, device=device)
    for length, groups in pieces:
        start, n = chunk(length, groups, device)
        digit = torch.arange(n, device=device) + start
        found = (found[:, None] * length + digit).reshape(-1)
    return found


@torch.library.custom_op("autopar3d::in_range", mutates_args=())
def in_range(index: Tensor, length: int) -> Tensor:
    """A copy of the index; raises where it points outside of `length` things, which no rank would notice on its own.

    Raises:
        IndexError: it does, on CPU; on other devices an assertion of the device fails, as in torch.
    """
    if index.device.type != "cpu":
        assert_async(((index >= 0) & (index < length)).all(), "an index is out of range")
    elif index.numel() and (int(index.min()) < 0 or int(index.max()) >= length):
        bad = index[(index < 0) | (index >= length)].flatten()
        raise IndexError(f"index {int(bad[0])} is out of range: there are {length} rows or classes, from 0")
    return index.clone()


@in_range.register_fake
def _(index: Tensor, length: int) -> Tensor:
    return torch.empty_like(index)


def locate(index: Tensor, pieces: Pieces, length: int) -> tuple[Tensor, Tensor]:
    """For global indices into a factor: (local index, is it here?). Elsewhere the local index is 0.

    Args:
        length: of the factor, without pads; indices beyond raise.
    """
    index = in_range(index, length)
    stride = 1
    here = torch.ones_like(index, dtype=torch.bool)
    local, width = torch.zeros_like(index), 1
    for length, groups in reversed(pieces):
        start, n = chunk(length, groups, index.device)
        digit = torch.div(index, stride, rounding_mode="floor") % length - start
        here = here & (digit >= 0) & (digit < n)
        local = local + digit * width
        stride, width = stride * length, width * n
    return torch.where(here, local, torch.zeros_like(local)), here


def widen(x: Tensor) -> Tensor:
    """Half precision is summed in fp32, as torch's own kernels do."""
    return x.float() if x.dtype in _HALF else x


# -- for building it -----------------------------------------------------------------------------------------


def pieces_of(op: LocalOp, factor: str) -> list[tuple[int, list[tuple[str, int]]]]:
    """A factor's pieces as plain arguments for `positions` and `locate`."""
    grid = op.grid
    return [
        (op.spec.sizes[f], [(grid.alias(a), grid.axis_size(a)) for a in op.axes_of.get(f, ())])
        for f in op.pieces(factor)
    ]


def given(op: LocalOp, name: str) -> Any:
    """An argument of the local op by its schema name; tensors are the local operands."""
    for i, arg in enumerate(op.node.target._schema.arguments):  # type: ignore[union-attr]
        if arg.name == name:
            if name in op.kwargs:
                return op.kwargs[name]
            return op.args[i] if i < len(op.args) else arg.default_value
    return None


def again(op: LocalOp, **changes: Any) -> Lowered:
    """The op itself on local operands, with some arguments changed."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    keep = 0  # trailing arguments at their defaults are left out
    for arg in op.node.target._schema.arguments:  # type: ignore[union-attr]
        value = changes[arg.name] if arg.name in changes else given(op, arg.name)
        default = arg.has_default_value() and _same(value, arg.default_value)
        if not arg.kwarg_only:
            args.append(value)
            keep = keep if default else len(args)
        elif not default or arg.name in op.kwargs:
            kwargs[arg.name] = value
    return op.node.target, tuple(args[:keep]), kwargs


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and not isinstance(a, Tensor) and bool(a == b)


def all_reduces(
    op: LocalOp,
    factors: Sequence[str],
    elements: float,
    forward: int = 1,
    backward: int = 0,
    dtype: torch.dtype | None = None,
) -> list[Exchange]:
    """`forward` and `backward` all_reduces over every axis of some factors.

    Backward ones run when the op's first operand needs a gradient; the planner knows whether it does.
    `dtype` is the computation's, the first operand's by default; half precision travels as fp32.
    """
    dtype = dtype or operands(op.node)[0].meta["val"].dtype
    dtype = torch.float32 if dtype in _HALF else dtype
    axes = op.axes(*factors)
    ahead = [Exchange("all_reduce", a, elements, dtype=dtype) for a in axes for _ in range(forward)]
    return ahead + [Exchange("all_reduce", a, elements, "backward", dtype) for a in axes for _ in range(backward)]
