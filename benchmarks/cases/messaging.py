"""Consumers of every broker: the same batches with and without effectonce, whose store is a Valkey beside the broker.

Overhead is held against consumers that do something: a handler that sets a key in Redis, the least that can be called
an effect, and one that inserts a row. One that does nothing shows what is paid for a message, and its ratio compares
with no application's.
"""

from __future__ import annotations

from benchmarks.cases.base import RAW, Case, Row

AT_MOST_30_PERCENT = 1 / 1.3
CLIENTS = {
    "redis-streams": ("valkey", "Redis Streams, redis-py"),
    "redis-streams-asyncio": ("valkey", "Redis Streams, redis.asyncio"),
    "rabbitmq-pika": ("rabbitmq+valkey", "RabbitMQ, pika"),
    "rabbitmq-aio-pika": ("rabbitmq+valkey", "RabbitMQ, aio-pika"),
    "nats": ("nats+valkey", "NATS JetStream, nats-py"),
    "sqs": ("sqs+valkey", "SQS (emulated), boto3"),
    "kafka-confluent": ("kafka+valkey", "Kafka, confluent-kafka"),
    "kafka-aiokafka": ("kafka+valkey", "Kafka, aiokafka"),
}
HANDLERS = {
    "idle": "a handler that does nothing",
    "key": "a handler that sets a key",
    "row": "a handler that inserts a row",
}


def _case(client: str, handler: str) -> Case:
    server, label = CLIENTS[client]
    is_crowd = handler == "key" and not client.startswith("kafka")  # one partition, so one after the other
    return Case(
        name=f"consume-{client}-{handler}",
        title=f"{label}, {HANDLERS[handler]}",
        group="messaging",
        store=client,
        op=f"consume-{handler}",
        server=f"{server}+postgres" if handler == "row" else server,
        rows=_rows(None if handler == "idle" else AT_MOST_30_PERCENT, is_crowd=is_crowd),
        step=100,
        operations=300 if client == "sqs" else 3_000 if handler == "idle" else 1_000,
        is_fixed=True,
        slices=2,
    )


def _rows(floor: float | None, *, is_crowd: bool) -> tuple[Row, ...]:
    """In turn, and side by side; each against raw code that does it the same way."""
    in_turn = Row("effectonce in turn", "effectonce", "in turn", note="concurrency=1", floor=floor)
    if not is_crowd:
        return RAW, in_turn
    crowd = "raw side by side"
    return (
        RAW,
        in_turn,
        Row(crowd, "raw", "side by side", baseline=""),
        Row("effectonce side by side", "effectonce", baseline=crowd, floor=floor),
    )


ATOMIC = ("redis-streams", "rabbitmq-pika", "nats", "kafka-confluent")
NUMBERED = ("nats", "kafka-confluent")
"""Brokers whose messages have places, so that a cursor can stand for all records."""


def _atomic_case(client: str) -> Case:
    """Batches of a hundred, each in one transaction: the same rows with and without records, or with a cursor."""
    server, label = CLIENTS[client]
    cursor = (Row("effectonce, cursor", "effectonce", "cursor"),) if client in NUMBERED else ()
    return Case(
        name=f"consume-{client}-atomic",
        title=f"{label}, rows of a batch in one transaction",
        group="messaging",
        store=client,
        op="consume-atomic",
        server=f"{server.removesuffix('+valkey')}+postgres",
        rows=(RAW, Row("effectonce, records", "effectonce", "records"), *cursor),
        step=100,
        operations=1_000,
        is_fixed=True,
        slices=2,
    )


CASES = (
    *(_case(client, handler) for client in CLIENTS for handler in HANDLERS),
    *map(_atomic_case, ATOMIC),
)
