"""Programs of the suite's models, and running a `Program` as the model it was traced from."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_unflatten

from autopar3d.passes.trace import trace
from autopar3d.program import Program
from tests.models import MODELS


@functools.cache
def traced(name: str) -> Program:
    """The program of one of the suite's models, in double precision. Passes leave it as it is."""
    make_model, make_inputs = MODELS[name]
    return trace(make_model(torch.float64), *make_inputs(torch.float64))


def run(
    program: Program, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Tensor]]:
    """The program's output and its buffers' new values, on the model's parameters and buffers."""
    held = dict(model.named_parameters()) | dict(model.named_buffers())
    leaves = tree_leaves((args, kwargs))
    values = []
    for argument in program.arguments:
        if argument.kind == "input":
            values.append(leaves[argument.index])
        elif argument.kind == "constant":
            values.append(program.constants[argument.node])
        else:
            values.append(held[argument.names[0]])
    flat = iter(program.graph(*values))
    results = [(r, r.value if r.node is None else next(flat)) for r in program.results]
    output = tree_unflatten([value for r, value in results if r.kind == "output"], program.out_spec)
    return output, {r.name: value for r, value in results if r.kind == "buffer"}
