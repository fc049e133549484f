"""Two server processes on one store: they race, they wait for each other, and one of them is killed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.http import servers
from tests.http.apps.extremes import STORE
from tests.http.servers import WebServer
from tests.http.site import Site
from tests.http.world import World

Start = Callable[[], WebServer]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("processes"))
    yield made
    made.close()


@pytest.fixture(scope="module", params=["sqlite", "valkey"])
def start(request: pytest.FixtureRequest, world: World) -> Start:
    """Starts a server on the store that all of them share."""
    if request.param == "sqlite":
        store = f"sqlite:///{world.folder}/shared.db"
    else:
        store = request.getfixturevalue("valkey").url
    return lambda: servers.start("hostile-httptools", world, {STORE: store})


@pytest.fixture(scope="module")
def sites(start: Start, world: World) -> Iterator[tuple[Site, Site]]:
    """Two processes that live as long as the tests."""
    with start() as one, start() as other:
        yield Site(one.url, world), Site(other.url, world)


@pytest.fixture
def mortal(start: Start, world: World) -> Iterator[Site]:
    """A process that may be killed."""
    with start() as server:
        yield Site(server.url, world)


def test_racing_duplicates_are_one(sites: tuple[Site, Site]) -> None:
    """Both processes get the same request at the same moment: one effect, and the same answer from both."""
    keys = [sites[0].new() for _ in range(40)]
    with ThreadPoolExecutor(8) as pool:
        pending = [pool.submit(site.post, "/wait/pay", key, b"5 EUR") for key in keys for site in sites]
        replies = [each.result() for each in pending]
    for one, other in zip(replies[::2], replies[1::2], strict=True):
        assert (one.status, other.status, one.body) == (201, 201, other.body)
        assert {one.replayed, other.replayed} == {True, False}
    assert {sites[0].world.count(key) for key in keys} == {1}


def test_a_repeat_elsewhere_is_told_to_come_back(sites: tuple[Site, Site]) -> None:
    """In flight in one process, asked for in the other: 409 with the time that is left of the lease."""
    one, other = sites
    key = one.new()
    one.world.hold(key)
    running = one.begin_post("/plain/pay", key)
    one.world.wait_for(key)
    reply = other.post("/plain/pay", key)
    one.world.let_go(key)
    assert (reply.status, reply.code, 100 < int(reply.one("retry-after") or 0) <= 120) == (
        409,
        "in-progress",
        True,
    )
    assert (running.reply().status, one.world.count(key)) == (201, 1)


def test_who_waits_elsewhere_gets_the_answer(sites: tuple[Site, Site]) -> None:
    """A duplicate in the other process waits for the first one's end."""
    one, other = sites
    key = one.new()
    one.world.hold(key)
    running = one.begin_post("/wait/pay", key)
    one.world.wait_for(key)
    waiting = other.begin_post("/wait/pay", key)
    one.world.let_go(key)
    assert (running.reply().replayed, waiting.reply().replayed, one.world.count(key)) == (False, True, 1)


def test_who_waits_elsewhere_runs_when_the_first_gives_up(sites: tuple[Site, Site]) -> None:
    """A key that is released in one process is free for whoever waits in the other."""
    one, other = sites
    key = one.new()
    one.world.hold(key)
    running = one.begin_post("/wait/500", key)
    one.world.wait_for(key)
    waiting = other.begin_post("/wait/500", key)
    one.world.let_go(key)
    assert (running.reply().body, waiting.reply().body) == (b"number 1", b"number 2")


def test_another_request_with_the_key_of_a_killed_one_is_refused(
    sites: tuple[Site, Site], mortal: Site
) -> None:
    """Killed between effect and record: what was asked under that key is known all the same."""
    survivor, key = sites[0], mortal.new()
    with pytest.raises(ConnectionError):
        mortal.post("/crash/die", key, b"5 EUR")
    assert survivor.world.count(key) == 1
    assert survivor.post("/crash/die", key, b"6 EUR").code == "key-reused"
    assert survivor.post("/crash/pay", key, b"5 EUR").code == "key-reused"
    reply = survivor.send("PATCH", f"/crash/die?n={key}", [("Idempotency-Key", key)], b"5 EUR")
    assert (reply.code, survivor.world.count(key)) == ("key-reused", 1)


def test_a_killed_request_is_taken_over_after_its_lease(sites: tuple[Site, Site], mortal: Site) -> None:
    """As the policy says by default: the retry runs again, once; its answer is what every repeat gets."""
    survivor, key = sites[0], mortal.new()
    with pytest.raises(ConnectionError):
        mortal.post("/crash/die", key)
    replies = [site.post("/crash/die", key) for site in (survivor, sites[1], survivor)]
    assert [(reply.body, reply.replayed) for reply in replies] == [
        (b"number 2", False),
        (b"number 2", True),
        (b"number 2", True),
    ]


def test_a_killed_request_stays_in_doubt_where_asked(sites: tuple[Site, Site], mortal: Site) -> None:
    """``on_crash="in_doubt"``: nothing runs again until somebody has looked into it."""
    survivor, key = sites[0], mortal.new()
    with pytest.raises(ConnectionError):
        mortal.post("/crash-once/die", key)
    for site in (survivor, sites[1]):
        assert site.post("/crash-once/die", key).code == "outcome-unknown"
    assert survivor.world.count(key) == 1
