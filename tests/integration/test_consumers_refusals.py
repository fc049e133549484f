"""Brokers that refuse for good: a wrong password, a missing permission or name ends a consumer with an error.

How long a refusal has to last is a matter of ``tests/unit/test_consumers.py``; here the first one that comes again is
believed.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs, urlsplit

import aio_pika
import boto3
import nats as nats_client
import pika
import pytest
import redis
from aiokafka import errors as aiokafka_errors
from botocore.exceptions import ClientError, NoCredentialsError, ReadTimeoutError
from confluent_kafka import KafkaError, KafkaException
from redis.backoff import NoBackoff
from redis.retry import Retry
from tests.integration.consumers_helpers import stop_when

from effectonce import Receiver
from effectonce.errors import UsageError
from effectonce.messaging import _refusals, redis_streams
from effectonce.messaging import kafka as messaging_kafka
from effectonce.messaging import nats as jetstream
from effectonce.messaging import rabbitmq as amqp
from effectonce.messaging import sqs as messaging_sqs

LAST_SECONDS = 60.0
ONCE = Retry(NoBackoff(), 0)
"""redis-py tries again by itself."""


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver("memory://") as receiver:
        yield receiver


@pytest.fixture(autouse=True)
def believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal that comes a second time is one for good."""
    monkeypatch.setattr(_refusals, "BELIEVED_SECONDS", 0.0)


@contextmanager
def stopped_at_last(consumer: Any) -> Iterator[None]:
    """A consumer that never ends fails its test, instead of holding it up."""
    timer = threading.Timer(LAST_SECONDS, consumer.stop)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def end_of(consumer: Any) -> str:
    """What a consumer ends with."""
    with stopped_at_last(consumer), pytest.raises(UsageError) as refused:
        consumer.run(lambda _: None)
    return str(refused.value)


async def aend_of(consumer: Any) -> str:
    async def nothing(_: Any) -> None: ...

    with stopped_at_last(consumer), pytest.raises(UsageError) as refused:
        await consumer.arun(nothing)
    return str(refused.value)


# Redis


def on_redis(client: redis.Redis, receiver: Receiver, stream: str) -> redis_streams.Consumer:
    return redis_streams.Consumer(client, stream, group="billing", receiver=receiver)


def test_redis(valkey: Any, receiver: Receiver) -> None:
    """A wrong password, a command that the user may not use, a key that is no stream."""
    url = str(valkey.url).replace("valkey:", "redis:")
    place = urlsplit(url)
    assert place.hostname
    with redis.Redis.from_url(url) as admin:
        admin.execute_command("ACL", "SETUSER", "reader", "on", ">right", "~*", "+@all", "-xreadgroup")
        admin.set("refusals:text", "no stream")
        try:
            for password, stream, told in (
                ("wrong", "refusals", "AuthenticationError"),
                ("right", "refusals", "NoPermissionError"),
                ("right", "refusals:text", "WRONGTYPE"),
            ):
                with redis.Redis(
                    place.hostname, place.port or 6379, username="reader", password=password, retry=ONCE
                ) as client:
                    ended = end_of(on_redis(client, receiver, stream))
                assert "The broker does not give any messages" in ended
                assert told in ended
                assert "right" not in ended.replace("user", "")
        finally:
            admin.execute_command("ACL", "DELUSER", "reader")


def test_redis_that_is_busy_is_no_refusal() -> None:
    """A server that loads its data, or has another master, is one later."""
    broker: Any = redis_streams._Streams
    for error in (
        redis.exceptions.BusyLoadingError("LOADING"),
        redis.exceptions.ReadOnlyError("READONLY"),
        redis.exceptions.ConnectionError("refused"),
        redis.exceptions.ResponseError("NOGROUP No such key"),
    ):
        assert not broker.refuses(None, error)


# RabbitMQ


def test_rabbitmq_with_pika(rabbitmq: Any, receiver: Receiver) -> None:
    """A wrong password, a virtual host that is not there, a name that nobody may declare."""
    parameters = pika.URLParameters(rabbitmq.url)
    parameters.credentials = pika.PlainCredentials("guest", "wrong")
    assert "ACCESS_REFUSED" in end_of(amqp.Consumer(parameters, "refusals", receiver=receiver))
    parameters = pika.URLParameters(rabbitmq.url)
    parameters.virtual_host = "nowhere"
    assert "nowhere" in end_of(amqp.Consumer(parameters, "refusals", receiver=receiver))
    parameters = pika.URLParameters(rabbitmq.url)
    named = amqp.Consumer(parameters, "refusals", receiver=receiver, dead_letter="amq.dead")
    assert "ACCESS_REFUSED" in end_of(named)


def test_rabbitmq_with_aio_pika(rabbitmq: Any, receiver: Receiver) -> None:
    """What its user may not do; and a connection that never comes back."""

    async def main() -> None:
        async with await aio_pika.connect_robust(rabbitmq.url) as connection:
            named = amqp.Consumer(connection, "refusals", receiver=receiver, dead_letter="amq.dead")
            assert "ACCESS_REFUSED" in await aend_of(named)
        assert "connect_robust" in await aend_of(amqp.Consumer(connection, "refusals", receiver=receiver))
        plain = await aio_pika.connect(rabbitmq.url)
        assert plain.transport is not None
        await plain.transport.connection.close(ConnectionError("lost"))
        assert "connect_robust" in await aend_of(amqp.Consumer(plain, "refusals", receiver=receiver))
        await plain.close()

    asyncio.run(main())


# NATS JetStream


def test_jetstream(nats: Any, receiver: Receiver) -> None:
    """A stream that is not there, and a connection that was closed."""

    async def main() -> None:
        connection = await nats_client.connect(nats.url)
        context = connection.jetstream()
        missing = jetstream.Consumer(context, "REFUSALS_NOWHERE", durable="d", receiver=receiver)
        assert "stream not found" in await aend_of(missing)
        await connection.close()
        closed = jetstream.Consumer(context, "REFUSALS", durable="d", receiver=receiver)
        assert "max_reconnect_attempts" in await aend_of(closed)

    asyncio.run(main())


# SQS


def test_sqs(sqs: Any, receiver: Receiver) -> None:
    """A queue that is not there."""
    place = parse_qs(urlsplit(sqs.url).query)
    client = boto3.client("sqs", region_name=place["region"][0], endpoint_url=place["endpoint"][0])
    url = client.create_queue(QueueName="refusals")["QueueUrl"]
    client.create_queue(QueueName="refusals-dead")
    client.delete_queue(QueueUrl=url)
    ended = end_of(messaging_sqs.Consumer(client, url, receiver=receiver, wait="1s"))
    assert "The broker does not give any messages" in ended


def test_what_sqs_refuses() -> None:
    """By its codes: the emulator knows no permissions."""
    broker: Any = messaging_sqs._Queue
    for code, refused in (
        ("AccessDenied", True),
        ("InvalidClientTokenId", True),
        ("ExpiredToken", False),
        ("RequestThrottled", False),
        ("InternalFailure", False),
    ):
        assert broker.refuses(None, ClientError({"Error": {"Code": code}}, "ReceiveMessage")) is refused
    assert broker.refuses(None, NoCredentialsError())
    assert not broker.refuses(None, ReadTimeoutError(endpoint_url="http://sqs"))


# Kafka


@pytest.mark.parametrize("awaits", [False, True], ids=["blocking", "asyncio"])
def test_kafka_that_knows_no_such_user(kafka: Any, receiver: Receiver, awaits: bool) -> None:
    """confluent-kafka tells of it to nobody but an ``error_cb``; the user's own hears it as well."""
    heard: list[KafkaError] = []

    async def ahear(error: KafkaError) -> None:
        heard.append(error)

    configuration = {
        "bootstrap.servers": kafka.url.removeprefix("kafka://"),
        "group.id": "refusals",
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "PLAIN",
        "sasl.username": "shop",
        "sasl.password": "hunter2",
        "log_level": 0,
        "error_cb": ahear if awaits else heard.append,
    }
    consumer = messaging_kafka.Consumer(configuration, "refusals", receiver=receiver)
    ended = asyncio.run(aend_of(consumer)) if awaits else end_of(consumer)
    assert "_AUTHENTICATION" in ended
    assert "hunter2" not in ended
    assert heard


def test_kafka_that_is_away_is_logged(receiver: Receiver, caplog: pytest.LogCaptureFixture) -> None:
    """Where nobody else listens: a poll says nothing of it."""
    configuration = {"bootstrap.servers": "127.0.0.1:1", "group.id": "refusals", "log_level": 0}
    consumer = messaging_kafka.Consumer(configuration, "refusals", receiver=receiver)

    def is_logged() -> bool:
        return any("Kafka can't be reached: " in record.getMessage() for record in caplog.records)

    stop_when(consumer, is_logged, time.monotonic() + LAST_SECONDS)
    consumer.run(lambda _: None)
    assert is_logged()


def test_what_kafka_refuses() -> None:
    """Of either client; a topic that is not there may be on its way, and the system's own numbers are others."""
    from effectonce.messaging._aiokafka import AioKafka
    from effectonce.messaging._confluent import Confluent

    confluent: Any = Confluent.refuses
    for code, refused in (
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, True),
        (KafkaError.GROUP_AUTHORIZATION_FAILED, True),
        (KafkaError._AUTHENTICATION, True),
        (KafkaError.UNKNOWN_TOPIC_OR_PART, False),
        (KafkaError.LEADER_NOT_AVAILABLE, False),
        (KafkaError._TRANSPORT, False),
    ):
        assert confluent(None, KafkaException(KafkaError(code))) is refused
    assert not confluent(None, OSError(24, "too many open files"))
    aiokafka: Any = AioKafka.refuses
    for error, refused in (
        (aiokafka_errors.TopicAuthorizationFailedError("orders"), True),
        (aiokafka_errors.SaslAuthenticationFailed(), True),
        (aiokafka_errors.AuthenticationFailedError(), True),
        (aiokafka_errors.UnknownTopicOrPartitionError(), False),
        (aiokafka_errors.KafkaConnectionError("lost"), False),
        (OSError(24, "too many open files"), False),
    ):
        assert aiokafka(None, error) is refused
