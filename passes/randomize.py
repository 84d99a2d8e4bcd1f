"""randomize: a `Program` -> the same with every random op a function of (seed, step, number of the op, place).

Torch's ops draw from the process's generator, so that ranks that hold different shards would draw in another order
than one device does. Here each becomes `autopar3d::draw`, which takes a new last argument of the program, the key
(kind "key": seed and step), and plain ops on what is drawn. A program without random ops is returned as it is.

Attention with dropout has no fused form that takes a mask of ours: it becomes matmul, softmax, dropout, matmul, and
the program's notes say what that keeps for backward.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from autopar3d.errors import TraceError
from autopar3d.private import FakeTensor, OpOverload, tree_leaves
from autopar3d.program import ORIGIN, Argument, Program, module_path, source_line
from autopar3d.rules.core import argument

aten = torch.ops.aten

KEY = "random_key"


def randomize(program: Program) -> Program:
    """A new program whose random numbers are the same on every grid.

    Raises:
        TraceError: a random op that has no such form.
    """
    if not any(is_random(node) for node in program.graph.graph.nodes):
        return program
    return _Randomizer(program).run()


# Random, though torch does not tag them so.
_UNTAGGED = {
    aten.scaled_dot_product_attention.default,
    aten.feature_dropout.default,
    aten.feature_alpha_dropout.default,
    aten.rrelu.default,
}


def is_random(node: Node) -> bool:
    """Whether the op draws random numbers with the arguments it has."""
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in target.tags and target not in _UNTAGGED:
        return False
    if any(argument(node, name, True) is False for name in ("train", "training")):
        return False
    return all(argument(node, name, 1.0) != 0.0 for name in ("dropout", "dropout_p"))


class _Randomizer:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.source = program.graph.graph
        self.graph = Graph()
        self.new: dict[Node, Any] = {}  # by the program's own node; of an op with several results a tuple
        leaves = (leaf for node in self.source.nodes for leaf in tree_leaves(node.meta.get("val")))
        self.fake_mode = next(leaf.fake_mode for leaf in leaves if isinstance(leaf, FakeTensor))
        self.numbers = 0
        self.attentions: list[tuple[Node, float]] = []  # unfused ones and the bytes they keep
        self.key: Node

    def run(self) -> Program:
        for node in self.source.find_nodes(op="placeholder"):
            self.new[node] = self.graph.node_copy(node)
        self.key = self.graph.placeholder(KEY)
        self.key.target = self.key.name
        with self.fake_mode:
            self.key.meta = {"val": torch.empty([2], dtype=torch.int64, device="cpu")}
        for node in self.source.nodes:
            if node.op == "call_function":
                self.new[node] = self._op(node)
        self.graph.output(self._map(self.source.output_node().args[0]))
        for node in reversed(self.graph.nodes):
            if node.op == "call_function" and not node.users:  # `empty`, to be filled at random
                self.graph.erase_node(node)
        self.graph.lint()
        renamed = {old.name: new.name for old, new in self.new.items() if isinstance(new, Node)}
        return dataclasses.replace(
            self.program,
            graph=GraphModule(nn.Module(), self.graph),
            arguments=(*self.program.arguments, Argument(self.key.name, "key", ("(random key)",))),
            results=tuple(
                r if r.node is None else dataclasses.replace(r, node=renamed[r.node]) for r in self.program.results
            ),
            notes=(*self.program.notes, *self._notes()),
        )

    def _op(self, node: Node) -> Any:
        if node.target is operator.getitem and isinstance(self.new[node.args[0]], tuple):  # type: ignore[index]
            return self.new[node.args[0]][node.args[1]]  # type: ignore[index]
        if not is_random(node):
            return self.graph.node_copy(node, lambda n: self.new[n])
        make = _FORMS.get(node.target)
        if make is None:
            line = source_line(node)
            raise TraceError(
                f"{node.target}{f' at {line}' if line else ''} draws random numbers in a way that would differ between "
                "ranks. Dropout of every kind, rand, randn, randint, randperm, bernoulli, uniform, normal and "
                "exponential are the same on every grid: write it with these (a sample from a distribution as "
                "torch.rand_like(x) and its quantiles), or draw outside the model and pass the result as an input"
            )
        return make(self, node)

    def _map(self, value: Any) -> Any:
        return map_arg(value, lambda n: self.new[n])

    # -- building ------------------------------------------------------------------------------------------------

    def call(self, origin: Node, target: Any, *args: Any, name: str | None = None, **kwargs: Any) -> Node:
        """A new node with its value, which comes from the place in the model that `origin` comes from."""
        node = self.graph.call_function(target, args, kwargs, name=name or target.overloadpacket.__name__)
        node.meta = {k: v for k, v in origin.meta.items() if k in ORIGIN}
        with self.fake_mode, torch.no_grad():
            values = map_arg((args, kwargs), lambda n: n.meta["val"])
            node.meta["val"] = target(*values[0], **values[1])
        return node

    def draw(self, origin: Node, what: str, like: Tensor, *, p: float = 0.0, dtype: torch.dtype | None = None) -> Node:
        """The next draw of the step, of the shape and on the device of a tensor."""
        number, self.numbers = self.numbers, self.numbers + 1
        size = [int(n) for n in like.shape]
        given = (self.key, number, what, p, size, dtype or like.dtype, like.device)
        return self.call(origin, torch.ops.autopar3d.draw.default, *given, name=f"draw_{what}")

    def shifted(self, origin: Node, x: Node, scale: Any, shift: Any) -> Node:
        """x * scale + shift, without what changes nothing."""
        if scale != 1:
            x = self.call(origin, aten.mul.Tensor, x, scale)
        return self.call(origin, aten.add.Tensor, x, shift) if shift != 0 else x

    def dropout(self, origin: Node, x: Node, p: float) -> tuple[Node, Node]:
        """x with elements dropped, and the mask of what is kept."""
        keep = self.draw(origin, "keep", x.meta["val"], p=p, dtype=torch.bool)
        scale = 1.0 / (1.0 - p) if p < 1.0 else 0.0
        # The op that multiplies by a mask and a number in one pass is named after one of its uses.
        return self.call(origin, aten.native_dropout_backward.default, x, keep, scale, name="dropout"), keep

    def _notes(self) -> list[str]:
        if not self.attentions:
            return []
        kept = sum(size for _, size in self.attentions)
        first = module_path(self.attentions[0][0]) or "the model"
        count = f"{len(self.attentions)} attentions, the first in {first}," if len(self.attentions) > 1 else f"{first}:"
        verb = "drop" if len(self.attentions) > 1 else "attention drops"
        return [
            f"{count} {verb} probabilities in training, which no fused kernel does the same way on every grid: "
            f"scores are computed unfused, and {kept / 2**20:.4g} MiB of probabilities and masks (all ranks together) "
            "are kept for backward. Set the attention's dropout to 0 to use the fused form."
        ]


# -- the forms ---------------------------------------------------------------------------------------------------------


def _fused_dropout(build: _Randomizer, node: Node) -> Any:
    x, p = build.new[node.args[0]], float(argument(node, "p"))  # type: ignore[index]
    both = node.target is aten.native_dropout.default
    if p == 0.0:
        return (x, build.call(node, aten.ones_like.default, x, dtype=torch.bool)) if both else x
    y, keep = build.dropout(node, x, p)
    return (y, keep) if both else y


def _like(node: Node) -> Tensor:
    value = node.meta["val"]
    assert isinstance(value, Tensor)
    return value


def _plain(what: str) -> Callable[[_Randomizer, Node], Node]:
    return lambda build, node: build.draw(node, what, _like(node))


def _bernoulli(build: _Randomizer, node: Node) -> Node:
    value = _like(node)
    p = argument(node, "p")
    if isinstance(p, (int, float)):
        keep = build.draw(node, "keep", value, p=1.0 - float(p), dtype=torch.bool)
    else:
        chance = build.new[p if isinstance(p, Node) else argument(node, "self")]
        keep = build.call(node, aten.lt.Tensor, build.draw(node, "uniform", value, dtype=_wide(value)), chance)
    return build.call(node, aten._to_copy.default, keep, dtype=value.dtype)


def _wide(value: Tensor) -> torch.dtype:
    return torch.float64 if value.dtype == torch.float64 else torch.float32


def _uniform(build: _Randomizer, node: Node) -> Node:
    low, high = float(argument(node, "from")), float(argument(node, "to"))
    return build.shifted(node, build.draw(node, "uniform", _like(node)), high - low, low)


def _exponential(build: _Randomizer, node: Node) -> Node:
    return build.shifted(node, build.draw(node, "exponential", _like(node)), 1.0 / float(argument(node, "lambd")), 0)


def _normal(build: _Randomizer, node: Node) -> Node:
    def fixed(x: Any) -> Any:
        # As in torch, the parameters of a drawn number have no gradient.
        return build.call(node, aten.detach.default, build.new[x]) if isinstance(x, Node) else x

    x = build.draw(node, "normal", _like(node))
    scale, shift = fixed(argument(node, "std")), fixed(argument(node, "mean"))
    return build.shifted(node, x, scale, shift)


def _randint(build: _Randomizer, node: Node) -> Node:
    low, high = int(argument(node, "low", 0)), int(argument(node, "high"))
    value = _like(node)
    # 53 random bits: the largest bias over a range of n is n / 2^53.
    x = build.shifted(node, build.draw(node, "uniform", value, dtype=torch.float64), float(high - low), 0)
    x = build.call(node, aten.floor.default, x)
    return build.call(node, aten._to_copy.default, build.shifted(node, x, 1, float(low)), dtype=value.dtype)


def _randperm(build: _Randomizer, node: Node) -> Node:
    value = _like(node)
    order = build.call(node, aten.argsort.default, build.draw(node, "uniform", value, dtype=torch.float64))
    return order if value.dtype == torch.int64 else build.call(node, aten._to_copy.default, order, dtype=value.dtype)


def _attention(build: _Randomizer, node: Node) -> Node:
    """softmax(q k^T scale + mask), dropped, times v: what the fused op computes, step by step."""
    q, k, v = (build.new[argument(node, n)] for n in ("query", "key", "value"))
    p, scale = float(argument(node, "dropout_p")), argument(node, "scale")
    if argument(node, "enable_gqa"):
        groups = q.meta["val"].shape[-3] // k.meta["val"].shape[-3]
        k, v = _repeated(build, node, k, groups), _repeated(build, node, v, groups)
    rows, columns = int(q.meta["val"].shape[-2]), int(k.meta["val"].shape[-2])
    scale = 1.0 / math.sqrt(q.meta["val"].shape[-1]) if scale is None else float(scale)
    turned = build.call(node, aten.transpose.int, k, -2, -1)
    scores = build.call(node, aten.matmul.default, build.call(node, aten.mul.Tensor, q, scale), turned)
    seen = None
    mask = argument(node, "attn_mask")
    safe = False  # whether every query sees some key
    if argument(node, "is_causal"):
        device = q.meta["val"].device
        row = build.call(node, aten.arange.default, rows, device=device)
        column = build.call(node, aten.arange.default, columns, device=device)
        seen = build.call(node, aten.ge.Tensor, build.call(node, aten.unsqueeze.default, row, 1), column)
        safe = True
    elif mask is not None and mask.meta["val"].dtype == torch.bool:
        seen = build.new[mask]
    elif mask is not None:
        scores = build.call(node, aten.add.Tensor, scores, build.new[mask])
        seen = build.call(node, aten.ne.Scalar, build.new[mask], -math.inf)
    hidden = None if seen is None else build.call(node, aten.logical_not.default, seen)
    if hidden is not None:
        # Not minus infinity: a query that sees nothing gives 0, with gradients 0, and not NaN.
        lowest = torch.finfo(scores.meta["val"].dtype).min
        scores = build.call(node, aten.masked_fill.Scalar, scores, hidden, lowest)
    probabilities = build.call(node, aten.softmax.int, scores, -1)
    if hidden is not None and not safe:
        probabilities = build.call(node, aten.masked_fill.Scalar, probabilities, hidden, 0.0)
    y, keep = build.dropout(node, probabilities, p)
    value = probabilities.meta["val"]
    build.attentions.append((node, float(value.numel() * (2 * value.dtype.itemsize + 1))))
    return build.call(node, aten.matmul.default, y, v, name=node.name)


def _repeated(build: _Randomizer, node: Node, x: Node, groups: int) -> Node:
    """Each head `groups` times, for the query heads that share it."""
    if groups == 1:
        return x
    *lead, heads, rows, width = (int(n) for n in x.meta["val"].shape)
    wide = build.call(node, aten.unsqueeze.default, x, -3)
    wide = build.call(node, aten.expand.default, wide, [*lead, heads, groups, rows, width])
    return build.call(node, aten.reshape.default, wide, [*lead, heads * groups, rows, width])


_FORMS: dict[Any, Callable[[_Randomizer, Node], Any]] = {
    aten.native_dropout.default: _fused_dropout,
    aten.dropout.default: _fused_dropout,
    aten.scaled_dot_product_attention.default: _attention,
    aten.rand.default: _plain("uniform"),
    aten.rand_like.default: _plain("uniform"),
    aten.randn.default: _plain("normal"),
    aten.randn_like.default: _plain("normal"),
    aten.uniform.default: _uniform,
    aten.exponential.default: _exponential,
    aten.normal_functional.default: _normal,
    aten.normal.float_float: _normal,
    aten.normal.Tensor_float: _normal,
    aten.normal.float_Tensor: _normal,
    aten.normal.Tensor_Tensor: _normal,
    aten.bernoulli.default: _bernoulli,
    aten.bernoulli.p: _bernoulli,
    aten.bernoulli.Tensor: _bernoulli,
    aten.randint.default: _randint,
    aten.randint.low: _randint,
    aten.randint_like.default: _randint,
    aten.randint_like.low_dtype: _randint,
    aten.randperm.default: _randperm,
}
