"""Servers whose disk is full, data, log and all: they refuse, lose nothing that was answered, and go on with room.

What a tablespace without room does is in tests/integration/test_postgres_faults.py.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.faults.disks import filled, small_disk
from tests.servers import Server, StartError

from effectonce import Message, Policy, Receiver, StoreUnavailable
from effectonce.testing.clocks import wait_until

POLICY = Policy(lease=1.0, keep="1h", wait=30.0)
ENOUGH = 20
SETTINGS: dict[str, dict[str, Any]] = {
    "postgres": {"max_wal_size": "32MB", "min_wal_size": "32MB", "wal_recycle": "off"},
    "valkey": {},
    "redis": {},
    "mariadb": {},
}


class Traffic:
    """Messages with answers of some size, what they were answered with, and how often each was run."""

    def __init__(self, url: str) -> None:
        self.receiver = Receiver(url, policy=POLICY, breaker=None)
        self.answers: dict[str, str] = {}
        self.refused: list[str] = []
        self.runs: Counter[str] = Counter()

    def _handle(self, message: Message) -> str:
        self.runs[message.id] += 1
        return os.urandom(10_000).hex()

    def ask(self, id: str) -> Any:
        outcome = self.receiver.process(Message(id), self._handle)
        self.answers.setdefault(id, outcome.value)
        return outcome

    def until_refused(self, times: int) -> None:
        """Ask for new keys until that many were refused."""
        while len(self.refused) < times:
            id = f"id {len(self.answers)} {len(self.refused)}"
            try:
                self.ask(id)
            except StoreUnavailable:
                self.refused.append(id)

    def check(self) -> None:
        """Every answer is what it was."""
        for id, answer in self.answers.items():
            outcome = self.ask(id)
            assert (outcome.status, outcome.value) == ("replayed", answer)


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_full_disk(
    start_server: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """New work is refused while it lasts; what was answered is there afterwards, also after a crash; no key is lost."""
    with small_disk(tmp_path / "disk", 160) as disk:
        monkeypatch.setattr(tempfile, "tempdir", str(disk))
        server = start_server(kind, **SETTINGS[kind])
        traffic = Traffic(server.url)
        with traffic.receiver:
            for number in range(ENOUGH):
                traffic.ask(f"before {number}")
            with filled(disk):
                traffic.until_refused(ENOUGH)
                if kind == "postgres":
                    fill_log(server.url)
                    traffic.until_refused(2 * ENOUGH)
                for id in list(traffic.answers)[:ENOUGH]:  # answered as before, or refused
                    with suppress(StoreUnavailable):
                        assert traffic.ask(id).status == "replayed"
            wait_until(lambda: recovers(server, traffic), seconds=60)
            traffic.check()
            for id in traffic.refused:
                traffic.ask(id)
                assert traffic.runs[id] <= 2, "run again only because its end could not be recorded"
            server.kill()
            server.restart()
            wait_until(lambda: traffic.receiver.store.health().ok, seconds=60)
            traffic.check()
        server.stop()


def fill_log(url: str) -> None:
    """Use up what a server has left of its log; without it PostgreSQL goes down rather than lose a commit."""
    with pytest.raises(psycopg.OperationalError), psycopg.connect(url, autocommit=True) as connection:
        while True:
            connection.execute("SELECT pg_switch_wal() FROM pg_logical_emit_message(true, 'full', 'disk')")


def recovers(server: Server, traffic: Traffic) -> bool:
    """Whether new work is done again: by the server itself, or after it was started again if the full disk ended it."""
    with suppress(StoreUnavailable):
        return bool(traffic.ask("after"))
    if not traffic.receiver.store.health().ok:
        with suppress(StartError):
            server.restart()
    return False
