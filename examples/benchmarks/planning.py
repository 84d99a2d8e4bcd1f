"""How long planning takes, and what it takes of memory.

    python examples/benchmarks/planning.py              # the planner alone: minutes
    python examples/benchmarks/planning.py --whole      # and whole plans of an 8B model, from module to graphs

Seconds are of CPU time of this process. Models are on meta; Llama needs `transformers`. "First" is the first planning
of a model, which in the first row also finds the ways between layouts; "again" is the second.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

import autopar3d
from autopar3d.grid import Grid
from autopar3d.hardware import PROFILES
from autopar3d.running.outputs import with_outputs
from autopar3d.search.factors import Factors
from autopar3d.search.walks import walks
from autopar3d.skeleton import Skeleton
from autopar3d.step import Options, decide
from examples.gpt import GPT, GPTConfig

Sizes = tuple[int, int, int]
Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]

ROWS = (64, 2048)


def llama(layers: int = 32) -> Call:
    """The shape of Llama-3-8B."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, use_cache=False,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        ids = torch.empty(ROWS, dtype=torch.long)
    return model, (), {"input_ids": ids, "labels": ids.clone()}


def gpt(layers: int = 1, hidden: int = 1024, heads: int = 16, rows: tuple[int, int] = (8, 512)) -> Call:
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab=50304, block=rows[1], layers=layers, heads=heads, hidden=hidden))
        ids = torch.empty(rows, dtype=torch.long)
    return model.to(torch.bfloat16), (ids, ids.clone()), {}


def gpt3(layers: int = 96) -> Call:
    """The shape of GPT-3 175B."""
    return gpt(layers, 12288, 96, ROWS)


def resident() -> float:
    """GB in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e9


class Planner:
    """One model, traced once."""

    def __init__(self, call: Call) -> None:
        model, args, kwargs = call
        skeleton = Skeleton(model, torch.device("cpu"))
        self.program, self.options = with_outputs(skeleton.trace(args, kwargs, skeleton.modes(), {}), Options())

    def __call__(self, sizes: Sizes) -> tuple[float, float, str]:
        """CPU seconds, GB above what was resident, and whether the plan is proven minimal."""
        before, start = resident(), time.process_time()
        factors = Factors(self.program.graph.graph)
        found = decide(self.program, factors, Grid(*sizes), PROFILES["h100"], self.options)
        return time.process_time() - start, resident() - before, "proven" if found.exact else "bounded"


def planner() -> None:
    walks.cache_clear()
    cases: list[tuple[str, Callable[[], Call], list[Sizes]]] = [
        ("GPT block, hidden 1024", gpt, [(2, 2, 2), (2, 2, 4)]),
        ("Llama-3-8B, 32 layers", llama, [(4, 4, 4), (16, 16, 16)]),
        ("GPT-3 175B, 96 layers", gpt3, [(4, 4, 4), (16, 16, 16)]),
    ]
    rows = []
    for name, make, grids in cases:
        plan = Planner(make())
        for sizes in grids:
            seconds, memory, proof = plan(sizes)
            again, _, _ = plan(sizes)
            rows.append((name, str(sizes), f"{seconds:.2f}", f"{again:.2f}", f"{memory:.2f}", proof))
    print(tabulate(rows, ("model", "grid", "first s", "again s", "GB", "minimum"), tablefmt="github"), "\n")

    rows = []
    for layers in (1, 2, 4, 8, 16, 32):
        plan = Planner(llama(layers))
        grids = [(64, 1, 1), (8, 8, 1), (4, 4, 4)]
        rows.append((layers, *(f"{min(plan(g)[0] for _ in range(2)):.2f}" for g in grids)))
    print(tabulate(rows, ("layers", "one axis s", "two axes s", "three axes s"), tablefmt="github"), "\n")


def whole() -> None:
    rows = []
    for name, make, grid in (("Llama-3-8B", llama, (4, 4, 4)), ("Llama-3-8B", llama, "auto")):
        model, args, kwargs = make()
        start, wall = time.process_time(), time.time()
        made = autopar3d.plan(model, grid, args, kwargs, world_size=64, hardware="h100")
        seconds = time.process_time() - start
        rows.append((name, str(grid), str(made.grid), f"{seconds:.1f}", f"{time.time() - wall:.1f}"))
    print(tabulate(rows, ("model", "grid=", "grid", "CPU s", "wall s"), tablefmt="github"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--whole", action="store_true")
    options = parser.parse_args()
    planner()
    if options.whole:
        whole()
