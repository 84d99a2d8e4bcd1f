"""Accounting for a step: from what the passes found and emitted to the `Plan` that users read."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from autopar3d.private import tree_leaves

from ..collectives import collectives
from ..cost import collective_seconds, compute_seconds, per_unit
from ..layout import Layout
from ..passes.rewrite import Movement
from ..plan import OpPlan, OutputPlan, ParameterPlan, Plan, Repeated, Sent
from ..program import module_path, source_line, text
from ..progress import stage
from ..redistribute import State
from ..rules import OpSpec, operands, results
from ..search.factors import is_getitem, producer
from ..search.padding import pads_of
from ..search.readings import backward_share, gradients
from ..search.replicas import idle
from ..search.saved import is_view
from ..search.strategies import Strategy, given
from ..step import Options, Step
from ..timelines import timing
from ..timelines.recording import predict
from ..timelines.timeline import timeline
from .attribution import Attribution

# What users call the factors of the rules of attention and of convolutions.
_FACTOR_NAMES = {
    "attention": {"h": "heads", "g": "group", "s": "queries", "b": "batch"},
    "norm": {"h": "hidden"},
    "conv": {"n": "batch", "g": "groups", "i": "in", "o": "out"},
}

_FREE = "no gradient flows here, so repeating it is free"


@stage("accounting")
def make_plan(
    step: Step,
    forward: GraphModule | None = None,
    backward: GraphModule | None = None,
    *,
    options: Options | None = None,
) -> Plan:
    """The plan of a step.

    Args:
        forward, backward: the graphs that run, when they are not `step.runs`' own.
        options: what the user asked for, to be printed.
    """
    return _Accountant(step, forward or step.runs.forward, backward or step.runs.backward).plan(options)


class _Accountant:
    def __init__(self, step: Step, forward: GraphModule, backward: GraphModule | None) -> None:
        self.step, self.forward, self.backward = step, forward, backward
        self.program, self.decisions, self.factors = step.program, step.decisions, step.factors
        self.grid, self.hardware = step.decisions.grid, step.decisions.hardware
        self.graph = step.program.graph.graph
        self.nodes: dict[str, Node] = {n.name: n for n in self.graph.nodes}
        self.grads = gradients(step.program)
        self.owed = Attribution(step)

    def plan(self, options: Options | None) -> Plan:
        decisions, grid = self.decisions, self.grid
        lines = [timeline(g, grid, self.hardware) for g in self._graphs()]
        memory = self._memory()
        memory |= {f"peak {name}": line.peak_bytes for name, line in zip(("forward", "backward"), lines, strict=False)}
        memory["needed"] = self._needed(memory)
        flops = [sum(timing.flops(n) for n in g.graph.nodes if n.op == "call_function") for g in self._graphs()]
        unshared = idle(self.program, decisions.strategies, grid)
        return Plan(
            grid=grid.sizes,
            replicas=grid.replicas,
            hardware=self.hardware.name,
            scheme=options.scheme if options else "",
            regather=options.regather if options else "",
            inputs=options.inputs if options else "",
            strategies={n: str(s) for n, s in decisions.strategies.items()},
            storage={n: str(self._layout(self.nodes[n], s)) for n, s in decisions.storage.items()},
            copies={n: str(self._layout(self.nodes[n], s)) for n, s in decisions.copies.items()},
            parameters=self._parameters(),
            ops=tuple(self._op(n) for n in self.factors.specs if self._is_listed(n)),
            outputs=self._outputs(),
            traffic=_sent(self.step.local.movements),
            calls=dict(Counter(c.axis for g in self._graphs() for c in collectives(g))),
            memory=memory,
            forward_flops=float(flops[0]),
            backward_flops=float(sum(flops[1:])),
            ideal_flops=self._all_flops() / grid.size,
            seconds=sum(t.seconds for t in lines),
            compute=sum(t.compute for t in lines),
            communication={a: sum(t.communication.get(a, 0.0) for t in lines) for a in grid.axes},
            exposed={a: sum(t.exposed.get(a, 0.0) for t in lines) for a in grid.axes},
            objective=decisions.cost,
            bound=decisions.bound,
            exact=decisions.exact,
            whole=dict(decisions.whole),
            repeated=self._repeated(),
            without_rule={op: len(nodes) for op, nodes in self.factors.without_rule.items()},
            hash=self._hash(),
            notes=(
                *self.program.notes,
                *self._off_scheme(options),
                *self._padded(),
                *([unshared] if unshared else []),
                *([self.step.note] if self.step.note else []),
            ),
            pads=pads_of(self.factors),
            lanes=self.step.lanes,
            free=options.free if options else 0.0,
            timeline=predict(dict(zip(("forward", "backward"), self._graphs(), strict=False)), grid, self.hardware),
        )

    def _graphs(self) -> list[GraphModule]:
        return [self.forward] if self.backward is None else [self.forward, self.backward]

    def _layout(self, value: Node, state: State) -> Layout:
        shape = self.factors.values.get(value)
        return Layout.replicated(value.meta["val"].dim()) if shape is None else shape.layout(state, self.grid)

    def _strategy(self, node: Node) -> Strategy:
        return self.decisions.strategies[node.name]

    # -- lines of the plan -------------------------------------------------------------------------------------------

    def _parameters(self) -> tuple[ParameterPlan, ...]:
        found = []
        arguments = self.program.arguments
        for i, (argument, layout) in enumerate(zip(arguments, self.step.argument_layouts, strict=True)):
            if argument.kind != "parameter":
                continue
            node = self.nodes[argument.node]
            val = node.meta["val"]
            movements = self.owed.parameters.get(node, [])
            sent = _sent(movements)
            reduced = {s.axis for s in sent if s.phase == "backward" and s.kind != "all_gather"}
            found.append(
                ParameterPlan(
                    argument.names,
                    tuple(val.shape),
                    _dtype(val),
                    str(layout),
                    layout.local_shape(val.shape, self.grid),
                    i in self.step.runs.gradients,
                    tuple(sorted({s.axis for s in sent if s.kind == "all_gather" and s.phase == "forward"})),
                    tuple(sorted(reduced)),
                    sent,
                )
            )
        return tuple(found)

    def _is_listed(self, node: Node) -> bool:
        spec = self.factors.specs[node]
        return bool(spec.flops) or any(m.transfers for m in self.owed.ops.get(node, ()))

    def _op(self, node: Node) -> OpPlan:
        spec, strategy = self.factors.specs[node], self._strategy(node)
        value = node
        if not isinstance(node.meta["val"], Tensor):
            value = next((u for u in node.users if is_getitem(u)), node)
        number = producer(value)[1]
        shape: tuple[int, ...] = ()
        layout, local = "-", shape
        if value in self.factors.values:
            shape = tuple(value.meta["val"].shape)
            placed = self._layout(value, given(spec, strategy, number))
            layout, local = str(placed), placed.local_shape(shape, self.grid)
        sent = _sent(self.owed.ops.get(node, ()))
        return OpPlan(
            name=node.name,
            module=module_path(node),
            source=source_line(node),
            op=_op_name(node),
            shape=shape,
            layout=layout,
            local_shape=local,
            strategy=str(strategy),
            roles=self._roles(node, spec, strategy),
            flops=spec.flops / self.grid.extent(strategy.axes),
            seconds=self._op_seconds(node, spec, strategy) + self._sending_seconds(sent),
            sent=sent,
        )

    def _roles(self, node: Node, spec: OpSpec, strategy: Strategy) -> str:
        """The strategy in words; see `OpPlan.roles`."""
        parts: dict[str, str] = {}
        weight = self._weight(node) if spec.flops and "conv" not in _op_name(node) else None
        out = {f for dims in spec.outputs for f in spec.atoms(dims)}
        names = next((v for k, v in _FACTOR_NAMES.items() if k in _op_name(node)), {})
        for f, axes in strategy.assigned:
            if weight is not None:
                held = f in spec.atoms(spec.inputs[weight])
                role = ("a" if f in out else "c") if held else "b"
                parts[role] = parts.get(role, "") + "".join(axes)
            else:
                plain = f.split("/")[0]
                word = names.get(plain) or names.get(plain.rstrip("0123456789")) or plain
                parts[word] = parts.get(word, "") + "".join(axes)
        if weight is not None:
            shown = [f"{r}={parts[r]}" for r in "abc" if r in parts]
        else:
            shown = [f"{word}:{axes}" for word, axes in parts.items()]
        if strategy.through:
            shown.append("sum:" + "".join(strategy.through))
        idle = self._idle(strategy)
        return " ".join(shown + ([f"repeat:{idle}"] if idle else []))

    def _weight(self, node: Node) -> int | None:
        """Number of the operand that is a parameter matrix, in whatever form."""
        found = [i for i, o in enumerate(operands(node)) if self.owed.root(o) is not None and o.meta["val"].dim() > 1]
        return found[-1] if found else None

    def _idle(self, strategy: Strategy) -> str:
        used = (*strategy.axes, *strategy.through)
        return "".join(a for a in self.grid.axes if a not in used)

    def _op_seconds(self, node: Node, spec: OpSpec, strategy: Strategy) -> float:
        """Roofline of the op on one rank, forward and backward."""
        axes_of = strategy.axes_of
        tensors = [*zip((o.meta["val"] for o in operands(node)), spec.inputs, strict=True)]
        tensors += [(r, d) for r, d in zip(results(node), spec.outputs, strict=False) if r is not None]
        moved = 0.0
        for val, dims in tensors:
            share = self.grid.extent([a for f in spec.atoms(dims) for a in axes_of.get(f, ())])
            moved += val.numel() * val.dtype.itemsize / share
        rates = per_unit(self.hardware.rate(tensors[-1][0].dtype)), per_unit(self.hardware.memory)
        once: float = compute_seconds(spec.flops / self.grid.extent(strategy.axes), moved, *rates)
        return (1.0 + self._backward_share(node, spec)) * once

    def _sending_seconds(self, sent: Iterable[Sent]) -> float:
        total = 0.0
        for s in sent:
            link = self.hardware.link(s.axis, self.grid)
            total += collective_seconds(s.calls, s.bytes, link.latency, per_unit(link.bandwidth))
        return total

    def _backward_share(self, node: Node, spec: OpSpec) -> float:
        return backward_share(node, spec, self.grads)

    def _all_flops(self) -> float:
        """FLOPs of the whole step, all ranks together, when no work is done twice."""
        specs = self.factors.specs.items()
        return sum(_true_flops(s) * (1.0 + self._backward_share(n, s)) for n, s in specs if s.flops)

    def _padded(self) -> list[str]:
        """A note per length that was made longer, with the heavy ops that have it."""
        where: dict[tuple[int, int], list[str]] = {}
        for node, spec in self.factors.specs.items():
            for f, n in spec.true.items():
                modules = where.setdefault((n, spec.sizes[f]), [])
                if spec.flops:
                    modules.append(module_path(node) or "(model)")
        notes = []
        for (n, longer), modules in where.items():
            names = ", ".join(dict.fromkeys(modules)) or "no matmul"
            notes.append(f"the grid does not divide {n}: padded to {longer} ({longer / n - 1:.1%} more) in {names}")
        return notes

    def _off_scheme(self, options: Options | None) -> list[str]:
        """A note that names the products which a scheme was asked for, and does not fit."""
        shapes: dict[str, list[str]] = {}
        for name in self.decisions.off_scheme:
            node = self.nodes[name]
            sizes = [val.shape for val in (o.meta["val"] for o in operands(node)) if val.dim() > 1]
            shown = " by ".join("x".join(map(str, s)) for s in sizes)
            shapes.setdefault(shown, []).append(module_path(node) or name)
        if not shapes:
            return []
        listed = "; ".join(f"{', '.join(dict.fromkeys(where))} ({shown})" for shown, where in shapes.items())
        asked = f"scheme={options.scheme!r}" if options else "the scheme"
        return [f"{asked} does not fit the sizes of these on grid {self.grid}, so they are planned by cost: {listed}"]

    def _outputs(self) -> tuple[OutputPlan, ...]:
        found = []
        present = [r for r in self.program.results if r.node is not None]
        counted: set[str] = set()  # a value that leaves twice is moved once
        for result, mode, layout in zip(present, self.step.outputs, self.step.local.results, strict=True):
            assert result.node is not None
            movements = [] if result.node in counted else self.owed.outputs.get(result.node, [])
            counted.add(result.node)
            shape = tuple(self.nodes[result.node].meta["val"].shape)
            found.append(OutputPlan(result.name, mode, shape, str(layout), _sent(movements)))
        return tuple(found)

    def _repeated(self) -> tuple[Repeated, ...]:
        found: dict[tuple[str, str, str, bool], list[str]] = {}
        for node, spec in self.factors.specs.items():
            axes = self._idle(self._strategy(node))
            if axes and not is_view(node):
                why = self._why_repeated(node, spec, axes)
                free = node not in self.grads and why == _FREE
                found.setdefault((_op_name(node), axes, why, free), []).append(module_path(node))
        ordered = sorted(found.items(), key=lambda item: item[0][3])
        return tuple(Repeated(*key, tuple(modules)) for key, modules in ordered)

    def _why_repeated(self, node: Node, spec: OpSpec, axes: str) -> str:
        if str(node.target) in self.factors.without_rule:
            return "no rule"
        free = [n for f, n in spec.sizes.items() if f not in spec.whole]
        if not spec.sizes:
            return "a single number"
        if not free:
            return "its dims must stay whole"
        if all(n % self.grid.axis_size(a) for n in free for a in axes):
            return "no dim that it may split is divisible"
        if node not in self.grads:
            return _FREE
        return "small, or cheaper than moving it"

    # -- totals --------------------------------------------------------------------------------------------------------

    def _memory(self) -> dict[str, int]:
        sizes: Counter[str] = Counter()
        for i, (argument, layout) in enumerate(zip(self.program.arguments, self.step.argument_layouts, strict=True)):
            val = self.nodes[argument.node].meta["val"]
            dtype = argument.stored or val.dtype
            size = math.prod(layout.local_shape(val.shape, self.grid)) * dtype.itemsize
            if argument.kind == "parameter":
                sizes["parameters"] += size
                if i in self.step.runs.gradients:
                    sizes["gradients"] += size
                    sizes["optimizer"] += 2 * size
            else:
                sizes["inputs" if argument.kind == "input" else "buffers"] += size
        for node, layout in zip(self._output_nodes(), self.step.local.results, strict=True):
            val = node.meta["val"]
            sizes["outputs"] += math.prod(layout.local_shape(val.shape, self.grid)) * val.dtype.itemsize
        sizes["activations"] = saved_bytes(self.forward, self.step.runs.results)
        order = ("parameters", "gradients", "optimizer", "buffers", "activations", "inputs", "outputs")
        return {name: sizes[name] for name in order}

    def _needed(self, memory: dict[str, int]) -> int:
        """Bytes for a training step: what stays, and the larger working set of the two graphs beside it."""
        stays = memory["parameters"] + memory["gradients"] + memory["optimizer"] + memory["buffers"]
        working = memory["peak forward"] - memory["parameters"] - memory["buffers"]
        if self.backward is not None:
            held = {a.node for a in self.program.arguments if a.kind in ("parameter", "buffer")}
            read = [n for n in self.backward.graph.nodes if n.op == "placeholder" and n.name in held]
            given = sum(timing.output_bytes(n) for n in read)
            working = max(working, memory["peak backward"] - given - memory["gradients"])
        return int(stays + max(0, working))

    def _output_nodes(self) -> Sequence[Node]:
        return [self.nodes[r.node] for r in self.program.results if r.node is not None]

    def _hash(self) -> str:
        """Of everything that must be the same on every rank."""
        d = self.decisions
        parts = [
            str((self.grid.sizes, self.grid.ranks)),
            *([f"replicas {self.grid.replicas}"] if self.grid.replicas > 1 else []),
            *(f"{n} {s}" for n, s in sorted(d.strategies.items())),
            *(f"{n} {tuple(s)}" for table in (d.storage, d.copies) for n, s in sorted(table.items())),
            *(
                f"{a.node} {a.kind} {a.names} {lay}"
                for a, lay in zip(self.program.arguments, self.step.argument_layouts, strict=True)
            ),
            *(f"{r.kind} {r.name} {r.node}" for r in self.program.results),
            *map(str, self.step.local.results),
            *(graph_text(g) for g in self._graphs()),
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def graph_text(module: GraphModule) -> str:
    """What two graphs that do the same have in common: every node with its arguments, dtype and local shape."""
    return text(module)


def saved_bytes(forward: GraphModule, results: int) -> int:
    """Bytes of the distinct storages that a forward graph keeps for backward, other than its arguments'."""
    arguments = {_storage(n.meta["val"]) for n in forward.graph.nodes if n.op == "placeholder"}
    kept: dict[int, int] = {}
    outputs: Any = forward.graph.output_node().args[0]
    for node in outputs[results:]:
        for val in tree_leaves(node.meta["val"]):
            if isinstance(val, Tensor) and _storage(val) not in arguments:
                kept[_storage(val)] = val.untyped_storage().nbytes()
    return sum(kept.values())


def _storage(val: Tensor) -> int:
    return val.untyped_storage()._cdata


def _true_flops(spec: OpSpec) -> float:
    """Without the work on pads."""
    return spec.flops / math.prod(spec.sizes[f] / n for f, n in spec.true.items())


def _sent(movements: Iterable[Movement]) -> tuple[Sent, ...]:
    """The transfers of some movements, together, by axis, kind and phase."""
    total: dict[tuple[str, str, str], float] = {}
    calls: Counter[tuple[str, str, str]] = Counter()
    for m in movements:
        for t in m.transfers:
            key = (t.axis, t.kind, t.phase)
            total[key] = total.get(key, 0.0) + t.elements * m.dtype.itemsize
            calls[key] += 1
    return tuple(Sent(*key, total[key], calls[key]) for key in sorted(total))


def _dtype(val: Tensor) -> str:
    return str(val.dtype).removeprefix("torch.")


def _op_name(node: Node) -> str:
    packet = getattr(node.target, "overloadpacket", node.target)
    return str(getattr(packet, "__name__", packet)).removeprefix("aten.")
