"""Values for a meta model, one submodule at a time, the same on every grid.

What a model's constructor would have filled in is filled in by the modules' own functions: `reset_parameters()` (or
`_reset_parameters()`, `init_weights()`, `_init_weights()` without arguments), then `_init_weights(module)` of the
nearest module above that has one, as HuggingFace's models and many GPTs do. A function may also reach down into
submodules, to scale their weights. So a submodule's tensors are made real, then its own functions and those of all
modules around it run, innermost first, with everything else on meta, where `torch.nn.init` does nothing.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


def initial_values(model: nn.Module, device: torch.device, seed: int) -> Iterator[tuple[str, Tensor, bool]]:
    """(name, values, whether all of it was written) of each parameter and buffer, under its first name.

    The values are overwritten for the next module: copy what is needed of them.

    Args:
        model: neither changed nor kept.
        device: where the values shall be made.
        seed: with a module's path it decides the module's random numbers.
    """
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = torch.empty_like(tensor, device="meta", requires_grad=False)
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    ghost: nn.Module = copy.deepcopy(model, memo)
    functions = dict(_functions(ghost))
    # One buffer for all modules in turn: blocks of changing sizes, taken and freed, would leave holes in the heap as
    # large as the model.
    scratch = torch.empty(max(map(_bytes, ghost.modules())), dtype=torch.uint8, device=device)
    seen: set[int] = set()
    for path, module in ghost.named_modules():
        with _made_real(module, scratch, seen) as made:
            if made:
                for around in _outwards(path):
                    with _seeded(f"{seed} {path} {around}", device), torch.no_grad():
                        _run(functions[around])
            yield from _filled(path, module, made)


def _filled(path: str, module: nn.Module, made: dict[str, Tensor]) -> Iterator[tuple[str, Tensor, bool]]:
    for leaf, tensor in _own(module):
        # A function may have put a new tensor there.
        if not tensor.is_meta:
            name = f"{path}.{leaf}" if path else leaf
            yield name, tensor.detach(), _is_written(tensor, made.get(leaf))


def _run(functions: list[Callable[[], Any]]) -> None:
    for function in functions:
        # It may ask for values that are on meta; then what follows is not written.
        with contextlib.suppress(RuntimeError, AttributeError):
            function()


def _outwards(path: str) -> Iterator[str]:
    """The path of a module and those of the modules around it."""
    yield path
    while path:
        path = path.rpartition(".")[0]
        yield path


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None:
            yield leaf, tensor


def _bytes(module: nn.Module) -> int:
    return sum(_padded(tensor) for _, tensor in _own(module))


def _padded(tensor: Tensor) -> int:
    return -(-tensor.nbytes // 64) * 64


@contextlib.contextmanager
def _made_real(module: nn.Module, scratch: Tensor, seen: set[int]) -> Iterator[dict[str, Tensor]]:
    """The module with its own tensors real, filled with NaN; those that came before, being tied, stay on meta."""
    before = dict(module._parameters), dict(module._buffers)
    made: dict[str, Tensor] = {}
    start = 0
    for leaf, tensor in list(_own(module)):
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        # `.data`, as a view would share the buffer's count of changes.
        real = scratch[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).data
        start += _padded(tensor)
        if real.is_floating_point() or real.is_complex():
            real.fill_(float("nan"))
        if isinstance(tensor, nn.Parameter):
            real = nn.Parameter(real, tensor.requires_grad)
        table: dict[str, Any] = module._parameters if leaf in module._parameters else module._buffers
        made[leaf] = table[leaf] = real
    try:
        yield made
    finally:
        module._parameters.update(before[0])
        module._buffers.update(before[1])
        made.clear()


@contextlib.contextmanager
def _seeded(what: str, device: torch.device) -> Iterator[None]:
    digest = hashlib.blake2b(what.encode(), digest_size=7).digest()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(int.from_bytes(digest, "big"))
        yield


def _functions(model: nn.Module) -> Iterator[tuple[str, list[Callable[[], Any]]]]:
    """By module path: what initialises it, in order."""
    per_module: dict[str, Callable[[nn.Module], Any] | None] = {"": None}
    for path, module in model.named_modules():
        found: list[Callable[[], Any]] = []
        own = getattr(module, "_init_weights", None)
        takes_module = callable(own) and _required(own) == 1
        for name in ("reset_parameters", "_reset_parameters", "init_weights", "_init_weights"):
            reset = getattr(module, name, None)
            # HuggingFace's init_weights() does to all submodules what its _init_weights(module) does to one.
            if callable(reset) and _required(reset) == 0 and not (takes_module and name == "init_weights"):
                found.append(reset)
                break
        per_module[path] = own if takes_module else per_module[path.rpartition(".")[0]]
        function = per_module[path]
        if function is not None:
            found.append(functools.partial(function, module))
        yield path, found


def _required(function: Callable[..., Any]) -> int:
    """How many arguments a call must have."""
    return sum(
        p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        for p in inspect.signature(function).parameters.values()
    )


def _is_written(tensor: Tensor, made: Tensor | None) -> bool:
    if tensor is not made:
        return True
    if tensor.is_floating_point() or tensor.is_complex():
        # The sum takes no memory, but infinities make it NaN too.
        return not bool(tensor.sum().isnan()) or not bool(tensor.isnan().any())
    return tensor._version > 0
