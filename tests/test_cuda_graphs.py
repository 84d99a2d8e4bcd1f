"""Graphs for CUDA, made without a GPU: traced with fake CUDA tensors, they hold nothing that only a CPU runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
# Between them: embeddings, norms, attention, cross-entropy; grouped heads; a learned attention bias; convolutions,
# batch norm, pooling. (Which fused attention a GPU takes only a torch with CUDA knows; this one writes it out.)
MODELS = ["gpt", "llama", "t5", "resnet"]

Graphs = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def emitted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Graphs]:
    """Per model and graph its ops and devices; made in a process of its own, which believes in CUDA."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler: a torch without CUDA cannot differentiate fake CUDA tensors by itself")
    root, library = Path(torch.__file__).parent, tmp_path_factory.mktemp("guard") / "guard.so"
    flags = ["-std=c++20", "-shared", "-fPIC", f"-I{root / 'include'}", f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu"]
    subprocess.run([compiler, str(HERE / "fake_cuda" / "guard.cpp"), "-o", str(library), *flags], check=True)
    path = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "ignore", str(HERE / "fake_cuda" / "emit.py"), str(library), *MODELS]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Graphs] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", MODELS)
def test_no_op_is_for_the_cpu_only(emitted: dict[str, Graphs], name: str) -> None:
    for graph in emitted[name].values():
        assert [op for op in graph["ops"] if "_for_cpu" in op or "mkldnn" in op or "mkl" in op] == []


@pytest.mark.parametrize("name", MODELS)
def test_every_value_lives_on_the_gpu(emitted: dict[str, Graphs], name: str) -> None:
    for graph in emitted[name].values():
        assert graph["devices"] == ["cuda"]
