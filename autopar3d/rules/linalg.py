"""Matrices and vectors that are treated whole; the dims before them may be sharded."""

from __future__ import annotations

import torch
from torch.fx import Node

from .core import RULES, Dims, OpSpec, argument, operands, results
from .pointwise import pointwise

aten = torch.ops.aten


@RULES.builder(
    aten.linalg_inv_ex.default,
    aten.linalg_cholesky_ex.default,
    aten.linalg_solve_ex.default,
    aten._linalg_solve_ex.default,
    aten._linalg_det.default,
    aten._linalg_slogdet.default,
    aten.linalg_eigh.default,
    aten._linalg_eigh.default,
    aten.linalg_qr.default,
    aten._linalg_svd.default,
    aten.linalg_matrix_exp.default,
    aten.cholesky_solve.default,
    pads=True,
)
def matrices(node: Node) -> OpSpec:
    """... m n -> ... | m, n: a matrix is treated whole, the dims before it are a batch"""
    batch = [int(n) for n in operands(node)[0].meta["val"].shape[:-2]]
    sizes = {f"b{i}": n for i, n in enumerate(batch)}
    whole: set[str] = set()

    def dims(tensor: torch.Tensor, tag: str) -> Dims:
        shape = [int(n) for n in tensor.shape]
        lead = len(batch) if shape[: len(batch)] == batch else 0
        own = {f"{tag}{i}": n for i, n in enumerate(shape[lead:])}
        sizes.update(own)
        whole.update(own)
        return (*((f"b{i}",) for i in range(lead)), *((f,) for f in own))

    inputs = tuple(dims(o.meta["val"], f"i{k}_") for k, o in enumerate(operands(node)))
    outputs = tuple(dims(r, f"o{k}_") for k, r in enumerate(results(node)))
    if any(len(d) < len(batch) for d in (*inputs, *outputs)):
        whole |= set(sizes)  # an operand without the batch: nothing is known of how it broadcasts
    return OpSpec(sizes, inputs, outputs, whole=frozenset(whole))


@RULES.builder(aten.linalg_cross.default, pads=True)
def cross(node: Node) -> OpSpec:
    """d0 d1, d0 d1 -> d0 d1 | d1"""
    spec = pointwise(node)
    at = int(argument(node, "dim", -1)) % results(node)[0].dim()
    return OpSpec(spec.sizes, spec.inputs, spec.outputs, whole=frozenset({f"d{at}"}))


@RULES.builder(aten._weight_norm_interface.default, pads=True)
def weight_norm(node: Node) -> OpSpec:
    """d0 d1, d0 1 -> d0 d1, d0 1 | d1: lengths over all dims but one"""
    v, g = (o.meta["val"] for o in operands(node))
    at = int(argument(node, "dim", 0)) % v.dim()
    sizes = {f"d{i}": int(n) for i, n in enumerate(v.shape)}
    dims: Dims = tuple((f,) for f in sizes)
    lengths: Dims = tuple(d if i == at else () for i, d in enumerate(dims))[-g.dim() :] if g.dim() else ()
    return OpSpec(sizes, (dims, lengths), (dims, lengths), whole=frozenset(sizes) - {f"d{at}"})
