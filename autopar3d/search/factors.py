"""The factors that a whole graph agrees on.

Each rule names the factors of one op. Tensors connect ops: if a linear's output is later viewed as (heads, head_dim),
then its `out` factor, its weight's rows and its bias are cut there too. `Factors` finds the coarsest cut of every dim
that serves all ops around it. Afterwards every tensor is a row of *atoms*, the same row for its producer and for each
of its readers, so that placements can be compared atom by atom.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from ..grid import Grid
from ..layout import Factor, Layout
from ..redistribute import State
from ..rules import OpRule, OpSpec, operands, refine, rule_for, whole_spec
from ..rules.core import check_spec


@dataclass(frozen=True)
class ValueShape:
    """A tensor as atoms: per dim the lengths of its factors, outer first; dims of length one have none.

    Where atoms are padded (see `pads`), `true` has the true length of every atom; else it is empty.
    """

    dims: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    true: tuple[int, ...] = ()

    @functools.cached_property
    def atoms(self) -> tuple[int, ...]:
        return tuple(n for dim in self.dims for n in dim)

    @property
    def elements(self) -> int:
        return math.prod(self.atoms)

    @property
    def bytes(self) -> int:
        return self.elements * self.dtype.itemsize

    @property
    def true_dims(self) -> tuple[tuple[int, ...], ...]:
        """`dims` without pads."""
        true = iter(self.true or self.atoms)
        return tuple(tuple(next(true) for _ in dim) for dim in self.dims)

    @property
    def pads(self) -> tuple[int, ...]:
        """Numbers of the atoms that are padded."""
        return tuple(i for i, (n, t) in enumerate(zip(self.atoms, self.true, strict=False)) if n != t)

    def even(self, state: State) -> bool:
        """Whether no padded atom is sharded."""
        return not any(state.atoms[i] for i in self.pads)

    def place(self, atom: int) -> tuple[int, int]:
        """(dim, position within the dim) of an atom."""
        for d, dim in enumerate(self.dims):
            if atom < len(dim):
                return d, atom
            atom -= len(dim)
        raise IndexError(atom)

    def legal(self, state: State, grid: Grid) -> bool:
        """Whether every atom is divisible by the axes over it."""
        return all(n % grid.extent(axes) == 0 for n, axes in zip(self.atoms, state.atoms, strict=True))

    def layout(self, state: State, grid: Grid) -> Layout:
        """The layout that a placement of the atoms means."""
        axes = iter(state.atoms)
        dims = [[Factor(n, next(axes)) for n in dim] for dim in self.true_dims]
        return Layout.from_factors(dims, grid, state.partial)

    def state(self, layout: Layout, grid: Grid) -> State | None:
        """The placement of the atoms that a layout means, or None when the atoms are too coarse for it."""
        atoms: list[tuple[str, ...]] = []
        for sizes, dim in zip(self.true_dims, layout.dims, strict=True):
            found = _spread(sizes, dim, grid)
            if found is None:
                return None
            atoms += found
        return State(tuple(atoms), tuple(sorted(layout.partial)))


def _spread(sizes: tuple[int, ...], dim: tuple[Factor, ...], grid: Grid) -> list[tuple[str, ...]] | None:
    """Distribute a dim's axes over its atoms."""
    if not sizes:
        return [] if not any(f.axes for f in dim) else None
    length = math.prod(sizes)
    factors = [Factor(length, dim[0].axes)] if len(dim) == 1 else list(dim)
    out: list[tuple[str, ...]] = []
    todo = list(sizes)
    for f in factors:
        left, axes = f.size, list(f.axes)
        while left > 1 or not f.size:
            if not todo or left % todo[0]:
                return None
            atom = todo.pop(0)
            mine: list[str] = []
            while axes and atom % grid.extent([*mine, axes[0]]) == 0:
                mine.append(axes.pop(0))
            if axes and grid.extent(mine) != atom:
                return None
            out.append(tuple(mine))
            left //= atom
        if axes:
            return None
    return out if not todo else None


class Factors:
    """Specs and atoms of a functional graph.

    Attributes:
        specs: per op node its `OpSpec`, cut as finely as the graph needs.
        values: per tensor-valued node (placeholders, ops with one result, getitems) its atoms.
        without_rule: names of ops that have no rule, with the nodes concerned.

    Args:
        rules: other rules than those of the library.
        whole: ops that no axis may shard.
    """

    def __init__(
        self, graph: Graph, rules: Mapping[Any, OpRule] | None = None, *, whole: Collection[Node] = ()
    ) -> None:
        self.graph = graph
        self.specs: dict[Node, OpSpec] = {}
        self.values: dict[Node, ValueShape] = {}
        self.without_rule: dict[str, list[Node]] = {}
        coarse = {n: self._spec(n, rules) for n in graph.nodes if n.op == "call_function" and not is_getitem(n)}
        coarse.update({node: _without_ones(whole_spec(node)) for node in whole})
        while True:
            try:
                cuts, factor_cuts = _infer(graph, coarse)
                break
            except _Conflict as conflict:
                # Two readers view one dim in ways that do not nest (24 as 4 * 6 and as 3 * 8): one of them is whole.
                coarse[conflict.node] = _without_ones(whole_spec(conflict.node))
        for node, spec in coarse.items():
            self.specs[node] = refine(spec, {f: _lengths(spec.sizes[f], c) for f, c in factor_cuts[node].items()})
        for node, dims in cuts.items():
            val = node.meta["val"]
            self.values[node] = ValueShape(
                tuple(_lengths(int(n), c) if int(n) != 1 else () for n, c in zip(val.shape, dims, strict=True)),
                val.dtype,
            )

    def _spec(self, node: Node, rules: Mapping[Any, OpRule] | None) -> OpSpec:
        rule = rule_for(node.target) if rules is None else rules.get(node.target)
        if rule is None:
            self.without_rule.setdefault(str(node.target), []).append(node)
            return _without_ones(whole_spec(node))
        spec = rule.build(node)
        check_spec(node, spec)
        return _without_ones(spec)


class _Conflict(Exception):
    def __init__(self, node: Node) -> None:
        self.node = node


def is_getitem(node: Node) -> bool:
    """One result of an op with several."""
    return node.target is operator.getitem


def producer(node: Node) -> tuple[Node, int]:
    """The op that makes a value, and which of its results it is."""
    if is_getitem(node):
        return node.args[0], int(node.args[1])  # type: ignore[return-value, arg-type]
    return node, 0


def _without_ones(spec: OpSpec) -> OpSpec:
    """Factors of length one can not be sharded; leaving them out lets a dim of length one have no atoms anywhere."""
    ones = {f for f, n in spec.sizes.items() if n == 1}
    if not ones:
        return spec

    def thin(dims: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(f for f in dim if f not in ones) for dim in dims)

    return replace(
        spec,
        sizes={f: n for f, n in spec.sizes.items() if f not in ones},
        inputs=tuple(map(thin, spec.inputs)),
        outputs=tuple(map(thin, spec.outputs)),
    )


def _lengths(size: int, cuts: set[int]) -> tuple[int, ...]:
    """Factor lengths from inner sizes: 96 cut at {32, 8} is (3, 4, 8)."""
    bounds = [size, *sorted(cuts, reverse=True), 1]
    return tuple(a // b for a, b in zip(bounds, bounds[1:], strict=False)) if size > 0 else (0,)


def _add(cuts: set[int], size: int, inner: int) -> bool:
    """Add a cut unless it is trivial or does not nest with those there."""
    if inner <= 1 or inner >= size or size % inner or inner in cuts:
        return False
    if any(max(inner, c) % min(inner, c) for c in cuts):
        return False
    cuts.add(inner)
    return True


def _infer(
    graph: Graph, specs: dict[Node, OpSpec]
) -> tuple[dict[Node, list[set[int]]], dict[Node, dict[str, set[int]]]]:
    """Spread the cuts between tensors' dims and ops' factors until nothing changes."""
    dims: dict[Node, list[set[int]]] = {}
    for node in graph.nodes:
        if node.op != "output" and isinstance(node.meta.get("val"), torch.Tensor):
            dims[node] = [set() for _ in node.meta["val"].shape]
    factors: dict[Node, dict[str, set[int]]] = {n: {f: set() for f in s.sizes} for n, s in specs.items()}
    touching: dict[Node, list[Node]] = {v: [] for v in dims}
    bound: dict[Node, list[tuple[Node, tuple[tuple[str, ...], ...]]]] = {}
    for node, spec in specs.items():
        pairs = list(zip(operands(node), spec.inputs, strict=True))
        if node in dims:
            pairs.append((node, spec.outputs[0]))
        else:
            items = [u for u in node.users if is_getitem(u) and u in dims]
            pairs += [(u, spec.outputs[producer(u)[1]]) for u in items]
        bound[node] = pairs
        for value, _ in pairs:
            touching[value].append(node)
    queue = list(specs)
    waiting = set(queue)
    while queue:
        node = queue.pop()
        waiting.discard(node)
        spec, mine = specs[node], factors[node]
        changed: set[Node] = set()
        again = True
        while again:
            again = False
            for value, value_dims in bound[node]:
                for d, names in enumerate(value_dims):
                    size = math.prod(spec.sizes[f] for f in names)
                    cuts, inner = dims[value][d], 1
                    for f in reversed(names):
                        n = spec.sizes[f]
                        new = [inner, *(c * inner for c in mine[f])]
                        if any([_add(cuts, size, c) for c in new]):
                            changed.add(value)
                            again = True
                        for c in sorted(cuts):
                            if inner < c < inner * n and c % inner == 0 and _add(mine[f], n, c // inner):
                                again = True
                        inner *= n
        for value in changed:
            for other in touching[value]:
                if other is not node and other not in waiting:
                    waiting.add(other)
                    queue.append(other)
    _reconcile(bound, specs, dims, factors)
    return dims, factors


def _reconcile(
    bound: dict[Node, list[tuple[Node, tuple[tuple[str, ...], ...]]]],
    specs: dict[Node, OpSpec],
    dims: dict[Node, list[set[int]]],
    factors: dict[Node, dict[str, set[int]]],
) -> None:
    """Where cuts could not nest, producer and reader would see different atoms: drop the cuts they do not share."""
    changed = True
    while changed:
        changed = False
        for node, pairs in bound.items():
            spec = specs[node]
            for value, value_dims in pairs:
                for d, names in enumerate(value_dims):
                    expected, inner = set(), 1
                    size = math.prod(spec.sizes[f] for f in names)
                    for f in reversed(names):
                        expected |= {c for c in (inner, *(c * inner for c in factors[node][f])) if 1 < c < size}
                        inner *= spec.sizes[f]
                    extra = dims[value][d] - expected
                    if extra:
                        dims[value][d] -= extra
                        changed = True
                    missing, inner = expected - dims[value][d], 1
                    for f in reversed(names):
                        for c in list(factors[node][f]):
                            if c * inner in missing:
                                factors[node][f].discard(c)
                                changed = True
                        inner *= spec.sizes[f]
                    if any(b in missing for b in _bounds(names, spec)):
                        raise _Conflict(node)


def _bounds(names: tuple[str, ...], spec: OpSpec) -> list[int]:
    out, inner = [], 1
    for f in reversed(names[1:]):
        inner *= spec.sizes[f]
        out.append(inner)
    return out
