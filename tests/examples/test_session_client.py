"""The client of the examples that may be killed: whatever its README says, and the books after many kills."""

from __future__ import annotations

import itertools
import os
import shlex
import signal
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.examples.running import ENVIRONMENT, Example, ExampleServer

from effectonce.sessions import Journal

SERVE = "python server.py 8000"
PAY = "python client.py http://127.0.0.1:8000"
INVOICES = 20
MORTAL = """
import os, signal, sys
import httpx
import client

url, count, when = sys.argv[1], int(sys.argv[2]), sys.argv[3]
real = httpx.HTTPTransport.handle_request

def die(): os.kill(os.getpid(), signal.SIGKILL)

def handle(self, request):
    global count
    count -= request.url.path == "/payments"
    if count == 0 and when == "before": die()
    response = real(self, request)
    if count == 0 and when == "after": die()
    return response

httpx.HTTPTransport.handle_request = handle
client.main(url)
"""
"""The client in a process that dies before it sends a payment, or with the answer in its hands."""


@pytest.fixture
def example(tmp_path: Path) -> Example:
    return Example("session_client", tmp_path)


@pytest.fixture
def server(example: Example) -> Iterator[ExampleServer]:
    with example.serve(SERVE) as server:
        yield server


def booked(example: Example) -> list[int]:
    """How many lines each invoice has."""
    with closing(sqlite3.connect(example.folder / "ledger.db")) as ledger:
        return [n for _, n in ledger.execute("SELECT invoice, count(*) FROM lines GROUP BY invoice")]


def started(example: Example, url: str) -> subprocess.Popen[str]:
    words = shlex.split(PAY.replace("http://127.0.0.1:8000", url))
    return subprocess.Popen(
        words,
        cwd=example.folder,
        env=os.environ | ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def killed_at(example: Example, url: str, payment: int, when: str) -> str:
    """Run the client until it is killed at some payment; what it said."""
    (example.folder / "mortal.py").write_text(MORTAL)
    return example.run(f"python mortal.py {url} {payment} {when}", status=-signal.SIGKILL)


def test_the_readme(example: Example, server: ExampleServer) -> None:
    """Every invoice is paid once, and a second run pays nothing."""
    assert example.commands[1:] == [f"{SERVE} &", PAY, f"{PAY} --books"]
    first = example.run(PAY, server.url)
    assert first.count("paid") == INVOICES
    assert example.run(PAY, server.url) == ""
    books = example.run(f"{PAY} --books", server.url).splitlines()
    assert [line.split()[1] for line in books] == ["1"] * INVOICES


def test_a_client_that_is_killed_again_and_again_repeats_no_effect(
    example: Example, server: ExampleServer
) -> None:
    """Before a payment is sent, and with its answer in hand: after each kill one is in doubt, and none runs twice."""
    doubts = 0
    for payment, when in itertools.product((1, 3), ("before", "after", "after")):
        doubts += killed_at(example, server.url, payment, when).count("in doubt")
        assert set(booked(example)) <= {1}
    last = example.run(PAY, server.url)
    assert "in doubt" in last
    assert booked(example) == [1] * INVOICES
    assert doubts == 5


def test_a_twin_is_fenced(example: Example, server: ExampleServer) -> None:
    """Whoever resumes the session last has it; the other is told, and nothing is paid twice."""
    with started(example, server.url) as first:
        assert first.stdout is not None
        first.stdout.readline()
        example.run(PAY, server.url)
        _, complaint = first.communicate()
    assert first.returncode == 0 or "409" in complaint or "Fenced" in complaint
    assert booked(example) == [1] * INVOICES


def test_a_session_that_is_over_is_left_to_a_person(example: Example) -> None:
    """What was sent without an answer is listed, and nothing is sent again under another session."""
    with example.serve(SERVE) as server:
        killed_at(example, server.url, 3, "after")
        journal = Journal(example.folder / "session.db")
        with closing(sqlite3.connect(example.folder / "effects.db", timeout=30)) as store:
            store.execute("UPDATE effectonce_sessions SET lease_until = 0")
            store.commit()
        assert "The session is over" in example.run(PAY, server.url, status=1)
    assert [entry.name for entry in journal.in_doubt()] == ["invoice-03"]
    assert booked(example) == [1, 1, 1]
