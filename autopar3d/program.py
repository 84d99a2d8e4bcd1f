"""A traced model as plain data: what `passes.trace` returns and every later pass takes.

Nothing in here computes. A `Program` is a functional aten graph together with the two lists that say what its
placeholders are (`Argument`) and what its flat outputs are (`Result`), plus the pytree specs that turn a
user's `(args, kwargs)` into flat inputs and the flat results back into the model's own return value.

The module-level accessors are the only way the rest of the package reads what a node carries in `meta`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch.fx import GraphModule, Node

from autopar3d.private import OpOverload, TreeSpec


@dataclass(frozen=True)
class Argument:
    """One placeholder of the graph, in placeholder order."""

    node: str
    """Name of the placeholder node."""
    kind: Literal["parameter", "buffer", "constant", "input", "key"]
    """"key": seed and step of the random numbers, see `passes.randomize`."""
    names: tuple[str, ...]
    """Every fully qualified name, in module order, of a (tied) parameter, buffer or constant: the first is
    the one that `named_parameters()` gives. For an input, its one pytree path: `args[0]`,
    `kwargs['labels']`."""
    index: int = -1
    """Inputs only: the position among the flattened leaves of `(args, kwargs)`."""
    requires_grad: bool = False
    persistent: bool = True
    """Buffers only: whether `state_dict()` holds it."""
    stored: torch.dtype | None = None
    """Parameters only: the dtype in which it is kept, where it enters in another."""


@dataclass(frozen=True)
class Result:
    """One flat element of what a call gives, in order: the model's outputs, then its buffers' new values."""

    kind: Literal["output", "buffer"]
    name: str
    """Of an output, its pytree path (`""` for a bare tensor, `[0]`, `['loss']`); of a buffer, its name."""
    node: str | None
    """Name of the node that computes it; None where the model returns a Python constant."""
    value: Any = None
    """That constant."""


@dataclass
class Program:
    """A functional graph and its signature.

    `graph` takes the tensors of `arguments`, in order, and returns the flat tuple of those `results` that
    have a node. Every node has `meta["val"]` (a FakeTensor, or a tuple of them; None of an assertion), and
    every op `stack_trace` and `nn_module_stack`.
    """

    graph: GraphModule
    arguments: tuple[Argument, ...]
    results: tuple[Result, ...]
    in_spec: TreeSpec
    """Of `(args, kwargs)`: a tuple and a dict, inputs that are no tensors included."""
    out_spec: TreeSpec
    """Of the model's return value: its leaves are the results of kind "output"."""
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    """Values of the arguments of kind "constant", by placeholder node."""
    notes: tuple[str, ...] = ()
    """What a pass did that a user should know, as sentences for the plan."""
    found: dict[str, Any] = field(default_factory=dict, init=False, compare=False, repr=False)
    """What analyses found of it, by their names, for who asks again: many grids may be planned for it."""

    def arguments_of(self, kind: str) -> tuple[Argument, ...]:
        """The arguments of one kind, in placeholder order."""
        return tuple(a for a in self.arguments if a.kind == kind)

    def results_of(self, kind: str) -> tuple[Result, ...]:
        """The results of one kind, in order."""
        return tuple(r for r in self.results if r.kind == kind)


def module_path(node: Node) -> str:
    """The fully qualified name of the innermost module whose forward made `node`; `""` is the model."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    name: str = next(reversed(stack.values()))[0]
    return name


ORIGIN = ("stack_trace", "nn_module_stack", "checkpoint")
"""Keys of `meta` that say where in the model a node comes from: a node made for another takes them over."""


def region(node: Node) -> int | None:
    """The number of the region of activation checkpointing (`torch.utils.checkpoint`) that made `node`, if any."""
    found: int | None = node.meta.get("checkpoint")
    return found


_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_TORCH = str(Path(torch.__file__).parent)
_HERE = Path(__file__).parent  # the frames of a call of a parallel module, which plans


def source_line(node: Node) -> str:
    """`file.py:123`: the innermost line of the model's own code, torch's not counted, that made `node`.

    `""` where none is known. torch records the frames of `forward` methods only.
    """
    for path, line in reversed(_FRAME.findall(node.meta.get("stack_trace") or "")):
        if not path.startswith((_TORCH, "<")) and Path(path).parent != _HERE:
            return f"{Path(path).name}:{line}"
    return ""


def text(graph_module: GraphModule) -> str:
    """The graph in one line a node, `%name = op(arguments) : dtype[shape]`: what tests keep as goldens."""
    lines = []
    for node in graph_module.graph.nodes:
        if node.op == "output":
            lines.append(f"return {_show(node.args[0])}")
            continue
        if node.op == "placeholder":
            call = "placeholder"
        else:
            shown = [_show(a) for a in node.args] + [f"{k}={_show(v)}" for k, v in node.kwargs.items()]
            call = f"{_target_name(node.target)}({', '.join(shown)})"
        lines.append(f"%{node.name} = {call} : {_type(node.meta.get('val'))}")
    return "\n".join(lines)


def _target_name(target: Any) -> str:
    if isinstance(target, OpOverload):
        return str(target).removesuffix(".default")
    return str(getattr(target, "__name__", target))


def _show(value: Any) -> str:
    if isinstance(value, Node):
        return f"%{value.name}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_show(v) for v in value)}]"
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value).removeprefix("torch.")
    return str(value)


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(_type(v) for v in value)})"
    return type(value).__name__
