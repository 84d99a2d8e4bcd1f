"""Random numbers by place: element i of draw n in step s is a function of (seed, s, n, i) and of nothing else.

So a dropout mask is the same on every grid: a rank computes the numbers of its own elements, and nobody has to agree on
anything but the seed. The same call computes them again in a recomputation, and a resumed run with the step number.

The tensor is rows and columns. A row has 64 random bits, a 64-bit hash of (seed, step, draw, row), of which 32 enter
before and 32 between two multiply-xorshift rounds on 32 bits; a column has a permuted 32-bit number. So two rows, draws
or steps never walk through one sequence, as they would with a plain counter. Per element this is 8 passes of integer
ops through the cache: a mask takes 1.2-3 ns an element on one core (3 million elements), torch's own `bernoulli_` 6-14.
It is not for cryptography.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_MASK64 = (1 << 64) - 1

# Rows are made longer than this where the trailing dims are short, as each costs a 64-bit hash.
_WIDTH = 128

# Elements worked on at a time: two int32 buffers of this length stay in a core's cache.
_CACHED = 1 << 16
_ON_DEVICE = 1 << 26  # there the limit is only memory


@dataclass
class RandomState:
    """Seed and number of the next step: all that later random numbers depend on."""

    seed: int = 0
    step: int = 0

    def next(self) -> Tensor:
        """The key of one call, on the CPU: its two numbers are read when kernels are launched."""
        key = torch.tensor([self.seed, self.step], dtype=torch.int64)
        self.step += 1
        return key


# -- the op ----------------------------------------------------------------------------------------------------------


def draw(
    key: Tensor,
    number: int,
    what: str,
    p: float,
    size: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    width: int = 0,
    stride: Sequence[int] = (),
    at: Sequence[Tensor] | None = None,
    weight: Sequence[int] = (),
) -> Tensor:
    """Random numbers, each by its place in a whole tensor.

    Args:
        key: (seed, step), int64, on the CPU.
        number: tells the draws of one step apart.
        what: "keep" (True with probability 1 - p), "uniform" in [0, 1), "normal", "exponential".
        size: what is drawn. The whole tensor, or, with `stride`, a part of it: local element (i, j, ..) is element
            `sum(at * weight) + i * stride[0] + j * stride[1] + ..` of the whole.
        width: length of the whole tensor's rows, see `row_width`.
        at, weight: this rank's coordinates along some axes, and how far one step along each is.
    """
    numbers = [int(n) for n in size]
    if not math.prod(numbers):
        return torch.empty(numbers, dtype=dtype, device=device)
    strides = list(stride) if stride else _strides(numbers)
    start = sum(int(c) * w for c, w in zip(at or (), weight, strict=True))
    seed, step = key.tolist()
    rows, columns = _places(numbers, strides, start, width or row_width(numbers), device)
    make = _MAKERS[what]
    return make(_fold(seed, step, number), rows, columns, p, dtype).reshape(numbers)


# As an op it is one node in every graph, whatever it takes to compute.
draw_op = torch.library.custom_op(
    "autopar3d::draw",
    draw,
    mutates_args=(),
    schema="(Tensor key, int number, str what, float p, int[] size, ScalarType dtype, Device device, int width=0, "
    "int[] stride=[], Tensor[]? at=None, int[] weight=[]) -> Tensor",
)


@draw_op.register_fake
def _(
    key: Tensor,
    number: int,
    what: str,
    p: float,
    size: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    width: int = 0,
    stride: Sequence[int] = (),
    at: Sequence[Tensor] | None = None,
    weight: Sequence[int] = (),
) -> Tensor:
    return torch.empty(list(size), dtype=dtype, device=device)


def row_width(shape: Sequence[int]) -> int:
    """Length of a row of a tensor: the last dims that together have at least `_WIDTH` elements.

    Every dim lies inside the rows or outside. This depends on the whole tensor's shape only, never on its sharding.
    """
    width = 1
    for n in reversed(shape):
        if width >= _WIDTH:
            break
        width *= max(int(n), 1)
    return width


def _strides(size: Sequence[int]) -> list[int]:
    out, stride = [], 1
    for n in reversed(size):
        out.append(stride)
        stride *= n
    return out[::-1]


def _places(
    size: Sequence[int], stride: Sequence[int], start: int, width: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Row and column numbers of the local elements, which are rows x columns."""
    first_row, first_column = divmod(start, width)
    rows = torch.full([1], first_row, dtype=torch.int64, device=device)
    columns = torch.full([1], first_column, dtype=torch.int64, device=device)
    for n, s in zip(size, stride, strict=True):
        if n > 1:
            digit = torch.arange(n, dtype=torch.int64, device=device)
            if s >= width:
                rows = (rows[:, None] + digit * (s // width)).reshape(-1)
            else:
                columns = (columns[:, None] + digit * s).reshape(-1)
    return rows, columns


# -- the generator -----------------------------------------------------------------------------------------------------


def _mix(z: int) -> int:
    """splitmix64's finaliser."""
    z = (z + 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def _fold(*parts: int) -> int:
    """Some integers as one of 64 bits."""
    z = 0
    for part in parts:
        z = _mix(z ^ _mix(part & _MASK64))
    return z


def _signed(z: int, bits: int) -> int:
    return z - (1 << bits) if z >> (bits - 1) else z


def _row_keys(key: int, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Two random int32 per row, as columns."""
    # Shifts of signed integers copy the sign: that costs less than a bit of 64, and masks cost a pass each.
    z = rows * _signed(0x9E3779B97F4A7C15, 64) + _signed(key, 64)
    z = (z ^ (z >> 30)) * _signed(0xBF58476D1CE4E5B9, 64)
    z = (z ^ (z >> 27)) * _signed(0x94D049BB133111EB, 64)
    z = z ^ (z >> 31)
    return z.to(torch.int32)[:, None], (z >> 32).to(torch.int32)[:, None]


def _column_codes(columns: Tensor) -> Tensor:
    """An int32 per column, no two alike (up to 2^32 columns): the permutation lowbias32."""
    x = columns & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return (x ^ (x >> 16)).to(torch.int32)


def _each_block(key: int, rows: Tensor, columns: Tensor, take: Callable[[Tensor, slice, slice], object]) -> None:
    """Hand the random int32 of all elements to `take`, block by block; it may overwrite them."""
    a, b = _row_keys(key, rows)
    codes = _column_codes(columns)
    limit = _CACHED * torch.get_num_threads() if rows.device.type == "cpu" else _ON_DEVICE
    wide = min(len(columns), limit)
    high = min(len(rows), max(1, limit // wide))
    one = torch.empty([high, wide], dtype=torch.int32, device=rows.device)
    two = torch.empty_like(one)
    for top in range(0, len(rows), high):
        here = slice(top, min(top + high, len(rows)))
        for left in range(0, len(columns), wide):
            there = slice(left, min(left + wide, len(columns)))
            x, y = one[: here.stop - top, : there.stop - left], two[: here.stop - top, : there.stop - left]
            # lowbias32 again; its last xorshift is for the low bits, and all readers take the high ones.
            torch.add(codes[there], a[here], out=x)
            torch.bitwise_right_shift(x, 16, out=y)
            x.bitwise_xor_(y)
            torch.add(b[here], x, alpha=0x7FEB352D, out=y)
            torch.bitwise_right_shift(y, 15, out=x)
            y.bitwise_xor_(x)
            y.mul_(_signed(0x846CA68B, 32))
            take(y, here, there)


def _words(key: int, rows: Tensor, columns: Tensor) -> Tensor:
    out = torch.empty([len(rows), len(columns)], dtype=torch.int32, device=rows.device)
    _each_block(key, rows, columns, lambda x, here, there: out[here, there].copy_(x))
    return out


# -- distributions -----------------------------------------------------------------------------------------------------


def _keep(key: int, rows: Tensor, columns: Tensor, p: float, dtype: torch.dtype) -> Tensor:
    dropped = round(p * (1 << 32))  # of the 2^32 values of a word
    shape = [len(rows), len(columns)]
    if not 0 < dropped < 1 << 32:
        return torch.full(shape, dropped <= 0, dtype=dtype, device=rows.device)
    out = torch.empty(shape, dtype=torch.bool, device=rows.device)
    bound = dropped - (1 << 31)
    _each_block(key, rows, columns, lambda x, here, there: torch.ge(x, bound, out=out[here, there]))
    return out.to(dtype)


# Bits of a uniform number: those of the mantissa, so that no rounding gives 1.
_BITS = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def _uniform(key: int, rows: Tensor, columns: Tensor, p: float, dtype: torch.dtype) -> Tensor:
    if dtype == torch.float64:
        high = (_words(key, rows, columns) >> 5).to(dtype).add_(2.0**26)
        low = (_words(_fold(key, 1), rows, columns) >> 6).to(dtype).add_(2.0**25)
        return high.mul_(2.0**26).add_(low).mul_(2.0**-53)
    bits = _BITS[dtype]
    word = (_words(key, rows, columns) >> (32 - bits)).to(torch.float32)
    return word.add_(2.0 ** (bits - 1)).mul_(2.0**-bits).to(dtype)


def _inner(key: int, rows: Tensor, columns: Tensor) -> Tensor:
    """Uniform in (0, 1), in double precision: results must not depend on where in a vector an element lies."""
    return _words(key, rows, columns).to(torch.float64).add_(2.0**31 + 0.5).mul_(2.0**-32)


def _normal(key: int, rows: Tensor, columns: Tensor, p: float, dtype: torch.dtype) -> Tensor:
    radius = _inner(key, rows, columns).log_().mul_(-2.0).sqrt_()
    angle = _inner(_fold(key, 1), rows, columns).mul_(2.0 * math.pi)
    return radius.mul_(angle.cos_()).to(dtype)


def _exponential(key: int, rows: Tensor, columns: Tensor, p: float, dtype: torch.dtype) -> Tensor:
    return _inner(key, rows, columns).log_().neg_().to(dtype)


_MAKERS: dict[str, Callable[[int, Tensor, Tensor, float, torch.dtype], Tensor]] = {
    "keep": _keep,
    "uniform": _uniform,
    "normal": _normal,
    "exponential": _exponential,
}
