"""For tests: hypothesis strategies that draw grids and layouts, training beside one device, and the proof of a rule.

hypothesis is imported when a strategy is made, so this module needs it only then (`pip install hypothesis`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .grid import Grid
from .layout import Factor, Layout
from .proof import prove_rule
from .trials import Comparison, Difference, assert_trains_like_one_device, trains_like_one_device

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

__all__ = [
    "Comparison",
    "Difference",
    "assert_trains_like_one_device",
    "grids",
    "layouts",
    "prove_rule",
    "trains_like_one_device",
]

# -- hypothesis strategies -----------------------------------------------------------------------------------


def grids(max_ranks: int = 8, size_one: bool = True) -> SearchStrategy[Grid]:
    """Grids of at most `max_ranks` devices, cubes or not; the smallest first.

    Args:
        size_one: whether some axes (or all) may have size 1.
    """
    st = _hypothesis()
    sizes = range(1 if size_one else 2, max_ranks + 1)
    found = [Grid(x, y, z) for x, y, z in itertools.product(sizes, repeat=3) if x * y * z <= max_ranks]
    if not found:
        raise ValueError(f"no grid of at most {max_ranks} ranks has three axes of size 2 or more; that takes 8")
    strategy: SearchStrategy[Grid] = st.sampled_from(sorted(found, key=lambda g: (g.size, g.sizes)))
    return strategy


def layouts(shape: Sequence[int], grid: Grid, partial: bool = True, *, uneven: bool = False) -> SearchStrategy[Layout]:
    """Legal layouts of a tensor of this shape on the grid, in canonical form.

    Axes stand in any order, several on one dim; dims are cut into factors where their length allows it, as in
    `[(3 4:y 2), zx]`.

    Args:
        partial: whether the tensor may still be a partial sum over some axes.
        uneven: whether axes may shard a dim that they do not divide.
    """
    st = _hypothesis()

    @st.composite  # type: ignore[untyped-decorator, unused-ignore]
    def build(draw: Any) -> Layout:
        dims = [draw(st.sampled_from(_factorings(int(n)))) for n in shape]
        flat = [(i, j) for i, sizes in enumerate(dims) for j in range(len(sizes))]
        held: dict[Any, list[str]] = {place: [] for place in flat}
        summed: list[str] = []
        for axis in draw(st.permutations(grid.axes)):
            places: list[Any] = [None, *(["partial"] if partial else [])]
            for i, j in flat:
                even = dims[i][j] % grid.extent([*held[i, j], axis]) == 0
                if even or (uneven and len(dims[i]) == 1):
                    places.append((i, j))
            place = draw(st.sampled_from(places))
            if place == "partial":
                summed.append(axis)
            elif place is not None:
                held[place].append(axis)
        factors = [[Factor(n, tuple(held[i, j])) for j, n in enumerate(sizes)] for i, sizes in enumerate(dims)]
        return Layout.from_factors(factors, grid, summed)

    strategy: SearchStrategy[Layout] = build()
    return strategy


def _factorings(length: int) -> list[tuple[int, ...]]:
    """A length as one factor, as two, as three; factors of length one left out."""
    found: list[tuple[int, ...]] = [(length,)]
    for outer in range(2, length):
        if length % outer == 0:
            rest = length // outer
            found.append((outer, rest))
            found += [(outer, middle, rest // middle) for middle in range(2, rest) if rest % middle == 0]
    return found


def _hypothesis() -> Any:
    try:
        from hypothesis import strategies
    except ImportError as error:
        raise ImportError(
            "autopar3d.testing draws grids and layouts with hypothesis, which is not installed: pip install hypothesis"
        ) from error
    return strategies
