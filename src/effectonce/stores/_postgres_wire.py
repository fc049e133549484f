"""One connection to PostgreSQL on psycopg's own interface to libpq: below its cursors, where a call costs half.

It sends a few statements at once, prepared when they are first used, and takes in their answers. Who waits for them, a
thread (``_postgres_threads``) or an event loop (``_postgres_loops``), is all that differs between the two colours.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import ceil
from typing import Any

import psycopg
from psycopg import pq
from psycopg.adapt import Transformer
from psycopg.conninfo import conninfo_to_dict

from ..errors import UsageError
from ._postgres_sql import STALE, Answer, Lost, Refusal, Statement, check_version, settings
from ._urls import shown

Encoded = tuple[Statement, list[bytes | None]]
Connect = Callable[[], "psycopg.Connection[Any]"]

OK, TUPLES, COMMAND = pq.ConnStatus.OK, pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK
SYNC, ABORTED = pq.ExecStatus.PIPELINE_SYNC, pq.ExecStatus.PIPELINE_ABORTED
SQLSTATE, MESSAGE = pq.DiagnosticField.SQLSTATE, pq.DiagnosticField.MESSAGE_PRIMARY


def parameters_of(url: str) -> dict[str, Any]:
    """What libpq makes of a URL."""
    try:
        return dict(conninfo_to_dict(url))
    except psycopg.ProgrammingError as error:
        # Other complaints may quote a password.
        why = f": {error}" if str(error).startswith("invalid URI query parameter") else ""
        raise UsageError(
            f"{shown(url)!r} is no URL that libpq understands{why.strip()}. Write postgresql://user:password@host/database."
        ) from None


def dialler(url: str, seconds: float, prepare: bool) -> Connect:
    """What opens connections to the database that a URL names."""
    given = parameters_of(url)
    usual = {"connect_timeout": ceil(seconds), "application_name": "effectonce"}
    parameters: dict[str, Any] = {**usual, **given, "client_encoding": "UTF8"}
    if prepare:
        said = ["-c " + f"{name}={value}".replace(" ", "\\ ") for name, value in settings(seconds).items()]
        parameters["options"] = " ".join([str(parameters.get("options", "")), *said])

    def connect() -> psycopg.Connection[Any]:
        try:
            connection = psycopg.connect(**parameters, autocommit=True)
        except psycopg.OperationalError as error:
            raise Lost(str(error)) from error
        try:
            check_version(connection.pgconn.server_version // 10000)
        except BaseException:
            connection.close()
            raise
        return connection

    return connect


def let_go(connection: psycopg.Connection[Any]) -> None:
    """Close a connection in a forked child without a word to the server: it is the parent's."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    with suppress(OSError, psycopg.Error):
        os.dup2(nowhere, connection.fileno())
    os.close(nowhere)
    connection.close()


class Wire:
    """One connection. It is used by one caller at a time.

    A single statement goes as such. Several go in libpq's pipeline mode, and so does one that has to be prepared first:
    it is still one round trip.
    """

    def __init__(self, connection: psycopg.Connection[Any], prepare: bool) -> None:
        self._connection = connection
        self._pg = connection.pgconn
        self._pg.nonblocking = 1
        self._prepare = prepare
        self._prepared: set[Statement] = set()
        self._loader = Transformer(connection)
        # What is to be answered and whether it only prepares; None where a transaction ends.
        self._sent: deque[tuple[Statement, bool] | None] = deque()
        self._syncs = 0  # how many more are to come in pipeline mode
        self._answers: list[Answer] = []
        self._committed = 0  # how many of them can't be refused any more
        self._why = Refusal("25P02", "an earlier statement failed")
        self.socket = self._pg.socket

    def send(self, calls: Sequence[Encoded], together: bool) -> bool:
        """Send statements, each a transaction of its own or all of them one; whether everything has left."""
        pg = self._pg
        try:
            if len(calls) == 1 and (calls[0][0] in self._prepared or not self._is_to_prepare(calls[0][0])):
                self._send_one(*calls[0])
            else:
                pg.enter_pipeline_mode()
                for statement, values in calls:
                    self._send_one(statement, values)
                    if not together:
                        self._sync()
                if together:
                    self._sync()
            return not pg.flush()
        except psycopg.OperationalError as error:
            raise self._lost() from error

    def _is_to_prepare(self, statement: Statement) -> bool:
        return self._prepare and bool(statement.name)

    def _send_one(self, statement: Statement, values: list[bytes | None]) -> None:
        pg = self._pg
        if not self._is_to_prepare(statement):
            pg.send_query_params(statement.sent, values, None, statement.formats, 1)
        else:
            if statement not in self._prepared and (statement, True) not in self._sent:
                pg.send_prepare(statement.name, statement.sent)
                self._sent.append((statement, True))
            pg.send_query_prepared(statement.name, values, statement.formats, 1)
        self._sent.append((statement, False))

    def _sync(self) -> None:
        self._pg.pipeline_sync()
        self._sent.append(None)
        self._syncs += 1

    def flush(self) -> bool:
        """Send more of what did not fit; whether everything has left."""
        try:
            self._pg.consume_input()  # a server that can't speak does not listen
            return not self._pg.flush()
        except psycopg.OperationalError as error:
            raise self._lost() from error

    def receive(self) -> list[Answer] | None:
        """Take in what has come, and give the answers when all of them are there."""
        pg = self._pg
        try:
            pg.consume_input()
            while not pg.is_busy():
                result = pg.get_result()
                if result is None:
                    if pg.status != OK:
                        raise self._lost()
                    if not self._syncs:
                        break
                elif result.status != SYNC:
                    self._take(result)
                else:
                    self._sent.popleft()
                    self._committed = len(self._answers)
                    self._syncs -= 1
                    if not self._syncs:
                        pg.exit_pipeline_mode()
                        break
            else:
                return None
        except psycopg.OperationalError as error:
            raise self._lost() from error
        answers, self._answers, self._committed = self._answers, [], 0
        return answers

    def close(self) -> None:
        """Hang up."""
        self._connection.close()

    def forget(self) -> None:
        """Let go in a forked child."""
        let_go(self._connection)

    def _take(self, result: pq.abc.PGresult) -> None:
        status = result.status
        if status not in (TUPLES, COMMAND, ABORTED):
            code, message = result.error_field(SQLSTATE), result.error_field(MESSAGE)
            self._why = Refusal((code or b"").decode(), (message or b"").decode(errors="replace"))
            if self._why.code in STALE:
                raise Lost(str(self._why))
        sent = self._sent.popleft() if self._sent and self._sent[0] else None
        if sent is None:  # all went well until it was to be committed
            self._answers[self._committed :] = [self._why] * (len(self._answers) - self._committed)
            return
        statement, only_prepares = sent
        if status == TUPLES:
            self._loader.set_pgresult(result)
            self._answers.append(self._loader.load_rows(0, result.ntuples, tuple))
        elif status == COMMAND and only_prepares:
            self._prepared.add(statement)
        elif not only_prepares:
            self._answers.append([] if status == COMMAND else self._why)

    def _lost(self) -> Lost:
        return Lost(self._pg.get_error_message().strip() or "the connection was lost")
