"""Consumers with a cursor, with a broker made of lists and SQLite: one row per source moves with the effects."""

from __future__ import annotations

import sqlite3
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
from tests.unit.shops import Shop
from tests.unit.test_consumers import COLOURS, ListBroker, of

from effectonce import Message, Receiver, current
from effectonce.errors import StoreMismatch, UsageError
from effectonce.messaging import cursors
from effectonce.messaging._consumer import Consumer
from effectonce.messaging._cursor_mode import MANY_RANGES
from effectonce.messaging._delivery import Ack, DeadLetter, Delivery

SIZES = pytest.mark.parametrize("messages", [5_000, pytest.param(1_000_000, marks=pytest.mark.soak)])


class Numbered(ListBroker):
    """A broker whose messages have numbers."""

    group = "billing"
    cursors: Any = None
    in_order = True
    lowest = 0

    async def floor(self, source: str) -> int:
        return self.lowest


def at(number: int, source: str = "orders/0", group: Any = "orders/0") -> Delivery:
    return of(f"m-{number}", group)._replace(at=(source, number))


def broker_of(shop: Shop, *batches: list[Delivery], in_order: bool = True) -> Numbered:
    broker = Numbered(*batches, awaits=shop.awaits)
    broker.in_order = in_order
    return broker


def row(shop: Shop, source: str = "orders/0") -> tuple[int, str]:
    ((low, above),) = shop.ask(f"SELECT low, above FROM effectonce_cursors WHERE source = '{source}'")
    return low, above


def fine(message: Message) -> None:
    assert (current().guarantee, current().number) == ("atomic", 1)
    assert current().step("a part of it", lambda: message.id) == message.id  # in the same transaction


@COLOURS
def test_a_batch_moves_one_row_and_leaves_no_record(make_shop: Any, awaits: bool) -> None:
    """Numbers have gaps. What was done before is acknowledged without being run."""
    shop = make_shop(awaits)
    batch = [at(number) for number in (3, 4, 9, 20)]
    broker = shop.consume(broker_of(shop, batch), fine, cursor=True)
    assert shop.effects() == ["m-3", "m-4", "m-9", "m-20"]
    assert row(shop) == (21, "")
    assert set(broker.verdicts().values()) == {Ack(None)}
    again = shop.consume(broker_of(shop, [*batch, at(21)]), fine, cursor=True)
    assert [verdict.replayed for verdict in again.verdicts().values()] == [True] * 4 + [False]
    assert shop.effects() == ["m-3", "m-4", "m-9", "m-20", "m-21"]
    assert shop.ask("SELECT count(*) FROM effectonce_records") == [(0,)]


@COLOURS
def test_a_failure_is_counted_and_stops_its_source(make_shop: Any, awaits: bool) -> None:
    """What came before is committed, what comes after waits; used-up attempts are put aside, and passed over then."""
    shop = make_shop(awaits)

    def handler(message: Message) -> None:
        if message.id == "m-2":
            raise ValueError("not today")

    first = shop.consume(broker_of(shop, [at(1), at(2), at(3)]), handler, cursor=True)
    assert shop.effects() == ["m-1"]
    assert [v.reason for v in list(first.verdicts().values())[1:]] == ["failed", "held"]
    assert row(shop) == (2, ";2=1")
    shop.consume(broker_of(shop, [at(2), at(3)]), handler, cursor=True)
    assert row(shop) == (2, ";2=2")
    third = shop.consume(broker_of(shop, [at(2), at(3)]), handler, cursor=True)
    assert isinstance(third.verdicts()["m-2"], DeadLetter)
    assert third.verdicts()["m-2"].reason == "attempts_exhausted"
    assert row(shop) == (3, "")
    shop.consume(broker_of(shop, [at(3)]), handler, cursor=True)
    assert shop.effects() == ["m-1", "m-3"]


@COLOURS
def test_somebody_elses_broken_connection_is_the_handlers_failure(make_shop: Any, awaits: bool) -> None:
    """One attempt, counted once; what the engine asks for is another matter: it is run again at once."""
    shop, errors = make_shop(awaits), [ConnectionResetError("the mail server hung up")]

    def handler(message: Message) -> None:
        if errors:
            raise errors[0]

    shop.consume(broker_of(shop, [at(1)]), handler, cursor=True)
    assert row(shop) == (0, ";1=1")
    errors[:] = [sqlite3.OperationalError("database is locked")]
    errors[0].sqlite_errorcode = sqlite3.SQLITE_BUSY  # type: ignore[attr-defined]
    begun = shop.begun

    def once(message: Message) -> None:
        if errors:
            raise errors.pop()

    shop.consume(broker_of(shop, [at(1)]), once, cursor=True)
    assert shop.effects() == ["m-1"]
    assert shop.begun == begun + 3, "the row was taken, and the transaction run twice"
    assert row(shop) == (2, "")


@COLOURS
def test_no_cursor_passes_a_message_before_it_is_put_aside(make_shop: Any, awaits: bool) -> None:
    """What follows one that can't be read is held back: a crash in between must not lose the letter."""
    shop = make_shop(awaits)
    bad = at(2)._replace(body=b"{")
    broker = broker_of(shop, [at(1), bad, at(3)])
    at_settle: list[tuple[int, str]] = []
    settle = broker.settle

    async def look_and_settle(settled: Any) -> None:
        at_settle.append(row(shop))
        await settle(settled)

    broker.settle = look_and_settle  # type: ignore[method-assign]
    verdicts = shop.consume(broker, fine, cursor=True).verdicts()
    assert (verdicts["m-1"], verdicts["m-3"].reason) == (Ack(None), "held")
    assert verdicts["m-2"].reason == "undecodable"
    assert at_settle == [(2, "")]
    assert row(shop) == (3, "")


def test_a_zombie_is_fenced(make_shop: Any) -> None:
    """A consumer whose source was given to another one does nothing, though it does not know."""
    shop = make_shop(False)
    zombie, successor = broker_of(shop, [at(1)], [at(2), at(3)]), broker_of(shop, [at(2)])
    told: list[str] = []

    def handler(message: Message, connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO effects (id) VALUES (?)", (message.id,))
        told.append(message.id)

    options: Any = {"transaction": shop.blocking, "cursor": True}
    first = Consumer(zombie, shop.receiver, options)
    first.run_once(handler)
    shop.consume(successor, fine, cursor=True)
    first.run_once(handler)
    assert told == ["m-1"], "on SQLite the lock comes first, so it did not even begin"
    assert shop.effects() == ["m-1", "m-2"]
    verdicts = zombie.verdicts()
    assert (verdicts["m-2"].reason, verdicts["m-3"].reason) == ("lease_lost", "lease_lost")
    zombie.batches.append([at(2), at(3)])
    first.run_once(handler)
    assert shop.effects() == ["m-1", "m-2", "m-3"], "what is delivered to it again is its own again"


@COLOURS
def test_a_commit_without_a_reply_is_settled_by_the_cursor(make_shop: Any, awaits: bool) -> None:
    """The row was moved by this very consumer, so it goes on from there."""
    shop = make_shop(awaits)
    original, begun = (shop.blocking, shop.asyncio), []

    def lose() -> None:
        begun.append(1)
        if len(begun) == 2:  # the first transaction takes the row
            raise ConnectionResetError("the reply to COMMIT got lost")

    @contextmanager
    def blocking() -> Any:
        with original[0]() as connection:
            yield connection
        lose()

    @asynccontextmanager
    async def asyncio() -> Any:
        async with original[1]() as connection:
            yield connection
        lose()

    shop.blocking, shop.asyncio = blocking, asyncio
    verdicts = shop.consume(broker_of(shop, [at(1), at(2)]), lambda _: None, cursor=True).verdicts()
    assert verdicts == {"m-1": Ack(None, replayed=True), "m-2": Ack(None, replayed=True)}
    assert shop.effects() == ["m-1", "m-2"]
    assert len(begun) > 2


@COLOURS
def test_what_spoils_the_commit_is_found(make_shop: Any, awaits: bool) -> None:
    """Nobody says which message it was: those around it are committed, and it has a failed attempt."""
    shop = make_shop(awaits)
    ran: list[str] = []

    def at_commit() -> None:
        spoilt = "m-3" in ran
        ran.clear()
        if spoilt:
            raise ValueError("violates a deferred constraint")

    shop.at_commit = at_commit
    batch = [at(number) for number in range(1, 6)]
    verdicts = shop.consume(broker_of(shop, batch), lambda m: ran.append(m.id), cursor=True).verdicts()
    assert shop.effects() == ["m-1", "m-2"]
    assert row(shop) == (3, ";3=1")
    assert [verdicts[f"m-{number}"].reason for number in (3, 4, 5)] == ["failed", "held", "held"]


@COLOURS
def test_a_source_without_order_keeps_a_sparse_set(make_shop: Any, awaits: bool) -> None:
    """One that failed comes again later, alone; nothing that was done meanwhile is run again."""
    shop, failing = make_shop(awaits), ["m-2"]

    def handler(message: Message) -> None:
        if message.id in failing:
            raise ValueError("not yet")

    def consume(*numbers: int, lowest: int = 0) -> ListBroker:
        batch = [at(number, "ORDERS", None) for number in numbers]
        broker = broker_of(shop, batch, in_order=False)
        broker.lowest = lowest
        return shop.consume(broker, handler, cursor=True)

    broker = consume(1, 2, 3, 4)
    assert broker.verdicts()["m-2"].reason == "failed"
    assert row(shop, "ORDERS") == (0, "1-2,3-5;2=1")
    consume(3, 6)
    failing.clear()
    consume(2, 0, 1)
    assert row(shop, "ORDERS") == (5, "6-7;")
    assert sorted(shop.effects()) == [f"m-{number}" for number in (0, 1, 2, 3, 4, 6)]


def test_what_never_comes_is_passed_over_by_the_brokers_word(make_shop: Any) -> None:
    """Numbers that belong to others leave gaps: the broker says below which of them nothing will come."""
    shop = make_shop(False)
    numbers = range(10, 10 + 4 * MANY_RANGES, 2)
    broker = broker_of(shop, in_order=False)
    broker.lowest = 2 * MANY_RANGES
    options: Any = {"transaction": shop.blocking, "cursor": True, "batch": 10}
    consumer = Consumer(broker, shop.receiver, options)
    for start in range(0, len(numbers), 10):
        broker.batches.append([at(number, "ORDERS", None) for number in numbers[start : start + 10]])
        consumer.run_once(lambda message, connection: None)
    low, above = row(shop, "ORDERS")
    assert low >= 2 * MANY_RANGES
    assert above.count("-") < len(numbers)
    assert all(isinstance(verdict, Ack) for verdict in broker.verdicts().values())


def test_two_consumers_of_a_source_without_order_take_turns(make_shop: Any) -> None:
    """Each reads the row when its turn comes, so none undoes what the other has done."""
    shop = make_shop(False)
    consumers = []
    for numbers in ((1, 3), (2, 4)):
        broker = broker_of(shop, *[[at(number, "ORDERS", None)] for number in numbers], in_order=False)
        consumers.append(Consumer(broker, shop.receiver, {"transaction": shop.blocking, "cursor": True}))
    for consumer in consumers * 2:
        consumer.run_once(lambda message, connection: None)
    assert row(shop, "ORDERS") == (0, "1-5;")


@SIZES
def test_the_state_does_not_grow_with_the_messages(make_shop: Any, messages: int) -> None:
    """One row per partition, and a file as large after all messages as after the first thousand."""
    shop = make_shop(False)
    partitions, size = 4, 1000  # a commit for each batch and partition is what takes time here
    broker = broker_of(shop)
    options: Any = {"transaction": shop.blocking, "cursor": True, "batch": size, "concurrency": 1}
    consumer = Consumer(broker, shop.receiver, options)
    pages: list[int] = []
    handled = 0

    def count(message: Message, connection: sqlite3.Connection) -> None:
        nonlocal handled
        handled += 1

    for start in range(0, messages, size):
        batch = [divmod(number, partitions) for number in range(start, start + size)]
        broker.batches.append([at(offset, f"orders/{p}", f"orders/{p}") for offset, p in batch])
        consumer.run_once(count)
        broker.told.clear()
        if start in (0, messages - size):
            pages.append(shop.ask("PRAGMA page_count")[0][0])
    assert handled == messages
    assert pages[0] == pages[1]
    rows = shop.ask("SELECT source, low, above FROM effectonce_cursors ORDER BY source")
    assert rows == [(f"orders/{p}", messages // partitions, "") for p in range(partitions)]
    assert shop.ask("SELECT count(*) FROM effectonce_records") == [(0,)]


def test_mistakes_of_the_program_end_the_consumer(make_shop: Any) -> None:
    """Each says what to do; nothing is settled."""
    shop = make_shop(False)

    def consume(broker: Any = None, receiver: Any = None, handler: Any = None, **options: Any) -> None:
        chosen = broker or broker_of(shop, [at(1)])
        choices: Any = {"transaction": shop.blocking, "cursor": True, **options}
        run = handler or (lambda message, connection: None)
        Consumer(chosen, receiver or shop.receiver, choices).run_once(run)

    def commits(message: Message, connection: sqlite3.Connection) -> None:
        connection.commit()

    with pytest.raises(UsageError, match="give transaction="):
        consume(transaction=None)
    with pytest.raises(UsageError, match="Kafka, or NATS JetStream"):
        consume(ListBroker([of("a")]))
    nobodys = broker_of(shop, [at(1)])
    nobodys.group = ""
    with pytest.raises(UsageError, match="belongs to somebody"):
        consume(nobodys)
    with pytest.raises(UsageError, match="ended meanwhile"):
        consume(handler=commits)
    shop.ask("DROP TABLE effectonce_cursors")
    with pytest.raises(StoreMismatch, match="migrate --cursors"):
        consume()
    with pytest.raises(UsageError, match="Say one of"):
        cursors.schema("oracle")  # type: ignore[arg-type]


def test_a_receiver_elsewhere_will_do(make_shop: Any) -> None:
    """The cursor is in the transaction's database; the receiver's own store is not asked."""
    shop = make_shop(False)
    with Receiver("memory://", consumer="shipping") as receiver:
        options: Any = {"transaction": shop.blocking, "cursor": True}
        Consumer(broker_of(shop, [at(7)]), receiver, options).run_once(lambda message, connection: None)
    assert shop.ask("SELECT consumer, low FROM effectonce_cursors") == [("shipping", 8)]
