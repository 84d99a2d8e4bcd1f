"""Fixtures that every test may use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from autopar3d.errors import RankError
from autopar3d.launch import Pool

# Two cores serve up to nine processes here: threads inside an op would only get in each other's way.
torch.set_num_threads(1)

# What the ranks import before they are forked, so that it is imported once and not eight times.
PRELOAD = ("torch.distributed.tensor", "torch.distributed.checkpoint", "hypothesis", "pytest", "transformers")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cases", metavar="FILE", help="run tests/test_cases.py on the cases of this file")


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


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """Eight local gloo ranks for the session: `ranks.run(fn, *args, ranks=n)` gives the results by rank.

    They start at the first call, as many as it needs, so a session that uses none pays nothing.
    """
    with SteadyPool(8, preload=PRELOAD) as pool:
        yield pool
