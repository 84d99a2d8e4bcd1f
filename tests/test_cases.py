"""Every case of a file, on each of its grids: `pytest tests/test_cases.py --cases FILE`.

Without `--cases`, our own `tests/cases/bundled.jsonl`, and the casebook beside the checkout
(`../shared/cases/cases.jsonl`) where there is one; on the last grid of each case only, the others are slow. Simulated
by default; `-m ""` adds real ranks, on the grids (2, 2, 2) and (1, 2, 4) and, for errors, on a case's own.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from autopar3d.ranks.launch import Pool

from .cases.rows import Case, load
from .cases.runner import check_on_ranks, check_simulated

HERE = Path(__file__).parent
BUNDLED = HERE / "cases" / "bundled.jsonl"
SHARED = HERE.parent.parent / "shared" / "cases" / "cases.jsonl"

REAL_GRIDS = ((2, 2, 2), (1, 2, 4))
# Real ranks by default: one of each kind that only they can show.
QUICK = {"B04-clip_norms": (1, 2, 1), "B05-inf_on_one_rank": (1, 2, 1), "B09-data_by_rank": (2, 1, 1)}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    given = metafunc.config.getoption("--cases")
    files = [Path(given)] if given else [BUNDLED, *([SHARED] if SHARED.exists() else [])]
    if "case" not in metafunc.fixturenames:
        return
    pairs, real = [], "ranks" in metafunc.fixturenames
    for file in files:
        for case in load(file):
            for grid in _real_grids(case) if real else case.grids:
                slow = QUICK.get(case.id) != grid if real else not given and grid != case.grids[-1]
                marks = [pytest.mark.slow] if slow else []
                pairs.append(pytest.param(case, grid, marks=marks, id=f"{case.id}-{','.join(map(str, grid))}"))
    metafunc.parametrize(("case", "grid"), pairs)


def _real_grids(case: Case) -> list[tuple[int, ...]]:
    """The grids on which a case runs on at most eight real ranks."""
    if case.expect_error:
        return [g for g in case.grids if (case.world or math.prod(g)) in range(2, 9)]
    quick = [QUICK[case.id]] if case.id in QUICK else []
    return [*quick, *REAL_GRIDS] if case.grids != ((1, 1, 1),) else [(1, 1, 1)]


def test_simulated(case: Case, grid: tuple[int, ...]) -> None:
    problems = check_simulated(case, grid)
    assert not problems, "\n".join(problems)


@pytest.mark.timeout(600)
def test_on_ranks(ranks: Pool, case: Case, grid: tuple[int, ...]) -> None:
    world = case.world or math.prod(grid)
    for rank, problems in enumerate(ranks.run(check_on_ranks, case, grid, ranks=world, timeout=280)):
        assert not problems, f"rank {rank}:\n" + "\n".join(problems)
