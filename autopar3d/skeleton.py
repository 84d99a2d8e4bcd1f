"""The structure of a user's model without its tensors, from which any new input shape or mode can be traced."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from autopar3d.private import FakeTensorMode, tree_map_only

from .capture.hooks import ParameterHooks
from .errors import TraceError
from .passes.canonicalize import canonicalize
from .passes.randomize import randomize
from .passes.trace import trace
from .precision import Autocast, MixedPrecision, autocast
from .program import Program


class Skeleton:
    """A copy of a model whose parameters and buffers are fake, on the device where they will live.

    Args:
        model: the user's module; it is neither changed nor kept.
        device: where parameters of a meta model will live.
        loss_fn: `loss_fn(output, *targets)`, put inside the graph; `targets` is then a keyword of the call.
        precision: the parameters are of the dtype in which they are computed with, inputs and outputs are cast.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        loss_fn: Callable[..., Tensor] | None = None,
        precision: MixedPrecision = MixedPrecision(),  # noqa: B008  (frozen)
    ) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.hooks = ParameterHooks.of(model)
        memo: dict[int, Any] = {}
        with self.mode:
            for tensor in (*model.parameters(), *model.buffers()):
                place = device if tensor.is_meta else tensor.device
                dtype = precision.computes_in(tensor) if isinstance(tensor, nn.Parameter) else tensor.dtype
                fake: Tensor = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=place)
                memo[id(tensor)] = (
                    nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
                )
            for value in [v for module in model.modules() for v in vars(module).values()]:
                if isinstance(value, Tensor) and not value.is_leaf:  # computed anew in forward, by a hook say
                    memo[id(value)] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        self.model: nn.Module = copy.deepcopy(model, memo)
        # The dtypes of parameters that are computed with in another, by name.
        _refuse_empty_attributes(model)
        kept = {name: p.dtype for name, p in model.named_parameters(remove_duplicate=False)}
        now = self.model.named_parameters(remove_duplicate=False)
        self.stored = {name: kept[name] for name, p in now if kept[name] != p.dtype}
        for module in self.model.modules():
            # Those of forward are part of what the model computes; those of backward would see the tracer's gradients.
            if module._backward_hooks or module._backward_pre_hooks:
                raise TraceError(
                    f"{type(module).__name__} has a backward hook (register_full_backward_hook), which a compiled "
                    "graph cannot call: remove it, or hook the parameters of the compiled model (register_hook)"
                )
        self.model.forward = precision.around(self.model.forward)
        if loss_fn is not None:
            self.model.forward = _with_loss(self.model.forward, loss_fn)

        self.autocast: Autocast = ()  # around the whole call
        self.model.forward = self._autocast(self.model.forward)

    def _autocast(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not self.autocast:
                return forward(*args, **kwargs)
            with autocast(self.autocast):
                return forward(*args, **kwargs)

        return run

    def modes(self) -> dict[str, bool]:
        """train/eval flag by module path."""
        return {path: module.training for path, module in self.model.named_modules()}

    def trace(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        modes: dict[str, bool],
        trainable: dict[str, bool],
        *,
        by_place: bool = True,
    ) -> Program:
        """The canonical program of one call; tensors may be real, fake or meta, only shape and dtype are read.

        Args:
            modes: train/eval flag by module path.
            trainable: requires_grad by parameter name.
            by_place: whether random ops become functions of their place, or stay torch's own.

        Raises:
            TraceError: the model cannot be made a graph.
        """
        for path, module in self.model.named_modules():
            module.training = modes.get(path, module.training)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(trainable.get(name, parameter.requires_grad))
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        fake_args, fake_kwargs = tree_map_only(Tensor, lambda t: self._fake(t, device), (args, kwargs))
        program = canonicalize(trace(self.model, fake_args, fake_kwargs, self.hooks))
        if self.stored:
            arguments = tuple(replace(a, stored=self.stored.get(a.names[0])) for a in program.arguments)
            program = replace(program, arguments=arguments)
        return randomize(program) if by_place else program

    def _fake(self, tensor: Tensor, device: torch.device) -> Tensor:
        with self.mode:
            place = device if tensor.is_meta else tensor.device
            fake = torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device=place)
        return fake.requires_grad_(tensor.requires_grad)


def _refuse_empty_attributes(model: nn.Module) -> None:
    """Raise if a plain tensor attribute is on meta: nothing would ever give it values."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                raise TraceError(
                    f"{f'{path}.{name}'.removeprefix('.')} is a plain tensor attribute on meta, which has no values, "
                    "and nothing gives it any. Make it a buffer (register_buffer) that the model initialises, or make "
                    "it on a real device"
                )


def _with_loss(forward: Callable[..., Any], loss_fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*args: Any, targets: Sequence[Any] = (), **kwargs: Any) -> Tensor:
        return loss_fn(forward(*args, **kwargs), *targets)

    return run
