"""Costs in numbers and in symbols are one account, and it is that of the planner and of the graphs."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import sympy
import torch

import autopar3d
from autopar3d.cost import Cost, collective_seconds, compute_seconds, larger, per_unit
from autopar3d.errors import PlanError
from autopar3d.plan import Plan
from tests.models import MODELS

FIELDS = ("seconds", "compute", "communication", "exposed", "bytes", "flops", "memory")


@functools.cache
def planned(name: str, scheme: str = "3d", regather: str = "all") -> Plan:
    make_model, make_inputs = MODELS[name]
    args, kwargs = make_inputs(torch.float32)
    how: dict[str, Any] = {"scheme": scheme, "regather": regather, "overlap": False}
    return autopar3d.plan(make_model(torch.float32), (2, 2, 2), args, kwargs, **how)


def test_functions_take_numbers_arrays_and_symbols() -> None:
    f, m, a, b = sympy.symbols("f m a b", positive=True)
    compute, sent = compute_seconds(f, m, a, b), collective_seconds(f, m, a, b)
    assert compute == sympy.Max(a * f, b * m) and sent == a * f + b * m
    points = np.array([[1.0, 8.0, 2.0, 3.0], [5.0, 2.0, 0.5, 0.25]])
    for found, function in ((compute, compute_seconds), (sent, collective_seconds)):
        by_array = function(*points.T)
        for value, point in zip(by_array, points, strict=True):
            assert value == function(*point) == float(found.subs(dict(zip((f, m, a, b), point, strict=True))))
    assert larger(2, 3) == 3 and larger(np.array([1, 5]), 3).tolist() == [3, 5]
    assert per_unit(float("inf")) == 0.0 and per_unit(4.0) == 0.25


@pytest.mark.parametrize(
    "name, scheme, regather", [("mlp", "3d", "all"), ("mlp", "auto", "none"), ("gpt", "3d", "all")]
)
def test_the_account_is_the_planners_and_the_graphs(name: str, scheme: str, regather: str) -> None:
    plan = planned(name, scheme, regather)
    cost = plan.cost()
    assert cost.compute + sum(cost.communication.values()) == pytest.approx(plan.objective, rel=1e-9)
    sent = dict.fromkeys("xyz", 0.0)
    for (axis, _), n in plan.bytes.items():
        sent[axis] += n
    assert cost.bytes == pytest.approx(sent, rel=1e-12)
    assert cost.flops == pytest.approx(plan.flops, rel=1e-12)
    assert cost.seconds == pytest.approx(cost.compute + cost.exposed, rel=1e-12)
    counted = sum(plan.memory[k] for k in ("parameters", "gradients", "optimizer", "activations"))
    assert cost.memory == pytest.approx(counted, rel=0.1)
    for field in ("compute", "flops"):
        assert sum(getattr(c, field) for c in cost.ops.values()) == pytest.approx(getattr(cost, field), rel=1e-9)


@pytest.mark.parametrize("name", ["mlp", "gpt", pytest.param("llama", marks=pytest.mark.slow)])
def test_symbols_substitute_exactly(name: str) -> None:
    plan = planned(name)
    symbolic, cost = plan.symbolic_cost(), plan.cost()
    back = symbolic.at()
    for field in FIELDS:
        assert getattr(back, field) == getattr(cost, field), field  # to the last bit
    assert back.ops.keys() == cost.ops.keys()
    for op in cost.ops:
        assert back.ops[op] == cost.ops[op], op
    names = {str(s) for s in symbolic.values}
    assert names >= {"batch", "hidden", "gx", "gy", "gz", "alpha_x", "beta_z", "gamma_float32", "mu"}
    assert ("sequence" in names) == (name != "mlp")
    assert {"heads", "kv_heads", "group"} & names == {"gpt": {"heads"}, "llama": {"kv_heads", "group"}}.get(name, set())
    assert {str(s) for s in symbolic.flops.free_symbols} >= {"batch", "hidden", "gx"}


def test_symbols_hold_for_other_sizes() -> None:
    """The same decisions carried out on a larger batch cost what the formulas say."""
    make_model, make_inputs = MODELS["gpt"]
    args, kwargs = make_inputs(torch.float32)
    double = [torch.cat([a, a]) if isinstance(a, torch.Tensor) else a for a in args]
    more = {k: torch.cat([v, v]) if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
    plan = planned("gpt")
    larger_batch = autopar3d.plan(
        make_model(torch.float32), (2, 2, 2), tuple(double), more, plan=plan, overlap=False, scheme="3d"
    )
    batch = next(v for s, v in plan.symbolic_cost().values.items() if str(s) == "batch")
    said = plan.symbolic_cost().at(batch=2 * batch)
    found = larger_batch.cost()
    assert said.bytes == pytest.approx(found.bytes, rel=1e-12)
    assert said.flops == found.flops
    assert said.compute == pytest.approx(found.compute, rel=1e-9)


def test_costs_need_the_graph() -> None:
    with pytest.raises(PlanError, match="not in a plan's file"):
        replace(planned("mlp"), choices=None).cost()
    with pytest.raises(KeyError, match="no symbol depth; there are batch"):
        planned("mlp").symbolic_cost().at(depth=3)
    assert isinstance(planned("mlp").cost(), Cost) and "bytes x" in str(planned("mlp").cost())
