"""Replicas: whole grids side by side that share the batch. They train as one device, and move what the plan says."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dcp_state
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DistributedSampler

import autopar3d
from autopar3d import Grid, collectives
from autopar3d.errors import GridError, PlanError
from autopar3d.plan import Plan
from autopar3d.ranks.launch import Pool
from autopar3d.testing import trains_like_one_device
from tests.end_to_end.cases import case
from tests.models import MODELS

CUBES = Grid(2, 1, 2, replicas=2)
TOL = 1e-10


def rows(count: int = 8) -> Tensor:
    return torch.randn(count, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.LayerNorm(16)).double()


HOW: dict[str, Any] = {"loss_fn": nn.functional.mse_loss}


# -- the grid --------------------------------------------------------------------------------------------------------


def test_replicas_are_an_outermost_fourth_axis() -> None:
    grid = Grid(2, 3, 1, replicas=4)
    assert grid.size == 24 and grid.sizes == (2, 3, 1) and grid.shape == (4, 2, 3, 1)
    assert grid.axes == ("r", "x", "y") and grid.names == ("r", "x", "y", "z")
    assert grid.coordinates(7) == {"r": 1, "x": 0, "y": 1, "z": 0}
    assert [grid.index(grid.coordinates(i)) for i in range(24)] == list(range(24))
    assert (0, 6, 12, 18) in grid.groups("r") and (6, 7, 8) in grid.groups("y")
    assert str(grid) == "(2, 3, 1, replicas=4)" and grid.alias("r") == "ap3d_r_4x2x3x1"
    assert grid.one_replica == Grid(2, 3, 1)


def test_one_replica_is_as_without() -> None:
    grid = Grid(2, 3, 1, replicas=1)
    assert grid == Grid(2, 3, 1) and str(grid) == "(2, 3, 1)" and grid.alias("x") == "ap3d_x_2x3x1"
    assert grid.coordinates(4) == {"x": 1, "y": 1, "z": 0} and grid.names == ("x", "y", "z")
    assert "replicas" not in autopar3d.plan(mlp(), (1, 2, 1), rows()).to_dict()


def test_a_mesh_of_four_dims_has_its_replicas_first() -> None:
    mesh: Any = SimpleNamespace(mesh=torch.arange(8).reshape(2, 2, 1, 2))
    assert Grid.of(mesh) == CUBES
    with pytest.raises(GridError, match=re.escape("asked for by Grid(x, y, z, replicas=r)")):
        Grid.of((2, 2, 1, 2))
    with pytest.raises(GridError, match="replicas is 0"):
        Grid(2, 2, 2, replicas=0)
    with pytest.raises(GridError, match=re.escape("2*2*1*2 = 8 ranks but the world size is 4")):
        CUBES.check_world(4)


# -- equality with one device ----------------------------------------------------------------------------------------

CASES = [
    *[(name, grid) for name in ("mlp", "gpt", "gpt2") for grid in (CUBES, Grid(1, 1, 1, replicas=4))],
    ("resnet", CUBES),  # batch norm's statistics are those of the whole batch
    ("vit", CUBES),  # a class token, expanded to the batch
]


@pytest.mark.parametrize(("name", "grid"), CASES, ids=str)
def test_replicas_train_as_one_device(name: str, grid: Grid) -> None:
    make, (args, kwargs) = case(name)
    found = trains_like_one_device(make, args, grid, example_kwargs=kwargs, steps=2)
    assert not [d for d in found.differences if d.note or not d.relative <= TOL], found
    plan = found.plan
    assert plan.replicas == grid.replicas
    # All of the batch's work is shared.
    assert plan.flops == pytest.approx(plan.ideal_flops, rel=1e-9)
    # What the plan says is what the graphs do, and what was decided on.
    sent: dict[tuple[str, str], float] = {}
    assert found.module.backward_graph is not None
    for graph in (found.module.forward_graph, found.module.backward_graph):
        for c in collectives(graph):
            sent[c.axis, c.kind] = sent.get((c.axis, c.kind), 0.0) + c.bytes
    assert sent == pytest.approx({k: b for k, b in plan.bytes.items() if b})
    cost = plan.cost()
    assert cost.compute + sum(cost.communication.values()) == pytest.approx(plan.objective, rel=1e-12)


def test_gradients_are_reduced_as_shards() -> None:
    plan = autopar3d.plan(mlp(), CUBES, rows(), {"targets": (rows(),)}, **HOW)
    for p in plan.parameters:
        assert "r" not in p.layout and p.reduced == ("r",), p
    grads = sum(s.bytes for s in plan.traffic if s.axis == "r" and s.phase == "backward")
    # An all_reduce over two sends as much as it is given: a fourth of each gradient, and the loss.
    assert grads == 8 * sum(p.numel() for p in mlp().parameters()) / 4
    assert "replicas=2: 8 devices" in str(plan) and "as its outermost axis r" in " ".join(str(plan).split())


def test_an_odd_batch_is_padded_where_that_is_cheaper() -> None:
    wide = nn.Linear(512, 512, bias=False)
    plan = autopar3d.plan(wide, Grid(1, 1, 1, replicas=3), torch.empty(512, 512), hardware="bandwidth")
    assert any("pad" in n for n in plan.notes) or "r" in str(plan)
    trained = trains_like_one_device(
        mlp, rows(4), Grid(1, 2, 1, replicas=3), example_kwargs={"targets": (rows(4),)}, steps=2, **HOW
    )
    assert not trained.failures


def test_replicas_that_share_nothing_are_noted() -> None:
    plan = autopar3d.plan(mlp(), Grid(1, 1, 1, replicas=2), rows(1))
    (note,) = plan.notes
    assert "all 2 replicas do the same work" in note and "is 1 long, and 1 % 2 = 1" in note
    with pytest.raises(PlanError, match="all 2 replicas do the same work"):
        autopar3d.plan(mlp(), Grid(1, 1, 1, replicas=2), rows(1), strict=True)


def test_dropout_masks_do_not_depend_on_replicas() -> None:
    def outputs(grid: Any) -> Tensor:
        torch.manual_seed(0)
        par = autopar3d.simulate(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5)).double(), grid, rows(), seed=5)
        found: Tensor = par(rows())
        return found

    want = outputs((1, 1, 1))
    assert 0.3 < float((want == 0).double().mean()) < 0.7
    for grid in (CUBES, Grid(1, 1, 1, replicas=4)):
        torch.testing.assert_close(outputs(grid), want, rtol=1e-12, atol=1e-12)


def test_lanes_go_with_replicas() -> None:
    more = {"targets": (rows(),)}
    found = trains_like_one_device(mlp, rows(), Grid(2, 1, 1, replicas=2), example_kwargs=more, steps=2, lanes=2, **HOW)
    assert not found.failures and found.plan.lanes == 2 and found.plan.replicas == 2


def test_plans_are_files_are_explained_and_obey_constraints(tmp_path: Path) -> None:
    model, batch = MODELS["gpt"][0](torch.float64), MODELS["gpt"][1](torch.float64)
    plan = autopar3d.plan(model, CUBES, *batch)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan and loaded.replicas == 2
    assert autopar3d.plan(model, CUBES, *batch, plan=loaded).hash == plan.hash
    with pytest.raises(PlanError, match=re.escape("for grid (2, 1, 2, replicas=2), this is (2, 1, 2)")):
        autopar3d.plan(model, (2, 1, 2), *batch, plan=loaded)
    linear = next(o for o in plan.ops if o.flops)
    explained = plan.explain(linear.name)
    assert all(":r" in c.strategy for c in explained.choices)
    name = next(p.names[0] for p in plan.parameters if len(p.shape) == 2)
    kept = autopar3d.plan(model, CUBES, *batch, constraints={name: "[z, x]"})
    assert next(p for p in kept.parameters if p.names[0] == name).layout == "[z, x]"
    with pytest.raises(PlanError, match=name):
        autopar3d.plan(model, CUBES, *batch, constraints={name: "[r, x]"})
    assert "2 replicas" in plan.to_html()


def test_named_schemes_go_with_replicas() -> None:
    for scheme in ("1d", "zero3", "3d"):
        plan = autopar3d.plan(mlp(), Grid(2, 2, 1, replicas=2), rows(), {"targets": (rows(),)}, scheme=scheme, **HOW)
        roles = [o.roles for o in plan.ops if o.flops]
        assert all(re.search(r"b=r", r) for r in roles), roles


# -- real ranks ------------------------------------------------------------------------------------------------------

REPLICAS = Grid(1, 2, 1, replicas=2)


def _steps(par: nn.Module, opt: torch.optim.Optimizer, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        opt.zero_grad()
        loss = par(rows(), targets=(rows() ** 2,))
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))
    return losses


def _compiled(grid: Any, **options: Any) -> Any:
    return autopar3d.compile(mlp(), grid, rows(), {"targets": (rows(),)}, **HOW, **options)


def _adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


def _train(grid: Grid, folder: str, before: str | None) -> Any:
    """Train two steps, from a checkpoint or from the beginning, and save."""
    par = _compiled(grid)
    opt = _adam(par)
    if before is not None:
        dcp_state._init_optim_state(opt)
        state = {"model": par.state_dict(), "optim": opt.state_dict()}
        dcp.load(state, checkpoint_id=before)
        par.load_state_dict(state["model"])
        opt.load_state_dict(state["optim"])
    losses = _steps(par, opt, 2)
    dcp.save({"model": par.state_dict(), "optim": opt.state_dict()}, checkpoint_id=folder)
    return losses, par.full_state_dict(), par.full_optim_state_dict(opt), par.plan.hash


def test_checkpoints_go_to_replicas_and_back(ranks: Pool, tmp_path: Path) -> None:
    one = mlp()
    opt = _adam(one)
    before: str | None = None
    for number, grid in enumerate((Grid(2, 2, 1), REPLICAS, Grid(2, 2, 1))):
        want = []
        for _ in range(2):
            opt.zero_grad()
            loss = nn.functional.mse_loss(one(rows()), rows() ** 2)
            loss.backward()
            opt.step()
            want.append(float(loss.detach()))
        folder = str(tmp_path / str(number))
        found = ranks.run(_train, grid, folder, before, ranks=4)
        simulated = autopar3d.simulate(mlp(), grid, rows(), {"targets": (rows(),)}, **HOW)
        for losses, state, optim, digest in found:
            assert losses == pytest.approx(want, rel=1e-10)
            torch.testing.assert_close(state, dict(one.state_dict()), rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(optim["state"], copy.deepcopy(opt.state_dict()["state"]), rtol=1e-9, atol=1e-9)
            assert digest == simulated.plan.hash
        before = folder


def _own_parts() -> tuple[int, int]:
    mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 1, 2, 1))
    par = _compiled(mesh, inputs="sharded", check=True)
    sampler = DistributedSampler(range(8), par.data_world_size, par.data_rank, shuffle=False)
    layout = par.input_layouts["args[0]"]
    x, y = (layout.shard(t, REPLICAS, dist.get_rank()) for t in (rows(), rows() ** 2))
    assert len(x) * par.data_world_size == 8 and len(list(sampler)) == len(x)
    loss = par(x, targets=(y,))
    one = mlp()
    want = nn.functional.mse_loss(one(rows()), rows() ** 2)
    torch.testing.assert_close(loss, want, rtol=1e-12, atol=1e-12)
    loss.backward()
    want.backward()
    for (name, p), q in zip(par.named_parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-10, atol=1e-10, msg=name)
    return par.data_rank, par.data_world_size


def test_each_replica_takes_its_own_part_of_the_batch(ranks: Pool) -> None:
    found = ranks.run(_own_parts, ranks=4)
    parts = {n for _, n in found}
    assert len(parts) == 1 and parts.pop() % 2 == 0
    # The first half of the ranks is the first replica, with the first half of the batch.
    assert [place * 2 // n for place, n in found] == [0, 0, 1, 1]
