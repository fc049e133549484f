"""The outbox on the command line: migrate, relay, and what to do about dead letters."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from tests.integration.brokers import OnRedis, OnWebhook
from tests.integration.outbox_helpers import World, sqlite_world

from effectonce.ops.cli import main
from effectonce.testing.clocks import wait_until

REASON = HTTPStatus(422).phrase
"""Its wording has changed between versions of Python."""


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = sqlite_world(tmp_path)
    assert main(["migrate", "--outbox", "--table", world.table, world.url]) == 0
    return world


@pytest.fixture
def hook() -> Iterator[OnWebhook]:
    hook = OnWebhook("")
    yield hook
    hook.server.shutdown()
    hook.server.server_close()
    hook.thread.join()


def test_migrate_makes_the_table_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Safe to repeat; --print shows the statements, and they are those that make the same table."""
    url = f"sqlite:///{tmp_path / 'a.db'}"
    assert main(["migrate", "--outbox", url]) == 0
    assert main(["migrate", "--outbox", url]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("has just been made ready.")
    assert second.endswith("is ready.")
    assert main(["migrate", "--outbox", "--print", url]) == 0
    with (
        closing(sqlite3.connect(tmp_path / "b.db")) as other,
        closing(sqlite3.connect(tmp_path / "a.db")) as made,
    ):
        other.executescript(capsys.readouterr().out)
        query = "SELECT name FROM sqlite_schema ORDER BY name"
        assert other.execute(query).fetchall() == made.execute(query).fetchall()


@pytest.mark.parametrize("fixture", ["postgres", "mariadb"])
def test_migrate_prints_what_a_person_may_run(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str], fixture: str
) -> None:
    """The statements of every engine, with the table's own name."""
    url = str(request.getfixturevalue(fixture).url)
    assert main(["migrate", "--outbox", "--print", "--table", "mine", url]) == 0
    assert capsys.readouterr().out.startswith("CREATE TABLE ")


def test_relay_once(world: World, hook: OnWebhook, capsys: pytest.CaptureFixture[str]) -> None:
    """Publishes what is there, says how much, and ends."""
    world.add(("1", "a"), ("2", None))
    assert main(["relay", "--once", "--table", world.table, world.url, hook.url]) == 0
    assert "published 2 events" in capsys.readouterr().out
    assert len(hook.seen) == 2


def test_relay_runs_until_it_is_told_to_stop(world: World, valkey: Any) -> None:
    """SIGTERM ends it in good order, with exit status 0."""
    place = OnRedis(valkey.url)
    command = [sys.executable, "-m", "effectonce", "relay", "--table", world.table, world.url, valkey.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as relay:
        try:
            assert relay.stdout is not None
            assert relay.stdout.readline().startswith("relaying from sqlite://")
            world.add(("1", "a"), topic=place.topic)
            wait_until(lambda: len(place.payloads()) == 1)
            relay.send_signal(signal.SIGTERM)
            assert relay.wait(20) == 0
            assert relay.stdout.read() == "published 1 events, gave up 0\n"
        finally:
            relay.kill()


def test_dead_letters_are_listed_replayed_and_forgotten(
    world: World, hook: OnWebhook, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each with its reason and what it holds up; a person decides."""
    world.add(("1", "a"), ("2", None), topic="status-422")
    relay = ["relay", "--table", world.table, world.url]
    assert main([*relay, hook.url, "--once", "--max-attempts", "1"]) == 0
    assert main([*relay, "--lag"]) == 0
    assert main([*relay, "--dead"]) == 0
    *_, lag, held, free = capsys.readouterr().out.splitlines()
    assert lag == "0 events wait, the oldest for 0.0 s; 2 were given up"
    assert held.endswith(f"status-422  after 1 attempts, holds up 'a': Refused: 422 {REASON}: text")
    assert free.endswith(f"status-422  after 1 attempts: Refused: 422 {REASON}: text")
    assert main([*relay, "--forget", held.split()[0]]) == 0
    assert main([*relay, "--forget", held.split()[0]]) == 1
    assert main([*relay, "--replay", "unknown"]) == 1
    assert main([*relay, "--replay", "all"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 events will be published after all"


def test_what_is_wrong_is_said_at_once(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """No broker, no table, a database that can't hold an outbox: exit status 2 and a sentence, without a password."""
    assert main(["relay", world.url]) == 2
    assert main(["relay", "--table", "nowhere", world.url, "http://127.0.0.1:9/"]) == 2
    assert main(["relay", "redis://u:secret@host/0", "http://127.0.0.1:9/"]) == 2
    broker, table, database = capsys.readouterr().err.splitlines()
    assert "Name a BROKER" in broker
    assert "effectonce migrate --outbox" in table
    assert "can't hold an outbox" in database
    assert "secret" not in database


@pytest.mark.parametrize("command", [["relay", "--lag"], ["migrate", "--outbox"], ["migrate", "--versions"]])
@pytest.mark.parametrize(
    "url", ["postgresql://u:secret@[::1/db", "postgresql://h/db?password=secret&pasword=secret"]
)
def test_a_url_that_libpq_does_not_understand_shows_no_password(
    capsys: pytest.CaptureFixture[str], command: list[str], url: str
) -> None:
    """The words of libpq would."""
    assert main([*command, url]) == 2
    said = "".join(capsys.readouterr())
    assert "no URL that libpq understands" in said
    assert "secret" not in said
