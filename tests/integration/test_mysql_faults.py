"""Faults of a real MariaDB: killed, cut off, hung, locked, deadlocked, read-only, and wanted by everybody.

Each ends with: one effect and one answer for every key, nothing stuck, or the refusal that the store's promise says.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
from tests.integration.mysql_helpers import ASKED, Place, Session, claim_of, ending_of, granted, place_on
from tests.servers import Server
from tests.servers.fixtures import HasURL
from tests.servers.proxy import FaultProxy

from effectonce import Message, Outcome, Policy, Receiver, StoreUnavailable
from effectonce._blocking import run
from effectonce._records import Ending, Renewal, State, Verdict
from effectonce.stores import Store, open_store
from effectonce.testing.clocks import wait_until

PATIENT = Policy(lease=2.0, keep="1h", wait=20.0)


@pytest.fixture
def place(mariadb: HasURL) -> Iterator[Place]:
    with place_on(mariadb.url) as place:
        yield place


class Effects:
    """What handlers have done, and how often; each key's effect is its first fence."""

    def __init__(self) -> None:
        self.runs: Counter[str] = Counter()
        self._lock = threading.Lock()

    def handle(self, message: Message) -> str:
        with self._lock:
            self.runs[message.id] += 1
        return f"receipt of {message.id}"


def until_answered(ask: Callable[[], Outcome[Any]], seconds: float = 60.0) -> Outcome[Any]:
    """Ask as a caller does whose store comes and goes: again with the same key."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return ask()
        except StoreUnavailable:
            assert time.monotonic() < deadline, "The store did not come back."


# The server goes away


@pytest.mark.parametrize("colour", ["blocking", "asyncio"])
def test_killed_and_restarted_in_the_middle_of_traffic(
    start_server: Callable[..., Server], colour: str
) -> None:
    """SIGKILL while 16 callers are at work: what was answered stays, and every key ends with one answer."""
    server = start_server("mariadb")
    effects, answers = Effects(), {}
    ids = [f"id {number}" for number in range(160)]
    done = threading.Event()

    def kill_twice() -> None:
        for share in (40, 100):
            wait_until(lambda share=share: len(answers) >= share, seconds=60)
            server.kill()
            server.restart()
        done.set()

    with Receiver(server.url, policy=PATIENT, breaker=None) as receiver, ThreadPoolExecutor(1) as killer:
        killing = killer.submit(kill_twice)
        if colour == "blocking":

            def process(id: str) -> None:
                answers[id] = until_answered(lambda: receiver.process(Message(id), effects.handle)).value

            with ThreadPoolExecutor(16) as threads:
                list(threads.map(process, ids))
        else:
            asyncio.run(_process_all(receiver, ids, effects, answers))
        killing.result()
        assert answers == {id: f"receipt of {id}" for id in ids}
        for id in ids:
            replay = receiver.process(Message(id), effects.handle)
            assert (replay.status, replay.value) == ("replayed", answers[id])
    # A run whose ending could not be told in time is taken over; nobody runs twice for any other reason.
    assert sum(effects.runs.values()) <= len(ids) + 2 * 16


async def _process_all(receiver: Receiver, ids: list[str], effects: Effects, answers: dict[str, Any]) -> None:
    left = list(ids)

    async def handle(message: Message) -> str:
        return effects.handle(message)

    async def caller() -> None:
        while left:
            id = left.pop()
            while id not in answers:
                try:
                    answers[id] = (await receiver.aprocess(Message(id), handle)).value
                except StoreUnavailable:
                    await asyncio.sleep(0.01)

    await asyncio.gather(*(caller() for _ in range(16)))


@pytest.mark.parametrize("colour", ["blocking", "asyncio"])
@pytest.mark.parametrize("lose", ["request", "reply"])
def test_cut_before_or_after_each_command(place: Place, lose: str, colour: str) -> None:
    """Whichever packet of a message's life is lost, on its way there or back: one run, one answer, one record."""
    effects = Effects()

    async def handle(message: Message) -> str:
        return effects.handle(message)

    with FaultProxy(place.admin_url) as proxy, asyncio.Runner() as runner:
        for nth in range(1, 40):
            with Receiver(place.url(proxy.url), policy=PATIENT, breaker=None) as receiver:
                getattr(proxy, f"lose_{lose}")(nth)
                fired = proxy.fired
                message = Message(f"{lose} {nth}")
                if colour == "blocking":
                    ask = partial(receiver.process, message, effects.handle)
                else:

                    def ask(message: Message = message, receiver: Receiver = receiver) -> Outcome[Any]:
                        return runner.run(receiver.aprocess(message, handle))

                outcome = until_answered(ask)
                assert outcome.value == f"receipt of {message.id}"
                assert until_answered(ask).status == "replayed"
                assert effects.runs[message.id] == 1
                fired, was_fired = proxy.fired, proxy.fired > fired
                proxy.heal()
            if not was_fired:
                break
        assert nth > 6


def test_a_lost_reply_to_a_step_is_repaired_at_once(place: Place) -> None:
    """Every verb sent again after its reply was lost says what it would have said; on a held line that is not seen."""
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


@pytest.mark.parametrize("colour", ["blocking", "asyncio"])
def test_a_server_that_hangs(place: Place, colour: str) -> None:
    """No answer within the time-out is StoreUnavailable, not a hang; when it answers again, so does the store."""
    with ExitStack() as stack:
        proxy = stack.enter_context(FaultProxy(place.admin_url))
        store = stack.enter_context(place.store(proxy.url, timeout=1.5))
        runner = stack.enter_context(asyncio.Runner())
        verbs = store if colour == "blocking" else store.for_asyncio()
        drive: Callable[..., Any] = run if colour == "blocking" else runner.run
        drive(verbs.claim(claim_of("before")))
        proxy.stall()
        for _ in range(2):  # on a line that was open, and on one that can't be opened
            began = time.monotonic()
            with pytest.raises(StoreUnavailable, match="too long"):
                drive(verbs.claim(claim_of("during")))
            assert time.monotonic() - began < 10
        proxy.heal()
        assert drive(verbs.claim(claim_of("after"))).verdict is Verdict.CLAIMED


def test_a_hung_server_does_not_hold_up_the_loop(place: Place) -> None:
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

    with FaultProxy(place.admin_url) as proxy, place.store(proxy.url, timeout=1.5) as store:
        assert asyncio.run(wait_and_count()) > 20


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


def lock(session: Session, table: str, *keys: str) -> None:
    """Hold the rows of some keys, as a transaction of somebody's may."""
    session("BEGIN")
    places = ", ".join(f"X'{key.encode().hex()}'" for key in keys)
    session(f"SELECT 1 FROM {table} WHERE `key` IN ({places}) FOR UPDATE")


def is_waiting(session: Session) -> bool:
    """Whether a command waits for a lock. What information_schema says of it stays as it was while one looks often."""
    return session.status("Innodb_row_lock_current_waits") > 0


@pytest.mark.parametrize("seconds", [0.0, 1.5])
def test_a_locked_record_is_waited_for(place: Place, seconds: float) -> None:
    """Another session's lock is waited out, also when the server gives up waiting meanwhile."""
    with (
        place.store() as store,
        place.session() as holder,
        place.session() as watcher,
        ThreadPoolExecutor(1) as pool,
    ):
        decision = run(store.claim(claim_of("k")))
        lock(holder, place.table, "k")
        began = time.monotonic()
        ending = pool.submit(lambda: run(store.complete(ending_of(decision))))
        wait_until(lambda: is_waiting(watcher) and time.monotonic() - began >= seconds)
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
        holder("ROLLBACK")
        assert run(store.complete(ending_of(decision))) is Ending.DONE


def test_a_locked_record_holds_up_its_own_caller_only(place: Place) -> None:
    """Of those who share a packet with it, the others are done."""
    with place.store() as store, place.session() as holder:
        decisions = run(store.claim_many([claim_of(f"key {number}") for number in range(12)]))
        lock(holder, place.table, "key 5")

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


@pytest.mark.parametrize("colour", ["blocking", "asyncio"])
def test_a_key_that_an_open_transaction_has(place: Place, colour: str) -> None:
    """It is busy; whoever else is claimed in the same packet is served; and it is there when that commits."""
    with place.store() as store, place.session() as holder, asyncio.Runner() as runner:
        verbs = store if colour == "blocking" else store.for_asyncio()
        drive: Callable[..., Any] = run if colour == "blocking" else runner.run
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


def test_a_duplicate_of_a_locked_record_that_is_being_added(place: Place) -> None:
    """Whoever asks for a key whose first claim has not been committed waits for it, and then finds it."""
    with (
        place.store() as store,
        place.session() as holder,
        place.session() as watcher,
        ThreadPoolExecutor(1) as pool,
    ):
        run(store.migrate())
        holder("BEGIN")
        holder(
            f"INSERT INTO {place.table} (`key`, state, once, attempts, fence, lease_until, expires_at, owner, "
            "fingerprint) VALUES ('k', 1, 0, 1, 5, 9e9, 9e9, 'somebody', 'something')"
        )
        claiming = pool.submit(lambda: run(store.claim(claim_of("k"))))
        wait_until(lambda: is_waiting(watcher))
        holder("COMMIT")
        assert claiming.result().verdict is Verdict.MISMATCH


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
        other(
            f"UPDATE {place.table} SET attempts = attempts + 1 WHERE `key` LIKE 'other %'"
        )  # the heavier side
        other(f"SELECT 1 FROM {place.table} WHERE `key` = 'b' FOR UPDATE")
        ending = pool.submit(lambda: run(store.complete_many([ending_of(d) for d in decisions])))
        wait_until(lambda: is_waiting(watcher))
        other(f"SELECT 1 FROM {place.table} WHERE `key` = 'a' FOR UPDATE")
        other("ROLLBACK")
        assert ending.result() == [Ending.DONE] * 2
        assert watcher.status("Innodb_deadlocks") == deadlocks + 1
        assert {run(store.get(key)).state for key in keys} == {State.COMPLETED}


def test_batches_in_opposite_orders_do_not_deadlock(place: Place) -> None:
    """Whatever the order in which callers name keys, everybody takes them in the same one."""
    with ExitStack() as stack:
        stores = [stack.enter_context(place.store()) for _ in range(6)]
        session = stack.enter_context(place.session())
        run(stores[0].migrate())
        deadlocks = session.status("Innodb_deadlocks")
        keys = [f"key {number}" for number in range(30)]

        def work(number: int) -> None:
            order = keys if number % 2 else keys[::-1]
            for turn in range(8):
                decisions = run(stores[number].claim_many([claim_of(f"{key} {turn}") for key in order]))
                won = [decision for decision in decisions if decision.verdict is Verdict.CLAIMED]
                assert set(run(stores[number].complete_many([ending_of(d) for d in won]))) <= {Ending.DONE}

        with ThreadPoolExecutor(6) as threads:
            list(threads.map(work, range(6)))
        assert run(stores[0].stats()).by_state == {"COMPLETED": 30 * 8}
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


def test_64_workers_on_one_key(place: Place) -> None:
    """Eight stores with eight threads each, and as many tasks, want one effect: one runs, all get its answer."""
    effects = Effects()
    with ExitStack() as stack:
        receivers = [
            stack.enter_context(Receiver(place.url(), policy=PATIENT, breaker=None)) for _ in range(8)
        ]
        barrier = threading.Barrier(64)

        def work(number: int) -> Any:
            barrier.wait()
            return receivers[number % 8].process(Message("m"), effects.handle).value

        with ThreadPoolExecutor(64) as threads:
            assert set(threads.map(work, range(64))) == {"receipt of m"}
    assert effects.runs == {"m": 1}


def test_a_server_that_only_reads(start_server: Callable[..., Server]) -> None:
    """A primary that became a replica refuses; the store goes on when it is one again, without a restart."""
    server = start_server("mariadb")
    with place_on(server.url) as place, place.session() as session, place.store() as store:
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
    with place_on(server.url) as place, place.store() as store, ExitStack() as others:
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
        lock(holder, place.table, "k")
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
