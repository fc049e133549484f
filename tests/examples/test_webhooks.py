"""The webhooks of two providers: whatever the README says, forged events, and a server that is killed in the middle."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from tests.examples.running import Example

SERVE = "python server.py 8000"
SEND = "python provider.py http://127.0.0.1:8000"
EVENTS = 40
MORTAL = """
import os, signal, sys
from effectonce.stores.sqlite import SQLiteStore

real, left = SQLiteStore.complete, 5

async def complete(self, completion):
    global left
    left -= 1
    if left == 0: os.kill(os.getpid(), signal.SIGKILL)
    return await real(self, completion)

SQLiteStore.complete = complete
import server
server.main(int(sys.argv[1]))
"""
"""The server, dying when it has booked an event and is about to record that."""


@pytest.fixture
def example(tmp_path: Path) -> Example:
    return Example("webhooks", tmp_path)


def booked(example: Example) -> list[int]:
    """How many lines each event has."""
    with closing(sqlite3.connect(example.folder / "ledger.db", timeout=30)) as ledger:
        return [lines for _, lines in ledger.execute("SELECT event, count(*) FROM lines GROUP BY event")]


def test_the_readme(example: Example) -> None:
    """Every event is booked once, every other delivery gets the first answer, and a forged one is refused."""
    assert example.commands[1:] == [f"{SERVE} &", SEND, f"{SEND} --books"]
    with example.serve(SERVE) as server:
        counts, forged = example.run(SEND, server.url).splitlines()
        _, deliveries, replayed = (int(word) for word in counts.replace(":", "").split() if word.isdigit())
        assert deliveries - replayed == EVENTS
        assert forged == "forged: 401"
        books = example.run(f"{SEND} --books", server.url).splitlines()
    assert [line.split()[1] for line in books] == ["1"] * EVENTS == [str(lines) for lines in booked(example)]


def test_a_server_that_is_killed_books_nothing_twice(example: Example) -> None:
    """Killed with an event booked and not recorded; started again, all that the provider repeats is there once."""
    (example.folder / "mortal.py").write_text(MORTAL)
    (example.folder / "once.py").write_text(
        "import sys, provider\nfor n in range(1, 9): provider.send(sys.argv[1], *provider.stripe(n))\n"
    )
    with example.serve("python mortal.py 8000") as server:
        example.run(f"python once.py {server.url}")
    assert booked(example) == [1] * 5  # the fifth is not recorded
    with example.serve(SERVE) as server:
        example.run(SEND, server.url)
    assert booked(example) == [1] * EVENTS
