"""What a user passes in a call, checked before anything is traced."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from ..errors import InputError
from .pytrees import flatten_input, register_caches


def examples_of(
    example_inputs: Any, example_kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The (args, kwargs) of the call that example inputs stand for.

    Raises:
        InputError: they are no arguments, or hold what is no tensor and no plain value.
    """
    if example_kwargs is not None and not isinstance(example_kwargs, Mapping):
        raise InputError(
            f"example_kwargs= is a {type(example_kwargs).__name__}; it must be a dict of keyword arguments, such as "
            '{"labels": labels}; positional ones go into example_inputs='
        )
    unnamed = [key for key in example_kwargs or {} if not isinstance(key, str)]
    if unnamed:
        raise InputError(f"example_kwargs= has the key {unnamed[0]!r}; keys are the names of keyword arguments")
    args = example_inputs if isinstance(example_inputs, (tuple, list)) else (example_inputs,)
    found = () if example_inputs is None else tuple(args), dict(example_kwargs or {})
    register_caches()
    flatten_input(*found)  # refuses what is no tensor, and no plain value
    return found


def described(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Of a call, the shapes of its inputs."""
    leaves = [(path, leaf) for path, leaf in flatten_input(args, kwargs)[0] if isinstance(leaf, Tensor)]
    shown = ", ".join(f"{path} {tuple(leaf.shape)}" for path, leaf in leaves[:4])
    return f"a call with {shown}{', ...' if len(leaves) > 4 else ''}" if leaves else ""


def check_call(
    model: nn.Module, loss_fn: Callable[..., Tensor] | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raise InputError where these are not what the model's forward and the loss take.

    Args:
        kwargs: with a loss, `targets` among them are the loss's.
    """
    _check_targets(model, loss_fn, kwargs)
    _check_arguments(model, loss_fn, args, {k: v for k, v in kwargs.items() if k != "targets" or loss_fn is None})


def _check_targets(model: nn.Module, loss_fn: Callable[..., Tensor] | None, kwargs: dict[str, Any]) -> None:
    """Raise InputError where targets and loss_fn do not go together."""
    if loss_fn is None:
        if "targets" in kwargs and not _takes(model.forward, **kwargs):
            raise InputError(
                "targets= was passed, but there is no loss to use them: give compile loss_fn=, or pass what "
                f"{type(model).__name__}.forward takes"
            )
        return
    targets = kwargs.get("targets", ())
    if not isinstance(targets, tuple):
        what = "a tensor" if isinstance(targets, Tensor) else f"a {type(targets).__name__}"
        raise InputError(f"targets= got {what}; pass a tuple, as in targets=(labels,): loss_fn(output, *targets)")
    if not _takes(loss_fn, None, *targets):
        name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        raise InputError(
            f"loss_fn {name}{_signature(loss_fn)} is called as loss_fn(output, *targets), here with "
            f"{len(targets)} targets: pass targets=(...) with each call, and as an example in example_kwargs="
        )


def _check_arguments(
    model: nn.Module, loss_fn: Callable[..., Tensor] | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raise InputError where the model's forward takes other arguments."""
    forward = model.forward
    try:
        inspect.signature(forward).bind(*args, **kwargs)
    except TypeError as error:
        name = type(model).__name__
        given = ", ".join([*(f"args[{i}]" for i in range(len(args))), *(f"{key}=" for key in kwargs)])
        advice = (
            "; a dict of keyword arguments goes into example_kwargs="
            if args and isinstance(args[0], Mapping)
            else "; a loss's targets go with loss_fn= into targets=(...)"
            if loss_fn is None and "too many" in str(error)
            else ""
        )
        raise InputError(f"{name}.forward{_signature(forward)} is called with ({given}): {error}{advice}") from error
    except ValueError:  # no signature: written in C
        return


def _takes(function: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Whether these arguments, and perhaps others before them, fit a function; True where that cannot be known."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind_partial(**kwargs) if kwargs else signature.bind(*args)
    except TypeError:
        return False
    return True


def _signature(function: Callable[..., Any]) -> str:
    """The names of a function's arguments, without types, for a message."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return ""
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))
