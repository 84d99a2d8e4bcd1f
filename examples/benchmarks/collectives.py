"""What collectives cost on gloo: its own, and those of `autopar3d.ranks.transport`, on ranks with links of their own.

    bash examples/benchmarks/cluster.sh 4 200mbit python examples/benchmarks/collectives.py

or under torchrun (then all ranks share one loopback, and bytes are not counted). Per kind and size: bytes that left the
link of rank 0 for each byte put in, headers included; CPU time; median wall time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor

from autopar3d.grid import Grid
from autopar3d.ranks.runtime import connect

c10d = torch.ops._c10d_functional
SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")
REPEATS = 7


def calls(size: int) -> dict[str, tuple[Callable[[Tensor, str], Tensor], float]]:
    """Per kind the call, and what a rank must send for each byte put in (ring convention)."""
    once = (size - 1) / size
    return {
        "all_gather": (lambda x, g: c10d.all_gather_into_tensor(x, size, g), size - 1.0),
        "reduce_scatter": (lambda x, g: c10d.reduce_scatter_tensor(x, "sum", size, g), once),
        "all_reduce": (lambda x, g: c10d.all_reduce(x, "sum", g), 2 * once),
        "all_to_all": (
            lambda x, g: c10d.all_to_all_single(x, [len(x) // size] * size, [len(x) // size] * size, g),
            once,
        ),
    }


def sent() -> int:
    return int(SENT.read_text()) if SENT.exists() else 0


def measure(call: Callable[[Tensor, str], Tensor], x: Tensor, group: str) -> tuple[float, float, float]:
    """Bytes sent for each put in, milliseconds of CPU, median milliseconds."""
    c10d.wait_tensor(call(x, group))
    walls, cpu, bytes_sent = [], 0.0, 0
    for _ in range(REPEATS):
        dist.barrier()
        before, busy, began = sent(), time.process_time(), time.perf_counter()
        c10d.wait_tensor(call(x, group))
        walls.append(time.perf_counter() - began)
        cpu += time.process_time() - busy
        bytes_sent += sent() - before
    put_in = x.numel() * x.element_size() * REPEATS
    return bytes_sent / put_in, cpu / REPEATS * 1e3, statistics.median(walls) * 1e3


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    grid = Grid(1, size, 1)
    connection = connect(grid, "cpu")
    groups = {"gloo": connection.mesh.get_group("y").group_name, "autopar3d": grid.alias("y")}
    rows = []
    for count in (2_000, 50_000, 1_000_000):
        x = torch.ones(count // size * size)
        for kind, (call, least) in calls(size).items():
            part = x[: len(x) // size] if kind == "all_gather" else x
            found = {name: measure(call, part, group) for name, group in groups.items()}
            numbers = [found[name][i] for i in range(3) for name in groups]
            rows.append((f"{x.numel() * 4 / 1e3:.0f} kB", kind, least, *numbers))
    if dist.get_rank() == 0:
        header = ("whole", "kind", "must send", "gloo sends", "ours", "gloo CPU ms", "ours", "gloo wall ms", "ours")
        print(f"{size} ranks")
        print(tabulate(rows, header, floatfmt=".2f"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
