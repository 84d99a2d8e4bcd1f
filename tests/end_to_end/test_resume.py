"""The example that is killed and goes on: the same losses, bit for bit, as the run that nobody disturbed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def losses(folder: Path, *options: str) -> tuple[dict[int, str], str]:
    """By step, as printed last."""
    where = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    script = ["--max-restarts", "2", "examples/train_resumable.py", "--folder", str(folder), *options]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([*where, *script], cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    found = re.findall(r"step +(\d+) +loss (\S+)", ran.stdout)
    return {int(step): loss for step, loss in found}, ran.stdout


@pytest.mark.slow
def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    quiet, _ = losses(tmp_path / "a")
    killed, said = losses(tmp_path / "b", "--kill-at", "7")
    assert "starting at step 0" in said and "starting at step 6" in said
    assert killed == quiet and len(quiet) == 12


@pytest.mark.slow
def test_a_run_goes_on_on_another_grid(tmp_path: Path) -> None:
    quiet, _ = losses(tmp_path / "a", "--grid", "1,2,2")
    losses(tmp_path / "b", "--grid", "1,2,2", "--steps", "6")
    later, said = losses(tmp_path / "b", "--grid", "4,1,1")
    assert "starting at step 6" in said
    for step in range(6, 12):
        assert float(later[step]) == pytest.approx(float(quiet[step]), rel=1e-5)
