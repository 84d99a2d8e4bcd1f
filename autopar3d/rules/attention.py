"""Attention: batch, heads and query rows may be sharded; a query needs all keys, so key rows stay whole."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from .core import RULES, Dims, LocalOp, Lowered, OpSpec, argument, results
from .lowering import Pieces, given, pieces_of, positions

aten = torch.ops.aten


def causal_attention_rows(
    q: Tensor, k: Tensor, v: Tensor, rows: Pieces, scale: float | None, enable_gqa: bool
) -> Tensor:
    """Causal attention of some of the query rows: which keys a row sees depends on its place in the whole."""
    sees = positions(rows, q.device)[:, None] >= torch.arange(k.shape[-2], device=k.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=sees, scale=scale, enable_gqa=enable_gqa)


@RULES.builder(aten.scaled_dot_product_attention.default)
def attention(node: Node) -> OpSpec:
    """... (h g) s d, ... h t d, ... h t e, ... (h g) s t? -> ... (h g) s e | t, d, e"""
    q, k, v = (argument(node, n).meta["val"] for n in ("query", "key", "value"))
    out = results(node)[0]
    sizes = {"s": int(q.shape[-2]), "t": int(k.shape[-2]), "d": int(q.shape[-1]), "e": int(v.shape[-1])}
    lead: list[tuple[str, ...]] = []
    for i, n in enumerate(out.shape[:-2]):
        last = i == out.dim() - 3
        name = "h" if last else f"b{i}"
        sizes[name] = int(n)
        lead.append((name,))
        if last and argument(node, "enable_gqa") and k.shape[-3] != n:  # g query heads share one key head
            sizes |= {"h": int(k.shape[-3]), "g": int(n) // int(k.shape[-3])}
            lead[-1] = ("h", "g")

    def dims(tensor: Tensor, tail: tuple[str, str]) -> Dims:
        """Batch dims align on the right and broadcast; so do those of a mask, and its rows and columns."""
        found: list[tuple[str, ...]] = []
        aligned = [*lead, *((f,) for f in tail)][len(lead) + 2 - tensor.dim() :]
        for factors, n in zip(aligned, tensor.shape, strict=True):
            length = math.prod(sizes[f] for f in factors)
            if int(n) == length:
                found.append(factors)
            else:
                found.append(("h",) if factors == ("h", "g") and int(n) == sizes["h"] else ())
        return tuple(found)

    inputs = [dims(q, ("s", "d")), dims(k, ("t", "d")), dims(v, ("t", "e"))]
    mask = argument(node, "attn_mask")
    if mask is not None:
        inputs.append(dims(mask.meta["val"], ("s", "t")))
    flops = 2.0 * math.prod(int(n) for n in out.shape[:-1]) * sizes["t"] * (sizes["d"] + sizes["e"])
    return OpSpec(
        sizes,
        tuple(inputs),
        (dims(out, ("s", "e")),),
        whole=frozenset({"t", "d", "e"}),
        flops=flops,
        padded=frozenset(sizes) - {"t", "d", "e"},
        placed=frozenset("s"),
        lower=_lower_attention,
    )


def _lower_attention(op: LocalOp) -> Lowered:
    if op.single("s") or not argument(op.node, "is_causal"):
        return op.node.target, op.args, dict(op.kwargs)
    q, k, v = given(op, "query"), given(op, "key"), given(op, "value")
    how = (given(op, "scale"), bool(given(op, "enable_gqa")))
    return causal_attention_rows, (q, k, v, pieces_of(op, "s"), *how), {}
