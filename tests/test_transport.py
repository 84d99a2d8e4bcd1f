"""transport: on gloo ranks, collectives of graphs give what gloo's own give, and send what they should."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autopar3d.errors import RankError
from autopar3d.grid import Grid
from autopar3d.private import GroupName, resolve_process_group
from autopar3d.ranks.launch import Pool
from autopar3d.ranks.runtime import connect
from autopar3d.ranks.transport import DirectGroup

c10d = torch.ops._c10d_functional


def _calls(size: int) -> dict[str, Callable[[str, list[Tensor]], list[Tensor]]]:
    """A call of each kind, given a group and tensors whose first dim the group's size divides."""
    uneven = [1 + i for i in range(size)]
    return {
        "all_gather": lambda g, x: [c10d.all_gather_into_tensor(x[0], size, g)],
        "reduce_scatter": lambda g, x: [c10d.reduce_scatter_tensor(x[0], "sum", size, g)],
        "all_reduce": lambda g, x: [c10d.all_reduce(x[0], "sum", g)],
        "max": lambda g, x: [c10d.all_reduce(x[1], "max", g)],
        "min": lambda g, x: [c10d.all_reduce(x[1], "min", g)],
        "product": lambda g, x: [c10d.all_reduce(x[1], "product", g)],
        "much": lambda g, x: [c10d.all_reduce(x[0].repeat(400, 1, 1), "sum", g)],
        "all_to_all": lambda g, x: [c10d.all_to_all_single(x[0], [2] * size, [2] * size, g)],
        "uneven": lambda g, x: [_uneven(g, x[0], uneven)],
        "gathers": lambda g, x: c10d.all_gather_into_tensor_coalesced(x, size, g),
        # So much goes around gloo's ring.
        "much gathered": lambda g, x: [c10d.all_gather_into_tensor(x[0].repeat(500, 1, 1), size, g)],
        "much in buckets": lambda g, x: c10d.all_gather_into_tensor_coalesced([x[0].repeat(500, 1, 1), *x], size, g),
        "scatters": lambda g, x: c10d.reduce_scatter_tensor_coalesced(x, "sum", size, g),
        "reduces": lambda g, x: c10d.all_reduce_coalesced(x, "sum", g),
    }


def _uneven(group: str, x: Tensor, counts: list[int]) -> Tensor:
    """Rank i gets counts[i] rows of each."""
    mine = counts[resolve_process_group(GroupName(group)).rank()]
    rows = x.repeat(4, 1, 1)[: sum(counts)].contiguous()
    return c10d.all_to_all_single(rows, [mine] * len(counts), counts, group)


def _compare() -> list[str]:
    """What differs from gloo's own collectives, by name."""
    wrong = []
    for grid in (Grid(2, 2, 2), Grid(1, 8, 1), Grid(4, 1, 2)):
        mesh, _, groups = connect(grid, "cpu")
        for axis in "xyz":  # groups of one too
            alias, own = grid.alias(axis), mesh.get_group(axis)
            assert resolve_process_group(GroupName(alias)) is groups["xyz".index(axis)]
            assert isinstance(groups["xyz".index(axis)], DirectGroup)
            size = grid.axis_size(axis)
            for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
                torch.manual_seed(dist.get_rank())
                shapes = ((2 * size, 3, 5), (size, 1), (4 * size,))
                x = [torch.randint(-4, 5, s).to(dtype) for s in shapes]
                for name, call in _calls(size).items():
                    if dtype == torch.bfloat16 and name == "product":
                        continue
                    pairs = [[c10d.wait_tensor(t) for t in call(g, x)] for g in (own.group_name, alias)]
                    if not all(torch.equal(a, b) for a, b in zip(*pairs, strict=True)):
                        wrong.append(f"{grid} {axis} {dtype} {name}")
    return wrong


def test_results_are_those_of_gloo(ranks: Pool) -> None:
    # Small whole numbers: sums are exact in every dtype and order.
    assert ranks.run(_compare, ranks=8) == [[]] * 8


def _many_in_flight() -> bool:
    """Waits in another order than starts, on three groups at once; a result that is never waited for does no harm."""
    grid = Grid(2, 2, 2)
    held = connect(grid, "cpu").groups
    assert held
    rank = float(dist.get_rank())
    starts = []
    for i in range(20):
        for axis in "xyz":
            starts.append((axis, i, c10d.all_reduce(torch.full((100,), rank + i), "sum", grid.alias(axis))))
            c10d.all_gather_into_tensor(torch.full((3,), rank), 2, grid.alias(axis))
    right = True
    for axis, i, start in reversed(starts):
        step = {"x": 4, "y": 2, "z": 1}[axis]
        partner = int(rank) ^ step
        right &= bool((c10d.wait_tensor(start) == rank + partner + 2 * i).all())
    return right


def test_many_at_once(ranks: Pool) -> None:
    assert all(ranks.run(_many_in_flight, ranks=8))


def _sums_in_rank_order() -> list[Any]:
    grid = Grid(1, 4, 1)
    held = connect(grid, "cpu").groups
    assert held
    # 1e8 + 1 - 1e8 in this order is 0 in float32, in another order 1.
    x = torch.tensor([[1e8, 1.0, -1e8, 0.0][dist.get_rank()]] * 4)
    return [
        c10d.wait_tensor(c10d.all_reduce(x, "sum", grid.alias("y"))).tolist(),
        c10d.wait_tensor(c10d.reduce_scatter_tensor(x, "sum", 4, grid.alias("y"))).tolist(),
    ]


def test_sums_are_taken_in_the_order_of_ranks(ranks: Pool) -> None:
    assert ranks.run(_sums_in_rank_order, ranks=4) == [[[0.0] * 4, [0.0]]] * 4


def _made_again() -> bool:
    """Groups that nobody held are made again, on some ranks only; meshes keep their groups."""
    grid = Grid(2, 1, 2)
    first = connect(grid, "cpu")
    own = first.mesh.get_group("x")
    x = torch.full((5,), float(dist.get_rank()))
    before = c10d.wait_tensor(c10d.all_gather_into_tensor(x, 2, grid.alias("x")))
    if dist.get_rank() % 2:
        del first
    second = connect(grid, "cpu")
    after = c10d.wait_tensor(c10d.all_gather_into_tensor(x, 2, grid.alias("x")))
    return torch.equal(before, after) and second.mesh.get_group("x") is own and len(second.groups) == 3


def test_groups_can_be_made_again(ranks: Pool) -> None:
    assert all(ranks.run(_made_again, ranks=4))


def _dead_peer() -> str:
    held = connect(Grid(1, 2, 1), "cpu")
    if dist.get_rank() == 1:
        os._exit(3)
    try:
        c10d.wait_tensor(c10d.all_gather_into_tensor(torch.ones(4), 2, Grid(1, 2, 1).alias("y")))
    except RuntimeError as error:
        raise RuntimeError(f"{len(held.groups)} groups, {error}") from error
    return "no error"


def test_a_peer_that_dies_is_an_error() -> None:
    with Pool(2) as pool, pytest.raises(RankError, match="rank 1 of 2.*exit"):
        pool.run(_dead_peer, ranks=2, timeout=60)
