"""The SQLite store and its file: what it refuses, what it survives, what it writes."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.integration.sqlite_helpers import (
    claim,
    claim_of,
    commits_in,
    connections_opened,
    files_in,
    open_files,
    output_of,
    read_beside_a_write,
    write_lock,
)

from effectonce import Message, Policy, Receiver
from effectonce._blocking import run
from effectonce._records import Completion, Ending, State, Verdict
from effectonce.errors import (
    EffectOnceError,
    InProgress,
    ResultUnavailable,
    StoreError,
    StoreMismatch,
    StoreUnavailable,
    UsageError,
)
from effectonce.stores import open_store
from effectonce.stores._sqlite_file import LOG_ROOM, SQL
from effectonce.stores.sqlite import PERFORM, PURGE_EVERY, SQLiteStore
from effectonce.testing.clocks import ManualClock

LINUX = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="looks at /proc/self/fd")
NOBODY_UID = 65534


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "effects.db"


@pytest.fixture
def store(path: Path) -> Iterator[SQLiteStore]:
    with SQLiteStore(path, busy_timeout=0.05) as store:
        assert isinstance(store, SQLiteStore)
        yield store


def must_not_run(_: Message) -> None:
    raise AssertionError("the handler ran")


# What is not ours is left alone.


def refused_untouched(path: Path, error: type[StoreError]) -> StoreError:
    """Check that a file is refused, without a byte of it or a file beside it changed, and let go of."""
    before, beside = path.read_bytes(), files_in(path.parent)
    with pytest.raises(error) as refused:
        SQLiteStore(path)
    assert path.read_bytes() == before
    assert files_in(path.parent) == beside
    assert str(path) in str(refused.value)
    return refused.value


def test_a_newer_schema_is_refused(path: Path) -> None:
    """A file that a newer effectonce wrote is not opened, not downgraded, and says what to do."""
    SQLiteStore(path).close()
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("UPDATE effectonce_meta SET value = 99 WHERE name = 'schema'")
    assert "99" in str(refused_untouched(path, StoreMismatch))


def test_another_programs_database_is_refused(path: Path) -> None:
    """A database with somebody else's tables is not ours to add to."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("CREATE TABLE customers (name TEXT)")
        other.execute("INSERT INTO customers VALUES ('Ada')")
    assert "customers" in str(refused_untouched(path, StoreMismatch))


def test_a_file_that_is_no_database_is_refused(path: Path) -> None:
    """Text, a picture, anything else: it stays what it is."""
    path.write_bytes(b"Dear diary, " * 1000)
    refused_untouched(path, StoreMismatch)


@pytest.mark.parametrize("damage", ["overwritten", "cut off"])
def test_a_corrupt_file_is_refused(path: Path, damage: str) -> None:
    """Whether it shows on opening or later: a damaged file is a store error, and no handler runs on its word."""
    with SQLiteStore(path) as store:
        for number in range(200):
            claim(store, f"key {number:03}" + "x" * 200)
    whole = path.read_bytes()
    junk = b"\xa5" * (len(whole) - 4096)
    path.write_bytes(whole[:4096] + junk if damage == "overwritten" else whole[: len(whole) // 2 - 100])
    with pytest.raises(StoreMismatch):
        for number in range(200):
            with Receiver(SQLiteStore(path)) as receiver:
                receiver.process(Message(id=f"{number}"), must_not_run)


@pytest.mark.parametrize("column", ["state = 77", "state = -1", "owner = zeroblob(0), state = 5"])
def test_a_record_that_makes_no_sense_is_a_store_error(path: Path, column: str) -> None:
    """A record that this effectonce can't read is said to be so, not guessed at."""
    with SQLiteStore(path) as store:
        claim(store, "k")
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute(f"UPDATE effectonce_records SET {column}")
        for verb in (lambda: store.claim(claim_of("k")), lambda: store.get("k"), store.scan, store.stats):
            with pytest.raises(StoreError):
                run(verb())


def test_a_directory_is_refused(tmp_path: Path) -> None:
    """A directory is not a file; the error names one that would do."""
    with pytest.raises(StoreMismatch, match=r"effects\.db"):
        SQLiteStore(tmp_path)
    assert files_in(tmp_path) == []


def test_a_name_that_is_no_utf_8_is_one(tmp_path: Path) -> None:
    """Files have names of bytes; only what no file can be called is refused."""
    with Receiver(tmp_path / os.fsdecode(b"caf\xe9.db")) as receiver:
        assert receiver.process(Message("e-1"), lambda _: "kept").value == "kept"
    with pytest.raises(UsageError, match="name of a file"):
        SQLiteStore(tmp_path / "\ud800.db")


def test_a_path_that_is_too_long_is_a_store_error(tmp_path: Path) -> None:
    """What the system refuses to look at is an error of the tree, with advice."""
    with pytest.raises(StoreUnavailable, match="Check that the path exists"):
        SQLiteStore(tmp_path / ("x" * 300) / "effects.db")


def test_a_missing_directory_is_not_made(tmp_path: Path) -> None:
    """A path whose directory does not exist is more likely a mistake than a wish."""
    with pytest.raises(StoreUnavailable, match="nowhere"):
        SQLiteStore(tmp_path / "nowhere" / "effects.db")
    assert files_in(tmp_path) == []


@LINUX
@pytest.mark.parametrize("content", [b"", b"no database " * 500, b"SQLite format 3\x00" + b"\xff" * 8000])
def test_a_failed_opening_leaves_no_connection(path: Path, content: bytes) -> None:
    """When a store can't be opened, the file is let go of at once."""
    path.write_bytes(content)
    if not content:
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("CREATE TABLE customers (name TEXT)")
    with pytest.raises(StoreMismatch) as refused:
        SQLiteStore(path)
    assert open_files(path) == []
    del refused


READ_ONLY = """
import os, sys
from pathlib import Path
from effectonce import Message, Receiver
from effectonce.errors import StoreUnavailable
from effectonce.stores.sqlite import SQLiteStore
import effectonce.stores._handover, effectonce._asyncio, sqlite3

what, path, uid = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
if what == "file":
    path.chmod(0o444)
    path.parent.chmod(0o777)
else:
    path.parent.chmod(0o000 if what == "closed directory" else 0o555)
if os.getuid() == 0:
    os.setuid(uid)
ran = []
try:
    with Receiver(SQLiteStore(path)) as receiver:
        receiver.process(Message(id="e-1"), ran.append)
except StoreUnavailable as error:
    print("refused", ran, path.name in str(error))
"""


@pytest.mark.parametrize("what", ["file", "directory", "empty directory", "closed directory"])
def test_what_may_not_be_written_is_refused(what: str) -> None:
    """A read-only file or directory is a store error, and no handler runs without a claim."""
    with tempfile.TemporaryDirectory() as directory:  # not tmp_path: nobody may look into that
        path = Path(directory) / "effects.db"
        if what != "empty directory":
            SQLiteStore(path).close()
        content = path.read_bytes() if path.exists() else None
        assert output_of(READ_ONLY, what, path, NOBODY_UID) == "refused [] True\n"
        assert (path.read_bytes() if path.exists() else None) == content
        Path(directory).chmod(0o755)


# A store that can't write is an error, never a silent run.


REMOVALS = {
    "removed": Path.unlink,
    "under a file": lambda path: path.parent.rename(f"{path.parent}-moved") and path.parent.touch(),
    "moved": lambda path: path.rename(path.with_name("elsewhere.db")),
    "replaced": lambda path: path.with_name("backup.db").replace(path),
    "without its log": lambda path: path.with_name(path.name + "-wal").unlink(),
    "without its log's index": lambda path: path.with_name(path.name + "-shm").unlink(),
}


@pytest.mark.parametrize("how", REMOVALS)
def test_a_file_that_is_taken_away_runs_nothing_more(path: Path, how: str) -> None:
    """Another process would find no file or another one and do everything again: claims are refused within a second."""
    clock = ManualClock()
    with Receiver(SQLiteStore(path, clock=clock)) as receiver:
        receiver.process(Message("e-1"), lambda _: "first")
        with (
            closing(sqlite3.connect(path)) as source,
            closing(sqlite3.connect(path.with_name("backup.db"))) as copy,
        ):
            source.backup(copy)
        REMOVALS[how](path)
        clock.advance(1)
        for _ in range(2):
            with pytest.raises(StoreMismatch, match="removed or replaced"):
                receiver.process(Message("e-2"), lambda _: pytest.fail("ran"))


def test_a_file_that_comes_back_is_used_again(path: Path) -> None:
    """What was moved and put back is the same file."""
    clock = ManualClock()
    with Receiver(SQLiteStore(path, clock=clock)) as receiver:
        receiver.process(Message("e-1"), lambda _: "first")
        away = path.rename(path.with_name("elsewhere.db"))
        clock.advance(1)
        with pytest.raises(StoreMismatch):
            receiver.process(Message("e-2"), lambda _: pytest.fail("ran"))
        away.rename(path)
        assert receiver.process(Message("e-2"), lambda _: "second").value == "second"


@LINUX
def test_a_fork_does_not_make_a_new_file(path: Path) -> None:
    """Connections are closed before a fork; afterwards nobody takes another file for the one that is gone."""
    with Receiver(SQLiteStore(path)) as receiver:
        receiver.process(Message("e-1"), lambda _: "first")
        receiver.store.before_fork()  # type: ignore[attr-defined]
        path.unlink()
        receiver.store.after_fork(in_child=False)  # type: ignore[attr-defined]
        with pytest.raises(StoreMismatch, match="removed or replaced"):
            receiver.process(Message("e-1"), lambda _: pytest.fail("ran"))
    assert not path.exists()


@LINUX
def test_a_log_that_ends_with_its_connections_is_not_missed(path: Path) -> None:
    """The last connection takes the log with it, before a fork too; the next one makes another."""
    clock = ManualClock()
    with Receiver(SQLiteStore(path, clock=clock)) as receiver:
        receiver.process(Message("e-1"), lambda _: "first")
        receiver.store.before_fork()  # type: ignore[attr-defined]
        assert not path.with_name(path.name + "-wal").exists()
        path.with_name("another").touch()  # so that the next log gets another number
        receiver.store.after_fork(in_child=False)  # type: ignore[attr-defined]
        clock.advance(1)
        assert receiver.get(receiver.key_of(Message("e-1"))) is not None
        assert receiver.process(Message("e-2"), lambda _: "second").value == "second"


@pytest.mark.parametrize("times", [1, 3])
def test_a_lack_of_memory_costs_no_answer(path: Path, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """What SQLite has no memory for is tried again: an effect that has happened must not be left without its record."""
    perform, failed = SQLiteStore._perform_completion, list[int]()

    def short_of_memory(*args: Any) -> Any:
        if len(failed) < times:
            failed.append(1)
            raise MemoryError
        return perform(*args)

    monkeypatch.setattr(SQLiteStore, "_perform_completion", short_of_memory)
    monkeypatch.setitem(PERFORM, Completion, short_of_memory)
    with Receiver(SQLiteStore(path)) as receiver:
        assert receiver.process(Message("e-1"), lambda _: "kept").status == "executed"
        assert receiver.process(Message("e-1"), must_not_run).value == "kept"  # type: ignore[func-returns-value]
    assert len(failed) == times


@pytest.mark.parametrize("size", [1, 2])
def test_a_result_that_does_not_fit_is_no_outage(path: Path, size: int) -> None:
    """SQLite has room for a gigabyte in one place: what is longer is done, can't be replayed, and costs no other."""
    store = SQLiteStore(path)
    store._writing().setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 5000)
    messages = [Message("long"), Message("short")]

    def handler(message: Message) -> str:
        return "x" * 6000 if message.id == "long" else "short"

    with Receiver(store) as receiver:
        first = receiver.process_batch(messages, handler, size=size)
        assert [outcome.status for outcome in first] == ["executed"] * 2
        again = receiver.process_batch(messages, must_not_run, size=size)
        assert isinstance(again[0].error, ResultUnavailable)
        assert again[1].value == "short"


def test_a_lock_held_too_long_is_refused(store: SQLiteStore, path: Path) -> None:
    """When another process holds the write lock beyond busy_timeout, the call fails and its handler never runs."""
    with Receiver(store) as receiver, write_lock(path):
        with pytest.raises(StoreUnavailable, match="lock"):
            receiver.process(Message(id="e-1"), must_not_run)
        with pytest.raises(StoreUnavailable):
            claim(store, "k")


def test_a_lock_does_not_stop_duplicates(store: SQLiteStore, path: Path) -> None:
    """What is already known is answered while another process writes."""
    with Receiver(store) as receiver:
        receiver.process(Message(id="e-1"), lambda _: "first")
        with write_lock(path):
            assert receiver.process(Message(id="e-1"), must_not_run).value == "first"


def test_after_a_lock_everything_goes_on(store: SQLiteStore, path: Path) -> None:
    """A refused claim left nothing behind: the next one is the first attempt."""
    with write_lock(path), pytest.raises(StoreUnavailable):
        claim(store, "k")
    assert claim(store, "k").verdict is Verdict.CLAIMED


class Disk:
    """Says how large the database of a store may become."""

    def __init__(self, connections: list[sqlite3.Connection]) -> None:
        self._connections = connections

    def fill_up(self) -> None:
        """Let it not grow any more."""
        (pages,) = self._connections[0].execute("PRAGMA page_count").fetchone()
        self._limit(pages)

    def make_room(self) -> None:
        self._limit(1_000_000)

    def _limit(self, pages: int) -> None:
        for connection in self._connections:
            connection.execute(f"PRAGMA max_page_count = {pages}")


@pytest.fixture
def limited(path: Path) -> Iterator[tuple[SQLiteStore, Disk]]:
    """A store, and the disk it is on."""
    with connections_opened() as opened, SQLiteStore(path) as store:
        assert isinstance(store, SQLiteStore)
        yield store, Disk(opened)


def test_a_full_disk_refuses_new_claims(limited: tuple[SQLiteStore, Disk]) -> None:
    """When a claim can't be written its handler does not run; with room again, it does."""
    store, disk = limited
    ran: list[str] = []
    messages = [Message(id=f"{number:04}" + "x" * 200) for number in range(1000)]
    with Receiver(store) as receiver:
        disk.fill_up()
        done = 0
        with pytest.raises(StoreUnavailable, match="full"):
            for message in messages:
                receiver.process(message, lambda m: ran.append(m.id))
                done += 1
        assert ran == [message.id for message in messages[:done]]
        disk.make_room()
        assert receiver.process(messages[done], lambda m: ran.append(m.id)).status == "executed"
        assert len(ran) == done + 1


def test_a_full_disk_after_the_effect_keeps_the_claim(limited: tuple[SQLiteStore, Disk]) -> None:
    """A result that can't be written is an error, the claim stays, and a retry does not run the effect again."""
    store, disk = limited
    ran: list[str] = []

    def handler(message: Message) -> str:
        ran.append(message.id)
        disk.fill_up()
        return "x" * 500_000

    with Receiver(store, policy=Policy(busy="reject"), breaker=None) as receiver:
        with pytest.raises(StoreUnavailable, match="has run"):
            receiver.process(Message(id="e-1"), handler)
        for _ in range(3):
            with pytest.raises(InProgress):
                receiver.process(Message(id="e-1"), handler)
        assert ran == ["e-1"]
        disk.make_room()
        # The keeper carries the result home.
        run(receiver._keeper.tick(store, receiver.flow.monotonic() + 60.0))
        replayed = receiver.process(Message(id="e-1"), handler)
        assert (replayed.status, replayed.value) == ("replayed", "x" * 500_000)
        assert ran == ["e-1"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one mebibyte."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = sys.platform == "linux" and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True, check=False
    )
    if not mounted or mounted.returncode:
        pytest.skip(
            "mounting a small file system needs Linux and root; max_page_count stands in for it above"
        )
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_is_really_full(small_disk: Path) -> None:
    """With no byte left on the device, claims are refused and nothing is lost; with room again, all goes on."""
    ran: list[str] = []
    path, filler = small_disk / "effects.db", small_disk / "filler"
    with Receiver(SQLiteStore(path)) as receiver:
        receiver.process(Message(id="before"), lambda m: ran.append(m.id))
        with pytest.raises(OSError, match="No space"), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        with pytest.raises(StoreUnavailable):
            for number in range(1000):
                receiver.process(Message(id=f"{number:04}" + "x" * 200), lambda m: ran.append(m.id))
        ran_before = list(ran)
        assert receiver.process(Message(id="before"), must_not_run).status == "replayed"
        filler.unlink()
        assert receiver.process(Message(id="after"), lambda m: ran.append(m.id)).status == "executed"
        assert ran == [*ran_before, "after"]
        assert len(ran) == len(set(ran))
    with closing(sqlite3.connect(path)) as other:
        assert other.execute("PRAGMA integrity_check").fetchone() == ("ok",)


# What is written, and how safely.


@pytest.mark.parametrize(
    ("url", "level"), [("?durability=full", 2), ("?durability=normal", 1), ("?durability=off", 0), ("", 2)]
)
def test_durability_is_set_on_every_connection(path: Path, url: str, level: int) -> None:
    """The promise of ``durability=`` is SQLite's own setting, on whichever connection writes; the journal is a WAL."""
    with connections_opened() as opened, open_store(f"sqlite:///{path}{url}") as store:
        assert isinstance(store, SQLiteStore)
        claim(store, "k")
        read_beside_a_write(store, "k")
        assert len(opened) > 1
        for connection in opened:
            assert connection.execute("PRAGMA synchronous").fetchone() == (level,)
            assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_duplicates_write_nothing(path: Path) -> None:
    """Replays, busy answers and mismatches are read: nothing is committed and the files do not grow."""
    with connections_opened() as opened, SQLiteStore(path) as store:
        held = claim(store, "done").record
        assert held is not None
        done = Completion("done", held.owner, held.fence, State.COMPLETED, b"result", 3600.0)
        assert run(store.complete(done)) is Ending.DONE
        claim(store, "running")

        def written() -> list[int]:
            sizes = [file.stat().st_size for file in sorted(path.parent.iterdir())]
            return [*sizes, commits_in(path), *(connection.total_changes for connection in opened)]

        before = written()
        for _ in range(50):
            assert claim(store, "done").verdict is Verdict.REPLAY
            assert claim(store, "running").verdict is Verdict.BUSY
            assert claim(store, "done", fingerprint=b"other").verdict is Verdict.MISMATCH
            assert claim(store, "unknown", may_create=False).verdict is Verdict.LATE
            run(store.get("done"))
            run(store.scan())
            run(store.stats())
        assert written() == before


def test_the_write_ahead_log_does_not_grow_without_bound(store: SQLiteStore, path: Path) -> None:
    """Steady traffic is checkpointed into the file: the log stays a few mebibytes."""
    for number in range(300):
        held = claim(store, f"key {number}").record
        assert held is not None
        result = bytes(50_000)
        run(store.complete(Completion(held.key, held.owner, held.fence, State.COMPLETED, result, 3600.0)))
    assert path.with_name(path.name + "-wal").stat().st_size < 10 << 20


def log_of(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def claim_many(store: SQLiteStore, count: int) -> None:
    for number in range(count):
        assert claim(store, f"key {number}").verdict is Verdict.CLAIMED


def test_a_log_in_use_has_its_room_at_once(store: SQLiteStore, path: Path) -> None:
    """Commits that write over what is there are twice as quick as those that make a file longer."""
    claim_many(store, PURGE_EVERY)
    assert log_of(path).stat().st_size < LOG_ROOM
    assert claim(store, "one more").verdict is Verdict.CLAIMED
    size = log_of(path).stat().st_size
    assert size >= LOG_ROOM
    for number in range(100):
        assert claim(store, f"later {number}").verdict is Verdict.CLAIMED
    assert log_of(path).stat().st_size == size
    with closing(sqlite3.connect(path)) as beside:
        assert beside.execute("SELECT count(*) FROM effectonce_records").fetchone() == (PURGE_EVERY + 101,)
        assert beside.execute("SELECT name FROM effectonce_meta WHERE name = 'room'").fetchall() == []
        assert beside.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_log_that_is_never_waited_for_needs_no_room(path: Path) -> None:
    """Without a sync for each commit nothing is gained."""
    with closing(SQLiteStore(path, durability="normal")) as store:
        claim_many(store, PURGE_EVERY + 2)
        assert log_of(path).stat().st_size < LOG_ROOM


def test_a_disk_that_is_nearly_full_is_left_alone(
    store: SQLiteStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room that may be needed for records is not taken for speed."""
    nearly_full = shutil.disk_usage(path.parent)._replace(free=LOG_ROOM * 10)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: nearly_full)
    claim_many(store, PURGE_EVERY + 2)
    assert log_of(path).stat().st_size < LOG_ROOM


def test_room_that_can_not_be_had_harms_nobody(
    store: SQLiteStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is for speed alone: claims go on, each with a commit of its own."""
    monkeypatch.setitem(SQL, "room", "INSERT INTO nowhere VALUES (?)")
    claim_many(store, PURGE_EVERY + 2)
    assert log_of(path).stat().st_size < LOG_ROOM
    writer = store._writer
    assert writer is not None
    assert not writer.in_transaction
    assert writer.execute("PRAGMA cache_size").fetchone() != (10,)


# Opening and closing


@LINUX
def test_close_lets_go_of_everything(path: Path) -> None:
    """After close() no descriptor and no thread is left, in whichever colour and from how many threads it was used."""
    import asyncio

    store = SQLiteStore(path)
    verbs = store.for_asyncio()

    async def use() -> None:
        await asyncio.gather(*(verbs.claim(claim_of(f"key {number}")) for number in range(8)))

    asyncio.run(use())
    threads = [threading.Thread(target=claim, args=(store, f"thread {number}")) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert open_files(path) != []
    store.close()
    assert open_files(path) == []
    assert [t.name for t in threading.enumerate() if t.name.startswith("effectonce-store")] == []
    assert files_in(path.parent) == [path.name]
    with pytest.raises(StoreUnavailable, match="closed"):
        asyncio.run(verbs.claim(claim_of("too late")))


def test_a_closed_store_begins_no_thread(path: Path) -> None:
    """The first loop that asks comes after close(): it is refused, and nobody is left waiting for it."""
    import asyncio

    store = SQLiteStore(path)
    store.close()
    before = threading.active_count()
    with pytest.raises(StoreUnavailable, match="closed"):
        asyncio.run(store.for_asyncio().claim(claim_of("too late")))
    assert threading.active_count() == before


@LINUX
def test_threads_that_end_leave_no_connection(path: Path) -> None:
    """A server that makes a thread for each request does not run out of descriptors."""
    with SQLiteStore(path) as store:
        assert isinstance(store, SQLiteStore)
        claim(store, "k")
        for _ in range(50):
            read_beside_a_write(store, "k")
        assert len(open_files(path)) < 20


def test_a_path_may_be_relative(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file without a directory is in the working directory, also after that has changed."""
    monkeypatch.chdir(path.parent)
    with SQLiteStore(path.name) as store:
        assert isinstance(store, SQLiteStore)
        claim(store, "k")
        (path.parent / "elsewhere").mkdir()
        monkeypatch.chdir(path.parent / "elsewhere")
        assert claim(store, "k").verdict is Verdict.BUSY
        assert read_beside_a_write(store, "k") is not None
    assert path.exists()


@pytest.mark.parametrize(
    "name", ["with blank.db", "per%20cent.db", "què?.db", "#hash.db", "file:x.db", "a;b'c.db"]
)
def test_any_file_name_will_do(tmp_path: Path, name: str) -> None:
    """A path is a path: nothing in it is taken for a URI."""
    with SQLiteStore(tmp_path / name) as store:
        claim(store, "k")
    assert files_in(tmp_path) == [name]


@pytest.mark.parametrize(
    "url",
    [
        "sqlite://",
        "sqlite:///",
        "sqlite:///:memory:",
        "sqlite://effects.db",
        "sqlite:///e.db?durability=maybe",
        "sqlite:///e.db?busy_timeout=soon",
        "sqlite:///e.db?wal=off",
    ],
)
def test_a_url_that_makes_no_sense_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    """Nothing is guessed, and no file is made."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError):
        open_store(url)
    assert files_in(tmp_path) == []


def test_errors_are_of_the_tree(path: Path) -> None:
    """Whatever SQLite says comes as an EffectOnceError that keeps the cause."""
    path.write_bytes(b"no database " * 500)
    with pytest.raises(EffectOnceError) as refused:
        SQLiteStore(path)
    assert isinstance(refused.value.__cause__, sqlite3.Error)


def test_a_transaction_that_a_signal_left_open_swallows_no_write(tmp_path: Path) -> None:
    """An answer means that the write is on the disk, also after an exception struck between BEGIN and COMMIT."""
    with SQLiteStore(tmp_path / "effects.db") as store:
        store._writing().execute("BEGIN IMMEDIATE")
        assert claim(store, "k").verdict is Verdict.CLAIMED
        with SQLiteStore(tmp_path / "effects.db") as other:
            assert claim(other, "k").verdict is Verdict.BUSY
