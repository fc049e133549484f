"""The outbox's relay from PostgreSQL to Redis Streams, and publishers with confirmations, in windows of 1000."""

from __future__ import annotations

from benchmarks.cases.base import RAW, Case, Row

EVENTS_PER_SECOND = 50_000

CASES = (
    Case(
        name="relay-redis",
        title="Outbox relay, PostgreSQL to Redis Streams, batches of 1000",
        group="relay",
        store="relay",
        op="relay",
        server="postgres+valkey",
        rows=(RAW, Row("effectonce relay", "effectonce", floor=0.5, limit=1 / EVENTS_PER_SECOND)),
        step=1000,
        operations=20_000,
        is_fixed=True,
        slices=3,
    ),
    *(
        Case(
            name=f"publish-{broker}",
            title=f"Publishing with confirmations, {label}, windows of 1000",
            group="relay",
            store=broker,
            op="publish",
            server=broker,
            rows=(RAW, Row("effectonce publisher", "effectonce", floor=0.7)),
            step=1000,
            operations=10_000,
            is_fixed=True,
            slices=3,
        )
        for broker, label in (("nats", "NATS JetStream"), ("rabbitmq", "RabbitMQ"))
    ),
)
