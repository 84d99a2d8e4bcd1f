"""Which operands an op's backward needs: asked of autograd itself, on fake tensors, once per kind of op."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from autopar3d.private import FakeTensorMode, OpOverload, tree_leaves

from ..rules import argument, operands

aten = torch.ops.aten

# Tensors that autograd hands to a backward for their shape only: keeping one would keep, or gather again, a tensor
# whose values nobody reads. op -> (argument), and in the backward op (its position, that of a tensor like it).
_SHAPE_ONLY = {aten.layer_norm.default: "bias"}
_STAND_INS = {aten.native_layer_norm_backward.default: (6, 5)}


class Saved(NamedTuple):
    """What autograd keeps of one op for its backward: numbers of operands and of results, and bytes of what is neither
    (row statistics, a softmax), for the op on whole tensors."""

    operands: frozenset[int] = frozenset()
    results: frozenset[int] = frozenset()
    hidden: int = 0


class Probes:
    """Answers of autograd, each asked for once: one for a program (see `readings.saved`)."""

    def __init__(self) -> None:
        self._known: dict[Any, Saved] = {}

    def of(self, node: Node, grads: tuple[bool, ...]) -> Saved:
        """All that autograd saves for the backward of this op; `grads`: which operands have a gradient."""
        if not any(grads):
            return Saved()
        key = (node.target, grads, _signature(node.args), _signature(node.kwargs))
        if key not in self._known:
            self._known[key] = _probe(node, grads)
        return self._known[key]


def _signature(x: Any) -> str:
    def show(n: Any) -> Any:
        val = n.meta["val"]
        return f"{val.dtype}{tuple(val.shape)}" if isinstance(val, torch.Tensor) else str(val)

    return str(map_arg(x, show))


def _probe(node: Node, grads: tuple[bool, ...]) -> Saved:
    # Fake tensors on the op's own device: which kernel runs, and so what it keeps, depends on the device.
    mode = FakeTensorMode()
    fakes: dict[Node, torch.Tensor] = {}
    for operand, grad in zip(operands(node), grads, strict=True):
        val = operand.meta["val"]
        if operand not in fakes:
            with mode:
                fake = torch.empty_strided(tuple(val.shape), val.stride(), dtype=val.dtype, device=val.device)
            fakes[operand] = fake.requires_grad_(grad and (fake.is_floating_point() or fake.is_complex()))
    saved: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        saved[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
        return t

    args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda n: fakes.get(n, n.meta["val"]))
    try:
        with mode, torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = node.target(*args, **kwargs)  # type: ignore[operator]
    except (RuntimeError, NotImplementedError):
        # No fake kernel: assume the worst, as a wrong "no" would make the plan's bytes too small.
        return Saved(frozenset(i for i, o in enumerate(operands(node)) if o.meta["val"].is_floating_point()))
    made = [t.untyped_storage()._cdata if isinstance(t, torch.Tensor) else 0 for t in tree_leaves(out)]
    idle = argument(node, _SHAPE_ONLY[node.target]) if node.target in _SHAPE_ONLY else None
    read = [fakes[o].untyped_storage()._cdata for o in operands(node)]
    return Saved(
        frozenset(i for i, o in enumerate(operands(node)) if o is not idle and read[i] in saved),
        frozenset(i for i, storage in enumerate(made) if storage in saved and storage not in read),
        sum(size for storage, size in saved.items() if storage not in (*read, *made)),
    )


def use_stand_ins(graph: Graph) -> None:
    """Let backward ops take a tensor they have anyway where they only look at a shape."""
    for node in graph.nodes:
        if node.target in _STAND_INS:
            unread, like = _STAND_INS[node.target]
            if isinstance(node.args[unread], Node) and isinstance(node.args[like], Node):
                node.update_arg(unread, node.args[like])


def is_view(node: Node) -> bool:
    """Whether the result of the op shares its first operand's memory (so that saving one is saving the other)."""
    tensors = operands(node)
    if not tensors or not isinstance(node.target, OpOverload):
        return False
    first = tensors[0].meta["val"]
    leaves = [t for t in tree_leaves(node.meta["val"]) if isinstance(t, torch.Tensor)]
    return any(t.untyped_storage()._cdata == first.untyped_storage()._cdata for t in leaves)
