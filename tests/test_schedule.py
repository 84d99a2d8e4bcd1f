"""schedule: what bucket and overlap make of a GPT together, in the simulator of time; and the `overlap=` argument."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node

import autopar3d
from autopar3d import collectives
from autopar3d.errors import PlanError
from autopar3d.grid import Grid
from autopar3d.hardware import PROFILES
from autopar3d.passes.overlap import overlap
from autopar3d.program import text
from autopar3d.ranks.launch import Pool
from autopar3d.schedule import schedule
from autopar3d.skeleton import Skeleton
from autopar3d.step import Options, Step, build_step
from autopar3d.timelines.timeline import timeline
from autopar3d.timelines.timing import is_heavy, is_start
from examples.gpt import GPT, GPTConfig
from tests.passes.test_overlap import feeds, is_covered, of_inputs, to_output

GRID = Grid(2, 2, 2)

# (hidden, layers, batch, sequence, vocabulary, heads, hardware): a GPT for local ranks, and one for a machine.
SMALL = (512, 2, 16, 128, 512, 8, "cpu")
LARGE = (4096, 4, 8, 2048, 32768, 32, "h100")


@cache
def step(shape: tuple[Any, ...], scheme: str) -> Step:
    hidden, layers, batch, sequence, vocabulary, heads, hardware = shape
    with torch.device("meta"):
        model = GPT(GPTConfig(vocabulary, sequence, layers, heads, hidden))
        ids = torch.zeros(batch, sequence, dtype=torch.long)
    skeleton = Skeleton(model, torch.device("cpu"))
    program = skeleton.trace((ids, ids), {}, skeleton.modes(), {})
    return build_step(program, GRID, PROFILES[hardware], Options(scheme))


def graphs(shape: tuple[Any, ...], scheme: str) -> list[GraphModule]:
    runs = step(shape, scheme).runs
    assert runs.backward is not None
    return [runs.forward, runs.backward]


@pytest.mark.parametrize("scheme", ["3d", "auto"])
@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "large"])
def test_exposed_communication_halves(shape: tuple[Any, ...], scheme: str) -> None:
    exposed, hidden = 0.0, 0.0
    for given in graphs(shape, scheme):
        hardware = PROFILES[shape[-1]]
        before = timeline(given, GRID, hardware)
        after = timeline(schedule(given, GRID, hardware), GRID, hardware)
        # As emitted, waits come right after starts: all communication is exposed.
        assert before.exposed_seconds == pytest.approx(sum(before.communication.values()))
        assert after.peak_bytes <= 1.1 * before.peak_bytes
        exposed, hidden = exposed + before.exposed_seconds, hidden + after.exposed_seconds
    assert hidden <= 0.5 * exposed


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "large"])
def test_weights_and_their_gradients_travel_under_a_matmul(shape: tuple[Any, ...]) -> None:
    for given in graphs(shape, "3d"):
        nodes = list(schedule(given, GRID, PROFILES[shape[-1]]).graph.nodes)
        first = next(n for n in nodes if is_heavy(n))
        gathers = [n for n in nodes if is_start(n) and of_inputs(n)]
        gradients = [n for n in nodes if is_start(n) and "reduce_scatter" in n.name and to_output(n)]
        early = [n for n in gathers if not is_covered(nodes, n)]
        # Before the first matmul there is nothing to hide under: its weight, and a bucket of norms and biases.
        assert all(feeds(n, first) for n in early), early
        assert len([n for n in early if "coalesced" not in n.name]) <= 1 < len(gathers), early
        assert [n for n in gradients if not is_covered(nodes, n)] in ([], gradients[-1:])


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "large"])
def test_the_gradient_of_an_input_travels_under_that_of_the_weight(shape: tuple[Any, ...]) -> None:
    backward = graphs(shape, "3d")[1]
    nodes = list(schedule(backward, GRID, PROFILES[shape[-1]]).graph.nodes)
    starts = [n for n in nodes if is_start(n) and "reduce_scatter" in n.name and not to_output(n)]
    products = [n for n in starts if _product(n) is not None]
    covered = [n for n in products if is_covered(nodes, n)]
    # All but those of the last products, behind which no other is left.
    assert len(covered) >= len(products) - 3 > 5


def _product(start: Node) -> Node | None:
    """The matmul whose result a collective reduces."""
    node = start.args[0]
    while isinstance(node, Node) and not is_heavy(node):
        node = node.args[0] if node.args else None
    return node if isinstance(node, Node) else None


def test_two_runs_give_one_order() -> None:
    for given in graphs(SMALL, "auto"):
        before = text(given)
        assert text(schedule(given, GRID, PROFILES["cpu"])) == text(schedule(given, GRID, PROFILES["cpu"]))
        assert text(given) == before


# -- the argument ----------------------------------------------------------------------------------------------------


def small() -> tuple[torch.nn.Module, tuple[Any, ...]]:
    from examples.gpt import make

    return make(GPTConfig(vocab=112, block=32, layers=1, heads=4, hidden=128), batch=16)


def test_off_leaves_waits_after_starts() -> None:
    model, batch = small()
    modes = ("auto", True, False)
    found = {mode: autopar3d.plan(model, (2, 2, 2), batch, scheme="3d", overlap=mode) for mode in modes}
    assert sum(found[False].exposed.values()) == pytest.approx(sum(found[False].communication.values()))
    assert found["auto"].seconds < found[False].seconds
    assert found["auto"].bytes == found[True].bytes == found[False].bytes
    assert sum(found["auto"].calls.values()) < sum(found[False].calls.values())
    assert sum(found[False].calls.values()) == sum(s.calls for s in found[False].traffic)


def test_calls_are_those_that_run() -> None:
    model, batch = small()
    sim = autopar3d.simulate(model, (2, 2, 2), batch, scheme="3d")
    run = [*collectives(sim.forward_graph), *collectives(sim.backward_graph)]
    assert sim.plan.calls == {a: sum(c.axis == a for c in run) for a in "xyz"}


def test_unknown_value() -> None:
    model, batch = small()
    with pytest.raises(PlanError, match="overlap='off' is not known"):
        autopar3d.plan(model, (2, 2, 2), batch, overlap="off")


# -- on real ranks ---------------------------------------------------------------------------------------------------


def _order_on_ranks() -> list[bool]:
    """Whether loss and gradients are the same bits when only the order of the graphs changes."""
    model, batch = small()
    par = autopar3d.compile(model, (2, 2, 2), batch, overlap=False)
    found = []
    for reorder in (False, True):
        if reorder:
            for graph in (par.forward_graph, par.backward_graph):
                before = graph.code
                graph.graph = overlap(graph, GRID, PROFILES["cpu"]).graph
                graph.recompile()
                assert graph.code != before
        par.zero_grad()
        loss = par(*batch)
        loss.backward()
        found.append([loss.detach(), *(p.grad.to_local().clone() for p in par.parameters())])
    return [torch.equal(a, b) for a, b in zip(*found, strict=True)]


@pytest.mark.slow
def test_order_changes_no_bit_on_ranks(ranks: Pool) -> None:
    for same in ranks.run(_order_on_ranks, ranks=8):
        assert len(same) > 20 and all(same)


def _with_and_without() -> list[float]:
    losses = []
    for mode in (False, "auto"):
        model, batch = small()
        par = autopar3d.compile(model, (2, 2, 2), batch, scheme="3d", overlap=mode)
        optimizer = torch.optim.AdamW(par.parameters(), lr=1e-3, foreach=True)
        for _ in range(3):
            optimizer.zero_grad()
            loss = par(*batch)
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    return losses


def test_buckets_train_as_single_collectives_on_ranks(ranks: Pool) -> None:
    for off, on in ranks.run(_with_and_without, ranks=8):
        assert on == pytest.approx(off, rel=1e-5)
