"""`autopar3d train`, the bundled example, and `autopar3d calibrate`: what runs on real ranks."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import autopar3d
from autopar3d.errors import GridError, LaunchError


def train(options: argparse.Namespace) -> int:
    """Run the example as a script of its own; its exit code."""
    return subprocess.run([sys.executable, str(example()), *options.more]).returncode


def calibrate(options: argparse.Namespace) -> int:
    """Measure on the ranks of torchrun, or on local CPU ranks where it was started without."""
    if options.grid == "auto":
        raise GridError("calibrate measures the axes of one grid: give three sizes, as in --grid 2,2,2")
    if "RANK" not in os.environ:
        profile = autopar3d.launch(_calibrate, options.grid, options.path, options.node_size, grid=options.grid)[0]
    else:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        profile = _calibrate(options.grid, options.path, options.node_size)
        dist.destroy_process_group()
    if os.environ.get("RANK", "0") == "0":
        print(profile)
        print(f"saved in {options.path}: --hardware {options.path}, or hardware={options.path!r}, takes it")
    return 0


def _calibrate(grid: tuple[int, int, int], path: str, node_size: int | None) -> autopar3d.Hardware:
    return autopar3d.calibrate(grid, path=path, name=Path(path).stem, node_size=node_size)


def example() -> Path:
    """The example's training script: inside the package where it was installed, beside it in a checkout."""
    package = Path(autopar3d.__file__).parent
    places = [folder / "examples" / "train_gpt.py" for folder in (package, package.parent)]
    for place in places:
        if place.is_file():
            return place
    raise LaunchError(
        f"the example is not there: {' and '.join(map(str, places))} do not exist; install autopar3d anew"
    )
