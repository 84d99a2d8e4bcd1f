"""`autopar3d train`: the bundled example."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import autopar3d
from autopar3d.errors import LaunchError


def train(options: argparse.Namespace) -> int:
    """Run the example as a script of its own; its exit code."""
    return subprocess.run([sys.executable, str(example()), *options.more]).returncode


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
