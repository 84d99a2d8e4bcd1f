"""Calls of any length through few plans: inputs are padded to the next of some lengths, outputs cut back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ..capture.pytrees import flatten_input, flatten_output
from ..errors import InputError
from ..module import ParallelModule
from ..private import tree_unflatten


def few_lengths(
    par: ParallelModule, lengths: Sequence[int], *, dim: int = 1, fill: Mapping[str, float] | None = None
) -> Callable[..., Any]:
    """`par`, called at the next of some lengths: a model that generates is planned once a length here, not once a
    token.

    The pads come last along the dim. So what is computed at the true places is right for a causal model as it is, and
    for others where an input says what counts, as an `attention_mask` padded with 0 does. What is computed at the pads
    is cut off.

    Args:
        lengths: to pad to, in any order.
        dim: of the inputs that has the length: that of the first tensor; inputs of another size there are left alone.
        fill: value of the pads by path, as in {"kwargs['labels']": -100}; 0 for others.

    Returns:
        a function that is called as `par`. It raises InputError for a longer input, for an output without the padded
        length, which may depend on the pads (a loss, a mean), and with inputs="sharded".
    """
    if not lengths or min(lengths) < 1:
        raise InputError(f"lengths={tuple(lengths)}: give one or more, each at least 1")

    def call(*args: Any, **kwargs: Any) -> Any:
        if par.__dict__["_ap3d"].engine.executor.sharded_inputs:
            raise InputError('few_lengths pads whole inputs; compile with inputs="global"')
        leaves, spec = flatten_input(args, kwargs)
        path, first = next(((p, t) for p, t in leaves if isinstance(t, Tensor) and t.dim() > dim), ("", None))
        if first is None:
            raise InputError(f"no input has a dim {dim} to pad")
        length = first.shape[dim]
        if length > max(lengths):
            raise InputError(
                f"input {path} has length {length} in dim {dim}, more than the largest of {tuple(lengths)}"
            )
        target = min(n for n in lengths if n >= length)
        given = [_padded(t, dim, length, target, (fill or {}).get(p, 0)) for p, t in leaves]
        args, kwargs = tree_unflatten(given, spec)
        found, out_spec = flatten_output(par(*args, **kwargs))
        return tree_unflatten([_cut(p, t, dim, length, target) for p, t in found], out_spec)

    return call


def _padded(leaf: Any, dim: int, length: int, target: int, value: float) -> Any:
    if not isinstance(leaf, Tensor) or leaf.dim() <= dim or leaf.shape[dim] != length:
        return leaf
    return F.pad(leaf, (*(0, 0) * (leaf.dim() - 1 - dim), 0, target - length), value=value)


def _cut(path: str, leaf: Any, dim: int, length: int, target: int) -> Any:
    if not isinstance(leaf, Tensor) or length == target:
        return leaf
    if leaf.dim() <= dim or leaf.shape[dim] != target:
        raise InputError(
            f"output{path} of shape {tuple(leaf.shape)} has not the padded length {target} in dim {dim}, so it may "
            "depend on the pads: compute it from the outputs that have the length"
        )
    return leaf.narrow(dim, 0, length)
