"""Fixtures that every test may use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from autopar3d.launch import Pool

# Two cores serve up to nine processes here: threads inside an op would only get in each other's way.
torch.set_num_threads(1)

# What the ranks import before they are forked, so that it is imported once and not eight times.
PRELOAD = ("torch.distributed.tensor", "torch.distributed.checkpoint", "hypothesis", "pytest", "transformers")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """Eight local gloo ranks for the session: `ranks.run(fn, *args, ranks=n)` gives the results by rank.

    They start at the first call, as many as it needs, so a session that uses none pays nothing.
    """
    with Pool(8, preload=PRELOAD) as pool:
        yield pool
