"""What the tests of versions share: every driver in one shape, with the user's side of a transaction."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from effectonce._blocking import run
from effectonce.transactions import adapt
from effectonce.versions import schema


class Connection:
    """A connection as its user has it: begun, committed and rolled back as its driver has it done."""

    dialect = "sqlite"
    raw: Any

    def __init__(self, url: str) -> None:
        self.open(url)
        self.begin()

    def open(self, url: str) -> None:
        self.raw = sqlite3.connect(url, timeout=20, check_same_thread=False)

    def begin(self) -> None:
        """Most drivers begin by themselves."""

    def commit(self) -> None:
        self.raw.commit()
        self.begin()

    def rollback(self) -> None:
        self.raw.rollback()
        self.begin()

    def sql(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """One statement of the user's own."""
        return run(adapt(self.raw).execute(statement, values)).rows

    def on(self, guard: Any) -> Any:
        """``guard.on(connection)``."""
        return guard.on(self.raw)

    def close(self) -> None:
        self.raw.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Awaited:
    """Methods with an ``a``, called as if they had none."""

    def __init__(self, run: Callable[..., Any], inner: Any) -> None:
        self._run, self._inner = run, inner

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self._run(getattr(self._inner, f"a{name}")(*args, **kwargs))


class AsyncConnection(Connection):
    """The same on an event loop, which runs only while something is awaited."""

    def __init__(self, url: str) -> None:
        self.runner = asyncio.Runner()
        super().__init__(url)

    def commit(self) -> None:
        self.runner.run(self.raw.commit())
        self.begin()

    def rollback(self) -> None:
        self.runner.run(self.raw.rollback())
        self.begin()

    def sql(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        return self.runner.run(adapt(self.raw).execute(statement, values)).rows

    def on(self, guard: Any) -> Any:
        return Awaited(self.runner.run, guard.on(self.raw))

    def close(self) -> None:
        self.runner.run(self.end())
        self.runner.close()

    async def end(self) -> None:
        await self.raw.close()


class Psycopg(Connection):
    dialect = "postgresql"

    def open(self, url: str) -> None:
        import psycopg

        self.raw = psycopg.connect(url)


class AsyncPsycopg(AsyncConnection):
    dialect = "postgresql"

    def open(self, url: str) -> None:
        import psycopg

        self.raw = self.runner.run(psycopg.AsyncConnection.connect(url))


class Asyncpg(AsyncConnection):
    dialect = "postgresql"

    def open(self, url: str) -> None:
        import asyncpg

        self.raw = self.runner.run(asyncpg.connect(url))

    def begin(self) -> None:
        self.transaction = self.raw.transaction()
        self.runner.run(self.transaction.start())

    def commit(self) -> None:
        self.runner.run(self.transaction.commit())
        self.begin()

    def rollback(self) -> None:
        self.runner.run(self.transaction.rollback())
        self.begin()


def mysql_options(url: str) -> dict[str, Any]:
    parts = urlsplit(url)
    return {
        "host": parts.hostname,
        "port": parts.port or 3306,
        "user": parts.username,
        "password": parts.password or "",
        "database": parts.path[1:],
    }


class PyMySQL(Connection):
    dialect = "mysql"

    def open(self, url: str) -> None:
        import pymysql

        self.raw = pymysql.connect(**mysql_options(url))


class Asyncmy(AsyncConnection):
    dialect = "mysql"

    def open(self, url: str) -> None:
        import asyncmy

        self.raw = self.runner.run(asyncmy.connect(**mysql_options(url)))

    async def end(self) -> None:
        await self.raw.ensure_closed()


class Alchemy(Connection):
    """SQLAlchemy's Session, over SQLite."""

    def open(self, url: str) -> None:
        from sqlalchemy import create_engine
        from sqlalchemy.orm import Session

        self.engine = create_engine(f"sqlite:///{url}")
        self.raw = Session(self.engine)

    def close(self) -> None:
        super().close()
        self.engine.dispose()


class AlchemyPostgres(Alchemy):
    dialect = "postgresql"

    def open(self, url: str) -> None:
        from sqlalchemy import create_engine

        self.engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
        self.raw = self.engine.connect()


DRIVERS = {
    "sqlite3": Connection,
    "sqlalchemy-session": Alchemy,
    "psycopg": Psycopg,
    "psycopg-async": AsyncPsycopg,
    "asyncpg": Asyncpg,
    "sqlalchemy-postgres": AlchemyPostgres,
    "pymysql": PyMySQL,
    "asyncmy": Asyncmy,
}

TEXT = {"sqlite": "TEXT", "postgresql": "text", "mysql": "VARCHAR(100)"}
DROPPED = (
    "effectonce_updates",
    "effectonce_positions",
    "effectonce_parked",
    "accounts",
    "members",
    "payments",
)


class Place:
    """An empty database of one engine, to be opened as often as needed."""

    def __init__(self, kind: type[Connection], url: str) -> None:
        self.kind, self.url, self.dialect = kind, url, kind.dialect
        text = TEXT[kind.dialect]
        self.make(
            *(f"DROP TABLE IF EXISTS {table}" for table in DROPPED),
            *schema(kind.dialect),  # type: ignore[arg-type]
            f"CREATE TABLE accounts (id {text} PRIMARY KEY, balance BIGINT, version BIGINT)",
            "INSERT INTO accounts VALUES ('acc-1', 10, 3)",
            f"CREATE TABLE members (tenant {text}, number BIGINT, name {text}, version BIGINT,"
            " PRIMARY KEY (tenant, number))",
            f"CREATE TABLE payments (id BIGINT PRIMARY KEY, account {text}, cents BIGINT)",
        )

    def make(self, *statements: str) -> None:
        """Have it done and committed."""
        with self.open() as connection:
            for statement in statements:
                connection.sql(statement)
            connection.commit()

    def open(self) -> Connection:
        return self.kind(self.url)

    def ask(self, statement: str) -> list[tuple[Any, ...]]:
        """What everybody sees."""
        with self.open() as connection:
            return connection.sql(statement)


@contextmanager
def waiting_for_locks(place: Place) -> Iterator[Callable[[], bool]]:
    """Whether some transaction of the server waits for another."""
    with place.open() as connection:

        def somebody_waits() -> bool:
            asked = {
                "postgresql": "SELECT COUNT(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'",
                "mysql": "SELECT variable_value FROM information_schema.global_status"
                " WHERE variable_name = 'INNODB_ROW_LOCK_CURRENT_WAITS'",
            }[place.dialect]
            found = int(connection.sql(asked)[0][0]) > 0
            connection.rollback()
            return bool(found)

        yield somebody_waits


def place_for(driver: str, request: Any, tmp_path: Path) -> Place:
    """The place of a driver, on a server that a fixture starts."""
    kind = DRIVERS[driver]
    servers = {"postgresql": "postgres", "mysql": "mariadb"}
    if server := servers.get(kind.dialect):
        return Place(kind, request.getfixturevalue(server).url)
    return Place(kind, str(tmp_path / "users.db"))
