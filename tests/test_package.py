"""The package as a whole: its link to passes/, its public names and what importing it loads."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import autopar3d
import autopar3d.passes

ROOT = Path(__file__).parents[1]


def test_passes_is_a_link_into_the_package() -> None:
    link = ROOT / "autopar3d" / "passes"
    assert link.is_symlink() and os.readlink(link) == "../passes"
    assert Path(autopar3d.passes.__file__).samefile(ROOT / "passes" / "__init__.py")


def test_passes_cannot_be_imported_a_second_time_from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    with pytest.raises(ImportError, match=r"import autopar3d\.passes, not passes"):
        importlib.import_module("passes")


def _loaded(code: str) -> set[str]:
    """The modules that are loaded once `code` has run in a new interpreter."""
    run = [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"]
    return set(subprocess.run(run, check=True, capture_output=True, text=True, cwd=ROOT).stdout.split())


def test_importing_the_package_loads_nothing_heavy() -> None:
    loaded = _loaded("import autopar3d; autopar3d.AutoPar3DError; autopar3d.Grid(2, 2, 2); dir(autopar3d)")
    assert {"autopar3d.errors", "autopar3d.grid"} <= loaded
    heavy = {"torch", "sympy", "numpy", "tabulate", "autopar3d.rules", "autopar3d.compiler", "autopar3d.passes"}
    assert not heavy & loaded
    # Of what torch itself does not load, layouts need nothing either.
    beside = _loaded("import torch, autopar3d; autopar3d.Layout; autopar3d.Hardware") - _loaded("import torch")
    assert {name for name in beside if not name.startswith("autopar3d")} <= {"importlib.util", "importlib._abc"}


def test_wheel_and_sdist_work_outside_the_checkout(tmp_path: Path) -> None:
    """The wheel is made from the sdist, so both have to hold everything."""
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert len(list((tmp_path / "dist").glob("*.tar.gz"))) == 1
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    ours = {str(p.relative_to(ROOT)) for p in (ROOT / "autopar3d").glob("**/*.py")}
    ours |= {f"autopar3d/{p.relative_to(ROOT)}" for p in (ROOT / "passes").glob("*.py")}
    ours |= {f"autopar3d/examples/{name}.py" for name in ("gpt", "train_gpt")}
    assert ours | {"autopar3d/py.typed"} == {n for n in names if n.startswith("autopar3d/")}
    metadata = next(n for n in names if n.endswith("entry_points.txt"))
    assert "autopar3d = autopar3d.cli:main" in (tmp_path / "site" / metadata).read_text()
    (tmp_path / "mine.py").write_text(
        "import torch, autopar3d\ndef make(): return torch.nn.Linear(8, 8), torch.ones(8, 8)\n"
        "print(autopar3d.__file__)\n"
    )
    there = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PYTHONPATH": str(tmp_path / "site")}

    words = [sys.executable, "-m", "autopar3d", "simulate", "mine:make", "--grid", "2,2,1", "--steps", "1"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=there)
    assert done.stdout.startswith(str(tmp_path / "site")) and "tensors agree within" in done.stdout, done.stderr


def test_public_names() -> None:
    source = ast.parse(Path(autopar3d.__file__).read_text())
    typed = next(node for node in source.body if isinstance(node, ast.If))
    homes = {alias.name: node.module for node in typed.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert homes == autopar3d._HOMES and sorted(homes) == sorted(autopar3d.__all__)
    for name in autopar3d.__all__:
        assert getattr(autopar3d, name).__name__ == name and name in dir(autopar3d)
    with pytest.raises(AttributeError, match="'autopar3d' has no attribute 'complie'"):
        autopar3d.complie  # noqa: B018


def test_a_module_does_not_hide_the_function_of_its_name() -> None:
    code = "import autopar3d.plan, autopar3d.ranks.launch, autopar3d; from autopar3d.collectives import gather"
    code += "; assert callable(autopar3d.plan) and callable(autopar3d.launch) and callable(autopar3d.collectives)"
    assert "autopar3d.compiler" in _loaded(code)
