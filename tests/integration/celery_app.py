"""A Celery app for the tests: ``celery -A tests.integration.celery_app worker``."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery
from celery.exceptions import Ignore
from tests.integration import framework_tasks as tasks

from effectonce.messaging.celery import IdempotentTask

app = Celery("tests", broker=os.environ["EFFECTONCE_BROKER"], backend=os.environ["EFFECTONCE_RESULTS"])
app.conf.update(
    task_default_queue=os.environ["EFFECTONCE_QUEUE"],
    broker_connection_retry_on_startup=True,
    # Redis: what a killed worker held comes again after this.
    broker_transport_options={
        "visibility_timeout": 5,
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
    },
    result_backend_transport_options={"global_keyprefix": os.environ["EFFECTONCE_QUEUE"]},
    worker_cancel_long_running_tasks_on_connection_loss=True,
)


class Once(IdempotentTask):
    """The base of all tasks here."""

    abstract = True
    receiver = tasks.receiver
    retry_pauses = tasks.PAUSES


def task(function: Any, **options: Any) -> Any:
    return app.task(base=Once, name=function.__name__, **options)(function)


deliver = task(tasks.deliver)
add = task(tasks.add)
hold = task(tasks.hold)
outlive = task(tasks.outlive)
decline = task(tasks.decline)
crash = task(tasks.crash, policy=tasks.FRAGILE)
fail_once = task(tasks.fail_once)


@app.task(base=Once, name="retry_once", bind=True, default_retry_delay=0)
def retry_once(self: Any, name: str, changed: bool = False) -> str:
    tasks.note("runs", f"{name} {changed}")
    if tasks.first(name):
        raise self.retry(args=(name,), kwargs={"changed": True})
    return f"{name} done"


@app.task(
    base=Once,
    name="autoretry",
    autoretry_for=(ValueError,),
    default_retry_delay=0,
    dont_autoretry_for=(KeyError,),
)
def autoretry(name: str) -> str:
    return tasks.fail_once(name)


@app.task(base=Once, name="ignore")
def ignore(name: str) -> None:
    tasks.note("runs", name)
    raise Ignore


@app.task(base=Once, name="pages", bind=True)
def pages(self: Any, name: str, page: int, last: int) -> str:
    tasks.note("runs", f"{name} {page}")
    if page < last:
        raise self.replace(self.s(name, page + 1, last))
    return f"{name}, {page} pages"


@app.task(base=Once, name="total")
def total(numbers: list[int]) -> int:
    tasks.note("runs", f"total {numbers}")
    return sum(numbers)


@app.task(base=Once, name="too_slow", soft_time_limit=1, retry_pauses=("100ms", "1s"))
def too_slow(name: str) -> str:
    tasks.note("runs", name)
    if tasks.first(name):
        tasks.hold(name)
    return f"{name} done"
