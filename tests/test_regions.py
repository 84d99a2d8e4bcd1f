"""Activation checkpointing: what is inside is computed again, not saved, and gradients stay what they were."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

import autopar3d
from autopar3d import collectives
from autopar3d.passes.trace import trace
from autopar3d.program import module_path, region
from tests.models import BATCH, HIDDEN, LAYERS, MODELS, SEQUENCE, loss_of

GRID = (2, 2, 2)


class Block(nn.Module):
    """Attention and an MLP with dropout; `how`: None, or `use_reentrant` of the checkpoint around both."""

    def __init__(self, how: bool | None, width: int = 16):
        super().__init__()
        self.how = how
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def run(self, x: Tensor, scale: Tensor, mask: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv.unbind(), attn_mask=mask).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.out(y), 0.1) * scale
        with torch.no_grad():
            shift = x.mean()
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), 0.1) - shift

    def forward(self, x: Tensor, scale: Tensor, mask: Tensor) -> Tensor:
        if self.how is None:
            return self.run(x, scale, mask)
        if self.how:
            return checkpoint(self.run, x, scale, mask, use_reentrant=True)
        return checkpoint(self.run, x, scale=scale, use_reentrant=False, mask=mask)


class Net(nn.Module):
    def __init__(self, how: bool | None):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.blocks = nn.ModuleList(Block(how) for _ in range(2))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x, scale = self.tokens(ids), torch.full((1,), 0.5)
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        for block in self.blocks:
            x = block(x, scale, mask)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


IDS = torch.arange(32).reshape(4, 8)


def trained(how: bool | None, regather: str) -> Any:
    par = autopar3d.simulate(Net(how), GRID, (IDS, IDS), regather=regather, hardware="bandwidth")
    par(IDS, IDS).backward()
    return par


@pytest.fixture(scope="module", params=["all", "none"])
def plain(request: pytest.FixtureRequest) -> tuple[str, Any]:
    return request.param, trained(None, request.param)


@pytest.mark.parametrize("how", [False, True], ids=["plain", "reentrant"])
def test_gradients_bit_for_bit_and_the_same_dropout(how: bool, plain: tuple[str, Any]) -> None:
    regather, without = plain
    par = trained(how, regather)
    for (name, p), q in zip(par.named_parameters(), without.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name
    plan = par.plan
    assert plan.memory["activations"] < without.plan.memory["activations"]
    assert plan.memory["peak backward"] < without.plan.memory["peak backward"]
    assert plan.backward_flops > without.plan.backward_flops
    assert any("2 regions of torch.utils.checkpoint" in note for note in plan.notes)
    # What the plan says is sent is what the two graphs send.
    sent: Counter[tuple[str, str]] = Counter()
    for graph in (par.forward_graph, par.backward_graph):
        for c in collectives(graph):
            sent[c.axis, c.kind] += c.bytes
    assert sent == plan.bytes_in("forward", "backward", "regather")


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Stack(nn.Module):
    """A linear and three residual blocks, under checkpoints as `run(block, x)` says."""

    def __init__(self, run: Any):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.run = nn.Linear(16, 16, bias=False), run
        self.blocks = nn.ModuleList(
            Residual(nn.Linear(16, 64, bias=False), nn.GELU(), nn.Linear(64, 16, bias=False)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = self.run(block, x)
        return x.square().mean()


def alone(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)


def nested(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(lambda y: checkpoint(block, y, use_reentrant=True), x, use_reentrant=False)


def in_order(block: Any, x: Tensor) -> Tensor:
    return checkpoint_sequential(block, 2, x, use_reentrant=False) + x


# Elements that a rank saves for backward beside parameters and inputs, with 32 rows: each block's input, and the last
# one's output, are quarters of 32 * 16; without a checkpoint there are in and out of the GELU, eighths of 32 * 64.
INPUTS, INSIDE = 4 * 32 * 16 // 4, 6 * 32 * 64 // 8
SAVED = {alone: INPUTS + INSIDE, nested: INPUTS, partial(checkpoint, use_reentrant=True): INPUTS}


@pytest.mark.parametrize("run", SAVED, ids=["alone", "nested", "reentrant"])
def test_saves_what_regions_take(run: Any) -> None:
    plan = autopar3d.plan(Stack(run), GRID, torch.randn(32, 16), scheme="3d", hardware="bandwidth")
    assert plan.memory["activations"] == 4 * SAVED[run]
    # Nothing is computed twice but the first product of each block: what a block gives is not needed again.
    again = 0 if run is alone else 3 * 2 * 32 * 16 * 64 // 8
    assert plan.backward_flops == 2 * plan.forward_flops - 2 * 32 * 16 * 16 // 8 + again
    parameters = 4 * (16 * 16 + 6 * 16 * 64) // 8
    assert plan.cost().memory == plan.memory["activations"] + 4 * parameters


def test_marks_regions_in_order() -> None:
    def regions(run: Any) -> list[int | None]:
        nodes = trace(Stack(run), (torch.randn(4, 16),)).graph.graph.nodes
        return [region(n) for n in nodes if n.op == "call_function" and "linear" in n.name]

    assert regions(alone) == [None] * 7
    assert regions(nested) == regions(partial(checkpoint, use_reentrant=True)) == [None, 0, 0, 1, 1, 2, 2]
    assert regions(in_order) == [None, 0, None, 1, None, 2, None]  # torch leaves the last part out


def test_a_policy_of_what_to_save_is_named_as_not_followed() -> None:
    def save(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        return op is torch.ops.aten.mm.default

    contexts = partial(create_selective_checkpoint_contexts, save)
    run = partial(checkpoint, use_reentrant=False, context_fn=contexts)
    (note,) = trace(Stack(run), (torch.randn(4, 16),)).notes
    assert "context_fn" in note
    assert "context_fn" not in trace(Stack(nested), (torch.randn(4, 16),)).notes[0]


def test_a_reentrant_region_without_a_gradient_to_its_arguments_trains_nothing() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(checkpoint(self.first, x, use_reentrant=True))

    par = autopar3d.simulate(Model(), (2, 1, 1), torch.ones(2, 4))
    par(torch.ones(2, 4)).sum().backward()
    assert par.first.weight.grad is None
    assert par.last.weight.grad is not None


@pytest.mark.parametrize(
    ("name", "reentrant", "layers", "kept"),
    # Of Llama's last layer the norm behind it saves a cast, outside of the layers.
    [
        ("gpt2", True, "transformer.h.", LAYERS),
        ("llama", False, "model.layers.", LAYERS - 1),
        ("bert", True, "bert.encoder.layer.", LAYERS),
    ],
)
def test_huggingface(name: str, reentrant: bool, layers: str, kept: int) -> None:
    make, make_inputs = MODELS[name]
    model = make(torch.float64)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    args, kwargs = make_inputs(torch.float64)
    par = autopar3d.simulate(model, GRID, args, example_kwargs=kwargs, scheme="3d", hardware="bandwidth")
    loss_of(par(*args, **kwargs)).backward()
    loss_of(model(*args, **kwargs)).backward()
    for (path, p), q in zip(par.named_parameters(), model.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), path
        assert p.grad is None or torch.allclose(p.grad, q.grad, atol=1e-6), path
    saved = [n for n in par.forward_graph.graph.output_node().args[0] if n.op != "placeholder"]
    inside = [n for n in saved if module_path(n).startswith(layers) and n.meta["val"].is_floating_point()]
    # Of each layer its output, which the next one takes, and nothing else.
    assert [n.meta["val"].numel() for n in inside] == [BATCH * SEQUENCE * HIDDEN // 8] * kept, inside
