"""Publishers on real brokers: every event arrives with its stable id, and one that fails does so alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from tests.integration.brokers import (
    BROKERS,
    OnFifo,
    OnNats,
    OnRabbitMQ,
    OnRedis,
    OnSQS,
    OnWebhook,
    Place,
    event,
    published,
)
from tests.integration.outbox_helpers import sqlite_world
from tests.servers.proxy import FaultProxy

from effectonce.errors import UsageError
from effectonce.outbox import Unsent
from effectonce.outbox.publishers import open_publisher
from effectonce.outbox.publishers.webhook import Webhook
from effectonce.testing.clocks import wait_until

PLACES: dict[str, tuple[str, type[Place]]] = {
    **{name: (name, kind) for name, kind in BROKERS.items()},
    "sqs-fifo": ("sqs", OnFifo),
    "webhook": ("", OnWebhook),
}


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    fixture, kind = PLACES[request.param]
    place = kind(str(request.getfixturevalue(fixture).url) if fixture else "")
    yield place
    if isinstance(place, OnWebhook):
        place.server.shutdown()
        place.server.server_close()
        place.thread.join()


def test_events_arrive_with_id_key_and_headers(place: Place) -> None:
    """What a consumer needs to recognise a repetition, and all else that was given."""
    publisher = open_publisher(place.url)
    events = [event(1, place.topic, "k1", trace="x"), event(2, place.topic)]
    assert list(published(publisher, events)) == [None, None]
    assert place.got(2) == [("e-1", "k1", b"1", "x"), ("e-2", None, b"2", None)]


def test_a_failing_event_fails_alone(place: Place) -> None:
    """Those before and behind it arrive; its own answer says why it did not, and is held against it."""
    publisher = open_publisher(place.url)
    events = [event(1, place.topic, "k1"), place.poison(), event(2, place.topic, "k2")]
    first, refused, last = published(publisher, events)
    assert (first, last) == (None, None)
    assert refused is not None
    assert not isinstance(refused, Unsent)
    assert str(refused)
    assert [got[0] for got in place.got(2)] == ["e-1", "e-2"]


def test_many_events_in_one_window(place: Place) -> None:
    """All of them arrive, each once; what keeps an order keeps it."""
    publisher = open_publisher(place.url)
    count = 40 if isinstance(place, OnSQS) else 300  # what stands for SQS is slow
    results = published(publisher, [event(number, place.topic, f"k{number}") for number in range(count)])
    assert list(results) == [None] * count
    got = [id for id, *_ in place.got(count)]
    assert sorted(got) == sorted(f"e-{number}" for number in range(count))
    if isinstance(place, OnRedis | OnRabbitMQ | OnNats):
        assert got == [f"e-{number}" for number in range(count)]


def test_a_name_that_amqp_has_no_room_for_fails_alone(rabbitmq: Any) -> None:
    """A routing key has 255 bytes, a topic as many characters; the channel goes on as if nothing had been."""
    place = OnRabbitMQ(rabbitmq.url)
    events = [event(1, place.topic), event(2, "ü" * 200), event(3, place.topic)]
    first, refused, last = published(open_publisher(rabbitmq.url), events)
    assert (first, last) == (None, None)
    assert refused is not None
    assert not isinstance(refused, Unsent)
    assert [got[0] for got in place.got(2)] == ["e-1", "e-3"]


def test_headers_that_no_frame_has_room_for_fail_alone(rabbitmq: Any) -> None:
    """The broker closes the connection at them and does not say whose they were; those around them arrive."""
    place = OnRabbitMQ(rabbitmq.url)
    large = event(2, place.topic)._replace(headers={"large": "x" * 200_000})
    long = event(3, place.topic)._replace(headers={"x" * 200: "a name that would be cut off"})
    around = [event(1, place.topic, payload=b"first"), event(4, place.topic, payload=b"last")]
    first, *refused, last = published(open_publisher(rabbitmq.url), [around[0], large, long, around[1]])
    assert (first, last) == (None, None)
    assert all(refused)
    assert not any(isinstance(error, Unsent) for error in refused)
    assert set(place.payloads()) == {b"first", b"last"}  # with one id, should one come twice


def test_a_payload_that_is_too_large_with_its_headers_fails_alone(nats: Any) -> None:
    """The server would close the connection at it, each time it comes, and nothing would be published any more."""
    place = OnNats(nats.url)
    large = event(2, place.topic, payload=b"x" * (1 << 20))._replace(headers={"a": "b"})
    just = event(3, place.topic, payload=b"x" * ((1 << 20) - 4000))._replace(headers={"a": "b" * 3900})
    first, refused, fits, last = published(
        open_publisher(nats.url), [event(1, place.topic), large, just, event(4, place.topic)]
    )
    assert (first, fits, last) == (None, None, None)
    assert refused is not None
    assert not isinstance(refused, Unsent)


def test_a_large_message_goes_in_many_frames(rabbitmq: Any) -> None:
    """What is larger than a frame arrives whole."""
    place = OnRabbitMQ(rabbitmq.url)
    payload = b"0123456789" * 100_000
    assert list(published(open_publisher(rabbitmq.url), [event(1, place.topic, payload=payload)])) == [None]
    assert place.payloads() == [payload]


@pytest.mark.parametrize("place", ["nats", "sqs-fifo"], indirect=True)
def test_a_broker_that_knows_ids_drops_repetitions(place: Place) -> None:
    """The stable id is where the broker looks for it."""
    for _ in range(2):
        assert list(published(open_publisher(place.url), [event(1, place.topic, "k")])) == [None]
    assert len(place.got(1)) == 1


@pytest.mark.parametrize("place", ["valkey", "rabbitmq", "nats"], indirect=True)
def test_a_broker_that_is_away_and_comes_back(place: Place, tmp_path: Path) -> None:
    """While it is away nothing counts as an attempt; when it is back, everything arrives, in order."""
    world = sqlite_world(tmp_path)
    with closing(world.database()) as database:
        database.migrate()
    world.add(*((str(number), "k") for number in range(5)), topic=place.topic)
    with FaultProxy(place.url) as proxy, world.relay(proxy.url, max_attempts=1) as relay:
        proxy.refuse()
        assert relay.run_once() == 0
        assert relay.lag()[::2] == (5, 0)
        proxy.heal()
        assert relay.run_once() == 5
    assert [payload for _, _, payload, _ in place.got(5)] == [b"0", b"1", b"2", b"3", b"4"]


@pytest.mark.parametrize("place", ["valkey", "rabbitmq", "nats"], indirect=True)
def test_a_connection_that_breaks_under_way_loses_nothing(place: Place, tmp_path: Path) -> None:
    """Wherever it breaks, every event arrives at least once, with its id, and in order, and none is given up."""
    world = sqlite_world(tmp_path)
    with closing(world.database()) as database:
        database.migrate()
    world.add(*((str(number), f"k{number % 7}") for number in range(50)), topic=place.topic)
    with FaultProxy(place.url) as proxy, world.relay(proxy.url, max_attempts=1) as relay:
        for burst in range(1, 9):
            proxy.lose_request(burst) if burst % 2 else proxy.lose_reply(burst)
            relay.run_once()
        proxy.heal()
        wait_until(lambda: relay.run_once() == 0 and relay.lag() == (0, 0, 0), seconds=60)
    seen = list(dict.fromkeys(int(payload) for payload in place.payloads()))
    assert sorted(seen) == list(range(50))
    for key in range(7):
        assert [number for number in seen if number % 7 == key] == list(range(key, 50, 7))


def test_redis_stops_a_key_at_its_first_failure(valkey: Any) -> None:
    """In one script: what failed is not passed by what comes behind it, in any of its streams."""
    place = OnRedis(valkey.url)
    bad = place.poison().topic
    events = [event(1, bad, "a"), event(2, bad, "a"), event(3, place.topic, "a"), event(4, place.topic, "b")]
    first, *_, last = published(open_publisher(valkey.url), events)
    assert first is not None
    assert last is None
    assert [got[0] for got in place.got(1)] == ["e-4"]


def test_redis_never_takes_for_added_what_it_has_left_out(valkey: Any) -> None:
    """A key that failed in one stream is left out of the next; an event that came before is not lost by that."""
    place = OnRedis(valkey.url)
    bad = place.poison().topic
    events = [event(1, bad, "other"), event(2, place.topic, "a"), event(3, bad, "a")]
    first, second, third = published(open_publisher(valkey.url), events)
    assert first is not None
    assert third is not None
    assert isinstance(second, Unsent)
    assert place.payloads() == []


def test_redis_trims_a_stream_as_it_is_told(valkey: Any) -> None:
    """?prefix= and ?maxlen= are part of the URL."""
    place = OnRedis(valkey.url)
    publisher = open_publisher(f"{valkey.url}?prefix=x.&maxlen=100")
    published(publisher, [event(number, place.topic) for number in range(1000)])
    with place.client as client:
        assert 100 <= client.xlen(f"x.{place.topic}") < 400


@pytest.mark.parametrize("status", [409, 425, 429, 503])
def test_a_webhook_that_says_later_counts_no_attempt(status: int) -> None:
    """It is not the event's fault."""
    place = OnWebhook("")
    (answer,) = published(open_publisher(place.url), [event(1, f"status-{status}")])
    place.server.shutdown()
    place.server.server_close()
    assert isinstance(answer, Unsent)
    assert str(answer) == f"{status} {HTTPStatus(status).phrase}: text"


def test_a_webhook_that_is_away_counts_no_attempt() -> None:
    """Nobody listens there."""
    (answer,) = published(open_publisher("http://127.0.0.1:9/x"), [event(1, "t")])
    assert isinstance(answer, Unsent)


def test_a_webhook_is_told_who_calls() -> None:
    """User and password of the URL, as every other client sends them; a header of one's own goes first."""
    url = "https://me:p%40ss@host/x"
    assert Webhook.from_url(url)._headers == {"Authorization": "Basic bWU6cEBzcw=="}
    own = {"Authorization": "Bearer t"}
    assert Webhook(url, headers=own)._headers == own


def test_an_unknown_broker_is_refused() -> None:
    """The error names those that are known, and no password."""
    with pytest.raises(UsageError, match="amqp://") as raised:
        open_publisher("smoke://user:secret@signals")
    assert "secret" not in str(raised.value)
    with pytest.raises(UsageError, match="no publisher"):
        open_publisher(7)  # type: ignore[arg-type]


@pytest.mark.parametrize("scheme", ["redis", "amqp", "https", "kafka", "sqs"])
def test_a_url_that_can_not_be_read_shows_no_password(scheme: str) -> None:
    """The error of the standard library would show it."""
    with pytest.raises(UsageError, match="can't be read as a URL") as refused:
        open_publisher(f"{scheme}://user:se\u2100cret@host/0")
    assert "cret" not in str(refused.value)
