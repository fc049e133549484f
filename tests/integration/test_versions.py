"""Versions over the user's own connection: every driver, two connections at once, and the receiver switched off."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.integration.versions_helpers import DRIVERS, Connection, Place, place_for, waiting_for_locks

from effectonce import Policy, Receiver, current
from effectonce.errors import StoreUnavailable, UsageError
from effectonce.stores.memory import MemoryStore
from effectonce.testing.clocks import wait_until
from effectonce.transactions import adapt, code_of, is_retryable
from effectonce.versions import Change, EventOrder, Gap, StaleVersion, UniqueEffect, VersionGap, VersionGuard

ACCOUNTS = VersionGuard("accounts")
PARKING = EventOrder("shipping", gaps="park")


@pytest.fixture(params=sorted(DRIVERS))
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """An empty database for each driver in turn."""
    return place_for(request.param, request, tmp_path)


@pytest.fixture(params=["psycopg", "pymysql"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """One on each server on which transactions run side by side."""
    return place_for(request.param, request, tmp_path)


@pytest.fixture(params=["sqlite3", "psycopg", "pymysql"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """One on each engine."""
    return place_for(request.param, request, tmp_path)


def row(place: Place) -> tuple[Any, ...]:
    return place.ask("SELECT balance, version FROM accounts")[0]


# Optimistic locking


def test_a_write_at_the_right_version_is_made(place: Place) -> None:
    """In the user's transaction, so it is there when that commits and not before."""
    with place.open() as connection:
        table = connection.on(ACCOUNTS)
        assert table.update("acc-1", expected=3, set={"balance": 5}) == Change(4)
        connection.rollback()
        assert row(place) == (10, 3)
        assert table.update("acc-1", expected=3, set={"balance": 5}) == Change(4)
        connection.commit()
    assert row(place) == (5, 4)


def test_a_write_at_another_version_is_stale(place: Place) -> None:
    """It changes nothing, says where the row is, and leaves the transaction usable."""
    with place.open() as connection:
        for expected in (0, 2, 4, 2**62):
            with pytest.raises(StaleVersion, match=f"version 3, not {expected}") as stale:
                connection.on(ACCOUNTS).update("acc-1", expected=expected, set={"balance": 0})
            assert (stale.value.expected, stale.value.actual) == (expected, 3)
        with pytest.raises(StaleVersion, match="no row 'acc-9'") as stale:
            connection.on(ACCOUNTS).update("acc-9", expected=3, set={"balance": 0})
        assert stale.value.actual is None
        assert connection.on(ACCOUNTS).update("acc-1", expected=3, set={"balance": 7}).version == 4
        connection.commit()
    assert row(place) == (7, 4)


def test_the_same_update_again_was_made_already(place: Place) -> None:
    """Whether it comes with the version it had read or with the one it made itself."""
    with place.open() as connection:
        table = connection.on(ACCOUNTS)
        assert table.update("acc-1", expected=3, set={"balance": 5}, by="withdraw-1") == Change(4)
        connection.commit()
        for expected in (3, 4):
            again = table.update("acc-1", expected=expected, set={"balance": 0}, by="withdraw-1")
            assert again == Change(4, replayed=True)
        connection.commit()
    assert row(place) == (5, 4)


def test_equal_values_do_not_make_it_the_same_update(place: Place) -> None:
    """Two withdrawals of the same amount from the same balance are two; the name tells them apart to the letter."""
    with place.open() as connection:
        table = connection.on(ACCOUNTS)
        table.update("acc-1", expected=3, set={"balance": 5}, by="withdraw-a")
        with pytest.raises(StaleVersion):
            table.update("acc-1", expected=3, set={"balance": 5}, by="withdraw-b")
        with pytest.raises(StaleVersion):
            table.update("acc-1", expected=3, set={"balance": 5}, by="WITHDRAW-A")
        assert table.update("acc-1", expected=4, set={"balance": 0}, by="WITHDRAW-A") == Change(5)
        for expected in (3, 5):  # however long ago, and also when it has read the row again
            again = table.update("acc-1", expected=expected, set={"balance": 5}, by="withdraw-a")
            assert again == Change(4, replayed=True)
        connection.commit()
    assert row(place) == (0, 5)


def test_an_update_that_failed_is_not_remembered(place: Place) -> None:
    """Not even if its user commits after the error, which all but PostgreSQL allow."""
    with place.open() as connection:
        table = connection.on(ACCOUNTS)
        with pytest.raises(Exception, match="nowhere"):
            table.update("acc-1", expected=3, set={"nowhere": 5}, by="withdraw-1")
        connection.commit()
        assert table.update("acc-1", expected=3, set={"balance": 5}, by="withdraw-1") == Change(4)
        connection.commit()
    assert row(place) == (5, 4)


def test_an_id_may_be_several_columns(place: Place) -> None:
    """As in a table that tenants share."""
    guard = VersionGuard("members", id=("tenant", "number"))
    with place.open() as connection:
        connection.sql("INSERT INTO members VALUES ('acme', 1, 'Ann', 1), ('globex', 1, 'Bob', 1)")
        assert connection.on(guard).update(("acme", 1), expected=1, set={"name": "Eve"}).version == 2
        with pytest.raises(StaleVersion, match="no row"):
            connection.on(guard).update(("acme", 2), expected=1, set={"name": "Eve"})
        assert connection.sql("SELECT name, version FROM members ORDER BY tenant") == [("Eve", 2), ("Bob", 1)]


def in_thread(work: Callable[[], Any]) -> Any:
    """Begin it on another thread; its result() is what it came to."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return future


def test_of_two_writers_at_once_one_is_stale(server: Place) -> None:
    """The second waits for the first one's transaction, and then finds another version."""
    with server.open() as one, server.open() as two, waiting_for_locks(server) as somebody_waits:
        one.on(ACCOUNTS).update("acc-1", expected=3, set={"balance": 5}, by="one")
        second = in_thread(lambda: two.on(ACCOUNTS).update("acc-1", expected=3, set={"balance": 6}, by="two"))
        wait_until(somebody_waits)
        one.commit()
        with pytest.raises(StaleVersion) as stale:
            second.result(20)
        assert stale.value.actual == 4
        two.rollback()
    assert row(server) == (5, 4)


def test_a_duplicate_at_once_waits_and_was_made_already(server: Place) -> None:
    """Or makes the update itself, if the first one is rolled back."""
    for commits, told in ((False, Change(4)), (True, Change(4, replayed=True))):
        with server.open() as one, server.open() as two, waiting_for_locks(server) as somebody_waits:
            one.on(ACCOUNTS).update("acc-1", expected=3, set={"balance": 5}, by="same")
            second = in_thread(
                lambda two=two: two.on(ACCOUNTS).update("acc-1", expected=3, set={"balance": 5}, by="same")
            )
            wait_until(somebody_waits)
            (one.commit if commits else one.rollback)()
            assert second.result(20) == told
            two.rollback()
    assert row(server) == (5, 4)


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_with_a_snapshot_a_lost_race_is_stale_or_retryable(server: Place, level: str) -> None:
    """Never a second write: the guard's answer, or the engine's own word that the transaction has to begin again."""
    with server.open() as one, server.open() as two:
        for connection in (one, two):
            connection.sql(
                f"SET SESSION TRANSACTION ISOLATION LEVEL {level}"
            ) if server.dialect == "mysql" else None
            connection.commit()
            if server.dialect == "postgresql":
                connection.sql(f"SET TRANSACTION ISOLATION LEVEL {level}")
        two.sql("SELECT 1 FROM members")  # the snapshot is taken by now
        one.on(ACCOUNTS).update("acc-1", expected=3, set={"balance": 5})
        one.commit()
        with pytest.raises(Exception) as refused:
            two.on(ACCOUNTS).update("acc-1", expected=3, set={"balance": 6})
        assert isinstance(refused.value, StaleVersion) or is_retryable(refused.value)
        if isinstance(refused.value, StaleVersion):
            assert refused.value.actual == 4
        two.rollback()
    assert row(server) == (5, 4)


def deposit(place: Place, name: str) -> None:
    """Read, decide, write; and read again when somebody was quicker."""
    with place.open() as connection:
        while True:
            try:
                balance, version = connection.sql("SELECT balance, version FROM accounts")[0]
                connection.on(ACCOUNTS).update(
                    "acc-1", expected=version, set={"balance": balance + 1}, by=name
                )
                return connection.commit()
            except Exception as error:
                connection.rollback()
                if not isinstance(error, StaleVersion) and not is_retryable(error):
                    raise


def test_no_deposit_is_lost(engine: Place) -> None:
    """Six at once, each sent three times by a client that has not heard: every one counts once."""
    names = [f"deposit-{n % 8}" for n in range(24)]
    with ThreadPoolExecutor(6) as pool:
        for future in [pool.submit(deposit, engine, name) for name in names]:
            future.result()
    balance, version = row(engine)
    assert (balance - 10, version - 3) == (8, 8)


# Order of events


def test_events_are_applied_once_and_in_order(place: Place) -> None:
    """Repeats are skipped, early ones wait, and come back as what they were."""
    with place.open() as connection:
        order = connection.on(PARKING)
        assert order.take("o-1", 1, {"n": 1}) == [{"n": 1}]
        assert order.take("o-1", 1, {"n": 1}) == []
        assert order.take("o-1", 4, {"n": 4, "text": "ünï"}) == []
        assert order.take("o-1", 3, {"n": 3}) == []
        assert order.take("o-1", 3, {"n": 3}) == []
        connection.commit()
        assert order.gaps() == [Gap("o-1", 1, 3, 2)]
        assert order.take("o-1", 2, {"n": 2}) == [{"n": 2}, {"n": 3}, {"n": 4, "text": "ünï"}]
        assert (order.position("o-1"), order.gaps()) == (4, [])
        connection.rollback()
        assert (order.position("o-1"), order.gaps()) == (1, [Gap("o-1", 1, 3, 2)])
        assert order.skip_to("o-1", 2) == [{"n": 3}, {"n": 4, "text": "ünï"}]
        connection.commit()
    assert place.ask("SELECT COUNT(*) FROM effectonce_parked") == [(0,)]
    assert place.ask("SELECT version, parked FROM effectonce_positions") == [(4, 0)]


def test_a_reported_gap_leaves_the_transaction_usable(place: Place) -> None:
    """A consumer may go on with other entities, in the same transaction."""
    with place.open() as connection:
        order = connection.on(EventOrder("shipping"))
        with pytest.raises(VersionGap, match="Event 3 of 'o-1' came too early: 0"):
            order.take("o-1", 3, "three")
        assert order.take("o-2", 1, "one") == ["one"]
        connection.commit()
        assert order.take("o-1", 1, "one") == ["one"]


def test_names_are_told_apart_to_the_letter(engine: Place) -> None:
    """Whatever the engine's collation takes for equal."""
    with engine.open() as connection:
        for consumer in ("shipping", "Shipping", "shippïng"):
            for entity in ("o-1", "O-1", "ö-1"):
                assert connection.on(EventOrder(consumer)).take(entity, 1, entity) == [entity]
        connection.commit()


def test_the_missing_event_and_an_early_one_at_once(server: Place) -> None:
    """Whichever is first, the early one is not stranded: one of the two applies both, in order."""
    for first, second in ((2, 3), (3, 2)):
        entity = f"o-{first}"
        with server.open() as one, server.open() as two, waiting_for_locks(server) as somebody_waits:
            one.on(PARKING).take(entity, 1, 1)
            one.commit()
            done = one.on(PARKING).take(entity, first, first)
            other = in_thread(lambda two=two, e=entity, v=second: two.on(PARKING).take(e, v, v))
            wait_until(somebody_waits)
            one.commit()
            done += other.result(20)
            two.commit()
            assert done == [2, 3]
            assert one.on(PARKING).gaps() == []


def test_who_parks_holds_the_position_from_its_look_on(server: Place) -> None:
    """Nobody can apply the missing event between the look that found it missing and the parking."""
    with server.open() as one, server.open() as two, waiting_for_locks(server) as somebody_waits:
        one.on(PARKING).take("o-1", 1, 1)
        one.commit()
        adapter, looked, go_on = adapt(two.raw), threading.Event(), threading.Event()
        execute = adapter.execute

        async def slowly(sql: str, values: Any = ()) -> Any:
            if "INTO effectonce_parked" in sql:
                looked.set()
                assert go_on.wait(20)
            return await execute(sql, values)

        adapter.execute = slowly  # type: ignore[method-assign]
        early = in_thread(lambda: PARKING.on(adapter).take("o-1", 3, 3))
        assert looked.wait(20)
        missing = in_thread(lambda: one.on(PARKING).take("o-1", 2, 2))
        try:
            wait_until(lambda: somebody_waits() or missing.done())
        finally:
            go_on.set()
        assert early.result(20) == []
        two.commit()
        assert missing.result(20) == [2, 3]
        one.commit()


def test_a_snapshot_can_not_strand_a_parked_event(server: Place) -> None:
    """Under REPEATABLE READ what is parked after the snapshot is seen, or the engine has the work begin again."""
    with server.open() as one, server.open() as two:
        one.on(PARKING).take("o-1", 1, 1)
        one.commit()
        if server.dialect == "postgresql":
            one.sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        one.sql("SELECT * FROM accounts")  # the snapshot
        two.on(PARKING).take("o-1", 3, 3)
        two.commit()
        try:
            done = one.on(PARKING).take("o-1", 2, 2)
        except Exception as error:
            assert is_retryable(error)
            one.rollback()
            done = one.on(PARKING).take("o-1", 2, 2)
        one.commit()
        assert done == [2, 3]


def test_events_from_all_sides(engine: Place) -> None:
    """Four consumers at once, every event twice and in any order: each is applied once, and in order."""
    entities, length = 3, 12
    events = [(f"o-{n % entities}", n // entities + 1) for n in range(entities * length)] * 2
    spread = [events[(n * 29) % len(events)] for n in range(len(events))]
    engine.make("CREATE TABLE applied (place BIGINT, entity VARCHAR(20), version BIGINT)")
    lock, places = threading.Lock(), iter(range(10_000))

    def consume(connection: Connection, entity: str, version: int) -> None:
        while True:
            try:
                due = connection.on(PARKING).take(entity, version, version)
                for each in due:
                    with lock:
                        number = next(places)
                    connection.sql("INSERT INTO applied VALUES ($1, $2, $3)", number, entity, each)
                return connection.commit()
            except Exception as error:
                connection.rollback()
                if not is_retryable(error):
                    raise

    def worker(n: int) -> None:
        with engine.open() as connection:
            for entity, version in spread[n::4]:
                consume(connection, entity, version)

    try:
        with ThreadPoolExecutor(4) as pool:
            for future in [pool.submit(worker, n) for n in range(4)]:
                future.result()
        for n in range(entities):
            applied = engine.ask(f"SELECT version FROM applied WHERE entity = 'o-{n}' ORDER BY place")
            assert [version for (version,) in applied] == list(range(1, length + 1))
        assert engine.ask("SELECT COUNT(*) FROM effectonce_parked") == [(0,)]
    finally:
        engine.make("DROP TABLE applied")


# Defence in depth: the unique column holds when nothing else does

PAYMENTS = UniqueEffect("payments")
NUMBERS = itertools.count(1)


def with_column(place: Place) -> Place:
    place.make(*PAYMENTS.schema(place.dialect))  # type: ignore[arg-type]
    return place


def test_a_second_row_of_one_effect_is_not_written(place: Place) -> None:
    """And the transaction goes on, which on PostgreSQL no constraint would let it if it were run into."""
    with with_column(place).open() as connection:
        table = connection.on(PAYMENTS)
        assert table.insert({"id": 1, "account": "acc-1", "cents": 500}, key="pay-1") is True
        assert table.insert({"id": 2, "account": "acc-1", "cents": 500}, key="pay-1") is False
        assert table.insert({"id": 3, "account": "acc-1", "cents": 500}, key="PAY-1") is True
        connection.commit()
    assert place.ask("SELECT id, effect_key FROM payments ORDER BY id") == [(1, "pay-1"), (3, "PAY-1")]


def test_the_unique_column_may_be_the_primary_key(place: Place) -> None:
    """Whatever the engine calls its index."""
    place.make(
        "DROP TABLE IF EXISTS bookings", "CREATE TABLE bookings (id VARCHAR(80) PRIMARY KEY, cents INTEGER)"
    )
    with place.open() as connection:
        table = connection.on(UniqueEffect("bookings", column="id"))
        assert [table.insert({"cents": 5}, key="b-1"), table.insert({"cents": 5}, key="b-1")] == [True, False]
        connection.commit()
    assert place.ask("SELECT id, cents FROM bookings") == [("b-1", 5)]


def test_the_error_of_a_primary_key_is_told_from_others(server: Place) -> None:
    """It is the effect's if the column is the table's key."""
    server.make(
        "DROP TABLE IF EXISTS bookings",
        "CREATE TABLE bookings (id VARCHAR(80) PRIMARY KEY, effect_key VARCHAR(80) UNIQUE)",
        "INSERT INTO bookings VALUES ('b-1', 'k-1')",
    )
    told = []
    with server.open() as connection:
        for values in ("('b-1', 'k-2')", "('b-2', 'k-1')"):
            with pytest.raises(Exception, match=r"(?i)duplicate") as refused:
                connection.sql(f"INSERT INTO bookings VALUES {values}")
            connection.rollback()
            told.append(UniqueEffect("bookings").already_done(refused.value))
            if server.dialect == "postgresql":
                told.append(UniqueEffect("bookings", column="id").already_done(refused.value))
    assert told == ([False, True, True, False] if server.dialect == "postgresql" else [False, True])


@pytest.mark.parametrize(
    ("key", "is_done"), [("effect_key", True), ("payments.effect_key", True), ("refunds.effect_key", False)]
)
def test_mysql_names_the_table_of_a_duplicate(key: str, is_done: bool) -> None:
    """MySQL 8 does, and another table's is another effect's; MariaDB does not."""
    import pymysql

    error = pymysql.err.IntegrityError(1062, f"Duplicate entry 'x' for key '{key}'")
    assert PAYMENTS.already_done(error) is is_done


def test_rows_from_before_need_no_key(place: Place) -> None:
    """The column can be added to a table that is in use."""
    place.make("INSERT INTO payments (id, cents) VALUES (1, 5), (2, 5)")
    with_column(place)
    assert place.ask("SELECT COUNT(*) FROM payments WHERE effect_key IS NULL") == [(2,)]


def test_an_insert_of_ones_own_can_ask_what_its_error_means(place: Place) -> None:
    """That constraint means done; any other does not."""
    with with_column(place).open() as connection:
        connection.sql("INSERT INTO payments (id, effect_key) VALUES (1, 'pay-1')")
        connection.commit()
        for values, done in (("2, 'pay-1'", True), ("1, 'pay-2'", False)):
            with pytest.raises(Exception) as refused:
                connection.sql(f"INSERT INTO payments (id, effect_key) VALUES ({values})")
            connection.rollback()
            assert PAYMENTS.already_done(refused.value) is done
        with pytest.raises(Exception) as refused:
            connection.on(PAYMENTS).insert({"id": 1}, key="pay-3")
        assert not PAYMENTS.already_done(refused.value)
        assert code_of(refused.value) in ("23505", 1062, 19)  # the driver's own error, as it is
        connection.rollback()


def test_a_column_that_is_not_unique_is_heard_of(place: Place) -> None:
    """It would hold nothing back."""
    place.make("ALTER TABLE payments ADD COLUMN effect_key VARCHAR(255)")
    with place.open() as connection, pytest.raises(Exception, match=r"(?i)unique"):
        connection.on(UniqueEffect("payments")).insert({"id": 1}, key="pay-1")
    assert place.ask("SELECT COUNT(*) FROM payments") == [(0,)]


def test_missing_tables_say_how_to_make_them(place: Place) -> None:
    """Those of effectonce; a missing table of the user's own is the driver's own error."""
    place.make("DROP TABLE effectonce_updates", "DROP TABLE effectonce_positions")
    with place.open() as connection:
        with pytest.raises(UsageError, match=f"schema.'{place.dialect}'"):
            connection.on(EventOrder("shipping")).take("o-1", 1, None)
        connection.rollback()
        with pytest.raises(UsageError, match=f"schema.'{place.dialect}'"):
            connection.on(ACCOUNTS).update("acc-1", expected=3, set={"balance": 1}, by="r")
        connection.rollback()
        with pytest.raises(Exception, match="nowhere") as refused:
            connection.on(VersionGuard("nowhere")).update("acc-1", expected=3, set={"balance": 1})
        assert not isinstance(refused.value, UsageError)
        connection.rollback()


def pay(place: Place, key: str, cents: int) -> bool:
    """The handler's effect: a row in the books, under the effect's key."""
    with place.open() as connection:
        first: bool = connection.on(PAYMENTS).insert(
            {"id": next(NUMBERS), "account": "acc-1", "cents": cents}, key=key
        )
        connection.commit()
        return first


def test_without_a_receiver_the_constraint_holds(engine: Place) -> None:
    """A storm of duplicates straight at the handler, as by a colleague who calls it directly: one row for each key."""
    with_column(engine)
    keys = [f"order-{n}" for n in range(6)]
    storm = keys * 5
    with ThreadPoolExecutor(6) as pool:
        firsts = list(pool.map(lambda key: pay(engine, key, 500), storm))
    assert firsts.count(True) == len(keys)
    booked = engine.ask("SELECT effect_key FROM payments")
    assert sorted(key for (key,) in booked) == sorted(keys)


class Forgetful(MemoryStore):
    """A store that can't be reached."""

    async def claim(self, claims: Any) -> Any:
        raise StoreUnavailable("gone")


def test_with_its_store_gone_the_constraint_holds(engine: Place) -> None:
    """``fallback="open"`` runs every duplicate unprotected; the derived key is the same on each."""
    with_column(engine)
    runs: list[str] = []

    with Receiver(Forgetful(), policy=Policy(fallback="open")) as receiver:

        @receiver.idempotent(key="order_id")
        def charge(order_id: str, cents: int) -> None:
            runs.append(order_id)
            pay(engine, current().key_for("payments"), cents)

        for _ in range(3):
            outcome = charge.outcome("o-1", 500)
            assert (outcome.status, outcome.guarantee) == ("executed", "none")
    assert runs == ["o-1"] * 3
    assert engine.ask("SELECT cents FROM payments") == [(500,)]


def test_with_its_memory_lost_the_constraint_holds(engine: Place) -> None:
    """A store that was restored from yesterday's backup knows nothing of today's payment. The table does."""
    with_column(engine)
    for _ in range(2):
        with Receiver("memory://") as receiver:

            @receiver.idempotent(key="order_id")
            def charge(order_id: str) -> bool:
                return pay(engine, current().key_for("payments"), 500)

            charge("o-1")
    assert engine.ask("SELECT cents FROM payments") == [(500,)]
