"""The documentation runs, prints what it says it prints, and links to what exists.

A Python block runs, after those above it in its file and in their namespace. A bash block of `autopar3d` commands
runs too, from the repository's root. `<!-- output -->` before a text block says that it is what the block before it
prints (a plan's hash aside); `<!-- not run: why -->` before a block, that it does not run; Python only has to be valid
then. After a change that alters what is printed, `python -m tests.test_docs`
writes the blocks anew.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import autopar3d
from autopar3d import errors
from autopar3d.cli import main
from autopar3d.errors import AutoPar3DError
from autopar3d.rules import RULES
from tests.api import SECTIONS, reference

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@dataclass(frozen=True)
class Block:
    """A fenced block. `first` is the number (from 0) of its first line, `note` the HTML comment right before it."""

    language: str
    note: str
    first: int
    text: str


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


def run(page: Path) -> Iterator[tuple[Block, str]]:
    """Run a page's blocks; each block that shows an output, with what was printed."""
    namespace = {"__name__": "page"}
    printed = ""
    for block in blocks(page.read_text()):
        if block.language == "python":
            # Empty lines in front, so that a traceback has the page's line numbers.
            code = compile("\n" * block.first + block.text, str(page), "exec", dont_inherit=True)
            if not block.note.startswith("not run: "):
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    exec(code, namespace)
                printed = out.getvalue()
        elif block.language == "bash" and not block.note.startswith("not run: "):
            commands = block.text.replace("\\\n", " ").split("\n")
            if all(command.startswith("autopar3d ") for command in commands):
                printed = "".join(_command(shlex.split(command, comments=True)) for command in commands)
        elif block.note == "output":
            yield block, _tidy(printed)


def _command(words: list[str]) -> str:
    """What an `autopar3d` command prints, errors too."""
    here = Path.cwd()
    os.chdir(ROOT)
    try:
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
            main(words[1:])
    finally:
        os.chdir(here)
    return out.getvalue()


def _tidy(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.rstrip().split("\n"))


def _same(a: str, b: str) -> bool:
    """Equal but for the hashes of plans, which change with every detail of the graphs."""
    return re.sub(r"Plan \w{12}", "Plan", a) == re.sub(r"Plan \w{12}", "Plan", b)


@contextlib.contextmanager
def _undone() -> Iterator[None]:
    """An empty working directory, one thread, and the table of rules and the loggers as they were."""
    rules, threads, here = dict(RULES), torch.get_num_threads(), Path.cwd()
    log = logging.getLogger("autopar3d.compile")
    level = log.level
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        torch.set_num_threads(1)
        try:
            with torch.random.fork_rng():
                yield
        finally:
            os.chdir(here)
            torch.set_num_threads(threads)
            log.setLevel(level)
            RULES.clear()
            RULES.update(rules)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_runs(page: Path) -> None:
    with _undone():
        for block, printed in run(page):
            where = f"{page.name}:{block.first + 1}"
            again = "python -m tests.test_docs writes what is printed now"
            assert _same(printed, block.text), f"{where}: {again}\n{printed}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_exist(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if not re.match(r"\w+:", target):
            linked = (page.parent / path) if path else page
            assert linked.exists(), f"{page.name} links to {target}"
            assert not anchor or anchor in _anchors(linked), f"{page.name} links to {target}: no such heading"


def _anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_exist(page: Path) -> None:
    text = page.read_text()
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    commands = [b.text for b in blocks(text) if b.language == "bash"]
    for word in " ".join([*spans, *commands]).split():
        path = word.strip("\"',;:()").partition("::")[0]
        # Names with a folder of this repository in front; others are the reader's own.
        if re.fullmatch(r"\.?[\w.-]+(/[\w.-]*)+", path) and (ROOT / path.split("/")[0]).is_dir():
            assert (ROOT / path).exists(), f"{page.name} names {path}"


def test_troubleshooting_shows_every_error() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    kinds = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, AutoPar3DError)]
    assert [c.__name__ for c in kinds if c.__name__ not in text] == []


def test_the_reference_is_what_the_docstrings_say() -> None:
    again = "python -m tests.test_docs writes it anew"
    assert (ROOT / "docs" / "api.md").read_text() == reference(), again
    documented = {getattr(thing, "__name__", "") for things in SECTIONS.values() for thing in things}
    assert set(autopar3d.__all__) <= documented


def write() -> None:
    """Put what is printed now into the blocks that show an output, and make the reference anew."""
    (ROOT / "docs" / "api.md").write_text(reference())
    for page in PAGES:
        lines = page.read_text().split("\n")
        with _undone():
            shown = list(run(page))
        for block, printed in reversed(shown):
            if not _same(printed, block.text):
                old = block.text.split("\n") if block.text else []
                lines[block.first : block.first + len(old)] = printed.split("\n")
                print(f"{page.name}:{block.first + 1} written", file=sys.stderr)
        page.write_text("\n".join(lines))


if __name__ == "__main__":
    write()
