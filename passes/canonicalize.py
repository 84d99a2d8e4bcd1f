"""canonicalize: a `Program` -> the same with one spelling for every construct that later passes reason about.

- what changes no value goes: aliases, clones, full slices, casts to the same dtype, detaches where nothing
  needs a gradient, and all that no result reads, assertions among it;
- `view` and `_unsafe_view` become `reshape` with the sizes written out: a view may be impossible on the
  strides that a local shard or a backward op has;
- lazy conjugates are computed;
- what is written into a whole tensor (`copy`) is an `expand`;
- `reshape -> (add)mm -> reshape`, HuggingFace's `Conv1D`, becomes `matmul` on the n-d tensor and an `add`
  of the bias: rows keep their batch and sequence dims, and the bias is added once, whatever axes the
  product is partial over. `linear` keeps its bias.

Every node's `meta["val"]` is computed anew, as strides change when clones go.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from autopar3d.private import FakeTensor, tree_leaves
from autopar3d.program import Program
from autopar3d.rules.complex import LAZY

aten = torch.ops.aten


def canonicalize(program: Program) -> Program:
    """A new program that computes the same results from the same arguments.

    Parameters, buffers and inputs stay arguments, read or not, under their names; constants that nobody reads
    go. The sizes of a `reshape` are those traced.
    """
    builder = _Builder(program)
    for node in program.graph.graph.nodes:
        builder.add(node)
    return builder.finish()


# Copies of their first argument: in a functional graph as good as the argument.
_COPIES = {
    aten.alias.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.lift_fresh.default,
    aten.lift_fresh_copy.default,
}

_RESHAPES = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}

# Equal to the tensor they take where shape, dtype and device are: none of them moves an element within a
# shape.
_IDENTITY_IF_UNCHANGED = _RESHAPES | {
    aten._to_copy.default,
    aten.copy.default,  # of its second argument
    aten.expand.default,
    aten.slice.Tensor,
}


class _Builder:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.graph = Graph()
        self.new: dict[Node, Node] = {}  # by the program's own node
        self.differentiable: set[Node] = set()  # new nodes through which a gradient can flow
        self.requires_grad = {a.node for a in program.arguments if a.requires_grad}
        self.fake_mode = _fake_mode(program.graph.graph)

    def add(self, node: Node) -> None:
        """Give `node` a counterpart in the new graph: a node of its own, or that of the value it repeats."""
        if node.op == "output":
            return
        if node.op == "placeholder":
            new = self.graph.placeholder(node.name)
            new.meta = dict(node.meta)
            if node.name in self.requires_grad:
                self.differentiable.add(new)
        else:
            shorter = self._repeated(node) or self._conv1d(node) or self._reshape(node)
            new = shorter or self._cast(node) or self._written(node) or self._same(node)
        self.new[node] = new

    def finish(self) -> Program:
        """The new program, without the nodes that no result reads."""
        renamed = {old.name: new.name for old, new in self.new.items()}
        results = tuple(
            r if r.node is None else dataclasses.replace(r, node=renamed[r.node]) for r in self.program.results
        )
        self.graph.output(self._map(self.program.graph.graph.output_node().args[0]))
        for node in reversed(self.graph.nodes):
            # The graph is functional: what nobody reads has no effect, assertions and random ops included.
            if not node.users and (node.op == "call_function" or node.name in self.program.constants):
                self.graph.erase_node(node)
        self.graph.lint()
        left = {node.name for node in self.graph.find_nodes(op="placeholder")}
        return dataclasses.replace(
            self.program,
            graph=GraphModule(nn.Module(), self.graph),
            arguments=tuple(a for a in self.program.arguments if a.node in left),
            results=results,
            constants={name: value for name, value in self.program.constants.items() if name in left},
        )

    def _repeated(self, node: Node) -> Node | None:
        """The new node whose value `node` would only repeat."""
        args: Any = node.args
        after = node.meta["val"]
        if node.target is aten.cat.default:
            # A key/value cache starts as a tensor of shape (0,), which `cat` takes beside any rank, and
            # skips.
            parts = [self.new[n] for n in args[0] if n.meta["val"].shape != (0,)]
            return parts[0] if len(parts) == 1 and _kind(parts[0].meta["val"]) == _kind(after) else None
        if not args or not isinstance(args[0], Node):
            return None
        source = self.new[args[1] if node.target is aten.copy.default else args[0]]
        if node.target in _COPIES:
            return source
        if node.target is aten.detach.default:
            return None if source in self.differentiable else source
        unchanged = node.target in _IDENTITY_IF_UNCHANGED and _kind(source.meta["val"]) == _kind(after)
        return source if unchanged else None

    def _reshape(self, node: Node) -> Node | None:
        if node.target not in _RESHAPES:
            return None
        return self._call(aten.reshape.default, (self._map(node.args[0]), list(node.meta["val"].shape)), node)

    def _cast(self, node: Node) -> Node | None:
        """`type_as(x, other)` reads nothing of `other` but its type."""
        if node.target is not aten.type_as.default:
            return None
        return self._call(aten._to_copy.default, (self._map(node.args[0]),), node, {"dtype": node.meta["val"].dtype})

    def _written(self, node: Node) -> Node | None:
        """`copy(x, y)`, y written into all of x, which autograd has no formula for: `expand(y)`, in x's dtype."""
        if node.target is not aten.copy.default:
            return None
        source, wanted = self.new[node.args[1]], node.meta["val"]  # type: ignore[index]
        if source.meta["val"].dtype != wanted.dtype or source.meta["val"].device != wanted.device:
            how = {"dtype": wanted.dtype, "device": wanted.device}
            source = self._call(aten._to_copy.default, (source,), node, how)
        if source.meta["val"].shape != wanted.shape:
            source = self._call(aten.expand.default, (source, list(wanted.shape)), node)
        return source

    def _conv1d(self, node: Node) -> Node | None:
        """`reshape(addmm(bias, reshape(x, [-1, k]), w), [..., n])` -> `add(matmul(x, w), bias)`."""
        args: Any = node.args
        if node.target not in _RESHAPES or len(args[0].users) > 1:
            return None
        product = self.new[args[0]]
        operands: Any = product.args
        if product.target is aten.addmm.default and not product.kwargs:
            bias, rows, weight = operands
        elif product.target is aten.mm.default:
            bias, (rows, weight) = None, operands
        else:
            return None
        if rows.target is not aten.reshape.default or (bias is not None and bias.meta["val"].dim() != 1):
            return None
        x = rows.args[0]
        k, n = weight.meta["val"].shape
        sizes = node.meta["val"].shape
        if sizes[-1] != n or x.meta["val"].shape != (*sizes[:-1], k):
            return None
        matmul = self._call(aten.matmul.default, (x, weight), product)
        return matmul if bias is None else self._call(aten.add.Tensor, (matmul, bias), product)

    def _same(self, node: Node) -> Node:
        target = LAZY.get(node.target, node.target)
        return self._call(target, self._map(node.args), node, self._map(node.kwargs), node.name)

    def _call(
        self,
        target: Any,
        args: tuple[Any, ...],
        origin: Node,
        kwargs: dict[str, Any] | None = None,
        name: str | None = None,
    ) -> Node:
        """A new node with its value, which comes from the place in the model that `origin` comes from."""
        new = self.graph.call_function(target, args, kwargs, name=name or target.overloadpacket.__name__)
        new.meta = dict(origin.meta)
        # A scalar read from a tensor keeps the symbol it was traced with: computing it anew makes another
        # one.
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(origin.meta["val"])):
            with self.fake_mode, torch.no_grad():
                new.meta["val"] = target(*_values(new.args), **_values(new.kwargs))
        if target is not aten.detach.default and any(n in self.differentiable for n in new.all_input_nodes):
            self.differentiable.add(new)
        return new

    def _map(self, value: Any) -> Any:
        """Node arguments, with the new nodes in place of the program's."""
        return map_arg(value, lambda n: self.new[n])


def _values(value: Any) -> Any:
    return map_arg(value, lambda n: n.meta["val"])


def _kind(t: Tensor) -> tuple[Any, ...]:
    return tuple(t.shape), t.dtype, t.device


def _fake_mode(graph: Graph) -> Any:
    """The mode that the graph's fake values were made in; values of two modes do not mix."""
    leaves = (leaf for node in graph.nodes for leaf in tree_leaves(node.meta.get("val")))
    return next(leaf.fake_mode for leaf in leaves if isinstance(leaf, FakeTensor))
