"""What a rank keeps between forward and backward is 1/P of what one device does.

That parameters, gradients and optimizer state are 1/P is looked at where real ranks run: test_real_ranks.py.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import autopar3d
from autopar3d import Grid
from autopar3d.running.lockstep import run_lockstep
from tests.models import MODELS

from .cases import Sizes

torch.set_num_threads(1)

GRIDS: list[Sizes] = [(2, 2, 2), (4, 2, 1), (8, 1, 1), (1, 8, 1)]
BATCH, SEQUENCE = 8, 32


def gpt() -> tuple[torch.nn.Module, tuple[Tensor, Tensor]]:
    MODELS["gpt"][0]()  # puts examples/ on the path
    from gpt import GPT, GPTConfig

    model = GPT(GPTConfig(vocab=256, block=SEQUENCE, layers=2, heads=8, hidden=256))
    tokens = torch.randint(256, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(0))
    return model, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


@cache
def saved(grid: Sizes) -> dict[str, tuple[int, ...]]:
    """Bytes of each distinct storage saved for backward, by node name, one number a rank.

    The emitted forward graph runs on every rank; what it returns beyond the results is what the module keeps. Memory
    of parameters, buffers and inputs is there anyway and does not count.
    """
    model, inputs = gpt()
    step = autopar3d.simulate(model, grid, inputs)._prepared.step
    cube = Grid.of(grid)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    given = iter(inputs)
    arguments = []
    for argument, layout in zip(step.program.arguments, step.argument_layouts, strict=True):
        if argument.kind == "input":
            tensor = next(given)
        elif argument.kind == "constant":
            tensor = step.program.constants[argument.node]
        else:
            tensor = tensors[argument.names[0]].detach()
        arguments.append([layout.shard(tensor, cube, rank).contiguous() for rank in range(cube.size)])
    forward = step.runs.forward
    outs = run_lockstep(forward, cube, arguments)
    names = [str(n) for n in forward.graph.output_node().args[0]]  # type: ignore[union-attr]
    own = {storage(t) for pieces in arguments for t in pieces}
    found: dict[str, tuple[int, ...]] = {}
    seen: set[Any] = set()
    for i in range(step.runs.results, len(names)):
        column = [out[i] for out in outs]
        if all(isinstance(t, Tensor) and storage(t) not in own | seen for t in column):
            found[names[i]] = tuple(t.untyped_storage().nbytes() for t in column)
            seen |= {storage(t) for t in column}
    return found


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_activations_saved_are_1_p(grid: Sizes) -> None:
    ranks = math.prod(grid)
    one = sum(sizes[0] for sizes in saved((1, 1, 1)).values())
    mine = saved(grid)
    worst = max(sum(column) for column in zip(*mine.values(), strict=True))
    largest = sorted(((max(sizes), name) for name, sizes in mine.items()), reverse=True)
    rows = BATCH * SEQUENCE * 256 * 4 // ranks
    offenders = [f"{name}: {size}" for size, name in largest if size > rows]
    message = (
        f"{worst} bytes on a rank are {worst * ranks / one:.3f} of one device's {one} / {ranks}; the shard of a "
        f"[batch, sequence, hidden] tensor is {rows}, and larger are {', '.join(offenders)}"
    )
    assert worst <= 1.05 * one / ranks, message


def test_one_device_keeps_what_eager_keeps_and_no_more() -> None:
    """The yardstick itself: autograd on the plain model holds at least as much."""
    model, inputs = gpt()
    own = {storage(t) for t in (*model.parameters(), *model.buffers(), *inputs)}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if storage(tensor) not in own:
            kept[storage(tensor)] = tensor.untyped_storage().nbytes()
            alive.append(tensor)  # a freed storage's address may come again
        return tensor

    alive: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(*inputs)
    one = sum(sizes[0] for sizes in saved((1, 1, 1)).values())
    assert one <= sum(kept.values())
