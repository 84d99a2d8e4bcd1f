"""Tensors that share memory, where a user may change one in place.

What is kept for backward may lie in the memory of an input, a buffer or an output; autograd cannot see that, as it sees
one function. And a graph may give one value as the gradient of several parameters (of two biases that are added),
which `clip_grad_norm_` scales in place, each one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from .dtensor import local

Span = tuple[int, int]  # first and last address


def version(tensor: Tensor) -> int:
    """How often the elements were changed in place, here or through a view."""
    held = _plain(tensor)
    return 0 if held.is_inference() else held._version


def versions(values: Iterable[Any]) -> list[int]:
    """Of all tensors among values, which may be one per rank."""
    return [version(t) for t in _tensors(values)]


def share(a: Any, b: Any) -> bool:
    """Whether two values lie in the same storage."""
    storages = [{_plain(t).untyped_storage().data_ptr() for t in _tensors([v])} for v in (a, b)]
    return bool(storages[0] & storages[1])


def own_outputs(outputs: Sequence[Tensor], kept: Iterable[Any]) -> list[Tensor]:
    """Outputs that may be changed in place as those of any module.

    autograd refuses changes to a view that a function returns. A view is no longer one here; where others lie in its
    memory, it is copied.

    Args:
        kept: values that are needed as they are.
    """
    if not any(_is_view(t) for t in outputs):
        return list(outputs)
    taken = [span for t in _tensors(kept) if (span := _span(t))]
    found = []
    for i, output in enumerate(outputs):
        own = output
        if _is_view(output):
            others = taken + [span for t in (*outputs[:i], *outputs[i + 1 :]) if (span := _span(t))]
            mine = _span(output)
            own = output.data if mine and not any(_overlap(mine, span) for span in others) else output.clone()
        found.append(own)
    return found


def own_gradients(gradients: Sequence[Any], others: Iterable[Any]) -> list[Any]:
    """Gradients in memory that no other of them has, nor any of the others, nor one of their own elements twice.

    Args:
        gradients: local tensors; what is one per rank is left alone, as it is assembled in new memory.
    """
    mine = [(span, i) for i, t in enumerate(gradients) if isinstance(t, Tensor) and (span := _span(t))]
    if not mine:
        return list(gradients)
    found = list(gradients)
    last, end = -1, 0
    spans = mine + [(span, -1) for t in _tensors(others) if (span := _span(t))]
    for span, i in sorted(spans):
        if span[0] < end:
            for j in (i, last):
                if j >= 0:
                    found[j] = gradients[j].clone()
        if span[1] > end:
            last, end = i, span[1]
    return [t.contiguous() if isinstance(t, Tensor) and _repeats(t) else t for t in found]


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _plain(tensor: Tensor) -> Tensor:
    return local(tensor) if isinstance(tensor, DTensor) else tensor


def _is_view(tensor: Tensor) -> bool:
    return not isinstance(tensor, DTensor) and tensor._is_view()


def _span(tensor: Tensor) -> Span | None:
    """The addresses between which the elements lie; None where there are none."""
    held = _plain(tensor)
    start = held.data_ptr() if held.numel() else 0
    if not start:
        return None
    if held.is_contiguous():
        return start, start + held.nbytes
    reach = sum((n - 1) * s for n, s in zip(held.shape, held.stride(), strict=True))
    return start, start + (reach + 1) * held.element_size()


def _overlap(a: Span, b: Span) -> bool:
    return a[0] < b[1] and b[0] < a[1]


def _repeats(tensor: Tensor) -> bool:
    """Whether an element of the memory is several of the tensor."""
    return (
        tensor.numel() > 1
        and not tensor.is_contiguous()
        and math.prod(n for n, s in zip(tensor.shape, tensor.stride(), strict=True) if s) < tensor.numel()
    )
