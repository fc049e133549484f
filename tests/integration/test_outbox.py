"""The outbox and its relay on every engine: what is committed is published, in order per key, and nothing else is."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.integration.outbox_helpers import (
    Broker,
    World,
    mariadb_world,
    postgres_world,
    sqlite_world,
    unsent,
)
from tests.servers.proxy import FaultProxy

from effectonce import Message, Receiver, current
from effectonce.errors import ColourMismatch, StoreMismatch, StoreUnavailable, UsageError
from effectonce.outbox import Event, Outbox, Relay
from effectonce.outbox._database import Bell, Settlement
from effectonce.outbox._events import new_id
from effectonce.testing.clocks import wait_until

ENGINES = ["sqlite", "postgres", "mariadb"]


@pytest.fixture(params=ENGINES)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    """An empty outbox on each engine."""
    if request.param == "sqlite":
        world = sqlite_world(tmp_path)
    else:
        url = str(request.getfixturevalue(request.param).url)
        world = postgres_world(url) if request.param == "postgres" else mariadb_world(url)
    database = world.database()
    assert database.migrate() is True
    database.close()
    yield world
    world.remove()


@pytest.fixture
def broker() -> Broker:
    return Broker()


# Adding


def test_what_is_committed_is_published(world: World, broker: Broker) -> None:
    """An event comes out as it went in: id, topic, key, payload and headers."""
    with world.transaction() as connection:
        id = world.outbox.on(connection).add("orders", {"n": 1}, key="o-1", headers={"trace": "é"})
    with world.relay(broker) as relay:
        assert relay.run_once() == 1
    event = broker.got[0]
    assert (event.id, event.topic, event.key, event.payload) == (id, "orders", "o-1", b'{"n":1}')
    assert (event.headers, event.attempts) == ({"trace": "é"}, 1)
    assert event.created_at > 1_600_000_000


def test_what_is_rolled_back_is_never_published(world: World, broker: Broker) -> None:
    """No commit, no event."""
    connection = world.connect()
    world.outbox.on(connection).add("orders", "lost")
    connection.rollback()
    connection.close()
    with world.relay(broker) as relay:
        assert relay.run_once() == 0
    assert broker.got == []


def test_payloads_of_every_kind(world: World, broker: Broker) -> None:
    """Bytes stay bytes, text is UTF-8, the rest is JSON; none of it is changed by a database."""
    payloads: list[Any] = [b"\x00\xff\\'\"%", "ü'\"\\%s $1 \U0001f600", {"a": [1, None]}, b"", 7]
    with world.transaction() as connection:
        for payload in payloads:
            world.outbox.on(connection).add("t'\"%s ü", payload, key="k")
    with world.relay(broker) as relay:
        relay.run_once()
    given = [event.payload for event in broker.got]
    assert given == [b"\x00\xff\\'\"%", payloads[1].encode(), b'{"a":[1,null]}', b"", b"7"]
    assert broker.got[0].topic == "t'\"%s ü"


def test_an_id_is_added_once(world: World, broker: Broker) -> None:
    """The same id is the same event: the first one counts, in the same transaction or a later one."""
    with world.transaction() as connection:
        world.outbox.on(connection).add("t", "first", id="e-1")
        assert world.outbox.on(connection).add("t", "again", id="e-1") == "e-1"
    with world.transaction() as connection:
        world.outbox.on(connection).add("t", "once more", id="e-1")
    with world.relay(broker) as relay:
        relay.run_once()
    assert broker.payloads == ["first"]


def test_a_handler_that_runs_again_makes_the_same_ids(world: World) -> None:
    """Inside a handler ids come of the key, the topic, the event's key and the ordinal; elsewhere they are random."""
    ids: list[list[str]] = []

    def handle(message: Message) -> None:
        with world.transaction() as connection:
            writer = world.outbox.on(connection)
            ids.append(
                [writer.add("a", 1), writer.add("a", 2), writer.add("b", 3), writer.add("a", 4, key="k")]
            )
        if len(ids) == 1:
            raise RuntimeError("crashed before the record")

    with Receiver("memory://") as receiver:
        with pytest.raises(RuntimeError):
            receiver.process(Message("m-1"), handle)
        receiver.process(Message("m-1"), handle)
        receiver.process(Message("m-2"), handle)
    assert ids[0] == ids[1]
    assert len(set(ids[0])) == 4
    assert not set(ids[0]) & set(ids[2])
    assert world.do("SELECT count(*) FROM {}")[0][0] == 8
    with world.transaction() as connection:
        writer = world.outbox.on(connection)
        assert writer.add("a", 1) != writer.add("a", 1)


def test_a_step_that_is_not_run_again_leaves_its_ids_to_nobody(world: World, broker: Broker) -> None:
    """A finished step is skipped when the handler runs again; the event after it is another one, and is published."""
    crashes = iter([True, False])

    def tell(what: str) -> None:
        with world.transaction() as connection:
            world.outbox.on(connection).add("orders", what, key="o-1")

    def handle(message: Message) -> None:
        current().step("reserve", tell, "reserved")
        if next(crashes):
            raise RuntimeError("crashed after the step")
        tell("paid")

    with Receiver("memory://") as receiver:
        with pytest.raises(RuntimeError):
            receiver.process(Message("m-1"), handle)
        receiver.process(Message("m-1"), handle)
    with world.relay(broker) as relay:
        relay.run_once()
    assert broker.payloads == ["reserved", "paid"]


def test_a_step_that_is_tried_again_makes_the_same_ids(tmp_path: Path) -> None:
    """What was counted in a run of it that failed does not count."""
    world, ids = sqlite_world(tmp_path), list[str]()
    with closing(world.database()) as database:
        database.migrate()

    def tell() -> None:
        with closing(world.connect()) as connection:
            ids.append(world.outbox.on(connection).add("orders", "reserved"))
            if len(ids) == 1:
                raise RuntimeError("rolled back")

    def handle(message: Message) -> None:
        with suppress(RuntimeError):
            current().step("reserve", tell)
        current().step("reserve", tell)

    with Receiver("memory://") as receiver:
        receiver.process(Message("m-1"), handle)
    assert len(ids) == 2
    assert ids[0] == ids[1]


@pytest.mark.parametrize(
    "others",
    [(("a of b", "c"), ("a", "b of c")), (("a of b", None), ("a", "b ")), (("a ", "b"), ("a", " b"))],
)
def test_no_two_events_share_an_id(others: tuple[tuple[str, str | None], ...]) -> None:
    """Wherever a topic ends and a key begins."""
    ids: set[str] = set()
    with Receiver("memory://") as receiver:
        receiver.process(Message("m-1"), lambda _: ids.update(new_id(topic, key) for topic, key in others))
    assert len(ids) == len(others)


BOTTOMLESS: list[Any] = []
for _ in range(100_000):
    BOTTOMLESS = [BOTTOMLESS]


@pytest.mark.parametrize(
    "words",
    [
        pytest.param({"topic": ""}, id="no topic"),
        pytest.param({"topic": "x" * 256}, id="long topic"),
        pytest.param({"topic": "a\0b"}, id="NUL"),
        pytest.param({"topic": None}, id="None"),
        pytest.param({"key": ""}, id="empty key"),
        pytest.param({"key": "\ud800"}, id="surrogate"),
        pytest.param({"id": 7}, id="number"),
        pytest.param({"headers": {"a": 1}}, id="header of a number"),
        pytest.param({"headers": {"a": "b\r\nc"}}, id="header of two lines"),
        pytest.param({"payload": object()}, id="object"),
        pytest.param({"payload": float("nan")}, id="nan"),
        pytest.param({"payload": "half \ud800"}, id="text with a surrogate"),
        pytest.param({"payload": {"name": ["half \ud800"]}}, id="JSON with a surrogate"),
        pytest.param({"payload": BOTTOMLESS}, id="JSON without a bottom"),
        pytest.param({"headers": [("a", "b")]}, id="headers in a list"),
        pytest.param({"headers": "a: b"}, id="headers in a text"),
        pytest.param({"headers": {"Id": "x"}}, id="header that names the event"),
    ],
)
def test_nonsense_is_refused_and_nothing_added(tmp_path: Path, words: dict[str, Any]) -> None:
    """Bad input is a UsageError that names it, before a statement is sent."""
    world = sqlite_world(tmp_path)
    with closing(world.database()) as database:
        database.migrate()
    given = {"topic": "t", "payload": 1, **words}
    with world.transaction() as connection, pytest.raises(UsageError):
        world.outbox.on(connection).add(given.pop("topic"), given.pop("payload"), **given)
    assert world.do("SELECT count(*) FROM {}") == [(0,)]


def test_without_its_table_the_error_says_what_to_do(world: World, broker: Broker) -> None:
    """A missing table is said in our words, to who adds and to who relays."""
    elsewhere = Outbox("ob_nowhere")
    connection = world.connect()
    with pytest.raises(StoreMismatch, match="effectonce migrate --outbox"):
        elsewhere.on(connection).add("t", 1)
    connection.close()
    with (
        Relay(world.url, broker, table="ob_nowhere") as relay,
        pytest.raises(StoreMismatch, match="effectonce migrate --outbox"),
    ):
        relay.run_once()


def test_a_relay_makes_no_file(tmp_path: Path, broker: Broker) -> None:
    """A path that is wrong is said, and no empty database is left there for the next one to find."""
    path = tmp_path / "typo.db"
    with Relay(f"sqlite:///{path}", broker) as relay:
        for ask in (relay.run_once, relay.lag, relay.dead, relay.replay, lambda: relay.forget("e-1")):
            with pytest.raises(StoreMismatch, match=rf"There is no file {path}.*effectonce migrate --outbox"):
                ask()
    assert not path.exists()


def test_another_programs_table_is_left_alone(world: World) -> None:
    """A table of the outbox's name that is not ours is not touched."""
    world.do("DROP TABLE {}")
    world.do("CREATE TABLE {} (seq integer)")
    with closing(world.database()) as database, pytest.raises(StoreMismatch, match="belongs to another"):
        database.migrate()


def test_a_blocking_connection_is_not_awaited(world: World) -> None:
    """The form of the call has to fit the connection."""
    with world.transaction() as connection:
        adding = world.outbox.on(connection).aadd("t", 1)
        with pytest.raises(ColourMismatch, match=r"\.add\("):
            asyncio.run(adding)


# Order, failures and leases


@pytest.mark.parametrize("world", ["postgres", "mariadb"], indirect=True)
def test_commit_order_is_not_the_order_of_ids(world: World, broker: Broker) -> None:
    """An event waits for a running transaction that added an earlier one of its key; without a key it does not."""
    with closing(world.connect()) as first, world.relay(broker) as relay:
        world.outbox.on(first).add("t", "a1", key="a")
        world.add(("a2", "a"), ("n1", None))
        assert relay.run_once() == 1
        first.commit()
        assert relay.run_once() == 2
    assert broker.payloads == ["n1", "a1", "a2"]


@pytest.mark.parametrize("world", ["postgres", "mariadb"], indirect=True)
def test_a_transaction_that_is_rolled_back_holds_up_nobody(world: World, broker: Broker) -> None:
    """What waited for it goes on."""
    with closing(world.connect()) as first, world.relay(broker) as relay:
        world.outbox.on(first).add("t", "a1", key="a")
        world.add(("a2", "a"))
        first.rollback()
        assert relay.run_once() == 1


def test_a_later_event_never_passes_a_committed_one(postgres: Any, broker: Broker) -> None:
    """The younger transaction's event came first, an old one still runs between them: neither passes the other."""
    world = postgres_world(postgres.url)
    with closing(world.database()) as database:
        database.migrate()
    with closing(world.connect()) as old, closing(world.connect()) as between, world.relay(broker) as relay:
        old.execute("SELECT pg_current_xact_id()")
        between.execute("SELECT pg_current_xact_id()")
        world.add(("a1", "a"))
        world.outbox.on(old).add("t", "a2", key="a")
        old.commit()
        assert relay.run_once() == 0
        between.rollback()
        assert relay.run_once() == 2
    assert broker.payloads == ["a1", "a2"]
    world.remove()


def test_order_per_key_and_waves(world: World, broker: Broker) -> None:
    """A publisher that may lose an event never has two of a key in its hands."""
    world.add(("a1", "a"), ("b1", "b"), ("a2", "a"), ("n1", None), ("a3", "a"), ("n2", None), ("b2", "b"))
    with world.relay(broker) as relay:
        assert relay.run_once() == 7
    assert broker.calls == [4, 2, 1]
    assert [p for p in broker.payloads if p[0] == "a"] == ["a1", "a2", "a3"]
    assert [p for p in broker.payloads if p[0] == "b"] == ["b1", "b2"]


def test_a_failed_event_is_retried_before_those_behind_it(world: World, broker: Broker) -> None:
    """What fails holds up its key and nobody else, and counts an attempt; those behind it count none."""
    world.add(("a1", "a"), ("a2", "a"), ("b1", "b"), ("n1", None))
    broker.refused = {"a1"}
    with world.relay(broker, retry=("1h", "1h")) as relay:
        assert relay.run_once() == 2
        assert sorted(broker.payloads) == ["b1", "n1"]
        world.add(("a3", "a"), ("c1", "c"))
        assert relay.run_once() == 1
        assert relay.lag().waiting == 3
        broker.refused = set()
        world.do("UPDATE {} SET due_at = 0 WHERE state = 1")
        assert relay.run_once() == 3
    assert [p for p in broker.payloads if p[0] == "a"] == ["a1", "a2", "a3"]
    attempts = {event.payload: event.attempts for event in broker.got}
    assert (attempts[b"a1"], attempts[b"a2"]) == (2, 1)


def test_a_poison_event_blocks_its_key_until_it_is_replayed(world: World, broker: Broker) -> None:
    """poison="block": given up with a reason; its key waits, others pass; replayed, everything goes in order."""
    world.add(("a1", "a"), ("a2", "a"), ("b1", "b"))
    broker.refused = {"a1"}
    with world.relay(broker, max_attempts=2) as relay:
        wait_until(lambda: relay.run_once() or relay.lag().dead)
        wait_until(lambda: relay.run_once() or relay.lag().dead)
        world.add(("a3", "a"), ("b2", "b"))
        relay.run_once()
        assert broker.payloads == ["b1", "b2"]
        (dead,) = relay.dead()
        assert (dead.event.payload, dead.event.attempts, dead.blocks) == (b"a1", 2, True)
        assert dead.reason == "ValueError: a1 is refused"
        assert relay.lag()[::2] == (2, 1)
        broker.refused = set()
        assert relay.replay(dead.event.id) == 1
        assert relay.run_once() == 3
    assert broker.payloads[2:] == ["a1", "a2", "a3"]


def test_a_poison_event_parks_alone(world: World, broker: Broker) -> None:
    """poison="skip": given up, those behind it pass; without a key it never held up anybody."""
    world.add(("a1", "a"), ("a2", "a"), ("n1", None), ("n2", None))
    broker.refused = {"a1", "n1"}
    with world.relay(broker, max_attempts=1, poison="skip") as relay:
        relay.run_once()
        assert sorted(broker.payloads) == ["a2", "n2"]
        assert [dead.blocks for dead in relay.dead()] == [False, False]
        assert (relay.lag().waiting, relay.figures.given_up) == (0, 2)
        assert relay.forget(relay.dead()[0].event.id) is True
        broker.refused = set()
        assert relay.replay() == 1
        assert relay.run_once() == 1
        assert relay.dead() == []


def test_forgetting_a_poison_event_frees_its_key(world: World, broker: Broker) -> None:
    """A person may decide that it is never published."""
    world.add(("a1", "a"), ("a2", "a"))
    broker.refused = {"a1"}
    with world.relay(broker, max_attempts=1) as relay:
        assert relay.run_once() == 0
        assert relay.forget(relay.dead()[0].event.id) is True
        assert relay.forget("unknown") is False
        relay.run_once()
    assert broker.payloads == ["a2"]


def test_many_events_behind_a_poison_event_stop_nobody_else(world: World, broker: Broker) -> None:
    """A batch is not filled up with events that can't go."""
    world.add(("poison", "a"), *((f"a{n}", "a") for n in range(20)), ("b1", "b"))
    broker.refused = {"poison"}
    with world.relay(broker, max_attempts=1, batch=4) as relay:
        relay.run_once()
        relay.run_once()
    assert broker.payloads == ["b1"]


def test_a_broker_that_is_away_costs_no_attempt(world: World, broker: Broker) -> None:
    """Everything waits, nothing is given up, and it goes on when the broker is back."""
    world.add(("a1", "a"), ("a2", "a"), ("n1", None))
    broker.is_away = True
    with world.relay(broker, max_attempts=1) as relay:
        for _ in range(5):
            assert relay.run_once() == 0
        assert relay.lag().dead == 0
        broker.is_away = False
        assert relay.run_once() == 3
    assert {event.attempts for event in broker.got} == {1}


def test_events_that_were_unsent_are_sent_again_in_order(world: World) -> None:
    """A connection that breaks in the middle of a window: what arrived is done, the rest goes again."""
    got: list[str] = []

    class Breaking(Broker):
        keeps_order = True

        def publish(self, events: Any) -> Any:
            few = events if got else events[:2]
            got.extend(event.payload.decode() for event in few)
            return [None] * len(few) + [unsent()] * (len(events) - len(few))

    world.add(("a1", "a"), ("b1", "b"), ("a2", "a"), ("a3", "a"))
    with world.relay(Breaking(), max_attempts=1) as relay:
        relay.run_once()
        wait_until(lambda: relay.run_once() or relay.lag().waiting == 0)
        assert relay.figures.given_up == 0
    assert got == ["a1", "b1", "a2", "a3"]


def test_one_topic_that_is_away_stops_nobody_else(world: World) -> None:
    """Events that don't get through make room for others, and no attempt is counted."""
    got: list[str] = []

    class Half(Broker):
        def publish(self, events: Any) -> Any:
            got.extend(event.payload.decode() for event in events if event.topic == "t")
            return [None if event.topic == "t" else unsent() for event in events]

    world.add(*((f"x{n}", None) for n in range(20)), topic="away")
    world.add(*((f"y{n}", "k") for n in range(20)), topic="away")
    world.add(("a", None), ("b", "b"))
    with world.relay(Half(), max_attempts=1, batch=8, retry=("1h", "1h")) as relay:
        for _ in range(20):
            relay.run_once()
        assert got == ["a", "b"]
        assert relay.lag()[::2] == (40, 0)


def test_leased_rows_are_nobody_elses(world: World) -> None:
    """Two relays get different rows, and a row waits while an earlier one of its key is leased."""
    world.add(("a1", "a"), ("b1", "b"), ("a2", "a"), ("n1", None))
    one, two = world.database(), world.database()
    first = one.claim(2, 60, 1)
    assert [event.payload for event in first] == [b"a1", b"b1"]
    assert [event.payload for event in two.claim(10, 60, 2)] == [b"n1"]
    assert one.settle(1, Settlement(published=[first[0].seq]), blocks=True, keeps=False) == 1
    assert [event.payload for event in two.claim(10, 60, 3)] == [b"a2"]
    one.close()
    two.close()


def test_a_lease_that_is_over_is_taken_over_and_fenced(world: World) -> None:
    """After a lease another relay publishes the same events; the first one's write-backs change nothing."""
    world.add(("a1", "a"), ("a2", "a"), ("a3", "a"), ("a4", "a"))
    one, two = world.database(), world.database()
    stale = one.claim(10, 0.001, 1)
    wait_until(lambda: two.claim(10, 60, 2))
    seqs = [event.seq for event in stale]
    late = Settlement([seqs[0]], [(seqs[1], 5.0, "x", True)], [(seqs[2], "x")], [seqs[3]])
    assert one.settle(1, late, blocks=True, keeps=False) == 0
    assert world.do("SELECT count(*) FROM {} WHERE state = 0 AND token = 2") == [(4,)]
    assert two.settle(2, Settlement(seqs), blocks=True, keeps=False) == 4
    assert two.lag().waiting == 0
    one.close()
    two.close()


def test_relays_side_by_side_keep_the_order(world: World) -> None:
    """Four relays on one outbox, small batches: every event once, each key's in order."""
    keys, each = 12, 40
    world.add(*((f"{key}:{number}", str(key)) for number in range(each) for key in range(keys)))
    got: list[Event] = []
    lock = threading.Lock()

    def take(event: Event) -> None:
        with lock:
            got.append(event)

    relays = [world.relay(take, batch=7) for _ in range(4)]
    threads = [threading.Thread(target=relay.run) for relay in relays]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(got) >= keys * each, seconds=60)
    for relay in relays:
        relay.stop()
    for thread in threads:
        thread.join()
    for relay in relays:
        relay.close()
    assert len(got) == keys * each
    for key in range(keys):
        numbers = [int(event.payload.split(b":")[1]) for event in got if event.key == str(key)]
        assert numbers == list(range(each))


# Servers that are away


@pytest.mark.parametrize("world", ["postgres", "mariadb"], indirect=True)
def test_a_database_that_is_away_and_comes_back(world: World, broker: Broker) -> None:
    """A running relay connects again and goes on; called once, it says what is wrong."""
    with FaultProxy(world.url) as proxy:
        behind = World(proxy.url, world.connect)
        behind.table = world.table
        with behind.relay(broker, lease="1s") as relay:
            proxy.refuse()
            with pytest.raises(StoreUnavailable):
                relay.run_once()
            thread = threading.Thread(target=relay.run)
            thread.start()
            proxy.heal()
            for number in range(3):
                world.add((str(number), "k"))
                wait_until(lambda number=number: str(number) in broker.payloads)
                proxy.cut()
            relay.stop()
            thread.join(20)
            assert not thread.is_alive()
    # A write-back that was lost is a repetition.
    assert list(dict.fromkeys(broker.payloads)) == ["0", "1", "2"]


def test_a_sleeping_relay_is_notified_and_a_busy_one_is_not(postgres: Any) -> None:
    """A commit wakes who sleeps. While nobody does, nothing is sent: notifications make commits wait."""
    world = postgres_world(postgres.url)
    ear = world.connect()
    ear.autocommit = True
    ear.execute(f"LISTEN {world.table}")
    with closing(world.database()) as database, closing(Bell()) as bell:
        database.migrate()
        world.add(("nobody sleeps", None))
        woken: list[bool] = []
        sleeper = threading.Thread(target=lambda: woken.append(database.wait(60, bell)))
        sleeper.start()
        wait_until(lambda: world.do("SELECT last_value FROM {}_ears")[0][0] > 0)
        world.add(("somebody does", None))
        sleeper.join(20)
        assert woken == [True]
        world.add(("nobody does again", None))
    heard = list(ear.notifies(timeout=0))
    assert [notice.channel for notice in heard] == [world.table]
    ear.close()
    world.remove()


# Retention, lag, running


def test_published_events_are_kept_and_purged(world: World, broker: Broker) -> None:
    """With keep= they stay for a while, where an id that is added again is still known."""
    with world.transaction() as connection:
        world.outbox.on(connection).add("t", "1", id="e-1")
    with world.relay(broker, keep="1h") as relay:
        relay.run_once()
        with world.transaction() as connection:
            world.outbox.on(connection).add("t", "1", id="e-1")
        assert relay.run_once() == 0
        assert world.do("SELECT state FROM {}") == [(4,)]
        assert relay.lag() == (0, 0, 0)
        world.do("UPDATE {} SET due_at = due_at - 3601")
        wait_until(lambda: relay.run_once() or relay.figures.purged)
    assert world.do("SELECT count(*) FROM {}") == [(0,)]


def test_lag_tells_how_far_behind_the_relays_are(world: World, broker: Broker) -> None:
    """How many events wait, and since when the oldest does."""
    world.add(("a", None), ("b", None))
    world.do("UPDATE {} SET created_at = created_at - 100")
    with world.relay(broker) as relay:
        lag = relay.lag()
        assert lag.waiting == 2
        assert 100 <= lag.seconds < 200
        relay.run_once()
        assert relay.lag() == (0, 0, 0)


def test_a_running_relay_finds_new_events_and_stops(world: World, broker: Broker) -> None:
    """run() publishes what comes, and returns after stop()."""
    relay = world.relay(broker)
    thread = threading.Thread(target=relay.run)
    thread.start()
    for number in range(3):
        world.add((str(number), None))
        wait_until(lambda number=number: len(broker.got) == number + 1)
    relay.stop()
    thread.join(20)
    assert not thread.is_alive()
    relay.close()


def test_a_relay_may_be_asked_while_it_works(world: World, broker: Broker) -> None:
    """lag(), dead() and replay() on another thread are not in the way of the round that is under way."""
    relay = world.relay(broker, batch=5)
    thread = threading.Thread(target=relay.run)
    thread.start()
    for number in range(50):
        world.add((str(number), "k"))
        assert relay.lag().dead == relay.replay() == len(relay.dead()) == 0
    wait_until(lambda: len(broker.got) == 50)
    relay.stop()
    thread.join(20)
    assert not thread.is_alive()
    assert broker.payloads == [str(number) for number in range(50)]
    relay.close()


def test_a_relay_that_is_stopped_finishes_what_it_began(world: World, broker: Broker) -> None:
    """The batch under way is published and written back; the next is not begun."""
    world.add(("1", None), ("2", None))
    relay = world.relay(broker, batch=1)
    broker.before = relay.stop
    relay.run()
    assert broker.payloads == ["1"]
    assert relay.lag().waiting == 1
    relay.close()


def test_on_an_event_loop(world: World) -> None:
    """arun() with a coroutine function: awaited on the loop, and cancelled it finishes what it began."""
    got: list[str] = []
    world.add(("a1", "a"), ("a2", "a"), ("b1", "b"))

    async def main() -> None:
        all_here = asyncio.Event()

        async def take(event: Event) -> None:
            await asyncio.sleep(0)
            got.append(event.payload.decode())
            if len(got) == 3:
                all_here.set()

        relay = world.relay(take)
        running = asyncio.ensure_future(relay.arun())
        await all_here.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert relay.figures.published == 3
        relay.close()

    asyncio.run(main())
    assert [p for p in got if p[0] == "a"] == ["a1", "a2"]


class Unseen:
    """A publisher that is async and does not look so."""

    keeps_order = False

    def publish(self, events: Any) -> Any:
        return asyncio.sleep(0, [None] * len(events))

    def close(self) -> None:
        """Nothing is held."""


@pytest.mark.parametrize("publisher", [lambda event: asyncio.sleep(0), Unseen()], ids=["lambda", "object"])
@pytest.mark.parametrize("looped", [False, True])
def test_what_nobody_awaits_is_not_published(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, publisher: Any, looped: bool
) -> None:
    """The event stays, and the log says how to write the publisher."""
    world = sqlite_world(tmp_path)
    with closing(world.database()) as database:
        database.migrate()
    world.add(("a", None))
    with world.relay(publisher) as relay:
        assert (asyncio.run(relay.arun_once()) if looped else relay.run_once()) == 0
        assert relay.lag()[::2] == (1, 0)
    assert "Write it as `async def`" in caplog.text


def test_a_callable_publishes_one_at_a_time(world: World) -> None:
    """A plain function takes an event and raises when it fails; a broken connection is not held against the event."""
    tries: list[str] = []

    def take(event: Event) -> None:
        tries.append(event.payload.decode())
        if len(tries) == 1:
            raise ConnectionResetError("away")

    world.add(("1", None))
    with world.relay(take, max_attempts=1) as relay:
        assert relay.run_once() == 0
        wait_until(relay.run_once)
    assert tries == ["1", "1"]
