"""How long one node of an emitted graph takes on a machine: a roofline for compute, alpha-beta for collectives.

Everything is read from `meta["val"]` (local shapes), so it needs no device and is the same on every rank.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from ..cost import compute_seconds, link_seconds, per_unit
from ..grid import Grid
from ..hardware import Hardware, Link
from ..redistribute import sent

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

# Ops that give another view of their first argument's memory.
_VIEWS = {
    aten.view,
    aten._unsafe_view,
    aten.t,
    aten.transpose,
    aten.permute,
    aten.expand,
    aten.unsqueeze,
    aten.squeeze,
    aten.slice,
    aten.select,
    aten.alias,
    aten.detach,
    aten.split,
    aten.split_with_sizes,
    aten.chunk,
    aten.unbind,
    aten.as_strided,
    aten.view_as_real,
    aten.view_as_complex,
}

# Ops that read of their first argument only what they give back.
_LOOKUPS = {aten.embedding, aten.index_select, aten.gather, aten.index}

# Local copies that bring a value into another form. They go with their reader, as views do.
_RESHUFFLES = {aten.clone, aten.reshape, aten.contiguous}
# The same, when nothing but inputs of the graph lies before them (weights cast before they are gathered).
_PREPARATIONS = {aten._to_copy}

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


def is_start(node: Node) -> bool:
    """Whether a node starts a collective."""
    return getattr(node.target, "namespace", "") == "_c10d_functional" and not is_wait(node)


def is_wait(node: Node) -> bool:
    """Whether a node waits for a collective."""
    return node.target is c10d.wait_tensor.default


def is_view(node: Node) -> bool:
    """Whether a node gives memory that exists already: it takes no time and no bytes."""
    if node.target is operator.getitem or is_wait(node):
        return True
    packet = _packet(node)
    if packet is aten.reshape or packet is aten.contiguous:
        source = _values(node.args[0])
        return bool(source) and source[0].is_contiguous()
    return packet in _VIEWS


def changes_form(node: Node) -> bool:
    """Whether a node gives a value that is there already, in another form: views, waits, local reshuffles."""
    return node.op == "call_function" and (is_view(node) or is_wait(node) or _packet(node) in _RESHUFFLES)


def prepares(node: Node) -> bool:
    """Whether a node is as good as a change of form when it acts on an input of the graph: a cast."""
    return _packet(node) in _PREPARATIONS


def is_random(node: Node) -> bool:
    """Whether a node draws from torch's generator, so that its place among others of the kind matters."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def mutates(node: Node) -> bool:
    """Whether edges do not tell what may change places with a node. Emitted graphs are functional: they have none."""
    schema = getattr(node.target, "_schema", None)
    return node.op in ("call_module", "call_method") or (schema is not None and schema.is_mutable)


def is_heavy(node: Node) -> bool:
    """Whether a node is matmul-like (matmul, convolution, attention): what communication can hide under."""
    return flops(node) > 0


def axis_of(node: Node) -> str:
    """The grid axis that a collective's start communicates along."""
    return str(node.args[-1]).split("_")[1]


def link_of(node: Node, hardware: Hardware, grid: Grid) -> Link:
    """The link that a collective's start uses."""
    return hardware.link(axis_of(node), grid)


def kind_of(node: Node) -> str:
    """The kind of a collective's start: all_gather, reduce_scatter, all_reduce or all_to_all."""
    name = _packet(node).__name__
    return next((k for k in KINDS if name.startswith(k)), "all_gather")


def sent_bytes(node: Node, grid: Grid) -> float:
    """Bytes each rank sends in a collective (ring convention, see `collectives.Collective`), coalesced forms too."""
    kind = kind_of(node)
    size = grid.axis_size(axis_of(node))
    return sum(sent(kind, size, v.numel()) * v.dtype.itemsize for v in _values(node.args[0]))


def flops(node: Node) -> int:
    """Floating point operations of a matmul-like node (two per multiply-add); 0 of any other."""
    packet = _packet(node)
    if packet is None or "val" not in node.meta:
        return 0
    if packet.__name__.startswith("_scaled_dot_product_"):
        return _attention_flops(node, backward="backward" in packet.__name__)
    if packet in (aten.matmul, aten.linear, aten.mv):
        source = _values(node.args[0])[0]
        return 2 * _values(node)[0].numel() * source.shape[-1]
    formula = flop_registry.get(packet)
    if formula is None:
        return 0
    args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
    return int(formula(*args, **kwargs, out_val=node.meta["val"]))


def seconds(node: Node, hardware: Hardware, grid: Grid) -> float:
    """Seconds a node takes: of a start, its collective alone on its link; of a wait or a view, none.

    Compute takes the longer of its floating point operations and its bytes in and out.
    """
    if node.op != "call_function" or is_view(node):
        return 0.0
    if is_start(node):
        return link_seconds(link_of(node, hardware, grid), sent_bytes(node, grid))
    outputs = _values(node)
    if not outputs:
        return 0.0
    inputs = [v for n in node.all_input_nodes for v in _values(n)]
    if _packet(node) in _LOOKUPS:
        inputs = inputs[1:] + outputs
    moved = sum(v.numel() * v.dtype.itemsize for v in (*inputs, *outputs))
    per_flop = per_unit(hardware.rate(outputs[0].dtype))
    return float(compute_seconds(flops(node), moved, per_flop, per_unit(hardware.memory)))


def output_bytes(node: Node) -> int:
    """Bytes that a node allocates for its results."""
    return 0 if is_view(node) else value_bytes(node)


def value_bytes(node: Node) -> int:
    """Bytes of a node's results, whosever memory they lie in."""
    return sum(v.numel() * v.dtype.itemsize for v in _values(node))


def _attention_flops(node: Node, *, backward: bool) -> int:
    # Forward takes (query, key, value), backward has the output's gradient before them and does five products
    # where forward does two. A causal mask is not counted, as in torch's own counter.
    query, key, value = (_values(a)[0].shape for a in node.args[backward : backward + 3])
    once = math.prod(query[:-1]) * key[-2]
    if backward:
        return 2 * once * (3 * query[-1] + 2 * value[-1])
    return 2 * once * (query[-1] + value[-1])


def _packet(node: Node) -> Any:
    return getattr(node.target, "overloadpacket", None)


def _values(arg: Any) -> list[Tensor]:
    """The tensors that a node, or a list of nodes, stands for."""
    if isinstance(arg, (list, tuple)):
        return [v for a in arg for v in _values(a)]
    if isinstance(arg, Node):
        return _values(arg.meta.get("val"))
    return [arg] if isinstance(arg, Tensor) else []
