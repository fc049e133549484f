"""taskiq, with real workers on Valkey and RabbitMQ: each message's effect once, whatever the worker does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from taskiq import InMemoryBroker
from taskiq.kicker import AsyncKicker
from taskiq_aio_pika import AioPikaBroker
from taskiq_redis import RedisAsyncResultBackend, RedisStreamBroker
from tests.integration.framework_helpers import Workers, working
from tests.integration.framework_stories import TaskSite, TaskStories, asked_for, settings_of, url_of
from tests.integration.taskiq_brokers import on_rabbitmq

from effectonce import Policy, Receiver
from effectonce.errors import UsageError
from effectonce.messaging.taskiq import Idempotent

WORKER = [
    "taskiq", "worker", "tests.integration.taskiq_app:broker", "--workers", "1", "--max-async-tasks", "8",
    "--max-threadpool-threads", "4",
]  # fmt: skip


class Site(TaskSite):
    """A broker as its clients see it, and its workers."""

    def __init__(self, workers: Workers, broker: Any, runner: asyncio.Runner) -> None:
        super().__init__(workers)
        self.broker, self._runner = broker, runner

    def send(self, name: str, *args: Any, id: str, **labels: Any) -> None:
        self.send_all([(name, args, id)], **labels)

    def deliver(self, orders: list[str]) -> None:
        self.send_all([("deliver", (order,), order) for order in orders])

    def send_all(self, messages: list[tuple[str, tuple[Any, ...], str]], **labels: Any) -> None:
        async def main() -> None:
            for name, args, id in messages:
                kicker: Any = AsyncKicker(name, self.broker, labels).with_task_id(id)
                await kicker.kiq(*args)

        self._runner.run(main())

    def result(self, id: str) -> Any:
        def look() -> bool:
            return self._runner.run(self.broker.result_backend.is_result_ready(id))

        self.until(look, what=f"The result of {id}")
        found = self._runner.run(self.broker.result_backend.get_result(id))
        return found.error if found.is_err else found.return_value

    def is_drained(self) -> bool:
        """Whether nothing waits; on Redis also whether no worker holds anything."""
        return self._runner.run(self._drained())

    async def _drained(self) -> bool:
        broker = self.broker
        if isinstance(broker, AioPikaBroker):
            channel: Any = broker.write_channel
            name = broker._task_queues[0].name
            queue = await channel.declare_queue(name, passive=True, robust=False)
            return not queue.declaration_result.message_count
        from redis.asyncio import Redis

        async with Redis(connection_pool=broker.connection_pool) as client:
            about = await client.xinfo_groups(broker.queue_name)
        if not about or about[0]["lag"]:
            return False
        if about[0]["pending"]:  # workers take over what a dead one held only after something new
            await self.broker.kick(self.broker.formatter.dumps(_nobodys()))
        return not about[0]["pending"]


def _nobodys() -> Any:
    """A message for no task: it is acknowledged and forgotten."""
    from taskiq import TaskiqMessage

    return TaskiqMessage(task_id=uuid4().hex, task_name="nobodys", labels={}, args=[], kwargs={})


@pytest.fixture
def server(request: pytest.FixtureRequest) -> str:
    return asked_for(request)


@pytest.fixture
def site(server: str, valkey: Any, tmp_path: Path) -> Iterator[Site]:
    settings = settings_of(server, results := url_of(valkey))
    queue = settings["EFFECTONCE_QUEUE"]
    broker: Any
    if server.startswith("amqp"):
        broker = on_rabbitmq(server, queue)
    else:
        broker = RedisStreamBroker(server, queue_name=queue, consumer_id="0")
    broker = broker.with_result_backend(RedisAsyncResultBackend(results, prefix_str=queue))
    with asyncio.Runner() as runner, working(tmp_path, WORKER, **settings) as workers:
        runner.run(broker.startup())
        yield Site(workers, broker, runner)
        runner.run(broker.shutdown())


class TestTaskiq(TaskStories):
    """The stories of every framework."""


@pytest.mark.parametrize("name", ["add", "add_async"])
def test_the_stored_result_goes_to_the_result_backend(site: Site, name: str) -> None:
    """A worker dies when a result is recorded and not yet in the backend: the redelivery puts it there."""
    site.send(name, 1, 2, id="fatal-1")
    assert site.result("fatal-1") == 3
    assert site.noted("runs") == ["add 1 2"]
    assert site.noted("events", "replayed")


@pytest.mark.parametrize("name", ["requeue_once", "fail_once"])
def test_another_try_releases_the_claim(site: Site, name: str) -> None:
    """A requeue and any exception: the message comes again and runs again; a repetition gets the result."""
    site.shows_another_try(name)


def test_a_remembered_error_is_raised_again_as_itself(site: Site) -> None:
    """The handler runs once, and the retry middleware makes nothing of it."""
    site.send("decline", "d", id="d-1")
    assert "d was declined" in str(site.result("d-1"))
    site.send("decline", "d", id="d-1")
    site.until(lambda: len(site.noted("events", "replayed")) + len(site.noted("events", "failed")) >= 2)
    site.until(site.is_drained)
    assert site.noted("runs") == ["d"]
    assert "d was declined" in str(site.result("d-1"))
    assert len(site.noted("events", "replayed")) <= 1


def test_a_message_that_takes_its_worker_along_is_given_up(site: Site) -> None:
    """It is delivered again after each crash, until its attempts are used up: then it fails, and says so."""
    site.send("crash", "c", id="c-1")
    assert "attempts crashed or failed" in str(site.result("c-1"))
    assert site.noted("runs") == ["c"] * 2


def test_a_task_that_met_its_time_limit_keeps_its_claim(site: Site) -> None:
    """Nobody knows how far it came: its retry begins when the lease is over, not before."""
    site.send("too_slow", "s", id="s-1", timeout=1)
    site.until(lambda: site.noted("events", "completed"))
    assert site.noted("runs") == ["s", "s"]
    assert not site.noted("events", "released")
    assert site.noted("events", "taken_over")


# Without a worker process


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver("memory://") as receiver:
        yield receiver


def test_a_task_that_is_called_as_a_function_is_called(receiver: Receiver) -> None:
    """There is no message, so there is nothing to be repeated; also inside of another task, and after one."""
    idempotent = Idempotent(receiver)
    broker = InMemoryBroker(await_inplace=True).with_middlewares(idempotent)
    told: list[str] = []
    receiver.events.hooks = (lambda event: told.append(event.kind),)
    ran: list[int] = []

    @broker.task(task_name="inner")
    @idempotent
    async def inner(number: int) -> int:
        ran.append(number)
        return number

    @broker.task(task_name="outer")
    @idempotent
    async def outer(number: int) -> int:
        return await inner(number) + (await outer(number - 1) if number else 0)

    async def main() -> None:
        assert await inner(7) == 7
        task = await outer.kiq(1)
        assert (await task.wait_result()).return_value == 1
        assert await outer(0) == 0

    asyncio.run(main())
    assert ran == [7, 1, 0, 0]
    assert told == ["claimed", "completed"]


def test_another_message_under_the_same_id_is_refused(receiver: Receiver) -> None:
    """Its sender gave one id to two messages: an error, and nothing runs. Arguments are compared as they were sent."""
    idempotent = Idempotent(receiver)
    broker = InMemoryBroker(await_inplace=True).with_middlewares(idempotent)
    ran: list[float] = []

    @broker.task(task_name="append")
    @idempotent(policy=Policy(keep="8d", busy="reject"))
    def append(number: float) -> None:
        ran.append(number)

    async def main() -> list[Any]:
        found: list[Any] = []
        for number in (1, 1, 2):
            task = await append.kicker().with_task_id("m-1").kiq(number)
            found.append((await task.wait_result()).error)
        return found

    first, second, third = asyncio.run(main())
    assert (first, second) == (None, None)
    assert "used before with another payload" in str(third)
    assert ran == [1.0]


def test_mistakes_are_told(receiver: Receiver) -> None:
    """A decorator in the wrong place, or one that the broker does not know: nothing would be remembered."""
    idempotent = Idempotent(receiver)
    broker = InMemoryBroker()
    with pytest.raises(UsageError, match=r"Write @broker\.task above"):
        idempotent(broker.task(nothing))
    with pytest.raises(UsageError, match="with_middlewares"):
        idempotent(nothing)()


def nothing() -> None:
    """A task that does nothing."""


known = Idempotent(Receiver("memory://"))
InMemoryBroker().with_middlewares(known)
in_a_pool = known(nothing)
in_a_pool.__qualname__ = "in_a_pool"


def test_a_pool_of_processes_is_refused() -> None:
    """The message is not known there."""
    in_a_pool()
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
        assert isinstance(pool.submit(in_a_pool).exception(), UsageError)
