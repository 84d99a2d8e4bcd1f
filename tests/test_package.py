"""The package as a whole: its link to passes/."""

from __future__ import annotations

import importlib
import os
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
