"""The same GPT, the same batch, on eight ranks with links of their own: DDP, FSDP2, tensor parallelism, and autopar3d.

    python examples/benchmarks/peers.py choose 512 --rate 200 --out 512.choice
    bash examples/benchmarks/cluster.sh 8 200mbit python examples/benchmarks/peers.py run 512 --rate 200 \
        --choice 512.choice --out 512.json
    python examples/benchmarks/peers.py report *.json

Each system trains in its recommended form, with AdamW, from the same weights on the same global batch. Steps of all
systems are interleaved, so that what else the machine does hits all of them. Rank 0 writes times, bytes that left its
link, CPU seconds (the mean over ranks), the most bytes of tensors alive on any rank, and losses; `report` prints
tables. Without a rate, links are those of one machine. `choose` finds what `grid="auto"` takes, which needs no ranks
and takes longer than the steps do; without a file of it, rank 0 does so while the others wait.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import autopar3d  # noqa: E402
from autopar3d import Grid  # noqa: E402
from autopar3d.hardware import Hardware, Link  # noqa: E402
from examples.gpt import GPT, Attention, GPTConfig  # noqa: E402

SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")

# hidden: layers, batch, sequence, heads; the last is to try the script
SHAPES = {512: (2, 16, 128, 8), 1024: (2, 8, 128, 8), 256: (4, 64, 128, 8), 64: (1, 8, 16, 8)}
GRIDS = tuple(Grid(*sizes) for sizes in ((8, 1, 1), (1, 8, 1), (2, 4, 1), (2, 2, 2)))


class Trainer:
    """Training steps of a model; `mean` is the group over which losses are averaged for the record."""

    def __init__(self, model: nn.Module, batch: tuple[Tensor, ...], *, mean: Any = None, context: Any = None) -> None:
        self.model, self.batch, self.mean, self.context = model, batch, mean, context or contextlib.nullcontext
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)

    def step(self) -> float:
        """Train once; the loss of the global batch."""
        self.optimizer.zero_grad()
        with self.context():
            loss = self.model(*self.batch)
            loss.backward()
        self.optimizer.step()
        value = loss.detach()
        value = value.full_tensor() if isinstance(value, DTensor) else value
        if self.mean is not None:
            dist.all_reduce(value, group=self.mean)
            value = value / dist.get_world_size(self.mean)
        return value.item()

    def peak(self) -> int:
        """The most bytes of tensors alive during a step: those from before, and what the step allocates on top."""
        held: dict[int, int] = {}
        state = [v for s in self.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        for tensor in (*self.model.parameters(), *self.model.buffers(), *grads, *state):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            storage = local.detach().untyped_storage()
            held[storage._cdata] = storage.nbytes()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            self.step()
        alive = most = 0
        # What an asynchronous collective spans is counted where it happens.
        tops = [e for e in found.events() or [] if e.cpu_parent is None and not e.is_async]
        for event in sorted(tops, key=lambda e: e.time_range.start):
            alive += event.cpu_memory_usage
            most = max(most, alive)
        return sum(held.values()) + most


@dataclass
class System:
    """One way to train."""

    name: str
    train: Trainer
    about: str = ""


class LocalHeads(Attention):
    """Attention over the heads that this rank's projections give."""

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, hidden = x.shape
        q, k, v = (
            linear(x).view(batch, seq, -1, hidden // self.heads).transpose(1, 2) for linear in (self.q, self.k, self.v)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


def config_of(hidden: int) -> GPTConfig:
    layers, _, sequence, heads = SHAPES[hidden]
    return GPTConfig(vocab=512, block=sequence, layers=layers, heads=heads, hidden=hidden)


def batch_of(hidden: int) -> tuple[Tensor, Tensor]:
    config, generator = config_of(hidden), torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab, (SHAPES[hidden][1], config.block + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def part(batch: tuple[Tensor, ...], index: int, parts: int) -> tuple[Tensor, ...]:
    return tuple(x.chunk(parts)[index].contiguous() for x in batch)


# -- peers -----------------------------------------------------------------------------------------------------------


def ddp(hidden: int) -> System:
    model = DistributedDataParallel(GPT(config_of(hidden)), gradient_as_bucket_view=True)
    mine = part(batch_of(hidden), dist.get_rank(), dist.get_world_size())
    return System("DDP", Trainer(model, mine, mean=dist.group.WORLD))


def fsdp2(hidden: int) -> System:
    model = GPT(config_of(hidden))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    mine = part(batch_of(hidden), dist.get_rank(), dist.get_world_size())
    return System("FSDP2", Trainer(model, mine, mean=dist.group.WORLD))


def block_plan() -> dict[str, Any]:
    """Tensor parallelism of a block as in torchtitan: sequence parallel between attention and MLP."""
    return {
        "norm1": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "attention.q": ColwiseParallel(),
        "attention.k": ColwiseParallel(),
        "attention.v": ColwiseParallel(),
        "attention.o": RowwiseParallel(output_layouts=Shard(1)),
        "norm2": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    }


def tensor_parallel(model: GPT, mesh: Any) -> None:
    """The blocks, and around them embeddings, head and loss over a sharded vocabulary."""
    for layer in model.blocks:
        layer.attention.__class__ = LocalHeads
        parallelize_module(layer, mesh, block_plan())
    parallelize_module(
        model,
        mesh,
        {
            "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "positions": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        },
    )


def tp(hidden: int) -> System:
    model = GPT(config_of(hidden))
    tensor_parallel(model, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",)))
    return System("TP", Trainer(model, batch_of(hidden), context=loss_parallel))


def fsdp2_tp(hidden: int, size: int) -> System:
    data = dist.get_world_size() // size
    mesh = init_device_mesh("cpu", (data, size), mesh_dim_names=("dp", "tp"))
    model = GPT(config_of(hidden))
    tensor_parallel(model, mesh["tp"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    mine = part(batch_of(hidden), mesh.get_local_rank("dp"), data)
    return System(f"FSDP2 x TP {size}", Trainer(model, mine, mean=mesh.get_group("dp"), context=loss_parallel))


# -- ours ------------------------------------------------------------------------------------------------------------


def hardware_of(rate: float | None) -> Hardware:
    """Eight ranks on this machine's two cores, a link for each.

    `calibrate` gives a latency of 4.5 ms, and 390 MB/s without a rate, when ranks have nothing else to do. Beside
    compute a collective costs more: it takes 2 to 5 ms of CPU time on each of four ranks that share a core.
    """
    link = Link(1e-2, (rate or 3100.0) * 1e6 / 8)
    return Hardware("cluster", {"": 1.5e10}, 4.0e9, link, link, 1 << 30, "order of magnitude of the machine")


def ours(hidden: int, grid: Grid, rate: float | None, regather: str, overlap: bool, lanes: int = 1) -> System:
    batch = batch_of(hidden)
    par = autopar3d.compile(
        GPT(config_of(hidden)),
        grid,
        batch,
        hardware=hardware_of(rate),
        regather=regather,
        overlap="auto" if overlap else False,
        lanes=lanes,
    )
    end = "" if overlap else ", no overlap"
    name = f"autopar3d {text_of(grid)}{', two lanes' if lanes == 2 else end}"
    about = f"regather={regather}, {sum(par.plan.bytes.values()) / 1e6:.1f} MB, {par.plan.seconds:.2f} s predicted"
    return System(name, Trainer(par, batch), about)


def text_of(grid: Grid) -> str:
    replicas = f" in {grid.replicas} replicas" if grid.replicas > 1 else ""
    return f"{grid.x}x{grid.y}x{grid.z}{replicas}"


Choice = tuple[Grid, str, int]  # grid, regather, lanes


def best(hidden: int, rate: float | None) -> Choice:
    """Grid, regather and lanes of the shortest predicted step."""
    with torch.device("meta"):
        model, batch = GPT(config_of(hidden)), tuple(torch.empty_like(x) for x in batch_of(hidden))
    how = {"hardware": hardware_of(rate), "world_size": 8, "lanes": "auto"}
    plans = {r: autopar3d.plan(model, "auto", batch, regather=r, **how) for r in ("all", "none")}  # type: ignore[arg-type]
    regather = min(plans, key=lambda r: plans[r].seconds)
    plan = plans[regather]
    return Grid(*plan.grid, replicas=plan.replicas), regather, plan.lanes


def choose(arguments: argparse.Namespace) -> None:
    grid, regather, lanes = best(arguments.hidden, arguments.rate)
    chosen = {"grid": [grid.x, grid.y, grid.z], "replicas": grid.replicas, "regather": regather, "lanes": lanes}
    Path(arguments.out).write_text(json.dumps({"hidden": arguments.hidden, "rate": arguments.rate, **chosen}))
    print(chosen)


def chosen(hidden: int, rate: float | None, file: str | None) -> Choice:
    """What `choose` wrote, or else what rank 0 finds; the others need not plan too."""
    if file is not None:
        found = json.loads(Path(file).read_text())
        if (found["hidden"], found["rate"]) != (hidden, rate):
            raise SystemExit(f"{file} is for hidden {found['hidden']} and rate {found['rate']}; choose again")
        return Grid(*found["grid"], replicas=found["replicas"]), found["regather"], found["lanes"]
    choice: list[Any] = [best(hidden, rate) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(choice)
    return choice[0]


def systems(hidden: int, rate: float | None, wanted: str, file: str | None) -> list[System]:
    found: list[tuple[str, Callable[[], System]]] = [
        ("ddp", lambda: ddp(hidden)),
        ("fsdp2", lambda: fsdp2(hidden)),
        ("tp", lambda: tp(hidden)),
        ("fsdp2xtp2", lambda: fsdp2_tp(hidden, 2)),
        ("fsdp2xtp4", lambda: fsdp2_tp(hidden, 4)),
    ]
    choice: list[Choice] = []
    for overlap in (True, False):
        end = "" if overlap else "-off"
        for grid in GRIDS:
            name = text_of(grid) + end
            found.append((name, lambda g=grid, o=overlap: ours(hidden, g, rate, "none", o)))  # type: ignore[misc]
            if overlap:
                found.append((f"{name}-lanes", lambda g=grid: ours(hidden, g, rate, "none", True, 2)))  # type: ignore[misc]

        def auto(overlap: bool = overlap) -> System:
            if not choice:
                choice.append(chosen(hidden, rate, file))
            grid, regather, lanes = choice[0]
            made = ours(hidden, grid, rate, regather, overlap, lanes if overlap else 1)
            size = text_of(grid) + (", two lanes" if overlap and lanes == 2 else "")
            return System(f"autopar3d auto{'' if overlap else ', no overlap'}", made.train, f"{size}, {made.about}")

        found.append((f"auto{end}", auto))
    names = [n for n, _ in found if not n.endswith("-lanes")] if wanted == "all" else wanted.split(",")
    made = []
    for name in names:
        began = time.perf_counter()
        made.append(next(make for n, make in found if n == name)())
        if dist.get_rank() == 0:
            print(f"{made[-1].name}: ready after {time.perf_counter() - began:.1f} s. {made[-1].about}", flush=True)
    return made


# -- measuring -------------------------------------------------------------------------------------------------------


def sent() -> int:
    return int(SENT.read_text()) if SENT.exists() else 0


def run(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    made = systems(arguments.hidden, arguments.rate, arguments.systems, arguments.choice)
    walls: dict[str, list[float]] = {s.name: [] for s in made}
    busy: dict[str, list[float]] = {s.name: [] for s in made}
    bytes_sent: dict[str, list[int]] = {s.name: [] for s in made}
    losses: dict[str, list[float]] = {s.name: [] for s in made}
    for turn in range(arguments.repeats + 1):
        for i in range(len(made)):
            system = made[(i + turn) % len(made)]
            dist.barrier()
            before, began, worked = sent(), time.perf_counter(), time.process_time()
            losses[system.name].append(system.train.step())
            worked = time.process_time() - worked
            dist.barrier()
            if turn:  # the first is to warm up
                walls[system.name].append(time.perf_counter() - began)
                bytes_sent[system.name].append(sent() - before)
                busy[system.name].append(worked)
        if dist.get_rank() == 0:
            print(f"turn {turn}", {n: round(w[-1], 2) for n, w in walls.items() if w}, flush=True)
    peaks, busy_of = {}, {}
    for system in made:
        each: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(each, system.train.peak())
        peaks[system.name] = max(each)
        dist.all_gather_object(each, statistics.median(busy[system.name]))
        busy_of[system.name] = sum(each) / len(each)
    if dist.get_rank() == 0:
        report = {
            "hidden": arguments.hidden,
            "rate": arguments.rate,
            "load": Path("/proc/loadavg").read_text().split()[:3],
            "systems": {
                s.name: {
                    "about": s.about,
                    "seconds": walls[s.name],
                    "bytes": statistics.median(bytes_sent[s.name]),
                    "cpu": busy_of[s.name],
                    "losses": losses[s.name],
                    "peak": peaks[s.name],
                }
                for s in made
            },
        }
        if arguments.out:
            Path(arguments.out).write_text(json.dumps(report, indent=1))
        show([report])
    dist.barrier()
    dist.destroy_process_group()


def show(reports: list[dict[str, Any]]) -> None:
    """Tables in Markdown, one per shape and rate."""
    for report in sorted(reports, key=lambda r: (r["hidden"], r["rate"] or math.inf)):
        layers, batch, sequence, _ = SHAPES[report["hidden"]]
        rate = f"{report['rate']:.0f} Mbit/s" if report["rate"] else "links unlimited"
        found = report["systems"]
        medians = {n: statistics.median(s["seconds"]) for n, s in found.items()}
        peers = {n: m for n, m in medians.items() if not n.startswith("autopar3d")}
        least = min(peers.values(), default=math.nan)
        print(f"\n### d={report['hidden']}, {layers} layers, {batch} x {sequence} tokens, {rate}\n")
        print("| system | s/step | from .. to | CPU s | MB sent | MB peak | best peer / this | last loss | |")
        print("|---|---|---|---|---|---|---|---|---|")
        for name, s in found.items():
            low, high = min(s["seconds"]), max(s["seconds"])
            ratio = f"{least / medians[name]:.2f}" if peers else ""
            print(
                f"| {name} | {medians[name]:.2f} | {low:.2f} .. {high:.2f} | {s.get('cpu', math.nan):.2f} "
                f"| {s['bytes'] / 1e6:.1f} | {s.get('peak', math.nan) / 1e6:.0f} | {ratio} "
                f"| {s['losses'][-1]:.5f} | {s['about']} |"
            )
        last = [s["losses"][-1] for s in found.values()]
        print(f"\nLosses differ by at most {max(last) - min(last):.1e}. Load average {' '.join(report['load'])}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    first = commands.add_parser("choose", help="what grid=auto takes, into a file")
    one = commands.add_parser("run", help="on every rank")
    for command in (first, one):
        command.add_argument("hidden", type=int, choices=SHAPES)
        command.add_argument("--rate", type=float, help="of the links, in Mbit/s: what plans are made for")
    first.add_argument("--out", required=True)
    one.add_argument("--choice", help="the file that `choose` wrote")
    one.add_argument("--repeats", type=int, default=7)
    one.add_argument("--systems", default="all", help="such as ddp,tp,fsdp2xtp4,2x4x1,2x4x1-off,2x4x1-lanes,auto")
    one.add_argument("--out", help="where rank 0 writes JSON")
    several = commands.add_parser("report", help="tables of files that `run` wrote")
    several.add_argument("files", nargs="+")
    arguments = parser.parse_args()
    if arguments.command == "run":
        run(arguments)
    elif arguments.command == "choose":
        choose(arguments)
    else:
        show([json.loads(Path(f).read_text()) for f in arguments.files])


if __name__ == "__main__":
    main()
