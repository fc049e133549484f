"""Desks of those who have their connections from a framework: SQLAlchemy's four, its scoped sessions, and Django's."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from tests.integration.transaction_desks import AsyncDesk, Desk


class SQLAlchemy(Desk):
    driver: str
    session = False

    async def open(self) -> None:
        from sqlalchemy import create_engine
        from sqlalchemy.orm import Session

        self.engine = create_engine(self.place.sqlalchemy(self.driver))
        self.connection = Session(self.engine) if self.session else self.engine.connect()

    async def execute(self, sql: str) -> Any:
        from sqlalchemy import text

        self.connection.execute(text(sql))

    async def savepoint(self) -> None:
        self.nested = self.connection.begin_nested()

    async def roll_back_to_savepoint(self) -> None:
        self.nested.rollback()

    async def release_savepoint(self) -> None:
        self.nested.commit()

    async def close(self) -> None:
        self.connection.close()
        self.engine.dispose()


class ScopedSession(SQLAlchemy):
    """The session of a thread, by the object that stands for it."""

    driver = "psycopg"

    async def open(self) -> None:
        from sqlalchemy import create_engine
        from sqlalchemy.orm import scoped_session, sessionmaker

        self.engine = create_engine(self.place.sqlalchemy(self.driver))
        self.connection = scoped_session(sessionmaker(self.engine))

    async def close(self) -> None:
        self.connection.remove()
        self.engine.dispose()


class SQLAlchemyAsync(AsyncDesk):
    driver: str
    session = False

    async def open(self) -> None:
        from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

        self.engine = create_async_engine(self.place.sqlalchemy(self.driver))
        self.connection = AsyncSession(self.engine) if self.session else await self.engine.connect()

    async def execute(self, sql: str) -> Any:
        from sqlalchemy import text

        await self.connection.execute(text(sql))

    async def savepoint(self) -> None:
        self.nested = await self.connection.begin_nested()

    async def roll_back_to_savepoint(self) -> None:
        await self.nested.rollback()

    async def release_savepoint(self) -> None:
        await self.nested.commit()

    async def close(self) -> None:
        await super().close()
        await self.engine.dispose()


class AsyncScopedSession(SQLAlchemyAsync):
    """The session of a task, by the object that stands for it."""

    driver = "asyncpg"

    async def open(self) -> None:
        from sqlalchemy.ext.asyncio import async_scoped_session, async_sessionmaker, create_async_engine

        self.engine = create_async_engine(self.place.sqlalchemy(self.driver))
        self.connection = async_scoped_session(async_sessionmaker(self.engine), asyncio.current_task)


class Django(Desk):
    """``transaction.atomic`` over a connection of its own, which Django knows by a name that nobody else has."""

    driver: str

    async def open(self) -> None:
        import django
        from django.conf import settings
        from django.db import connections
        from django.db.utils import ConnectionHandler

        if not settings.configured:
            settings.configure()
        django.setup()
        # Stories are told by coroutines, which block here as everywhere; Django would rather not.
        os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "yes"
        if self.driver == "mysql":
            import pymysql

            pymysql.version_info = (2, 2, 8, "final", 0)  # what Django asks of the driver that it knows
            pymysql.install_as_MySQLdb()
        handler = ConnectionHandler(
            {"default": {"ENGINE": f"django.db.backends.{self.driver}", **self.address()}}
        )
        self.connection = handler.create_connection("default")
        self.connection.alias = uuid4().hex
        connections[self.connection.alias] = self.connection
        self.blocks: list[Any] = []
        await self.savepoint()

    def address(self) -> dict[str, Any]:
        if self.place.dialect == "sqlite":
            return {"NAME": self.place.path, "OPTIONS": {"timeout": 30}}
        parts = urlsplit(self.place.url)
        names = ("NAME", "USER", "PASSWORD", "HOST", "PORT")
        return dict(
            zip(
                names,
                (parts.path[1:], parts.username, parts.password or "", parts.hostname, parts.port),
                strict=True,
            )
        )

    async def execute(self, sql: str) -> Any:
        with self.connection.cursor() as cursor:
            cursor.execute(sql)

    async def savepoint(self) -> None:
        """The outermost block is the transaction."""
        from django.db import transaction

        self.blocks.append(transaction.atomic(using=self.connection.alias))
        self.blocks[-1].__enter__()

    async def roll_back_to_savepoint(self) -> None:
        error = RuntimeError("undo it")
        self.blocks.pop().__exit__(RuntimeError, error, None)

    async def release_savepoint(self) -> None:
        self.blocks.pop().__exit__(None, None, None)

    async def commit(self) -> None:
        await self.release_savepoint()
        await self.savepoint()

    async def rollback(self) -> None:
        await self.roll_back_to_savepoint()
        await self.savepoint()

    async def close(self) -> None:
        from django.db import connections

        with suppress(Exception):
            await self.roll_back_to_savepoint()
        self.connection.close()
        del connections[self.connection.alias]
