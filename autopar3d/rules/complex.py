"""Complex numbers as pairs of real ones, and Fourier transforms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from .core import RULES, Dims, OpSpec, argument, operands, results
from .lowering import again

aten = torch.ops.aten

LAZY: dict[Any, Any] = {aten._conj.default: aten._conj_physical.default, aten._neg_view.default: aten.neg.default}
"""Lazy forms and what computes them: some ops refuse a lazy form, and a graph shows no sign that it was resolved."""


def as_complex(x: Tensor) -> Tensor:
    """Whatever its strides: a gathered tensor may have any."""
    return torch.view_as_complex(x.contiguous())


@RULES.builder(aten.view_as_complex.default, aten.view_as_real.default, pads=True)
def pairs(node: Node) -> OpSpec:
    """... 2 -> ... and back; the pair stays whole"""
    to_complex = node.target is aten.view_as_complex.default
    real = operands(node)[0].meta["val"] if to_complex else results(node)[0]
    sizes = {f"d{i}": int(n) for i, n in enumerate(real.shape)}
    dims: Dims = tuple((f,) for f in sizes)
    inputs, outputs = (dims, dims[:-1]) if to_complex else (dims[:-1], dims)
    return OpSpec(
        sizes,
        (inputs,),
        (outputs,),
        whole=frozenset({f"d{real.dim() - 1}"}),
        linear=True,
        lower=lambda op: (as_complex, op.args, {}) if to_complex else again(op),
    )


_ONE = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
_MANY = ("fft2", "ifft2", "rfft2", "irfft2", "fftn", "ifftn", "rfftn", "irfftn")


@RULES.builder(*(getattr(aten, f"fft_{name}").default for name in (*_ONE, *_MANY)), pads=True)
def transform(node: Node) -> OpSpec:
    """... n -> ... m | n, m: the dims that are transformed stay whole"""
    x, out = operands(node)[0].meta["val"], results(node)[0]
    given = argument(node, "dim")
    lengths = argument(node, "s")
    if given is None:
        given = list(range(x.dim()))[-len(lengths) if lengths else 0 :]
    over = {d % x.dim() for d in ([given] if isinstance(given, int) else given)}
    sizes: dict[str, int] = {}
    before: list[tuple[str, ...]] = []
    after: list[tuple[str, ...]] = []
    for i, (n, m) in enumerate(zip(x.shape, out.shape, strict=True)):
        names = (f"n{i}", f"m{i}") if i in over else (f"d{i}", f"d{i}")
        sizes.update({names[0]: int(n), names[1]: int(m)})
        before.append((names[0],))
        after.append((names[1],))
    whole = frozenset(f for f in sizes if f[0] in "nm")
    return OpSpec(sizes, (tuple(before),), (tuple(after),), whole=whole)
