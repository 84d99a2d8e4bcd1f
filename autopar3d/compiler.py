"""The three ways in: `compile` for real ranks, `simulate` for all ranks in one process, `plan` for neither."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import runtime
from .dtensor import to_dtensor
from .errors import InputError, PlanError
from .execute import Executor, LockstepExecutor, RankExecutor
from .grid import Grid, GridLike
from .hardware import Hardware, resolve
from .module import Engine, ParallelModule, Prepared, bind
from .passes.differentiate import Differentiated
from .redistribute import State
from .report import make_plan
from .schedule import scheduled
from .skeleton import Skeleton
from .step import Options, Step, build_step

if TYPE_CHECKING:
    from .plan import Plan


def compile(  # noqa: A001  (as torch.compile)
    model: nn.Module,
    grid: GridLike,
    example_inputs: Any = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[..., Tensor] | None = None,
    scheme: str = "auto",
    inputs: str = "global",
    outputs: str | Mapping[str, str] = "auto",
    regather: str = "all",
    hardware: Hardware | str | None = None,
    strict: bool = False,
    check: bool = False,
    seed: int = 0,
) -> ParallelModule:
    """Parallelize `model` over a grid of ranks. Every rank of the process group calls this with the same arguments.

    The model is neither changed nor kept; rank 0's weights reach all ranks.

    Args:
        model: any `nn.Module` that `torch.export` can trace, on CPU, CUDA or meta.
        grid: a `Grid`, sizes `(x, y, z)`, or a 3-D `DeviceMesh`; their product is the world size.
        example_inputs: positional arguments of a call, of *global* shape; one tensor means a tuple of one. Without
            them the plan is made at the first call.
        example_kwargs: keyword arguments of a call.
        loss_fn: `loss_fn(output, *targets)` becomes part of the graph; call the result with
            `par(*inputs, targets=(labels,))`; examples travel in `example_kwargs={"targets": (labels,)}`.
        scheme: "auto" (by cost), or "3d", "2d", "1d", "zero3", "zero3x1d".
        inputs: "global" (every rank passes the same batch) or "sharded" (its own part, see `input_layouts`).
        outputs: "auto" (beside a scalar loss the other outputs stay sharded, as DTensors; without one all are
            global), "global", "sharded", "loss", or a dict by output path.
        regather: "all" (only shards are kept for backward), "weights" (gathered activations are kept), "none".
        hardware: a `Hardware`, a profile's name, or None for the default of the device type.
        strict: make it an error when something is kept whole or has no rule.
        check: compare the inputs across ranks at every call, and the traced graph with the model on the examples.
        seed: for the initialisation of meta models.

    Raises:
        GridError: the grid is malformed or its size is not the world size.
        LaunchError: there is no process group.
        TraceError: the model cannot be made a graph.
        PlanError: unknown options, or `strict` found something.
        MismatchError: ranks made different plans.
    """
    cube = Grid.of(grid)
    device = _device(model)
    mesh, index = runtime.connect(cube, device.type)
    executor = RankExecutor(cube, mesh, index, sharded_inputs=inputs == "sharded")
    options = Options(scheme, inputs, outputs, regather, strict)
    compiler = Compiler(model, cube, executor, options, hardware, loss_fn, check=check, seed=seed)
    return compiler.module(example_inputs, example_kwargs)


def simulate(
    model: nn.Module,
    grid: GridLike,
    example_inputs: Any = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[..., Tensor] | None = None,
    scheme: str = "auto",
    inputs: str = "global",
    outputs: str | Mapping[str, str] = "auto",
    regather: str = "all",
    hardware: Hardware | str | None = None,
    strict: bool = False,
    check: bool = False,
    seed: int = 0,
) -> ParallelModule:
    """As `compile`, but every rank runs in this process, in lock-step, on the same graphs.

    Parameters, gradients, inputs and outputs are full tensors, so any optimizer and training loop works.

    Raises:
        GridError, TraceError, PlanError: as `compile`.
    """
    cube = Grid.of(grid)
    options = Options(scheme, inputs, outputs, regather, strict)
    compiler = Compiler(model, cube, LockstepExecutor(cube), options, hardware, loss_fn, check=check, seed=seed)
    return compiler.module(example_inputs, example_kwargs)


def plan(
    model: nn.Module,
    grid: GridLike,
    example_inputs: Any = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[..., Tensor] | None = None,
    scheme: str = "auto",
    inputs: str = "global",
    outputs: str | Mapping[str, str] = "auto",
    regather: str = "all",
    hardware: Hardware | str | None = None,
    strict: bool = False,
    check: bool = False,
    seed: int = 0,
    world_size: int | None = None,
) -> Plan:
    """What `compile` would do on a grid, in one plain process: no process group, meta tensors welcome.

    Raises:
        GridError: `world_size` is given and is not the grid's size.
        InputError: no example inputs.
        TraceError, PlanError: as `compile`.
    """
    cube = Grid.of(grid)
    if world_size is not None:
        cube.check_world(world_size)
    if example_inputs is None and not example_kwargs:
        raise InputError("plan needs example_inputs= (meta tensors do): layouts depend on the shapes")
    options = Options(scheme, inputs, outputs, regather, strict)
    compiler = Compiler(model, cube, None, options, hardware, loss_fn, check=check, seed=seed)
    args, kwargs = _call(example_inputs, example_kwargs)
    step, made = compiler.step(args, kwargs, compiler.skeleton.modes(), {}, None)
    del step
    return made


class Compiler(Engine):
    """Makes steps for one model on one grid, and the module that holds its tensors."""

    def __init__(
        self,
        model: nn.Module,
        grid: Grid,
        executor: Executor | None,
        options: Options,
        hardware: Hardware | str | None,
        loss_fn: Callable[..., Tensor] | None,
        *,
        check: bool,
        seed: int,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise PlanError(f"model is a {type(model).__name__}; it must be an nn.Module")
        options.check()
        device = _device(model)
        self.grid, self.options, self.check, self.seed = grid, options, check, seed
        self.hardware = resolve(hardware, device)
        self.skeleton = Skeleton(model, device, loss_fn)
        self.kinds = {path: type(m).__name__ for path, m in model.named_modules(remove_duplicate=False)}
        self.storage: dict[str, State] | None = None  # by parameter name, once planned
        self.model: nn.Module | None = model  # only until its tensors are taken over
        if executor is not None:
            self.executor = executor

    def module(self, example_inputs: Any, example_kwargs: Mapping[str, Any] | None) -> ParallelModule:
        """The module; planned, with its tensors, when there are example inputs."""
        module = ParallelModule(self)
        module._grow(self.kinds)
        for path, mode in self.skeleton.modes().items():
            module._part(path).training = mode
        if example_inputs is not None or example_kwargs:
            args, kwargs = _call(example_inputs, example_kwargs)
            module.plan_for(*args, **kwargs)
        return module

    def prepare(self, module: ParallelModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Prepared:
        if self.storage is None:
            modes = {path: module._part(path).training for path in self.kinds}
            step, made = self.step(args, kwargs, modes, {}, None)
            self._take_over(module, step)
        else:
            modes = {path: module._part(path).training for path in self.kinds}
            trainable = {name: p.requires_grad for name, p in module.named_parameters()}
            step, made = self.step(args, kwargs, modes, trainable, self.storage)
        if isinstance(self.executor, RankExecutor):
            runtime.compare("the plan", made.hash, "do all ranks compile the same model with the same arguments?")
        prepared = Prepared(step, made, lambda seeds: self._variant(step, seeds))
        bind(module, prepared, self.executor)
        return prepared

    def step(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        modes: dict[str, bool],
        trainable: dict[str, bool],
        storage: Mapping[str, State] | None,
    ) -> tuple[Step, Plan]:
        """Trace and plan one call."""
        program = self.skeleton.trace(args, kwargs, modes, trainable)
        pinned = {a.node: storage[a.names[0]] for a in program.arguments_of("parameter")} if storage else None
        step = scheduled(build_step(program, self.grid, self.hardware, self.options, pinned))
        return step, make_plan(step)

    def _variant(self, step: Step, seeds: tuple[int, ...]) -> Differentiated:
        from .passes.differentiate import differentiate

        values = [n.meta["val"] for n in step.program.graph.graph.nodes if n.op == "placeholder"]
        return differentiate(step.local, values, [a.requires_grad for a in step.program.arguments], seeds=seeds)

    def _take_over(self, module: ParallelModule, step: Step) -> None:
        """Give the module the model's tensors, each as its plan stores it, one at a time."""
        assert self.model is not None
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        for argument, layout in zip(step.program.arguments, step.argument_layouts, strict=True):
            if argument.kind == "parameter":
                source: Tensor = parameters[argument.names[0]]
                held = self._stored(source, layout)
                module._hold(argument, nn.Parameter(held, requires_grad=source.requires_grad))
            elif argument.kind == "buffer":
                module._hold(argument, self._copied(buffers[argument.names[0]]))
        self.storage = {a.names[0]: step.decisions.storage[a.node] for a in step.program.arguments_of("parameter")}
        self.model = None

    def _copied(self, source: Tensor) -> Tensor:
        own = source.detach().clone()
        if isinstance(self.executor, RankExecutor) and dist.get_world_size() > 1:
            own = runtime.broadcast_from_first(own, self.executor.mesh)
        return own

    def _stored(self, source: Tensor, layout: Any) -> Tensor:
        own = self._copied(source)
        if not isinstance(self.executor, RankExecutor):
            return own
        local = layout.shard(own, self.grid, self.executor.index).clone(memory_format=torch.contiguous_format)
        return to_dtensor(local, layout, tuple(source.shape), self.grid, self.executor.mesh)


def _call(example_inputs: Any, example_kwargs: Mapping[str, Any] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args = example_inputs if isinstance(example_inputs, (tuple, list)) else (example_inputs,)
    return (() if example_inputs is None else tuple(args)), dict(example_kwargs or {})


def _device(model: nn.Module) -> torch.device:
    """Where the model lives; a meta model will live where the process group's backend works."""
    tensor = next(iter(model.parameters()), None)
    if tensor is not None and not tensor.is_meta:
        return tensor.device
    if dist.is_available() and dist.is_initialized() and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


