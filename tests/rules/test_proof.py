"""The rule table is proved numerically: every rule, every legal placement, against the plain op.

A placement is forced, the real passes make the local program, and all ranks run in lock-step. Results and
gradients must be the plain op's, and the emitted collectives must be those that the rule and the changes of
layout announce. Of many placements a fixed sample is taken: `LIMIT`, or `SLOW_LIMIT` if slow.
"""

from __future__ import annotations

import random

import pytest

from autopar3d.grid import Grid
from autopar3d.padding import classes, pad
from autopar3d.rules import RULES
from autopar3d.strategies import Strategy

from .one_op import OneOp, Sample
from .samples import samples

SAMPLES = samples()
GRIDS = (Grid(2, 2, 2), Grid(2, 3, 1))
LIMIT, SLOW_LIMIT = 3, 60


def _name(sample: Sample) -> str:
    return str(sample.op).removeprefix("aten.").removesuffix(".default")


def _chosen(found: list[Strategy], limit: int) -> list[Strategy]:
    """All, or a fixed sample with the first, the most sharded, and one with two axes on a factor."""
    if len(found) <= limit:
        return found
    nested = [s for s in found if any(len(axes) > 1 for _, axes in s.assigned)]
    chosen = [found[0], max(found, key=lambda s: len(s.axes)), *nested[-1:]]
    rest = [s for s in found if s not in chosen]
    return chosen + random.Random(0).sample(rest, limit - len(chosen))


def _prove(sample: Sample, limit: int) -> None:
    one = OneOp(sample)
    for grid in GRIDS:
        for strategy in _chosen(one.strategies(grid), limit):
            try:
                one.check(grid, strategy)
            except Exception as error:
                raise AssertionError(f"{sample.op} on {grid} with {strategy}: {error}") from error


def test_every_rule_has_a_sample() -> None:
    assert set(RULES) - {s.op for s in SAMPLES} == set()


@pytest.mark.parametrize("number", range(len(SAMPLES)), ids=lambda i: f"{_name(SAMPLES[i])}-{i}")
def test_rule(number: int) -> None:
    _prove(SAMPLES[number], LIMIT)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(SAMPLES)), ids=lambda i: f"{_name(SAMPLES[i])}-{i}")
def test_rule_at_length(number: int) -> None:
    _prove(SAMPLES[number], SLOW_LIMIT)


# -- sizes that the grid does not divide -----------------------------------------------------------------------------


def _prove_padded(sample: Sample, limit: int) -> None:
    """With all factors longer that may be, and where there is time with each of them alone."""
    one, grid = OneOp(sample), Grid(2, 2, 1)
    lengths = {c: (c.length // grid.size + 1) * grid.size for c in classes(one.factors) if c.length > 1}
    if not lengths:
        return
    alone = [{c: n} for c, n in lengths.items()] if limit > LIMIT else []
    for way in [lengths, *alone]:
        factors = pad(one.factors, way)
        spec = factors.specs[one.node]
        found = one.strategies(grid, factors)
        sharded = [s for s in found if any(f in spec.true for f, _ in s.assigned)]
        nested = [s for s in sharded if any(f in spec.true and len(axes) > 1 for f, axes in s.assigned)]
        for strategy in [*nested[-1:], *([found[0], *sharded[: limit - 2]] if limit > LIMIT else [])]:
            try:
                one.check(grid, strategy, factors)
            except Exception as error:
                raise AssertionError(f"{sample.op} with {dict(spec.true)} padded, {strategy}: {error}") from error


@pytest.mark.parametrize("number", range(len(SAMPLES)), ids=lambda i: f"{_name(SAMPLES[i])}-{i}")
def test_pads_do_not_leak(number: int) -> None:
    _prove_padded(SAMPLES[number], LIMIT)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(SAMPLES)), ids=lambda i: f"{_name(SAMPLES[i])}-{i}")
def test_pads_do_not_leak_at_length(number: int) -> None:
    _prove_padded(SAMPLES[number], 8)
