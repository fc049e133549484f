"""Atomic mode with commit=True: each call is a transaction, over every driver whose connections can have one."""

from __future__ import annotations

import asyncio
import inspect
import sqlite3
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import psycopg
import pytest
from tests.integration.transaction_drivers import DRIVERS, OWN, REJECT, Beside, Desk, Place
from tests.integration.transaction_worlds import ROTATING, Declined, told, world_of
from tests.integration.transaction_worlds import World as AnyWorld
from tests.servers.proxy import FaultProxy

from effectonce import Message, Outcome, Policy, Receiver, current
from effectonce._records import State
from effectonce.errors import InProgress, KeyReused, UsageError
from effectonce.transactions import aretrying, is_retryable


class World(AnyWorld):
    """One whose connections are in no transaction when they are handed out."""

    @asynccontextmanager
    async def desk(self, autocommit: bool = False) -> AsyncIterator[Desk]:
        desk = self.kind(self.place)
        await desk.open()
        await idle(desk)
        if autocommit:
            await set_autocommit(desk.connection)
        try:
            yield desk
        finally:
            with suppress(Exception):
                await desk.close()

    def told(self, id: str) -> tuple[int, State | None]:
        """What everybody sees of an effect, and of its record."""
        return self.place.count(id), self.state(id)


async def set_autocommit(connection: Any) -> None:
    """Each driver has a way of its own; asyncpg knows nothing else."""
    if isinstance(connection, sqlite3.Connection):
        connection.isolation_level = None
    elif isinstance(connection, psycopg.AsyncConnection):
        await connection.set_autocommit(True)
    elif isinstance(connection, psycopg.Connection):
        connection.autocommit = True
    elif hasattr(connection, "autocommit"):
        done = connection.autocommit(True)
        if inspect.isawaitable(done):
            await done


async def idle(desk: Desk) -> None:
    """In no transaction: desks of asyncpg begin one when they are opened."""
    transaction = getattr(desk, "transaction", None)
    if transaction is not None:
        await transaction.rollback()


async def process(
    desk: Desk, receiver: Receiver, id: str, handler: Callable[[Message], Any] | None = None, **options: Any
) -> Outcome[Any]:
    """Process a message in a transaction of its own."""
    on, message = receiver.on(desk.connection, commit=True), Message(id=id, payload={"id": id})
    handle = handler or desk.handler()
    return (
        await on.aprocess(message, handle, **options)
        if desk.awaits
        else on.process(message, handle, **options)
    )


@pytest.fixture(params=[*OWN, "psycopg" + ROTATING, "asyncpg" + ROTATING])
def world(request: pytest.FixtureRequest, places: Callable[..., Place]) -> Iterator[World]:
    yield from world_of(request.param, places, World)


@pytest.fixture(params=["psycopg", "psycopg-async"])
def psycopgs(request: pytest.FixtureRequest, places: Callable[..., Place]) -> Iterator[World]:
    yield from world_of(request.param, places, World)


@pytest.mark.parametrize("autocommit", [False, True], ids=["by itself", "autocommit"])
def test_a_call_is_a_transaction(world: World, request: pytest.FixtureRequest, autocommit: bool) -> None:
    """When it returns, effect and record are committed and the connection is free; a repeat has the first answer."""

    async def story(id: str) -> None:
        async with world.desk(autocommit) as desk:
            outcome = await process(desk, world.receiver, id)
            assert (outcome.status, outcome.value, outcome.guarantee) == ("executed", {"done": id}, "atomic")
            assert world.told(id) == (1, State.COMPLETED)
            for _ in range(2):
                again = await process(desk, world.receiver, id)
                assert (again.status, again.value, again.guarantee) == ("replayed", {"done": id}, "atomic")
            assert (await process(desk, world.receiver, f"{id}-2")).status == "executed"
            assert world.told(f"{id}-2") == (1, State.COMPLETED)

    asyncio.run(story(request.node.name))


@told
async def test_another_payload_is_refused(world: World, id: str) -> None:
    """As ever, and the connection is free."""
    async with world.desk() as desk:
        await process(desk, world.receiver, id)
        on, other = world.receiver.on(desk.connection, commit=True), Message(id=id, payload="another")
        with pytest.raises(KeyReused):
            await on.aprocess(other, desk.handler()) if desk.awaits else on.process(other, desk.handler())
        assert (await process(desk, world.receiver, f"{id}-2")).status == "executed"
    assert world.told(id) == (1, State.COMPLETED)


@told
async def test_an_error_leaves_nothing(world: World, id: str) -> None:
    """What the handler did is undone, its error is raised, and the next delivery runs. Where the policy remembers some
    errors, the attempt is counted.
    """
    async with world.desk() as desk:
        for policy, trace, number in ((Policy(), None, 1), (Policy(remember=(Declined,)), State.ABSENT, 2)):
            key = f"{id}-{number}"
            with pytest.raises(ValueError, match="no") as raised:
                await process(desk, world.receiver, key, desk.handler(ValueError("no")), policy=policy)
            assert not getattr(raised.value, "__notes__", None)
            assert world.told(key) == (0, trace)
            assert (await process(desk, world.receiver, key, policy=policy)).attempt == number
            assert world.told(key) == (1, State.COMPLETED)


def test_a_swallowed_error_can_not_pass_for_success(psycopgs: World, request: pytest.FixtureRequest) -> None:
    """PostgreSQL has aborted what a handler goes on with: the engine's word is told, and nothing is left."""
    world = psycopgs

    async def handle(message: Message) -> str:
        await desk.effect(message.id)
        with suppress(psycopg.Error):
            await desk.execute("SELECT nonsense FROM nowhere")
        return "fine"

    async def story(id: str, policy: Policy) -> None:
        nonlocal desk
        async with world.desk() as desk:
            handler = handle if desk.awaits else (lambda message: _sent(handle(message)))
            with pytest.raises(psycopg.errors.InFailedSqlTransaction):
                await process(desk, world.receiver, id, handler, policy=policy)
            assert world.place.count(id) == 0
            assert (await process(desk, world.receiver, id, policy=policy)).status == "executed"

    desk: Any = None
    for number, policy in enumerate((Policy(), Policy(max_attempts=3))):
        asyncio.run(story(f"{request.node.name}-{number}", policy))


@told
async def test_a_remembered_error_is_committed_without_its_effects(world: World, id: str) -> None:
    """It is the answer of every repeat, and nobody has to commit it."""
    async with world.desk() as desk:
        for _ in range(2):
            with pytest.raises(Declined, match="no money"):
                await process(desk, world.receiver, id, desk.handler(Declined("no money")))
            assert world.told(id) == (0, State.FAILED)


@told
async def test_attempts_are_counted(world: World, id: str) -> None:
    """A failed attempt is committed as such, so that max_attempts holds."""
    policy = Policy(max_attempts=2)
    async with world.desk() as desk:
        for _ in range(2):
            with pytest.raises(ValueError):
                await process(desk, world.receiver, id, desk.handler(ValueError()), policy=policy)
        with pytest.raises(Exception, match="attempts"):
            await process(desk, world.receiver, id, policy=policy)
    assert world.told(id) == (0, State.FAILED)


@told
async def test_a_transaction_of_the_users_is_left_alone(world: World, id: str) -> None:
    """It would be committed with it: that is refused before anything happens, and it goes on."""
    async with world.desk() as desk:
        await desk.begin()
        await desk.effect(f"{id}-mine")
        with pytest.raises(UsageError, match="in a transaction already"):
            await process(desk, world.receiver, id)
        on, messages = world.receiver.on(desk.connection, commit=True), [Message(id=id)]
        with pytest.raises(UsageError, match="in a transaction already"):
            if desk.awaits:
                await on.aprocess_batch(messages, desk.handler())
            else:
                on.process_batch(messages, desk.handler())
        await desk.commit()
    assert world.told(id) == (0, None)
    assert world.place.count(f"{id}-mine") == 1


@told
async def test_a_call_inside_of_one_is_refused(world: World, id: str) -> None:
    """The inner one would commit half of the outer one. Without commit=True it is part of it."""

    async def handle(message: Message) -> Any:
        await desk.effect(message.id)
        with pytest.raises(UsageError, match="in a transaction already"):
            await process(desk, world.receiver, f"{id}-inner")
        return (await desk.process(world.receiver, f"{id}-inner")).status

    async with world.desk() as desk:
        handler = handle if desk.awaits else (lambda message: _sent(handle(message)))
        assert (await process(desk, world.receiver, id, handler)).value == "executed"
    assert world.told(id) == world.told(f"{id}-inner") == (1, State.COMPLETED)


def _sent(coroutine: Coroutine[Any, Any, Any]) -> Any:
    with pytest.raises(StopIteration) as done:
        coroutine.send(None)
    return done.value.value


@told
async def test_a_handler_that_commits_is_found_out(world: World, id: str) -> None:
    """Its result is not given: what it did was committed before there was one."""

    async def handle(message: Message) -> None:
        await desk.effect(message.id)
        await desk.execute("COMMIT")

    async with world.desk() as desk:
        handler = handle if desk.awaits else (lambda message: _sent(handle(message)))
        with pytest.raises(UsageError, match="was ended meanwhile"):
            await process(desk, world.receiver, id, handler)
    assert world.told(id) in ((1, State.PENDING), (1, State.COMPLETED))


@told
async def test_a_handler_that_rolls_back_and_goes_on_is_found_out(world: World, id: str) -> None:
    """What it does then is in another transaction, which has no claim: nothing of that is committed."""

    async def handle(message: Message) -> None:
        await desk.execute("ROLLBACK")
        if not isinstance(desk.connection, psycopg.Connection | psycopg.AsyncConnection):
            await desk.execute("BEGIN")  # psycopg does so by itself
        await desk.effect(message.id)

    async with world.desk() as desk:
        handler = handle if desk.awaits else (lambda message: _sent(handle(message)))
        for number, policy in enumerate((Policy(), Policy(remember=(Declined,)))):
            with pytest.raises(UsageError, match="was ended meanwhile"):
                await process(desk, world.receiver, f"{id}-{number}", handler, policy=policy)
            assert world.told(f"{id}-{number}") == (0, None)


@told
async def test_who_rolls_back_and_goes_on_and_raises_leaves_nothing(world: World, id: str) -> None:
    """What can't be undone to its mark is undone whole, and not committed for the sake of what is to be recorded."""

    async def handle(message: Message) -> None:
        await desk.execute("ROLLBACK")
        await desk.execute("BEGIN")
        await desk.effect(message.id)
        raise Declined("no")

    async with world.desk() as desk:
        handler = handle if desk.awaits else (lambda message: _sent(handle(message)))
        for number, policy in enumerate((Policy(), Policy(remember=(Declined,)), Policy(max_attempts=3))):
            for _ in range(2):
                with pytest.raises(Declined):
                    await process(desk, world.receiver, f"{id}-{number}", handler, policy=policy)
                assert world.place.count(f"{id}-{number}") == 0
        assert (await process(desk, world.receiver, id)).status == "executed"
    assert world.told(id) == (1, State.COMPLETED)


@told
async def test_a_handler_that_ends_the_transaction_behind_its_drivers_back(world: World, id: str) -> None:
    """The driver's own transactions work afterwards."""

    async def handle(message: Message) -> None:
        await desk.execute("ROLLBACK")

    async with world.desk() as desk:
        handler = handle if desk.awaits else (lambda message: _sent(handle(message)))
        with pytest.raises(UsageError, match="was ended meanwhile"):
            await process(desk, world.receiver, id, handler, policy=Policy())
        await desk.begin()
        await desk.process(world.receiver, id)
        await desk.commit()
    assert world.told(id) == (1, State.COMPLETED)


@told
async def test_nothing_is_committed_where_there_is_no_claim_to_end(world: World, id: str) -> None:
    """A handler that has deleted its own record has no result that could be recorded, so its effect is undone."""
    table = "effectonce_records" if world.place.dialect == "sqlite" else f"records_{world.place.name}"

    async def handle(message: Message) -> str:
        await desk.effect(message.id)
        await desk.execute(f"DELETE FROM {table}")
        return "done"

    async with world.desk() as desk:
        handler = handle if desk.awaits else (lambda message: _sent(handle(message)))
        with pytest.raises(UsageError, match="was ended meanwhile"):
            await process(desk, world.receiver, id, handler)
        assert world.told(id) == (0, None)
        assert (await process(desk, world.receiver, id)).status == "executed"


@told
async def test_a_batch(world: World, id: str) -> None:
    """Each piece of it is a transaction; one failure spoils no other, and the connection is free afterwards."""

    async def handle(message: Message) -> str:
        await desk.effect(message.id)
        if message.id.endswith("-3"):
            raise ValueError("no")
        return message.id

    ids = [f"{id}-{number % 5}" for number in range(7)]
    messages = [Message(id=each, payload={"id": each}) for each in ids]
    async with world.desk() as desk:
        on = world.receiver.on(desk.connection, commit=True)
        for status in ("executed", "replayed"):
            if desk.awaits:
                outcomes = await on.aprocess_batch(messages, handle, size=3)
            else:
                outcomes = on.process_batch(messages, lambda message: _sent(handle(message)), size=3)
            failed = [outcome.status for outcome in outcomes if outcome.status == "failed"]
            assert [outcomes[0].status, len(failed)] == [status, 1]
        assert (await process(desk, world.receiver, id)).status == "executed"
    assert [world.place.count(each) for each in sorted(set(ids))] == [1, 1, 1, 0, 1]


@told
async def test_a_block(world: World, id: str) -> None:
    """It begins when it is entered, and is committed when it is left."""
    async with world.desk() as desk:
        for first in (True, False):
            claiming = world.receiver.on(desk.connection, commit=True).claim(id)
            if desk.awaits:
                async with claiming as claim:
                    if claim.first:
                        await desk.effect(id)
                        await claim.complete("done")
            else:
                with claiming as claim:
                    if claim.first:
                        await desk.effect(id)
                        claim.complete("done")
            assert (claim.outcome.replayed, claim.value) == (not first, "done")
            assert world.place.count(id) == 1
        claiming = world.receiver.on(desk.connection, commit=True).claim(f"{id}-2")
        with pytest.raises(ValueError):
            if desk.awaits:
                async with claiming:
                    await desk.effect(f"{id}-2")
                    raise ValueError
            else:
                with claiming:
                    await desk.effect(f"{id}-2")
                    raise ValueError
    assert world.place.count(f"{id}-2") == 0


@told
async def test_a_decorated_function(world: World, id: str) -> None:
    """``function.on(connection, commit=True)``."""
    async with world.desk() as desk:
        if desk.awaits:

            @world.receiver.idempotent(key="order")
            async def pay(order: str) -> str:
                await desk.effect(order)
                return current().guarantee

            assert [await pay.on(desk.connection, commit=True)(id) for _ in range(2)] == ["atomic"] * 2
        else:

            @world.receiver.idempotent(key="order")
            def charge(order: str) -> str:
                _sent(desk.effect(order))
                return current().guarantee

            assert [charge.on(desk.connection, commit=True)(id) for _ in range(2)] == ["atomic"] * 2
    assert world.place.count(id) == 1


@told
async def test_steps_are_in_the_transaction(world: World, id: str) -> None:
    """What a step has written is committed with the rest, and the journal is gone with the result."""

    async def handle(message: Message) -> str:
        attempt = current()
        effect = partial(desk.effect, message.id)
        if desk.awaits:
            await attempt.astep("effect", effect)
        else:
            attempt.step("effect", lambda: _sent(effect()))
        return "done"

    async with world.desk() as desk:
        handler = handle if desk.awaits else (lambda message: _sent(handle(message)))
        assert (await process(desk, world.receiver, id, handler)).value == "done"
    assert world.told(id) == (1, State.COMPLETED)


@told
async def test_a_concurrent_duplicate_has_the_first_answer(world: World, id: str) -> None:
    """It waits for the transaction of the first, and replays what that committed."""
    if world.place.dialect == "sqlite":
        pytest.skip("one that waits for SQLite's lock has nothing to tell of it")

    async def second() -> Outcome[Any]:
        async with world.desk() as other:
            return await process(other, world.receiver, id)

    async def handle(message: Message) -> str:
        await desk.effect(message.id)
        beside.append(Beside(second))
        world.place.wait_for_waiters()
        return "first"

    beside: list[Beside] = []
    async with world.desk() as desk:
        handler = handle if desk.awaits else (lambda message: _sent(handle(message)))
        assert (await process(desk, world.receiver, id, handler)).status == "executed"
        again = beside[0].result()
    assert (again.status, again.value, world.place.count(id)) == ("replayed", "first", 1)


@told
async def test_one_that_must_not_wait(world: World, id: str) -> None:
    """With busy="reject" it is told so at once, and its connection is free."""
    if world.place.dialect == "sqlite":
        pytest.skip("SQLite has one lock for everything")
    async with world.desk() as first, world.desk() as second:
        await first.begin()
        await first.process(world.receiver, id)
        with pytest.raises(InProgress):
            await process(second, world.receiver, id, policy=REJECT)
        assert (await process(second, world.receiver, f"{id}-2")).status == "executed"
        await first.commit()
    assert world.told(id) == (1, State.COMPLETED)


# When it can't be committed


def test_a_constraint_that_is_checked_at_the_end(psycopgs: World, request: pytest.FixtureRequest) -> None:
    """COMMIT itself is refused: the engine's error is told, nothing is there, and the next delivery runs."""
    world, id = psycopgs, request.node.name
    table = f"late_{world.place.name}"
    world.place.ask(f"CREATE TABLE {table} (id int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
    world.place.ask(f"INSERT INTO {table} VALUES (1)")

    async def handle(message: Message) -> str:
        await desk.effect(message.id)
        await desk.execute(f"INSERT INTO {table} VALUES ({values.pop()})")
        return "done"

    async def story() -> None:
        nonlocal desk
        async with world.desk() as desk:
            handler = handle if desk.awaits else (lambda message: _sent(handle(message)))
            with pytest.raises(psycopg.errors.UniqueViolation) as refused:
                await process(desk, world.receiver, id, handler)
            assert not getattr(refused.value, "__notes__", None)
            assert world.told(id) == (0, None)
            assert (await process(desk, world.receiver, id, handler)).status == "executed"
            assert world.told(id) == (1, State.COMPLETED)

    desk: Any = None
    values = [2, 1]
    try:
        asyncio.run(story())
    finally:
        world.place.ask(f"DROP TABLE {table}")


def test_a_refusal_of_the_users_own_at_the_end(places: Callable[..., Place]) -> None:
    """Whatever code it has: what effectonce itself would be refused with has to be told from it."""
    place = places("postgresql")
    name = f"mind_{place.name}"
    place.ask(
        f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$ "
        "BEGIN RAISE 'not today' USING ERRCODE = 'check_violation'; END $$",
        f"CREATE CONSTRAINT TRIGGER {name} AFTER INSERT ON {place.effects} INITIALLY DEFERRED "
        f"FOR EACH ROW EXECUTE FUNCTION {name}()",
    )
    try:
        with Receiver(place.store_url) as receiver, psycopg.connect(place.url) as connection:

            def handle(message: Message) -> None:
                connection.execute(f"INSERT INTO {place.effects} VALUES ('minded')")

            with pytest.raises(psycopg.errors.CheckViolation, match="not today"):
                receiver.on(connection, commit=True).process(Message(id="minded"), handle)
            assert receiver.get(receiver.key_of(Message(id="minded"))) is None
    finally:
        place.ask(f"DROP FUNCTION {name} CASCADE")


@pytest.mark.parametrize("policy", [Policy(), Policy(max_attempts=3)], ids=["plain", "max_attempts"])
@pytest.mark.parametrize("options", [{}, {"autocommit": True}, {"isolation_level": None}], ids=str)
def test_a_constraint_of_sqlite(tmp_path: Path, policy: Policy, options: dict[str, Any]) -> None:
    """SQLite keeps a transaction that it has refused to commit: it is rolled back, and nothing of it is left."""
    if sys.version_info < (3, 12) and "autocommit" in options:
        pytest.skip("autocommit= is new in Python 3.12")
    file = tmp_path / "app.db"
    with Receiver(f"sqlite:///{file}") as receiver, closing(sqlite3.connect(file, **options)) as connection:
        connection.executescript(
            "PRAGMA foreign_keys = ON; CREATE TABLE parent (id INTEGER PRIMARY KEY);"
            "CREATE TABLE child (id INTEGER REFERENCES parent DEFERRABLE INITIALLY DEFERRED);"
        )

        def handle(message: Message) -> str:
            connection.execute("INSERT INTO child VALUES (?)", (numbers.pop(),))
            return "done"

        numbers = [1, 7]
        with pytest.raises(sqlite3.IntegrityError):
            receiver.on(connection, commit=True).process(Message(id="a"), handle, policy=policy)
        assert not connection.in_transaction
        connection.execute("INSERT INTO parent VALUES (1)")
        if connection.in_transaction:
            connection.commit()
        assert connection.execute("SELECT count(*) FROM child").fetchone() == (0,)
        outcome = receiver.on(connection, commit=True).process(Message(id="a"), handle, policy=policy)
        assert (outcome.status, connection.in_transaction) == ("executed", False)
        with closing(sqlite3.connect(file)) as another:
            assert another.execute("SELECT id FROM child").fetchall() == [(1,)]
        with pytest.raises(ValueError):
            receiver.on(connection, commit=True).process(Message(id="b"), _raise, policy=policy)
        assert not connection.in_transaction


def _raise(message: Message) -> NoReturn:
    raise ValueError(message.id)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="autocommit= is new in Python 3.12")
def test_a_sqlite_connection_that_is_always_in_a_transaction(tmp_path: Path) -> None:
    """Nothing can begin there, and the error says so."""
    options: Any = {"autocommit": False}
    with Receiver(f"sqlite:///{tmp_path / 'app.db'}") as receiver:
        connection = sqlite3.connect(tmp_path / "app.db", **options)
        with closing(connection), pytest.raises(UsageError, match="in a transaction at all times"):
            receiver.on(connection, commit=True).process(Message(id="a"), _raise)


def test_the_isolation_level_of_the_connection_holds(places: Callable[..., Place]) -> None:
    """BEGIN is what psycopg would have sent; a serialization failure at COMMIT asks for another run."""
    place = places("postgresql")
    with Receiver(place.store_url) as receiver, psycopg.connect(place.url) as connection:
        connection.isolation_level = psycopg.IsolationLevel.SERIALIZABLE

        def handle(message: Message) -> str:
            ((level,),) = connection.execute("SHOW transaction_isolation").fetchall()
            return str(level)

        outcome = receiver.on(connection, commit=True).process(Message(id="serializable"), handle)
        assert outcome.value == "serializable"

        def skewed(message: Message) -> str:
            """Reads what another writes, and writes what that has read."""
            connection.execute(f"SELECT count(*) FROM {place.effects} WHERE id = 'theirs'")
            connection.execute(f"INSERT INTO {place.effects} VALUES ('ours')")
            with psycopg.connect(place.url) as other:
                other.isolation_level = psycopg.IsolationLevel.SERIALIZABLE
                other.execute(f"SELECT count(*) FROM {place.effects} WHERE id = 'ours'")
                other.execute(f"INSERT INTO {place.effects} VALUES ('theirs')")
            return "done"

        with pytest.raises(psycopg.errors.SerializationFailure) as failure:
            receiver.on(connection, commit=True).process(Message(id="skewed"), skewed)
        assert is_retryable(failure.value)
        assert place.count("ours") == 0
        assert receiver.on(connection, commit=True).process(Message(id="skewed"), handle).status == "executed"


def test_a_pipeline_of_the_users_is_refused(places: Callable[..., Place]) -> None:
    """Nobody would know whether it was committed before the pipeline is over."""
    place = places("postgresql")
    with (
        Receiver(place.store_url) as receiver,
        psycopg.connect(place.url, autocommit=True) as connection,
        connection.pipeline(),
        pytest.raises(UsageError, match="in a pipeline"),
    ):
        receiver.on(connection, commit=True).process(Message(id="piped"), lambda message: None)


@pytest.mark.parametrize("driver", [name for name in DRIVERS if name not in OWN])
def test_frameworks_commit_for_themselves(
    driver: str, places: Callable[..., Place], request: pytest.FixtureRequest
) -> None:
    """Their transactions have hooks, sessions and blocks of their own: refused, with what to write instead."""
    dialect, kind = DRIVERS[driver]
    world = World(places(dialect), kind)

    async def story() -> None:
        async with world.desk() as desk:
            with pytest.raises(UsageError, match="commit=True is for the connections of drivers"):
                await process(desk, world.receiver, f"framework-{driver}")

    asyncio.run(story())
    world.receiver.close()


# Lost replies, and interruptions (test_transactions_interrupted.py)


@pytest.mark.parametrize(
    "world", ["psycopg", "psycopg-async", "asyncpg", "pymysql", "asyncmy"], indirect=True
)
def test_a_lost_reply_is_settled_by_asking_again(world: World, request: pytest.FixtureRequest) -> None:
    """Whichever reply is lost, that of COMMIT among them: run again, the effect has happened once."""
    kind, url = world.kind, world.place.url

    async def connected() -> Desk:
        desk = kind(far)
        await desk.open()
        await idle(desk)
        return desk

    @asynccontextmanager
    async def begin() -> AsyncIterator[Desk]:
        desk = opened.pop() if opened else await connected()
        try:
            yield desk
        finally:
            with suppress(Exception):
                await desk.close()

    async def story() -> None:
        lost = 0
        for nth in range(1, 60):
            id = f"{request.node.name}-{nth}"

            async def body(desk: Desk, id: str = id) -> Any:
                return (await process(desk, world.receiver, id)).value

            opened.append(
                await connected()
            )  # beforehand: some drivers lose more than a reply while they connect
            proxy.lose_reply(nth)
            assert await aretrying(begin, body) == {"done": id}
            assert world.told(id) == (1, State.COMPLETED)
            if proxy.fired == lost:
                break
            lost = proxy.fired
        assert lost >= 3

    opened: list[Desk] = []
    with FaultProxy(url) as proxy:
        far = Place(world.place.dialect, proxy.url, world.place.name, world.place.options)
        asyncio.run(story())


def test_a_lost_commit_says_that_nobody_knows(places: Callable[..., Place]) -> None:
    """Without somebody who asks again, the error tells to."""
    place = places("postgresql")
    with Receiver(place.store_url) as receiver, FaultProxy(place.url) as proxy:
        with psycopg.connect(proxy.url) as connection:
            receiver.on(connection, commit=True).process(Message(id="before"), lambda message: None)
            proxy.lose_reply(2)
            with pytest.raises(psycopg.OperationalError) as lost:
                receiver.on(connection, commit=True).process(Message(id="lost"), lambda message: "done")
            (note,) = lost.value.__notes__
            assert "can't know whether this was committed" in note
            assert connection.closed
        with psycopg.connect(place.url) as connection:
            again = receiver.on(connection, commit=True).process(Message(id="lost"), lambda message: "done")
        assert (again.status, again.value) == ("replayed", "done")


@pytest.mark.parametrize(
    "world", ["psycopg", "psycopg-async", "asyncpg", "pymysql", "asyncmy"], indirect=True
)
def test_a_lost_reply_to_what_is_recorded_of_a_failure(world: World, request: pytest.FixtureRequest) -> None:
    """The handler's error is told, and it is not said that nothing was committed: nobody knows that."""

    async def story() -> None:
        lost = 0
        for nth in range(1, 30):
            id = f"{request.node.name}-{nth}"
            desk = world.kind(far)
            await desk.open()
            await idle(desk)
            proxy.lose_reply(nth)
            with pytest.raises(Exception) as raised:
                await process(desk, world.receiver, id, desk.handler(Declined("no")))
            notes = " ".join(getattr(raised.value, "__notes__", ()))
            assert "Nothing of it was committed" not in notes or world.state(id) is not State.FAILED
            assert world.place.count(id) == 0
            with suppress(Exception):
                await desk.close()
            if proxy.fired == lost:
                assert world.state(id) is State.FAILED
                break
            lost = proxy.fired
        assert lost >= 3

    with FaultProxy(world.place.url) as proxy:
        far = Place(world.place.dialect, proxy.url, world.place.name, world.place.options)
        asyncio.run(story())


@pytest.mark.parametrize("word", ["BEGIN", "COMMIT"])
def test_pymysql_interrupted_between_question_and_answer(
    places: Callable[..., Place], monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    """Whoever goes on with the connection has its own answers, or the connection is closed."""
    import pymysql

    class Interrupt(BaseException):
        pass

    place = places("mysql")
    connection = pymysql.connect(**place.mysql())
    send = connection._execute_command

    def sent(command: int, sql: Any) -> None:
        send(command, sql)
        if sql == word:
            monkeypatch.undo()
            raise Interrupt

    with Receiver(place.store_url) as receiver:
        monkeypatch.setattr(connection, "_execute_command", sent)
        with pytest.raises(Interrupt):
            receiver.on(connection, commit=True).process(Message(id=f"between-{word}"), lambda message: 1)
        if connection.open:
            with connection.cursor() as cursor:
                for number in (1, 2):
                    cursor.execute(f"SELECT {number}")
                    assert cursor.fetchall() == ((number,),)
            connection.close()
        with closing(pymysql.connect(**place.mysql())) as another:
            on = receiver.on(another, commit=True)
            assert on.process(Message(id=f"between-{word}"), lambda message: 1).value == 1


def test_asyncpg_cancelled_at_any_moment_is_closed_or_idle(places: Callable[..., Place]) -> None:
    """Where nobody knows whether a transaction has begun, whoever goes on would be inside of it."""
    import asyncpg

    place = places("postgresql")

    async def story(receiver: Receiver) -> None:
        for turns in range(24):
            connection = await asyncpg.connect(place.url)
            task = asyncio.ensure_future(
                receiver.on(connection, commit=True).aprocess(Message(id=f"turn-{turns}"), work)
            )
            for _ in range(turns % 8):
                await asyncio.sleep(0)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            if not connection.is_closed():
                async with connection.transaction():
                    await connection.execute(f"INSERT INTO {place.effects} VALUES ('mine-{turns}')")
                assert place.count(f"mine-{turns}") == 1
                await connection.close()

    async def work(message: Message) -> int:
        return 1

    with Receiver(place.store_url) as receiver:
        asyncio.run(story(receiver))


def test_notifications_reach_who_listens(places: Callable[..., Place]) -> None:
    """Also those that come with the answer to a claim."""
    place = places("postgresql")
    with Receiver(place.store_url) as receiver, psycopg.connect(place.url, autocommit=True) as connection:
        connection.execute("LISTEN somebody")

        def handle(message: Message) -> None:
            place.ask("NOTIFY somebody, 'hello'")

        receiver.on(connection, commit=True).process(Message(id="listening"), handle)
        assert [each.payload for each in connection.notifies(timeout=10, stop_after=1)] == ["hello"]


@pytest.mark.parametrize("world", ["psycopg", "psycopg-async", "pymysql", "asyncmy"], indirect=True)
def test_a_closed_connection_is_called_closed(world: World) -> None:
    """Not one that is in a transaction, or in a pipeline."""

    async def story() -> None:
        async with world.desk() as desk:
            await desk.close()
            with pytest.raises(UsageError, match="is closed"):
                await process(desk, world.receiver, "closed")

    asyncio.run(story())


# What it costs


def test_a_server_without_merge(
    psycopgs: World, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL 14 takes a round trip more; everything else is as it was."""
    from effectonce.transactions import _postgres_store

    monkeypatch.setattr(_postgres_store, "MERGES", 99)
    world, id = psycopgs, request.node.name

    async def story() -> None:
        async with world.desk() as desk:
            for status in ("executed", "replayed"):
                assert (await process(desk, world.receiver, id)).status == status
                assert world.told(id) == (1, State.COMPLETED)

    asyncio.run(story())


def test_round_trips(psycopgs: World, request: pytest.FixtureRequest) -> None:
    """BEGIN with the claim, the work, the result with COMMIT: three; and one for a duplicate."""
    world, id = psycopgs, request.node.name

    async def story() -> None:
        with FaultProxy(world.place.url) as proxy:
            desk = world.kind(Place("postgresql", proxy.url, world.place.name))
            await desk.open()

            async def trips(id: str) -> int:
                before = proxy.bursts
                await process(desk, world.receiver, id)
                return proxy.bursts - before

            await trips(f"{id}-first")  # looks for the table
            assert [await trips(f"{id}-{number}") for number in (1, 2)] == [3, 3]
            # The first duplicate after a new key was not expected.
            assert [await trips(f"{id}-1") for _ in range(3)] == [3, 1, 1]
            assert [await trips(f"{id}-{number}") for number in (3, 4)] == [4, 3]
            await desk.close()

    asyncio.run(story())
