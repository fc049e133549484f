"""A taskiq broker with tasks for the tests: ``taskiq worker tests.integration.taskiq_app:broker``."""

from __future__ import annotations

import asyncio
import os
from typing import Annotated, Any

from taskiq import Context, SimpleRetryMiddleware, TaskiqDepends
from taskiq_redis import RedisAsyncResultBackend, RedisStreamBroker
from tests.integration import framework_tasks as tasks
from tests.integration.taskiq_brokers import on_rabbitmq

from effectonce.messaging.taskiq import Idempotent

url, queue = os.environ["EFFECTONCE_BROKER"], os.environ["EFFECTONCE_QUEUE"]
results: Any = RedisAsyncResultBackend(os.environ["EFFECTONCE_RESULTS"], prefix_str=queue)
broker: Any
if url.startswith("amqp"):
    broker = on_rabbitmq(url, queue)
else:  # what a killed worker held comes again when it has been silent for this long, and others look only with traffic
    broker = RedisStreamBroker(
        url,
        queue_name=queue,
        consumer_id="0",
        xread_block=100,
        idle_timeout=2000,
        unacknowledged_lock_timeout=1,
    )
idempotent = Idempotent(tasks.receiver, retry=tasks.PAUSES)
broker = broker.with_result_backend(results).with_middlewares(
    SimpleRetryMiddleware(default_retry_count=3, default_retry_label=True), idempotent
)


def task(function: Any, decorator: Any = idempotent) -> Any:
    return broker.task(task_name=function.__name__)(decorator(function))


deliver = task(tasks.deliver)
add = task(tasks.add)
hold = task(tasks.hold)
outlive = task(tasks.outlive)
decline = task(tasks.decline)
fail_once = task(tasks.fail_once)
crash = task(tasks.crash, idempotent(policy=tasks.FRAGILE))


@broker.task(task_name="add_async")
@idempotent
async def add_async(a: int, b: int) -> int:
    return tasks.add(a, b)


@broker.task(task_name="requeue_once")
@idempotent
async def requeue_once(name: str, context: Annotated[Context, TaskiqDepends()]) -> str:
    tasks.note("runs", name)
    if tasks.first(name):
        await context.requeue()
    return f"{name} done"


@broker.task(task_name="too_slow")
@idempotent
async def too_slow(name: str) -> str:
    tasks.note("runs", name)
    if tasks.first(name):
        await asyncio.sleep(60)
    return f"{name} done"
