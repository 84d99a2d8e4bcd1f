"""What torch computes by looking at values, or out of the tracer's sight, in a form that a graph can hold."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autopar3d.errors import TraceError
from autopar3d.private import add_batch_dim, distribution_checks, remove_batch_dim
from autopar3d.rules.ctc import ctc_losses


@contextlib.contextmanager
def substitutes(model: nn.Module) -> Iterator[None]:
    """While a model is traced: the same results from torch's own modules and, with `Functions`, functions.

    - gaussian_nll_loss checks for a negative variance, ctc_loss takes lengths as Python numbers;
    - distributions check their arguments, which is left out;
    - rrelu and multinomial draw numbers of their own: here by ops whose draws are the same on every grid;
    - vmap moves its dim in a way that is not traced;
    - nn.TransformerEncoder and nn.TransformerDecoder look whether a mask is causal, which only picks a kernel;
    - a batch norm with momentum=None divides by the number of batches that it has seen.
    """
    hooks = []
    for module in model.modules():
        for kind, name in ((nn.TransformerEncoder, "is_causal"), (nn.TransformerDecoder, "tgt_is_causal")):
            if isinstance(module, kind):
                taken_as_given = functools.partial(_not_known_to_be_causal, name)
                hooks.append(module.register_forward_pre_hook(taken_as_given, with_kwargs=True))
        if isinstance(module, _BATCH_NORMS) and module.momentum is None and module.track_running_stats:
            average = _CumulativeAverage()
            hooks += [module.register_forward_pre_hook(average.before), module.register_forward_hook(average.after)]
    checks = distribution_checks()
    torch.distributions.Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        torch.distributions.Distribution.set_default_validate_args(checks)
        for handle in hooks:
            handle.remove()


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class Functions(TorchFunctionMode):
    """Entered around a model's forward while it is traced, inside of the tracer's own modes: see `substitutes`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _FUNCTIONS.get(func, func)(*args, **(kwargs or {}))


def _gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    if not isinstance(var, Tensor):
        var = torch.full_like(input, var)
    if var.size() != input.size() and input.size()[:-1] == var.size():
        var = var.unsqueeze(-1)
    # The floor takes no gradient away from var, as in torch.
    var = var + (var.detach().clamp(min=eps) - var.detach())
    loss = 0.5 * (var.log() + (input - target).square() / var)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    alone = log_probs.dim() == 2
    if alone:
        log_probs, targets = log_probs.unsqueeze(1), targets.unsqueeze(0) if targets.dim() == 1 else targets
    lengths = [
        given if isinstance(given, Tensor) else torch.tensor(given, dtype=torch.int64, device=targets.device)
        for given in (input_lengths, target_lengths)
    ]
    source, target = (given.reshape(-1).to(log_probs.device, torch.int64) for given in lengths)
    losses = ctc_losses(log_probs, targets.to(torch.int64), source, target, blank, zero_infinity)
    if reduction == "mean":
        return (losses / target.clamp(min=1).to(losses.dtype)).mean()
    return losses.sum() if reduction == "sum" else losses.squeeze(0) if alone else losses


def _rrelu(
    input: Tensor, lower: float = 1.0 / 8, upper: float = 1.0 / 3, training: bool = False, inplace: bool = False
) -> Tensor:
    slope = torch.empty_like(input).uniform_(lower, upper) if training else (lower + upper) / 2
    result = torch.where(input >= 0, input, input * slope)
    return input.copy_(result) if inplace else result


def _multinomial(input: Tensor, num_samples: int, replacement: bool = False, *, generator: Any = None) -> Tensor:
    """The first arrivals of exponential clocks, as torch itself draws without replacement."""
    if generator is not None:
        raise TraceError("torch.multinomial with a generator of its own would draw other numbers on each rank")
    weights = input.detach()
    if not replacement:
        return (weights / torch.empty_like(weights).exponential_()).topk(num_samples).indices
    each = weights.unsqueeze(-2).expand(*weights.shape[:-1], num_samples, weights.shape[-1])
    return (each / torch.empty_like(each).exponential_()).argmax(-1)


# The moves of vmap's dim in the open: torch's own are not traced.


def _add_batch_dim(self: Tensor, batch_dim: int, level: int) -> Tensor:
    return add_batch_dim(self.movedim(batch_dim, 0), 0, level)


def _remove_batch_dim(self: Tensor, level: int, batch_size: int, out_dim: int) -> Tensor:
    return remove_batch_dim(self, level, batch_size, 0).movedim(0, out_dim)


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    F.gaussian_nll_loss: _gaussian_nll_loss,
    F.ctc_loss: _ctc_loss,
    F.rrelu: _rrelu,
    torch.multinomial: _multinomial,
    Tensor.multinomial: _multinomial,
    add_batch_dim: _add_batch_dim,
    remove_batch_dim: _remove_batch_dim,
}


def _not_known_to_be_causal(name: str, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    known = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    return (args, kwargs) if known.get(name) is not None else (args, kwargs | {name: False})


class _CumulativeAverage:
    """Running statistics that are the mean of all batches': the batch's own first, then mixed in with 1 / count."""

    def before(self, module: Any, args: Any) -> None:
        self.old = [] if not module.training else [module.running_mean.clone(), module.running_var.clone()]
        module.momentum = 1.0

    def after(self, module: Any, args: Any, output: Any) -> None:
        module.momentum = None
        for old, running in zip(self.old, (module.running_mean, module.running_var), strict=False):
            share = 1.0 / module.num_batches_tracked.to(running.dtype)
            running.copy_((1.0 - share) * old + share * running)
