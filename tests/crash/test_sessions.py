"""A server of client sessions that dies by SIGKILL: the client asks another one, and a sink sees each effect once."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from effectonce import Policy, Receiver, current
from effectonce.sessions import ClientSession, Journal, Request, Sessions

VICTIM = """
import os, signal, sys
from pathlib import Path
from effectonce import Policy, Receiver, current
from effectonce._blocking import run
from effectonce.sessions import Request, Sessions
from effectonce.sessions import _store

url, sink, point, client, number, acked, epoch = sys.argv[1:]

def die(): os.kill(os.getpid(), signal.SIGKILL)

def charge(request):
    if point == "before the effect": die()
    with open(sink, "a") as lines:
        lines.write(current().key_for("charge") + "\\n")
    if point == "after the effect": die()
    return request.number

sessions = Sessions(Receiver(url), policy=Policy(lease=0.4))
sessions.process(Request(client, int(number), int(acked), None, int(epoch)), charge)
die()
"""
"""Dies at a point, and in any case before its client hears anything."""
POINTS = ["before the effect", "after the effect", "after the record"]


@pytest.mark.parametrize("store", ["sqlite", "valkey", "postgres", "mariadb"])
def test_a_killed_server_repeats_no_effect(
    store: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """A request for each point. All are asked for again, out of order, by a restarted client."""
    if store == "sqlite":
        url = f"sqlite:///{tmp_path}/effects.db"
    else:
        url = request.getfixturevalue(store).url + ("" if store == "valkey" else "?table=session_crashes")
    sink = tmp_path / "sink"

    def charge(request: Request) -> int:
        with sink.open("a") as lines:
            lines.write(current().key_for("charge") + "\n")
        return request.number

    with Receiver(url) as receiver:
        sessions = Sessions(receiver, policy=Policy(lease=0.4))
        journal = Journal(tmp_path / "session.db")
        client = ClientSession(sessions.open(), journal=journal)
        for number in range(1, 4):
            sent = client.begin(name=f"charge {number}")
            words = [
                url,
                str(sink),
                POINTS[number % 3],
                sent.client,
                *map(str, (sent.number, sent.acked, sent.epoch)),
            ]
            died = subprocess.run(
                [sys.executable, "-c", VICTIM, *words], capture_output=True, timeout=60, check=False
            )
            assert died.returncode == -signal.SIGKILL, died.stderr.decode()
        client = ClientSession(sessions.resume(client.client), journal=Journal(journal.path))
        for number in (2, 3, 1):
            again = client.begin(name=f"charge {number}")
            outcome = sessions.process(again, charge)
            assert outcome.value == number
            assert outcome.replayed == (POINTS[number % 3] == "after the record")
            client.done(again, outcome.value)
        assert client.acked == 3
        sessions.end(client.client, epoch=client.epoch)
        sessions.close()
    keys = sink.read_text().split()
    assert len(set(keys)) == 3
    assert len(keys) == 4  # one effect was asked for again, under the key that the sink knows
