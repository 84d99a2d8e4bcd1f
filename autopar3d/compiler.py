"""The three ways in: `compile` for real ranks, `simulate` for all ranks in one process, `plan` for neither."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .capture.pytrees import flatten_input, register_caches
from .errors import GridError, InputError, LayoutError, PlanError
from .grid import Grid, GridLike, check_size
from .hardware import Hardware, resolve
from .layout import Layout
from .module import Engine, ParallelModule
from .passes.defer import Deferred, defer
from .precision import MixedPrecision, ambient, autocast
from .program import Argument, Program
from .progress import stage, watching
from .ranks import runtime
from .ranks.checks import compare_with_model
from .reports.explain import Choices
from .reports.report import make_plan
from .running.call import Leaves, Prepared, bind, stand_ins
from .running.dtensor import is_exact
from .running.execute import LockstepExecutor, RankExecutor
from .running.initialize import initial_values
from .running.outputs import with_outputs
from .running.tree import slot
from .schedule import in_best_lanes, schedule, scheduled
from .search.constraints import check_carried_out, unfit
from .search.grids import Chosen, choose, distinct
from .skeleton import Skeleton
from .step import Options, Step, build_step, differentiated

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
        check: None compares the inputs across ranks at the first call of each plan; True at every call, and the traced
            graph with the model on the examples; False never.
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
    compiler.executor = RankExecutor(compiler.grid, *connection, sharded_inputs=inputs == "sharded", backend=backend)
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
    compiler.choose_alone(grid, world_size, example_inputs, example_kwargs)
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
    compiler.choose_alone(grid, world_size, example_inputs, example_kwargs)
    args, kwargs = _call(example_inputs, example_kwargs)
    return compiler.step(args, kwargs, compiler.skeleton.modes(), {}, {}, compiler.given)[1]


def _settled(method: Callable[..., T]) -> Callable[..., T]:
    """Let a method of the compiler note the autocast that is on around it, for the trace, and turn it off."""

    @functools.wraps(method)
    def run(self: Compiler, *args: Any, **kwargs: Any) -> T:
        if self.settled:
            return method(self, *args, **kwargs)
        self.settled, self.skeleton.autocast = True, ambient()
        try:
            with autocast(()):
                return method(self, *args, **kwargs)
        finally:
            self.settled = False

    return run


class Compiler(Engine):
    """Makes steps for one model on one grid, and gives a module the model's tensors.

    `executor` is set before `module` is called; planning alone needs none. Without a grid, `choose` comes first.
    """

    def __init__(
        self,
        model: nn.Module,
        grid: Grid | None,
        options: Options,
        hardware: Hardware | str | None,
        loss_fn: Callable[..., Tensor] | None,
        *,
        check: bool | None,
        seed: int,
        given: Plan | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            hint = "; make one of it first" if isinstance(model, type) and issubclass(model, nn.Module) else ""
            raise PlanError(f"model is a {type(model).__name__}; it must be an nn.Module{hint}")
        if isinstance(model, ParallelModule):
            raise PlanError("model is a ParallelModule, which is compiled already; pass the model it was made from")
        _check_given(loss_fn=loss_fn, plan=given, check=check, seed=seed)
        options.check()
        self.device = device_of(model)
        self.grid, self.options = grid or Grid(1, 1, 1), options
        self.check, self.seed, self.loss_fn = check, seed, loss_fn
        self.chosen: Chosen | None = None  # from `choose` to the first step
        self.hardware = resolve(hardware, self.device)
        self.settled = False
        self.skeleton = Skeleton(model, self.device, loss_fn, options.precision)
        self.given = _checked(given, options)
        if given is not None:
            self.options = replace(options, free=given.free)
        self.pinned: dict[str, Layout] = {}  # by name of parameter or input, once planned
        self.model: nn.Module | None = None  # only until its tensors are taken over

    @_settled
    def choose(self, world_size: int | None, example_inputs: Any, example_kwargs: Mapping[str, Any] | None) -> None:
        """Decide for the grid of `world_size` devices (None: the one given) and what to keep, as serves this call best.

        Raises:
            InputError: no example inputs.
            GridError, TraceError, PlanError: as `compile`.
        """
        if example_inputs is None and not example_kwargs:
            raise InputError(
                'grid="auto", regather="auto" and memory_budget= need example_inputs=: the best depends on the shapes'
            )
        args, kwargs = _call(example_inputs, example_kwargs)
        program, options = self._traced(args, kwargs, self.skeleton.modes(), {})
        grids = [(self.grid, ())] if world_size is None else list(distinct(world_size, self.hardware))
        self.chosen = choose(program, grids, self.hardware, options)
        self.grid = self.chosen.grid
        found = self.chosen.options
        self.options = replace(self.options, regather=found.regather, free=found.free, overlap=found.overlap)

    def choose_alone(
        self, grid: GridLike, world_size: int | None, example_inputs: Any, example_kwargs: Mapping[str, Any] | None
    ) -> None:
        """`choose` in one process, where the call leaves something open; `grid` as the user passed it."""
        if self.given is None and _chooses(grid, self.options):
            self.choose(world_size if _is_auto(grid) else None, example_inputs, example_kwargs)

    def module(self, model: nn.Module, example_inputs: Any, example_kwargs: Mapping[str, Any] | None) -> ParallelModule:
        """The module; planned, with its tensors, when there are example inputs."""
        self.model = model
        module = ParallelModule(self, model)
        if example_inputs is not None or example_kwargs:
            args, kwargs = _call(example_inputs, example_kwargs)
            module.plan_for(*args, **kwargs)
        return module

    @watching("planning a new call")
    @_settled
    def prepare(self, module: ParallelModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Prepared:
        modes = {path: m.training for path, m in module.named_modules(remove_duplicate=False)}
        step, made = self._jointly(_described(args, kwargs), lambda: self._prepare(module, args, kwargs, modes))
        if self.model is not None:
            self._take_over(self.model, module, step)
            self.model = None
        prepared = Prepared(step, made, stand_ins(args, kwargs), self)
        bind(module, prepared, self.executor)
        return prepared

    def compare(self, leaves: Leaves, *, first: bool) -> None:
        wanted = self.check is None if first else self.check
        if wanted and isinstance(self.executor, RankExecutor):
            runtime.compare_inputs(leaves, values=not self.executor.sharded_inputs)

    @_settled
    def step(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        modes: dict[str, bool],
        trainable: dict[str, bool],
        pinned: Mapping[str, Layout],
        given: Plan | None = None,
    ) -> tuple[Step, Plan]:
        """Trace and plan one call, or carry out a plan that is given."""
        if self.chosen is not None:
            chosen, self.chosen = self.chosen, None
            made = make_plan(chosen.step, options=chosen.options)
            made = replace(made, notes=(*made.notes, *([chosen.note] if chosen.note else [])))
            return chosen.step, replace(
                made, candidates=chosen.candidates, choices=Choices(chosen.step, chosen.options)
            )
        program, options = self._traced(args, kwargs, modes, trainable)
        places = {a.node: pinned[a.names[0]] for a in program.arguments if a.names[0] in pinned}
        step = build_step(program, self.grid, self.hardware, options, places or None, given=given)
        step = in_best_lanes(step, options if given is None else replace(options, lanes=given.lanes))
        made = make_plan(step, options=self.options)
        if given is not None:
            check_carried_out(given, made)
        return step, replace(made, choices=Choices(step, options))

    def _traced(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], modes: dict[str, bool], trainable: dict[str, bool]
    ) -> tuple[Program, Options]:
        self._refuse_targets(kwargs)
        self._refuse_arguments(args, {k: v for k, v in kwargs.items() if k != "targets" or self.loss_fn is None})
        with stage("tracing"):
            return with_outputs(self.skeleton.trace(args, kwargs, modes, trainable), self.options)

    def _refuse_targets(self, kwargs: dict[str, Any]) -> None:
        """Raise InputError where targets and loss_fn do not go together."""
        if self.loss_fn is None:
            if "targets" in kwargs and not _takes(self.skeleton.model.forward, **kwargs):
                raise InputError(
                    "targets= was passed, but there is no loss to use them: give compile loss_fn=, or pass what "
                    f"{type(self.skeleton.model).__name__}.forward takes"
                )
            return
        targets = kwargs.get("targets", ())
        if not isinstance(targets, tuple):
            what = "a tensor" if isinstance(targets, Tensor) else f"a {type(targets).__name__}"
            raise InputError(f"targets= got {what}; pass a tuple, as in targets=(labels,): loss_fn(output, *targets)")
        if not _takes(self.loss_fn, None, *targets):
            name = getattr(self.loss_fn, "__name__", type(self.loss_fn).__name__)
            raise InputError(
                f"loss_fn {name}{_signature(self.loss_fn)} is called as loss_fn(output, *targets), here with "
                f"{len(targets)} targets: pass targets=(...) with each call, and as an example in example_kwargs="
            )

    def _refuse_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise InputError where the model's forward takes other arguments."""
        forward = self.skeleton.model.forward
        try:
            inspect.signature(forward).bind(*args, **kwargs)
        except TypeError as error:
            name = type(self.skeleton.model).__name__
            given = ", ".join([*(f"args[{i}]" for i in range(len(args))), *(f"{key}=" for key in kwargs)])
            advice = (
                "; a dict of keyword arguments goes into example_kwargs="
                if args and isinstance(args[0], Mapping)
                else "; a loss's targets go with loss_fn= into targets=(...)"
                if self.loss_fn is None and "too many" in str(error)
                else ""
            )
            raise InputError(
                f"{name}.forward{_signature(forward)} is called with ({given}): {error}{advice}"
            ) from error
        except ValueError:  # no signature: written in C
            return

    def _prepare(
        self, module: ParallelModule, args: tuple[Any, ...], kwargs: dict[str, Any], modes: dict[str, bool]
    ) -> tuple[Step, Plan]:
        if self.model is None:
            trainable = {name: p.requires_grad for name, p in module.named_parameters()}
            step, made = self.step(args, kwargs, modes, trainable, self.pinned)
            self._refuse_other_cuts(step)
            return step, made
        trainable = {name: p.requires_grad for name, p in self.model.named_parameters()}
        step, made = self.step(args, kwargs, modes, trainable, {}, self.given)
        if self.check:
            program = step.program
            if program.arguments_of("key"):  # random numbers of our own: compare with torch's instead
                program = self.skeleton.trace(args, kwargs, modes, trainable, by_place=False)
            compare_with_model(self.model, program, args, kwargs, self.loss_fn, self.options.precision)
        return step, made

    def _jointly(self, call: str, work: Callable[[], tuple[Step, Plan]]) -> tuple[Step, Plan]:
        if not isinstance(self.executor, RankExecutor):
            return work()
        advice = "all ranks must compile the same model with the same arguments, and make the same calls"
        return runtime.jointly("planning", work, lambda made: made[1].hash, advice, of=call)

    @_settled
    def with_seeds(self, step: Step, seeds: tuple[int, ...]) -> Step:
        """The step with graphs for gradients that flow from these results."""
        runs = differentiated(step.program, step.local, self.options, seeds, step.machine)
        return scheduled(replace(step, runs=runs), self.options.overlap)

    @_settled
    def deferred(self, step: Step, seeds: tuple[int, ...]) -> Deferred:
        """The backward graph for these gradients, in two; see `ParallelModule.no_sync`."""
        runs = differentiated(step.program, step.local, self.options, seeds, step.machine)
        assert runs.backward is not None
        kinds = [step.program.arguments[number].kind for number in runs.gradients]
        split = defer(runs.backward, [i for i, kind in enumerate(kinds) if kind == "parameter"])
        if self.options.overlap is False:
            return split
        local, reduce = (schedule(g, self.grid, self.hardware) for g in (split.local, split.reduce))
        return replace(split, local=local, reduce=reduce)

    def _refuse_other_cuts(self, step: Step) -> None:
        """With sharded inputs, a rank's part means the same under every plan."""
        if self.options.inputs != "sharded":
            return
        for argument, layout in zip(step.program.arguments, step.argument_layouts, strict=True):
            name = argument.names[0]
            if argument.kind == "input" and name in self.pinned and layout != self.pinned[name]:
                raise InputError(
                    f'input {name}: with inputs="sharded" a call of this shape would be cut in another way '
                    "than the example inputs were; use one batch size per compile, or global inputs"
                )

    # -- taking over the model's tensors -------------------------------------------------------------------

    @stage("placing tensors")
    def _take_over(self, model: nn.Module, module: ParallelModule, step: Step) -> None:
        """Give the module the model's tensors, each as its plan stores it, one at a time."""
        sources: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        sources |= dict(model.named_buffers(remove_duplicate=False))
        arguments = {}
        for argument, layout in zip(step.program.arguments, step.argument_layouts, strict=True):
            if argument.kind == "parameter" and not is_exact(
                layout, tuple(sources[argument.names[0]].shape), self.grid
            ):
                raise LayoutError(f"{argument.names[0]} would be stored as {layout}, which no DTensor carries exactly")
            if argument.kind in ("parameter", "buffer"):
                arguments[argument.names[0]] = (argument, layout)
                if not sources[argument.names[0]].is_meta:
                    value = self._from_first(sources[argument.names[0]])
                    self._hold(module, argument, layout, value, sources)
        if any(sources[name].is_meta for name in arguments):
            self._materialise(model, module, arguments, sources)
        self.pinned = {
            a.names[0]: layout
            for a, layout in zip(step.program.arguments, step.argument_layouts, strict=True)
            if a.kind == "parameter" or (a.kind == "input" and self.options.inputs == "sharded")
        }

    def _materialise(
        self,
        model: nn.Module,
        module: ParallelModule,
        arguments: Mapping[str, tuple[Argument, Layout]],
        sources: Mapping[str, Tensor],
    ) -> None:
        by_name = {name: argument.names[0] for argument, _ in arguments.values() for name in argument.names}
        for name, value, written in initial_values(model, self.device, self.seed):
            first = by_name.get(name)
            if first is None or not sources[first].is_meta:
                continue
            argument, layout = arguments[first]
            held = self._hold(module, argument, layout, value, sources)
            del value  # before the next one is made
            if not written:
                module.__dict__["_ap3d"].uninitialized.add(first, held)

    def _hold(
        self, module: ParallelModule, argument: Argument, layout: Layout, value: Tensor, sources: Mapping[str, Tensor]
    ) -> Tensor:
        """Register a tensor, copied from its whole value, under all its names."""
        if argument.kind == "parameter":
            trained = sources[argument.names[0]].requires_grad
            held: Tensor = nn.Parameter(self.executor.store(value, layout), requires_grad=trained)
        else:
            held = value.clone(memory_format=torch.contiguous_format)
        for name in argument.names:
            table, leaf = slot(module, name)
            table[leaf] = held
        return held

    def _from_first(self, source: Tensor) -> Tensor:
        if not isinstance(self.executor, RankExecutor):
            return source.detach()
        own = source.detach().clone(memory_format=torch.contiguous_format)
        return runtime.broadcast_from_first(own, self.executor.mesh)


def _takes(function: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Whether these arguments, and perhaps others before them, fit a function; True where that cannot be known."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind_partial(**kwargs) if kwargs else signature.bind(*args)
    except TypeError:
        return False
    return True


def _signature(function: Callable[..., Any]) -> str:
    """The names of a function's arguments, without types, for a message."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return ""
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))


def _described(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Of a call, the shapes of its inputs."""
    leaves = [(path, leaf) for path, leaf in flatten_input(args, kwargs)[0] if isinstance(leaf, Tensor)]
    shown = ", ".join(f"{path} {tuple(leaf.shape)}" for path, leaf in leaves[:4])
    return f"a call with {shown}{', ...' if len(leaves) > 4 else ''}" if leaves else ""


def _is_auto(grid: GridLike) -> bool:
    return isinstance(grid, str) and grid == "auto"


def _chooses(grid: GridLike, options: Options) -> bool:
    """Whether something is left to be chosen by comparing whole plans."""
    return _is_auto(grid) or options.regather == "auto" or options.memory_budget is not None


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


def _checked(given: Plan | None, options: Options) -> Plan | None:
    """The plan, if the call's options are those that it was made with."""
    if given is None:
        return None
    problems = [
        f"it was made with {name}={theirs!r}, this call has {mine!r}"
        for name, theirs, mine in (
            ("regather", given.regather, options.regather),
            ("inputs", given.inputs, options.inputs),
        )
        if theirs and theirs != mine
    ]
    if options.constraints:
        problems.append("constraints= goes with planning; a plan decides everything")
    if problems:
        raise PlanError(unfit(problems))
    return given


def _check_given(*, loss_fn: Any, plan: Any, check: Any, seed: Any) -> None:
    """Raise PlanError where an argument is of a type that it cannot have; all of them are listed."""
    problems = []
    if loss_fn is not None and (isinstance(loss_fn, type) or not callable(loss_fn)):
        what = f"the class {loss_fn.__name__}" if isinstance(loss_fn, type) else f"a {type(loss_fn).__name__}"
        way = f"pass an object of it, as {loss_fn.__name__}()" if isinstance(loss_fn, type) else "it is a function"
        problems.append(f"loss_fn= is {what}; {way}: loss_fn(output, *targets) is called")
    if plan is not None and not isinstance(getattr(plan, "strategies", None), Mapping):
        problems.append(f"plan= is a {type(plan).__name__}; it is a Plan, from plan(...) or Plan.load(path)")
    if check is not None and not isinstance(check, bool):
        problems.append(f"check={check!r} is not known; choose None, True or False")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 63:
        problems.append(f"seed={seed!r} is not a whole number from 0 to 2**63 - 1")
    if problems:
        raise PlanError("\n".join(problems))


def _call(example_inputs: Any, example_kwargs: Mapping[str, Any] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if example_kwargs is not None and not isinstance(example_kwargs, Mapping):
        raise InputError(
            f"example_kwargs= is a {type(example_kwargs).__name__}; it must be a dict of keyword arguments, such as "
            '{"labels": labels}; positional ones go into example_inputs='
        )
    unnamed = [key for key in example_kwargs or {} if not isinstance(key, str)]
    if unnamed:
        raise InputError(f"example_kwargs= has the key {unnamed[0]!r}; keys are the names of keyword arguments")
    args = example_inputs if isinstance(example_inputs, (tuple, list)) else (example_inputs,)
    found = () if example_inputs is None else tuple(args), dict(example_kwargs or {})
    register_caches()
    flatten_input(*found)  # refuses what is no tensor, and no plain value
    return found


def device_of(model: nn.Module) -> torch.device:
    """Where the model lives; a meta model will live where the process group's backend works."""
    tensor = next(iter(model.parameters()), None)
    if tensor is not None and not tensor.is_meta:
        return tensor.device
    if dist.is_available() and dist.is_initialized() and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
