"""Runs one op on every rank of a grid in lock-step, under a forced strategy, through the real passes."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_map_only

from autopar3d.collectives import collectives, sent
from autopar3d.factors import Factors
from autopar3d.grid import Grid
from autopar3d.passes.differentiate import differentiate
from autopar3d.passes.rewrite import rewrite
from autopar3d.plan import Decisions
from autopar3d.program import Argument, Program, Result
from autopar3d.redistribute import State
from autopar3d.rules import LocalOp
from autopar3d.strategies import Strategy, strategies


@dataclass
class Sample:
    """One call of one op. Floating-point tensors have gradients, except those listed (by operand) in `constant`.

    `empty` marks ops whose values are not defined (`aten.empty`) or random: only shapes are compared.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    constant: tuple[int, ...] = ()
    empty: bool = False
    backward: bool = True


class OneOp:
    """A sample as a `Program`, its reference results and gradients, and its legal strategies."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        self.inputs: list[Tensor] = []
        tree_map_only(Tensor, self.inputs.append, (sample.args, sample.kwargs))
        self.needs = [
            t.is_floating_point() and sample.backward and i not in sample.constant for i, t in enumerate(self.inputs)
        ]
        graph = Graph()
        nodes = []
        with FakeTensorMode() as mode:
            for i, t in enumerate(self.inputs):
                node = graph.placeholder(f"a{i}")
                node.meta["val"] = mode.from_tensor(t)
                nodes.append(node)
            order = iter(range(len(nodes)))
            args, kwargs = tree_map_only(Tensor, lambda _: nodes[next(order)], (sample.args, sample.kwargs))
            self.node = graph.call_function(sample.op, args, kwargs, name="op")
            fake = [n.meta["val"] for n in nodes]
            order = iter(range(len(nodes)))
            fargs, fkwargs = tree_map_only(Tensor, lambda _: fake[next(order)], (sample.args, sample.kwargs))
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
        arguments = tuple(
            Argument(n.name, "input", (n.name,), i, g) for i, (n, g) in enumerate(zip(nodes, self.needs, strict=True))
        )
        self.program = Program(
            GraphModule(torch.nn.Module(), graph),
            arguments,
            tuple(Result("output", f"[{i}]", r.name) for i, r in enumerate(results)),
            None,  # type: ignore[arg-type]
            None,  # type: ignore[arg-type]
        )
        self.node = next(n for n in self.program.graph.graph.nodes if n.name == "op")
        self.factors = Factors(self.program.graph.graph)
        self.spec = self.factors.specs[self.node]
        self._reference()

    def _reference(self) -> None:
        leaves = [t.clone().requires_grad_(g) for t, g in zip(self.inputs, self.needs, strict=True)]
        order = iter(leaves)
        args, kwargs = tree_map_only(Tensor, lambda _: next(order), (self.sample.args, self.sample.kwargs))
        torch.manual_seed(0)
        out = self.sample.op(*args, **kwargs)
        outs = [t for t in ([out] if self.single else out) if isinstance(t, Tensor)]
        self.results = [t.detach() for t in outs]
        generator = torch.Generator().manual_seed(1)
        self.tangents = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype) for t in outs]
        self.flows = [i for i, t in enumerate(outs) if t.requires_grad]
        sources = [t for t in leaves if t.requires_grad]
        self.grads: list[Tensor | None] = []
        if self.flows and sources:
            self.grads = list(
                torch.autograd.grad(
                    [outs[i] for i in self.flows], sources, [self.tangents[i] for i in self.flows], allow_unused=True
                )
            )

    def strategies(self, grid: Grid) -> list[Strategy]:
        return strategies(self.spec, grid)

    def check(self, grid: Grid, strategy: Strategy) -> None:
        """Results and gradients are the plain op's on every rank, and what is exchanged is what the rule says."""
        values = self.factors.values
        graph = self.program.graph.graph
        by_name = {n.name: n for n in graph.nodes}

        def whole(node: Node) -> State:
            return State(((),) * len(values[node].atoms))

        decisions = Decisions(
            grid,
            None,  # type: ignore[arg-type]
            {"op": strategy},
            {n.name: whole(n) for n in graph.nodes if n.op == "placeholder"},
            {},
            tuple(whole(by_name[r.node]) for r in self.program.results),  # type: ignore[index]
        )
        local = rewrite(self.program, self.factors, decisions, regather="none")
        parts = differentiate(local, self.inputs, self.needs)
        ranks = [list(self.inputs) for _ in range(grid.size)]
        outs = lock_step(parts.forward, ranks, grid)
        n = len(self.results)
        for rank, got in enumerate(outs):
            for i, want in enumerate(self.results):
                self._compare(got[i], want, f"result {i} on rank {rank}")
        grads: list[Tensor | None] = [None] * sum(self.needs)
        if parts.backward is not None:
            tangents = [self.tangents[i] for i in parts.tangents]
            assert list(parts.tangents) == self.flows
            backs = lock_step(parts.backward, [[*o[n:], *tangents] for o in outs], grid)
            numbers = [i for i, g in enumerate(self.needs) if g]
            for rank, got in enumerate(backs):
                grads = [None] * sum(self.needs)
                for i, g in zip(parts.gradients, got, strict=True):
                    grads[numbers.index(i)] = g
                for i, want in enumerate(self.grads):
                    if want is not None:
                        assert grads[i] is not None
                        self._compare(grads[i], want, f"gradient {i} on rank {rank}")
        self._check_exchange(grid, strategy, local, parts)

    def _compare(self, got: Tensor | None, want: Tensor, what: str) -> None:
        assert got is not None
        assert got.shape == want.shape and got.dtype == want.dtype, (what, got.shape, want.shape, got.dtype)
        if self.sample.empty:
            return
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10, equal_nan=True, msg=lambda m: f"{what}: {m}")

    def _check_exchange(self, grid: Grid, strategy: Strategy, local: Any, parts: Any) -> None:
        emitted: dict[str, Counter[Any]] = {"forward": Counter(), "backward": Counter()}
        for c in collectives(parts.forward):
            emitted["forward"][c.axis, c.kind] += c.elements
        for c in collectives(parts.backward) if parts.backward is not None else ():
            emitted["backward"][c.axis, c.kind] += c.elements
        told: dict[str, Counter[Any]] = {"forward": Counter(), "backward": Counter()}
        for m in local.movements:
            for t in m.transfers:
                if t.phase == "forward" or parts.backward is not None:
                    told[t.phase][t.axis, t.kind] += t.elements
        if self.spec.exchange is not None:
            # The first operand's gradient is what asks for the exchanges of the backward.
            ahead = {"forward", "backward"} if self.needs and self.needs[0] and self.grads else {"forward"}
            for e in self.spec.exchange(LocalOp(self.node, self.spec, strategy.axes_of, grid)):
                if e.phase in ahead:
                    told[e.phase][e.axis, e.kind] += sent(e.kind, grid.axis_size(e.axis), int(e.elements))
        for phase in emitted:
            got, want = +emitted[phase], +told[phase]
            assert got.keys() == want.keys(), (phase, got, want)
            assert all(abs(got[k] - want[k]) < 1e-6 for k in got), (phase, got, want)


def lock_step(module: GraphModule, inputs: list[list[Tensor]], grid: Grid) -> list[tuple[Any, ...]]:
    """Run a graph on all ranks, one node after the other."""
    c10d = torch.ops._c10d_functional
    groups: dict[str, list[tuple[int, ...]]] = {grid.alias(a): grid.groups(a) for a in grid.axes}
    env: dict[Node, list[Any]] = {}
    placeholders = iter(range(len(inputs[0])))
    together: dict[Any, Callable[..., list[Tensor]]] = {
        c10d.all_gather_into_tensor.default: lambda xs, *_: [torch.cat(xs)] * len(xs),
        c10d.reduce_scatter_tensor.default: lambda xs, *_: list(sum(xs[1:], xs[0]).chunk(len(xs))),
        c10d.all_reduce.default: lambda xs, op, _: [
            torch.stack(xs).amax(0) if op == "max" else sum(xs[1:], xs[0])
        ] * len(xs),
        c10d.all_to_all_single.default: lambda xs, *_: [
            torch.cat([x.chunk(len(xs))[i] for x in xs]) for i in range(len(xs))
        ],
    }
    for node in module.graph.nodes:
        if node.op == "placeholder":
            i = next(placeholders)
            env[node] = [per_rank[i] for per_rank in inputs]
            continue

        def local(rank: int, tree: Any) -> Any:
            return torch.fx.node.map_arg(tree, lambda n: env[n][rank])

        ranks = range(grid.size)
        if node.op == "output":
            return [local(r, node.args[0]) for r in ranks]
        if node.target is torch.ops.autopar3d.axis_index.default:
            axis = next(a for a in grid.axes if grid.alias(a) == node.args[0])
            env[node] = [torch.tensor([grid.coordinates(r)[axis]]) for r in ranks]
        elif node.target in together:
            xs: list[Any] = [None] * grid.size
            for group in groups[node.args[-1]]:
                got = together[node.target]([env[node.args[0]][r] for r in group], *node.args[1:])
                for r, x in zip(group, got, strict=True):
                    xs[r] = x
            env[node] = xs
        elif node.target is c10d.wait_tensor.default:
            env[node] = env[node.args[0]]
        else:
            env[node] = []
            for r in ranks:
                torch.manual_seed(0)
                env[node].append(node.target(*local(r, node.args), **local(r, node.kwargs)))
    raise AssertionError("a graph without output")
