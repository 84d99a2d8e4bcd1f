"""Sizes that the grid does not divide: equal to one device, and cut where that pays."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import autopar3d
from autopar3d.pads import add_pads, fill_pads, trim_pads
from autopar3d.ranks.launch import Pool
from autopar3d.search import padding
from autopar3d.testing import assert_trains_like_one_device


class Block(nn.Module):
    """Embedding, causal attention, a head over the vocabulary, and a loss that ignores a label."""

    def __init__(self, vocabulary: int, heads: int, width: int, hidden: int, device: str = "cpu") -> None:
        super().__init__()
        self.heads = heads
        inner = heads * width
        with torch.device(device):
            self.embed = nn.Embedding(vocabulary, hidden)
            self.norm = nn.LayerNorm(hidden)
            self.q, self.k, self.v = (nn.Linear(hidden, inner) for _ in range(3))
            self.o = nn.Linear(inner, hidden)
            self.drop = nn.Dropout(0.1)
            self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(ids)
        b, t, _ = x.shape
        y = self.norm(x)
        q, k, v = (f(y).view(b, t, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.o(seen.transpose(1, 2).reshape(b, t, -1)))
        logits = self.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=1)
        return loss + 1e-3 * logits.softmax(-1).square().mean(), logits


def make(vocabulary: int, heads: int, width: int, hidden: int, dropout: bool = False) -> Callable[[], Block]:
    def build() -> Block:
        torch.manual_seed(0)
        block = Block(vocabulary, heads, width, hidden).double()
        block.drop.p = 0.1 if dropout else 0.0
        return block

    return build


def tokens(batch: int, length: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(0, vocabulary, (batch, length), generator=generator) for _ in range(2))
    return ids, labels


def padded_whatever_it_costs() -> Any:
    """Every class that can be padded is, to the last length that is tried."""
    return mock.patch.multiple(padding, _LEAST_GAIN=-1e9, _idle=lambda *_: True)


@pytest.mark.parametrize("force", [False, True])
@settings(
    max_examples=6, deadline=None, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(
    sizes=st.tuples(*(st.integers(1, 9) for _ in range(6))),
    grid=st.sampled_from([(2, 2, 2), (1, 2, 4), (2, 3, 1), (3, 1, 1)]),
)
@example(sizes=(4, 1, 1, 1, 3, 4), grid=(2, 3, 1))
def test_any_size_trains_like_one_device(force: bool, sizes: tuple[int, ...], grid: tuple[int, int, int]) -> None:
    batch, length, vocabulary, heads, width, hidden = sizes
    vocabulary += 1
    ids = tokens(batch, length, vocabulary)
    with padded_whatever_it_costs() if force else nullcontext():
        assert_trains_like_one_device(make(vocabulary, heads, width, hidden), ids, grid, steps=2)


class Rows(nn.Module):
    """Sums and means over an odd batch, on their way to a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.a(x).tanh()
        h = h - h.mean(0, keepdim=True) + torch.linalg.vector_norm(h, dim=0)
        return F.mse_loss(self.b(h), y) + h.amax(0).sum() + h.logsumexp(0).mean() + h.std(0).mean()


@pytest.mark.parametrize("rows", [3, 5, 7])
def test_pads_stay_out_of_statistics(rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(rows, n, generator=generator, dtype=torch.float64) for n in (64, 5))
    with padded_whatever_it_costs():
        found = assert_trains_like_one_device(
            lambda: (torch.manual_seed(0), Rows().double())[1], (x, y), (8, 1, 1), steps=2
        )
    assert any(f"does not divide {rows}: padded" in note for note in found.plan.notes)


def test_odd_vocabulary_is_shared_out() -> None:
    """50257 classes on 8 ranks: the head's work at most 1.01 of an eighth, its parameter an eighth."""
    ids = torch.empty(8, 64, dtype=torch.int64, device="meta")
    plan = autopar3d.plan(Block(50257, 8, 128, 1024, "meta"), (2, 2, 2), (ids, ids))
    head = next(op for op in plan.ops if op.module == "head")
    assert head.flops <= 1.01 * 2 * 8 * 64 * 50257 * 1024 / 8
    stored = next(p for p in plan.parameters if p.names == ("head.weight",))
    assert math.prod(stored.local_shape) * 8 <= 1.01 * 50257 * 1024


def test_seven_heads_on_four_ranks() -> None:
    """At most 8/7 of a quarter, even where the batch can not be split."""
    ids = torch.empty(1, 510, dtype=torch.int64, device="meta")
    plan = autopar3d.plan(Block(64, 7, 64, 512, "meta"), (1, 4, 1), (ids, ids))
    attention = next(op for op in plan.ops if "attention" in op.op)
    assert attention.flops <= 8 / 7 * (2 * 7 * 510 * 510 * (64 + 64)) / 4


def test_last_batch_of_three() -> None:
    """Another number of rows plans again, with the parameters where they are."""
    par = autopar3d.simulate(make(53, 7, 4, 32)(), (2, 2, 2), tokens(8, 7, 53))
    alone = make(53, 7, 4, 32)()
    for batch in (8, 3, 5):
        example = tokens(batch, 7, 53)
        loss, want = par(*example)[0], alone(*example)[0]
        torch.testing.assert_close(loss, want, rtol=1e-10, atol=1e-12)
        loss.backward(), want.backward()
    for (name, p), q in zip(par.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12, msg=name)


def test_dropout_is_the_same_on_padded_tensors() -> None:
    example = tokens(5, 7, 53)
    losses = []
    with padded_whatever_it_costs():
        for grid in ((1, 1, 1), (2, 2, 2), (1, 4, 1)):
            losses.append(autopar3d.simulate(make(53, 7, 4, 32, True)(), grid, example, seed=3)(*example)[0].detach())
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-10, atol=0)
    torch.testing.assert_close(losses[2], losses[0], rtol=1e-10, atol=0)


def _on_ranks(grid: tuple[int, int, int]) -> list[str]:
    with padded_whatever_it_costs():
        found = assert_trains_like_one_device(make(53, 7, 4, 32), tokens(5, 7, 53), grid, steps=2, simulate=False)
    full = found.module.full_state_dict()
    make(53, 7, 4, 32)().load_state_dict(full)  # shapes without pads
    return [note for note in found.plan.notes if "padded" in note]


@pytest.mark.parametrize("grid", [(2, 2, 2), (1, 2, 4)])
def test_real_ranks(ranks: Pool, grid: tuple[int, int, int]) -> None:
    notes = ranks.run(_on_ranks, grid, ranks=8)
    assert notes[0] and all(n == notes[0] for n in notes)


def test_pads_repeat_the_last_element_and_pass_no_gradient() -> None:
    x = torch.arange(12.0).reshape(2, 6).requires_grad_()  # dim 1 is (2 outer, 3)
    longer = add_pads(x, 1, 2, 3, 4)
    assert longer.tolist() == [[0, 1, 2, 2, 3, 4, 5, 5], [6, 7, 8, 8, 9, 10, 11, 11]]
    assert torch.equal(trim_pads(longer, 1, 2, 3, 4), x)
    filled = fill_pads(longer, 1, 2, 3, 4, -1.0, [])
    assert filled[0].tolist() == [0, 1, 2, -1, 3, 4, 5, -1]
    (grad,) = torch.autograd.grad((longer * torch.arange(8.0)).sum(), x)
    assert grad[0].tolist() == [0, 1, 2, 4, 5, 6]
