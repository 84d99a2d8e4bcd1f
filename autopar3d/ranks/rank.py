"""What runs in the processes that `autopar3d.launch` starts: a nursery that forks ranks, and the ranks.

Importing torch and the compiler takes seconds, so it is done once per nursery and inherited by fork. A
nursery is a fresh single-threaded interpreter that only imports, so forking it is safe, which forking the
user's own process would not be. The parent talks to a nursery over a socket with fixed-size requests, and to
a rank over a `multiprocessing` connection with the messages below. When the parent goes away, both see the
end of their stream and leave.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import os
import pickle
import queue
import random
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections import ChainMap
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from types import CodeType, ModuleType, TracebackType
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

# A request to the nursery is a command and a pid (0 for FORK, which travels with the rank's end of its
# connection); its answer is one number: the new pid, or an exit code as `Popen.returncode` gives it.
REQUEST = struct.Struct("=cq")
ANSWER = struct.Struct("=q")
FORK, POLL, WAIT = b"f", b"p", b"w"
RUNNING = 1 << 32  # the answer to POLL for a process that still runs: no exit code is as large


@dataclass(frozen=True)
class Job:
    """One call for one rank, parent to rank."""

    rank: int
    world_size: int
    store: str  # the path of a file of this run alone, through which its ranks find each other
    address: tuple[str, int]
    timeout: float
    path: tuple[str, ...]  # the parent's sys.path and working directory at the time of the call
    cwd: str
    call: bytes  # the pickled (fn, args)


@dataclass(frozen=True)
class Close:
    """Parent to rank: every rank of the run is through, the process group can go."""


@dataclass(frozen=True)
class Where:
    """Parent to rank: say where the function is."""


@dataclass(frozen=True)
class Done:
    """Rank to parent: the function returned."""

    result: bytes


@dataclass(frozen=True)
class Failed:
    """Rank to parent: the function raised, at `time` (the system-wide monotonic clock)."""

    time: float
    summary: str
    trace: str
    exception: bytes | None  # None where the exception does not pickle


@dataclass(frozen=True)
class Closed:
    """Rank to parent: ready for the next job."""


@dataclass(frozen=True)
class Stack:
    """Rank to parent: the answer to `Where`."""

    text: str


def _reduce_code(code: CodeType) -> tuple[Any, ...]:
    make, parts = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return _make_code, (make, parts, code.co_filename)


def _make_code(make: Any, parts: tuple[Any, ...], filename: str) -> CodeType:
    code: CodeType = make(*parts)
    return code.replace(co_filename=filename)


class _Pickler(cloudpickle.Pickler):
    """Pickles as cloudpickle does, and keeps the file names of code, which it drops for reproducible bytes.

    Tracebacks, and the source lines that graphs carry, are to read as in the parent.
    """

    dispatch_table = ChainMap({CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table)

    def reducer_override(self, obj: Any) -> Any:
        # torch has modules of a class of their own. cloudpickle takes any module for used whose name a function's
        # names could spell, such as `torch.distributed.config` beside a global `config`, and cannot pickle those.
        if isinstance(obj, ModuleType) and type(obj) is not ModuleType and sys.modules.get(obj.__name__) is obj:
            return importlib.import_module, (obj.__name__,)
        return super().reducer_override(obj)


def dumps(value: object) -> bytes:
    """Pickle; functions and classes that the other side cannot import go by value. `pickle.loads` reads."""
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def nursery(fd: int, preload: Sequence[str] = ()) -> None:
    """Import `preload`, then fork a rank, or report on one, at each request from `fd`."""
    os.set_inheritable(fd, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the parent decides
    for name in preload:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a rank then leaves the inherited pages shared
    control = socket.socket(fileno=fd)
    while True:
        request, fds, _, _ = socket.recv_fds(control, REQUEST.size, 1)
        if not request:
            break
        command, pid = REQUEST.unpack(request)
        if command == FORK:
            answer = os.fork()
            if answer == 0:
                control.close()
                serve(fds[0])
            os.close(fds[0])
        else:
            done, status = os.waitpid(pid, os.WNOHANG if command == POLL else 0)
            answer = os.waitstatus_to_exitcode(status) if done else RUNNING
        control.sendall(ANSWER.pack(answer))
    with contextlib.suppress(ChildProcessError):
        while True:  # the ranks see the parent's end too; none may be left to an init that reaps nothing
            os.wait()


def serve(fd: int) -> None:
    """A rank's life: run the jobs that arrive on the connection `fd`; never returns."""
    connection: Connection[Any, Any] = Connection(fd)
    jobs: queue.SimpleQueue[Job | Close] = queue.SimpleQueue()
    main, lock = threading.get_ident(), threading.Lock()

    def send(message: object) -> None:
        with lock:
            connection.send(message)

    def listen() -> None:
        # A thread of its own, so that the parent's death ends a rank in the middle of a collective.
        while True:
            try:
                message = connection.recv()
            except (EOFError, OSError):
                os._exit(1)
            if isinstance(message, Where):
                send(Stack(_stack(main)))
            else:
                jobs.put(message)

    threading.Thread(target=listen, daemon=True).start()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    while True:
        job = jobs.get()
        assert isinstance(job, Job)
        outcome = _run(job)
        sys.stdout.flush()
        sys.stderr.flush()
        send(outcome)
        # The group outlives the function until every rank is through: to close it now would fail the others'
        # collectives and hide which rank was the first to fail.
        jobs.get()
        _clean()
        send(Closed())


def _run(job: Job) -> Done | Failed:
    """Call the job's function in a process group of its own."""
    os.environ.update(
        RANK=str(job.rank),
        LOCAL_RANK=str(job.rank),
        WORLD_SIZE=str(job.world_size),
        LOCAL_WORLD_SIZE=str(job.world_size),
        MASTER_ADDR=job.address[0],
        MASTER_PORT=str(job.address[1]),
    )
    # A run sees what a fresh process would, whatever ran before it in this one.
    random.seed(0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    try:
        os.chdir(job.cwd)
        sys.path[:] = job.path
        fn, args = pickle.loads(job.call)
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(job.store, job.world_size),  # type: ignore[attr-defined]
            rank=job.rank,
            world_size=job.world_size,
            timeout=timedelta(seconds=job.timeout + 60),  # the parent's timeout comes first, and says more
        )
        return Done(dumps(fn(*args)))
    except BaseException as error:  # SystemExit too: a rank that leaves early is a failure
        return _failed(error)


def _failed(error: BaseException) -> Failed:
    now = time.monotonic()
    frames: TracebackType | None = error.__traceback__
    if frames is not None and frames.tb_next is not None:
        frames = frames.tb_next  # the first frame is `_run`'s
    text = "".join(traceback.format_exception(type(error), error, frames))
    summary = "".join(traceback.format_exception_only(type(error), error)).strip()
    try:
        shipped = dumps(error)
        pickle.loads(shipped)  # exceptions that pickle and do not unpickle are common
    except Exception:
        shipped = None
    return Failed(now, summary, text, shipped)


def _clean() -> None:
    """Close what the function left open, so that the next job starts afresh."""
    gc.collect()
    with contextlib.suppress(Exception):  # a group whose peers died may refuse; its successor is new anyway
        if dist.is_initialized():
            dist.destroy_process_group()
    if "torch.distributed.tensor" in sys.modules:
        # DTensor remembers meshes that are equal to the next job's, and with them groups that are gone.
        from ..private import forget_meshes

        forget_meshes()


def _stack(thread: int) -> str:
    """The stack of `thread`, from the job's function on."""
    frames = traceback.extract_stack(sys._current_frames()[thread])
    inner = [i for i, frame in enumerate(frames) if frame.filename == __file__]
    return "".join(traceback.format_list(frames[inner[-1] + 1 :] or frames[-1:]))
