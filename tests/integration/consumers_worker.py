"""A consumer as a process: ``python -m tests.integration.consumers_worker KIND FOLDER SETTINGS``."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from tests.integration.consumers_helpers import BATCH, SIDE_BY_SIDE, Books, Gate, handled, receiver_in

from effectonce import Message

OPTIONS: dict[str, Any] = {"batch": BATCH, "concurrency": SIDE_BY_SIDE, "retry": ("100ms", "1s")}


def serve(consumer: Any, books: Books) -> None:
    """Consume until SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: consumer.stop())
    say_ready(books)
    consumer.run(lambda message: handled(books, message))


def say_ready(books: Books) -> None:
    """From here on it may be asked to stop."""
    (books.folder / f"{os.getpid()}.ready").touch()


async def aserve(consumer: Any, books: Books) -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, consumer.stop)
    say_ready(books)

    async def handler(message: Message) -> str:
        return handled(books, message)

    await consumer.arun(handler)


def redis_streams(books: Books, receiver: Any, url: str, stream: str) -> None:
    import redis

    from effectonce.messaging import redis_streams

    client = redis.Redis.from_url(url)
    serve(redis_streams.Consumer(client, stream, group="g", receiver=receiver, idle="1s", **OPTIONS), books)


def redis_streams_asyncio(books: Books, receiver: Any, url: str, stream: str) -> None:
    import redis.asyncio

    from effectonce.messaging import redis_streams

    async def main() -> None:
        async with redis.asyncio.Redis.from_url(url) as client:
            await aserve(
                redis_streams.Consumer(client, stream, group="g", receiver=receiver, idle="1s", **OPTIONS),
                books,
            )

    asyncio.run(main())


def jetstream(books: Books, receiver: Any, url: str, stream: str) -> None:
    import nats

    from effectonce.messaging import nats as jetstream

    async def main() -> None:
        connection = await nats.connect(url)
        context = connection.jetstream()
        await aserve(
            jetstream.Consumer(
                context,
                stream,
                durable="billing",
                receiver=receiver,
                id=lambda each: order_of(each.data),
                **OPTIONS,
            ),
            books,
        )
        await connection.close()

    asyncio.run(main())


def rabbitmq(books: Books, receiver: Any, url: str, queue: str) -> None:
    import aio_pika

    from effectonce.messaging import rabbitmq

    async def main() -> None:
        async with await aio_pika.connect_robust(url) as connection:
            await aserve(rabbitmq.Consumer(connection, queue, receiver=receiver, **OPTIONS), books)

    asyncio.run(main())


def rabbitmq_blocking(books: Books, receiver: Any, url: str, queue: str) -> None:
    import pika

    from effectonce.messaging import rabbitmq

    serve(rabbitmq.Consumer(pika.URLParameters(url), queue, receiver=receiver, **OPTIONS), books)


def sqs(books: Books, receiver: Any, url: str, **settings: Any) -> None:
    import boto3

    from effectonce.messaging import sqs

    client = boto3.client("sqs", **settings)
    serve(sqs.Consumer(client, url, receiver=receiver, visibility="2s", wait="1s", **OPTIONS), books)


def kafka(books: Books, receiver: Any, topic: str, **configuration: Any) -> None:
    from effectonce.messaging import kafka

    serve(kafka.Consumer(configuration, topic, receiver=receiver, **OPTIONS), books)


def kafka_asyncio(books: Books, receiver: Any, topic: str, **configuration: Any) -> None:
    from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

    from effectonce.messaging import kafka

    settings = {name.replace(".", "_"): value for name, value in configuration.items()}

    async def main() -> None:
        client = AIOKafkaConsumer(
            **settings, enable_auto_commit=False, auto_offset_reset="earliest", metadata_max_age_ms=1000
        )
        producer = AIOKafkaProducer(bootstrap_servers=settings["bootstrap_servers"])
        async with client, producer:
            await aserve(
                kafka.Consumer(client, topic, receiver=receiver, producer=producer, **OPTIONS), books
            )

    asyncio.run(main())


def transformer(books: Books, receiver: Any, topic: str, out: str, **configuration: Any) -> None:
    made, handler = _transformer(books, receiver, topic, out, configuration)
    signal.signal(signal.SIGTERM, lambda *_: made.stop())
    say_ready(books)
    made.run(handler)


def transformer_aio(books: Books, receiver: Any, topic: str, out: str, **configuration: Any) -> None:
    made, handler = _transformer(books, receiver, topic, out, configuration)

    async def coroutine(message: Message) -> Any:
        return await asyncio.to_thread(handler, message)

    async def main() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, made.stop)
        say_ready(books)
        await made.arun(coroutine)

    asyncio.run(main())


def _transformer(books: Books, receiver: Any, topic: str, out: str, configuration: Any) -> tuple[Any, Any]:
    """What is made of one partition's records has one key, so that it keeps its order."""
    from effectonce.messaging.kafka import Output, Transformer

    # What a killed process has begun is ended by its time-out, since nobody opens its id again.
    mine = configuration | {"transactional.id": f"{topic}-{os.getpid()}", "transaction.timeout.ms": 3000}
    made = Transformer(mine, topic, receiver=receiver, **OPTIONS)
    gate = Gate(books.folder)

    def handler(message: Message) -> Output:
        gate.pass_(message.id)
        return Output(out, message.id, key=f"k-{int(message.id[2:]) % 3}")

    return made, handler


def order_of(body: bytes) -> Any:
    """The id in a message whose broker would itself drop repetitions that have it in a header."""
    return json.loads(body)["order"]


if __name__ == "__main__":
    kind, folder, settings = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    with receiver_in(folder) as receiver:
        globals()[kind](Books(folder / "books.db"), receiver, **settings)
