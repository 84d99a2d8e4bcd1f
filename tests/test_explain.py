"""Why an op runs as it does, decisions that are given, and plans compared and carried out from files."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import autopar3d
from autopar3d.errors import PlanError
from autopar3d.layout import Layout
from autopar3d.plan import Plan
from autopar3d.search import padding
from autopar3d.search.constraints import Pins, Wish
from tests.models import MLP, MODELS

GRID = (2, 2, 2)


def mlp() -> MLP:
    torch.manual_seed(0)
    return MLP()


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(16, 64), torch.randint(0, 16, (16,))


def planned(**how: Any) -> Plan:
    return autopar3d.plan(mlp(), GRID, batch(), **how)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned()


# -- explain -----------------------------------------------------------------------------------------------------------


def test_each_strategy_is_the_best_plan_with_it(plan: Plan) -> None:
    """The totals are those of searches in which that strategy alone is allowed."""
    from autopar3d.step import choices

    found = plan.explain("up")
    assert found.op == "linear" and found.chosen.total == pytest.approx(plan.objective, rel=1e-12)
    assert found.choices[0].total == found.chosen.total and found.chosen.extra == 0.0
    assert {c.strategy for c in found.choices} >= {"b0:x n:yz", "b0:xyz", "b0:x k:y n:z"}
    behind: Any = plan.choices
    step = behind.step
    for choice in found.choices[::40]:
        pins = Pins(strategies={"linear": choice.strategy})
        grid, hardware = step.decisions.grid, step.decisions.hardware
        alone = choices(step.program, step.factors, grid, hardware, behind.options, None, pins).run()
        assert alone.cost == pytest.approx(choice.total, rel=1e-9)
        assert str(alone.strategies["linear"]) == choice.strategy
        others = {n: str(s) for n, s in alone.strategies.items() if str(s) != plan.strategies[n] and n != "linear"}
        assert not (others and not choice.changes and not choice.others)


def test_costs_add_up_to_what_the_plan_counts() -> None:
    """The collectives of the planned strategy of a linear hold those that the plan lists for it."""
    plan = planned(scheme="3d")
    for module in ("up", "down", "head"):
        chosen = plan.explain(module).chosen
        assert chosen.communication > 0 and chosen.compute > 0 and chosen.memory > 0
        listed = next(o for o in plan.ops if o.module == module)
        for s in listed.sent:
            mine = sum(c.bytes for c in chosen.collectives if (c.axis, c.kind, c.phase) == (s.axis, s.kind, s.phase))
            assert mine >= s.bytes * (1 - 1e-12), (module, s)


def test_what_explain_prints(plan: Plan) -> None:
    text = str(plan.explain("down"))
    assert text.startswith("down: linear_1 (aten.linear.default), ") and "strategies, * is planned" in text
    assert max(map(len, text.split("\n"))) <= 120
    assert " * " in text and "more, up to" in text


def test_explain_names_what_there_is(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="called 'upp'; near are up"):
        plan.explain("upp")
    plan.save(tmp_path / "plan.json")
    for bare in (Plan.load(tmp_path / "plan.json"), copy.deepcopy(plan)):
        assert bare == plan
        with pytest.raises(PlanError, match="not in a plan's file"):
            bare.explain("up")


# -- constraints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "constraints",
    [
        {"up.weight": "[z, y]", "*.bias": "[x]"},
        {"down.weight": "[-, -]", "up": "[x, zy]"},
        {"*.weight": Layout.parse("[y, -]"), "head": "[y, -] +{x,z}"},
    ],
)
def test_constraints_hold_and_train_right(constraints: dict[str, str | Layout]) -> None:
    par = autopar3d.simulate(mlp(), GRID, batch(), constraints=constraints)
    stored = {name: p.layout for p in par.plan.parameters for name in p.names}
    results = {o.module: o.layout for o in par.plan.ops}
    if "up.weight" in constraints:
        assert stored["up.weight"] == "[z, y]" and stored["up.bias"] == stored["head.bias"] == "[x]"
    elif "up" in constraints:
        assert stored["down.weight"] == "[-, -]" and results["up"] == "[x, zy]"
    else:
        assert stored["down.weight"] == stored["head.weight"] == "[y, -]" and results["head"] == "[y, -] +{x,z}"
    assert par.plan.objective >= planned().objective
    one = mlp()
    x, labels = batch()
    one(x, labels).backward()
    par(x, labels).backward()
    for (name, a), (_, b) in zip(one.named_parameters(), par.named_parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, msg=name)


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        ({"*.fc.weight": "[z, y]"}, r"'\*.fc.weight': '\[z, y\]': no parameter and no module .* did you mean"),
        ({"up.weight": "[z, y"}, r"'up.weight': '\[z, y' is not a layout"),
        ({"up.weight": "[z]"}, r"up.weight, 256x64: the layout has 1 dims, the tensor has 2"),
        ({"up.*": "[z]", "*.bias": "[y]"}, r"'\*.bias': '\[y\]' and 'up.\*': '\[z\]' disagree about up.bias"),
        ({"up": "[xyz, -] +{x}"}, "axis x is used 2 times"),
        ({"up.weight": 3}, r"'up.weight': 3 is no glob with a layout"),
        (["up.weight"], r"constraints= is a list; it must be a dict of layouts by glob"),
        ({"up": "[x, -] +{y,z}", "head.bias": "[-]"}, None),
        ({"down": "[-, x]", "down.weight": "[y, z]"}, r"the result of down, 16x64: the op leaves it in one of \d+ lay"),
    ],
)
def test_conflicts_are_named(constraints: Any, message: str | None) -> None:
    if message is None:
        planned(constraints=constraints)
        return
    with pytest.raises(PlanError, match=message):
        planned(constraints=constraints)


def test_a_constraint_that_does_not_divide() -> None:
    x, labels = batch()
    with pytest.raises(PlanError, match=r"up.weight, 256x64: dim 1 over y: 64 % 3 = 1"):
        autopar3d.plan(mlp(), (1, 3, 2), (x, labels), constraints={"up.weight": "[z, y]"})


# -- plans from files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "gpt", "llama"])
def test_a_plan_is_carried_out(name: str, tmp_path: Path) -> None:
    """What was planned otherwise than the planner would, saved and loaded, gives the same graphs."""
    make_model, make_inputs = MODELS[name]
    args, kwargs = make_inputs(torch.float32)
    first = autopar3d.plan(make_model(torch.float32), GRID, args, kwargs, scheme="3d")
    first.save(tmp_path / "plan.json")
    again = autopar3d.plan(make_model(torch.float32), GRID, args, kwargs, plan=Plan.load(tmp_path / "plan.json"))
    assert again.hash == first.hash
    assert not again.diff(replace(first, scheme=again.scheme))
    own = autopar3d.plan(make_model(torch.float32), GRID, args, kwargs)
    assert own.hash != first.hash and own.diff(first)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("grid", None, "grid is None"),
        ("grid", [2, 2], "grid is"),
        ("grid", [2, 0, 2], "grid axis y is 0"),
        ("storage", "x", "storage is 'x'"),
        ("strategies", {"linear": []}, "is .*, which is no str"),
        ("parameters", "x", "damaged"),
        ("seconds", None, "seconds is None, which is no float"),
        ("lanes", 0, "lanes is 0, which is less than 1"),
    ],
)
def test_a_file_that_was_edited_to_nonsense_is_refused(plan: Plan, field: str, value: Any, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        Plan.from_dict({**plan.to_dict(), field: value})


def test_a_plan_with_pads_is_carried_out() -> None:
    model = nn.Sequential(nn.Linear(62, 50, bias=False), nn.GELU(), nn.Linear(50, 62, bias=False))
    x = torch.randn(15, 62)
    with mock.patch.multiple(padding, _LEAST_GAIN=-1e9, _idle=lambda *_: True):  # whatever it costs
        first = autopar3d.plan(model, (1, 1, 4), x)
    assert len(first.pads) > 1, "the example is meant to be padded"
    again = autopar3d.plan(model, (1, 1, 4), x, plan=Plan.from_dict(first.to_dict()))
    assert again.hash == first.hash
    wrong = replace(first, pads=(("nothing", 0, 52),))
    with pytest.raises(PlanError, match="pads what this model does not have: atom 0 of nothing to 52"):
        autopar3d.plan(model, (1, 1, 4), x, plan=wrong)


def test_a_module_from_a_plan_trains_right(plan: Plan) -> None:
    par = autopar3d.simulate(mlp(), GRID, batch(), plan=plan)
    assert par.plan.hash == plan.hash
    x, labels = batch()
    one = mlp()
    torch.testing.assert_close(par(x, labels), one(x, labels))
    # Another shape is planned anew, with the parameters as they are.
    torch.testing.assert_close(par(x[:8], labels[:8]), one(x[:8], labels[:8]))


def test_plans_that_do_not_fit(plan: Plan, tmp_path: Path) -> None:
    other = nn.Sequential(nn.Linear(64, 8))
    with pytest.raises(PlanError, match=r"parameter 0.weight of the model is not in the plan"):
        autopar3d.plan(other, GRID, torch.randn(16, 64), plan=plan)
    with pytest.raises(PlanError, match=r"the plan is for grid \(2, 2, 2\), this is \(4, 2, 1\)"):
        autopar3d.plan(mlp(), (4, 2, 1), batch(), plan=plan)
    with pytest.raises(PlanError, match="made with regather='all', this call has 'none'"):
        planned(plan=plan, regather="none")
    with pytest.raises(PlanError, match="parameter head.weight is 16x64 in the plan, 32x64 here"):
        autopar3d.plan(MLP(classes=32), GRID, batch(), plan=plan)
    plain = plan.to_dict()
    plain["strategies"]["linear"] = "m:x n:y q:z"
    with pytest.raises(PlanError, match=r"linear \(aten.linear.default\) has no strategy 'm:x n:y q:z' here"):
        planned(plan=Plan.from_dict(plain))
    (tmp_path / "plan.json").write_text(json.dumps([1]))
    with pytest.raises(PlanError, match="is no plan: it holds a list"):
        Plan.load(tmp_path / "plan.json")
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(PlanError, match="is no plan"):
        Plan.load(tmp_path / "plan.json")


def test_an_edited_plan_is_carried_out(plan: Plan) -> None:
    """Plans may be edited by hand: the layout of a weight, here."""
    node = next(n for n, text in plan.storage.items() if "up_weight" in n)
    plain = plan.to_dict()
    plain["storage"][node] = "[xyz, -]" if plan.storage[node] != "[xyz, -]" else "[-, xyz]"
    edited = planned(plan=Plan.from_dict(plain))
    assert edited.storage[node] == plain["storage"][node] != plan.storage[node]
    (change,) = [c for c in plan.diff(edited).parameters if c[0] == "up.weight"]
    assert change == ("up.weight", plan.storage[node], edited.storage[node])
    assert "Parameters stored otherwise" in str(plan.diff(edited))
    assert str(plan.diff(plan)) == "The plans are the same." and not plan.diff(plan)


def test_pins_are_plain() -> None:
    assert Pins(storage={"a": Wish(Layout.parse("[x]"), "test")}).of_op("a") == (None, None)
