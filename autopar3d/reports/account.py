"""The account of a step, in numbers or in symbols: `plan.cost()` and `plan.symbolic_cost()`.

One walk over the ops and the changes of layout, with one set of quantities: exact fractions, or sympy expressions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from torch import Tensor
from torch.fx import Node

from ..cost import Cost, collective_seconds, compute_seconds, per_unit
from ..grid import LANE
from ..passes.rewrite import Movement
from ..redistribute import sent, transfers
from ..rules import OpSpec, operands, results
from ..search.estimate import saved_shards
from ..search.readings import backward_share, gradients
from ..search.saved import is_view
from ..step import Step
from .attribution import Attribution


@dataclass(frozen=True)
class Quantities:
    """What an account counts with: `number` makes a constant; the others are lengths, axis sizes and rates."""

    number: Any
    atoms: Mapping[tuple[Node, int], Any]
    factors: Mapping[tuple[Node, str], Any]
    axes: Mapping[str, Any]
    alpha: Mapping[str, Any]
    beta: Mapping[str, Any]
    per_flop: Mapping[str, Any]  # by dtype
    per_byte: Any
    shares: Mapping[str, Any]  # by axis, of its communication that is exposed
    values: Mapping[Any, Any]
    lanes: int = 1

    def axis_size(self, axis: str) -> Any:
        return self.axes[axis]

    def extent(self, axes: Iterable[str]) -> Any:
        return math.prod((self.lanes if a == LANE else self.axes[a] for a in axes), start=self.number(1))


def numbers(step: Step, shares: Mapping[str, float]) -> Quantities:
    """Exact fractions."""
    return _quantities(step, shares, Fraction, {}, lambda name, value: Fraction(value))


def symbols(step: Step, shares: Mapping[str, float]) -> Quantities:
    """Sympy expressions: batch, sequence, hidden, heads, gx, alpha_x, beta_x, ... as far as the program has them."""
    import sympy

    from .symbols import lengths

    atoms, factors, values = lengths(step.program, step.factors)
    known: dict[Any, Any] = {s: sympy.Integer(v) for s, v in values.items()}

    def symbol(name: str, value: float) -> Any:
        found = sympy.Symbol(name, positive=True)
        known[found] = sympy.Rational(Fraction(value).numerator, Fraction(value).denominator)
        return found

    def number(x: Any) -> Any:
        return sympy.Rational(Fraction(x).numerator, Fraction(x).denominator)

    return _quantities(step, shares, number, known, symbol, atoms, factors)


def _quantities(
    step: Step, shares: Mapping[str, float], number: Any, values: Any, make: Any, atoms: Any = None, factors: Any = None
) -> Quantities:
    grid, hardware = step.decisions.grid, step.decisions.hardware
    links = {a: hardware.link(a, grid) for a in grid.axes}
    dtypes = {str(v.dtype).removeprefix("torch.") for v in step.factors.values.values()}
    rates = {d: hardware.flops.get(d, hardware.flops[""]) for d in sorted(dtypes)}
    return Quantities(
        number,
        atoms or {(v, i): number(n) for v, s in step.factors.values.items() for i, n in enumerate(s.atoms)},
        factors or {(n, f): number(k) for n, s in step.factors.specs.items() for f, k in s.sizes.items()},
        {a: make(f"g{a}", grid.axis_size(a)) for a in grid.axes},
        {a: make(f"alpha_{a}", link.latency) for a, link in links.items()},
        {a: make(f"beta_{a}", per_unit(link.bandwidth)) for a, link in links.items()},
        {d: make(f"gamma_{d}", per_unit(rate)) for d, rate in rates.items()},
        make("mu", per_unit(hardware.memory)),
        {a: make(f"exposed_{a}", shares.get(a, 1.0)) for a in grid.axes},
        values,
        step.lanes,
    )


def account(step: Step, q: Quantities, regather: str) -> Cost:
    """The cost of a step, counted with these quantities."""
    return _Account(step, q, regather).total()


class _Account:
    def __init__(self, step: Step, q: Quantities, regather: str) -> None:
        self.step, self.q, self.regather = step, q, regather
        self.decisions, self.specs = step.decisions, step.factors.specs
        self.grads = gradients(step.program)
        self.nodes = {n.name: n for n in step.program.graph.graph.nodes}
        self.owed = Attribution(step)

    def total(self) -> Cost:
        ops = {n.name: self._op(n) for n in self.specs}
        leaving = [self._cost(0, 0, moves, 0) for moves in self.owed.outputs.values()]
        parts = [*ops.values(), *leaving]
        memory = self._memory()
        whole = self._sum(parts, memory)
        listed = {name: c for name, c in ops.items() if c.compute != 0 or any(x != 0 for x in c.bytes.values())}
        found = replace(whole, ops=listed, values=self.q.values)
        return found if self.q.values else found.at()

    def _op(self, node: Node) -> Cost:
        spec, q = self.specs[node], self.q
        strategy = self.decisions.strategies[node.name]
        moved = q.number(0)
        tensors = [*zip((o.meta["val"] for o in operands(node)), spec.inputs, strict=True)]
        tensors += [(r, d) for r, d in zip(results(node), spec.outputs, strict=False) if isinstance(r, Tensor)]
        for val, dims in tensors:
            held = [a for f in spec.atoms(dims) for a in strategy.axes_of.get(f, ())]
            moved += self._product(node, spec.atoms(dims)) * val.dtype.itemsize / q.extent(held)
        flops = self._flops(node, spec) / q.extent(strategy.axes)
        if node.name not in self.decisions.seconds:  # set aside: the planner takes it to be free
            return self._cost(0, 0, self.owed.ops.get(node, ()), 0)
        once = compute_seconds(flops, 0 if is_view(node) else moved, q.per_flop[_dtype(tensors[-1][0])], q.per_byte)
        times = 3 if node in self.grads else 1
        work = flops * q.number(1 + backward_share(node, spec, self.grads))
        return self._cost(once * times, work, self.owed.ops.get(node, ()), 0)

    def _product(self, node: Node, factors: Iterable[str]) -> Any:
        return math.prod((self.q.factors[node, f] for f in factors), start=self.q.number(1))

    def _flops(self, node: Node, spec: OpSpec) -> Any:
        """The op's FLOPs as a formula in its factors: two per multiply-add; attention has two products."""
        if not spec.flops:
            return self.q.number(0)
        split: dict[str, list[str]] = {"d": [], "e": []}
        rest: list[str] = []
        for f in spec.sizes:
            (split.get(f.split("/")[0], rest) if "attention" in str(node.target) else rest).append(f)
        found = 2 * self._product(node, rest)
        at = 2 * math.prod(spec.sizes[f] for f in rest)
        if "attention" in str(node.target):
            found *= self._product(node, split["d"]) + self._product(node, split["e"])
            at *= sum(math.prod(spec.sizes[f] for f in split[k]) for k in "de")
        # What a formula in the factors does not say (taps of a convolution) is a constant.
        return found * self.q.number(Fraction(spec.flops) / at)

    def _cost(self, compute: Any, flops: Any, moves: Iterable[Movement], memory: Any) -> Cost:
        q = self.q
        calls = {a: 0 for a in q.axes}
        sent_bytes = {a: q.number(0) for a in q.axes}
        for m in moves:
            for axis, elements in self._transfers(m):
                calls[axis] += 1
                sent_bytes[axis] += elements * m.dtype.itemsize
        communication = {a: collective_seconds(calls[a], sent_bytes[a], q.alpha[a], q.beta[a]) for a in q.axes}
        exposed = sum((communication[a] * q.shares[a] for a in q.axes), start=q.number(0))
        compute, flops = q.number(0) + compute, q.number(0) + flops
        return Cost(compute + exposed, compute, communication, exposed, sent_bytes, flops, q.number(0) + memory)

    def _transfers(self, m: Movement) -> list[tuple[str, Any]]:
        """(axis, elements sent) of the collectives of a movement."""
        q = self.q
        if m.way is not None:
            before, step = m.way
            value = self.nodes[m.value]
            elements = math.prod(
                (q.atoms[value, i] for i in range(len(self.step.factors.values[value].atoms))), start=q.number(1)
            )
            wanted = {(t.kind, t.axis, t.phase) for t in m.transfers}
            scatterable = not any(t.kind == "all_reduce" for t in m.transfers)
            every = transfers(step, before, elements, q, scatterable=scatterable)
            known = {(t.kind, t.axis, t.phase) for t in every}
            forward = [t._replace(phase="regather") for t in every if t.phase == "forward"]
            # A region of activation checkpointing repeats what else is kept.
            every += [t for t in forward if (t.kind, t.axis, t.phase) not in known]
            return [(t.axis, t.elements) for t in every if (t.kind, t.axis, t.phase) in wanted]
        return [(t.axis, self._inside(self.nodes[m.value], t.kind, t.axis, t.elements)) for t in m.transfers]

    def _inside(self, node: Node, kind: str, axis: str, elements: float) -> Any:
        """What a lowering exchanges: so many numbers a row, and some that are there once. Rows are all factors but
        those that it finishes."""
        q, spec = self.q, self.specs[node]
        grid, strategy = self.step.carried_out.grid, self.step.carried_out.strategies[node.name]
        rows = [f for f in spec.sizes if f not in spec.complete]
        held = [a for f in rows for a in strategy.axes_of.get(f, ())]
        count = Fraction(math.prod(spec.sizes[f] for f in rows), grid.extent(held))
        put_in = Fraction(elements) / sent(kind, Fraction(grid.axis_size(axis)), Fraction(1))
        each, once = divmod(put_in, count) if spec.complete else (0, put_in)
        return sent(kind, q.axes[axis], self._product(node, rows) / q.extent(held) * each + q.number(once))

    def _memory(self) -> Any:
        q, step = self.q, self.step
        total = q.number(0)
        for argument in step.program.arguments_of("parameter"):
            value = self.nodes[argument.node]
            shape = step.factors.values[value]
            state = self.decisions.storage[argument.node]
            copies = 4 if argument.requires_grad else 1  # itself, its gradient, AdamW's two
            total += copies * self._share(value, state.sharding) * shape.dtype.itemsize
        for (name, state), size in saved_shards(step.program, step.factors, self.decisions, self.regather).items():
            kept = self.nodes.get(name)
            if kept in step.factors.values:
                assert kept is not None
                total += self._share(kept, state.sharding) * step.factors.values[kept].dtype.itemsize
            else:
                total += q.number(size)
        return total

    def _share(self, value: Node, axes: Iterable[str]) -> Any:
        atoms = range(len(self.step.factors.values[value].atoms))
        return math.prod((self.q.atoms[value, i] for i in atoms), start=self.q.number(1)) / self.q.extent(axes)

    def _sum(self, parts: list[Cost], memory: Any) -> Cost:
        q = self.q
        add = _adder(q)
        compute, flops = add([p.compute for p in parts]), add([p.flops for p in parts])
        communication = {a: add([p.communication[a] for p in parts]) for a in q.axes}
        exposed = add([communication[a] * q.shares[a] for a in q.axes])
        sent_bytes = {a: add([p.bytes[a] for p in parts]) for a in q.axes}
        return Cost(compute + exposed, compute, communication, exposed, sent_bytes, flops, memory)


def _adder(q: Quantities) -> Any:
    """Adds many terms at once; sympy would sort its terms at every plus."""
    if not q.values:
        return lambda terms: sum(terms, start=q.number(0))
    import sympy

    return lambda terms: sympy.Add(*terms)


def _dtype(val: Tensor) -> str:
    return str(val.dtype).removeprefix("torch.")
