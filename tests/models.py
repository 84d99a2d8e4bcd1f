"""The models of the test suite: small, seeded, without dropout, each returning a loss.

`MODELS[name]` is a pair of builders:

- `make_model(dtype)`: the model in training mode, the same weights at every call;
- `make_inputs(dtype)`: `(args, kwargs)` of one batch.

The output is a scalar loss, or an object with a `.loss`. Batch, sequence, heads and widths divide by 8, so
that any axis of eight ranks may cut any of them; Llama's four key/value heads do not, on purpose.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH, SEQUENCE, HIDDEN, HEADS, LAYERS, VOCABULARY = 8, 16, 64, 8, 2, 128

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
MakeModel = Callable[[torch.dtype], nn.Module]
MakeInputs = Callable[[torch.dtype], Inputs]


class MLP(nn.Module):
    """Three linears, two with a bias, and a cross-entropy loss inside."""

    def __init__(self, width: int = HIDDEN, classes: int = 16):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.down(F.gelu(self.up(x)))
        return F.cross_entropy(self.head(x), labels)


class Block(nn.Module):
    """Two convolutions with batch norm beside a (projected) shortcut."""

    def __init__(self, inner: int, outer: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outer)
        self.shortcut = nn.Identity()
        if stride != 1 or inner != outer:
            self.shortcut = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """A stem, two blocks and a linear head: batch norm's running statistics are the buffers of the suite."""

    def __init__(self, width: int = 16, classes: int = 16):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.pool = nn.MaxPool2d(2)
        self.blocks = nn.Sequential(Block(width, width, 1), Block(width, 2 * width, 2))
        self.head = nn.Linear(2 * width, classes)

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.pool(F.relu(self.norm(self.stem(images))))
        logits = self.head(F.adaptive_avg_pool2d(self.blocks(x), 1).flatten(1))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def loss_of(output: Any) -> Tensor:
    """The loss in any of these models' outputs."""
    if isinstance(output, Tensor):
        return output
    return output["loss"]


def _mlp() -> nn.Module:
    return MLP()


def _gpt() -> nn.Module:
    examples = str(Path(__file__).parents[1] / "examples")
    if examples not in sys.path:
        sys.path.append(examples)
    from gpt import GPT, GPTConfig

    return GPT(GPTConfig(vocab=VOCABULARY, block=SEQUENCE, layers=LAYERS, heads=HEADS, hidden=HIDDEN))


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=2 * SEQUENCE,
            n_embd=HIDDEN,
            n_layer=LAYERS,
            n_head=HEADS,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            intermediate_size=2 * HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS // 2,
            max_position_embeddings=2 * SEQUENCE,
        )
    )


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            intermediate_size=2 * HIDDEN,
            max_position_embeddings=2 * SEQUENCE,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=HIDDEN,
            d_kv=HIDDEN // HEADS,
            d_ff=2 * HIDDEN,
            num_layers=LAYERS,
            num_heads=HEADS,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            image_size=16,
            patch_size=4,
            num_channels=3,
            hidden_size=HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            intermediate_size=2 * HIDDEN,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=16,
        )
    )


def _resnet() -> nn.Module:
    return ResNet()


def _seeded(build: Callable[[], nn.Module]) -> MakeModel:
    def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = build()
            with torch.no_grad():  # off the 0 and 1 of fresh biases and norms, behind which dropped terms would hide
                for p in model.parameters():
                    p.add_(0.02 * torch.randn_like(p))
        return model.to(dtype).train()

    return make_model


def _tokens(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=generator)


def _rows(dtype: torch.dtype = torch.float32) -> Inputs:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, HIDDEN, generator=generator, dtype=torch.float64)
    return (x.to(dtype), torch.randint(16, (BATCH,), generator=generator)), {}


def _pairs(dtype: torch.dtype = torch.float32) -> Inputs:
    return (_tokens(1), _tokens(2)), {}


def _text(dtype: torch.dtype = torch.float32) -> Inputs:
    return (), {"input_ids": _tokens(1), "labels": _tokens(2)}


def _images(dtype: torch.dtype = torch.float32) -> Inputs:
    kwargs = _named_images(dtype)[1]
    return (kwargs["pixel_values"], kwargs["labels"]), {}


def _named_images(dtype: torch.dtype = torch.float32) -> Inputs:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(BATCH, 3, 16, 16, generator=generator, dtype=torch.float64)
    labels = torch.randint(16, (BATCH,), generator=generator)
    return (), {"pixel_values": images.to(dtype), "labels": labels}


MODELS: dict[str, tuple[MakeModel, MakeInputs]] = {
    "mlp": (_seeded(_mlp), _rows),
    "gpt": (_seeded(_gpt), _pairs),
    "gpt2": (_seeded(_gpt2), _text),
    "llama": (_seeded(_llama), _text),
    "bert": (_seeded(_bert), _text),
    "t5": (_seeded(_t5), _text),
    "vit": (_seeded(_vit), _named_images),
    "resnet": (_seeded(_resnet), _images),
}
