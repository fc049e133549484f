"""The SQLite store shared: by threads through group commit, by event loops, by processes, across a fork."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.integration.sqlite_helpers import (
    Caller,
    claim,
    claim_of,
    commits_in,
    lead,
    let_go,
    open_files,
    output_of,
    python,
    wait_for_leader,
    wait_for_queue,
    write_lock,
)

from effectonce._blocking import run
from effectonce._records import Completion, State, Verdict
from effectonce.errors import StoreError, StoreUnavailable
from effectonce.stores._group import Group
from effectonce.stores.sqlite import SQLiteStore
from effectonce.testing.clocks import wait_until

PROCESSES, KEYS = 4, 200
FORKS = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "effects.db"


@pytest.fixture
def store(path: Path) -> Iterator[SQLiteStore]:
    with SQLiteStore(path) as store:
        assert isinstance(store, SQLiteStore)
        yield store


def write_behind_a_lock(store: SQLiteStore) -> Caller:
    """Start a caller who leads, and waits for the file's write lock that somebody else holds."""
    caller = Caller(lambda: claim(store, "leader"))
    wait_for_leader(store)
    return caller


# Threads: group commit


def test_who_queues_is_written_together(store: SQLiteStore, path: Path) -> None:
    """While one write waits, others queue up; all of them are then written in one transaction."""
    claim(store, "k")
    before = commits_in(path)
    with write_lock(path):
        first = write_behind_a_lock(store)
        others = [Caller(lambda n=n: claim(store, f"key {n}")) for n in range(20)]
        wait_for_queue(store, 20)
    decisions = [caller.answer() for caller in (first, *others)]
    assert {decision.verdict for decision in decisions} == {Verdict.CLAIMED}
    assert [caller.answer().record.key for caller in others] == [f"key {n}" for n in range(20)]
    assert commits_in(path) == before + 2


def test_alone_nobody_waits_for_company(store: SQLiteStore, path: Path) -> None:
    """A single caller's write is a transaction of its own."""
    claim(store, "k")
    before = commits_in(path)
    for number in range(3):
        claim(store, f"key {number}")
    assert commits_in(path) == before + 3


def test_a_failing_command_fails_its_own_caller_only(store: SQLiteStore, path: Path) -> None:
    """One command that can't be written costs nobody else in the same transaction their answer."""
    held = claim(store, "held").record
    assert held is not None
    bad = Completion("held", held.owner, held.fence, State.COMPLETED, object(), 1.0)  # type: ignore[arg-type]
    with write_lock(path):
        first = write_behind_a_lock(store)
        failing = Caller(lambda: run(store.complete(bad)))
        others = [Caller(lambda n=n: claim(store, f"key {n}")) for n in range(5)]
        wait_for_queue(store, 6)
    with pytest.raises(StoreError):
        failing.answer()
    assert {caller.answer().verdict for caller in (first, *others)} == {Verdict.CLAIMED}
    assert run(store.get("held")) == held


def test_an_interrupt_in_the_queue_wedges_nobody(store: SQLiteStore, path: Path) -> None:
    """Ctrl-C takes its own caller out of the queue; the others are served and the store works on."""
    with write_lock(path):
        first = write_behind_a_lock(store)

        def interrupt_when_queued() -> None:
            wait_for_queue(store, 1)
            os.kill(os.getpid(), signal.SIGINT)

        interrupter = Caller(interrupt_when_queued)
        with pytest.raises(KeyboardInterrupt):
            claim(store, "interrupted")
        interrupter.answer()
        after = Caller(lambda: claim(store, "after"))
        wait_for_queue(store, 1)
    assert first.answer().verdict is Verdict.CLAIMED
    assert after.answer().verdict is Verdict.CLAIMED
    assert run(store.get("interrupted")) is None
    assert claim(store, "interrupted").verdict is Verdict.CLAIMED


def test_an_interrupted_heir_passes_the_lead_on(
    store: SQLiteStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C at the very moment a caller gets the lead: the next in the queue leads instead."""
    take = Group._take

    def be_interrupted(group: Group[Any, Any], *args: Any) -> None:
        if threading.current_thread().name == "interrupted":
            raise KeyboardInterrupt
        take(group, *args)

    monkeypatch.setattr(Group, "_take", be_interrupted)
    with write_lock(path):
        first = write_behind_a_lock(store)
        heir = Caller(lambda: claim(store, "heir"), name="interrupted")
        wait_for_queue(store, 1)
        last = Caller(lambda: claim(store, "last"))
        wait_for_queue(store, 2)
    assert first.answer().verdict is Verdict.CLAIMED
    with pytest.raises(KeyboardInterrupt):
        heir.answer()
    assert last.answer().verdict is Verdict.CLAIMED
    assert claim(store, "heir").verdict is Verdict.CLAIMED


def test_an_interrupted_leader_does_not_interrupt_others(path: Path) -> None:
    """Ctrl-C is its own thread's: those it was writing for get an answer or a store error, not a KeyboardInterrupt."""
    armed = threading.Event()

    def clock() -> float:
        if armed.is_set() and threading.current_thread().name == "interrupted":
            raise KeyboardInterrupt
        return time.time()

    with SQLiteStore(path, clock=clock) as store:
        assert isinstance(store, SQLiteStore)
        with write_lock(path):
            first = write_behind_a_lock(store)
            heir = Caller(lambda: claim(store, "heir"), name="interrupted")
            wait_for_queue(store, 1)
            others = [Caller(lambda n=n: claim(store, f"key {n}")) for n in range(4)]
            wait_for_queue(store, 5)
            armed.set()
        assert first.answer().verdict is Verdict.CLAIMED
        with pytest.raises(KeyboardInterrupt):
            heir.answer()
        for caller in others:
            caller.join(20)
            assert caller.error is None or isinstance(caller.error, StoreError)
        assert claim(store, "after").verdict is Verdict.CLAIMED


def test_waiting_for_a_lock_has_one_bound(path: Path) -> None:
    """Every caller waits busy_timeout or a little more for a lock, however many wait with it."""
    with SQLiteStore(path, busy_timeout=0.3) as store, write_lock(path):
        began = time.monotonic()
        callers = [Caller(lambda n=n: claim(store, f"key {n}")) for n in range(32)]
        for caller in callers:
            with pytest.raises(StoreUnavailable, match=r"use receiver\.on\(connection\)"):
                caller.answer()
        assert time.monotonic() - began < 4.0  # each waiting for the one before it would be 32 * 0.3 s


def test_waiting_for_a_lock_has_one_bound_on_an_event_loop(path: Path) -> None:
    """Likewise for tasks: those of one turn of the loop wait together, not one after another."""
    with SQLiteStore(path, busy_timeout=0.3) as store:
        verbs = store.for_asyncio()

        async def all_at_once() -> list[object]:
            claims = (verbs.claim(claim_of(f"key {n}")) for n in range(32))
            return list(await asyncio.gather(*claims, return_exceptions=True))

        with write_lock(path):
            began = time.monotonic()
            answers = asyncio.run(all_at_once())
            took = time.monotonic() - began
        assert {type(answer) for answer in answers} == {StoreUnavailable}
        assert took < 4.0


def test_close_waits_for_who_is_on_the_way(path: Path) -> None:
    """What was submitted before close() is written before the file is closed."""
    store = SQLiteStore(path)
    with write_lock(path):
        callers = [
            write_behind_a_lock(store),
            *(Caller(lambda n=n: claim(store, f"key {n}")) for n in range(4)),
        ]
        wait_for_queue(store, 4)
        closing_it = Caller(store.close)
        assert closing_it.began.wait(20)
    assert [caller.answer().verdict for caller in callers] == [Verdict.CLAIMED] * 5
    closing_it.answer()


def test_close_does_not_overtake_who_is_on_the_way(tmp_path: Path) -> None:
    """Whoever gets the lead first, close() or the first of those who wait: they are served."""
    for number in range(100):
        store = SQLiteStore(tmp_path / f"{number}.db")
        claim(store, "first")
        lead(store)
        callers = [Caller(lambda n=n, store=store: claim(store, f"key {n}")) for n in range(4)]
        wait_for_queue(store, 4)
        closing_it = Caller(store.close)
        wait_until(lambda store=store: store._file.closed, what="The end")
        let_go(store)
        assert [caller.answer().verdict for caller in callers] == [Verdict.CLAIMED] * 4
        closing_it.answer()


def test_close_leaves_nobody_waiting(path: Path) -> None:
    """A caller who was about to queue when the store was closed is served or gets a store error, but does not hang."""
    reading, go_on = threading.Event(), threading.Event()

    def clock() -> float:
        if threading.current_thread().name == "late":
            reading.set()
            assert go_on.wait(20)
        return 2e9

    store = SQLiteStore(path, clock=clock)
    # A claim that a reader finds, and that has to be written to be taken over.
    claim(store, "lapsed", lease=-1.0)
    store._expect_new = False  # as after a duplicate: the next claim looks before it queues
    lead(store)  # somebody writes
    late = Caller(lambda: claim(store, "lapsed"), name="late")
    assert reading.wait(20)
    let_go(store)
    closing_it = Caller(store.close)
    closing_it.join(0.2)  # it may wait for who is on the way, or not
    go_on.set()
    closing_it.answer(5)
    late.join(5)
    assert not late.is_alive()
    assert late.error is None or isinstance(late.error, StoreError)
    assert open_files(path) == []


# Event loops


def test_a_failing_command_fails_its_own_task_only(store: SQLiteStore) -> None:
    """Commands of one turn of a loop travel together, but fail alone."""
    held = claim(store, "held").record
    assert held is not None
    bad = Completion("held", held.owner, held.fence, State.COMPLETED, object(), 1.0)  # type: ignore[arg-type]
    verbs = store.for_asyncio()

    async def together() -> list[object]:
        claims = (verbs.claim(claim_of(f"key {n}")) for n in range(5))
        return list(await asyncio.gather(verbs.complete(bad), *claims, return_exceptions=True))

    failed, *decisions = asyncio.run(together())
    assert isinstance(failed, StoreError)
    assert [decision.verdict for decision in decisions] == [Verdict.CLAIMED] * 5  # type: ignore[attr-defined]


def test_tasks_of_one_turn_are_written_together(store: SQLiteStore, path: Path) -> None:
    """64 tasks that claim at the same time cost one or two transactions, not 64."""
    claim(store, "k")
    before = commits_in(path)
    verbs = store.for_asyncio()

    async def together() -> None:
        await asyncio.gather(*(verbs.claim(claim_of(f"key {n}")) for n in range(64)))

    asyncio.run(together())
    assert commits_in(path) - before <= 2


def test_a_cancelled_task_does_not_stop_its_command(store: SQLiteStore, path: Path) -> None:
    """What was sent is executed: the claim of a cancelled task can be found, and sent again by its owner."""
    verbs, wanted = store.for_asyncio(), claim_of("k")

    async def cancel_while_waiting() -> None:
        with write_lock(path):
            task = asyncio.ensure_future(verbs.claim(wanted))
            await asyncio.to_thread(wait_for_leader, store)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        again = await verbs.claim(wanted)
        assert again.verdict is Verdict.CLAIMED
        assert again.record is not None
        assert (again.record.owner, again.record.attempts) == (wanted.owner, 1)

    asyncio.run(cancel_while_waiting())


def test_event_loops_on_several_threads_share_a_store(store: SQLiteStore) -> None:
    """One store serves any number of loops; a key goes to one of their tasks."""
    verbs, barrier = store.for_asyncio(), threading.Barrier(4)

    async def claim_all() -> list[str]:
        decisions = await asyncio.gather(*(verbs.claim(claim_of(f"key {n}")) for n in range(50)))
        return [d.record.key for d in decisions if d.verdict is Verdict.CLAIMED and d.record]

    def loop() -> list[str]:
        barrier.wait()
        return asyncio.run(claim_all())

    loops = [Caller(loop) for _ in range(4)]
    granted = [key for caller in loops for key in caller.answer()]
    assert sorted(granted) == sorted(f"key {n}" for n in range(50))


# Processes

CONTEND = """
import json, random, sys
from effectonce._blocking import run
from effectonce._records import Claim, Verdict
from effectonce.keys import new_owner
from effectonce.stores.sqlite import SQLiteStore

path, count = sys.argv[1], int(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
keys = [f"key {number}" for number in range(count)]
random.shuffle(keys)
with SQLiteStore(path) as store:
    granted = {}
    for key in keys:
        decision = run(store.claim(Claim(key, new_owner(), b"asked", 3600.0, 3600.0)))
        if decision.verdict is Verdict.CLAIMED:
            granted[key] = decision.record.fence
        elif decision.verdict is not Verdict.BUSY:
            sys.exit(f"{key}: {decision}")
print(json.dumps(granted))
"""


def test_processes_share_a_file(path: Path) -> None:
    """Four processes open one new file at the same moment and want the same 200 keys: each goes to one of them."""
    processes = [python(CONTEND, path, KEYS) for _ in range(PROCESSES)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    granted: list[str] = []
    for process in processes:
        output, complaints = process.communicate(timeout=60)
        assert process.returncode == 0, complaints
        granted += json.loads(output)
    assert sorted(granted) == sorted(f"key {number}" for number in range(KEYS))


def test_opening_waits_for_another_process_that_creates(path: Path) -> None:
    """While another process makes or recovers the file, opening it waits for busy_timeout instead of failing."""
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN EXCLUSIVE")
        opening = Caller(lambda: SQLiteStore(path, busy_timeout=20.0))
        opening.join(0.2)  # long enough to be refused, if it were not to wait
        other.execute("ROLLBACK")
    with opening.answer() as store:
        assert claim(store, "k").verdict is Verdict.CLAIMED


# Forks

FORK = """
import json, os, signal, sys, threading, time
from effectonce import Message, Receiver
from effectonce._blocking import run
from effectonce._records import Claim
from effectonce.keys import new_owner
from effectonce.stores.sqlite import SQLiteStore

path = sys.argv[1]
signal.alarm(40)

def pipe():
    reader, writer = os.pipe()
    return (lambda: os.read(reader, 1)), (lambda: os.write(writer, b"x"))

def child(function):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.alarm(40)
            function()
            code = 0
        finally:
            sys.stdout.flush()
            os._exit(code)
    return lambda: os.waitpid(pid, 0)[1]

def claim(store, key):
    return run(store.claim(Claim(key, new_owner(), b"asked", 3600.0, 3600.0))).verdict.value

def process(receiver, id):
    return receiver.process(Message(id=id), lambda message: f"{message.id} by {os.getpid()}")
"""

FORK_USE = (
    FORK
    + """
receiver = Receiver(SQLiteStore(path))
process(receiver, "before")

def use():
    assert process(receiver, "before").replayed
    assert not process(receiver, "in the child").replayed
    assert process(receiver, "in the child").value.endswith(str(os.getpid()))

waiting = child(use)
assert not process(receiver, "in the parent").replayed
assert waiting() == 0
assert process(receiver, "in the child").replayed
assert process(receiver, "in the parent").replayed
receiver.close()
print("fine")
"""
)

FORK_OUTLIVE = (
    FORK
    + """
receiver = Receiver(SQLiteStore(path))
process(receiver, "before")
wait_for_child, child_is_ready = pipe()
wait_for_parent, parent_is_gone = pipe()

def outlive():
    assert not process(receiver, "early").replayed
    child_is_ready()
    wait_for_parent()
    assert not process(receiver, "late").replayed
    assert process(receiver, "late").replayed

waiting = child(outlive)
wait_for_child()
receiver.close()
parent_is_gone()
assert waiting() == 0
with Receiver(SQLiteStore(path)) as receiver:
    assert process(receiver, "before").replayed
    assert process(receiver, "early").replayed
    assert process(receiver, "late").replayed, "what the child was told is recorded has been lost"
print("fine")
"""
)

FORK_DURING_WRITE = (
    FORK
    + """
writing, go_on = threading.Event(), threading.Event()

def clock():
    if threading.current_thread().name == "writer":
        writing.set()
        go_on.wait(20)
    return time.time()

receiver = Receiver(SQLiteStore(path, clock=clock))
process(receiver, "before")
thread = threading.Thread(target=claim, args=(receiver.store, "by the thread"), name="writer")
thread.start()
writing.wait(20)
threading.Timer(0.2, go_on.set).start()  # a fork may have to wait for the write
waiting = child(lambda: process(receiver, "in the child"))
go_on.set()
thread.join()
assert waiting() == 0
assert process(receiver, "in the child").replayed
receiver.close()
print("fine")
"""
)

FORK_BARE = (
    FORK
    + """
store = SQLiteStore(path)
claim(store, "before")
wait_for_child, child_is_ready = pipe()
wait_for_parent, parent_is_gone = pipe()

def use():
    assert claim(store, "before") == "busy"
    assert claim(store, "early") == "claimed"
    child_is_ready()
    wait_for_parent()
    assert claim(store, "late") == "claimed"

waiting = child(use)
wait_for_child()
assert claim(store, "early") == "busy"
store.close()
parent_is_gone()
assert waiting() == 0
with SQLiteStore(path) as store:
    assert [claim(store, key) for key in ("before", "early", "late")] == ["busy"] * 3
print("fine")
"""
)


@FORKS
@pytest.mark.parametrize(
    "script",
    [FORK_USE, FORK_OUTLIVE, FORK_DURING_WRITE, FORK_BARE],
    ids=["used by both", "parent closes first", "while a thread writes", "without a receiver"],
)
def test_a_forked_child_may_use_its_parents_store(path: Path, script: str) -> None:
    """Parent and child both go on, in any order, and nothing that either was told is recorded gets lost."""
    assert output_of(script, path) == "fine\n"
    with closing(sqlite3.connect(path)) as other:
        assert other.execute("PRAGMA integrity_check").fetchone() == ("ok",)
