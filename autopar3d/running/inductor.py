"""backend="inductor": emitted graphs compiled by torch's inductor, their order kept.

A graph is compiled when it first runs, for the strides that it is given; an edited graph is compiled anew. Collectives
stay calls of the same ops, so what is behind them (`transport`) is the same too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from ..errors import PlanError
from ..private import FakeTensorMode, inductor

# Inductor may fuse what waits for the same collectives, and what the overlap pass put in order stays so. (By default it
# moves gathers to their waits, to have less memory alive, and fuses the two lanes' kernels, so that one lane would wait
# for the other's collectives.)
_OPTIONS = {"reorder_for_peak_memory": False, "reorder_for_compute_comm_overlap": False}


@dataclass(frozen=True)
class _Compiled:
    code: str  # of the graph, as it was compiled
    strides: tuple[tuple[int, ...], ...]
    run: Callable[[list[Any]], Sequence[Any]]


class Inductor:
    """Runs graphs compiled."""

    def __init__(self) -> None:
        self._made: weakref.WeakKeyDictionary[GraphModule, _Compiled] = weakref.WeakKeyDictionary()

    def run(self, graph: GraphModule, values: Sequence[Any]) -> list[Any]:
        """The results of a graph.

        Raises:
            PlanError: inductor cannot compile it.
        """
        made = self._made.get(graph)
        if made is None or made.code != graph.code:
            made = self._made[graph] = _compile(graph, values)
        # Code is made for certain strides; other ones (of a new output's gradient, say) are copied into them.
        fitted = [
            v if not isinstance(v, Tensor) or v.stride() == stride else _with_stride(v, stride)
            for v, stride in zip(values, made.strides, strict=True)
        ]
        with torch.no_grad():
            return list(made.run(fitted))


def _with_stride(value: Tensor, stride: tuple[int, ...]) -> Tensor:
    return torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device).copy_(value)


def _compile(graph: GraphModule, values: Sequence[Any]) -> _Compiled:
    run, _ = compile_graph(graph, values)
    return _Compiled(graph.code, tuple(v.stride() if isinstance(v, Tensor) else () for v in values), run)


def compile_graph(graph: GraphModule, values: Sequence[Any]) -> tuple[Callable[[list[Any]], Sequence[Any]], str]:
    """Inductor's function of a list of inputs, and its source.

    Args:
        values: inputs, of which shapes, strides, dtypes and devices are read.
    """
    config, compile_inner, decompositions, apart = inductor()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with mode, torch.no_grad():
            fakes = [
                torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) if isinstance(v, Tensor) else v
                for v in values
            ]
            lowered = make_fx(graph, decomposition_table=decompositions())(*fakes)
            with config.patch(_OPTIONS), apart():
                made = compile_inner(lowered, fakes)
    except Exception as error:
        raise PlanError(
            f'backend="inductor" could not compile a graph of {len(graph.graph.nodes)} nodes: {error}; '
            'use backend="eager"'
        ) from error
    return made, str(getattr(made, "source_code", ""))
