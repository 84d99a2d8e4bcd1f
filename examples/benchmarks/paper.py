"""The experiment of arXiv 2105.14450, simulated: 1-D, 2-D and 3-D tensor parallelism on up to 64 V100s.

    python examples/benchmarks/paper.py             # tables; about a minute
    python examples/benchmarks/paper.py --plot docs/schemes_h100.png   # 8 to 4096 H100s as well

One transformer layer, fp32, forward and backward. Each scheme's plan is found by the planner within that scheme, on its
own grid, and its step is predicted by `autopar3d.search.estimate`, in which communication runs beside compute.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from tabulate import tabulate

from autopar3d.grid import Grid, factorisations
from autopar3d.hardware import PROFILES, Hardware, Link
from autopar3d.passes.rewrite import moves
from autopar3d.running.outputs import with_outputs
from autopar3d.search.estimate import Estimate, estimate, memory
from autopar3d.search.factors import Factors
from autopar3d.skeleton import Skeleton
from autopar3d.step import Options, decide
from examples.gpt import Block, GPTConfig

PUBLISHED = {"1-D": 2.32, "2-D": 1.57}  # how much faster 3-D is on 64 V100s, from the abstract

# Four GPUs of a node share its one EDR port where each is in a group of its own across nodes.
SHARED = replace(PROFILES["v100"], name="v100, port shared", network=Link(2.0e-5, 3.0e9))

Sizes = tuple[int, int, int]


def root(devices: int, power: int) -> int:
    found = round(devices ** (1 / power))
    return found if found**power == devices else 0


def grid_of(scheme: str, devices: int) -> Sizes | None:
    """The grid that a scheme means, or None where the number of devices is no square or cube."""
    square, cube = root(devices, 2), root(devices, 3)
    grids = {"1-D": (1, devices, 1), "2-D": (1, square, square), "3-D": (cube, cube, cube), "ZeRO-3": (devices, 1, 1)}
    return grids[scheme] if 0 not in grids[scheme] else None


OPTIONS = {"1-D": "1d", "2-D": "2d", "3-D": "3d", "ZeRO-3": "zero3"}


class Layer:
    """One layer of a size, traced once."""

    def __init__(self, batch: int, sequence: int, hidden: int, dtype: torch.dtype = torch.float32) -> None:
        with torch.device("meta"):
            model = Block(GPTConfig(hidden=hidden, heads=64, layers=1)).to(dtype)
            x = torch.empty(batch, sequence, hidden, dtype=dtype)
        skeleton = Skeleton(model, torch.device("cpu"))
        options = Options(outputs="sharded", regather="weights")
        self.program, self.options = with_outputs(skeleton.trace((x,), {}, skeleton.modes(), {}), options)
        self.factors = Factors(self.program.graph.graph)

    def step(self, scheme: str, sizes: Sizes, hardware: Hardware) -> Estimate:
        options = replace(self.options, scheme=scheme)
        decisions = decide(self.program, self.factors, Grid(*sizes), hardware, options)
        made = moves(self.program, self.factors, decisions, regather=options.regather)
        kept = memory(self.program, self.factors, decisions, options.regather)
        return estimate(self.program, decisions, made, kept)


def speedups(devices: int, sizes: list[tuple[int, int, int]], hardware: Hardware) -> list[tuple[object, ...]]:
    """Per size the steps of 1-D, 2-D, 3-D, and how much faster 3-D is."""
    rows = []
    for batch, sequence, hidden in sizes:
        layer = Layer(batch, sequence, hidden)
        steps = []
        for scheme in ("1-D", "2-D", "3-D"):
            grid = grid_of(scheme, devices)
            steps.append(layer.step(OPTIONS[scheme], grid, hardware).seconds * 1e3 if grid else float("nan"))
        rows.append((devices, batch, sequence, hidden, *steps, steps[0] / steps[2], steps[1] / steps[2]))
    return rows


HEADER = ("GPUs", "batch", "sequence", "hidden", "1-D ms", "2-D ms", "3-D ms", "3-D over 1-D", "3-D over 2-D")


def experiment() -> None:
    sizes = [(b, 512, h) for b in (24, 96, 384) for h in (2048, 4096, 8192)]
    for hardware in (PROFILES["v100"], SHARED):
        print(f"\n64 V100s, {hardware.name}: published 3-D over 1-D {PUBLISHED['1-D']}, over 2-D {PUBLISHED['2-D']}")
        print(tabulate(speedups(64, sizes, hardware), HEADER, floatfmt=".2f", tablefmt="github"))
    print("\nStrong scaling, port shared: one problem on more GPUs (2-D needs a square, 3-D a cube)")
    strong = [row for p in (4, 8, 16, 64) for row in speedups(p, [(96, 512, 4096)], SHARED)]
    print(tabulate(strong, HEADER, floatfmt=".2f", tablefmt="github"))
    print("\nWeak scaling, port shared: rows and hidden grow with the GPUs")
    weak = [row for p, b, h in ((8, 48, 2048), (64, 96, 4096)) for row in speedups(p, [(b, 512, h)], SHARED)]
    print(tabulate(weak, HEADER, floatfmt=".2f", tablefmt="github"))


def best(layer: Layer, devices: int, axes: int, hardware: Hardware) -> tuple[float, Sizes]:
    """The fastest grid with at most so many axes, planned freely, among those that could be good."""
    grids = {tuple(sorted(g, reverse=True)) for g in factorisations(devices)}
    near = [g for g in grids if sum(n > 1 for n in g) == axes and (axes < 3 or (g[0] <= 16 * g[2] and g[2] <= 8))]
    near = sorted(near, key=lambda g: max(g) / min(n for n in g if n > 1))[:4]
    found = []
    for g in near:
        try:
            found.append((layer.step("auto", g, hardware).seconds, g))
        except ValueError:
            continue  # a grid that the sizes do not allow
    return min(found, default=(float("nan"), (0, 0, 0)))


def plot(path: Path) -> None:
    """Where each scheme wins on H100s: time of a step over that of the best, by number of devices."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    hardware, counts = PROFILES["h100"], (8, 64, 512, 4096)
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    rows = []
    for panel, (batch, sequence, hidden) in zip(panels, ((64, 2048, 4096), (512, 2048, 8192)), strict=True):
        layer = Layer(batch, sequence, hidden, torch.bfloat16)
        curves: dict[str, list[float]] = {}
        for p in counts:
            for scheme in ("1-D", "ZeRO-3", "2-D", "3-D"):
                grid = grid_of(scheme, p)
                time = layer.step(OPTIONS[scheme], grid, hardware).seconds if grid else float("nan")
                curves.setdefault(f"{scheme}, its own grid", []).append(time)
            for axes, name in ((2, "best of two axes"), (3, "best of three axes")):
                time, grid = best(layer, p, axes, hardware)
                curves.setdefault(name, []).append(time)
                rows.append((batch * sequence, hidden, p, name, str(grid), time * 1e3))
        for name, times in curves.items():
            least = [min(t for t in column if t == t) for column in zip(*curves.values(), strict=True)]
            marker = "s" if name.startswith("best") else "o"
            ratios = [t / m for t, m in zip(times, least, strict=True)]
            known = [(p, r) for p, r in zip(counts, ratios, strict=True) if r == r]
            panel.plot(*zip(*known, strict=True), marker=marker, label=name, lw=1.4)
            rows += [(batch * sequence, hidden, p, name, "", t * 1e3) for p, t in zip(counts, times, strict=True)
                     if not name.startswith("best")]  # fmt: skip
        panel.set(xscale="log", yscale="log", xticks=counts, xlabel="H100s, nodes of 8")
        panel.set_xticklabels(counts)
        panel.set_title(f"{batch * sequence} tokens, hidden {hidden}, bf16", fontsize=10)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("time of a layer / that of the best")
    panels[1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    print(tabulate(rows, ("tokens", "hidden", "GPUs", "scheme", "grid", "ms"), floatfmt=".2f", tablefmt="github"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plot", type=Path)
    chosen = parser.parse_args()
    if chosen.plot:
        plot(chosen.plot)
    else:
        experiment()


if __name__ == "__main__":
    main()
