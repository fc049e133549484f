"""Consumers of RabbitMQ, through aio-pika and pika: each message's effect happens once, whatever dies in between."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aio_pika
import pika
import pytest
from tests.integration.consumers_helpers import BATCH, SIZES, deliveries, receiver_in, stop_when, storm
from tests.servers.proxy import FaultProxy

from effectonce import Message, Policy, Receiver
from effectonce.errors import UsageError
from effectonce.messaging import rabbitmq as amqp
from effectonce.messaging._amqp import Unsettled
from effectonce.testing.clocks import wait_until

CLIENTS = pytest.mark.parametrize("name", ["aio-pika", "pika"])


class Queue:
    """A queue to publish to and to look at, by a client of its own."""

    def __init__(self, url: str, name: str) -> None:
        self.url, self.name = url, name
        parameters = pika.URLParameters(url)
        parameters.heartbeat = 0  # a soak is longer than the broker's patience with one who only watches
        self._connection = pika.BlockingConnection(parameters)
        self._channel = self._connection.channel()
        self._channel.queue_declare(name, durable=True)

    def publish(self, order: str | None, body: bytes | None = None, **properties: Any) -> None:
        data = json.dumps({"order": order}).encode() if body is None else body
        about = pika.BasicProperties(message_id=order, **properties)
        self._channel.basic_publish("", self.name, data, about)

    def size(self) -> int:
        """Messages that are ready: not those that a consumer holds."""
        return int(self._channel.queue_declare(self.name, passive=True).method.message_count)

    def consumers(self) -> int:
        return int(self._channel.queue_declare(self.name, passive=True).method.consumer_count)

    def letters(self) -> list[Any]:
        """The properties of dead letters, taken out."""
        found: list[Any] = []
        while (message := self._channel.basic_get(f"{self.name}.dead", auto_ack=True))[0]:
            found.append(message[1])
        return found

    def close(self) -> None:
        self._connection.close()


@pytest.fixture
def queue(rabbitmq: Any, request: pytest.FixtureRequest) -> Iterator[Queue]:
    queue = Queue(rabbitmq.url, "".join(each if each.isalnum() else "_" for each in request.node.name))
    yield queue
    queue.close()


def consume(
    name: str, queue: Queue, receiver: Receiver, handler: Any, until: Callable[[], object], **options: Any
) -> None:
    """Consume, with either client, until something is the case."""
    choices: dict[str, Any] = {"receiver": receiver, "retry": ("50ms", "100ms")} | options
    url = choices.pop("url", queue.url)
    deadline = time.monotonic() + 20

    if name == "pika":
        consumer = amqp.Consumer(pika.URLParameters(url), queue.name, **choices)
        stop_when(consumer, until, deadline)
        consumer.run(handler)
        return

    async def coroutine(message: Message) -> Any:
        return handler(message)

    async def main() -> None:
        async with await aio_pika.connect_robust(url, reconnect_interval=0.1) as connection:
            consumer = amqp.Consumer(connection, queue.name, **choices)
            stop_when(consumer, until, deadline)
            await consumer.arun(coroutine)

    asyncio.run(main())


@SIZES
@pytest.mark.parametrize("kind", ["rabbitmq", "rabbitmq_blocking"])
def test_killed_consumers_leave_each_effect_once(
    kind: str, messages: int, queue: Queue, tmp_path: Path
) -> None:
    """Messages that come up to four times, and a consumer killed in the middle: each effect once, nothing left."""
    for order in deliveries(messages):
        queue.publish(order)
    storm(kind, tmp_path, messages, lambda: queue.size() == 0, url=queue.url, queue=queue.name)
    with receiver_in(tmp_path) as receiver:
        rest = amqp.Consumer(pika.URLParameters(queue.url), queue.name, receiver=receiver)
        ran: list[str] = []  # the last consumer may have held back what the kill had caught: that runs again
        wait_until(lambda: rest.run_once(lambda m: ran.append(m.id)) == 0 and queue.size() == 0, seconds=60)
        assert len(ran) <= BATCH
    assert queue.letters() == []


@CLIENTS
def test_bad_messages_are_put_aside_with_a_reason_and_the_rest_goes_on(name: str, queue: Queue) -> None:
    """What can never be processed goes to the dead-letter queue, whole; good messages around it are handled."""
    queue.publish("good-1")
    queue.publish(None, b"{}")
    queue.publish(None, b"{}", headers={"id": 7})
    own = {"correlation_id": "c-1", "reply_to": "answers", "type": "order", "app_id": "shop"}
    queue.publish("undecodable", b"{", headers={"trace": "t-1"}, timestamp=int(time.time()), **own)
    queue.publish("future", timestamp=int(time.time()) + 3600)
    queue.publish("large", json.dumps("x" * 2000).encode())
    queue.publish("good-1", b'{"order": "another"}')
    queue.publish(None, b'{"order": "good-2"}', headers={"id": "good-2"})
    ran: list[str] = []
    with Receiver("memory://") as receiver:

        def handler(message: Message) -> None:
            ran.append(message.payload["order"])

        consume(name, queue, receiver, handler, lambda: "good-2" in ran, max_body=1000)
    assert sorted(ran) == ["good-1", "good-2"]
    letters = queue.letters()
    reasons = [letter.headers["dead-reason"] for letter in letters]
    assert reasons == ["no_id", "invalid_id", "undecodable", "future", "too_large", "mismatch"]
    assert "message_id" in letters[0].headers["dead-detail"], "it says where an id was looked for"
    assert (letters[2].message_id, letters[2].headers["trace"]) == ("undecodable", "t-1")
    assert all("dead-first-seen" in letter.headers for letter in letters)
    assert {name: getattr(letters[2], name) for name in own} == own
    assert queue.size() == 0


@CLIENTS
def test_a_dead_letter_queue_that_is_there_need_not_be_made(name: str, queue: Queue) -> None:
    """A user who may not make it, as nobody may make one of this name, uses the one that others have made."""
    dead = str(queue._channel.queue_declare("").method.queue)
    assert dead.startswith("amq."), "which is a name that only the broker gives"
    queue.publish("undecodable", b"{")
    queue.publish("good")
    ran: list[str] = []
    with Receiver("memory://") as receiver:
        consume(name, queue, receiver, lambda message: ran.append(message.id), lambda: ran, dead_letter=dead)
    method, about, _ = queue._channel.basic_get(dead, auto_ack=True)
    assert method is not None
    assert about.headers["dead-reason"] == "undecodable"
    queue._channel.queue_delete(dead)


@CLIENTS
def test_a_letter_that_is_not_taken_keeps_nobody_else_waiting(name: str, queue: Queue) -> None:
    """What is done is acknowledged first; the bad one stays."""
    full = {"x-max-length": 0, "x-overflow": "reject-publish"}
    queue._channel.queue_declare(f"{queue.name}.dead", durable=True, arguments=full)
    queue.publish("bad", b"{")
    queue.publish("good")
    ran: list[str] = []
    with Receiver("memory://") as receiver:
        consume(name, queue, receiver, lambda m: ran.append(m.id), lambda: "good" in ran)
    wait_until(lambda: queue.size() > 0)
    assert (ran, queue.size()) == (["good"], 1)


@pytest.mark.parametrize(
    ("name", "reasons"), [("aio-pika", ["undecodable", "undecodable"]), ("pika", ["future", "invalid_id"])]
)
def test_properties_that_no_client_should_send_do_not_stop_the_queue(
    name: str, reasons: list[str], queue: Queue
) -> None:
    """A time in nanoseconds, an id that is not UTF-8: aio-pika ends its connection at either, each time it comes."""
    queue.publish("good-1")
    queue.publish("ahead", timestamp=time.time_ns(), headers={"trace": "t-1"})
    queue._channel.basic_publish("", queue.name, b"{}", pika.BasicProperties(message_id=b"\xff\xfe"))
    queue.publish("good-2")
    ran: list[str] = []
    with Receiver("memory://", consumer="billing") as receiver:
        consume(name, queue, receiver, lambda m: ran.append(m.id), lambda: len(set(ran)) == 2)
    assert sorted(set(ran)) == ["good-1", "good-2"]
    letters = queue.letters()
    assert [letter.headers["dead-reason"] for letter in letters] == reasons
    assert (letters[0].message_id, letters[0].headers["trace"]) == ("ahead", "t-1")
    assert {letter.headers["dead-consumer"] for letter in letters} == {"billing"}
    assert queue.size() == 0


@CLIENTS
def test_headers_that_leave_no_room_for_a_reason_are_put_aside_in_a_part_of_their_own(
    name: str, queue: Queue
) -> None:
    """All properties are in one frame. With the reason it would be too large; the broker would hang up, each time."""
    queue.publish(
        "large", b"{", headers={"large": "x" * 130_900, "trace": b"t-1", "deep": {"list": [1, None]}}
    )
    queue.publish("good")
    ran: list[str] = []
    with Receiver("memory://") as receiver:
        consume(name, queue, receiver, lambda m: ran.append(m.id), lambda: ran and not queue.size())
    get = queue._channel.basic_get
    (_, first, body), (_, second, written) = (get(f"{queue.name}.dead", auto_ack=True) for _ in range(2))
    assert (ran, body) == (["good"], b"{")
    assert [each.headers["dead-part"] for each in (first, second)] == ["1/2", "2/2"]
    assert [each.headers["dead-reason"] for each in (first, second)] == ["undecodable"] * 2
    assert second.headers["dead-headers"] == "json"
    assert json.loads(written) == {"large": "x" * 130_900, "trace": "t-1", "deep": {"list": [1, None]}}


@CLIENTS
def test_a_dead_letter_is_not_sent_where_its_message_was(name: str, queue: Queue) -> None:
    """The header CC has the broker send copies. A letter that came to the queue again would do so for ever."""
    queue.publish("bad", b"{", headers={"CC": [queue.name, "elsewhere"]})
    queue.publish("good")
    ran: list[str] = []
    with Receiver("memory://") as receiver:
        consume(name, queue, receiver, lambda m: ran.append(m.id), lambda: ran and not queue.size())
    assert [letter.headers["dead-cc"] for letter in queue.letters()] == [[queue.name, "elsewhere"]]
    assert queue.size() == 0


@CLIENTS
def test_a_failed_message_comes_again_and_a_hopeless_one_is_put_aside(name: str, queue: Queue) -> None:
    """A handler's exception gives the message back, only this one; used-up attempts make it a dead letter."""
    for order in ("fine", "flaky", "poison"):
        queue.publish(order)
    ran: list[str] = []
    letters: list[Any] = []

    def handler(message: Message) -> None:
        ran.append(message.id)
        if message.id == "poison" or (message.id == "flaky" and ran.count("flaky") < 2):
            raise ValueError("not today")

    def is_over() -> bool:
        letters.extend(queue.letters() if ran else [])
        return bool(letters) and ran.count("flaky") == 2

    with Receiver("memory://", consumer="billing", policy=Policy(max_attempts=3)) as receiver:
        consume(name, queue, receiver, handler, is_over)
    assert sorted(ran) == ["fine", "flaky", "flaky", "poison", "poison", "poison"]
    (letter,) = letters
    assert letter.headers["dead-reason"] == "attempts_exhausted"
    assert letter.headers["dead-attempts"] == "3"
    assert letter.headers["dead-consumer"] == "billing"
    assert queue.size() == 0


@CLIENTS
def test_what_waits_for_its_next_delivery_goes_back_when_the_consumer_ends(name: str, queue: Queue) -> None:
    """A message whose pause is long is nobody's when its consumer has stopped: the broker has it again.

    Those around it are acknowledged, those after it too.
    """
    for order in ("before", "failing", "after"):
        queue.publish(order)
    ran: list[str] = []

    def handler(message: Message) -> None:
        ran.append(message.id)
        if message.id == "failing":
            raise ValueError("not today")

    with Receiver("memory://") as receiver:
        consume(name, queue, receiver, handler, lambda: len(ran) == 3, retry=("1h", "1h"))
        assert queue.size() == 1
        consume(name, queue, receiver, handler, lambda: len(ran) > 3, retry=("1h", "1h"))
    assert sorted(ran) == ["after", "before", "failing", "failing"]


def test_one_acknowledgement_is_of_all_tags_up_to_the_first_that_waits() -> None:
    """Whatever is held back or was not looked at stays; what comes after it is acknowledged one by one."""
    unsettled = Unsettled()
    for tag in range(1, 9):
        unsettled.add(tag)
    assert unsettled.settle([3, 2, 1]) == (3, [])
    assert unsettled.settle([4, 6, 7]) == (4, [6, 7]), "5 is held, 8 was not looked at"
    assert unsettled.settle([]) == (0, [])
    unsettled.drop(5)
    assert unsettled.settle([8]) == (8, [])


@CLIENTS
def test_a_lost_acknowledgement_is_absorbed(name: str, queue: Queue) -> None:
    """The connection breaks when the effect is done: the message comes again, finds it done, and is acknowledged."""
    for order in ("o-1", "o-2"):
        queue.publish(order)
    ran: list[str] = []
    with FaultProxy(queue.url) as proxy, Receiver("memory://") as receiver:
        told: list[str] = []
        receiver.events.hooks = (lambda event: told.append(event.kind),)

        def handler(message: Message) -> None:
            ran.append(message.id)
            if len(ran) == 1:
                proxy.cut()

        def is_over() -> bool:
            return told.count("replayed") + told.count("completed") >= 3 and queue.size() == 0

        consume(name, queue, receiver, handler, is_over, url=proxy.url)
        assert "replayed" in told
        # Both may have come again, and the consumer was told to stop after the first: the broker has the other one.
        rest = amqp.Consumer(pika.URLParameters(queue.url), queue.name, receiver=receiver)
        wait_until(lambda: rest.run_once(handler) == 0 and queue.size() == 0, seconds=20)
    assert sorted(ran) == ["o-1", "o-2"]


def test_a_robust_connection_does_not_go_on_consuming_for_a_channel_that_was_given_up(queue: Queue) -> None:
    """After an outage aio-pika opens all channels again that nobody closed: nobody would see what these got."""
    ran: list[str] = []

    async def handler(message: Message) -> None:
        ran.append(message.id)

    async def until(condition: Callable[[], object]) -> None:
        await asyncio.to_thread(wait_until, condition, seconds=30)

    async def main(receiver: Receiver, proxy: FaultProxy) -> None:
        async with await aio_pika.connect_robust(proxy.url, reconnect_interval=0.1) as connection:
            consumer = amqp.Consumer(connection, queue.name, receiver=receiver, batch=5)
            broker: Any = consumer._broker
            running = asyncio.ensure_future(consumer.arun(handler))
            await until(lambda: queue.consumers() == 1)
            proxy.refuse()
            proxy.cut()
            await until(lambda: broker._channel is None)  # given up, and no other can be had
            proxy.heal()
            await until(lambda: broker._channel is not None and queue.consumers())
            for number in range(30):
                queue.publish(f"o-{number}")
            await until(lambda: len(ran) == 30)
            assert queue.consumers() == 1
            consumer.stop()
            await running

    with FaultProxy(queue.url) as proxy, Receiver("memory://") as receiver:
        asyncio.run(main(receiver, proxy))


def test_heartbeats_are_answered_while_a_handler_runs(queue: Queue) -> None:
    """With pika nobody else would: the broker would cut the connection, and the acknowledgement with it."""
    queue.publish("slow")
    ran: list[str] = []
    beats: list[int] = []
    with Receiver("memory://") as receiver:
        consumer = amqp.Consumer(
            pika.URLParameters(f"{queue.url}?heartbeat=1"), queue.name, receiver=receiver
        )
        broker: Any = consumer._broker
        extend = broker.extend

        async def counted(under_way: Any) -> None:
            await extend(under_way)
            beats.append(len(under_way))

        def slow(message: Message) -> None:
            ran.append(message.id)
            wait_until(lambda: len(beats) >= 10)  # a third of a second each: the broker's patience is two

        broker.extend = counted
        stop_when(consumer, lambda: ran, time.monotonic() + 20)
        consumer.run(slow)
    assert ran == ["slow"]
    assert queue.size() == 0


@CLIENTS
def test_a_queue_that_is_not_there_is_told(name: str, queue: Queue) -> None:
    """Rather than waited for: its name is probably wrong."""
    queue.name = "nobody-declared-this"
    with Receiver("memory://") as receiver, pytest.raises(UsageError, match="Declare it first"):
        consume(name, queue, receiver, print, lambda: False)


def test_a_connection_of_another_kind_is_told(queue: Queue) -> None:
    """Pika's own connection can't be opened again, so its parameters are asked for."""
    with Receiver("memory://") as receiver:
        with pytest.raises(UsageError, match="URLParameters"):
            amqp.Consumer(queue._connection, "q", receiver=receiver)
        with pytest.raises(UsageError, match="neither") as refused:
            amqp.Consumer("amqp://shop:secret@localhost", "q", receiver=receiver)
    assert "secret" not in str(refused.value), "a URL has a password"
