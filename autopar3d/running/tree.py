"""The tree of parts: the user's modules reduced to what a parallel module keeps of them, under the same names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import StateError


class Part(nn.Module):
    """A submodule of the user's model, reduced to its parameters, buffers and train/eval flag."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        # Any plain attribute could be the name of one of the model's parameters.
        self.__dict__["_ap3d_kind"] = kind

    def _get_name(self) -> str:
        return str(self.__dict__["_ap3d_kind"])

    def __getitem__(self, key: int | str) -> nn.Module:
        """A part of a list, a sequence or a dict of modules, as in `par.blocks[0].eval()`."""
        return child(self, key)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Part:
        refuse_conversion(self, fn)
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise StateError(f"{self._get_name()} is part of a parallel module; call the whole module")


def child(module: nn.Module, key: int | str) -> nn.Module:
    """A submodule by its number or name."""
    names = list(module._modules)
    try:
        found = module._modules[names[key] if isinstance(key, int) else key]
    except KeyError:
        listed = ", ".join(names) or "none"
        raise KeyError(f"{module._get_name()} has no part {key!r}; it has {listed}") from None
    assert found is not None
    return found


def grow(root: nn.Module, model: nn.Module) -> None:
    """Give `root` parts like the model's modules, with the names of all tensors in the model's order, none held yet."""
    parts: dict[nn.Module, nn.Module] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        parent, _, leaf = path.rpartition(".")
        if path:
            # Straight into the tables: a part may be called `graph` or `code`, which attributes refuse. A module
            # that the model has twice is one part with two names.
            table = part(root, parent)._modules
            table[leaf] = parts.get(module) or Part(module._get_name())
        here = parts[module] = part(root, path)
        here.training = module.training
        here._parameters.update(dict.fromkeys(module._parameters))
        here._buffers.update(dict.fromkeys(module._buffers))
        here._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
        here.__dict__["_version"] = module._version  # some modules read old state dicts by it


def part(root: nn.Module, path: str) -> nn.Module:
    """The part at a path; `get_submodule` would find GraphModule's attributes first."""
    for leaf in path.split(".") if path else ():
        child = root._modules[leaf]
        assert child is not None
        root = child
    return root


Slot = tuple[dict[str, Any], str]


def slot(root: nn.Module, name: str) -> Slot:
    """The table and the key in it that hold a parameter or buffer."""
    path, _, leaf = name.rpartition(".")
    here = part(root, path)
    return (here._parameters if leaf in here._parameters else here._buffers), leaf


def held(root: nn.Module, *, persistent: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Every name of every parameter and buffer, a tied one under each of its names, in the order of `state_dict`.

    Args:
        persistent: leave out the buffers that `state_dict` leaves out.
    """
    for path, module in root.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and not (persistent and leaf in module._non_persistent_buffers_set):
                yield prefix + leaf, tensor


def refuse_conversion(root: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
    """Raise StateError for `.to()`, `.half()`, `.cuda()` and the like, unless they would change nothing."""
    for name, tensor in held(root):
        probe = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        made = fn(probe)
        if made.dtype != probe.dtype or made.device != probe.device:
            raise StateError(
                f"{name} cannot change to {made.dtype} on {made.device}: the parallel module's graphs are made for "
                f"{probe.dtype} on {probe.device}; convert the model, then compile it"
            )


Line = tuple[str, tuple[str, ...]]


def describe(root: nn.Module, label: Callable[[Tensor], str]) -> str:
    """The tree as text, one line a part and one a tensor.

    Neighbours of one form are one entry, as `0-11: 12 x Block`, whose tensors carry all their labels.
    """
    lines = [(root._get_name(), ()), *(("  " + text, labels) for text, labels in _lines(root, label))]
    return "\n".join(f"{text}  {' or '.join(labels)}".rstrip() for text, labels in lines)


def _lines(root: nn.Module, label: Callable[[Tensor], str]) -> list[Line]:
    lines: list[Line] = []
    for leaf, tensor in (*root._parameters.items(), *root._buffers.items()):
        if tensor is not None:
            shape = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
            lines.append((f"{leaf} {shape}", (label(tensor),)))
    runs: list[tuple[list[str], str, list[Line]]] = []
    for leaf, child in root._modules.items():
        if child is None:
            continue
        kind, below = child._get_name(), _lines(child, label)
        leaves, known, merged = runs[-1] if runs else ([], "", [])
        if kind == known and [text for text, _ in merged] == [text for text, _ in below]:
            leaves.append(leaf)
            merged[:] = [(text, tuple(dict.fromkeys(a + b))) for (text, a), (_, b) in zip(merged, below, strict=True)]
        else:
            runs.append(([leaf], kind, below))
    for leaves, kind, below in runs:
        name = leaves[0] if len(leaves) == 1 else f"{leaves[0]}-{leaves[-1]}"
        lines.append((f"{name}: {kind}" if len(leaves) == 1 else f"{name}: {len(leaves)} x {kind}", ()))
        lines += [("  " + text, labels) for text, labels in below]
    return lines
