"""Versions over sqlite3: event order against a model, and what is refused before anything is asked."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effectonce.errors import ColourMismatch, Unencodable, UsageError
from effectonce.versions import (
    Change,
    EventOrder,
    Gap,
    StaleVersion,
    UniqueEffect,
    VersionGap,
    VersionGuard,
    schema,
)

ACCOUNTS = "CREATE TABLE accounts (id TEXT PRIMARY KEY, balance INTEGER, version INTEGER, note TEXT)"


def database() -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:")
    for statement in [*schema("sqlite"), ACCOUNTS, "INSERT INTO accounts VALUES ('acc-1', 10, 3, '')"]:
        connection.execute(statement)
    connection.commit()
    return connection


@pytest.fixture
def connection() -> Iterator[sqlite3.Connection]:
    """A database with one account, at version 3."""
    with closing(database()) as connection:
        yield connection


def account(connection: sqlite3.Connection) -> tuple[Any, ...]:
    found: tuple[Any, ...] = connection.execute("SELECT balance, version FROM accounts").fetchone()
    return found


# Event order against a model

arrivals = st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 6), st.sampled_from([True, True, False])))


@given(arrivals)
def test_parked_events_are_applied_once_and_in_order(arriving: list[tuple[str, int, bool]]) -> None:
    """However they arrive, and whatever is rolled back: what is applied is what has come, up to the first gap."""
    order = EventOrder("shipping", gaps="park")
    with closing(database()) as connection:
        applied: dict[str, list[int]] = {"a": [], "b": []}
        came: dict[str, set[int]] = {"a": set(), "b": set()}
        for entity, version, commits in arriving:
            due = order.on(connection).take(entity, version, {"is": version})
            if not commits:
                connection.rollback()
                continue
            connection.commit()
            came[entity].add(version)
            applied[entity] += [event["is"] for event in due]
            length = next(n for n in range(7) if n + 1 not in came[entity])
            assert applied[entity] == list(range(1, length + 1))
            assert order.on(connection).position(entity) == length
            connection.commit()
        waiting = {entity: sorted(came[entity] - set(applied[entity])) for entity in "ab"}
        assert order.on(connection).gaps() == [
            Gap(entity, len(applied[entity]), early[0], len(early))
            for entity, early in waiting.items()
            if early
        ]


@given(arrivals)
def test_reported_gaps_change_nothing(arriving: list[tuple[str, int, bool]]) -> None:
    """What is not the next one is skipped or refused, and the position stays."""
    order = EventOrder("shipping")
    with closing(database()) as connection:
        applied = {"a": 0, "b": 0}
        for entity, version, _ in arriving:
            if version > applied[entity] + 1:
                with pytest.raises(VersionGap) as gap:
                    order.on(connection).take(entity, version, None)
                assert (gap.value.entity, gap.value.applied, gap.value.version) == (
                    entity,
                    applied[entity],
                    version,
                )
            else:
                is_due = version == applied[entity] + 1
                assert order.on(connection).take(entity, version, version) == [version] * is_due
                applied[entity] += is_due
            assert order.on(connection).position(entity) == applied[entity]


@given(arrivals)
def test_where_gaps_are_allowed_the_newest_wins(arriving: list[tuple[str, int, bool]]) -> None:
    """Each event that is newer than all before is applied, and no other."""
    order = EventOrder("shipping", gaps="allow")
    with closing(database()) as connection:
        newest = {"a": 0, "b": 0}
        for entity, version, _ in arriving:
            assert order.on(connection).take(entity, version, "e") == ["e"] * (version > newest[entity])
            newest[entity] = max(newest[entity], version)
            assert order.on(connection).position(entity) == newest[entity]


def test_many_parked_events_are_released_together(connection: sqlite3.Connection) -> None:
    """More than are read at a time; then none is left behind."""
    order = EventOrder("shipping", gaps="park").on(connection)
    for version in (*range(300, 1, -1), 350):
        assert order.take("o-1", version, version) == []
    assert order.gaps() == [Gap("o-1", 0, 2, 300)]
    assert order.take("o-1", 1, 1) == list(range(1, 301))
    assert order.gaps() == [Gap("o-1", 300, 350, 1)]
    assert connection.execute("SELECT COUNT(*) FROM effectonce_parked").fetchone() == (1,)


def test_the_usual_event_is_one_statement(connection: sqlite3.Connection) -> None:
    """Also where gaps are parked, as long as nothing is."""
    order = EventOrder("shipping", gaps="park").on(connection)
    order.take("o-1", 1, "first")
    seen: list[str] = []
    connection.set_trace_callback(seen.append)
    assert order.take("o-1", 2, "second") == ["second"]
    assert len(seen) == 1, seen


def test_a_gap_can_be_given_up(connection: sqlite3.Connection) -> None:
    """What is parked behind it is released, what it made pointless is dropped, and nothing goes back."""
    order = EventOrder("shipping", gaps="park").on(connection)
    for version in (3, 5, 6, 8):
        order.take("o-1", version, version)
    assert order.skip_to("o-1", 4) == [5, 6]
    assert order.skip_to("o-1", 2) == []
    assert (order.position("o-1"), order.take("o-1", 4, 4)) == (6, [])
    assert order.take("o-1", 7, 7) == [7, 8]
    assert order.gaps() == [] and order.skip_to("unheard of", 9) == []
    assert order.position("unheard of") == 9


def test_a_consumer_that_stops_parking_releases_what_is_parked(connection: sqlite3.Connection) -> None:
    """What was acknowledged to its broker must not be stranded by a change of mind."""
    EventOrder("shipping", gaps="park").on(connection).take("o-1", 2, "two")
    assert EventOrder("shipping").on(connection).take("o-1", 1, "one") == ["one", "two"]


def test_consumers_and_entities_keep_apart(connection: sqlite3.Connection) -> None:
    """Case and accents count."""
    for consumer in ("shipping", "Shipping", "shippïng"):
        for entity in ("o-1", "O-1", "ö-1"):
            assert EventOrder(consumer).on(connection).take(entity, 1, entity) == [entity]


def test_events_may_be_counted_from_zero(connection: sqlite3.Connection) -> None:
    """Then zero is due first, and below it there is nothing."""
    order = EventOrder("shipping", first=0).on(connection)
    assert order.position("o-1") == -1
    with pytest.raises(VersionGap):
        order.take("o-1", 1, "one")
    assert order.take("o-1", 0, "zero") == ["zero"] and order.take("o-1", 0, "zero") == []
    with pytest.raises(UsageError, match="from 0"):
        order.take("o-1", -1, "before")


@dataclass
class Shipped:
    """An event of a class of the user's own."""

    parcels: int


def test_parked_events_come_back_with_their_type(connection: sqlite3.Connection) -> None:
    """If the order knows it; if not, that is said at the first event, not at the first gap."""
    order = EventOrder("shipping", gaps="park", event=Shipped).on(connection)
    assert order.take("o-1", 2, Shipped(2)) == []
    assert order.take("o-1", 1, Shipped(1)) == [Shipped(1), Shipped(2)]
    with pytest.raises(Unencodable):
        EventOrder("untyped", gaps="park").on(connection).take("o-1", 1, Shipped(1))
    assert EventOrder("untyped").on(connection).take("o-1", 1, Shipped(1)) == [Shipped(1)]


# What is refused before anything is asked

ACCOUNT = VersionGuard("accounts")


@pytest.mark.parametrize(
    ("update", "says"),
    [
        (
            lambda at: at.update("acc-1", expected="3", set={"balance": 1}, by="r"),
            "expected='3' is not a version",
        ),
        (lambda at: at.update("acc-1", expected=True, set={"balance": 1}, by="r"), "is not a version"),
        (lambda at: at.update("acc-1", expected=-1, set={"balance": 1}, by="r"), "from 0"),
        (lambda at: at.update("acc-1", expected=2**63, set={"balance": 1}, by="r"), "is not a version"),
        (lambda at: at.update("acc-1", expected=3, set={}, by="r"), "changes nothing"),
        (lambda at: at.update("acc-1", expected=3, set=[("balance", 1)], by="r"), "mapping from columns"),
        (lambda at: at.update("acc-1", expected=3, set={"VERSION": 9}, by="r"), "the guard's own"),
        (lambda at: at.update("acc-1", expected=3, set={"id": "x"}, by="r"), "the guard's own"),
        (lambda at: at.update("acc-1", expected=3, set={'balance" = 0 --': 9}, by="r"), "not a name"),
        (lambda at: at.update("acc-1", expected=3, set={"balance": 1}, by=""), "can't be a name"),
        (lambda at: at.update("acc-1", expected=3, set={"balance": 1}, by="r "), "without blanks around"),
        (lambda at: at.update(None, expected=3, set={"balance": 1}, by="r"), "names no row"),
    ],
    ids=[f"update-{n}" for n in range(12)],
)
def test_a_wrong_update_says_what_is_wrong(
    connection: sqlite3.Connection, update: Callable[[Any], object], says: str
) -> None:
    """And writes nothing."""
    with pytest.raises(UsageError, match=says):
        update(ACCOUNT.on(connection))
    assert account(connection) == (10, 3)


def test_without_a_transaction_nothing_is_done(connection: sqlite3.Connection) -> None:
    """A connection that commits by itself is told how to begin."""
    connection.isolation_level = None
    for call in (
        lambda: VersionGuard("accounts").on(connection).update("acc-1", expected=3, set={"balance": 1}),
        lambda: EventOrder("shipping").on(connection).take("o-1", 1, None),
        lambda: UniqueEffect("accounts", column="id").on(connection).insert({}, key="k"),
    ):
        with pytest.raises(UsageError, match="BEGIN IMMEDIATE"):
            call()
    assert account(connection) == (10, 3) and not connection.in_transaction


def test_the_wrong_colour_is_told_the_right_one(connection: sqlite3.Connection) -> None:
    """A blocking connection would hold up an event loop."""
    work = EventOrder("shipping").on(connection).atake("o-1", 1, None)
    with pytest.raises(ColourMismatch, match="take"):
        work.send(None)


def test_what_is_no_connection_is_refused() -> None:
    """With those that are known."""
    for make in (VersionGuard("accounts"), EventOrder("shipping"), UniqueEffect("payments")):
        with pytest.raises(UsageError, match="psycopg"):
            make.on("postgresql://…")


def test_an_id_that_is_not_unique_is_heard_of(connection: sqlite3.Connection) -> None:
    """Two rows written at once would be two effects; a rollback undoes them."""
    connection.execute("INSERT INTO accounts VALUES ('acc-2', 10, 3, '')")
    with pytest.raises(UsageError, match="has to be unique"):
        VersionGuard("accounts", id="balance").on(connection).update(10, expected=3, set={"note": "x"})


def test_a_row_without_a_version_is_stale(connection: sqlite3.Connection) -> None:
    """NULL is no version, and the error says so."""
    connection.execute("UPDATE accounts SET version = NULL")
    with pytest.raises(StaleVersion, match="its version is NULL") as stale:
        VersionGuard("accounts").on(connection).update("acc-1", expected=3, set={"balance": 1})
    assert stale.value.actual is None


def test_a_row_that_a_trigger_protects_is_no_endless_loop(connection: sqlite3.Connection) -> None:
    """It is where it should be and yet can't be written."""
    connection.execute("CREATE TRIGGER no BEFORE UPDATE ON accounts BEGIN SELECT RAISE(IGNORE); END")
    with pytest.raises(UsageError, match="trigger"):
        VersionGuard("accounts").on(connection).update("acc-1", expected=3, set={"balance": 1})


def test_names_that_need_quotes_work(connection: sqlite3.Connection) -> None:
    """Key words, blanks, hyphens, letters of any script."""
    connection.execute('CREATE TABLE "order" ("group" TEXT, "größe" INTEGER, "my-version" INTEGER)')
    connection.execute("INSERT INTO \"order\" VALUES ('g', 1, 1)")
    guard = VersionGuard("main.order", id="group", version="my-version")
    assert guard.on(connection).update("g", expected=1, set={"größe": 2}, by="r").version == 2
    assert connection.execute('SELECT * FROM "order"').fetchone() == ("g", 2, 2)


def test_a_stale_update_is_not_remembered(connection: sqlite3.Connection) -> None:
    """It was not made, so the next try under its name is made."""
    table = ACCOUNT.on(connection)
    with pytest.raises(StaleVersion):
        table.update("acc-1", expected=2, set={"balance": 5}, by="withdraw-1")
    connection.commit()
    assert table.update("acc-1", expected=3, set={"balance": 5}, by="withdraw-1") == Change(4)


def test_an_id_may_be_a_tuple_of_one(connection: sqlite3.Connection) -> None:
    """As a caller writes it who makes guards for many tables."""
    guard = VersionGuard("accounts", id=("id",))
    assert guard.on(connection).update(("acc-1",), expected=3, set={"balance": 5}) == Change(4)


def test_a_name_is_a_rows_own(connection: sqlite3.Connection) -> None:
    """One request may change several rows and tables."""
    connection.execute("INSERT INTO accounts VALUES ('acc-2', 10, 3, '')")
    connection.execute("CREATE TABLE others AS SELECT * FROM accounts")
    tables = [VersionGuard(name).on(connection) for name in ("accounts", "others")]
    for table in tables:
        for id in ("acc-1", "acc-2"):
            assert table.update(id, expected=3, set={"balance": 5}, by="transfer-1") == Change(4)
            assert table.update(id, expected=4, set={"balance": 0}, by="transfer-1") == Change(
                4, replayed=True
            )


# The unique column


def test_a_column_that_takes_two_keys_for_one_is_heard_of(connection: sqlite3.Connection) -> None:
    """Else the second effect would be taken for done, and never be."""
    connection.execute("CREATE TABLE payments (cents INTEGER, effect_key TEXT COLLATE NOCASE UNIQUE)")
    effect = UniqueEffect("payments").on(connection)
    assert effect.insert({"cents": 1}, key="key-a") and not effect.insert({"cents": 1}, key="key-a")
    with pytest.raises(UsageError, match="compared exactly"):
        effect.insert({"cents": 2}, key="KEY-A")


def test_a_wrong_row_says_what_is_wrong(connection: sqlite3.Connection) -> None:
    """Before anything is written."""
    effect: Any = UniqueEffect("payments").on(connection)
    for row, key, says in [
        ({"effect_key": "x"}, "k", "key="),
        ({"Effect_Key": "x"}, "k", "key="),
        ([], "k", "not a row"),
        ({"a;b": 1}, "k", "not a name"),
        ({}, None, "can't be a name"),
        ({}, "", "can't be a name"),
    ]:
        with pytest.raises(UsageError, match=says):
            effect.insert(row, key=key)


def test_only_this_constraint_means_done(connection: sqlite3.Connection) -> None:
    """Another one that fails is an error like any other."""
    connection.execute("CREATE TABLE payments (id INTEGER PRIMARY KEY, cents INTEGER CHECK (cents > 0))")
    effect = UniqueEffect("payments")
    for statement in effect.schema("sqlite"):
        connection.execute(statement)
    assert effect.on(connection).insert({"id": 1, "cents": 5}, key="k-1")
    for row in ({"id": 1, "cents": 5}, {"id": 2, "cents": -5}):
        with pytest.raises(sqlite3.IntegrityError) as refused:
            effect.on(connection).insert(row, key="k-2")
        assert not effect.already_done(refused.value)
    with pytest.raises(sqlite3.IntegrityError) as refused:
        connection.execute("INSERT INTO payments (cents, effect_key) VALUES (7, 'k-1')")
    assert effect.already_done(refused.value)
    wrapped = RuntimeError("an ORM's")
    wrapped.__cause__ = refused.value
    assert effect.already_done(wrapped) and not effect.already_done(RuntimeError())
