"""A write-ahead log that ends too early, as a power cut may leave it: what opens is a prefix of what was acknowledged.

This cuts, zeroes and damages the end of the log, which is what a disk that keeps its order leaves of writes that were
on their way. It can't show that a disk which has said "synced" has told the truth, nor what one does that writes out
of order.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import count, pairwise
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest

from effectonce._blocking import run
from effectonce._records import Claim, Completion, Ending, Record, Renewal, State, Verdict
from effectonce.stores.sqlite import SQLiteStore

NOW = 1_700_000_000.0
LEASE, KEEP = 60.0, 86_400.0
HEADER, FRAME = 32, 24 + 4096
"""Bytes of the log's header, and of a frame with its page."""


class Acknowledged(NamedTuple):
    """How long the log was when a command was answered, and what the store held then."""

    length: int
    records: list[Record]


class History(NamedTuple):
    """A database file, the whole log that belongs to it, and what was acknowledged when."""

    database: bytes
    log: bytes
    answers: list[Acknowledged]

    def at(self, length: int) -> list[Record]:
        """What must be there when so many bytes of the log are sound: no less and no more."""
        return [answer.records for answer in self.answers if answer.length <= length][-1]


def commands(store: SQLiteStore) -> Iterator[object]:
    """A little of everything that writes."""

    def claim(name: str) -> Claim:
        return Claim(name, name.encode() * 16, b"asked", LEASE, KEEP)

    for name in "abc":
        granted = run(store.claim(claim(name)))
        assert granted.verdict is Verdict.CLAIMED
        assert granted.record is not None
        yield granted
        yield run(store.renew(Renewal(name, name.encode() * 16, granted.record.fence, LEASE, KEEP)))
        state = State.ABSENT if name == "b" else State.COMPLETED
        result = None if name == "b" else name.encode() * 3000
        yield run(
            store.complete(Completion(name, name.encode() * 16, granted.record.fence, state, result, KEEP))
        )
    yield run(store.claim_many([claim(name) for name in "defgh"]))
    yield run(
        store.complete_many([Completion(n, n.encode() * 16, 1, State.COMPLETED, b"1", KEEP) for n in "dg"])
    )


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> History:
    """Run commands on a store that never gets to a checkpoint, noting after each answer how long the log is."""
    path = tmp_path_factory.mktemp("wal") / "effects.db"
    log = path.with_name("effects.db-wal")
    SQLiteStore(path).close()
    database = path.read_bytes()
    moment = count()  # a renewal at the very moment of its claim would change nothing, and write nothing
    with closing(SQLiteStore(path, clock=lambda: NOW + next(moment) / 1000)) as store:
        answers = [Acknowledged(0, [])]
        for answer in commands(store):
            assert answer not in (False, Ending.FENCED)
            answers.append(Acknowledged(log.stat().st_size, run(store.scan())))
        assert path.read_bytes() == database, "the log is the only witness"
        return History(database, log.read_bytes(), answers)


def recovered(directory: Path, database: bytes, log: bytes) -> list[Record]:
    """What a store finds in these files. It must be sound, and able to go on."""
    path = directory / "effects.db"
    path.write_bytes(database)
    path.with_name("effects.db-wal").write_bytes(log)
    with closing(SQLiteStore(path, clock=lambda: NOW, durability="off")) as store:
        found = run(store.scan())
        granted = run(store.claim(Claim("next", b"owner", b"", LEASE, KEEP)))
        assert granted.verdict is Verdict.CLAIMED
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    path.unlink()
    return found


def cuts(log: bytes) -> list[int]:
    """Every border of a frame with its neighbours, and bytes anywhere between."""
    borders = range(HEADER, len(log) + 1, FRAME)
    near = {border + by for border in borders for by in (-1, 0, 1, 24, FRAME // 2)}
    anywhere = Random(3).choices(range(len(log)), k=60)
    return sorted(cut for cut in {0, 1, *near, *anywhere} if cut <= len(log))


def test_every_answer_was_in_the_log(history: History) -> None:
    """Each answer came after its commit was written: the log grew first, by whole frames."""
    lengths = [answer.length for answer in history.answers[1:]]
    assert lengths == sorted(set(lengths))
    assert all((length - HEADER) % FRAME == 0 for length in lengths)
    assert lengths[-1] == len(history.log)


DAMAGES: dict[str, Callable[[bytes, int], bytes]] = {
    "cut off": lambda log, at: log[:at],
    "zeroed": lambda log, at: log[:at] + bytes(len(log) - at),
    "damaged": lambda log, at: log[:at] + bytes(255 - byte for byte in log[at : at + 8]) + log[at + 8 :],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_torn_log_gives_a_prefix_of_history(tmp_path: Path, history: History, damage: str) -> None:
    """All that was acknowledged before the damage is there, and nothing of what came after, not even half a batch."""
    for at in cuts(history.log):
        log = DAMAGES[damage](history.log, at)
        # Zeroes that were zeroes before are no damage; it begins with the first byte that has changed.
        sound = len(history.log) - len(history.log[at:].lstrip(b"\0")) if damage == "zeroed" else at
        assert recovered(tmp_path, history.database, log) == history.at(sound), f"{damage} at {at}"


def test_what_made_room_in_the_log_is_no_history(tmp_path: Path) -> None:
    """Pages that were never committed lie behind every commit in a log that had its room beforehand.

    A commit that is cut off before them, at its first byte, in its middle or at its last, is as if it had never been.
    """
    path, elsewhere = tmp_path / "effects.db", tmp_path / "recovered"
    elsewhere.mkdir()
    SQLiteStore(path).close()
    database, log = path.read_bytes(), path.with_name("effects.db-wal")
    moment = count()
    with closing(SQLiteStore(path, clock=lambda: NOW + next(moment) / 1000)) as store:
        store._file.make_room(store._writing())
        moments: list[tuple[bytes, list[Record]]] = [(log.read_bytes(), [])]
        for _ in commands(store):
            moments.append((log.read_bytes(), run(store.scan())))
        assert len({len(written) for written, _ in moments}) == 1, "it had its room"
    for (before, known), (after, learned) in pairwise(moments):
        changed = [
            place
            for place in range(0, len(after), 4)
            if after[place : place + 4] != before[place : place + 4]
        ]
        for cut in (changed[0], changed[len(changed) // 2], changed[-1]):
            assert recovered(elsewhere, database, after[:cut] + before[cut:]) == known
        assert recovered(elsewhere, database, after) == learned
