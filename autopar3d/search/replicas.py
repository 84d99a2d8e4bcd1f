"""What replicas do at each op: which factor they shard, found by following the batch through the graph.

The other axes are searched for; replicas have one role, the same under every plan, so they add nothing to the search.
The batch is the first dim of the inputs. An op on a value that has it is split over replicas by that factor; an op on
parameters alone is repeated by each replica, except where its readers all want the batch of it (a class token that is
expanded to the batch). Roles concern speed only: where one is a bad guess, layouts are changed and results are right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch import Tensor
from torch.fx import Node

from ..grid import REPLICAS, Grid
from ..program import Program
from ..rules import OpSpec, operands
from .factors import Factors, is_getitem, producer
from .strategies import Role, Strategy, given

Place = str | int
"""Of replicas, as `State.place` says it."""


def roles(program: Program, factors: Factors, grid: Grid) -> dict[Node, Role]:
    """Per op the role of the replicas; ops that none of them splits are left out. Empty without replicas."""
    if grid.replicas == 1:
        return {}
    found: dict[Node, Role] = {}
    places: dict[Node, Place] = dict.fromkeys(_batches(program, factors, grid), 0)
    nodes = list(program.graph.graph.nodes)
    for node in nodes:
        if node in factors.specs:
            role = _role(node, factors, places, grid)
            if role != Role():
                found[node] = role
                _spread(node, factors, role, grid, places)
    for node in reversed(nodes):
        if node in factors.specs and node not in found:
            role = _wanted(node, factors, found, grid)
            if role != Role():
                found[node] = role
    return found


def batch_size(program: Program) -> int:
    """Length of the first dim of most inputs, 0 where there is none."""
    nodes = {n.name: n for n in program.graph.graph.nodes}
    vals = [nodes[a.node].meta["val"] for a in program.arguments_of("input")]
    lengths = [int(v.shape[0]) for v in vals if isinstance(v, Tensor) and v.dim()]
    return Counter(lengths).most_common(1)[0][0] if lengths else 0


def idle(program: Program, strategies: Mapping[str, Strategy], grid: Grid) -> str:
    """Why replicas share no work under these strategies, "" where they do."""
    if grid.replicas == 1 or any(REPLICAS in s.axes for s in strategies.values()):
        return ""
    size, n = batch_size(program), grid.replicas
    why = f"{size} % {n} = {size % n}" if size % n else "no op on it can be split by it"
    return (
        f"all {n} replicas do the same work: the batch, the first dim of the inputs, is {size} long, and {why}; give a "
        "batch that replicas divide, or make the grid larger in their place"
    )


def _batches(program: Program, factors: Factors, grid: Grid) -> list[Node]:
    """Inputs whose first dim is the batch, if replicas divide its outermost factor."""
    nodes = {n.name: n for n in program.graph.graph.nodes}
    size, found = batch_size(program), []
    for argument in program.arguments_of("input"):
        node = nodes[argument.node]
        shape = factors.values.get(node)
        if shape is None or not shape.dims or not shape.dims[0] or int(node.meta["val"].shape[0]) != size:
            continue
        if shape.dims[0][0] % grid.replicas == 0:
            found.append(node)
    return found


def _divides(spec: OpSpec, factor: str, grid: Grid) -> bool:
    return factor not in spec.whole and spec.sizes[factor] > 0 and spec.sizes[factor] % grid.replicas == 0


def _role(node: Node, factors: Factors, places: dict[Node, Place], grid: Grid) -> Role:
    """By what the op reads: the batch of the largest operand that has one."""
    spec = factors.specs[node]
    candidates = []
    read = operands(node)
    for number, value in enumerate(read):
        place = places.get(value, "R")
        if isinstance(place, int):
            factor = spec.atoms(spec.inputs[number])[place]
            if _divides(spec, factor, grid):
                candidates.append((factors.values[value].elements, -number, factor))
    if candidates:
        return Role(max(candidates)[2])
    partial = read and all(places.get(v) == "P" and len(v.users) == 1 for v in read)
    return Role(through=bool(spec.linear and partial))


def _spread(node: Node, factors: Factors, role: Role, grid: Grid, places: dict[Node, Place]) -> None:
    """Note where the op's results have the replicas."""
    spec = factors.specs[node]
    strategy = Strategy(((role.factor, (REPLICAS,)),) if role.factor else (), (REPLICAS,) if role.through else ())
    made = [u for u in node.users if is_getitem(u)] if isinstance(node.meta["val"], (tuple, list)) else [node]
    for value in made:
        place = given(spec, strategy, producer(value)[1]).place(REPLICAS)
        if place != "R" and value in factors.values:
            places[value] = place


def _wanted(node: Node, factors: Factors, found: dict[Node, Role], grid: Grid) -> Role:
    """By what all readers want of the op's result."""
    spec = factors.specs[node]
    if len(spec.outputs) != 1 or spec.exchange is not None or not isinstance(node.meta["val"], Tensor):
        return Role()
    wants: set[str] = set()
    for reader in node.users:
        factor = found.get(reader, Role()).factor
        if reader not in factors.specs or not factor:
            return Role()
        for number, value in enumerate(operands(reader)):
            if value is node:
                atoms = factors.specs[reader].atoms(factors.specs[reader].inputs[number])
                wants.add(spec.atoms(spec.outputs[0])[atoms.index(factor)] if factor in atoms else "")
    if len(wants) != 1:
        return Role()
    (factor,) = wants
    return Role(factor) if factor and _divides(spec, factor, grid) else Role()
