"""How well a calibrated profile predicts whole steps: what overlap gains, and which of three grids is faster.

    bash examples/benchmarks/cluster.sh 4 100mbit python examples/benchmarks/predict_steps.py --hidden 512

or under torchrun, on four ranks. Calibrates first; then steps (forward and backward) of a GPT on three grids, each with
overlap and without, are interleaved, and medians stand beside the predictions. Absolute times hang on how busy the
machine is; ratios should not.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import autopar3d  # noqa: E402
from autopar3d.timelines.calibration import calibrate  # noqa: E402
from examples.gpt import GPTConfig, make  # noqa: E402

GRIDS = ((4, 1, 1), (1, 4, 1), (2, 2, 1))
BATCH = 8


def error(predicted: float, measured: float) -> str:
    return f"{100.0 * (predicted / measured - 1.0):+.0f}%"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--hidden", type=int, default=512)
    args = parser.parse_args()
    repeats, config = args.repeats, GPTConfig(vocab=512, block=128, layers=1, heads=8, hidden=args.hidden)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    hardware = calibrate((2, 2, 1))
    systems = {}
    for grid, overlap in itertools.product(GRIDS, (True, False)):
        model, batch = make(config, BATCH)
        systems[grid, overlap] = autopar3d.compile(model, grid, batch, hardware=hardware, overlap=overlap)
    walls: dict[tuple[tuple[int, int, int], bool], list[float]] = {key: [] for key in systems}
    for turn in range(repeats + 1):
        for key, par in systems.items():
            par.zero_grad()
            dist.barrier()
            began = time.perf_counter()
            par(*batch).backward()
            dist.barrier()
            if turn:
                walls[key].append(time.perf_counter() - began)
    if dist.get_rank() == 0:
        report(hardware, {k: par.plan.seconds for k, par in systems.items()}, walls)
    dist.barrier()
    dist.destroy_process_group()


def report(
    hardware: autopar3d.Hardware,
    predicted: dict[tuple[tuple[int, int, int], bool], float],
    walls: dict[tuple[tuple[int, int, int], bool], list[float]],
) -> None:
    link = hardware.node
    print(
        f"latency {link.latency * 1e3:.2f} ms, {link.bandwidth * 8e-6:.1f} Mbit/s, burst {link.burst / 1e3:.0f} kB, "
        f"{hardware.flops['']:.3g} FLOP/s"
    )
    median = {key: statistics.median(times) for key, times in walls.items()}
    rows = []
    for (grid, overlap), times in walls.items():
        said, took = predicted[grid, overlap], median[grid, overlap]
        name = "x".join(map(str, grid)) + ("" if overlap else ", no overlap")
        rows.append((name, said, took, f"{min(times):.2f} .. {max(times):.2f}", error(said, took)))
    print(tabulate(rows, ("", "predicted s", "median s", "from .. to", "error"), floatfmt=".2f", tablefmt="github"))
    rows = []
    for grid in GRIDS:
        said, took = (t[grid, False] / t[grid, True] for t in (predicted, median))
        rows.append((f"off / on, {'x'.join(map(str, grid))}", said, took, error(said, took)))
    for one, other in itertools.combinations(GRIDS, 2):
        said, took = (t[one, True] / t[other, True] for t in (predicted, median))
        rows.append((f"{'x'.join(map(str, one))} / {'x'.join(map(str, other))}", said, took, error(said, took)))
    print()
    print(tabulate(rows, ("ratio", "predicted", "measured", "error"), floatfmt=".2f", tablefmt="github"))


if __name__ == "__main__":
    main()
