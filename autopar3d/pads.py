"""Sizes that the grid does not divide: a factor is made longer, so that it is cut evenly.

Seven heads over four ranks are eight, of which the last rank holds one and a pad. In a local program a padded factor
has its padded length everywhere; `add` lengthens what comes in (arguments, and results of ops that must not see pads)
and `trim` shortens what goes out.

Three rules keep pads from leaking:

- A pad repeats the last true element, so that whatever is computed from it is as finite as the model is.
- Where an op mixes positions along a padded factor, `fill` first writes what does not count there: 0 into a sum, -inf
  into a softmax, the ignored label into a loss. Backwards it writes 0, so pads have no gradient.
- `add` passes no gradient through its pads.

`dim` and `outer` are as in `collectives`: the tensor's dim, and the length of what lies outside the factor there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .collectives import chunk, join_dim, split_dim


def add_pads(x: Tensor, dim: int, outer: int, length: int, padded: int) -> Tensor:
    """Lengthen a whole factor from `length` to `padded` by repeating its last element."""
    wide = split_dim(x, dim, outer, length)
    last = wide.narrow(dim + 1, length - 1, 1).detach()
    shape = [*wide.shape]
    shape[dim + 1] = padded - length
    return join_dim(torch.cat([wide, last.expand(shape)], dim + 1), dim)


def trim_pads(x: Tensor, dim: int, outer: int, length: int, padded: int) -> Tensor:
    """Shorten a whole factor from `padded` to `length`."""
    return join_dim(split_dim(x, dim, outer, padded).narrow(dim + 1, 0, length), dim)


def fill_pads(
    x: Tensor, dim: int, outer: int, length: int, padded: int, value: float, groups: Sequence[tuple[str, int]]
) -> Tensor:
    """Write `value` into the pads of a factor that is sharded over `groups` (group name, size), outer axis first."""
    start, local = chunk(padded, groups, x.device)
    wide = split_dim(x, dim, outer, local)
    true = torch.arange(local, device=x.device) + start < length
    shape = [local if i == dim + 1 else 1 for i in range(wide.dim())]
    return join_dim(torch.where(true.reshape(shape), wide, torch.full_like(wide, value)), dim)
