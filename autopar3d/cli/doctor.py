"""`autopar3d doctor`: what this machine has, whether it works, and what is wrong."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist

import autopar3d
from autopar3d.errors import AutoPar3DError, GridError
from autopar3d.grid import Grid
from autopar3d.timelines.timing import KINDS

_NEEDED = ("torch", "numpy", "sympy", "tabulate", "cloudpickle")
_OPTIONAL = {"transformers": "hf", "matplotlib": "plot", "hypothesis": "test"}
_ELEMENTS = 1 << 16  # a rank, for each collective


@dataclass
class Findings:
    """Facts by heading, and what is wrong."""

    facts: dict[str, dict[str, str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def doctor(options: argparse.Namespace) -> int:
    """Print what was found; 1 when something is wrong."""
    found = Findings()
    found.facts["versions"] = _versions(found.problems)
    found.facts["machine"] = _machine()
    found.facts["backends"] = _backends(found.problems)
    if options.grid == "auto":
        raise GridError("doctor tries one grid: give three sizes, as in --grid 2,2,2")
    found.facts[f"collectives on grid {Grid.of(options.grid)}, local CPU ranks"] = _ranks(options.grid, found.problems)
    found.facts["compiler"] = _compiler(found.problems)
    if options.json:
        print(json.dumps({"facts": found.facts, "problems": found.problems}, indent=1))
        return 1 if found.problems else 0
    for title, lines in found.facts.items():
        print(title)
        width = max(map(len, lines), default=0)
        for name, text in lines.items():
            print(f"  {name:{width}}  {text}")
    print("\n".join(f"WRONG: {problem}" for problem in found.problems) or "nothing is wrong")
    return 1 if found.problems else 0


def _versions(problems: list[str]) -> dict[str, str]:
    lines = {"autopar3d": autopar3d.__version__, "python": platform.python_version()}
    for name in _NEEDED:
        try:
            lines[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            lines[name] = "missing"
            problems.append(f"{name} is not installed: pip install {name}")
    if not torch.__version__.startswith("2.13."):
        problems.append(
            f"torch is {torch.__version__}; the passes rely on the graphs that 2.13 emits: "
            "pip install 'torch>=2.13,<2.14'"
        )
    for name, extra in _OPTIONAL.items():
        try:
            lines[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            lines[name] = f"not installed (optional: pip install 'autopar3d[{extra}]')"
    return lines


def _machine() -> dict[str, str]:
    lines = {"system": platform.platform(), "cores": str(len(os.sched_getaffinity(0)))}
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            card = torch.cuda.get_device_properties(i)
            lines[f"cuda:{i}"] = f"{card.name}, {card.total_memory / 1e9:.0f} GB"
    elif torch.version.cuda:
        lines["cuda"] = f"torch is built for CUDA {torch.version.cuda}, and finds no device"
    else:
        lines["cuda"] = "none: this torch is built for the CPU"
    if "OMP_NUM_THREADS" in os.environ:
        lines["OMP_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"]
    return lines


def _backends(problems: list[str]) -> dict[str, str]:
    if not dist.is_available():
        problems.append("this torch is built without torch.distributed")
        return {"torch.distributed": "no"}
    there = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    if not there["gloo"]:
        problems.append("there is no gloo backend, so there are no ranks on CPUs")
    if torch.cuda.is_available() and not there["nccl"]:
        problems.append("there are CUDA devices, but this torch has no NCCL")
    return {name: "yes" if yes else "no" for name, yes in there.items()}


def _ranks(grid: tuple[int, int, int], problems: list[str]) -> dict[str, str]:
    """Every kind of collective along every axis, on local ranks: milliseconds, and whether the result is right."""
    try:
        results = autopar3d.launch(_try_collectives, grid, grid=grid, timeout=120)
    except AutoPar3DError as error:
        problems.append(f"local ranks do not work: {error}")
        return {"ranks": "failed"}
    lines = {}
    for axis in Grid.of(grid).axes:
        for kind in KINDS:
            seconds = max(result[axis, kind][0] for result in results)
            wrong = [rank for rank, result in enumerate(results) if not result[axis, kind][1]]
            lines[f"{axis} {kind}"] = f"{1e3 * seconds:.2f} ms, {'WRONG' if wrong else 'right'}"
            if wrong:
                problems.append(f"{kind} along {axis} gives a wrong result on ranks {wrong}")
    return lines or {"ranks": "one rank: nothing to send"}


def _try_collectives(sizes: tuple[int, int, int]) -> dict[tuple[str, str], tuple[float, bool]]:
    """On one rank: seconds and correctness by axis and kind, with the groups and the transport that graphs use."""
    from autopar3d.ranks.runtime import connect

    c10d = torch.ops._c10d_functional
    grid = Grid.of(sizes)
    connection = connect(grid, "cpu")
    place = grid.coordinates(connection.place)
    found = {}
    for axis in grid.axes:
        group, n = grid.alias(axis), grid.axis_size(axis)
        mine = torch.full((_ELEMENTS // n * n,), float(place[axis]))
        parts = mine.numel() // n
        every = torch.arange(float(n)).repeat_interleave(parts)
        numbered = torch.arange(float(n)).repeat_interleave(parts) + 100.0 * place[axis]
        total = float(n * (n - 1) // 2)
        tries: dict[str, tuple[Any, torch.Tensor]] = {
            "all_gather": (lambda g=group, n=n, x=mine[:parts]: c10d.all_gather_into_tensor(x, n, g), every),
            "reduce_scatter": (
                lambda g=group, n=n, x=mine: c10d.reduce_scatter_tensor(x, "sum", n, g),
                torch.full((parts,), total),
            ),
            "all_reduce": (lambda g=group, x=mine: c10d.all_reduce(x, "sum", g), torch.full_like(mine, total)),
            "all_to_all": (
                lambda g=group, n=n, k=parts, x=numbered: c10d.all_to_all_single(x, [k] * n, [k] * n, g),
                100.0 * every + place[axis],
            ),
        }
        for kind, (run, expected) in tries.items():
            c10d.wait_tensor(run())  # the first call of a kind sets connections up
            start = time.perf_counter()
            result = c10d.wait_tensor(run())
            found[axis, kind] = (time.perf_counter() - start, torch.equal(result, expected))
    return found


def _compiler(problems: list[str]) -> dict[str, str]:
    """A small model through all passes, simulated, beside one device."""
    from torch import nn

    from autopar3d import testing

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    start = time.perf_counter()
    try:
        found = testing.trains_like_one_device(make, torch.ones(8, 8), (2, 2, 2), steps=1)
    except Exception as error:  # noqa: BLE001  (any failure is a finding)
        problems.append(f"a small model does not compile: {type(error).__name__}: {error}")
        return {"small model": "failed"}
    problems += [f"a small model, simulated, differs from one device: {f}" for f in found.failures]
    took = time.perf_counter() - start
    return {
        "small model": f"planned and simulated on (2, 2, 2) in {took:.1f} s, {'WRONG' if found.failures else 'right'}"
    }
