"""lanes: the batch in two halves gives the same gradients, gathers weights once, and hides communication."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autopar3d
from autopar3d import collectives
from autopar3d.errors import PlanError
from autopar3d.grid import Grid
from autopar3d.hardware import Hardware, Link
from autopar3d.plan import Plan
from autopar3d.schedule import in_best_lanes, scheduled
from autopar3d.skeleton import Skeleton
from autopar3d.step import Options, Step, build_step, split_batch
from autopar3d.testing import assert_trains_like_one_device
from autopar3d.timelines.timeline import timeline
from autopar3d.timelines.timing import is_start
from examples.gpt import GPT, GPTConfig
from examples.gpt import make as make_gpt
from tests.end_to_end.cases import case
from tests.passes.test_overlap import of_inputs, to_output

GRIDS = [(2, 2, 2), (1, 4, 1), (2, 1, 2)]
LINK = Link(1.5e-3, 100e6 / 8)
CLUSTER = Hardware("cluster", {"": 1.5e10}, 4.0e9, LINK, LINK, 1 << 30, "links of 100 Mbit/s")


class Classifier(nn.Module):
    """Two linears and a loss; as many labels as one likes are ignored."""

    def __init__(self, **loss: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16, bias=False)
        self.loss = loss

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.down(F.gelu(self.up(x))), labels, **self.loss)


def rows(batch: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(16, (batch,), generator=generator)
    labels[: batch // 3] = -100  # most of them in the first half of each rank
    return torch.randn(batch, 16, generator=generator, dtype=torch.float64), labels


@pytest.mark.parametrize(
    ("grid", "scheme", "loss"),
    [
        ((2, 2, 2), "auto", {}),
        ((2, 2, 2), "3d", {"label_smoothing": 0.1}),
        ((1, 4, 1), "3d", {}),
        ((2, 1, 2), "auto", {"reduction": "sum"}),
        ((2, 1, 2), "3d", {"label_smoothing": 0.1}),
    ],
)
def test_ignored_labels_count_in_no_lane(grid: tuple[int, int, int], scheme: str, loss: dict[str, Any]) -> None:
    assert_trains_like_one_device(
        lambda: Classifier(**loss).double(), rows(), grid, steps=1, tol=1e-10, lanes=2, scheme=scheme
    )


def test_gpt_trains_as_on_one_device() -> None:
    model, batch = make_gpt(GPTConfig(vocab=32, block=8, layers=1, heads=4, hidden=16), batch=8)
    state = model.double().state_dict()

    def make() -> nn.Module:
        model.load_state_dict(state)
        return copy.deepcopy(model)

    assert_trains_like_one_device(make, batch, (2, 2, 2), steps=1, tol=1e-10, lanes=2)


@pytest.mark.slow
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", ["mlp", "gpt", "gpt2", "llama", "t5", "bert", "vit", "resnet"])
def test_models_train_as_on_one_device(name: str, grid: tuple[int, int, int]) -> None:
    make, (args, kwargs) = case(name)
    assert_trains_like_one_device(make, args, grid, example_kwargs=kwargs, steps=2, tol=1e-10, lanes=2)


@pytest.mark.slow
def test_ranks_pass_their_part() -> None:
    make, (args, kwargs) = case("gpt")
    assert_trains_like_one_device(
        make, args, (2, 2, 2), example_kwargs=kwargs, steps=1, tol=1e-10, lanes=2, inputs="sharded"
    )


class Checkpointed(Classifier):
    """The same, computed again in backward."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return checkpoint(super().forward, x, labels, use_reentrant=False)


@pytest.mark.parametrize("scheme", ["auto", "3d"])
def test_what_is_computed_again_is_so_in_each_lane(scheme: str) -> None:
    found = assert_trains_like_one_device(
        lambda: Checkpointed().double(), rows(), (2, 2, 2), steps=1, tol=1e-10, lanes=2, scheme=scheme
    )
    par, plan = found.module, found.plan
    sent: Counter[str] = Counter()
    for c in (*collectives(par.forward_graph), *collectives(par.backward_graph)):
        sent[c.axis] += int(c.bytes)
    assert sent == {axis: sum(int(b) for (a, _), b in plan.bytes.items() if a == axis) for axis in sent}


def test_dropout_has_the_same_masks() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.Linear(32, 16)).double()
    x = rows()[0]
    found = []
    for lanes in (1, 2):
        sim = autopar3d.simulate(model, (2, 2, 1), x, lanes=lanes, seed=3, scheme="3d")
        sim.train()
        found.append(sim(x))
        assert sim.plan.lanes == lanes
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
    assert not torch.equal(found[0], sim.eval()(x))


# -- what is sent, and when ------------------------------------------------------------------------------------------


@cache
def steps(scheme: str = "auto") -> tuple[Step, Step]:
    """A GPT on (2, 2, 2), in one lane and in two, not scheduled."""
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab=512, block=128, layers=1, heads=8, hidden=512))
        ids = torch.zeros(16, 128, dtype=torch.long)
    skeleton = Skeleton(model, torch.device("cpu"))
    program = skeleton.trace((ids, ids), {}, skeleton.modes(), {})
    options = Options(scheme, regather="none")
    one = build_step(program, Grid(2, 2, 2), CLUSTER, options)
    return one, split_batch(one, options, 2)


def graphs(step: Step) -> list[torch.fx.GraphModule]:
    assert step.runs.backward is not None
    return [step.runs.forward, step.runs.backward]


@pytest.mark.parametrize("scheme", ["auto", pytest.param("3d", marks=pytest.mark.slow)])
def test_weights_are_gathered_and_reduced_once(scheme: str) -> None:
    of_weights, all_of_them, sent = [], [], []
    for step in steps(scheme):
        nodes = [n for g in graphs(step) for n in g.graph.nodes if is_start(n)]
        of_weights.append(Counter(str(n.target) for n in nodes if of_inputs(n) or to_output(n)))
        all_of_them.append(len(nodes))
        by_axis: Counter[tuple[str, str]] = Counter()
        for c in (c for g in graphs(step) for c in collectives(g)):
            by_axis[c.axis, c.kind] += int(c.bytes)
        sent.append(by_axis)
    assert of_weights[0] == of_weights[1]
    assert sum(of_weights[0].values()) > 20
    # Activations travel in halves: twice the collectives, not a byte more but the count of the labels, once per lane.
    mine = sum(of_weights[0].values())
    halves = all_of_them[0] - mine
    assert halves > 20
    assert all_of_them[1] - mine <= 2 * halves
    more = sent[1] - sent[0]
    assert set(kind for _, kind in more) <= {"all_reduce"} and sum(more.values()) <= 3 * 4
    assert not sent[0] - sent[1]


def test_auto_takes_two_lanes_where_less_is_exposed() -> None:
    # Both as scheduled; predicted, so exact.
    one, two = scheduled(steps()[0]), in_best_lanes(steps()[0], Options(regather="none", lanes="auto"))
    found = [[timeline(g, Grid(2, 2, 2), CLUSTER) for g in graphs(step)] for step in (one, two)]
    assert two.lanes == 2
    assert two.note.startswith("lanes: 2, as the step is predicted to take")
    exposed = [sum(t.exposed_seconds for t in lines) for lines in found]
    assert exposed[1] < 0.9 * exposed[0]
    assert sum(t.seconds for t in found[1]) < 0.95 * sum(t.seconds for t in found[0])


def test_auto_takes_one_lane_where_nothing_is_exposed() -> None:
    free = dataclasses.replace(CLUSTER, node=Link(0.0, 1e15), network=Link(0.0, 1e15))
    found = planned(8, lanes="auto", hardware=free)
    assert found.lanes == 1
    assert any(note.startswith("lanes: 1, as the step is predicted to take") for note in found.notes)


# -- the argument ----------------------------------------------------------------------------------------------------


def planned(batch: int, **options: Any) -> Plan:
    return autopar3d.plan(Classifier().double(), (2, 1, 1), rows(batch), scheme="3d", **options)


def test_a_batch_without_halves_is_an_error_or_a_note() -> None:
    with pytest.raises(PlanError, match=r"the batch of 6 is cut over x, 6 / 2 has no two halves"):
        planned(6, lanes=2)
    found = planned(6, lanes="auto")
    assert found.lanes == 1
    assert any("6 / 2 has no two halves" in note for note in found.notes)


@pytest.mark.parametrize("lanes", [0, 3, True, "two"])
def test_other_numbers_are_refused(lanes: Any) -> None:
    with pytest.raises(PlanError, match="lanes="):
        planned(8, lanes=lanes)


def test_a_plan_keeps_its_lanes(tmp_path: Path) -> None:
    made = planned(8, lanes=2)
    assert made.lanes == 2 and "2 lanes" in str(made)
    assert made.digest != planned(8).digest
    made.save(tmp_path / "plan.json")
    again = planned(8, plan=Plan.load(tmp_path / "plan.json"))
    assert (again.lanes, again.hash) == (2, made.hash)


def test_costs_are_those_of_the_lanes() -> None:
    one, two = planned(8).cost(), planned(8, lanes=2).cost()
    assert one.bytes == two.bytes
    assert one.flops == two.flops


@pytest.mark.parametrize("model", [nn.BatchNorm1d(16), nn.LayerNorm(16)], ids=["batch norm", "layer norm"])
def test_what_mixes_the_batch_takes_it_whole(model: nn.Module) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 16), model.__class__(16), nn.Linear(16, 8)).double()

    square: Callable[[Tensor], Tensor] = lambda y: y.square().mean()  # noqa: E731
    assert_trains_like_one_device(make, rows()[0], (2, 2, 1), steps=2, tol=1e-10, lanes=2, loss_fn=square)
