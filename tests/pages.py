"""Pages of the documentation: their blocks, and running them.

A Python block runs after those above it on its page, in their namespace. A bash block of `autopar3d` commands runs too,
from the repository's root. A comment before a block says otherwise:

- `<!-- output -->`: the block is what the one before it prints, a plan's hash aside.
- `<!-- on 4 ranks -->`: Python that real ranks run, all such blocks of a page in one go. A name is there what blocks on
  ranks made it; else what the page had made it by then.
- `<!-- from FILE -->`: the lines stand in that file, in this order.
- `<!-- not run -->`: it does not run; `tests/test_docs.py` lists these, with the test that runs the same.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import os
import pickle
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import autopar3d
from autopar3d.cli import main
from autopar3d.grid import Grid
from autopar3d.ranks.launch import Pool
from autopar3d.ranks.rank import dumps

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@dataclass(frozen=True)
class Block:
    """A fenced block. `first` is the number (from 0) of its first line, `note` the HTML comment right before it."""

    language: str
    note: str
    first: int
    text: str

    @property
    def ranks(self) -> int:
        """How many ranks are to run it; 0 where it runs in this process, or not."""
        found = re.fullmatch(r"on (\d+) ranks", self.note)
        return int(found[1]) if found else 0

    @property
    def source(self) -> str:
        """The file that has its lines, or ""."""
        return self.note.removeprefix("from ") if self.note.startswith("from ") else ""

    @property
    def commands(self) -> list[str]:
        """Of a bash block; continued lines joined, comments dropped."""
        lines = re.sub(r"\\\n\s*", "", self.text).split("\n") if self.language == "bash" else []
        return [line for line in lines if line and not line.startswith("#")]

    @property
    def runs_here(self) -> bool:
        """In this process, by itself."""
        if self.language == "python":
            return not self.note
        return bool(self.commands) and not self.note and all(c.startswith("autopar3d ") for c in self.commands)


def blocks(page: str) -> list[Block]:
    """All fenced blocks, those in lists too."""
    found = []
    lines = page.split("\n")
    i, note = 0, ""
    while i < len(lines):
        fence = re.fullmatch(r"(\s*)```(\w*)", lines[i])
        if fence:
            indent, language = fence.groups()
            end = next(j for j in range(i + 1, len(lines)) if lines[j] == f"{indent}```")
            body = "\n".join(line.removeprefix(indent) for line in lines[i + 1 : end])
            found.append(Block(language, note, i + 1, body))
            i, note = end, ""
        elif lines[i].strip():
            comment = re.fullmatch(r"\s*<!-- (.*) -->", lines[i])
            note = comment[1] if comment else ""
        i += 1
    return found


@dataclass(frozen=True)
class _OnRanks:
    """What a rank needs to run a block: its code, where it stands, and what the page had made of its names."""

    text: str
    page: str
    first: int
    names: dict[str, bytes]


def run(page: Path, ranks: Pool) -> Iterator[tuple[Block, str]]:
    """Run a page's blocks; each block that shows an output, with what was printed. What `launch` runs, and blocks that
    are for ranks, run on those of the pool."""
    namespace: dict[str, Any] = {"__name__": "page"}
    printed = ""
    for_ranks: list[_OnRanks] = []
    count = 0
    with mock.patch.object(autopar3d, "launch", _launch_on(ranks)):
        for block in blocks(page.read_text()):
            if block.language == "python":
                if block.ranks:
                    count = max(count, block.ranks)
                    names = _shipped(_compiled(block.text, page.name, block.first), namespace)
                    for_ranks.append(_OnRanks(block.text, page.name, block.first, names))
                elif block.runs_here:
                    printed = _execute(block.text, page.name, block.first, namespace)
            elif block.runs_here:
                printed = "".join(_command(shlex.split(command, comments=True)) for command in block.commands)
            elif block.note == "output":
                yield block, "\n".join(line.rstrip() for line in printed.rstrip().split("\n"))
    if for_ranks:
        ranks.run(_on_rank, for_ranks, ranks=count)


def _execute(text: str, page: str, first: int, namespace: dict[str, Any]) -> str:
    """Run a block; what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            exec(_compiled(text, page, first), namespace)
        except Exception as error:
            raise AssertionError(f"{page}:{first + 1} fails") from error
    return out.getvalue()


def _compiled(text: str, page: str, first: int) -> CodeType:
    """As a file of its own: messages with lines of it stay the same where the page gets longer above."""
    file = f"{page}/{first}/example.py"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    return compile(text, file, "exec", dont_inherit=True)


def _launch_on(ranks: Pool) -> Callable[..., list[Any]]:
    def launch(fn: Callable[..., Any], *args: Any, grid: Any, timeout: float = 300.0) -> list[Any]:
        return ranks.run(fn, *args, ranks=grid if isinstance(grid, int) else Grid.of(grid).size, timeout=timeout)

    return launch


def _shipped(code: CodeType, namespace: dict[str, Any]) -> dict[str, bytes]:
    """What the page made of the names that a block uses, pickled; what is compiled cannot travel."""
    stays = (autopar3d.ParallelModule, torch.optim.Optimizer)
    shipped = {}
    for name in _names(code) & set(namespace):
        if not isinstance(namespace[name], stays):
            shipped[name] = dumps(namespace[name])
    return shipped


def _names(code: CodeType) -> set[str]:
    inner = [c for c in code.co_consts if isinstance(c, CodeType)]
    return set(code.co_names).union(*(_names(c) for c in inner))


def _on_rank(todo: list[_OnRanks]) -> None:
    namespace: dict[str, Any] = {"__name__": "page"}
    made: set[str] = set()
    for block in todo:
        namespace |= {name: pickle.loads(value) for name, value in block.names.items() if name not in made}
        before = dict(namespace)
        if "init_process_group(" in block.text:  # as under torchrun, whose environment a pool's rank has
            dist.destroy_process_group()
        _execute(block.text, block.page, block.first, namespace)
        made |= {name for name in namespace if namespace[name] is not before.get(name)}


def _command(words: list[str]) -> str:
    """What an `autopar3d` command prints, errors too; files that it writes go into the working directory."""
    here = Path.cwd()
    writes = ("--html", "--save")
    words = [str(here / word) if before in writes else word for before, word in zip(["", *words], words, strict=False)]
    os.chdir(ROOT)
    try:
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
            main(words[1:])
    finally:
        os.chdir(here)
    return out.getvalue()
