"""Names for the lengths of a program's dims: which are the batch, the sequence, the hidden size.

Ops tie dims together: a linear's rows are the rows of what it reads. All that is tied to dim 0 of the first input is
the batch, to dim 1 (of token numbers, or of three dims) the sequence. The hidden size is the length that most
parameters' dims are tied to; a product of lengths that makes it up (heads times their width) is written so.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from typing import Any

import sympy
from torch.fx import Node

from ..program import Program
from ..search.factors import Factors
from ..search.padding import places_of

Atom = tuple[Node, int]


def lengths(program: Program, factors: Factors) -> tuple[dict[Atom, Any], dict[tuple[Node, str], Any], dict[Any, int]]:
    """Expressions for the atoms of every value and the factors of every op, and the value of each symbol."""
    root = _ties(factors)
    size: dict[Any, int] = {}
    for value, shape in factors.values.items():
        for i, n in enumerate(shape.atoms):
            size[root(("atom", value, i))] = n
    for node, spec in factors.specs.items():
        for f, n in spec.sizes.items():
            size[root(("factor", node, f))] = n
    named = _named(program, factors, root, size)
    values = {s: size[c] for c, s in named.items() if isinstance(s, sympy.Symbol)}
    atoms = {
        (value, i): named.get(root(("atom", value, i)), sympy.Integer(n))
        for value, shape in factors.values.items()
        for i, n in enumerate(shape.atoms)
    }
    sizes = {
        (node, f): named.get(root(("factor", node, f)), sympy.Integer(n))
        for node, spec in factors.specs.items()
        for f, n in spec.sizes.items()
    }
    return atoms, sizes, values


def _ties(factors: Factors) -> Any:
    parent: dict[Any, Any] = {}

    def root(x: Any) -> Any:
        parent.setdefault(x, x)
        while parent[x] != x:
            parent[x] = parent[parent[x]]
            x = parent[x]
        return x

    for node, spec in factors.specs.items():
        for f, places in places_of(node, spec).items():
            for value, i in places:
                parent[root(("atom", value, i))] = root(("factor", node, f))
    return root


def _named(program: Program, factors: Factors, root: Any, size: Mapping[Any, int]) -> dict[Any, Any]:
    nodes = {n.name: n for n in program.graph.graph.nodes}
    named: dict[Any, Any] = {}
    lengths_of: dict[str, int] = {}

    def symbol(name: str, cls: Any) -> None:
        if cls in named or size[cls] <= 1:
            return
        # One name, one length: what differs (another attention's heads) is numbered.
        numbered = next(
            n
            for n in itertools.chain([name], (f"{name}_{i}" for i in itertools.count(2)))
            if lengths_of.get(n, size[cls]) == size[cls]
        )
        lengths_of[numbered] = size[cls]
        named[cls] = sympy.Symbol(numbered, positive=True)

    for argument in program.arguments_of("input")[:1]:
        shape = factors.values[nodes[argument.node]]
        tokens = len(shape.dims) > 2 or not shape.dtype.is_floating_point
        for name, d in zip(("batch", "sequence")[: 1 + tokens], range(len(shape.dims)), strict=False):
            if len(shape.dims[d]) == 1:
                atom = sum(map(len, shape.dims[:d]))
                symbol(name, root(("atom", nodes[argument.node], atom)))
    counts: Counter[Any] = Counter()
    dims: list[list[Any]] = []
    for argument in program.arguments_of("parameter"):
        value, atom = nodes[argument.node], 0
        for dim in factors.values[value].dims:
            classes = [root(("atom", value, atom + i)) for i in range(len(dim))]
            atom += len(dim)
            dims.append(classes)
            if len(classes) == 1:
                counts[classes[0]] += 1
    for node, spec in factors.specs.items():
        if "attention" in str(node.target):
            # Where several queries share keys and values, their heads are two factors.
            heads = [f for f in spec.sizes if f.split("/")[0] == "h" and spec.sizes[f] > 1]
            names = ("heads",) if len(heads) == 1 else ("kv_heads", "group", *("heads",) * len(heads))
            for name, f in zip(names, heads, strict=False):
                symbol(name, root(("factor", node, f)))
    free = [c for c, _ in counts.most_common() if c not in named]
    if free:
        hidden = free[0]
        symbol("hidden", hidden)
        if hidden in named:
            _as_parts(named[hidden], size[hidden], dims, named, size)
    return named


def _as_parts(hidden: Any, length: int, dims: list[list[Any]], named: dict[Any, Any], size: Mapping[Any, int]) -> None:
    """Write what makes up a multiple of the hidden size in terms of it: 4 * hidden, hidden / heads."""
    for classes in dims:
        left = [c for c in classes if c not in named]
        if len(left) != 1:
            continue
        product, parts = size[left[0]], sympy.Integer(1)
        for c in classes:
            if c in named:
                product, parts = product * size[c], parts * named[c]
        if product % length == 0 and (len(classes) > 1 or product >= length):
            named[left[0]] = product // length * hidden / parts
