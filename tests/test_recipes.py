"""The recipes run, learn, resume, and leave what they say."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autopar3d
from autopar3d.errors import StateError
from autopar3d.layout import Layout
from autopar3d.ranks.launch import Pool
from autopar3d.ranks.sampling import data_place
from tests.pages import ROOT, blocks

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


@pytest.mark.slow
def test_the_trainer_of_transformers_trains_as_on_one_device(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from transformers import GPT2LMHeadModel, Trainer

    # Ranks of their own: accelerate keeps the number of processes for the life of each.
    logs = autopar3d.launch(_trainer, str(tmp_path / "grid"), None, grid=(2, 2, 1))[0]
    # From a checkpoint in the middle of the second epoch, on another grid.
    middle = str(tmp_path / "grid" / "checkpoint-5")
    again = autopar3d.launch(_trainer, str(tmp_path / "again"), middle, grid=(1, 2, 1))[0]
    for name in ("loss", "grad_norm", "learning_rate", "eval_loss"):
        assert [log[name] for log in again if name in log] == pytest.approx(
            [log[name] for log in logs if name in log], rel=1e-4
        )
    recipe = _recipe("hf_trainer")

    class Alone(Trainer):  # type: ignore[misc]
        get_train_dataloader = recipe.GridTrainer.get_train_dataloader
        _loader = recipe.GridTrainer._loader

    model = recipe.small()
    model.accepts_loss_kwargs = False
    data = recipe.Counting(model.config)
    alone = Alone(model, recipe.arguments(tmp_path / "alone", 6), train_dataset=data, eval_dataset=data)
    alone.train()
    for name in ("loss", "grad_norm", "learning_rate", "eval_loss"):
        mine = [log[name] for log in logs if name in log]
        assert mine == pytest.approx([log[name] for log in alone.state.log_history if name in log], rel=1e-4)
        assert len(mine) == (1 if name == "eval_loss" else 6)
    saved = GPT2LMHeadModel.from_pretrained(tmp_path / "grid")
    for (name, one), other in zip(saved.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4, msg=name)


def _commands() -> list[str]:
    found = [c for b in blocks((ROOT / "docs" / "recipes.md").read_text()) for c in b.commands]
    return [command for command in found if command.startswith("torchrun ")]


@pytest.mark.slow
@pytest.mark.parametrize("command", _commands())
def test_as_the_page_says_under_torchrun(command: str, tmp_path: Path) -> None:
    """With two ranks, and not eight."""
    if "hf_trainer" in command:
        pytest.importorskip("accelerate")
    if "lightning" in command:
        pytest.importorskip("lightning")
    words = re.sub("--nproc-per-node [0-9]+", "--standalone --nproc-per-node 2", command).replace("2,2,2", "2,1,1")
    words = words.replace(" examples/", f" {ROOT}/examples/").removeprefix("torchrun ")
    run = [sys.executable, "-m", "torch.distributed.run", *words.split()]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr[-3000:]


@pytest.mark.slow
def test_the_readme_as_a_script(tmp_path: Path) -> None:
    parts = [b for b in blocks((ROOT / "README.md").read_text()) if b.language == "python"]
    make, train = (next(b.text for b in parts if name in b.text) for name in ("def make(", "def train("))
    end = next(b.text for b in parts if b.ranks)
    script = "\n".join([make, train.partition("\n\n\nlosses = ")[0], end])
    (tmp_path / "train.py").write_text(script.replace("(2, 2, 2)", "(1, 2, 1)"))
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    first, last = map(float, done.stdout.split())
    assert last < first


def _trainer(folder: str, resume: str | None) -> list[dict[str, float]]:
    grid = (2, 2, 1) if dist.get_world_size() == 4 else (1, 2, 1)
    train = _recipe("hf_trainer").train
    logs: list[dict[str, float]] = train(grid, Path(folder), steps=6, resume=Path(resume) if resume else None)
    return logs


@pytest.mark.slow
def test_lightning_trains_as_on_one_device_and_resumes(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    whole = autopar3d.launch(_lightning, str(tmp_path / "grid"), 3, grid=(2, 1, 1))[0]
    (checkpoint,) = (tmp_path / "grid" / "checkpoints").iterdir()
    recipe = _recipe("lightning_module")

    class Alone(recipe.Regression):  # type: ignore[misc, name-defined]
        def configure_model(self) -> None:
            self.model = self.model or WithLoss(recipe.small())

    runner = recipe.trainer(tmp_path / "alone", 3, "auto", accelerator="cpu", devices=1)
    assert isinstance(runner, lightning.Trainer)
    module = Alone((1, 1, 1))
    runner.fit(module, recipe.loader(), recipe.loader(shuffle=False))
    for name in ("loss", "val_loss"):
        assert whole[name] == pytest.approx(float(runner.callback_metrics[name]), rel=1e-5)
    for name, value in module.model.model.state_dict().items():
        torch.testing.assert_close(whole["state"][name], value, rtol=0, atol=1e-5, msg=name)
    more = autopar3d.launch(_lightning, str(tmp_path / "more"), 5, str(checkpoint), grid=(2, 1, 1))[0]
    assert more["val_loss"] < whole["val_loss"]


class WithLoss(torch.nn.Module):
    """Called as the compiled model is."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, targets: tuple[torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.model(x), *targets)


def _lightning(folder: str, epochs: int, resume: str | None = None) -> dict[str, Any]:
    start = None if resume is None else Path(resume)
    found: dict[str, Any] = _recipe("lightning_module").train((2, 1, 1), Path(folder), epochs=epochs, resume=start)
    return found
