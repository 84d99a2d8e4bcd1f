"""Exposed communication of a real step, recorded, beside the prediction: one lane and two.

    bash examples/benchmarks/cluster.sh 8 100mbit python examples/benchmarks/exposed.py

or under torchrun, on eight ranks (or as many as --grid says). Calibrates first; then steps (forward and backward) of
the example GPT in one lane and in two are recorded in turns with torch's profiler (`autopar3d.timelines.measure`). A
step's seconds are the mean over the ranks; medians of the turns are printed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import autopar3d  # noqa: E402
from autopar3d.timelines.calibration import calibrate  # noqa: E402
from autopar3d.timelines.measure import measure  # noqa: E402
from autopar3d.timelines.recording import Recording, plot  # noqa: E402
from examples.gpt import GPTConfig, make  # noqa: E402

CONFIG = GPTConfig(vocab=512, block=128, layers=2, heads=8, hidden=512)
BATCH = 16
LANES = (1, 2)


def numbers(recording: Recording) -> list[float]:
    """Seconds of a step, of compute, and exposed."""
    return [recording.seconds, recording.compute, sum(recording.exposed.values())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", default="2,2,2")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--plot", type=Path, help="where to draw rank 0's last steps below the predictions")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    grid = tuple(int(n) for n in args.grid.split(","))
    hardware = calibrate(grid)
    model, batch = make(CONFIG, BATCH)
    systems = {n: autopar3d.compile(model, grid, batch, hardware=hardware, regather="none", lanes=n) for n in LANES}
    found: dict[int, list[list[float]]] = {n: [] for n in LANES}
    shown: list[Recording] = []
    for turn in range(args.repeats + 1):
        for n, par in systems.items():
            par.zero_grad()
            dist.barrier()
            recording = measure(par, lambda par=par: par(*batch).backward(), warmup=0)  # type: ignore[misc]
            mean = torch.tensor(numbers(recording), dtype=torch.float64)
            dist.all_reduce(mean)
            if turn:
                found[n].append((mean / dist.get_world_size()).tolist())
            if turn == args.repeats and par.plan.timeline is not None:
                shown += [par.plan.timeline, recording]
    if dist.get_rank() == 0:
        rows = []
        for n, par in systems.items():
            assert par.plan.timeline is not None
            medians = [statistics.median(column) for column in zip(*found[n], strict=True)]
            rows.append((n, *numbers(par.plan.timeline), *medians))
        header = ("lanes", "predicted step s", "compute", "exposed", "measured step s", "compute", "exposed")
        print(f"grid {args.grid}, medians of {args.repeats}")
        print(tabulate(rows, header, floatfmt=".2f", tablefmt="github"))
        if args.plot:
            plot(shown, args.plot)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
