"""Train a character-level GPT on a 3-D grid of local ranks, and beside it on one device.

    python examples/train_gpt.py --grid 2,2,2 --steps 150

The text ships with Python. The ranks are started here; under torchrun, those that exist are used:

    torchrun --nproc-per-node 8 examples/train_gpt.py --grid 2,2,2 --device cuda
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig
from torch import Tensor, nn

import autopar3d


@dataclass(frozen=True)
class Run:
    """What one training run leaves: plain data, so that a rank can send it to its parent."""

    losses: list[float]
    tokens_per_second: float
    state: dict[str, Tensor]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", default="2,2,2", help="sizes of the axes x,y,z")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float64"])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw both loss curves into FILE")
    options = parser.parse_args()
    try:
        options.grid = tuple(int(size) for size in options.grid.split(","))
    except ValueError:
        parser.error(f"--grid {options.grid}: give three sizes, as in 2,2,2")
    if len(options.grid) != 3 or min(options.grid) < 1:
        parser.error(f"--grid {options.grid}: give three sizes of 1 and more, as in 2,2,2")
    for name in ("steps", "batch", "seq", "hidden", "layers", "heads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: give a whole number of at least 1")
    if options.plot is not None and not options.plot.resolve().parent.is_dir():
        parser.error(f"--plot {options.plot}: there is no folder {options.plot.parent}")
    if options.device == "cuda" and "RANK" not in os.environ:
        parser.error("--device cuda needs one process per GPU: start this script with torchrun")
    return options


def encode() -> tuple[Tensor, int]:
    """The text as one long row of character numbers, and the size of the vocabulary."""
    text = "\n".join(topics[name] for name in sorted(topics))
    letters = {letter: i for i, letter in enumerate(sorted(set(text)))}
    # A vocabulary that is a multiple of 16 can be cut over any small grid; the unused rows do no harm.
    vocab = math.ceil(len(letters) / 16) * 16
    return torch.tensor([letters[letter] for letter in text]), vocab


def batches(text: Tensor, options: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    """The same endless stream of random windows `(ids, labels)` for everyone who asks."""
    generator = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(text) - options.seq, (options.batch,), generator=generator)
        windows = torch.stack([text[start : start + options.seq + 1] for start in starts.tolist()])
        yield (
            windows[:, :-1].contiguous().to(options.device),
            windows[:, 1:].contiguous().to(options.device),
        )


def make_model(vocab: int, options: argparse.Namespace) -> GPT:
    config = GPTConfig(
        vocab=vocab, block=options.seq, layers=options.layers, heads=options.heads, hidden=options.hidden
    )
    return GPT(config).to(options.device, getattr(torch, options.dtype))


def train(model: nn.Module, text: Tensor, options: argparse.Namespace, report: bool) -> tuple[list[float], float]:
    """The training loop, the same for one device and for a grid: the losses and the tokens per second."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    losses: list[float] = []
    start = time.perf_counter()
    for step, (ids, labels) in zip(range(options.steps), batches(text, options), strict=False):
        optimizer.zero_grad()
        loss = model(ids, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step == 0:
            start = time.perf_counter()  # the first step warms up
        if report and (step % 10 == 0 or step == options.steps - 1):
            rate = step * ids.numel() / (time.perf_counter() - start)
            speed = f"   {rate:8.0f} tokens/s" if step else ""
            print(f"step {step:4d}   loss {losses[-1]:.4f}{speed}", flush=True)
    seconds = time.perf_counter() - start
    return losses, (options.steps - 1) * options.batch * options.seq / max(seconds, 1e-9)


def train_on_grid(options: argparse.Namespace) -> Run | None:
    """What every rank runs; the result is rank 0's."""
    text, vocab = encode()
    model = make_model(vocab, options)
    par = autopar3d.compile(model, grid=options.grid, example_inputs=next(batches(text, options)))
    del model  # par has taken its share
    first = dist.get_rank() == 0
    if first:
        print(par.plan, flush=True)
    losses, rate = train(par, text, options, report=first)
    state = par.full_state_dict()  # a collective: every rank takes part
    return Run(losses, rate, {name: value.cpu() for name, value in state.items()}) if first else None


def train_alone(options: argparse.Namespace) -> Run:
    """The same model, batches and optimizer on one device."""
    text, vocab = encode()
    model = make_model(vocab, options)
    losses, rate = train(model, text, options, report=False)
    return Run(losses, rate, {name: value.cpu() for name, value in model.state_dict().items()})


def compare(grid: Run, alone: Run, options: argparse.Namespace) -> None:
    """Print, and plot on request, how far the grid's run is from one device's."""
    loss = max(abs(a - b) for a, b in zip(grid.losses, alone.losses, strict=True))
    assert grid.state.keys() == alone.state.keys(), "the names of the parameters changed"
    parameter = max((grid.state[name] - alone.state[name]).abs().max().item() for name in alone.state)
    name = "x".join(map(str, options.grid))
    print(f"\nafter {options.steps} steps        {name:>12}   one device")
    print(f"first loss           {grid.losses[0]:12.4f} {alone.losses[0]:12.4f}")
    print(f"last loss            {grid.losses[-1]:12.4f} {alone.losses[-1]:12.4f}")
    print(f"tokens/s             {grid.tokens_per_second:12.0f} {alone.tokens_per_second:12.0f}")
    print(f"largest difference of a step's loss       {loss:.2e}")
    print(f"largest difference of a parameter, at end {parameter:.2e}")
    if options.plot:
        plot(grid, alone, options)


def plot(grid: Run, alone: Run, options: argparse.Namespace) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot(alone.losses, linewidth=3, alpha=0.4, label="one device")
    axes.plot(grid.losses, linewidth=1, label=f"grid {options.grid}")
    axes.set(xlabel="step", ylabel="loss", title=f"Character-level GPT, {options.dtype}")
    axes.legend()
    figure.savefig(options.plot, dpi=120, bbox_inches="tight")
    print(f"loss curves in {options.plot}")


def main() -> None:
    options = parse()
    if "RANK" in os.environ:  # under torchrun
        if options.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
        result = train_on_grid(options)
        dist.destroy_process_group()
    else:
        result = autopar3d.launch(train_on_grid, options, grid=options.grid, timeout=3600)[0]
    if result is not None:
        compare(result, train_alone(options), options)


if __name__ == "__main__":
    main()
