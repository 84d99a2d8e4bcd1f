"""What the end-to-end tests share: grids, models by name, and comparisons with one device that are made once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from autopar3d.testing import Comparison, trains_like_one_device
from tests.models import MODELS, Inputs

Sizes = tuple[int, int, int]

GLOO_GRIDS: list[Sizes] = [(2, 2, 2), (8, 1, 1), (1, 8, 1), (1, 1, 8), (4, 2, 1), (1, 2, 2)]
SIMULATED_GRIDS: list[Sizes] = [(4, 4, 4), (2, 3, 4), (1, 1, 1)]

# These upcast to float32 inside (norms, softmax, the loss of GPT-2), float64 weights or not.
_SINGLE_INSIDE = ("gpt2", "llama", "t5")


class _Double(TorchFunctionMode):
    """Makes float64 of every float32 that code asks for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        args, kwargs = tree_map(lambda x: torch.float64 if x is torch.float32 else x, (args, kwargs or {}))
        return func(*args, **kwargs)


class InDouble(nn.Module):
    """A float64 model without float32 inside.

    HuggingFace's Llama and T5 compute norms and attention weights in float32 whatever the model's dtype, so that a
    float64 model is equal to 1e-7 only, and after AdamW, which divides a gradient by its own size, to 1e-5 or so.
    With these upcasts turned into float64, the same graph can be held to 1e-10.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with _Double():
            return self.model(*args, **kwargs)


def case(name: str, dtype: torch.dtype = torch.float64) -> tuple[Callable[[], nn.Module], Inputs]:
    """A builder of the model, the same weights at every call, and a batch for it."""
    make, inputs = MODELS[name]
    if name in _SINGLE_INSIDE and dtype == torch.float64:
        return (lambda: InDouble(make(dtype))), inputs(dtype)
    return (lambda: make(dtype)), inputs(dtype)


def simulated(name: str, grid: Sizes, dtype: torch.dtype = torch.float64, steps: int = 5, **options: str) -> Comparison:
    """The model, trained on a simulated grid beside one device; made once, for all tests that look at it."""
    return _simulated(name, grid, dtype, steps, tuple(sorted(options.items())))


@cache
def _simulated(
    name: str, grid: Sizes, dtype: torch.dtype, steps: int, options: tuple[tuple[str, str], ...]
) -> Comparison:
    make, (args, kwargs) = case(name, dtype)
    return trains_like_one_device(make, args, grid, example_kwargs=kwargs, steps=steps, **dict(options))
