"""The files of examples/migration train alike before and after."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from autopar3d.ranks.launch import Pool

FOLDER = Path(__file__).parents[1] / "examples" / "migration"
FILES = [file for file in sorted(FOLDER.glob("*.py")) if file.stem != "small"]


def _losses(files: list[str]) -> list[tuple[list[float], list[float]]]:
    pages = [runpy.run_path(file) for file in files]
    return [(page["before"](), page["after"]()) for page in pages]


def test_losses_are_equal(ranks: Pool) -> None:
    assert {file.stem for file in FILES} == {"ddp", "fsdp2", "tensor_parallel"}
    data = [file for file in FILES if file.stem != "tensor_parallel"]
    tensor = [file for file in FILES if file.stem == "tensor_parallel"]
    for files, count in (data, 2), (tensor, 4):
        for rank in ranks.run(_losses, [str(file) for file in files], ranks=count):
            for file, (before, after) in zip(files, rank, strict=True):
                assert after == pytest.approx(before, rel=1e-4), file.stem
                assert len(before) == 4 and before[-1] < before[0]
