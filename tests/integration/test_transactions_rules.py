"""Atomic mode: what it refuses, what it leaves to the engine, and what it does when a transaction goes wrong."""

from __future__ import annotations

import asyncio
import gc
import signal
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any, NoReturn
from uuid import UUID

import psycopg
import pymysql
import pytest
from tests.integration.transaction_drivers import DRIVERS, Beside, Place, finished
from tests.servers.fixtures import HasURL
from tests.servers.proxy import FaultProxy

from effectonce import Message, Policy, Receiver, current
from effectonce._blocking import run as blocking
from effectonce._records import Claim, State
from effectonce.errors import ColourMismatch, InDoubt, InProgress, KeyReused, StoreError, UsageError
from effectonce.keys import new_owner
from effectonce.policy import Resolution
from effectonce.stores._postgres_steps import id_of
from effectonce.testing.clocks import wait_until
from effectonce.transactions import adapt, aretrying, code_of, is_retryable, retrying


class Scene:
    """A database, a receiver, and connections of one driver for every engine."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.events: list[Any] = []
        self.receiver = Receiver(place.store_url, hooks=[self.events.append])

    def connect(self, **options: Any) -> Any:
        if self.place.dialect == "sqlite":
            return sqlite3.connect(self.place.path, timeout=30, check_same_thread=False, **options)
        if self.place.dialect == "postgresql":
            return psycopg.connect(self.place.url, **options)
        return pymysql.connect(**self.place.mysql(), **options)

    @contextmanager
    def transaction(self) -> Iterator[Any]:
        """Commits when it is left, and rolls back when it is left by an exception."""
        with closing(self.connect()) as connection:
            try:
                yield connection
            except BaseException:
                if not getattr(connection, "closed", False):
                    connection.rollback()
                raise
            connection.commit()

    def effect(self, connection: Any, id: str) -> None:
        connection.cursor().execute(f"INSERT INTO {self.place.effects} VALUES ('{id}')")

    def handler(self, connection: Any) -> Callable[[Message], str]:
        def handle(message: Message) -> str:
            self.effect(connection, message.id)
            return message.id

        return handle


def place_of(request: pytest.FixtureRequest, dialect: str, tmp_path: Path) -> Place:
    if dialect == "sqlite":
        return Place("sqlite", f"sqlite:///{tmp_path / 'app.db'}")
    server = request.getfixturevalue("postgres" if dialect == "postgresql" else "mariadb")
    return Place(dialect, server.url)


@pytest.fixture(params=["sqlite", "postgresql", "mysql"])
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scene]:
    yield from scene_on(place_of(request, request.param, tmp_path))


@pytest.fixture(params=["postgresql", "mysql"])
def server_scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scene]:
    yield from scene_on(place_of(request, request.param, tmp_path))


@pytest.fixture
def postgres_scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scene]:
    yield from scene_on(place_of(request, "postgresql", tmp_path))


@pytest.fixture
def mariadb_scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scene]:
    yield from scene_on(place_of(request, "mysql", tmp_path))


def scene_on(place: Place) -> Iterator[Scene]:
    place.prepare()
    scene = Scene(place)
    yield scene
    scene.receiver.close()
    place.remove()


# What is refused


def test_autocommit_is_an_error_that_explains(scene: Scene) -> None:
    """Without a transaction nothing could be atomic: nothing is claimed, and the error says how to begin one."""
    options: dict[str, Any] = (
        {"isolation_level": None} if scene.place.dialect == "sqlite" else {"autocommit": True}
    )
    with closing(scene.connect(**options)) as connection:
        with pytest.raises(UsageError, match="Begin a transaction first"):
            scene.receiver.on(connection).process(Message(id="a"), scene.handler(connection))
        assert scene.place.count("a") == 0
        connection.cursor().execute("BEGIN")
        assert scene.receiver.on(connection).process(Message(id="a"), scene.handler(connection)).value == "a"
        connection.cursor().execute("COMMIT")
    assert scene.place.count("a") == 1


@pytest.mark.parametrize("form", ["connection", "session"])
def test_autocommit_below_sqlalchemy_is_found_out(scene: Scene, form: str) -> None:
    """A driver that was told in connect_args to commit every statement, of which SQLAlchemy knows nothing."""
    from sqlalchemy import create_engine, event, text
    from sqlalchemy.orm import Session

    driver = {"sqlite": "pysqlite", "postgresql": "psycopg", "mysql": "pymysql"}[scene.place.dialect]
    alone = {"isolation_level": None} if driver == "pysqlite" else {"autocommit": True}
    engine = create_engine(scene.place.sqlalchemy(driver), connect_args=alone)
    insert = text(f"INSERT INTO {scene.place.effects} VALUES ('a')")

    def process() -> int:
        with engine.connect() if form == "connection" else Session(engine) as connection:
            handled = scene.receiver.on(connection).process(
                Message(id="a"), lambda _: connection.execute(insert).rowcount
            )
            connection.rollback()
        return handled.value

    with pytest.raises(UsageError, match="connect_args"):
        process()
    assert scene.place.count("a") == 0
    if driver == "pysqlite":  # as SQLAlchemy's manual has it for SQLite: a listener begins
        event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
        assert process() == 1
        assert scene.place.count("a") == 0
    engine.dispose()


def test_autocommit_below_sqlalchemys_event_loop_is_found_out(scene: Scene) -> None:
    """The same over asyncio's drivers."""
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    driver = {"sqlite": "aiosqlite", "postgresql": "psycopg", "mysql": "asyncmy"}[scene.place.dialect]
    alone = {"isolation_level": None} if driver == "aiosqlite" else {"autocommit": True}

    async def process() -> None:
        engine = create_async_engine(scene.place.sqlalchemy(driver), connect_args=alone)
        async with engine.connect() as connection, AsyncSession(engine) as session:
            for each in (connection, session):
                with pytest.raises(UsageError, match="connect_args"):
                    await scene.receiver.on(each).aprocess(Message(id="a"), lambda _: 1)
        await engine.dispose()

    asyncio.run(process())


@pytest.mark.parametrize(("encoding", "letter"), [("LATIN1", "ä"), ("EUC_JP", "漢")])
def test_a_connection_need_not_speak_utf8(postgres_scene: Scene, encoding: str, letter: str) -> None:
    """Keys and results are the same to all, before and inside of a transaction that has begun."""
    scene = postgres_scene
    for number, first in enumerate(["", "SELECT 1"]):
        message = Message(id=f"{letter}-{number}")
        with closing(scene.connect(client_encoding=encoding)) as connection:
            connection.cursor().execute(first)
            outcome = scene.receiver.on(connection).process(message, lambda _: letter)
            connection.commit()
        store: Any = scene.receiver.store
        assert scene.receiver.key_of(message) in [record.key for record in blocking(store.scan())]
        assert outcome.value == scene.receiver.process(message, lambda _: "again").value == letter


def test_a_local_cache_holds_nothing_that_may_be_rolled_back(scene: Scene) -> None:
    """A duplicate in the same transaction is answered by what nobody has committed: after a rollback it runs."""
    message, policy = Message(id="a"), Policy(local_cache=10)

    def twice(connection: Any) -> list[str]:
        on, handler = scene.receiver.on(connection), scene.handler(connection)
        return [
            on.process(message, handler, policy=policy).status,
            *(outcome.status for outcome in on.process_batch([message], handler, policy=policy)),
            on.process(message, handler, policy=policy).status,
        ]

    with scene.transaction() as connection:
        assert twice(connection) == ["executed", "replayed", "replayed"]
        connection.rollback()
    with scene.transaction() as connection:
        assert twice(connection) == ["executed", "replayed", "replayed"]
    assert scene.place.count("a") == 1


def test_a_missing_table_is_not_made_by_who_may_not(scene: Scene) -> None:
    """The error names the command that makes it. On PostgreSQL the user's transaction is over, as with any error."""
    url = f"{Place(scene.place.dialect, scene.place.url).store_url}&create=no"
    if scene.place.dialect == "sqlite":
        scene.place.ask("DROP TABLE effectonce_records")
        url = scene.place.store_url
    with Receiver(url) as receiver, scene.transaction() as connection:
        with pytest.raises(StoreError, match="effectonce migrate"):
            receiver.on(connection).process(Message(id="a"), scene.handler(connection))
        outcomes = receiver.on(connection).process_batch([Message(id="a")], scene.handler(connection))
        assert [outcome.status for outcome in outcomes] == ["store_error"]
        connection.rollback()
    assert scene.place.count("a") == 0


def test_a_batch_may_be_the_first_use(server_scene: Scene) -> None:
    """Then the receiver makes its table, too, outside of the user's transaction: a rollback leaves it there."""
    place = Place(server_scene.place.dialect, server_scene.place.url)
    with Receiver(place.store_url) as receiver, server_scene.transaction() as connection:
        outcomes = receiver.on(connection).process_batch([Message(id="a")], server_scene.handler(connection))
        assert [outcome.status for outcome in outcomes] == ["executed"]
        connection.rollback()
        assert receiver.get(receiver.key_of(Message(id="a"))) is None
    assert place.ask(f"SELECT count(*) FROM records_{place.name}") == [(0,)]
    assert server_scene.place.count("a") == 0
    place.remove()


def test_another_engine_is_refused(scene: Scene, tmp_path: Path) -> None:
    """A connection to another kind of database can't hold the records."""
    with closing(scene.connect()) as connection:
        other = "sqlite" if scene.place.dialect != "sqlite" else "postgresql"
        url = f"sqlite:///{tmp_path / 'other.db'}" if other == "sqlite" else "postgresql://localhost/nowhere"
        with Receiver(url) as receiver, pytest.raises(UsageError, match="the same database"):
            receiver.on(connection)
        with Receiver("memory://") as receiver, pytest.raises(UsageError, match="no SQL database"):
            receiver.on(connection)


def test_what_is_no_connection_is_refused(tmp_path: Path) -> None:
    """A pool, an engine or a URL is not a connection; the error lists what is."""
    with Receiver(f"sqlite:///{tmp_path / 'a.db'}") as receiver, pytest.raises(UsageError, match="Known are"):
        receiver.on("postgresql://localhost/app")


def test_a_connection_of_the_other_colour(scene: Scene) -> None:
    """A blocking connection on an event loop is a colour mismatch, before anything happens."""

    async def handler(message: Message) -> None: ...

    with closing(scene.connect()) as connection:
        with pytest.raises(ColourMismatch, match="blocks"):
            asyncio.run(scene.receiver.on(connection).aprocess(Message(id="a"), handler))
        with pytest.raises(ColourMismatch):
            scene.receiver.on(connection).process(Message(id="a"), handler)
        with pytest.raises(ColourMismatch):
            scene.receiver.on(connection).process(Message(id="a"), lambda message: handler(message))
        connection.rollback()


def test_a_connection_of_an_event_loop_in_a_blocking_call(postgres_scene: Scene) -> None:
    """The other way round."""

    async def story() -> None:
        connection = await psycopg.AsyncConnection.connect(postgres_scene.place.url)
        with pytest.raises(ColourMismatch, match="event loop"):
            postgres_scene.receiver.on(connection).process(Message(id="a"), lambda message: None)
        await connection.close()

    asyncio.run(story())


def test_it_holds_nothing_to_close(scene: Scene) -> None:
    """Closing belongs to who opened: the receiver on a connection refuses it, and goes no deeper."""
    with closing(scene.connect()) as connection:
        on = scene.receiver.on(connection)
        with pytest.raises(UsageError, match="Close the receiver itself"):
            on.close()
        with pytest.raises(UsageError, match="already"):
            on.on(connection)


# Forms


def test_the_decorator_with_a_connection_among_the_arguments(scene: Scene) -> None:
    """``on="connection"`` names the parameter; it is a tool and no part of what is asked."""
    place = scene.place

    @scene.receiver.idempotent(key="order", on="connection", operation="charge")
    def charge(connection: Any, order: str, cents: int) -> int:
        scene.effect(connection, order)
        return cents

    for _ in range(2):
        with scene.transaction() as connection:
            assert charge(connection, "o-1", cents=5) == 5
    assert place.count("o-1") == 1
    with scene.transaction() as connection:
        assert charge.outcome(connection, "o-1", 5).guarantee == "atomic"
        with pytest.raises(KeyReused):
            charge(connection, "o-1", 6)
    with pytest.raises(UsageError, match="no parameter 'session'"):
        scene.receiver.idempotent(key="order", on="session", operation="other")(lambda order: None)


def test_a_decorated_function_on_a_connection(scene: Scene) -> None:
    """``function.on(connection)`` is the same function for one transaction, with the same keys."""

    @scene.receiver.idempotent(key="order", ignore=("connection",), operation="charge")
    def charge(order: str, connection: Any) -> str:
        scene.effect(connection, order)
        return order

    with scene.transaction() as connection:
        assert charge.on(connection).outcome("o-1", connection).guarantee == "atomic"
    with scene.transaction() as connection:
        assert charge.outcome("o-1", connection).replayed
    assert scene.place.count("o-1") == 1


def test_a_method_on_a_connection(scene: Scene) -> None:
    """Methods have it too."""

    class Till:
        @scene.receiver.idempotent(key="order", ignore=("self", "connection"), operation="till")
        def charge(self, order: str, connection: Any) -> str:
            scene.effect(connection, order)
            return order

    with scene.transaction() as connection:
        assert Till().charge.on(connection)("o-1", connection) == "o-1"  # type: ignore[attr-defined]
    assert scene.place.count("o-1") == 1


def test_the_attempt_knows_where_it_runs(scene: Scene) -> None:
    """``current()`` inside a handler: the guarantee is atomic, the lease can't be lost, and its key is its own."""
    seen: list[Any] = []

    def handler(message: Message) -> None:
        attempt = current()
        attempt.check()
        seen.append((attempt.guarantee, attempt.lost, attempt.key))
        with pytest.raises(UsageError, match="wait for itself"):
            scene.receiver.on(connection).process(message, handler)

    with scene.transaction() as connection:
        scene.receiver.on(connection).process(Message(id="a"), handler)
    assert seen == [("atomic", False, scene.receiver.key_of(Message(id="a")))]
    kinds = [(event.kind, event.guarantee) for event in scene.events]
    assert kinds == [("claimed", "atomic"), ("completed", "atomic")]


def test_a_handler_that_asks_for_its_own_key_by_way_of_another(scene: Scene) -> None:
    """It is told that it would wait for itself, rather than to roll back and try again for ever."""
    after = {"a": "b", "b": "a"}

    def handler(message: Message) -> Any:
        return scene.receiver.on(connection).process(Message(id=after[message.id]), handler).value

    with scene.transaction() as connection, pytest.raises(UsageError, match="wait for itself"):
        scene.receiver.on(connection).process(Message(id="a"), handler)


def test_a_key_of_the_same_name_in_another_store_is_another_key(scene: Scene) -> None:
    """A message that was begun elsewhere may be handed on to a transaction."""
    message = Message(id="a")
    with scene.transaction() as connection:
        outcome = Receiver("memory://").process(
            message, lambda _: scene.receiver.on(connection).process(message, scene.handler(connection)).value
        )
    assert outcome.status == "executed"
    assert scene.place.count("a") == 1


def test_a_handler_that_calls_another(scene: Scene) -> None:
    """Calls nest, each in a savepoint of its own: when the outer fails, the inner is undone with it."""

    def outer(message: Message) -> str:
        on.process(Message(id="inner"), scene.handler(connection))
        raise ValueError("the outer one fails")

    with scene.transaction() as connection:
        on = scene.receiver.on(connection)
        with pytest.raises(ValueError, match="outer"):
            on.process(Message(id="outer"), outer)
        assert on.process(Message(id="inner"), scene.handler(connection)).status == "executed"
    assert scene.place.count("inner") == 1


def test_an_attempt_in_doubt_is_settled_in_the_transaction(scene: Scene) -> None:
    """A prober settles it there; without one it is refused."""
    policy = Policy(in_doubt=(TimeoutError,))

    def unsure(message: Message) -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        scene.receiver.process(Message(id="a"), unsure, policy=policy)
    with scene.transaction() as connection:
        on = scene.receiver.on(connection)
        with pytest.raises(InDoubt):
            on.process(Message(id="a"), scene.handler(connection))
        probing = Policy(prober=lambda record: Resolution("not_applied"))
        assert on.process(Message(id="a"), scene.handler(connection), policy=probing).value == "a"
    assert scene.place.count("a") == 1


# When a transaction goes wrong


def test_a_handler_that_ends_the_transaction_is_found_out(scene: Scene) -> None:
    """Its result was not recorded with its effects, and is not given; the claim that it committed stays a claim."""

    def handler(message: Message) -> None:
        connection.commit()

    with closing(scene.connect()) as connection:
        with pytest.raises(UsageError, match="was ended meanwhile"):
            scene.receiver.on(connection).process(Message(id="a"), handler)
        connection.rollback()
        with pytest.raises(UsageError, match="was ended meanwhile"):
            scene.receiver.on(connection).process_batch([Message(id="b"), Message(id="c")], handler)
        connection.rollback()
        with pytest.raises(InProgress):
            scene.receiver.on(connection).process(Message(id="a"), scene.handler(connection))
        connection.rollback()
    assert scene.place.count("a") == 0


def test_the_error_of_a_failed_statement_is_told(scene: Scene) -> None:
    """A handler's database error comes through as it is, and the transaction goes on as if it had not run."""
    with scene.transaction() as connection:
        scene.effect(connection, "before")

        def handler(message: Message) -> None:
            scene.effect(connection, "a")
            connection.cursor().execute("SELECT nonsense FROM nowhere")

        with pytest.raises(Exception, match="nowhere") as caught:
            scene.receiver.on(connection).process(Message(id="a"), handler)
        assert not getattr(caught.value, "__notes__", None)
        assert not isinstance(caught.value, StoreError)
        scene.effect(connection, "after")
    assert [scene.place.count(id) for id in ("before", "a", "after")] == [1, 0, 1]


def test_a_swallowed_error_can_not_pass_for_success(postgres_scene: Scene) -> None:
    """PostgreSQL has aborted what a handler goes on with: its result is refused, and the engine's word told."""
    scene = postgres_scene

    def handler(message: Message) -> str:
        scene.effect(connection, "a")
        with pytest.raises(psycopg.Error):
            connection.execute("SELECT nonsense FROM nowhere")
        return "fine"

    with scene.transaction() as connection:
        with pytest.raises(psycopg.errors.InFailedSqlTransaction):
            scene.receiver.on(connection).process(Message(id="a"), handler)
        assert scene.receiver.on(connection).process(Message(id="a"), scene.handler(connection)).value == "a"
    assert scene.place.count("a") == 1


@pytest.mark.parametrize("awaits", [False, True], ids=["Session", "AsyncSession"])
def test_what_a_session_flushes_belongs_to_the_handler(postgres_scene: Scene, awaits: bool) -> None:
    """Objects are written when the handler has returned; an error of theirs is the handler's, and undoes it."""
    from sqlalchemy import Column, String, create_engine, text
    from sqlalchemy.exc import IntegrityError
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
    from sqlalchemy.orm import Session, declarative_base

    scene = postgres_scene
    url = scene.place.sqlalchemy("psycopg")

    class Effect(declarative_base()):  # type: ignore[misc]
        __tablename__ = scene.place.effects
        id = Column(String, primary_key=True)

    scene.place.ask(f"ALTER TABLE {scene.place.effects} ADD PRIMARY KEY (id)")
    scene.place.ask(f"INSERT INTO {scene.place.effects} VALUES ('taken')")

    def run_blocking() -> None:
        engine = create_engine(url)
        with Session(engine) as session:

            def handler(message: Message) -> None:
                session.add(Effect(id=message.id))

            session.add(Effect(id="before"))
            session.flush()
            with pytest.raises(IntegrityError) as caught:
                scene.receiver.on(session).process(Message(id="taken"), handler)
            assert not getattr(caught.value, "__notes__", None)
            scene.receiver.on(session).process(Message(id="free"), handler)
            assert session.execute(text("SELECT 1")).scalar() == 1
            session.commit()
        engine.dispose()

    async def run_awaiting() -> None:
        engine = create_async_engine(url)
        async with AsyncSession(engine) as session:

            async def handler(message: Message) -> None:
                session.add(Effect(id=message.id))

            session.add(Effect(id="before"))
            await session.flush()
            with pytest.raises(IntegrityError) as caught:
                await scene.receiver.on(session).aprocess(Message(id="taken"), handler)
            assert not getattr(caught.value, "__notes__", None)
            await scene.receiver.on(session).aprocess(Message(id="free"), handler)
            await session.commit()
        await engine.dispose()

    asyncio.run(run_awaiting()) if awaits else run_blocking()
    assert [scene.place.count(id) for id in ("before", "taken", "free")] == [1, 1, 1]
    record = scene.receiver.get(scene.receiver.key_of(Message(id="taken")))
    assert record is not None
    assert record.state is State.ABSENT


def test_a_dead_connection_does_not_mask_the_handlers_error(server_scene: Scene) -> None:
    """When nothing can be undone or recorded any more, the handler's own error is still the one that is told."""
    scene = server_scene
    error = ValueError("mine")

    def handler(message: Message) -> None:
        if scene.place.dialect == "postgresql":
            scene.place.ask(f"SELECT pg_terminate_backend({connection.info.backend_pid})")
        else:
            scene.place.ask(f"KILL {connection.thread_id()}")
        raise error

    with closing(scene.connect()) as connection:
        with pytest.raises(ValueError, match="mine") as caught:
            scene.receiver.on(connection).process(Message(id="a"), handler)
        assert "rolled back" in caught.value.__notes__[0]


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_handler_gives_its_key_back(scene: Scene, interrupt: type[BaseException]) -> None:
    """What it did is undone. Who commits that, as may be after a time-out, leaves a key that anybody can have."""

    def stop(connection: Any) -> NoReturn:
        scene.effect(connection, "a")
        raise interrupt

    with scene.transaction() as connection, pytest.raises(interrupt):
        scene.receiver.on(connection).process(Message(id="a"), lambda _: stop(connection))
    with (
        scene.transaction() as connection,
        pytest.raises(interrupt),
        scene.receiver.on(connection).claim("b"),
    ):
        stop(connection)
    assert scene.place.count("a") == 0
    with scene.transaction() as connection:
        assert scene.receiver.on(connection).process(Message(id="a"), scene.handler(connection)).attempt == 2
        with scene.receiver.on(connection).claim("b") as claim:
            assert claim.first
    assert scene.place.count("a") == 1


def test_an_interrupted_batch_has_recorded_what_it_did(scene: Scene) -> None:
    """What was handled before is done, what was not is free, whether or not the user commits."""
    messages = [Message(id=name) for name in "abcd"]
    statuses: list[list[str]] = []

    def process(connection: Any, interrupted: str) -> None:
        def handle(message: Message) -> str:
            scene.effect(connection, message.id)
            if message.id == interrupted:
                raise KeyboardInterrupt
            return message.id

        outcomes = scene.receiver.on(connection).process_batch(messages, handle)
        statuses.append([outcome.status for outcome in outcomes])

    with scene.transaction() as connection, pytest.raises(KeyboardInterrupt):
        process(connection, "c")
    assert [scene.place.count(name) for name in "abcd"] == [1, 1, 0, 0]
    with scene.transaction() as connection:
        process(connection, "")
    assert statuses == [["replayed", "replayed", "executed", "executed"]]
    assert [scene.place.count(name) for name in "abcd"] == [1, 1, 1, 1]


@pytest.mark.parametrize("failing", ["a", "bd", "f", "abdef"])
def test_in_a_batch_each_handler_is_undone_by_itself(scene: Scene, failing: str) -> None:
    """Whichever fail, beside others and beside what was done before: their rows are gone, and nobody else's."""

    def handle(message: Message) -> str:
        scene.effect(connection, message.id)
        if message.id in failing:
            raise ValueError(message.id)
        return message.id

    with scene.transaction() as connection:
        scene.receiver.on(connection).process(Message(id="c"), handle)
    with scene.transaction() as connection:
        outcomes = scene.receiver.on(connection).process_batch(
            [Message(id=name) for name in "abcdef"], handle
        )
    expected = {name: "failed" if name in failing else "executed" for name in "abdef"} | {"c": "replayed"}
    assert [outcome.status for outcome in outcomes] == [expected[name] for name in "abcdef"]
    assert [scene.place.count(name) for name in "abcdef"] == [name not in failing for name in "abcdef"]


def test_cancellation_leaves_nothing(postgres_scene: Scene) -> None:
    """A cancelled handler is undone; its transaction is the user's, who rolls back."""
    scene = postgres_scene

    async def story() -> None:
        async with await psycopg.AsyncConnection.connect(scene.place.url) as connection:
            started = asyncio.Event()

            async def handler(message: Message) -> None:
                await connection.execute(f"INSERT INTO {scene.place.effects} VALUES ('a')")
                started.set()
                await asyncio.Event().wait()

            task = asyncio.ensure_future(scene.receiver.on(connection).aprocess(Message(id="a"), handler))
            await started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            rows = await (await connection.execute(f"SELECT * FROM {scene.place.effects}")).fetchall()
            assert rows == []
            await connection.rollback()

    asyncio.run(story())
    assert scene.receiver.get(scene.receiver.key_of(Message(id="a"))) is None


def test_an_interrupted_wait_leaves_the_connection_usable(postgres_scene: Scene) -> None:
    """Ctrl-C ends a claim that waits for another transaction; the user rolls back, and goes on with the connection."""
    scene, main = postgres_scene, threading.get_ident()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with scene.transaction() as holder, closing(scene.connect()) as connection:
            scene.receiver.on(holder).process(Message(id="a"), scene.handler(holder))
            waits = "SELECT 1 FROM pg_locks WHERE NOT granted AND pid = %s"

            async def interrupt() -> None:
                with closing(scene.connect(autocommit=True)) as other:
                    wait_until(lambda: other.execute(waits, (connection.info.backend_pid,)).fetchone())
                signal.pthread_kill(main, signal.SIGINT)

            beside = Beside(interrupt)
            with pytest.raises(KeyboardInterrupt):
                scene.receiver.on(connection).process(Message(id="a"), scene.handler(connection))
            beside.result()
            connection.rollback()
            assert scene.receiver.on(connection).process(Message(id="b"), lambda message: 1).value == 1
            connection.commit()
    finally:
        signal.signal(signal.SIGINT, before)
    assert scene.place.count("a") == 1


def test_who_watches_is_told_when_a_transaction_ends_what_it_took_over(postgres_scene: Scene) -> None:
    """Once, when it commits. What is new in a transaction nobody can have watched, and nobody is told of it."""
    scene = postgres_scene
    store: Any = scene.receiver.store
    key = scene.receiver.key_of(Message(id="a"))
    held = blocking(store.claim(Claim(key, new_owner(), b"", 0.05, 60.0))).record
    assert held is not None
    assert blocking(store.mark(held))
    wait_until(lambda: blocking(store.now()) > held.lease_until)
    with closing(scene.connect(autocommit=True)) as ears:
        ears.execute(f"LISTEN {store._table.sql.channel}")
        for id in ("new", "a"):
            with scene.transaction() as connection:
                done = scene.receiver.on(connection).process(Message(id=id), scene.handler(connection))
            assert done.attempt == (1 if id == "new" else 2)
        heard = [notice.payload for notice in ears.notifies(timeout=20, stop_after=1)]
        assert heard == [str(UUID(bytes=id_of(key)))]
        assert list(ears.notifies(timeout=0)) == []


def test_a_result_that_was_rolled_back_is_not_cached(scene: Scene) -> None:
    """What this process holds in memory are finished records: nothing that nobody committed."""
    policy = Policy(local_cache=100)
    with closing(scene.connect()) as connection:
        for _ in range(2):
            on = scene.receiver.on(connection)
            assert not on.process(Message(id="a"), scene.handler(connection), policy=policy).replayed
            connection.rollback()


# Isolation and contention

LEVELS = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]


@pytest.mark.parametrize("level", LEVELS)
def test_every_isolation_level_is_right_or_asks_for_a_retry(server_scene: Scene, level: str) -> None:
    """A duplicate whose snapshot is older than the first's commit: its answer, or the engine's retryable error."""
    scene = server_scene
    scene.place.ask(f"CREATE TABLE {scene.place.effects}_of_others (id INTEGER)")
    with closing(scene.connect()) as first, closing(scene.connect()) as second:
        for connection in (first, second):
            begin(connection, scene, level)
        second.cursor().execute(f"SELECT count(*) FROM {scene.place.effects}_of_others")  # takes the snapshot
        scene.receiver.on(first).process(Message(id="a"), scene.handler(first))

        async def duplicate() -> Any:
            return scene.receiver.on(second).process(Message(id="a"), scene.handler(second))

        beside = Beside(duplicate)
        scene.place.wait_for_waiters()
        first.commit()
        try:
            assert beside.result().value == "a"
        except Exception as error:
            assert is_retryable(error), error
            assert level != "READ COMMITTED"
            second.rollback()
            begin(second, scene, level)
            assert scene.receiver.on(second).process(Message(id="a"), scene.handler(second)).replayed
        second.commit()
    scene.place.ask(f"DROP TABLE {scene.place.effects}_of_others")
    assert scene.place.count("a") == 1


def begin(connection: Any, scene: Scene, level: str) -> None:
    if scene.place.dialect == "postgresql":
        connection.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
    else:
        connection.cursor().execute(f"SET SESSION TRANSACTION ISOLATION LEVEL {level}")


def test_an_answer_that_is_not_committed_is_nobodys_answer(mariadb_scene: Scene) -> None:
    """At READ UNCOMMITTED everything could be read; what may yet be rolled back is given to nobody all the same."""
    scene, rejecting = mariadb_scene, Policy(busy="reject")
    with closing(scene.connect()) as first, closing(scene.connect()) as second:
        begin(second, scene, "READ UNCOMMITTED")
        scene.receiver.on(first).process(Message(id="a"), scene.handler(first))
        with pytest.raises(InProgress):
            scene.receiver.on(second).process(Message(id="a"), scene.handler(second), policy=rejecting)
        first.rollback()
        outcome = scene.receiver.on(second).process(Message(id="a"), scene.handler(second), policy=rejecting)
        second.commit()
    assert not outcome.replayed
    assert scene.place.count("a") == 1


@pytest.mark.parametrize("level", LEVELS)
def test_a_crowd_on_few_keys(scene: Scene, level: str) -> None:
    """Threads process the same keys, roll back at random, retry what the engine refuses: each effect happens once."""
    keys = [f"k{number}" for number in range(6)]
    crowd, rounds = (4, 6) if scene.place.dialect != "sqlite" else (3, 3)
    refused: list[BaseException] = []

    class Changed(Exception):
        """The user's mind."""

    def worker(seed: int) -> None:
        random = Random(seed)

        def body(connection: Any) -> None:
            if scene.place.dialect != "sqlite":
                begin(connection, scene, level)
            on = scene.receiver.on(connection)
            chosen = sorted(random.sample(keys, 2))
            if random.random() < 0.5:
                on.process_batch([Message(id=id) for id in chosen], scene.handler(connection))
            else:
                for id in chosen:
                    on.process(Message(id=id), scene.handler(connection))
            if random.random() < 0.4:
                raise Changed

        for _ in range(rounds):
            try:
                retrying(scene.transaction, body, tries=50)
            except Changed:
                pass
            except BaseException as error:
                refused.append(error)
                raise

    threads = [threading.Thread(target=worker, args=(seed,)) for seed in range(crowd)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not refused
    with scene.transaction() as connection:
        for id in keys:
            scene.receiver.on(connection).process(Message(id=id), scene.handler(connection))
    assert [scene.place.count(id) for id in keys] == [1] * len(keys)


def test_batches_in_opposite_order_do_not_deadlock(server_scene: Scene) -> None:
    """Keys are claimed in one order by everybody, whatever the order of the messages."""
    scene = server_scene
    ids = [f"k{number}" for number in range(20)]
    errors: list[BaseException] = []
    ready = threading.Barrier(4)

    def worker(number: int) -> None:
        messages = [Message(id=id) for id in (ids if number % 2 else reversed(ids))]
        try:
            with scene.transaction() as connection:
                ready.wait(30)
                scene.receiver.on(connection).process_batch(messages, scene.handler(connection))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=worker, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert [scene.place.count(id) for id in ids] == [1] * len(ids)


def test_neighbouring_new_keys_do_not_wait_for_each_other(server_scene: Scene) -> None:
    """No gap between keys is locked, at any isolation: two open transactions claim keys side by side.

    PostgreSQL may find, at SERIALIZABLE, that both have read the same pages; then one is asked to try again.
    """
    scene = server_scene
    for level in LEVELS:
        with closing(scene.connect()) as first, closing(scene.connect()) as second:
            for number, connection in enumerate((first, second, first, second)):
                if number < 2:
                    begin(connection, scene, level)
                id = f"{level}-{number}".replace(" ", "-")
                scene.receiver.on(connection).process(Message(id=id), lambda message: None)
            first.commit()
            try:
                second.commit()
            except psycopg.errors.SerializationFailure:
                assert level == "SERIALIZABLE"


def test_sqlite_asks_for_a_retry_when_a_reader_wants_to_write(tmp_path: Path) -> None:
    """A transaction that has read before others wrote can't claim any more: SQLite says so, and a new one can."""
    place = Place("sqlite", f"sqlite:///{tmp_path / 'app.db'}")
    place.prepare()
    scene = Scene(place)
    with closing(scene.connect()) as reader:
        reader.execute("BEGIN")
        reader.execute(f"SELECT * FROM {place.effects}").fetchall()
        with scene.transaction() as writer:
            scene.receiver.on(writer).process(Message(id="a"), scene.handler(writer))
        with pytest.raises(sqlite3.OperationalError) as refused:
            scene.receiver.on(reader).process(Message(id="a"), scene.handler(reader))
        assert is_retryable(refused.value)
        reader.rollback()
        assert scene.receiver.on(reader).process(Message(id="a"), scene.handler(reader)).replayed
    scene.receiver.close()


def test_sqlite_records_beside_the_tables_of_an_application(tmp_path: Path) -> None:
    """A file that has other tables is refused, with a word on how to say that it is one's own; then it is shared."""
    path = tmp_path / "app.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE payments (id TEXT)")
        with pytest.raises(StoreError, match="beside=yes"):
            Receiver(f"sqlite:///{path}")
        with Receiver(f"sqlite:///{path}?beside=yes") as receiver, connection:
            insert = "INSERT INTO payments VALUES ('a')"
            receiver.on(connection).process(
                Message(id="a"), lambda message: connection.execute(insert).rowcount
            )
        assert connection.execute("SELECT count(*) FROM payments").fetchone() == (1,)
    Receiver(f"sqlite:///{path}").close()  # from now on it is known


# Retrying


def test_only_what_may_help_is_retried(scene: Scene) -> None:
    """A handler's own error is told at once; a deadlock or a key in progress brings another transaction."""
    begun: list[Any] = []

    def begin_one() -> Any:
        begun.append(1)
        return scene.transaction()

    def fail(connection: Any) -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        retrying(begin_one, fail)
    assert len(begun) == 1

    def busy(connection: Any) -> str:
        if len(begun) < 4:
            raise InProgress(key="k", retry_after=0.001)
        return "at last"

    assert retrying(begin_one, busy) == "at last"
    assert len(begun) == 4
    begun.clear()
    with pytest.raises(InProgress):
        retrying(begin_one, busy, tries=2)
    with pytest.raises(UsageError):
        retrying(begin_one, busy, tries=0)


def lost_anywhere(scene: Scene, proxied: Place) -> int:
    """Lose every reply that there is to lose, one in each story; how many there were."""
    behind = Scene(proxied)
    behind.receiver.close()
    lost = 0
    with FaultProxy(scene.place.url) as proxy:
        elsewhere = Scene(Place(scene.place.dialect, proxy.url, scene.place.name))
        for nth in range(1, 60):
            id = f"lost-{nth}"
            runs: list[int] = []

            def body(connection: Any, id: str = id, runs: list[int] = runs) -> str:
                runs.append(1)
                on = scene.receiver.on(connection)
                return on.process(Message(id=id), scene.handler(connection)).value

            proxy.lose_reply(nth)
            assert retrying(elsewhere.transaction, body) == id
            assert scene.place.count(id) == 1
            if proxy.fired == lost:
                break
            lost = proxy.fired
        proxy.heal()
        elsewhere.receiver.close()
    return lost


def test_a_transaction_that_keeps_errors_to_itself_is_refused() -> None:
    """Else its body would run for ever."""

    async def fail(_: object) -> NoReturn:
        raise ValueError

    with pytest.raises(UsageError, match="to itself"):
        retrying(lambda: suppress(ZeroDivisionError), lambda _: 1 // 0)
    with pytest.raises(UsageError, match="to itself"):
        asyncio.run(aretrying(silently, fail))


@asynccontextmanager
async def silently() -> AsyncIterator[None]:
    with suppress(ValueError):
        yield


def test_what_breaks_elsewhere_is_no_reason_to_run_again(scene: Scene) -> None:
    """A handler that loses its connection to another service has failed. The transaction's own one still answers."""
    runs: list[str] = []

    def handler(message: Message) -> NoReturn:
        runs.append(message.id)
        raise ConnectionResetError("by a service")

    def one(connection: Any) -> Any:
        return scene.receiver.on(connection).process(Message(id="a"), handler)

    def batch(connection: Any) -> Any:
        return scene.receiver.on(connection).process_batch([Message(id="b")], handler)[0].unwrap()

    for body in (one, batch):
        with pytest.raises(ConnectionResetError, match="by a service"):
            retrying(scene.transaction, body)
    assert runs == ["a", "b"]


def test_a_lost_reply_is_settled_by_asking_again(server_scene: Scene) -> None:
    """Whichever reply is lost, that of COMMIT among them: the transaction is run again, the effect happened once."""
    assert lost_anywhere(server_scene, server_scene.place) >= 5


def test_a_lost_reply_on_an_event_loop(postgres_scene: Scene) -> None:
    """The same for coroutines."""
    scene = postgres_scene

    async def story() -> None:
        lost = 0
        with FaultProxy(scene.place.url) as proxy:
            for nth in range(1, 60):
                id = f"lost-{nth}"

                async def body(connection: Any, id: str = id) -> str:
                    async def handler(message: Message) -> str:
                        await connection.execute(f"INSERT INTO {scene.place.effects} VALUES ('{id}')")
                        return message.id

                    return (await scene.receiver.on(connection).aprocess(Message(id=id), handler)).value

                proxy.lose_reply(nth)
                assert await aretrying(lambda: connecting(proxy.url), body) == id
                assert scene.place.count(id) == 1
                if proxy.fired == lost:
                    break
                lost = proxy.fired
        assert lost >= 5

    class connecting:
        def __init__(self, url: str) -> None:
            self.url = url

        async def __aenter__(self) -> Any:
            self.connection = await psycopg.AsyncConnection.connect(self.url)
            return await self.connection.__aenter__()

        async def __aexit__(self, *error: object) -> None:
            await self.connection.__aexit__(*error)

    asyncio.run(story())


# What it costs


def test_a_call_leaves_nothing_to_collect(scene: Scene) -> None:
    """No object waits for the garbage collector. Other tests' threads may leave some during one call, not all."""

    def left_by(id: str) -> int:
        with scene.transaction() as connection:
            gc.collect()
            gc.disable()
            try:
                scene.receiver.on(connection).process(Message(id=id), lambda message: 1)
                return gc.collect()
            finally:
                gc.enable()

    left_by("first")
    assert any(left_by(f"m{number}") == 0 for number in range(20))


def test_round_trips(postgres_scene: Scene) -> None:
    """Over psycopg a new key takes the five that it takes by hand: BEGIN, claim, work, complete, COMMIT."""
    scene = postgres_scene
    with FaultProxy(scene.place.url) as proxy, closing(psycopg.connect(proxy.url)) as connection:

        def trips(id: str, handler: Callable[[Message], Any]) -> int:
            before = proxy.bursts
            with connection.transaction():
                scene.receiver.on(connection).process(Message(id=id), handler)
            return proxy.bursts - before

        # Once in a process it looks whether the table is there.
        assert trips("first", scene.handler(connection)) == 6
        assert trips("new", scene.handler(connection)) == 5
        assert trips("idle", lambda message: None) == 4
        assert trips("new", scene.handler(connection)) == 4


def test_round_trips_of_a_batch(postgres_scene: Scene) -> None:
    """A hundred claims are one, so are their completions; each handler has one beside its own."""
    scene = postgres_scene
    with FaultProxy(scene.place.url) as proxy, closing(psycopg.connect(proxy.url)) as connection:
        messages = [Message(id=f"m{number}") for number in range(100)]
        scene.receiver.on(connection).process(Message(id="first"), lambda message: None)
        before = proxy.bursts
        scene.receiver.on(connection).process_batch(messages, lambda message: None)
        assert proxy.bursts - before <= 3 + len(messages)
        connection.commit()
        before = proxy.bursts
        scene.receiver.on(connection).process_batch(messages, lambda message: None)
        assert proxy.bursts - before <= 2


def test_what_psycopg_forgets_is_prepared_again(postgres_scene: Scene) -> None:
    """Psycopg has everything that is prepared forgotten at a rollback; whatever its user does, nothing is missed."""
    scene = postgres_scene
    random = Random(3)

    def fail(message: Message) -> None:
        raise ValueError("no")

    with closing(scene.connect()) as connection:
        for number in range(60):
            on = scene.receiver.on(connection)
            id = f"m{number if random.random() < 0.7 else random.randrange(number + 1)}"
            if random.random() < 0.3:
                connection.execute("SELECT %s::text", ("x",), prepare=True)
            if random.random() < 0.2:
                with pytest.raises(ValueError, match="no"):
                    on.process(Message(id=f"{id}-fails"), fail)
            on.process(Message(id=id), scene.handler(connection))
            ends = (
                connection.commit,
                connection.rollback,
                lambda: connection.execute("ROLLBACK"),
                lambda: None,
            )
            random.choice(ends)()
        with connection.pipeline():  # a pipeline of the user's own
            assert scene.receiver.on(connection).process(Message(id="p"), lambda message: 1).value == 1
        connection.prepare_threshold = None
        assert scene.receiver.on(connection).process(Message(id="q"), lambda message: 1).value == 1
        connection.commit()


# Adapters


def test_statements_are_in_one_style(scene: Scene) -> None:
    """``$1`` on every engine, in any order and more than once; a percent sign is nothing special."""
    with closing(scene.connect()) as connection:
        adapter = adapt(connection)
        assert adapt(adapter) is adapter

        async def story() -> Any:
            text = "::text" if adapter.dialect == "postgresql" else ""
            like = "'%'" if adapter.dialect != "postgresql" else "'%'::text"
            sql = f"SELECT $2{text}, $1{text}, $2{text}, {like}"
            return (await adapter.execute(sql, ("a", "b%s"))).rows

        assert finished_rows(story()) == [("b%s", "a", "b%s", "%")]
        connection.rollback()


def finished_rows(coroutine: Any) -> Any:
    from effectonce._blocking import run

    return run(coroutine)


def test_codes_of_errors(scene: Scene, postgres: HasURL) -> None:
    """What an engine says is read from the driver's error; what is no database's error has no code."""
    with closing(scene.connect()) as connection, pytest.raises(Exception, match="nowhere") as caught:
        connection.cursor().execute("SELECT * FROM nowhere")
    assert code_of(caught.value) == {"sqlite": 1, "postgresql": "42P01", "mysql": 1146}[scene.place.dialect]
    assert code_of(ValueError(1213)) is None
    assert not is_retryable(ValueError("no"))


# Whose table, and whose session


def test_the_search_path_of_a_connection_leads_to_no_other_table(postgres_scene: Scene) -> None:
    """The record is where the receiver has its own, also when the connection would see another receiver's first."""
    scene, name = postgres_scene, f"records_{postgres_scene.place.name}"
    scene.place.ask("CREATE SCHEMA elsewhere")
    try:
        with Receiver(f"{scene.place.store_url}&schema=elsewhere") as other:
            other.get("nothing")
        scene.receiver.get("nothing")
        with closing(scene.connect(options="-c search_path=elsewhere,public")) as connection:
            on = scene.receiver.on(connection)
            for id_, status in (("a", "executed"), ("a", "replayed"), ("b", "executed")):
                assert on.process(Message(id=id_), scene.handler(connection)).status == status
            connection.commit()
        for id_ in ("a", "b"):
            assert scene.receiver.process(Message(id=id_), lambda _: "again").replayed
        assert scene.place.ask(f"SELECT count(*) FROM elsewhere.{name}") == [(0,)]
    finally:
        scene.place.ask("DROP SCHEMA elsewhere CASCADE")


def test_a_table_that_was_seen_once_is_the_one(postgres_scene: Scene) -> None:
    """A receiver that is only used in transactions keeps to the table that the first of them saw."""
    scene = postgres_scene
    scene.place.ask("CREATE SCHEMA elsewhere")
    try:
        with Receiver(f"{scene.place.store_url}&schema=elsewhere") as other:
            other.get("nothing")
        with closing(scene.connect()) as connection:
            statuses = []
            for path in ("public", "elsewhere"):
                connection.execute(f"SET search_path = {path}, public")
                on = scene.receiver.on(connection)
                statuses.append(on.process(Message(id="a"), scene.handler(connection)).status)
                connection.commit()
        assert statuses == ["executed", "replayed"]
    finally:
        scene.place.ask("DROP SCHEMA elsewhere CASCADE")


def test_the_current_database_of_a_connection_is_not_asked(mariadb_scene: Scene) -> None:
    """The record is in the database of the receiver's URL."""
    scene, other = mariadb_scene, f"other_{mariadb_scene.place.name}"
    home = scene.place.mysql()["database"]
    scene.place.ask(f"CREATE DATABASE {other}")
    try:
        with Receiver(scene.place.store_url.replace(f"/{home}?", f"/{other}?")) as elsewhere:
            elsewhere.get("nothing")
        with closing(scene.connect()) as connection:
            connection.select_db(other)
            scene.receiver.on(connection).process(Message(id="a"), lambda _: "first")
            connection.commit()
        assert scene.receiver.process(Message(id="a"), lambda _: "second").value == "first"
    finally:
        scene.place.ask(f"DROP DATABASE {other}")


def test_last_insert_id_is_the_users(mariadb_scene: Scene) -> None:
    """What a handler refers to as the row that was added last is that row, also after a replay and in a batch."""
    scene, table = mariadb_scene, f"orders_{mariadb_scene.place.name}"
    scene.place.ask(f"CREATE TABLE {table} (id BIGINT AUTO_INCREMENT PRIMARY KEY)")
    try:
        with closing(scene.connect()) as connection, connection.cursor() as cursor:
            cursor.execute(f"INSERT INTO {table} VALUES (NULL)")
            added = cursor.lastrowid

            def last(*_: Any) -> Any:
                cursor.execute("SELECT LAST_INSERT_ID()")
                return cursor.fetchone()[0]

            on = scene.receiver.on(connection)
            assert on.process(Message(id="a"), last).value == added
            assert on.process(Message(id="a"), last).replayed
            outcomes = on.process_batch([Message(id="b"), Message(id="c")], last)
            assert [outcome.value for outcome in outcomes] == [added, added]
            assert last() == added
            connection.rollback()
    finally:
        scene.place.ask(f"DROP TABLE {table}")


def test_a_session_with_safe_updates_records_one_by_one(mariadb_scene: Scene) -> None:
    """A session that refuses an UPDATE without a key in it is no reason to refuse a batch."""
    scene = mariadb_scene
    with closing(scene.connect(init_command="SET sql_safe_updates = 1")) as connection:
        messages = [Message(id=name) for name in "abc"]
        outcomes = scene.receiver.on(connection).process_batch(messages, scene.handler(connection))
        connection.commit()
    assert [outcome.status for outcome in outcomes] == ["executed"] * 3
    assert scene.receiver.process(Message(id="b"), lambda _: "again").replayed


def test_a_session_without_an_encoding(postgres_scene: Scene) -> None:
    """What it gives as bytes is told back to it as it was."""
    scene = postgres_scene
    with closing(scene.connect(client_encoding="SQL_ASCII")) as connection:
        outcome = scene.receiver.on(connection).process(
            Message(id="a"), lambda _: "done", policy=Policy(busy="reject")
        )
        connection.commit()
    assert (outcome.value, scene.receiver.process(Message(id="a"), lambda _: "again").value) == (
        "done",
        "done",
    )


def test_a_session_that_rounds_numbers(postgres_scene: Scene) -> None:
    """What it is told of times is not all of them; an attempt that was left behind is taken over all the same."""
    from sqlalchemy import create_engine

    scene, store = postgres_scene, postgres_scene.receiver.store
    engine = create_engine(
        scene.place.sqlalchemy("psycopg"), connect_args={"options": "-c extra_float_digits=0"}
    )
    for id_ in "abcdefgh":
        key = scene.receiver.key_of(Message(id=id_))
        blocking(store.claim(Claim(key, new_owner(), b"", 0.001, 60.0)))
    last = blocking(store.get(key))
    assert last is not None
    wait_until(lambda: blocking(store.now()) > last.lease_until)
    for id_ in "abcdefgh":
        with engine.begin() as connection:
            outcome = scene.receiver.on(connection).process(Message(id=id_), lambda message: message.id)
        assert (outcome.status, outcome.attempt) == ("executed", 2)
    engine.dispose()


def test_another_programs_table_is_left_alone(server_scene: Scene) -> None:
    """Also where a user's connection is the first that sees it."""
    place = Place(server_scene.place.dialect, server_scene.place.url)
    table = f"records_{place.name}"
    place.ask(f"CREATE TABLE {table} (id int, fence bigint)")
    try:
        with Receiver(place.store_url) as receiver, server_scene.transaction() as connection:
            with pytest.raises(StoreError, match="another program"):
                receiver.on(connection).process(Message(id="a"), server_scene.handler(connection))
            connection.rollback()
        assert place.ask(f"SELECT count(*) FROM {table}") == [(0,)]
    finally:
        place.ask(f"DROP TABLE {table}")
    assert server_scene.place.count("a") == 0


def test_a_key_that_a_connection_can_not_express(postgres_scene: Scene) -> None:
    """The error says which letter, and what to do; nothing was claimed, and the transaction goes on."""
    scene = postgres_scene
    with closing(scene.connect(client_encoding="LATIN1")) as connection:
        for _ in range(2):  # before its transaction has begun, and after
            with pytest.raises(UsageError, match="client_encoding has no '漢'"):
                scene.receiver.on(connection).process(Message(id="漢"), lambda _: "never")
            scene.effect(connection, "a")
        connection.commit()
    assert scene.place.count("a") == 2


@pytest.mark.parametrize("word", ["COMMIT", "ROLLBACK"])
@pytest.mark.parametrize("driver", list(DRIVERS))
def test_a_statement_that_ends_the_transaction_is_found_out(
    request: pytest.FixtureRequest, tmp_path: Path, driver: str, word: str
) -> None:
    """Whatever the driver knows of it: a handler has executed COMMIT or ROLLBACK, and gets no result for that."""
    dialect, kind = DRIVERS[driver]
    place = place_of(request, dialect, tmp_path)
    place.prepare()

    async def story() -> None:
        desk = kind(place)
        await desk.open()

        async def end(_: Message) -> None:
            await desk.effect("a")
            await desk.execute(word)

        try:
            with (
                Receiver(place.store_url) as receiver,
                pytest.raises(UsageError, match="was ended meanwhile"),
            ):
                on = receiver.on(desk.connection)
                if desk.awaits:
                    await on.aprocess(Message(id="a"), end)
                else:
                    on.process(Message(id="a"), lambda message: finished(end(message)))
        finally:
            with suppress(Exception):  # many a driver does not understand either
                await desk.close()

    asyncio.run(story())
    place.remove()
