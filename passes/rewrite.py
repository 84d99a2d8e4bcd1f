"""rewrite: a global `Program` and its `Decisions` -> the *local* program that every rank runs, same text on each.

Local shapes, local ops, and every change of layout as explicit calls of `autopar3d.collectives`, not yet
differentiated. Each value is moved once per placement: readers that need the same copy share it, and with it the one
reduction of its gradient.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from autopar3d.collectives import (
    cut,
    embed,
    exchange,
    fork,
    gather,
    lane_cut,
    lane_embed,
    lane_join,
    lane_sum,
    mask,
    reduce,
    regroup,
    scatter,
    unfork,
)
from autopar3d.grid import LANE, Grid
from autopar3d.layout import Layout
from autopar3d.pads import add_pads, fill_pads, trim_pads
from autopar3d.plan import Decisions
from autopar3d.program import ORIGIN, Program, module_path
from autopar3d.redistribute import State, Step, Transfer, route, scatter_atom, sent, transfers
from autopar3d.rules import Dims, Exchange, LocalOp, OpSpec, operands, results
from autopar3d.search.factors import Factors, ValueShape, is_getitem
from autopar3d.search.readings import Slot, drops, gradients, regathered
from autopar3d.search.strategies import Strategy, given, needed


@dataclass(frozen=True)
class Movement:
    """One step of one value on its way to a reader, or what one op exchanges inside, and the collectives it causes.

    `kind` is that of the `redistribute.Step`, or `inside` for an op's own collectives. `reordered`: elements that each
    of the transfers copies into another order locally, as collectives gather and scatter along the first dim only.
    `way`: the placement before, and the step; None of what is inside. `node`: what does it in the local program.
    """

    value: str
    module: str
    kind: str
    axis: str
    reader: str
    transfers: tuple[Transfer, ...]
    dtype: torch.dtype
    reordered: float = 0.0
    way: tuple[State, Step] | None = None
    node: str = ""


# A value in one placement: per lane its local node. Where the lanes are not over it, all have the same one.
_Lanes = tuple[Node, ...]


@dataclass(frozen=True)
class LocalProgram:
    """The program of one rank, before differentiation.

    Attributes:
        graph: takes the local pieces of `Program.arguments`, returns the local pieces of the results with a node.
        arguments: per argument its layout.
        results: per result with a node its layout.
        movements: every change of layout, in program order, with the collectives of forward, backward and regather.
    """

    graph: GraphModule
    arguments: tuple[Layout, ...]
    results: tuple[Layout, ...]
    movements: tuple[Movement, ...]


def rewrite(program: Program, factors: Factors, decisions: Decisions, *, regather: str = "all") -> LocalProgram:
    """Carry out the decisions. `regather` says which gathered copies are dropped after forward.

    Where the decisions' grid has lanes, what lies along them is there once per lane.
    """
    return _Rewriter(program, factors, decisions, regather).run()


def moves(program: Program, factors: Factors, decisions: Decisions, *, regather: str = "all") -> tuple[Movement, ...]:
    """The movements of `rewrite`, without a module that runs."""
    rewriter = _Rewriter(program, factors, decisions, regather)
    rewriter.emit()
    return rewriter.made()


class _Rewriter:
    def __init__(self, program: Program, factors: Factors, decisions: Decisions, regather: str) -> None:
        self.program, self.factors, self.decisions, self.regather = program, factors, decisions, regather
        self.grid: Grid = decisions.grid
        self.source = program.graph.graph
        self.graph = Graph()
        self.grads = gradients(program)
        self.needed_again = regathered(program)
        self.placed: dict[tuple[Node, State], _Lanes] = {}  # a value in a placement
        self.home: dict[Node, State] = {}
        self.ops: dict[Node, _Lanes] = {}  # global op -> local ops (for getitems)
        self.movements: list[Movement] = []
        self.numbers: dict[Node, int] = {}  # local node of a movement -> its number
        self.between: set[Node] = set()  # local nodes that take values from lane to lane
        self.dead: set[int] = set()  # movements that nobody reads
        self.again: set[int] = set()  # movements whose result some backward needs

    def run(self) -> LocalProgram:
        layouts = self.emit()
        arguments = tuple(
            self._layout(n, self.decisions.storage[n.name]) for n in self.source.nodes if n.op == "placeholder"
        )
        return LocalProgram(GraphModule(torch.nn.Module(), self.graph), arguments, layouts, self.made())

    def emit(self) -> tuple[Layout, ...]:
        """Fill the graph; the layouts of its results."""
        for node in self.source.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "call_function" and not is_getitem(node):
                self._op(node)
        results, layouts = self._results()
        self.graph.output(tuple(results))
        self._erase_unread()
        self.graph.lint()
        return tuple(layouts)

    def made(self) -> tuple[Movement, ...]:
        """The movements that were emitted and are read."""
        return tuple(self._final(i) for i in range(len(self.movements)) if i not in self.dead)

    def _erase_unread(self) -> None:
        """Drop copies that no reader took after all (it may have found its placement made already)."""
        for node in reversed(self.graph.nodes):
            if (node in self.numbers or node in self.between) and not node.users:
                self.dead.update([self.numbers[node]] if node in self.numbers else [])
                self.graph.erase_node(node)

    def _final(self, number: int) -> Movement:
        """The movement without the regather of a copy that no backward needs."""
        m = self.movements[number]
        if m.kind == "inside" or number in self.again:
            return m
        return replace(m, transfers=tuple(t for t in m.transfers if t.phase != "regather"))

    def _layout(self, value: Node, state: State) -> Layout:
        if value not in self.factors.values:  # a placeholder that is no tensor, or one that nobody reads
            return Layout.replicated(value.meta["val"].dim())
        return self.factors.values[value].layout(state, self.grid)

    def _placeholder(self, node: Node) -> None:
        local = self.graph.placeholder(node.name)
        state = self.decisions.storage[node.name]
        layout = self._layout(node, state)
        local.meta = {"shape": layout.local_shape(node.meta["val"].shape, self.grid)}
        pads = self.factors.values[node].pads if node in self.factors.values else ()
        self._arrive(node, state, (self._resized(add_pads, node, state, local, pads, node),) * self.grid.lanes)

    def _arrive(self, value: Node, state: State, local: _Lanes) -> None:
        self.home[value] = state
        self.placed[value, state] = local

    # -- pads ---------------------------------------------------------------------------------------

    def _resized(
        self, how: Callable[..., Any], value: Node, state: State, local: Node, atoms: Sequence[int], origin: Node
    ) -> Node:
        """`add_pads` or `trim_pads` on some atoms, which are whole."""
        shape = self.factors.values.get(value)
        for i in atoms:
            assert shape is not None and not state.atoms[i]
            # Adding goes from the outermost atom inwards and trimming back, so what lies outside is padded.
            dim, outer = self._where(shape, state, i)
            args = (local, dim, outer, shape.true[i], shape.atoms[i])
            local = self.graph.call_function(how, args, name=f"{value.name}_{how.__name__.split('_')[0]}")
            local.meta = self._meta(origin)
        return local

    def _true_atoms(self, value: Node, spec: OpSpec, dims: Dims) -> list[int]:
        """Padded atoms of a value that one op has at their true lengths."""
        pads = self.factors.values[value].pads if value in self.factors.values else ()
        names = spec.atoms(dims)
        return [i for i in pads if names[i] not in spec.true]

    def _filled(self, node: Node, spec: OpSpec, number: int, state: State, local: Node) -> Node:
        """An operand with what its op wants in the pads."""
        value = operands(node)[number]
        for i, f in enumerate(spec.atoms(spec.inputs[number])):
            fill = dict(spec.fills.get(f, ())).get(number)
            if fill is None or f not in spec.true:
                continue
            shape = self.factors.values[value]
            groups = [(self.grid.alias(a), self.grid.axis_size(a)) for a in state.atoms[i]]
            where = (*self._where(shape, state, i), shape.true[i], shape.atoms[i])
            local = self.graph.call_function(fill_pads, (local, *where, fill, groups), name=f"{node.name}_fill")
            local.meta = self._meta(node)
        return local

    def _left(self, value: Node, node: Node, spec: OpSpec, number: int, state: State, local: Node) -> Node:
        """A result with what its readers may find in the pads."""
        shape = self.factors.values[value]
        for i, f in enumerate(spec.atoms(spec.outputs[number])):
            if f in spec.leaves and f in spec.true:
                groups = [(self.grid.alias(a), self.grid.axis_size(a)) for a in state.atoms[i]]
                where = (*self._where(shape, state, i), shape.true[i], shape.atoms[i])
                left = (local, *where, spec.leaves[f], groups)
                local = self.graph.call_function(fill_pads, left, name=f"{local.name}_left")
                local.meta = self._meta(node)
        return local

    def _op(self, node: Node) -> None:
        spec = self.factors.specs[node]
        strategy = self.decisions.strategies[node.name]
        lanes = range(self.grid.lanes if LANE in strategy.axes else 1)
        read: list[list[Node]] = [[] for _ in lanes]
        for i, operand in enumerate(operands(node)):
            # The copies of a value that the lanes read are one node, whose gradient autograd adds up.
            target = _without_lanes_varying(needed(spec, strategy, i, grad=operand in self.grads))
            found = self._read(operand, target, Slot(node, i))
            trimmed = list(reversed(self._true_atoms(operand, spec, spec.inputs[i])))
            for k in lanes:
                local = self._resized(trim_pads, operand, target, found[k], trimmed, node)
                read[k].append(self._filled(node, spec, i, target, local))
        arguments = tuple(self._arguments(node, read[k], k) for k in lanes)
        made = []
        for k, (args, kwargs) in enumerate(arguments):
            grid = self.grid.in_lane(k)
            op = LocalOp(node, spec, strategy.axes_of, grid, args, kwargs, arguments if len(lanes) > 1 else ())
            if spec.exchange is not None:
                self._inside(node, spec.exchange(op), _named(node.name, k))
            call: Any
            call, args, kwargs = spec.lower(op) if spec.lower else (node.target, args, kwargs)
            made.append(self.graph.call_function(call, tuple(args), dict(kwargs), name=_named(node.name, k)))
            made[-1].meta = self._meta(node)
        self.ops[node] = self._all(made)
        if isinstance(node.meta["val"], torch.Tensor):
            self._arrive(node, *self._result(node, node, spec, strategy, 0, made))
            return
        for user in node.users:
            if is_getitem(user) and isinstance(user.meta.get("val"), torch.Tensor):
                number = int(user.args[1])  # type: ignore[arg-type]
                items = []
                for k, local in enumerate(made):
                    items.append(self.graph.call_function(operator.getitem, (local, number), name=_named(user.name, k)))
                    items[-1].meta = self._meta(node)
                self._arrive(user, *self._result(user, node, spec, strategy, number, items))

    def _all(self, made: Sequence[Node]) -> _Lanes:
        """What all lanes have, of what each of them made, or one for all."""
        return tuple(made) if len(made) > 1 else (made[0],) * self.grid.lanes

    def _arguments(self, node: Node, read: list[Node], lane: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # Two operands may be one global node in two placements, so they are told apart by their number.
        order = iter(read)
        args, kwargs = map_arg(
            (node.args, dict(node.kwargs)),
            lambda n: next(order) if isinstance(n.meta.get("val"), torch.Tensor) else self.ops[n][lane],
        )
        return args, kwargs

    def _result(
        self, value: Node, node: Node, spec: OpSpec, strategy: Strategy, number: int, made: list[Node]
    ) -> tuple[State, _Lanes]:
        state = given(spec, strategy, number)
        if spec.leaves:
            made = [self._left(value, node, spec, number, state, local) for local in made]
        atoms = self._true_atoms(value, spec, spec.outputs[number])
        return state, self._all([self._resized(add_pads, value, state, local, atoms, node) for local in made])

    def _inside(self, node: Node, exchanges: list[Exchange], local: str) -> None:
        dtype = next(r.dtype for r in results(node) if r is not None)
        for e in exchanges:
            if e.phase == "forward" or operands(node)[0] in self.grads:
                elements = sent(e.kind, self.grid.axis_size(e.axis), e.elements)
                moved = Transfer(e.kind, e.axis, elements, "forward" if e.phase == "forward" else "backward")
                path, travels = module_path(node), e.dtype or dtype
                self.movements.append(
                    Movement(node.name, path, "inside", e.axis, node.name, (moved,), travels, node=local)
                )

    @staticmethod
    def _meta(node: Node) -> dict[str, Any]:
        return {k: node.meta[k] for k in ORIGIN if k in node.meta}

    # -- moving values ------------------------------------------------------------------------------

    def _read(self, value: Node, target: State, slot: Slot) -> _Lanes:
        start = self.home[value]
        for stop in self.decisions.way(value.name, slot.reader.name if slot.reader else "", slot.operand):
            self._move(value, start, stop, slot)
            start = stop
        return self._move(value, start, target, slot)

    def _move(self, value: Node, start: State, target: State, slot: Slot) -> _Lanes:
        now, local = start, self.placed[value, start]
        for step in route(start, target):
            known = self.placed.get((value, step.after))
            if known is None:
                known = self._step(value, now, step, local, slot.reader)
                self.placed[value, step.after] = known
            if slot in self.needed_again:
                self.again.update(self.numbers[n] for n in known if n in self.numbers)
            now, local = step.after, known
        return local

    def _step(self, value: Node, before: State, step: Step, local: _Lanes, reader: Node | None) -> _Lanes:
        if step.axis == LANE:
            return self._across_lanes(value, before, step, local, reader)
        made: dict[Node, Node] = {}
        for k, node in enumerate(local):
            if node not in made:
                made[node] = self._emit(value, before, step, node, reader, k)
        return tuple(made[node] for node in local)

    def _across_lanes(self, value: Node, before: State, step: Step, local: _Lanes, reader: Node | None) -> _Lanes:
        """A step along the axis of lanes: local ops from one lane's values to another's."""
        shape, lanes = self.factors.values[value], self.grid.lanes

        def make(how: Callable[..., Any], *args: Any, lane: int = 0) -> Node:
            name = _named(f"{value.name}_{getattr(how, '__name__', 'lane').removeprefix('lane_')}_lanes", lane)
            node = self.graph.call_function(how, args, name=name)
            node.meta = self._meta(reader or value)
            self.between.add(node)
            return node

        def cut_over(whole: Node, state: State, atom: int) -> _Lanes:
            parts = make(lane_cut, whole, *self._where(shape, state, atom), lanes)
            return tuple(make(operator.getitem, parts, k, lane=k) for k in range(lanes))

        if step.kind == "cut":
            return cut_over(local[0], before, step.atom)
        if step.kind == "gather":
            return (make(lane_join, local, *self._where(shape, step.after, step.atom)),) * lanes
        if step.kind == "reduce":
            return (make(lane_sum, local),) * lanes
        if step.kind == "scatter":
            return cut_over(make(lane_sum, local), before, step.atom)
        if step.kind == "exchange":
            whole = make(lane_join, local, *self._where(shape, step.after, step.atom))
            return cut_over(whole, before, step.to)
        if step.kind == "embed":
            where = self._where(shape, step.after, step.atom)
            return tuple(make(lane_embed, n, *where, lanes, k, lane=k) for k, n in enumerate(local))
        assert step.kind == "mask", step  # the lanes never make a value vary, see `_op`
        return (local[0], *(make(torch.zeros_like, n, lane=k + 1) for k, n in enumerate(local[1:])))

    def _emit(self, value: Node, before: State, step: Step, local: Node, reader: Node | None, lane: int) -> Node:
        shape = self.factors.values[value]
        group, size = self.grid.alias(step.axis), self.grid.axis_size(step.axis)
        function: Callable[..., Any]
        args: tuple[Any, ...]
        atom = scatter_atom(shape.atoms, before, step.axis, self.grid) if step.kind == "regroup" else None
        if step.kind == "gather":
            function, args = (
                gather,
                (*self._where(shape, step.after, step.atom), group, size, step.varying),
            )
        elif step.kind == "cut":
            function, args = cut, (*self._where(shape, before, step.atom), group, size, step.varying)
        elif step.kind == "scatter":
            function, args = scatter, (*self._where(shape, before, step.atom), group, size)
        elif step.kind == "embed":
            function, args = embed, (*self._where(shape, step.after, step.atom), group, size)
        elif step.kind == "exchange":
            # Before the exchange the receiving atom is whole over the axis, after it the losing one is.
            gains, loses = self._where(shape, before, step.to), self._where(shape, step.after, step.atom)
            function, args = exchange, (gains, loses, group, size)
        elif step.kind == "regroup" and atom is not None:
            function, args = regroup, (*self._where(shape, before, atom), group, size)
        elif step.kind in ("reduce", "regroup"):
            function, args = reduce, (group, step.varying)
        elif step.kind == "mask":
            function, args = mask, (group, step.varying)
        else:
            function, args = {"fork": fork, "unfork": unfork}[step.kind], (group,)
        name = _named(f"{value.name}_{step.kind}_{step.axis}", lane)
        node = self.graph.call_function(function, (local, *args), name=name)
        # Finishing a sum belongs to the op that left it; what else is moved, to the op that wants it so.
        finishing = step.kind in ("scatter", "reduce") and value.op != "placeholder"
        origin = value if reader is None or finishing else reader
        node.meta = self._meta(origin)
        drop = drops(self.regather, value)
        if value.op == "placeholder" and not drop:  # a parameter's copy is no activation: the user keeps it
            node.meta.pop("checkpoint", None)
        if step.kind in ("gather", "regroup"):
            node.meta["regather"] = drop
        kept = tuple(
            t
            for t in transfers(step, before, shape.elements, self.grid, scatterable=atom is not None)
            if t.phase == "forward" or (value in self.grads and (t.phase == "backward" or drop))
        )
        self.numbers[node] = len(self.movements)
        name = reader.name if reader else "output"
        whole = shape.elements / self.grid.extent([a for a in before.sharding if a in step.after.sharding])
        reordered = whole if step.kind not in ("reduce", "fork") and args[:2] != (0, 1) else 0.0
        self.movements.append(
            Movement(
                value.name,
                module_path(origin),
                step.kind,
                step.axis,
                name,
                kept,
                shape.dtype,
                reordered,
                (before, step),
                node.name,
            )
        )
        return node

    def _where(self, shape: ValueShape, state: State, atom: int) -> tuple[int, int]:
        """(dim, outer) of an atom for `collectives`: the local length of what lies outside it in its dim."""
        dim, position = shape.place(atom)
        first = atom - position
        outer = 1
        for i in range(first, atom):
            outer *= shape.atoms[i] // self.grid.extent(state.atoms[i])
        # Axes that the atom already has cut its local length, not what lies outside it.
        return dim, outer

    def _results(self) -> tuple[list[Node], list[Layout]]:
        by_name = {n.name: n for n in self.source.nodes}
        nodes, layouts = [], []
        for i, (result, state) in enumerate(zip(self.program.results, self.decisions.results, strict=True)):
            if result.node is None:
                continue
            value = by_name[result.node]
            assert state is not None
            local = self._read(value, state, Slot(None, i))
            pads = self.factors.values[value].pads
            nodes.append(self._resized(trim_pads, value, state, local[0], pads[::-1], value))
            layouts.append(self._layout(value, state))
        return nodes, layouts


def _named(name: str, lane: int) -> str:
    return f"{name}_lane{lane}" if lane else name


def _without_lanes_varying(state: State) -> State:
    return state._replace(varying=tuple(a for a in state.varying if a != LANE))
