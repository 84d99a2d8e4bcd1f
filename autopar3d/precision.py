"""Mixed precision: parameters are kept, and updated, in their own dtype, and computed with in a lower one.

The graphs are those of a model in the lower dtype, so gathers, activations and products are low. Each step casts this
rank's shards as they enter, and casts gradients back as they leave.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .errors import PlanError
from .private import tree_map_only


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes of a model's steps; `None` leaves what it concerns as it is.

    Attributes:
        parameters: of parameters while computing, and so of what is computed from them. Floating inputs are cast to it.
            Buffers are not.
        reduce: in which gradients of parameters are summed over ranks; by default the same. A wider one sends more.
        outputs: to which floating outputs of the model are cast, before `loss_fn`.
    """

    parameters: torch.dtype | None = None
    reduce: torch.dtype | None = None
    outputs: torch.dtype | None = None

    @classmethod
    def of(cls, given: MixedPrecision | torch.dtype | None) -> MixedPrecision:
        """A dtype alone is that of `parameters`.

        Raises:
            PlanError: neither, or a dtype that is not floating.
        """
        made = cls(given) if given is None or isinstance(given, torch.dtype) else given
        if not isinstance(made, MixedPrecision):
            raise PlanError(f"mixed_precision={given!r} is neither a dtype nor an autopar3d.MixedPrecision")
        for name in ("parameters", "reduce", "outputs"):
            dtype = getattr(made, name)
            if dtype is not None and dtype not in _FLOATING:
                raise PlanError(
                    f"mixed_precision: {name}={dtype} is not one of {', '.join(str(d) for d in _FLOATING)}"
                    + ("; float8 needs scales that no graph here keeps" if "float8" in str(dtype) else "")
                )
        return made

    def computes_in(self, tensor: Tensor) -> torch.dtype:
        """The dtype of a parameter while computing."""
        return self.parameters if self.parameters is not None and tensor.is_floating_point() else tensor.dtype

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """`forward` with inputs and outputs cast."""
        if self.parameters is None and self.outputs is None:
            return forward

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = tree_map_only(Tensor, lambda t: _cast(t, self.parameters), (args, kwargs))
            return tree_map_only(Tensor, lambda t: _cast(t, self.outputs), forward(*args, **kwargs))

        return run


Autocast = tuple[tuple[str, torch.dtype], ...]
"""Per device type for which autocast is on, the dtype."""

_DEVICES = ("cpu", "cuda")


def ambient() -> Autocast:
    """Of the code that is running."""
    return tuple((d, torch.get_autocast_dtype(d)) for d in _DEVICES if torch.is_autocast_enabled(d))


@contextlib.contextmanager
def autocast(wanted: Autocast) -> Iterator[None]:
    """Within, autocast is on for these and off for all other devices."""
    on = dict(wanted)
    with contextlib.ExitStack() as stack:
        for device in _DEVICES:
            if device in on:
                stack.enter_context(torch.autocast(device, on[device]))
            elif torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


_FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
