"""The table of prices says what `route` and `transfers` say, for every pair of placements."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from autopar3d.grid import Grid
from autopar3d.hardware import PROFILES
from autopar3d.redistribute import State, route, transfers
from autopar3d.search.prices import PHASES, price_table


def walked(source: State, target: State, grid: Grid, atoms: Sequence[int] = ()) -> tuple[np.ndarray, np.ndarray]:
    """Latency and seconds per byte by phase, one transfer at a time."""
    hardware = PROFILES["v100"]
    latency, per_byte = np.zeros(3), np.zeros(3)
    now = source
    for step in route(source, target):
        cuttable = [
            n % (grid.extent(held) * grid.axis_size(step.axis)) == 0 for n, held in zip(atoms, now.atoms, strict=False)
        ]
        for t in transfers(step, now, 1.0, grid, scatterable=not atoms or any(cuttable)):
            link = hardware.link(t.axis, grid)
            latency[PHASES.index(t.phase)] += link.latency
            per_byte[PHASES.index(t.phase)] += t.elements / link.bandwidth
        now = step.after
    return latency, per_byte


@pytest.mark.parametrize(
    ("atoms", "sizes", "stride"),
    [
        (0, (2, 3, 4), 1),
        (1, (2, 3, 4), 1),
        (2, (2, 1, 3), 1),
        (2, (2, 3, 4), 17),
        (3, (4, 2, 3), 401),
        (4, (2, 3, 2), 9973),
    ],
)
def test_the_table_equals_the_walk(atoms: int, sizes: tuple[int, int, int], stride: int) -> None:
    """All pairs of up to two atoms' placements; every so many of more."""
    grid = Grid(*sizes)
    table = price_table(atoms, grid, PROFILES["v100"])
    found = list(table.index)
    assert [table.index[s] for s in found] == list(range(len(found)))
    for pair in range(0, len(found) ** 2, stride):
        i, j = divmod(pair, len(found))
        latency, per_byte = walked(found[i], found[j], grid)
        way = table.walks.classes[i, j]
        assert np.allclose(table.latency[:, way], latency, rtol=1e-9, atol=0), (found[i], found[j])
        assert np.allclose(table.inverse_bandwidth[:, way], per_byte, rtol=1e-9, atol=0), (found[i], found[j])


def test_what_a_price_counts() -> None:
    """Backward where there is a gradient, the second gather where the first copy is dropped and needed."""
    grid, hardware = Grid(2, 2, 2), PROFILES["v100"]
    table = price_table(1, grid, hardware)
    shard, copy = State((("z",),)), State(((),), (), ("z",))
    at = np.array([table.index[shard]]), np.array([table.index[copy]])
    link = hardware.link("z", grid)
    once = link.latency + 500 / link.bandwidth  # half of 1000 bytes
    for grad, regather, collectives in (
        (False, False, 1),
        (False, True, 1),
        (True, False, 2),
        (True, True, 3),
    ):
        seconds = table.price(*at, 1000, grad=grad, regather=regather)
        assert seconds.shape == (1, 1)
        assert np.isclose(seconds[0, 0], collectives * once)


@pytest.mark.parametrize("atoms", [(3,), (6,), (2, 3), (4, 5)])
def test_a_sum_that_no_atom_can_scatter_is_all_reduced(atoms: tuple[int, ...]) -> None:
    grid = Grid(2, 2, 3)
    table = price_table(len(atoms), grid, PROFILES["v100"])
    legal = [s for s in table.index if all(n % grid.extent(a) == 0 for n, a in zip(atoms, s.atoms, strict=True))]
    at = np.array([table.index[s] for s in legal])
    seconds = table.price(at, at, 1000, atoms=atoms, grad=True, regather=True)
    assert not np.allclose(seconds, table.price(at, at, 1000, grad=True, regather=True))
    for i, j in np.ndindex(seconds.shape):
        latency, per_byte = walked(legal[i], legal[j], grid, atoms)
        assert np.isclose(seconds[i, j], latency.sum() + 1000 * per_byte.sum(), rtol=1e-9), (legal[i], legal[j])


def test_staying_costs_nothing() -> None:
    table = price_table(2, Grid(2, 2, 2), PROFILES["v100"])
    assert not table.latency[:, table.walks.classes.diagonal()].any()
    assert not table.inverse_bandwidth[:, table.walks.classes.diagonal()].any()
    assert (table.latency >= 0).all() and (table.inverse_bandwidth >= 0).all()


def test_a_grid_of_one_device() -> None:
    table = price_table(2, Grid(1, 1, 1), PROFILES["v100"])
    assert list(table.index) == [State(((), ()))]
