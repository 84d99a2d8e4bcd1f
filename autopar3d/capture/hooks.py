"""Hooks on gradients (`Tensor.register_hook`), of parameters and of what forward computes: made part of the graph.

`torch.export` records forward only, and would lose them. `Hooks` records, for each, a `HookedGradient` of its tensor,
and `passes.trace` lets every reader of the tensor read that instead. Its forward changes nothing, and its backward is
the hook, so that the hook gets the sum of the gradients of all readers, as in eager.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import TraceError
from ..private import FakeTensor, FakeTensorMode, hooks_of, post_accumulate_hooks_of, tree_map_only


@dataclass(frozen=True)
class ParameterHooks:
    """The hooks of a model's parameters, which a copy of the model does not have.

    Attributes:
        by_name: the hooks in their order, by the parameter's name.
        held: the name of every parameter and buffer of the model that has the hooks, by its id.
    """

    by_name: Mapping[str, tuple[Callable[..., Any], ...]] = field(default_factory=dict)
    held: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module) -> ParameterHooks:
        """Those of `model`.

        Raises:
            TraceError: a parameter has a hook that no graph can call.
        """
        for name, p in model.named_parameters():
            if post_accumulate_hooks_of(p):
                raise TraceError(
                    f"the parameter {name} has a hook that runs when its gradient is accumulated "
                    "(register_post_accumulate_grad_hook), which a compiled graph cannot call; register it on the "
                    "parameters of the compiled model"
                )
        hooks = {name: hooks_of(p) for name, p in model.named_parameters()}
        held = {id(t): name for name, t in (*model.named_parameters(), *model.named_buffers())}
        return cls({name: found for name, found in hooks.items() if found}, held)


@dataclass(frozen=True, eq=False)
class Hook:
    """A hook, and the tensors that it reads beside the gradient."""

    function: Callable[..., Any]
    reads: tuple[Tensor, ...]

    def call(self, gradient: Tensor, instead: tuple[Tensor, ...]) -> Tensor:
        """What it makes of a gradient, with other tensors instead of those that it reads."""
        given = dict(zip(map(id, self.reads), instead, strict=True))
        with _Instead(lambda t: given.get(id(t), t)):
            changed: Tensor = self.function(gradient)
        return changed


class HookedGradient(torch.autograd.Function):
    """The tensor itself; backward is the hook."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, hook: Hook, *reads: Tensor) -> Tensor:
        ctx.hook = hook
        ctx.save_for_backward(*reads)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        reads = ctx.saved_tensors
        return ctx.hook.call(gradient, reads), None, *(None for _ in reads)


class Hooks(TorchFunctionMode):
    """Entered around a model's forward while it is traced.

    Attributes:
        made: a `HookedGradient` each: the graph must return them, or the tracer would drop what nobody reads.
    """

    def __init__(self, model: nn.Module, on_parameters: ParameterHooks) -> None:
        super().__init__()
        self.made: list[Tensor] = []
        self.model, self.on_parameters = model, on_parameters

    def register_all(self) -> None:
        """The parameters' hooks, as if forward registered them first."""
        for name, hooks in self.on_parameters.by_name.items():
            parameter = self.model.get_parameter(name)
            for hook in hooks if parameter.requires_grad else ():
                self._record(parameter, hook, f"the parameter {name}")

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is Tensor.register_hook:
            tensor, hook = (*args, *(kwargs or {}).values())
            self._record(tensor, hook, "a tensor in forward")
        return result

    def _record(self, tensor: Tensor, hook: Callable[..., Any], of: str) -> None:
        reads = _reads(tensor, hook, of)
        registered = dict((*self.model.named_parameters(), *self.model.named_buffers()))
        held = self.on_parameters.held
        own = tuple(registered[held[id(t)]] if id(t) in held else t for t in reads)
        self.made.append(HookedGradient.apply(tensor, Hook(hook, reads), *own))


def _reads(tensor: Tensor, hook: Callable[..., Any], of: str) -> tuple[Tensor, ...]:
    """The tensors beside the gradient that a hook reads."""
    found: dict[int, tuple[Tensor, Tensor]] = {}

    def instead(t: Tensor) -> Tensor:
        if isinstance(t, FakeTensor) and t.fake_mode is mode:
            return t
        if id(t) not in found:
            found[id(t)] = t, torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
        return found[id(t)][1]

    def run() -> Any:
        with mode:
            gradient = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
            with _Instead(instead), torch.no_grad():
                return hook(gradient)

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with ThreadPoolExecutor(1) as other:  # untraced: modes of tracing belong to their thread
            result = other.submit(run).result()
    except Exception as error:
        raise TraceError(
            f"the hook on {of} cannot be traced ({type(error).__name__}: {str(error).strip().splitlines()[0]}); it may "
            "compute with torch ops only, and look at no value"
        ) from error
    if not isinstance(result, Tensor):
        raise TraceError(
            f"the hook on {of} returns no gradient, but only looks at it, which a compiled graph cannot let it do; "
            "return the new gradient, or hook the parameters or outputs of the compiled model"
        )
    return tuple(t for t, _ in found.values())


class _Instead(TorchFunctionMode):
    """Within, torch's functions get other tensors."""

    def __init__(self, instead: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.instead = instead

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = tree_map_only(Tensor, self.instead, (args, kwargs or {}))
        return func(*given[0], **given[1])
