"""What training loops do around a model: hooks, averages, torch.compile, closures, several models, odd calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import autopar3d
from autopar3d.errors import InputError, PlanError, StateError, TraceError
from autopar3d.ranks.launch import Pool

GRID = (2, 1, 2)


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def rows(n: int = 8) -> Tensor:
    return torch.randn(n, 8, generator=torch.Generator().manual_seed(1))


def five_times(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(5)


def both() -> tuple[Any, nn.Module]:
    return autopar3d.simulate(make(), GRID, rows()), make()


def same(par: Any, model: nn.Module, what: str = "grad") -> None:
    for p, q in zip(par.parameters(), model.parameters(), strict=True):
        found, wanted = (p.grad, q.grad) if what == "grad" else (p, q)
        assert torch.allclose(found, wanted, atol=1e-5)


def test_hooks_on_calls_outputs_and_parameters() -> None:
    par, model = both()
    seen: list[str] = []
    for module in (par, model):
        handle = module.register_forward_hook(lambda m, i, o: 2 * o)
        out = module(rows())
        out.register_hook(lambda g: 3 * g)
        module.register_full_backward_hook(lambda m, i, o: seen.append("backward"))
        module[0].weight.register_hook(lambda g: g / 2)
        module[2].bias.register_post_accumulate_grad_hook(five_times)
        out.square().mean().backward()
        handle.remove()
    same(par, model)
    assert torch.allclose(par(rows()), model(rows()), atol=1e-6)


def test_averages_and_closures() -> None:
    par, model = both()
    means = []
    for module in (par, model):
        mean = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        optimizer = torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=3)

        def closure(module: Any = module, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = module(rows()).square().mean()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
            mean.update_parameters(module)
        means.append(mean(rows()))
    same(par, model, "value")
    assert torch.allclose(*means, atol=1e-5)


def test_models_that_feed_each_other() -> None:
    par, model = both()
    torch.manual_seed(2)
    second = nn.Linear(4, 8)
    also = autopar3d.simulate(second, (1, 2, 2), torch.randn(8, 4, requires_grad=True))
    once_more = autopar3d.simulate(make(), GRID, rows())
    (par(also(par(rows()))) + once_more(rows())).square().mean().backward()
    third = make()
    (model(second(model(rows()))) + third(rows())).square().mean().backward()
    same(par, model)
    same(also, second)
    same(once_more, third)


def test_functional_calls_use_the_tensors_they_are_given() -> None:
    par, model = both()
    double = {name: 2 * p.detach() for name, p in par.named_parameters()}
    found = torch.func.functional_call(par, double, (rows(),))
    assert torch.allclose(found, torch.func.functional_call(model, double, (rows(),)), atol=1e-5)
    assert torch.allclose(par(rows()), model(rows()), atol=1e-6)
    grads = torch.autograd.grad(par(rows()).sum(), list(par.parameters()))
    wanted = torch.autograd.grad(model(rows()).sum(), list(model.parameters()))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(grads, wanted, strict=True))


def test_torch_compile_of_the_result_runs_it_as_it_is() -> None:
    par, model = both()
    compiled = torch.compile(par, backend="eager")
    compiled(rows()).square().mean().backward()
    model(rows()).square().mean().backward()
    same(par, model)


def test_torch_compile_and_checkpoint_around_a_rank(ranks: Pool) -> None:
    ranks.run(_compile_and_checkpoint, ranks=1)


def _compile_and_checkpoint() -> None:
    par, model = autopar3d.compile(make(), (1, 1, 1), rows()), make()
    torch.compile(par)(rows()).square().mean().backward()
    model(rows()).square().mean().backward()
    x = rows(4).requires_grad_()  # planned inside of the checkpoint
    for module in (par, model):
        checkpoint(module, x, use_reentrant=False).sum().backward()
    for p, q in zip(par.parameters(), model.parameters(), strict=True):
        assert torch.allclose(p.grad.full_tensor(), q.grad, atol=1e-5)


def test_a_module_changed_after_planning_is_refused() -> None:
    par, _ = both()
    par[0].weight = nn.Parameter(torch.zeros(20, 8))
    with pytest.raises(StateError, match=r"0.weight is of shape \(20, 8\); planned was \(16, 8\). Change the model"):
        par(rows())
    par, _ = both()
    par[0].bias = None
    with pytest.raises(StateError, match="0.bias is gone"):
        par(rows())
    par, _ = both()
    nn.utils.spectral_norm(par[0])
    with pytest.raises(StateError, match="0.weight is gone"):
        par(rows())
    with pytest.raises(PlanError, match="Sequential holds a ParallelModule, 0, which is compiled already"):
        autopar3d.simulate(nn.Sequential(both()[0], nn.ReLU()), GRID, rows())


def test_what_is_no_habit_is_refused() -> None:
    par, _ = both()
    loss = par(rows()).sum()
    loss.backward()
    with pytest.raises(StateError, match="a second time"):
        loss.backward()
    hooked = make()
    hooked[0].register_full_backward_hook(lambda m, i, o: None)
    with pytest.raises(TraceError, match="Linear has a backward hook"):
        autopar3d.simulate(hooked, GRID, rows())


def test_lengths_that_come_again_are_planned_once(caplog: pytest.LogCaptureFixture) -> None:
    par, model = both()
    par.eval()
    for _ in range(2):
        for n in (8, 5, 3, 1):
            with torch.no_grad():
                assert torch.allclose(par(rows(n)), model(rows(n)), atol=1e-6)
    assert len(par.__dict__["_ap3d"].steps) == 5  # these, and the examples in training mode
    with caplog.at_level("WARNING", "autopar3d"):
        for n in (2, 4, 6, 7, 9):
            par(rows(n))
    assert sum("8 plans were made" in record.message for record in caplog.records) == 1


class Causal(nn.Module):
    """A token sees those before it; with a mask, only those that count."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.qkv, self.head = nn.Embedding(16, 8), nn.Linear(8, 24), nn.Linear(8, 16)

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> dict[str, Tensor]:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(self.tokens(ids)).chunk(3, -1))
        mask = None if attention_mask is None else attention_mask[:, None, None].bool()
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None).transpose(1, 2).flatten(2)
        return (
            {"logits": self.head(y), "sum": y.sum((1, 2))} if attention_mask is not None else {"logits": self.head(y)}
        )


def test_generating_is_planned_once_a_padded_length() -> None:
    model = Causal().eval()
    par = autopar3d.simulate(model, (1, 2, 2), torch.zeros(2, 8, dtype=torch.int64))
    call = autopar3d.few_lengths(par, (8, 16))
    ids = torch.arange(32).reshape(2, 16) % 16
    with torch.no_grad():
        for n in range(1, 17):
            found = call(ids[:, :n])["logits"]
            assert found.shape == (2, n, 16)
            assert torch.allclose(found, model(ids[:, :n])["logits"], atol=1e-6), n
        assert len(par.__dict__["_ap3d"].steps) == 2
        with pytest.raises(InputError, match=r"args\[0\] has length 17 in dim 1, more than the largest of \(8, 16\)"):
            call(torch.zeros(2, 17, dtype=torch.int64))
        with pytest.raises(InputError, match=r"output\['sum'\] of shape \(2,\) has not the padded length 8"):
            call(ids[:, :5], attention_mask=torch.ones(2, 5))


def test_the_plans_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar3d.module._KEPT", 3)
    par, model = both()
    for n in (8, 1, 8, 2, 8, 3, 8):
        assert torch.allclose(par(rows(n)), model(rows(n)), atol=1e-6)
    sizes = [key[1][0][0][0] for key in par.__dict__["_ap3d"].steps]
    assert sizes == [2, 3, 8]
