"""``docs/http.md`` says everything there is to say: every rule, every problem, every word of the client."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from effectonce.http import client
from effectonce.http._exchange import PROBLEMS
from effectonce.http._rules import RuleWords

PAGE = (Path(__file__).parents[2] / "docs" / "http.md").read_text()


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table under a heading, without its head."""
    _, _, rest = PAGE.partition(heading)
    table = re.search(r"(?:^\|.*\n)+", rest, re.MULTILINE)
    assert table is not None
    lines = [line for line in table[0].splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def words(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_rule_is_explained() -> None:
    """The table has each word that a boundary or a route can be told, once."""
    listed = [word for row in rows("## Rules, for all") for word in words(row[0])]
    assert sorted(listed) == sorted(RuleWords.__annotations__)


def test_every_problem_is_listed() -> None:
    """With its status, and whether to come again."""
    listed = {words(row[0])[0]: (int(row[1][:3]), row[2] == "yes") for row in rows("## Problems")}
    assert listed == {code: (kind.status, kind.retryable) for code, kind in PROBLEMS.items()}


def test_every_word_of_the_client_is_explained() -> None:
    """The client's rules, each once."""
    listed = [word for row in rows("| `Rules` |") for word in words(row[0])]
    assert sorted(listed) == sorted(each.name for each in fields(client.Rules))
