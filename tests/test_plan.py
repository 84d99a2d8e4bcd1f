"""Plans: what they say is what the emitted graphs do, and they print, hash, save and load."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import autopar3d
from autopar3d.collectives import collectives
from autopar3d.errors import PlanError
from autopar3d.grid import Grid
from autopar3d.hardware import PROFILES
from autopar3d.passes.canonicalize import canonicalize
from autopar3d.passes.trace import trace
from autopar3d.plan import Plan
from autopar3d.program import Program
from autopar3d.reports.report import make_plan, saved_bytes
from autopar3d.reports.tables import fold, wrapped
from autopar3d.schedule import scheduled
from autopar3d.step import Options, Step, build_step
from tests.models import MODELS

Case = tuple[str, tuple[int, int, int], str, str, str, str]

DIVIDING = [(2, 2, 2), (8, 1, 1), (1, 8, 1)]
OTHERS = [(1, 1, 8), (4, 2, 1), (1, 2, 2), (4, 4, 4), (2, 3, 4), (1, 1, 1)]
WAYS = [  # scheme, regather, outputs, inputs
    ("auto", "all", "auto", "global"),
    ("3d", "weights", "auto", "sharded"),
    ("auto", "none", "global", "global"),
    ("zero3x1d", "all", "sharded", "global"),
]
SLOW_TO_PLAN = ("gpt2", "llama", "bert", "t5", "vit")  # on three axes

# Every model once, and the quick ones in every way; the rest takes minutes.
QUICK: list[Case] = [
    *((name, (8, 1, 1) if name in SLOW_TO_PLAN else (2, 2, 2), *WAYS[0]) for name in MODELS),
    *(("mlp", grid, *way) for grid in (*DIVIDING, (2, 3, 4), (1, 1, 1)) for way in WAYS),
    *(("gpt", grid, *way) for grid, way in zip(((8, 1, 1), (1, 8, 1), (2, 3, 4)), WAYS[1:], strict=True)),
    ("resnet", (1, 2, 2), *WAYS[1]),
]
SLOW: list[Case] = [
    case
    for name in MODELS
    for grid in (*DIVIDING, *OTHERS)
    for way in WAYS
    if (case := (name, grid, *way)) not in QUICK
]
ALL = [*QUICK, *(pytest.param(*c, marks=pytest.mark.slow) for c in SLOW)]
PARTS = "name, grid, scheme, regather, outputs, inputs"


@functools.cache
def traced(name: str) -> Program:
    make_model, make_inputs = MODELS[name]
    return canonicalize(trace(make_model(torch.float32), *make_inputs(torch.float32)))


@functools.cache
def planned(
    name: str,
    grid: tuple[int, int, int],
    scheme: str = "auto",
    regather: str = "all",
    outputs: str = "auto",
    inputs: str = "global",
) -> tuple[Step, Plan]:
    options = Options(scheme, inputs, outputs, regather)
    step = build_step(traced(name), Grid.of(grid), PROFILES["cpu"], options)
    return step, make_plan(step, options=options)


def total(plan_part: object) -> Counter[tuple[str, str, str]]:
    """Bytes by (axis, kind, phase) of lines with `sent`."""
    found: Counter[tuple[str, str, str]] = Counter()
    for line in plan_part:  # type: ignore[attr-defined]
        for s in line.sent:
            found[s.axis, s.kind, s.phase] += s.bytes  # type: ignore[assignment]
    return found


# -- what it says is what runs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(PARTS, ALL)
def test_bytes_are_those_of_the_emitted_graphs(
    name: str, grid: tuple[int, int, int], scheme: str, regather: str, outputs: str, inputs: str
) -> None:
    step, plan = planned(name, grid, scheme, regather, outputs, inputs)
    for graph, phases in ((step.runs.forward, ("forward",)), (step.runs.backward, ("backward", "regather"))):
        emitted: dict[tuple[str, str], float] = {}
        calls: Counter[str] = Counter()
        assert graph is not None
        for c in collectives(graph):
            emitted[c.axis, c.kind] = emitted.get((c.axis, c.kind), 0.0) + c.bytes
            calls[c.kind] += 1
        assert plan.bytes_in(*phases) == pytest.approx(emitted, abs=1e-6), phases
        said: Counter[str] = Counter()
        for s in plan.traffic:
            if s.phase in phases:
                said[s.kind] += s.calls
        assert said == calls


@pytest.mark.parametrize(PARTS, ALL)
def test_the_objective_is_the_time_of_the_emitted_collectives(
    name: str, grid: tuple[int, int, int], scheme: str, regather: str, outputs: str, inputs: str
) -> None:
    """Each is priced as often as it is emitted: a copy that several ops read once, forward and backward."""
    step, _ = planned(name, grid, scheme, regather, outputs, inputs)
    assert step.runs.backward is not None
    seconds = 0.0
    for c in (*collectives(step.runs.forward), *collectives(step.runs.backward)):
        link = step.decisions.hardware.link(c.axis, step.decisions.grid)
        seconds += link.latency + c.bytes / link.bandwidth
    assert step.decisions.cost - step.decisions.compute == pytest.approx(seconds, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(PARTS, QUICK)
def test_every_byte_belongs_to_one_op_or_output(
    name: str, grid: tuple[int, int, int], scheme: str, regather: str, outputs: str, inputs: str
) -> None:
    _, plan = planned(name, grid, scheme, regather, outputs, inputs)
    expected = {(s.axis, s.kind, s.phase): s.bytes for s in plan.traffic}
    assert dict(total(plan.ops) + total(plan.outputs)) == pytest.approx(expected, abs=1e-6)
    # The bytes of parameters are among those of the ops.
    assert all(total(plan.parameters)[key] <= n + 1e-6 for key, n in total(plan.ops).items())


@pytest.mark.parametrize(
    "name, grid",
    [
        pytest.param(n, g, marks=() if (n, g, *WAYS[0]) in QUICK or n == "gpt" else pytest.mark.slow)
        for n in MODELS
        for g in DIVIDING
    ],
)
def test_flops_are_shared_by_all_ranks(name: str, grid: tuple[int, int, int]) -> None:
    _, plan = planned(name, grid)
    _, one = planned(name, (1, 1, 1))
    assert plan.flops <= 1.02 * one.flops / plan.devices
    assert one.flops == pytest.approx(one.ideal_flops, rel=1e-6)
    assert plan.ideal_flops * plan.devices == pytest.approx(one.flops, rel=1e-6)
    assert sum(o.flops for o in plan.ops) == pytest.approx(plan.forward_flops, rel=1e-6)


def test_flops_of_a_linear_stack_by_hand() -> None:
    _, plan = planned("mlp", (1, 1, 1))
    forward = 2 * 8 * (64 * 256 + 256 * 64 + 64 * 16)
    # The first linear's input has no gradient.
    assert (plan.forward_flops, plan.backward_flops) == (forward, 2 * forward - 2 * 8 * 64 * 256)


def test_repeated_work_is_counted_and_said() -> None:
    _, plan = planned("mlp", (2, 3, 4))  # 3 divides nothing
    assert plan.flops == pytest.approx(3 * plan.ideal_flops)
    assert all(o.roles.endswith("repeat:y") for o in plan.ops if o.flops)
    assert {"up.weight", "down.weight", "head.bias"} <= set(plan.whole)
    assert any(r.op == "linear" and r.axes == "y" and "divisible" in r.why for r in plan.repeated)


@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_parameters_gradients_and_optimizer_are_one_in_p(name: str) -> None:
    _, plan = planned(name, (2, 2, 2))
    _, one = planned(name, (1, 1, 1))
    for part in ("parameters", "gradients", "optimizer"):
        assert plan.memory[part] * 8 == one.memory[part]
    assert plan.memory["optimizer"] == 2 * plan.memory["parameters"]
    sizes = [p.numel() * 4 for p in MODELS[name][0](torch.float32).parameters()]
    assert one.memory["parameters"] == sum(sizes)


def test_saved_bytes_count_each_storage_once_and_no_argument() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.ops.aten.relu.default, (x,))
    t = graph.call_function(torch.ops.aten.t.default, (y,))
    v = graph.call_function(torch.ops.aten.t.default, (x,))
    z = graph.call_function(torch.ops.aten.sum.default, (y,))
    graph.output((z, y, t, v, x))
    with torch._subclasses.fake_tensor.FakeTensorMode():
        x.meta["val"] = torch.empty(4, 8)
        y.meta["val"] = torch.empty(4, 8)
        t.meta["val"], v.meta["val"] = y.meta["val"].t(), x.meta["val"].t()
        z.meta["val"] = torch.empty(())
    assert saved_bytes(torch.fx.GraphModule(torch.nn.Module(), graph), 1) == 4 * 8 * 4


def test_tied_parameters_are_one_line_with_all_their_names() -> None:
    _, plan = planned("gpt2", (8, 1, 1))
    assert ("transformer.wte.weight", "lm_head.weight") in [p.names for p in plan.parameters]


def test_roles_of_the_paper() -> None:
    _, plan = planned("mlp", (2, 2, 2), *WAYS[1])
    roles = {o.module: o.roles for o in plan.ops if o.flops}
    # Alternating, so that no activation changes its layout in between.
    assert roles == {"up": "a=z b=x c=y", "down": "a=y b=x c=z", "head": "a=z b=x c=y"}
    up = next(p for p in plan.parameters if p.names == ("up.weight",))
    assert (up.gathered, up.reduced) == (("x",), ("x",))


def test_how_sure_the_planner_is_is_said() -> None:
    _, plan = planned("mlp", (2, 2, 2))
    assert plan.exact and plan.bound == plan.objective and "proven minimal" in str(plan)
    unsure = Plan.from_dict({**plan.to_dict(), "exact": False, "bound": plan.objective / 1.02})
    assert "at most 2% above the minimum" in str(unsure).replace("\n", " ")


def test_outputs_say_how_they_leave_and_what_that_costs() -> None:
    _, kept = planned("resnet", (2, 2, 2))
    _, whole = planned("gpt2", (8, 1, 1), *WAYS[2])
    assert [(o.name, o.mode) for o in kept.outputs[:2]] == [("['loss']", "global"), ("['logits']", "sharded")]
    assert {o.mode for o in kept.outputs[2:]} == {"buffer"}
    assert not kept.outputs[1].sent
    logits = next(o for o in whole.outputs if o.name == "['logits']")
    assert logits.mode == "global" and logits.layout == "[-, -, -]"


def test_schedule_changes_time_but_no_byte() -> None:
    step, plan = planned("mlp", (2, 2, 2))
    after = make_plan(scheduled(step))
    assert after.traffic == plan.traffic
    assert after.seconds <= plan.seconds * (1 + 1e-9)
    assert after.compute == pytest.approx(plan.compute)


# -- printing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(PARTS, ALL)
def test_prints_in_120_columns(
    name: str, grid: tuple[int, int, int], scheme: str, regather: str, outputs: str, inputs: str
) -> None:
    _, plan = planned(name, grid, scheme, regather, outputs, inputs)
    lines = str(plan).split("\n")
    assert max(map(len, lines)) <= 120
    assert len(lines) < 250
    assert "0x" not in str(plan)  # no address of an object


def test_identical_layers_are_one_line() -> None:
    _, plan = planned("gpt", (2, 2, 2))
    text = str(plan)
    assert "blocks.0-1.attention.{q,k,v}.weight (x6)" in text
    assert "blocks.1." not in text
    assert text.startswith(f"Plan {plan.hash[:12]}  grid x=2 y=2 z=2: 8 devices, hardware cpu, scheme auto")
    assert "Without a rule: nothing." in text and "Kept whole: nothing." in text


def test_fold() -> None:
    layers = [(f"blocks.{i}.{part}", cell) for i in range(12) for part, cell in (("up", "a"), ("down", "b"))]
    assert fold(layers) == [("blocks.0-11.up (x12)", "a"), ("blocks.0-11.down (x12)", "b")]
    alternating = [(f"h.{i}.fc", "xy"[i % 2]) for i in range(5)]
    assert fold(alternating) == [("h.0,2,4.fc (x3)", "x"), ("h.1,3.fc (x2)", "y")]
    assert fold([("a.weight", ""), ("a.bias", ""), ("b.c.weight", "")]) == [
        ("a.{weight,bias} (x2)", ""),
        ("b.c.weight", ""),
    ]
    assert fold([("cache[0]", ""), ("cache[1]", "")]) == [("cache[0-1] (x2)", "")]
    assert fold([("", "x"), ("", "y")]) == [("", "x"), ("", "y")]


def test_wrapped() -> None:
    assert wrapped("AG x 1, y 22 kB", 9) == "AG x 1,\ny 22 kB"
    assert wrapped("transformer.h.0-11.attn", 14) == "transformer.h.\n0-11.attn"
    assert wrapped("x" * 10, 4) == "xxxx\nxxxx\nxx"


def test_what_a_scheme_does_not_fit_is_said() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 6), torch.nn.Linear(6, 8))
    plan = autopar3d.plan(model, (2, 2, 1), torch.randn(8, 6), scheme="1d")
    said = "scheme='1d' does not fit the sizes of these on grid (2, 2, 1), so they are planned by cost: "
    assert said + "0 (8x6 by 10x6); 1 (8x10 by 6x10)" in plan.notes
    assert "does not fit" in " ".join(str(plan).split())
    assert not autopar3d.plan(model, (2, 2, 1), torch.randn(8, 6), scheme="zero3").notes


def test_what_is_whole_or_without_a_rule_is_said() -> None:
    _, plan = planned("mlp", (2, 3, 4))
    assert "whole over y" in str(plan) and "up.weight" in str(plan).split("Kept whole:")[1]
    no_rule = Plan.from_dict({**plan.to_dict(), "without_rule": {"my.op.default": 2}})
    assert "Without a rule, so computed whole: my.op.default (2 uses)." in str(no_rule)


# -- plain data --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "resnet", "gpt2"])
def test_goes_to_json_and_back(name: str, tmp_path: Path) -> None:
    _, plan = planned(name, (8, 1, 1))
    again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan
    assert str(again) == str(plan)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_what_is_no_plan_is_refused() -> None:
    _, plan = planned("mlp", (1, 1, 1))
    with pytest.raises(PlanError, match="format"):
        Plan.from_dict({"grid": [1, 1, 1]})
    with pytest.raises(PlanError, match="damaged"):
        Plan.from_dict({k: v for k, v in plan.to_dict().items() if k != "ops"})
    with pytest.raises(PlanError, match="damaged"):
        Plan.from_dict({**plan.to_dict(), "more": 1})


def test_hash_tells_programs_apart() -> None:
    hashes = [planned("mlp", grid)[1].hash for grid in ((2, 2, 2), (8, 1, 1), (1, 8, 1))]
    hashes += [planned("mlp", (2, 2, 2), *WAYS[1])[1].hash, planned("gpt", (2, 2, 2))[1].hash]
    assert len(set(hashes)) == len(hashes)
    step, plan = planned("mlp", (2, 2, 2))
    assert make_plan(step).hash == plan.hash


def test_hash_sees_an_argument_that_only_the_text_shows() -> None:
    step, plan = planned("mlp", (2, 2, 2))
    forward = torch.fx.GraphModule(torch.nn.Module(), torch.fx.Graph())
    forward.graph = torch.fx.Graph()
    forward.graph.output(forward.graph.graph_copy(step.runs.forward.graph, {}))
    assert make_plan(step, forward=forward).hash == plan.hash
    reshape = next(n for n in forward.graph.nodes if n.target is torch.ops.aten.gelu.default)
    reshape.kwargs = {"approximate": "tanh"}
    assert make_plan(step, forward=forward).hash != plan.hash


_PRINT_HASHES = "from tests.test_plan import planned; print(*(planned(n, (2, 2, 2))[1].hash for n in ('mlp', 'gpt')))"


def test_hash_is_the_same_in_every_process() -> None:
    # Not the `ranks` fixture: forked ranks share one hash seed.
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", _PRINT_HASHES],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[1],
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    expected = [planned(name, (2, 2, 2))[1].hash for name in ("mlp", "gpt")]
    assert [run.communicate()[0].split() for run in runs] == [expected, expected]
