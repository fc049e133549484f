"""The documentation holds: examples run, commands exist, links lead somewhere, and every word of ours is in it."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import os
import re
import shlex
import shutil
import sqlite3
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import pytest

from effectonce import Policy, Receiver
from effectonce.hooks import EventKind
from effectonce.http._rules import RuleWords
from effectonce.http.client import Rules
from effectonce.messaging._consumer import Options
from effectonce.ops.cli import make_parser
from effectonce.stores import Breaker

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
PAGES = [page for page in PAGES if page.exists()]
LINKED = [*PAGES, *sorted((ROOT / "examples").glob("*/README.md")), ROOT / "benchmarks/README.md"]
TESTS = [path.read_text() for path in sorted((ROOT / "tests").rglob("*.py"))]

# A block is left out only by a comment that says why, on the line before it.
OPT_OUT = re.compile(r"<!-- not run: \S.* -->")
FENCE = re.compile(r"^(?P<indent> *)(?P<marks>`{3,})(?P<language>\w*)")
# What a reader has anyway, as against what this project must bring.
READERS_COMMANDS = {"cat", "cd", "curl", "docker", "git", "pip", "pipx", "python", "python3", "uv"}


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the number of its first line in the page."""

    language: str
    text: str
    line: int


def runnable_blocks(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page that didn't opt out."""
    lines = page.read_text().splitlines()
    number = 0
    while number < len(lines):
        opening = FENCE.match(lines[number])
        before = lines[number - 1] if number else ""
        number += 1
        if not opening:
            continue
        start, indent = number, len(opening["indent"])
        while lines[number].strip() != opening["marks"]:
            number += 1
        if not OPT_OUT.fullmatch(before.strip()):
            text = "\n".join(line[indent:] for line in lines[start:number])
            yield Block(opening["language"], text, start + 1)
        number += 1


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python blocks of a page run from top to bottom in one namespace, in an empty directory."""
    monkeypatch.chdir(tmp_path)
    # A real module, so that dataclasses and annotations resolve as they do in a reader's own file.
    module = types.ModuleType("example")
    monkeypatch.setitem(sys.modules, "example", module)
    for block in runnable_blocks(page):
        if block.language in ("python", "py"):
            # The blank lines make a traceback point at the line of the page.
            source = "\n" * (block.line - 1) + block.text
            exec(compile(source, str(page), "exec"), module.__dict__)
    for value in list(module.__dict__.values()):
        if isinstance(value, Receiver | sqlite3.Connection):
            value.close()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_shown_commands_exist(page: Path) -> None:
    """Each ``$ command`` of a console block is a file of this project or something a reader has."""
    for block in runnable_blocks(page):
        if block.language != "console":
            continue
        for line in block.text.splitlines():
            if line.startswith("$ "):
                command = next(word for word in shlex.split(line[2:], comments=True) if "=" not in word)
                assert exists(command), f"{name_of(page)} shows {line!r}, but there is no {command}"


def exists(command: str) -> bool:
    if command.startswith(("./", ".ci/")):
        return os.access(ROOT / command, os.X_OK)
    return (
        command in READERS_COMMANDS
        or shutil.which(command, path=str(Path(sys.executable).parent)) is not None
    )


def prose_of(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^( *)(`{3,}).*?^ *\2$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as they are made where pages are shown."""
    headings = re.findall(r"^#+ (.*)$", prose_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKED, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    """To a file or a folder of this project, and to a heading that is there."""
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", prose_of(page)) if "://" not in link]
    for link in links:
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{link} leads nowhere"
        assert not anchor or anchor in anchors_of(target), f"{link} names no heading"


@pytest.mark.parametrize("page", LINKED, ids=name_of)
def test_what_a_page_says_shows_something_is_there(page: Path) -> None:
    """Files and folders of this project by their paths, and tests by their names, of which "…" is the rest."""
    text = prose_of(page)
    for path in re.findall(r"`((?:tests|src|benchmarks|examples|scripts|docs)/[\w./*-]+)`", text):
        assert list(ROOT.glob(path.rstrip("/"))), f"there is no {path}"
    for name in re.findall(r"`(test_[\w…]+)`", text):
        pattern = re.compile(rf"def {name.replace('…', '[a-z0-9_]*')}\(")
        assert any(pattern.search(source) for source in TESTS), f"there is no {name}"


def commands_and_options() -> list[str]:
    """Every command, and every option of one."""
    actions = make_parser()._actions
    (commands,) = [action.choices for action in actions if isinstance(action, argparse._SubParsersAction)]
    options = {option for parser in commands.values() for option in parser._option_string_actions}
    return [f"effectonce {name}" for name in commands] + sorted(options - {"-h", "--help"})


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("commands.md", commands_and_options()),
        ("guide.md", list(get_args(EventKind))),
        ("guide.md", [field.name for field in dataclasses.fields(Breaker)]),
        ("http.md", list(RuleWords.__annotations__)),
        ("http.md", list(inspect.signature(Rules).parameters)),
        ("messaging.md", list(Options.__annotations__)),
    ],
    ids=["commands", "events", "breaker", "http rules", "client rules", "consumer options"],
)
def test_every_word_has_its_place_in_a_table(page: str, words: list[str]) -> None:
    """A command, an option, an event or a rule that nobody explains is not there for anybody."""
    rows = [line for line in (ROOT / "docs" / page).read_text().splitlines() if line.startswith(("|", "##"))]
    explained = "\n".join(row.split("|")[1] if row.startswith("|") else row for row in rows)
    assert [word for word in words if not re.search(rf"(`|## ){re.escape(word)}(?![\w-])", explained)] == []


def test_every_word_of_a_policy_is_explained() -> None:
    """Where the README says that it is: in the docstring."""
    words = [field.name for field in dataclasses.fields(Policy) if field.init]
    explained = inspect.getdoc(Policy) or ""
    assert [word for word in words if not re.search(rf"^{word} ", explained, re.MULTILINE)] == []


def test_an_example_is_left_out_only_with_a_reason(tmp_path: Path) -> None:
    """The opt-out comment counts only with a reason, and only directly before its block."""
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- not run: needs a server -->\n```python\nleft_out\n```\n"
        "<!-- not run: -->\n```python\nno_reason\n```\n"
        "<!-- not run: too far away -->\n\n```python\ntoo_far\n```\n"
        "- in a list\n  ```python\n  indented\n  ```\n"
    )
    blocks = list(runnable_blocks(page))
    assert [block.text for block in blocks] == ["no_reason", "too_far", "indented"]
    assert [block.line for block in blocks] == [7, 12, 16]
