"""Whether cutting gather + matmul, and matmul + reduce-scatter, into ring steps pays on gloo.

    bash examples/benchmarks/cluster.sh 4 100mbit python examples/benchmarks/ring_matmul.py

One linear of a transformer layer on one axis, its input's rows sharded: `Y = gather(X) W`, or `scatter(X W)`. Each
is done in three ways that send the same bytes: whole (the collective, then the matmul), in two lanes (half of the rows
each, so that one half's collective runs under the other's matmul, as `lanes=2` does), and as a ring written by hand: in
each of g-1 steps a rank sends one shard to its neighbour and multiplies the one that it has. Beside them the parts
alone: the collective as graphs have it, the same ring without the products (what the ring gains by its messages, not by
hiding them), gloo's own collective, and the product. Medians of REPEATS interleaved turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor

from autopar3d.grid import Grid
from autopar3d.ranks.runtime import connect

c10d = torch.ops._c10d_functional
REPEATS = 7
# rows of the global batch, hidden in, hidden out: an MLP's first linear, whose output is sharded
SHAPES = ((2048, 512, 2048), (1024, 1024, 4096))


class Axis:
    """One axis of ranks: its group for collectives, and single messages around the ring."""

    def __init__(self, size: int) -> None:
        grid = Grid(1, size, 1)
        self.connection = connect(grid, "cpu")
        self.group, self.size, self.rank = grid.alias("y"), size, dist.get_rank()

    def gather(self, x: Tensor) -> Tensor:
        return c10d.all_gather_into_tensor(x, self.size, self.group)

    def scatter(self, x: Tensor) -> Tensor:
        return c10d.reduce_scatter_tensor(x, "sum", self.size, self.group)

    def gloo(self, x: Tensor, *, gather: bool) -> Tensor:
        """gloo's own all_gather, or reduce_scatter."""
        group = self.connection.mesh.get_group("y")
        out = x.new_empty(x.shape[0] * self.size if gather else x.shape[0] // self.size, x.shape[1])
        (dist.all_gather_single if gather else dist.reduce_scatter_single)(out, x, group=group)
        return out

    def pass_on(self, x: Tensor, room: Tensor) -> list[dist.Work]:
        """Send to the next rank and receive from the one before."""
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        found = [dist.irecv(room, before), dist.isend(x, after)]
        return [work for work in found if work is not None]


def gather_matmul(axis: Axis, x: Tensor, w: Tensor) -> Tensor:
    return c10d.wait_tensor(axis.gather(x)) @ w


def gather_matmul_lanes(axis: Axis, x: Tensor, w: Tensor) -> Tensor:
    first, second = (axis.gather(part.contiguous()) for part in x.chunk(2))
    return torch.cat([c10d.wait_tensor(first) @ w, c10d.wait_tensor(second) @ w])


def gather_matmul_ring(axis: Axis, x: Tensor, w: Tensor) -> Tensor:
    y = x.new_empty(axis.size, x.shape[0], w.shape[1])
    piece, room = x, torch.empty_like(x)
    for step in range(axis.size):
        last = step == axis.size - 1
        messages = [] if last else axis.pass_on(piece, room)
        torch.matmul(piece, w, out=y[(axis.rank - step) % axis.size])
        for message in messages:
            message.wait()
        piece, room = room, torch.empty_like(x)
    return y.flatten(0, 1)


def gather_ring(axis: Axis, x: Tensor) -> Tensor:
    y = x.new_empty(axis.size, *x.shape)
    y[axis.rank] = x
    for step in range(axis.size - 1):
        here, next_ = (axis.rank - step) % axis.size, (axis.rank - step - 1) % axis.size
        for message in axis.pass_on(y[here], y[next_]):
            message.wait()
    return y.flatten(0, 1)


def scatter_ring(axis: Axis, x: Tensor) -> Tensor:
    rows = x.unflatten(0, (axis.size, -1))
    total = rows[(axis.rank - 1) % axis.size]
    for step in range(1, axis.size):
        room = torch.empty_like(total)
        for message in axis.pass_on(total, room):
            message.wait()
        total = room.add_(rows[(axis.rank - 1 - step) % axis.size])
    return total


def matmul_scatter(axis: Axis, x: Tensor, w: Tensor) -> Tensor:
    return c10d.wait_tensor(axis.scatter(x @ w))


def matmul_scatter_lanes(axis: Axis, x: Tensor, w: Tensor) -> Tensor:
    rows = x.unflatten(0, (axis.size, 2, -1))
    first, second = (axis.scatter(rows[:, k].flatten(0, 1) @ w) for k in range(2))
    return torch.cat([c10d.wait_tensor(first), c10d.wait_tensor(second)])


def matmul_scatter_ring(axis: Axis, x: Tensor, w: Tensor) -> Tensor:
    rows = x.unflatten(0, (axis.size, -1))
    total = rows[(axis.rank - 1) % axis.size] @ w
    for step in range(1, axis.size):
        room = torch.empty_like(total)
        messages = axis.pass_on(total, room)
        mine = rows[(axis.rank - 1 - step) % axis.size] @ w
        for message in messages:
            message.wait()
        total = room.add_(mine)
    return total


def measure(ways: dict[str, Callable[[], Tensor]]) -> dict[str, float]:
    """Median milliseconds of each, interleaved; the slowest rank counts."""
    walls: dict[str, list[float]] = {name: [] for name in ways}
    expected = next(iter(ways.values()))()
    for turn in range(REPEATS + 1):
        for name, way in ways.items():
            dist.barrier()
            began = time.perf_counter()
            found = way()
            dist.barrier()
            if turn:
                walls[name].append((time.perf_counter() - began) * 1e3)
            elif found.shape == expected.shape and "alone" not in name:
                torch.testing.assert_close(found.sum(), expected.sum(), rtol=1e-3, atol=1e-1)
    return {name: statistics.median(times) for name, times in walls.items()}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    axis = Axis(size)
    rows = []
    for m, k, n in SHAPES:
        x, w = torch.randn(m // size, k), torch.randn(k, n // size)
        whole = torch.randn(m, k)
        up = {
            "whole": lambda x=x, w=w: gather_matmul(axis, x, w),
            "lanes": lambda x=x, w=w: gather_matmul_lanes(axis, x, w),
            "ring": lambda x=x, w=w: gather_matmul_ring(axis, x, w),
            "collective alone": lambda x=x: c10d.wait_tensor(axis.gather(x)),
            "ring alone": lambda x=x: gather_ring(axis, x),
            "gloo alone": lambda x=x: axis.gloo(x, gather=True),
            "matmul alone": lambda x=whole, w=w: x @ w,
        }
        y, v = torch.randn(m, n // size), torch.randn(n // size, k)
        product = y @ v
        down = {
            "whole": lambda x=y, w=v: matmul_scatter(axis, x, w),
            "lanes": lambda x=y, w=v: matmul_scatter_lanes(axis, x, w),
            "ring": lambda x=y, w=v: matmul_scatter_ring(axis, x, w),
            "collective alone": lambda x=product: c10d.wait_tensor(axis.scatter(x)),
            "ring alone": lambda x=product: scatter_ring(axis, x),
            "gloo alone": lambda x=product: axis.gloo(x, gather=False),
            "matmul alone": lambda x=y, w=v: x @ w,
        }
        for what, ways in (("gather + matmul", up), ("matmul + scatter", down)):
            found = measure(ways)
            hidden = (found["ring alone"] + found["matmul alone"]) / found["ring"]
            rows.append((what, f"{m}x{k}x{n}", *found.values(), found["whole"] / found["ring"], hidden))
    if dist.get_rank() == 0:
        header = (
            *("linear", "m x k x n", "whole ms", "lanes", "ring", "collective", "ring alone", "gloo's", "matmul"),
            *("whole / ring", "(ring alone + matmul) / ring"),
        )
        print(f"{size} ranks")
        print(tabulate(rows, header, floatfmt=(".0f",) * 9 + (".2f", ".2f"), tablefmt="github"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
