"""The CTC loss. torch's own ops have results of a size that depends on the lengths; this one has a loss per sample."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from .core import RULES, OpSpec, operands

aten = torch.ops.aten


@torch.library.custom_op("autopar3d::ctc_losses", mutates_args=())
def ctc_losses(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    """The CTC loss of each sample.

    Args:
        log_probs: (time, samples, classes).
        targets: (samples, longest), or all in one row, (sum of target_lengths,).
    """
    losses = aten._ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)[0]
    return torch.where(losses == torch.inf, 0.0, losses) if zero_infinity else losses


@ctc_losses.register_fake
def _(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1])


@torch.library.custom_op("autopar3d::ctc_losses_backward", mutates_args=())
def _backward(
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    """The gradient of `log_probs`; what torch saves in forward is computed again, for its size is not known before."""
    rest = (input_lengths, target_lengths, blank, zero_infinity)
    losses, alpha = aten._ctc_loss(log_probs, targets, *rest)
    return aten._ctc_loss_backward(
        grad.contiguous(), log_probs, targets, input_lengths, target_lengths, losses, alpha, blank, zero_infinity
    )


@_backward.register_fake
def _(grad: Tensor, log_probs: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(log_probs)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.blank, ctx.zero_infinity = inputs
    ctx.save_for_backward(*tensors)


def _gradient(ctx: Any, grad: Tensor) -> Any:
    return _backward(grad, *ctx.saved_tensors, ctx.blank, ctx.zero_infinity), None, None, None, None, None


ctc_losses.register_autograd(_gradient, setup_context=_keep)


@RULES.builder(torch.ops.autopar3d.ctc_losses.default)
def per_sample(node: Node) -> OpSpec:
    """t n c, n s, n, n -> n | t c s"""
    log_probs, targets, *_ = (o.meta["val"] for o in operands(node))
    t, n, c = map(int, log_probs.shape)
    sizes = {"t": t, "n": n, "c": c, "s": int(targets.shape[-1])}
    whole = {"t", "c", "s"}
    if targets.dim() == 1:  # where a sample's targets begin depends on the lengths of those before
        whole.add("n")
    rows = (("s",),) if targets.dim() == 1 else (("n",), ("s",))
    lengths = (("n",),)
    return OpSpec(sizes, ((("t",), ("n",), ("c",)), rows, lengths, lengths), ((("n",),),), whole=frozenset(whole))
