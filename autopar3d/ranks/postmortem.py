"""Why a collective failed: which rank did not come, and what every rank was at.

A collective that fails says that a peer is gone, or that time is up; not who, nor why. So ranks leave notes in the
process group's store: before planning, which other ranks may never come to, and when something failed. Nothing is
written or read while all is well.
"""

from __future__ import annotations

import contextlib
import re
import time
import traceback
from collections.abc import Iterator

import torch.distributed as dist
from torch.fx import GraphModule

from ..collectives import collectives
from ..errors import MismatchError
from ..private import get_default_store

_GRACE = 5.0  # seconds to wait for the others' notes: their time is up at about the same moment
_WAITING = "waiting"  # how the note of a rank begins whose collective failed
_RUNNING = "running its own code, or a step"


def is_of_a_peer(error: RuntimeError) -> bool:
    """Whether a collective failed for what another rank did, or did not."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def note(text: str) -> None:
    """Say what this rank is at; "" when it is through."""
    get_default_store().set(_key(dist.get_rank()), text or _RUNNING)


def failed_step(part: str, graph: GraphModule, error: RuntimeError) -> MismatchError:
    """The error to raise when a collective of a graph, that of this `part` of a step, failed with `error`."""
    return _report(f"a step stopped in {part}, in {_collective(graph, error)}", error)


def failed_exchange(what: str, error: RuntimeError) -> MismatchError:
    """The error to raise when the ranks' look at each other failed with `error`."""
    return _report(f"{what} waited in vain for all ranks to come to it", error)


@contextlib.contextmanager
def together(what: str) -> Iterator[None]:
    """Around work with collectives that are not a graph's.

    Raises:
        MismatchError: a rank did not come.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        yield
        return
    note(f"at {what}, and waits for all ranks to come to it")
    try:
        yield
    except RuntimeError as error:
        if is_of_a_peer(error) and not isinstance(error, MismatchError):
            raise failed_exchange(what, error) from error
        note(f"{what} failed there: {_first_line(error)}")
        raise
    note("")


def _report(what: str, error: RuntimeError) -> MismatchError:
    note(f"{_WAITING}: {what}")
    deadline = time.monotonic() + _GRACE
    others = [r for r in range(dist.get_world_size()) if r != dist.get_rank()]
    notes = {r: _read(r) for r in others}
    while not all(n.startswith(_WAITING) for n in notes.values()) and time.monotonic() < deadline:
        time.sleep(0.1)
        notes = {r: _read(r) for r in others}
    by_text: dict[str, list[int]] = {}
    for rank, text in notes.items():
        by_text.setdefault(text or "no word of it: it ended, failed, or never called the module", []).append(rank)
    listed = "".join(
        f"\n  {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}: {text}"
        for text, ranks in sorted(by_text.items(), key=lambda item: item[0].startswith(_WAITING))
    )
    return MismatchError(
        f"rank {dist.get_rank()}: {what} ({_first_line(error)}). All ranks must make the same calls, with inputs of "
        f"the same shapes, until one of them fails. The others:{listed}"
    )


def _read(rank: int) -> str:
    store, key = get_default_store(), _key(rank)
    try:
        if not store.check([key]):
            return ""
        return str(store.get(key).decode())
    except RuntimeError:  # the store's own rank is gone
        return ""


def _key(rank: int) -> str:
    return f"autopar3d/doing/{rank}"


def _first_line(error: RuntimeError) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _collective(graph: GraphModule, error: RuntimeError) -> str:
    """Kind, axis and module of the collective in whose line of the graph's code an error was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.line or "" for frame in frames if "eval_with_key" in frame.filename]
    names = re.findall(r"\w+", lines[-1]) if lines else []
    nodes = {c.node: c for c in collectives(graph)}
    found = next((nodes[name] for name in names if name in nodes), None)
    if found is None:
        return "a collective"
    article = "an" if found.kind.startswith("a") else "a"
    return f"{article} {found.kind} over axis {found.axis}{f' of module {found.module}' if found.module else ''}"
