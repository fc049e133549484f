"""A consumer in atomic mode as a process: ``python -m …consumers_atomic_worker KIND FOLDER SETTINGS``."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.integration.consumers_atomic import Sink
from tests.integration.consumers_helpers import BATCH, SIDE_BY_SIDE, Gate
from tests.integration.consumers_worker import order_of

from effectonce import Message, Receiver

Options = dict[str, Any]
FOLDER = Path()


def serve(sink: Sink, consumer: Any) -> None:
    gate = Gate(FOLDER)

    def handler(message: Message, connection: Any) -> None:
        gate.pass_(message.payload["order"])
        sink.handle(message, connection)

    signal.signal(signal.SIGTERM, lambda *_: consumer.stop())
    (FOLDER / f"{os.getpid()}.ready").touch()
    consumer.run(handler)


async def aserve(sink: Sink, consumer: Any) -> None:
    gate = Gate(FOLDER)

    async def handler(message: Message, connection: Any) -> None:
        await asyncio.to_thread(gate.pass_, message.payload["order"])
        await sink.ahandle(message, connection)

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, consumer.stop)
    (FOLDER / f"{os.getpid()}.ready").touch()
    await consumer.arun(handler)


def redis_streams(sink: Sink, options: Options, url: str, stream: str) -> None:
    import redis

    from effectonce.messaging import redis_streams

    serve(sink, redis_streams.Consumer(redis.Redis.from_url(url), stream, group="g", idle="1s", **options))


def pika(sink: Sink, options: Options, url: str, queue: str) -> None:
    import pika

    from effectonce.messaging import rabbitmq

    serve(sink, rabbitmq.Consumer(pika.URLParameters(url), queue, **options))


def aio_pika(sink: Sink, options: Options, url: str, queue: str) -> None:
    import aio_pika

    from effectonce.messaging import rabbitmq

    async def main() -> None:
        async with await aio_pika.connect_robust(url) as connection:
            await aserve(sink, rabbitmq.Consumer(connection, queue, **options))

    asyncio.run(main())


def sqs(sink: Sink, options: Options, url: str, **settings: Any) -> None:
    import boto3

    from effectonce.messaging import sqs

    client = boto3.client("sqs", **settings)
    serve(sink, sqs.Consumer(client, url, visibility="2s", wait="1s", **options))


def jetstream(sink: Sink, options: Options, url: str, stream: str) -> None:
    import nats

    from effectonce.messaging import nats as jetstream

    async def main() -> None:
        connection = await nats.connect(url)
        found: Callable[[Any], object] = lambda each: order_of(each.data)  # noqa: E731
        consumer = jetstream.Consumer(connection.jetstream(), stream, durable="billing", id=found, **options)
        await aserve(sink, consumer)
        await connection.close()

    asyncio.run(main())


def confluent(sink: Sink, options: Options, topic: str, **configuration: Any) -> None:
    from effectonce.messaging import kafka

    serve(sink, kafka.Consumer(configuration, topic, **options))


def confluent_aio(sink: Sink, options: Options, topic: str, **configuration: Any) -> None:
    from effectonce.messaging import kafka

    asyncio.run(aserve(sink, kafka.Consumer(configuration, topic, **options)))


def aiokafka(sink: Sink, options: Options, topic: str, **configuration: Any) -> None:
    from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

    from effectonce.messaging import kafka

    settings = {name.replace(".", "_"): value for name, value in configuration.items()}

    async def main() -> None:
        client = AIOKafkaConsumer(
            **settings, enable_auto_commit=False, auto_offset_reset="earliest", metadata_max_age_ms=1000
        )
        producer = AIOKafkaProducer(bootstrap_servers=settings["bootstrap_servers"])
        async with client, producer:
            await aserve(sink, kafka.Consumer(client, topic, producer=producer, **options))

    asyncio.run(main())


ON_A_LOOP = (jetstream, aio_pika, confluent_aio, aiokafka)


def main(kind: str, sink: Sink, receiver: Receiver, cursor: bool, settings: dict[str, Any]) -> None:
    run = globals()[kind]
    begin = sink.asyncio if run in ON_A_LOOP else sink.blocking
    options: Options = {
        "receiver": receiver,
        "batch": BATCH,
        "concurrency": SIDE_BY_SIDE,
        "transaction": begin,
    }
    run(sink, options | {"retry": ("100ms", "1s"), "cursor": cursor}, **settings)


if __name__ == "__main__":
    kind, FOLDER, settings = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    sink = Sink(**settings.pop("sink"))
    with sink.receiver() as receiver:
        main(kind, sink, receiver, settings.pop("cursor", False), settings)
