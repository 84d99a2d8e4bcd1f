"""Statistics of the random numbers, on fixed seeds: no test here depends on luck."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from autopar3d.counter import RandomState, draw_op, row_width

CPU = torch.device("cpu")


def _draw(what: str, size: list[int], *, key: tuple[int, int] = (0, 0), number: int = 0, p: float = 0.0) -> Tensor:
    dtype = torch.bool if what == "keep" else torch.float32
    return draw_op(torch.tensor(key), number, what, p, size, dtype, CPU)


def _uniform(kind: str) -> Tensor:
    """A million numbers each, as rows that one thing tells apart."""
    if kind == "rows":
        return _draw("uniform", [2048, 512])
    if kind == "columns":
        return _draw("uniform", [2048, 512]).T.contiguous()
    if kind == "one row":
        return _draw("uniform", [1 << 20]).reshape(2048, 512)
    if kind == "short rows":
        return _draw("uniform", [1 << 18, 4]).reshape(2048, 512)
    if kind == "steps":
        return torch.stack([_draw("uniform", [512], key=(0, i)) for i in range(2048)])
    if kind == "draws":
        return torch.stack([_draw("uniform", [512], number=i) for i in range(2048)])
    assert kind == "seeds"
    return torch.stack([_draw("uniform", [512], key=(i, 0)) for i in range(2048)])


KINDS = ("rows", "columns", "one row", "short rows", "steps", "draws", "seeds")


def _deviations(counts: Tensor, expected: float) -> float:
    """Chi-square, as standard deviations from its mean."""
    chi = float(((counts.double() - expected) ** 2 / expected).sum())
    return (chi - (len(counts) - 1)) / math.sqrt(2 * (len(counts) - 1))


@pytest.mark.parametrize("kind", KINDS)
def test_uniform(kind: str) -> None:
    u = _uniform(kind).double()
    n = u.numel()
    assert u.min() >= 0
    assert u.max() < 1
    centred = u - 0.5
    found = {
        "mean": float(centred.mean()) * math.sqrt(12 * n),
        "variance": (float((centred**2).mean()) - 1 / 12) * math.sqrt(n * 180),
        "bytes": _deviations(torch.bincount((u * 256).long().flatten(), minlength=256), n / 256),
        "words": _deviations(torch.bincount((u * 65536).long().flatten(), minlength=65536), n / 65536),
    }
    for lag in (1, 2, 3, 4, 8, 16, 64, 128):
        found[f"neighbours at {lag}"] = float((centred[:, lag:] * centred[:, :-lag]).mean()) * 12 * math.sqrt(n)
        found[f"rows at {lag}"] = float((centred[lag:] * centred[:-lag]).mean()) * 12 * math.sqrt(n)
    # Eight neighbours' top bits, and four neighbours' top nibbles, as one number each.
    bits = (u.reshape(-1, 8) >= 0.5).long() @ (1 << torch.arange(8))
    found["bits"] = _deviations(torch.bincount(bits, minlength=256), n / 8 / 256)
    nibbles = (u.reshape(-1, 4) * 16).long() @ (16 ** torch.arange(4))
    found["nibbles"] = _deviations(torch.bincount(nibbles, minlength=65536), n / 4 / 65536)
    assert {k: v for k, v in found.items() if abs(v) > 4} == {}


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_masks(p: float) -> None:
    m = _draw("keep", [4096, 256], p=p)
    variance = p * (1 - p)
    found = {"mean": (float(m.double().mean()) - (1 - p)) / math.sqrt(variance / m.numel())}
    # Sums over rows, columns and windows scatter as independent draws do.
    for name, parts in (("rows", m), ("columns", m.T), ("windows", m.reshape(-1, 32))):
        sums = parts.double().sum(1)
        scatter = float(((sums - parts.shape[1] * (1 - p)) ** 2).mean()) / (parts.shape[1] * variance)
        found[name] = (scatter - 1) * math.sqrt(len(sums) / 2)
    again = _draw("keep", [4096, 256], key=(0, 1), p=p)
    other = _draw("keep", [4096, 256], number=1, p=p)
    for name, mask in (("step", again), ("draw", other)):
        same = float((m == mask).double().mean())
        expected = p**2 + (1 - p) ** 2
        found[name] = (same - expected) / math.sqrt(expected * (1 - expected) / m.numel())
    assert {k: v for k, v in found.items() if abs(v) > 4} == {}


def test_masks_at_the_ends() -> None:
    assert _draw("keep", [64, 64], p=0.0).all()
    assert not _draw("keep", [64, 64], p=1.0).any()


def test_normal() -> None:
    x = _draw("normal", [1 << 20]).double()
    n = x.numel()
    moments = [float((x**k).mean()) for k in (1, 2, 3, 4)]
    assert abs(moments[0]) * math.sqrt(n) < 4
    assert abs(moments[1] - 1) * math.sqrt(n / 2) < 4
    assert abs(moments[2]) * math.sqrt(n / 15) < 4
    assert abs(moments[3] - 3) * math.sqrt(n / 96) < 4
    inside = float((x.abs() < 1).double().mean())
    assert abs(inside - math.erf(math.sqrt(0.5))) * math.sqrt(n / 0.22) < 4


def test_exponential() -> None:
    x = _draw("exponential", [1 << 20]).double()
    assert x.min() > 0
    assert abs(float(x.mean()) - 1) * math.sqrt(x.numel()) < 4
    assert abs(float((x**2).mean()) - 2) * math.sqrt(x.numel() / 20) < 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_uniform_stays_below_one(dtype: torch.dtype) -> None:
    u = draw_op(torch.tensor([0, 0]), 0, "uniform", 0.0, [1 << 16], dtype, CPU)
    assert u.dtype == dtype
    assert 0 <= u.min() < u.max() < 1
    assert abs(float(u.double().mean()) - 0.5) < 0.01


def test_numbers_are_what_they_were() -> None:
    """A saved run must draw the same after an update of the library: the generator is frozen."""
    key = torch.tensor([7, 3])
    words = draw_op(key, 2, "uniform", 0.0, [2, 130], torch.float32, CPU).mul(1 << 24).long()
    assert words[:, ::43].tolist() == EXPECTED


EXPECTED = [[11588190, 3201233, 11310354, 1269001], [7454070, 14552386, 16735088, 499433]]


@pytest.mark.parametrize(("shape", "width"), [([], 1), ([7], 7), ([4, 300], 300), ([4, 8, 3, 64], 192), ([2, 3], 6)])
def test_rows_hold_whole_dims(shape: list[int], width: int) -> None:
    assert row_width(shape) == width


@pytest.mark.parametrize("shape", [[4, 6, 8], [2, 3, 4, 200], [24], [3, 2]])
@pytest.mark.parametrize("what", ["keep", "uniform", "normal", "exponential"])
def test_parts_are_parts_of_the_whole(what: str, shape: list[int]) -> None:
    """Any rectangular part, given by start and strides, holds the whole's numbers: exactly."""
    key, dtype = torch.tensor([5, 9]), torch.bool if what == "keep" else torch.float32
    whole = draw_op(key, 1, what, 0.3, shape, dtype, CPU)
    for dim, n in enumerate(shape):
        for low, high in ((0, n // 2), (n // 2, n), (n // 3, n // 3 + 1)):
            part = whole.narrow(dim, low, high - low)
            at, weight = [torch.tensor([low])], [whole.stride(dim)]
            given = (list(part.shape), dtype, CPU, row_width(shape), list(whole.stride()), at, weight)
            assert draw_op(key, 1, what, 0.3, *given).equal(part)


def test_part_of_a_packed_dim() -> None:
    """Heads 2 and 3 of 4 in a dim made of (3, heads, 8)."""
    key = torch.tensor([5, 9])
    whole = draw_op(key, 0, "uniform", 0.0, [6, 96], torch.float32, CPU)
    part = draw_op(
        key, 0, "uniform", 0.0, [6, 3, 2, 8], torch.float32, CPU, 576, [96, 32, 8, 1], [torch.tensor([1])], [16]
    )
    assert part.equal(whole.reshape(6, 3, 4, 8)[:, :, 2:])


def test_blocks_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    key = torch.tensor([1, 1])
    whole = draw_op(key, 0, "uniform", 0.0, [50, 300], torch.float32, CPU)
    monkeypatch.setattr("autopar3d.counter._CACHED", 77)
    assert draw_op(key, 0, "uniform", 0.0, [50, 300], torch.float32, CPU).equal(whole)


def test_empty_and_scalar() -> None:
    assert _draw("uniform", [0, 4]).shape == (0, 4)
    assert _draw("normal", []).shape == ()


def test_state_counts_steps() -> None:
    state = RandomState(seed=4)
    assert [state.next().tolist() for _ in range(2)] == [[4, 0], [4, 1]]
    assert state == RandomState(4, 2)
