"""Random small models, compared with one device. The tests try a few; for many, until one differs:

    python -m tests.fuzz --examples 500

A model is a list of moves on a growing list of tensors: products, norms, attention, reductions, changes of shape.
Sizes are odd as often as even. What fails is printed as the moves that make it: a test for `end_to_end/test_fuzz.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from autopar3d.testing import assert_trains_like_one_device

GRIDS = ((2, 2, 2), (1, 2, 4), (4, 2, 1), (2, 3, 1), (1, 8, 1), (2, 1, 2))
MOST_ELEMENTS = 4096
NO_SHRINKING = (Phase.explicit, Phase.generate)

# op, which earlier tensor (counted from the last), and two numbers that say how
Move = tuple[str, int, int, int]


@dataclass(frozen=True)
class Recipe:
    """A model: the shape of its input, and what is done to it."""

    shape: tuple[int, ...]
    moves: tuple[Move, ...]


class Random(nn.Module):
    """Carries out a recipe. A move that its tensor does not allow does nothing."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.weights = nn.ParameterList()
        self.made: dict[int, int] = {}
        self.forward(torch.ones(recipe.shape, dtype=torch.float64))  # makes the parameters

    def weight(self, at: int, *shape: int) -> Tensor:
        """The parameter of move `at`, made at the first run."""
        if at not in self.made:
            self.made[at] = len(self.weights)
            generator = torch.Generator().manual_seed(at)
            scale = shape[-1] ** -0.5 if len(shape) > 1 else 1.0
            made = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
            self.weights.append(nn.Parameter(made))
        return self.weights[self.made[at]]

    def run(self, x: Tensor) -> Tensor:
        tensors = [x]
        for at, (name, back, i, j) in enumerate(self.recipe.moves):
            source = tensors[-1 - back % len(tensors)]
            result = MOVES[name](self, at, source, tensors[-1], i, j)
            if result is not None and 0 < result.numel() <= MOST_ELEMENTS and result.dim() <= 4:
                tensors.append(result)
        return tensors[-1]

    def forward(self, x: Tensor) -> Tensor:
        y = self.run(self.weight(-1, *x.shape) * x)
        # Every element counts differently, so that no gradient cancels.
        places = torch.arange(y.numel(), dtype=y.dtype).reshape(y.shape)
        return (y * (places * 0.7).cos()).sum() + y.square().mean()


def _linear(m: Random, at: int, x: Tensor, _: Tensor, i: int, j: int) -> Tensor | None:
    if not x.dim():
        return None
    width = (3, 4, 5, 7, 8, 12, 16)[i % 7]
    return F.linear(x, m.weight(at, width, x.shape[-1]), m.weight(1000 + at, width) if j % 2 else None)


def _norm(m: Random, at: int, x: Tensor, _: Tensor, i: int, j: int) -> Tensor | None:
    if not x.dim() or x.shape[-1] < 2:
        return None
    n = x.shape[-1]
    if j % 2:
        return F.rms_norm(x, (n,), m.weight(at, n), 1e-3)
    return F.layer_norm(x, (n,), m.weight(at, n), m.weight(1000 + at, n), 1e-3)


def _scale(m: Random, at: int, x: Tensor, _: Tensor, i: int, j: int) -> Tensor | None:
    return x * m.weight(at, x.shape[i % x.dim()]).reshape(_along(x, i)) if x.dim() else None


def _along(x: Tensor, i: int) -> list[int]:
    at = i % x.dim()
    return [n if k == at else 1 for k, n in enumerate(x.shape)]


def _act(m: Random, at: int, x: Tensor, _: Tensor, i: int, j: int) -> Tensor:
    return (torch.tanh, F.gelu, F.silu, torch.sigmoid, lambda t: F.elu(t), lambda t: t.abs() + 0.1)[i % 6](x)


def _join(m: Random, at: int, x: Tensor, y: Tensor, i: int, j: int) -> Tensor | None:
    try:
        torch.broadcast_shapes(x.shape, y.shape)
    except RuntimeError:
        return None
    return (x + y, x * y.tanh(), x - 2 * y)[i % 3]


def _softmax(m: Random, at: int, x: Tensor, _: Tensor, i: int, j: int) -> Tensor | None:
    if not x.dim():
        return None
    return x.softmax(i % x.dim()) if j % 2 else x.log_softmax(i % x.dim())


def _reduce(m: Random, at: int, x: Tensor, _: Tensor, i: int, j: int) -> Tensor | None:
    if x.dim() < 2:
        return None
    d = i % x.dim()
    if j % 6 == 5 and x.shape[d] < 2:
        return None
    return (
        lambda: x.sum(d),
        lambda: x.mean(d, keepdim=True),
        lambda: x.amax(d, keepdim=True),
        lambda: x.logsumexp(d),
        lambda: torch.linalg.vector_norm(x + 3, dim=d, keepdim=True),
        lambda: x.var(d),
    )[j % 6]()


def _turn(m: Random, at: int, x: Tensor, _: Tensor, i: int, j: int) -> Tensor | None:
    return x.transpose(i % x.dim(), j % x.dim()) if x.dim() else None


def _split(m: Random, at: int, x: Tensor, _: Tensor, i: int, j: int) -> Tensor | None:
    if not x.dim():
        return None
    d = i % x.dim()
    outer = (2, 3, 4)[j % 3]
    return x.unflatten(d, (outer, x.shape[d] // outer)) if x.shape[d] % outer == 0 else None


def _merge(m: Random, at: int, x: Tensor, _: Tensor, i: int, j: int) -> Tensor | None:
    return x.flatten(i % (x.dim() - 1), i % (x.dim() - 1) + 1) if x.dim() > 1 else None


def _attend(m: Random, at: int, x: Tensor, _: Tensor, i: int, j: int) -> Tensor | None:
    if x.dim() < 3:
        return None
    return F.scaled_dot_product_attention(x, x.tanh(), 0.5 * x, is_causal=bool(j % 2))


def _product(m: Random, at: int, x: Tensor, _: Tensor, i: int, j: int) -> Tensor | None:
    return (x @ x.mT).tanh() if x.dim() > 1 else None


def _pair(m: Random, at: int, x: Tensor, _: Tensor, i: int, j: int) -> Tensor | None:
    if not x.dim():
        return None
    d = i % x.dim()
    if j % 3 == 0:
        return torch.cat([x, x.tanh()], d)
    if j % 3 == 1:
        return torch.stack([x, x.sigmoid()], d)
    a, b = x.chunk(2, d) if x.shape[d] % 2 == 0 else (x, x)
    return a * b.sigmoid()


def _part(m: Random, at: int, x: Tensor, _: Tensor, i: int, j: int) -> Tensor | None:
    if not x.dim() or x.shape[i % x.dim()] < 2:
        return None
    d = i % x.dim()
    n = x.shape[d]
    return (
        lambda: x.narrow(d, 1, n - 1),
        lambda: x.select(d, n // 2) if x.dim() > 1 else None,
        lambda: x.flip(d),
        lambda: x.cumsum(d) / n,
        lambda: x.roll(1, d),
        lambda: x.index_select(d, torch.arange(n - 1, -1, -2)),
    )[j % 6]()


def _convolve(m: Random, at: int, x: Tensor, _: Tensor, i: int, j: int) -> Tensor | None:
    if x.dim() != 3 or x.shape[2] < 2:
        return None
    channels = x.shape[1]
    if j % 2:
        return F.conv1d(x, m.weight(at, channels, 1, 2), padding=1, groups=channels)
    return F.conv1d(x, m.weight(at, 6, channels, 2), m.weight(1000 + at, 6))


def _look_up(m: Random, at: int, x: Tensor, _: Tensor, i: int, j: int) -> Tensor | None:
    if x.dim() > 2 or not x.dim():
        return None
    rows = (5, 8, 12)[i % 3]
    places = torch.arange(x.numel()).reshape(x.shape) % rows
    return F.embedding(places, m.weight(at, rows, 4)) + x[..., None]


def _pick(m: Random, at: int, x: Tensor, _: Tensor, i: int, j: int) -> Tensor | None:
    """Rows by number: out of the tensor, and into another."""
    if not x.dim() or not x.shape[0]:
        return None
    n = x.shape[0]
    rows = (torch.arange(n) * 2 + 1) % (n + 2)
    table = m.weight(at, n + 2, *x.shape[1:])
    wide = rows.reshape(n, *[1] * (x.dim() - 1)).expand_as(x)
    return (
        lambda: table[rows] * x,
        lambda: table.index_put((rows,), x),
        lambda: table.index_add(0, rows // 2, x),
        lambda: table.scatter(0, wide, x),
        lambda: table.gather(0, wide) + x,
        lambda: torch.zeros_like(table).scatter_add(0, wide // 2, x),
    )[j % 6]()


def _order(m: Random, at: int, x: Tensor, _: Tensor, i: int, j: int) -> Tensor | None:
    if not x.dim():
        return None
    d = i % x.dim()
    apart = x + 3 * m.weight(at, *x.shape)  # no two elements are alike
    return (
        lambda: apart.sort(d).values,
        lambda: apart.topk((x.shape[d] + 1) // 2, d).values,
        lambda: apart.cummax(d).values,
        lambda: apart.gather(d, apart.argsort(d, descending=True)),
        lambda: apart.amax(d, keepdim=True),
        lambda: torch.where(apart > apart.mean(d, keepdim=True), x, -x),
    )[j % 6]()


def _grow(m: Random, at: int, x: Tensor, _: Tensor, i: int, j: int) -> Tensor | None:
    if not x.dim():
        return None
    d = i % x.dim()
    sides = [0, 0] * (x.dim() - 1 - d) + [1, 2]
    return (
        lambda: F.pad(x, sides),
        lambda: F.pad(x, sides, value=0.5) if x.dim() > 1 else None,
        lambda: x.repeat_interleave(2, d),
        lambda: x.repeat(*[2 if k == d else 1 for k in range(x.dim())]),
        lambda: x.unsqueeze(d).expand(*x.shape[:d], 3, *x.shape[d:]) * 0.5,
        lambda: x.unfold(d, 2, 1) if x.shape[d] > 1 and x.dim() < 4 else None,
    )[j % 6]()


def _group(m: Random, at: int, x: Tensor, _: Tensor, i: int, j: int) -> Tensor | None:
    """Norms over rows and channels."""
    if x.dim() not in (2, 3) or x.numel() // x.shape[1] < 2:
        return None
    channels = x.shape[1]
    scale, shift = m.weight(at, channels), m.weight(1000 + at, channels)
    if j % 2:
        return F.batch_norm(x, None, None, scale, shift, True, 0.1, 1e-2)
    groups = max(g for g in (1, 2, 3, 4) if channels % g == 0)
    if x.numel() // x.shape[0] // groups < 2:
        return None
    return F.group_norm(x, groups, scale, shift, 1e-2)


def _einsum(m: Random, at: int, x: Tensor, _: Tensor, i: int, j: int) -> Tensor | None:
    if not x.dim():
        return None
    heads, n = (2, 3, 4)[i % 3], x.shape[-1]
    w = m.weight(at, n, heads, 4)
    if j % 2 and x.dim() < 4:
        return torch.einsum("...d,dhk->...hk", x, w)
    return torch.einsum("...d,dhk->...k", x, w) / heads


def _change(m: Random, at: int, x: Tensor, _: Tensor, i: int, j: int) -> Tensor | None:
    """In place, on a copy."""
    y = x * 1.0
    if y.dim():
        part = y.select(i % y.dim(), -1)
        part.mul_(0.5) if j % 2 else part.fill_(1.0)
    return y.add_(x, alpha=0.5).clamp_(-4, 4)


MOVES: dict[str, Callable[[Random, int, Tensor, Tensor, int, int], Tensor | None]] = {
    "linear": _linear,
    "norm": _norm,
    "scale": _scale,
    "act": _act,
    "join": _join,
    "softmax": _softmax,
    "reduce": _reduce,
    "turn": _turn,
    "split": _split,
    "merge": _merge,
    "attend": _attend,
    "product": _product,
    "pair": _pair,
    "part": _part,
    "convolve": _convolve,
    "look_up": _look_up,
    "pick": _pick,
    "order": _order,
    "grow": _grow,
    "group": _group,
    "einsum": _einsum,
    "change": _change,
}


def recipes() -> st.SearchStrategy[Recipe]:
    sizes = st.sampled_from([2, 3, 4, 5, 6, 7, 8, 12])
    shape = st.lists(sizes, min_size=1, max_size=3).map(tuple)
    # Products are what a grid is for: half of the moves.
    name = st.one_of(st.sampled_from(["linear", "attend", "product", "convolve"]), st.sampled_from(list(MOVES)))
    move = st.tuples(name, st.integers(0, 2), st.integers(0, 6), st.integers(0, 5))
    return st.builds(Recipe, shape, st.lists(move, min_size=1, max_size=7).map(tuple))


def check(recipe: Recipe, grid: tuple[int, int, int]) -> None:
    """Raise AssertionError unless the model trains on the grid as on one device."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(recipe.shape, generator=generator, dtype=torch.float64)
    assert_trains_like_one_device(lambda: Random(recipe), (x,), grid, steps=1, tol=1e-8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="another seed, other models")
    given_ = parser.parse_args()
    torch.set_num_threads(1)
    tried = 0

    @seed(given_.seed)
    @settings(max_examples=given_.examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(recipe=recipes(), grid=st.sampled_from(GRIDS))
    def many(recipe: Recipe, grid: tuple[int, int, int]) -> None:
        nonlocal tried
        tried += 1
        check(recipe, grid)
        if tried % 50 == 0:
            print(tried, flush=True)

    many()
    print(f"{tried} models, none differs")


if __name__ == "__main__":
    main()
