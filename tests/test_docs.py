"""The documentation runs, prints what it says it prints, and links to what exists.

`tests/pages.py` says which blocks run, and where. After a change that alters what is printed,
`python -m tests.test_docs` writes the blocks that show an output anew.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import re
import runpy
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import autopar3d
from autopar3d import errors
from autopar3d.errors import AutoPar3DError
from autopar3d.ranks.launch import Pool
from autopar3d.rules import RULES
from tests.api import SECTIONS, reference
from tests.pages import PAGES, ROOT, blocks, run

# Blocks of Python that cannot run here, by the words they start with.
NOT_RUN = {
    "import colossalai": "ColossalAI is for torch versions before those that autopar3d needs",
    "from axonn": "AxoNN needs GPUs",
}

# Commands that the test of their page does not run, by how they start; the page or the test that runs the same.
ELSEWHERE = {
    "bash examples/run_gpt.sh": ".ci/run",
    "bash tests/run.sh": ".ci/run",
    "pip install": "tests/test_package.py::test_wheel_and_sdist_work_outside_the_checkout",
    "autopar3d doctor": "tests/test_cli.py::test_doctor_tries_every_collective",
    "autopar3d plan examples/gpt.py:make --grid 4,4,4 --hardware h100": "docs/command-line.md",
    "autopar3d check your.py:make": "docs/command-line.md",
    "autopar3d simulate your.py:make": "docs/command-line.md",
    "torchrun --nproc-per-node 8 train.py": "README.md",  # the block before it, on ranks
    "torchrun --nproc-per-node 4 train.py": "docs/user-guide.md",  # the same
    "torchrun --nproc-per-node 4 examples/migration/": "tests/test_migration.py::test_losses_are_equal",
    "torchrun --nproc-per-node 8 examples/": "tests/test_recipes.py::test_as_the_page_says_under_torchrun",
    "python -m pytest tests/rules -k cdist": "tests/rules/test_proof.py::test_rule",
    "ruff format . && ruff check .": "tests/run.sh",
    "mypy": "tests/run.sh",
    "lint-imports": "tests/run.sh",
    'python -m pytest -m "not slow"': "tests/run.sh",
    "python -m tests.test_docs": "tests/test_docs.py::test_python_runs",
}

# Measurements take minutes, and links of a given rate: here they only have to take the options that are shown.
MEASURED = re.compile(r"(?:bash \S*cluster\.sh \d+ \w+ |[A-Z_]+=\d+ )*python (examples/benchmarks/\w+\.py)(.*)")


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
def test_python_runs(page: Path, ranks: Pool) -> None:
    with _undone():
        for block, printed in run(page, ranks):
            where = f"{page.name}:{block.first + 1}"
            again = "python -m tests.test_docs writes what is printed now"
            assert _same(printed, block.text), f"{where}: {again}\n{printed}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_runs_somewhere(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for block in blocks(page.read_text()):
        where = f"{page.name}:{block.first + 1}"
        if block.source:
            rest = (line.strip() for line in (ROOT / block.source).read_text().split("\n"))
            missing = [line for line in block.text.split("\n") if line.strip() and line.strip() not in rest]
            assert not missing, f"{where}: {block.source} has no line {missing[0]!r} there"
        elif block.runs_here or block.ranks or block.note == "output":
            continue
        elif block.language == "python":
            assert block.text.startswith(tuple(NOT_RUN)), f"{where} does not run, and NOT_RUN does not say why"
            compile(block.text, page.name, "exec")
        for command in block.commands:
            measured = MEASURED.fullmatch(command)
            if measured:
                _takes_its_options(ROOT / measured[1], shlex.split(measured[2]), monkeypatch)
                continue
            found = [test for start, test in ELSEWHERE.items() if command.startswith(start)]
            assert found, f"{where}: {command} is run by nothing"
            file, _, test = found[0].partition("::")
            text = (ROOT / file).read_text()
            assert not test or f"def {test}(" in text, f"{found[0]} does not exist"
            word = command.split()[min(1, command.count(" "))]
            assert test or file.startswith(".") or word in text, f"{file} does not run {command}"


def _takes_its_options(script: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It loads, and its parser takes these words."""
    if "parse_args" not in script.read_text():
        assert not words, f"{script.name} takes no options"
        runpy.run_path(str(script))
        return

    class Parsed(Exception):
        pass

    def parse(self: argparse.ArgumentParser, *_: object) -> None:
        unknown = self.parse_known_args(words)[1]
        raise Parsed(*unknown)

    with monkeypatch.context() as patch, pytest.raises(Parsed) as parsed:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse)
        patch.syspath_prepend(str(script.parent))
        runpy.run_path(str(script), run_name="__main__")
    assert not parsed.value.args, f"{script.name} does not know {parsed.value.args}"


def test_links_exist() -> None:
    for page in PAGES:
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
    os.environ["AUTOPAR3D_PROGRESS"] = "off"
    (ROOT / "docs" / "api.md").write_text(reference())
    with Pool(8) as ranks:
        for page in PAGES:
            lines = page.read_text().split("\n")
            with _undone():
                shown = list(run(page, ranks))
            for block, printed in reversed(shown):
                if not _same(printed, block.text):
                    old = block.text.split("\n") if block.text else []
                    lines[block.first : block.first + len(old)] = printed.split("\n")
                    print(f"{page.name}:{block.first + 1} written", file=sys.stderr)
            page.write_text("\n".join(lines))


if __name__ == "__main__":
    write()
