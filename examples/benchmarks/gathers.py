"""All-gathers on gloo: all ranks send to all at once, or around gloo's ring.

    bash examples/benchmarks/cluster.sh 8 100mbit python examples/benchmarks/gathers.py

or under torchrun. Medians of REPEATS interleaved turns, by the bytes that each rank puts in. What is sent straight
is here an all_to_all of copies, which are the same messages; `autopar3d.ranks.transport` takes the ring for much data.
"""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist
from tabulate import tabulate

from autopar3d.grid import Grid
from autopar3d.ranks.runtime import connect

c10d = torch.ops._c10d_functional
REPEATS = 5
SIZES = (64_000, 256_000, 1_024_000)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    grid = Grid(1, size, 1)
    connection = connect(grid, "cpu")
    group = connection.mesh.get_group("y")
    rows = []
    for count in SIZES:
        x = torch.ones(count // 4)
        copies, parts = x.repeat(size), [x.numel()] * size

        def straight(copies: torch.Tensor = copies, parts: list[int] = parts) -> None:
            c10d.wait_tensor(c10d.all_to_all_single(copies, parts, parts, grid.alias("y")))

        def ring(x: torch.Tensor = x) -> None:
            dist.all_gather_single(x.new_empty(size * x.numel()), x, group=group)

        walls: list[list[float]] = [[], []]
        for turn in range(REPEATS + 1):
            for call, found in zip((straight, ring), walls, strict=True):
                dist.barrier()
                began = time.perf_counter()
                call()
                if turn:
                    found.append((time.perf_counter() - began) * 1e3)
        rows.append((f"{count / 1e3:.0f} kB", *map(statistics.median, walls)))
    if dist.get_rank() == 0:
        print(f"{size} ranks")
        print(tabulate(rows, ("each", "straight ms", "ring ms"), floatfmt=".1f", tablefmt="github"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
