"""Run a function on local CPU ranks, from a script or a notebook.

`launch` is for one call; a `Pool` keeps its ranks for many. The ranks are processes of their own in a gloo
group, with the environment that torchrun would give them. Functions and arguments travel by value where they
were defined in a script or a notebook, so no `if __name__ == "__main__"` guard is needed.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

from autopar3d.errors import GridError, LaunchError, RankError
from autopar3d.grid import Grid
from autopar3d.ranks import rank as remote

_HOST = "127.0.0.1"
_TICK = 0.2  # seconds between two looks at ranks that say nothing
_GRACE = 1.0  # seconds that the other ranks get to fail or finish by themselves after the first failure
_CLOSING = 5.0  # seconds that a rank gets to leave its process group
_NURSERIES = 2
_FEW = 128  # processes that any machine is asked for


def launch(fn: Callable[..., Any], *args: Any, grid: Grid | Sequence[int] | int, timeout: float = 300.0) -> list[Any]:
    """Run `fn(*args)` on every rank of a grid of local CPU processes and return the results by rank.

    Every rank has RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT set, one thread, and a gloo
    process group that spans the grid.

    Args:
        fn: any function, from an importable module, a script or a notebook cell; lambdas and closures too.
        args: its arguments, pickled once and the same for every rank.
        grid: a `Grid`, its sizes `(x, y, z)`, or just the number of ranks.
        timeout: seconds, start-up included, after which the ranks are ended.

    Raises:
        GridError: `grid` is no grid; sizes are three, as in `(2, 2, 1)`.
        LaunchError: `fn` is no function, or `grid` is more processes than one machine is asked for.
        RankError: a rank raised or died (the message holds its number and traceback, `__cause__` the
            exception where it pickles), or some had not finished in time.
    """
    if not callable(fn):
        raise LaunchError(f"launch calls fn(*args) on every rank; fn is a {type(fn).__name__}, not a function")
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise LaunchError(f"timeout={timeout!r}: it is a number of seconds above 0")
    ranks, most = rank_count(grid), max(_FEW, 16 * (os.cpu_count() or 1))
    if ranks > most:
        raise LaunchError(
            f"grid={grid} is {ranks} processes on this machine of {os.cpu_count()} cores; launch starts at most "
            f"{most}. plan and simulate need no processes; torchrun starts ranks on several machines"
        )
    with Pool(ranks) as pool:
        return pool.run(fn, *args, timeout=timeout)


def rank_count(grid: Any) -> int:
    """The number of ranks of a `Grid`, a `DeviceMesh`, three axis sizes, or a plain number.

    Raises:
        GridError: it is none of these.
    """
    if isinstance(grid, int) and not isinstance(grid, bool):
        if grid < 1:
            raise GridError(f"grid={grid} ranks: at least one is needed")
        return grid
    return Grid.of(grid).size


class Pool:
    """Local CPU ranks that stay alive between calls; a context manager.

    Ranks start at the first call that needs them. One that dies, or that has to be killed because another
    failed, is replaced at the next call.

    Args:
        world_size: the largest number of ranks a call may use.
        preload: modules that every rank will need, imported once instead of once per rank.
    """

    def __init__(self, world_size: int, preload: Sequence[str] = ()) -> None:
        if world_size < 1:
            raise ValueError(f"a pool needs at least one rank, not {world_size}")
        self.world_size = world_size
        self._preload = tuple(preload)
        self._nurseries: list[_Nursery] = []
        self._ranks: dict[int, _Rank] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._runs = 0

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all processes and wait for them; the pool may be used again, and starts anew."""
        for rank in self._ranks.values():
            rank.kill()
        for nursery in self._nurseries:
            nursery.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._ranks, self._nurseries, self._folder = {}, [], None

    def run(self, fn: Callable[..., Any], *args: Any, ranks: int | None = None, timeout: float = 300.0) -> list[Any]:
        """Run `fn(*args)` on the first `ranks` ranks (default: all), in a process group of just these.

        Each call has a new default process group. Seed, default dtype and working directory are set at each
        call; other state of a rank's process (module globals, environment) persists.

        Returns:
            The results by rank.

        Raises:
            RankError: as `launch` does. The pool remains usable.
        """
        count = self.world_size if ranks is None else ranks
        if not 1 <= count <= self.world_size:
            raise ValueError(f"this pool has {self.world_size} ranks; {count} were asked for")
        deadline = time.monotonic() + timeout
        try:
            call = remote.dumps((fn, args))
        except TypeError as error:
            raise LaunchError(
                f"the function and its arguments go to the ranks as pickles, and do not: {error}; make what it is in "
                "the function, on each rank"
            ) from error
        members = self._start(count)
        try:
            self._send_jobs(members, call, timeout)
            outcomes = _collect(members, deadline)
            stacks = _stacks(members, outcomes)
        except BaseException:
            for member in members:
                member.kill()
            raise
        _finish(members, outcomes)
        return _results(outcomes, stacks, count, timeout)

    def _start(self, count: int) -> list[_Rank]:
        """The first `count` ranks, started where there is none or a dead one."""
        # Two nurseries: they import side by side, and they give even and odd ranks different hash seeds, as
        # separate processes have. One seed for all would hide programs that depend on the order of a set.
        while len(self._nurseries) < min(count, _NURSERIES):
            self._nurseries.append(_Nursery(self._preload))
        for i in range(count):
            if i not in self._ranks or not self._ranks[i].alive():
                self._ranks[i] = _Rank(self._nurseries[i % _NURSERIES])
        return [self._ranks[i] for i in range(count)]

    def _send_jobs(self, members: Sequence[_Rank], call: bytes, timeout: float) -> None:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="autopar3d-")
        self._runs += 1
        with socket.create_server((_HOST, 0)) as server:
            port = server.getsockname()[1]  # nothing of ours uses it; a function that starts a server may
        for i, member in enumerate(members):
            member.send(
                remote.Job(
                    rank=i,
                    world_size=len(members),
                    # A file, not a TCPStore: that one asks the name service who connects, and stalled for
                    # five seconds now and then on a machine whose name service does not answer.
                    store=os.path.join(self._folder.name, f"run{self._runs}"),
                    address=(_HOST, port),
                    timeout=timeout,
                    path=tuple(sys.path),
                    cwd=os.getcwd(),
                    call=call,
                )
            )


class _Nursery:
    """The parent's end of a process that forks ranks; see `autopar3d.ranks.rank`."""

    def __init__(self, preload: Sequence[str]) -> None:
        self._control, other = socket.socketpair()
        # The path goes along, for the nursery to find autopar3d where the parent did.
        code = (
            "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
            "from autopar3d.ranks.rank import nursery; nursery(int(sys.argv[2]), sys.argv[3:])"
        )
        # Numerical libraries must not start threads before the fork. Ranks are local, so the loopback
        # interface will do, and does not depend on the host's name being resolvable.
        libraries = ("OMP", "MKL", "OPENBLAS")
        environment = os.environ | {f"{library}_NUM_THREADS": "1" for library in libraries}
        loopback = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
        if loopback:
            environment.setdefault("GLOO_SOCKET_IFNAME", loopback.pop())
        fd = other.fileno()
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, json.dumps(sys.path), str(fd), *preload],
            pass_fds=[fd],
            env=environment,
            stdin=subprocess.DEVNULL,
        )
        other.close()

    def fork(self, fd: int) -> int:
        """Fork a rank that owns `fd`; its pid."""
        return self._ask(remote.FORK, 0, fd)

    def poll(self, pid: int) -> int | None:
        """The exit code of a rank, None while it runs; like `wait`, not to be asked again afterwards."""
        code = self._ask(remote.POLL, pid)
        return None if code == remote.RUNNING else code

    def wait(self, pid: int) -> int:
        """The exit code of a rank that is about to end."""
        return self._ask(remote.WAIT, pid)

    def close(self) -> None:
        """End the process; its ranks must be gone."""
        self._control.close()
        try:
            self._process.wait(timeout=_CLOSING)
        except subprocess.TimeoutExpired:  # still importing
            self._process.kill()
            self._process.wait()

    def _ask(self, command: bytes, pid: int, *fds: int) -> int:
        answer = b""
        with contextlib.suppress(ConnectionError):
            socket.send_fds(self._control, [remote.REQUEST.pack(command, pid)], fds)
            answer = self._control.recv(remote.ANSWER.size, socket.MSG_WAITALL)
        if len(answer) < remote.ANSWER.size:
            raise LaunchError("the process that starts the ranks ended; what it printed stands on stderr")
        return int(remote.ANSWER.unpack(answer)[0])


class _Rank:
    """The parent's end of one rank's process."""

    def __init__(self, nursery: _Nursery) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._nursery = nursery
            self._pid = nursery.fork(theirs.fileno())
        self.connection: Connection[Any, Any] = Connection(ours.detach())
        self._code: int | None = None

    def alive(self) -> bool:
        """Whether the process runs; reaps it where not."""
        if self._code is None:
            self._code = self._nursery.poll(self._pid)
        return self._code is None

    def kill(self) -> None:
        """End the process, if it runs, and reap it."""
        if self._code is None:
            os.kill(self._pid, signal.SIGKILL)  # not reaped yet, so the pid is still its own
            self._code = self._nursery.wait(self._pid)
        self.connection.close()

    def send(self, message: object) -> None:
        """Send, unless the process is dead: then the next `receive` tells."""
        with contextlib.suppress(ConnectionError):
            self.connection.send(message)

    def receive(self) -> Any:
        """The next message; None when the process died without one."""
        try:
            return self.connection.recv()
        except (EOFError, ConnectionError):
            return None

    def obituary(self) -> remote.Failed:
        """Reap the dead process and say how it ended."""
        now = time.monotonic()
        self.kill()  # it may have closed its connection and live on
        assert self._code is not None
        if self._code < 0:
            how = f"the process was killed by {signal.Signals(-self._code).name}"
        else:
            how = f"the process exited with status {self._code}"
        return remote.Failed(time=now, summary=how, trace="", exception=None)


_Outcomes = dict[int, "remote.Done | remote.Failed"]


def _collect(members: Sequence[_Rank], deadline: float) -> _Outcomes:
    """What became of each rank; absent are those that had not finished when waiting made no more sense."""
    outcomes: _Outcomes = {}
    while len(outcomes) < len(members) and (left := deadline - time.monotonic()) > 0:
        open_ = {member.connection: i for i, member in enumerate(members) if i not in outcomes}
        ready = wait(list(open_), timeout=min(left, _TICK))
        # A dead rank's connection stays open in processes that it forked: look at the silent ones too.
        for connection, i in open_.items():
            if connection in ready or not members[i].alive():
                # What a rank said before it died comes first.
                said = members[i].receive() if connection in ready or connection.poll() else None
                outcomes[i] = said or members[i].obituary()
                if isinstance(outcomes[i], remote.Failed):
                    # The others may be waiting for this rank for ever, or be about to say something better.
                    deadline = min(deadline, time.monotonic() + _GRACE)
    return outcomes


def _stacks(members: Sequence[_Rank], outcomes: _Outcomes) -> dict[int, str]:
    """Where each rank is that has not finished, when no failure says why it cannot."""
    stacks: dict[int, str] = {}
    if any(isinstance(outcome, remote.Failed) for outcome in outcomes.values()):
        return stacks
    busy = {i: member for i, member in enumerate(members) if i not in outcomes}
    for member in busy.values():
        member.send(remote.Where())
    for i, member in busy.items():
        # A rank inside native code that holds the interpreter's lock cannot answer.
        answer = member.receive() if member.connection.poll(_GRACE / len(busy)) else None
        stacks[i] = answer.text if isinstance(answer, remote.Stack) else "  (no answer)\n"
    return stacks


def _finish(members: Sequence[_Rank], outcomes: _Outcomes) -> None:
    """Have the ranks that finished leave their process group; kill those that did not, or cannot."""
    for i, member in enumerate(members):
        if i not in outcomes:
            member.kill()
    living = [members[i] for i in outcomes if members[i].alive()]
    for member in living:
        member.send(remote.Close())
    deadline = time.monotonic() + _CLOSING
    for member in living:
        left = max(0.0, deadline - time.monotonic())
        if not (member.connection.poll(left) and isinstance(member.receive(), remote.Closed)):
            member.kill()


def _results(outcomes: _Outcomes, stacks: dict[int, str], count: int, timeout: float) -> list[Any]:
    """The results by rank, or the error that stopped them."""
    failures = {i: outcome for i, outcome in outcomes.items() if isinstance(outcome, remote.Failed)}
    if failures:
        # A rank that died takes its connections along, so the others raise within the instant, and may well
        # be heard first: a death beats an exception. An exception takes none along: the earliest counts.
        first = min(failures, key=lambda i: (bool(failures[i].trace), failures[i].time))
        failure = failures[first]
        message = f"rank {first} of {count}: {failure.summary}"
        if failure.trace:
            message += f"\n\nOn rank {first}:\n{failure.trace.rstrip()}"
        others = sorted(set(failures) - {first})
        if others:
            message += f"\n\n{_names(others)} failed after it."
        left = sorted(set(range(count)) - set(outcomes))
        if left:
            message += f"\n\n{_names(left)} had not finished, and {'was' if len(left) == 1 else 'were'} ended."
        raise RankError(message) from (pickle.loads(failure.exception) if failure.exception else None)
    if stacks:
        where = "".join(f"\n\nRank {i} is at:\n{stack.rstrip()}" for i, stack in sorted(stacks.items()))
        raise RankError(f"{_names(sorted(stacks))} of {count} had not finished after {timeout:g} s{where}")
    # No failure and none missing: all are there, and done.
    return [pickle.loads(outcomes[i].result) for i in range(count)]  # type: ignore[union-attr]


def _names(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
