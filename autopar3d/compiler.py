"""`Compiler`: makes steps for one model on one grid."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .capture.calls import check_call, described, examples_of
from .errors import InputError, PlanError
from .grid import Grid
from .hardware import Hardware, resolve
from .layout import Layout
from .module import Engine, ParallelModule, called_with
from .passes.defer import Deferred, defer
from .precision import ambient, autocast
from .private import saved_tensors_are_hooked
from .program import Program
from .progress import stage, watching
from .ranks import runtime
from .ranks.checks import compare_with_model
from .reports.explain import Choices
from .reports.report import make_plan
from .running.call import Leaves, Prepared, bind, stand_ins
from .running.execute import RankExecutor
from .running.outputs import with_outputs
from .running.takeover import take_over
from .schedule import in_best_lanes, schedule, scheduled
from .search.constraints import check_carried_out, unfit
from .search.grids import Chosen, choose, distinct
from .skeleton import Skeleton
from .step import Options, Step, build_step, differentiated

if TYPE_CHECKING:
    from .plan import Plan


T = TypeVar("T")


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
        inner = [path for path, m in model.named_modules() if isinstance(m, ParallelModule)]
        if inner:
            raise PlanError(
                f"{type(model).__name__} holds a ParallelModule, {inner[0]}, which is compiled already; compile the "
                "whole plain model, or call the parallel module beside it"
            )
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
        args, kwargs = examples_of(example_inputs, example_kwargs)
        program, options = self._traced(args, kwargs, self.skeleton.modes(), {})
        grids = [(self.grid, ())] if world_size is None else list(distinct(world_size, self.hardware))
        self.chosen = choose(program, grids, self.hardware, options)
        self.grid = self.chosen.grid
        found = self.chosen.options
        self.options = replace(self.options, regather=found.regather, free=found.free, overlap=found.overlap)

    def module(self, model: nn.Module, example_inputs: Any, example_kwargs: Mapping[str, Any] | None) -> ParallelModule:
        """The module; planned, with its tensors, when there are example inputs."""
        self.model = model
        module = ParallelModule(self, model)
        if example_inputs is not None or example_kwargs:
            args, kwargs = examples_of(example_inputs, example_kwargs)
            module.plan_for(*args, **kwargs)
        return module

    @watching("planning a new call")
    @_settled
    def prepare(self, module: ParallelModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Prepared:
        modes = {path: m.training for path, m in module.named_modules(remove_duplicate=False)}

        def plan() -> tuple[Step, Plan]:
            return self._jointly(described(args, kwargs), lambda: self._prepare(module, args, kwargs, modes))

        if saved_tensors_are_hooked():
            # As by torch.utils.checkpoint around the call. They are not for tensors of traces, and are a thread's.
            with ThreadPoolExecutor(1) as other:
                step, made = other.submit(plan).result()
        else:
            step, made = plan()
        if self.model is not None:
            take_over(module, self.model, step, self.executor, self.device, self.seed)
            self.model = None
            self.pinned = {
                a.names[0]: layout
                for a, layout in zip(step.program.arguments, step.argument_layouts, strict=True)
                if a.kind == "parameter" or (a.kind == "input" and self.options.inputs == "sharded")
            }
        prepared = Prepared(step, made, stand_ins(args, kwargs), self)
        bind(module, prepared, self.executor)
        return prepared

    def compare(self, module: ParallelModule, leaves: Leaves, *, first: bool) -> None:
        wanted = self.check is None if first else self.check
        if wanted and isinstance(self.executor, RankExecutor):
            state = [] if first else called_with(module)
            runtime.compare_inputs(leaves, values=not self.executor.sharded_inputs, state=state)

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
        check_call(self.skeleton.model, self.loss_fn, args, kwargs)
        with stage("tracing"):
            return with_outputs(self.skeleton.trace(args, kwargs, modes, trainable), self.options)

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


def device_of(model: nn.Module) -> torch.device:
    """Where the model lives; a meta model will live where the process group's backend works."""
    tensor = next(iter(model.parameters()), None)
    if tensor is not None and not tensor.is_meta:
        return tensor.device
    if dist.is_available() and dist.is_initialized() and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
