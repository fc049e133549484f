"""Consumers of every broker: the same batches with and without effectonce, whose store is a Valkey beside the broker.

Overhead is held against consumers that do something: a handler that writes one key. One that does nothing shows what
is paid for a message, and its ratio is a bound that no application reaches.
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
HANDLERS = {"write": "a handler that writes a key", "idle": "a handler that does nothing"}


def _case(client: str, handler: str) -> Case:
    server, label = CLIENTS[client]
    floor = AT_MOST_30_PERCENT if handler == "write" else None
    return Case(
        name=f"consume-{client}-{handler}",
        title=f"{label}, {HANDLERS[handler]}",
        group="messaging",
        store=client,
        op=f"consume-{handler}",
        server=server,
        rows=_rows(floor, is_ordered=client.startswith("kafka")),
        step=100,
        operations=300 if client == "sqs" else 3_000,
        is_fixed=True,
        slices=2,
    )


def _rows(floor: float | None, *, is_ordered: bool) -> tuple[Row, ...]:
    """In turn, and side by side where the broker's order allows it; each against raw code that does it the same way."""
    in_turn = Row("effectonce in turn", "effectonce", "in turn", note="concurrency=1", floor=floor)
    if is_ordered:  # one partition
        return RAW, in_turn
    crowd = "raw side by side"
    return (
        RAW,
        in_turn,
        Row(crowd, "raw", "side by side", baseline=""),
        Row("effectonce", "effectonce", baseline=crowd, floor=floor),
    )


CASES = tuple(_case(client, handler) for client in CLIENTS for handler in HANDLERS)
