"""Embedding tables: tokens, the hidden dim and the vocabulary may be sharded."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from .core import RULES, LocalOp, Lowered, OpSpec, argument, operands
from .lowering import Pieces, again, given, locate, pieces_of

aten = torch.ops.aten


def embedding_part(weight: Tensor, indices: Tensor, padding: int, rows: Pieces, count: int) -> Tensor:
    """Look up in some rows of the table; zeros for rows elsewhere, so that the parts sum to the whole."""
    local, here = locate(indices, rows, count)
    out = F.embedding(local, weight)
    if padding >= 0:  # that row is read but gets no gradient
        out = torch.where((indices == padding)[..., None], out.detach(), out)
    return torch.where(here[..., None], out, torch.zeros_like(out))


@RULES.builder(aten.embedding.default)
def embedding(node: Node) -> OpSpec:
    """v h, ... -> ... h (partial over a sharded vocabulary)"""
    table, ids = (o.meta["val"] for o in operands(node))
    sizes = {"v": int(table.shape[0]), "h": int(table.shape[1])}
    dims: list[tuple[str, ...]] = []
    for i, n in enumerate(ids.shape):
        sizes[f"i{i}"] = int(n)
        dims.append((f"i{i}",))
    # Gradients scaled by how often a token occurs need all tokens and rows in one place.
    whole = frozenset(sizes) - {"h"} if argument(node, "scale_grad_by_freq") else frozenset()
    inputs = ((("v",), ("h",)), tuple(dims))
    return OpSpec(
        sizes,
        inputs,
        ((*dims, ("h",)),),
        whole=whole,
        padded=frozenset(sizes) - whole,
        placed=frozenset("v"),
        lower=_lower_embedding,
    )


def _lower_embedding(op: LocalOp) -> Lowered:
    if op.single("v"):
        return again(op, sparse=False)  # gradients of shards are dense: they travel through collectives
    args = (
        given(op, "weight"),
        given(op, "indices"),
        int(argument(op.node, "padding_idx")),
        pieces_of(op, "v"),
        op.size("v"),
    )
    return embedding_part, args, {}


@RULES.builder(aten.one_hot.default, pads=True)
def one_hot(node: Node) -> OpSpec:
    """... -> ... c | c"""
    ids = operands(node)[0].meta["val"]
    classes = int(node.meta["val"].shape[-1])
    sizes = {f"i{i}": int(n) for i, n in enumerate(ids.shape)}
    dims = tuple((f,) for f in sizes)
    sizes["c"] = classes
    return OpSpec(
        sizes,
        (dims,),
        ((*dims, ("c",)),),
        whole=frozenset("c"),
        lower=lambda op: again(op, num_classes=classes),
    )


@RULES.builder(aten.index_select.default, pads=True)
def index_select(node: Node) -> OpSpec:
    """d0 d1, k -> d0 k, the indexed dim whole"""
    x, index = (o.meta["val"] for o in operands(node))
    sizes = {f"d{i}": int(n) for i, n in enumerate(x.shape)}
    dims: list[tuple[str, ...]] = [(f,) for f in sizes]
    if x.dim() == 0:
        sizes["k"] = int(index.numel())
        return OpSpec(sizes, ((), (("k",),) * index.dim()), ((),), whole=frozenset("k"))
    at = int(argument(node, "dim")) % x.dim()
    out = list(dims)
    sizes["k"] = int(index.numel())
    out[at] = ("k",)
    return OpSpec(sizes, (tuple(dims), (("k",),) * index.dim()), (tuple(out),), whole=frozenset({f"d{at}"}))
