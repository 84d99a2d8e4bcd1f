"""`ParallelModule`: the GraphModule that `compile` and `simulate` return.

It holds the parameters under the model's own names, in a tree of parts shaped like the model's, so that optimizers,
`clip_grad_norm_`, `state_dict` and `train()`/`eval()` of any part work as users know them. A call looks up the step
planned for its shapes and modes, or plans one with the parameters' layouts as they are.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.optim import Optimizer

from autopar3d.private import TreeSpec, inside_transform, tree_unflatten

from .capture.pytrees import flatten_input
from .collectives import collectives
from .counter import RandomState
from .errors import AutoPar3DError, InputError, StateError, TraceError
from .layout import Layout
from .precision import ambient
from .ranks import postmortem
from .ranks.sampling import data_place
from .running import state, tree
from .running.call import Leaves, Prepared, bind, rebuild, refuse_differences, refuse_places
from .running.deferral import Deferral
from .running.execute import Executor

if TYPE_CHECKING:
    from .plan import Plan

Key = tuple[Any, ...]


class Engine:
    """What makes steps for a module: the compiler's side, see `compiler.Compiler`."""

    executor: Executor
    device: torch.device
    seed: int

    def prepare(self, module: ParallelModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Prepared:
        """Plan a call; the first time, give the module its tensors."""
        raise NotImplementedError

    def compare(self, module: ParallelModule, leaves: Leaves, *, first: bool) -> None:
        """Refuse a call that differs between ranks, if that is to be checked; `first`: of the calls of this plan."""
        raise NotImplementedError


@dataclass
class _Calls:
    """What a parallel module remembers beside its tensors."""

    engine: Engine
    random: RandomState
    steps: dict[Key, Prepared] = field(default_factory=dict)
    last: Prepared | None = None
    deferral: Deferral = field(default_factory=Deferral)
    uninitialized: state.Uninitialized = field(default_factory=state.Uninitialized)


class ParallelModule(GraphModule):
    """The compiled model. Built by `autopar3d.compile` and `autopar3d.simulate`, not by hand.

    Call it as the model was called. `plan`, `forward_graph` and `backward_graph` are those of the last call (before
    the first, of the example inputs): the graphs are what runs, so an edited and recompiled graph changes the next
    step. `graph` is the whole call: inputs, their shards, one call of the two graphs, outputs.
    """

    def __init__(self, engine: Engine, model: nn.Module) -> None:
        super().__init__(nn.Module(), _empty_graph(), class_name=model._get_name())
        # One attribute, set past nn.Module, whose name no model uses: a parameter may be called as it likes.
        self.__dict__["_ap3d"] = _Calls(engine, RandomState(engine.seed))
        tree.grow(self, model)

    # -- what users look at --------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan of the last call's shapes and modes."""
        return self._prepared.plan

    @property
    def forward_graph(self) -> GraphModule:
        """What runs forward on this rank: local ops and collectives.

        A call under `torch.no_grad()` runs `inference_graph` instead. A backward from other outputs than planned
        for makes new graphs, which this is from then on.
        """
        return self._prepared.step.runs.forward

    @property
    def backward_graph(self) -> GraphModule | None:
        """What runs backward on this rank; None when nothing has a gradient."""
        return self._prepared.step.runs.backward

    @property
    def inference_graph(self) -> GraphModule:
        """What runs when no gradient is wanted: `forward_graph` without what it keeps for backward."""
        return self._prepared.step.runs.inference

    @property
    def input_layouts(self) -> dict[str, Layout]:
        """Per input, by its path such as `args[0]`, the layout in which it enters the graphs.

        With inputs="sharded" each rank passes its part by this layout; global inputs are cut by it.
        """
        step = self._prepared.step
        pairs = zip(step.program.arguments, step.argument_layouts, strict=True)
        return {a.names[0]: layout for a, layout in pairs if a.kind == "input"}

    @property
    def data_rank(self) -> int:
        """Which part of the batch this rank passes, as `rank=` of a `DistributedSampler`; 0 with global inputs.

        Raises:
            StateError: nothing is planned yet, or the inputs' batches are cut by different axes.
        """
        return self._data_place()[0]

    @property
    def data_world_size(self) -> int:
        """Number of parts of the batch, as `num_replicas=` of a `DistributedSampler`; 1 with global inputs."""
        return self._data_place()[1]

    def _data_place(self) -> tuple[int, int]:
        layouts, executor = self.input_layouts, self.__dict__["_ap3d"].engine.executor
        return data_place(layouts, executor.grid, executor.index) if executor.sharded_inputs else (0, 1)

    def __repr__(self) -> str:
        calls = self.__dict__.get("_ap3d")
        if calls is None:
            return super().__repr__()
        if calls.last is None:
            return tree.describe(self, str) + f"\nnot planned yet: {_UNPLANNED}"
        step = calls.last.step
        arguments = zip(step.program.arguments, step.argument_layouts, strict=True)
        layouts = {id(_tensor(self, a.names[0])): str(lay) for a, lay in arguments if a.kind == "parameter"}
        text = tree.describe(self, lambda t: layouts.get(id(t), ""))
        text += f"\non grid {calls.engine.executor.grid}; what went where: print(par.plan)"
        for name, graph in (("forward", step.runs.forward), ("backward", step.runs.backward)):
            if graph is not None:
                text += f"\n{name}_graph: {_summary(graph)}"
        return text

    __str__ = __repr__

    @property
    def _prepared(self) -> Prepared:
        calls: _Calls = self.__dict__["_ap3d"]
        if calls.last is None:
            raise StateError(f"nothing is planned yet: {_UNPLANNED}")
        return calls.last

    # -- calling -------------------------------------------------------------------------------------------

    def recompile(self) -> Any:
        """Make an edited `graph` run, as of every GraphModule.

        The generated code takes the flat tensors; a user's call goes through `forward` below, which flattens.
        """
        calls = self.__dict__.get("_ap3d")
        if calls is not None and calls.last is not None:
            code = calls.last.outer.recompile()
            self.__dict__["_code"] = code.src
            return code
        code = super().recompile()
        # In place of the generated one, in this object's own class. torch.compile of what calls it, or of itself, runs
        # it as it is: dynamo would go into planning, processes and graphs that are compiled already.
        runs = torch.compiler.disable(ParallelModule.forward, reason="a parallel module runs graphs of its own")
        setattr(type(self), "forward", runs)  # noqa: B010
        return code

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        calls: _Calls = self.__dict__["_ap3d"]
        leaves, in_spec = flatten_input(args, kwargs)
        if inside_transform():
            raise InputError(
                "torch.func's transforms (grad, vmap, jvp and those made of them) do not go through a parallel module; "
                "torch.autograd.grad gives gradients, and torch.func.functional_call takes other parameters"
            )
        refuse_places(leaves, calls.engine.device)
        calls.engine.compare(self, leaves, first=False)
        planned = calls.last
        key = self._key(in_spec, leaves)
        prepared = calls.steps.get(key)
        if prepared is None:
            prepared = self._plan_call(args, kwargs)
        if not prepared.has_run:
            calls.engine.compare(self, leaves, first=True)
        calls.uninitialized.check()
        if prepared is not calls.last:
            self._show(prepared)
        if key in calls.steps:  # the one used last is forgotten last
            calls.steps[key] = calls.steps.pop(key)
        tensors = [leaf for _, leaf in leaves if isinstance(leaf, Tensor)]
        try:
            flat = prepared.outer(*tensors)
        except RuntimeError as error:
            # A trace does not notice every dtype that does not fit.
            if prepared.has_run or planned is None or isinstance(error, AutoPar3DError):
                raise
            del calls.steps[key]
            self._show(planned)
            refuse_differences(leaves, planned.leaves, error)
            raise
        prepared.has_run = True
        return rebuild(prepared.step, flat)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within, backward leaves gradients unreduced, for accumulation: they are summed up locally, `.grad` stays as
        it is, and the next backward outside reduces the sums together with its own gradients.

        What counts is where backward runs. An unreduced gradient is as large as the parameter is gathered to for the
        product, the whole of it with "zero3"; `par.held_bytes` says how much is held. Gradients that need no
        collective, and those of inputs, are complete in `.grad` at once.
        """
        deferral = self.__dict__["_ap3d"].deferral
        before, deferral.on = deferral.on, True
        try:
            yield
        finally:
            deferral.on = before

    @property
    def held_bytes(self) -> int:
        """Bytes of unreduced gradients that this rank holds after backward passes under `no_sync`."""
        return sum(split.bytes for split in self.__dict__["_ap3d"].deferral.held)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of every module; what `no_sync` holds back is dropped, too."""
        self.__dict__["_ap3d"].deferral.held.clear()
        super().zero_grad(set_to_none)

    def plan_for(self, *args: Any, **kwargs: Any) -> Plan:
        """Plan a call without running it; tensors are of global shape, and only shape and dtype are read.

        Raises:
            TraceError: the model cannot be made a graph for these inputs.
        """
        calls: _Calls = self.__dict__["_ap3d"]
        leaves, in_spec = flatten_input(args, kwargs)
        prepared = calls.engine.prepare(self, args, kwargs)
        self._show(prepared)
        if calls.engine.executor.sharded_inputs:
            leaves = [(path, self._part_of(path, leaf)) for path, leaf in leaves]
        # The key is made afterwards: the first planning creates the parameters that it names.
        calls.steps[self._key(in_spec, leaves)] = prepared
        while len(calls.steps) > _KEPT:
            del calls.steps[next(iter(calls.steps))]
        return prepared.plan

    def _plan_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Prepared:
        """Plan a call of new shapes, structure or modes."""
        calls: _Calls = self.__dict__["_ap3d"]
        leaves, in_spec = flatten_input(args, kwargs)
        known = calls.last
        if len(calls.steps) == _MANY:
            _log.warning(
                "%d plans were made for calls that differ in shapes, modes or Python values, and each takes time and "
                "memory: pad batches to few shapes (autopar3d.few_lengths does), and pass as tensors what changes "
                "often. The last %d are kept",
                _MANY,
                _KEPT,
            )
        if calls.engine.executor.sharded_inputs:
            args, kwargs = tree_unflatten(self._global(leaves), in_spec)
        try:
            self.plan_for(*args, **kwargs)
        except (TraceError, InputError) as error:
            if known is not None:
                refuse_differences(flatten_input(args, kwargs)[0], known.leaves, error)
            raise
        return self._prepared

    def _global(self, leaves: Leaves) -> list[Any]:
        """Stand-ins of global shape for the parts of the inputs that this rank was passed."""
        layouts = self.input_layouts if self.__dict__["_ap3d"].last else {}
        found = []
        for path, leaf in leaves:
            if isinstance(leaf, Tensor):
                layout = layouts.get(path)
                if layout is None or layout.ndim != leaf.dim():
                    raise InputError(
                        f'input {path}: with inputs="sharded", global shapes follow from those planned, and none of '
                        "this structure is: give compile example_inputs= of global shape, or call plan_for with them"
                    )
                shape = layout.global_shape(leaf.shape, self.__dict__["_ap3d"].engine.executor.grid)
                leaf = torch.empty(shape, dtype=leaf.dtype, device="meta", requires_grad=leaf.requires_grad)
            found.append(leaf)
        return found

    def _part_of(self, path: str, leaf: Any) -> Any:
        """A stand-in of the shape that each rank passes."""
        if not isinstance(leaf, Tensor):
            return leaf
        grid = self.__dict__["_ap3d"].engine.executor.grid
        shape = self.input_layouts[path].local_shape(leaf.shape, grid)
        return torch.empty(shape, dtype=leaf.dtype, device="meta", requires_grad=leaf.requires_grad)

    def _key(self, in_spec: TreeSpec, leaves: Leaves) -> Key:
        """Equal for two calls that one step serves."""
        signature = tuple(
            (tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else (type(leaf), leaf)
            for _, leaf in leaves
        )
        modes = tuple(m.training for m in self.modules())
        trainable = tuple(p.requires_grad for _, p in super().named_parameters())
        return (str(in_spec), signature, modes, trainable, ambient())

    def _show(self, prepared: Prepared) -> None:
        """Let `graph` and `code` be those of the step that runs."""
        self.__dict__["_ap3d"].last = prepared
        self.__dict__["_graph"] = prepared.outer.graph
        self.__dict__["_code"] = prepared.outer.code

    # -- state: see `state` --------------------------------------------------------------------------------

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As of every module: DTensors on real ranks, full tensors in simulation.

        Raises:
            StateError: nothing is planned yet.
        """
        self._prepared  # noqa: B018
        return super().named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """As of every module, under the model's own names: DTensors on real ranks, full tensors in simulation.

        Raises:
            StateError: nothing is planned yet.
        """
        self._prepared  # noqa: B018
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a full state dict of the plain model, or a sharded one, of any grid over these ranks.

        Every rank passes the whole of the dict. A tied tensor may come under one of its names only.

        Args:
            assign: the values are copied all the same, so that optimizers keep their parameters; but a dtype that
                differs is an error.

        Raises:
            StateError: something does not fit (all of it is listed, nothing is loaded), or nothing is planned yet.
        """
        self._prepared  # noqa: B018
        with postmortem.together("load_state_dict()"):
            return state.load(self, state_dict, strict=strict, assign=assign)

    def full_state_dict(self) -> dict[str, Tensor]:
        """What the plain model's `load_state_dict` takes: plain CPU tensors, on every rank. All ranks must call it.

        Raises:
            StateError: nothing is planned yet.
        """
        self._prepared  # noqa: B018
        with postmortem.together("full_state_dict()"):
            return state.full_state_dict(self)

    def full_optim_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """What the same optimizer over the plain model's parameters loads, on every rank. All ranks must call it."""
        with postmortem.together("full_optim_state_dict()"):
            return state.full_optimizer_state(optimizer)

    def load_full_optim_state_dict(self, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
        """The way back: load the plain optimizer's state dict into one over these parameters.

        Raises:
            StateError: it is of other groups or shapes.
        """
        with postmortem.together("load_full_optim_state_dict()"):
            state.load_full_optimizer_state(self, optimizer, state_dict)

    def random_state(self) -> dict[str, int]:
        """What the random numbers of later calls depend on: save it beside `state_dict()` to resume exactly."""
        calls: _Calls = self.__dict__["_ap3d"]
        return {"seed": calls.random.seed, "step": calls.random.step}

    def set_random_state(self, state: Mapping[str, int]) -> None:
        """Take up what `random_state()` gave, here or on any other grid. Every rank must be given the same.

        Raises:
            StateError: it is something else.
        """
        if not isinstance(state, Mapping) or not all(isinstance(state.get(k), int) for k in ("seed", "step")):
            raise StateError(f"set_random_state takes what random_state() gave, a dict of seed and step; not {state!r}")
        calls: _Calls = self.__dict__["_ap3d"]
        calls.random.seed, calls.random.step = int(state["seed"]), int(state["step"])

    def __getitem__(self, key: int | str) -> nn.Module:
        """A part, as in `par[0].eval()`, of a model that is a sequence, a list or a dict of modules."""
        return tree.child(self, key)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ParallelModule:
        tree.refuse_conversion(self, fn)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        """An independent copy: tensors and graphs of its own; gradients stay behind, as with any module."""
        calls: _Calls = self.__dict__["_ap3d"]
        if calls.last is None:
            raise StateError(f"nothing is planned yet, so there is nothing to copy: {_UNPLANNED}")
        made = ParallelModule(calls.engine, self)
        memo[id(self)] = made
        copies = state.copy_tensors(self, memo)
        state.hold_copies(made, self, copies)
        own: _Calls = made.__dict__["_ap3d"]
        own.random = replace(calls.random)
        own.uninitialized = calls.uninitialized.copied(copies)
        for key, prepared in calls.steps.items():
            own.steps[key] = again = prepared.copied()
            bind(made, again, calls.engine.executor)
            if prepared is calls.last:
                made._show(again)
        return made

    def __copy__(self) -> NoReturn:
        raise StateError("a shallow copy would share its tensors with the original; use copy.deepcopy")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise StateError(
            "a parallel module cannot be pickled, as its graphs belong to running processes: save state_dict() (with "
            "torch.distributed.checkpoint) or full_state_dict(), compile the model again, and load"
        )


_MANY = 8  # plans of one module, from which on a user should know
_KEPT = 64  # plans of one module that are kept: of those used last

_log = logging.getLogger(__name__)

_UNPLANNED = (
    "pass example_inputs= to compile, or call the module once; the plan lays the parameters out, so make the "
    "optimizer, and read or load state, after that"
)


def called_with(module: ParallelModule) -> list[tuple[str, str]]:
    """What a call depends on beside its inputs, as text by name: must be the same on all ranks."""
    parts = module.named_modules(remove_duplicate=False)
    named = nn.Module.named_parameters(module)  # before there is a plan, too
    return [
        ("train/eval mode", " ".join(f"{path or 'model'}:{'train' if m.training else 'eval'}" for path, m in parts)),
        ("requires_grad of parameters", " ".join(f"{name}:{p.requires_grad}" for name, p in named)),
        ("torch.is_grad_enabled()", str(torch.is_grad_enabled())),
        ("no_sync()", str(module.__dict__["_ap3d"].deferral.on)),
        ("autocast", str(ambient())),
    ]


def _summary(graph: GraphModule) -> str:
    """`57 ops; all_gather x: 3, y: 2; ...`"""
    counts: dict[str, dict[str, int]] = {}
    for c in collectives(graph):
        by_axis = counts.setdefault(c.kind, {})
        by_axis[c.axis] = by_axis.get(c.axis, 0) + 1
    kinds = [f"{k} {', '.join(f'{a}: {n}' for a, n in sorted(axes.items()))}" for k, axes in sorted(counts.items())]
    ops = sum(n.op == "call_function" for n in graph.graph.nodes)
    return "; ".join([f"{ops} ops", *(kinds or ["no collectives"])])


def _tensor(module: nn.Module, name: str) -> Tensor:
    table, leaf = tree.slot(module, name)
    found: Tensor = table[leaf]
    return found


def _empty_graph() -> Graph:
    graph = Graph()
    graph.output(())
    return graph
