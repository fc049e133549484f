"""Celery, with real workers on Valkey and RabbitMQ: each message's effect once, whatever the worker does."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextvars import Context
from pathlib import Path
from typing import Any

import celery
import pytest
from celery import chain, chord
from tests.integration.framework_helpers import Workers, working
from tests.integration.framework_stories import (
    BROKERS,
    TaskSite,
    TaskStories,
    asked_for,
    settings_of,
    url_of,
)

from effectonce import Message, Policy, Receiver, current
from effectonce.errors import AttemptsExhausted, UsageError
from effectonce.messaging.celery import IdempotentTask

APP = "tests.integration.celery_app"
WORKER = [
    "celery",
    "-A",
    APP,
    "worker",
    "--pool",
    "prefork",
    "-c",
    "2",
    "-l",
    "INFO",
    "--without-mingle",
    "--without-gossip",
]


class Site(TaskSite):
    """An app as its clients see it, and its workers."""

    def __init__(self, workers: Workers, app: Any) -> None:
        super().__init__(workers)
        self.app = app
        # There a message is taken from its list in one command, and noted as taken in another.
        self.loses = app.conf.broker_url.startswith("redis")

    def send(self, name: str, *args: Any, id: str, **options: Any) -> None:
        self.app.send_task(name, args, task_id=id, **options)

    def deliver(self, orders: list[str]) -> None:
        for order in orders:
            self.send("deliver", order, id=order, ignore_result=True)

    def signature(self, name: str, *args: Any, id: str) -> Any:
        return self.app.signature(name, args).set(task_id=id)

    def result(self, id: str) -> Any:
        found = self.app.AsyncResult(id)
        self.until(found.ready, what=f"The result of {id}")
        return found.result

    def ended(self) -> int:
        """How many deliveries have come to an end, of any kind."""
        return sum(not line.startswith(("claimed", "busy")) for line in self.noted("events"))

    def is_drained(self) -> bool:
        queue = self.app.conf.task_default_queue
        with self.app.connection_for_read() as connection:
            channel = connection.default_channel
            if hasattr(channel, "client"):
                waiting = int(channel.client.llen(queue))
                held = sum(queue.encode() in each for each in channel.client.hvals("unacked"))
                return not waiting + held
            return not channel.queue_declare(queue, passive=True).message_count


@pytest.fixture(autouse=True)
def tidied() -> Iterator[None]:
    """What Celery's own clients leave to the collector on a busy machine is collected here, and in no later test."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture
def server(request: pytest.FixtureRequest) -> str:
    return asked_for(request)


@pytest.fixture
def site(server: str, valkey: Any, tmp_path: Path) -> Iterator[Site]:
    settings = settings_of(server, results := url_of(valkey))
    queue = settings["EFFECTONCE_QUEUE"]
    with (
        celery.Celery("client", broker=server, backend=results, set_as_current=False) as app,
        working(tmp_path, WORKER, **settings) as workers,
    ):
        app.conf.update(
            task_default_queue=queue, result_backend_transport_options={"global_keyprefix": queue}
        )
        yield Site(workers, app)
        app.backend.result_consumer.stop()
        app.backend.client.connection_pool.disconnect()  # which an app that is closed leaves to the collector


class TestCelery(TaskStories):
    """The stories of every framework."""


def test_a_chain_goes_on_with_the_stored_result(site: Site) -> None:
    """A worker dies when a link is recorded and its successor not yet sent: the redelivery sends it."""
    chain(site.signature("add", 1, 2, id="fatal-1"), site.signature("add", 10, id="next-1")).apply_async()
    assert site.result("next-1") == 13
    assert site.noted("runs") == ["add 1 2", "add 3 10"]
    assert any("fatal-1" in line for line in site.noted("events", "replayed"))


def test_a_chord_is_completed_by_the_stored_result(site: Site) -> None:
    """The same for a member of a chord: its part is not missing."""
    header = [site.signature("add", 1, 2, id="fatal-1"), site.signature("add", 3, 4, id="other-1")]
    chord(header)(site.signature("total", id="total-1"))
    assert site.result("total-1") == 10
    assert sorted(site.noted("runs")) == ["add 1 2", "add 3 4", "total [3, 7]"]


def test_callbacks_happen_once_for_a_message_that_comes_again(site: Site) -> None:
    """Celery sends them with each delivery of their task, under another id each time. One that is new is run."""
    single, step = site.app.signature("add", (10,)), site.app.signature("add", (100,))
    for number, link in enumerate([[single, chain(step, step)]] * 2 + [[site.app.signature("add", (11,))]]):
        site.send("add", 1, 2, id="l-1", link=link)
        # The task, its callback and the two steps, and again; then the task and the new one.
        ended = (4, 8, 10)[number]
        site.until(lambda n=ended: site.ended() == n)
    assert sorted(site.noted("runs")) == ["add 1 2", "add 103 100", "add 3 10", "add 3 100", "add 3 11"]


@pytest.mark.parametrize("name", ["retry_once", "autoretry"])
def test_a_retry_releases_the_claim(site: Site, name: str) -> None:
    """The task runs again under the same id, also with other arguments; a repetition gets the result."""
    for number in range(2):
        site.send(name, "r", id="r-1")
        site.until(lambda: site.result("r-1") == "r done")
        site.until(
            lambda n=number: len(site.noted("events", "completed") + site.noted("events", "replayed")) > n
        )
    assert len(site.noted("runs")) == 2


def test_an_error_is_celerys_to_treat(site: Site) -> None:
    """A failed task may be sent again, and runs; the claim was released."""
    site.send("fail_once", "f", id="f-1")
    assert isinstance(site.result("f-1"), ValueError)
    site.send("fail_once", "f", id="f-1")
    site.until(lambda: site.result("f-1") == "f done")


def test_a_remembered_error_is_raised_again_as_itself(site: Site) -> None:
    """The handler does not run again."""
    for number in range(2):
        site.send("decline", "d", id="d-1")
        site.until(lambda n=number: site.ended() > n)
        site.until(site.is_drained)
        found = site.result("d-1")
        assert type(found).__name__ == "Declined"
        assert str(found) == "d was declined"
    assert site.noted("runs") == ["d"]


def test_an_ignored_task_is_ignored_again(site: Site) -> None:
    """It ended by its own word, so a repetition does not run it."""
    for number in range(2):
        site.send("ignore", "i", id="i-1")
        site.until(lambda n=number: site.ended() > n)
        site.until(site.is_drained)
    assert site.noted("runs") == ["i"]


def test_a_task_that_replaces_itself_goes_on(site: Site) -> None:
    """What takes a task's place has its id, and is no repetition of it; a repetition of the first goes nowhere."""
    site.send("pages", "book", 1, 3, id="p-1")
    assert site.result("p-1") == "book, 3 pages"
    site.send("pages", "book", 1, 3, id="p-1")
    site.until(lambda: site.ended() >= 4, what="The repetition")
    assert site.noted("runs") == ["book 1", "book 2", "book 3"]


@BROKERS
def test_a_task_that_takes_its_worker_along_is_given_up(site: Site) -> None:
    """It is delivered again after each crash, until its attempts are used up: then it fails, and says so."""
    site.send("crash", "c", id="c-1")
    found = site.result("c-1")
    assert isinstance(found, AttemptsExhausted)
    assert site.noted("runs") == ["c"] * 2
    site.until(site.is_drained)


def test_a_task_that_met_its_soft_time_limit_keeps_its_claim(site: Site) -> None:
    """Nobody knows how far it came: a repetition begins when the lease is over, not before."""
    site.send("too_slow", "s", id="s-1")
    assert type(site.result("s-1")).__name__ == "SoftTimeLimitExceeded"
    assert not site.noted("events", "released")
    site.send("too_slow", "s", id="s-1")
    site.until(lambda: site.result("s-1") == "s done")
    assert site.noted("events", "taken_over")


# Without a worker


def nothing() -> None:
    """A task that does nothing."""


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver("memory://") as receiver:
        yield receiver


@pytest.fixture
def app() -> Iterator[Any]:
    with celery.Celery("local", broker="memory://", backend="cache+memory://", set_as_current=False) as app:
        yield app


def test_an_eager_task_runs_once_too(app: Any, receiver: Receiver) -> None:
    """In eager mode a task has an id as well; what runs elsewhere can't come later, so it is an error."""
    ran: list[int] = []

    @app.task(base=IdempotentTask, receiver=receiver, bind=True)
    def double(self: Any, number: int) -> int:
        assert self.request.id == "e-1"
        assert current().key.endswith("e-1")
        ran.append(number)
        return number * 2

    assert double.apply((4,), task_id="e-1").get() == 8
    assert double.apply((4,), task_id="e-1").get() == 8
    assert ran == [4]


def test_an_eager_task_that_runs_elsewhere_is_an_error(app: Any, receiver: Receiver) -> None:
    """It can't come later: there is nobody to send it."""

    @app.task(base=IdempotentTask, receiver=receiver, name="double")
    def double(number: int) -> int:
        return number * 2

    def elsewhere(_: Message) -> str:
        found = Context().run(lambda: double.apply((4,), task_id="e-1", throw=False).result)
        return type(found).__name__

    assert receiver.process(Message("e-1", source="double"), elsewhere).value == "InProgress"


def test_a_task_that_is_called_as_a_function_is_called(app: Any, receiver: Receiver) -> None:
    """There is no message, so there is nothing to be repeated."""
    told: list[str] = []
    receiver.events.hooks = (lambda event: told.append(event.kind),)

    @app.task(base=IdempotentTask, receiver=receiver, bind=True)
    def double(self: Any, number: int) -> int:
        return number * 2 if number else int(double(4))

    assert [double(4), double(4)] == [8, 8]
    assert double.apply((0,), task_id="e-1").get() == 8
    assert told == ["claimed", "completed"]


@pytest.mark.parametrize("setting", ["acks_late", "reject_on_worker_lost"])
def test_settings_that_would_lose_messages_are_refused(app: Any, receiver: Receiver, setting: str) -> None:
    """When the task is made, with the reason."""
    with pytest.raises(UsageError, match=f"{setting}=False.*Both must be True"):
        app.task(base=IdempotentTask, receiver=receiver, lazy=False, **{setting: False})(nothing)


def test_a_task_without_a_receiver_is_refused(app: Any) -> None:
    """It could remember nothing."""
    with pytest.raises(UsageError, match="no receiver"):
        app.task(base=IdempotentTask, lazy=False)(nothing)


def test_a_policy_of_a_task_is_its_own(app: Any, receiver: Receiver) -> None:
    """Options of the decorator are attributes of the task, as Celery has it."""
    policy = Policy(keep="30d")
    task = app.task(base=IdempotentTask, receiver=receiver, policy=policy, lazy=False)(nothing)
    assert task._tasks.policy.keep == policy.keep
