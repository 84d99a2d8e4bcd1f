"""What the planner finds: never worse than a named scheme, and what the best grid sends for known layers."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar3d.grid import Grid, factorisations
from autopar3d.hardware import PROFILES
from autopar3d.passes.canonicalize import canonicalize
from autopar3d.passes.propagate import SCHEMES
from autopar3d.passes.rewrite import rewrite
from autopar3d.passes.trace import trace
from autopar3d.plan import Decisions
from autopar3d.program import Program
from autopar3d.search.factors import Factors
from autopar3d.step import Options, decide
from examples.gpt import GPT, GPTConfig

linear = torch.ops.aten.linear.default


class MLP(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """A pre-norm transformer block with separate q, k, v, o without biases."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.mlp = MLP(hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, hidden = x.shape
        y = self.norm1(x)
        q, k, v = (f(y).view(batch, seq, hidden // 64, 64).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(batch, seq, hidden))
        return x + self.mlp(self.norm2(x))


class Inner(nn.Module):
    """A layer as it stands inside a model: what it reads is stored in shards and has a gradient."""

    def __init__(self, layer: nn.Module, rows: tuple[int, ...]) -> None:
        super().__init__()
        self.layer, self.rows = layer, nn.Parameter(torch.empty(rows))

    def forward(self) -> Tensor:
        return self.layer(torch.tanh(self.rows))  # an activation: weights are gathered again in backward, it is not


def program_of(make: Callable[[], nn.Module], *inputs: Tensor) -> Program:
    with torch.device("meta"):
        return canonicalize(trace(make(), inputs))


@functools.cache
def shaped(name: str) -> Program:
    tokens = torch.empty(512, 64, dtype=torch.long, device="meta")
    if name == "mlp":
        return program_of(lambda: MLP(4096), torch.empty(32768, 4096, device="meta"))
    if name == "gpt":
        return program_of(lambda: GPT(GPTConfig(4096, 64, 1, 8, 1024)), tokens, tokens.clone())
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=4096, hidden_size=1024, intermediate_size=2816, num_hidden_layers=1, num_attention_heads=16,
        num_key_value_heads=8, use_cache=False,
    )  # fmt: skip

    def make() -> nn.Module:
        model = LlamaForCausalLM(config)
        return model

    with torch.device("meta"):
        return canonicalize(trace(make(), (), {"input_ids": tokens, "labels": tokens.clone()}))


def decided(
    program: Program, factors: Factors, sizes: tuple[int, int, int], hardware: str, options: Options
) -> Decisions:
    return decide(program, factors, Grid(*sizes), PROFILES[hardware], options)


@pytest.mark.parametrize("sizes", [(2, 2, 2), (4, 2, 1), (4, 4, 4), (8, 4, 2), (8, 8, 8), (16, 8, 4)], ids=str)
@pytest.mark.parametrize("name", ["mlp", "gpt", "llama"])
def test_auto_is_never_worse_than_a_named_scheme(name: str, sizes: tuple[int, int, int]) -> None:
    program = shaped(name)
    factors = Factors(program.graph.graph)
    cost = {s: decided(program, factors, sizes, "h100", Options(scheme=s)).cost for s in SCHEMES}
    assert all(cost["auto"] <= c * (1 + 1e-9) for c in cost.values()), cost
    assert any(cost["auto"] < 0.99 * c for c in cost.values())


@pytest.mark.parametrize(
    ("layer", "rows", "devices", "most"),
    [
        (lambda: Block(1024), (8, 512, 1024), 8, 69.3),
        (lambda: Block(1024), (8, 512, 1024), 64, 28.1),
        (lambda: MLP(1024), (8, 512, 1024), 8, 37.8),
        (lambda: MLP(1024), (8, 512, 1024), 64, 16.3),
        (lambda: MLP(4096), (16, 2048, 4096), 64, 411.1),
    ],
    ids=["block-8", "block-64", "mlp-8", "mlp-64", "wide-mlp-64"],
)
def test_the_best_grid_sends_no_more_than(
    layer: Callable[[], nn.Module], rows: tuple[int, ...], devices: int, most: float
) -> None:
    """MB per rank and step of the linears' own tensors (gathered activations kept), and at most 2% for all else."""
    program = program_of(lambda: Inner(layer(), rows))
    factors = Factors(program.graph.graph)
    options = Options(outputs="sharded", regather="weights")
    grids = {tuple(sorted(g)): g for g in factorisations(devices)}  # axes are alike where only bytes count
    best = min((decided(program, factors, g, "bandwidth", options) for g in grids.values()), key=lambda d: d.cost)
    assert best.exact
    for node, spec in factors.specs.items():
        assert not spec.flops or best.grid.extent(best.strategies[node.name].axes) == devices
    nodes = {n.name: n for n in program.graph.graph.nodes}
    linears = others = 0.0
    for m in rewrite(program, factors, best, regather="weights").movements:
        sent = sum(t.elements for t in m.transfers) * m.dtype.itemsize / 1e6
        value = nodes[m.value]
        if m.kind != "inside" and (value.target is linear or any(u.target is linear for u in value.users)):
            linears += sent
        else:
            others += sent
    assert linears + others == pytest.approx(best.cost * 1e3)
    assert linears <= most
    assert others <= 0.02 * linears
