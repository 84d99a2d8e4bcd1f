"""Whose is a collective: each movement of a step belongs to one op or one output."""

from __future__ import annotations

from torch.fx import Node

from ..passes.rewrite import Movement
from ..rules import operands
from ..search.factors import producer
from ..search.saved import is_view
from ..step import Step


class Attribution:
    """The movements of a step, by what they serve. `ops` and `outputs` together hold each movement once.

    Attributes:
        ops: by the op that reads the moved value or left it a partial sum, or whose lowering communicates.
        outputs: by the name of the value that leaves.
        parameters: those that move a parameter, in whatever form; they are in `ops` too.
    """

    def __init__(self, step: Step) -> None:
        self.ops: dict[Node, list[Movement]] = {}
        self.outputs: dict[str, list[Movement]] = {}
        self.parameters: dict[Node, list[Movement]] = {}
        self._specs, self._strategies = step.factors.specs, step.decisions.strategies
        self._nodes: dict[str, Node] = {n.name: n for n in step.program.graph.graph.nodes}
        self._parameter_nodes = {self._nodes[a.node] for a in step.program.arguments_of("parameter")}
        self._roots: dict[Node, Node | None] = {}
        for movement in step.local.movements:
            value = self._nodes[movement.value]
            parameter = self.root(value)
            if parameter is not None:
                self.parameters.setdefault(parameter, []).append(movement)
            if movement.reader == "output":
                self.outputs.setdefault(movement.value, []).append(movement)
            else:
                self.ops.setdefault(self._owner(movement, value), []).append(movement)

    def root(self, node: Node) -> Node | None:
        """The parameter that a value is another form of (a transpose, a cast), if any."""
        if node not in self._roots:
            sources = operands(producer(node)[0]) if node.op == "call_function" else []
            found = node if node in self._parameter_nodes else self.root(sources[0]) if len(sources) == 1 else None
            self._roots[node] = found
        return self._roots[node]

    def _owner(self, movement: Movement, value: Node) -> Node:
        """Views, and linear ops that pass a partial sum on, are looked through when that leads to a heavy op."""
        if movement.kind == "inside":
            return value
        if movement.kind in ("scatter", "reduce", "regroup"):
            node, _ = producer(value)
            while self._passes_on(node, movement.axis):
                node, _ = producer(operands(node)[0])
            if self._is_heavy(node):
                return node
        node = reader = self._nodes[movement.reader]
        while not self._is_heavy(node) and is_view(node) and len(node.users) == 1:
            following = next(iter(node.users))
            if following not in self._specs:
                break
            node = following
        return node if self._is_heavy(node) else reader

    def _is_heavy(self, node: Node) -> bool:
        return node in self._specs and bool(self._specs[node].flops)

    def _passes_on(self, node: Node, axis: str) -> bool:
        light = node in self._specs and not self._specs[node].flops
        return light and axis in self._strategies[node.name].through and bool(operands(node))
