"""Elementwise ops. Any op that torch itself tags as pointwise gets its rule here, so there is no list to keep."""

from __future__ import annotations

import torch
from torch.fx import Node

from ..capture.functions import FunctionCall
from ..private import OpOverload
from .core import RULES, Dims, OpRule, OpSpec, argument, operands, results

aten = torch.ops.aten

# f(a + b) = f(a) + f(b) in every tensor operand together: partial sums pass through.
_ADDITIVE = {aten.add.Tensor, aten.sub.Tensor, aten.neg.default, aten.clone.default, aten.alias.default}
# Linear in the first operand when the second is a number.
_SCALING = {aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar}
# Elementwise without torch's tag.
_MORE = (
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.contiguous.default,
    aten.lift_fresh_copy.default,
    aten._to_copy.default,
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
    aten.type_as.default,
    aten.where.self,
    aten.where.ScalarSelf,
    aten.where.ScalarOther,
    aten.where.Scalar,
    aten.masked_fill.Scalar,
    aten.fill.Scalar,
    aten.fill.Tensor,
    aten.masked_fill.Tensor,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.empty_like.default,
    aten.full_like.default,
    aten.isnan.default,
    aten.isinf.default,
    aten.isfinite.default,
    aten.silu.default,
    aten.gelu.default,
    aten.mish.default,
    aten.selu.default,
    aten.relu6.default,
    aten.hardswish.default,
    aten.real.default,
    aten.imag.default,
    aten.conj.default,
    aten._conj.default,
    aten.polar.default,
    aten.complex.default,
    aten.floor_divide.default,
    aten.floor_divide.Scalar,
    aten.logical_and.default,
    aten.logical_or.default,
    aten.logical_not.default,
    aten.__and__.Tensor,
    aten.__or__.Tensor,
)


def broadcast_dims(tensor: torch.Tensor, out: torch.Tensor) -> Dims:
    """Factors of an operand that broadcasts to `out`, whose dim i is factor `d{i}`."""
    lead = out.dim() - tensor.dim()
    return tuple(() if int(n) == 1 else (f"d{lead + i}",) for i, n in enumerate(tensor.shape))


def pointwise(node: Node) -> OpSpec:
    """each result element depends on the operands' elements at its place (operands broadcast)"""
    out = results(node)[0]
    sizes = {f"d{i}": int(n) for i, n in enumerate(out.shape)}
    tensors = [o.meta["val"] for o in operands(node)]
    inputs = tuple(broadcast_dims(t, out) for t in tensors)
    output = broadcast_dims(out, out)
    return OpSpec(
        sizes, inputs, (output,) * len(results(node)), linear=_is_linear(node, tensors), padded=frozenset(sizes)
    )


def _is_linear(node: Node, tensors: list[torch.Tensor]) -> bool:
    out = results(node)[0]
    if not out.dtype.is_floating_point or any(t.dtype != out.dtype or t.shape != out.shape for t in tensors):
        return False
    if node.target in _SCALING:
        return len(tensors) == 1
    if node.target in (aten.add.Tensor, aten.sub.Tensor):
        return len(tensors) == 2 and argument(node, "alpha", 1) is not None
    return node.target in _ADDITIVE


@RULES.builder(aten.prelu.default, pads=True)
def prelu(node: Node) -> OpSpec:
    """n c ..., c -> n c ... (one slope a channel, or one for all)"""
    x, weight = (o.meta["val"] for o in operands(node))
    sizes = {f"d{i}": int(n) for i, n in enumerate(x.shape)}
    dims: Dims = tuple((f,) for f in sizes)
    if weight.numel() == 1:
        sizes["one"] = 1
        slopes: Dims = (("one",),) * weight.dim()
    else:
        slopes = (("d1",),)
    return OpSpec(sizes, (dims, slopes), (dims,))


POINTWISE = OpRule(pointwise, pointwise.__doc__ or "")
for _op in _MORE:
    RULES[_op] = POINTWISE


def rule_for(target: object) -> OpRule | None:
    """The rule of an op: its own line, or the pointwise rule when torch tags the op so.

    A custom `autograd.Function` has the rule of its class, or the pointwise rule where it was found elementwise.
    """
    if isinstance(target, FunctionCall):
        return RULES.get(target.cls) or (POINTWISE if target.elementwise else None)
    own = RULES.get(target)
    return POINTWISE if own is None and is_tagged(target) else own


def is_tagged(target: object) -> bool:
    """Whether torch says that an op is pointwise."""
    return isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags


def is_pointwise(target: object) -> bool:
    """Whether an op has the pointwise rule."""
    return rule_for(target) is POINTWISE
