"""Dramatiq, with real workers on Valkey and RabbitMQ: each message's effect once, whatever the worker does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dramatiq
import pytest
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.brokers.redis import RedisBroker
from dramatiq.brokers.stub import StubBroker
from dramatiq.results.backends import RedisBackend
from dramatiq.results.errors import ResultFailure, ResultMissing
from tests.integration.framework_helpers import Workers, working
from tests.integration.framework_stories import (
    BROKERS,
    TaskSite,
    TaskStories,
    asked_for,
    settings_of,
    url_of,
)

from effectonce import Policy, Receiver
from effectonce.errors import UsageError
from effectonce.messaging.dramatiq import Idempotent

WORKER = ["dramatiq", "tests.integration.dramatiq_app:broker", "--processes", "1", "--threads", "4"]


class Site(TaskSite):
    """A broker as its clients see it, and its workers."""

    def __init__(self, workers: Workers, broker: Any, backend: Any, queue: str) -> None:
        super().__init__(workers)
        self.broker, self.backend, self.queue = broker, backend, queue
        self._names: dict[str, str] = {}

    def message(self, name: str, *args: Any, id: str, **options: Any) -> Any:
        self._names[id] = name
        return dramatiq.Message(self.queue, name, args, {}, options, message_id=id)

    def send(self, name: str, *args: Any, id: str, **options: Any) -> None:
        self.broker.enqueue(self.message(name, *args, id=id, **options))

    def result(self, id: str) -> Any:
        """An actor's result, or the text of its failure, when it is there."""
        message, found = self.message(self._names[id], id=id), list[Any]()

        def look() -> bool:
            try:
                found.append(self.backend.get_result(message))
            except ResultMissing:
                return False
            except ResultFailure as failure:
                found.append(str(failure))
            return True

        self.until(look, what=f"The result of {id}")
        return found[0]

    def is_drained(self) -> bool:
        """Whether neither the queues nor any worker hold a message. RabbitMQ says nothing of the latter."""
        if isinstance(self.broker, RedisBroker):
            return not self.broker.do_qsize(self.queue) + self.broker.do_qsize(f"{self.queue}.DQ")
        return not sum(self.broker.get_queue_message_counts(self.queue)[:2])

    def dead(self) -> int:
        if isinstance(self.broker, RedisBroker):
            return int(self.broker.client.zcard(f"{self.broker.namespace}:{self.queue}.XQ"))
        return int(self.broker.get_queue_message_counts(self.queue)[2])


@pytest.fixture
def server(request: pytest.FixtureRequest) -> str:
    return asked_for(request)


@pytest.fixture
def site(server: str, valkey: Any, tmp_path: Path) -> Iterator[Site]:
    settings = settings_of(server, results := url_of(valkey))
    queue = settings["EFFECTONCE_QUEUE"]
    on_rabbitmq = server.startswith("amqp")
    broker: Any = RabbitmqBroker(url=server) if on_rabbitmq else RedisBroker(url=server, namespace=queue)
    broker.declare_queue(queue)
    backend = RedisBackend(url=results, namespace=f"{queue}-results")
    with working(tmp_path, WORKER, **settings) as workers:
        yield Site(workers, broker, backend, queue)
    broker.close()
    backend.client.close()


class TestDramatiq(TaskStories):
    """The stories of every framework."""


@pytest.mark.parametrize("name", ["add", "add_async"])
def test_a_pipeline_goes_on_with_the_stored_result(site: Site, name: str) -> None:
    """A worker dies when a stage is recorded and the next not yet sent: the redelivery sends it."""
    first, second = site.message(name, 1, 2, id="fatal-1"), site.message(name, 10, id="next-1")
    dramatiq.pipeline([first, second], broker=site.broker).run()
    assert site.result("next-1") == 13
    assert site.noted("runs") == ["add 1 2", "add 10 3"]
    assert any("fatal-1" in line for line in site.noted("events", "replayed"))


@pytest.mark.parametrize("name", ["retry_once", "fail_once"])
def test_an_error_releases_the_claim(site: Site, name: str) -> None:
    """Dramatiq's own Retry and any exception: the message comes again and runs again; a repetition gets the result."""
    site.shows_another_try(name)


def test_a_remembered_error_is_a_dead_letter_at_once(site: Site) -> None:
    """The handler runs once, no retry is made, and a repetition gets the same error."""
    for number in range(2):
        site.send("decline", "d", id="d-1")
        site.until(lambda n=number: site.dead() > n)
    assert "Declined" in site.result("d-1")
    assert "d was declined" in site.result("d-1")
    assert site.noted("runs") == ["d"]


@BROKERS
def test_a_message_that_takes_its_worker_along_is_given_up(site: Site) -> None:
    """It is delivered again after each crash, until its attempts are used up: then it is a dead letter."""
    site.send("crash", "c", id="c-1")
    site.until(lambda: site.dead() == 1)
    assert site.noted("runs") == ["c"] * 2
    assert "AttemptsExhausted" in site.result("c-1")


def test_an_actor_that_met_its_time_limit_keeps_its_claim(site: Site) -> None:
    """Nobody knows how far it came: its retry begins when the lease is over, not before."""
    site.send("too_slow", "s", id="s-1")
    assert site.result("s-1") == "s done"
    (done,) = site.noted("events", "completed")
    assert int(done.split()[-1]) > 1, "a later attempt than the one that began"
    assert not site.noted("events", "released")


# Without a worker process


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver("memory://") as receiver:
        yield receiver


def work(broker: StubBroker, queue: str = "default") -> None:
    """Have a worker handle all there is."""
    worker = dramatiq.Worker(broker, worker_timeout=10, worker_threads=2)
    worker.start()
    try:
        broker.join(queue, fail_fast=False, timeout=20_000)
        worker.join()
    finally:
        worker.stop()


def test_an_actor_that_is_called_as_a_function_is_called(receiver: Receiver) -> None:
    """There is no message, so there is nothing to be repeated; also inside of another actor, or of itself."""
    broker = StubBroker()
    broker.add_middleware(Idempotent(receiver))
    told: list[str] = []
    receiver.events.hooks = (lambda event: told.append(event.kind),)
    ran: list[int] = []

    @dramatiq.actor(broker=broker)
    def inner(number: int) -> None:
        ran.append(number)

    @dramatiq.actor(broker=broker)
    def outer(number: int) -> None:
        inner(number)
        if number:
            outer(number - 1)

    inner(7)
    outer.send(1)
    work(broker)
    assert ran == [7, 1, 0]
    assert told == ["claimed", "completed"]
    broker.close()


def test_actors_that_were_there_before_are_protected_too(receiver: Receiver) -> None:
    """The order of adding middleware and declaring actors does not matter; one that says no is left alone."""
    broker = StubBroker()
    ran: list[str] = []
    early = dramatiq.actor(ran.append, broker=broker, actor_name="early")
    broker.add_middleware(Idempotent(receiver))
    never = dramatiq.actor(ran.append, broker=broker, actor_name="never", idempotent=False)
    for actor in (early, never):
        message = actor.message(actor.actor_name)
        for _ in range(2):
            broker.enqueue(message)
        work(broker)
    assert ran == ["early", "never", "never"]
    broker.close()


def test_another_message_under_the_same_id_is_refused(receiver: Receiver) -> None:
    """Its sender gave one id to two messages: a dead letter, and nothing runs."""
    broker = StubBroker()
    broker.add_middleware(Idempotent(receiver))
    ran: list[int] = []
    actor = dramatiq.actor(ran.append, broker=broker, actor_name="append")
    for number in (1, 2):
        broker.enqueue(actor.message(number).copy(message_id="m-1"))
        work(broker)
    assert ran == [1]
    assert [letter.args for letter in broker.dead_letters] == [(2,)]
    broker.close()


def test_an_option_that_is_no_policy_is_refused(receiver: Receiver) -> None:
    """When the actor is made."""
    broker = StubBroker()
    broker.add_middleware(Idempotent(receiver, policy=Policy(keep="8d")))
    with pytest.raises(UsageError, match="no Policy"):
        dramatiq.actor(print, broker=broker, idempotent="yes")
    broker.close()
