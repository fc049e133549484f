"""A FastStream app for the tests: ``python -m tests.integration.faststream_app``."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from faststream import AckPolicy, FastStream
from pydantic import BaseModel
from tests.integration import framework_tasks as tasks

from effectonce.messaging.faststream import Idempotent

url, queue = os.environ["EFFECTONCE_BROKER"], os.environ["EFFECTONCE_QUEUE"]
wanted = os.environ["EFFECTONCE_HANDLER"]
policy = tasks.FRAGILE if wanted == "crash" else None
middlewares = [Idempotent(tasks.receiver, policy=policy, retry=tasks.PAUSES, max_body=100_000)]
NACK = AckPolicy.NACK_ON_ERROR
broker: Any
if url.startswith("amqp"):
    from faststream.rabbit import RabbitBroker

    broker = RabbitBroker(url, middlewares=middlewares)

    def subscribe(name: str, **options: Any) -> Any:
        return broker.subscriber(f"{queue}.{name}", **{"ack_policy": NACK, **options})

elif url.startswith("kafka"):
    from faststream.kafka import KafkaBroker

    broker = KafkaBroker(url.removeprefix("kafka://"), middlewares=middlewares)

    def subscribe(name: str, **options: Any) -> Any:
        return broker.subscriber(
            f"{queue}.{name}",
            group_id=queue,
            auto_offset_reset="earliest",
            session_timeout_ms=6000,
            heartbeat_interval_ms=500,
            **{"ack_policy": NACK, **options},
        )

else:
    from faststream.nats import JStream, NatsBroker
    from nats.js.api import ConsumerConfig

    broker = NatsBroker(url, middlewares=middlewares)

    def subscribe(name: str, **options: Any) -> Any:
        return broker.subscriber(
            f"{queue}.{name}",
            # The test's own: who declares it again gives it back the broker's window for repetitions, two minutes.
            stream=JStream(queue, declare=False),
            durable=name,
            pull_sub=True,
            config=ConsumerConfig(ack_wait=2.0, max_deliver=-1),
            **{"ack_policy": NACK, **options},
        )


app = FastStream(broker)


def subscriber(name: str, **options: Any) -> Any:
    """Subscribe the one handler that the test wants."""
    return subscribe(name, **options) if name == wanted else lambda handler: handler


class Order(BaseModel):
    """What the messages hold."""

    order: str


class Invoice(BaseModel):
    """What goes on downstream."""

    invoice: str


@subscriber("deliver")
async def deliver(order: Order) -> None:
    tasks.deliver(order.order)


@subscriber("bill")
@broker.publisher(f"{queue}.invoices")
async def bill(order: Order) -> Invoice:
    tasks.note("runs", order.order)
    return Invoice(invoice=f"for {order.order}")


@subscriber("hold")
async def hold(order: Order) -> str:
    return await asyncio.to_thread(tasks.hold, order.order)


@subscriber("outlive")
async def outlive(order: Order) -> str:
    return await asyncio.to_thread(tasks.outlive, order.order)


@subscriber("fail_once")
async def fail_once(order: Order) -> str:
    return tasks.fail_once(order.order)


@subscriber("decline")
async def decline(order: Order) -> str:
    return tasks.decline(order.order)


@subscriber("crash")
async def crash(order: Order) -> None:
    tasks.crash(order.order)


@subscriber("careless", ack_policy=AckPolicy.REJECT_ON_ERROR)
async def careless(order: Order) -> None:
    tasks.note("runs", order.order)


if __name__ == "__main__":
    asyncio.run(app.run())
