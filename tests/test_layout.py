"""Layouts: pieces tile the tensor, shapes invert, the text form is read back, bad ones are refused."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar3d.errors import LayoutError
from autopar3d.grid import Grid
from autopar3d.layout import Factor, Layout, ordered_assignments
from autopar3d.testing import grids, layouts

shapes = st.lists(st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12]), max_size=3).map(tuple)


@st.composite
def cases(draw: Any, uneven: bool = True, partial: bool = True) -> tuple[tuple[int, ...], Grid, Layout]:
    shape, grid = draw(shapes), draw(grids(12))
    return shape, grid, draw(layouts(shape, grid, partial, uneven=uneven))


def owned(length: int, axes: Sequence[str], grid: Grid, coordinates: dict[str, int]) -> list[int]:
    """Indices of one factor, by DTensor's definition: nested `torch.chunk`, missing chunks empty."""
    rows = torch.arange(length)
    for axis in axes:
        chunks = rows.chunk(grid.axis_size(axis)) if len(rows) else ()
        i = coordinates[axis]
        rows = chunks[i] if i < len(chunks) else rows[:0]
    return rows.tolist()  # type: ignore[no-any-return]


def reference(tensor: torch.Tensor, layout: Layout, grid: Grid, index: int) -> torch.Tensor:
    """The piece of a device, index by index."""
    at = grid.coordinates(index)
    for d, dim in enumerate(layout.factors(tensor.shape)):
        rows = [owned(f.size, f.axes, grid, at) for f in dim]
        sizes = [f.size for f in dim]
        flat = []
        for combination in itertools.product(*rows):
            position = 0
            for i, n in zip(combination, sizes, strict=True):
                position = position * n + i
            flat.append(position)
        tensor = tensor.index_select(d, torch.tensor(flat, dtype=torch.int64))
    return tensor


def numbered(shape: Sequence[int]) -> torch.Tensor:
    return torch.arange(1, math.prod(shape) + 1, dtype=torch.float64).reshape(tuple(shape))


@settings(deadline=None)
@given(cases(partial=False))
def test_pieces_are_nested_chunks(case: Any) -> None:
    shape, grid, layout = case
    layout.check(shape, grid)
    tensor = numbered(shape)
    for index in range(grid.size):
        piece = layout.shard(tensor, grid, index)
        assert torch.equal(piece, reference(tensor, layout, grid, index))
        assert tuple(piece.shape) == layout.valid_shape(shape, grid, index)
        padded = layout.shard(tensor, grid, index, pad=True)
        assert tuple(padded.shape) == layout.local_shape(shape, grid)
        assert torch.equal(padded[tuple(slice(n) for n in piece.shape)], piece)
        assert padded.sum() == piece.sum()


@settings(deadline=None)
@given(cases(partial=False))
def test_pieces_tile_the_tensor(case: Any) -> None:
    """Every element is owned once by the devices that differ only in sharding axes."""
    shape, grid, layout = case
    pieces = [
        layout.shard(numbered(shape), grid, i)
        for i in range(grid.size)
        if not any(grid.coordinates(i)[a] for a in layout.replicated_axes(grid))
    ]
    assert sorted(torch.cat([p.flatten() for p in pieces]).tolist()) == numbered(shape).flatten().tolist()


@settings(deadline=None)
@given(cases())
def test_assemble_inverts_shard(case: Any) -> None:
    shape, grid, layout = case
    tensor = numbered(shape)
    for pad in (False, True):
        pieces = [layout.shard(tensor, grid, i, pad=pad) for i in range(grid.size)]
        assert torch.equal(layout.assemble(pieces, shape, grid), tensor)


@settings(deadline=None)
@given(cases(), st.integers(0, 2**31))
def test_assemble_adds_partial_sums(case: Any, seed: int) -> None:
    shape, grid, layout = case
    random = torch.Generator().manual_seed(seed)
    whole = Layout(layout.dims)  # the same pieces, complete
    parts = {}
    for i in range(grid.size):
        at = tuple(grid.coordinates(i)[a] for a in sorted(layout.partial))
        if at not in parts:
            parts[at] = torch.randint(-9, 9, shape, generator=random).double()
    pieces = [
        whole.shard(parts[tuple(grid.coordinates(i)[a] for a in sorted(layout.partial))], grid, i)
        for i in range(grid.size)
    ]
    assert torch.equal(layout.assemble(pieces, shape, grid), sum(parts.values()))  # type: ignore[arg-type]


@settings(deadline=None)
@given(cases(uneven=False))
def test_local_and_global_shapes_invert(case: Any) -> None:
    shape, grid, layout = case
    assert layout.is_even(shape, grid)
    local = layout.local_shape(shape, grid)
    assert layout.global_shape(local, grid) == shape
    assert math.prod(local) * grid.extent(layout.sharding_axes) == math.prod(shape)
    assert all(layout.valid_shape(shape, grid, i) == local for i in range(grid.size))


@settings(deadline=None)
@given(cases())
def test_the_text_form_is_read_back(case: Any) -> None:
    _, _, layout = case
    assert Layout.parse(str(layout)) == layout
    assert hash(Layout.parse(str(layout))) == hash(layout)


@settings(deadline=None)
@given(cases())
def test_axes_are_accounted_for(case: Any) -> None:
    _, grid, layout = case
    parts = [*layout.sharding_axes, *layout.partial, *layout.replicated_axes(grid)]
    assert sorted(parts) == sorted(grid.axes)


@settings(deadline=None)
@given(st.data())
def test_merging_changes_no_piece(data: Any) -> None:
    """`from_factors` is canonical: it owns what the factors say, and merging again changes nothing."""
    grid = data.draw(grids(12))
    sizes = data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4))
    held: list[list[str]] = [[] for _ in sizes]
    for axis in data.draw(st.permutations(grid.axes)):
        fits = [j for j, n in enumerate(sizes) if n % grid.extent([*held[j], axis]) == 0]
        if fits:
            held[data.draw(st.sampled_from(fits))].append(axis)
    factors = [Factor(n, tuple(axes)) for n, axes in zip(sizes, held, strict=True)]
    layout = Layout.from_factors([factors], grid)
    tensor = numbered([math.prod(sizes)])
    raw = Layout((tuple(factors),))
    for i in range(grid.size):
        assert torch.equal(layout.shard(tensor, grid, i), raw.shard(tensor, grid, i))
    assert Layout.from_factors(layout.factors(tensor.shape), grid) == layout
    assert len(layout.dims[0]) <= len(sizes)


def test_neighbours_that_make_one_cut_are_merged() -> None:
    grid = Grid(2, 2, 2)

    def merged(*factors: Factor) -> str:
        return str(Layout.from_factors([factors], grid))

    assert merged(Factor(4, ("x",)), Factor(8, ())) == "[x]"
    assert merged(Factor(2, ("x",)), Factor(16, ("y",))) == "[xy]"
    assert merged(Factor(4, ("x",)), Factor(8, ("y",))) == "[(4:x 8:y)]"
    assert merged(Factor(3, ()), Factor(4, ("y",)), Factor(2, ())) == "[(3 8:y)]"
    assert merged(Factor(3, ()), Factor(4, ())) == "[-]"
    assert merged(Factor(1, ()), Factor(4, ("z",))) == "[z]"


def test_uneven_rows_over_two_axes() -> None:
    grid = Grid(2, 2, 1)
    layout = Layout.of("xy")
    assert [layout.valid_shape((5,), grid, i)[0] for i in range(4)] == [2, 1, 1, 1]
    assert layout.local_shape((5,), grid) == (2,)
    assert not layout.is_even((5,), grid)
    assert [Layout.of("xy").valid_shape((1,), grid, i)[0] for i in range(4)] == [1, 0, 0, 0]


@pytest.mark.parametrize(
    "text",
    ["[xy, -, z]", "[x, -] +{y,z}", "[-]", "[]", "[] +{x}", "[(4:x 8:y), z]", "[(3 4:y 2), zx]"],
)
def test_text_examples(text: str) -> None:
    assert str(Layout.parse(text)) == text


def test_names_stand_for_sizes() -> None:
    read = Layout.parse("[(3 h:y d), k:zx]", sizes={"h": 12, "d": 64})
    assert read == Layout(((Factor(3, ()), Factor(12, ("y",)), Factor(64, ())), (Factor(0, ("z", "x")),)))
    assert Layout.parse("[b:x, s:-, h:]") == Layout.of("x", "", "")
    assert Layout.parse("[(b:x s:-)]", sizes={"b": 4, "s": 8}) == Layout(((Factor(4, ("x",)), Factor(8, ())),))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("xy, z", "is not a layout"),
        ("[x] +x", "is not a layout"),
        ("[w]", "no grid axis 'w'"),
        ("[x] +{q}", "no grid axis 'q'"),
        ("[x, x]", "axis x is used 2 times"),
        ("[xx]", "axis x is used 2 times"),
        ("[x] +{x}", "axis x is used 2 times"),
        ("[(h:x 4)]", "give the size of factor 'h'"),
        ("[(4:x, 8)]", "cannot read the dim"),
        ("[4]", "cannot read the dim"),
        ("[,]", "cannot read the dim"),
        ("[()]", "dim 0"),
        ("[(0:x 4)]", "dim 0"),
    ],
)
def test_bad_text_is_explained(text: str, says: str) -> None:
    with pytest.raises(LayoutError, match=says.replace("(", r"\(")):
        Layout.parse(text)


def test_shapes_that_do_not_fit_are_explained() -> None:
    grid = Grid(2, 2, 2)
    with pytest.raises(LayoutError, match="is for 1 dims"):
        Layout.of("x").factors((4, 4))
    with pytest.raises(LayoutError, match=r"3 \* 4, but shape \(10,\) has 10"):
        Layout.parse("[(3 4:x)]").factors((10,))
    with pytest.raises(LayoutError, match="3 % 2 = 1"):
        Layout.parse("[(3:x 4:y)]").check((12,), grid)
    Layout.of("x").check((3,), grid)  # a dim's only factor may be uneven


def test_ordered_assignments_of_three_axes() -> None:
    found = list(ordered_assignments("xyz", 4))
    assert len(found) == len(set(found)) == 193
    assert len(list(ordered_assignments("xyz", 1))) == 16
    assert list(ordered_assignments("", 2)) == [((), ())]
