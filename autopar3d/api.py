"""The three ways in: `compile` for real ranks, `simulate` for all ranks in one process, `plan` for neither."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from .capture.calls import examples_of
from .compiler import Compiler
from .errors import GridError, InputError, PlanError
from .grid import Grid, GridLike, check_size
from .hardware import Hardware
from .layout import Layout
from .module import ParallelModule
from .precision import MixedPrecision
from .progress import watching
from .ranks import runtime
from .running.execute import LockstepExecutor, RankExecutor
from .step import Options

if TYPE_CHECKING:
    from .plan import Plan


T = TypeVar("T")


@watching("compile")
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
    overlap: bool | str = "auto",
    lanes: int | str = 1,
    constraints: Mapping[str, str | Layout] | None = None,
    memory_budget: int | None = None,
    plan: Plan | None = None,
    strict: bool = False,
    check: bool | None = None,
    mixed_precision: MixedPrecision | torch.dtype | None = None,
    backend: str = "eager",
    seed: int = 0,
) -> ParallelModule:
    """Parallelize `model` over a grid of ranks. Every rank of the process group calls this with the same arguments.

    The model is neither changed nor kept; rank 0's weights reach all ranks. A model on meta is made real shard by shard
    and initialised by its modules' `reset_parameters()` or its `_init_weights(module)`, to the same values on every
    grid; what these do not fill must be loaded before the first call.

    Args:
        model: any `nn.Module` that `torch.export` can trace, on CPU, CUDA or meta.
        grid: a `Grid` (with `replicas` or without), sizes `(x, y, z)`, or a `DeviceMesh`, 3-D or with replicas first;
            their product is the world size. Or "auto": the grid of all ranks whose step is predicted to be the
            shortest, for these example inputs.
        example_inputs: positional arguments of a call, of *global* shape; one tensor means a tuple of one. Without
            them the plan is made at the first call.
        example_kwargs: keyword arguments of a call.
        loss_fn: `loss_fn(output, *targets)` becomes part of the graph; call the result with
            `par(*inputs, targets=(labels,))`; examples travel in `example_kwargs={"targets": (labels,)}`.
        scheme: "auto" (by cost), or "3d", "2d", "1d", "zero3", "zero3x1d".
        inputs: "global" (every rank passes the same batch) or "sharded" (its own part, see `input_layouts`).
        outputs: "auto" (beside a scalar loss the other outputs stay sharded, as DTensors; without one all are
            global), "global", "sharded", "loss" (outputs that are no scalar are not computed and come back as
            None), or a dict by output, such as `{"logits": "global"}`; those it does not name are "auto".
        regather: "all" (only shards are kept for backward), "weights" (gathered activations are kept), "none", or
            "auto": the fastest of them, within `memory_budget`.
        hardware: a `Hardware`, a profile's name, or None for the default of the device type.
        overlap: "auto" merges small collectives and orders the graphs so that communication runs beside compute, where
            the predicted time gets shorter; True does so always; False leaves each wait right after its start.
        lanes: 2 lets each rank go through its part of the batch in two halves, so that one half computes while the
            other communicates; weights are gathered once for both. "auto" does so where it is predicted to pay.
        constraints: layouts that are decided, by glob: `{"*.fc1.weight": "[z, y]"}` for parameters by name,
            `{"blocks.*.fc1": "[xy, -, z]"}` for the results of modules' ops, as a plan prints them.
        plan: a plan of this model on this grid, from `plan(...)` or `Plan.load(path)`, to be carried out instead of
            searching for one. Calls of other shapes are planned anew, with the parameters as it stores them.
        strict: make it an error when something is kept whole or has no rule.
        check: None compares the inputs across ranks at the first call of each plan; False never. True is for finding
            what is wrong: at every call it compares inputs, train/eval modes and requires_grad, before every graph
            which one the ranks are about to run, and at first the traced graph with the model on the examples.
        memory_budget: bytes per device that a training step may need: parameters, gradients, AdamW's state, what is
            saved for backward, and the working set. The fastest plan found that fits is taken: in other layouts, or
            computing values again in backward; with grid="auto" of the best grids, with regather="auto" of all three.
            It holds for the example inputs.
        mixed_precision: a dtype in which to compute with parameters that are kept in their own, or a `MixedPrecision`.
        backend: "eager" runs the graphs op by op; "inductor" compiles them, in the order in which they are.
        seed: of dropout and other random numbers, and of the initialisation of meta models.

    Raises:
        GridError: the grid is malformed or its size is not the world size.
        LaunchError: there is no process group.
        TraceError: the model cannot be made a graph.
        PlanError: unknown options, `strict` found something, or constraints or a plan that do not fit.
        MismatchError: ranks passed different arguments or made different plans, or another rank failed.
    """
    if backend not in ("eager", "inductor"):
        raise PlanError(f"backend={backend!r} is not known; choose 'eager' or 'inductor'")
    options = Options(
        scheme,
        inputs,
        outputs,
        regather,
        strict,
        overlap,
        MixedPrecision.of(mixed_precision),
        constraints,
        memory_budget,
        lanes,
    )
    compiler = runtime.jointly(
        "compile",
        lambda: Compiler(
            model, _given(grid, processes=True), options, hardware, loss_fn, check=check, seed=seed, given=plan
        ),
        lambda made: f"grid={made.grid} {made.grid.ranks or ''} seed={seed} {options} {plan.digest if plan else ''}",
        "all ranks must pass the same arguments",
    )
    if plan is None and _chooses(grid, options):
        world_size = runtime.world_size() if _is_auto(grid) else None
        runtime.jointly(
            "choosing the grid",
            lambda: compiler.choose(world_size, example_inputs, example_kwargs),
            lambda _: str(compiler.grid),
            "all ranks must pass the same model and inputs",
        )
    connection = runtime.connect(compiler.grid, compiler.device.type)
    compiler.executor = RankExecutor(
        compiler.grid,
        *connection,
        sharded_inputs=inputs == "sharded",
        backend=backend,
        compare=runtime.compare_runs if check else None,
    )
    return compiler.module(model, example_inputs, example_kwargs)


@watching("simulate")
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
    overlap: bool | str = "auto",
    lanes: int | str = 1,
    constraints: Mapping[str, str | Layout] | None = None,
    memory_budget: int | None = None,
    plan: Plan | None = None,
    strict: bool = False,
    check: bool | None = None,
    mixed_precision: MixedPrecision | torch.dtype | None = None,
    seed: int = 0,
    world_size: int | None = None,
) -> ParallelModule:
    """As `compile`, but every rank runs in this process, in lock-step, on the same graphs.

    Parameters, gradients, inputs and outputs are full tensors, so any optimizer and training loop works.

    Args:
        world_size: number of devices, for grid="auto"; else it must be the grid's size.

    Raises:
        GridError, TraceError, PlanError: as `compile`.
    """
    options = Options(
        scheme,
        inputs,
        outputs,
        regather,
        strict,
        overlap,
        MixedPrecision.of(mixed_precision),
        constraints,
        memory_budget,
        lanes,
    )
    compiler = Compiler(model, _given(grid, world_size), options, hardware, loss_fn, check=check, seed=seed, given=plan)
    _choose(compiler, grid, world_size, example_inputs, example_kwargs)
    compiler.executor = LockstepExecutor(compiler.grid)
    return compiler.module(model, example_inputs, example_kwargs)


@watching("plan")
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
    overlap: bool | str = "auto",
    lanes: int | str = 1,
    constraints: Mapping[str, str | Layout] | None = None,
    memory_budget: int | None = None,
    plan: Plan | None = None,
    strict: bool = False,
    check: bool | None = None,
    mixed_precision: MixedPrecision | torch.dtype | None = None,
    seed: int = 0,
    world_size: int | None = None,
) -> Plan:
    """What `compile` would do on a grid, in one plain process: no process group, meta tensors welcome.

    Args:
        world_size: number of devices, for grid="auto"; else it must be the grid's size.

    Raises:
        GridError: `world_size` is given and is not the grid's size, or is missing with grid="auto".
        InputError: no example inputs.
        TraceError, PlanError: as `compile`.
    """
    cube = _given(grid, world_size)
    if example_inputs is None and not example_kwargs:
        raise InputError("plan needs example_inputs= (meta tensors do): layouts depend on the shapes")
    options = Options(
        scheme,
        inputs,
        outputs,
        regather,
        strict,
        overlap,
        MixedPrecision.of(mixed_precision),
        constraints,
        memory_budget,
        lanes,
    )
    compiler = Compiler(model, cube, options, hardware, loss_fn, check=check, seed=seed, given=plan)
    _choose(compiler, grid, world_size, example_inputs, example_kwargs)
    args, kwargs = examples_of(example_inputs, example_kwargs)
    return compiler.step(args, kwargs, compiler.skeleton.modes(), {}, {}, compiler.given)[1]


def _choose(
    compiler: Compiler,
    grid: GridLike,
    world_size: int | None,
    example_inputs: Any,
    example_kwargs: Mapping[str, Any] | None,
) -> None:
    """In one process, decide for what the call leaves open."""
    if compiler.given is None and _chooses(grid, compiler.options):
        compiler.choose(world_size if _is_auto(grid) else None, example_inputs, example_kwargs)


def _given(grid: GridLike, world_size: int | None = None, *, processes: bool = False) -> Grid | None:
    """The grid that a user passes, None for "auto".

    Raises:
        GridError: it is malformed, or is not of the size given, or "auto" without a size.
    """
    if not _is_auto(grid):
        found = Grid.of(grid)
        if world_size is not None:
            found.check_world(world_size)
        return found
    if world_size is None and not processes:
        raise GridError('grid="auto" needs world_size=, the number of devices, where there is no process group')
    if world_size is not None:
        check_size(world_size)
    return None


def _is_auto(grid: GridLike) -> bool:
    return isinstance(grid, str) and grid == "auto"


def _chooses(grid: GridLike, options: Options) -> bool:
    """Whether something is left to be chosen by comparing whole plans."""
    return _is_auto(grid) or options.regather == "auto" or options.memory_budget is not None
