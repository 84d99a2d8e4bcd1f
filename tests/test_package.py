"""The package as a whole: its link to passes/, its public names and what importing it loads."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
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
    code = "import autopar3d.plan, autopar3d.launch, autopar3d; from autopar3d.collectives import gather"
    code += "; assert callable(autopar3d.plan) and callable(autopar3d.launch) and callable(autopar3d.collectives)"
    assert "autopar3d.compiler" in _loaded(code)
