"""What the adapter reports of a run is false where it should be, and a wrong answer is found."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import autopar3d
from autopar3d import Grid, Layout
from autopar3d.ranks.launch import Pool

from .apis import EagerApi, RankApi, SimulatedApi, Witness
from .rows import Case, differences, says
from .runner import check_simulated, simulated

CODE = """
import torch, torch.nn as nn
class M(nn.Module):
    def __init__(s): super().__init__(); s.a = nn.Linear(8, 16); s.b = nn.Linear(16, 8)
    def forward(s, x): return s.b(torch.relu(s.a(x)))
def make():
    torch.manual_seed(0)
    return M(), (torch.randn(4, 8),), {}, lambda o: o.square().mean()
"""
CASE = Case("facts", ((2, 1, 2),), CODE)
REDUCES = (torch.ops._c10d_functional.all_reduce.default, torch.ops._c10d_functional.reduce_scatter_tensor.default)


def model() -> tuple[Any, Any, Witness]:
    made = CASE.make()
    witness = Witness(Grid(2, 1, 2))
    return simulated(made[:3], (2, 1, 2), witness), made, witness


def silence(graph: torch.fx.GraphModule) -> int:
    """Let every all_reduce of a graph do nothing; how many there were."""
    found = [n for n in graph.graph.nodes if n.target is REDUCES[0]]
    for node in found:
        node.target, node.args = torch.ops.aten.clone.default, node.args[:1]
    graph.recompile()
    return len(found)


def api(witness: Witness) -> SimulatedApi:
    return SimulatedApi(lambda: CASE.make()[0], lambda: CASE.make()[0], witness)


def test_ranks_that_part_are_seen() -> None:
    par, (_, args, _, loss_fn), witness = model()
    out = par(*args)
    loss_fn(out).backward()
    assert api(witness).same_on_all_ranks(out) and api(witness).collectives_agree(par)
    assert silence(par.forward_graph)
    out = par(*args)
    assert not api(witness).same_on_all_ranks(out)


def test_parts_of_other_sizes_are_seen() -> None:
    par, (_, args, _, _), witness = model()
    par(*args)
    assert api(witness).collectives_agree(par)
    graph = torch.fx.Graph()
    graph.output((graph.placeholder("x"),))
    witness.run(
        torch.fx.GraphModule(nn.Module(), graph), [[torch.ones(2), torch.ones(3), torch.ones(2), torch.ones(2)]]
    )
    assert not api(witness).collectives_agree(par)


def test_whole_parameters_are_counted_whole() -> None:
    par, (_, args, _, _), witness = model()
    whole = sum(p.numel() for p in par.parameters())
    assert api(witness).local_numel(par) * 4 == whole == EagerApi(lambda: CASE.make()[0]).local_numel(CASE.make()[0])
    step = par.__dict__["_ap3d"].last.step
    layouts = tuple(Layout.replicated(layout.ndim) for layout in step.argument_layouts)
    par.__dict__["_ap3d"].last.step = dataclasses.replace(
        step, local=dataclasses.replace(step.local, arguments=layouts)
    )
    assert api(witness).local_numel(par) == whole


def test_a_wrong_model_fails() -> None:
    assert check_simulated(CASE, (2, 1, 2)) == []
    lucky = dataclasses.replace(CASE, model_code=CODE.replace("torch.manual_seed(0)", "torch.seed()"))
    assert any("off by" in p for p in check_simulated(lucky, (2, 1, 2)))
    quiet = dataclasses.replace(CASE, expect_error=True, error_should_say="Says something.")
    assert check_simulated(quiet, (2, 1, 2)) == ["no error"]
    bare = dataclasses.replace(quiet, model_code=CODE.replace("return M()", "raise KeyError('x'); return M()"))
    assert check_simulated(bare, (2, 1, 2)) == ["a bare KeyError: 'x'"]


def test_answers_are_compared_entry_by_entry() -> None:
    one = {"a": torch.ones(2), "b": [1, "x", None], "c": {"d": 2.0}}
    assert differences("r", one, {**one, "a": torch.ones(2) + 1e-7}, None) == []
    assert differences("r", {**one, "a": torch.ones(2) + 1e-3}, one, None)
    assert differences("r", {**one, "a": None}, one, None) == ["r.a: None, not torch.float32 (2,)"]
    assert differences("r", {**one, "a": torch.tensor([float("nan"), 1.0])}, one, None)
    assert differences("r", {**one, "b": [1, "x", 0]}, one, None) == ["r.b.2: 0, not None"]
    assert differences("r", {**one, "c": {"d": 2.0000001}}, one, None)
    assert differences("r", {"a": one["a"]}, one, None)
    assert not says("parameter l.weight is modified in place", "Says that 'l.weight' is modified in place")
    assert says("parameter weight is modified", "Mentions 'l.weight'") == "does not name 'l.weight'"
    assert says("boom", "Mentions that the parameter is modified in place inside forward")


def _facts() -> list[list[bool]]:
    made = CASE.make()
    grid = (1, 2, 1)
    par = autopar3d.compile(made[0], grid, made[1])
    mine = RankApi(lambda: CASE.make()[0], lambda: CASE.make()[0])
    par(*made[1]).sum().backward()
    whole = sum(p.numel() for p in par.parameters())
    good = [
        mine.same_on_all_ranks(torch.ones(3)),
        mine.collectives_agree(par),
        mine.local_numel(par) * 2 == whole,
        all(mine.same_on_all_ranks(g) for g in mine.grads(par).values() if g is not None),
    ]
    if dist.get_rank() == 1:
        silence(par.forward_graph)
    plain = CASE.make()[0]
    bad = [
        mine.same_on_all_ranks(torch.ones(3) * dist.get_rank()),
        mine.collectives_agree(par),
        mine.local_numel(plain) * 2 == whole,
    ]
    return [good, bad]


def test_facts_of_real_ranks(ranks: Pool) -> None:
    assert ranks.run(_facts, ranks=2) == [[[True] * 4, [False] * 3]] * 2
