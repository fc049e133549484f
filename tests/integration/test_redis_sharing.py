"""The Redis store shared: how many round trips there are, by threads, by event loops, across a fork, and who waits."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

import pytest
import redis
from tests.integration.redis_helpers import (
    COLOURS,
    LONG,
    claim_of,
    clients,
    ending_of,
    forget,
    hold,
    hold_and_look,
    in_colour,
    renewal_of,
)
from tests.integration.sqlite_helpers import CLOSED_IN_THE_MIDDLE, TOLD_OF_CLOSED_LOOPS, Caller, output_of
from tests.servers import Server
from tests.servers.base import HOST
from tests.servers.cluster import SLOTS, ValkeyCluster
from tests.servers.fixtures import HasURL
from tests.servers.proxy import FaultProxy

from effectonce import Message, Policy, Receiver, current
from effectonce._blocking import run
from effectonce._records import NOBODY, Completion, Decision, Ending, State, Verdict
from effectonce.errors import StoreError, StoreMismatch, StoreUnavailable
from effectonce.keys import uuid4
from effectonce.stores import Store, _redis_threads, _redis_wire
from effectonce.stores._redis_loop import MOST_AT_ONCE
from effectonce.stores._redis_routes import slot_of
from effectonce.stores.base import PartlyAnswered
from effectonce.stores.redis import OnLoops, RedisStore
from effectonce.testing.clocks import wait_until

StartServer = Callable[..., Server]
FORKS = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")


@pytest.fixture
def prefix(valkey: HasURL) -> Iterator[str]:
    prefix = f"{uuid4()}:"
    yield prefix
    forget(valkey.url, prefix)


@pytest.fixture
def store(valkey: HasURL, prefix: str) -> Iterator[RedisStore]:
    with RedisStore(valkey.url, prefix=prefix) as store:
        yield store


@pytest.fixture
def proxy(valkey: HasURL) -> Iterator[FaultProxy]:
    with FaultProxy(valkey.url) as proxy:
        yield proxy


@pytest.fixture
def behind_proxy(proxy: FaultProxy, prefix: str) -> Iterator[RedisStore]:
    with RedisStore(proxy.url, prefix=prefix) as store:
        yield store


def connections_of(url: str, name: str) -> int:
    """How many connections a server has, but for the one that asks. The name keeps tests apart that run at once."""
    with clients(url) as (client,):
        client.client_setname(name)
        return sum(other["name"] != name for other in client.client_list())


# Round trips, counted on the wire


@COLOURS
def test_round_trips(behind_proxy: RedisStore, proxy: FaultProxy, colour: str) -> None:
    """A new key takes two, a step one, a duplicate one, a batch of a hundred new keys two, their duplicates one."""

    async def counted(verbs: Store) -> list[int]:
        counts = []

        async def count(*actions: Any) -> list[Any]:
            before = proxy.bursts
            answers = [await action() for action in actions]
            counts.append(proxy.bursts - before)
            return answers

        await verbs.claim(claim_of("warm"))  # connects, and loads the scripts
        claim = claim_of("k")
        (decision,) = await count(lambda: verbs.claim(claim))
        for journal in (None, b"one", b"one, two"):  # the keeper's renewal, and two steps
            await count(
                lambda journal=journal: verbs.renew(renewal_of(decision.record)._replace(progress=journal))
            )
        await count(lambda: verbs.complete(ending_of(decision.record)))
        await count(lambda: verbs.claim(claim_of("k")))
        claims = [claim_of(f"key {n}") for n in range(100)]
        (decisions,) = await count(lambda: verbs.claim_many(claims))
        await count(lambda: verbs.complete_many([ending_of(d.record) for d in decisions]))
        (replays,) = await count(lambda: verbs.claim_many(claims))
        assert {decision.verdict for decision in replays} == {Verdict.REPLAY}
        return counts

    with clients(proxy.url) as (client,):
        client.ping()
    assert in_colour(colour, behind_proxy, counted) == [1] * 9
    assert proxy.connections == 2  # the store's, and the one above


@COLOURS
def test_a_receiver_adds_no_round_trip(proxy: FaultProxy, prefix: str, colour: str) -> None:
    """The whole way, from a message to its outcome: two for a new one, one for its duplicate, one for each step."""

    async def handle(message: Message) -> str:
        return "done"

    async def handle_by_steps(message: Message) -> None:
        for name in ("one", "two"):
            await current().astep(name, dict)

    def by_steps(message: Message) -> None:
        for name in ("one", "two"):
            current().step(name, dict)

    with Receiver(RedisStore(proxy.url, prefix=prefix), policy=Policy(keep="1h", lease="1m")) as receiver:

        async def deliver(*ids: str) -> list[int]:
            counts = []
            for id in ids:
                before = proxy.bursts
                if colour == "asyncio":
                    await receiver.aprocess(Message(id), handle_by_steps if id == "steps" else handle)
                else:
                    receiver.process(Message(id), by_steps if id == "steps" else lambda message: "done")
                counts.append(proxy.bursts - before)
            return counts

        counts = asyncio.run(deliver("warm", "a", "a", "b", "b", "steps", "steps"))
    assert counts[1:] == [2, 1, 2, 1, 4, 1]


def test_tasks_share_round_trips(behind_proxy: RedisStore, proxy: FaultProxy) -> None:
    """What a loop's callers ask for in one turn goes out together, on one connection."""

    async def crowd() -> tuple[list[Decision], int]:
        verbs = behind_proxy.for_asyncio()
        await verbs.claim(claim_of("warm"))
        before = proxy.bursts
        claims = [verbs.claim(claim_of(f"key {n}")) for n in range(MOST_AT_ONCE)]
        return list(await asyncio.gather(*claims)), proxy.bursts - before

    decisions, bursts = asyncio.run(crowd())
    assert {decision.verdict for decision in decisions} == {Verdict.CLAIMED}
    assert (bursts, proxy.connections) == (1, 1)


def test_no_task_and_no_thread_per_call(store: RedisStore) -> None:
    """A call costs neither."""

    async def busy() -> tuple[int, int]:
        verbs = store.for_asyncio()
        await verbs.claim(claim_of("warm"))
        tasks, threads = set(asyncio.all_tasks()), threading.active_count()
        calls = [asyncio.ensure_future(verbs.claim(claim_of(f"key {n}"))) for n in range(20)]
        await asyncio.sleep(0)
        added = len(asyncio.all_tasks() - tasks - set(calls)), threading.active_count() - threads
        await asyncio.gather(*calls)
        return added

    assert asyncio.run(busy()) == (0, 0)


def test_nothing_is_published_without_a_waiter(valkey: HasURL, store: RedisStore) -> None:
    """The end of a record is told to nobody, unless somebody has asked."""
    with clients(valkey.url) as (client,):
        before = client.info("commandstats").get("cmdstat_publish", {"calls": 0})["calls"]
        for number in range(20):
            run(store.complete(ending_of(hold(store, f"key {number}"))))
        assert client.info("commandstats").get("cmdstat_publish", {"calls": 0})["calls"] == before


# One caller's trouble is no other's


def test_a_failing_step_fails_its_own_caller_only(valkey: HasURL, store: RedisStore, prefix: str) -> None:
    """Of callers who share a round trip, only the one whose key holds something else hears of it."""
    with clients(valkey.url) as (client,):
        client.rpush(f"{prefix}key 3", "theirs")
        client.set(f"{prefix}key 4", "theirs")

    async def crowd() -> list[Any]:
        verbs = store.for_asyncio()
        await verbs.claim(claim_of("warm"))
        bad = Completion("key 5", b"A" * 16, 1, State.COMPLETED, object(), LONG)  # type: ignore[arg-type]
        calls = [verbs.claim(claim_of(f"key {n}")) for n in range(10)]
        return list(await asyncio.gather(*calls, verbs.complete(bad), return_exceptions=True))

    *answers, error = asyncio.run(crowd())
    assert isinstance(error, TypeError)
    assert [type(answer) for answer in answers[3:5]] == [StoreMismatch] * 2
    assert {answer.verdict for answer in answers[:3] + answers[5:]} == {Verdict.CLAIMED}


@COLOURS
def test_a_key_that_is_forbidden_fails_its_own_caller_only(start_server: StartServer, colour: str) -> None:
    """A server refuses the whole command that names such a key: the others of it are asked for again, each alone."""
    server = start_server("valkey")
    with clients(server.url) as (client,):
        client.execute_command("ACL", "SETUSER", "a", "on", ">p", "~eo:key*", "&*", "+@all")
    keys = [*(f"key {n}" for n in range(5)), "forbidden", *(f"key {n}" for n in range(5, 9))]
    with RedisStore(f"redis://a:p@127.0.0.1:{server.port}") as store:

        async def crowd() -> list[Any]:
            verbs = store.for_asyncio()
            await verbs.claim(claim_of("key"))
            calls = [verbs.claim(claim_of(key)) for key in keys]
            return list(await asyncio.gather(*calls, return_exceptions=True))

        def threads() -> list[Any]:
            callers = [Caller(lambda key=key: run(store.claim(claim_of(key)))) for key in keys]
            for caller in callers:
                caller.join(20)
            return [caller.error or caller.result for caller in callers]

        answers = asyncio.run(crowd()) if colour == "asyncio" else threads()
        with pytest.raises(StoreUnavailable, match="NOPERM"):
            in_colour(colour, store, lambda verbs: verbs.claim_many([claim_of("key"), claim_of("forbidden")]))
    error = answers.pop(5)
    assert isinstance(error, StoreUnavailable)
    assert "NOPERM" in str(error)
    assert {answer.verdict for answer in answers} == {Verdict.CLAIMED}


def test_strangers_who_claim_one_key_at_once(store: RedisStore) -> None:
    """They share a command, and still one of them is first; who asks twice under one name is answered twice."""
    mine = claim_of("k")

    async def crowd() -> list[Decision]:
        verbs = store.for_asyncio()
        await verbs.claim(claim_of("warm"))
        claims = [mine, mine, *(claim_of("k") for _ in range(5))]
        return list(await asyncio.gather(*map(verbs.claim, claims)))

    decisions = asyncio.run(crowd())
    assert [decision.verdict for decision in decisions] == [Verdict.CLAIMED] * 2 + [Verdict.BUSY] * 5
    assert len({decision.record.fence for decision in decisions if decision.record}) == 1


@COLOURS
def test_a_batch_of_all_kinds(store: RedisStore, colour: str) -> None:
    """Whatever is in a batch, each has its own answer: new, known, held, waited for, too late, of any size."""

    async def batch(verbs: Store) -> None:
        held, done, once = hold(store, "held"), hold(store, "done"), hold(store, "once", once=True)
        run(store.complete(ending_of(done)))
        claims = [
            claim_of("new"),
            claim_of("held"),
            claim_of("bare", fingerprint=b""),
            claim_of("done"),
            claim_of("done", fingerprint=b"other"),
            claim_of("never", may_create=False),
            claim_of("held", owner=held.owner),
            claim_of("odd", fingerprint=b"odd", once=True),
        ]
        decisions = await verbs.claim_many(claims[:4] + claims[5:6] + claims[7:])
        others = await verbs.claim_many([claims[4], claims[6]])
        assert [decision.verdict.value for decision in decisions + others] == [
            "claimed", "busy", "claimed", "replay", "late", "claimed", "mismatch", "claimed",
        ]  # fmt: skip
        new, _, bare, _, _, odd = [decision.record for decision in decisions]
        assert new is not None
        assert bare is not None
        assert odd is not None
        endings = [
            ending_of(new, b"r" * 100_000),
            ending_of(bare, b"small"),
            ending_of(bare._replace(key="nothing")),
            ending_of(odd, None),
            ending_of(once, None, state=State.IN_DOUBT),
            ending_of(done),
            ending_of(held, owner=b"stranger"),
        ]
        answers = await verbs.complete_many(endings)
        assert [answer.value for answer in answers] == [
            "done", "done", "fenced", "done", "done", "repeated", "fenced",
        ]  # fmt: skip
        found = [await verbs.get(key) for key in ("new", "bare", "nothing", "odd", "once")]
        assert [record and record.result for record in found] == [b"r" * 100_000, b"small", None, None, None]
        assert [record and len(record.fingerprint) for record in found] == [16, 0, None, 3, 16]

    in_colour(colour, store, batch)


def test_a_cancelled_caller_disturbs_nobody(store: RedisStore) -> None:
    """Its reply is thrown away when it comes; the others get their own, also those who come later."""

    async def crowd() -> list[Decision]:
        verbs = store.for_asyncio()
        await verbs.claim(claim_of("warm"))
        calls = [asyncio.ensure_future(verbs.claim(claim_of(f"key {n}"))) for n in range(30)]
        await asyncio.sleep(0)
        for call in calls[::3]:
            call.cancel()
        late = asyncio.ensure_future(verbs.claim_many([claim_of(f"late {n}") for n in range(5)]))
        await asyncio.sleep(0)
        late.cancel()
        done = [await call for number, call in enumerate(calls) if number % 3]
        return [*done, await verbs.claim(claim_of("after"))]

    decisions = asyncio.run(crowd())
    keys = [f"key {n}" for n in range(30) if n % 3] + ["after"]
    assert [decision.record.key for decision in decisions if decision.record] == keys
    assert {decision.verdict for decision in decisions} == {Verdict.CLAIMED}


def test_a_caller_cancelled_while_connecting_disturbs_nobody(proxy: FaultProxy, prefix: str) -> None:
    """Who waits for the same connection gets it, though the one who wanted it first has left."""
    with RedisStore(proxy.url, prefix=prefix) as store:

        async def crowd() -> Decision:
            verbs = store.for_asyncio()
            proxy.stall()
            first = asyncio.ensure_future(verbs.claim(claim_of("first")))
            second = asyncio.ensure_future(verbs.claim(claim_of("second")))
            await asyncio.sleep(0)
            first.cancel()
            await asyncio.sleep(0)
            proxy.heal()
            return await second

        assert asyncio.run(crowd()).verdict is Verdict.CLAIMED
    assert proxy.connections == 1


def test_an_interrupted_caller_leaves_no_broken_connection(
    behind_proxy: RedisStore, proxy: FaultProxy
) -> None:
    """Ctrl-C between a command and its reply: the reply never reaches anybody else."""
    main = threading.get_ident()

    def interrupt(asked: int) -> None:
        wait_until(lambda: proxy.bursts > asked, what="A command on its way")
        signal.pthread_kill(main, signal.SIGINT)

    hold(behind_proxy, "k")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for number in range(3):
            proxy.stall()
            opened, asked = proxy.connections, proxy.bursts
            interruption = Caller(lambda asked=asked: interrupt(asked))
            with pytest.raises(KeyboardInterrupt):
                run(behind_proxy.claim(claim_of(f"interrupted {number}")))
            interruption.answer()
            proxy.heal()
            assert hold_and_look(behind_proxy, f"key {number}")
            assert proxy.connections == opened + 1
    finally:
        signal.signal(signal.SIGINT, before)


# Threads, loops, processes


def test_threads_have_connections_of_their_own_and_keep_them(proxy: FaultProxy, prefix: str) -> None:
    """As many connections as were needed at once, and no more for any number of calls."""
    with RedisStore(proxy.url, prefix=prefix) as store, ThreadPoolExecutor(8) as threads:
        for turn in range(20):
            decisions = list(
                threads.map(lambda n, turn=turn: run(store.claim(claim_of(f"{turn} {n}"))), range(8))
            )
            assert {decision.verdict for decision in decisions} == {Verdict.CLAIMED}
    assert 1 <= proxy.connections <= 8


def test_more_threads_than_connections(
    proxy: FaultProxy, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are only so many connections: the others wait in line, and each gets its own answer."""
    monkeypatch.setattr(_redis_threads, "MOST_AT_ONCE", 3)
    together = threading.Barrier(12)

    def look(number: int) -> bool:
        together.wait(20)
        return all(hold_and_look(store, f"{number} {turn}") for turn in range(20))

    with RedisStore(proxy.url, prefix=prefix) as store, ThreadPoolExecutor(12) as threads:
        assert all(threads.map(look, range(12)))
    assert 1 <= proxy.connections <= 3


def test_event_loops_in_threads(store: RedisStore) -> None:
    """Each loop has a connection of its own; they meet at the server."""

    async def crowd(owner: int) -> list[Decision]:
        verbs = store.for_asyncio()
        return list(await asyncio.gather(*(verbs.claim(claim_of(f"key {n}")) for n in range(50))))

    callers = [Caller(lambda n=n: asyncio.run(crowd(n))) for n in range(4)]
    verdicts = [[decision.verdict for decision in caller.answer()] for caller in callers]
    for number in range(50):
        assert sorted(v[number].value for v in verdicts) == ["busy"] * 3 + ["claimed"]


def test_event_loops_that_begin_at_once(store: RedisStore) -> None:
    """In many threads, while those before them end: each finds connections of its own, and none trips over another."""
    verbs, usual = store.for_asyncio(), sys.getswitchinterval()

    def begin_and_end() -> None:
        for _ in range(60):
            asyncio.run(verbs.get("k"))

    sys.setswitchinterval(1e-7)
    try:
        callers = [Caller(begin_and_end) for _ in range(12)]
        for caller in callers:
            caller.answer(60)
    finally:
        sys.setswitchinterval(usual)


def test_a_loop_that_was_closed_in_the_middle_is_its_own_trouble(valkey: HasURL, prefix: str) -> None:
    """Closed while a call is under way, and never shut down: nobody on another loop fails for it, nor a close."""
    assert output_of(CLOSED_IN_THE_MIDDLE, f"{valkey.url}?prefix={prefix}") == TOLD_OF_CLOSED_LOOPS


def test_event_loops_leave_nothing_behind(start_server: StartServer) -> None:
    """One after another, loops use the store and end: their connections end with them, without a warning."""
    server = start_server("valkey")
    with RedisStore(server.url) as store:
        for number in range(5):
            asyncio.run(store.for_asyncio().claim(claim_of(f"key {number}")))  # type: ignore[arg-type]
        wait_until(lambda: connections_of(server.url, "me") == 0, what="The end of the connections")
        assert len(store._lines) <= 1
        loop = asyncio.new_event_loop()  # one that nobody ends in good order
        loop.run_until_complete(store.for_asyncio().claim(claim_of("k")))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
        gc.collect()
    wait_until(lambda: connections_of(server.url, "me") == 0, what="The end of the connections")


def test_closing_from_another_thread(start_server: StartServer) -> None:
    """A loop hears of it: who waits is told, whoever comes later too, and its connection ends."""
    server = start_server("valkey")
    store = RedisStore(server.url)
    verbs = store.for_asyncio()

    async def wait_and_see() -> list[type]:
        await verbs.claim(claim_of("k"))
        server.pause()
        waiting = asyncio.ensure_future(verbs.claim(claim_of("waiting")))
        await asyncio.sleep(0)
        await asyncio.to_thread(store.close)
        kinds = []
        for call in (waiting, verbs.claim(claim_of("later"))):
            with pytest.raises(StoreError, match="closed") as told:
                await call
            kinds.append(told.type)
        server.resume()
        return kinds

    assert asyncio.run(wait_and_see()) == [StoreUnavailable] * 2
    wait_until(lambda: connections_of(server.url, "me") == 0, what="The end of the connections")


@FORKS
def test_a_forked_process_has_connections_of_its_own(store: RedisStore) -> None:
    """Parent and child go on at once, and neither reads what was said to the other."""
    for number in range(3):
        hold(store, f"before {number}")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            fine = [hold_and_look(store, f"child {n}") for n in range(50)]
            fine.append(asyncio.run(_claimed(store, "child's loop")))
            status = 0 if all(fine) else 2
        finally:
            os._exit(status)
    assert all(hold_and_look(store, f"parent {number}") for number in range(50))
    assert os.waitpid(child, 0)[1] == 0
    assert run(store.stats()).keys == 104


async def _claimed(store: RedisStore, key: str) -> bool:
    return (await store.for_asyncio().claim(claim_of(key))).verdict is Verdict.CLAIMED


@FORKS
def test_a_fork_beside_an_event_loop(store: RedisStore) -> None:
    """A child leaves the loop's connection alone: the parent's loop goes on with it."""

    async def fork_and_go_on() -> tuple[int, bool]:
        assert await _claimed(store, "before")
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = 0 if hold_and_look(store, "child") else 2
            finally:
                os._exit(status)
        ended = await asyncio.to_thread(os.waitpid, child, 0)
        return ended[1], await _claimed(store, "after")

    assert asyncio.run(fork_and_go_on()) == (0, True)


# Waiting for another process


@COLOURS
@pytest.mark.parametrize("ended", ["completed", "released", "given back", "taken over"])
def test_a_watcher_is_told(store: RedisStore, valkey: HasURL, prefix: str, colour: str, ended: str) -> None:
    """However a watched record changes, who watches hears of it long before it would look again."""
    lease = 0.05 if ended == "taken over" else LONG
    held = hold(store, "k", lease=lease)
    with RedisStore(valkey.url, prefix=prefix) as other:
        # Loads the script where it is missing.
        in_colour(colour, other, lambda verbs: verbs.watch(held, 0.01))
        began = time.monotonic()
        watcher = Caller(lambda: in_colour(colour, other, lambda verbs: verbs.watch(held, 30.0)))
        with clients(valkey.url) as (client,):
            wait_until(lambda: client.pubsub_numsub(f"{prefix}k")[0][1] == 1, what="Somebody who listens")
        if ended == "completed":
            assert run(store.complete(ending_of(held))) is Ending.DONE
        elif ended == "taken over":
            wait_until(lambda: run(store.claim(claim_of("k"))).verdict is Verdict.TAKEN_OVER)
        else:
            began_at_all = ended == "released"
            assert run(store.release("k", held.owner, held.fence, LONG, began_at_all)) is Ending.DONE
        assert watcher.answer() is True
        assert time.monotonic() - began < 20


@COLOURS
def test_a_watch_ends_with_its_store(store: RedisStore, valkey: HasURL, prefix: str, colour: str) -> None:
    """Who waits for another process is not left waiting when its own store is closed."""
    held = hold(store, "k")
    other = RedisStore(valkey.url, prefix=prefix)
    watcher = Caller(lambda: in_colour(colour, other, lambda verbs: verbs.watch(held, 3600.0)))
    with clients(valkey.url) as (client,):
        wait_until(lambda: client.pubsub_numsub(f"{prefix}k")[0][1] == 1, what="Somebody who listens")
        other.close()
        with suppress(StoreUnavailable):
            watcher.answer()
        wait_until(lambda: client.pubsub_numsub(f"{prefix}k")[0][1] == 0, what="Nobody who listens")


@COLOURS
def test_a_watch_ends_with_its_time(store: RedisStore, colour: str) -> None:
    """Nothing happens: then who waits looks again by itself, and so does who comes too late."""
    held = hold(store, "k")
    in_colour(colour, store, lambda verbs: verbs.watch(held, 0.01))
    began = time.monotonic()
    assert in_colour(colour, store, lambda verbs: verbs.watch(held, 0.1)) is True
    assert time.monotonic() - began < 10
    run(store.complete(ending_of(held)))
    assert in_colour(colour, store, lambda verbs: verbs.watch(held, 30.0)) is True
    assert time.monotonic() - began < 20


@COLOURS
def test_being_watched_changes_no_answer(store: RedisStore, colour: str) -> None:
    """A watched record is renewed, swapped, ended and read as any other, and loses its mark with its holder."""
    held = hold(store, "k", lease=0.05)
    in_colour(colour, store, lambda verbs: verbs.watch(held, 0.01))
    in_colour(colour, store, lambda verbs: verbs.watch(held, 0.01))
    assert in_colour(colour, store, lambda verbs: verbs.get("k")) == held
    again = in_colour(colour, store, lambda verbs: verbs.claim(claim_of("k", owner=held.owner))).record
    assert (again.fence, again.attempts) == (held.fence, 1)
    in_colour(colour, store, lambda verbs: verbs.watch(again, 0.01))
    assert in_colour(colour, store, lambda verbs: verbs.stats()).by_state == {"PENDING": 1}
    doubt = ending_of(again, None, state=State.IN_DOUBT)
    assert in_colour(colour, store, lambda verbs: verbs.complete(doubt)) is Ending.DONE
    settled = ending_of(again, b"it happened", owner=NOBODY)
    assert in_colour(colour, store, lambda verbs: verbs.complete(settled)) is Ending.DONE
    assert in_colour(colour, store, lambda verbs: verbs.get("k")).result == b"it happened"


@COLOURS
@pytest.mark.parametrize("forbidden", ["-subscribe", "-unsubscribe", "-publish", "resetchannels"])
def test_who_may_not_be_told_looks_by_itself(start_server: StartServer, colour: str, forbidden: str) -> None:
    """A user without the right to listen is no worse off, and no reply reaches the wrong caller."""
    server = start_server("valkey")
    with clients(server.url) as (client,):
        client.execute_command("ACL", "SETUSER", "a", "on", ">p", "~*", "&*", "+@all", forbidden)

    async def watch_and_go_on(verbs: Store) -> list[object]:
        held = (await verbs.claim(claim_of("k"))).record
        assert held is not None
        told = [await verbs.watch(held, 0.01) for _ in range(3)]
        after = (await verbs.claim(claim_of("after"))).record
        assert await verbs.get("after") == after
        assert await verbs.complete(ending_of(held)) is Ending.DONE
        return told

    with RedisStore(f"redis://a:p@127.0.0.1:{server.port}") as store:
        told = in_colour(colour, store, watch_and_go_on)
    if forbidden != "-unsubscribe":
        assert told[1:] == [forbidden == "-publish"] * 2


def test_many_watchers_share_a_loops_connection(store: RedisStore, valkey: HasURL, prefix: str) -> None:
    """They wait together on one connection, which others use meanwhile; cancelled ones are not missed."""
    held = [hold(store, f"key {n % 3}") if n < 3 else None for n in range(3)]

    async def wait_together(other: RedisStore) -> list[bool]:
        verbs = other.for_asyncio()
        records = [record for record in held if record] * 5
        await verbs.watch(records[0], 0.01)
        watchers = [asyncio.ensure_future(verbs.watch(record, 30.0)) for record in records]
        await asyncio.to_thread(wait_until, lambda: all(_is_watched(valkey, prefix, r.key) for r in records))
        watchers[0].cancel()
        watchers[1].cancel()
        for record in records[:3]:
            await verbs.complete(ending_of(record))
        return list(await asyncio.gather(*watchers[2:]))

    with RedisStore(valkey.url, prefix=prefix) as other:
        assert asyncio.run(wait_together(other)) == [True] * 13


def _is_watched(valkey: HasURL, prefix: str, key: str) -> bool:
    with clients(valkey.url) as (client,):
        return client.getrange(f"{prefix}{key}", 0, 0) == b"\xa5"


def test_a_waiting_duplicate_in_another_process_gets_the_result(valkey: HasURL, prefix: str) -> None:
    """Two receivers that share nothing but the server: the second waits for the first, and hears of its end."""
    entered, leave = threading.Event(), threading.Event()

    def slow(message: Message) -> str:
        entered.set()
        leave.wait(20)
        return "slow"

    policy = Policy(keep="1h", lease="1m", busy="wait", wait="30s")
    with (
        Receiver(RedisStore(valkey.url, prefix=prefix), policy=policy) as one,
        Receiver(RedisStore(valkey.url, prefix=prefix), policy=policy) as two,
    ):
        first = Caller(lambda: one.process(Message("m"), slow))
        entered.wait(20)
        second = Caller(lambda: two.process(Message("m"), slow))
        wait_until(lambda: _some_watched(valkey, prefix), what="A duplicate that waits")
        leave.set()
        assert (first.answer().value, first.answer().replayed) == ("slow", False)
        assert (second.answer().value, second.answer().replayed) == ("slow", True)


def _some_watched(valkey: HasURL, prefix: str) -> bool:
    with clients(valkey.url) as (client,):
        return any(client.getrange(name, 0, 0) == b"\xa5" for name in client.scan_iter(f"{prefix}*"))


# Replicas


@COLOURS
def test_waiting_for_replicas(
    start_server: StartServer, colour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With wait:1 an answer has been confirmed by a replica; without one there is no answer, and nothing is lost."""
    monkeypatch.setattr(_redis_wire, "WAIT_SHARE", 0.05)  # a second, on a slow machine too
    primary = start_server("valkey")
    replica = start_server("valkey", replicaof=f"127.0.0.1 {primary.port}")
    with (
        RedisStore(primary.url, durability="wait:1", timeout=20.0) as store,
        RedisStore(primary.url) as beside,
        clients(replica.url) as (client,),
    ):
        held = in_colour(colour, store, lambda verbs: verbs.claim(claim_of("k"))).record
        assert client.exists("eo:k")
        many = in_colour(colour, store, lambda verbs: verbs.claim_many([claim_of(f"{n}") for n in range(20)]))
        assert all(client.exists(f"eo:{decision.record.key}") for decision in many)
        done = hold(beside, "done")
        replica.pause()
        with pytest.raises(StoreUnavailable, match="0 of 1 replicas"):
            in_colour(colour, store, lambda verbs: verbs.complete(ending_of(held)))
        # Sent again, it is there but not confirmed.
        with pytest.raises(StoreUnavailable, match="0 of 1 replicas"):
            in_colour(colour, store, lambda verbs: verbs.complete(ending_of(held)))
        assert run(beside.complete(ending_of(done))) is Ending.DONE
        with pytest.raises(StoreUnavailable, match="0 of 1 replicas"):  # nor is what another one completed
            in_colour(colour, store, lambda verbs: verbs.claim(claim_of("done")))
        replica.resume()
        ending = in_colour(colour, store, lambda verbs: verbs.complete(ending_of(held)))
        assert ending is Ending.REPEATED
        assert in_colour(colour, store, lambda verbs: verbs.claim(claim_of("done"))).verdict is Verdict.REPLAY
    with (
        RedisStore(primary.url, durability="wait:2", timeout=2.0) as store,
        pytest.raises(StoreUnavailable, match="of 2"),
    ):
        in_colour(colour, store, lambda verbs: verbs.claim(claim_of("k")))


@COLOURS
def test_watching_while_replicas_confirm(start_server: StartServer, colour: str) -> None:
    """Being told and waiting for replicas go together on one connection."""
    primary = start_server("valkey")
    start_server("valkey", replicaof=f"127.0.0.1 {primary.port}")

    async def watch_and_go_on(verbs: Store) -> None:
        held = (await verbs.claim(claim_of("k"))).record
        assert held is not None
        for _ in range(3):
            assert await verbs.watch(held, 0.01) in (True, False)
            assert await verbs.get("k") == held
        assert await verbs.complete(ending_of(held)) is Ending.DONE

    with RedisStore(primary.url, durability="wait:1") as store:
        in_colour(colour, store, watch_and_go_on)


@COLOURS
def test_a_server_that_refuses_to_wait_for_replicas(start_server: StartServer, colour: str) -> None:
    """Nobody gets an unconfirmed answer, and everybody gets one: the server's refusal."""
    primary = start_server("valkey", busy_reply_threshold=50)
    start_server("valkey", replicaof=f"127.0.0.1 {primary.port}")
    with clients(primary.url) as (client,):
        client.execute_command("ACL SETUSER shop on >secret ~* &* +@all -wait")
    login = primary.url.replace("://", "://shop:secret@")
    with (
        RedisStore(login, durability="wait:1") as store,
        pytest.raises(StoreUnavailable, match=r"NOPERM.*also WAIT"),
    ):
        in_colour(colour, store, lambda verbs: verbs.claim(claim_of("k")))

    async def ask(verbs: Store) -> None:
        await verbs.claim(claim_of("before"))
        with busy(primary):
            for asking in (verbs.claim(claim_of("i")), verbs.claim_many([claim_of("l"), claim_of("m")])):
                with pytest.raises(StoreUnavailable, match="BUSY"):
                    await asking
        assert (await verbs.claim(claim_of("i"))).verdict is Verdict.CLAIMED

    with RedisStore(primary.url, durability="wait:1") as store:
        in_colour(colour, store, ask)


@contextmanager
def busy(server: Server) -> Iterator[None]:
    """A server that runs a script for ever, meanwhile."""
    with clients(server.url) as (client,), clients(server.url) as (other,), ThreadPoolExecutor(1) as beside:
        script = beside.submit(client.eval, "while true do end", 0)
        wait_until(lambda: is_busy(other), what="A busy server")
        try:
            yield
        finally:
            other.script_kill()
            assert isinstance(script.exception(), redis.ResponseError)


def is_busy(client: redis.Redis) -> bool:
    try:
        client.ping()
    except redis.ResponseError as error:
        return str(error).startswith("BUSY")
    return False


@COLOURS
def test_a_part_of_a_cluster_without_replicas(
    start_server: StartServer, colour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With wait:1 its own keys are refused; but it shows the way to those of others, and they go on."""
    monkeypatch.setattr(_redis_wire, "WAIT_SHARE", 0.05)
    cluster = start_server("valkey-cluster", replicas=True)
    assert isinstance(cluster, ValkeyCluster)
    cluster.replicas[1].kill()
    url = f"redis+cluster://{HOST}:{cluster.nodes[1].port}"
    with RedisStore(url, durability="wait:1", timeout=20.0) as store:
        safe, lone = (a_key_between(SLOTS * third // 3, SLOTS * (third + 1) // 3) for third in (0, 1))

        async def ask(verbs: Store) -> None:
            assert (await verbs.claim(claim_of(safe))).verdict is Verdict.CLAIMED
            with pytest.raises(StoreUnavailable, match="0 of 1 replicas"):
                await verbs.claim(claim_of(lone))
            assert (await verbs.claim(claim_of(safe))).verdict is Verdict.BUSY

        in_colour(colour, store, ask)


def a_key_between(first: int, end: int) -> str:
    """A key whose slot is one of these."""
    names = (f"key {number}" for number in count())
    return next(name for name in names if first <= slot_of(f"eo:{name}".encode()) < end)


def test_tasks_wait_for_replicas_together(start_server: StartServer) -> None:
    """One WAIT confirms what all callers of a turn have written."""
    primary = start_server("valkey")
    start_server("valkey", replicaof=f"127.0.0.1 {primary.port}")
    with RedisStore(primary.url, durability="wait:1") as store, clients(primary.url) as (client,):

        async def crowd() -> set[Verdict]:
            verbs = store.for_asyncio()
            await verbs.claim(claim_of("warm"))
            client.config_resetstat()
            calls = [verbs.claim(claim_of(f"key {n}")) for n in range(MOST_AT_ONCE)]
            return {decision.verdict for decision in await asyncio.gather(*calls)}

        assert asyncio.run(crowd()) == {Verdict.CLAIMED}
        assert client.info("commandstats")["cmdstat_wait"]["calls"] == 1


# Clusters


def test_the_two_colours_share_one_face(store: RedisStore) -> None:
    """A view for event loops has the features of its store, and closes it."""
    view = store.for_asyncio()
    assert isinstance(view, OnLoops)
    assert view.features == store.features
    view.close()
    with pytest.raises(StoreUnavailable):
        run(store.get("k"))


@COLOURS
def test_keys_that_move_are_found(start_server: StartServer, colour: str) -> None:
    """While a slot moves to another server, and after it has moved, every step reaches its key."""
    from effectonce.stores._redis_routes import slot_of

    cluster = start_server("valkey-cluster")
    nodes: list[Any] = cluster.nodes  # type: ignore[attr-defined]
    with RedisStore(cluster.url) as store:
        held = [hold(store, f"{{tag}}{n}") for n in range(10)]
        slot = slot_of(b"eo:{tag}0")
        assert {slot_of(f"eo:{record.key}".encode()) for record in held} == {slot}
        owner = next(node for node in nodes if _keys(node, slot) == 10)
        heir = next(node for node in nodes if node is not owner)
        names = {node: _node_id(node) for node in nodes}
        _say(heir, "CLUSTER", "SETSLOT", slot, "IMPORTING", names[owner])
        _say(owner, "CLUSTER", "SETSLOT", slot, "MIGRATING", names[heir])
        for record in held[:5]:
            _say(owner, "MIGRATE", "127.0.0.1", heir.port, f"eo:{record.key}", 0, 5000)

        async def half_way(verbs: Store) -> None:
            for record in held:
                assert await verbs.get(record.key) == record
                assert (await verbs.claim(claim_of(record.key))).verdict is Verdict.BUSY
            fresh = await verbs.claim_many([claim_of(f"{{tag}}new {n}") for n in range(5)])
            assert {decision.verdict for decision in fresh} == {Verdict.CLAIMED}
            endings = await verbs.complete_many([ending_of(record) for record in held[3:7]])
            assert endings == [Ending.DONE] * 4

        async def all_the_way(verbs: Store) -> None:
            for record in held[3:7]:
                assert (await verbs.claim(claim_of(record.key))).verdict is Verdict.REPLAY
            moved = _redirections(owner)
            assert await verbs.complete_many([ending_of(record) for record in held[:3]]) == [Ending.DONE] * 3
            assert _redirections(owner) == moved  # the way is known now
            assert (await verbs.stats()).keys == 15
            assert len(await verbs.scan()) == 15

        in_colour(colour, store, half_way)
        for name in _say(owner, "CLUSTER", "GETKEYSINSLOT", slot, 100):
            _say(owner, "MIGRATE", "127.0.0.1", heir.port, name, 0, 5000)
        for node in (heir, owner, *nodes):
            _say(node, "CLUSTER", "SETSLOT", slot, "NODE", names[heir])
        in_colour(colour, store, all_the_way)


@COLOURS
def test_a_cluster_with_a_server_down(start_server: StartServer, colour: str) -> None:
    """Keys of the others go on if the cluster says so; those of the one that is down wait until it is back."""
    cluster = start_server("valkey-cluster", cluster_require_full_coverage="no")
    nodes: list[Any] = cluster.nodes  # type: ignore[attr-defined]
    with RedisStore(cluster.url, timeout=2.0) as store:
        held = [hold(store, f"key {number}") for number in range(30)]
        extra = [hold(store, f"{colour} {number}") for number in range(30)]
        nodes[0].kill()  # the one that the URL names

        async def each(verbs: Store) -> list[str]:
            found = []
            for number in range(30):
                try:
                    found.append((await verbs.claim(claim_of(f"key {number}"))).verdict.value)
                except StoreUnavailable:
                    found.append("unavailable")
            return found

        async def together(verbs: Store) -> set[Verdict | None]:
            with pytest.raises(PartlyAnswered) as partly:
                await verbs.claim_many([claim_of(f"new {number}") for number in range(30)])
            return {decision and decision.verdict for decision in partly.value.answers}

        async def renewed(verbs: Store) -> set[bool | None]:
            with pytest.raises(PartlyAnswered) as partly:
                await verbs.renew_many([renewal_of(record) for record in held])
            return set(partly.value.answers)

        async def ended(verbs: Store) -> set[Ending | None]:
            with pytest.raises(PartlyAnswered) as partly:
                await verbs.complete_many([ending_of(record) for record in extra])
            return set(partly.value.answers)

        assert set(in_colour(colour, store, each)) == {"busy", "unavailable"}
        assert in_colour(colour, store, together) == {Verdict.CLAIMED, None}
        assert in_colour(colour, store, renewed) == {True, None}
        assert in_colour(colour, store, ended) == {Ending.DONE, None}
        nodes[0].restart()
        wait_until(lambda: set(in_colour(colour, store, each)) == {"busy"}, what="All keys")


@COLOURS
def test_a_server_of_a_cluster_that_is_down_refuses_only_its_own(
    start_server: StartServer, colour: str
) -> None:
    """With the others everything goes on, however often the one that is down has been asked in vain."""
    cluster = start_server("valkey-cluster", cluster_require_full_coverage="no")
    nodes: list[Any] = cluster.nodes  # type: ignore[attr-defined]
    with Receiver(f"{cluster.url}?timeout=2") as receiver:
        first = [receiver.process(Message(f"first {n}"), lambda message: message.id) for n in range(60)]
        assert {outcome.status for outcome in first} == {"executed"}
        down = nodes[0]
        down.kill()

        async def ask(number: int) -> str:
            message = Message(f"{colour} {number}")
            try:
                if colour == "asyncio":
                    return (await receiver.aprocess(message, _awaited_id)).status
                return receiver.process(message, lambda message: message.id).status
            except StoreUnavailable as error:
                return str(error)

        async def ask_all(verbs: Store) -> dict[str, str]:
            return {receiver.key_of(Message(f"{colour} {n}")): await ask(n) for n in range(150)}

        told = in_colour(colour, receiver.store, ask_all)
        assert {receiver.store.place_of(key) for key, said in told.items() if said != "executed"} == {
            ("127.0.0.1", down.port)
        }
        assert any("is not asked for another" in said for said in told.values())


async def _awaited_id(message: Message) -> str:
    return message.id


def _say(node: Any, *words: Any) -> Any:
    with node.client() as client:
        return client.execute_command(*words)


def _redirections(node: Any) -> int:
    with node.client() as client:
        return int(client.info("errorstats").get("errorstat_MOVED", {"count": 0})["count"])


def _node_id(node: Any) -> str:
    return str(_say(node, "CLUSTER", "MYID"))


def _keys(node: Any, slot: int) -> int:
    return int(_say(node, "CLUSTER", "COUNTKEYSINSLOT", slot))
