"""Faults of a real MariaDB: killed, cut off, hung, locked, deadlocked, read-only, and wanted by everybody.

Each ends with: one effect and one answer for every key, nothing stuck, or the refusal that the store's promise says.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from tests.integration import mysql_helpers
from tests.integration.mysql_helpers import Place, speak_mysql
from tests.integration.sql_places import ASKED, Colour, claim_of, ending_of, granted
from tests.integration.sql_stories import (
    SqlFaultStories,
    show_a_locked_record_waited_for,
    show_held_keys_in_nobodys_way,
    take_in_opposite_orders,
)
from tests.servers import Server
from tests.servers.proxy import FaultProxy

from effectonce import StoreUnavailable
from effectonce._blocking import run
from effectonce._records import Ending, Renewal, State, Verdict
from effectonce.stores import Store, open_store
from effectonce.testing.clocks import wait_until

place, colour, driver = mysql_helpers.FIXTURES


class TestMySQL(SqlFaultStories):
    """The stories of every SQL store."""

    server, commands = "mariadb", 6


# The server goes away


def test_a_server_that_hangs(place: Place, colour: Colour) -> None:
    """No answer within the time-out is StoreUnavailable, not a hang; when it answers again, so does the store."""
    with FaultProxy(place.admin_url) as proxy, place.store(proxy.url, timeout=1.5) as store:
        verbs = colour.of(store)
        colour.run(verbs.claim(claim_of("before")))
        proxy.stall()
        for _ in range(2):  # on a line that was open, and on one that can't be opened
            began = time.monotonic()
            with pytest.raises(StoreUnavailable, match="too long"):
                colour.run(verbs.claim(claim_of("during")))
            assert time.monotonic() - began < 10
        proxy.heal()
        assert colour.run(verbs.claim(claim_of("after"))).verdict is Verdict.CLAIMED


def test_a_frozen_server(start_server: Callable[..., Server]) -> None:
    """SIGSTOP: unavailable while it lasts, at work again afterwards, and a late command harms nothing."""
    server = start_server("mariadb")
    with open_store(f"{server.url}?timeout=1.5") as store:
        decision = run(store.claim(claim_of("k")))
        server.pause()
        with pytest.raises(StoreUnavailable):
            run(store.complete(ending_of(decision)))
        server.resume()
        assert run(store.complete(ending_of(decision))) in (Ending.DONE, Ending.REPEATED)
        assert run(store.claim(claim_of("k"))).record.result == b"done"


# Locks


@pytest.mark.parametrize("seconds", [0.0, 1.5])
def test_a_locked_record_is_waited_for(place: Place, seconds: float) -> None:
    """Another session's lock is waited out, also when the server gives up waiting meanwhile."""
    show_a_locked_record_waited_for(place, seconds)


def test_a_locked_record_holds_up_its_own_caller_only(place: Place) -> None:
    """Of those who share a packet with it, the others are done."""
    with place.store() as store, place.session() as holder:
        decisions = run(store.claim_many([claim_of(f"key {number}") for number in range(12)]))
        place.lock(holder, "key 5")

        async def crowd() -> list[Any]:
            verbs = store.for_asyncio()
            await verbs.now()
            endings = [verbs.complete(ending_of(decision)) for decision in decisions]
            return await asyncio.gather(*endings, return_exceptions=True)

        answers = asyncio.run(crowd())
        assert isinstance(answers.pop(5), StoreUnavailable)
        assert set(answers) == {Ending.DONE}
        holder("ROLLBACK")
        assert run(store.complete(ending_of(decisions[5]))) is Ending.DONE


def test_a_key_that_an_open_transaction_has(place: Place, colour: Colour) -> None:
    """It is busy; whoever else is claimed in the same packet is served; and it is there when that commits."""
    with place.store() as store, place.session() as holder:
        verbs, drive = colour.of(store), colour.run
        drive(verbs.claim(claim_of("other")))
        holder("BEGIN")
        holder(
            f"INSERT INTO {place.table} (`key`, state, once, attempts, fence, lease_until, expires_at, owner, "
            "fingerprint) VALUES ('k', 1, 0, 1, 5, 9e9, 9e9, 'somebody', %s)",
            ASKED,
        )
        assert drive(verbs.claim(claim_of("k"))).verdict is Verdict.BUSY
        decisions = drive(verbs.claim_many([claim_of(key) for key in ("a", "k", "z")]))
        assert [decision.verdict.name for decision in decisions] == ["CLAIMED", "BUSY", "CLAIMED"]
        holder("COMMIT")
        decision = drive(verbs.claim(claim_of("k")))
        assert decision.verdict is Verdict.BUSY
        assert decision.record is not None


def test_a_duplicate_of_a_locked_record_that_is_being_added(
    place: Place, colour: Colour, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks for a key whose first claim has not been committed waits for it, and then finds it."""
    with place.store() as store, place.session() as holder:
        verbs = colour.of(store)
        colour.run(verbs.claim(claim_of("other")))
        place.hold(holder, "k")

        async def commit_meanwhile(_: float) -> None:
            holder("COMMIT")

        monkeypatch.setattr(verbs, "pause", commit_meanwhile)
        assert colour.run(verbs.claim(claim_of("k", fingerprint=b"another"))).verdict is Verdict.MISMATCH


def test_a_mysql_is_told_in_its_own_words_that_claims_do_not_wait(
    place: Place, colour: Colour, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can't wait for less than a second, so it looks first, in a way that does not wait."""
    speak_mysql(monkeypatch)
    with place.session() as session:
        waits = session.status("Innodb_row_lock_time")
        show_held_keys_in_nobodys_way(place, colour)
        assert (
            session.status("Innodb_row_lock_time") - waits < 1000
        )  # one that waited would have waited a second


def test_a_deadlock_is_survived(place: Place) -> None:
    """The server ends a circle of locks by undoing one side; if that is ours, it is done again."""
    keys = ["a", "b"]
    with (
        place.store() as store,
        place.session() as other,
        place.session() as watcher,
        ThreadPoolExecutor(1) as pool,
    ):
        decisions = run(store.claim_many([claim_of(key) for key in keys]))
        run(store.claim_many([claim_of(f"other {number}") for number in range(200)]))
        deadlocks = watcher.status("Innodb_deadlocks")
        other("BEGIN")
        # So many rows make it the heavier side, which a deadlock does not choose.
        other(f"UPDATE {place.table} SET attempts = attempts + 1 WHERE `key` LIKE 'other %'")
        other(f"SELECT 1 FROM {place.table} WHERE `key` = 'b' FOR UPDATE")
        ending = pool.submit(lambda: run(store.complete_many([ending_of(d) for d in decisions])))
        wait_until(lambda: place.is_waiting(watcher))
        other(f"SELECT 1 FROM {place.table} WHERE `key` = 'a' FOR UPDATE")
        other("ROLLBACK")
        assert ending.result() == [Ending.DONE] * 2
        assert watcher.status("Innodb_deadlocks") == deadlocks + 1
        assert {run(store.get(key)).state for key in keys} == {State.COMPLETED}


def test_batches_in_opposite_orders_do_not_deadlock(place: Place) -> None:
    """Whatever the order in which callers name keys, everybody takes them in the same one."""
    with place.session() as session:
        deadlocks = session.status("Innodb_deadlocks")
        take_in_opposite_orders(place)
        assert session.status("Innodb_deadlocks") == deadlocks


def test_crowds_on_the_same_few_keys(place: Place) -> None:
    """Processes whose packets add, end and renew the same keys in every mixture get in each other's way, and get on."""
    keys = [f"key {number}" for number in range(6)]
    grants: Counter[tuple[str, int]] = Counter()

    async def caller(verbs: Store, number: int) -> None:
        for turn in range(12):
            key = keys[(number * 5 + turn) % len(keys)]
            decision = await verbs.claim(claim_of(key))
            if decision.verdict is not Verdict.CLAIMED:
                continue
            held = granted(decision)
            grants[key, held.fence] += 1
            assert await verbs.renew(Renewal(key, held.owner, held.fence, 60.0, 60.0))
            assert await verbs.release(key, held.owner, held.fence, 60.0) is Ending.DONE

    async def crowd(store: Store) -> None:
        verbs = store.for_asyncio()
        await asyncio.gather(*(caller(verbs, number) for number in range(24)))

    with ExitStack() as stack, ThreadPoolExecutor(4) as threads:
        stores = [stack.enter_context(place.store()) for _ in range(4)]
        list(threads.map(lambda store: asyncio.run(crowd(store)), stores))
        assert set(grants.values()) == {1}
        assert {run(stores[0].get(key)).state for key in keys} == {State.ABSENT}
        assert sum(run(stores[0].get(key)).attempts for key in keys) == len(grants)


# Everybody at once


def test_a_server_that_only_reads(start_server: Callable[..., Server]) -> None:
    """A primary that became a replica refuses; the store goes on when it is one again, without a restart."""
    server = start_server("mariadb")
    with Place(server.url) as place, place.session() as session, place.store() as store:
        decision = run(store.claim(claim_of("k")))
        session("SET GLOBAL read_only = 1")
        for verb in (store.claim(claim_of("new")), store.complete(ending_of(decision))):
            with pytest.raises(StoreUnavailable, match="only reads"):
                run(verb)
        session("SET GLOBAL read_only = 0")
        assert run(store.get("new")) is None
        assert run(store.complete(ending_of(decision))) is Ending.DONE


def test_a_server_without_room_for_another_connection(start_server: Callable[..., Server]) -> None:
    """Too many connections is StoreUnavailable, until one is free."""
    server = start_server("mariadb", max_connections=10)
    with Place(server.url) as place, place.store() as store, ExitStack() as others:
        run(store.migrate())
        wait_until(lambda: not place.connections())
        crowd = []
        with pytest.raises(Exception, match="Too many connections"):
            while True:
                crowd.append(others.enter_context(place.session()))
        with pytest.raises(StoreUnavailable, match="Too many connections"):
            run(store.claim(claim_of("k")))
        others.close()
        wait_until(lambda: store.health().ok)
        assert run(store.claim(claim_of("k"))).verdict is Verdict.CLAIMED


def test_a_statement_that_is_stopped(place: Place) -> None:
    """KILL QUERY in the middle of a wait: nothing was done. It is asked for once more; then its caller hears of it."""
    with (
        place.store() as store,
        place.session() as holder,
        place.session() as killer,
        ThreadPoolExecutor(1) as pool,
    ):
        decision = run(store.claim(claim_of("k")))
        place.lock(holder, "k")
        waits = killer.status("Innodb_row_lock_waits")
        ending = pool.submit(lambda: run(store.complete(ending_of(decision))))
        for kill in (1, 2):
            wait_until(lambda kill=kill: killer.status("Innodb_row_lock_waits") >= waits + kill)
            for id in place.connections():
                killer(f"KILL QUERY {id}")
        with pytest.raises(StoreUnavailable, match="interrupted"):
            ending.result()
        holder("ROLLBACK")
        assert run(store.complete(ending_of(decision))) is Ending.DONE
