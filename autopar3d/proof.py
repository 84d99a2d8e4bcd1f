"""Is a rule right? One op on every rank of a grid, under each legal strategy, beside the plain op.

The strategy is forced, the real passes make the local program, and all ranks run it in one process. Results and
gradients must be the plain op's, and the collectives must be those that the rule and the changes of layout announce.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node

from .collectives import KINDS, collectives
from .errors import RuleError
from .grid import Grid, GridLike
from .passes.differentiate import differentiate
from .passes.rewrite import LocalProgram, rewrite
from .plan import Decisions
from .private import FakeTensorMode, tree_map_only
from .program import Argument, Program, Result
from .redistribute import State, sent
from .rules import rule_for
from .running.lockstep import run_lockstep, run_threads
from .search.factors import Factors
from .search.padding import classes, pad
from .search.strategies import Strategy, strategies

aten = torch.ops.aten

CUBE_AND_PLANE: tuple[GridLike, ...] = ((2, 2, 2), (2, 3, 1))

Exchanged = dict[str, dict[tuple[str, str], float]]  # elements each rank sends, by phase, axis and kind


@dataclass
class Sample:
    """One call of one op. Floating-point tensors have gradients, except operands listed in `constant`.

    `empty` marks ops whose values are undefined (`aten.empty`) or random: only shapes and types are compared.
    `first` seeds the first result's gradient only (torch drops the gradients of the others).
    `views`: operands that arrive in another shape and are reshaped, so that factors are cut finer.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    constant: tuple[int, ...] = ()
    empty: bool = False
    first: bool = False
    views: dict[int, list[int]] = field(default_factory=dict)


class OneOp:
    """A sample as a `Program`, its reference results and gradients, and its legal strategies."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        self.inputs: list[Tensor] = []
        tree_map_only(Tensor, self.inputs.append, (sample.args, sample.kwargs))
        self.needs = [t.is_floating_point() and i not in sample.constant for i, t in enumerate(self.inputs)]
        graph = Graph()
        nodes = []
        with FakeTensorMode() as mode:
            for i, t in enumerate(self.inputs):
                node = graph.placeholder(f"a{i}")
                fake = mode.from_tensor(t)
                node.meta["val"] = fake.reshape(sample.views.get(i, t.shape))
                if i in sample.views:
                    node = graph.call_function(aten.reshape.default, (node, list(t.shape)))
                    node.meta["val"] = fake
                nodes.append(node)
            order = iter(range(len(nodes)))
            args, kwargs = tree_map_only(Tensor, lambda _: nodes[next(order)], (sample.args, sample.kwargs))
            self.node = graph.call_function(sample.op, args, kwargs, name="op")
            fakes = [n.meta["val"] for n in nodes]
            order = iter(range(len(nodes)))
            fargs, fkwargs = tree_map_only(Tensor, lambda _: fakes[next(order)], (sample.args, sample.kwargs))
            out = sample.op(*fargs, **fkwargs)
        self.single = isinstance(out, Tensor)
        self.node.meta["val"] = out if self.single else tuple(out)
        results: list[Node] = [self.node]
        if not self.single:
            results = []
            for i, t in enumerate(out):
                if isinstance(t, Tensor):
                    item = graph.call_function(operator.getitem, (self.node, i))
                    item.meta["val"] = t
                    results.append(item)
        graph.output(tuple(results))
        arguments = tuple(Argument(f"a{i}", "input", (f"a{i}",), i, g) for i, g in enumerate(self.needs))
        self.program = Program(
            GraphModule(torch.nn.Module(), graph),
            arguments,
            tuple(Result("output", f"[{i}]", r.name) for i, r in enumerate(results)),
            None,  # type: ignore[arg-type]
            None,  # type: ignore[arg-type]
        )
        self.node = next(n for n in self.program.graph.graph.nodes if n.name == "op")
        # What the placeholders hold.
        self.arrive = [t.reshape(sample.views.get(i, list(t.shape))) for i, t in enumerate(self.inputs)]
        self.factors = Factors(self.program.graph.graph)
        self.spec = self.factors.specs[self.node]
        self._reference()

    def _reference(self) -> None:
        leaves = [t.clone().requires_grad_(g) for t, g in zip(self.arrive, self.needs, strict=True)]
        order = iter(x.reshape(t.shape) if i in self.sample.views else x for i, (x, t) in self._numbered(leaves))
        args, kwargs = tree_map_only(Tensor, lambda _: next(order), (self.sample.args, self.sample.kwargs))
        out = self.sample.op(*args, **kwargs)
        outs = [t for t in ([out] if self.single else out) if isinstance(t, Tensor)]
        self.results = [t.detach() for t in outs]
        generator = torch.Generator().manual_seed(1)
        self.tangents = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype) for t in outs]
        self.flows = [i for i, t in enumerate(outs) if t.requires_grad and (i == 0 or not self.sample.first)]
        sources = [t for t in leaves if t.requires_grad]
        self.grads: list[Tensor | None] = []
        if self.flows and sources:
            self.grads = list(
                torch.autograd.grad(
                    [outs[i] for i in self.flows],
                    sources,
                    [self.tangents[i] for i in self.flows],
                    allow_unused=True,
                )
            )

    def _numbered(self, leaves: list[Tensor]) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
        return enumerate(zip(leaves, self.inputs, strict=True))

    def strategies(self, grid: Grid, factors: Factors | None = None) -> list[Strategy]:
        return strategies((factors or self.factors).specs[self.node], grid)

    def check(
        self, grid: Grid, strategy: Strategy, factors: Factors | None = None, *, pool: ThreadPoolExecutor | None = None
    ) -> None:
        """Results and gradients are the plain op's on every rank; what is exchanged is what the rule says.

        Args:
            factors: with some of them padded.
            pool: `grid.size` threads, in which the local program runs under autograd itself, some five times faster.
                Without, it is traced, differentiated and run in lock-step, as in a compiled model.

        Raises:
            AssertionError: it differs.
        """
        local = self._local(grid, strategy, factors or self.factors)
        results, grads, emitted = self._threads(local, grid, pool) if pool else self._traced(local, grid)
        for rank in range(grid.size):
            for i, want in enumerate(self.results):
                self._compare(results[rank][i], want, f"result {i} on rank {rank}")
            for i, wanted in enumerate(self.grads):
                if wanted is not None:
                    self._compare(grads[rank][i], wanted, f"gradient {i} on rank {rank}")
        told: Exchanged = {"forward": defaultdict(float), "backward": defaultdict(float)}
        for m in local.movements:
            for t in m.transfers:
                if t.phase == "forward" or self.grads:
                    told[t.phase][t.axis, t.kind] += t.elements
        for phase in emitted:
            got, expected = ({k: v for k, v in of[phase].items() if v} for of in (emitted, told))
            assert got.keys() == expected.keys(), (phase, got, expected)
            assert all(abs(got[k] - expected[k]) < 1e-6 for k in got), (phase, got, expected)

    def _local(self, grid: Grid, strategy: Strategy, factors: Factors) -> LocalProgram:
        values = factors.values
        graph = self.program.graph.graph
        by_name = {n.name: n for n in graph.nodes}

        def whole(node: Node) -> State:
            return State(((),) * len(values[node].atoms))

        decisions = Decisions(
            grid,
            None,  # type: ignore[arg-type]
            {n.name: Strategy() for n in graph.nodes if n.target is aten.reshape.default} | {"op": strategy},
            {n.name: whole(n) for n in graph.nodes if n.op == "placeholder"},
            {},
            tuple(whole(by_name[r.node]) for r in self.program.results if r.node is not None),
        )
        return rewrite(self.program, factors, decisions, regather="none")

    def _traced(self, local: LocalProgram, grid: Grid) -> tuple[list[Any], list[list[Tensor | None]], Exchanged]:
        parts = differentiate(local, self.arrive, self.needs, seeds=self.flows)
        outs = run_lockstep(parts.forward, grid, [[t] * grid.size for t in self.arrive])
        n = len(self.results)
        grads: list[list[Tensor | None]] = [[None] * sum(self.needs) for _ in outs]
        emitted: Exchanged = {"forward": defaultdict(float), "backward": defaultdict(float)}
        if parts.backward is not None:
            tangents = [self.tangents[i] for i in parts.tangents]
            assert list(parts.tangents) == self.flows
            saved = list(zip(*(o[n:] for o in outs), strict=True))
            backs = run_lockstep(parts.backward, grid, [*saved, *([t] * grid.size for t in tangents)])
            numbers = [i for i, g in enumerate(self.needs) if g]
            for rank, got in enumerate(backs):
                for i, g in zip(parts.gradients, got, strict=True):
                    grads[rank][numbers.index(i)] = g
        for phase, graph in (("forward", parts.forward), ("backward", parts.backward)):
            for c in collectives(graph) if graph is not None else ():
                emitted[phase][c.axis, c.kind] += c.elements
        return list(outs), grads, emitted

    def _threads(
        self, local: LocalProgram, grid: Grid, pool: ThreadPoolExecutor
    ) -> tuple[list[Any], list[list[Tensor | None]], Exchanged]:
        emitted: Exchanged = {"forward": defaultdict(float), "backward": defaultdict(float)}
        phase = "forward"
        axes = {grid.alias(axis): axis for axis in grid.axes}

        def seen(op: Any, args: Any) -> None:
            kind, axis = KINDS[op], axes[args[-1]]
            emitted[phase][axis, kind] += sent(kind, grid.axis_size(axis), args[0].numel())

        def forward(rank: int) -> tuple[list[Tensor], list[Tensor]]:
            leaves = [t.clone().requires_grad_(g) for t, g in zip(self.arrive, self.needs, strict=True)]
            return leaves, list(Interpreter(local.graph).run(*leaves))

        def backward(rank: int) -> list[Tensor | None]:
            leaves, outs = ran[rank]
            return list(
                torch.autograd.grad(
                    [outs[i] for i in self.flows],
                    [t for t in leaves if t.requires_grad],
                    [self.tangents[i] for i in self.flows],
                    allow_unused=True,
                )
            )

        ran = run_threads(forward, grid, pool, seen)
        phase = "backward"
        grads = run_threads(backward, grid, pool, seen) if self.grads else [[] for _ in ran]
        return [[t.detach() for t in outs] for _, outs in ran], grads, emitted

    def _compare(self, got: Tensor | None, want: Tensor, what: str) -> None:
        assert got is not None
        assert got.shape == want.shape and got.dtype == want.dtype, (what, got.shape, want.shape, got.dtype)
        if self.sample.empty:
            return
        tol = 1e-5 if want.dtype is torch.float32 or self.results[0].dtype is torch.float32 else 1e-10
        tol = 0.25 if want.dtype is torch.bfloat16 else tol
        torch.testing.assert_close(got, want, rtol=tol, atol=tol, equal_nan=True, msg=lambda m: f"{what}: {m}")


# -- what a user calls -----------------------------------------------------------------------------------------------


def prove_rule(
    op: Any, *args: Any, constant: Sequence[int] = (), grids: Iterable[GridLike] = CUBE_AND_PLANE, **kwargs: Any
) -> int:
    """Prove the rule of an op by numbers: one call of the op, under every legal placement, beside the plain op.

    On each grid every legal strategy runs on all ranks, in this process. Results and gradients must be the plain op's,
    and the collectives those that the rule announces. If the rule allows pads, the same with lengths that the grid does
    not divide. A few strategies also go through differentiation into graphs, as in a compiled model.

    Args:
        op: an op that has a rule, as `torch.ops.aten.cdist.default`.
        args, kwargs: those of the call. Small tensors in float64, their dims of different lengths that 2 and 3 divide.
        constant: numbers of the tensors among them that need no gradient.
        grids: where to try; `(2, 2, 2)` and `(2, 3, 1)` by default.

    Returns:
        how many placements were tried.

    Raises:
        RuleError: the op has no rule, or it does not fit this call.
        AssertionError: names the grid and strategy, and what differs.
    """
    sample = Sample(op, args, kwargs, tuple(constant))
    if not rule_for(op):
        raise RuleError(f"{op} has no rule, so every rank computes it whole; give it one with autopar3d.rules.rule")
    grids = [Grid.of(g) for g in grids]
    tried = prove(sample, grids) + sum(prove_padded(sample, g) for g in grids)
    prove(sample, grids, pick=lambda found: [max(found, key=lambda s: len(s.axes))], traced=True)
    return tried


# -- all legal strategies --------------------------------------------------------------------------------------------


def prove(
    sample: Sample,
    grids: Iterable[GridLike] = CUBE_AND_PLANE,
    *,
    pick: Callable[[list[Strategy]], Iterable[Strategy]] | None = None,
    traced: bool = False,
) -> int:
    """Prove an op's rule on this sample: each legal strategy on each grid.

    Args:
        pick: takes the legal strategies, returns those to try; all by default.
        traced: differentiated as in a compiled model, which takes five times as long.

    Returns:
        how many placements were tried.

    Raises:
        AssertionError: names the op, the grid, the strategy, and what differs.
    """
    one = OneOp(sample)
    return sum(_each(one, Grid.of(g), one.factors, pick, traced) for g in grids)


def prove_padded(
    sample: Sample,
    grid: GridLike = (2, 2, 1),
    *,
    pick: Callable[[list[Strategy]], Iterable[Strategy]] | None = None,
    traced: bool = False,
) -> int:
    """The same with factors longer than they are, all that the rule allows at once, and each alone; of the strategies
    those that shard one of them."""
    one, grid = OneOp(sample), Grid.of(grid)
    lengths = {c: (c.length // grid.size + 1) * grid.size for c in classes(one.factors) if c.length > 1}
    ways = [lengths, *({c: n} for c, n in lengths.items() if len(lengths) > 1)] if lengths else []
    return sum(_each(one, grid, pad(one.factors, way), pick, traced) for way in ways)


def _each(
    one: OneOp,
    grid: Grid,
    factors: Factors,
    pick: Callable[[list[Strategy]], Iterable[Strategy]] | None,
    traced: bool,
) -> int:
    true = dict(factors.specs[one.node].true)
    found = one.strategies(grid, factors)
    if true:
        found = [s for s in found if any(f in true for f, _ in s.assigned)]
    chosen = list(pick(found)) if pick and found else found
    with ThreadPoolExecutor(grid.size) as pool:
        for strategy in chosen:
            try:
                one.check(grid, strategy, factors, pool=None if traced else pool)
            except Exception as error:
                padded = f", longer than {true}" if true else ""
                raise AssertionError(f"{one.sample.op} on {grid} with {strategy}{padded}: {error}") from error
    return len(chosen)
