"""trace: a model and one call of it -> a `Program`, the functional aten graph that all later passes work on.

`linear`, `layer_norm`, `scaled_dot_product_attention`, `cross_entropy_loss`, `embedding` and the like stay
single nodes. What `torch.export` alone would get silently wrong is put right here and in
`autopar3d.capture.export`, or refused:

- tied parameters, and parameters reached through plain Python lists, are one placeholder with all its names;
- two inputs that happen to be one tensor stay two placeholders;
- a buffer that forward assigns is a new value of that buffer, as is one that it changes in place;
- what a `torch.no_grad()` region computes is detached;
- a custom `autograd.Function`, whose backward export drops, is one node that applies it;
- a hook on a tensor's gradient is one, too, that all readers of the tensor read instead of it;
- a parameter or input that forward changes is an error.

Arguments that are no tensors (None, bool, int, str, ...) are static: the program holds for these values only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind, InputSpec, OutputKind, TensorArgument
from torch.fx import Graph, GraphModule, Node

from autopar3d.capture.export import TENSOR, Recording, export, own_name
from autopar3d.capture.hooks import HookedGradient, ParameterHooks
from autopar3d.capture.pytrees import flatten_input, register_caches
from autopar3d.capture.regions import traced_region
from autopar3d.errors import TraceError
from autopar3d.private import HigherOrderOperator, TreeSpec, keystr, tree_flatten_with_path, tree_leaves, tree_unflatten
from autopar3d.program import Argument, Program, Result, region, source_line


def trace(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    hooks: ParameterHooks | None = None,
) -> Program:
    """Trace `model(*args, **kwargs)` in the model's present train/eval mode.

    The model may live on any device; where it lives on "meta", tensor inputs are taken as meta tensors too.
    It is left as it was, and the program holds none of its tensors: fake values, and copies of plain tensor
    attributes.

    Args:
        hooks: those of the parameters, where `model` is a copy that has none.

    Raises:
        TraceError: the model cannot be made a graph; the message has the user's line and the reason.
    """
    register_caches()
    leaves, in_spec = flatten_input(args, kwargs or {})
    on_meta = any(p.is_meta for p in model.parameters())
    own = [_own(leaf, on_meta) if isinstance(leaf, Tensor) else leaf for _, leaf in leaves]
    own_args, own_kwargs = tree_unflatten(own, in_spec)
    return _Assembly(model, export(model, own_args, own_kwargs, hooks), leaves).program(in_spec)


def _own(leaf: Tensor, on_meta: bool) -> Tensor:
    """A tensor object of this trace's own: export merges inputs that are one object, like ids and labels."""
    own = leaf.detach()
    return (own.to("meta") if on_meta else own).requires_grad_(leaf.requires_grad)


class _Assembly:
    """Builds the program's graph from an exported one: placeholders anew, all other nodes copied."""

    def __init__(self, model: nn.Module, recording: Recording, leaves: list[tuple[str, Any]]) -> None:
        self.model = model
        self.recording = recording
        self.leaves = leaves
        self.exported = recording.program
        self.signature = recording.program.graph_signature
        self.source = recording.program.graph_module.graph
        self.graph = Graph()
        self.old = {node.name: node for node in self.source.nodes}
        self.new: dict[str, Node] = {}  # by the exported node's name
        registered = (*model.named_parameters(), *model.named_buffers())
        self.registered = {_storage(t): (name, t) for name, t in registered}
        self.held = {_storage(t): (name, t) for name, t in _plain_attributes(model)}
        self.arguments: list[Argument] = []
        self.constants: dict[str, Tensor] = {}
        self.hooked: dict[str, list[Node]] = {}  # by the exported name of a tensor, what stands for its hooks
        for node in self.source.nodes:
            call = recording.functions.get(node.target)
            if call is not None and call.cls is HookedGradient:
                self.hooked.setdefault(node.args[0].name, []).append(node)

    def program(self, in_spec: TreeSpec) -> Program:
        self._refuse_mutations()
        self._placeholders()
        hooks = {hook for hooks in self.hooked.values() for hook in hooks}
        for node in self.source.nodes:
            if node.op not in ("placeholder", "output") and node not in hooks:
                self._copy(node)
            self._hook(node)
        results = self._results()
        nodes = {node.name: node for node in self.graph.nodes}
        self.graph.output(tuple(nodes[r.node] for r in results if r.node is not None))
        return Program(
            graph=GraphModule(nn.Module(), self.graph),
            arguments=tuple(self.arguments),
            results=results,
            in_spec=in_spec,
            out_spec=self.recording.out_spec,
            constants=self.constants,
            notes=self._notes(),
        )

    def _notes(self) -> tuple[str, ...]:
        count = len({region(n) for n in self.graph.nodes} - {None})
        if not count:
            return ()
        found = (
            f"activation checkpointing: what {count} region{'s' * (count > 1)} of torch.utils.checkpoint compute"
            f"{'s' * (count == 1)} is not saved but computed again in backward, collectives of activations included"
        )
        selective = "; the context_fn (selective checkpointing) is not followed" * self.recording.selective
        return (found + selective,)

    def _refuse_mutations(self) -> None:
        inputs = [s.arg.name for s in self.signature.input_specs if s.kind is InputKind.USER_INPUT]
        paths = dict(zip(inputs, (path for path, _ in self.leaves), strict=True))
        for spec in self.signature.output_specs:
            if spec.kind is OutputKind.PARAMETER_MUTATION:
                what = f"the parameter {own_name(spec.target)}"
                way_out = "make it a buffer or a parametrization, or change it outside the model, between steps"
            elif spec.kind is OutputKind.USER_INPUT_MUTATION:
                what, way_out = f"its input {paths[spec.target]}", "work on a copy: x = x.clone()"
            else:
                continue
            raise TraceError(
                f"{self._site(self.old[spec.arg.name])} changes {what} in place inside forward, which a "
                f"compiled graph cannot represent; {way_out}"
            )

    def _placeholders(self) -> None:
        """One placeholder a parameter, buffer, constant and tensor input, in this order.

        Export has one a *name*, and makes a constant of a parameter that forward reaches through a plain
        list.
        """
        by_name: dict[str, list[str]] = {}  # a name -> the exported placeholders that stand for it
        persistent: dict[str, bool] = {}
        constants: list[InputSpec] = []
        inputs: list[InputSpec] = []
        for spec in self.signature.input_specs:
            if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
                by_name.setdefault(own_name(spec.target), []).append(spec.arg.name)
                persistent[own_name(spec.target)] = spec.persistent is not False
            elif spec.kind is InputKind.CONSTANT_TENSOR:
                name = self._registered_name(self.exported.constants[spec.target])
                if name is not None:
                    by_name.setdefault(name, []).append(spec.arg.name)
                else:
                    constants.append(spec)
            elif spec.kind is InputKind.USER_INPUT:
                inputs.append(spec)
            else:
                raise TraceError(f"{type(self.model).__name__} uses {spec.target}, a {spec.kind.name.lower()}")

        kinds: tuple[tuple[Literal["parameter", "buffer"], Iterable[tuple[str, Tensor]]], ...] = (
            ("parameter", self.model.named_parameters(remove_duplicate=False)),
            ("buffer", self.model.named_buffers(remove_duplicate=False)),
        )
        for kind, named in kinds:
            for tensor, names in _tied(named):
                node = self._placeholder(_identifier(kind, names[0]), [p for n in names for p in by_name[n]])
                keep = any(persistent[n] for n in names)
                self.arguments.append(Argument(node.name, kind, names, -1, tensor.requires_grad, keep))
        self._constants(constants)
        for index, ((path, leaf), spec) in enumerate(zip(self.leaves, inputs, strict=True)):
            if isinstance(leaf, Tensor):
                node = self._placeholder(spec.arg.name, [spec.arg.name])
                self.arguments.append(Argument(node.name, "input", (path,), index, leaf.requires_grad))

    def _registered_name(self, constant: Tensor) -> str | None:
        """The name of the parameter or buffer that is this constant of export's, if one is.

        Export detaches its constants: they are told by their storage, which meta tensors have too.
        """
        name, tensor = self.registered.get(_storage(constant), (None, None))
        if tensor is None:
            return None
        _, attribute = self.held.get(_storage(constant), (name, tensor))
        # `self.p.detach()`, kept as an attribute, is the same memory but takes no gradient.
        return name if attribute.requires_grad == tensor.requires_grad else None

    def _constants(self, specs: list[InputSpec]) -> None:
        learned = {t.untyped_storage()._cdata for t in self.model.parameters()}
        for spec in specs:
            value = self.exported.constants[spec.target]
            name, attribute = self.held.get(_storage(value), (own_name(spec.target), value))
            if value.untyped_storage()._cdata in learned:
                raise TraceError(f"{name} is a view of a parameter, made outside of forward; make it in forward")
            if attribute.requires_grad:
                raise TraceError(
                    f"forward uses {name}, which requires a gradient but is not among the model's "
                    "parameters, so that it would never train; hold it in an nn.ParameterList, "
                    "nn.ParameterDict or nn.ModuleList"
                )
            node = self._placeholder(_identifier("constant", name), [spec.arg.name])
            self.constants[node.name] = value.detach().clone()
            self.arguments.append(Argument(node.name, "constant", (name,)))

    def _placeholder(self, name: str, stands_for: list[str]) -> Node:
        """A new placeholder in place of some exported ones, which are the same tensor."""
        node = self.graph.placeholder(name)
        node.target = node.name  # codegen takes the argument's name from the target: keep the two alike
        node.meta = {"val": self.old[stands_for[0]].meta["val"]}
        self.new.update(dict.fromkeys(stands_for, node))
        return node

    def _copy(self, node: Node) -> None:
        if node.op != "call_function" or isinstance(node.target, HigherOrderOperator):
            raise TraceError(
                f"{self._site(node)} uses {node.target}, a construct with a graph of its own, which is not "
                "supported; write it with tensor ops, as torch.where"
            )
        if any(isinstance(s, torch.SymInt) for t in _tensors(node.meta.get("val")) for s in t.shape):
            raise TraceError(
                f"{self._site(node)} makes a tensor whose shape depends on values ({node.target}); use masks "
                "of a fixed shape"
            )
        self._refuse_numbers(node)
        self._refuse_dtypes(node)
        copy = self.graph.node_copy(node, lambda n: self.new[n.name])
        copy.target = self.recording.functions.get(node.target, node.target)
        copy.meta = {key: node.meta.get(key) for key in ("val", "stack_trace", "nn_module_stack")}
        copy.meta["checkpoint"] = traced_region(node)
        self.new[node.name] = copy

    def _hook(self, node: Node) -> None:
        """Let all that reads a tensor read what its hooks make of it, the first hook last, as backward runs the other
        way."""
        for hook in reversed(self.hooked.get(node.name, ())):
            later = [n.name for n in hook.all_input_nodes if n.name not in self.new]
            if later:
                raise TraceError(
                    f"{self._site(hook)} registers a hook on a tensor that reads {later[0]}, which is computed after "
                    "that tensor; compute what the hook reads first, or write it as a torch.autograd.Function"
                )
            before = self.new[node.name]
            self._copy(hook)
            after = self.new[hook.name]
            self.new.update({name: after for name, new in self.new.items() if new is before})

    def _refuse_numbers(self, node: Node) -> None:
        """Raise if a tensor is computed from a number that was read from a tensor."""
        numbers = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), _NUMBERS)]
        if numbers and _tensors(node.meta.get("val")):
            raise TraceError(
                f"{self._site(node)} computes with a number that was read from a tensor (.item(), float(), int()), "
                "which differs from batch to batch. Compute with the tensor itself, detached if it shall not train"
            )

    def _refuse_dtypes(self, node: Node) -> None:
        """Raise if a product is of two dtypes: fake tensors let it pass, real ones do not."""
        if getattr(node.target, "overloadpacket", None) not in _PRODUCTS:
            return
        found = [n for n in node.all_input_nodes if n.meta["val"].dtype != torch.bool]
        if len({n.meta["val"].dtype for n in found}) > 1:
            names = {s.arg.name: own_name(s.target) for s in self.signature.input_specs if s.target is not None}
            names |= {s.arg.name: path for (path, _), s in zip(self.leaves, self._inputs(), strict=True)}
            listed = ", ".join(f"{names.get(n.name, n.name)} {n.meta['val'].dtype}" for n in found)
            raise TraceError(
                f"{self._site(node)} multiplies tensors of different dtypes ({node.target}: {listed}); convert the "
                "input to the parameters' dtype, or the model to the input's"
            )

    def _inputs(self) -> list[InputSpec]:
        return [s for s in self.signature.input_specs if s.kind is InputKind.USER_INPUT]

    def _site(self, node: Node) -> str:
        """The model's class and, where it is known, the line: how a message begins."""
        line = source_line(node)
        return type(self.model).__name__ + (f", at {line}," if line else "")

    def _results(self) -> tuple[Result, ...]:
        specs = self.signature.output_specs
        tensors = iter(s.arg for s in specs if s.kind is OutputKind.USER_OUTPUT)
        results = []
        for path, value in self.recording.outputs:
            if value is TENSOR:
                arg = next(tensors)
                assert isinstance(arg, TensorArgument)
                results.append(Result("output", path, self.new[arg.name].name))
            else:
                results.append(Result("output", path, None, value))
        for spec in specs:
            if spec.kind is OutputKind.BUFFER_MUTATION:
                name = self._canonical(own_name(spec.target))
                results.append(Result("buffer", name, self.new[spec.arg.name].name))
        return tuple(results)

    def _canonical(self, name: str) -> str:
        return next(a.names[0] for a in self.arguments if a.kind == "buffer" and name in a.names)


_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)

_PRODUCTS = {
    getattr(torch.ops.aten, name)
    for name in (
        *("linear", "mm", "matmul", "bmm", "addmm", "baddbmm", "addbmm", "mv", "dot", "bilinear"),
        *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution"),
        "scaled_dot_product_attention",
    )
}


def _identifier(kind: str, name: str) -> str:
    return re.sub(r"\W+", "_", f"{kind[0]}_{name}").rstrip("_")


def _tied(named: Iterable[tuple[str, Tensor]]) -> list[tuple[Tensor, tuple[str, ...]]]:
    """Every tensor once, in order, with all its names."""
    names: dict[int, tuple[Tensor, list[str]]] = {}
    for name, tensor in named:
        names.setdefault(id(tensor), (tensor, []))[1].append(name)
    return [(tensor, tuple(found)) for tensor, found in names.values()]


def _storage(t: Tensor) -> tuple[Any, ...]:
    """Equal for two tensors that are one piece of memory seen in one way."""
    # `_cdata` is the address of the storage object; `data_ptr()` is 0 on meta.
    return t.untyped_storage()._cdata, t.storage_offset(), tuple(t.shape), t.stride(), t.dtype


def _plain_attributes(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """The tensors that modules hold without registering them, in lists and dicts too, by a readable name."""
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute in ("_parameters", "_buffers", "_modules"):
                continue
            found, _ = tree_flatten_with_path(value)
            for keys, leaf in found:
                name = f"{path}.{attribute}{keystr(keys)}".removeprefix(".")
                if isinstance(leaf, Tensor):
                    yield name, leaf
                elif isinstance(leaf, nn.Module):
                    yield from ((f"{name}.{inner}", p) for inner, p in leaf.named_parameters())


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
