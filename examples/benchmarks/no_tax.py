"""What the wrapper costs where there is nothing to parallelize: grid (1, 1, 1) beside the plain eager model.

    OMP_NUM_THREADS=1 python examples/benchmarks/no_tax.py

Forward, backward and AdamW of a GPT, in interleaved pairs; medians of CPU time (the machine may be busy with other
work) and of wall time. Then the parts of a step, and AdamW on many small DTensors beside plain tensors.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from tabulate import tabulate
from torch import Tensor, nn

import autopar3d
from examples.gpt import GPTConfig, make

Times = list[tuple[float, float]]  # CPU and wall seconds


def timed(function: Callable[[], object]) -> tuple[float, float]:
    busy, began = time.process_time(), time.perf_counter()
    function()
    return time.process_time() - busy, time.perf_counter() - began


def medians(times: Times) -> tuple[float, float]:
    cpu, wall = zip(*times, strict=True)
    return statistics.median(cpu) * 1e3, statistics.median(wall) * 1e3


def trainer(model: nn.Module, batch: tuple[Tensor, Tensor], *, optimizer: bool) -> Callable[[], None]:
    made = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)

    def step() -> None:
        made.zero_grad()
        model(*batch).backward()
        if optimizer:
            made.step()

    return step


def compare(first: Callable[[], None], second: Callable[[], None], pairs: int) -> tuple[list[float], list[float]]:
    """Medians (CPU, wall in ms) of both, and the medians of the ratios within pairs."""
    for _ in range(3):
        first()
        second()
    both = []
    for i in range(pairs):
        # Which one goes first changes, so that neither always finds the warm cache.
        order = (first, second) if i % 2 else (second, first)
        found = {f: timed(f) for f in order}
        both.append((found[first], found[second]))
    a, b = medians([x for x, _ in both]), medians([y for _, y in both])
    ratios = [statistics.median(y[i] / x[i] for x, y in both) for i in range(2)]
    return [*a, *b], ratios


def model_step(hidden: int, pairs: int, *, optimizer: bool) -> tuple[object, ...]:
    config = GPTConfig(vocab=512, block=128, layers=2, heads=8, hidden=hidden)
    plain, batch = make(config, batch=4)
    par = autopar3d.compile(make(config, batch=4)[0], (1, 1, 1), batch)
    numbers, ratios = compare(
        trainer(plain, batch, optimizer=optimizer), trainer(par, batch, optimizer=optimizer), pairs
    )
    what = "forward, backward, AdamW" if optimizer else "forward, backward"
    return (f"d={hidden} {what}", *numbers, *ratios)


class Many(nn.Module):
    """Many small parameters."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(size, size) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(x * w).sum() for w in self.weights]).sum()


def optimizer_step(count: int, size: int, repeats: int, **options: bool) -> tuple[object, ...]:
    """AdamW on `count` parameters of size x size: ours beside plain tensors with foreach=True."""
    plain, x = Many(count, size), torch.ones(size, size)
    par = autopar3d.compile(plain, (1, 1, 1), x)
    sides = []
    for model, wish in ((plain, {"foreach": True}), (par, options)):
        model(x).backward()
        sides.append(torch.optim.AdamW(model.parameters(), **wish).step)
    numbers, ratios = compare(sides[0], sides[1], repeats)
    return (f"AdamW, {count} of {size}x{size}, {options or 'default'}", *numbers, *ratios)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--hidden", type=lambda s: [int(n) for n in s.split(",")], default=[512, 128])
    pairs = parser.parse_args().pairs
    torch.set_num_threads(1)
    rows = [
        model_step(hidden, pairs, optimizer=optimizer)
        for hidden in parser.parse_args().hidden
        for optimizer in (False, True)
    ]
    header = ("", "plain CPU ms", "plain wall ms", "ours CPU ms", "ours wall ms", "ratio CPU", "ratio wall")
    print(tabulate(rows, header, floatfmt=".2f"), flush=True)
    ways: list[dict[str, bool]] = [{"foreach": True}, {"fused": True}, {}]
    rows = [optimizer_step(200, size, pairs, **options) for size in (16, 64) for options in ways]
    print(tabulate(rows, header, floatfmt=".2f"))


if __name__ == "__main__":
    main()
