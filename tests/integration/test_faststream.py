"""FastStream on RabbitMQ, Kafka and NATS JetStream: each message's effect once, whatever the consumer does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from faststream import AckPolicy, Response
from faststream.confluent import KafkaBroker as ConfluentBroker
from faststream.exceptions import NackMessage
from faststream.kafka import KafkaBroker
from faststream.kafka.response import KafkaPublishCommand
from faststream.nats import NatsBroker
from faststream.nats.response import NatsPublishCommand
from faststream.rabbit import RabbitBroker, RabbitResponse, TestRabbitBroker
from faststream.response.publish_type import PublishType
from tests.integration.consumers_helpers import SIZES
from tests.integration.faststream_places import PLACES, Place
from tests.integration.framework_helpers import Workers, storm, working

from effectonce import Policy, Receiver, keys
from effectonce.errors import UsageError
from effectonce.messaging._faststream import name_result
from effectonce.messaging.faststream import Idempotent
from effectonce.testing.clocks import wait_until

BROKERS = pytest.mark.parametrize("name", ["rabbitmq", "kafka", "nats"])
Site = Callable[[str, str], Any]


@contextmanager
def consuming(place: Place, folder: Path) -> Iterator[Workers]:
    settings = {"EFFECTONCE_BROKER": place.url, "EFFECTONCE_QUEUE": place.queue}
    command = ["tests.integration.faststream_app"]
    with working(folder, command, **settings, EFFECTONCE_HANDLER=place.handler) as workers:
        yield workers


@pytest.fixture
def place_on(request: pytest.FixtureRequest) -> Iterator[Callable[[str, str], Place]]:
    made: list[Place] = []

    def make(name: str, handler: str) -> Place:
        server: Any = request.getfixturevalue(name)
        made.append(PLACES[name](server.url, handler))
        return made[-1]

    yield make
    for place in made:
        place.close()


@BROKERS
@SIZES
def test_killed_consumers_leave_each_effect_once(
    name: str, messages: int, place_on: Site, tmp_path: Path
) -> None:
    """Messages that come up to four times, and the consumer killed in the middle."""
    place = place_on(name, "deliver")
    with consuming(place, tmp_path) as workers:
        storm(tmp_path, messages, workers, place.send_all, place.is_drained)
    assert place.letters() == []


@BROKERS
def test_publishers_go_on_with_the_stored_result(name: str, place_on: Site, tmp_path: Path) -> None:
    """A consumer dies when a result is recorded and not yet published: the redelivery publishes it."""
    place = place_on(name, "bill")
    with consuming(place, tmp_path) as workers:
        place.send("fatal-1")
        workers.until(place.invoices)
        workers.until(place.is_drained)
        assert workers.noted("runs") == ["fatal-1"]
        assert workers.noted("events", "replayed")
    assert place.invoices() == [{"invoice": "for fatal-1"}]


@pytest.mark.parametrize("name", ["rabbitmq", "kafka"])
def test_the_next_consumer_knows_a_result_again_that_is_published_again(
    name: str, request: pytest.FixtureRequest
) -> None:
    """Each delivery publishes the result; FastStream would make up another id each time, and so another effect."""
    url, ran, seen = request.getfixturevalue(name).url, list[str](), list[str]()
    queue = f"results-{keys.uuid7()}"
    receiver = Receiver("memory://", consumer="billing", hooks=[lambda event: seen.append(event.kind)])

    async def main() -> None:
        options: dict[str, Any] = {"ack_policy": AckPolicy.NACK_ON_ERROR}
        broker: Any
        if name == "rabbitmq":
            broker, told = RabbitBroker(url, middlewares=[Idempotent(receiver)]), {"message_id": "m-1"}
        else:
            servers = url.removeprefix("kafka://")
            broker, told = (
                KafkaBroker(servers, middlewares=[Idempotent(receiver)]),
                {"headers": {"id": "m-1"}},
            )
            options |= {"auto_offset_reset": "earliest"}
            admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})
            for made in admin.create_topics(
                [NewTopic(queue, 1, 1), NewTopic(f"{queue}.next", 1, 1)]
            ).values():
                made.result(20)

        def subscriber(place: str) -> Any:
            group = {"group_id": place} if name == "kafka" else {}
            return broker.subscriber(place, **options, **group)

        @subscriber(queue)
        @broker.publisher(f"{queue}.next")
        @broker.publisher(f"{queue}.next")
        async def first(order: str) -> str:
            ran.append(order)
            return f"invoice for {order}"

        @subscriber(f"{queue}.next")
        async def second(invoice: str) -> None:
            ran.append(invoice)

        async with broker:
            await broker.start()
            for _ in range(2):
                await broker.publish("o-1", queue, **told)
            await asyncio.to_thread(
                wait_until, lambda: seen.count("completed") + seen.count("replayed") == 6, seconds=60
            )

    asyncio.run(main())
    assert sorted(ran) == ["invoice for o-1", "invoice for o-1", "o-1"]  # there are two publishers
    assert seen.count("replayed") == 3


def test_a_result_has_its_id_where_jetstream_looks_unless_it_has_one() -> None:
    """And records that are published together have none: they would be taken for one."""
    plain = NatsPublishCommand("x", subject="next", _publish_type=PublishType.PUBLISH)
    name_result(plain, "r-1")
    own = NatsPublishCommand(
        "x", subject="next", headers={"Nats-Msg-Id": "own"}, _publish_type=PublishType.PUBLISH
    )
    name_result(own, "r-1")
    several = KafkaPublishCommand("x", "y", topic="next", _publish_type=PublishType.PUBLISH)
    name_result(several, "r-1")
    assert (plain.headers["Nats-Msg-Id"], own.headers["Nats-Msg-Id"]) == ("r-1", "own")
    assert not several.headers


@pytest.mark.parametrize("name", ["rabbitmq", "nats"])
def test_a_message_that_is_in_flight_elsewhere_comes_later(name: str, place_on: Site, tmp_path: Path) -> None:
    """Two consumers, one message twice: the second is neither run nor acknowledged before the first is done."""
    place = place_on(name, "hold")
    with consuming(place, tmp_path) as workers, consuming(place, tmp_path) as others:
        for _ in range(2):
            place.send("h")
        workers.until(lambda: len(workers.noted("events", "busy")) >= 3)
        others.until(lambda: True)
        (tmp_path / "go").touch()
        workers.until(lambda: workers.noted("events", "replayed"))
        workers.until(place.is_drained)
        assert workers.noted("runs") == ["h"]


@pytest.mark.parametrize("name", ["rabbitmq", "nats"])
def test_a_handler_may_run_for_longer_than_its_lease(name: str, place_on: Site, tmp_path: Path) -> None:
    """The keeper renews it, and JetStream is told to wait: it is delivered once."""
    place = place_on(name, "outlive")
    with consuming(place, tmp_path) as workers:
        place.send("long")
        workers.until(lambda: workers.noted("events", "completed"))
        workers.until(place.is_drained)
        assert workers.noted("runs") == ["long"]
        assert not workers.noted("events", "busy")


@pytest.mark.parametrize("name", ["rabbitmq", "kafka"])
def test_an_error_releases_the_claim(name: str, place_on: Site, tmp_path: Path) -> None:
    """The message comes again, after a pause, and runs again."""
    place = place_on(name, "fail_once")
    with consuming(place, tmp_path) as workers:
        place.send("f")
        workers.until(lambda: workers.noted("events", "completed"))
        workers.until(place.is_drained)
        assert workers.noted("runs") == ["f", "f"]


@BROKERS
def test_what_can_never_be_processed_is_put_aside_with_a_reason(
    name: str, place_on: Site, tmp_path: Path
) -> None:
    """A remembered error and bad messages, and the consumer goes on; no id of FastStream's making is taken for one."""
    place = place_on(name, "decline")
    place.send("d")
    place.send("undecodable", body=b"{")
    place.send("large", body=json.dumps({"order": "x" * 200_000}).encode())
    place.send("d", body=b'{"order": "another"}')
    if name == "rabbitmq":
        place.send(None, body=b"{}")
    expected = ["remembered_error", "undecodable", "too_large", "mismatch"]
    expected += ["no_id"] * (name == "rabbitmq")
    with consuming(place, tmp_path) as workers:
        workers.until(lambda: len(place.letters()) >= len(expected))
        workers.until(place.is_drained)
        assert workers.noted("runs") == ["d"]
    letters = place.letters()
    assert sorted(letter["dead-reason"] for letter in letters) == sorted(expected)
    assert {letter["dead-consumer"] for letter in letters} == {"billing"}
    declined = next(letter for letter in letters if letter["dead-reason"] == "remembered_error")
    assert "d was declined" in declined["dead-detail"]
    if name == "rabbitmq":
        refused = next(letter for letter in letters if letter["dead-reason"] == "no_id")
        assert "Have the sender set one" in refused["dead-detail"]
        assert "Have the sender set one" in (tmp_path / "worker.log").read_text()


def test_a_message_that_takes_its_consumer_along_is_given_up(place_on: Site, tmp_path: Path) -> None:
    """It is delivered again after each crash, until its attempts are used up."""
    place = place_on("rabbitmq", "crash")
    with consuming(place, tmp_path) as workers:
        place.send("c")
        workers.until(place.letters)
        assert workers.noted("runs") == ["c"] * 2
    assert place.letters()[0]["dead-reason"] == "attempts_exhausted"


@pytest.mark.parametrize("name", ["rabbitmq", "kafka"])
def test_places_in_the_log_are_ids_on_kafka(name: str, place_on: Site, tmp_path: Path) -> None:
    """A record without an id is known by partition and offset; a RabbitMQ message has no such place."""
    place = place_on(name, "deliver")
    for _ in range(2):
        place.send(None, body=b'{"order": "o"}')
    with consuming(place, tmp_path) as workers:
        if name == "kafka":
            workers.until(lambda: len(workers.noted("events", "completed")) == 2)
        else:
            workers.until(lambda: len(place.letters()) == 2)
            assert not workers.noted("events", "claimed")


@BROKERS
def test_a_subscriber_that_would_lose_messages_is_stopped(name: str, place_on: Site, tmp_path: Path) -> None:
    """At its first message, which the broker keeps, with an explanation in the log."""
    place = place_on(name, "careless")
    place.send("c-1")
    with consuming(place, tmp_path) as workers:
        log = tmp_path / "worker.log"
        workers.until(lambda: "ack_policy=AckPolicy.NACK_ON_ERROR" in log.read_text())
        assert workers.noted("runs") == []
    wait_until(lambda: not place.is_drained(), what="The message, back at the broker,")


# Without a server


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver("memory://") as receiver:
        yield receiver


def noting(ran: list[str], group: str) -> Any:
    async def handler(body: dict[str, str]) -> None:
        ran.append(group)

    return handler


def test_a_subscriber_that_would_get_its_own_dead_letters_is_stopped(
    place_on: Site, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    """The subject for them is one of those that it has subscribed to: they would come back for ever."""
    place = place_on("nats", "anybody")
    place.send("bad", body=b"no JSON")
    told = f'Write dead_letter= "{place.queue}-dead"'

    async def main() -> None:
        middleware = Idempotent(receiver, dead_letter=f"{place.queue}.dead")
        broker = NatsBroker(place.url, middlewares=[middleware])
        whose: dict[str, Any] = {"stream": place.queue, "durable": place.handler, "pull_sub": True}
        subscribe = broker.subscriber(f"{place.queue}.*", ack_policy=AckPolicy.NACK_ON_ERROR, **whose)
        subscribe(noting([], "all"))
        async with broker:
            await broker.start()
            await asyncio.to_thread(wait_until, lambda: told in caplog.text, seconds=30)

    asyncio.run(main())
    assert not place.is_drained()
    assert receiver.stats().since_start.counts.get("dead_letter", 0) == 0


@pytest.mark.parametrize("name", ["kafka", "nats"])
def test_two_groups_that_get_the_same_message_are_two_consumers(
    name: str, place_on: Site, receiver: Receiver
) -> None:
    """Each has its own effect, and once: the second is no repetition of the first. Each puts aside in its own name."""
    place = place_on(name, "both")
    for _ in range(2):
        place.send("o-1")
    place.send("bad", body=b"{")
    ran: list[str] = []
    ended: list[str] = []
    givers: set[str] = set()
    receiver.events.hooks = (lambda event: ended.append(event.kind),)

    def are_put_aside() -> bool:
        givers.update(letter["dead-consumer"] for letter in place.letters())
        return len(givers) >= 2

    async def main() -> None:
        broker: Any
        if name == "kafka":
            broker = KafkaBroker(place.url.removeprefix("kafka://"), middlewares=[Idempotent(receiver)])
        else:
            broker = NatsBroker(place.url, middlewares=[Idempotent(receiver)])
        for group in ("email", "sms"):
            whose: dict[str, Any] = (
                {"group_id": f"{place.queue}-{group}", "auto_offset_reset": "earliest"}
                if name == "kafka"
                else {"stream": place.queue, "durable": group, "pull_sub": True}
            )
            subscribe = broker.subscriber(place.name, ack_policy=AckPolicy.NACK_ON_ERROR, **whose)
            subscribe(noting(ran, group))
        async with broker:
            await broker.start()
            await asyncio.to_thread(
                wait_until, lambda: ended.count("completed") + ended.count("replayed") >= 4, seconds=30
            )
            await asyncio.to_thread(wait_until, are_put_aside, seconds=30)

    if name == "kafka":
        place._producer.flush()
    asyncio.run(main())
    assert sorted(ran) == ["email", "sms"]
    assert {name.removeprefix(f"{place.queue}-") for name in givers} == {"email", "sms"}


@pytest.mark.parametrize("client", ["aiokafka", "confluent-kafka"])
def test_a_dead_letter_that_is_too_large_for_kafka_does_not_stop_its_partition(
    client: str, place_on: Site, receiver: Receiver
) -> None:
    """It is put aside in parts, by what the client and the topic take; what comes after it is handled."""
    place = place_on("kafka", "large")
    body = b"{" + b"x" * 150_000
    place.send("poison", body=body)
    place.send("good")
    place._producer.flush()
    ran: list[str] = []

    async def main() -> None:
        options: dict[str, Any] = {"max_request_size": 60_000, "middlewares": [Idempotent(receiver)]}
        servers = place.url.removeprefix("kafka://")
        made = KafkaBroker if client == "aiokafka" else ConfluentBroker
        broker: Any = made(servers, **options)
        broker.subscriber(
            place.name,
            group_id=place.queue,
            auto_offset_reset="earliest",
            ack_policy=AckPolicy.NACK_ON_ERROR,
        )(noting(ran, "good"))
        async with broker:
            await broker.start()
            await asyncio.to_thread(wait_until, lambda: ran, seconds=30, what="What comes after it")

    asyncio.run(main())
    letters = place._all(f"{place.name}.dead")
    assert b"".join(letter.value() for letter in letters) == body
    told = [{name: text.decode() for name, text in letter.headers()} for letter in letters]
    count = len(letters)
    assert [each["dead-part"] for each in told] == [f"{number}/{count}" for number in range(1, count + 1)]
    assert {each["dead-reason"] for each in told} == {"undecodable"}


@pytest.mark.parametrize("client", ["aiokafka", "confluent-kafka"])
def test_a_dead_letter_of_kafka_has_the_headers_of_its_record(
    client: str, place_on: Site, receiver: Receiver
) -> None:
    """Also names that repeat, which FastStream can't publish: with a number. One without a value is empty then."""
    place = place_on("kafka", f"headers-{client}")
    own = [
        ("content-type", b"application/json"),
        ("trace", "ä".encode()),
        ("dead-reason", b"of an earlier life"),
        ("hop", b"a"),
        ("hop", b"b"),
        ("hop", b"c"),
        ("hop.2", b"of its own"),
        ("id", b"poison"),
        *([("none", None)] if client == "confluent-kafka" else ()),  # with aiokafka it can't be read
    ]
    dead = f"{place.name}.dead"
    place._producer.produce(place.name, b"{", headers=own)
    place._producer.flush()

    async def main() -> None:
        servers = place.url.removeprefix("kafka://")
        made = KafkaBroker if client == "aiokafka" else ConfluentBroker
        broker: Any = made(servers, middlewares=[Idempotent(receiver)])
        broker.subscriber(
            place.name,
            group_id=place.queue,
            auto_offset_reset="earliest",
            ack_policy=AckPolicy.NACK_ON_ERROR,
        )(noting([], "never"))
        async with broker:
            await broker.start()
            await asyncio.to_thread(wait_until, partial(place._all, dead), seconds=30, what="The letter")

    asyncio.run(main())
    (letter,) = place._all(dead)
    told = dict(letter.headers())
    hops = {name: value for name, value in told.items() if name.startswith("hop")}
    assert hops == {"hop": b"c", "hop.2": b"of its own", "hop.3": b"b", "hop.4": b"a"}
    assert (told["trace"], told["id"], told.get("none", b"")) == ("ä".encode(), b"poison", b"")
    assert (told["dead-reason"], told["dead-reason.2"]) == (b"undecodable", b"of an earlier life")


def published(broker: RabbitBroker, *messages: dict[str, Any]) -> list[Any]:
    """Publish to the queue q under the test broker; the replies."""

    async def main() -> list[Any]:
        async with TestRabbitBroker(broker) as client:
            return [await client.request(1, "q", **each) for each in messages]

    return asyncio.run(main())


@pytest.mark.parametrize(
    "value",
    [7, {"a": [1]}, None, Response({"a": 1}, headers={"h": "x"}), RabbitResponse(b"x", message_type="t")],
)
def test_a_reply_is_the_same_on_each_delivery(receiver: Receiver, value: Any) -> None:
    """Values and responses with headers: whoever asks again under the same id gets the first answer."""
    broker = RabbitBroker(middlewares=[Idempotent(receiver)])
    ran: list[int] = []

    @broker.subscriber("q", ack_policy=AckPolicy.NACK_ON_ERROR)
    async def handler(number: int) -> Any:
        ran.append(number)
        return value

    first, second = published(broker, {"message_id": "m-1"}, {"message_id": "m-1"})
    assert first.body == second.body
    assert first.headers.get("h") == second.headers.get("h")
    assert ran == [1]


def test_a_handlers_own_word_to_faststream_is_kept(receiver: Receiver) -> None:
    """NackMessage releases the claim, and nothing is published."""
    broker = RabbitBroker(middlewares=[Idempotent(receiver)])
    told: list[str] = []
    receiver.events.hooks = (lambda event: told.append(event.kind),)

    @broker.subscriber("q", ack_policy=AckPolicy.NACK_ON_ERROR)
    async def handler(number: int) -> Any:
        raise NackMessage(requeue=False)

    async def main() -> None:
        async with TestRabbitBroker(broker) as client:
            await client.publish(1, "q", message_id="m-1")

    asyncio.run(main())
    assert told == ["claimed", "released"]


def test_a_policy_that_loses_messages_is_an_error_under_the_test_broker(receiver: Receiver) -> None:
    """So that it is found before there is a broker."""
    broker = RabbitBroker(middlewares=[Idempotent(receiver, policy=Policy(keep="8d"))])

    @broker.subscriber("q")
    async def handler(number: int) -> None: ...

    async def main() -> None:
        async with TestRabbitBroker(broker) as client:
            await client.publish(1, "q", message_id="m-1")

    with pytest.raises(UsageError, match="NACK_ON_ERROR"):
        asyncio.run(main())
