"""A Dramatiq broker with actors for the tests: ``dramatiq tests.integration.dramatiq_app:broker``."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import dramatiq
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import AsyncIO
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend
from tests.integration import framework_tasks as tasks

from effectonce.messaging.dramatiq import Idempotent


def make_broker() -> tuple[dramatiq.Broker, RedisBackend]:
    """The broker, as workers and clients have it."""
    url, name = os.environ["EFFECTONCE_BROKER"], os.environ["EFFECTONCE_QUEUE"]
    broker: Any
    if url.startswith("amqp"):
        broker = RabbitmqBroker(url=url)
    else:  # what a killed worker held comes again when its heartbeat has been missing for this long
        broker = RedisBroker(url=url, namespace=name, heartbeat_timeout=2000, maintenance_chance=300_000)
    backend = RedisBackend(url=os.environ["EFFECTONCE_RESULTS"], namespace=f"{name}-results")
    broker.add_middleware(AsyncIO())
    broker.add_middleware(Results(backend=backend))
    return broker, backend


broker, _ = make_broker()
broker.add_middleware(Idempotent(tasks.receiver, retry=tasks.PAUSES))
OPTIONS: dict[str, Any] = {
    "broker": broker,
    "queue_name": os.environ["EFFECTONCE_QUEUE"],
    "store_results": True,
    "min_backoff": 100,
    "max_backoff": 500,
}


def actor(function: Any, **options: Any) -> Any:
    return dramatiq.actor(function, **{**OPTIONS, **options})


deliver = dramatiq.actor(**{**OPTIONS, "store_results": False, "actor_name": "deliver"})(
    lambda order: tasks.deliver(order) and None
)
add = actor(tasks.add)
hold = actor(tasks.hold, max_retries=0)
outlive = actor(tasks.outlive)
decline = actor(tasks.decline)
fail_once = actor(tasks.fail_once)
crash = actor(tasks.crash, idempotent=tasks.FRAGILE)


@dramatiq.actor(**OPTIONS)
async def add_async(a: int, b: int) -> int:
    await asyncio.sleep(0)
    return tasks.add(a, b)


@dramatiq.actor(**OPTIONS)
def retry_once(name: str) -> str:
    tasks.note("runs", name)
    if tasks.first(name):
        raise dramatiq.Retry("once more", delay=50)
    return f"{name} done"


@dramatiq.actor(**OPTIONS, time_limit=1000)
def too_slow(name: str) -> str:
    tasks.note("runs", name)
    if tasks.first(name):
        tasks.hold(name)
    return f"{name} done"
