"""The one seam to processes and devices: the mesh, the groups' names in graphs, and what ranks must agree on."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..errors import InputError, LaunchError, MismatchError
from ..grid import Grid
from ..private import (
    GroupName,
    register_process_group,
    resolve_process_group,
    set_group_timeout,
    unregister_process_group,
)
from . import postmortem
from .transport import transport

T = TypeVar("T")

_LAUNCH = (
    "start the script under torchrun (torchrun --nproc-per-node 8 train.py) and call "
    "torch.distributed.init_process_group() first, or use autopar3d.launch(fn, grid=(2, 2, 2)) for local CPU ranks; "
    "autopar3d.plan and autopar3d.simulate need no processes"
)


_ALIKE = "all ranks must make the same calls, and call backward alike"


class Connection(NamedTuple):
    """A grid on real ranks.

    Args:
        mesh: its device mesh.
        place: this rank's position in the grid.
        groups: what the axes' names in graphs stand for, only as long as somebody holds these.
    """

    mesh: DeviceMesh
    place: int
    groups: tuple[dist.ProcessGroup, ...]


def connect(grid: Grid, device_type: str) -> Connection:
    """The grid's mesh, with each axis's group registered under the name that graphs use; and this rank's position.

    Raises:
        LaunchError: no process group.
        GridError: the grid's size is not the world size.
    """
    if grid.size == 1 and dist.is_available() and not dist.is_initialized():
        _single_process_group()
    if not (dist.is_available() and dist.is_initialized()):
        raise LaunchError(f"grid {grid} needs {grid.size} ranks, but there is no process group: {_LAUNCH}")
    grid.check_world(dist.get_world_size())
    _quiet_redistribution()
    ranks = torch.tensor(grid.ranks or range(grid.size)).reshape(grid.shape)
    position = (ranks.flatten() == dist.get_rank()).nonzero()
    mesh = _mesh(grid, device_type, ranks)
    return Connection(mesh, int(position), tuple(_named(grid.alias(a), mesh.get_group(a)) for a in grid.names))


def world_size() -> int:
    """Number of ranks.

    Raises:
        LaunchError: no process group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise LaunchError(f'grid="auto" takes its size from the process group, but there is none: {_LAUNCH}')
    return dist.get_world_size()


def _mesh(grid: Grid, device_type: str, ranks: Tensor) -> DeviceMesh:
    """The mesh of a grid; a second one of the same grid has the same groups."""
    names = [GroupName(f"{grid.alias(axis)}_mesh") for axis in grid.names]
    groups = [_resolved(name) for name in names]
    if None not in groups:
        return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=grid.names)  # type: ignore[arg-type]
    mesh = DeviceMesh(device_type, ranks, mesh_dim_names=grid.names)
    for name, axis in zip(names, grid.names, strict=True):
        unregister_process_group(name)
        set_group_timeout(_timeout(device_type), mesh.get_group(axis))
        register_process_group(name, mesh.get_group(axis))
    return mesh


def _named(alias: str, group: dist.ProcessGroup) -> dist.ProcessGroup:
    """What an axis's name in graphs stands for; the same for all modules on a grid."""
    name = GroupName(alias)
    found = _resolved(name)
    if found is None:
        found = transport(group)
        unregister_process_group(name)
        register_process_group(name, found)
    return found


def _resolved(name: GroupName) -> dist.ProcessGroup | None:
    try:
        found: dist.ProcessGroup = resolve_process_group(name)
        # One of a default group that was destroyed since may be alive yet: torch knows its ranks no more.
        dist.get_process_group_ranks(getattr(found, "inner", found))
    except (KeyError, RuntimeError, ValueError):  # not registered yet, or nobody holds it any more
        return None
    return found


def _timeout(device_type: str) -> timedelta:
    """What `init_process_group` was given."""
    assert dist.group.WORLD is not None
    backend = dist.group.WORLD._get_backend(torch.device(device_type))
    timeout: timedelta = backend.options._timeout
    return timeout


def _single_process_group() -> None:
    """A grid of one place works without a launcher."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]


def _no_advice(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("While redistributing from")


def _quiet_redistribution() -> None:
    """Without DTensor's advice, on every rank, to flatten the mesh: `clip_grad_norm_` sums one number per axis."""
    # A filter that is there already is not added again.
    logging.getLogger("torch.distributed.tensor._redistribute").addFilter(_no_advice)


def broadcast_from_first(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Rank 0's value (of the grid's first place) on all ranks."""
    tensor = tensor.contiguous()
    if dist.get_world_size() > 1:
        with postmortem.together("placing the model's tensors"):
            dist.broadcast(tensor, src=int(mesh.mesh.flatten()[0]))
    return tensor


def jointly(what: str, work: Callable[[], T], digest: Callable[[T], str], advice: str, *, of: str = "") -> T:
    """`work()` on every rank, then a look at how the others did, so that none waits for one that failed.

    Args:
        what: names the work, as in "planning".
        digest: of the work's result, a text that must be the same on all ranks.
        advice: what to do when it is not.
        of: what the work is about on this rank, for the others should they not come to it.

    Raises:
        Exception: what `work` raised on this rank.
        MismatchError: it failed on other ranks, or gave something else there.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return work()
    failure: Exception | None = None
    try:
        value = work()
        mine = ("done", digest(value))
    except Exception as error:
        failure, mine = error, ("failed", f"{type(error).__name__}: {error}")
    reports = _exchange(f"{what} of {of}" if of else what, mine)
    if failure is not None:
        raise failure
    failed = {rank: text for rank, (state, text) in enumerate(reports) if state == "failed"}
    if failed:
        rank, text = next(iter(failed.items()))
        others = f" (and on {len(failed) - 1} other ranks)" if len(failed) > 1 else ""
        raise MismatchError(f"{what} failed on rank {rank}{others}: {text}")
    _refuse_difference(what, [text for _, text in reports], advice, MismatchError)
    return value


def _exchange(what: str, mine: T) -> list[T]:
    """Everybody's, by rank.

    Raises:
        MismatchError: a rank did not come, or came with something else.
    """
    found: list[Any] = [None] * dist.get_world_size()
    with postmortem.together(what):
        dist.all_gather_object(found, (what, mine))
    _refuse_difference("the next run", [at for at, _ in found], _ALIKE, MismatchError)
    return [value for _, value in found]


def _refuse_difference(what: str, digests: Sequence[str], advice: str, error: type[Exception]) -> None:
    if len(set(digests)) > 1:
        odd = [r for r, d in enumerate(digests) if d != digests[0]]
        ranks = ("rank " if len(odd) == 1 else "ranks ") + ", ".join(map(str, odd))
        shown = _apart(digests[0], digests[odd[0]])
        raise error(f"{what} of rank 0 differs from that of {ranks}{shown}: {advice}")


def _apart(one: str, other: str) -> str:
    """The words in which two texts differ, where that is short."""
    if max(len(one), len(other)) > 100 and len(one.split()) == len(other.split()):
        pairs = [(a, b) for a, b in zip(one.split(), other.split(), strict=True) if a != b][:3]
        one, other = (" ".join(words).rstrip(",)") for words in zip(*pairs, strict=True))
    return f" ({one} and {other})" if max(len(one), len(other)) <= 100 else ""


def compare_runs(part: str, what: str, gradients: Sequence[Tensor]) -> None:
    """Compare, before a graph runs, which graph that is on other ranks.

    Args:
        part: of a step, as in "backward".
        what: the graph, and how many ran before.
        gradients: of a backward, those of outputs that all ranks have; they must be the same.

    Raises:
        MismatchError: on every rank, saying who differs.
    """
    if dist.get_world_size() == 1:
        return
    reports = _exchange(f"the start of {part}", (f"{part}, {what}", [_fingerprint(g, values=True) for g in gradients]))
    _refuse_difference("the next run", [run for run, _ in reports], _ALIKE, MismatchError)
    for i in range(len(gradients)):
        digests = [report[i] for _, report in reports]
        _refuse_difference(f"the outputs' gradient {i}", digests, _ALIKE, MismatchError)


def compare_inputs(leaves: Sequence[tuple[str, Any]], *, values: bool, state: Sequence[tuple[str, str]] = ()) -> None:
    """Compare a call's inputs across ranks.

    Args:
        leaves: path and value of each, as `pytrees.flatten_input` gives them.
        state: what else a call depends on, by name.
        values: whether the elements must be the same too; only shapes and dtypes where each rank passes its part.

    Raises:
        InputError: on every rank, naming the first input that differs.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    mine = [(path, _fingerprint(leaf, values=values)) for path, leaf in leaves]
    gathered = _exchange("the comparison of inputs", (mine, list(state)))
    reports = [inputs for inputs, _ in gathered]
    paths = [", ".join(path for path, _ in report) for report in reports]
    _refuse_difference("the structure of the call's inputs", paths, "all ranks must make the same call", InputError)
    advice = (
        "every rank must pass the same global batch (seed the sampler alike on all ranks, or broadcast the batch "
        'from rank 0), or pass its own part with inputs="sharded"'
    )
    for i, (path, _) in enumerate(mine):
        _refuse_difference(f"input {path}", [report[i][1] for report in reports], advice, InputError)
    advice = "all ranks must make the same call, of the module in the same state"
    for i, (what, _) in enumerate(state):
        _refuse_difference(what, [others[i][1] for _, others in gathered], advice, InputError)


def _fingerprint(leaf: Any, *, values: bool) -> str:
    if not isinstance(leaf, Tensor):
        return repr(leaf)
    text = f"{tuple(leaf.shape)} {leaf.dtype}"
    if values and not isinstance(leaf, DTensor):
        data = leaf.detach().cpu().contiguous().reshape(-1)
        text += " " + hashlib.blake2b(data.view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()
    return text
