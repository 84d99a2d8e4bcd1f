"""Values going in and out of a parallel module: state dicts of model and optimizer, and copies.

A value that is given may be whole (a plain tensor) or sharded in any way (a DTensor on any mesh of these ranks); a
value that is held is a DTensor on real ranks and a plain tensor in simulation. `fitted` makes one from the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

# What `load_state_dict` of every nn.Module returns; torch exports it under no public name.
from torch.nn.modules.module import _IncompatibleKeys
from torch.optim import Optimizer

from autopar3d.private import tree_map_only

from ..errors import StateError
from ..grid import Grid
from .dtensor import from_placements
from .sharing import version
from .tree import held


def whole(tensor: Tensor) -> Tensor:
    """The full values, in memory of their own on the CPU. On real ranks all of them must call this."""
    full = tensor.detach()
    if isinstance(full, DTensor):
        full = full.full_tensor()
    return full.to("cpu", copy=True).contiguous()


def fitted(value: Tensor, like: Tensor) -> Tensor:
    """`value`, whole or sharded in any way, as this rank's part of a tensor placed as `like`."""
    value = value.detach()
    if not isinstance(like, DTensor):
        return value.full_tensor() if isinstance(value, DTensor) else value
    if isinstance(value, DTensor):
        if value.device_mesh == like.device_mesh and value.placements == like.placements:
            return value.to_local()
        value = value.full_tensor()
    grid = Grid.of(like.device_mesh)
    index = grid.index(dict(zip(grid.names, like.device_mesh.get_coordinate() or (), strict=True)))
    return from_placements(like.placements, grid, like.dim()).shard(value, grid, index)


def load(root: nn.Module, given: Mapping[str, Any], *, strict: bool, assign: bool) -> Any:
    """`load_state_dict`: copy values into the tensors that the module holds; all fit, or none is touched.

    Raises:
        StateError: shapes differ; with `strict`, keys are missing or unexpected; with `assign`, dtypes differ.
    """
    if not isinstance(given, Mapping):
        raise StateError(f"load_state_dict got a {type(given).__name__}; it takes a dict of tensors by name")
    own = dict(held(root, persistent=True))
    unexpected = [name for name in given if name not in own]
    # A tied tensor may come under any of its names.
    came = {id(own[name]) for name in given if name in own}
    missing = [name for name, tensor in own.items() if id(tensor) not in came]
    problems = []
    for name in given:
        if name in own:
            problems += _misfits(name, given[name], own[name], assign=assign)
    if strict and missing:
        problems.append(f"missing: {_some(missing)}")
    if strict and unexpected:
        problems.append(f"unexpected: {_some(unexpected)}")
    if problems:
        raise StateError("load_state_dict changed nothing:\n  " + "\n  ".join(problems))
    with torch.no_grad():
        # In the module's order, the same on all ranks: values on other meshes are gathered.
        for name, tensor in own.items():
            if name in given:
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                local.copy_(fitted(given[name], tensor))
    return _IncompatibleKeys(missing, unexpected)


def _misfits(name: str, value: Any, own: Tensor, *, assign: bool) -> list[str]:
    if not isinstance(value, Tensor):
        return [f"{name}: the dict has a {type(value).__name__}, the model a tensor"]
    if value.shape != own.shape:
        return [f"{name}: the dict has shape {tuple(value.shape)}, the model {tuple(own.shape)}"]
    if value.is_meta:
        return [f"{name}: the dict has a meta tensor, which holds no values"]
    if assign and value.dtype != own.dtype:
        return [
            f"{name}: the dict has {value.dtype}, the model {own.dtype}, which its graphs are made for; "
            "load without assign=True to convert"
        ]
    return []


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"


def full_state_dict(root: nn.Module) -> dict[str, Tensor]:
    """Plain CPU tensors under the model's own names; tied names share one."""
    made: dict[int, Tensor] = {}
    found = {}
    for name, tensor in held(root, persistent=True):
        if id(tensor) not in made:
            made[id(tensor)] = whole(tensor)
        found[name] = made[id(tensor)]
    return found


def full_optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's state dict with plain CPU tensors for DTensors."""
    found: dict[str, Any] = tree_map_only(Tensor, whole, optimizer.state_dict())
    return found


def load_full_optimizer_state(root: nn.Module, optimizer: Optimizer, given: Mapping[str, Any]) -> None:
    """Load what `full_optimizer_state`, or the plain optimizer's `state_dict`, gave.

    Raises:
        StateError: the groups hold other numbers of parameters, or a state has another shape than its parameter.
    """
    if not isinstance(given, Mapping) or not {"state", "param_groups"} <= set(given):
        got = f"the keys {', '.join(map(str, given)) or '-'}" if isinstance(given, Mapping) else type(given).__name__
        raise StateError(
            f"an optimizer's state is a dict of 'state' and 'param_groups', as optimizer.state_dict() and "
            f"full_optim_state_dict() give; this has {got}"
        )
    names = {id(p): name for name, p in root.named_parameters()}
    sizes = [len(g["params"]) for g in optimizer.param_groups]
    theirs = [len(g["params"]) for g in given["param_groups"]]
    if sizes != theirs:
        raise StateError(
            f"the optimizer's groups have {sizes} parameters, those of the state that is loaded {theirs}; "
            "make both from the parameters of the same model, in the same groups"
        )
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [i for group in given["param_groups"] for i in group["params"]]
    state = {}
    for number, parameter in zip(numbers, parameters, strict=True):
        if number in given["state"]:
            name = names.get(id(parameter), f"parameter {number}")
            entries = given["state"][number]
            state[number] = {k: _placed(f"{k} of {name}", v, parameter, k) for k, v in entries.items()}
    optimizer.load_state_dict({**given, "state": state})


def _placed(what: str, value: Any, parameter: Tensor, key: str) -> Any:
    """A state as the optimizer over sharded parameters makes it: placed as the parameter, or whole everywhere."""
    if not isinstance(value, Tensor):
        return value
    if key == "step" or (value.dim() == 0 and parameter.dim() > 0):
        return value.clone()
    fits = value.dim() != parameter.dim() or all(
        # Adafactor keeps sums over a dim.
        n in (m, 1)
        for n, m in zip(value.shape, parameter.shape, strict=True)
    )
    if not fits:
        raise StateError(f"{what} has shape {tuple(value.shape)}, the parameter {tuple(parameter.shape)}")
    if not isinstance(parameter, DTensor):
        return fitted(value, parameter).clone()
    if value.shape != parameter.shape:
        mesh = parameter.device_mesh
        return distribute_tensor(value.to(parameter.to_local().device), mesh, [Replicate()] * mesh.ndim)
    made = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
    assert isinstance(made, DTensor)
    made.to_local().copy_(fitted(value, parameter))
    return made


class Uninitialized:
    """The tensors of a meta model that have no values yet: until somebody writes to them in place."""

    def __init__(self) -> None:
        self._since: dict[str, tuple[Tensor, int]] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        self._since[name] = (tensor, version(tensor))

    def check(self) -> None:
        """Raise StateError while there are any."""
        if not self._since:
            return
        self._since = {name: (t, v) for name, (t, v) in self._since.items() if version(t) == v}
        if self._since:
            raise StateError(
                f"{len(self._since)} tensors of a meta model have no values: {_some(list(self._since))}. Nothing in "
                "the model initialises them (a reset_parameters() of the submodule that holds them, or the model's "
                "_init_weights(module)): load them with load_state_dict or torch.distributed.checkpoint, write to them "
                "in place, or build the model with these tensors on a real device"
            )

    def copied(self, copies: Mapping[int, Tensor]) -> Uninitialized:
        """The same of a copy; `copies` by id of the tensors here."""
        made = Uninitialized()
        for name, (tensor, since) in self._since.items():
            if version(tensor) == since:
                made.add(name, copies[id(tensor)])
        return made


def copy_tensors(source: nn.Module, memo: dict[int, Any]) -> dict[int, Tensor]:
    """Copies of all that a module holds, by id; noted in the `memo` of `copy.deepcopy`. Without gradients, as of any
    module's parameters."""
    copies: dict[int, Tensor] = {}
    for _, tensor in held(source):
        if id(tensor) not in copies:
            own = tensor.detach().clone()
            made = nn.Parameter(own, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else own
            copies[id(tensor)] = memo.setdefault(id(tensor), made)
    return copies


def hold_copies(root: nn.Module, source: nn.Module, copies: Mapping[int, Tensor]) -> None:
    """Let `root`, a tree like `source`, hold the copies; tied names stay tied."""
    for module, original in _pairs(root, source):
        for table, theirs in ((module._parameters, original._parameters), (module._buffers, original._buffers)):
            for leaf, tensor in theirs.items():
                table[leaf] = None if tensor is None else copies[id(tensor)]  # type: ignore[assignment]


def _pairs(a: nn.Module, b: nn.Module) -> Iterable[tuple[nn.Module, nn.Module]]:
    return zip(a.modules(), b.modules(), strict=True)
