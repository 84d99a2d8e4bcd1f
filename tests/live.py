"""The bytes that are really alive while one rank runs an emitted graph: what predictions of memory are held against.

The graph runs on CPU, node by node, each value freed after its last reader. Every storage that any op makes is seen as
it comes (a dispatch mode) and as it goes (a weak reference), so aliases, copies inside an op and hidden results count
as they are, whatever the planner believes of them. Of a collective only the sizes are true: there is one rank. What it
reads stays alive until it is waited for.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopar3d.grid import Grid

c10d = torch.ops._c10d_functional


class Live(TorchDispatchMode):
    """Counts bytes alive, from `hold` and from all ops that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.hold(out)
        return out

    def hold(self, values: Any) -> None:
        for t in tree_leaves(values):
            if isinstance(t, Tensor):
                self._see(t.untyped_storage())
        self.peak = max(self.peak, self.now)

    def _see(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self.known:
            self.known[key] = weakref.ref(storage, lambda _: self._lose(key, size))
            self.now += size

    def _lose(self, key: int, size: int) -> None:
        del self.known[key]
        self.now -= size


class _Rank(Interpreter):
    """One rank's run; collectives give values of the right shape."""

    def __init__(self, module: GraphModule, grid: Grid) -> None:
        super().__init__(module)
        self.sizes = {grid.alias(a): grid.axis_size(a) for a in "xyz"}
        self.in_flight: dict[int, Any] = {}  # by the result of a start: what it reads

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is c10d.wait_tensor.default:
            self.in_flight.pop(id(args[0]), None)
            return args[0]
        if target is torch.ops.autopar3d.axis_index.default:
            return torch.zeros(1, dtype=torch.int64)
        if getattr(target, "namespace", "") != "_c10d_functional":
            return super().call_function(target, args, kwargs)
        made = [self._result(target, t, args) for t in args[0]] if isinstance(args[0], list) else None
        out = self._result(target, args[0], args) if made is None else made
        for t in tree_leaves(out):
            self.in_flight[id(t)] = (t, args[0])
        return out

    def _result(self, target: Any, t: Tensor, args: Any) -> Tensor:
        n, name = self.sizes[args[-1]], target._opname
        if name.startswith("all_gather"):
            return t.new_zeros(t.shape[0] * n, *t.shape[1:])
        if name.startswith("reduce_scatter"):
            return t.new_zeros(t.shape[0] // n, *t.shape[1:])
        if name.startswith("all_to_all"):
            return t.new_zeros(sum(args[1]), *t.shape[1:])
        return torch.zeros_like(t)


def run_alone(module: GraphModule, grid: Grid, arguments: Sequence[Any], *counters: Live) -> Sequence[Any]:
    """The results of a graph on one rank, counted. `arguments` belong to the caller and stay alive."""
    with ExitStack() as stack:
        for counter in counters:
            counter.hold(list(arguments))
            stack.enter_context(counter)
        return _Rank(module, grid).run(*arguments)  # type: ignore[no-any-return]


def arguments_like(module: GraphModule) -> list[Tensor]:
    """Zeros in the place of a graph's arguments."""

    def zeros(node: Node) -> Tensor:
        val = node.meta["val"]
        return torch.zeros(tuple(val.shape), dtype=val.dtype)

    return [zeros(n) for n in module.graph.nodes if n.op == "placeholder"]
