"""Connections to PostgreSQL through asyncpg, for callers on an event loop who already have it.

asyncpg sends one statement at a time, so the kinds of steps that come in one turn of a loop go side by side, each on a
connection of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import asyncpg  # type: ignore[import-untyped]

from ..errors import UsageError
from ._postgres_sql import (
    PATIENCE,
    STALE,
    Answer,
    Call,
    Closed,
    Lost,
    Refusal,
    TimedOut,
    check_version,
    settings,
)
from ._urls import shown

T = TypeVar("T")
Connect = Callable[[], Awaitable[Any]]

BROKEN = (OSError, asyncpg.InterfaceError, asyncpg.InternalClientError, asyncpg.PostgresConnectionError)

_of_parents: list[Any] = []

KNOWN = {
    "host", "port", "user", "password", "passfile", "dbname", "database", "sslmode", "sslcert", "sslkey", "sslpassword",
    "sslrootcert", "sslcrl", "sslnegotiation", "ssl_min_protocol_version", "ssl_max_protocol_version",
    "target_session_attrs", "krbsrvname", "gsslib", "application_name", "options",
}  # fmt: skip
"""What asyncpg understands in a URL. It takes anything else for a setting of the server."""


def dialler(url: str, seconds: float, prepare: bool) -> Connect:
    """What opens connections to the database that a URL names."""
    parts = urlsplit(url)
    chosen = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := sorted(set(chosen) - KNOWN - {"connect_timeout"}):
        raise UsageError(f"{shown(url)!r} has the option {unknown[0]!r}, which asyncpg does not know.")
    patience = float(chosen.pop("connect_timeout", seconds))
    url = urlunsplit(parts._replace(query=urlencode(chosen)))
    parameters: dict[str, Any] = {
        "timeout": patience,
        "server_settings": {
            "application_name": chosen.get("application_name", "effectonce"),
            **(settings(seconds) if prepare else {}),
        },
        **({} if prepare else {"statement_cache_size": 0}),
    }

    async def connect() -> Any:
        connection = None
        try:
            connection = await asyncpg.connect(url, **parameters)
            check_version(connection.get_server_version().major)
            await connection.set_type_codec(
                "uuid", schema="pg_catalog", encoder=bytes, decoder=bytes, format="binary"
            )
        except BaseException as error:
            if connection is not None:
                connection.terminate()
            if isinstance(error, (asyncpg.PostgresError, *BROKEN, TimeoutError)):
                raise Lost(str(error) or type(error).__name__) from error
            if isinstance(error, ValueError):  # which may quote any part of the URL
                raise UsageError(
                    f"{shown(url)!r} is no URL that asyncpg understands. Check its port."
                ) from None
            raise
        return connection

    return connect


class LoopWires:
    """asyncpg's connections for the callers of one event loop."""

    def __init__(self, connect: Connect, prepare: bool, seconds: float, most: int) -> None:
        self._connect = connect
        self._seconds, self._most = seconds, most
        self._stack: list[Any] = []
        self._all: set[Any] = set()
        self._closed = False

    async def run(self, calls: Sequence[Call], together: bool = False) -> Sequence[Answer]:
        """Have statements executed, side by side, or one after the other in one transaction."""
        if together:
            return await self._patiently(self._fetch_together, calls)
        if len(calls) == 1:
            return [await self._patiently(self._fetch, calls[0])]
        answers: list[Answer] = []
        while few := calls[len(answers) : len(answers) + self._most]:  # no more connections than are kept
            answers += await asyncio.gather(*(self._patiently(self._fetch, call) for call in few))
        return answers

    def close(self) -> None:
        """Close every connection. To be called on the loop, or when it does not run any more."""
        self._closed = True
        self._stack.clear()  # connections hold their loop, which holds this
        for connection in list(self._all):
            self._drop(connection)

    def forget(self) -> None:
        """Let go of everything in a forked child; closing would be a word to the parent's server."""
        _of_parents.extend(self._all)

    async def _patiently(self, fetch: Callable[[Any, Any], Awaitable[T]], asked: Any) -> T:
        """Ask on a connection that is there. If it broke while nobody used it, ask again on a new one."""
        while self._stack:
            connection = self._stack.pop()
            if connection.is_closed():
                self._drop(connection)
                continue
            try:
                return await self._use(connection, fetch, asked)
            except TimedOut:
                raise
            except Lost:
                while self._stack:  # what broke this one broke them all
                    self._drop(self._stack.pop())
        return await self._use(await self._open(), fetch, asked)

    async def _use(self, connection: Any, fetch: Callable[[Any, Any], Awaitable[T]], asked: Any) -> T:
        try:
            answer = await fetch(connection, asked)
        except TimeoutError as error:
            self._drop(connection)
            raise TimedOut(f"no answer in {self._seconds:g} s") from error
        except BROKEN as error:
            self._drop(connection)
            raise Lost(str(error) or type(error).__name__) from error
        except asyncpg.PostgresError as error:
            # No statement is to blame: a transaction began or ended.
            self._drop(connection)
            raise Refusal(getattr(error, "sqlstate", ""), str(error)) from error
        except BaseException:  # cancelled, perhaps: nobody knows what is still on its way
            self._drop(connection)
            raise
        if self._closed or len(self._stack) >= self._most:
            self._drop(connection)
        else:
            self._stack.append(connection)
        return answer

    async def _fetch(self, connection: Any, call: Call, patience: int = 1) -> Answer:
        seconds = self._seconds * patience
        try:
            answer: Answer = await connection.fetch(call.statement.text, *call.values, timeout=seconds)
        except asyncpg.PostgresError as error:
            code: str = getattr(error, "sqlstate", "")
            if connection.is_closed() or code in STALE:
                raise Lost(str(error)) from error
            return Refusal(code, str(error))
        return answer

    async def _fetch_together(self, connection: Any, calls: Sequence[Call]) -> Sequence[Answer]:
        answers: list[Answer] = []
        transaction = connection.transaction()
        await transaction.start()
        for call in calls:
            answers.append(await self._fetch(connection, call, PATIENCE))
            if isinstance(answers[-1], Refusal):
                await transaction.rollback()
                return answers
        await transaction.commit()
        return answers

    async def _open(self) -> Any:
        if self._closed:
            raise Closed("the store is closed")
        connection = await self._connect()
        self._all.add(connection)
        return connection

    def _drop(self, connection: Any) -> None:
        self._all.discard(connection)
        with suppress(RuntimeError):  # its loop is closed
            connection.terminate()
