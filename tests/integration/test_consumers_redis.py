"""Consumers of Redis Streams: each entry's effect happens once, whatever dies in between."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from tests.integration.consumers_helpers import SIZES, deliveries, storm
from tests.servers.proxy import FaultProxy

from effectonce import Message, Policy, Receiver
from effectonce.errors import ColourMismatch, UsageError
from effectonce.messaging import redis_streams
from effectonce.testing.clocks import wait_until

GROUP = "g"


@pytest.fixture
def client(valkey: Any) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(url_of(valkey)) as client:
        yield client


@pytest.fixture
def stream(request: pytest.FixtureRequest) -> str:
    return f"orders:{request.node.name}"


def url_of(server: Any) -> str:
    return str(server.url).replace("valkey://", "redis://")


def add(client: redis.Redis, stream: str, order: str, **fields: Any) -> None:
    client.xadd(stream, {"id": order, "payload": json.dumps({"order": order}), **fields})


def pending(client: redis.Redis, stream: str) -> int:
    return int(client.xpending(stream, GROUP)["pending"])


def dead(client: redis.Redis, stream: str) -> list[str]:
    return [fields[b"dead-reason"].decode() for _, fields in client.xrange(f"{stream}:dead")]


def consumer_of(
    client: redis.Redis, stream: str, receiver: Receiver, **options: Any
) -> redis_streams.Consumer:
    choices: dict[str, Any] = {"group": GROUP, "idle": "200ms", "retry": ("50ms", "100ms")}
    return redis_streams.Consumer(client, stream, receiver=receiver, **(choices | options))


def until(consumer: redis_streams.Consumer, handler: Any, condition: Callable[[], object]) -> None:
    """Consume until something is the case."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        consumer.run_once(handler)


@SIZES
@pytest.mark.parametrize("kind", ["redis_streams", "redis_streams_asyncio"])
def test_killed_consumers_leave_each_effect_once(
    kind: str, messages: int, valkey: Any, client: redis.Redis, stream: str, tmp_path: Path
) -> None:
    """Entries that come up to four times, and a consumer killed in the middle: each effect once, nothing left."""
    for order in deliveries(messages):
        add(client, stream, order)

    def is_drained() -> bool:
        (group,) = client.xinfo_groups(stream)
        return group["pending"] == 0 and group["lag"] == 0

    storm(kind, tmp_path, messages, is_drained, url=url_of(valkey), stream=stream)
    assert dead(client, stream) == []


def test_bad_entries_are_put_aside_with_a_reason_and_the_rest_goes_on(
    client: redis.Redis, stream: str
) -> None:
    """What can never be processed goes to the dead-letter stream; good entries around it are handled."""
    add(client, stream, "good-1")
    client.xadd(stream, {"id": "undecodable", "payload": b"{"})
    client.xadd(stream, {"id": b"\xff\xfe", "payload": "1"})
    client.xadd(stream, {"id": "", "payload": "1"})
    client.xadd(stream, {"id": "large", "payload": json.dumps("x" * 2000)})
    client.xadd(stream, {"id": "good-1", "payload": '{"order": "another"}'})
    add(client, stream, "good-2")
    client.xadd(stream, {"id": "future", "payload": "1"}, id=f"{int(time.time() * 1000) + 3_600_000}-0")
    ran: list[str] = []
    with Receiver("memory://") as receiver:
        consumer = consumer_of(client, stream, receiver, max_body=1000)
        consumer.run_once(lambda message: ran.append(message.payload["order"]))
    assert ran == ["good-1", "good-2"]
    assert dead(client, stream) == [
        "undecodable",
        "invalid_id",
        "invalid_id",
        "too_large",
        "mismatch",
        "future",
    ]
    assert pending(client, stream) == 0
    _, letter = client.xrange(f"{stream}:dead")[0]
    assert letter[b"id"] == b"undecodable"
    assert letter[b"payload"] == b"{"
    assert letter[b"dead-first-seen"].startswith(b"20")
    assert letter[b"dead-consumer"] == GROUP.encode()


def test_an_id_that_was_asked_for_and_is_missing_is_refused(client: redis.Redis, stream: str) -> None:
    """Without ``id=`` the place in the stream serves; with it there is no second choice."""
    client.xadd(stream, {"order": "o-1"})
    seen: list[Message] = []
    with Receiver("memory://") as receiver:
        consumer_of(client, stream, receiver).run_once(seen.append)
        consumer_of(client, stream, receiver, group="strict", id="order-id").run_once(seen.append)
        consumer_of(client, stream, receiver, group="found", id=lambda fields: fields[b"order"]).run_once(
            seen.append
        )
    assert [message.payload for message in seen] == [{"order": "o-1"}] * 2
    assert seen[0].id.startswith("at:")
    assert seen[1].id == "o-1"
    assert dead(client, stream) == ["no_id"]


def test_a_failed_entry_comes_again_and_a_hopeless_one_is_put_aside(client: redis.Redis, stream: str) -> None:
    """A handler's exception gives the entry back, only this one; used-up attempts make it a dead letter."""
    for order in ("fine", "flaky", "poison"):
        add(client, stream, order)
    ran: list[str] = []

    def handler(message: Message) -> str:
        order = message.payload["order"]
        ran.append(order)
        if order == "poison" or (order == "flaky" and ran.count("flaky") < 2):
            raise ValueError("not today")
        return str(order)

    with Receiver("memory://", policy=Policy(max_attempts=3)) as receiver:
        until(consumer_of(client, stream, receiver), handler, lambda: dead(client, stream))
    assert sorted(ran) == ["fine", "flaky", "flaky", "poison", "poison", "poison"]
    assert dead(client, stream) == ["attempts_exhausted"]
    assert pending(client, stream) == 0


def test_a_poll_of_a_thousand_is_claimed_recorded_and_acknowledged_at_once(
    client: redis.Redis, stream: str
) -> None:
    """Three commands for all of it; and when one of them fails, only that one comes again."""
    pipeline = client.pipeline(transaction=False)
    for number in range(1000):
        pipeline.xadd(stream, {"id": f"o-{number}", "payload": json.dumps({"order": number})})
    pipeline.execute()
    ran: list[int] = []
    asked: list[tuple[str, int]] = []

    def handler(message: Message) -> None:
        ran.append(message.payload["order"])
        if ran.count(500) == 1 and ran[-1] == 500:
            raise ValueError("not today")

    def xacks() -> int:
        return int(client.info("commandstats").get("cmdstat_xack", {}).get("calls", 0))

    with Receiver("memory://") as receiver:
        store: Any = receiver.blocking.store

        def counting(name: str, verb: Any) -> Any:
            async def counted(commands: Any) -> Any:
                asked.append((name, len(commands)))
                return await verb(commands)

            return counted

        store.claim_many = counting("claim_many", store.claim_many)
        store.complete_many = counting("complete_many", store.complete_many)
        consumer, before = consumer_of(client, stream, receiver, batch=1000), xacks()
        assert consumer.run_once(handler) == 1000
        assert asked == [("claim_many", 1000), ("complete_many", 1000)]
        assert xacks() - before == 1
        assert pending(client, stream) == 1
        until(consumer, handler, lambda: pending(client, stream) == 0)
    assert sorted(ran) == sorted([*range(1000), 500])


def test_a_pause_is_shorter_than_the_patience_with_the_dead(client: redis.Redis, stream: str) -> None:
    """A failed entry comes again after its own pause, however long a silent consumer is waited for."""
    add(client, stream, "flaky")
    ran: list[str] = []

    def handler(message: Message) -> None:
        ran.append(message.id)
        if len(ran) < 2:
            raise ValueError("not yet")

    with Receiver("memory://") as receiver:
        until(consumer_of(client, stream, receiver, idle="1h"), handler, lambda: len(ran) > 1)
    assert pending(client, stream) == 0


def test_a_remembered_error_is_put_aside_at_once(client: redis.Redis, stream: str) -> None:
    """Another delivery would get the same error, so there is none."""
    add(client, stream, "declined")

    def handler(message: Message) -> None:
        raise PermissionError("card declined")

    with Receiver("memory://", policy=Policy(remember=(PermissionError,))) as receiver:
        consumer_of(client, stream, receiver).run_once(handler)
    assert dead(client, stream) == ["remembered_error"]
    assert pending(client, stream) == 0


def test_a_duplicate_of_a_running_attempt_is_not_acknowledged(client: redis.Redis, stream: str) -> None:
    """It goes back to the broker, and is acknowledged when the first attempt is done."""
    add(client, stream, "o-1")
    add(client, stream, "o-1")
    entered, leave = threading.Event(), threading.Event()
    ran: list[str] = []

    def slow(message: Message) -> None:
        ran.append(message.id)
        entered.set()
        assert leave.wait(20)

    with Receiver("memory://") as receiver:
        first = consumer_of(client, stream, receiver, batch=1)
        thread = threading.Thread(target=first.run_once, args=(slow,))
        thread.start()
        assert entered.wait(20)
        second = consumer_of(client, stream, receiver, batch=1)
        second.run_once(slow)
        assert pending(client, stream) == 2
        leave.set()
        thread.join()
        until(second, slow, lambda: pending(client, stream) == 0)
    assert ran == ["o-1"]


def test_a_long_handler_keeps_its_entry(client: redis.Redis, stream: str) -> None:
    """While a handler runs, its entry is not taken over, although it is silent for longer than ``idle``."""
    add(client, stream, "o-1")
    beats: list[int] = []

    def slow(message: Message) -> None:
        wait_until(lambda: len(beats) >= 4)

    with Receiver("memory://") as receiver:
        consumer = consumer_of(client, stream, receiver)
        broker: Any = consumer._broker
        extend = broker.extend

        async def counted(deliveries: Any) -> None:
            await extend(deliveries)
            (entry,) = client.xpending_range(stream, GROUP, "-", "+", 1)
            beats.append(entry["time_since_delivered"])
            assert entry["times_delivered"] == 1

        broker.extend = counted
        consumer.run_once(slow)
    assert len(beats) >= 4
    assert max(beats) < 200
    assert pending(client, stream) == 0


def test_a_store_that_is_away_costs_no_attempt(client: redis.Redis, stream: str, tmp_path: Path) -> None:
    """Nothing runs and nothing is acknowledged while the store does not answer; then it goes on."""
    add(client, stream, "o-1")
    ran: list[Message] = []
    with Receiver(f"sqlite:///{tmp_path / 'store.db'}", breaker=None) as receiver:
        consumer = consumer_of(client, stream, receiver)
        store: Any = receiver.blocking.store
        claim_many = store.claim_many

        async def refuse(claims: Any) -> Any:
            from effectonce import StoreUnavailable

            raise StoreUnavailable("away", retry_after=0.01)

        store.claim_many = refuse
        consumer.run_once(ran.append)
        assert (ran, pending(client, stream)) == ([], 1)
        store.claim_many = claim_many
        until(consumer, ran.append, lambda: pending(client, stream) == 0)
    assert len(ran) == 1


def test_a_lost_acknowledgement_is_absorbed(client: redis.Redis, valkey: Any, stream: str) -> None:
    """The connection breaks when the effect is done: the entry comes again, finds it done, and is acknowledged."""
    add(client, stream, "o-1")
    ran: list[str] = []
    with FaultProxy(url_of(valkey)) as proxy, Receiver("memory://") as receiver:
        broken = redis.Redis.from_url(proxy.url, retry=None)
        consumer = consumer_of(broken, stream, receiver)

        def handler(message: Message) -> None:
            ran.append(message.id)
            proxy.refuse()
            proxy.cut()

        thread = threading.Thread(target=consumer.run, args=(handler,))
        thread.start()
        wait_until(lambda: ran)
        assert pending(client, stream) == 1
        proxy.heal()
        wait_until(lambda: pending(client, stream) == 0)
        consumer.stop()
        thread.join()
        broken.close()
    assert ran == ["o-1"]


def test_a_lost_group_is_made_again(client: redis.Redis, stream: str) -> None:
    """Whoever deletes the stream under a running consumer does not end it."""
    ran: list[str] = []
    with Receiver("memory://") as receiver:
        consumer = consumer_of(client, stream, receiver)

        @consumer.handler
        def handle(message: Message) -> None:
            ran.append(message.id)

        thread = threading.Thread(target=consumer.run)
        thread.start()
        try:
            add(client, stream, "before")
            wait_until(lambda: ran == ["before"])
            client.delete(stream)
            add(client, stream, "after")
            wait_until(lambda: ran == ["before", "after"])
        finally:
            consumer.stop()
            thread.join()
    assert client.xinfo_consumers(stream, GROUP) == [], "its name goes with it"


def test_a_letter_that_can_not_be_added_keeps_nobody_else_waiting(client: redis.Redis, stream: str) -> None:
    """What is done is acknowledged, whatever becomes of it."""
    client.set(f"{stream}:dead", "no stream")
    add(client, stream, "bad", payload="{")
    add(client, stream, "good")
    with Receiver("memory://") as receiver:
        consumer = consumer_of(client, stream, receiver)
        with pytest.raises(redis.ResponseError):
            consumer.run_once(lambda message: None)
    assert pending(client, stream) == 1
    client.delete(f"{stream}:dead")


def test_a_client_with_little_patience_is_not_made_to_wait_longer(
    valkey: Any, stream: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An empty stream would look like a server that is away, and the consumer would rest, longer each time."""
    with (
        redis.Redis.from_url(url_of(valkey), socket_timeout=0.4) as client,
        Receiver("memory://") as receiver,
    ):
        consumer = consumer_of(client, stream, receiver, idle="1m")
        assert consumer.run_once(print) == 0
    assert caplog.records == []


def test_processes_that_fork_have_a_name_each(
    client: redis.Redis, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that ends removes its name, and with it all that was delivered under it."""
    with Receiver("memory://") as receiver:
        consumer = consumer_of(client, stream, receiver)
        names: list[str] = []
        for process in (1, 2):
            monkeypatch.setattr(
                "effectonce.messaging.redis_streams.os.getpid", lambda process=process: process
            )
            add(client, stream, f"o-{process}")
            consumer.run_once(
                lambda _: names.extend(each["name"] for each in client.xinfo_consumers(stream, GROUP))
            )
    assert len(set(names)) == 2


def test_wrong_colours_and_clients_are_told(client: redis.Redis, valkey: Any, stream: str) -> None:
    """A coroutine for a blocking client, a decoding client and a missing handler are said before anything runs."""

    async def coroutine(message: Message) -> None: ...

    with Receiver("memory://") as receiver:
        consumer = consumer_of(client, stream, receiver)
        with pytest.raises(ColourMismatch, match="coroutine function"):
            consumer.run(coroutine)
        with pytest.raises(ColourMismatch, match=r"consumer\.run"):
            asyncio.run(consumer.arun(coroutine))
        with pytest.raises(UsageError, match="no handler"):
            consumer.run()
        decoding = redis.Redis.from_url(url_of(valkey), decode_responses=True)
        with pytest.raises(UsageError, match="decode_responses=False"):
            consumer_of(decoding, stream, receiver)
        with pytest.raises(UsageError, match="no such option"):
            consumer_of(client, stream, receiver, batches=3)
