"""Random models of `tests.fuzz`, some each time; and those that once failed."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz import GRIDS, NO_SHRINKING, Recipe, check, recipes

FAILED = {
    # -inf in the pads of a log_softmax, and its reader's derivative there
    "log_softmax of two": (Recipe((2,), (("scale", 0, 3, 5), ("softmax", 2, 0, 4))), (1, 2, 4)),
    "layer_norm of a row alone": (Recipe((2,), (("norm", 0, 0, 0),)), (2, 2, 2)),
}


@pytest.mark.parametrize("name", FAILED)
def test_what_once_failed(name: str) -> None:
    check(*FAILED[name])


@settings(
    max_examples=30, deadline=None, phases=NO_SHRINKING, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(recipe=recipes(), grid=st.sampled_from(GRIDS))
def test_random_models(recipe: Recipe, grid: tuple[int, int, int]) -> None:
    check(recipe, grid)
