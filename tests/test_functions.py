"""Custom autograd functions: kept, trained right, cut where elementwise or given a rule, refused where they must be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import autopar3d
from autopar3d.errors import TraceError
from autopar3d.rules import RULES
from autopar3d.testing import Comparison, assert_trains_like_one_device

GRID = (2, 1, 2)


class Scaled(torch.autograd.Function):
    """Saved tensors, and an argument that is none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, k: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.k = k
        return x.sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return g * x.cos() * ctx.k, None


class Tutorial(torch.autograd.Function):
    """The ReLU of torch's tutorial, which writes into a masked part of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        g = 3 * g.clone()
        g[x < 0] = 0
        g[:, :2].mul_(0.5)
        return g


class Context(torch.autograd.Function):
    """forward and setup_context apart; tensors kept as attributes."""

    @staticmethod
    def forward(x: Tensor, y: Tensor, power: int = 2) -> tuple[Tensor, Tensor]:
        return x * y, x.pow(power)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.x, ctx.y, ctx.power = inputs
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, h: Tensor | None) -> Any:
        dx = dy = None
        if ctx.needs_input_grad[0]:
            dx = torch.zeros_like(ctx.x)
            if g is not None:
                dx = dx + g * ctx.y * 0.5
            if h is not None:
                dx = dx + h * ctx.power * ctx.x
        if ctx.needs_input_grad[1] and g is not None:
            dy = g * ctx.x
        return dx, dy, None


class Longer(Context):
    """Inherits all but its backward."""

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, h: Tensor | None) -> Any:
        return (None if g is None else 7 * g), (None if g is None else 5 * g), None


class Straight(torch.autograd.Function):
    """Straight-through rounding, once differentiable, with an index that has no gradient and a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor, int]:
        top = x.argmax(-1)
        ctx.mark_non_differentiable(top)
        return x.round(), top, 3

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, *_: Any) -> Any:
        return g * 2


class Reversal(torch.autograd.Function):
    """Returns its input, and calls another function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return -Scaled.apply(g, 0.5)


class RowNorm(torch.autograd.Function):
    """Reduces rows, and its weight's gradient over rows: nothing that could be cut unasked."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        scale = x.square().mean(-1, keepdim=True).add(1e-6).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        return x * scale * weight

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight, scale = ctx.saved_tensors
        n = x * scale
        h = g * weight
        return (h - n * (h * n).mean(-1, keepdim=True)) * scale, (g * n).flatten(0, -2).sum(0) * 2


class PerRow(torch.autograd.Function):
    """Looks at its length: elementwise by its ops only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * x.shape[0]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * g.shape[-1]


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.add_(1)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g


class Around(nn.Module):
    """A function between two linears; `taken` is how users keep `apply`."""

    def __init__(self, use: Callable[..., Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)
        self.weight = nn.Parameter(torch.linspace(0.5, 2.0, 8))
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.use(self.a(x), self.weight))


scaled = Scaled.apply

USES: dict[str, tuple[Callable[..., Any], bool]] = {
    "saved": (lambda x, w: scaled(x, 0.25), True),
    "in place": (lambda x, w: Tutorial.apply(x), False),
    "context": (lambda x, w: Context.apply(x, x.tanh(), 3)[0] + x, True),
    "default": (lambda x, w: sum(Context.apply(x, x.tanh())), True),
    "inherited": (lambda x, w: Longer.apply(x, x.tanh())[0], True),
    "outputs": (lambda x, w: Straight.apply(x)[0] * Straight.apply(x)[2] + Straight.apply(x)[1][:, None], False),
    "nested": (lambda x, w: Reversal.apply(x) * 2, True),
    "row norm": (lambda x, w: RowNorm.apply(x, w), False),
    "length": (lambda x, w: PerRow.apply(x), False),
    "no grad": (lambda x, w: x * Scaled.apply(x.detach(), 0.5), True),
    "autocast": (lambda x, w: _low(x), True),
}


def _low(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return Scaled.apply(x, 0.5) + x


def trained(use: Callable[..., Tensor], **options: Any) -> Comparison:
    torch.manual_seed(1)
    x = torch.randn(8, 8, dtype=torch.float64)
    make = lambda: (torch.manual_seed(0), Around(use).double())[1]  # noqa: E731
    return assert_trains_like_one_device(make, x, GRID, steps=2, **options)


@pytest.mark.parametrize("name", USES)
def test_a_function_trains_as_on_one_device(name: str) -> None:
    use, elementwise = USES[name]
    found = trained(use)
    assert bool(found.plan.without_rule) != elementwise, found.plan.without_rule


def test_its_own_backward_is_used_and_cut() -> None:
    plan = trained(lambda x, w: scaled(x, 0.25)).module
    assert plan.backward_graph is not None
    targets = [n.target for n in plan.backward_graph.graph.nodes]
    assert torch.ops.aten.cos.default in targets
    shapes = {tuple(n.meta["val"].shape) for n in plan.forward_graph.graph.nodes if "sin" in n.name}
    assert shapes and all(s[0] * s[1] < 64 for s in shapes)


def test_classes_are_left_as_they_were() -> None:
    before = dict(vars(Longer)), dict(vars(Scaled))
    trained(USES["inherited"][0])
    assert (dict(vars(Longer)), dict(vars(Scaled))) == before


def test_a_rule_of_its_class_lets_it_be_cut() -> None:
    RULES.rule(RowNorm, text="... h, h -> ... h | h")
    try:
        found = trained(USES["row norm"][0])
        assert not found.plan.without_rule
    finally:
        del RULES[RowNorm]


def test_what_cannot_be_a_graph_is_refused() -> None:
    with pytest.raises(TraceError, match="Dirty changes an argument in place .mark_dirty.*return a new tensor"):
        trained(lambda x, w: Dirty.apply(x * 1))

    def local(x: Tensor, w: Tensor) -> Tensor:
        class Late(Scaled):
            pass

        return Late.apply(x, 0.5)

    with pytest.raises(TraceError, match="Function Late.*define its class before the model is compiled"):
        trained(local)

    class Leaky(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return torch.as_tensor(x.numpy() + 1)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            return g

    with pytest.raises(TraceError, match="Leaky cannot be traced.*torch.library.custom_op"):
        trained(lambda x, w: Leaky.apply(x))

    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x + torch.randn_like(x)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            return g

    with pytest.raises(TraceError, match="Noisy draws random numbers"):
        trained(lambda x, w: Noisy.apply(x))


def test_real_ranks_agree(ranks: Any) -> None:
    assert ranks.run(_on_ranks, ranks=2) == [[], []]


def _on_ranks() -> list[str]:
    torch.manual_seed(1)
    x = torch.randn(8, 8)
    make = lambda: (torch.manual_seed(0), Around(USES["in place"][0]))[1]  # noqa: E731
    found = autopar3d.testing.trains_like_one_device(make, x, (2, 1, 1), steps=2, simulate=False)
    return list(map(str, found.failures))
