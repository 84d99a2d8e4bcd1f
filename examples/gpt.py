"""A plain GPT, written as one writes it for a single device: nothing in here knows about autopar3d."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """Sizes and options of a `GPT`."""

    vocab: int = 128
    block: int = 64  # the longest sequence
    layers: int = 2
    heads: int = 4
    hidden: int = 128
    bias: bool = True
    tied: bool = False  # one weight for the token embedding and the head


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        if config.hidden % config.heads:
            raise ValueError(f"hidden {config.hidden} is not a multiple of heads {config.heads}")
        self.heads = config.heads
        self.q = nn.Linear(config.hidden, config.hidden, bias=config.bias)
        self.k = nn.Linear(config.hidden, config.hidden, bias=config.bias)
        self.v = nn.Linear(config.hidden, config.hidden, bias=config.bias)
        self.o = nn.Linear(config.hidden, config.hidden, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, hidden = x.shape
        q, k, v = (
            linear(x).view(batch, seq, self.heads, hidden // self.heads).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(batch, seq, hidden))


class MLP(nn.Module):
    """The feed-forward half of a block."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden, 4 * config.hidden, bias=config.bias)
        self.down = nn.Linear(4 * config.hidden, config.hidden, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden, bias=config.bias)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.hidden, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A decoder-only transformer; the same config and seed give the same weights everywhere."""

    def __init__(self, config: GPTConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.hidden)
        self.positions = nn.Embedding(config.block, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden, bias=config.bias)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.tokens.weight
        self._initialise(seed)

    def _initialise(self, seed: int) -> None:
        if self.tokens.weight.is_meta:
            return
        # As GPT-2: normal weights, smaller where a branch joins the residual stream; no bias at first.
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                joins = name.endswith(("o.weight", "down.weight"))
                std = 0.02 / (2 * self.config.layers) ** 0.5 if joins else 0.02
                nn.init.normal_(parameter, std=std, generator=generator)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        """The mean cross-entropy of `targets` where they are given, else the logits."""
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.tokens(ids) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make(config: GPTConfig | None = None, batch: int = 8, seed: int = 0) -> tuple[GPT, tuple[Tensor, Tensor]]:
    """A small model and one batch `(ids, labels)` of random tokens for it."""
    config = config or GPTConfig()
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(config.vocab, (batch, config.block + 1), generator=generator)
    return GPT(config, seed), (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
