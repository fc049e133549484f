"""Tables that plain statements make, each safe to repeat: the helper of ``effectonce migrate`` for all of them.

The database is the one that the application itself writes to. A store or an outbox knows its table and can tell whether
it is theirs; what is made here belongs to rules that work over the application's own connections.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from importlib import import_module
from typing import Any

from ..errors import StoreUnavailable, UsageError
from ..stores._urls import shown
from ..transactions import Dialect

Schema = Callable[[Dialect], Sequence[str]]
DIALECTS: dict[str, Dialect] = {
    "postgresql": "postgresql", "postgres": "postgresql", "postgresql+asyncpg": "postgresql",
    "mysql": "mysql", "mariadb": "mysql", "sqlite": "sqlite",
}  # fmt: skip
BUSY_SECONDS = 30.0
CONNECT_SECONDS = 10


def dialect_of(url: str) -> Dialect:
    """What the database that a URL names speaks."""
    scheme = url.partition("://")[0]
    if scheme not in DIALECTS:
        raise UsageError(
            f"{shown(url)!r} is no database for this. Give the URL of the one that the application writes to: "
            "postgresql://, mysql://, mariadb:// or sqlite:///."
        )
    return DIALECTS[scheme]


def ddl(url: str, schema: Schema) -> str:
    """The statements for a database, as a person would run them."""
    return "".join(f"{statement};\n\n" for statement in schema(dialect_of(url))).removesuffix("\n")


def make(url: str, schema: Schema) -> None:
    """Execute the statements. One of two who do so at the same moment may be told that it is there: then it is."""
    dialect = dialect_of(url)
    with _CONNECTIONS[dialect](url) as (connection, already_there, away):
        try:
            for statement in schema(dialect):
                try:
                    connection.cursor().execute(statement)
                except already_there:
                    connection.cursor().execute(statement)
        except away as error:
            why = " ".join(str(error).split())
            raise StoreUnavailable(f"{shown(url)} did not make the tables: {why}") from error


Connected = tuple[Any, Any, Any]
"""A connection that commits each statement; errors of a race that was lost; errors of the driver."""


@contextmanager
def _sqlite(url: str) -> Iterator[Connected]:
    path = url.removeprefix("sqlite://").partition("?")[0].removeprefix("/")
    if path in ("", ":memory:"):
        raise UsageError(f"{shown(url)!r} names no file. Write sqlite:///app.db.")
    try:
        connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)
    except sqlite3.Error as error:
        raise _unreached(url, error) from error
    with closing(connection):
        yield connection, (), sqlite3.Error


@contextmanager
def _postgres(url: str) -> Iterator[Connected]:
    from ..outbox._postgres import ALREADY_THERE, _for_libpq

    psycopg = import_module("psycopg")  # not above: the outbox says which extra to install, if it is missing
    try:
        connection = psycopg.connect(_for_libpq(url), autocommit=True, connect_timeout=CONNECT_SECONDS)
    except psycopg.Error as error:
        raise _unreached(url, error) from error
    with closing(connection):
        yield connection, ALREADY_THERE, psycopg.Error


@contextmanager
def _mysql(url: str) -> Iterator[Connected]:
    from ..outbox._mysql import _address, pymysql

    address = _address(url)
    try:
        connection = pymysql.connect(**address.options(), ssl_disabled=address.tls == "no")
    except pymysql.MySQLError as error:
        raise _unreached(url, error) from error
    with closing(connection):
        yield connection, (), pymysql.MySQLError


def _unreached(url: str, error: Exception) -> StoreUnavailable:
    return StoreUnavailable(
        f"{shown(url)} gave no answer: {' '.join(str(error).split())}. Check the URL, and that the database runs."
    )


_CONNECTIONS = {"sqlite": _sqlite, "postgresql": _postgres, "mysql": _mysql}
