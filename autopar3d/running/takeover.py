"""A module's own tensors: the model's, each as its plan stores it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..errors import LayoutError
from ..layout import Layout
from ..program import Argument
from ..progress import stage
from ..ranks import runtime
from ..step import Step
from .dtensor import is_exact
from .execute import Executor, RankExecutor
from .initialize import initial_values
from .tree import slot

if TYPE_CHECKING:
    from ..module import ParallelModule


@stage("placing tensors")
def take_over(
    module: ParallelModule, model: nn.Module, step: Step, executor: Executor, device: torch.device, seed: int
) -> None:
    """Give the module the model's tensors, one at a time; where there are ranks, those of rank 0.

    Args:
        device: where what is on meta becomes real.
        seed: of the values that it gets.

    Raises:
        LayoutError: a parameter would be stored in a layout that no DTensor carries exactly.
    """
    sources: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    sources |= dict(model.named_buffers(remove_duplicate=False))
    arguments = {}
    for argument, layout in zip(step.program.arguments, step.argument_layouts, strict=True):
        if argument.kind not in ("parameter", "buffer"):
            continue
        name = argument.names[0]
        source = sources[name]
        if argument.kind == "parameter" and not is_exact(layout, tuple(source.shape), executor.grid):
            raise LayoutError(f"{name} would be stored as {layout}, which no DTensor carries exactly")
        arguments[name] = (argument, layout)
        if not source.is_meta:
            _hold(module, argument, layout, _from_first(source, executor), source.requires_grad, executor)
    if any(sources[name].is_meta for name in arguments):
        _materialise(module, model, arguments, sources, executor, device, seed)


def _materialise(
    module: ParallelModule,
    model: nn.Module,
    arguments: Mapping[str, tuple[Argument, Layout]],
    sources: Mapping[str, Tensor],
    executor: Executor,
    device: torch.device,
    seed: int,
) -> None:
    """Fill in what is on meta."""
    firsts = {name: argument.names[0] for argument, _ in arguments.values() for name in argument.names}
    for name, value, written in initial_values(model, device, seed):
        first = firsts.get(name)
        if first is None or not sources[first].is_meta:
            continue
        held = _hold(module, *arguments[first], value, sources[first].requires_grad, executor)
        del value  # before the next one is made
        if not written:
            module.__dict__["_ap3d"].uninitialized.add(first, held)


def _hold(
    module: ParallelModule, argument: Argument, layout: Layout, value: Tensor, trained: bool, executor: Executor
) -> Tensor:
    """Register a tensor, copied from its whole value, under all its names."""
    if argument.kind == "parameter":
        held: Tensor = nn.Parameter(executor.store(value, layout), requires_grad=trained)
    else:
        held = value.clone(memory_format=torch.contiguous_format)
    for name in argument.names:
        table, leaf = slot(module, name)
        table[leaf] = held
    return held


def _from_first(source: Tensor, executor: Executor) -> Tensor:
    if not isinstance(executor, RankExecutor):
        return source.detach()
    own = source.detach().clone(memory_format=torch.contiguous_format)
    return runtime.broadcast_from_first(own, executor.mesh)
