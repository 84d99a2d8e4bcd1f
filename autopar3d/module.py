"""`ParallelModule`: the GraphModule that `compile` and `simulate` return.

It holds the parameters under the model's own names, in a tree of modules shaped like the model's, so that optimizers,
`clip_grad_norm_`, `state_dict` and `train()`/`eval()` of any part work as users know them. A call looks up the step
planned for its shapes and modes, or plans one with the parameters' layouts as they are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.utils._pytree import TreeSpec, tree_unflatten

from .errors import StateError
from .execute import Entered, Executor, run_step
from .layout import Layout
from .passes.differentiate import Differentiated
from .program import Argument
from .pytrees import flatten_input
from .step import Step

if TYPE_CHECKING:
    from .plan import Plan

Key = tuple[Any, ...]


class Part(nn.Module):
    """A submodule of the user's model, reduced to its parameters, buffers and train/eval flag."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def _get_name(self) -> str:
        return self.kind

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise StateError(f"{self.kind} is part of a parallel module and has no forward of its own; call the whole module")


class Prepared:
    """A step, ready to be called: its outer graph, and where its arguments live in the module."""

    def __init__(self, step: Step, plan: Plan, variants: Callable[[tuple[int, ...]], Differentiated]) -> None:
        self.step, self.plan = step, plan
        self.variants = variants
        self.outer: GraphModule = GraphModule(nn.Module(), Graph())


class ParallelModule(GraphModule):
    """The compiled model. Built by `autopar3d.compile` and `autopar3d.simulate`, not by hand.

    Call it as the model was called. `plan`, `forward_graph` and `backward_graph` are those of the last call (before
    the first, of the example inputs): the graphs are what runs, so an edited and recompiled graph changes the next
    step. `graph` is the whole call: inputs, their shards, one call of the two graphs, outputs.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(nn.Module(), _empty_graph())
        # Not a submodule, and nothing a state_dict should see.
        object.__setattr__(self, "_engine", engine)
        self._steps: dict[Key, Prepared] = {}
        self._last: Prepared | None = None

    # -- what users look at ----------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan of the last call's shapes and modes."""
        return self._prepared.plan

    @property
    def forward_graph(self) -> GraphModule:
        """What runs forward on this rank: local ops and collectives."""
        return self._prepared.step.runs.forward

    @property
    def backward_graph(self) -> GraphModule | None:
        """What runs backward on this rank; None when nothing has a gradient."""
        return self._prepared.step.runs.backward

    @property
    def input_layouts(self) -> dict[str, Layout]:
        """Per input the layout in which ranks pass it (with inputs="sharded") or cut it themselves."""
        step = self._prepared.step
        return {
            a.names[0]: lay
            for a, lay in zip(step.program.arguments, step.argument_layouts, strict=True)
            if a.kind == "input"
        }

    @property
    def _prepared(self) -> Prepared:
        if self._last is None:
            raise StateError(
                "nothing is planned yet: pass example_inputs= to compile, or call the module once; "
                "parameters are laid out by the plan, so create the optimizer after that"
            )
        return self._last

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        self._prepared  # noqa: B018  (raises when there is no plan yet)
        return super().named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self._prepared  # noqa: B018
        return super().state_dict(*args, **kwargs)

    # -- calling -----------------------------------------------------------------------------------------------------

    def recompile(self) -> Any:
        """Generate code from `graph`, as every GraphModule does.

        The generated function takes the flat tensors; a user's call goes through `forward` below, which flattens.
        """
        code = super().recompile()
        cls = type(self)
        object.__setattr__(self, "_flat_forward", cls.__dict__["forward"])
        del cls.forward
        return code

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves, in_spec = flatten_input(args, kwargs)
        tensors = [(path, leaf) for path, leaf in leaves if isinstance(leaf, Tensor)]
        prepared = self._steps.get(self._key(in_spec, leaves))
        if prepared is None:
            self.plan_for(*args, **kwargs)
            prepared = self._prepared
        if prepared is not self._last:
            self._show(prepared)
        flat = prepared.outer(*(leaf for _, leaf in tensors))
        return _rebuild(prepared.step, flat)

    def plan_for(self, *args: Any, **kwargs: Any) -> Plan:
        """Plan a call without running it; only the tensors' shapes and dtypes are read."""
        leaves, in_spec = flatten_input(args, kwargs)
        prepared = self._engine.prepare(self, args, kwargs)
        self._show(prepared)
        # The key is made afterwards: the first planning creates the parameters that it names.
        self._steps[self._key(in_spec, leaves)] = prepared
        return prepared.plan

    def _key(self, in_spec: TreeSpec, leaves: Sequence[tuple[str, Any]]) -> Key:
        """Equal for two calls that one step serves."""
        signature = tuple(
            (tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
            for _, leaf in leaves
        )
        modes = tuple(m.training for m in self.modules())
        trainable = tuple(p.requires_grad for _, p in super().named_parameters())
        return (str(in_spec), signature, modes, trainable)

    def _show(self, prepared: Prepared) -> None:
        """Let `graph` and `code` be those of the step that runs."""
        self._last = prepared
        self._graph = prepared.outer.graph
        self._code = prepared.outer.code

    # -- holding tensors -----------------------------------------------------------------------------------------------

    def _grow(self, kinds: Mapping[str, str]) -> None:
        """Make the tree of parts: `kinds` maps every module path of the model to its class name."""
        for path, kind in kinds.items():
            if path:
                parent, _, leaf = path.rpartition(".")
                # Straight into the tables: a part may be called `graph` or `code`, which attributes refuse.
                self._part(parent)._modules[leaf] = Part(kind)

    def _part(self, path: str) -> nn.Module:
        part: nn.Module = self
        for leaf in path.split(".") if path else ():
            child = part._modules[leaf]
            assert child is not None
            part = child
        return part

    def _hold(self, argument: Argument, tensor: Tensor) -> None:
        """Register a parameter or buffer under all its names."""
        for name in argument.names:
            path, _, leaf = name.rpartition(".")
            part = self._part(path)
            if isinstance(tensor, nn.Parameter):
                part._parameters[leaf] = tensor
            else:
                part._buffers[leaf] = tensor
                if not argument.persistent:
                    part._non_persistent_buffers_set.add(leaf)

    def _held(self, name: str) -> Tensor:
        path, _, leaf = name.rpartition(".")
        part = self._part(path)
        found = part._parameters.get(leaf)
        if found is None:
            found = part._buffers[leaf]  # type: ignore[assignment]
        assert found is not None
        return found


class Engine:
    """What makes steps for a module: the compiler's side, see `compiler.Compiler`."""

    executor: Executor

    def prepare(self, module: ParallelModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Prepared:
        raise NotImplementedError


def bind(module: ParallelModule, prepared: Prepared, executor: Executor) -> None:
    """Build the outer graph of a step: inputs, their shards, one call of the two graphs, outputs."""
    step = prepared.step
    graph = Graph()
    shards, layouts = [], []
    inputs = [
        (a, lay) for a, lay in zip(step.program.arguments, step.argument_layouts, strict=True) if a.kind == "input"
    ]
    placeholders = [graph.placeholder(a.node) for a, _ in inputs]
    for placeholder, (argument, layout) in zip(placeholders, inputs, strict=True):
        layouts.append(layout)
        shards.append(graph.call_function(_Shard(executor, layout), (placeholder, str(layout)), name=f"{argument.node}_local"))
    run = graph.call_function(_RunGraphs(module, prepared, executor), tuple(shards), name="run")
    names = [r.name for r in step.program.results if r.node is not None and r.kind == "output"]
    outputs = [graph.call_function(operator.getitem, (run, i)) for i in range(len(names))]
    graph.output(tuple(outputs))
    prepared.outer = GraphModule(nn.Module(), graph)


class _Shard:
    """Node of the outer graph: this rank's part of an input."""

    def __init__(self, executor: Executor, layout: Layout) -> None:
        self.executor, self.layout = executor, layout
        self.__name__, self.__qualname__ = "shard", "shard"

    def __call__(self, tensor: Tensor, layout: str) -> Tensor | Entered:
        # One that wants a gradient must stay a tensor until autograd has seen it.
        return tensor if tensor.requires_grad else Entered(self.executor.enter(tensor, self.layout))


class _RunGraphs:
    """Node of the outer graph: forward_graph now, backward_graph when gradients come."""

    def __init__(self, module: ParallelModule, prepared: Prepared, executor: Executor) -> None:
        self.prepared, self.executor = prepared, executor
        self.__name__, self.__qualname__ = "forward_and_backward", "forward_and_backward"
        self.slots: list[tuple[dict[str, Any], str] | Tensor | None] = []
        for argument in prepared.step.program.arguments:
            if argument.kind == "input":
                self.slots.append(None)
            elif argument.kind == "constant":
                self.slots.append(prepared.step.program.constants[argument.node])
            else:
                path, _, leaf = argument.names[0].rpartition(".")
                part = module._part(path)
                table = part._parameters if argument.kind == "parameter" else part._buffers
                self.slots.append((table, leaf))
        results = [r for r in prepared.step.program.results if r.node is not None]
        self.outputs = [i for i, r in enumerate(results) if r.kind == "output"]
        self.buffers = []
        for i, r in enumerate(results):
            if r.kind == "buffer":
                path, _, leaf = r.name.rpartition(".")
                self.buffers.append((i, module._part(path)._buffers, leaf))

    def __call__(self, *shards: Any) -> list[Tensor]:
        given = iter(shards)
        tensors = [
            next(given) if s is None else s[0][s[1]] if isinstance(s, tuple) else s for s in self.slots
        ]
        grad = torch.is_grad_enabled()
        results = run_step(self.prepared.step, self.executor, tensors, self.prepared.variants, grad=grad)
        for i, table, leaf in self.buffers:
            with torch.no_grad():
                table[leaf].copy_(results[i])
        return [results[i] for i in self.outputs]


def _rebuild(step: Step, flat: Sequence[Tensor]) -> Any:
    """The model's own return value from the flat tensors."""
    tensors = iter(flat)
    leaves = [r.value if r.node is None else next(tensors) for r in step.program.results if r.kind == "output"]
    return tree_unflatten(leaves, step.program.out_spec)


def _empty_graph() -> Graph:
    graph = Graph()
    graph.output(())
    return graph


