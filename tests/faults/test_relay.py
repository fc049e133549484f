"""Relay processes that are killed and frozen at any moment, while writers commit: no event is lost, no order broken.

A consumer that drops repetitions by their id sees each event once, and those of a key in the order of their commits.
The writers count each key's events under a row lock, so that the numbers are the order.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.brokers import OnRedis
from tests.integration.outbox_helpers import World, mariadb_world, postgres_world, sqlite_world

from effectonce.testing.clocks import wait_until

SOAK = bool(os.environ.get("EFFECTONCE_SOAK"))
EVENTS = 100_000 if SOAK else 3_000
TROUBLES = 300 if SOAK else 14
"""Kills and freezes."""
RELAYS, WRITERS, KEYS = 4, 3, 40
IN_A_TRANSACTION = 10
SECONDS = 3600 if SOAK else 100


class Relays:
    """Relay processes, some of which may be frozen."""

    def __init__(self, world: World, broker: str, seed: int) -> None:
        options = ["--table", world.table, "--batch", "40", "--lease", "1s"]
        self._command = [sys.executable, "-m", "effectonce", "relay", *options, world.url, broker]
        self._chance = random.Random(seed)
        # Who freezes with SQLite's only lock in his hand has frozen them all.
        self._kills = 1.0 if world.engine == "sqlite" else 0.6
        self._running = [self._start() for _ in range(RELAYS)]
        self._frozen: subprocess.Popen[bytes] | None = None

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def trouble(self) -> None:
        """Kill one and start another, or freeze one and let go on the one that was frozen before."""
        place = self._chance.randrange(RELAYS)
        chosen = self._running[place]
        if chosen is self._frozen or self._chance.random() < self._kills:
            chosen.kill()
            chosen.wait()
            self._running[place] = self._start()
        else:
            self._thaw()
            chosen.send_signal(signal.SIGSTOP)
            self._frozen = chosen

    def _thaw(self) -> None:
        if self._frozen is not None and self._frozen.poll() is None:
            self._frozen.send_signal(signal.SIGCONT)

    def end(self) -> list[int]:
        """End all in good order; their exit statuses."""
        self._thaw()
        for relay in self._running:
            relay.terminate()
        return [relay.wait(60) for relay in self._running]

    def kill(self) -> None:
        for relay in self._running:
            relay.kill()
            relay.wait()


class Writers:
    """Threads that commit events of many keys, each numbered by the key's own counter."""

    def __init__(self, world: World, topic: str) -> None:
        self._world, self._topic = world, topic
        self.errors: list[BaseException] = []
        world.do(f"CREATE TABLE {world.table}_counters (name VARCHAR(20) PRIMARY KEY, n INTEGER NOT NULL)")
        for key in range(KEYS):
            world.do(f"INSERT INTO {world.table}_counters VALUES ('k{key}', 0)")
        self._threads = [threading.Thread(target=self._write, args=(seed,)) for seed in range(WRITERS)]
        for thread in self._threads:
            thread.start()

    def _write(self, seed: int) -> None:
        chance = random.Random(seed)
        connection = self._world.connect()
        try:
            for _ in range(EVENTS // WRITERS // IN_A_TRANSACTION):
                self._transaction(connection, sorted(chance.sample(range(KEYS), IN_A_TRANSACTION)))
        except BaseException as error:
            self.errors.append(error)
        finally:
            connection.close()

    def _transaction(self, connection: Any, keys: list[int]) -> None:
        cursor = connection.cursor()
        counters = f"{self._world.table}_counters"
        if self._world.engine == "sqlite":
            cursor.execute("BEGIN IMMEDIATE")
        writer = self._world.outbox.on(connection)
        for key in keys:
            cursor.execute(f"UPDATE {counters} SET n = n + 1 WHERE name = 'k{key}'")
            cursor.execute(f"SELECT n FROM {counters} WHERE name = 'k{key}'")
            writer.add(self._topic, str(cursor.fetchone()[0]), key=f"k{key}")
        connection.commit()

    def join(self) -> dict[str, int]:
        """Wait for them all; how many events of each key were committed."""
        for thread in self._threads:
            thread.join()
        if self.errors:
            raise self.errors[0]
        return dict(self._world.do(f"SELECT name, n FROM {self._world.table}_counters"))


@pytest.fixture(params=["postgres", "mariadb", "sqlite"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    if request.param == "sqlite":
        world = sqlite_world(tmp_path)
        world.do("PRAGMA journal_mode = WAL")
    else:
        make = postgres_world if request.param == "postgres" else mariadb_world
        world = make(str(request.getfixturevalue(request.param).url))
    database = world.database()
    database.migrate()
    database.close()
    yield world
    world.do(f"DROP TABLE IF EXISTS {world.table}_counters")
    world.remove()


@pytest.mark.timeout(SECONDS + 60)
def test_killed_and_frozen_relays_lose_nothing_and_keep_the_order(world: World, valkey: Any) -> None:
    """Whatever happens to relays, a consumer that goes by ids sees every event once, and each key's in order."""
    place = OnRedis(valkey.url)
    relays = Relays(world, valkey.url, seed=5)
    try:
        writers = Writers(world, place.topic)
        with place.client as client:
            for number in range(TROUBLES):
                goal = EVENTS * (number + 1) // (TROUBLES + 1)
                wait_until(
                    lambda goal=goal: client.xlen(place.topic) >= goal or writers.errors, seconds=SECONDS
                )
                relays.trouble()
        committed = writers.join()
        database = world.database()
        wait_until(lambda: database.lag().waiting == 0, seconds=SECONDS, what="The end of the outbox")
        assert database.lag().dead == 0
        database.close()
        assert set(relays.end()) <= {0, -signal.SIGTERM}  # one had not begun yet
    finally:
        relays.kill()
    with place.client as client:
        entries = [entry for _, entry in client.xrange(place.topic)]
    first_seen = {
        entry[b"id"]: (entry[b"key"].decode(), int(entry[b"payload"])) for entry in reversed(entries)
    }
    by_key: dict[str, list[int]] = {key: [] for key in committed}
    for id in dict.fromkeys(entry[b"id"] for entry in entries):
        key, number = first_seen[id]
        by_key[key].append(number)
    assert by_key == {key: list(range(1, count + 1)) for key, count in committed.items()}
    assert sum(committed.values()) == EVENTS // WRITERS // IN_A_TRANSACTION * WRITERS * IN_A_TRANSACTION
