"""The rule table is proved numerically: every rule, every legal placement, against the plain op (`autopar3d.proof`).

Axes of one length differ by name alone, so of placements that are equal but for the names one is tried; `-m slow` tries
them all. What a compiled model does beyond the local program (differentiation into graphs) is the same for all
placements; each rule goes through it in one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from autopar3d.errors import RuleError
from autopar3d.proof import Sample, prove, prove_padded, prove_rule
from autopar3d.rules import RULES
from autopar3d.search.strategies import Strategy

from .samples import samples

SAMPLES = samples()
CUBE, PLANE = (2, 2, 2), (2, 3, 1)


def _name(sample: Sample) -> str:
    return str(sample.op).removeprefix("aten.").removesuffix(".default")


every_sample = pytest.mark.parametrize("sample", SAMPLES, ids=[f"{_name(s)}-{i}" for i, s in enumerate(SAMPLES)])


def _up_to_names(found: list[Strategy]) -> list[Strategy]:
    """Those that use x before y before z: any other becomes one of them when axes of one length swap names."""

    def axes(strategy: Strategy) -> str:
        return "".join(dict.fromkeys(a for _, axes in strategy.assigned for a in axes))

    return [s for s in found if "xyz".startswith(axes(s))]


def _one(found: list[Strategy]) -> list[Strategy]:
    """One with two axes on a factor, or else one that uses the most."""
    return [max(found, key=lambda s: (any(len(axes) > 1 for _, axes in s.assigned), len(s.axes)))]


def test_every_rule_has_a_sample() -> None:
    assert set(RULES) - {s.op for s in SAMPLES} == set()


@every_sample
def test_rule(sample: Sample) -> None:
    assert prove(sample, [CUBE], pick=_up_to_names) and prove(sample, [PLANE])


@every_sample
def test_rule_differentiated_into_graphs(sample: Sample) -> None:
    prove(sample, [CUBE], pick=_one, traced=True)


@every_sample
def test_pads_do_not_leak(sample: Sample) -> None:
    """Where sizes are such that the grid does not divide them."""
    prove_padded(sample, pick=_up_to_names)


@pytest.mark.slow
@every_sample
def test_rule_under_all_names(sample: Sample) -> None:
    prove(sample, [CUBE])


@pytest.mark.slow
@every_sample
def test_pads_differentiated_into_graphs(sample: Sample) -> None:
    prove_padded(sample, pick=_one, traced=True)


# -- the proof itself ------------------------------------------------------------------------------------------------


@pytest.fixture
def cumprod() -> Iterator[Any]:
    """An op that has no rule, for as long as a test lasts."""
    op = torch.ops.aten.cumprod.default
    before = RULES.pop(op, None)
    yield op
    RULES.pop(op, None)
    if before is not None:
        RULES[op] = before


def test_a_wrong_rule_is_found(cumprod: Any) -> None:
    x = torch.rand(4, 6, dtype=torch.float64)
    with pytest.raises(RuleError, match="has no rule"):
        prove_rule(cumprod, x, 1)
    RULES.rule(cumprod, text="... -> ...")  # the products along dim 1 need all of it
    with pytest.raises(AssertionError, match=r"cumprod.default on .* with .*: result 0 on rank"):
        prove_rule(cumprod, x, 1)
    del RULES[cumprod]
    RULES.rule(cumprod, text="... p -> ... p | p")
    assert prove_rule(cumprod, x, 1) > 5
