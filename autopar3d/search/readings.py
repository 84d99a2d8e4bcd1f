"""Who reads what in a program: readings of values, which values have gradients, and what backward needs again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.fx import Node

from ..program import Program, region
from ..rules import OpSpec, operands
from .factors import is_getitem
from .saved import Probes, Saved, is_view

T = TypeVar("T")


@dataclass(frozen=True)
class Slot:
    """One reading of a value: an operand of an op, or a result of the program (`operand` is then its number)."""

    reader: Node | None
    operand: int


def gradients(program: Program) -> set[Node]:
    """Nodes whose value has a gradient: floating point, and reached from a tensor that requires one."""
    return _once(program, _gradients)


def readings(program: Program) -> dict[Node, list[Slot]]:
    """Per value, who reads it."""
    return _once(program, _readings)


def regathered(program: Program) -> set[Slot]:
    """Readings whose value some backward needs: a gathered copy made for one of them is gathered again in backward.

    A reading by a view counts when one of the view's own readings does, as both are the same memory; a reading by an op
    that is computed again (`recomputed`) counts, too.
    """
    return _once(program, _regathered)


def recomputed(program: Program) -> set[Node]:
    """Values inside of a region of activation checkpointing, which nothing outside of it reads: they are not saved."""
    return _once(program, _recomputed)


def saved(program: Program) -> Probes:
    """What autograd keeps of the program's ops."""
    return _once(program, _probes)


def _once(program: Program, analysis: Callable[[Program], T]) -> T:
    if analysis.__name__ not in program.found:
        program.found[analysis.__name__] = analysis(program)
    found: T = program.found[analysis.__name__]
    return found


def _probes(program: Program) -> Probes:
    return Probes()


def _gradients(program: Program) -> set[Node]:
    requires = {a.node for a in program.arguments if a.requires_grad}
    found: set[Node] = set()
    for node in program.graph.graph.nodes:
        val = node.meta.get("val")
        if node.op == "placeholder":
            reached = node.name in requires
        else:
            reached = any(n in found for n in node.all_input_nodes) and not _detaches(node)
        values = val if isinstance(val, (tuple, list)) else [val]
        if reached and any(isinstance(v, Tensor) and (v.is_floating_point() or v.is_complex()) for v in values):
            found.add(node)
    return found


def _detaches(node: Node) -> bool:
    return node.target is torch.ops.aten.detach.default


def _readings(program: Program) -> dict[Node, list[Slot]]:
    graph = program.graph.graph
    found: dict[Node, list[Slot]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and not is_getitem(node):
            for i, operand in enumerate(operands(node)):
                found.setdefault(operand, []).append(Slot(node, i))
    by_name = {n.name: n for n in graph.nodes}
    for i, result in enumerate(program.results):
        if result.node is not None:
            found.setdefault(by_name[result.node], []).append(Slot(None, i))
    return found


def _regathered(program: Program) -> set[Slot]:
    grads, slots, inner = gradients(program), readings(program), recomputed(program)
    kept, found = saved(program), set[Slot]()
    alive: set[Node] = set()  # values with such a reading
    for node in reversed(program.graph.graph.nodes):
        for slot in slots.get(node, ()):
            reader = slot.reader
            if reader is None:
                continue
            saves = reader in grads and slot.operand in kept.of(reader, _flags(reader, grads)).operands
            if not saves and slot.operand == 0 and is_view(reader):
                saves = any(o in alive for o in values_of(reader))
            if saves or _again(reader, grads, inner, alive, kept):
                found.add(slot)
                alive.add(node)
    return found


def _recomputed(program: Program) -> set[Node]:
    slots = readings(program)
    leaving: set[Node] = set()
    inner: set[Node] = set()
    for node in reversed(program.graph.graph.nodes):
        number = region(node)
        if number is None:
            continue
        for reader in (slot.reader for slot in slots.get(node, ())):
            # A view is as good as what it views.
            passes_on = reader is not None and is_view(reader) and any(v in leaving for v in values_of(reader))
            if reader is None or region(reader) != number or passes_on:
                leaving.add(node)
        if node not in leaving:
            inner.add(node)
    return inner


def values_of(op: Node) -> list[Node]:
    """The results of an op: the node itself, or its items."""
    return [user for user in op.users if is_getitem(user)] or [op]


def _again(op: Node, grads: set[Node], inner: set[Node], alive: set[Node], probes: Probes) -> bool:
    """Whether an op is computed again in backward."""
    if region(op) is None:
        return False
    if any(v in alive and v in inner for v in values_of(op)):
        return True
    kept = probes.of(op, _flags(op, grads)) if op in grads else Saved()
    return bool(kept.hidden) or (bool(kept.results) and any(v in inner for v in values_of(op)))


def _flags(node: Node, grads: set[Node]) -> tuple[bool, ...]:
    return tuple(o in grads for o in operands(node))


def drops(regather: str, value: Node) -> bool:
    """Whether gathered copies of this value are dropped after forward and gathered again."""
    return regather == "all" or (regather == "weights" and value.op == "placeholder")


def backward_share(node: Node, spec: OpSpec, grads: set[Node]) -> float:
    """How many times the forward's FLOPs the backward of an op has."""
    if node not in grads:
        return 0.0
    attention = "attention" in str(node.target)
    with_mask = any(o in grads for o in operands(node)[3:])
    if attention and not with_mask:
        # Fused: five products for two, as the scores are computed again. (With a trained bias it is not fused.)
        d, e = (operands(node)[i].meta["val"].shape[-1] for i in (0, 2))
        return float(3 * d + 2 * e) / float(d + e)
    if attention:
        return 2.0
    return float(sum(o in grads for i, o in enumerate(operands(node)) if i not in spec.addends))
