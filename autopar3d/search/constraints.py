"""Decisions that are made before planning: `constraints=` by glob, or all those of a plan from a file.

Both become `Pins`: what propagate must keep to, per node of the graph, each with the words in which it was asked for.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor
from torch.fx import Node

from ..errors import LayoutError, PlanError
from ..grid import Grid
from ..layout import Factor, Layout
from ..program import Program, module_path
from ..redistribute import State
from ..rules import OpSpec, results
from .factors import Factors, ValueShape, is_getitem
from .strategies import Strategy, given

if TYPE_CHECKING:
    from ..plan import Plan


class Wish(NamedTuple):
    """A layout that a tensor must have; `said`: who asked, for messages."""

    layout: Layout
    said: str


@dataclass(frozen=True)
class Pins:
    """What is decided already, by node name.

    Args:
        strategies: op -> its strategy as text.
        results: op -> layout of its first result.
        storage: placeholder -> layout in which it is stored.
        copies: value -> layout of the copy that its readers share.
    """

    strategies: Mapping[str, str] = field(default_factory=dict)
    results: Mapping[str, Wish] = field(default_factory=dict)
    storage: Mapping[str, Wish] = field(default_factory=dict)
    copies: Mapping[str, Wish] = field(default_factory=dict)

    def of_op(self, name: str) -> tuple[str | None, Wish | None]:
        """The two wishes about an op; hashable, so that ops of equal wishes can be planned once."""
        return self.strategies.get(name), self.results.get(name)


def pins_of(constraints: Mapping[str, str | Layout], program: Program, factors: Factors, grid: Grid) -> Pins:
    """The pins that globs mean. A glob is held against the names of parameters, and the module paths of ops: of a
    module's ops it means those that are matmuls, convolutions or attention, or else its last one.

    Raises:
        PlanError: a glob that matches nothing, text that is no layout, or two globs that disagree.
    """
    nodes = {n.name: n for n in program.graph.graph.nodes}
    names: dict[str, Node] = {}
    for argument in program.arguments_of("parameter"):
        names |= {name: nodes[argument.node] for name in argument.names}
    parameters = set(names)
    modules: dict[str, list[Node]] = {}
    for node in factors.specs:
        if any(r is not None for r in results(node)):
            modules.setdefault(module_path(node), []).append(node)
    found: tuple[dict[str, Wish], dict[str, Wish]] = ({}, {})
    problems = []
    for glob, wanted in constraints.items():
        said = f"{glob!r}: '{wanted}'"
        if not isinstance(wanted, (str, Layout)):
            problems.append(
                f"{glob!r}: {wanted!r} is a {type(wanted).__name__}; give a layout, as text such as '[z, y]'"
            )
            continue
        try:
            layout = _thin(Layout.parse(wanted) if isinstance(wanted, str) else wanted, grid)
        except LayoutError as error:
            problems.append(f"{glob!r}: {error}")
            continue
        hits = [(0, names[n]) for n in names if fnmatch.fnmatchcase(n, glob)]
        for path, ops in modules.items():
            if path and fnmatch.fnmatchcase(path, glob):
                hits += [(1, n) for n in ([n for n in ops if factors.specs[n].flops] or ops[-1:])]
        if not hits:
            near = difflib.get_close_matches(glob.replace("*", ""), [*parameters, *modules], 3, 0.4)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            problems.append(f"{said}: no parameter and no module that computes is called so{hint}")
        for part, node in hits:
            earlier = found[part].setdefault(node.name, Wish(layout, said))
            if earlier.layout != layout:
                problems.append(f"{said} and {earlier.said} disagree about {_label(node, program)}")
    if problems:
        raise PlanError(f"constraints that cannot be read on grid {grid}:\n  " + "\n  ".join(dict.fromkeys(problems)))
    return Pins(storage=found[0], results=found[1])


def pins_from(plan: Plan, program: Program, grid: Grid) -> Pins:
    """The pins that repeat a plan.

    Raises:
        PlanError: the plan is for another grid, or for another model: names each thing that does not fit.
    """
    problems = []
    if (plan.grid, plan.replicas) != (grid.sizes, grid.replicas):
        problems.append(f"the plan is for grid {Grid(*plan.grid, replicas=plan.replicas)}, this is {grid}")
    nodes = {n.name: n for n in program.graph.graph.nodes}
    ops = {n.name for n in nodes.values() if n.op == "call_function" and not is_getitem(n)}
    stored = {a.node: a for a in program.arguments}
    known = {p.names: p for p in plan.parameters}
    for a in program.arguments_of("parameter"):
        shape = tuple(nodes[a.node].meta["val"].shape)
        if a.names not in known:
            problems.append(f"parameter {' = '.join(a.names)} of the model is not in the plan")
        elif known[a.names].shape != shape:
            problems.append(
                f"parameter {a.names[0]} is {_sizes(known[a.names].shape)} in the plan, {_sizes(shape)} here"
            )
    mine = {a.names for a in program.arguments_of("parameter")}
    problems += [f"parameter {' = '.join(n)} of the plan is not in the model" for n in known if n not in mine]
    for what, theirs, here in (
        ("op", set(plan.strategies), ops),
        ("stored tensor", set(plan.storage), set(stored)),
        ("shared value", set(plan.copies), set(nodes)),
    ):
        problems += [f"{what} {n} of the plan is not in the model" for n in sorted(theirs - here)]
        problems += [f"{what} {n} of the model is not in the plan" for n in sorted(here - theirs) if what == "op"]
    layouts = {}
    for table in (plan.storage, plan.copies):
        for name, text in table.items():
            try:
                layouts[text] = _thin(Layout.parse(text), grid)
            except LayoutError as error:
                problems.append(f"{name}: {error}")
    if problems:
        raise PlanError(unfit(problems))
    return Pins(
        strategies=dict(plan.strategies),
        storage={n: Wish(layouts[t], f"{n}: '{t}'") for n, t in plan.storage.items() if stored[n].kind == "parameter"},
        copies={n: Wish(layouts[t], f"{n}: '{t}'") for n, t in plan.copies.items()},
    )


def check_carried_out(given: Plan, made: Plan) -> None:
    """Raise PlanError where what was made from a plan decides otherwise than it says."""
    problems = []
    for what in ("strategies", "storage", "copies"):
        theirs, mine = getattr(given, what), getattr(made, what)
        for name in theirs:
            if theirs[name] != mine.get(name):
                problems.append(f"{what}: {name} is '{theirs[name]}' in the plan, and can only be '{mine.get(name)}'")
    if problems:
        raise PlanError(unfit(problems))


def unfit(problems: Iterable[str]) -> str:
    """The message for a plan that does not fit, its problems listed (the first ten)."""
    listed = list(dict.fromkeys(problems))
    more = [f"... and {len(listed) - 10} more"] if len(listed) > 10 else []
    return "plan= does not fit this call; make it anew with autopar3d.plan:\n  " + "\n  ".join(listed[:10] + more)


# -- choosing among options --------------------------------------------------------------------------------------------


def kept_strategies(
    options: Sequence[Strategy], node: Node, spec: OpSpec, shape: ValueShape | None, pins: Pins, grid: Grid
) -> tuple[list[Strategy], str]:
    """The strategies of an op that meet the pins, or all of them and why none does."""
    text, wish = pins.of_op(node.name)
    kept = [s for s in options if text is None or str(s) == text]
    if not kept:
        return list(options), f"{node.name} ({node.target}) has no strategy '{text}' here"
    if wish is None or shape is None:
        return kept, ""
    layouts = {s: shape.layout(given(spec, s, 0), grid) for s in kept}
    fit = [s for s in kept if layouts[s] == _filled(wish.layout, shape, grid)]
    if fit:
        return fit, ""
    sizes = _true_shape(shape)
    offered = list(dict.fromkeys(str(v) for v in layouts.values()))
    why = _why(wish.layout, shape, grid) or (
        f"the op leaves it in one of {len(offered)} layouts, such as {', '.join(offered[:6])}; no collective follows "
        "before the layout counts"
    )
    return kept, f"{wish.said}: the result of {module_path(node) or node.name}, {_sizes(sizes)}: {why}"


def kept_states(
    options: Sequence[State], name: str, shape: ValueShape, wish: Wish, grid: Grid
) -> tuple[list[State], str]:
    """The placements of a tensor that mean the layout wished for, or all of them and why none does."""
    wanted = _filled(wish.layout, shape, grid)
    fit = [s for s in options if shape.layout(s, grid) == wanted]
    if fit:
        return fit, ""
    why = _why(wish.layout, shape, grid) or "its factors, or DTensor's order of axes, do not allow this cut"
    return list(options), f"{wish.said}: {name}, {_sizes(_true_shape(shape))}: {why}"


def _why(layout: Layout, shape: ValueShape, grid: Grid) -> str:
    """The arithmetic that forbids a layout, where there is some."""
    sizes = _true_shape(shape)
    if layout.ndim != len(sizes):
        return f"the layout has {layout.ndim} dims, the tensor has {len(sizes)}"
    try:
        for i, dim in enumerate(layout.factors(sizes)):
            for f in dim:
                n = grid.extent(f.axes)
                if f.size % n:
                    return f"dim {i} over {''.join(f.axes)}: {f.size} % {n} = {f.size % n}"
    except LayoutError as error:
        return str(error)
    return ""


def _filled(layout: Layout, shape: ValueShape, grid: Grid) -> Layout | None:
    """The layout in the form in which placements of this tensor come out."""
    try:
        return Layout.from_factors(layout.factors(_true_shape(shape)), grid, layout.partial)
    except LayoutError:
        return None


def _thin(layout: Layout, grid: Grid) -> Layout:
    """Without the axes of size one, which cut nothing."""
    dims = tuple(tuple(Factor(f.size, tuple(a for a in f.axes if a in grid.axes)) for f in dim) for dim in layout.dims)
    return Layout(dims, frozenset(a for a in layout.partial if a in grid.axes))


def _true_shape(shape: ValueShape) -> tuple[int, ...]:
    return tuple(math.prod(dim) for dim in shape.true_dims)


def _label(node: Node, program: Program) -> str:
    names = next((a.names for a in program.arguments if a.node == node.name), None)
    return names[0] if names else module_path(node) or node.name


def _sizes(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "a number"


def result_of(node: Node, factors: Factors) -> ValueShape | None:
    """The first result of an op, as atoms."""
    if isinstance(node.meta["val"], Tensor):
        return factors.values.get(node)
    item = next((u for u in node.users if is_getitem(u) and int(u.args[1]) == 0), None)  # type: ignore[arg-type]
    return None if item is None else factors.values.get(item)
