"""Runs one op on every rank of a grid in lock-step, under a forced strategy, through the real passes."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_map_only

from autopar3d.collectives import collectives
from autopar3d.factors import Factors
from autopar3d.grid import Grid
from autopar3d.lockstep import run_lockstep
from autopar3d.passes.differentiate import differentiate
from autopar3d.passes.rewrite import rewrite
from autopar3d.plan import Decisions
from autopar3d.program import Argument, Program, Result
from autopar3d.redistribute import State
from autopar3d.strategies import Strategy, strategies

aten = torch.ops.aten


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

    def check(self, grid: Grid, strategy: Strategy, factors: Factors | None = None) -> None:
        """Results and gradients are the plain op's on every rank; what is exchanged is what the rule says.

        `factors`: with some of them padded.
        """
        factors = factors or self.factors
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
            tuple(whole(by_name[r.node]) for r in self.program.results),  # type: ignore[index]
        )
        local = rewrite(self.program, factors, decisions, regather="none")
        parts = differentiate(local, self.arrive, self.needs, seeds=self.flows)
        outs = run_lockstep(parts.forward, grid, [[t] * grid.size for t in self.arrive])
        n = len(self.results)
        for rank, got in enumerate(outs):
            for i, want in enumerate(self.results):
                self._compare(got[i], want, f"result {i} on rank {rank}")
        grads: list[Tensor | None] = [None] * sum(self.needs)
        if parts.backward is not None:
            tangents = [self.tangents[i] for i in parts.tangents]
            assert list(parts.tangents) == self.flows
            saved = list(zip(*(o[n:] for o in outs), strict=True))
            backs = run_lockstep(parts.backward, grid, [*saved, *([t] * grid.size for t in tangents)])
            numbers = [i for i, g in enumerate(self.needs) if g]
            for rank, got in enumerate(backs):
                grads = [None] * sum(self.needs)
                for i, g in zip(parts.gradients, got, strict=True):
                    grads[numbers.index(i)] = g
                for i, want in enumerate(self.grads):
                    if want is not None:
                        assert grads[i] is not None
                        self._compare(grads[i], want, f"gradient {i} on rank {rank}")
        self._check_exchange(local, parts)

    def _compare(self, got: Tensor | None, want: Tensor, what: str) -> None:
        assert got is not None
        assert got.shape == want.shape and got.dtype == want.dtype, (what, got.shape, want.shape, got.dtype)
        if self.sample.empty:
            return
        tol = 1e-5 if want.dtype is torch.float32 or self.results[0].dtype is torch.float32 else 1e-10
        tol = 0.25 if want.dtype is torch.bfloat16 else tol
        torch.testing.assert_close(got, want, rtol=tol, atol=tol, equal_nan=True, msg=lambda m: f"{what}: {m}")

    def _check_exchange(self, local: Any, parts: Any) -> None:
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
        for phase in emitted:
            got, want = +emitted[phase], +told[phase]
            assert got.keys() == want.keys(), (phase, got, want)
            assert all(abs(got[k] - want[k]) < 1e-6 for k in got), (phase, got, want)
