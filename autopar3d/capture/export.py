"""Runs `torch.export` on a model: what `passes.trace` builds a `Program` from.

Export is used non-strict: the model's Python runs, on fake tensors. Around it this file keeps the model as
it was, hands the output's tensors over flat, puts right or refuses what export would get silently wrong,
and turns every failure into a `TraceError` that has the user's line and a reason in plain words.
"""

from __future__ import annotations

import contextlib
import functools
import re
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from autopar3d.capture.decompositions import decompositions
from autopar3d.capture.functions import FunctionCall, Recorded, recording
from autopar3d.capture.hooks import HookedGradient, Hooks, ParameterHooks
from autopar3d.capture.keywords import hide_keywords, show_keywords
from autopar3d.capture.pytrees import flatten_output
from autopar3d.capture.regions import Regions
from autopar3d.capture.substitutes import Functions, substitutes
from autopar3d.errors import TraceError
from autopar3d.private import FakeTensor, TreeSpec, tree_leaves
from autopar3d.program import source_line
from autopar3d.quiet import quiet_torch
from autopar3d.rules import is_pointwise


def own_name(name: str | None) -> str:
    """The model's own name of a parameter, buffer or module, from that which its wrapper `_Flat` gives it."""
    return (name or "").removeprefix("model").removeprefix(".")


@dataclass
class Recording:
    """One exported call."""

    program: ExportedProgram
    """Of the model wrapped so that it returns the output's tensors as a flat tuple; after these, what is hooked."""
    outputs: list[tuple[str, Any]]
    """Path and value of every leaf of the output, a tensor's value being `TENSOR`."""
    out_spec: TreeSpec
    functions: Mapping[Any, FunctionCall]
    """By the op that stands for it in the program, what applies a custom autograd function."""
    selective: bool
    """Whether the model says what a region of activation checkpointing shall save."""


TENSOR = object()
"""Stands for a tensor among `Recording.outputs`: the next one of those the program returns."""


def export(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], hooks: ParameterHooks | None = None
) -> Recording:
    """Export `model(*args, **kwargs)` to a functional graph of aten ops, leaving the model as it was.

    Raises:
        TraceError: export failed, or would have dropped a gradient.
    """
    wrapped = _Flat(model, hooks or ParameterHooks())
    keeping = recording(is_pointwise, HookedGradient)
    with (
        _left_as_it_was(model),
        substitutes(model),
        torch.enable_grad(),
        quiet_torch(),
        keeping as wrapped.functions,
    ):
        try:
            program = torch.export.export(wrapped, args, kwargs, strict=False)
            _refuse_hidden_tensors(program, model)
            _inline_grad_regions(program.graph_module)
            renamed = hide_keywords(program)
            program = program.run_decompositions(decompositions(program.graph))
            show_keywords(program, renamed)
        except TraceError:
            raise
        except Exception as error:
            raise TraceError(_explain(error, model)) from error
    _forget_wrapper(program)
    assert wrapped.seen.spec is not None
    return Recording(program, wrapped.seen.outputs, wrapped.seen.spec, wrapped.functions.calls, wrapped.seen.selective)


@dataclass
class _Seen:
    outputs: list[tuple[str, Any]] = field(default_factory=list)
    spec: TreeSpec | None = None
    selective: bool = False


class _Flat(nn.Module):
    """The model, returning its output's tensors as a flat tuple; `seen` keeps what a tuple cannot say."""

    def __init__(self, model: nn.Module, on_parameters: ParameterHooks) -> None:
        super().__init__()
        self.model = model
        self.seen = seen = _Seen()
        self.functions = Recorded()

        @functools.wraps(model.forward)  # export names the placeholders after this signature
        def forward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
            before = dict(model.named_buffers())
            parameters = dict(model.named_parameters(remove_duplicate=False))
            # Regions last: it looks for its callers on the stack.
            with Hooks(model, on_parameters) as hooks, Functions(), Regions() as regions:
                hooks.register_all()
                output = model(*args, **kwargs)
                _write_back(model, before)
                _refuse_replaced(model, parameters)
            leaves, spec = flatten_output(output)
            tensors = tuple(leaf for _, leaf in leaves if isinstance(leaf, Tensor))
            if not tensors:
                raise TraceError(
                    f"{type(model).__name__}, or its loss_fn where there is one, returns no tensor "
                    f"({output!r:.60}), so there is nothing to compute"
                )
            _refuse_custom_functions([*(t.grad_fn for t in tensors), *regions.hidden], self.functions.classes)
            # The fake tensors themselves must not outlive the trace.
            seen.outputs = [(path, TENSOR if isinstance(leaf, Tensor) else leaf) for path, leaf in leaves]
            seen.spec = spec
            seen.selective = regions.selective
            return (*tensors, *hooks.made)

        self.forward = forward


def _write_back(model: nn.Module, before: dict[str, Tensor]) -> None:
    """Turn `self.buffer = new`, which export drops, into `self.buffer.copy_(new)`, which it records."""
    for name, new in list(model.named_buffers()):
        old = before.get(name)
        if old is None or old is new:
            continue
        if old.shape != new.shape or old.dtype != new.dtype:
            raise TraceError(
                f"forward replaces buffer {name} of {tuple(old.shape)} {old.dtype} by {tuple(new.shape)} "
                f"{new.dtype}; a buffer must keep its shape and dtype"
            )
        path, _, attribute = name.rpartition(".")
        old.copy_(new)
        setattr(model.get_submodule(path), attribute, old)


def _refuse_replaced(model: nn.Module, before: dict[str, nn.Parameter]) -> None:
    """Raise if forward assigned a parameter: export would forget the new one, and train the old one."""
    after = dict(model.named_parameters(remove_duplicate=False))
    for name in dict.fromkeys((*before, *after)):
        if before.get(name) is not after.get(name):
            what = "replaces" if name in before else "registers"
            raise TraceError(
                f"forward {what} the parameter {name} of {type(model).__name__}, which a compiled graph cannot "
                "represent; make it a buffer or a parametrization, or assign it outside the model, before compiling"
            )


def _refuse_custom_functions(outputs: list[Any], kept: set[type]) -> None:
    """Raise if a custom `autograd.Function` that is not kept lies behind an output: export records its forward only.

    Args:
        outputs: what autograd recorded of the outputs.
    """
    nodes = list(outputs)
    visited = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        name = type(node).__name__.removesuffix("Backward")
        # A torch.library op with `register_autograd` survives as one node, whose backward is kept.
        custom = isinstance(node, BackwardCFunction) and type(node)._forward_cls not in kept  # type: ignore[attr-defined]
        # Of a reentrant checkpoint, `regions` has made plain ops.
        if custom and name != "CheckpointFunction" and not name.startswith("GeneratedBackwardFor_"):
            raise TraceError(
                f"the model uses the custom torch.autograd.Function {name}, whose backward torch.export drops, so that "
                "gradients would be wrong; define its class before the model is compiled, or write it with "
                "differentiable torch ops"
            )
        nodes.extend(child for child, _ in node.next_functions)


def _refuse_hidden_tensors(program: ExportedProgram, model: nn.Module) -> None:
    """Raise if forward made a tensor that the trace did not see; torch would go on with memory that is not there."""
    held = (*model.parameters(), *model.buffers(), *tree_leaves([vars(module) for module in model.modules()]))
    known = {t.untyped_storage()._cdata for t in held if isinstance(t, Tensor)}
    placeholders = {s.target: s.arg.name for s in program.graph_signature.input_specs if s.target is not None}
    for name, value in program.constants.items():
        if isinstance(value, FakeTensor) and value.untyped_storage()._cdata not in known:
            node = next(n for n in program.graph.nodes if n.name == placeholders[name])
            lines = [source_line(user) for user in node.users]
            line = next((found for found in lines if found and not found.startswith(Path(__file__).name)), "")
            raise TraceError(f"cannot trace {type(model).__name__}{f' at {line}' if line else ''}: {_HIDDEN}")


def _inline_grad_regions(module: GraphModule, no_grad: bool = False) -> None:
    """Inline the bodies of `torch.no_grad()` regions, and detach what they give.

    Making the graph functional would inline them too, but forget that they take no gradient, and their lines.
    Works in place, on the graph of a fresh export, which nobody else holds.
    """
    region = torch.ops.higher_order.wrap_with_set_grad_enabled
    calls = module.graph.find_nodes(op="call_function", target=region)
    modes: dict[str, bool] = {call.args[1].target: call.args[0] for call in calls}
    for name, body in module.named_children():
        if isinstance(body, GraphModule):  # a region's, or autocast's, which may hold regions
            if no_grad and modes.get(name):
                raise TraceError("forward uses torch.enable_grad() inside torch.no_grad(): take them apart")
            _inline_grad_regions(body, no_grad or modes.get(name) is False)
    for call in calls:
        _, attribute, *operands = call.args
        results = _inline(module, call, module.get_submodule(attribute.target), operands)
        for item in list(call.users):  # `getitem` of one result each: edited, as the outputs go by its name
            item.target = torch.ops.aten.alias.default if call.args[0] else torch.ops.aten.detach.default
            item.args = (results[item.args[1]],)
        module.graph.erase_node(call)
    module.recompile()


def _inline(module: GraphModule, call: Node, body: nn.Module, operands: list[Any]) -> Any:
    """Copy the nodes of `body` to before its `call`; the values there of what it returns."""
    assert isinstance(body, GraphModule)
    inputs = body.graph.find_nodes(op="placeholder")
    values: dict[Node, Any] = dict(zip(inputs, operands, strict=True))
    with module.graph.inserting_before(call):
        for node in body.graph.nodes:
            if node.op in ("call_function", "get_attr"):
                values[node] = module.graph.node_copy(node, values.__getitem__)
            if node.op == "get_attr":
                values[node].target = f"{call.name}_{node.target}"
                module.add_submodule(values[node].target, body.get_submodule(node.target))
    return map_arg(body.graph.output_node().args[0], values.__getitem__)


def _forget_wrapper(program: ExportedProgram) -> None:
    """Let the nodes' stacks of modules and of frames begin with the model's, and hold no generated code."""
    for node in program.graph.nodes:
        stack = list(node.meta.get("nn_module_stack", {}).items())[1:]
        node.meta["nn_module_stack"] = {key: (own_name(name), cls) for key, (name, cls) in stack}
        frames = re.split(r'(?=^ *File ")', node.meta.get("stack_trace") or "", flags=re.MULTILINE)
        own = [f for f in frames if f'"{__file__}"' not in f and '"<eval_with_key>' not in f]
        node.meta["stack_trace"] = "".join(own)


@contextlib.contextmanager
def _left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Undo what forward does to the modules' attributes: what a trace computes is fake and must not stay."""
    kept = [(vars(module), {k: (v, _copy(v)) for k, v in vars(module).items()}) for module in model.modules()]
    try:
        yield
    finally:
        for attributes, saved in kept:
            for name in [name for name in attributes if name not in saved]:
                del attributes[name]
            for name, (value, contents) in saved.items():
                attributes[name] = value
                if isinstance(value, list):
                    value[:] = contents
                elif isinstance(value, dict):
                    value.clear()
                    value.update(contents)


def _copy(value: Any) -> Any:
    if isinstance(value, list):
        return list(value)
    return dict(value) if isinstance(value, dict) else None


_HIDDEN = (
    "the model makes a tensor behind the tracer's back, as `.data` and torch.autograd.grad do. Use .detach() instead "
    "of .data; what forward changes must be a buffer, changed in place, or be changed outside of forward; a derivative "
    "inside forward must be written out"
)

# What an exception's class or message says, and what it means to the user. The first that is found counts.
_REASONS: tuple[tuple[str, str], ...] = (
    (
        r"GuardOnDataDependent|DataDependentOutput|DynamicOutputShape",
        "the model's Python depends on a tensor's values here (an `if`, a loop, int(), bool(), .tolist()), "
        "and one graph must serve every batch. Use torch.where, or decide before the call and pass a Python "
        "value",
    ),
    (
        r"Constant (?:model\.)?(\S+) is mutated in the forward",
        r"forward changes the plain tensor attribute \1, whose new value would be lost. Make it a buffer: "
        r"register_buffer",
    ),
    (
        r"\.numpy\(\) is not supported",
        "the model leaves torch here (.numpy()), and a graph can only hold tensor ops",
    ),
    (
        r"'Tensor' object has no attribute 'constant'",
        "forward differentiates a function (torch.func.grad, jvp, jacrev), which the tracer cannot record; write the "
        "derivative out, or take it outside of forward",
    ),
    (
        r"found a fake tensor in the exported program constant's list",
        _HIDDEN,
    ),
)


def _explain(error: Exception, model: nn.Module) -> str:
    """One sentence on where and why the export failed."""
    raised = f"{type(error).__name__}: {error}"
    for pattern, reason in _REASONS:
        match = re.search(pattern, raised)
        if match:
            what = match.expand(reason)
            break
    else:
        what = f"its forward fails with {raised.strip().splitlines()[0]}"
    return f"cannot trace {type(model).__name__}{_module(error, model)}{_user_line(error)}: {what}"


def _module(error: Exception, model: nn.Module) -> str:
    """`, in layers.2.norm (BatchNorm1d)`: the innermost of the model's modules in whose forward it failed, if any."""
    names = {id(module): name for name, module in model.named_modules() if name}
    found = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if id(module) in names:
            found = f", in {names[id(module)]} ({type(module).__name__})"
    return found


def _user_line(error: Exception) -> str:
    """` at file.py:12 (the line)`: the innermost frame of the model's own code, where there is one."""
    others = {Path(torch.__file__).parent, Path(__file__).parent}
    frames = traceback.extract_tb(error.__traceback__)
    inside = [i for i, frame in enumerate(frames) if frame.filename == __file__]
    for frame in reversed(frames[inside[-1] + 1 :] if inside else []):
        if not frame.filename.startswith("<") and not others & set(Path(frame.filename).parents):
            return f" at {Path(frame.filename).name}:{frame.lineno} (`{frame.line}`)"
    return ""
