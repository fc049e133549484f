"""Consumers of NATS JetStream: each message's effect happens once, whatever dies in between."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import nats as client
import pytest
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine
from tests.integration.consumers_helpers import SIZES, SlowClock, deliveries, storm
from tests.servers.proxy import FaultProxy

from effectonce import Message, Policy, Receiver
from effectonce.errors import UsageError
from effectonce.messaging import cursors
from effectonce.messaging import nats as jetstream
from effectonce.testing.clocks import wait_until

DURABLE = "billing"


@pytest.fixture
def stream(request: pytest.FixtureRequest) -> str:
    return "".join(each if each.isalnum() else "_" for each in request.node.name)


@asynccontextmanager
async def connected(server: Any, stream: str = "") -> AsyncIterator[JetStreamContext]:
    connection = await client.connect(server.url)
    try:
        context = connection.jetstream()
        if stream:
            # No window of the broker's own: repetitions are to come through.
            await context.add_stream(name=stream, subjects=[f"{stream}.*"], duplicate_window=0.1)
        yield context
    finally:
        await connection.close()


async def publish(
    context: JetStreamContext, stream: str, order: str | None, body: bytes | None = None
) -> None:
    data = json.dumps({"order": order}).encode() if body is None else body
    headers = None if order is None else {"Nats-Msg-Id": order}
    # The header alone would have the broker drop what comes twice within its window.
    await context._nc.publish(f"{stream}.new", data, headers=headers)


async def unacknowledged(context: JetStreamContext, stream: str) -> int:
    info = await context.consumer_info(stream, DURABLE)
    return int((info.num_pending or 0) + (info.num_ack_pending or 0))


async def letters(context: JetStreamContext, stream: str) -> list[dict[str, str]]:
    last = (await context.stream_info(f"{stream}-dead")).state.last_seq
    return [(await context.get_msg(f"{stream}-dead", seq)).headers or {} for seq in range(1, last + 1)]


def consumer_of(
    context: JetStreamContext, stream: str, receiver: Receiver, **options: Any
) -> jetstream.Consumer:
    choices: dict[str, Any] = {
        "durable": DURABLE,
        "retry": ("50ms", "100ms"),
        "dead_letter": f"{stream}-dead",
    }
    return jetstream.Consumer(context, stream, receiver=receiver, **(choices | options))


async def until(consumer: jetstream.Consumer, handler: Any, condition: Callable[[], Awaitable[bool]]) -> None:
    deadline = time.monotonic() + 20
    while not await condition():
        assert time.monotonic() < deadline
        await consumer.arun_once(handler)


@SIZES
def test_killed_consumers_leave_each_effect_once(
    messages: int, nats: Any, stream: str, tmp_path: Path
) -> None:
    """Messages that come up to four times, and a consumer killed in the middle: each effect once, nothing left."""

    async def prepare() -> None:
        async with connected(nats, stream) as context:
            # A second on the server's clock, as the lease has it; and room for all that the dead consumer holds.
            await context.add_consumer(stream, ConsumerConfig(durable_name=DURABLE, ack_wait=1.0))
            for order in deliveries(messages):
                await publish(context, stream, None, json.dumps({"order": order}).encode())

    async def left() -> int:
        async with connected(nats) as context:
            return await unacknowledged(context, stream)

    asyncio.run(prepare())
    storm("jetstream", tmp_path, messages, lambda: not asyncio.run(left()), url=nats.url, stream=stream)


def test_bad_messages_are_put_aside_with_a_reason_and_the_rest_goes_on(nats: Any, stream: str) -> None:
    """What can never be processed goes to the dead-letter subject; good messages around it are handled."""
    ran: list[str] = []

    async def handler(message: Message) -> None:
        ran.append(message.payload["order"])

    async def main(receiver: Receiver) -> None:
        async with connected(nats, stream) as context:
            await publish(context, stream, "good-1")
            await publish(context, stream, "undecodable", b"\xff{")
            await publish(context, stream, "x" * 300)
            await publish(context, stream, "large", json.dumps("x" * 2000).encode())
            for order, body in (("good-1", b'{"order": "another"}'), ("undecodable", b"{")):
                again = {"Nats-Msg-Id": order}
                while (await context.publish(f"{stream}.new", body, headers=again)).duplicate:
                    pass  # until the broker's own memory of it is over
            await publish(context, stream, None, b'{"order": "placed"}')
            consumer = consumer_of(context, stream, receiver, max_body=1000)

            async def is_empty() -> bool:
                return bool(ran) and await unacknowledged(context, stream) == 0

            await until(consumer, handler, is_empty)
            found = await letters(context, stream)
        assert [letter["dead-reason"] for letter in found] == [
            "undecodable",
            "invalid_id",
            "too_large",
            "mismatch",
            "undecodable",
        ]
        assert found[3]["dead-msg-id"] == "good-1"
        assert found[3]["dead-source"] == stream

    with Receiver("memory://") as receiver:
        asyncio.run(main(receiver))
    assert ran == ["good-1", "placed"]


def test_a_bad_message_as_large_as_can_be_is_put_aside_in_parts(nats: Any, stream: str) -> None:
    """With the reason it is larger than the server takes, which would close the connection, again and again."""
    ran: list[str] = []

    async def handler(message: Message) -> None:
        ran.append(message.id)

    async def main(receiver: Receiver) -> None:
        async with connected(nats, stream) as context:
            body = b"{" * (context._nc.max_payload - 10)
            await publish(context, stream, None, body)
            await publish(context, stream, "good")
            consumer = consumer_of(context, stream, receiver)

            async def is_empty() -> bool:
                return bool(ran) and await unacknowledged(context, stream) == 0

            await until(consumer, handler, is_empty)
            found = [await context.get_msg(f"{stream}-dead", number) for number in (1, 2)]
        assert [(each.headers or {})["dead-part"] for each in found] == ["1/2", "2/2"]
        assert b"".join(each.data or b"" for each in found) == body

    with Receiver("memory://") as receiver:
        asyncio.run(main(receiver))
    assert ran == ["good"]


def test_a_dead_letter_asks_nothing_of_its_stream_and_has_room_for_its_reason(nats: Any, stream: str) -> None:
    """What a sender expected of the first stream the next would refuse; so it would headers of more than 64 KiB."""
    ran: list[str] = []

    async def handler(message: Message) -> None:
        ran.append(message.id)

    async def main(receiver: Receiver) -> None:
        async with connected(nats, stream) as context:
            subject = f"{stream}.new"
            await context.publish(subject, b"{", stream=stream, headers={"trace": "t-1"})
            large = {"Nats-Msg-Id": "large", "trace": "x" * 65_300}
            await context.publish(subject, b"{", headers=large)
            await publish(context, stream, "good")
            consumer = consumer_of(context, stream, receiver)

            async def is_empty() -> bool:
                return bool(ran) and await unacknowledged(context, stream) == 0

            await until(consumer, handler, is_empty)
            plain, part, headers = [await context.get_msg(f"{stream}-dead", number) for number in (1, 2, 3)]
        told = plain.headers or {}
        assert (told["dead-expected-stream"], told["trace"]) == (stream, "t-1")
        assert ((part.headers or {})["dead-part"], part.data) == ("1/2", b"{")
        assert ((headers.headers or {})["dead-headers"], json.loads(headers.data or b"")) == ("json", large)

    with Receiver("memory://") as receiver:
        asyncio.run(main(receiver))
    assert ran == ["good"]


def test_a_cursor_beyond_the_end_of_its_stream_is_refused(nats: Any, stream: str, tmp_path: Path) -> None:
    """The stream was deleted and made again: what is in the new one would count as done, without a word."""
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/shop.db")
    ran: list[str] = []

    async def handler(message: Message, connection: Any) -> None:
        ran.append(message.id)

    async def main(receiver: Receiver) -> None:
        async with engine.begin() as connection:
            for statement in cursors.schema("sqlite"):
                await connection.execute(text(statement))
        async with connected(nats, stream) as context:

            async def is_empty() -> bool:
                return len(ran) == 3 and await unacknowledged(context, stream) == 0

            def consumer() -> jetstream.Consumer:
                return consumer_of(context, stream, receiver, transaction=engine.begin, cursor=True)

            for order in ("o-1", "o-2", "o-3"):
                await publish(context, stream, order)
            await until(consumer(), handler, is_empty)
            await context.delete_stream(stream)
            await context.add_stream(name=stream, subjects=[f"{stream}.new"])
            await publish(context, stream, "new")
            with pytest.raises(UsageError, match="deleted and made again"):
                await consumer().arun_once(handler)
        await engine.dispose()

    with Receiver(f"sqlite:///{tmp_path}/shop.db?beside=yes", consumer="billing") as receiver:
        asyncio.run(main(receiver))
    assert ran == ["o-1", "o-2", "o-3"]


def test_two_consumers_of_a_stream_put_aside_the_same_message(nats: Any, stream: str) -> None:
    """Each its own letter: the broker must not take the second for a repetition of the first."""

    async def handler(message: Message) -> None:
        raise AssertionError

    async def main(receiver: Receiver) -> None:
        async with connected(nats, stream) as context:
            await publish(context, stream, "bad", b"{")
            for durable in ("email", "sms"):
                await consumer_of(context, stream, receiver, durable=durable).arun_once(handler)
            assert [letter["dead-reason"] for letter in await letters(context, stream)] == ["undecodable"] * 2

    with Receiver("memory://") as receiver:
        asyncio.run(main(receiver))


def test_what_the_server_stamped_in_the_future_and_a_missing_id_are_put_aside(nats: Any, stream: str) -> None:
    """One of two clocks is wrong, so nobody can tell how old it is; and an id that was asked for has to be there."""
    ran: list[str] = []

    async def handler(message: Message) -> None:
        ran.append(message.id)

    async def main(receiver: Receiver) -> None:
        async with connected(nats, stream) as context:
            for order in ("future", "none", "named"):
                headers = {"order-id": order} if order != "none" else None
                await context.publish(f"{stream}.new", b"{}", headers=headers)
            consumer = consumer_of(context, stream, receiver, batch=1, id="order-id")

            async def is_empty() -> bool:
                return bool(ran) and await unacknowledged(context, stream) == 0

            await until(consumer, handler, is_empty)
            found = await letters(context, stream)
        assert [letter["dead-reason"] for letter in found] == ["future", "no_id"]
        assert "order-id" in found[1]["dead-detail"], "it says where an id was looked for"

    with Receiver("memory://", clock=SlowClock()) as receiver:
        asyncio.run(main(receiver))
    assert ran == ["named"]


def test_a_failed_message_comes_again_and_a_hopeless_one_is_put_aside(nats: Any, stream: str) -> None:
    """A handler's exception gives the message back, only this one; used-up attempts make it a dead letter."""
    ran: list[str] = []

    async def handler(message: Message) -> None:
        ran.append(message.id)
        if message.id == "poison" or (message.id == "flaky" and ran.count("flaky") < 2):
            raise ValueError("not today")

    async def main(receiver: Receiver) -> None:
        async with connected(nats, stream) as context:
            for order in ("fine", "flaky", "poison"):
                await publish(context, stream, order)
            consumer = consumer_of(context, stream, receiver)

            async def is_empty() -> bool:
                return bool(ran) and await unacknowledged(context, stream) == 0

            await until(consumer, handler, is_empty)
            (letter,) = await letters(context, stream)
        assert letter["dead-reason"] == "attempts_exhausted"
        assert letter["dead-attempts"] == "3"
        assert letter["dead-consumer"] == "billing"

    with Receiver("memory://", policy=Policy(max_attempts=3)) as receiver:
        asyncio.run(main(receiver))
    assert sorted(ran) == ["fine", "flaky", "flaky", "poison", "poison", "poison"]


def test_a_long_handler_keeps_its_message(nats: Any, stream: str) -> None:
    """While a handler runs, the message is not delivered to another, although that takes longer than its ack_wait."""
    ran: list[str] = []

    async def main(receiver: Receiver) -> None:
        async with connected(nats, stream) as context:
            await context.add_consumer(stream, ConsumerConfig(durable_name=DURABLE, ack_wait=2.0))
            await publish(context, stream, "slow")
            consumer = consumer_of(context, stream, receiver)

            async def slow(message: Message) -> None:
                ran.append(message.id)
                rival = await context.pull_subscribe_bind(DURABLE, stream=stream)
                with pytest.raises(asyncio.TimeoutError):
                    await rival.fetch(1, timeout=4.5)  # twice the deadline, and nobody else gets it

            await consumer.arun_once(slow)
            assert await unacknowledged(context, stream) == 0

    with Receiver("memory://") as receiver:
        asyncio.run(main(receiver))
    assert ran == ["slow"]


def test_a_lost_acknowledgement_is_absorbed(nats: Any, stream: str) -> None:
    """The connection breaks when the effect is done: the message comes again, finds it done, and is acknowledged."""
    ran: list[str] = []

    async def main(receiver: Receiver, proxy: FaultProxy) -> None:
        async with connected(nats, stream) as context:
            await context.add_consumer(stream, ConsumerConfig(durable_name=DURABLE, ack_wait=0.5))
            await publish(context, stream, "o-1")
            connection = await client.connect(proxy.url, reconnect_time_wait=0.05, max_reconnect_attempts=-1)
            consumer = consumer_of(connection.jetstream(), stream, receiver)

            async def handler(message: Message) -> None:
                ran.append(message.id)
                proxy.refuse()
                proxy.cut()

            running = asyncio.ensure_future(consumer.arun(handler))
            await asyncio.to_thread(wait_until, lambda: ran)
            proxy.heal()
            while await unacknowledged(context, stream):
                pass
            consumer.stop()
            await running
            await connection.close()

    with FaultProxy(nats.url) as proxy, Receiver("memory://") as receiver:
        asyncio.run(main(receiver, proxy))
    assert ran == ["o-1"]


def test_dead_letters_that_would_come_back_are_refused(nats: Any, stream: str) -> None:
    """A stream may have the subject that is named for dead letters, too; a filter leaves it out."""
    dead = f"{stream}.dead"

    async def main(receiver: Receiver) -> None:
        async with connected(nats, stream) as context:
            with pytest.raises(UsageError, match=f'Write dead_letter= "{stream}-dead"'):
                await consumer_of(context, stream, receiver, dead_letter=dead).arun_once(asyncio.sleep)
            filtered = {"durable": "filtered", "subject": f"{stream}.new", "dead_letter": dead}
            consumer = consumer_of(context, stream, receiver, **filtered)
            await publish(context, stream, "bad", b"no JSON")

            async def is_put_aside() -> bool:
                return (await context.stream_info(stream)).state.messages == 2

            await until(consumer, asyncio.sleep, is_put_aside)
            await consumer.arun_once(asyncio.sleep)
            assert await is_put_aside()

    with Receiver("memory://") as receiver:
        asyncio.run(main(receiver))


def test_by_default_dead_letters_go_where_they_do_not_come_back(nats: Any, stream: str) -> None:
    """A stream that has all subjects below its name has the usual one for them, too: then it is another."""

    async def main(receiver: Receiver) -> None:
        async with connected(nats, stream) as context:
            consumer = consumer_of(context, stream, receiver, dead_letter="")
            await publish(context, stream, "bad", b"no JSON")

            await consumer.arun_once(asyncio.sleep)

            async def is_put_aside() -> bool:
                return (await context.stream_info(f"{stream}-dead")).state.messages == 1

            await until(consumer, asyncio.sleep, is_put_aside)
            await consumer.arun_once(asyncio.sleep)
            assert await is_put_aside()
            assert (await context.stream_info(stream)).state.messages == 1

    with Receiver("memory://") as receiver:
        asyncio.run(main(receiver))


def test_a_consumer_that_acknowledges_by_itself_is_refused(nats: Any, stream: str) -> None:
    """With it, a message would be gone before its effect happened."""

    async def main(receiver: Receiver) -> None:
        async with connected(nats, stream) as context:
            config = ConsumerConfig(durable_name=DURABLE, ack_policy=AckPolicy.NONE)
            await context.add_consumer(stream, config)
            with pytest.raises(UsageError, match="ack_policy explicit"):
                await consumer_of(context, stream, receiver).arun_once(asyncio.sleep)

    with Receiver("memory://") as receiver:
        asyncio.run(main(receiver))
