"""One or more calls of every op in the table: small, in fp64, of sizes that the test grids divide."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from autopar3d.proof import Sample

aten = torch.ops.aten
_generator = torch.Generator().manual_seed(7)


def t(*shape: int) -> Tensor:
    """Values with a gradient."""
    return torch.randn(shape, generator=_generator, dtype=torch.float64)


def pos(*shape: int) -> Tensor:
    """Values in (0.1, 0.9)."""
    return torch.rand(shape, generator=_generator, dtype=torch.float64) * 0.8 + 0.1


def ids(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=_generator)


def distinct(*shape: int) -> Tensor:
    n = int(torch.tensor(shape).prod())
    return torch.randperm(n, generator=_generator).reshape(shape).double() / n


def yes(*shape: int) -> Tensor:
    return torch.rand(shape, generator=_generator) > 0.4


def samples() -> list[Sample]:
    """Every sample, in the order of the families."""
    families = (_matmul, _pointwise, _views, _norms, _softmax, _attention, _embedding, _losses, _reductions)
    return [s for family in (*families, _creation, _conv, _index, _complex, _linalg, _ctc, _finer) for s in family()]


def _s(op: Any, *args: Any, constant: tuple[int, ...] = (), first: bool = False, **kwargs: Any) -> Sample:
    return Sample(op, args, kwargs, constant, first=first)


def _complex() -> Iterator[Sample]:
    def c(*shape: int) -> Tensor:
        return torch.complex(t(*shape), t(*shape))

    yield _s(aten.view_as_complex.default, t(4, 6, 2))
    yield _s(aten.view_as_real.default, c(4, 6))
    yield _s(aten._conj_physical.default, c(4, 6))
    yield _s(aten.mul.Tensor, c(4, 6), c(6))
    yield _s(aten.fft_fft.default, c(4, 6, 12))
    yield _s(aten.fft_ifft.default, c(4, 6, 12), None, 1)
    yield _s(aten.fft_rfft.default, t(4, 6, 12), 8, -1, "ortho")
    yield _s(aten.fft_irfft.default, c(4, 6, 7), 12)
    yield _s(aten.fft_hfft.default, c(4, 7))
    yield _s(aten.fft_ihfft.default, t(4, 12))
    yield _s(aten.fft_fft2.default, c(4, 6, 12))
    yield _s(aten.fft_ifft2.default, c(4, 6, 12))
    yield _s(aten.fft_rfft2.default, t(4, 6, 12))
    yield _s(aten.fft_irfft2.default, c(4, 6, 7))
    yield _s(aten.fft_fftn.default, c(4, 6, 4), None, [0, 2])
    yield _s(aten.fft_ifftn.default, c(4, 6, 4), [4, 6])
    yield _s(aten.fft_rfftn.default, t(4, 6, 4), None, [1, 2])
    yield _s(aten.fft_irfftn.default, c(4, 6, 4), None, [1, 2])


def _matmul() -> Iterator[Sample]:
    yield _s(aten.mm.default, t(4, 6), t(6, 8))
    yield _s(aten.bmm.default, t(4, 2, 6), t(4, 6, 8))
    yield _s(aten.mv.default, t(4, 12), t(12))
    yield _s(aten.dot.default, t(12), t(12))
    yield _s(aten.outer.default, t(4), t(6))
    yield _s(aten.linear.default, t(2, 4, 6), t(8, 6), t(8))
    yield _s(aten.linear.default, t(4, 6), t(8, 6))
    yield _s(aten.bilinear.default, t(4, 2), t(4, 6), t(4, 2, 6), t(4))
    yield _s(aten.addmm.default, t(8), t(4, 6), t(6, 8))
    yield _s(aten.addmm.default, t(4, 8), t(4, 6), t(6, 8))
    yield _s(aten.baddbmm.default, t(4, 1, 8), t(4, 2, 6), t(4, 6, 8))
    yield _s(aten.matmul.default, t(2, 4, 6), t(6, 8))
    yield _s(aten.matmul.default, t(4, 1, 4, 6), t(2, 6, 8))
    yield _s(aten.matmul.default, t(2, 4, 6), t(6))
    yield _s(aten.einsum.default, "bsh,bth->bst", [t(2, 4, 6), t(2, 6, 6)])


def _pointwise() -> Iterator[Sample]:
    for op in (
        *(aten.clone.default, aten.alias.default, aten.detach.default, aten.contiguous.default),
        *(aten.lift_fresh_copy.default, aten.silu.default, aten.gelu.default, aten.mish.default),
        *(aten.selu.default, aten.relu6.default, aten.relu.default, aten.tanh.default, aten.sigmoid.default),
        *(aten.exp.default, aten.neg.default, aten.rsqrt.default, aten.logical_not.default),
        *(aten.isnan.default, aten.isinf.default, aten.isfinite.default, aten.zeros_like.default),
        *(aten.ones_like.default, aten.cos.default, aten.abs.default),
    ):
        yield _s(op, pos(4, 6))
    yield Sample(aten.empty_like.default, (t(4, 6),), empty=True)
    yield _s(aten.full_like.default, t(4, 6), 3.0)
    yield _s(aten._to_copy.default, t(4, 6), dtype=torch.float32)
    yield _s(aten.to.dtype, t(4, 6), torch.float32)
    yield _s(aten.to.dtype_layout, t(4, 6), dtype=torch.float32)
    yield _s(aten.to.device, t(4, 6), torch.device("cpu"), torch.float32)
    yield _s(aten.type_as.default, t(4, 6), t(4, 6).float(), constant=(1,))
    yield _s(aten.native_dropout_backward.default, t(4, 6), yes(4, 6), 1.25)
    yield _s(aten.where.self, yes(4, 6), t(4, 6), t(6))
    yield _s(aten.where.ScalarSelf, yes(4, 6), 2.0, t(4, 6))
    yield _s(aten.where.ScalarOther, yes(4, 6), t(4, 1), 2.0)
    yield _s(aten.where.Scalar, yes(4, 6), 1.0, 2.0)
    yield _s(aten.masked_fill.Scalar, t(4, 6), yes(6), 2.0)
    yield _s(aten.masked_fill.Tensor, t(4, 6), yes(4, 6), t())
    yield _s(aten.fill.Scalar, t(4, 6), 2.0)
    yield _s(aten.fill.Tensor, t(4, 6), t())
    yield _s(aten.prelu.default, t(4, 6), t(6))
    yield _s(aten.prelu.default, t(4, 6, 6), t(6))
    yield _s(aten.prelu.default, t(4, 6, 4), t(1))
    for op in (aten.logical_and.default, aten.logical_or.default, aten.__and__.Tensor, aten.__or__.Tensor):
        yield _s(op, yes(4, 6), yes(4, 1))
    for op in (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.maximum.default):
        yield _s(op, t(4, 6), pos(4, 6))
        yield _s(op, t(4, 6), pos(6))
    yield _s(aten.mul.Tensor, t(4, 6), 2.0)
    yield _s(aten.add.Tensor, t(4, 6), 2.0)
    yield _s(aten.pow.Tensor_Scalar, t(4, 6), 3)
    yield _s(aten.le.Tensor, t(1, 6), t(4, 1))


def _views() -> Iterator[Sample]:
    for op in (aten.reshape.default, aten.view.default, aten._unsafe_view.default):
        yield _s(op, t(4, 6, 2), [24, 2])
        yield _s(op, t(4, 12), [4, 6, 2])
        yield _s(op, t(4, 6), [6, 4])
    yield _s(aten.unsqueeze.default, t(4, 6), 1)
    yield _s(aten.squeeze.default, t(4, 1, 6))
    yield _s(aten.squeeze.dim, t(4, 1, 6), 1)
    yield _s(aten.squeeze.dims, t(4, 1, 6, 1), [1, 3])
    yield _s(aten.flatten.using_ints, t(4, 6, 2), 0, 1)
    yield _s(aten.unflatten.int, t(4, 12), 1, [6, 2])
    yield _s(aten.view_as.default, t(4, 12), t(4, 6, 2), constant=(1,))
    yield _s(aten.reshape_as.default, t(4, 12), t(4, 6, 2), constant=(1,))
    yield _s(aten.permute.default, t(4, 6, 2), [2, 0, 1])
    yield _s(aten.transpose.int, t(4, 6, 2), 0, -1)
    yield _s(aten.t.default, t(4, 6))
    yield _s(aten.movedim.int, t(4, 6, 2), 0, 2)
    yield _s(aten.numpy_T.default, t(4, 6))
    yield _s(aten.expand.default, t(4, 1, 6), [2, 4, 4, 6])
    yield _s(aten.expand.default, t(4, 1), [-1, 6])
    yield _s(aten.expand_as.default, t(4, 1), t(4, 6), constant=(1,))
    yield _s(aten.broadcast_to.default, t(6), [4, 6])
    yield _s(aten.slice.Tensor, t(4, 12), 1, 6, 12)
    yield _s(aten.slice.Tensor, t(4, 12), 1, 0, 9223372036854775807)
    yield _s(aten.slice.Tensor, t(4, 12), 1, 1, 5)
    yield _s(aten.slice.Tensor, t(4, 12), 1, -6, 9223372036854775807)
    yield _s(aten.select.int, t(4, 6, 2), 1, 2)
    yield _s(aten.split.Tensor, t(4, 12), 6, 1)
    yield _s(aten.split.Tensor, t(4, 12), 8, 1)
    yield _s(aten.split_with_sizes.default, t(4, 12), [6, 6], 1)
    yield _s(aten.split_with_sizes.default, t(4, 12), [4, 8], 1)
    yield _s(aten.chunk.default, t(4, 12), 3, 1)
    yield _s(aten.unbind.int, t(4, 2, 6), 1)
    yield _s(aten.cat.default, [t(4, 6), t(4, 6)], 1)
    yield _s(aten.cat.default, [t(4, 6), t(4, 2)], -1)
    yield _s(aten.stack.default, [t(4, 6), t(4, 6)], 1)
    yield _s(aten.flip.default, t(4, 6), [1])
    yield _s(aten.roll.default, t(4, 6), [1], [1])
    yield _s(aten.repeat.default, t(4, 6), [2, 1, 3])
    yield _s(aten.repeat_interleave.self_int, t(4, 6), 2, 1)


def _norms() -> Iterator[Sample]:
    for weights in ((t(12), t(12)), (t(12), None), (None, None)):
        yield _s(aten.layer_norm.default, t(2, 4, 12), [12], *weights, 1e-5, False)
    yield _s(aten.layer_norm.default, t(4, 4, 6), [4, 6], t(4, 6), t(4, 6))
    yield _s(aten.native_layer_norm.default, t(4, 12), [12], t(12), t(12), 1e-5)
    yield _s(aten.rms_norm.default, t(2, 4, 12), [12], t(12))
    yield _s(aten.rms_norm.default, t(4, 12), [12], None, 1e-6)
    yield Sample(aten._fused_rms_norm.default, (t(4, 12), [12], t(12), 1e-6), first=True)
    yield _s(aten.group_norm.default, t(4, 12, 3), 6, t(12), t(12), 1e-5, False)
    yield _s(aten.group_norm.default, t(4, 12, 3), 4)
    yield _s(aten.native_group_norm.default, t(4, 12, 3), t(12), t(12), 4, 12, 3, 6, 1e-5)
    yield _s(aten.instance_norm.default, t(4, 6, 3), t(6), t(6), None, None, True, 0.1, 1e-5, False)
    yield _s(
        aten.instance_norm.default,
        t(4, 6, 3),
        None,
        None,
        t(6),
        pos(6),
        False,
        0.1,
        1e-5,
        False,
        constant=(1, 2),
    )
    for training in (True, False):
        stats = (t(6), pos(6))
        op = aten._native_batch_norm_legit_functional.default
        yield _s(op, t(12, 6, 2), t(6), t(6), *stats, training, 0.1, 1e-5, constant=(3, 4))
        yield _s(op, t(12, 6), None, None, *stats, training, 0.1, 1e-5, constant=(1, 2))
    yield _s(aten._native_batch_norm_legit.no_stats, t(12, 6, 2), t(6), t(6), True, 0.1, 1e-5)
    yield _s(
        aten.batch_norm.default,
        t(12, 6, 2),
        t(6),
        t(6),
        t(6),
        pos(6),
        False,
        0.1,
        1e-5,
        False,
        constant=(3, 4),
    )
    yield _s(aten.batch_norm.default, t(12, 6, 2), t(6), t(6), None, None, True, 0.1, 1e-5, False)


def _softmax() -> Iterator[Sample]:
    for op in (aten.softmax.int, aten.log_softmax.int):
        yield _s(op, t(4, 2, 12), -1)
        yield _s(op, t(12, 4), 0, torch.float32)
    for op in (aten._softmax.default, aten._log_softmax.default):
        yield _s(op, t(4, 12), 1, False)
    yield _s(aten.logsumexp.default, t(4, 12), [1])
    yield _s(aten.logsumexp.default, t(4, 2, 6), [0, 2], True)


def _attention() -> Iterator[Sample]:
    op = aten.scaled_dot_product_attention.default

    def qkv(b: int = 2, h: int = 4, kv: int = 4, s: int = 12, m: int = 12) -> tuple[Tensor, ...]:
        return t(b, h, s, 3), t(b, kv, m, 3), t(b, kv, m, 5)

    yield _s(op, *qkv())
    yield _s(op, *qkv(), None, 0.0, True)
    yield _s(op, *qkv(m=8), None, 0.0, True, scale=0.3)
    yield _s(op, *qkv(), yes(12, 12) | torch.eye(12, dtype=torch.bool))
    yield _s(op, *qkv(), t(2, 1, 12, 12))
    yield _s(op, *qkv(), t(1, 4, 1, 12))
    yield _s(op, *qkv(kv=2), None, 0.0, True, enable_gqa=True)
    yield _s(op, *qkv(h=8, kv=2, s=6, m=4), t(2, 8, 6, 4), enable_gqa=True)
    yield _s(op, t(4, 6, 2), t(4, 6, 2), t(4, 6, 2), None, 0.0, True)


def _embedding() -> Iterator[Sample]:
    yield _s(aten.embedding.default, t(24, 6), ids(24, 4, 6))
    yield _s(aten.embedding.default, t(12, 4), torch.tensor([[3, 0, 7, 3], [11, 3, 1, 5]]), 3)
    yield _s(aten.embedding.default, t(12, 4), ids(12, 4), -1, True)
    yield _s(aten.one_hot.default, ids(5, 4, 6), 5)
    yield _s(aten.index_select.default, t(4, 12, 6), 1, ids(12, 8))


def _losses() -> Iterator[Sample]:
    target = torch.tensor([0, 5, 11, -100, 7, 3, -100, 11, 1, 2, 6, 4])
    for reduction in (0, 1, 2):
        for smoothing in (0.0, 0.1):
            for weight in (None, pos(12)):
                constant = (2,)
                args = (weight, reduction, -100, smoothing)
                yield _s(aten.cross_entropy_loss.default, t(12, 12), target, *args, constant=constant)
        for op in (aten.nll_loss_nd.default, aten.nll_loss.default):
            for weight in (None, pos(12)):
                yield _s(op, t(12, 12), target, weight, reduction, -100, constant=(2,))
        for op in (
            aten.mse_loss.default,
            aten.l1_loss.default,
            aten.smooth_l1_loss.default,
            aten.huber_loss.default,
        ):
            yield _s(op, t(4, 6), t(4, 6), reduction)
        yield _s(aten.soft_margin_loss.default, t(4, 6), t(4, 6).sign(), reduction, constant=(1,))
        yield _s(aten.binary_cross_entropy.default, pos(4, 6), pos(4, 6), None, reduction, constant=(1,))
        yield _s(aten.binary_cross_entropy.default, pos(4, 6), pos(4, 6), pos(6), reduction, constant=(1, 2))
        bce = aten.binary_cross_entropy_with_logits.default
        yield _s(bce, t(4, 6), pos(4, 6), pos(4, 6), pos(6), reduction, constant=(1, 2, 3))
        for log in (True, False):
            yield _s(aten.kl_div.default, t(4, 6), pos(4, 6), reduction, log_target=log)
        yield _s(aten.hinge_embedding_loss.default, t(4, 6), t(4, 6).sign(), 1.0, reduction, constant=(1,))
        yield _s(aten.margin_ranking_loss.default, t(4, 6), t(4, 6), t(4, 6).sign(), 0.1, reduction, constant=(2,))
        yield _s(aten.poisson_nll_loss.default, t(4, 6), pos(4, 6), True, False, 1e-8, reduction, constant=(1,))
        places = torch.where(yes(4, 6), ids(4, 4, 6), torch.tensor(2))
        for op in (aten.cross_entropy_loss.default, aten.nll_loss_nd.default):
            yield _s(op, t(4, 4, 6), places, pos(4), reduction, 2, constant=(2,))
        yield _s(aten.nll_loss2d.default, t(4, 4, 6, 2), ids(4, 4, 6, 2), None, reduction)
        shares = pos(12, 4) / 4
        yield _s(aten.cross_entropy_loss.default, t(12, 4), shares, None, reduction, -100, 0.1, constant=(1,))
        yield _s(aten.cross_entropy_loss.default, t(12), torch.tensor(5), None, reduction)


def _reductions() -> Iterator[Sample]:
    yield _s(aten.sum.default, t(4, 6))
    yield _s(aten.sum.default, yes(4, 6))
    yield _s(aten.sum.dim_IntList, t(4, 6, 2), [0, -1])
    yield _s(aten.sum.dim_IntList, t(4, 6), [1], True)
    yield _s(aten.mean.default, t(4, 6))
    yield _s(aten.mean.dim, t(4, 6), [-1], True)
    yield _s(aten.mean.dim, t(4, 6, 2), [0, 1])
    yield _s(aten.var.correction, t(4, 6), [1], correction=1, keepdim=True)
    yield _s(aten.var.correction, t(4, 6))
    yield _s(aten.var.dim, t(4, 6), [-1], False)
    yield _s(aten.var.default, t(4, 6), True)
    yield _s(aten.std.correction, t(4, 6), [0], correction=0)
    yield _s(aten.std.dim, t(4, 6), [-1])
    yield _s(aten.std.default, t(4, 6), False)
    yield _s(aten.linalg_vector_norm.default, t(4, 6))
    yield _s(
        aten.linalg_vector_norm.default,
        torch.cat([t(3, 6), torch.zeros(1, 6, dtype=torch.float64)]),
        2,
        [1],
        True,
    )
    yield _s(aten.linalg_vector_norm.default, t(4, 6), 1, [1])
    for op in (
        *(aten.amax.default, aten.amin.default, aten.max.dim, aten.min.dim, aten.argmax.default),
        *(aten.argmin.default, aten.prod.dim_int, aten.median.dim, aten.mode.default),
    ):
        yield _s(op, distinct(4, 6), 1)
    yield _s(aten.amax.default, t(4, 6, 2), [0, 2], True)
    yield _s(aten.aminmax.default, distinct(4, 6), dim=1)
    for op in (aten.max.default, aten.min.default, aten.prod.default, aten.median.default):
        yield _s(op, distinct(4, 6))
    for op in (aten.any.default, aten.all.default):
        yield _s(op, yes(4, 6))
    for op in (aten.any.dim, aten.all.dim):
        yield _s(op, yes(4, 6), -1)
    for op in (aten.any.dims, aten.all.dims):
        yield _s(op, yes(4, 6, 2), [0, 2])
    for op in (aten.var_mean.correction, aten.std_mean.correction):
        yield _s(op, t(4, 6), [1], correction=1)
    yield _s(aten.kthvalue.default, distinct(4, 6), 2, 1)
    yield _s(aten.count_nonzero.default, yes(4, 6))
    yield _s(aten.count_nonzero.dim_IntList, yes(4, 6), [1])
    yield _s(aten.norm.Scalar, t(4, 6))
    yield _s(aten.norm.ScalarOpt_dim, t(4, 6), 2, [1])
    for op in (aten.cumsum.default, aten.cumprod.default, aten.cummax.default, aten.cummin.default):
        yield _s(op, distinct(4, 6), 1)
    for op in (aten.logcumsumexp.default, aten.sort.default, aten.argsort.default):
        yield _s(op, distinct(4, 6), 1)
    yield _s(aten.sort.stable, distinct(4, 6), stable=True, dim=0)
    yield _s(aten.argsort.stable, distinct(4, 6), stable=True, dim=0)
    yield _s(aten.topk.default, distinct(4, 6), 2)


def _creation() -> Iterator[Sample]:
    yield _s(aten.zeros.default, [4, 6])
    yield _s(aten.ones.default, [4, 6], dtype=torch.float64)
    yield _s(aten.full.default, [4, 6], 2.5)
    yield Sample(aten.empty.memory_format, ([4, 6],), empty=True)
    yield _s(aten.new_zeros.default, t(2, 4), [4, 6])
    yield _s(aten.new_ones.default, t(2, 4), [4, 6])
    yield _s(aten.new_full.default, t(2, 4), [4, 6], 2.5)
    yield Sample(aten.new_empty.default, (t(2, 4), [4, 6]), empty=True)
    yield _s(aten.arange.default, 12)
    yield _s(aten.arange.start, 3, 15)
    yield _s(aten.arange.start_step, 3, 27, 2, dtype=torch.int32)
    yield _s(aten.arange.default, 12, dtype=torch.float64)
    yield _s(aten.scalar_tensor.default, 2.0)
    yield _s(aten.linspace.default, 0.0, 1.0, 12)
    yield _s(aten.eye.default, 4)
    yield _s(aten.eye.m, 4, 6)
    yield _s(aten.tril_indices.default, 4, 4)
    yield _s(aten.triu_indices.default, 4, 4)
    key, cpu = torch.tensor([7, 3]), torch.device("cpu")
    for what, shape in (("keep", [4, 6]), ("uniform", [12]), ("normal", [2, 2, 3, 4]), ("exponential", [4, 6, 140])):
        dtype = torch.bool if what == "keep" else torch.float64
        yield _s(torch.ops.autopar3d.draw.default, key, 5, what, 0.4, shape, dtype, cpu)
    yield _s(aten.tril.default, t(4, 2, 6, 6))
    yield _s(aten.triu.default, t(4, 2, 6, 6), 1)
    yield _s(aten.broadcast_tensors.default, [t(4, 1), t(6)])
    yield _s(aten.meshgrid.default, [t(4), t(6)])
    yield _s(aten.meshgrid.indexing, [t(4), t(6)], indexing="xy")


def _conv() -> Iterator[Sample]:
    yield _s(aten.conv1d.default, t(4, 6, 5), t(8, 6, 3), t(8), [1], [1])
    yield _s(aten.conv1d.padding, t(4, 6, 5), t(8, 6, 3), t(8), [1], "same")
    yield _s(aten.conv2d.default, t(4, 6, 5, 5), t(8, 6, 3, 3), t(8), [2, 2], [1, 1])
    yield _s(aten.conv2d.default, t(4, 12, 3, 3), t(24, 1, 2, 2), t(24), [1, 1], [0, 0], [1, 1], 12)
    yield _s(aten.conv2d.default, t(2, 8, 3, 3), t(8, 2, 2, 2), None, [1, 1], [0, 0], [1, 1], 4)
    yield _s(aten.conv2d.default, t(6, 5, 5), t(8, 6, 3, 3), t(8))
    yield _s(aten.conv2d.padding, t(4, 6, 3, 3), t(8, 6, 3, 3), None, [1, 1], "same")
    yield _s(aten.conv3d.default, t(4, 2, 3, 3, 3), t(4, 2, 2, 2, 2), t(4))
    yield _s(aten.conv3d.padding, t(4, 2, 3, 3, 3), t(4, 2, 2, 2, 2), t(4), [1, 1, 1], "valid")
    yield _s(aten.conv_transpose1d.default, t(4, 6, 3), t(6, 8, 2), t(8), [2])
    yield _s(aten.conv_transpose2d.input, t(4, 6, 3, 3), t(6, 8, 2, 2), t(8))
    yield _s(aten.conv_transpose2d.input, t(2, 8, 3, 3), t(8, 3, 2, 2), t(12), [1, 1], [0, 0], [0, 0], 4)
    yield _s(aten.conv_transpose3d.input, t(4, 2, 2, 2, 2), t(2, 4, 2, 2, 2), t(4))
    yield _s(aten.convolution.default, t(4, 6, 3), t(8, 6, 2), t(8), [1], [0], [1], False, [0], 1)
    yield _s(aten.convolution.default, t(4, 6, 3), t(6, 4, 2), t(8), [1], [0], [1], True, [0], 2)
    for op in (aten.max_pool1d.default, aten.avg_pool1d.default):
        yield _s(op, t(4, 6, 4), [2])
    for op in (aten.adaptive_avg_pool1d.default, aten.adaptive_max_pool1d.default):
        yield _s(op, t(4, 6, 4), [2])
    for op in (aten.max_pool2d.default, aten.max_pool2d_with_indices.default, aten.avg_pool2d.default):
        yield _s(op, t(4, 6, 4, 4), [2, 2])
    for op in (
        aten.adaptive_avg_pool2d.default,
        aten._adaptive_avg_pool2d.default,
        aten.adaptive_max_pool2d.default,
    ):
        yield _s(op, t(4, 6, 4, 4), [2, 2])
    for op in (aten.max_pool3d.default, aten.avg_pool3d.default):
        yield _s(op, t(4, 6, 4, 2, 2), [2, 2, 2])
    for op in (aten.adaptive_avg_pool3d.default, aten.adaptive_max_pool3d.default):
        yield _s(op, t(4, 6, 4, 2, 2), [2, 1, 1])
    yield _s(aten.upsample_nearest1d.vec, t(4, 6, 3), None, [2.0])
    yield _s(aten.upsample_linear1d.vec, t(4, 6, 3), [6], False, None)
    yield _s(aten.upsample_nearest2d.vec, t(4, 6, 3, 3), [6, 6], None)
    for op in (aten.upsample_bilinear2d.vec, aten.upsample_bicubic2d.vec):
        yield _s(op, t(4, 6, 3, 3), None, False, [2.0, 2.0])
    for op in (aten._upsample_bilinear2d_aa.vec, aten._upsample_bicubic2d_aa.vec):
        yield _s(op, t(4, 6, 4, 4), [2, 2], False, None)
    yield _s(aten.upsample_nearest3d.vec, t(4, 6, 2, 2, 2), None, [2.0, 2.0, 2.0])
    yield _s(aten.upsample_trilinear3d.vec, t(4, 6, 2, 2, 2), None, False, [2.0, 2.0, 2.0])
    for op in (aten.reflection_pad1d.default, aten.replication_pad1d.default):
        yield _s(op, t(4, 6, 3), [1, 2])
    for op in (aten.reflection_pad2d.default, aten.replication_pad2d.default):
        yield _s(op, t(4, 6, 3, 3), [1, 2, 1, 0])
    yield _s(aten.pixel_shuffle.default, t(4, 24, 2, 3), 2)
    yield _s(aten.pixel_unshuffle.default, t(4, 6, 4, 6), 2)
    yield _s(aten.im2col.default, t(4, 6, 3, 3), [2, 2], [1, 1], [0, 0], [1, 1])
    yield _s(aten.col2im.default, t(4, 24, 4), [3, 3], [2, 2], [1, 1], [0, 0], [1, 1])
    yield _s(aten.pad.default, t(4, 6, 2), [1, 1])
    yield _s(aten.pad.default, t(4, 6, 3), [1, 1], "reflect")
    yield _s(aten.pad.default, t(4, 6), [0, 2, 0, 0], "constant", 3.0)
    yield _s(aten.constant_pad_nd.default, t(4, 6, 2), [0, 0, 1, -1], 0.0)
    for op in (aten.grid_sampler.default, aten.grid_sampler_2d.default):
        yield _s(op, t(4, 6, 3, 3), pos(4, 4, 6, 2), 0, 0, False)


def _index() -> Iterator[Sample]:
    op = aten.index.Tensor
    yield _s(op, t(4, 6, 2), [None, ids(6, 8)])
    yield _s(op, t(4, 6, 12), [torch.arange(4), ids(6, 4)])
    yield _s(op, t(4, 6, 12), [ids(4, 2, 1), None, ids(12, 6)])
    yield _s(aten.index_put.default, t(4, 6), [ids(4, 3).unique()], t(1, 6))
    yield _s(aten.index_put.default, t(4, 6, 2), [None, ids(6, 8)], t(4, 8, 2), True)
    yield _s(aten.index_put.default, t(4, 6, 2), [yes(4, 6)], t(), constant=(2,))
    yield _s(aten.index_put.default, t(4, 6, 2), [yes(4)], t(1))
    yield _s(aten.gather.default, t(4, 12), 1, ids(12, 4, 6))
    yield _s(aten.gather.default, t(4, 12, 6), 1, ids(12, 4, 2, 3))
    yield _s(aten.take_along_dim.default, t(4, 12), ids(12, 4, 6), 1)
    yield _s(aten.take_along_dim.default, t(4, 12), ids(12, 1, 6), 1)
    order = torch.argsort(t(4, 6))
    yield _s(aten.scatter.src, t(4, 6), 1, order, t(4, 6))
    yield _s(aten.scatter.value, t(4, 12), 1, ids(12, 4, 6), 1.0)
    yield _s(aten.scatter.reduce, t(4, 6), 1, order, t(4, 6), reduce="add", constant=(0, 2))
    yield _s(aten.scatter.value_reduce, t(4, 6), 1, order, 2.0, reduce="multiply", constant=(0,))
    yield _s(aten.scatter_add.default, t(4, 6), 1, ids(6, 4, 12), t(4, 12))
    yield _s(aten.scatter_reduce.two, t(4, 6), 1, ids(6, 4, 12), t(4, 12), "sum")
    yield _s(aten.select_scatter.default, t(4, 6, 2), t(4, 2), 1, 3)
    yield _s(aten.slice_scatter.default, t(4, 6), t(4, 2), 1, 1, 3)
    yield _s(aten.index_add.default, t(4, 6), 1, ids(6, 8), t(4, 8))
    yield _s(aten.index_copy.default, t(4, 6), 1, torch.tensor([3, 0]), t(4, 2))
    yield _s(aten.index_fill.int_Scalar, t(4, 6), 1, torch.tensor([3, 0]), 2.0)
    yield _s(aten.index_fill.int_Tensor, t(4, 6), 1, torch.tensor([3, 0]), t(), constant=(2,))
    yield _s(aten.bucketize.Tensor, t(4, 6), torch.arange(5.0, dtype=torch.float64), constant=(0, 1))
    yield _s(aten.isin.Tensor_Tensor, ids(9, 4, 6), ids(9, 5))
    yield _s(aten.glu.default, t(4, 24), -1)
    yield _s(aten.cosine_similarity.default, t(4, 6, 2), t(6, 2), -1)
    yield _s(aten.diagonal.default, t(4, 6, 6), 0, 1, 2)
    yield _s(aten.unfold.default, t(4, 6), 1, 2, 1)


def _linalg() -> Iterator[Sample]:
    waves = torch.view_as_complex(t(4, 6, 8, 2))
    square = t(4, 6, 3, 3) + 4 * torch.eye(3, dtype=torch.float64)
    for op in (aten._linalg_det.default, aten._linalg_slogdet.default, aten.linalg_matrix_exp.default):
        yield _s(op, square, first=True)
    yield _s(aten.linalg_inv_ex.default, square, first=True)
    both = square @ square.mT
    yield _s(aten.linalg_cholesky_ex.default, both, first=True)
    yield _s(aten.linalg_eigh.default, both, first=True)
    yield _s(aten._linalg_eigh.default, both, first=True)
    yield _s(aten.linalg_qr.default, square, first=True)
    yield _s(aten._linalg_svd.default, square)
    yield _s(aten.linalg_solve_ex.default, square, t(4, 6, 3, 2), first=True)
    yield _s(aten._linalg_solve_ex.default, square, t(4, 6, 3, 2), first=True)
    yield _s(aten.cholesky_solve.default, t(4, 6, 3, 2), both.tril() + torch.eye(3, dtype=torch.float64))
    yield _s(aten.linalg_cross.default, t(4, 6, 3), t(4, 6, 3))
    yield _s(aten._weight_norm_interface.default, t(12, 6), pos(12, 1))
    yield _s(aten._weight_norm_interface.default, t(4, 6, 12), pos(1, 1, 12), 2)
    yield _s(aten.vdot.default, t(12), t(12))
    yield _s(aten.nansum.default, t(4, 6), [1])
    yield _s(aten.unsafe_split.Tensor, t(4, 12), 6, 1)
    yield _s(aten.polar.default, pos(4, 6), t(4, 6))
    yield _s(aten.complex.default, t(4, 6), t(4, 6))
    for op in (aten.real.default, aten.imag.default, aten.conj.default, aten._conj.default):
        yield _s(op, waves)
    yield _s(aten.hardswish.default, t(4, 6))
    yield _s(aten.floor_divide.default, t(4, 6), pos(6), constant=(0, 1))
    yield _s(aten.floor_divide.Scalar, t(4, 6), 2, constant=(0,))
    # bfloat16 is all that torch traces, in rows of whole 16 bytes.
    rows, experts = (t(*n).sign().bfloat16() for n in ((12, 192), (4, 192, 192)))
    yield _s(aten._grouped_mm.default, rows, experts, torch.tensor([2, 5, 5, 12], dtype=torch.int32))


def _ctc() -> Iterator[Sample]:
    log_probs = t(8, 6, 12).log_softmax(-1)
    lengths = torch.tensor([8, 7, 8, 6, 8, 8]), torch.tensor([2, 1, 2, 2, 1, 2])
    op = torch.ops.autopar3d.ctc_losses.default
    yield _s(op, log_probs, ids(12, 6, 2), *lengths, 0, True)
    yield _s(op, log_probs, ids(12, 10), *lengths, 11, False)


def _finer() -> Iterator[Sample]:
    """Ops whose factors other ops cut: an axis may lie on an inner piece, so a shard is no single run."""
    table, places = t(24, 6), ids(24, 4, 6)
    yield Sample(aten.embedding.default, (table, places, 2), views={0: [4, 6, 6], 1: [4, 6]})
    target = torch.tensor([0, 5, 11, -100, 7, 3, -100, 11, 1, 2, 6, 4])
    for weight in (None, pos(12)):
        args = (t(12, 12), target, weight, 1, -100, 0.1)
        yield Sample(aten.cross_entropy_loss.default, args, constant=(2,), views={0: [2, 6, 6, 2], 1: [2, 6]})
    yield Sample(aten.nll_loss_nd.default, (t(12, 12), target), views={0: [12, 2, 6]})
    heads = tuple(t(2, 4, 12, 3) for _ in range(3))
    causal = aten.scaled_dot_product_attention.default
    yield Sample(causal, (*heads, None, 0.0, True), views={0: [2, 4, 2, 6, 3]})
    yield Sample(aten.layer_norm.default, (t(4, 12), [12], t(12), t(12)), views={0: [4, 2, 6]})
    yield Sample(aten.softmax.int, (t(4, 12), 1), views={0: [4, 2, 6]})
    yield Sample(aten.conv2d.default, (t(4, 12, 3, 3), t(8, 12, 2, 2), t(8)), views={0: [4, 6, 2, 3, 3], 2: [2, 4]})
    yield Sample(aten.mean.dim, (t(4, 12), [1]), views={0: [4, 6, 2]})
