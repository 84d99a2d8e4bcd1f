"""How well a calibrated profile predicts single collectives that it was not measured on.

    bash examples/benchmarks/cluster.sh 4 50mbit python examples/benchmarks/predict_collectives.py

or under torchrun. Calibrates, then times each kind at other sizes, the median of REPEATS, beside what plans count.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from tabulate import tabulate

from autopar3d.grid import Grid
from autopar3d.timelines.calibration import calibrate, collectives, predicted

REPEATS = 7
SIZES = (20_000, 100_000, 150_000, 400_000, 700_000, 1_500_000)  # bytes that a rank sends; none is calibrated on


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    grid = Grid(1, dist.get_world_size(), 1)
    hardware = calibrate(grid, repeats=REPEATS)
    samples = collectives(grid, torch.device("cpu"), SIZES, REPEATS)
    if dist.get_rank() == 0:
        link = hardware.link("y", grid)
        print(
            f"{grid.size} ranks: latency {link.latency * 1e3:.2f} ms, {link.bandwidth * 8e-6:.1f} Mbit/s a rank, "
            f"burst {link.burst / 1e3:.0f} kB"
        )
        rows = []
        for s in samples:
            said = predicted(link, s.bytes)
            rows.append((s.kind, s.bytes / 1e3, s.seconds * 1e3, said * 1e3, 100.0 * (said / s.seconds - 1.0)))
        print(tabulate(rows, ("kind", "kB sent", "median ms", "predicted ms", "error %"), floatfmt=".1f"))
        for size in SIZES:
            near = [abs(row[-1]) for row in rows if 0.9 < row[1] * 1e3 / size < 1.1]
            print(f"{size / 1e3:.0f} kB: {sum(e <= 20.0 for e in near)} of {len(near)} within 20%")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
