"""Random numbers in training: the same on every grid, new at every step, resumed exactly; nothing in evaluation."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar3d
from autopar3d.plan import Plan

GRIDS = [(2, 2, 2), (1, 2, 4), (4, 4, 4)]


class Noisy(nn.Module):
    """Every kind of random number, behind and before sharded dims of all sorts."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.out = nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = F.dropout(x, 0.1, self.training)
        q, k, v = self.qkv(x).view(*x.shape[:-1], 3, 8, 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3 if self.training else 0.0, is_causal=True)
        y = self.out(y.transpose(1, 2).flatten(2))
        if self.training:
            path = (torch.rand(x.shape[0], 1, 1, dtype=x.dtype) < 0.8).to(x.dtype)
            y = y * path + 0.1 * torch.randn_like(y)
        y = self.norm(x + F.dropout(y, 0.5, self.training))
        return {"loss": y.square().mean() + y[..., 0].sin().sum(), "y": y}


def _model() -> Noisy:
    torch.manual_seed(0)
    return Noisy().double()


def _input() -> Tensor:
    return torch.randn(8, 8, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def _compiled(grid: tuple[int, int, int], **how: Any) -> Any:
    return autopar3d.simulate(_model(), grid, _input(), outputs="global", **how)


def _steps(par: Any, count: int) -> list[Tensor]:
    """Outputs, losses and gradients of some steps."""
    found = []
    for _ in range(count):
        out = par(_input())
        par.zero_grad()
        out["loss"].backward()
        found += [out["loss"].detach(), out["y"].detach()]
        found += [p.grad.clone() for p in par.parameters()]
    return found


@functools.cache
def _alone() -> list[Tensor]:
    return _steps(_compiled((1, 1, 1)), 2)


def _assert_equal(found: list[Tensor], wanted: list[Tensor]) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).abs().max() <= 1e-10 * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_same_on_every_grid(grid: tuple[int, int, int]) -> None:
    _assert_equal(_steps(_compiled(grid), 2), _alone())


def test_steps_and_seeds_differ() -> None:
    alone = _alone()
    half = len(alone) // 2
    assert not torch.allclose(alone[1], alone[half + 1])
    other = _steps(_compiled((1, 1, 1), seed=1), 1)
    assert not torch.allclose(other[1], alone[1])


def test_resumed_on_another_grid() -> None:
    par = _compiled((1, 1, 1))
    _steps(par, 1)
    state = par.random_state()
    assert state == {"seed": 0, "step": 1}
    resumed = _compiled((2, 2, 1), seed=7)
    resumed.set_random_state(state)
    half = len(_alone()) // 2
    _assert_equal(_steps(resumed, 1), _alone()[half:])


def test_a_copy_goes_on_by_itself() -> None:
    par = _compiled((2, 1, 1))
    _steps(par, 1)
    twin = copy.deepcopy(par)
    first, second = _steps(twin, 1), _steps(par, 1)
    _assert_equal(first, second)
    assert par.random_state() == twin.random_state() == {"seed": 0, "step": 2}


def test_names_and_state_are_the_models() -> None:
    assert list(_compiled((2, 1, 1)).state_dict()) == list(_model().state_dict())


def test_without_gradients_the_same_is_drawn() -> None:
    par = _compiled((2, 2, 1))
    with torch.no_grad():
        y = par(_input())["y"]
    _assert_equal([y], [_alone()[1]])


def test_a_backward_nobody_planned_sees_the_same_mask() -> None:
    """Gradients from `y` where they were planned from the loss: the forward is run again."""
    wanted, found = [], []
    for grid, into in (((1, 1, 1), wanted), ((2, 2, 2), found)):
        par = _compiled(grid)
        par(_input())["y"].square().sum().backward()
        into += [p.grad for p in par.parameters()]
    _assert_equal(found, wanted)


def test_evaluation_draws_nothing() -> None:
    par, model = _compiled((2, 2, 2)).eval(), _model().eval()
    with torch.no_grad():
        _assert_equal([par(_input())["y"]], [model(_input())["y"]])
    assert par.random_state()["step"] == 0


def test_the_plan_says_what_attention_costs() -> None:
    plan = _compiled((2, 2, 1)).plan
    assert "unfused" in str(plan)
    assert plan.notes
    assert Plan.from_dict(plan.to_dict()).notes == plan.notes


def test_self_check_with_dropout() -> None:
    _compiled((2, 1, 1), check=True)


def _on_real_ranks() -> list[Tensor]:
    par = autopar3d.compile(_model(), (2, 2, 1), _input(), outputs="global")
    out = par(_input())
    out["loss"].backward()
    return [out["loss"].detach(), out["y"].detach(), *(p.grad.full_tensor() for p in par.parameters())]


@pytest.mark.slow
def test_real_ranks() -> None:
    for found in autopar3d.launch(_on_real_ranks, grid=(2, 2, 1)):
        _assert_equal(found, _alone()[: len(found)])


@pytest.mark.slow
@pytest.mark.parametrize("grid", [(2, 2, 2), (1, 2, 4)], ids=str)
def test_gpt2_with_its_own_dropouts(grid: tuple[int, int, int]) -> None:
    found, wanted = _gpt2(grid), _gpt2((1, 1, 1))
    # HuggingFace computes the loss in single precision.
    assert abs(found[0] - wanted[0]) < 1e-6
    for name, grad in wanted[1].items():
        assert (found[1][name] - grad).abs().max() < 1e-10
    assert abs(found[2] - wanted[2]) < 1e-6


@functools.cache
def _gpt2(grid: tuple[int, int, int]) -> tuple[float, dict[str, Tensor], float]:
    """Training loss and gradients, and the loss in evaluation."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=8, bos_token_id=0, eos_token_id=0)
    assert config.attn_pdrop == config.resid_pdrop == config.embd_pdrop == 0.1
    model = GPT2LMHeadModel(config).double().train()
    ids = torch.randint(64, (8, 8), generator=torch.Generator().manual_seed(2))
    par = autopar3d.simulate(model, grid, example_kwargs={"input_ids": ids, "labels": ids}, outputs="loss")
    loss = par(input_ids=ids, labels=ids).loss
    loss.backward()
    with torch.no_grad():
        quiet = par.eval()(input_ids=ids, labels=ids).loss
        assert torch.allclose(quiet, model.eval()(input_ids=ids, labels=ids).loss, atol=1e-6)
    return float(loss.detach()), {name: p.grad for name, p in par.named_parameters()}, float(quiet)
