"""Redis in trouble: killed, out of memory, failed over, cut off. No effect happens twice, and no answer is wrong.

Where Redis itself may forget what it acknowledged, the test shows what the store's promise says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.crash.sink import Sink, Stale
from tests.integration.redis_helpers import (
    COLOURS,
    claim_of,
    clients,
    ending_of,
    hold,
    hold_and_look,
    in_colour,
)
from tests.integration.sqlite_helpers import Caller
from tests.servers import Server
from tests.servers.fixtures import HasURL
from tests.servers.proxy import FaultProxy

from effectonce import InProgress, LeaseLost, Message, Outcome, Policy, Receiver, current
from effectonce._blocking import run
from effectonce._records import Ending, State, Verdict
from effectonce.errors import StoreUnavailable
from effectonce.keys import uuid4
from effectonce.stores import Store, _redis_wire
from effectonce.stores.redis import RedisStore
from effectonce.testing.clocks import wait_until

StartServer = Callable[..., Server]
POLICY = Policy(keep="1h", lease="2s", wait="8s")
NOT_YET = (InProgress, LeaseLost, StoreUnavailable, Stale)
MESSAGES = [f"message {number}" for number in range(60)]
WORKERS = 6


class Traffic:
    """Workers who process the same messages, each until it has an answer to all of them."""

    def __init__(self, url: str, folder: Path, **options: Any) -> None:
        self.sink = Sink(folder / "sink.db")
        self.receivers = [
            Receiver(RedisStore(url, timeout=1.0, **options), policy=POLICY, breaker=None)
            for _ in range(WORKERS)
        ]
        self.answers: list[tuple[str, str]] = []
        self.errors = 0
        self.callers = [Caller(lambda n=n: self.work(n)) for n in range(WORKERS)]

    def work(self, number: int) -> None:
        left = MESSAGES[number:] + MESSAGES[:number]
        while left:
            id = left.pop(0)
            try:
                outcome = self.receivers[number].process(Message(id), self.handle)
            except NOT_YET:
                self.errors += 1
                left.append(id)
            else:
                self.answers.append((id, str(outcome.value)))

    def handle(self, message: Message) -> str:
        fence = current().fence
        return self.sink.apply(message.id, fence, f"{message.id} under {fence}")

    def wait_for(self, answers: int) -> None:
        wait_until(lambda: len(self.answers) >= answers, seconds=60, what=f"{answers} answers")

    def check(self) -> None:
        """Every worker got every answer, and each was the one effect that the sink has."""
        for caller in self.callers:
            caller.answer(90)
        assert len(self.answers) == WORKERS * len(MESSAGES)
        assert set(self.answers) == {(id, self.sink.effect(id)) for id in MESSAGES}
        for receiver in self.receivers:
            receiver.close()
        self.sink.close()


# Connections cut before and after each command


@COLOURS
@pytest.mark.parametrize("lost", ["request", "reply"])
def test_every_command_may_be_lost(valkey: HasURL, colour: str, lost: str) -> None:
    """Cut off before or after the server has done it: the flow sends it again, and the handler runs once."""
    with FaultProxy(valkey.url) as proxy:
        for nth in range(1, 50):
            before = proxy.fired
            runs = _deliver_with_a_loss(proxy, colour, lost, nth)
            assert runs == [1, 1]
            if proxy.fired == before:
                assert nth > 4  # claim, complete, replay, and those of another message
                return
    raise AssertionError("There is always something left to lose.")


def _deliver_with_a_loss(proxy: FaultProxy, colour: str, lost: str, nth: int) -> list[int]:
    """Process two messages and a duplicate of each, losing the nth thing that is said; how often each ran."""
    runs = dict.fromkeys(("a", "b"), 0)

    def handle(message: Message) -> str:
        runs[message.id] += 1
        return f"{message.id} done"

    async def ahandle(message: Message) -> str:
        return handle(message)

    async def deliver(receiver: Receiver, id: str) -> Outcome[str]:
        if colour == "asyncio":
            return await receiver.aprocess(Message(id), ahandle)
        return receiver.process(Message(id), handle)

    async def all_of_them() -> None:
        with Receiver(RedisStore(proxy.url, prefix=f"{uuid4()}:", timeout=5.0), policy=POLICY) as receiver:
            proxy.lose_request(nth) if lost == "request" else proxy.lose_reply(nth)
            first = [await deliver(receiver, id) for id in runs]
            again = [await deliver(receiver, id) for id in runs]
            proxy.heal()
        assert [outcome.value for outcome in first + again] == ["a done", "b done"] * 2
        assert [outcome.replayed for outcome in again] == [True, True]

    asyncio.run(all_of_them())
    return list(runs.values())


@COLOURS
@pytest.mark.parametrize("lost", ["request", "reply"])
def test_a_lost_batch_is_sent_again(valkey: HasURL, colour: str, lost: str) -> None:
    """A batch whose answer never came is claimed again under the same owners, and gets the same fences."""
    with FaultProxy(valkey.url) as proxy, RedisStore(proxy.url, prefix=f"{uuid4()}:") as store:

        async def batch(verbs: Store) -> None:
            await verbs.claim(claim_of("warm"))
            claims = [claim_of(f"key {n}") for n in range(20)]
            proxy.lose_request() if lost == "request" else proxy.lose_reply()
            try:
                first = await verbs.claim_many(claims)
            except StoreUnavailable:
                first = await verbs.claim_many(claims)
            again = await verbs.claim_many(claims)
            assert {decision.verdict for decision in first + again} == {Verdict.CLAIMED}
            assert [d.record.fence for d in first if d.record] == [d.record.fence for d in again if d.record]
            assert {d.record.attempts for d in again if d.record} == {1}

        in_colour(colour, store, batch)
        assert proxy.fired == 1


@COLOURS
def test_a_cut_connection_fails_who_was_waiting_and_nobody_else(valkey: HasURL, colour: str) -> None:
    """In the middle of a crowd: those on their way are told, those who come later are served."""
    with FaultProxy(valkey.url) as proxy, RedisStore(proxy.url, prefix=f"{uuid4()}:") as store:

        async def crowd() -> None:
            verbs = store.for_asyncio()
            await verbs.claim(claim_of("warm"))
            proxy.stall()
            waiting = [asyncio.ensure_future(verbs.claim(claim_of(f"key {n}"))) for n in range(10)]
            await asyncio.sleep(0)
            proxy.cut()
            answers = await asyncio.gather(*waiting, return_exceptions=True)
            assert {type(answer) for answer in answers} == {StoreUnavailable}
            proxy.heal()
            assert (await verbs.claim(claim_of("after"))).verdict is Verdict.CLAIMED

        def threads() -> None:
            hold(store, "warm")
            proxy.stall()
            waiting = [Caller(lambda n=n: run(store.claim(claim_of(f"key {n}")))) for n in range(10)]
            wait_until(lambda: proxy.connections >= 2, what="Several under way")
            proxy.cut()
            proxy.heal()
            for caller in waiting:
                caller.join(20)
                assert caller.error is None or isinstance(caller.error, StoreUnavailable)
            assert run(store.claim(claim_of("after"))).verdict is Verdict.CLAIMED

        asyncio.run(crowd()) if colour == "asyncio" else threads()


def test_connections_cut_while_they_are_idle(valkey: HasURL) -> None:
    """Nobody hears of it: each thread that meets one asks again on a new one."""
    with FaultProxy(valkey.url) as proxy, RedisStore(proxy.url, prefix=f"{uuid4()}:") as store:
        proxy.stall()
        crowd = [Caller(lambda n=n: hold(store, f"before {n}")) for n in range(4)]
        wait_until(lambda: proxy.connections == 4, what="A connection for each")
        proxy.heal()
        assert all(caller.answer() for caller in crowd)
        proxy.cut()
        crowd = [Caller(lambda n=n: hold_and_look(store, f"after {n}")) for n in range(4)]
        assert all(caller.answer() for caller in crowd)


# Killed and restarted


def test_a_crowd_that_loses_its_connection_asks_again(valkey: HasURL) -> None:
    """All callers of a loop share one: when it is cut nobody is refused, since the server is there."""
    callers, calls = 64, 20

    async def story(receiver: Receiver, cut: Callable[[], object]) -> None:
        asked = 0

        async def ask(id: str) -> None:
            nonlocal asked
            for _ in range(calls):
                asked += 1
                if asked == callers * calls // 2:
                    await asyncio.to_thread(cut)
                assert (await receiver.aprocess(Message(id), lambda _: id)).value == id

        await asyncio.gather(*(ask(uuid4()) for _ in range(callers)))

    with Receiver(valkey.url) as receiver, clients(valkey.url) as (server, *_):
        asyncio.run(story(receiver, lambda: server.client_kill_filter(_type="normal", skipme=True)))


def test_a_server_killed_in_the_middle_of_traffic(start_server: StartServer, tmp_path: Path) -> None:
    """SIGKILL and restart with appendonly, again and again: no effect twice, no key stuck, every answer the same."""
    server = start_server("redis", appendonly="yes", appendfsync="always")
    traffic = Traffic(server.url, tmp_path)
    for turn in range(4):
        traffic.wait_for(20 * (turn + 1))
        server.kill()
        server.restart()
    traffic.check()
    assert traffic.errors > 0


def test_scripts_flushed_in_the_middle_of_traffic(start_server: StartServer, tmp_path: Path) -> None:
    """The scripts come back with the next command that misses them, and nobody has to ask again."""
    server = start_server("valkey")
    traffic = Traffic(server.url, tmp_path)
    with clients(server.url) as (client,):
        for answers in range(10, WORKERS * len(MESSAGES), 10):
            traffic.wait_for(answers)
            client.script_flush()
    traffic.check()
    assert traffic.errors == 0


# Out of memory


@COLOURS
def test_a_server_out_of_memory(start_server: StartServer, colour: str) -> None:
    """Nothing new begins and nothing is lost: duplicates are answered, and all goes on when there is room again."""
    server = start_server("redis", maxmemory_policy="noeviction")
    with RedisStore(server.url) as store, clients(server.url) as (client,):
        done, held = hold(store, "done"), hold(store, "held")
        run(store.complete(ending_of(done)))
        client.config_set("maxmemory", 1)
        with pytest.raises(StoreUnavailable, match="out of memory"):
            in_colour(colour, store, lambda verbs: verbs.claim(claim_of("new")))
        with pytest.raises(StoreUnavailable, match="out of memory"):
            in_colour(colour, store, lambda verbs: verbs.complete(ending_of(held)))
        assert in_colour(colour, store, lambda verbs: verbs.claim(claim_of("done"))).verdict is Verdict.REPLAY
        assert in_colour(colour, store, lambda verbs: verbs.claim(claim_of("held"))).verdict is Verdict.BUSY
        client.config_set("maxmemory", 0)
        assert in_colour(colour, store, lambda verbs: verbs.complete(ending_of(held))) is Ending.DONE
        assert in_colour(colour, store, lambda verbs: verbs.get("new")) is None


def test_out_of_memory_in_the_middle_of_traffic(start_server: StartServer, tmp_path: Path) -> None:
    """Handlers that had begun get their results recorded when there is room again; no effect happens twice."""
    server = start_server("redis", maxmemory_policy="noeviction")
    traffic = Traffic(server.url, tmp_path)
    with clients(server.url) as (client,):
        traffic.wait_for(10)
        client.config_set("maxmemory", 1)
        wait_until(lambda: traffic.errors > 0, what="Somebody who is refused")
        client.config_set("maxmemory", 0)
    traffic.check()


# Failed over


@pytest.fixture
def pair(start_server: StartServer) -> Iterator[tuple[Server, Server, FaultProxy]]:
    """A primary, its replica, and what lies between them."""
    primary = start_server("valkey")
    with FaultProxy(primary.url) as between:
        yield primary, start_server("valkey", replicaof=f"127.0.0.1 {between.port}"), between


def _fail_over(primary: Server, replica: Server, between: FaultProxy) -> None:
    """The primary dies with what it had not passed on, and the replica takes its place."""
    between.refuse()
    between.cut()
    primary.kill()
    with clients(replica.url) as (client,):
        client.execute_command("REPLICAOF", "NO", "ONE")


def test_a_promoted_replica_may_lack_the_last_writes(pair: tuple[Server, Server, FaultProxy]) -> None:
    """What the default promises: Redis answers before it replicates, so after a failover an effect may happen again.

    Its fence is higher, so that a sink that checks fences can tell.
    """
    primary, replica, between = pair
    with RedisStore(primary.url) as before, RedisStore(replica.url) as after:
        early = hold(before, "early")
        wait_until(lambda: run(after.get("early")) == early, what="The replica")
        between.stall()
        late = hold(before, "late")
        assert run(before.complete(ending_of(late))) is Ending.DONE
        assert run(before.complete(ending_of(early))) is Ending.DONE
        _fail_over(*pair)
        again = run(after.claim(claim_of("late")))
        assert again.verdict is Verdict.CLAIMED
        assert again.record is not None
        assert again.record.fence > late.fence
        assert run(after.complete(ending_of(late))) is Ending.FENCED
        assert run(after.complete(ending_of(early))) is Ending.DONE  # sent again, it is recorded


@COLOURS
def test_what_a_replica_confirmed_survives_its_promotion(
    pair: tuple[Server, Server, FaultProxy], colour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With wait:1 what was answered is there after a failover, and what could not be confirmed was never answered."""
    primary, replica, between = pair
    monkeypatch.setattr(_redis_wire, "WAIT_SHARE", 0.1)  # two seconds, on a slow machine too
    options: dict[str, Any] = {"durability": "wait:1", "timeout": 20.0}
    with RedisStore(primary.url, **options) as before, RedisStore(replica.url) as after:

        async def until_it_fails(verbs: Store) -> list[str]:
            done: list[str] = []
            for number in range(1000):
                if number == 30:
                    between.stall()
                try:
                    decision = await verbs.claim(claim_of(f"key {number}"))
                    assert decision.record is not None
                    assert await verbs.complete(ending_of(decision.record)) is Ending.DONE
                except StoreUnavailable:
                    return done
                done.append(decision.record.key)
            return done

        done = in_colour(colour, before, until_it_fails)
        assert len(done) == 30
        _fail_over(*pair)
        for key in done:
            record = run(after.get(key))
            assert record is not None
            assert (record.state, record.result) == (State.COMPLETED, b"done")
        assert run(after.get("key 30")) is None


def test_a_primary_that_became_a_replica_is_left(start_server: StartServer) -> None:
    """After a planned failover the connection to the old primary is given up: its name may mean another server now."""
    one, two = start_server("valkey"), start_server("valkey")
    with FaultProxy(one.url) as proxy, RedisStore(proxy.url) as store:
        hold(store, "k")
        with clients(one.url) as (client,):
            client.execute_command("REPLICAOF", "127.0.0.1", two.port)
        with pytest.raises(StoreUnavailable, match="replica"):
            run(store.claim(claim_of("other")))
        proxy._target = ("127.0.0.1", two.port)  # as if the name now meant the other one
        assert run(store.claim(claim_of("other"))).verdict is Verdict.CLAIMED
        with clients(two.url) as (client,):
            assert client.exists("eo:other")
