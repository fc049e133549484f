"""The SQLite store and its file: what it refuses, what it survives, what it writes."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.integration.sqlite_helpers import claim, claim_of, open_files, output_of, write_lock

from effectonce import Message, Policy, Receiver
from effectonce._blocking import run
from effectonce._records import Completion, Ending, State, Verdict
from effectonce.errors import (
    EffectOnceError,
    InProgress,
    StoreError,
    StoreMismatch,
    StoreUnavailable,
    UsageError,
)
from effectonce.stores import open_store
from effectonce.stores.sqlite import SQLiteStore

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


def writer_of(store: SQLiteStore) -> sqlite3.Connection:
    """The connection that writes; the next verb opens it if need be."""
    claim(store, "opens the connection")
    assert store._writer is not None
    return store._writer


def must_not_run(_: Message) -> None:
    raise AssertionError("the handler ran")


# What is not ours is left alone.


def refused_untouched(path: Path, error: type[StoreError]) -> StoreError:
    """Check that a file is refused, without a byte of it or a file beside it changed, and let go of."""
    before, beside = path.read_bytes(), sorted(os.listdir(path.parent))
    with pytest.raises(error) as refused:
        SQLiteStore(path)
    assert path.read_bytes() == before
    assert sorted(os.listdir(path.parent)) == beside
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
        for verb in (store.claim(claim_of("k")), store.get("k"), store.scan(), store.stats()):
            with pytest.raises(StoreError):
                run(verb)


def test_a_directory_is_refused(tmp_path: Path) -> None:
    """A directory is not a file; the error names one that would do."""
    with pytest.raises(StoreMismatch, match=r"effects\.db"):
        SQLiteStore(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_directory_is_not_made(tmp_path: Path) -> None:
    """A path whose directory does not exist is more likely a mistake than a wish."""
    with pytest.raises(StoreUnavailable, match="nowhere"):
        SQLiteStore(tmp_path / "nowhere" / "effects.db")
    assert list(tmp_path.iterdir()) == []


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
    path.parent.chmod(0o555)
if os.getuid() == 0:
    os.setuid(uid)
ran = []
try:
    with Receiver(SQLiteStore(path)) as receiver:
        receiver.process(Message(id="e-1"), ran.append)
except StoreUnavailable as error:
    print("refused", ran, path.name in str(error))
"""


@pytest.mark.parametrize("what", ["file", "directory", "empty directory"])
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


def fill_up(store: SQLiteStore) -> None:
    """Let the database not grow any more."""
    writer = writer_of(store)
    (pages,) = writer.execute("PRAGMA page_count").fetchone()
    writer.execute(f"PRAGMA max_page_count = {pages}")


def make_room(store: SQLiteStore) -> None:
    writer_of(store).execute("PRAGMA max_page_count = 1000000")


def test_a_full_disk_refuses_new_claims(store: SQLiteStore) -> None:
    """When a claim can't be written its handler does not run; with room again, it does."""
    ran: list[str] = []
    messages = [Message(id=f"{number:04}" + "x" * 200) for number in range(1000)]
    with Receiver(store) as receiver:
        fill_up(store)
        done = 0
        with pytest.raises(StoreUnavailable, match="full"):
            for message in messages:
                receiver.process(message, lambda m: ran.append(m.id))
                done += 1
        assert ran == [message.id for message in messages[:done]]
        make_room(store)
        assert receiver.process(messages[done], lambda m: ran.append(m.id)).status == "executed"
        assert len(ran) == done + 1


def test_a_full_disk_after_the_effect_keeps_the_claim(store: SQLiteStore) -> None:
    """A result that can't be written is an error, the claim stays, and a retry does not run the effect again."""
    ran: list[str] = []

    def handler(message: Message) -> str:
        ran.append(message.id)
        fill_up(store)
        return "x" * 500_000

    with Receiver(store, policy=Policy(busy="reject")) as receiver:
        with pytest.raises(StoreUnavailable, match="has run"):
            receiver.process(Message(id="e-1"), handler)
        for _ in range(3):
            with pytest.raises(InProgress):
                receiver.process(Message(id="e-1"), handler)
        assert ran == ["e-1"]
        make_room(store)
        run(receiver._keeper.tick(store, receiver.flow.monotonic() + 60.0))  # the keeper carries the result home
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
        pytest.skip("mounting a small file system needs Linux and root; max_page_count stands in for it above")
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


@pytest.mark.parametrize(("durability", "level"), [("full", 2), ("normal", 1), ("off", 0)])
def test_durability_is_set_on_the_connections(path: Path, durability: str, level: int) -> None:
    """The promise of ``durability=`` is SQLite's own setting, on whichever connection writes; the journal is a WAL."""
    with open_store(f"sqlite:///{path}?durability={durability}") as store:
        assert isinstance(store, SQLiteStore)
        for connection in (writer_of(store), store._reader()):
            assert connection.execute("PRAGMA synchronous").fetchone() == (level,)
            assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_durability_is_full_unless_relaxed(store: SQLiteStore) -> None:
    """Without a word about it, an answer survives power loss."""
    assert writer_of(store).execute("PRAGMA synchronous").fetchone() == (2,)


def test_duplicates_write_nothing(store: SQLiteStore, path: Path) -> None:
    """Replays, busy answers and mismatches are read: no transaction begins and the files do not grow."""
    held = claim(store, "done").record
    assert held is not None
    done = Completion("done", held.owner, held.fence, State.COMPLETED, b"result", 3600.0)
    assert run(store.complete(done)) is Ending.DONE
    claim(store, "running")
    statements: list[str] = []
    writer = writer_of(store)
    wal = path.with_name(path.name + "-wal")
    before = writer.total_changes, wal.stat().st_size, path.stat().st_size
    writer.set_trace_callback(statements.append)
    for _ in range(50):
        assert claim(store, "done").verdict is Verdict.REPLAY
        assert claim(store, "running").verdict is Verdict.BUSY
        assert claim(store, "done", fingerprint=b"other").verdict is Verdict.MISMATCH
        run(store.get("done"))
        run(store.scan())
    writer.set_trace_callback(None)
    assert (writer.total_changes, wal.stat().st_size, path.stat().st_size) == before
    assert {statement.split()[0] for statement in statements} == {"SELECT"}


def test_the_write_ahead_log_does_not_grow_without_bound(store: SQLiteStore, path: Path) -> None:
    """Steady traffic is checkpointed into the file: the log stays a few mebibytes."""
    for number in range(300):
        held = claim(store, f"key {number}").record
        assert held is not None
        result = bytes(50_000)
        run(store.complete(Completion(held.key, held.owner, held.fence, State.COMPLETED, result, 3600.0)))
    assert path.with_name(path.name + "-wal").stat().st_size < 10 << 20


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
    assert os.listdir(path.parent) == [path.name]


@LINUX
def test_threads_that_end_leave_no_connection(path: Path) -> None:
    """A server that makes a thread for each request does not run out of descriptors."""
    with SQLiteStore(path) as store:
        assert isinstance(store, SQLiteStore)
        claim(store, "k")
        assert store._group.try_lead()  # somebody writes: everyone else reads on a connection of their own
        for _ in range(50):
            thread = threading.Thread(target=lambda: run(store.get("k")))
            thread.start()
            thread.join()
        open_now = len(open_files(path))
        store._group.hand_over()
    assert open_now < 20


def test_a_path_may_be_relative(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file without a directory is in the working directory, also after that has changed."""
    monkeypatch.chdir(path.parent)
    with SQLiteStore(path.name) as store:
        claim(store, "k")
        monkeypatch.chdir(path.parent.parent)
        assert claim(store, "k").verdict is Verdict.BUSY
        thread_found: list[object] = []
        thread = threading.Thread(target=lambda: thread_found.append(run(store.get("k"))))
        thread.start()
        thread.join()
        assert thread_found != [None]
    assert path.exists()


@pytest.mark.parametrize("name", ["with blank.db", "per%20cent.db", "què?.db", "#hash.db", "file:x.db", "a;b'c.db"])
def test_any_file_name_will_do(tmp_path: Path, name: str) -> None:
    """A path is a path: nothing in it is taken for a URI."""
    with SQLiteStore(tmp_path / name) as store:
        claim(store, "k")
    assert os.listdir(tmp_path) == [name]


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
def test_a_url_that_makes_no_sense_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Nothing is guessed, and no file is made."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError):
        open_store(url)
    assert os.listdir(tmp_path) == []


def test_errors_are_of_the_tree(path: Path) -> None:
    """Whatever SQLite says comes as an EffectOnceError that keeps the cause."""
    path.write_bytes(b"no database " * 500)
    with pytest.raises(EffectOnceError) as refused:
        SQLiteStore(path)
    assert isinstance(refused.value.__cause__, sqlite3.Error)
