"""Which factors are made longer so that the grid divides them, and to what length (see `pads`).

Sizes that the grid divides are never touched. For the others padding is planned by cost like everything else: the plan
with a padded factor is made beside the one without, and the cheaper is taken.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch.fx import Node

from ..errors import PlanError
from ..grid import Grid
from ..plan import Decisions
from ..rules import OpSpec, operands, results
from .factors import Factors, is_getitem, producer

# Plans are made for at most so many classes, those with the most work.
_MOST_CLASSES = 4
# A longer factor must save more than this share of the cost: equal plans stay unpadded.
_LEAST_GAIN = 1e-3
# Up to this much longer costs next to nothing.
_NEAR = 1.02


@dataclass(frozen=True)
class FactorClass:
    """Atoms that have one length because ops share the factor, so that they are padded together.

    Attributes:
        length: true length.
        atoms: (value, number of the atom).
        factors: (op, factor).
        work: FLOPs of the ops that have the factor, or else elements.
    """

    length: int
    atoms: frozenset[tuple[Node, int]]
    factors: tuple[tuple[Node, str], ...]
    work: tuple[float, float]


def classes(factors: Factors) -> list[FactorClass]:
    """The classes of a graph, in order of the graph. Ops at which a factor may not be padded do not connect."""
    parent: dict[tuple[Node, int], tuple[Node, int]] = {}

    def root(x: tuple[Node, int]) -> tuple[Node, int]:
        while parent.setdefault(x, x) is not x:
            parent[x] = parent[parent[x]]
            x = parent[x]
        return x

    members: list[tuple[Node, str, tuple[Node, int]]] = []
    for node, spec in factors.specs.items():
        where = places_of(node, spec)
        for f in spec.factors:
            if f not in spec.padded or f in spec.whole or not where.get(f):
                continue
            first = root(where[f][0])
            for other in where[f][1:]:
                parent[root(other)] = first
            members.append((node, f, where[f][0]))
    atoms: dict[tuple[Node, int], set[tuple[Node, int]]] = {}
    for value, shape in factors.values.items():
        for i in range(len(shape.atoms)):
            atoms.setdefault(root((value, i)), set()).add((value, i))
    held: dict[tuple[Node, int], list[tuple[Node, str]]] = {}
    for node, f, place in members:
        held.setdefault(root(place), []).append((node, f))
    found = []
    for top, ops in held.items():
        flops = sum(factors.specs[n].flops for n, _ in ops)
        elements = sum(factors.values[v].elements for v, _ in atoms[top])
        length = factors.values[top[0]].atoms[top[1]]
        found.append(FactorClass(length, frozenset(atoms[top]), tuple(ops), (flops, elements)))
    return found


def places_of(node: Node, spec: OpSpec) -> dict[str, list[tuple[Node, int]]]:
    """Per factor, the atoms of operands and results that it is."""
    found: dict[str, list[tuple[Node, int]]] = {}
    pairs = list(zip(operands(node), spec.inputs, strict=True))
    if isinstance(node.meta["val"], (tuple, list)):
        items = [u for u in node.users if is_getitem(u) and results(node)[producer(u)[1]] is not None]
        pairs += [(u, spec.outputs[producer(u)[1]]) for u in items]
    else:
        pairs.append((node, spec.outputs[0]))
    for value, dims in pairs:
        for i, f in enumerate(spec.atoms(dims)):
            found.setdefault(f, []).append((value, i))
    return found


def pad(factors: Factors, lengths: Mapping[FactorClass, int]) -> Factors:
    """The factors with some classes made longer."""
    longer = copy.copy(factors)
    longer.values, longer.specs = dict(factors.values), dict(factors.specs)
    new: dict[tuple[Node, int], int] = {}
    touched: dict[Node, None] = {}
    for group, n in lengths.items():
        for value, i in group.atoms:
            new[value, i] = n
            touched[value] = None
    for value in touched:
        shape = factors.values[value]
        every = [new.get((value, i), n) for i, n in enumerate(shape.atoms)]
        left = iter(every)
        dims = tuple(tuple(next(left) for _ in dim) for dim in shape.dims)
        longer.values[value] = replace(shape, dims=dims, true=shape.atoms)
    for node, spec in factors.specs.items():
        longer.specs[node] = _pad_spec(node, spec, new)
    return longer


def _pad_spec(node: Node, spec: OpSpec, new: Mapping[tuple[Node, int], int]) -> OpSpec:
    sizes, true, whole = dict(spec.sizes), {}, set(spec.whole)
    for f, places in places_of(node, spec).items():
        length = next((new[p] for p in places if p in new), None)
        if length is None:
            continue
        if f in spec.padded and f not in spec.whole:
            true[f], sizes[f] = spec.sizes[f], length
        else:
            whole.add(f)
    if not true and len(whole) == len(spec.whole):
        return spec
    fills = {f: fill for f, fill in spec.fills.items() if f in true}
    out = {f for dims in spec.outputs for dim in dims for f in dim}
    for f in true:
        if f not in out and f not in spec.complete and f not in fills:
            first = next(i for i, dims in enumerate(spec.inputs) if f in spec.atoms(dims))
            fills[f] = ((first, 0.0),)
    flops = spec.flops * math.prod(sizes[f] / n for f, n in true.items())
    return replace(spec, sizes=sizes, true=true, whole=frozenset(whole), fills=fills, flops=flops)


def best(
    factors: Factors,
    grid: Grid,
    plan: Callable[[Factors], Decisions],
    groups: Callable[[], list[FactorClass]] | None = None,
) -> tuple[Factors, Decisions]:
    """The cheapest plan over which classes are padded, and to what: one class after the other, most work first.

    Args:
        groups: gives `classes(factors)`, for who asks for many grids.
    """
    chosen: dict[FactorClass, int] = {}
    found, decisions = factors, plan(factors)
    sizes = [grid.axis_size(a) for a in grid.axes]
    atoms = {n for shape in factors.values.values() for n in shape.atoms}
    if not any(n % size for n in atoms for size in sizes if n > 1):
        return found, decisions
    odd = [
        c for c in (groups() if groups else classes(factors)) if c.length > 1 and any(c.length % size for size in sizes)
    ]
    # What the planner sets aside, label arithmetic for instance, costs nothing either way.
    odd = [c for c in odd if any(node.name in decisions.seconds for node, _ in c.factors)]
    for group in sorted(odd, key=lambda c: c.work, reverse=True)[:_MOST_CLASSES]:
        idle = _idle(group, found, decisions, grid)
        for n in _lengths(group.length, grid):
            # Much longer pays only where devices would otherwise repeat each other's work.
            if n > _NEAR * group.length and not idle:
                continue
            lengths = {**chosen, group: n}
            longer = pad(factors, lengths)
            other = plan(longer)
            if other.cost < decisions.cost * (1 - _LEAST_GAIN):
                chosen, found, decisions = lengths, longer, other
    return found, decisions


def _idle(group: FactorClass, factors: Factors, decisions: Decisions, grid: Grid) -> bool:
    """Whether ops that have the factor are repeated on some ranks: matmuls and the like, where there are any."""
    ops = [n for n, _ in group.factors if n.name in decisions.seconds]
    ops = [n for n in ops if factors.specs[n].flops] or ops
    return any(grid.extent(decisions.strategies[n.name].axes) < grid.size for n in ops)


Pads = tuple[tuple[str, int, int], ...]
"""Per class that was made longer: a value that has it, the number of the atom there, and its length."""


def pads_of(factors: Factors) -> Pads:
    """What was padded, from which `again` does the same."""
    found = {}
    for group in classes(factors):
        value, i = min(group.atoms, key=lambda at: (at[0].name, at[1]))
        if i in factors.values[value].pads:
            found[value.name, i] = factors.values[value].atoms[i]
    return tuple((name, i, n) for (name, i), n in sorted(found.items()))


def again(factors: Factors, pads: Pads) -> Factors:
    """The factors with what was padded before, when it is a graph of the same model.

    Raises:
        PlanError: there is no such value or atom, or the length is no longer one.
    """
    if not pads:
        return factors
    wanted = {(name, i): n for name, i, n in pads}
    lengths = {}
    for group in classes(factors):
        for value, i in group.atoms:
            if (n := wanted.pop((value.name, i), None)) is not None and n >= group.length:
                lengths[group] = n
    if wanted:
        names = ", ".join(f"atom {i} of {name} to {n}" for (name, i), n in wanted.items())
        raise PlanError(f"plan= pads what this model does not have: {names}")
    return pad(factors, lengths)


def _lengths(length: int, grid: Grid) -> list[int]:
    """Lengths to try: the next multiples of the product of some axes, shortest first."""
    sizes = [grid.axis_size(a) for a in grid.axes]
    products = {math.prod(s for i, s in enumerate(sizes) if mask >> i & 1) for mask in range(1, 1 << len(sizes))}
    longer = sorted({-(-length // m) * m for m in products} - {length})
    near = [n for n in longer if n <= _NEAR * length]
    # The longest of those that cost next to nothing serves every axis; beyond, each length is a choice.
    return [*near[-1:], *(n for n in longer if n > _NEAR * length)]
