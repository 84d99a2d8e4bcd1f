"""differentiate: a `LocalProgram` -> its forward and backward graphs, as plain aten and functional collectives.

The local program is run once on fake tensors while autograd records and `make_fx` traces, forward and backward in one
graph; ops need no backward rules. The joint graph is then cut in two. What the backward reads of the forward is saved,
with three exceptions, which the backward computes again: views (their memory is saved anyway), gathers that the
`regather` option drops, with the local reordering that follows them, and `axis_index`. So only shards are saved. And
nothing is saved inside of a region of activation checkpointing (`program.region`), but what is read outside of it: the
backward computes the region again, its collectives included, right before it first needs something of it. (The rest
is autograd's own choice of what to keep, as the eager backend wants it: recomputing elementwise ops pays only where a
compiler fuses them.)
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from autopar3d.collectives import KINDS, gather
from autopar3d.errors import TraceError
from autopar3d.private import FakeTensor, FakeTensorMode, OpOverload
from autopar3d.program import region
from autopar3d.rules.complex import LAZY
from autopar3d.search.saved import use_stand_ins
from autopar3d.timelines.timing import seconds

from .recompute import Machine, cheapest
from .rewrite import LocalProgram

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

# Keys that a traced node takes over from the local program's node.
_KEPT = ("stack_trace", "nn_module_stack")


@dataclass(frozen=True)
class Differentiated:
    """What runs.

    Attributes:
        forward: takes the local arguments, returns (*results, *saved).
        backward: takes (*saved, *tangents), returns the gradients; None when nothing has a gradient.
        inference: takes the local arguments, returns the results only.
        results: number of results.
        differentiable: numbers of the results that have a gradient.
        tangents: numbers of the results whose gradients the backward takes.
        gradients: numbers of the arguments whose gradients the backward returns, in order.
        again: where the model has regions of activation checkpointing, by the name of a node of the local program the
            kinds of its collectives that the backward repeats.
        recomputing: seconds in which the backward computes again what was not saved to free memory (`recompute`).
    """

    forward: GraphModule
    backward: GraphModule | None
    inference: GraphModule
    results: int
    differentiable: frozenset[int]
    tangents: tuple[int, ...]
    gradients: tuple[int, ...]
    again: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    recomputing: float = 0.0


def differentiate(
    local: LocalProgram,
    values: Sequence[Tensor],
    requires_grad: Sequence[bool],
    *,
    seeds: Sequence[int] | None = None,
    free: float = 0.0,
    machine: Machine | None = None,
) -> Differentiated:
    """Trace and cut.

    Args:
        values: one (fake or meta) tensor per argument, of its global shape; dtype and device are read from it.
        requires_grad: per argument, whether its gradient is wanted.
        seeds: numbers of the results from which gradients flow; all that have one by default.
        free: so many bytes less are saved, as far as computing again frees them (`recompute`); `machine`: on which to
            weigh that.
    """
    joint = _Joint(local, values, requires_grad, seeds)
    # On CPU torch would run an LSTM as one op of oneDNN, whose backward works in the call that recorded it only.
    before = torch.backends.mkldnn.set_flags(False)
    try:
        joint.trace()
    finally:
        torch.backends.mkldnn.set_flags(before[0])
    return _Cut(joint, free, machine).split()


class _Recorder(Interpreter):
    """Runs the local program and writes down which traced nodes each of its nodes made."""

    def __init__(self, module: GraphModule, joint: _Joint) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.joint = joint

    def run_node(self, n: Node) -> Any:
        start = self.joint.position()
        out = super().run_node(n)
        if n.op == "call_function":
            self.joint.forward_ranges.append((start, self.joint.position(), n))
            for t in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(t, Tensor) and t.grad_fn is not None:
                    t.grad_fn.register_prehook(
                        lambda grads, n=n: self.joint.backward_marks.append((self.joint.position(), n))
                    )
        return out


class _Joint:
    def __init__(
        self,
        local: LocalProgram,
        values: Sequence[Tensor],
        requires_grad: Sequence[bool],
        seeds: Sequence[int] | None,
    ) -> None:
        self.local, self.values, self.requires_grad, self.seeds = local, values, requires_grad, seeds
        self.forward_ranges: list[tuple[int, int, Node]] = []
        self.backward_marks: list[tuple[int, Node]] = []
        self.boundary = 0
        self.differentiable: frozenset[int] = frozenset()
        self.tangents: list[int] = []
        self.gradients: list[int] = []
        self.results = 0
        self.graph: Graph

    def position(self) -> int:
        """How many nodes have been traced so far."""
        mode = get_proxy_mode()
        assert mode is not None
        return len(mode.tracer.graph.nodes)

    def trace(self) -> None:
        placeholders = [n for n in self.local.graph.graph.nodes if n.op == "placeholder"]
        mode = FakeTensorMode()
        with mode:
            inputs = [
                torch.empty(n.meta["shape"], dtype=v.dtype, device=v.device, requires_grad=g)
                for n, v, g in zip(placeholders, self.values, self.requires_grad, strict=True)
            ]
            with torch.no_grad():
                outs = Interpreter(self.local.graph).run(*inputs)
            tangents = [torch.empty_like(o, requires_grad=False) for o in outs]
            # Tracing twice is cheap beside what it saves: the tangents' shapes are known before the trace.
            # (fx counts a bound method's self among the arguments, hence the lambda.)
            traced = make_fx(lambda i, t: self._run(i, t))(inputs, tangents)
            self.graph = traced.graph
            if any(_changes_in_place(node) for node in self.graph.nodes):
                traced = self._make_functional(traced, [*inputs, *tangents])
        _write_out_constants(traced)
        use_stand_ins(self.graph)

    def _make_functional(self, traced: GraphModule, values: list[Tensor]) -> GraphModule:
        """Trace again without the in-place ops that a custom autograd function brought along."""
        moved: list[int] = []  # by position in the old graph, that in the new one
        joint = self

        class Mover(Interpreter):
            def run_node(self, n: Node) -> Any:
                moved.append(joint.position())
                return super().run_node(n)

        def run(*flat: Tensor) -> Any:
            return Mover(traced, garbage_collect_values=False).run(*flat, enable_io_processing=False)

        with torch.no_grad():
            plain = [v.detach() for v in values]
            functional = make_fx(torch.func.functionalize(run, remove="mutations"))(*plain)
        self.graph = functional.graph
        moved.append(len(self.graph.nodes))
        self.forward_ranges = [(moved[start], moved[end], node) for start, end, node in self.forward_ranges]
        self.backward_marks = [(moved[position], node) for position, node in self.backward_marks]
        self.boundary = moved[self.boundary]
        return functional

    def _run(self, inputs: list[Tensor], tangents: list[Tensor]) -> Any:
        with torch.enable_grad():
            outs = list(_Recorder(self.local.graph, self).run(*inputs))
            self.results = len(outs)
            self.boundary = self.position()
            wanted = range(len(outs)) if self.seeds is None else self.seeds
            self.differentiable = frozenset(i for i, o in enumerate(outs) if o.requires_grad)
            self.tangents = [i for i in wanted if i in self.differentiable]
            sources = [x for x, g in zip(inputs, self.requires_grad, strict=True) if g]
            grads: list[Tensor | None] = [None] * len(sources)
            if self.tangents and sources:
                grads = list(
                    torch.autograd.grad(
                        [outs[i] for i in self.tangents],
                        sources,
                        [tangents[i] for i in self.tangents],
                        allow_unused=True,
                    )
                )
        numbers = [i for i, g in enumerate(self.requires_grad) if g]
        self.gradients = [i for i, g in zip(numbers, grads, strict=True) if g is not None]
        return [*outs, *(g for g in grads if g is not None)]


class _Cut:
    def __init__(self, joint: _Joint, free: float = 0.0, machine: Machine | None = None) -> None:
        self.joint, self.free, self.machine, self.recomputing = joint, free, machine, 0.0
        self.nodes = list(joint.graph.nodes)
        self.placeholders = [n for n in self.nodes if n.op == "placeholder"]
        arguments = len(joint.values)
        self.arguments, self.tangent_nodes = self.placeholders[:arguments], self.placeholders[arguments:]
        flat: list[Any] = list(self.nodes[-1].args[0])
        self.outs, self.grads = flat[: joint.results], flat[joint.results :]
        self.is_forward = {n: i < joint.boundary for i, n in enumerate(self.nodes)}
        self.repeatable: set[Node] = set()
        self._annotate()
        self.repeatable |= self._inside_regions()

    def _annotate(self) -> None:
        """Module paths and source lines on every node, and the marks of what may be computed again."""
        for start, end, origin in self.joint.forward_ranges:
            drops = origin.meta.get("regather", False)
            # All of a gather is done again, the copy that makes its source contiguous included; of a regroup only
            # what follows its reduce_scatter.
            dropping = drops and origin.target is gather
            for node in self.nodes[start:end]:
                node.meta.update({k: origin.meta[k] for k in _KEPT if k in origin.meta})
                dropping |= drops and node.target is c10d.all_gather_into_tensor.default
                if dropping or _is_free(node):
                    self.repeatable.add(node)
        marks = self.joint.backward_marks
        bounds = [*(m for m, _ in marks), len(self.nodes)]
        for (start, origin), end in zip(marks, bounds[1:], strict=True):
            for node in self.nodes[start:end]:
                node.meta.update({k: origin.meta[k] for k in _KEPT if k in origin.meta})

    def _inside_regions(self) -> set[Node]:
        """Nodes of regions of activation checkpointing that nothing outside their region reads.

        What is computed again anyway where it is read (a view, a gather that is dropped) is looked through: else its
        source would be computed again for a reader outside, and with it the region, and the one before it, and so on.
        """
        regions = {}
        for start, end, origin in self.joint.forward_ranges:
            number = region(origin)
            if number is not None:
                regions.update(dict.fromkeys(self.nodes[start:end], number))
        leaving = set(self.outs)
        for node in reversed(regions):
            readers = [user for user in node.users if self.is_forward[user]]
            if any(regions.get(u) != regions[node] or (u in leaving and u in self.repeatable) for u in readers):
                leaving.add(node)
        return regions.keys() - leaving

    def _again(self, repeated: set[Node]) -> dict[str, tuple[str, ...]]:
        """See `Differentiated.again`."""
        found: dict[str, tuple[str, ...]] = {}
        if all(region(origin) is None for _, _, origin in self.joint.forward_ranges):
            return found
        for start, end, origin in self.joint.forward_ranges:
            done = [n for n in self.nodes[start:end] if n in repeated and n.target in KINDS]
            found[origin.name] = tuple(KINDS[n.target] for n in done)
        return found

    def split(self) -> Differentiated:
        backward = Graph()
        saved: dict[Node, Node] = {}
        copied: dict[Node, Node] = {}
        tangents = [self.tangent_nodes[i] for i in self.joint.tangents]
        live = self._live(self.grads)
        body = [n for n in self.nodes if not self.is_forward[n] and n in live and n.op == "call_function"]
        # First find what is saved: placeholders come before everything else.
        self._save(body, saved)
        if self.free > 0 and self.machine is not None:
            again = {n for n in self._live([*body, *self.grads], stop=saved) if n in self.repeatable}
            found = cheapest(saved, self.repeatable, again, self.outs, self.free, self.machine)
            self.repeatable |= found
            self.recomputing = sum(seconds(n, self.machine.hardware, self.machine.grid) for n in found)
            saved.clear()
            self._save(body, saved)
        for node in saved:
            copied[node] = _placeholder(backward, node.name, node)
        for i, node in zip(self.joint.tangents, tangents, strict=True):
            copied[node] = _placeholder(backward, f"tangent_{i}", node)
        for node in [*body, *self.grads]:
            self._copy(node, backward, copied)
        backward.output(tuple(copied[g] for g in self.grads))

        forward = self._forward([*self.outs, *saved])
        inference = self._forward(self.outs)
        return Differentiated(
            forward,
            _finish(backward) if self.grads else None,
            inference,
            self.joint.results,
            self.joint.differentiable,
            tuple(self.joint.tangents),
            tuple(self.joint.gradients),
            self._again({n for n in copied if self.is_forward[n]} - saved.keys()),
            self.recomputing,
        )

    def _live(self, outputs: list[Node], stop: Collection[Node] = ()) -> set[Node]:
        """What these nodes read, directly or not, and they themselves; nothing beyond those in `stop`."""
        live, todo = set(), list(outputs)
        while todo:
            node = todo.pop()
            if node not in live:
                live.add(node)
                todo += node.all_input_nodes if node not in stop else ()
        return live

    def _save(self, body: list[Node], saved: dict[Node, Node]) -> None:
        for node in body:
            for source in node.all_input_nodes:
                self._find(source, saved)
        for grad in self.grads:
            self._find(grad, saved)

    def _find(self, node: Node, saved: dict[Node, Node]) -> None:
        """What must be saved so that the backward has `node`."""
        todo = [node]
        while todo:
            n = todo.pop()
            if not self.is_forward[n] or n in self.tangent_nodes or n in saved:
                continue
            if n in self.repeatable and n.op == "call_function":
                todo += n.all_input_nodes
            else:
                saved[n] = n

    def _copy(self, node: Node, graph: Graph, copied: dict[Node, Node]) -> None:
        """Copy a node into the backward, after whatever forward nodes it needs again."""
        todo = [node]
        while todo:
            n = todo[-1]
            missing = [m for m in n.all_input_nodes if m not in copied] if n not in copied else []
            if missing:
                todo += missing
                continue
            todo.pop()
            if n not in copied:
                copied[n] = graph.node_copy(n, lambda m: copied[m])

    def _forward(self, outputs: list[Node]) -> GraphModule:
        graph = Graph()
        copied: dict[Node, Node] = {}
        names = [n for n in self.joint.local.graph.graph.nodes if n.op == "placeholder"]
        for node, named in zip(self.arguments, names, strict=True):
            copied[node] = _placeholder(graph, named.name, node)
        live = self._live(outputs)
        for node in self.nodes:
            if self.is_forward[node] and node in live and node.op == "call_function":
                copied[node] = graph.node_copy(node, lambda m: copied[m])
        graph.output(tuple(copied[n] for n in outputs))
        return _finish(graph)


def _write_out_constants(traced: GraphModule) -> None:
    """Turn the numbers that a custom autograd function made tensors of, as `x[mask] = 0` does, into ops."""
    for node in traced.graph.find_nodes(op="get_attr"):
        value = getattr(traced, node.target)
        value = getattr(value, "constant", None) if isinstance(value, FakeTensor) else value
        if value is None or value.numel() != 1:
            raise TraceError(
                "a custom torch.autograd.Function makes a tensor of numbers (torch.tensor([...])) in its forward or "
                "backward: make it outside, a buffer of the model, and pass it as an argument"
            )
        with traced.graph.inserting_before(node):
            where = {"dtype": value.dtype, "device": value.device}
            made = traced.graph.call_function(aten.full.default, (list(value.shape), value.item()), where)
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        traced.graph.erase_node(node)


def _changes_in_place(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _placeholder(graph: Graph, name: str, like: Node) -> Node:
    node = graph.placeholder(name)
    node.target = node.name
    node.meta = {k: v for k, v in like.meta.items() if k in ("val", *_KEPT)}
    return node


_VIEWS = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.expand.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.slice.Tensor,
    aten.select.int,
    aten.alias.default,
    aten.detach.default,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unbind.int,
    aten.as_strided.default,
    aten.view_as_real.default,
    aten.view_as_complex.default,
}


def _is_free(node: Node) -> bool:
    """Ops that cost nothing to repeat, so that their source is saved instead."""
    if node.target is operator.getitem:
        return _is_free(node.all_input_nodes[0])
    return node.target in _VIEWS or node.target is torch.ops.autopar3d.axis_index.default


def _finish(graph: Graph) -> GraphModule:
    """Tidy a traced graph: strides may differ at run time from those traced, and one `axis_index` a group is enough."""
    seen: dict[Any, Node] = {}
    for node in list(graph.nodes):
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default
        node.target = LAZY.get(node.target, node.target)
        if node.target is torch.ops.autopar3d.axis_index.default:
            first = seen.setdefault(node.args, node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)
        elif node.target in (aten.detach.default, aten.alias.default):
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.erase_node(node)
    for node in graph.nodes:
        kept = ("val", "tensor_meta", *_KEPT)
        node.meta = {k: v for k, v in node.meta.items() if k in kept}
    graph.lint()
    return GraphModule(torch.nn.Module(), graph)
