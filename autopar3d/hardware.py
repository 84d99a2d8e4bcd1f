"""What the planner believes about a machine: compute rate, memory rate, and each axis's link."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import torch

from .errors import PlanError
from .grid import Grid


@dataclass(frozen=True)
class Link:
    """One collective of n bytes sent takes `latency + n / bandwidth` seconds.

    Args:
        latency: seconds before the first byte.
        bandwidth: bytes per second that a rank sends.
        burst: bytes that a link which was idle lets through at once: limited links and switches save up what was not
            sent, at `bandwidth`. Plans are priced without; predicted timelines have it.
    """

    latency: float
    bandwidth: float
    burst: float = 0.0


@dataclass(frozen=True)
class Hardware:
    """A machine profile.

    Args:
        name: how `hardware=` asks for it.
        flops: achievable floating point operations per second of one device, by dtype name ("" is any other).
        memory: bytes per second between the device and its memory.
        node: the link between devices of one node.
        network: the link between nodes.
        node_size: devices per node.
        source: where the numbers come from.
        capacity: bytes of memory of one device; `grid="auto"` prefers what fits.
    """

    name: str
    flops: dict[str, float] = field(hash=False)
    memory: float
    node: Link
    network: Link
    node_size: int
    source: str = field(default="", compare=False)
    capacity: float = math.inf

    def link(self, axis: str, grid: Grid) -> Link:
        """The link an axis uses: inside a node when its whole group, in rank order, lies inside one."""
        inner = grid.extent([a for a in grid.names if a >= axis])
        return self.node if inner <= self.node_size else self.network

    def rate(self, dtype: torch.dtype) -> float:
        return self.flops.get(str(dtype).removeprefix("torch."), self.flops[""])

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON, which `hardware=path` takes."""
        Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Hardware:
        """Read what `save` wrote.

        Raises:
            PlanError: the file holds no profile.
        """
        try:
            plain = json.loads(Path(path).read_text())
            node, network = Link(**plain.pop("node")), Link(**plain.pop("network"))
            return cls(node=node, network=network, **plain)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PlanError(f"{path} is no hardware profile: {error!r}") from error


PROFILES = {
    p.name: p
    for p in (
        Hardware(
            "cpu",
            {"": 2.0e10, "float64": 1.0e10},
            1.0e10,
            Link(2.0e-4, 1.0e9),
            Link(2.0e-4, 1.0e9),
            1 << 30,
            "order of magnitude of one core and gloo over loopback; `calibrate` measures the real machine",
        ),
        Hardware(
            "a100",
            {"": 1.0e14, "bfloat16": 2.5e14, "float16": 2.5e14, "float32": 1.2e14, "float64": 1.5e13},
            1.5e12,
            Link(1.0e-5, 2.4e11),
            Link(2.0e-5, 2.5e10),
            8,
            "NVIDIA A100 80GB SXM datasheet, derated by 0.8: 312 TFLOP/s bf16 and fp16, 156 TF32 (taken for float32), "
            "19.5 float64; 2.0 TB/s; NVLink 300 GB/s a direction. Network: a 200 Gbit/s HDR port per device (DGX). "
            "Latencies are assumed: `calibrate` measures them",
            8.0e10,
        ),
        Hardware(
            "h100",
            {"": 2.5e14, "bfloat16": 7.0e14, "float16": 7.0e14, "float32": 3.0e14, "float64": 5.0e13},
            2.7e12,
            Link(1.0e-5, 3.6e11),
            Link(2.0e-5, 5.0e10),
            8,
            "NVIDIA H100 SXM datasheet, derated by 0.7 (compute) and 0.8: 989 TFLOP/s dense bf16 and fp16, 494 TF32 "
            "(taken for float32), 67 float64; 3.35 TB/s; NVLink 450 GB/s a direction. Network: a 400 Gbit/s NDR port "
            "per device (DGX). Latencies are assumed: `calibrate` measures them",
            8.0e10,
        ),
        Hardware(
            "v100",
            {"": 1.2e13, "bfloat16": 1.2e13, "float16": 9.0e13, "float32": 1.2e13, "float64": 6.0e12},
            7.2e11,
            Link(1.0e-5, 1.2e11),
            Link(2.0e-5, 1.2e10),
            4,
            "NVIDIA V100 SXM2 datasheet, derated by 0.8: 15.7 TFLOP/s float32, 125 fp16 (derated by 0.7), 7.8 float64; "
            "900 GB/s; NVLink 150 GB/s a direction. Network: a 100 Gbit/s EDR port per device. bfloat16 is computed "
            "as float32. Latencies are assumed: `calibrate` measures them. Memory: the 32 GB model",
            3.2e10,
        ),
        Hardware(
            "bandwidth",
            {"": float("inf")},
            float("inf"),
            Link(0.0, 1.0e9),
            Link(0.0, 1.0e9),
            1 << 30,
            "a machine whose only cost is bytes, 1 GB/s everywhere",
        ),
    )
}


def resolve(hardware: Hardware | str | Path | None, device: torch.device) -> Hardware:
    """The profile asked for, by name or by file, or the default of a device type (the same on every rank).

    Raises:
        PlanError: an unknown name, or a file that is no profile.
    """
    if isinstance(hardware, Hardware):
        return hardware
    if hardware is not None and not isinstance(hardware, (str, Path)):
        raise PlanError(
            f"hardware= is a {type(hardware).__name__}; it is a Hardware, a profile's name or a file's path"
        )
    if isinstance(hardware, Path) or (hardware and hardware not in PROFILES and Path(hardware).is_file()):
        return Hardware.load(hardware)
    name = hardware or ("h100" if device.type == "cuda" else "cpu")
    if name not in PROFILES:
        known = ", ".join(sorted(PROFILES))
        raise PlanError(f"hardware={name!r} is not known; choose one of {known}, or a file that calibrate saved")
    return PROFILES[name]
