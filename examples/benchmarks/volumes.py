"""What a rank sends and holds for GPT blocks, exactly: DDP, FSDP2, tensor parallelism, autopar3d on 8 and 64 devices.

    python examples/benchmarks/volumes.py --write docs     # some minutes; one process, no network, no timing

Peers run as they are, one rank of them, on a process group that moves nothing and counts what it is asked to send (ring
convention, as `autopar3d.Collective`). autopar3d's numbers are counted from its plans, which equal the emitted graphs
to the byte. "Held" are elements of parameters, gradients and AdamW's state, and of what is saved for backward: distinct
storages, parameters not counted again.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import autopar3d  # noqa: E402
from autopar3d.private import GroupName, register_process_group  # noqa: E402
from examples.benchmarks.peers import LocalHeads, block_plan  # noqa: E402
from examples.gpt import Block, GPTConfig  # noqa: E402

INTRODUCTION = """# What is sent and held

GPT blocks (separate q, k, v and o, an MLP of four times the hidden size, no biases) on 8 and on 64 devices: elements
that each rank sends in a step by ring convention, and that it holds. "Saved" is what is kept between forward and
backward, beside parameters. Made by

    python examples/benchmarks/volumes.py --write docs

Peers were run, one rank of them, on a process group that counts; the closed forms beside them are `2 (P-1)/P W` of DDP,
`3 (P-1)/P W` of FSDP2, `8 (t-1)/P M h` a layer of tensor parallelism over t, and `3 (d-1)/d W/t` of FSDP2 over d on top
(W weights, M tokens, h hidden). Numbers of autopar3d are those of its plans, which are those of the emitted graphs to
the byte. `regather="all"` keeps only shards for backward, `"none"` keeps what was gathered.
"""

LAYERS, HIDDEN, HEADS, SEQUENCE = 2, 1024, 16, 512


class Blocks(nn.Module):
    """Transformer blocks without embeddings or head; what goes in wants a gradient, as in the middle of a model."""

    def __init__(self) -> None:
        super().__init__()
        config = GPTConfig(layers=LAYERS, heads=HEADS, hidden=HIDDEN, block=SEQUENCE, bias=False)
        self.first = nn.Linear(1, HIDDEN, bias=False)
        self.blocks = nn.ModuleList(Block(config) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


# -- a process group that counts -------------------------------------------------------------------------------------


class _Done(dist.Work):
    def wait(self, timeout: Any = None) -> bool:
        return True

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(self.result_)
        return future

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result_ = result


class Counting(dist.ProcessGroup):
    """Moves nothing; adds up the elements that a rank would send in collectives of floating tensors."""

    sent = 0.0

    made: list[Counting] = []

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.own_name = GroupName(f"counting_{len(self.made)}")
        self.made.append(self)  # torch's registry of names does not keep it
        register_process_group(self.own_name, self)

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self.own_name

    def getBackendName(self) -> str:  # noqa: N802
        return "counting"

    def _count(self, tensors: Any, factor: float) -> None:
        Counting.sent += sum(t.numel() * factor for t in tensors if t.is_floating_point())

    def all_gather_single(self, output: Tensor, source: Tensor, *_: Any) -> dist.Work:
        self._count([source], self.size() - 1)
        output.view(self.size(), -1).copy_(source.reshape(1, -1).expand(self.size(), -1))
        return _Done([output])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], *_: Any) -> dist.Work:
        for output, source in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, source)
        return _Done(outputs)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, *_: Any) -> dist.Work:
        self._count([source], (self.size() - 1) / self.size())
        output.copy_(source.reshape(self.size(), *output.shape)[self.rank()])
        return _Done([output])

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], *_: Any) -> dist.Work:
        for output, source in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, source)
        return _Done(outputs)

    def allreduce(self, tensors: list[Tensor], *_: Any) -> dist.Work:
        self._count(tensors, 2 * (self.size() - 1) / self.size())
        return _Done(tensors)

    allreduce_coalesced = allreduce

    def all_to_all_single(self, output: Tensor, source: Tensor, *_: Any) -> dist.Work:
        self._count([source], (self.size() - 1) / self.size())
        output.copy_(source.reshape(output.shape))
        return _Done([output])

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], *_: Any) -> dist.Work:
        for parts, source in zip(outputs, inputs, strict=True):
            self._count([source], self.size() - 1)
            for part in parts:
                part.copy_(source)
        return _Done(outputs)

    def broadcast(self, tensors: list[Tensor], *_: Any) -> dist.Work:
        return _Done(tensors)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], *_: Any) -> dist.Work:
        return _Done(outputs)

    def barrier(self, *_: Any) -> dist.Work:
        return _Done([])


def _counting(store: Any, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    return Counting(rank, size)


# -- one step of each ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """Millions of elements per rank."""

    name: str
    sent: float
    parameters: float
    gradients: float
    optimizer: float
    saved: float
    formula: float | None = None

    @property
    def held(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.saved


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def count(name: str, model: nn.Module, x: Tensor, formula: float | None) -> Row:
    # Plain and distributed parameters do not mix in one group.
    groups: dict[bool, list[Tensor]] = {}
    for p in model.parameters():
        groups.setdefault(isinstance(p, DTensor), []).append(p)
    optimizer = torch.optim.AdamW([{"params": g} for g in groups.values()], foreach=True)
    saved: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        base = t if t._base is None else t._base
        if base.is_leaf and base.requires_grad:  # a parameter, gathered perhaps: FSDP2 frees it, and gathers it again
            return t
        piece = local(t.detach())
        saved[piece.untyped_storage()._cdata] = piece.untyped_storage().nbytes() // piece.element_size()
        return t

    def step() -> None:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            loss = model(x)
        loss.backward()

    step()  # some set up at their first step
    model.zero_grad()
    saved.clear()
    Counting.sent = 0.0
    step()
    sent = Counting.sent
    optimizer.step()
    parameters = list(model.parameters())
    own = {local(p.detach()).untyped_storage()._cdata for p in parameters}
    state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor) and v.dim()]
    numbers = (
        sent,
        sum(local(p.detach()).numel() for p in parameters),
        sum(local(p.grad).numel() for p in parameters if p.grad is not None),
        sum(local(v).numel() for v in state),
        sum(n for storage, n in saved.items() if storage not in own),
    )
    return Row(name, *(n / 1e6 for n in numbers), formula=formula and formula / 1e6)


def peer(name: str, world: int, tp: int, batch: int) -> Row:
    """A peer at its first rank: "DDP", "FSDP2", "TP", or "FSDP2 x TP"."""
    torch.manual_seed(0)
    model: nn.Module = Blocks()
    data = world // tp
    weights = sum(p.numel() for p in model.parameters())
    tokens = batch * SEQUENCE
    matrices = LAYERS * 12 * HIDDEN * HIDDEN
    # Data parallelism moves weights, tensor parallelism a row of activations at eight places of a layer.
    along_tp = LAYERS * 8 * (tp - 1) / world * tokens * HIDDEN
    if name == "DDP":
        formula = 2 * (world - 1) / world * weights
        return count(name, DistributedDataParallel(model), torch.ones(batch // world, SEQUENCE, 1), formula)
    if tp > 1:
        mesh = init_device_mesh("cpu", (data, tp), mesh_dim_names=("dp", "tp"))
        for layer in model.blocks:  # type: ignore[union-attr]
            layer.attention.__class__ = LocalHeads
            # What comes in and goes out is cut along the sequence, as it is in the middle of a model.
            parallelize_module(layer, mesh["tp"], block_plan())  # type: ignore[arg-type]
        x = torch.ones(batch // data, SEQUENCE // tp, 1)
    else:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
        x = torch.ones(batch // world, SEQUENCE, 1)
    formula = along_tp
    if data > 1:
        for layer in model.blocks:  # type: ignore[union-attr]
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        formula += 3 * (data - 1) / data * (weights if tp == 1 else matrices / tp)
    return count(name if name != "FSDP2 x TP" else f"FSDP2 x TP {tp}", model, x, formula)


def ours(grid: tuple[int, int, int], batch: int, **options: Any) -> Row:
    with torch.device("meta"):
        model, x = Blocks(), torch.empty(batch, SEQUENCE, 1)
    plan = autopar3d.plan(model, grid, x, hardware="bandwidth", **options)
    memory = plan.memory
    sent = sum(plan.bytes.values())
    size = "x".join(map(str, grid))
    how = ", ".join(f"{k}={v}" for k, v in options.items())
    parts = [memory[k] for k in ("parameters", "gradients", "optimizer", "activations")]
    return Row(f"autopar3d {size} {how}", *(n / 4e6 for n in (sent, *parts)))


def rows(world: int, batch: int) -> list[Row]:
    store = dist.HashStore()
    dist.init_process_group("counting", rank=0, world_size=world, store=store)
    found = [peer("DDP", world, 1, batch), peer("FSDP2", world, 1, batch)]
    sizes = [t for t in (2, 4, 8, 16) if t <= world]
    found += [peer("TP" if t == world else "FSDP2 x TP", world, t, batch) for t in sizes]
    dist.destroy_process_group()
    grids = {8: [(8, 1, 1), (4, 2, 1), (2, 2, 2)], 64: [(64, 1, 1), (8, 8, 1), (16, 4, 1), (4, 4, 4), (8, 4, 2)]}
    for scheme, grid in (("1d", (1, world, 1)), ("2d", (1, *((2, 4) if world == 8 else (8, 8))))):
        if world == 8 or scheme == "2d":
            found.append(ours(grid, batch, scheme=scheme, regather="none"))  # type: ignore[arg-type]
    for grid in grids[world]:
        for regather in ("all", "none"):
            found.append(ours(grid, batch, regather=regather))
    return found


# -- out -------------------------------------------------------------------------------------------------------------


def table(found: list[Row]) -> str:
    body = [(r.name, r.sent, r.formula, r.parameters + r.gradients + r.optimizer, r.saved, r.held) for r in found]
    header = ("per rank, millions of elements", "sent", "closed form", "weights, gradients, AdamW", "saved", "held")
    return tabulate(body, header, tablefmt="github", floatfmt=".2f", missingval="")


def plot(results: dict[tuple[int, int], list[Row]], path: Path) -> None:
    """Sent against held, a panel per number of devices: down and left is better."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import ScalarFormatter

    figure, panels = pyplot.subplots(1, len(results), figsize=(13, 5.5))
    for panel, ((world, batch), found) in zip(panels, results.items(), strict=True):
        labels: dict[tuple[float, float], list[str]] = {}
        for row in found:
            own = row.name.startswith("autopar3d")
            colour = "#0072B2" if own else "#D55E00"
            panel.scatter(row.held, row.sent, marker="o" if own else "s", color=colour, zorder=3)
            place = next((p for p in labels if abs(p[0] / row.held - 1) + abs(p[1] / row.sent - 1) < 0.04), None)
            short = row.name.removeprefix("autopar3d ").replace("regather=", "").replace("scheme=", "")
            labels.setdefault(place or (row.held, row.sent), []).append(short)
        for place, names in labels.items():
            panel.annotate("\n".join(names), place, xytext=(6, -2), textcoords="offset points", fontsize=7)
        panel.set_xscale("log")
        panel.set_yscale("log")
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_formatter(ScalarFormatter())
            axis.set_minor_formatter(ScalarFormatter())
        panel.set_title(f"{world} devices, {batch * SEQUENCE} tokens", fontsize=10)
        panel.set_xlabel("held per rank, millions of elements")
        panel.set_ylabel("sent per rank and step, millions of elements")
        panel.grid(alpha=0.3, which="both")
        panel.margins(0.15)
    for colour, marker, label in (("#0072B2", "o", "autopar3d"), ("#D55E00", "s", "peers")):
        panels[0].scatter([], [], color=colour, marker=marker, label=label)
    panels[0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", type=Path, help="a folder for volumes.md and volumes.png")
    folder = parser.parse_args().write
    torch.set_num_threads(1)
    dist.Backend.register_backend("counting", _counting, devices=["cpu"])
    results = {(world, batch): rows(world, batch) for world, batch in ((8, 8), (64, 64))}
    text = ""
    for (world, batch), found in results.items():
        text += (
            f"\n{world} devices, {batch} x {SEQUENCE} tokens, {LAYERS} blocks of hidden {HIDDEN}:\n\n{table(found)}\n"
        )
    print(text)
    if folder:
        (folder / "volumes.md").write_text(f"{INTRODUCTION}{text}\n![](volumes.png)\n")
        plot(results, folder / "volumes.png")


if __name__ == "__main__":
    main()
