"""Low precision: mixed, in autocast regions, of the whole model; loss scaling; what is kept and what travels."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar3d
from autopar3d import MixedPrecision
from autopar3d.errors import PlanError
from autopar3d.ranks.launch import Pool

LOW = torch.bfloat16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 32)
        self.up, self.norm, self.down = nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 16)
        self.register_buffer("shift", torch.linspace(-1, 1, 16))

    def forward(self, ids: Tensor, scale: Tensor) -> Tensor:
        return self.down(torch.relu(self.norm(self.up(self.embed(ids) * scale)))) + self.shift.to(scale.dtype)


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randint(16, (8, 4)), torch.rand(8, 4, 1) + 0.5


def far(found: Any, wanted: Any) -> float:
    """The largest difference, beside the largest of its tensor."""
    pairs = zip(found.parameters(), wanted.parameters(), strict=True)
    return max(float((p.grad.float() - q.grad).abs().max() / q.grad.abs().max()) for p, q in pairs)


def test_masters_stay_and_gathers_move_the_low_dtype() -> None:
    model, args = net(), batch()
    par = autopar3d.simulate(model, (2, 2, 2), args, scheme="zero3", mixed_precision=LOW, check=True)
    out = par(*args)
    assert out.dtype == LOW
    out.float().square().mean().backward()
    for p, q in zip(par.parameters(), model.parameters(), strict=True):
        assert p.dtype == p.grad.dtype == torch.float32 and torch.equal(p, q)
    assert par.shift.dtype == torch.float32
    both = [*autopar3d.collectives(par.forward_graph), *autopar3d.collectives(par.backward_graph)]
    assert {c.dtype for c in both if c.kind in ("all_gather", "reduce_scatter")} == {LOW}
    assert par.plan.memory["parameters"] * 8 == 4 * sum(p.numel() for p in model.parameters())
    low, exact = copy.deepcopy(model).to(LOW), model
    low(args[0], args[1].to(LOW)).float().square().mean().backward()
    exact(*args).square().mean().backward()
    assert far(par, exact) < 2 * far(low, exact)


def test_sums_and_outputs_in_their_own_dtype() -> None:
    args = batch()
    policy = MixedPrecision(LOW, reduce=torch.float32, outputs=torch.float32)
    par = autopar3d.simulate(net(), (2, 2, 2), args, scheme="zero3", mixed_precision=policy)
    out = par(*args)
    assert out.dtype == torch.float32
    out.square().mean().backward()
    sums = [c for c in autopar3d.collectives(par.backward_graph) if c.kind == "reduce_scatter"]
    gathers = [c for c in autopar3d.collectives(par.forward_graph) if c.kind == "all_gather"]
    assert {c.dtype for c in sums} == {torch.float32} and {c.dtype for c in gathers} == {LOW}
    plain = autopar3d.simulate(
        net(), (2, 2, 2), args, scheme="zero3", mixed_precision=MixedPrecision(LOW, None, torch.float32)
    )
    plain(*args).square().mean().backward()
    exact = net()
    exact(*args).square().mean().backward()
    assert far(par, exact) <= far(plain, exact)


def test_the_loss_sees_outputs_in_their_dtype() -> None:
    seen = []

    def loss_fn(out: Tensor, wanted: Tensor) -> Tensor:
        seen.append(out.dtype)
        return nn.functional.mse_loss(out, wanted)

    ids, scale = batch()
    kwargs = {"targets": (torch.zeros(8, 4, 16),)}
    policy = MixedPrecision(LOW, outputs=torch.float32)
    par = autopar3d.simulate(net(), (2, 1, 2), (ids, scale), kwargs, loss_fn=loss_fn, mixed_precision=policy)
    loss = par(ids, scale, **kwargs)
    loss.backward()
    assert set(seen) == {torch.float32} and loss.dtype == torch.float32


def test_what_is_no_policy_is_refused() -> None:
    with pytest.raises(PlanError, match="mixed_precision='bf16' is neither a dtype nor an autopar3d.MixedPrecision"):
        autopar3d.simulate(net(), (1, 1, 1), batch(), mixed_precision="bf16")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"parameters=torch.float8_e4m3fn is not one of torch.float64.*needs scales"):
        autopar3d.simulate(net(), (1, 1, 1), batch(), mixed_precision=torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_of_low_dtype(dtype: torch.dtype) -> None:
    ids, scale = batch()
    autopar3d.testing.assert_trains_like_one_device(lambda: net().to(dtype), (ids, scale.to(dtype)), (2, 1, 2), steps=2)


class Regions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            h = self.b(torch.relu(self.a(x)))
            with torch.autocast("cpu", enabled=False):
                inner = self.c(h.float())
            y = self.c(h) + torch.softmax(h, -1)[:, :8]
        return y, inner


def test_autocast_regions_keep_their_dtypes() -> None:
    torch.manual_seed(0)
    model, x = Regions(), torch.randn(8, 16)
    par = autopar3d.simulate(model, (2, 2, 2), x)
    for found, wanted in zip(par(x), model(x), strict=True):
        assert found.dtype == wanted.dtype
        assert torch.allclose(found.float(), wanted.float(), atol=2e-2)
    for module in (par, model):
        sum(out.float().square().mean() for out in module(x)).backward()
    assert far(par, model) < 2e-2
    autopar3d.testing.assert_trains_like_one_device(
        lambda: (torch.manual_seed(0), Regions())[1], x, (2, 1, 2), steps=2, tol=2e-2
    )


def test_autocast_around_the_call_is_planned_for() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16))
    x = torch.randn(8, 16)
    par = autopar3d.simulate(model, (2, 2, 2), x)
    plain = par(x)
    for module in (par, model):
        with torch.autocast("cpu", torch.bfloat16):
            out = module(x)
            assert out.dtype == torch.bfloat16
            loss = out.float().square().mean()
        loss.backward()
    assert far(par, model) < 2e-2
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    dtypes = {n.meta["val"].dtype for n in par.forward_graph.graph.nodes if n.target in products}
    assert dtypes == {torch.bfloat16}
    assert par(x).dtype == torch.float32 and torch.equal(par(x), plain)
    with torch.autocast("cpu", torch.bfloat16):
        inside = autopar3d.simulate(model, (2, 1, 1), x)
        assert inside(x).dtype == torch.bfloat16 and len(inside.__dict__["_ap3d"].steps) == 1
        par(x).sum().backward()


def _scaled() -> list[Any]:
    """float16-like loss scaling where one rank alone has an inf."""
    torch.manual_seed(0)
    par = autopar3d.compile(net(), (2, 1, 2), batch(), mixed_precision=LOW)
    optimizer = torch.optim.AdamW(par.parameters(), lr=0.1, foreach=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    seen = []
    for step in range(4):
        optimizer.zero_grad()
        before = [p.detach().to_local().clone() for p in par.parameters()]
        scaler.scale(par(*batch()).float().square().mean()).backward()
        if step == 1 and torch.distributed.get_rank() == 3:
            par.down.weight.grad.to_local()[0, 0] = float("inf")
        if step == 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(par.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        moved = any(not torch.equal(b, p.detach().to_local()) for b, p in zip(before, par.parameters(), strict=True))
        seen.append((moved, scaler.get_scale()))
    return seen


def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks: Pool) -> None:
    expected = [(True, 4.0), (False, 2.0), (True, 2.0), (True, 4.0)]
    assert ranks.run(_scaled, ranks=4) == [expected] * 4
