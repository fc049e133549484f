"""Faults of a real PostgreSQL: killed, cut off, hung, locked, deadlocked, full, read-only, and wanted by everybody.

Each ends with: one effect and one answer for every key, nothing stuck, or the refusal that the store's promise says.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.faults.disks import small_disk
from tests.integration import postgres_helpers
from tests.integration.postgres_helpers import Place, Session
from tests.integration.sql_places import Colour, Effects, claim_of, ending_of
from tests.integration.sql_stories import (
    PATIENT,
    SqlFaultStories,
    process_all,
    show_a_locked_record_waited_for,
    take_in_opposite_orders,
)
from tests.servers import Server
from tests.servers.proxy import FaultProxy

from effectonce import Message, Receiver, StoreUnavailable
from effectonce._blocking import run
from effectonce._records import Ending, State, Verdict
from effectonce.stores import _postgres_sql, open_store
from effectonce.testing.clocks import wait_until

place, colour, driver = postgres_helpers.FIXTURES


class TestPostgreSQL(SqlFaultStories):
    """The stories of every SQL store."""

    server, commands = "postgres", 5


# The server goes away


def test_a_hung_server_is_waited_for_once(place: Place) -> None:
    """One time-out, not one for each layer that might wait."""
    waits: list[float] = []
    with FaultProxy(place.admin_url) as proxy, place.store(proxy.url, timeout=1.5) as store:
        for key in ("before", "prepared"):
            run(store.claim(claim_of(key)))
        (wire,) = store._wires._all
        is_readable = wire._is_readable
        wire._is_readable = lambda seconds: waits.append(seconds) or is_readable(seconds)
        proxy.stall()
        with pytest.raises(StoreUnavailable, match=r"no answer in 1\.5 s"):
            run(store.claim(claim_of("k")))
    assert waits == [1.5]


def test_a_frozen_server(start_server: Callable[..., Server]) -> None:
    """SIGSTOP: unavailable while it lasts, at work again afterwards, and a late command harms nothing."""
    server = start_server("postgres")
    with open_store(f"{server.url}?timeout=1.5") as store:
        decision = run(store.claim(claim_of("k")))
        server.pause()
        with pytest.raises(StoreUnavailable):
            run(store.complete(ending_of(decision)))
        server.resume()
        wait_until(lambda: store.health().ok)
        assert run(store.complete(ending_of(decision))) in (Ending.DONE, Ending.REPEATED)
        assert run(store.claim(claim_of("k"))).record.result == b"done"


def test_terminated_in_the_middle_of_commands(place: Place, colour: Colour) -> None:
    """pg_terminate_backend again and again while callers are at work: every key ends with one run and one answer."""
    effects, answers = Effects(), dict[str, Any]()
    done, rounds = threading.Event(), list[int]()

    def terminate() -> None:
        query = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s"
        with place.session() as session:
            while not done.wait(0.001):
                if len(answers) >= 8 * len(rounds):
                    rounds.append(len(session(query, place.user)))

    url = place.url(driver=colour.driver)
    with Receiver(url, policy=PATIENT, breaker=None) as receiver, ThreadPoolExecutor(1) as terminator:
        terminating = terminator.submit(terminate)
        try:
            for batch in count(1):
                ids = [f"id {number}" for number in range(120 * batch)]
                process_all(colour, receiver, ids[-120:], effects, answers, threads=8)
                if len(rounds) > 10:
                    break
        finally:
            done.set()
        terminating.result()
        assert answers == {id: f"receipt of {id}" for id in ids}
        assert {receiver.process(Message(id), effects.handle).status for id in ids} == {"replayed"}
    assert sum(effects.runs.values()) <= len(ids) + 16 * batch


# Locks


def test_a_locked_record_is_waited_for(place: Place) -> None:
    """Another session's lock is waited out."""
    show_a_locked_record_waited_for(place)


def test_a_duplicate_needs_no_lock(place: Place) -> None:
    """It is answered while somebody keeps the record locked."""
    with place.store(timeout=1.5) as store, place.session() as holder:
        run(store.claim(claim_of("k")))
        place.lock(holder, "k")
        assert run(store.claim(claim_of("k"))).verdict is Verdict.BUSY


def test_batches_in_opposite_orders_do_not_deadlock(place: Place) -> None:
    """Whatever the order in which callers name keys, everybody takes them in the same one."""
    began = time.monotonic()
    take_in_opposite_orders(place)
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("prepare", ["yes", "no"])
def test_a_duplicate_of_a_record_that_is_being_added(
    place: Place, colour: Colour, prepare: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks for a key whose first claim has not been committed waits for it, and then finds it."""
    with place.store(driver=colour.driver, prepare=prepare) as store, place.session() as holder:
        verbs = colour.of(store)
        colour.run(verbs.claim(claim_of("other")))
        place.hold(holder, "k")

        async def commit_meanwhile(_: float) -> None:
            holder("COMMIT")

        monkeypatch.setattr(verbs, "pause", commit_meanwhile)
        assert colour.run(verbs.claim(claim_of("k", fingerprint=b"another"))).verdict is Verdict.MISMATCH


def test_a_claim_leaves_the_patience_of_a_users_transaction_as_it_was(place: Place) -> None:
    """How long it waits for locks is its own setting, also after a key that was known."""
    with place.store() as store, place.session() as session, Receiver(store) as receiver:
        for id in ("new", "known", "known"):
            with session.connection.transaction():
                session("SET LOCAL lock_timeout = '7s'")
                receiver.on(session.connection).process(Message(id), lambda _: 1)
                assert session("SHOW lock_timeout") == [("7s",)]


def test_a_deadlock_is_survived(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server ends a circle of locks by undoing one side; if that is ours, it is done again."""
    monkeypatch.setattr(_postgres_sql, "LOCK_SECONDS", 60.0)  # the server looks for circles later
    keys = ["a", "b"]
    with (
        place.store() as store,
        place.session() as other,
        place.session() as watcher,
        ThreadPoolExecutor(1) as pool,
    ):
        decisions = run(store.claim_many([claim_of(key) for key in keys]))
        other("SET deadlock_timeout = '30s'")  # whoever looks first is undone: not this side
        other("BEGIN")
        other(f"SELECT 1 FROM {place.table} WHERE key = 'b' FOR UPDATE")
        ending = pool.submit(lambda: run(store.complete_many([ending_of(d) for d in decisions])))
        wait_until(lambda: place.is_waiting(watcher))
        other(f"SELECT 1 FROM {place.table} WHERE key = 'a' FOR UPDATE")
        other("ROLLBACK")
        assert ending.result() == [Ending.DONE] * 2
        assert {run(store.get(key)).state for key in keys} == {State.COMPLETED}
        deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
        wait_until(lambda: watcher(deadlocks)[0][0] > 0)


@pytest.mark.parametrize("prepare", ["yes", "no"])
def test_where_transactions_are_serializable(place: Place, prepare: str) -> None:
    """Failures of serialization are repeated, where the session can't be told to do without them."""
    with place.session() as session:
        session(f"ALTER ROLE {place.user} SET default_transaction_isolation = serializable")
    effects = Effects()
    with Receiver(place.url(prepare=prepare), policy=PATIENT, breaker=None) as receiver:
        ids = [f"id {number % 20}" for number in range(120)]

        def process(id: str) -> Any:
            return receiver.process(Message(id), effects.handle).value

        with ThreadPoolExecutor(12) as threads:
            assert list(threads.map(process, ids)) == [f"receipt of {id}" for id in ids]
    assert set(effects.runs.values()) == {1}


# Everybody at once


# The server can't


def says(url: str, question: str) -> Any:
    """What a new session is told."""
    with Session(url) as session:
        return session(question)[0][0]


def test_a_server_that_only_reads(start_server: Callable[..., Server]) -> None:
    """A primary that became a standby refuses; the store goes on when there is a primary again, without a restart."""
    server = start_server("postgres")
    with Place(server.url) as place, place.session() as session, place.store() as store:
        decision = run(store.claim(claim_of("k")))
        run(store.get("k"))
        session("ALTER SYSTEM SET default_transaction_read_only = on")
        session("SELECT pg_reload_conf()")
        wait_until(lambda: says(server.url, "SHOW default_transaction_read_only") == "on")
        for verb in (lambda: store.claim(claim_of("new")), lambda: store.complete(ending_of(decision))):
            with pytest.raises(StoreUnavailable, match=r"only reads: .*default_transaction_read_only is on"):
                run(verb())
        session("SET default_transaction_read_only = off")
        session("ALTER SYSTEM RESET default_transaction_read_only")
        session("SELECT pg_reload_conf()")
        wait_until(lambda: says(server.url, "SHOW default_transaction_read_only") == "off")
        assert run(store.get("new")) is None
        assert run(store.complete(ending_of(decision))) is Ending.DONE


def test_a_server_without_room_for_another_connection(start_server: Callable[..., Server]) -> None:
    """Too many connections is StoreUnavailable, until one is free."""
    server = start_server("postgres", max_connections=10, superuser_reserved_connections=3)
    with Place(server.url) as place, place.store() as store, ExitStack() as others:
        with pytest.raises(Exception, match=r"remaining connection slots|too many clients"):
            while True:
                others.enter_context(place.session())
        with pytest.raises(StoreUnavailable, match=r"remaining connection slots|too many clients"):
            run(store.claim(claim_of("k")))
        others.close()
        wait_until(lambda: store.health().ok)
        assert run(store.claim(claim_of("k"))).verdict is Verdict.CLAIMED


def test_a_full_disk(start_server: Callable[..., Server], tmp_path: Path) -> None:
    """New claims are refused; what was answered stays, and when there is room again the store goes on."""
    with small_disk(tmp_path / "disk", 6) as disk:
        server = start_server("postgres")
        with Place(server.url) as place, place.session() as session:
            shutil.chown(disk, "nobody", "nogroup")
            session(f"CREATE TABLESPACE small OWNER {place.user} LOCATION '{disk}'")
            session(f"ALTER ROLE {place.user} SET default_tablespace = small")
            with place.store() as store:
                done: list[str] = []
                with pytest.raises(StoreUnavailable, match="make room"):
                    for number in range(100_000):
                        key = f"key {number}"
                        run(store.complete(ending_of(run(store.claim(claim_of(key))), os.urandom(4000))))
                        done.append(key)
                assert len(done) > 100
                for key in done:
                    assert run(store.get(key)).state is State.COMPLETED
                assert run(store.claim(claim_of(done[0]))).verdict is Verdict.REPLAY
                subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
                assert run(store.complete(ending_of(run(store.claim(claim_of("room")))))) is Ending.DONE
            session(f"DROP TABLE {place.table}")
            session("DROP TABLESPACE small")
        server.stop()


def test_a_statement_that_is_stopped(place: Place) -> None:
    """pg_cancel_backend in the middle of a wait: nothing was done, and its caller hears of it."""
    with (
        place.store() as store,
        place.session() as holder,
        place.session() as killer,
        ThreadPoolExecutor(1) as pool,
    ):
        decision = run(store.claim(claim_of("k")))
        place.lock(holder, "k")
        ending = pool.submit(lambda: run(store.complete(ending_of(decision))))
        while not ending.done():
            wait_until(lambda: place.is_waiting(killer) or ending.done())
            for pid in place.connections():
                killer("SELECT pg_cancel_backend(%s)", pid)
        with pytest.raises(StoreUnavailable, match="cancel"):
            ending.result()
        holder("ROLLBACK")
        assert run(store.complete(ending_of(decision))) is Ending.DONE
