"""Running a step: on this rank (`RankExecutor`), or on every rank of the grid in this process (`LockstepExecutor`).

Both run the same two graphs inside one `autograd.Function`, so that `loss.backward()` works as users know it. What
differs is only how a tensor enters (its shard, or a list of all shards) and how a result leaves.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule
from torch.profiler import record_function

from ..errors import StateError
from ..grid import Grid
from ..layout import Layout
from ..passes.defer import Deferred
from ..passes.differentiate import Differentiated
from ..precision import ambient, autocast
from ..private import keeps_graph
from ..ranks import postmortem
from ..ranks.transport import DirectGroup
from ..step import Step
from .deferral import Deferral, Held
from .dtensor import like_parameter, local, placements, to_dtensor
from .inductor import Inductor
from .lockstep import run_lockstep
from .sharing import own_gradients, own_outputs, share, version, versions


class Executor(Protocol):
    """How values enter, run and leave; a value is a local tensor, or one per rank."""

    grid: Grid
    # Whether a call's tensors are this rank's part already.
    sharded_inputs: bool

    def store(self, tensor: Tensor, layout: Layout) -> Tensor:
        """A tensor that the module shall hold, copied from the whole tensor."""
        ...

    def enter(self, tensor: Tensor, layout: Layout) -> Any:
        """The value of a tensor that the module holds."""
        ...

    def enter_input(self, tensor: Tensor, layout: Layout) -> Any:
        """The value of an input of a call."""
        ...

    def run(
        self, graph: GraphModule, values: Sequence[Any], *, part: str = "", gradients: Sequence[Tensor] = ()
    ) -> list[Any]:
        """The results of a graph.

        Args:
            part: of a step, as "forward" or "backward".
            gradients: of a backward, those of outputs as they came.
        """
        ...

    def leave(self, value: Any, layout: Layout, shape: tuple[int, ...], *, sharded: bool) -> Tensor:
        """A result, as the user gets it."""
        ...

    def seed(self, cotangent: Tensor, layout: Layout) -> Any:
        """The value of the gradient of a result."""
        ...

    def gradient(self, value: Any, layout: Layout, like: Tensor) -> Tensor:
        """The gradient of an argument, as the user gets it."""
        ...


class Entered(NamedTuple):
    """An input that has entered already (one without a gradient): its shard, or all of them."""

    value: Any


class Source(Protocol):
    """Where a call takes its step from."""

    step: Step
    deferral: Deferral

    def deferred(self) -> Deferred:
        """The backward graph of `step` in two."""
        ...

    def switch(self, seeds: tuple[int, ...]) -> Differentiated:
        """Graphs for gradients that flow from these results, from now on in `step`."""
        ...


def run_step(source: Source, executor: Executor, tensors: Sequence[Tensor | Entered], *, grad: bool) -> list[Tensor]:
    """The results of one call.

    Args:
        tensors: per argument of the program the tensor the module holds or was given.
        grad: whether a backward may follow; without it nothing is kept.
    """
    step = source.step
    if grad and step.runs.backward is not None:
        return list(_Run.apply(source, executor, *tensors))
    with torch.no_grad():
        values = _entered(step, executor, tensors)
        return own_outputs(_leave(step, executor, _run(executor, "inference", step.runs.inference, values)), values)


def _run(
    executor: Executor, part: str, graph: GraphModule, values: Sequence[Any], gradients: Sequence[Tensor] = ()
) -> list[Any]:
    """A graph has the casts of the autocast that it was planned under; another one must not add to them."""
    if not ambient():
        return executor.run(graph, values, part=part, gradients=gradients)
    with autocast(()):
        return executor.run(graph, values, part=part, gradients=gradients)


def _entered(step: Step, executor: Executor, tensors: Sequence[Tensor | Entered]) -> list[Any]:
    values = [
        t.value if isinstance(t, Entered) else executor.enter(t, layout)
        for t, layout in zip(tensors, step.argument_layouts, strict=True)
    ]
    for number, dtype in step.lower.items():
        values[number] = _cast(values[number], dtype)
    return values


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """A local tensor, or one per rank, in another dtype."""
    return [v.to(dtype) for v in value] if isinstance(value, list) else value.to(dtype)


def _leave(step: Step, executor: Executor, values: Sequence[Any]) -> list[Tensor]:
    return [
        executor.leave(value, layout, step.result_shape(i), sharded=step.outputs[i] == "sharded")
        for i, (value, layout) in enumerate(zip(values, step.local.results, strict=True))
    ]


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Source, executor: Executor, *tensors: Tensor | Entered) -> Any:
        ctx.source, ctx.executor, ctx.step = source, executor, source.step
        runs = ctx.step.runs
        values = _entered(ctx.step, executor, tensors)
        with record_function("autopar3d forward"):
            outs = _run(executor, "forward", runs.forward, values)
        results, ctx.saved = outs[: runs.results], outs[runs.results :]
        # By reference, for a backward that nobody planned; parameters are alive anyway.
        ctx.tensors, ctx.versions = tensors, _versions(ctx.step, tensors)
        ctx.set_materialize_grads(False)
        left = own_outputs(_leave(ctx.step, executor, results), (values, ctx.saved))
        ctx.kept_versions, ctx.read_versions = versions(ctx.saved), versions(_read(ctx.step, tensors))
        ctx.mark_non_differentiable(*(t for i, t in enumerate(left) if i not in runs.differentiable))
        return tuple(left)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        step, executor, runs, saved = ctx.step, ctx.executor, ctx.step.runs, ctx.saved
        if torch.is_grad_enabled():
            raise StateError(
                "backward with create_graph=True: gradients of gradients are not computed through a parallel module; "
                "a term that needs them (a gradient penalty, a Hessian) is to be computed with the plain model"
            )
        if saved is None:
            raise StateError(
                "backward through a call a second time: what it kept for backward was freed by the first; give that "
                "one retain_graph=True, or add the losses up and call backward once"
            )
        if not keeps_graph():
            ctx.saved = None
        _refuse_changes(step, ctx.versions, _versions(step, ctx.tensors))
        _refuse_writes(step, saved, ctx.kept_versions, ctx.tensors)
        given = tuple(i for i, c in enumerate(cotangents) if c is not None)
        if given != runs.tangents:
            # Gradients flow from other results than planned for: this once, their forward runs again.
            _refuse_writes(step, _read(step, ctx.tensors), ctx.read_versions, ctx.tensors)
            runs = ctx.source.switch(given)
            saved = _run(executor, "forward", runs.forward, _entered(step, executor, ctx.tensors))[runs.results :]
        seeds = [executor.seed(cotangents[i], step.local.results[i]) for i in runs.tangents]
        grads: list[Tensor | None] = [None] * len(ctx.tensors)
        if runs.backward is not None:
            with record_function("autopar3d backward"):
                came = [c for i in runs.tangents if (c := cotangents[i]) is not None]
                out = _gradients(ctx.source, step, runs, executor, [*saved, *seeds], ctx.tensors, came)
            for position, value in out.items():
                number = runs.gradients[position]
                grads[number] = _gradient(step, executor, number, value, ctx.tensors[number])
        return (None, None, *grads)


def _gradients(
    source: Source,
    step: Step,
    runs: Differentiated,
    executor: Executor,
    values: Sequence[Any],
    tensors: Sequence[Any],
    came: Sequence[Tensor],
) -> dict[int, Any]:
    """Gradients by their position in `runs.gradients`, without those that are held back (see `deferral`)."""
    assert runs.backward is not None

    def run(graph: GraphModule, given: Sequence[Any]) -> list[Any]:
        return own_gradients(_run(executor, "backward", graph, given, came), given)

    deferral = source.deferral
    if not deferral.on and not deferral.held:
        return dict(enumerate(run(runs.backward, values)))

    def finish(position: int, value: Any) -> tuple[Tensor, Tensor]:
        number = runs.gradients[position]
        return tensors[number], _gradient(step, executor, number, value, tensors[number])

    held = Held([], _versions(step, tensors), lambda: _versions(step, tensors), finish)
    return deferral.backward(source.deferred(), run, values, held)


def _gradient(step: Step, executor: Executor, number: int, value: Any, like: Tensor) -> Tensor:
    """The gradient of an argument, as the user gets it."""
    if number in step.lower:
        value = _cast(value, like.dtype)
    return executor.gradient(value, step.argument_layouts[number], like)


def _versions(step: Step, tensors: Sequence[Tensor | Entered]) -> list[int]:
    """How often each parameter was changed in place; autograd cannot know that backward reads them."""
    return [
        version(t)
        for argument, t in zip(step.program.arguments, tensors, strict=True)
        if argument.kind == "parameter" and isinstance(t, Tensor)
    ]


def _refuse_changes(step: Step, before: Sequence[int], now: Sequence[int]) -> None:
    parameters = step.program.arguments_of("parameter")
    changed = [a.names[0] for a, b, n in zip(parameters, before, now, strict=True) if b != n]
    if changed:
        raise StateError(
            f"{changed[0]} {f'and {len(changed) - 1} more parameters were' if changed[1:] else 'was'} changed between "
            "the call and its backward, so gradients would be wrong; call backward before optimizer.step()"
        )


def _read(step: Step, tensors: Sequence[Tensor | Entered]) -> list[Any]:
    """The inputs and buffers that the program reads."""
    pairs = zip(step.program.arguments, tensors, strict=True)
    return [
        t.value if isinstance(t, Entered) else t
        for a, t in pairs
        if a.kind in ("input", "buffer") and a.node in step.read
    ]


def _refuse_writes(step: Step, values: Sequence[Any], before: Sequence[int], tensors: Sequence[Any]) -> None:
    if versions(values) == before:
        return
    at, changed = 0, None
    for value in values:
        found = versions([value])
        if found != before[at : at + len(found)]:
            changed = value
            break
        at += len(found)
    held = [t.value if isinstance(t, Entered) else t for t in tensors]
    pairs = zip(step.program.arguments, held, strict=True)
    names = [f"{argument.kind} {argument.names[0]}" for argument, t in pairs if share(t, changed)]
    raise StateError(
        f"{names[0] if names else 'an output'} was changed in place between the call and its backward, which needs it "
        "as it was; call backward first, or change a clone"
    )


class LockstepExecutor:
    """Full tensors outside, one tensor per rank inside."""

    sharded_inputs = False

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def store(self, tensor: Tensor, layout: Layout) -> Tensor:
        return tensor.clone(memory_format=torch.contiguous_format)

    def enter(self, tensor: Tensor, layout: Layout) -> list[Tensor]:
        return [layout.shard(tensor, self.grid, rank).contiguous() for rank in range(self.grid.size)]

    enter_input = enter

    def run(
        self, graph: GraphModule, values: Sequence[Any], *, part: str = "", gradients: Sequence[Tensor] = ()
    ) -> list[Any]:
        out = run_lockstep(graph, self.grid, values)
        return [list(column) for column in zip(*out, strict=True)]

    def leave(self, value: list[Tensor], layout: Layout, shape: tuple[int, ...], *, sharded: bool) -> Tensor:
        return layout.assemble(value, shape, self.grid)

    def seed(self, cotangent: Tensor, layout: Layout) -> list[Tensor]:
        return self.enter(cotangent, layout)

    def gradient(self, value: list[Tensor], layout: Layout, like: Tensor) -> Tensor:
        return layout.assemble(value, like.shape, self.grid)


class RankExecutor:
    """This rank's part of each tensor, collectives over the mesh's process groups.

    Args:
        mesh: the grid's mesh, with the groups registered under the grid's aliases (see `runtime.connect`).
        index: this rank's position in the grid.
        groups: what the axes' names in graphs stand for; held, because torch's registry does not.
        backend: "eager" runs graphs op by op, "inductor" compiles them.
        compare: called before each graph with the part of the step, what runs, and the gradients of outputs that all
            ranks have; None where ranks are not compared.
        sharded_inputs: whether plain tensors arrive as this rank's part already.
    """

    def __init__(
        self,
        grid: Grid,
        mesh: DeviceMesh,
        index: int,
        groups: Sequence[ProcessGroup],
        *,
        sharded_inputs: bool,
        backend: str = "eager",
        compare: Callable[[str, str, Sequence[Tensor]], None] | None = None,
    ) -> None:
        self.grid, self.mesh, self.index, self.sharded_inputs = grid, mesh, index, sharded_inputs
        self.groups = tuple(groups)
        self.inductor = Inductor() if backend == "inductor" else None
        self.compare, self.runs = compare, 0
        self.marks: weakref.WeakKeyDictionary[GraphModule, tuple[str, int]] = weakref.WeakKeyDictionary()

    def store(self, tensor: Tensor, layout: Layout) -> Tensor:
        mine = layout.shard(tensor, self.grid, self.index).clone(memory_format=torch.contiguous_format)
        return to_dtensor(mine, layout, tuple(tensor.shape), self.grid, self.mesh)

    def enter(self, tensor: Tensor, layout: Layout) -> Tensor:
        if isinstance(tensor, DTensor):
            return local(tensor)
        return layout.shard(tensor, self.grid, self.index).contiguous()

    def enter_input(self, tensor: Tensor, layout: Layout) -> Tensor:
        if isinstance(tensor, DTensor):
            if tensor.device_mesh == self.mesh and tuple(tensor.placements) == placements(layout, self.grid):
                return tensor.to_local()
            tensor = tensor.full_tensor()
        elif self.sharded_inputs:
            return tensor
        return self.enter(tensor, layout)

    def run(
        self, graph: GraphModule, values: Sequence[Any], *, part: str = "", gradients: Sequence[Tensor] = ()
    ) -> list[Any]:
        mark = self._mark(graph)
        if self.compare is not None:
            plain = [g for g in gradients if not isinstance(g, DTensor)]
            self.compare(part, f"graph {mark:06x}, after {self.runs} runs", plain)
            self.runs += 1
        direct = [g for g in self.groups if isinstance(g, DirectGroup)]
        for group in direct:
            group.mark = mark
        try:
            return list(graph(*values)) if self.inductor is None else self.inductor.run(graph, values)
        except RuntimeError as error:
            if not postmortem.is_of_a_peer(error):
                raise
            raise postmortem.failed_step(part, graph, error) from error
        finally:
            for group in direct:
                group.mark = 0

    def _mark(self, graph: GraphModule) -> int:
        """A number below 1 << 24 that is a graph's own, the same on all ranks: graphs have the same text there."""
        code, mark = self.marks.get(graph, ("", 0))
        if code is not graph.code:
            code, mark = graph.code, zlib.crc32(graph.code.encode()) & 0xFFFFFF
            self.marks[graph] = code, mark
        return mark

    def leave(self, value: Tensor, layout: Layout, shape: tuple[int, ...], *, sharded: bool) -> Tensor:
        return to_dtensor(value, layout, shape, self.grid, self.mesh) if sharded else value

    def seed(self, cotangent: Tensor, layout: Layout) -> Tensor:
        if not isinstance(cotangent, DTensor):
            return cotangent
        if tuple(cotangent.placements) == placements(layout, self.grid):
            return cotangent.to_local()
        return self.enter(cotangent.full_tensor(), layout)

    def gradient(self, value: Tensor, layout: Layout, like: Tensor) -> Tensor:
        if not isinstance(like, DTensor):
            return value
        if isinstance(like, torch.nn.Parameter) and value.shape == local(like).shape:
            return like_parameter(value, like)
        return to_dtensor(value, layout, tuple(like.shape), self.grid, self.mesh)
