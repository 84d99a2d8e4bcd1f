"""Every rank of a grid in one process.

`run_lockstep` runs an emitted graph node by node, each node on all ranks before the next. Collectives become exchanges
between list entries; everything else runs as on a real rank. The graphs are those that real ranks run, text for text.

`run_threads` runs code that is not a graph yet (a local program under autograd), a thread a rank, which meet at each
collective.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from ..grid import Grid
from ..private import TorchDispatchMode

T = TypeVar("T")

c10d = torch.ops._c10d_functional


def run_lockstep(module: GraphModule, grid: Grid, arguments: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Run an emitted graph on every rank.

    Args:
        arguments: `arguments[i][rank]` is placeholder i on a rank.

    Returns:
        the outputs of each rank.
    """
    ranks = range(grid.size)
    values: dict[Node, list[Any]] = {}
    given = iter(arguments)
    last_use = _last_uses(module)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            values[node] = list(next(given))
        elif node.op == "output":
            return [tuple(_on(r, node.args[0], values)) for r in ranks]
        else:
            args = [_on(r, node.args, values) for r in ranks]
            if node.target in EXCHANGES:
                values[node] = EXCHANGES[node.target](grid, args)
            elif node.target is c10d.wait_tensor.default:
                values[node] = [a[0] for a in args]
            elif node.target is torch.ops.autopar3d.axis_index.default:
                axis = _axis(grid, args[0][0])
                values[node] = [torch.tensor([grid.coordinates(r)[axis]], device=args[0][1]) for r in ranks]
            else:
                kwargs = [_on(r, node.kwargs, values) for r in ranks]
                values[node] = [node.target(*a, **k) for a, k in zip(args, kwargs, strict=True)]
        for dead in last_use.get(node, ()):
            del values[dead]
    raise AssertionError("a graph without an output")


def _on(rank: int, what: Any, values: dict[Node, list[Any]]) -> Any:
    """Arguments as they are on one rank."""
    return map_arg(what, lambda n: values[n][rank])


def _last_uses(module: GraphModule) -> dict[Node, list[Node]]:
    seen: set[Node] = set()
    last: dict[Node, list[Node]] = {}
    for node in reversed(module.graph.nodes):
        for used in node.all_input_nodes:
            if used not in seen:
                seen.add(used)
                last.setdefault(node, []).append(used)
    return last


def _axis(grid: Grid, alias: str) -> str:
    return next(a for a in grid.names if grid.alias(a) == alias)


def _per_group(exchange: Any) -> Any:
    """Lift a function of one group's arguments, in coordinate order, to all ranks."""

    def run(grid: Grid, args: Sequence[Sequence[Any]]) -> list[Any]:
        out: list[Any] = [None] * grid.size
        for group in grid.groups(_axis(grid, args[0][-1])):
            for rank, value in zip(group, exchange([args[r] for r in group]), strict=True):
                out[rank] = value
        return out

    return run


def _all_gather(args: list[Any]) -> list[Tensor]:
    whole = torch.cat([a[0] for a in args])
    return [whole.clone() for _ in args]


def _combine(tensors: list[Tensor], op: str) -> Tensor:
    total = tensors[0].clone()
    for t in tensors[1:]:
        total = torch.maximum(total, t) if op == "max" else torch.minimum(total, t) if op == "min" else total + t
    return total


def _reduce_scatter(args: list[Any]) -> list[Tensor]:
    # Copies: a chunk would keep the whole sum alive.
    return [c.clone() for c in _combine([a[0] for a in args], args[0][1]).chunk(len(args))]


def _all_reduce(args: list[Any]) -> list[Tensor]:
    total = _combine([a[0] for a in args], args[0][1])
    return [total.clone() for _ in args]


def _all_to_all(args: list[Any]) -> list[Tensor]:
    parts = [a[0].split(list(a[2])) for a in args]
    return [torch.cat([p[i] for p in parts]) for i in range(len(args))]


def _coalesced(exchange: Any) -> Any:
    """The same for a bucket: a list of tensors in the place of one."""

    def run(args: list[Any]) -> list[list[Tensor]]:
        each = [exchange([(a[0][i], *a[1:]) for a in args]) for i in range(len(args[0][0]))]
        return [list(of_rank) for of_rank in zip(*each, strict=True)]

    return run


EXCHANGES = {
    c10d.all_gather_into_tensor.default: _per_group(_all_gather),
    c10d.reduce_scatter_tensor.default: _per_group(_reduce_scatter),
    c10d.all_reduce.default: _per_group(_all_reduce),
    c10d.all_to_all_single.default: _per_group(_all_to_all),
    c10d.all_gather_into_tensor_coalesced.default: _per_group(_coalesced(_all_gather)),
    c10d.reduce_scatter_tensor_coalesced.default: _per_group(_coalesced(_reduce_scatter)),
    c10d.all_reduce_coalesced.default: _per_group(_coalesced(_all_reduce)),
}


# -- a thread a rank -------------------------------------------------------------------------------------------------


def run_threads(
    fn: Callable[[int], T], grid: Grid, pool: ThreadPoolExecutor, seen: Callable[[Any, Any], None] | None = None
) -> list[T]:
    """`fn(rank)` on every rank, each in a thread of `pool`; what they return, by rank.

    Args:
        pool: has at least `grid.size` idle threads.
        seen: called once per collective with its op and rank 0's arguments.

    Raises:
        what the first rank raised that failed.
    """
    meeting = _Meeting(grid, seen)

    def run(rank: int) -> T:
        with meeting.turn, _Rank(meeting, rank):
            try:
                return fn(rank)
            except BaseException:
                meeting.give_up()
                raise

    futures = [pool.submit(run, rank) for rank in range(grid.size)]
    errors = [e for e in (f.exception() for f in futures) if e is not None]
    for error in sorted(errors, key=lambda e: isinstance(e, _Abandoned)):
        raise error
    return [f.result() for f in futures]


class _Abandoned(RuntimeError):
    """Another rank failed, and will not come to this rank's collective."""


class _Meeting:
    """Where the ranks hand in what they put into a collective, and take what it gives them.

    One rank runs at a time, until it has to wait: threads that run at once would only fight for Python's lock.
    """

    def __init__(self, grid: Grid, seen: Callable[[Any, Any], None] | None) -> None:
        self.grid, self.seen = grid, seen
        self.turn = threading.Condition()
        self.given: dict[int, tuple[Any, Any]] = {}
        self.taken: list[Any] = []
        self.number = 0  # of exchanges made
        self.failed = False

    def give_up(self) -> None:
        self.failed = True
        self.turn.notify_all()

    def meet(self, rank: int, op: Any, args: Any) -> Any:
        number = self.number
        self.given[rank] = (op, args)
        if len(self.given) == self.grid.size:
            self._exchange()
            self.turn.notify_all()
        else:
            self.turn.wait_for(lambda: self.number > number or self.failed)
        if self.number == number:
            raise _Abandoned(f"rank {rank} waits in {op}; another rank failed")
        # The next exchange waits for every rank, so none overwrites what another has not taken yet.
        return self.taken[rank]

    def _exchange(self) -> None:
        ops = {op for op, _ in self.given.values()}
        if len(ops) != 1:
            raise RuntimeError(f"ranks meet in different collectives: {sorted(map(str, ops))}")
        (op,) = ops
        if self.seen is not None:
            self.seen(*self.given[0])
        self.taken = EXCHANGES[op](self.grid, [self.given[rank][1] for rank in range(self.grid.size)])
        self.given = {}
        self.number += 1


class _Rank(TorchDispatchMode):
    """One rank's thread: its collectives and its place are those of the meeting."""

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        super().__init__()
        self.meeting, self.rank = meeting, rank

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op in EXCHANGES:
            return self.meeting.meet(self.rank, op, args)
        if op is c10d.wait_tensor.default:
            return args[0]
        if op is torch.ops.autopar3d.axis_index.default:
            grid = self.meeting.grid
            return torch.tensor([grid.coordinates(self.rank)[_axis(grid, args[0])]], device=args[1])
        return op(*args, **(kwargs or {}))
