"""A look at the traced graph: does it compute what the model computes?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Interpreter

from autopar3d.private import tree_leaves

from ..capture.pytrees import flatten_input, flatten_output
from ..errors import TraceError
from ..precision import MixedPrecision
from ..program import Program

_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}


def compare_with_model(
    model: nn.Module,
    program: Program,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss_fn: Callable[..., Tensor] | None,
    precision: MixedPrecision,
) -> None:
    """Run both on the examples, with the same random numbers; nothing is compared where something is on meta.

    Raises:
        TraceError: an output differs.
    """
    buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
    parameters = {name: p.detach().to(precision.computes_in(p)) for name, p in model.named_parameters()}
    tensors: dict[str, Tensor] = parameters | buffers
    if any(isinstance(t, Tensor) and t.is_meta for t in tree_leaves((tensors, args, kwargs))):
        return
    with torch.no_grad(), torch.random.fork_rng():
        seed = torch.initial_seed()
        torch.manual_seed(seed)
        expected = _call(model, tensors, args, kwargs, loss_fn, precision)
        torch.manual_seed(seed)
        # The call may have changed the buffers.
        again = tensors | {name: b.detach() for name, b in model.named_buffers()}
        found = Interpreter(program.graph).run(*_arguments(program, again, args, kwargs))
    found = iter(found)
    results = [(r.name, None if r.node is None else next(found)) for r in program.results]
    for (path, want), (_, got) in zip(flatten_output(expected)[0], results, strict=False):
        if isinstance(want, Tensor) and got is not None:
            _compare(type(model).__name__, path, want, got)


def _call(
    model: nn.Module,
    tensors: dict[str, Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss_fn: Callable[..., Tensor] | None,
    precision: MixedPrecision,
) -> Any:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return torch.func.functional_call(model, tensors, args, kwargs)

    call = precision.around(forward)
    if loss_fn is None:
        return call(*args, **kwargs)
    own = {k: v for k, v in kwargs.items() if k != "targets"}
    return loss_fn(call(*args, **own), *kwargs.get("targets", ()))


def _arguments(
    program: Program, tensors: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Tensor]:
    leaves, _ = flatten_input(args, kwargs)
    found = []
    for argument in program.arguments:
        if argument.kind == "input":
            found.append(leaves[argument.index][1])
        elif argument.kind == "constant":
            found.append(program.constants[argument.node])
        else:
            found.append(tensors[argument.names[0]])
    return found


def _compare(model: str, path: str, want: Tensor, got: Tensor) -> None:
    tolerance = _TOLERANCE.get(want.dtype, 0.05 if want.is_floating_point() else 0.0)
    if want.numel() and want.shape == got.shape:
        a, b = want.to(torch.float64), got.to(torch.float64)
        if torch.allclose(a, b, rtol=0.0, atol=tolerance * max(1.0, float(a.abs().max())), equal_nan=True):
            return
        how = f"they differ by up to {float((a - b).abs().max()):.3g}"
    elif want.shape == got.shape:
        return
    else:
        how = f"the shapes are {tuple(want.shape)} and {tuple(got.shape)}"
    raise TraceError(
        f"the graph of {model} does not compute what the model does, at output {path or 'itself'}: {how}. Its forward "
        "depends on what a graph cannot hold, such as numbers from Python or NumPy, or attributes that it changes"
    )
