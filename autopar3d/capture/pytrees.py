"""What a model takes and returns, as pytrees: leaves, specs, and the classes torch does not know yet.

torch's pytree registry is global. This file adds to it, once a class, only what an output could not be
rebuilt without: dataclasses, and HuggingFace's key/value caches where `transformers` is imported anyway.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from autopar3d.errors import TraceError
from autopar3d.private import pytree

_PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device)


def flatten_output(output: Any) -> tuple[list[tuple[str, Any]], pytree.TreeSpec]:
    """The `(path, leaf)` pairs of a model's return value, paths like `['loss']`, and its spec.

    Every leaf is a tensor or a plain Python constant. Dataclasses met on the way are registered.

    Raises:
        TraceError: an object of a class that pytree cannot open; it is named, with the ways out.
    """
    leaves, spec = _flatten(output)
    _refuse_opaque("returns", [("output" + path, leaf) for path, leaf in leaves])
    return leaves, spec


def flatten_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[tuple[str, Any]], pytree.TreeSpec]:
    """The same of a call: paths like `args[0]` and `kwargs['labels']`, and the spec of `(args, kwargs)`."""
    leaves, spec = _flatten((args, kwargs))
    # A path begins with "[0]" in args and with "[1]" in kwargs.
    named = [("args" if path.startswith("[0]") else "kwargs") + path[3:] for path, _ in leaves]
    leaves = [(path, leaf) for path, (_, leaf) in zip(named, leaves, strict=True)]
    _refuse_opaque("is called with", leaves)
    return leaves, spec


def _flatten(tree: Any) -> tuple[list[tuple[str, Any]], pytree.TreeSpec]:
    while True:
        found, spec = pytree.tree_flatten_with_path(tree)
        new = {type(leaf) for _, leaf in found if dataclasses.is_dataclass(type(leaf))}
        if not new:
            return [(pytree.keystr(path), leaf) for path, leaf in found], spec
        for cls in new:
            torch.export.register_dataclass(cls)


def _refuse_opaque(verb: str, leaves: list[tuple[str, Any]]) -> None:
    for path, leaf in leaves:
        if isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise TraceError(
                f"the model {verb} a number that it read from a tensor ({path}), as .item() does; a graph has no such "
                "numbers: return the tensor itself"
            )
        if isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided:
            raise TraceError(
                f"the model {verb} a sparse tensor ({path}, {leaf.layout}), which no grid cuts; use {path}.to_dense()"
            )
        if isinstance(leaf, np.ndarray):
            raise TraceError(f"the model {verb} a numpy array ({path}); a graph takes tensors: torch.as_tensor({path})")
        if not isinstance(leaf, (torch.Tensor, *_PLAIN)):
            cls = type(leaf)
            raise TraceError(
                f"the model {verb} a {cls.__module__}.{cls.__qualname__} ({path}), which cannot be taken "
                "apart into tensors. Register it with torch.utils._pytree.register_pytree_node("
                f"{cls.__qualname__}, flatten, unflatten), or use tensors in tuples, dicts or dataclasses; "
                "if it is a cache, use_cache=False avoids it"
            )


def register_caches() -> None:
    """Register the cache classes of `transformers`, their layers included, if that package is imported.

    Classes that the user, or transformers itself, registered before are left as they are.
    """
    module = sys.modules.get("transformers.cache_utils")
    if module is None:
        return
    # Roots by name: they differ between versions of transformers, and what is missing cannot be in an output.
    roots = ("Cache", "CacheLayerMixin", "LinearAttentionCacheLayerMixin", "DummyLayer")
    for cls in _with_subclasses(getattr(module, name) for name in roots if hasattr(module, name)):
        if cls not in pytree.SUPPORTED_NODES:
            pytree.register_pytree_node(cls, _flatten_object, _rebuild_object, flatten_with_keys_fn=_flatten_with_keys)


@dataclasses.dataclass(frozen=True)
class _Shape:
    """Of an object that is taken apart by attributes: its class, those that are children, and the others."""

    cls: type
    children: tuple[str, ...]
    plain: tuple[tuple[str, Any], ...]


def _flatten_object(instance: Any) -> tuple[list[Any], _Shape]:
    held = vars(instance)
    children = [name for name, value in held.items() if not isinstance(value, (*_PLAIN, type))]
    plain = tuple((name, value) for name, value in held.items() if name not in children)
    return [held[name] for name in children], _Shape(type(instance), tuple(children), plain)


def _flatten_with_keys(instance: Any) -> tuple[list[tuple[Any, Any]], _Shape]:
    values, shape = _flatten_object(instance)
    return [(pytree.GetAttrKey(name), value) for name, value in zip(shape.children, values, strict=True)], shape


def _rebuild_object(values: Any, shape: _Shape) -> Any:
    instance: Any = object.__new__(shape.cls)  # a cache's __init__ wants a config and makes tensors of its own
    vars(instance).update(shape.plain)
    vars(instance).update(zip(shape.children, values, strict=True))
    return instance


def _with_subclasses(classes: Iterable[type]) -> Iterator[type]:
    for cls in classes:
        yield cls
        yield from _with_subclasses(cls.__subclasses__())
