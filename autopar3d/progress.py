"""How far a compilation is, and where its time went.

`watching` surrounds one compilation, `stage` a part of it. A compilation that takes longer than a moment shows a bar in
a terminal and lines elsewhere, on stderr, of rank 0 only. Within a long stage the bar's time goes on, and elsewhere a
line now and then says which stage it is. Every stage is logged at DEBUG, and a summary at INFO, by
`logging.getLogger("autopar3d.compile")`. AUTOPAR3D_PROGRESS=bar, lines or off decides otherwise; tests see nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TextIO

_LOG = logging.getLogger("autopar3d.compile")
_MOMENT = 2.0  # seconds of work before anything is shown
_LINE = 1.0  # seconds of a stage before it gets a line
_STILL = 10.0  # seconds without a line before one says that the stage still runs
_TICK = 0.5  # seconds between two looks at a stage that runs
_WIDTH = 24

# The compilation that runs in this thread, if any: passes report to it without having to be handed it.
_CURRENT: ContextVar[Watch | None] = ContextVar("autopar3d_watch", default=None)


@dataclass
class _Open:
    """A stage that runs: steps done of how many, and seconds of the stages inside it."""

    name: str
    total: int | None
    done: int = 0
    inside: float = 0.0


@dataclass
class Watch:
    """One compilation.

    Args:
        what: names it.
        show: "bar", "lines" or "off".
        seconds: by stage, without the stages inside it, as they end.
    """

    what: str
    show: str
    out: TextIO
    clock: Callable[[], float] = time.perf_counter
    seconds: dict[str, float] = field(default_factory=dict)
    start: float = 0.0
    _open: list[_Open] = field(default_factory=list)
    _drawn: int = 0
    _told: float = 0.0
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self.start = self._told = self.clock()

    @property
    def elapsed(self) -> float:
        return self.clock() - self.start

    @contextlib.contextmanager
    def stage(self, name: str, total: int | None) -> Iterator[Callable[[int], None]]:
        """See `stage`."""
        begun = self.clock()
        here = _Open(name, total)
        with self._lock:
            self._open.append(here)
            self._draw()
        try:
            yield lambda done: self._advance(here, done)
        finally:
            took = self.clock() - begun
            with self._lock:
                self._open.pop()
                if self._open:
                    self._open[-1].inside += took
                own = took - here.inside
                self.seconds[name] = self.seconds.get(name, 0.0) + own
                if self.show == "lines" and not self._open and self.elapsed > _MOMENT and took > _LINE:
                    self._tell(f"{name} {took:.1f} s")
            _LOG.debug("%s: %s took %.2f s", self.what, name, own)

    def tick(self) -> None:
        """Show that a long stage still runs; called now and then from another thread."""
        with self._lock:
            if not self._open:
                return
            self._draw()
            if self.show == "lines" and self.clock() - self._told >= _STILL:
                outer = next((o for o in self._open if o.total), None)
                count = f"{outer.name} {outer.done}/{outer.total}, " if outer and outer is not self._open[-1] else ""
                self._tell(f"{count}{self._open[-1].name}, {self.elapsed:.0f} s so far")

    def close(self) -> None:
        """The summary."""
        self._clear()
        text = f"{self.what} took {self.elapsed:.1f} s: {self.summary()}"
        _LOG.info(text)
        if self.show != "off" and self.elapsed > _MOMENT:
            self._tell(text)

    def _tell(self, text: str) -> None:
        self._told = self.clock()
        print(f"autopar3d: {text}", file=self.out, flush=True)

    def summary(self) -> str:
        """Where the time went, the longest first."""
        ordered = sorted(self.seconds.items(), key=lambda item: -item[1])
        rest = self.elapsed - sum(self.seconds.values())
        return ", ".join(f"{name} {s:.1f}" for name, s in [*ordered, ("other", max(0.0, rest))] if s >= 0.05) or "-"

    def _advance(self, here: _Open, done: int) -> None:
        with self._lock:
            here.done = done
            self._draw()

    def _draw(self) -> None:
        if self.show != "bar" or self.elapsed <= _MOMENT:
            return
        # A stage that knows how many steps it has says more than those inside it.
        here = next((o for o in self._open if o.total), self._open[-1])
        filled = _WIDTH * here.done // here.total if here.total else 0
        count = f" {here.done}/{here.total}" if here.total else ""
        inner = f": {self._open[-1].name}" if self._open[-1] is not here else ""
        line = f"autopar3d [{'#' * filled}{'-' * (_WIDTH - filled)}] {here.name}{count}{inner}  {self.elapsed:.0f} s"
        self.out.write("\r" + line.ljust(self._drawn))
        self.out.flush()
        self._drawn = len(line)

    def _clear(self) -> None:
        if self._drawn:
            self.out.write("\r" + " " * self._drawn + "\r")
            self._drawn = 0


@contextlib.contextmanager
def watching(what: str) -> Iterator[None]:
    """Watch one compilation; one inside another belongs to it."""
    if _CURRENT.get() is not None:
        yield
        return
    out = sys.stderr
    watch = Watch(what, _display(out), out)
    token = _CURRENT.set(watch)
    ended = threading.Event()
    ticker = threading.Thread(target=_ticking, args=(watch, ended), name="autopar3d progress", daemon=True)
    if watch.show != "off":
        ticker.start()
    try:
        yield
    except BaseException:
        _end(ticker, ended)
        watch._clear()
        raise
    else:
        _end(ticker, ended)
        watch.close()
    finally:
        _CURRENT.reset(token)


def _ticking(watch: Watch, ended: threading.Event) -> None:
    while not ended.wait(_TICK):
        watch.tick()


def _end(ticker: threading.Thread, ended: threading.Event) -> None:
    ended.set()
    if ticker.is_alive():
        ticker.join()


@contextlib.contextmanager
def stage(name: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """A part of the compilation that is watched, if one is.

    Args:
        name: what it does, as in "tracing".
        total: number of its steps; call what is given with the number done so far.
    """
    watch = _CURRENT.get()
    if watch is None:
        yield lambda done: None
        return
    with watch.stage(name, total) as step:
        yield step


def _display(out: TextIO) -> str:
    wish = os.environ.get("AUTOPAR3D_PROGRESS", "")
    if wish in ("bar", "lines", "off"):
        return wish
    # torchrun and `launch` both set RANK.
    if os.environ.get("RANK", "0") != "0" or "PYTEST_CURRENT_TEST" in os.environ:
        return "off"
    return "bar" if out.isatty() else "lines"
