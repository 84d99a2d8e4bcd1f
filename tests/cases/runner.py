"""Runs a case on a grid, simulated or on the ranks of the process group, beside the model on one device.

What is compared: the output, the loss, every parameter's gradient and every buffer after one forward and backward, and
what the driver reports. Random numbers of ours are the same on every grid, but not torch's own: a model that draws any
is compared with the grid (1, 1, 1), and what its driver reports may be as there or as on one device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar3d
from autopar3d.capture.pytrees import flatten_output
from autopar3d.compiler import Compiler
from autopar3d.errors import AutoPar3DError
from autopar3d.grid import Grid
from autopar3d.step import Options

from .apis import EagerApi, ParallelApi, RankApi, SimulatedApi, Witness, issued
from .rows import Case, coarsest, differences, says

Compile = Callable[[nn.Module, Any, Any], nn.Module]
Answers = dict[str, Any]

SEED = 77


def check_simulated(case: Case, grid: tuple[int, ...]) -> list[str]:
    """What does not hold of a case on a simulated grid."""
    if case.expect_error and not case.differs_by_rank:
        return _refusal(case, lambda: _refused_in_one_process(case, grid))
    sizes = Grid.of(grid)
    executor = Witness(sizes)
    api = SimulatedApi(lambda: case.make()[0], lambda: _simulated(case, _other(grid), Witness)[0], executor)
    found = _answers(case, lambda *made: simulated(made, grid, executor), api)
    return [*_beside_one_device(case, found), *(f"ranks part: {t}" for t in executor.torn + executor.uneven)]


def check_on_ranks(case: Case, grid: tuple[int, ...]) -> list[str]:
    """What does not hold of a case on the ranks of this process group; every rank calls it."""

    def compiled(*made: Any) -> nn.Module:
        model, args, kwargs = made
        return autopar3d.compile(model, grid, args, kwargs, outputs="global")

    if case.expect_error:
        return _refusal(case, lambda: _use(case, compiled, RankApi(lambda: case.make()[0], lambda: case.make()[0])))
    sizes = _other(grid)
    api = RankApi(lambda: case.make()[0], lambda: autopar3d.compile(*_swap(case.make(), sizes), outputs="global"))
    found = _answers(case, compiled, api)
    problems = _beside_one_device(case, found)
    none = [name for name, value in found["answers"].items() if value is None]
    if not all(other == none for other in _exchange(none)):
        problems.append("which gradients are None differs between ranks")
    if not all(other == found["issued"] for other in _exchange(found["issued"])):
        problems.append("the collectives differ between ranks")
    return problems


def simulated(made: Any, grid: tuple[int, ...], executor: Any) -> nn.Module:
    """As `autopar3d.simulate`, with an executor of the caller's."""
    model, args, kwargs = made
    compiler = Compiler(model, Grid.of(grid), Options(), None, None, check=False, seed=0)
    compiler.executor = executor
    return compiler.module(model, args, kwargs)


# -- running ---------------------------------------------------------------------------------------------------------


def _answers(case: Case, compile_: Compile, api: ParallelApi) -> dict[str, Any]:
    """What a parallel model gives: answers of a step, the driver's, and whether random numbers were drawn."""
    model, args, kwargs, loss_fn = case.make()
    par = compile_(model, args, kwargs)
    answers = _step(par, args, kwargs, loss_fn, api)
    random = _draws(par)
    seen = issued(par)
    driven: Answers = {}
    if case.driver_code:
        torch.manual_seed(SEED)
        model, args, kwargs, loss_fn = case.make()
        par = compile_(model, args, kwargs)
        driven = case.drive((par, args, kwargs, loss_fn), api)
        seen += issued(par)
        random |= _draws(par)
    return {"answers": answers, "driver": driven, "random": random, "issued": seen, "size": api.world}


def _step(model: nn.Module, args: Any, kwargs: Any, loss_fn: Any, api: EagerApi) -> Answers:
    torch.manual_seed(SEED)
    given = {name: t for name, t in _tensors((args, kwargs)) if t.requires_grad}
    output = model(*args, **kwargs)
    loss = loss_fn(output)
    loss.backward()
    # An output that is no container at all has the path "".
    leaves, _ = flatten_output(output)
    return {
        "loss": loss.detach(),
        **{f"output{path}": leaf.detach() if isinstance(leaf, Tensor) else leaf for path, leaf in leaves},
        "type of the output": type(output).__name__,
        **{f"gradient of {name}": g for name, g in api.grads(model).items()},
        **{f"gradient of input {name}": t.grad for name, t in given.items()},
        **{f"buffer {name}": b for name, b in api.buffers(model).items()},
    }


def _beside_one_device(case: Case, found: dict[str, Any]) -> list[str]:
    api = EagerApi(lambda: case.make()[0])
    if found["random"]:
        # Made again: a model's inputs may be its own.
        wanted = _simulated_answers(case, (1, 1, 1))
        step, driven = wanted["answers"], wanted["driver"]
    else:
        step, driven = _step(*case.make(), api), {}
    tol = case.tol if case.tol is not None else coarsest(step.values())
    gradients = [t for name, t in step.items() if name.startswith("gradient") and t is not None and t.numel()]
    largest = max((float(t.abs().max()) for t in gradients), default=1.0)
    problems = []
    if set(step) != set(found["answers"]):
        problems.append(f"answers {sorted(set(step) ^ set(found['answers']))} are on one side only")
    for name in step:
        if name in found["answers"]:
            floor = largest if name.startswith("gradient") else 1.0
            problems += differences(name, found["answers"][name], step[name], tol, floor)
    if found["size"] == 1 and found["issued"]:
        problems.append(f"a grid of one device issues {len(found['issued'])} collectives")
    if case.driver_code:
        torch.manual_seed(SEED)
        eager = case.drive(case.make(), api)
        if found["random"]:
            # Facts must be as on one device; of values, one that our random numbers decide is as on the grid of one.
            for k, v in eager.items():
                if isinstance(v, Tensor) and _driver({k: found["driver"].get(k)}, {k: v}, tol):
                    eager[k] = driven[k]
        problems += _driver(found["driver"], eager, tol)
    return problems


def _driver(found: Answers, wanted: Answers, tol: float | None) -> list[str]:
    return differences("driver", found, wanted, tol, 1.0)


def _simulated_answers(case: Case, grid: tuple[int, ...]) -> dict[str, Any]:
    executor = Witness(Grid.of(grid))
    api = SimulatedApi(lambda: case.make()[0], lambda: case.make()[0], executor)
    return _answers(case, lambda *made: simulated(made, grid, executor), api)


def _simulated(case: Case, grid: tuple[int, ...], executor: Any) -> tuple[nn.Module, Any]:
    model, args, kwargs, _ = case.make()
    witness = executor(Grid.of(grid))
    return simulated((model, args, kwargs), grid, witness), witness


def _draws(par: nn.Module) -> bool:
    return any(p.step.program.arguments_of("key") for p in par.__dict__["_ap3d"].steps.values())


def _other(grid: tuple[int, ...]) -> tuple[int, ...]:
    """Another grid of as many devices, where there is one."""
    x, y, z = grid
    if len(set(grid)) > 1:
        return z, x, y
    return (1, x, y * z)


def _swap(made: Any, grid: tuple[int, ...]) -> tuple[Any, ...]:
    model, args, kwargs, _ = made
    return model, grid, args, kwargs


def _tensors(tree: Any) -> list[tuple[str, Tensor]]:
    leaves, _ = flatten_output(tree)
    return [(path, leaf) for path, leaf in leaves if isinstance(leaf, Tensor)]


def _exchange(mine: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


# -- errors ----------------------------------------------------------------------------------------------------------


def _refusal(case: Case, use: Callable[[], object]) -> list[str]:
    """What is wrong with the error that a case must end in."""
    try:
        use()
    except AutoPar3DError as error:
        lack = says(str(error), case.error_should_say)
        return [f"the error {lack}: {error}"] if lack else []
    except Exception as error:
        return [f"a bare {type(error).__name__}: {error}"]
    return ["no error"]


def _use(case: Case, compile_: Compile, api: ParallelApi) -> None:
    """Whatever may show the error: compiling, a step, the driver."""
    model, args, kwargs, loss_fn = case.make()
    par = compile_(model, args, kwargs)
    _step(par, args, kwargs, loss_fn, api)
    case.drive((par, args, kwargs, loss_fn), api)


def _refused_in_one_process(case: Case, grid: tuple[int, ...]) -> None:
    model, args, kwargs, loss_fn = case.make()
    if case.world is not None and case.world != math.prod(grid):
        autopar3d.plan(model, grid, args, kwargs, world_size=case.world)  # simulation has as many ranks as it likes
    executor = Witness(Grid.of(grid))
    api = SimulatedApi(lambda: case.make()[0], lambda: case.make()[0], executor)
    _use(case, lambda *made: simulated(made, grid, executor), api)
