"""Custom `torch.autograd.Function`s: kept whole through the trace, and run as they are by the local program.

`torch.export` records what a function's forward computes and derives a backward of its own from that. So while a model
is traced, `recording` lets the forward of every function class of the user's be one opaque op, and afterwards
`FunctionCall`, which applies the class itself, takes the op's place. Differentiating the local program then runs
the user's forward and the user's backward.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from ..errors import TraceError
from ..precision import Autocast, ambient, autocast
from ..private import FakeTensorMode, OpOverload, TreeSpec, tree_flatten, tree_leaves, tree_unflatten

_NAMESPACE = "autopar3d_traced"
_numbers = itertools.count()  # an op's name is never used twice in a process: torch may remember an op by it


@dataclass(frozen=True, eq=False)
class FunctionCall:
    """The target of a node: applies a custom function to the node's tensors.

    Two are equal when they do the same: a plan reuses what it found out about one for the other.

    Attributes:
        cls: the class.
        statics: the leaves of its arguments; where a tensor stands, `TENSOR`.
        spec: their structure.
        elementwise: whether each element of the results, and of the gradients, depends on the elements at its place
            only, whatever the shape.
        autocast: per device type for which it was on at the call, the dtype.
    """

    cls: type[torch.autograd.Function]
    statics: tuple[Any, ...]
    spec: TreeSpec
    elementwise: bool = False
    autocast: Autocast = ()

    def __post_init__(self) -> None:
        # What fx writes for a callable in its code.
        object.__setattr__(self, "__name__", self.cls.__name__)
        object.__setattr__(self, "__qualname__", self.cls.__name__)

    def __call__(self, *tensors: Tensor) -> Any:
        """The tensors among the results: one alone where the function returns no tuple."""
        output = self.apply(tensors)
        return tensors_of(output) if isinstance(output, tuple) else output

    def apply(self, tensors: Sequence[Tensor]) -> Any:
        """What the class gives for these tensors and the other arguments."""
        given = iter(tensors)
        args = tree_unflatten([next(given) if s is TENSOR else s for s in self.statics], self.spec)
        with autocast(self.autocast):
            return self.cls.apply(*args)

    def __str__(self) -> str:
        return self.cls.__name__

    __repr__ = __str__

    def _key(self) -> tuple[Any, ...]:
        return self.cls, self.statics, str(self.spec), self.elementwise, self.autocast

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FunctionCall) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash((self.cls, str(self.spec), self.elementwise))


class _Tensor:
    def __repr__(self) -> str:
        return "tensor"


TENSOR = _Tensor()
"""Stands for a tensor among `FunctionCall.statics`."""


def tensors_of(output: Any) -> tuple[Tensor, ...]:
    return tuple(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))


@dataclass
class Recorded:
    """What `recording` noted: the calls by the op that stands for each in the traced graph, and the classes."""

    calls: dict[Any, FunctionCall] = field(default_factory=dict)
    classes: set[type] = field(default_factory=set)


@contextlib.contextmanager
def recording(pointwise: Callable[[Any], bool], *own: type[torch.autograd.Function]) -> Iterator[Recorded]:
    """Within, a traced call of a custom function, and of each of our `own`, is one node of the traced graph.

    Only the user's own classes are touched (their `forward`, and only meanwhile): `apply` may have been taken from
    them long before, as in `relu = MyReLU.apply`, and looks `forward` up anew.
    """
    library = torch.library.Library(_NAMESPACE, "FRAGMENT")
    recorder = _Recorder(library, Recorded(), pointwise)
    # Each has one of its own, an inherited one too: it must know which class is meant.
    forwards: dict[Any, Any] = {
        cls: cls.forward for cls in (*_classes(torch.autograd.Function), *own) if hasattr(cls, "forward")
    }
    with contextlib.ExitStack() as stack:
        stack.callback(library._destroy)
        for cls, original in forwards.items():
            if original is torch.autograd.Function.forward:
                continue  # abstract
            own = vars(cls).get("forward")
            stack.callback(delattr, cls, "forward") if own is None else stack.callback(setattr, cls, "forward", own)
            setattr(cls, "forward", staticmethod(recorder.replacement(cls, original)))  # noqa: B010
            recorder.recorded.classes.add(cls)
        yield recorder.recorded


def _classes(root: Any) -> Iterator[Any]:
    for cls in root.__subclasses__():
        if not cls.__module__.startswith(("torch.", "autopar3d.")):
            yield cls
        yield from _classes(cls)


class _Recorder:
    def __init__(self, library: torch.library.Library, recorded: Recorded, pointwise: Callable[[Any], bool]) -> None:
        self.library, self.recorded, self.pointwise = library, recorded, pointwise
        self.inside = False  # a function that another one calls belongs to that one

    def replacement(self, cls: type[torch.autograd.Function], original: Callable[..., Any]) -> Callable[..., Any]:
        """Stands for the forward of a class."""
        skipped = 0 if _without_context(cls) else 1

        @functools.wraps(original)  # `apply` reads defaults from the signature
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.inside:
                return original(*args, **kwargs)
            return self.call(cls, (_bound(original, args, kwargs) if kwargs else args)[skipped:])

        return forward

    def call(self, cls: type, args: tuple[Any, ...]) -> Any:
        """Do the call through an op of its own; runs where autograd records nothing."""
        leaves, spec = tree_flatten(args)
        statics = tuple(TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        call = FunctionCall(cls, statics, spec, autocast=ambient())
        name = f"{cls.__name__}_{next(_numbers)}"
        output, made = self._results(call, tensors)
        results = "Tensor" if isinstance(output, Tensor) else f"({', '.join(['Tensor'] * len(made))})"
        parameters = ", ".join(f"Tensor t{i}" for i in range(len(tensors)))
        self.library.define(f"{name}({parameters}) -> {results}")

        def fresh(*given: Tensor) -> Any:
            values = tuple(torch.empty_strided(s, t, dtype=d, device=v) for s, t, d, v in made)
            return values[0] if isinstance(output, Tensor) else values

        torch.library.register_fake(f"{_NAMESPACE}::{name}", fresh, lib=self.library)
        op = getattr(getattr(torch.ops, _NAMESPACE), name).default
        alone = self._alone(is_elementwise, call, tensors, self.pointwise)
        self.recorded.calls[op] = replace(call, elementwise=alone)
        found = op(*tensors)
        given = iter([found] if isinstance(found, Tensor) else found)
        # What is no tensor stays what it was.
        leaves, structure = tree_flatten(output)
        return tree_unflatten([next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure)

    def _results(self, call: FunctionCall, tensors: Sequence[Tensor]) -> tuple[Any, list[Any]]:
        """What the function returns for tensors like these, and shape, strides, dtype, device of the tensors in it."""

        def run() -> tuple[Any, bool]:
            with FakeTensorMode(allow_non_fake_inputs=True):
                fakes = [t * 1 if t.requires_grad else t for t in _like([t.shape for t in tensors], tensors)]
                before = [t._version for t in fakes]
                return call.apply(fakes), [t._version for t in fakes] != before

        try:
            output, changed = self._alone(run)
        except Exception as error:
            raise TraceError(
                f"the custom torch.autograd.Function {call} cannot be traced ({type(error).__name__}: "
                f"{_first_line(error)}). It may compute with torch ops only, and only on its arguments: pass what else "
                "it reads as an argument, and make a kernel of another library an op with torch.library.custom_op"
            ) from error
        if changed:
            raise TraceError(
                f"the custom torch.autograd.Function {call} changes an argument in place (mark_dirty), which a "
                "compiled graph cannot represent; let it return a new tensor"
            )
        made = tensors_of(output)
        if not made or not isinstance(output, (Tensor, tuple)):
            raise TraceError(f"the custom torch.autograd.Function {call} returns {output!r}: no tensor to go on with")
        return output, [(tuple(t.shape), t.stride(), t.dtype, t.device) for t in made]

    def _alone(self, work: Callable[..., Any], *args: Any) -> Any:
        """Run with the functions as they are, and untraced: modes of tracing belong to their thread."""
        self.inside = True
        try:
            with ThreadPoolExecutor(1) as other:
                return other.submit(work, *args).result()
        finally:
            self.inside = False


def _first_line(error: Exception) -> str:
    return (str(error).strip() or "no message").splitlines()[0]


def _without_context(cls: type[torch.autograd.Function]) -> bool:
    """Whether forward takes no `ctx`, as a `setup_context` follows it."""
    return cls.setup_context is not torch.autograd.Function.setup_context


def _bound(forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Arguments by their place."""
    bound = inspect.signature(forward).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.args


def _like(shapes: Sequence[Sequence[int]], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Fake tensors of these shapes, otherwise like the tensors."""
    return [
        torch.empty(tuple(shape), dtype=t.dtype, device=t.device).requires_grad_(t.requires_grad)
        for shape, t in zip(shapes, tensors, strict=True)
    ]


# -- what a function does ----------------------------------------------------------------------------------------------


def is_elementwise(call: FunctionCall, tensors: Sequence[Tensor], pointwise: Callable[[Any], bool]) -> bool:
    """See `FunctionCall.elementwise`: forward and backward consist of pointwise ops, the same for another shape.

    Args:
        tensors: the arguments, of which shape, dtype, device and requires_grad are read.
        pointwise: whether an op is.

    Raises:
        TraceError: it draws random numbers.
    """
    longer = [[2 * n if n > 1 else n for n in t.shape] for t in tensors]
    try:
        shape = torch.broadcast_shapes(*(t.shape for t in tensors))
        first = _joint(call, [list(t.shape) for t in tensors], tensors)
        other = _joint(call, longer, tensors)
    except Exception:
        return False  # it insists on a shape, say; run whole it may do so
    results, nodes = first
    for target, _ in nodes:
        if isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags:
            raise TraceError(
                f"the custom torch.autograd.Function {call} draws random numbers ({target}), which would differ "
                "between ranks; draw them in the module's forward, and pass them as an argument"
            )
    return (
        nodes == other[1]
        and all(tuple(r) == tuple(shape) for r in results)
        and all(pointwise(target) for target, _ in nodes)
    )


def _joint(
    call: FunctionCall, shapes: Sequence[Sequence[int]], tensors: Sequence[Tensor]
) -> tuple[list[tuple[int, ...]], list[tuple[Any, str]]]:
    """Shapes of the results, and per op of forward and backward its target and its arguments that are no tensors."""
    results: list[tuple[int, ...]] = []

    def both(*given: Tensor) -> list[Tensor]:
        with torch.enable_grad():
            made = call(*given)
            found = [made] if isinstance(made, Tensor) else list(made)
            results[:] = [tuple(t.shape) for t in found]
            wanted = [t for t in given if t.requires_grad]
            flows = [t for t in found if t.requires_grad]
            if not wanted or not flows:
                return found
            seeds = [torch.ones_like(t, requires_grad=False) for t in flows]
            grads = torch.autograd.grad(flows, wanted, seeds, allow_unused=True)
            return [*found, *(g for g in grads if g is not None)]

    with FakeTensorMode(allow_non_fake_inputs=True):
        graph = make_fx(both)(*_like(shapes, tensors)).graph
    graph.eliminate_dead_code()
    return results, [
        (node.target, str(map_arg((node.args, node.kwargs), lambda n: "%")))
        for node in graph.nodes
        if node.op not in ("placeholder", "output") and not _unchanging(node)
    ]


def _unchanging(node: Node) -> bool:
    """A view of the shape that its source has, as `x.view_as(x)`."""
    views = (torch.ops.aten.view.default, torch.ops.aten.expand.default, torch.ops.aten.reshape.default)
    return node.target in views and node.args[0].meta["val"].shape == node.meta["val"].shape  # type: ignore[union-attr]
