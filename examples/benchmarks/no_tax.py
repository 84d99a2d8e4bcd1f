"""What the wrapper costs where there is nothing to parallelize: grid (1, 1, 1) beside the plain eager model.

    OMP_NUM_THREADS=1 python examples/benchmarks/no_tax.py

Forward, backward and AdamW of a GPT, in interleaved pairs; medians of CPU time (the machine may be busy with other
work) and of wall time. The same with `backend="inductor"` beside `torch.compile` of the plain model. Then what of a
step is outside of the two graphs, and AdamW on many small parameters: ours, and DTensors made without autopar3d,
beside plain tensors.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

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


def models(hidden: int, backend: str) -> tuple[nn.Module, autopar3d.ParallelModule, tuple[Tensor, Tensor]]:
    """The plain model, compiled by torch for "inductor", ours, and a batch."""
    config = GPTConfig(vocab=512, block=128, layers=2, heads=8, hidden=hidden)
    plain, batch = make(config, batch=4)
    par = autopar3d.compile(make(config, batch=4)[0], (1, 1, 1), batch, backend=backend)
    return torch.compile(plain) if backend == "inductor" else plain, par, batch


def model_step(hidden: int, pairs: int, backend: str, *, optimizer: bool) -> tuple[object, ...]:
    plain, par, batch = models(hidden, backend)
    numbers, ratios = compare(
        trainer(plain, batch, optimizer=optimizer), trainer(par, batch, optimizer=optimizer), pairs
    )
    what = "forward, backward, AdamW" if optimizer else "forward, backward"
    return (f"{backend}, d={hidden}, {what}", *numbers, *ratios)


def parts(hidden: int, repeats: int) -> tuple[object, ...]:
    """Medians of CPU time in ms: a step, its two graphs, and what is outside of them: ours, autograd's, DTensor's."""
    _, par, batch = models(hidden, "eager")
    spent = {"forward": 0.0, "backward": 0.0}
    for name, graph in (("forward", par.forward_graph), ("backward", par.backward_graph)):

        def enter(*_: object, name: str = name) -> None:
            spent[name] -= time.process_time()

        def leave(*_: object, name: str = name) -> None:
            spent[name] += time.process_time()

        assert graph is not None
        graph.register_forward_pre_hook(enter)
        graph.register_forward_hook(leave)
    step, found = trainer(par, batch, optimizer=False), []
    for i in range(repeats + 3):
        spent.update(forward=0.0, backward=0.0)
        whole, _ = timed(step)
        if i >= 3:
            found.append((whole, *spent.values(), whole - sum(spent.values())))
    count = len(list(par.parameters()))
    numbers = [statistics.median(column) * 1e3 for column in zip(*found, strict=True)]
    return (f"d={hidden}", count, *numbers, numbers[-1] / count * 1e3)


class Many(nn.Module):
    """Many small parameters."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(size, size) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(x * w).sum() for w in self.weights]).sum()


def optimizer_step(count: int, size: int, repeats: int, *, bare: bool = False, **options: bool) -> tuple[object, ...]:
    """AdamW on `count` parameters of size x size: ours beside plain tensors with foreach=True.

    Args:
        bare: DTensors made by torch alone in place of ours, each with its own gradient.
    """
    plain, x = Many(count, size), torch.ones(size, size)
    par = autopar3d.compile(plain, (1, 1, 1), x)
    sides = []
    for model, wish in ((plain, {"foreach": True}), (par, options)):
        model(x).backward()
        sides.append(torch.optim.AdamW(model.parameters(), **wish).step)
    if bare:
        made = []
        for p in par.parameters():
            assert isinstance(p, DTensor)
            made.append(nn.Parameter(DTensor.from_local(torch.randn(size, size), p.device_mesh, p.placements)))
            made[-1].grad = DTensor.from_local(torch.randn(size, size), p.device_mesh, p.placements)
        sides[1] = torch.optim.AdamW(made, **options).step
    numbers, ratios = compare(sides[0], sides[1], repeats)
    whose = "torch's DTensors" if bare else "ours"
    return (f"{count} of {size}x{size}, {whose}, {options or 'default'}", *numbers, *ratios)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--hidden", type=lambda s: [int(n) for n in s.split(",")], default=[512, 128])
    parser.add_argument("--backends", type=lambda s: s.split(","), default=["eager", "inductor"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    header = ("", "plain CPU ms", "plain wall ms", "ours CPU ms", "ours wall ms", "ratio CPU", "ratio wall")
    rows = [
        model_step(hidden, args.pairs, backend, optimizer=optimizer)
        for backend in args.backends
        for hidden in args.hidden
        for optimizer in (False, True)
    ]
    print(tabulate(rows, header, floatfmt=".2f", tablefmt="github"), flush=True)
    print("\nCPU ms of forward and backward, eager:")
    rows = [parts(hidden, args.pairs) for hidden in args.hidden]
    header = ("", "parameters", "step", "forward graph", "backward graph", "outside of graphs", "us per parameter")
    print(tabulate(rows, header, floatfmt=".2f", tablefmt="github"), flush=True)
    print("\nAdamW, beside plain tensors with foreach=True:")
    ways: list[dict[str, bool]] = [{"foreach": True}, {"foreach": True, "bare": True}, {"fused": True}, {}]
    rows = [optimizer_step(200, size, args.pairs, **options) for size in (16, 64, 256) for options in ways]
    header = ("", "plain CPU ms", "plain wall ms", "CPU ms", "wall ms", "ratio CPU", "ratio wall")
    print(tabulate(rows, header, floatfmt=".2f", tablefmt="github"))


if __name__ == "__main__":
    main()
