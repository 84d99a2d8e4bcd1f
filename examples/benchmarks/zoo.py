"""Does it work on the architectures that people use? Small HuggingFace models from configs, on (2,2,2) and (1,2,4).

    python examples/benchmarks/zoo.py                                        # all, some ten minutes of CPU
    python examples/benchmarks/zoo.py --models llama whisper --grids 2,2,2   # some
    python examples/benchmarks/zoo.py --keep zoo.jsonl --write docs/zoo.md   # the page

Each is traced, planned and simulated: the loss and every gradient beside one device's, in float64 with a tolerance of
1e-5 (HuggingFace computes parts in float32 whatever the dtype). "sharded" is the share of the floating point operations
of matmuls, convolutions and attention that no rank does twice.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tabulate import tabulate
from torch import Tensor, nn

from autopar3d.testing import trains_like_one_device

GRIDS = ((2, 2, 2), (1, 2, 4))
BATCH, LENGTH, WORDS, CLASSES = 4, 16, 96, 8

TEXT: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT |= {"intermediate_size": 64, "max_position_embeddings": 64, "pad_token_id": 0}
TEXT |= {"bos_token_id": 1, "eos_token_id": 2}
GROUPED = TEXT | {"num_key_value_heads": 2}
SEQ2SEQ: dict[str, Any] = {"vocab_size": WORDS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2}
SEQ2SEQ |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 64}
SEQ2SEQ |= {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SEQ2SEQ |= {"decoder_start_token_id": 2, "forced_eos_token_id": None}
VISION: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
VISION |= {"image_size": 32, "patch_size": 8, "num_labels": CLASSES}

Inputs = dict[str, Tensor]


def _tokens(*names: str) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    return {n: torch.randint(3, WORDS, (BATCH, LENGTH), generator=generator) for n in names}


def _masked() -> Inputs:
    mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    mask[0, LENGTH // 2 :] = 0
    return _tokens("input_ids", "labels") | {"attention_mask": mask}


def _language() -> Inputs:
    return _tokens("input_ids", "labels")


def _translation() -> Inputs:
    return _tokens("input_ids", "decoder_input_ids", "labels")


def _labels() -> Tensor:
    return torch.arange(BATCH) % CLASSES


def _pixels(size: int = 32) -> Callable[[], Inputs]:
    def make() -> Inputs:
        images = torch.randn(BATCH, 3, size, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return {"pixel_values": images, "labels": _labels()}

    return make


def _speech() -> Inputs:
    sound = torch.randn(BATCH, 8, 2 * LENGTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return {"input_features": sound} | _tokens("decoder_input_ids", "labels")


def _waves() -> Inputs:
    sound = torch.randn(BATCH, 400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return {"input_values": sound, "labels": _labels()}


@dataclass(frozen=True)
class Entry:
    """One architecture: what it is called in transformers, the head it gets, and a small config."""

    kind: str
    model_type: str
    head: str
    inputs: Callable[[], Inputs]
    config: dict[str, Any]

    def make(self) -> nn.Module:
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(self.model_type, **self.config)
        for part in (config, *(c for c in vars(config).values() if isinstance(c, transformers.PretrainedConfig))):
            for name, value in vars(part).items():
                # One device's own masks are not ours; all else stays as the config has it.
                if isinstance(value, float) and ("drop" in name or name.startswith("mask_")):
                    setattr(part, name, 0.0)
        config._experts_implementation = "batched_mm"  # one graph whatever the routing, in any dtype
        model: nn.Module = getattr(transformers, f"AutoModelFor{self.head}").from_config(config)
        return model.double().train()


MLM, CLM, S2S, IMG = "MaskedLM", "CausalLM", "Seq2SeqLM", "ImageClassification"


def _entries() -> Iterable[Entry]:
    bert = TEXT | {"type_vocab_size": 2}
    for name in ("bert", "roberta", "electra", "mpnet", "xlm-roberta", "ernie", "roformer", "megatron-bert"):
        yield Entry("encoder", name, MLM, _masked, bert | ({"embedding_size": 32} if name == "electra" else {}))
    yield Entry("encoder", "albert", MLM, _masked, bert | {"embedding_size": 16})
    yield Entry(
        "encoder",
        "distilbert",
        MLM,
        _masked,
        {"vocab_size": WORDS, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "max_position_embeddings": 64},
    )
    yield Entry(
        "encoder",
        "deberta-v2",
        MLM,
        _masked,
        bert | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
    )
    yield Entry("encoder", "convbert", MLM, _masked, bert | {"embedding_size": 32, "head_ratio": 2})
    yield Entry("encoder", "fnet", MLM, _language, bert)
    yield Entry("encoder", "modernbert", MLM, _masked, TEXT | {"cls_token_id": 1, "sep_token_id": 2})
    small = {"vocab_size": WORDS, "bos_token_id": 1, "eos_token_id": 2}
    yield Entry("decoder", "gpt2", CLM, _language, small | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64})
    yield Entry(
        "decoder",
        "gptj",
        CLM,
        _language,
        small | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4},
    )
    yield Entry(
        "decoder",
        "codegen",
        CLM,
        _language,
        small | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4},
    )
    yield Entry(
        "decoder",
        "gpt_neo",
        CLM,
        _language,
        small
        | {
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
            "max_position_embeddings": 64,
        },
    )
    yield Entry("decoder", "opt", CLM, _masked, TEXT | {"ffn_dim": 64, "word_embed_proj_dim": 32})
    yield Entry("decoder", "bloom", CLM, _masked, small | {"hidden_size": 32, "n_layer": 2, "n_head": 4})
    yield Entry("decoder", "falcon", CLM, _language, TEXT | {"alibi": False})
    yield Entry(
        "decoder",
        "mpt",
        CLM,
        _language,
        {"vocab_size": WORDS, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
    )
    yield Entry("decoder", "biogpt", CLM, _masked, TEXT)
    for name in ("gpt_neox", "phi", "stablelm"):
        yield Entry("decoder", name, CLM, _masked, TEXT | {"num_key_value_heads": 4})
    for name in (
        "llama",
        "mistral",
        "qwen2",
        "gemma",
        "gemma2",
        "starcoder2",
        "olmo",
        "cohere",
        "granite",
        "phi3",
        "qwen3",
    ):
        heads = {"head_dim": 8} if name in ("gemma", "gemma2", "qwen3") else {}
        window = {"sliding_window": 8} if name in ("mistral", "gemma2") else {}
        yield Entry("decoder", name, CLM, _masked, GROUPED | heads | window)
    yield Entry("experts", "mixtral", CLM, _language, GROUPED | {"num_local_experts": 4})
    yield Entry(
        "experts",
        "qwen2_moe",
        CLM,
        _language,
        GROUPED | {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    )
    yield Entry(
        "state space",
        "mamba",
        CLM,
        _language,
        small | {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "use_mambapy": False},
    )
    yield Entry(
        "encoder-decoder",
        "t5",
        S2S,
        _translation,
        {
            "vocab_size": WORDS,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
    )
    for name in ("bart", "mbart", "marian", "pegasus", "m2m_100", "blenderbot-small"):
        yield Entry("encoder-decoder", name, S2S, _translation, SEQ2SEQ)
    yield Entry(
        "audio",
        "whisper",
        "SpeechSeq2Seq",
        _speech,
        SEQ2SEQ
        | {
            "num_mel_bins": 8,
            "max_source_positions": LENGTH,
            "max_target_positions": 64,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
    )
    yield Entry(
        "audio",
        "wav2vec2",
        "AudioClassification",
        _waves,
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "conv_dim": (16, 16),
            "conv_kernel": (10, 3),
            "conv_stride": (5, 2),
            "num_labels": CLASSES,
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
            "classifier_proj_size": 16,
            "mask_time_prob": 0.0,
            "mask_feature_prob": 0.0,
        },
    )
    for name in ("vit", "beit", "dinov2"):
        yield Entry("vision", name, IMG, _pixels(), VISION)
    yield Entry(
        "vision",
        "swin",
        IMG,
        _pixels(),
        {
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 2,
            "image_size": 32,
            "patch_size": 4,
            "num_labels": CLASSES,
        },
    )
    yield Entry(
        "vision",
        "convnext",
        IMG,
        _pixels(),
        {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2, "num_labels": CLASSES},
    )
    yield Entry(
        "vision",
        "resnet",
        IMG,
        _pixels(),
        {
            "embedding_size": 16,
            "hidden_sizes": [16, 32],
            "depths": [1, 1],
            "layer_type": "basic",
            "num_labels": CLASSES,
        },
    )
    yield Entry(
        "vision",
        "regnet",
        IMG,
        _pixels(),
        {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "groups_width": 8, "num_labels": CLASSES},
    )
    yield Entry("vision", "mobilenet_v2", IMG, _pixels(64), {"depth_multiplier": 0.25, "num_labels": CLASSES})
    yield Entry(
        "vision",
        "segformer",
        IMG,
        _pixels(),
        {
            "hidden_sizes": [16, 32],
            "depths": [1, 1],
            "num_encoder_blocks": 2,
            "num_attention_heads": [2, 4],
            "sr_ratios": [2, 1],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "mlp_ratios": [2, 2],
            "num_labels": CLASSES,
        },
    )
    yield Entry(
        "vision",
        "poolformer",
        IMG,
        _pixels(),
        {"hidden_sizes": [16, 32, 32, 32], "depths": [1, 1, 1, 1], "num_labels": CLASSES},
    )


ENTRIES = {e.model_type: e for e in _entries()}


@dataclass(frozen=True)
class Row:
    """What came of one architecture on one grid."""

    kind: str
    model: str
    grid: str
    worst: float | None
    """The largest relative difference of the loss or a gradient; None if it could not be run."""
    share: float
    without: str
    result: str

    @property
    def equal(self) -> bool:
        return self.result == "equal"

    @property
    def cells(self) -> tuple[str, ...]:
        worst, share = ("-", "-") if self.worst is None else (f"{self.worst:.0e}", f"{self.share:.1%}")
        return self.kind, self.model, self.grid, worst, share, self.without, self.result


def try_one(entry: Entry, grid: tuple[int, int, int], *, debug: bool = False) -> Row:
    """Trains one architecture for a step, beside one device."""
    name = "({},{},{})".format(*grid)
    try:
        found = trains_like_one_device(entry.make, (), grid, example_kwargs=entry.inputs(), steps=1, tol=1e-5)
    except Exception as error:
        if debug:
            traceback.print_exc()
        said = str(error).strip().splitlines() or [""]
        return Row(entry.kind, entry.model_type, name, None, 0.0, "-", f"{type(error).__name__}: {said[0][:60]}")
    # An optimizer step says nothing here about a gradient that is rounding alone.
    failures = [d for d in found.failures if d.kind != "parameter"]
    worst = max((v for k, v in found.worst.items() if k != "parameter"), default=0.0)
    plan = found.plan
    # Of T operations a share s is split and the rest repeated: a rank does s T / P + (1 - s) T of them.
    ranks = grid[0] * grid[1] * grid[2]
    share = min(1.0, (ranks - plan.flops / plan.ideal_flops) / (ranks - 1))
    result = f"{len(failures)} differ: {failures[0].kind} {failures[0].name}"[:60] if failures else "equal"
    return Row(entry.kind, entry.model_type, name, worst, share, ", ".join(plan.without_rule) or "-", result)


def kept_rows(path: Path | None) -> dict[tuple[str, str], Row]:
    """The rows of a file of earlier runs, by model and grid."""
    if path is None or not path.exists():
        return {}
    rows = [Row(**json.loads(line)) for line in path.read_text().splitlines()]
    return {(row.model, row.grid): row for row in rows}


def page(rows: list[Row], kept: bool) -> str:
    """The table, what it adds up to, and how it was made."""
    header = ("kind", "model", "grid", "worst", "sharded", "without a rule", "result")
    table = tabulate([row.cells for row in rows], header, tablefmt="github", disable_numparse=True)
    equal = [row for row in rows if row.equal]
    high = sum(row.share >= 0.95 for row in equal)
    command = "python examples/benchmarks/zoo.py" + (" --keep zoo.jsonl" if kept else "") + " --write docs/zoo.md"
    summary = (
        f"{len({row.model for row in rows})} architectures: {len(equal)} of {len(rows)} rows are equal, and {high} of "
        f"them have at least 95% of the operations sharded.\n\nWritten on {datetime.date.today()} with torch "
        f"{torch.__version__} and transformers {transformers.__version__}, by\n`{command}`."
    )
    return f"# HuggingFace architectures\n\n{__doc__}\n{summary}\n\n{table}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(ENTRIES), help="names of transformers' model types")
    parser.add_argument("--grids", nargs="+", default=["2,2,2", "1,2,4"])
    parser.add_argument("--keep", type=Path, help="append each row to this file, and run none that it has")
    parser.add_argument("--write", type=Path, help="write the table to this page")
    parser.add_argument("--debug", action="store_true", help="print tracebacks")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    kept = kept_rows(given.keep)
    rows = []
    for model in given.models:
        for grid in given.grids:
            row = kept.get((model, f"({grid})"))
            if row is None:
                start = time.process_time()
                x, y, z = map(int, grid.split(","))
                row = try_one(ENTRIES[model], (x, y, z), debug=given.debug)
                print(*row.cells, f"{time.process_time() - start:.0f} s of CPU", flush=True)
                if given.keep:
                    with given.keep.open("a") as file:
                        file.write(json.dumps(asdict(row)) + "\n")
            rows.append(row)
    text = page(rows, bool(given.keep))
    print(text)
    if given.write:
        given.write.write_text(text)


if __name__ == "__main__":
    main()
