"""Consumers in atomic mode, with a broker made of lists and SQLite: one transaction, and the ack after it."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from typing import Any

import pytest
from tests.unit.test_consumers import COLOURS, ListBroker, of

from effectonce import Message, Receiver, current
from effectonce.errors import ColourMismatch, StoreMismatch, UsageError
from effectonce.messaging._consumer import Consumer
from effectonce.messaging._delivery import Ack, DeadLetter
from effectonce.outbox import Outbox
from effectonce.outbox._database import open_database


def fine(message: Message) -> str:
    assert current().guarantee == "atomic"
    return message.id


@COLOURS
def test_a_batch_is_one_transaction_and_a_repeat_is_answered_by_it(make_shop: Any, awaits: bool) -> None:
    """Effects and records are committed together, before anything is acknowledged."""
    shop = make_shop(awaits)
    names = [f"{number}" for number in range(20)]
    broker = shop.consume(shop.broker(*map(of, names)), fine)
    assert shop.begun == 1
    assert shop.effects() == names
    assert broker.verdicts() == {name: Ack(name) for name in names}
    again = shop.consume(shop.broker(*map(of, names)), fine)
    assert again.verdicts() == {name: Ack(name, replayed=True) for name in names}
    assert shop.effects() == names


@COLOURS
def test_a_handler_that_raises_spoils_no_other_and_its_attempts_are_counted(
    make_shop: Any, awaits: bool
) -> None:
    """What it did is undone; the attempt is committed with the others' effects, and used-up ones are put aside."""
    shop = make_shop(awaits)

    def handler(message: Message) -> None:
        if message.id == "bad":
            raise ValueError("not today")

    batch = [of("a"), of("bad"), of("b")]
    first = shop.consume(shop.broker(*batch), handler)
    assert shop.effects() == ["a", "b"]
    assert (first.verdicts()["bad"].reason, first.verdicts()["b"]) == ("failed", Ack(None))
    second, third = (shop.consume(shop.broker(of("bad")), handler) for _ in range(2))
    assert second.verdicts()["bad"].reason == "failed"
    assert isinstance(third.verdicts()["bad"], DeadLetter)
    assert shop.effects() == ["a", "b"]


@COLOURS
def test_groups_stop_at_their_first_failure_each_in_its_own_transaction(make_shop: Any, awaits: bool) -> None:
    """What comes after it is given back, unbegun and without a count; it runs when it comes again."""
    shop = make_shop(awaits)
    failing = ["a2"]

    def handler(message: Message) -> None:
        if message.id in failing:
            raise ValueError("not yet")

    batch = [of(name, name[0]) for name in ("a1", "b1", "a2", "b2", "a3")]
    broker = shop.consume(shop.broker(*batch), handler, concurrency=1)
    assert shop.begun == 2
    assert sorted(shop.effects()) == ["a1", "b1", "b2"]
    assert (broker.verdicts()["a2"].reason, broker.verdicts()["a3"].reason) == ("failed", "held")
    failing.clear()
    shop.consume(shop.broker(of("a2", "a"), of("a3", "a")), handler)
    assert shop.effects()[3:] == ["a2", "a3"]


@COLOURS
def test_what_spoils_the_commit_has_its_messages_run_one_by_one(make_shop: Any, awaits: bool) -> None:
    """A constraint that is checked at COMMIT: the others are committed, the culprit has a failed attempt."""
    shop = make_shop(awaits)
    ran: list[str] = []

    def at_commit() -> None:
        if "bad" in ran:
            raise ValueError("violates a deferred constraint")

    shop.at_commit = at_commit

    def handler(message: Message) -> None:
        ran.append(message.id)

    def consume(*names: str) -> dict[str, Any]:
        ran.clear()
        return shop.consume(shop.broker(*map(of, names)), handler).verdicts()

    original = shop.blocking, shop.asyncio

    @contextmanager
    def blocking() -> Any:
        ran.clear()
        with original[0]() as connection:
            yield connection

    @asynccontextmanager
    async def anew() -> Any:
        ran.clear()
        async with original[1]() as connection:
            yield connection

    shop.blocking, shop.asyncio = blocking, anew
    verdicts = consume("a", "bad", "b")
    assert shop.effects() == ["a", "b"]
    assert (verdicts["a"], verdicts["b"], verdicts["bad"].reason) == (Ack(None), Ack(None), "failed")
    consume("bad")
    assert isinstance(consume("bad")["bad"], DeadLetter)


@COLOURS
def test_a_database_that_is_away_costs_no_attempt(make_shop: Any, awaits: bool) -> None:
    """Everything comes again, and the store is said to be the reason."""
    shop = make_shop(awaits)

    def nowhere() -> Any:
        raise OSError("connection refused")

    shop.blocking = shop.asyncio = nowhere
    verdicts = shop.consume(shop.broker(of("a"), of("b")), fine).verdicts()
    assert [(each.reason, each.excused) for each in verdicts.values()] == [("store_error", True)] * 2


@COLOURS
def test_a_commit_without_a_reply_is_settled_by_the_records(make_shop: Any, awaits: bool) -> None:
    """The transaction is run again, and finds that it had happened."""
    shop = make_shop(awaits)
    original, lost = (shop.blocking, shop.asyncio), [True]

    @contextmanager
    def blocking() -> Any:
        with original[0]() as connection:
            yield connection
        if lost and lost.pop():
            raise ConnectionResetError("the reply to COMMIT got lost")

    @asynccontextmanager
    async def asyncio() -> Any:
        async with original[1]() as connection:
            yield connection
        if lost and lost.pop():
            raise ConnectionResetError("the reply to COMMIT got lost")

    shop.blocking, shop.asyncio = blocking, asyncio
    verdicts = shop.consume(shop.broker(of("a"), of("b")), fine).verdicts()
    assert verdicts == {"a": Ack("a", replayed=True), "b": Ack("b", replayed=True)}
    assert shop.effects() == ["a", "b"]


def test_events_of_the_outbox_are_in_the_same_transaction(make_shop: Any) -> None:
    """The effect, the inbox record and the outbox row: all, or none, and each once."""
    shop = make_shop(False)
    database = open_database(f"sqlite:///{shop.path}")
    database.migrate()
    database.close()

    def handler(message: Message, connection: sqlite3.Connection) -> None:
        Outbox().on(connection).add("invoices", message.id)
        if message.id == "bad":
            raise ValueError("no")

    for _ in range(2):
        broker = shop.broker(of("a"), of("bad"), of("a"))
        Consumer(broker, shop.receiver, {"transaction": shop.blocking}).run_once(handler)
    assert [topic for (topic,) in shop.ask("SELECT payload FROM effectonce_outbox")] == [b"a"]


@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
def test_a_handler_that_commits_ends_the_consumer(make_shop: Any, fails: bool) -> None:
    """What it has committed has no result, so every delivery would do it again. One that rolls back does no harm."""
    shop = make_shop(False)

    def handler(message: Message, connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO effects (id) VALUES (?)", (message.id,))
        if message.id == "commits":
            connection.commit()
        if message.id == "rolls back":
            connection.rollback()
        if fails:
            raise ValueError("no")

    broker = ListBroker([of("rolls back")], [of("commits")])
    consumer = Consumer(broker, shop.receiver, {"transaction": shop.blocking})
    consumer.run_once(handler)
    assert broker.verdicts()["rolls back"].reason == "failed"
    with pytest.raises(UsageError, match="ended meanwhile"):
        consumer.run_once(handler)
    assert "commits" not in broker.verdicts()
    assert shop.effects() == ["commits"]


def test_mistakes_of_the_program_end_the_consumer(make_shop: Any) -> None:
    """They are not the messages' fault: nothing is settled, and the error says what to do."""
    shop, other = make_shop(False), Receiver("memory://")

    def handler(message: Message, connection: Any) -> None: ...

    def consume(transaction: Any, receiver: Receiver = shop.receiver, handler: Any = handler) -> None:
        broker = ListBroker([of("a")])
        try:
            Consumer(broker, receiver, {"transaction": transaction}).run_once(handler)
        finally:
            assert broker.told == []

    @contextmanager
    def autocommitting() -> Any:
        with closing(sqlite3.connect(shop.path, isolation_level=None)) as connection:
            yield connection

    @contextmanager
    def elsewhere() -> Any:
        with closing(sqlite3.connect(":memory:")) as connection:
            yield connection

    @contextmanager
    def silent() -> Any:
        with shop.blocking() as connection, suppress(ValueError):
            yield connection

    def commits(message: Message, connection: Any) -> None:
        connection.commit()

    def leaves(message: Message, connection: Any) -> None:
        raise SystemExit

    with other:
        with pytest.raises(UsageError, match="two arguments"):
            consume(shop.blocking, handler=fine)
        with pytest.raises(ColourMismatch, match="event loop"):
            consume(shop.asyncio)
        with pytest.raises(UsageError, match="no context manager"):
            consume(lambda: sqlite3)
        with pytest.raises(UsageError, match="engine"):
            consume("postgresql://")
        with pytest.raises(UsageError, match="BEGIN IMMEDIATE"):
            consume(autocommitting)
        with pytest.raises(UsageError, match="no SQL database"):
            consume(shop.blocking, other)
        with pytest.raises(SystemExit):
            consume(shop.blocking, handler=leaves)
        with pytest.raises(UsageError, match="keeps errors to itself"):
            consume(silent, handler=commits)
        with pytest.raises(StoreMismatch, match="sees no table"):
            consume(elsewhere)

    async def main() -> None:
        async def coroutine(message: Message, connection: Any) -> None: ...

        consumer = Consumer(ListBroker([of("a")], awaits=True), shop.receiver, {"transaction": shop.blocking})
        await consumer.arun_once(coroutine)

    with pytest.raises(ColourMismatch, match="asyncio driver"):
        asyncio.run(main())
