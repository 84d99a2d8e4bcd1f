"""Tensors in one memory: what a user changes in place is either right, or refused, as on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar3d
from autopar3d.errors import InputError, StateError
from autopar3d.running.sharing import own_gradients, own_outputs


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.full((8,), 0.5))
        self.register_buffer("unread", torch.ones(8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = torch.sigmoid(self.linear(x) * self.scale)
        a, b = self.linear(x).chunk(2, -1)
        return h, a, b.reshape(-1)


def ones() -> Tensor:
    return torch.ones(4, 8)


def a_rank() -> Any:
    return autopar3d.compile(Model(), (1, 1, 1), ones())


def simulated(grid: tuple[int, int, int]) -> Callable[[], Any]:
    return lambda: autopar3d.simulate(Model(), grid, ones())


def grads(module: Any) -> list[Tensor]:
    return [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in module.parameters()]


MAKERS = [a_rank, simulated((1, 1, 1)), simulated((1, 2, 2))]


@pytest.mark.parametrize("make", MAKERS, ids=["rank", "alone", "simulated"])
def test_what_backward_needs_is_not_changed_unseen(make: Callable[[], Any]) -> None:
    par = make()
    x = ones()
    h, _, _ = par(x)
    x.mul_(3)
    with pytest.raises(StateError, match=r"input args\[0\] was changed in place between the call and its backward"):
        h.sum().backward()
    h, _, _ = par(ones())
    par.unread.mul_(3)
    h.sum().backward()  # the first backward from this output alone: forward runs again
    x = ones()
    h, _, _ = par(x)
    h.sum().backward()
    h, _, _ = par(x)
    x.mul_(3)
    with pytest.raises(StateError, match=r"input args\[0\]"):
        h.sum().backward()
    if make is not MAKERS[2]:  # there, each rank has a copy
        h, _, _ = par(ones())
        par.scale.mul_(3)
        with pytest.raises(StateError, match="buffer scale was changed"):
            h.sum().backward()
    if make is a_rank:
        h, _, _ = par(ones())
        with pytest.raises(StateError, match="an output was changed"):
            h.mul_(3).sum().backward()


@pytest.mark.parametrize("make", MAKERS, ids=["rank", "alone", "simulated"])
def test_outputs_may_be_changed_in_place(make: Callable[[], Any]) -> None:
    par, model = make(), Model()
    for module in par, model:
        with torch.no_grad():
            module(ones())[2].mul_(2)
        _, a, b = module(ones())
        if module is model:  # autograd refuses to change the parts of a chunk
            a, b = a.clone(), b.clone()
        a.mul_(3)
        b[0] = 0.0
        (a.square().sum() + 2 * b.sum()).backward()
    for found, wanted in zip(grads(par), grads(model), strict=True):
        torch.testing.assert_close(found, wanted)


class Sums(nn.Module):
    """Biases with one gradient, as an LSTM's; and gradients that one number fills."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.p, self.q = nn.Parameter(torch.zeros(4, 8)), nn.Parameter(torch.zeros(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x) + self.p + self.q


@pytest.mark.parametrize("defer", [False, True])
def test_gradients_are_scaled_once_each(defer: bool) -> None:
    par, model = autopar3d.compile(Sums(), (1, 1, 1), ones()), Sums()
    for module in par, model:
        seed = torch.ones(4, 8)
        if defer and module is par:
            with par.no_sync():
                par(ones()).backward(seed)
        elif defer:
            model(ones()).backward(seed)
        module(ones()).backward(seed)
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        for p in module.parameters():
            p.grad.mul_(2)
        assert torch.equal(seed, torch.ones(4, 8))
    for found, wanted in zip(grads(par), grads(model), strict=True):
        torch.testing.assert_close(found, wanted)
    par.zero_grad()
    par(ones()).sum().backward()
    nn.utils.clip_grad_norm_(par.parameters(), 1.0)  # an expanded number cannot be scaled in place


def test_what_is_copied_and_what_is_not() -> None:
    flat = torch.arange(8.0)
    bucket = [flat[:4], flat[4:]]
    assert all(a is b for a, b in zip(own_gradients(bucket, []), bucket, strict=True))
    whole, part = own_gradients([flat, flat[2:4]], [])
    part.mul_(2)
    assert torch.equal(whole, torch.arange(8.0)) and torch.equal(part, torch.tensor([4.0, 6.0]))
    assert own_gradients([flat], [flat])[0].data_ptr() != flat.data_ptr()
    assert own_gradients([torch.ones(1).expand(4)], [])[0].stride() == (1,)
    views = own_outputs(bucket, [])
    assert [v.data_ptr() for v in views] == [b.data_ptr() for b in bucket] and not any(v._is_view() for v in views)
    assert own_outputs(bucket, [flat])[0].data_ptr() != flat.data_ptr()


def test_gradients_of_gradients_are_refused() -> None:
    par = autopar3d.simulate(nn.Linear(8, 8), (2, 1, 1), ones())
    x = ones().requires_grad_()
    with pytest.raises(StateError, match="create_graph=True: gradients of gradients are not computed"):
        torch.autograd.grad(par(x).sum(), x, create_graph=True)


def test_transforms_of_functions_are_refused() -> None:
    par = autopar3d.simulate(nn.Linear(8, 8), (2, 1, 1), ones())
    with pytest.raises(InputError, match="torch.func's transforms .* do not go through a parallel module"):
        torch.func.vmap(par)(ones())
    with pytest.raises(InputError, match="torch.autograd.grad gives gradients"):
        torch.func.grad(lambda x: par(x).sum())(ones())
