"""The grid: coordinates, groups, and what `grid=` accepts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from autopar3d.errors import GridError
from autopar3d.grid import AXES, Grid, factorisations
from autopar3d.testing import grids


def test_rank_order_has_z_innermost() -> None:
    grid = Grid(2, 3, 4)
    assert grid.coordinates(0) == {"x": 0, "y": 0, "z": 0}
    assert grid.coordinates(1) == {"x": 0, "y": 0, "z": 1}
    assert grid.coordinates(4) == {"x": 0, "y": 1, "z": 0}
    assert grid.coordinates(23) == {"x": 1, "y": 2, "z": 3}


@settings(deadline=None)
@given(grids(24))
def test_coordinates_invert(grid: Grid) -> None:
    assert [grid.index(grid.coordinates(i)) for i in range(grid.size)] == list(range(grid.size))


@settings(deadline=None)
@given(grids(24))
def test_groups_partition_the_grid_in_coordinate_order(grid: Grid) -> None:
    for axis in AXES:
        groups = grid.groups(axis)
        assert sorted(i for g in groups for i in g) == list(range(grid.size))
        for group in groups:
            places = [grid.coordinates(i) for i in group]
            assert [p[axis] for p in places] == list(range(grid.axis_size(axis)))
            assert len({tuple(p[a] for a in AXES if a != axis) for p in places}) == 1


def test_axes_of_size_one_never_shard() -> None:
    assert Grid(1, 2, 1).axes == ("y",)
    assert Grid(1, 1, 1).axes == ()
    assert Grid(2, 3, 4).extent("xz") == 8


def test_every_form_of_grid() -> None:
    expected = Grid(4, 2, 1)
    for form in (expected, (4, 2, 1), [4, 2, 1], torch.Size((4, 2, 1)), np.array([4, 2, 1])):
        assert Grid.of(form) == expected


def test_a_mesh_in_another_rank_order_keeps_its_ranks() -> None:
    plain = SimpleNamespace(mesh=torch.arange(8).reshape(2, 2, 2))
    assert Grid.of(plain) == Grid(2, 2, 2)  # type: ignore[arg-type]
    turned: Any = SimpleNamespace(mesh=torch.arange(8).reshape(2, 2, 2).transpose(0, 2))
    grid = Grid.of(turned)
    assert grid.ranks == (0, 4, 2, 6, 1, 5, 3, 7)
    assert grid.alias("x") != Grid(2, 2, 2).alias("x")


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ((2, 2), "has 2 entries"),
        (8, "has 1 entries"),
        ((2, 0, 4), "axis y has size 0"),
        ((2, 2.0, 2), "axis y"),
        ((True, 2, 2), "axis x"),
        (SimpleNamespace(mesh=torch.arange(8)), "exactly 3 dimensions"),
    ],
)
def test_bad_grids_are_named(bad: Any, says: str) -> None:
    with pytest.raises(GridError, match=says):
        Grid.of(bad)


def test_ranks_must_fill_the_grid() -> None:
    with pytest.raises(GridError, match="8 places but 2 ranks"):
        Grid(2, 2, 2, ranks=(0, 1))


def test_a_world_of_another_size_lists_the_legal_grids() -> None:
    Grid(2, 2, 1).check_world(4)
    with pytest.raises(GridError) as caught:
        Grid(2, 2, 2).check_world(4)
    assert "2*2*2 = 8" in str(caught.value) and "world size is 4" in str(caught.value)
    assert all(str(g) in str(caught.value) for g in [(1, 1, 4), (2, 2, 1), (4, 1, 1)])
    assert len(list(factorisations(4))) == 6


def test_the_alias_of_an_axis_names_the_grid() -> None:
    assert Grid(2, 3, 4).alias("y") == "ap3d_y_2x3x4"
