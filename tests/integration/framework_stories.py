"""What every framework with workers of its own has to show, and a site to show it on.

``class TestMine(TaskStories)`` with a fixture ``site`` runs the stories. Their tasks are those of ``framework_tasks``.
"""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest
from tests.integration.consumers_helpers import SIZES
from tests.integration.framework_helpers import Workers, storm

BROKERS = pytest.mark.parametrize("server", ["valkey", "rabbitmq"], indirect=True)


class TaskSite:
    """A framework as its clients see it, and its workers."""

    loses = False
    """Whether the broker may lose what it has just given to a worker that is killed."""

    def __init__(self, workers: Workers) -> None:
        self.workers, self.folder = workers, workers.folder
        self.noted, self.until = workers.noted, workers.until

    def send(self, name: str, *args: Any, id: str) -> None:
        """Send a task under an id, which may have been sent before."""
        raise NotImplementedError

    def deliver(self, orders: list[str]) -> None:
        """Send orders to be delivered; nobody asks for what becomes of them."""
        for order in orders:
            self.send("deliver", order, id=order)

    def result(self, id: str) -> Any:
        """What a task returned or raised, when it is there."""
        raise NotImplementedError

    def is_drained(self) -> bool:
        """Whether neither the queues nor any worker hold a message, as far as the broker says."""
        raise NotImplementedError

    def dead(self) -> int:
        """How many messages are dead letters, where a framework has them."""
        return 0

    def shows_another_try(self, name: str) -> None:
        """The first try of a task gives its claim back, and the second has the result of every repetition."""
        self.send(name, "r", id="r-1")
        assert self.result("r-1") == "r done"
        self.send(name, "r", id="r-1")
        self.until(lambda: self.noted("events", "replayed"))
        assert self.noted("runs") == ["r", "r"]


class TaskStories:
    """One test for each thing that all of them promise."""

    @BROKERS
    @SIZES
    def test_killed_workers_leave_each_effect_once(self, site: TaskSite, messages: int) -> None:
        """Messages that come up to four times, and all processes of the worker killed in the middle."""
        storm(site.folder, messages, site.workers, site.deliver, site.is_drained, loses=site.loses)
        assert site.dead() == 0

    @BROKERS
    def test_a_message_that_is_in_flight_elsewhere_comes_later(self, site: TaskSite) -> None:
        """It is neither run nor answered nor lost, and no retry is counted: afterwards it gets the first result."""
        for _ in range(2):
            site.send("hold", "h", id="h-1")
        site.until(lambda: len(site.noted("events", "busy")) >= 5)
        (site.folder / "go").touch()
        assert site.result("h-1") == "h held"
        site.until(lambda: site.noted("events", "replayed"))
        site.until(site.is_drained)
        assert site.noted("runs") == ["h"]
        assert site.result("h-1") == "h held"
        assert site.dead() == 0

    def test_a_handler_may_run_for_longer_than_its_lease(self, site: TaskSite) -> None:
        """The keeper renews it, also in the child of a pool."""
        site.send("outlive", "long", id="long-1")
        assert site.result("long-1") == "long outlived"
        assert site.noted("runs") == ["long"]


def url_of(server: Any) -> str:
    """A server's URL, as frameworks write it."""
    return str(server.url).replace("valkey:", "redis:")


def asked_for(request: pytest.FixtureRequest) -> str:
    """The URL of the broker that a test asks for by ``BROKERS``; RabbitMQ's, if it does not."""
    return url_of(request.getfixturevalue(getattr(request, "param", "rabbitmq")))


def settings_of(broker: str, results: str) -> dict[str, str]:
    """What a worker finds in its environment: where its messages are, in a queue that is nobody else's."""
    queue = f"q-{uuid4().hex}"
    return {"EFFECTONCE_BROKER": broker, "EFFECTONCE_RESULTS": results, "EFFECTONCE_QUEUE": queue}
