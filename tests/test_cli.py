"""The command line: what it prints, its exit codes, and mistakes told without tracebacks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autopar3d import Grid, Hardware
from autopar3d.cli import doctor, main, training
from autopar3d.plan import Plan
from autopar3d.ranks.launch import Pool

ROOT = Path(__file__).parents[1]

SOURCE = """
import torch
from torch import nn

x, y = torch.ones(8, 8), torch.ones(8, 8)


def model():
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def alone():
    return model()


def pair():
    return model(), (x,)


def tensor():
    return model(), x


def with_kwargs():
    return model(), (), {"input": x}


def with_loss():
    return model(), x, {"targets": (y,)}, nn.functional.mse_loss


def on_meta():
    with torch.device("meta"):
        return model(), torch.empty(8, 8)


def with_dropout():
    return nn.Sequential(model(), nn.Dropout(0.5)), x


def listed():
    return model(), {"input": x}, ["more"]


def number():
    return 3


def leaves():
    raise SystemExit(3)


def broken():
    return model(), torch.ones(8, 8) @ torch.ones(3, 3)


class Branches(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


def branches():
    return Branches(), x
"""


@pytest.fixture
def source(tmp_path: Path) -> str:
    file = tmp_path / "models_of_mine.py"
    file.write_text(SOURCE)
    return str(file)


@pytest.mark.parametrize("function", ["pair", "tensor", "with_kwargs", "with_loss", "on_meta"])
def test_plan_takes_every_form(source: str, function: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{source}:{function}", "--grid", "4,2,1", "--hardware", "h100", "--json"]) == 0
    plan = Plan.from_dict(json.loads(capsys.readouterr().out))
    assert plan.grid == (4, 2, 1) and plan.hardware == "h100"
    assert {p.names[0] for p in plan.parameters} == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert (len(plan.outputs), plan.outputs[0].shape) == (1, () if function == "with_loss" else (8, 8))


def test_plan_prints_and_saves(source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "plan.json"
    arguments = ["--scheme", "1d", "--regather", "none", "--overlap", "off", "--save", str(saved)]
    assert main(["plan", f"{source}:pair", "--grid", "1,2,1", "--world-size", "2", *arguments]) == 0
    plan = Plan.load(saved)
    assert capsys.readouterr().out == f"{plan}\n"
    assert (plan.grid, plan.scheme, plan.regather) == ((1, 2, 1), "1d", "none")


def test_simulate_compares_with_one_device(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", f"{source}:with_loss", "--grid", "2,1,2", "--steps", "2"]) == 0
    out = capsys.readouterr().out
    assert "2 steps of AdamW on grid (2, 1, 2)" in out and "agree within 1e-10" in out
    assert main(["simulate", f"{source}:with_dropout", "--grid", "2,1,1", "--steps", "1"]) == 0
    capsys.readouterr()
    arguments = ["--grid", "2,1,2", "--steps", "1", "--dtype", "own", "--json"]
    assert main(["simulate", f"{source}:pair", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["grid"] == [2, 1, 2] and found["differ"] == [] and set(found["worst"]) > {"loss", "gradient"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "{}:alone"], "returned a model and no inputs"),
        (["plan", "{}:listed"], "kwargs of type list; args is a tuple"),
        (["plan", "/tmp:make"], "/tmp is a folder; the model comes from a file in it"),
        (["plan", "{}:number"], "returned (int); it must return model, (model, args)"),
        (["plan", "{}:missing"], "has no function 'missing'; it has model, alone, pair"),
        (["plan", "{}:broken"], "raised RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
        (["plan", "{}:leaves"], "raised SystemExit: 3 at"),
        (["plan", ".:make"], "names no function: give FILE.py:FUNCTION"),
        (["plan", "{}"], "names no function: give FILE.py:FUNCTION"),
        (["plan", "no_such_file.py:make"], "there is no file no_such_file.py"),
        (["plan", "no_such_module:make"], "there is no module 'no_such_module'"),
        (["plan", "{}:branches"], "TraceError: cannot trace Branches at"),
        (["plan", "{}:pair", "--hardware", "tpu"], "PlanError: hardware='tpu' is not known; choose one of"),
        (["plan", "{}:pair", "--scheme", "4d"], "PlanError: scheme="),
        (["plan", "{}:pair", "--world-size", "8"], "GridError: grid (1, 2, 1) needs 1*2*1 = 2 ranks"),
        (["simulate", "{}:on_meta"], "PlanError: "),
    ],
)
def test_mistakes_are_told_in_lines(
    source: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [a.format(source) for a in arguments] + ["--grid", "1,2,1"]
    assert main(arguments) == 1
    out, err = capsys.readouterr()
    assert message in err and not out
    assert "Traceback" not in err and err.startswith("autopar3d: ")
    if message.startswith("raised RuntimeError"):
        assert "models_of_mine.py:54 (`return model(), torch.ones(8, 8) @ torch.ones(3, 3)`)" in err
    assert main([*arguments, "--debug"]) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["paln"], "invalid choice: 'paln'"),
        (["plan", "a.py:make", "--grid", "2,2,2", "--gird", "2"], "unrecognized arguments: --gird 2"),
        (["plan", "a.py:make"], "required: --grid"),
        (["plan", "a.py:make", "--grid", "2,2"], "'2,2' is not a grid: give three sizes, as in 4,2,1, or auto"),
        (["plan", "a.py:make", "--grid", "2,2,2", "--world-size", "0"], "'0' is not a whole number of at least 1"),
        (["plan", "a.py:make", "--grid", "2,2,2", "--html", "no/where.html"], "there is no folder 'no'"),
        (["calibrate", "/tmp"], "'/tmp' is a folder: give the name of a file in it"),
    ],
)
def test_a_wrong_command_line_is_two(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_help_of_each_command(capfd: pytest.CaptureFixture[str]) -> None:
    for command, text in {"plan": "--hardware", "simulate": "--steps", "doctor": "--grid"}.items():
        with pytest.raises(SystemExit) as caught:
            main([command, "--help"])
        assert caught.value.code == 0
        assert text in capfd.readouterr().out
    assert main(["train", "--help"]) == 0
    assert "--plot FILE" in capfd.readouterr().out
    assert main(["train", "--grid", "2,2"]) == 2
    assert "give three sizes of 1 and more, as in 2,2,2" in capfd.readouterr().err


def test_as_a_module_and_from_another_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SOURCE)
    run = [sys.executable, "-m", "autopar3d"]
    there = os.environ | {"PYTHONPATH": str(ROOT)}
    version = subprocess.run([*run, "--version"], capture_output=True, text=True, cwd=tmp_path, env=there)
    assert version.returncode == 0 and version.stdout.startswith("autopar3d 0.")
    # A module of the working directory, and a reader that stops reading.
    plan = subprocess.run(
        f"{' '.join(run)} plan mine:pair --grid 2,2,2 | head -1",
        shell=True, capture_output=True, text=True, cwd=tmp_path, env=there,
    )  # fmt: skip
    assert plan.stdout.startswith("Plan ") and plan.stdout.count("\n") == 1 and not plan.stderr


def test_calibrate_saves_a_profile(
    ranks: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def launch(fn, *args, grid):  # type: ignore[no-untyped-def]
        return ranks.run(fn, *args, ranks=Grid.of(grid).size)

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(training.autopar3d, "launch", launch)
    path = str(tmp_path / "mine.json")
    assert main(["calibrate", path, "--grid", "2,1,1"]) == 0
    assert f"--hardware {path}" in capsys.readouterr().out
    assert Hardware.load(path).name == "mine"


def test_train_finds_the_example() -> None:
    assert training.example() == ROOT / "examples" / "train_gpt.py"


def test_doctor_tries_every_collective(
    ranks: Pool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def launch(fn, *args, grid, timeout):  # type: ignore[no-untyped-def]
        return ranks.run(fn, *args, ranks=Grid.of(grid).size, timeout=timeout)

    monkeypatch.setattr(doctor.autopar3d, "launch", launch)
    assert main(["doctor", "--grid", "1,1,3", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["facts"]
    tried = facts["collectives on grid (1, 1, 3), local CPU ranks"]
    assert set(tried) == {f"{a} {k}" for a in "z" for k in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")}
    assert all(text.endswith("ms, right") for text in tried.values())
    assert "right" in facts["compiler"]["small model"] and facts["backends"]["gloo"] == "yes"


def test_doctor_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from autopar3d.errors import RankError

    def launch(*_, **__):  # type: ignore[no-untyped-def]
        raise RankError("rank 1 of 8: the process was killed by SIGBUS")

    monkeypatch.setattr(doctor.autopar3d, "launch", launch)
    monkeypatch.setattr(doctor.torch, "__version__", "2.9.0")
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert (
        "WRONG: torch is 2.9.0" in out and "WRONG: local ranks do not work: rank 1 of 8: the process was killed" in out
    )
