"""Faults of a real PostgreSQL: killed, cut off, hung, locked, deadlocked, full, read-only, and wanted by everybody.

Each ends with: one effect and one answer for every key, nothing stuck, or the refusal that the store's promise says.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.faults.disks import small_disk
from tests.integration.postgres_helpers import Place, Session, claim_of, ending_of, granted, place_on
from tests.servers import Server
from tests.servers.fixtures import HasURL
from tests.servers.proxy import FaultProxy

from effectonce import Message, Outcome, Policy, Receiver, StoreUnavailable
from effectonce._blocking import run
from effectonce._records import Ending, Renewal, State, Verdict
from effectonce.stores import _postgres_sql, open_store
from effectonce.testing.clocks import wait_until

PATIENT = Policy(lease=2.0, keep="1h", wait=20.0)


@pytest.fixture
def place(postgres: HasURL) -> Iterator[Place]:
    with place_on(postgres.url) as place:
        yield place


class Effects:
    """What handlers have done, and how often."""

    def __init__(self) -> None:
        self.runs: Counter[str] = Counter()
        self._lock = threading.Lock()

    def handle(self, message: Message) -> str:
        with self._lock:
            self.runs[message.id] += 1
        return f"receipt of {message.id}"

    async def ahandle(self, message: Message) -> str:
        return self.handle(message)


def until_answered(ask: Callable[[], Outcome[Any]], seconds: float = 60.0) -> Outcome[Any]:
    """Ask as a caller does whose store comes and goes: again with the same key."""
    answers: list[Outcome[Any]] = []

    def is_answered() -> bool:
        with suppress(StoreUnavailable):
            answers.append(ask())
        return bool(answers)

    wait_until(is_answered, seconds=seconds, what="An answer")
    return answers[0]


# The server goes away


@pytest.mark.parametrize("driver", ["threads", "", "+asyncpg"])
def test_killed_and_restarted_in_the_middle_of_traffic(
    start_server: Callable[..., Server], driver: str
) -> None:
    """SIGKILL while 16 callers are at work: what was answered stays, and every key ends with one answer."""
    server = start_server("postgres")
    effects, answers = Effects(), dict[str, Any]()
    ids = [f"id {number}" for number in range(160)]

    def kill_twice() -> None:
        for share in (40, 100):
            wait_until(lambda share=share: len(answers) >= share, seconds=60)
            server.kill()
            server.restart()

    url = server.url.replace("postgresql", f"postgresql{driver if driver.startswith('+') else ''}")
    with Receiver(url, policy=PATIENT, breaker=None) as receiver, ThreadPoolExecutor(1) as killer:
        killing = killer.submit(kill_twice)
        if driver == "threads":

            def process(id: str) -> None:
                answers[id] = until_answered(lambda: receiver.process(Message(id), effects.handle)).value

            with ThreadPoolExecutor(16) as threads:
                list(threads.map(process, ids))
        else:
            asyncio.run(process_all(receiver, ids, effects, answers))
        killing.result()
        assert answers == {id: f"receipt of {id}" for id in ids}
        for id in ids:
            replay = receiver.process(Message(id), effects.handle)
            assert (replay.status, replay.value) == ("replayed", answers[id])
    # A run whose ending could not be told in time is taken over; nobody runs twice for any other reason.
    assert sum(effects.runs.values()) <= len(ids) + 2 * 16


async def process_all(receiver: Receiver, ids: list[str], effects: Effects, answers: dict[str, Any]) -> None:
    left = list(ids)

    async def caller() -> None:
        while left:
            id = left.pop()
            while id not in answers:
                try:
                    answers[id] = (await receiver.aprocess(Message(id), effects.ahandle)).value
                except StoreUnavailable:
                    await asyncio.sleep(0.01)

    await asyncio.gather(*(caller() for _ in range(16)))


@pytest.mark.parametrize("driver", ["threads", "", "+asyncpg"])
@pytest.mark.parametrize("lose", ["request", "reply"])
def test_cut_before_or_after_each_command(place: Place, lose: str, driver: str) -> None:
    """Whichever packet of a message's life is lost, on its way there or back: one run, one answer, one record."""
    effects = Effects()
    scheme = driver if driver.startswith("+") else ""
    with FaultProxy(place.admin_url) as proxy, asyncio.Runner() as runner:
        for nth in range(1, 40):
            with Receiver(place.url(proxy.url, scheme), policy=PATIENT, breaker=None) as receiver:
                getattr(proxy, f"lose_{lose}")(nth)
                fired = proxy.fired
                message = Message(f"{lose} {nth}")
                if driver == "threads":
                    ask = partial(receiver.process, message, effects.handle)
                else:

                    def ask(message: Message = message, receiver: Receiver = receiver) -> Outcome[Any]:
                        return runner.run(receiver.aprocess(message, effects.ahandle))

                outcome = until_answered(ask)
                assert outcome.value == f"receipt of {message.id}"
                assert until_answered(ask).status == "replayed"
                assert effects.runs[message.id] == 1
                fired, was_fired = proxy.fired, proxy.fired > fired
                proxy.heal()
            if not was_fired:
                break
        assert nth > 5


def test_a_lost_reply_to_a_step_is_repaired_at_once(place: Place) -> None:
    """Every verb sent again after its reply was lost says what it would have said; on a held wire that is not seen."""
    with FaultProxy(place.admin_url) as proxy, place.store(proxy.url) as store:
        claim = claim_of("k")
        run(store.now())
        proxy.lose_reply()
        first = granted(run(store.claim(claim)))
        assert run(store.get("k")) == first
        proxy.lose_reply()
        assert run(store.renew(Renewal("k", first.owner, first.fence, 60.0, 60.0))) is True
        proxy.lose_reply()
        ending = ending_of(run(store.claim(claim)))
        proxy.lose_reply()
        assert run(store.complete(ending)) in (Ending.DONE, Ending.REPEATED)
        assert proxy.fired == 4
        assert run(store.claim(claim_of("k"))).verdict is Verdict.REPLAY


@pytest.mark.parametrize("driver", ["", "+asyncpg"])
def test_a_hung_server_does_not_hold_up_the_loop(place: Place, driver: str) -> None:
    """Others on the loop go on while the store's callers wait, and each of those gets its error."""

    async def wait_and_count() -> int:
        verbs = store.for_asyncio()
        await verbs.claim(claim_of("before"))
        proxy.stall()
        claims = [asyncio.ensure_future(verbs.claim(claim_of(f"key {number}"))) for number in range(8)]
        turns = 0
        while not all(claim.done() for claim in claims):
            await asyncio.sleep(0.001)
            turns += 1
        assert all(isinstance(claim.exception(), StoreUnavailable) for claim in claims)
        return turns

    with FaultProxy(place.admin_url) as proxy, place.store(proxy.url, driver, timeout=1.5) as store:
        assert asyncio.run(wait_and_count()) > 20


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


@pytest.mark.parametrize("driver", ["threads", "", "+asyncpg"])
def test_terminated_in_the_middle_of_commands(place: Place, driver: str) -> None:
    """pg_terminate_backend again and again while callers are at work: every key ends with one run and one answer."""
    effects, answers = Effects(), dict[str, Any]()
    ids = [f"id {number}" for number in range(120)]
    done = threading.Event()

    def terminate() -> int:
        rounds = 0
        with place.session() as session:
            while not done.wait(0.001):
                if len(answers) >= 8 * rounds:
                    session(
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s",
                        place.role,
                    )
                    rounds += 1
        return rounds

    url = place.url(driver=driver if driver.startswith("+") else "")
    with Receiver(url, policy=PATIENT, breaker=None) as receiver, ThreadPoolExecutor(9) as threads:
        terminating = threads.submit(terminate)
        try:
            if driver == "threads":

                def process(id: str) -> None:
                    answers[id] = until_answered(lambda: receiver.process(Message(id), effects.handle)).value

                list(threads.map(process, ids))
            else:
                asyncio.run(process_all(receiver, ids, effects, answers))
        finally:
            done.set()
        assert terminating.result() > 10
        assert answers == {id: f"receipt of {id}" for id in ids}
        assert {receiver.process(Message(id), effects.handle).status for id in ids} == {"replayed"}
    assert sum(effects.runs.values()) <= len(ids) + 16


# Locks


def lock(session: Session, table: str, *keys: str) -> None:
    """Hold the rows of some keys, as a transaction of somebody's may."""
    session("BEGIN")
    session(f"SELECT 1 FROM {table} WHERE key = ANY (%s) FOR UPDATE", list(keys))


def is_waiting(session: Session, place: Place) -> bool:
    """Whether a command of the store waits for a lock."""
    waiting = "SELECT 1 FROM pg_stat_activity WHERE usename = %s AND wait_event_type = 'Lock'"
    return bool(session(waiting, place.role))


def test_a_locked_record_is_waited_for(place: Place) -> None:
    """Another session's lock is waited out."""
    with (
        place.store() as store,
        place.session() as holder,
        place.session() as watcher,
        ThreadPoolExecutor(1) as pool,
    ):
        decision = run(store.claim(claim_of("k")))
        lock(holder, place.table, "k")
        ending = pool.submit(lambda: run(store.complete(ending_of(decision))))
        wait_until(lambda: is_waiting(watcher, place))
        holder("ROLLBACK")
        assert ending.result() is Ending.DONE


def test_a_record_that_stays_locked(place: Place) -> None:
    """Patience ends with the time-out; afterwards the same command is done."""
    with place.store(timeout=1.5) as store, place.session() as holder:
        decision = run(store.claim(claim_of("k")))
        lock(holder, place.table, "k")
        with pytest.raises(StoreUnavailable, match="lock"):
            run(store.complete(ending_of(decision)))
        assert run(store.claim(claim_of("other"))).verdict is Verdict.CLAIMED
        assert run(store.claim(claim_of("k"))).verdict is Verdict.BUSY, "a duplicate needs no lock"
        holder("ROLLBACK")
        assert run(store.complete(ending_of(decision))) is Ending.DONE


def test_a_duplicate_of_a_record_that_is_being_added(place: Place) -> None:
    """Whoever asks for a key whose first claim has not been committed waits for it, and then finds it."""
    with (
        place.store() as store,
        place.session() as holder,
        place.session() as watcher,
        ThreadPoolExecutor(1) as pool,
    ):
        run(store.claim(claim_of("k")))
        ((id,),) = holder(f"SELECT id FROM {place.table}")
        holder(f"DELETE FROM {place.table}")
        holder("BEGIN")
        holder(f"INSERT INTO {place.table} VALUES (5, %s, 'k', 'other', 33, 9e9, 9e9, 'somebody')", id)
        claiming = pool.submit(lambda: run(store.claim(claim_of("k"))))
        wait_until(lambda: is_waiting(watcher, place))
        holder("COMMIT")
        assert claiming.result().verdict is Verdict.MISMATCH


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
        wait_until(lambda: is_waiting(watcher, place))
        other(f"SELECT 1 FROM {place.table} WHERE key = 'a' FOR UPDATE")
        other("ROLLBACK")
        assert ending.result() == [Ending.DONE] * 2
        assert {run(store.get(key)).state for key in keys} == {State.COMPLETED}
        deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
        wait_until(lambda: watcher(deadlocks)[0][0] > 0)


def test_batches_in_opposite_orders_do_not_deadlock(place: Place) -> None:
    """Whatever the order in which callers name keys, everybody takes them in the same one."""
    with ExitStack() as stack:
        stores = [stack.enter_context(place.store()) for _ in range(6)]
        run(stores[0].migrate())
        keys = [f"key {number}" for number in range(30)]

        def work(number: int) -> None:
            order = keys if number % 2 else keys[::-1]
            for turn in range(8):
                decisions = run(stores[number].claim_many([claim_of(f"{key} {turn}") for key in order]))
                won = [decision for decision in decisions if decision.verdict is Verdict.CLAIMED]
                assert set(run(stores[number].complete_many([ending_of(d) for d in won]))) <= {Ending.DONE}

        began = time.monotonic()
        with ThreadPoolExecutor(6) as threads:
            list(threads.map(work, range(6)))
        assert run(stores[0].stats()).by_state == {"COMPLETED": 30 * 8}
        assert time.monotonic() - began < 60


@pytest.mark.parametrize("prepare", ["yes", "no"])
def test_where_transactions_are_serializable(place: Place, prepare: str) -> None:
    """Failures of serialization are repeated, where the session can't be told to do without them."""
    with place.session() as session:
        session(f"ALTER ROLE {place.role} SET default_transaction_isolation = serializable")
    effects = Effects()
    with Receiver(place.url(prepare=prepare), policy=PATIENT, breaker=None) as receiver:
        ids = [f"id {number % 20}" for number in range(120)]

        def process(id: str) -> Any:
            return receiver.process(Message(id), effects.handle).value

        with ThreadPoolExecutor(12) as threads:
            assert list(threads.map(process, ids)) == [f"receipt of {id}" for id in ids]
    assert set(effects.runs.values()) == {1}


# Everybody at once


@pytest.mark.parametrize("driver", ["threads", "", "+asyncpg"])
def test_64_workers_on_one_key(place: Place, driver: str) -> None:
    """Eight stores with eight callers each want one effect: one runs, all get its answer."""
    effects = Effects()
    with ExitStack() as stack:
        url = place.url(driver=driver if driver.startswith("+") else "", pool=4)
        receivers = [stack.enter_context(Receiver(url, policy=PATIENT, breaker=None)) for _ in range(8)]
        if driver == "threads":
            barrier = threading.Barrier(64)

            def work(number: int) -> Any:
                barrier.wait()
                return receivers[number % 8].process(Message("m"), effects.handle).value

            with ThreadPoolExecutor(64) as threads:
                answers = list(threads.map(work, range(64)))
        else:

            async def crowd() -> list[Any]:
                calls = [
                    receivers[number % 8].aprocess(Message("m"), effects.ahandle) for number in range(64)
                ]
                return [outcome.value for outcome in await asyncio.gather(*calls)]

            answers = asyncio.run(crowd())
        assert answers == ["receipt of m"] * 64
    assert effects.runs == {"m": 1}


# The server can't


def says(url: str, question: str) -> Any:
    """What a new session is told."""
    with Session(url) as session:
        return session(question)[0][0]


def test_a_server_that_only_reads(start_server: Callable[..., Server]) -> None:
    """A primary that became a standby refuses; the store goes on when there is a primary again, without a restart."""
    server = start_server("postgres")
    with place_on(server.url) as place, place.session() as session, place.store() as store:
        decision = run(store.claim(claim_of("k")))
        run(store.get("k"))
        session("ALTER SYSTEM SET default_transaction_read_only = on")
        session("SELECT pg_reload_conf()")
        wait_until(lambda: says(server.url, "SHOW default_transaction_read_only") == "on")
        for verb in (lambda: store.claim(claim_of("new")), lambda: store.complete(ending_of(decision))):
            with pytest.raises(StoreUnavailable, match="read-only"):
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
    with place_on(server.url) as place, place.store() as store, ExitStack() as others:
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
        with place_on(server.url) as place, place.session() as session:
            shutil.chown(disk, "nobody", "nogroup")
            session(f"CREATE TABLESPACE small OWNER {place.role} LOCATION '{disk}'")
            session(f"ALTER ROLE {place.role} SET default_tablespace = small")
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
        lock(holder, place.table, "k")
        ending = pool.submit(lambda: run(store.complete(ending_of(decision))))
        while not ending.done():
            wait_until(lambda: is_waiting(killer, place) or ending.done())
            for pid in place.connections():
                killer("SELECT pg_cancel_backend(%s)", pid)
        with pytest.raises(StoreUnavailable, match="cancel"):
            ending.result()
        holder("ROLLBACK")
        assert run(store.complete(ending_of(decision))) is Ending.DONE
