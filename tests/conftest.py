"""Fixtures that every test may use."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
import torch.distributed as dist

from autopar3d.errors import RankError
from autopar3d.ranks.launch import Pool

# Two cores serve up to nine processes here: threads inside an op would only get in each other's way.
torch.set_num_threads(1)

# The suite is the same at every run; `python -m tests.fuzz` draws anew.
hypothesis.settings.register_profile("suite", derandomize=True, deadline=None)
hypothesis.settings.load_profile("suite")

ROOT = Path(__file__).parent.parent

# Beside tests that use the pool, these start processes of their own.
WITH_PROCESSES = ("test_launch", "test_recipes", "test_cli", "test_package", "test_postmortem", "test_transport")

# What the ranks import before they are forked, so that it is imported once and not eight times.
PRELOAD = ("torch.distributed.tensor", "torch.distributed.checkpoint", "hypothesis", "pytest", "transformers")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cases", metavar="FILE", help="run tests/test_cases.py on the cases of this file")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n 2` one worker takes all that starts ranks: two pools would be too many for two cores. A file's other
    tests stay together, as they may share what they set up; the proofs of rules fill up whoever is free."""
    from xdist.scheduler import LoadScopeScheduling

    class OnePool(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file, _, test = nodeid.partition("::")
            if Path(file).stem in WITH_PROCESSES or test.partition("[")[0] in _with_ranks(file):
                return "processes"
            return nodeid if file.endswith("test_proof.py") else file

    return OnePool(config, log)


@functools.cache
def _with_ranks(file: str) -> frozenset[str]:
    """Names of the tests of a file that take the fixture `ranks`."""
    text = (ROOT / file).read_text()
    return frozenset(re.findall(r"^def (test_\w+)\([^)]*\branks\b", text, re.MULTILINE))


class SteadyPool(Pool):
    """A pool that runs a call once more when a rank died inside gloo.

    torch 2.13's gloo seldom corrupts its heap ("malloc(): unaligned tcache chunk", raised in its own worker thread)
    when many more ranks than cores keep several groups busy. That kills the rank with SIGABRT or SIGSEGV, which no
    Python code of ours can do; every other failure counts at once.
    """

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        try:
            return super().run(fn, *args, **kwargs)
        except RankError as error:
            if not any(name in str(error) for name in ("SIGABRT", "SIGSEGV")):
                raise
            print(f"once more, after {error}")
            return super().run(fn, *args, **kwargs)


@pytest.fixture(autouse=True)
def _no_group_left() -> Iterator[None]:
    """A rank alone makes a process group of its own, which the next test's `compile` would take for its ranks."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """Eight local gloo ranks for the session: `ranks.run(fn, *args, ranks=n)` gives the results by rank.

    They start at the first call, as many as it needs, so a session that uses none pays nothing.
    """
    with SteadyPool(8, preload=PRELOAD) as pool:
        yield pool
