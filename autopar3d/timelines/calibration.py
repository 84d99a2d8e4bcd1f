"""Measuring a machine: the numbers of a `Hardware` profile, from the ranks of a process group."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..cost import link_seconds
from ..errors import LaunchError
from ..grid import Grid, GridLike
from ..hardware import Hardware, Link
from ..ranks.runtime import connect
from ..redistribute import sent
from .timing import KINDS

c10d = torch.ops._c10d_functional

# Bytes that a rank sends in the collectives measured: where latency is all, where a burst ends (switches and
# limited links let some 100 kB through at once), and where bandwidth is all.
_SIZES = (10_000, 60_000, 250_000, 1_200_000)


class Sample(NamedTuple):
    """A collective that was timed: the bytes that a rank sends (ring convention), and the median of its seconds."""

    axis: str
    kind: str
    bytes: float
    seconds: float


def calibrate(
    grid: GridLike | None = None,
    *,
    path: str | Path | None = None,
    name: str = "calibrated",
    sizes: Sequence[int] = _SIZES,
    repeats: int = 7,
    node_size: int | None = None,
) -> Hardware:
    """Measure the machine that the process group runs on: products by size, memory, and collectives by axis and size.

    Every rank calls this. Ranks measure together, and all get the same profile, of means over the ranks. Axes that lie
    inside a node, in rank order, give the profile's `node` link, the others its `network`; where one kind is missing
    it is taken to be like the other.

    Args:
        grid: whose axes are measured; None takes one axis of all ranks.
        path: where rank 0 saves the profile; `hardware=path` takes it.
        name: of the profile.
        sizes: bytes that a rank sends in the collectives that are timed, each kind `repeats` times.
        node_size: devices per node; None asks torchrun's LOCAL_WORLD_SIZE, or takes all ranks to be one node.

    Raises:
        LaunchError: there is no process group.
    """
    if not dist.is_initialized():
        raise LaunchError("calibrate measures the ranks of a process group: call it under torchrun, or from launch")
    world = dist.get_world_size()
    cube = Grid(1, world, 1) if grid is None else Grid.of(grid)
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    inside = node_size or int(os.environ.get("LOCAL_WORLD_SIZE", world))
    samples = collectives(cube, device, sizes, repeats)
    flops = {str(d).removeprefix("torch."): _product_rate(d, device, repeats) for d in _dtypes(device)}
    found = profile(name, cube, samples, {"": flops["float32"], **flops}, _memory_rate(device, repeats), inside)
    if path is not None and dist.get_rank() == 0:
        found.save(path)
    dist.barrier()
    return found


def profile(
    name: str, grid: Grid, samples: Sequence[Sample], flops: dict[str, float], memory: float, node_size: int
) -> Hardware:
    """The profile that measurements mean."""
    blank = Hardware(name, flops, memory, Link(0.0, 1.0), Link(0.0, 2.0), node_size)
    parts: dict[str, list[Sample]] = {"node": [], "network": []}
    for s in samples:
        parts["node" if blank.link(s.axis, grid) == blank.node else "network"].append(s)
    links = {where: fit(found) for where, found in parts.items() if found}
    either = next(iter(links.values()), Link(0.0, float("inf")))
    source = f"measured by calibrate on grid {grid}, {len(samples)} collectives, torch {torch.__version__}"
    return Hardware(name, flops, memory, links.get("node", either), links.get("network", either), node_size, source)


def fit(samples: Sequence[Sample]) -> Link:
    """The link that samples mean.

    The median of the smallest size, where noise is as large as what is measured, counts as it is. Bandwidth and burst
    have the least sum of squared relative errors at the other sizes.
    """
    least = min(s.bytes for s in samples)
    first = statistics.median(s.seconds for s in samples if s.bytes <= 1.5 * least)
    others = [s for s in samples if s.bytes > 1.5 * least]
    seconds, sizes = np.array([s.seconds for s in others]), np.array([s.bytes for s in others])
    best, lowest = Link(first, float("inf")), float("inf")
    # A burst bends the line; where it does, is tried. With two sizes any bend would fit.
    for burst in np.linspace(0.0, max(sizes, default=0.0) / 2, 201 if len({*sizes}) > 1 else 1):
        limited = max(least - burst, 0.0)  # of the smallest size
        slope = (np.maximum(sizes - burst, 0.0) - limited) / seconds
        per_byte = float(slope @ (1.0 - first / seconds) / (slope @ slope)) if slope.any() else 0.0
        # Neither number is below zero, whatever the noise.
        per_byte = min(max(per_byte, 0.0), first / limited if limited else float("inf"))
        latency = first - limited * per_byte
        error = float((((latency + np.maximum(sizes - burst, 0.0) * per_byte) / seconds - 1.0) ** 2).sum())
        if per_byte > 0.0 and error < lowest - 1e-12:
            best, lowest = Link(max(latency, 0.0), 1.0 / per_byte, float(burst)), error
    return best


def predicted(link: Link, size: float) -> float:
    """Seconds of one collective alone on its link, as timelines count them."""
    return link_seconds(link, size, idle=True)


def collectives(grid: Grid, device: torch.device, sizes: Sequence[int], repeats: int) -> list[Sample]:
    """Time collectives along each axis: those that graphs make, each kind at sizes of about so many bytes sent."""
    connection = connect(grid, device.type)  # holds the groups
    found = []
    for axis in grid.axes:
        g, group = grid.axis_size(axis), grid.alias(axis)
        for kind in KINDS:
            for size in sizes:
                call, x = _call(kind, g, group, size, device)
                moved = sent(kind, g, x.numel()) * x.element_size()
                found.append(Sample(axis, kind, moved, _median(lambda c=call, t=x: c(t), device, repeats)))  # type: ignore[misc]
    del connection
    return found


def _call(kind: str, g: int, group: str, size: int, device: torch.device) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """A collective, and an input with which each rank sends about so many bytes."""
    rows = max(1, int(size / 4 / sent(kind, g, g))) * g
    x = torch.ones(rows, device=device)
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "all_gather": lambda t: c10d.all_gather_into_tensor(t, g, group),
        "reduce_scatter": lambda t: c10d.reduce_scatter_tensor(t, "sum", g, group),
        "all_reduce": lambda t: c10d.all_reduce(t, "sum", group),
        "all_to_all": lambda t: c10d.all_to_all_single(t, [rows // g] * g, [rows // g] * g, group),
    }
    return lambda t: c10d.wait_tensor(calls[kind](t)), x


def _dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    return (torch.float32, torch.float64, torch.bfloat16) if device.type == "cuda" else (torch.float32, torch.float64)


def _product_rate(dtype: torch.dtype, device: torch.device, repeats: int) -> float:
    """FLOPs per second of the best of some square products."""
    best = 0.0
    for n in (256, 512, 1024) if device.type == "cpu" else (1024, 4096, 8192):
        a = torch.ones(n, n, dtype=dtype, device=device)
        best = max(best, 2.0 * n**3 / _median(lambda a=a: a @ a, device, repeats))  # type: ignore[misc]
    return best


def _memory_rate(device: torch.device, repeats: int) -> float:
    """Bytes per second of an elementwise op on tensors that no cache holds: read once, written once."""
    x = torch.ones(1 << 24 if device.type == "cpu" else 1 << 28, device=device)
    out = torch.empty_like(x)
    return 2.0 * x.numel() * x.element_size() / _median(lambda: torch.add(x, 1.0, out=out), device, repeats)


def _median(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median seconds, the mean over the ranks; a first run is not counted."""
    taken = []
    for i in range(repeats + 1):
        dist.barrier()
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if i:
            taken.append(time.perf_counter() - began)
    mean = torch.tensor([statistics.median(taken)], dtype=torch.float64, device=device)
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size()
