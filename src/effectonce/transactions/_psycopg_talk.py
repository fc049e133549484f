"""Several statements in one round trip over a user's psycopg connection, below its cursors and its pipeline.

Both cost more than a round trip does: what is known in advance (a claim and its savepoint, a release and a completion)
is sent as libpq's own pipeline, prepared when it is first used, and waited for once. psycopg does the waiting, so that
an interrupt or a cancelled task leaves the connection as it would after any other statement.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import lru_cache
from typing import Any

from psycopg import errors, pq
from psycopg.generators import send
from psycopg.waiting import Wait

from .._records import make
from ..stores._postgres_sql import LOADS, Statement
from .base import Result

Spoken = tuple[Statement | str, Sequence[bytes | None]]
"""A statement with its values as they travel; or a command without any."""

SYNC, TUPLES, COMMAND = pq.ExecStatus.PIPELINE_SYNC, pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK
OFF = pq.PipelineStatus.OFF
IDLE = pq.TransactionStatus.IDLE
AT_REST = (IDLE,)
IN_TRANSACTION = (pq.TransactionStatus.INTRANS, pq.TransactionStatus.INERROR)

WAIT_R = Wait.R
BEGIN = Statement("effectonce_begin", "BEGIN")

Names = dict[Any, bytes]
"""What is prepared on a connection, by its text, in psycopg's own register: psycopg has everything forgotten at every
rollback, and what it does not know of would be gone without a word."""


def may_talk(connection: Any) -> bool:
    """Whether a connection is in a transaction, and not in a pipeline of its user's: else it is psycopg's to begin.

    And whether it speaks UTF-8, as the values of a store do: else it is psycopg's to translate.
    """
    return _is_at(connection, IN_TRANSACTION)


def may_begin(connection: Any) -> bool:
    """The same where a transaction is to be begun in one round trip with its first statements."""
    return _is_at(connection, AT_REST)


def _is_at(connection: Any, statuses: tuple[pq.TransactionStatus, ...]) -> bool:
    pg = connection.pgconn
    return bool(
        pg.transaction_status in statuses
        and pg.pipeline_status == OFF
        and pg.parameter_status(b"client_encoding") == b"UTF8"
    )


def opening(connection: Any) -> Statement:
    """How psycopg begins a transaction on a connection: at the isolation level, and so on, that its user has set."""
    command = getattr(connection, "_get_tx_start_command", None)
    return BEGIN if command is None else _openings(command())


@lru_cache(maxsize=64)
def _openings(command: bytes) -> Statement:
    return Statement("effectonce_begin", command.decode())


def talk(connection: Any, calls: Sequence[Spoken]) -> Generator[Any, Any, list[Result]]:
    """Have statements done, for ``connection.wait``. The first error is raised; what follows it was not done."""
    pg = connection.pgconn
    prepared = _register(connection)
    prepares: dict[int, tuple[bytes, bytes]] = {}
    pg.enter_pipeline_mode()
    for place, (statement, values) in enumerate(calls):
        if isinstance(statement, str):
            pg.send_query_params(statement.encode(), None)
        elif prepared is None:
            pg.send_query_params(statement.sent, values, None, statement.formats, 1)
        else:
            if statement.named not in prepared:
                pg.send_prepare(statement.name, statement.sent)
                prepares[place + len(prepares)] = statement.named
            pg.send_query_prepared(statement.name, values, statement.formats, 1)
    pg.pipeline_sync()
    yield from send(pg)
    answers: list[Any] = []
    is_over = False
    while True:
        while pg.is_busy():
            while not (yield WAIT_R):
                pass
            pg.consume_input()
        answer = pg.get_result()
        if answer is None:  # the answers to one statement are over, and those to the next follow
            if is_over:
                raise errors.OperationalError(f"the connection was lost: {pg.get_error_message()}")
            is_over = True
        elif answer.status == SYNC:
            break
        else:
            is_over = False
            answers.append(answer)
    while notice := pg.notifies():  # as psycopg does: who listens on this connection waits for them
        if pg.notify_handler is not None:
            pg.notify_handler(notice)
    if prepares and prepared is not None:
        _note(prepares, answers, prepared)
    pg.exit_pipeline_mode()  # last: who is interrupted before does not know what is prepared
    results: list[Result] = []
    for answer in answers:
        if answer.status == COMMAND:
            results.append(make(Result, ([], answer.command_tuples or 0)))
        elif answer.status == TUPLES:
            results.append(_rows(answer))
        else:
            raise errors.error_from_result(answer, encoding=connection.info.encoding)
    return results


def broken_off(connection: Any) -> None:
    """Close a connection that was interrupted in a way which psycopg does not know, as by a signal that raises: it is
    left in the middle of a pipeline, where nobody could tell which answer is whose.
    """
    pg = connection.pgconn
    if pg.status == pq.ConnStatus.OK and pg.pipeline_status != OFF:
        pg.finish()


def _note(prepares: dict[int, tuple[bytes, bytes]], answers: list[Any], prepared: Names) -> None:
    """Take out the answers that only say that something was prepared, and note that it was."""
    for place, named in reversed(prepares.items()):
        if answers[place].status == COMMAND:
            prepared[named] = named[1]
            del answers[place]


def _register(connection: Any) -> Names | None:
    """Where psycopg notes what it has prepared; None if it is not to prepare, or is just about to forget."""
    try:
        manager = connection._prepared
        forgetting = manager._to_flush or manager.prepare_threshold is None
        return None if forgetting else manager._names
    except AttributeError:
        return None


def _rows(answer: Any) -> Result:
    """Rows, from their binary form: not by the user's own ways to load values, nor at what psycopg's cost."""
    rows: list[tuple[Any, ...]] = []
    columns = range(answer.nfields)
    for row in range(answer.ntuples):
        values = []
        for column in columns:
            value = answer.get_value(row, column)
            values.append(None if value is None else LOADS[answer.ftype(column)](value))
        rows.append(tuple(values))
    return make(Result, (rows, len(rows)))
