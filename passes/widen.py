"""widen: a backward graph -> the same with the gradients of parameters reduced in a wider dtype.

A gradient's reduce_scatter or all_reduce, with the reordering after it, takes a cast copy of what it took. What has no
collective stays as it is: nothing is summed there.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from autopar3d.collectives import REORDERS

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

_REDUCES = (c10d.reduce_scatter_tensor.default, c10d.all_reduce.default)


def widen(module: GraphModule, outputs: Collection[int], dtype: torch.dtype) -> GraphModule:
    """A new graph in which these outputs, where ranks sum them, are of this dtype."""
    results: tuple[Node, ...] = module.graph.output_node().args[0]  # type: ignore[assignment]
    wide: set[Node] = set()
    first: set[Node] = set()
    for number in outputs:
        chain = _chain(results[number], dtype)
        if chain:
            wide.update(chain)
            first.add(chain[-1])
    graph = Graph()
    new: dict[Node, Node] = {}
    for node in module.graph.nodes:
        if node in first:
            source = node.args[0]
            assert isinstance(source, Node)
            cast = graph.call_function(aten._to_copy.default, (new[source],), {"dtype": dtype})
            cast.meta = {**node.meta, "val": source.meta["val"].to(dtype)}
            new[node] = graph.node_copy(node, lambda n, given={**new, source: cast}: given[n])  # type: ignore[misc]
        else:
            new[node] = graph.node_copy(node, lambda n: new[n])
        if node in wide:
            new[node].meta["val"] = node.meta["val"].to(dtype)
    graph.lint()
    return GraphModule(nn.Module(), graph)


def _chain(result: Node, dtype: torch.dtype) -> list[Node]:
    """From a result back to the first of its reductions, where nobody else reads what is between."""
    found: list[Node] = []
    node, last = result, 0
    while node.target in (*_REDUCES, *REORDERS) and len(node.users) == 1 and node.meta["val"].is_floating_point():
        found.append(node)
        if node.target in _REDUCES:
            last = len(found)
        source = node.args[0]
        assert isinstance(source, Node)
        node = source
    return found[:last] if result.meta["val"].dtype != dtype else []
