"""Random models of `tests.fuzz`, some each time; and those that once failed."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz import GRIDS, NO_SHRINKING, Recipe, check, recipes


@settings(
    max_examples=30, deadline=None, phases=NO_SHRINKING, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(recipe=recipes(), grid=st.sampled_from(GRIDS))
def test_random_models(recipe: Recipe, grid: tuple[int, int, int]) -> None:
    check(recipe, grid)
