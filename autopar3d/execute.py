"""Running a step: on this rank (`RankExecutor`), or on every rank of the grid in this process (`LockstepExecutor`).

Both run the same two graphs inside one `autograd.Function`, so that `loss.backward()` works as users know it. What
differs is only how a tensor enters (its shard, or a list of all shards) and how a result leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule

from .dtensor import placements, to_dtensor
from .grid import Grid
from .layout import Layout
from .lockstep import run_lockstep
from .passes.differentiate import Differentiated
from .step import Step

# Makes the graphs for gradients that flow from other results than was planned for.
Variant = Callable[[tuple[int, ...]], Differentiated]


class Executor(Protocol):
    """How values enter, run and leave; `Value` is a local tensor, or one per rank."""

    def enter(self, tensor: Tensor, layout: Layout) -> Any: ...

    def run(self, graph: GraphModule, values: Sequence[Any]) -> list[Any]: ...

    def leave(self, value: Any, layout: Layout, shape: tuple[int, ...]) -> Tensor: ...

    def seed(self, cotangent: Tensor, layout: Layout) -> Any: ...

    def gradient(self, value: Any, layout: Layout, like: Tensor) -> Tensor: ...


class Entered(NamedTuple):
    """An input that has entered already (one without a gradient): its shard, or all of them."""

    value: Any


def enter(executor: Executor, tensor: Tensor | Entered, layout: Layout) -> Any:
    """The value of an argument inside."""
    return tensor.value if isinstance(tensor, Entered) else executor.enter(tensor, layout)


class LockstepExecutor:
    """Full tensors outside, one tensor per rank inside."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def enter(self, tensor: Tensor, layout: Layout) -> list[Tensor]:
        return [layout.shard(tensor, self.grid, rank).contiguous() for rank in range(self.grid.size)]

    def run(self, graph: GraphModule, values: Sequence[Any]) -> list[Any]:
        out = run_lockstep(graph, self.grid, values)
        return [list(column) for column in zip(*out, strict=True)]

    def leave(self, value: list[Tensor], layout: Layout, shape: tuple[int, ...]) -> Tensor:
        return layout.assemble(value, shape, self.grid)

    def seed(self, cotangent: Tensor, layout: Layout) -> list[Tensor]:
        return self.enter(cotangent, layout)

    def gradient(self, value: list[Tensor], layout: Layout, like: Tensor) -> Tensor:
        return layout.assemble(value, like.shape, self.grid)


def run_step(
    step: Step, executor: Executor, tensors: Sequence[Tensor | Entered], variant: Variant, *, grad: bool
) -> list[Tensor]:
    """The results of one call.

    Args:
        tensors: per argument of the program the tensor the module holds or was given.
        grad: whether a backward may follow; without it nothing is kept.
    """
    if grad and step.runs.backward is not None:
        return list(_Run.apply(step, executor, variant, *tensors))
    with torch.no_grad():
        values = [enter(executor, t, lay) for t, lay in zip(tensors, step.argument_layouts, strict=True)]
        return _leave(step, executor, executor.run(step.runs.inference, values))


def _leave(step: Step, executor: Executor, values: Sequence[Any]) -> list[Tensor]:
    return [
        executor.leave(v, lay, step.result_shape(i))
        for i, (v, lay) in enumerate(zip(values, step.local.results, strict=True))
    ]


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: Step, executor: Executor, variant: Variant, *tensors: Tensor | Entered) -> Any:
        values = [enter(executor, t, lay) for t, lay in zip(tensors, step.argument_layouts, strict=True)]
        outs = executor.run(step.runs.forward, values)
        ctx.step, ctx.executor, ctx.variant = step, executor, variant
        results, ctx.saved = outs[: step.runs.results], outs[step.runs.results :]
        # Inputs by reference, for a backward that nobody planned; parameters are alive anyway.
        ctx.tensors = tensors
        ctx.set_materialize_grads(False)
        left = _leave(step, executor, results)
        fixed = [t for i, t in enumerate(left) if i not in step.runs.differentiable]
        ctx.mark_non_differentiable(*fixed)
        return tuple(left)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        step, executor, runs = ctx.step, ctx.executor, ctx.step.runs
        given = tuple(i for i, c in enumerate(cotangents) if c is not None)
        saved = ctx.saved
        if saved is None:
            raise RuntimeError("backward a second time: the activations of this call are freed; call the module again")
        ctx.saved = None
        if given != runs.tangents:
            # Gradients flow from other results than planned for: their graphs, and their forward once more.
            runs = ctx.variant(given)
            values = [enter(executor, t, lay) for t, lay in zip(ctx.tensors, step.argument_layouts, strict=True)]
            saved = executor.run(runs.forward, values)[runs.results :]
        seeds = [executor.seed(cotangents[i], step.local.results[i]) for i in runs.tangents]
        grads: list[Tensor | None] = [None] * len(ctx.tensors)
        if runs.backward is not None:
            out = executor.run(runs.backward, [*saved, *seeds])
            for number, value in zip(runs.gradients, out, strict=True):
                grads[number] = executor.gradient(value, step.argument_layouts[number], ctx.tensors[number])
        return (None, None, None, *grads)


class RankExecutor:
    """This rank's part of each tensor, collectives over the mesh's process groups.

    Args:
        mesh: the grid's mesh, with the groups registered under the grid's aliases (see `runtime.connect`).
        index: this rank's position in the grid.
        sharded_inputs: whether plain tensors arrive as this rank's part already.
    """

    def __init__(self, grid: Grid, mesh: DeviceMesh, index: int, *, sharded_inputs: bool) -> None:
        self.grid, self.mesh, self.index, self.sharded_inputs = grid, mesh, index, sharded_inputs

    def enter(self, tensor: Tensor, layout: Layout) -> Tensor:
        if isinstance(tensor, DTensor):
            return tensor.to_local()
        if self.sharded_inputs or not layout.sharding_axes:
            return tensor
        return layout.shard(tensor, self.grid, self.index).contiguous()

    def run(self, graph: GraphModule, values: Sequence[Any]) -> list[Any]:
        return list(graph(*values))

    def leave(self, value: Tensor, layout: Layout, shape: tuple[int, ...]) -> Tensor:
        return to_dtensor(value, layout, shape, self.grid, self.mesh) if layout.sharding_axes else value

    def seed(self, cotangent: Tensor, layout: Layout) -> Tensor:
        if not isinstance(cotangent, DTensor):
            return cotangent
        wanted = placements(layout, self.grid)
        if tuple(cotangent.placements) != wanted:
            cotangent = cotangent.redistribute(placements=wanted)
        return cotangent.to_local()

    def gradient(self, value: Tensor, layout: Layout, like: Tensor) -> Tensor:
        return to_dtensor(value, layout, tuple(like.shape), self.grid, self.mesh) if isinstance(like, DTensor) else value
