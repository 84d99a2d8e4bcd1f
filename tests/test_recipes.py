"""The recipes run, learn, resume, and leave what they say."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autopar3d
from autopar3d.errors import StateError
from autopar3d.launch import Pool
from autopar3d.layout import Layout
from autopar3d.sampling import data_place

FOLDER = Path(__file__).parents[1] / "examples" / "recipes"


def _recipe(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_data_place() -> None:
    grid = autopar3d.Grid(2, 1, 3)
    layouts = {"ids": Layout.parse("[zx, -]"), "labels": Layout.parse("[zx]"), "scale": Layout.parse("[]")}
    found = [data_place(layouts, grid, rank) for rank in range(6)]
    # z is outer: the rank at x=1, z=0 has the second part.
    assert found == [(0, 6), (2, 6), (4, 6), (1, 6), (3, 6), (5, 6)]
    assert data_place({"ids": Layout.parse("[x, z]")}, grid, 4) == (1, 2)
    assert data_place({}, grid, 4) == (0, 1)
    with pytest.raises(StateError, match=r"on grid \(2, 1, 3\): ids by x, mask by no axis; .*input_layouts"):
        data_place({"ids": Layout.parse("[x, -]"), "mask": Layout.parse("[-, -]")}, grid, 0)
    par = autopar3d.simulate(torch.nn.Linear(8, 8), (2, 2, 1), torch.ones(8, 8))
    assert (par.data_rank, par.data_world_size) == (0, 1)


def _loop(folder: str, steps: int, grid: tuple[int, int, int]) -> list[float]:
    losses: list[float] = _recipe("training_loop").train(grid, Path(folder), steps=steps, save_every=3)
    return losses


def test_the_loop_learns_and_resumes_on_another_grid(ranks: Pool, tmp_path: Path) -> None:
    # Five steps at once, and three steps followed by two on another grid, which starts from the third's checkpoint.
    whole = ranks.run(_loop, str(tmp_path / "whole"), 5, (2, 2, 1), ranks=4)
    first = ranks.run(_loop, str(tmp_path / "parts"), 3, (2, 2, 1), ranks=4)
    assert all(losses == whole[0] for losses in whole)
    assert len(first[0]) == 3 and first[0][0] == pytest.approx(whole[0][0], rel=1e-5)
    assert whole[0][-1] < whole[0][0]
    assert sorted(p.name for p in (tmp_path / "whole").iterdir()) == ["step000003", "step000005"]
    rest = ranks.run(_loop, str(tmp_path / "parts"), 5, (1, 2, 1), ranks=2)
    assert len(rest[0]) == 2
    # The learning rate's decay depends on the number of steps asked for, so the two runs differ a little.
    assert rest[0] == pytest.approx(whole[0][3:], rel=0.05)


def _hugging(folder: str) -> list[float]:
    losses: list[float] = _recipe("huggingface").train((2, 2, 1), Path(folder), steps=6)
    return losses if dist.get_rank() == 0 else []


def test_huggingface_is_trained_and_saved(ranks: Pool, tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    losses = ranks.run(_hugging, str(tmp_path), ranks=4)[0]
    assert losses[-1] < losses[0]
    model = GPT2LMHeadModel.from_pretrained(tmp_path)
    recipe = _recipe("huggingface")
    with torch.no_grad():
        loss = model(**recipe.batch_of(5, model.config)).loss.item()
    assert loss < losses[-1]  # one more step was taken on that batch


def test_scripts_are_bash() -> None:
    for script in FOLDER.glob("*.sh"):
        subprocess.run(["bash", "-n", str(script)], check=True)
        for line in script.read_text().splitlines():
            for word in line.split():
                if word.startswith("examples/"):
                    assert (FOLDER.parents[1] / word).exists(), word
