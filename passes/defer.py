"""defer: a backward graph -> one that leaves the gradients of parameters unreduced, and one that reduces them.

For gradient accumulation: the first runs per micro-batch, the second once, on the sums. That is right because all that
happens to a gradient from its first collective on is linear in it; where it is not, or where something else reads what
is between, the gradient is reduced in the first graph, as before.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import dtype, nn, ops
from torch.fx import Graph, GraphModule, Node

from autopar3d.collectives import KINDS, REORDERS

aten, c10d = ops.aten, ops._c10d_functional


@dataclass(frozen=True, eq=False)
class Deferred:
    """A backward graph in two.

    Attributes:
        local: takes what the backward graph takes, returns the gradients `kept` and then the unreduced values.
        reduce: takes the unreduced values, returns the gradients `deferred`.
        kept, deferred: positions among the backward graph's results.
        bytes: of the unreduced values on one rank.
    """

    local: GraphModule
    reduce: GraphModule
    kept: tuple[int, ...]
    deferred: tuple[int, ...]
    bytes: int


def defer(backward: GraphModule, learned: Collection[int]) -> Deferred:
    """Cut before the first collective of each of the results `learned`.

    Args:
        backward: not yet bucketed, so that each collective is of one gradient.
        learned: positions of the gradients of parameters.
    """
    nodes = list(backward.graph.nodes)
    results: tuple[Node, ...] = backward.graph.output_node().args[0]  # type: ignore[assignment]
    fixed: set[Node] = set()  # the same in every call: what reads nothing but the rank's place
    for node in nodes:
        if node.op == "call_function" and node.target not in KINDS and fixed.issuperset(node.all_input_nodes):
            fixed.add(node)
    late = _late(nodes, results, set(learned), fixed)
    cuts = list(dict.fromkeys(source for n in nodes if n in late for source in _data(n, fixed) if source not in late))
    kept = tuple(i for i, r in enumerate(results) if r not in late)
    deferred = tuple(i for i, r in enumerate(results) if r in late)
    return Deferred(
        _extract(nodes, [n for n in nodes if n.op == "placeholder"], [*(results[i] for i in kept), *cuts]),
        _extract(nodes, cuts, [results[i] for i in deferred]),
        kept,
        deferred,
        sum(n.meta["val"].numel() * n.meta["val"].dtype.itemsize for n in cuts),
    )


def _late(nodes: list[Node], results: tuple[Node, ...], learned: set[int], fixed: set[Node]) -> set[Node]:
    """What is linear in unreduced gradients and leads to gradients only, from the first collective on."""
    others = {r for i, r in enumerate(results) if i not in learned}
    tail: set[Node] = set()
    for node in reversed(nodes[:-1]):
        if not node.users or node in others or node in fixed or not _data(node, fixed):
            continue
        if all(u.op == "output" or (u in tail and node in _data(u, fixed)) for u in node.users):
            tail.add(node)
    late: set[Node] = set()
    for node in nodes:
        if node in tail and (node.target in KINDS or any(source in late for source in _data(node, fixed))):
            late.add(node)
    return late


_LINEAR = {
    *KINDS,
    *REORDERS,
    aten.expand.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.select.int,
    aten.index_select.default,
    aten.sum.dim_IntList,
    aten._to_copy.default,
}


def _data(node: Node, fixed: set[Node]) -> list[Node]:
    """The inputs in which an op is linear, the others being fixed; empty where it is not."""
    inputs = node.all_input_nodes
    if node.target is aten.add.Tensor and len(node.args) == 2 and not node.kwargs:
        return inputs if all(isinstance(a, Node) for a in node.args) and not fixed.intersection(inputs) else []
    if node.target not in _LINEAR or not fixed.issuperset(inputs[1:]) or inputs[0] in fixed:
        return []
    reduces = KINDS.get(node.target) in ("reduce_scatter", "all_reduce")
    if reduces and node.args[1] != "sum":
        return []
    if node.target is aten._to_copy.default and not _widens(inputs[0].meta["val"].dtype, node.meta["val"].dtype):
        return []
    return inputs[:1]


def _widens(before: dtype, after: dtype) -> bool:
    return before.is_floating_point and after.is_floating_point and after.itemsize >= before.itemsize


def _extract(nodes: list[Node], inputs: list[Node], outputs: list[Node]) -> GraphModule:
    """The graph from some nodes to others."""
    needed, todo = set(inputs), list(outputs)
    while todo:
        node = todo.pop()
        if node not in needed:
            needed.add(node)
            todo += node.all_input_nodes
    graph = Graph()
    copied: dict[Node, Node] = {}
    for node in inputs:
        copied[node] = graph.placeholder(node.name)
        copied[node].target = copied[node].name
        copied[node].meta = dict(node.meta)
    for node in nodes:
        if node in needed and node not in copied:
            copied[node] = graph.node_copy(node, lambda n: copied[n])
    graph.output(tuple(copied[n] for n in outputs))
    graph.lint()
    return GraphModule(nn.Module(), graph)
