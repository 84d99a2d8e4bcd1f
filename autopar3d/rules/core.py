"""What a rule is: one line that names an op's factors, from which everything else follows.

`"m k, n k -> m n"` says that a linear's input, weight and output share the factors m, k and n. An axis may shard any
factor: operands and results that have it are sharded there, operands without it must be copies (their gradient becomes
a partial sum), and results without it are partial sums. So strategies, local shapes, FLOPs and the numerical proof in
the tests all come from the line.

Notation: terms separated by commas; a term lists one factor per dim; `...` stands for any leading dims, aligned on the
right; `(a b)` is a dim made of two factors, outer first; `1` is a dim of length one; a term ending in `?` may be
absent. Factors after `|` stay whole: `"... h, h? -> ... h | h"`.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from ..capture.functions import TENSOR, FunctionCall
from ..errors import RuleError
from ..grid import LANE, Grid

Dims = tuple[tuple[str, ...], ...]  # per dim of a tensor, its factors, outer first
Lowered = tuple[Any, tuple[Any, ...], dict[str, Any]]  # target, args, kwargs of the local node


@dataclass(frozen=True)
class OpSpec:
    """A rule applied to one node: its factors with their sizes, and which dims they are.

    Args:
        sizes: length of each factor.
        inputs: per tensor operand (see `operands`) the factors of its dims.
        outputs: the same per result.
        whole: factors that no axis may shard.
        complete: factors missing from the results over which the lowering itself finishes the reduction, so that the
            results are complete instead of partial.
        addends: operands (by number) that are added to the result, such as a linear's bias: where the result is a
            partial sum they must be partial too, so that they count once.
        linear: a partial sum in every operand gives a partial sum in every result (f(a + b) = f(a) + f(b)).
        flops: of the forward, for the whole op; 0 for everything that is not a matmul, convolution or attention.
        lower: builds the local node when it is not simply the op on local tensors.
        exchange: collectives inside the lowering, for the planner: see `Exchange`.
        padded: factors that may be longer than they are, see `pads`: positions along them do not mix, or the op sums
            over them. All others meet true lengths only.
        placed: those of them whose lowering computes with places: when such a factor is cut more finely, only its
            outermost part may be padded.
        fills: what is written into a padded factor's pads, as (operand, value) pairs, before the op mixes them in. A
            factor that an op sums over needs none: zeros are written into the first operand that has it.
        leaves: what is written into the pads of the result, by factor, where the op itself leaves what has no finite
            derivative (log_softmax: -inf), so that readers' gradients of pads stay 0.
        true: the true lengths of the factors that are padded in this graph; `sizes` has the padded ones.
    """

    sizes: Mapping[str, int]
    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    whole: frozenset[str] = frozenset()
    complete: frozenset[str] = frozenset()
    addends: frozenset[int] = frozenset()
    linear: bool = False
    flops: float = 0.0
    lower: Callable[[LocalOp], Lowered] | None = None
    exchange: Callable[[LocalOp], list[Exchange]] | None = None
    padded: frozenset[str] = frozenset()
    placed: frozenset[str] = frozenset()
    fills: Mapping[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    leaves: Mapping[str, float] = field(default_factory=dict)
    true: Mapping[str, int] = field(default_factory=dict)

    def atoms(self, dims: Dims) -> tuple[str, ...]:
        """The factors of one tensor in order: its atoms."""
        return tuple(f for dim in dims for f in dim)

    @property
    def factors(self) -> tuple[str, ...]:
        """Every factor, in order of first appearance."""
        seen = (f for dims in (*self.inputs, *self.outputs) for dim in dims for f in dim)
        return tuple(dict.fromkeys(seen))


@dataclass(frozen=True)
class Exchange:
    """A collective that a lowering performs itself: elements put in per rank, and when (`forward` or `backward`).

    Backward ones happen when the op's first operand has a gradient. `dtype` is what travels, where it is not that of
    the op's first result.
    """

    kind: str
    axis: str
    elements: float
    phase: str = "forward"
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class LocalOp:
    """What a lowering sees: one node, the axes that shard its factors, and its operands already local.

    Args:
        node: the op in the global graph (`node.args` hold global nodes).
        spec: its factors. A factor that other ops cut more finely has become `name/0`, `name/1`, ...
        axes_of: per factor the axes over it, outer first.
        args, kwargs: as the node's, with local operands in place of global ones.
        grid: sizes and group names.
        in_lanes: where the op runs in lanes (see `LaneGrid`), (args, kwargs) as they are in each of them.
    """

    node: Node
    spec: OpSpec
    axes_of: Mapping[str, tuple[str, ...]]
    grid: Grid
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    in_lanes: tuple[tuple[tuple[Any, ...], Mapping[str, Any]], ...] = ()

    def pieces(self, factor: str) -> tuple[str, ...]:
        """The finer factors that stand for one factor of the rule."""
        return tuple(f for f in self.spec.factors if f == factor or f.startswith(factor + "/"))

    def axes(self, *factors: str) -> tuple[str, ...]:
        """The axes over these factors of the rule, outer first."""
        return tuple(a for name in factors for f in self.pieces(name) for a in self.axes_of.get(f, ()))

    def groups(self, *factors: str) -> list[tuple[str, int]]:
        """(group name, size) for each of `axes(*factors)`."""
        return [(self.grid.alias(a), self.grid.axis_size(a)) for a in self.axes(*factors)]

    def ranks(self, *factors: str) -> list[tuple[str, int]]:
        """`groups` without that of the lanes: of a lowering that takes what it needs from `in_lanes`."""
        return [(self.grid.alias(a), self.grid.axis_size(a)) for a in self.axes(*factors) if a != LANE]

    def every_lane(self, name: str) -> list[Any]:
        """The operand of that name in the op's schema, in each lane."""
        lanes = self.in_lanes or ((self.args, self.kwargs),)
        names = [a.name for a in self.node.target._schema.arguments]  # type: ignore[union-attr]
        return [kwargs[name] if name in kwargs else args[names.index(name)] for args, kwargs in lanes]

    def size(self, factor: str) -> int:
        """Global length, without pads."""
        return math.prod(self.spec.true.get(f, self.spec.sizes[f]) for f in self.pieces(factor))

    def local(self, factor: str) -> int:
        """Local length, pads included."""
        return math.prod(self.spec.sizes[f] for f in self.pieces(factor)) // self.grid.extent(self.axes(factor))

    def shape(self, dims: Dims, global_shape: Sequence[int]) -> tuple[int, ...]:
        out = []
        for dim, n in zip(dims, global_shape, strict=True):
            for f in dim:
                n = int(n) // self.spec.true.get(f, self.spec.sizes[f] or 1) * (self.spec.sizes[f] or 1)
            out.append(int(n) // self.grid.extent([a for f in dim for a in self.axes_of.get(f, ())]))
        return tuple(out)

    def in_shape(self, i: int) -> tuple[int, ...]:
        """Local shape of operand i."""
        return self.shape(self.spec.inputs[i], operands(self.node)[i].meta["val"].shape)

    def out_shape(self, i: int = 0) -> tuple[int, ...]:
        """Local shape of result i."""
        return self.shape(self.spec.outputs[i], results(self.node)[i].shape)

    def single(self, factor: str) -> bool:
        """True when nothing shards the factor."""
        return not self.axes(factor)


@dataclass(frozen=True)
class OpRule:
    """How one op (an overload) may be sharded. `build` makes the `OpSpec` of a node."""

    build: Callable[[Node], OpSpec]
    text: str = ""


class Registry(dict[Any, OpRule]):
    """op overload -> rule. `RULES` is the table; `rule` and `builder` add to it."""

    def rule(self, *ops: Any, text: str, **how: Any) -> None:
        """Add a one-line rule for some ops (those that this torch does not have are passed over)."""
        parsed = parse_rule(text)
        for op in ops:
            self[op] = OpRule(functools.partial(_apply, parsed, how), text)

    def builder(self, *ops: Any, pads: bool = False) -> Callable[[Callable[[Node], OpSpec]], Callable[[Node], OpSpec]]:
        """Decorator: the function makes the OpSpec of a node, for ops whose factors depend on shapes or arguments.

        `pads=True` marks every factor that may be sharded as `padded`.
        """

        def add(build: Callable[[Node], OpSpec]) -> Callable[[Node], OpSpec]:
            for op in ops:
                made = functools.partial(_with_pads, build) if pads else build
                self[op] = OpRule(made, (build.__doc__ or "").strip().split("\n")[0])
            return build

        return add


def _with_pads(build: Callable[[Node], OpSpec], node: Node) -> OpSpec:
    spec = build(node)
    return replace(spec, padded=frozenset(spec.sizes) - spec.whole)


RULES = Registry()


def operands(node: Node) -> list[Node]:
    """The tensor operands of a node in order of appearance in args, then kwargs (lists are opened)."""
    found: list[Node] = []

    def visit(x: Any) -> None:
        if isinstance(x, Node):
            if isinstance(x.meta.get("val"), torch.Tensor):
                found.append(x)
        elif isinstance(x, (list, tuple)):
            for y in x:
                visit(y)
        elif isinstance(x, dict):
            for y in x.values():
                visit(y)

    for x in node.args:
        visit(x)
    if node.kwargs:
        visit(node.kwargs)
    return found


def results(node: Node) -> list[torch.Tensor]:
    """The (fake) tensors a node produces; entries of a tuple that are not tensors are None."""
    val = node.meta["val"]
    return list(val) if isinstance(val, (tuple, list)) else [val]


def argument(node: Node, name: str, default: Any = None) -> Any:
    """An argument by its name in the op's schema, whether it was given by position or by keyword."""
    if isinstance(node.target, FunctionCall):
        return default
    for i, arg in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if arg.name == name:
            if name in node.kwargs:
                return node.kwargs[name]
            if i < len(node.args):
                return node.args[i]
            return arg.default_value if arg.has_default_value() else default
    return default


def spec_of(node: Node, rules: Mapping[Any, OpRule] = RULES) -> OpSpec | None:
    """The node's factors, or None when its op has no rule."""
    rule = rules.get(node.target)
    if rule is None:
        return None
    spec = rule.build(node)
    check_spec(node, spec)
    return spec


def check_spec(node: Node, spec: OpSpec) -> None:
    """Raise RuleError unless the factors multiply to the shapes of the node's operands and results."""
    tensors = [("operand", o.meta["val"], d) for o, d in zip(operands(node), spec.inputs, strict=True)]
    tensors += [("result", r, d) for r, d in zip(results(node), spec.outputs, strict=True) if r is not None]
    for what, tensor, dims in tensors:
        got = tuple(math.prod(spec.sizes[f] for f in dim) for dim in dims)
        if got != tuple(tensor.shape):
            raise RuleError(
                f"rule of {node.target} on node {node.name}: a {what} of shape {tuple(tensor.shape)} "
                f"is given the factors {dims}, which multiply to {got}"
            )


def whole_spec(node: Node) -> OpSpec:
    """The spec of an op without a rule: every dim is a factor of its own that stays whole."""
    sizes: dict[str, int] = {}

    def dims(tensor: torch.Tensor | None, tag: str) -> Dims:
        if tensor is None:
            return ()
        names = [f"{tag}{i}" for i in range(tensor.dim())]
        sizes.update(zip(names, map(int, tensor.shape), strict=True))
        return tuple((n,) for n in names)

    inputs = tuple(dims(o.meta["val"], f"i{k}_") for k, o in enumerate(operands(node)))
    outputs = tuple(dims(r if isinstance(r, torch.Tensor) else None, f"o{k}_") for k, r in enumerate(results(node)))
    return OpSpec(sizes, inputs, outputs, whole=frozenset(sizes))


# -- one-line rules ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Term:
    dims: Dims
    ellipsis: bool
    optional: bool


@dataclass(frozen=True)
class ParsedRule:
    inputs: tuple[_Term, ...]
    outputs: tuple[_Term, ...]
    whole: frozenset[str]


def parse_rule(text: str) -> ParsedRule:
    """Read one line of the notation in this module's docstring.

    Raises:
        RuleError: no arrow, or a term that cannot be read.
    """
    body, _, whole = text.partition("|")
    left, arrow, right = body.partition("->")
    if not arrow:
        raise RuleError(
            f"rule {text!r} has no '->'; write a term for each input, '->', and one for each output, as in "
            "'m k, k n -> m n'"
        )
    return ParsedRule(
        tuple(_parse_term(t, text) for t in left.split(",")) if left.strip() else (),
        tuple(_parse_term(t, text) for t in right.split(",")),
        frozenset(whole.replace(",", " ").split()),
    )


def _parse_term(term: str, text: str) -> _Term:
    term = term.strip()
    optional = term.endswith("?")
    tokens = re.findall(r"\.\.\.|\([^)]*\)|\w+", term)
    ellipsis = bool(tokens) and tokens[0] == "..."
    if "..." in tokens[1:]:
        raise RuleError(f"rule {text!r}: '...' stands first in a term")
    dims: list[tuple[str, ...]] = []
    for token in tokens[1:] if ellipsis else tokens:
        dims.append(() if token == "1" else tuple(token.strip("()").split()))
    return _Term(tuple(dims), ellipsis, optional)


def tensor_arguments(node: Node) -> Iterator[tuple[str, Any]]:
    """(schema name, value) of the op's tensor arguments in schema order, absent ones as None."""
    if isinstance(node.target, FunctionCall):
        given = iter(node.args)
        for i, leaf in enumerate(node.target.statics):
            if leaf is TENSOR or leaf is None:
                yield str(i), None if leaf is None else next(given)
        return
    for arg in node.target._schema.arguments:  # type: ignore[union-attr]
        if "Tensor" in str(arg.type):
            yield arg.name, argument(node, arg.name)


def _apply(rule: ParsedRule, how: dict[str, Any], node: Node) -> OpSpec:
    return apply_text(rule, node, **how)


def apply_text(
    rule: ParsedRule,
    node: Node,
    *,
    linear: bool = False,
    flops: bool = False,
    pads: bool = False,
    complete: str = "",
    addend: str = "",
    lower: Callable[[LocalOp], Lowered] | None = None,
    exchange: Callable[[LocalOp], list[Exchange]] | None = None,
) -> OpSpec:
    """The OpSpec of a node from its rule's line.

    `flops=True` counts 2 x the product of all factors; `pads=True` marks all that may be sharded as `padded`.
    """
    sizes: dict[str, int] = {}
    inputs: list[Dims] = []
    addends = set()
    for i, (name, value) in enumerate(tensor_arguments(node)):
        if value is None:
            if i < len(rule.inputs) and not rule.inputs[i].optional:
                raise RuleError(f"rule of {node.target}: argument {name} is absent but its term has no '?'")
            continue
        if i >= len(rule.inputs):
            raise RuleError(f"rule of {node.target} has {len(rule.inputs)} terms; argument {name} has none")
        if name == addend:
            addends.add(len(inputs))
        inputs.append(_bind(rule.inputs[i], value.meta["val"], sizes, node))
    outputs = [_bind(t, r, sizes, node) for t, r in zip(rule.outputs, results(node), strict=False)]
    total = 2.0 * math.prod(sizes.values()) if flops else 0.0
    return OpSpec(
        sizes,
        tuple(inputs),
        tuple(outputs),
        whole=rule.whole,
        complete=frozenset(complete.split()),
        addends=frozenset(addends),
        linear=linear,
        flops=total,
        lower=lower,
        exchange=exchange,
        padded=frozenset(sizes) - rule.whole if pads else frozenset(),
    )


def _bind(term: _Term, tensor: torch.Tensor, sizes: dict[str, int], node: Node) -> Dims:
    lead = tensor.dim() - len(term.dims)
    if lead < 0 or (lead > 0 and not term.ellipsis):
        raise RuleError(f"rule of {node.target}: a term of {len(term.dims)} dims met shape {tuple(tensor.shape)}")
    # Leading dims are numbered from the right, so that operands of different rank line up as in broadcasting.
    dims: list[tuple[str, ...]] = [(f"b{lead - 1 - i}",) for i in range(lead)]
    dims += term.dims
    out: list[tuple[str, ...]] = []
    for dim, n in zip(dims, tensor.shape, strict=True):
        unknown = [f for f in dim if f not in sizes]
        if len(dim) == 1 and int(n) == 1 and (not unknown and sizes[dim[0]] != 1 or dim[0][0] == "b"):
            out.append(())  # a broadcast dim of length one has nothing to shard
            continue
        if len(unknown) > 1:
            raise RuleError(f"rule of {node.target}: the lengths of {unknown} inside one dim are not known")
        if unknown:
            sizes[unknown[0]] = int(n) // math.prod(sizes[f] for f in dim if f in sizes)
        out.append(dim)
    return tuple(out)


# -- finer factors ----------------------------------------------------------------------------------------------------


def refine(spec: OpSpec, cuts: Mapping[str, tuple[int, ...]]) -> OpSpec:
    """Replace factors by the finer ones that the graph needs: `cuts["n"] = (3, 12, 64)` makes n/0, n/1, n/2."""
    names = {f: tuple(f"{f}/{i}" for i in range(len(c))) for f, c in cuts.items() if len(c) > 1}
    if not names:
        return spec

    def fine(dims: Dims) -> Dims:
        return tuple(tuple(g for f in dim for g in names.get(f, (f,))) for dim in dims)

    def fine_set(factors: frozenset[str]) -> frozenset[str]:
        return frozenset(g for f in factors for g in names.get(f, (f,)))

    sizes = {
        g: n for f, size in spec.sizes.items() for g, n in zip(names.get(f, (f,)), cuts.get(f, (size,)), strict=True)
    }
    return replace(
        spec,
        sizes=sizes,
        inputs=tuple(map(fine, spec.inputs)),
        outputs=tuple(map(fine, spec.outputs)),
        whole=fine_set(spec.whole),
        complete=fine_set(spec.complete),
        padded=fine_set(spec.padded) - {g for f in spec.placed for g in names.get(f, (f,))[1:]},
        placed=fine_set(spec.placed),
        fills={g: fill for f, fill in spec.fills.items() for g in names.get(f, (f,))},
        leaves={g: value for f, value in spec.leaves.items() for g in names.get(f, (f,))},
    )
