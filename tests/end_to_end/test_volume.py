"""What a linear stack sends is what the paper says, to the byte.

For `Y[m,n] = X[m,k] W[k,n]` with X gathered over axis a, W over b, and Y reduced over c, each rank sends

    forward                     (ga-1)MK/P of X,  (gb-1)KN/P of W,  (gc-1)MN/P of Y   (gather, gather, reduce_scatter)
    backward                    as much of dX,    dW,               dY                (reduce_scatter twice, gather)
    regather="all"              X and W once more, as only their shards were kept
    regather="weights"          W only
    regather="none"             nothing

elements. Layers alternate: a and c swap, so that what one leaves is where the next expects it.
"""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

import autopar3d
from autopar3d import Collective, ParallelModule, collectives

from .cases import Sizes

# Large enough for bytes, not latencies, to decide; every dim divides by 16 and by 12.
ROWS, HIDDEN = 1536, 384
WIDTHS = [(HIDDEN, 4 * HIDDEN), (4 * HIDDEN, HIDDEN)] * 2

GRIDS: list[Sizes] = [(2, 2, 2), (4, 2, 1), (2, 3, 2), (4, 4, 4), (8, 1, 1), (1, 8, 1)]

Sent = dict[tuple[str, str], float]


class Stack(nn.Module):
    """Four linears without a bias, and nothing between them. Learned: its rows are a parameter, not an input."""

    def __init__(self, learned: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(k, n, bias=False) for k, n in WIDTHS)
        self.rows = nn.Parameter(torch.randn(ROWS, HIDDEN)) if learned else None

    def forward(self, x: Tensor | None = None) -> Tensor:
        x = self.rows if x is None else x
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def emitted(grid: Sizes, learned: bool, regather: str = "all") -> ParallelModule:
    inputs = () if learned else (torch.empty(ROWS, HIDDEN),)
    return autopar3d.simulate(Stack(learned), grid, inputs, scheme="3d", regather=regather)


def sent(module: ParallelModule) -> Sent:
    """Elements each rank sends, by (axis, kind); numbers alone, that is the loss, not counted."""
    assert module.backward_graph is not None
    found: Counter[tuple[str, str]] = Counter()
    for graph in (module.forward_graph, module.backward_graph):
        for c in collectives(graph):
            assert c.bytes == 4 * c.elements
            if not is_number(c):
                found[c.axis, c.kind] += c.elements  # type: ignore[assignment]
    return dict(found)


def is_number(c: Collective) -> bool:
    return c.kind == "all_reduce" and c.elements < 2


def assert_as_the_formula_says(found: Sent, grid: Sizes, learned: bool, regather: str) -> None:
    """The alternation may begin with either role on either axis: the cheaper wins, and where they tie, any."""
    ways = [_formula(grid, roles, learned, regather) for roles in ("yxz", "zxy")]
    least = min(sum(way.values()) for way in ways)
    best = [way for way in ways if sum(way.values()) == least]
    assert any(found == pytest.approx(way, rel=1e-12) for way in best), f"sent {found}, expected {best}"


def _formula(grid: Sizes, roles: str, learned: bool, regather: str) -> Sent:
    size = dict(zip("xyz", grid, strict=True))
    ranks = math.prod(grid)
    found: Counter[tuple[str, str]] = Counter()
    a, b, c = roles

    def add(axis: str, kind: str, elements: int) -> None:
        found[axis, kind] += (size[axis] - 1) * elements / ranks  # type: ignore[assignment]

    for number, (k, n) in enumerate(WIDTHS):
        x, w, y = ROWS * k, k * n, ROWS * n
        given = number == 0 and not learned
        if not given:
            # An input is the same on all ranks: each cuts out what it multiplies, before the graphs and for nothing.
            # It wants no gradient, so nothing is reduced either.
            add(a, "all_gather", x)
            add(a, "reduce_scatter", x)
            if regather == "all" or (regather == "weights" and number == 0):  # learned rows are a weight
                add(a, "all_gather", x)
        add(b, "all_gather", w)
        add(b, "reduce_scatter", w)
        if regather != "none" and not given:  # the backward reads W for dX only
            add(b, "all_gather", w)
        add(c, "reduce_scatter", y)
        add(c, "all_gather", y)
        a, c = c, a
    return {key: elements for key, elements in found.items() if elements}


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("learned", [True, False], ids=["inner", "first"])
def test_a_stack_sends_what_the_formula_says(grid: Sizes, learned: bool) -> None:
    module = emitted(grid, learned)
    assert_as_the_formula_says(sent(module), grid, learned, "all")
    # Beside it only the loss: one number over each axis, forward; its gradient is one everywhere.
    assert module.backward_graph is not None
    numbers = [c for c in collectives(module.forward_graph) if is_number(c)]
    assert sorted(c.axis for c in numbers) == [a for a, size in zip("xyz", grid, strict=True) if size > 1]
    assert not any(is_number(c) for c in collectives(module.backward_graph))


@pytest.mark.parametrize("regather", ["weights", "none"])
@pytest.mark.parametrize("learned", [True, False], ids=["inner", "first"])
@pytest.mark.parametrize("grid", [(2, 2, 2), (2, 3, 2)], ids=str)
def test_without_regather_that_much_less(grid: Sizes, learned: bool, regather: str) -> None:
    found = Counter(sent(emitted(grid, learned, regather)))
    # The last Y may be all_reduced: its readers then repeat each other's work (which regather="all" forbids, as
    # results kept whole are no 1/P). That is the scatter of Y and the gather of dY in one, and as many bytes.
    for axis, kind in list(found):
        if kind == "all_reduce":
            whole = found.pop((axis, kind))
            found[axis, "reduce_scatter"] += whole / 2  # type: ignore[assignment]
            found[axis, "all_gather"] += whole / 2  # type: ignore[assignment]
    assert_as_the_formula_says(dict(found), grid, learned, regather)


def test_the_formula_is_the_papers() -> None:
    """2[(ga-1)MK + (gb-1)KN + (gc-1)MN]/P a layer, and [(ga-1)MK + (gb-1)KN]/P for gathering again."""
    g, ranks = (2, 4, 3), 24
    total = 0.0
    for number, (k, n) in enumerate(WIDTHS):
        ga, gb, gc = (g[1], g[0], g[2]) if number % 2 == 0 else (g[2], g[0], g[1])
        x, w, y = (ga - 1) * ROWS * k, (gb - 1) * k * n, (gc - 1) * ROWS * n
        total += (2 * (x + w + y) + x + w) / ranks
    assert sum(_formula(g, "yxz", True, "all").values()) == pytest.approx(total)
