"""One planned call, ready to run: its outer graph, which takes a user's tensors in and gives the results out."""

from __future__ import annotations

import copy
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from autopar3d.private import tree_unflatten

from ..capture.pytrees import flatten_input
from ..counter import RandomState
from ..errors import InputError, StateError
from ..layout import Layout
from ..passes.defer import Deferred
from ..passes.differentiate import Differentiated
from ..step import Step
from . import tree
from .deferral import Deferral
from .execute import Entered, Executor, run_step

if TYPE_CHECKING:
    from ..plan import Plan

Leaves = list[tuple[str, Any]]  # path and value of each leaf of a call's (args, kwargs)


class Maker(Protocol):
    """Makes more graphs of a step: the compiler."""

    def with_seeds(self, step: Step, seeds: tuple[int, ...]) -> Step:
        """The step with graphs for gradients that flow from these results."""
        ...

    def deferred(self, step: Step, seeds: tuple[int, ...]) -> Deferred:
        """The backward graph for these gradients, in two."""
        ...


class Prepared:
    """A step, ready to be called: its outer graph, and the graphs for other seeds once they were needed."""

    def __init__(self, step: Step, plan: Plan, leaves: Leaves, maker: Maker) -> None:
        self.step, self.plan, self.leaves = step, plan, leaves
        self.outer: GraphModule = GraphModule(nn.Module(), Graph())
        self.maker = maker
        self.deferral = Deferral()  # the module's, once bound
        self.has_run = False
        self._variants = {step.runs.tangents: step.runs}
        self._deferred: dict[tuple[int, ...], Deferred] = {}

    def switch(self, seeds: tuple[int, ...]) -> Differentiated:
        """Graphs for gradients that flow from these results; the next call runs them, expecting the same again."""
        if seeds not in self._variants:
            self._variants[seeds] = self.maker.with_seeds(self.step, seeds).runs
        self.step = replace(self.step, runs=self._variants[seeds])
        return self.step.runs

    def deferred(self) -> Deferred:
        """The backward graph in two, for gradients that flow from where they flow now."""
        seeds = self.step.runs.tangents
        if seeds not in self._deferred:
            self._deferred[seeds] = self.maker.deferred(self.step, seeds)
        return self._deferred[seeds]

    def copied(self) -> Prepared:
        """A copy with graphs of its own."""
        runs = self.step.runs
        backward = None if runs.backward is None else copy.deepcopy(runs.backward)
        own = replace(
            runs,
            forward=copy.deepcopy(runs.forward),
            backward=backward,
            inference=copy.deepcopy(runs.inference),
        )
        return Prepared(replace(self.step, runs=own), self.plan, self.leaves, self.maker)


def stand_ins(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Leaves:
    """The leaves of a call, tensors without their values."""
    leaves, _ = flatten_input(args, kwargs)
    return [
        (path, torch.empty(tuple(x.shape), dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x)
        for path, x in leaves
    ]


def bind(module: nn.Module, prepared: Prepared, executor: Executor) -> None:
    """Build the outer graph of a step: inputs, their shards, one call of the two graphs, outputs."""
    step, prepared.deferral = prepared.step, module.__dict__["_ap3d"].deferral
    graph = Graph()
    shards = []
    pairs = zip(step.program.arguments, step.argument_layouts, strict=True)
    inputs = [(argument.node, layout) for argument, layout in pairs if argument.kind == "input"]
    placeholders = [graph.placeholder(name) for name, _ in inputs]
    for placeholder, (name, layout) in zip(placeholders, inputs, strict=True):
        shard = _Shard(executor, layout)
        shards.append(graph.call_function(shard, (placeholder, str(layout)), name=f"{name}_local"))
    run = graph.call_function(_RunGraphs(module, prepared, executor), tuple(shards), name="run")
    results = [r for r in step.program.results if r.node is not None and r.kind == "output"]
    graph.output(tuple(graph.call_function(operator.getitem, (run, i)) for i in range(len(results))))
    prepared.outer = GraphModule(nn.Module(), graph)


class _Shard:
    """Node of the outer graph: this rank's part of an input."""

    def __init__(self, executor: Executor, layout: Layout) -> None:
        self.executor, self.layout = executor, layout
        self.__name__, self.__qualname__ = "shard", "shard"

    def __repr__(self) -> str:
        return f"shard as {self.layout}"

    def __call__(self, tensor: Tensor, layout: str) -> Tensor | Entered:
        # One that wants a gradient must stay a tensor until autograd has seen it.
        return tensor if tensor.requires_grad else Entered(self.executor.enter_input(tensor, self.layout))


class _RunGraphs:
    """Node of the outer graph: forward_graph now, backward_graph when gradients come."""

    def __init__(self, module: nn.Module, prepared: Prepared, executor: Executor) -> None:
        self.prepared, self.executor = prepared, executor
        self.__name__, self.__qualname__ = "forward_and_backward", "forward_and_backward"
        program = prepared.step.program
        self.arguments = program.arguments
        values = {n.name: n.meta["val"] for n in program.graph.graph.nodes if n.op == "placeholder"}
        # Of what the module holds, as it was planned.
        self.shapes: list[torch.Size | None] = [
            values[a.node].shape if a.kind in ("parameter", "buffer") else None for a in program.arguments
        ]
        results = [r for r in program.results if r.node is not None]
        self.outputs = [i for i, r in enumerate(results) if r.kind == "output"]
        self.updated = {i: tree.slot(module, r.name) for i, r in enumerate(results) if r.kind == "buffer"}
        names = {r.name for r in results if r.kind == "buffer"}
        self.changing = [i for i, a in enumerate(program.arguments) if names & set(a.names)]
        # Per argument of the program: a table and a key in it, a constant, the source of the key of random numbers, or
        # None for the next input.
        self.slots: list[tree.Slot | Tensor | RandomState | None] = []
        for argument in program.arguments:
            if argument.kind == "input":
                self.slots.append(None)
            elif argument.kind == "constant":
                self.slots.append(program.constants[argument.node])
            elif argument.kind == "key":
                self.slots.append(module.__dict__["_ap3d"].random)
            else:
                self.slots.append(tree.slot(module, argument.names[0]))

    def __repr__(self) -> str:
        return self.__name__

    def __call__(self, *shards: Any) -> list[Tensor]:
        given = iter(shards)
        tensors: list[Any] = [
            next(given)
            if s is None
            else s[0].get(s[1])
            if isinstance(s, tuple)
            else s.next()
            if isinstance(s, RandomState)
            else s
            for s in self.slots
        ]
        self._refuse_strangers(tensors)
        for i in self.changing:
            # Backward may need the values from before the update.
            tensors[i] = tensors[i].clone()
        results = run_step(self.prepared, self.executor, tensors, grad=torch.is_grad_enabled())
        with torch.no_grad():
            for i, (table, leaf) in self.updated.items():
                table[leaf].copy_(results[i])
        return [results[i] for i in self.outputs]

    def _refuse_strangers(self, tensors: Sequence[Any]) -> None:
        """Raise StateError where the module no longer holds what was planned."""
        for argument, shape, tensor in zip(self.arguments, self.shapes, tensors, strict=True):
            if shape is not None and (tensor is None or tensor.shape != shape):
                now = "gone" if tensor is None else f"of shape {tuple(tensor.shape)}"
                raise StateError(
                    f"{argument.names[0]} is {now}; planned was {tuple(shape)}. Change the model (its sizes, "
                    "parametrizations, pruning, weight or spectral norm), and compile it again"
                )


def rebuild(step: Step, flat: Sequence[Tensor]) -> Any:
    """The model's own return value from the flat tensors."""
    tensors = iter(flat)
    leaves = [r.value if r.node is None else next(tensors) for r in step.program.results if r.kind == "output"]
    return tree_unflatten(leaves, step.program.out_spec)


def refuse_places(leaves: Leaves, device: torch.device) -> None:
    wrong = [(p, t.device) for p, t in leaves if isinstance(t, Tensor) and t.device.type != device.type]
    if wrong:
        path, place = wrong[0]
        raise InputError(f"input {path} is on {place}, the parameters are on {device}; move it there before the call")


def refuse_differences(given: Leaves, planned: Leaves, error: Exception) -> None:
    """Raise InputError if a call that failed differs from the one that was planned, and say where."""
    old, new = dict(planned), dict(given)
    found = [f"{path} is missing; planned was {_kind(old[path])}" for path in old if path not in new]
    for path, leaf in new.items():
        if path not in old:
            found.append(f"{path} is {_kind(leaf)}; nothing was planned there")
        elif _kind(leaf) != _kind(old[path]):
            found.append(f"{path} is {_kind(leaf)}; planned was {_kind(old[path])}")
    if found:
        listed = "\n  ".join(found)
        raise InputError(f"the call differs from the one planned:\n  {listed}\nand as it is, {error}") from error


def _kind(leaf: Any) -> str:
    return f"{leaf.dtype} {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)
