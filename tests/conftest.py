"""Fixtures that every test may use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from autopar3d.launch import Pool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """Eight local gloo ranks for the session: `ranks.run(fn, *args, ranks=n)` gives the results by rank.

    They start at the first call, as many as it needs, so a session that uses none pays nothing.
    """
    with Pool(8) as pool:
        yield pool
