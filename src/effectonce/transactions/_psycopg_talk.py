"""Several statements in one round trip over a user's psycopg connection, below its cursors and its pipeline.

Both cost more than a round trip does: what is known in advance (a claim and its savepoint, a release and a completion)
is sent as libpq's own pipeline, prepared when it is first used, and waited for once. psycopg does the waiting, so that
an interrupt or a cancelled task leaves the connection as it would after any other statement.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import lru_cache
from typing import Any
from zlib import crc32

from psycopg import errors, pq
from psycopg.adapt import Transformer
from psycopg.waiting import Wait

from ..stores._postgres_sql import Statement
from .base import Result

Spoken = tuple[Statement | str, Sequence[Any]]
"""A statement with its values; or a command without any."""

SYNC, TUPLES, COMMAND = pq.ExecStatus.PIPELINE_SYNC, pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK
ABORTED, OFF = pq.ExecStatus.PIPELINE_ABORTED, pq.PipelineStatus.OFF
IN_TRANSACTION = (pq.TransactionStatus.INTRANS, pq.TransactionStatus.INERROR)

Names = dict[Any, bytes]
"""What is prepared on a connection, by its text, in psycopg's own register: psycopg has everything forgotten at every
rollback, and what it does not know of would be gone without a word."""


def may_talk(connection: Any) -> bool:
    """Whether a connection is in a transaction, and not in a pipeline of its user's: else it is psycopg's to begin."""
    pg = connection.pgconn
    return bool(pg.transaction_status in IN_TRANSACTION and pg.pipeline_status == OFF)


def talk(connection: Any, calls: Sequence[Spoken]) -> Generator[Wait, int, list[Result]]:
    """Have statements done, for ``connection.wait``. The first error is raised; what follows it was not done."""
    pg = connection.pgconn
    prepared = _register(connection)
    pg.enter_pipeline_mode()
    prepares: list[tuple[bytes, bytes] | None] = []
    for statement, values in calls:
        if isinstance(statement, str):
            pg.send_query_params(statement.encode(), None)
        else:
            _send(pg, statement, statement.encoded(values), prepared, prepares)
        prepares.append(None)
    pg.pipeline_sync()
    answers = yield from _answers(pg)
    pg.exit_pipeline_mode()
    for name, answer in zip(prepares, answers, strict=True):
        if answer.status not in (TUPLES, COMMAND):
            raise errors.error_from_result(answer, encoding=connection.info.encoding)
        if name is not None and prepared is not None:
            prepared[name] = name[1]
    return [_result(answer) for name, answer in zip(prepares, answers, strict=True) if name is None]


def _send(
    pg: Any,
    statement: Statement,
    values: list[bytes | None],
    prepared: Names | None,
    prepares: list[tuple[bytes, bytes] | None],
) -> None:
    text, name = _named(statement.name, statement.text)
    if prepared is None:
        pg.send_query_params(text, values, None, statement.formats, 1)
        return
    if (text, name) not in prepared:
        pg.send_prepare(name, text)
        prepares.append((text, name))
    pg.send_query_prepared(name, values, statement.formats, 1)


@lru_cache(maxsize=256)
def _named(name: bytes, text: str) -> tuple[bytes, bytes]:
    """A statement as it is sent, and its name, which is not the same for another store's table."""
    sent = text.encode()
    return sent, b"%b_%08x" % (name, crc32(sent))


def _register(connection: Any) -> Names | None:
    """Where psycopg notes what it has prepared; None if it is not to prepare, or is just about to forget."""
    notes = getattr(connection, "_prepared", None)
    names, forgetting = getattr(notes, "_names", None), getattr(notes, "_to_flush", True)
    usable = isinstance(names, dict) and connection.prepare_threshold is not None and not forgetting
    return names if usable else None


def _answers(pg: Any) -> Generator[Wait, int, list[Any]]:
    """Whatever comes until the server is in step again."""
    answers: list[Any] = []
    while pg.flush():
        yield Wait.RW
        pg.consume_input()
    while True:
        while pg.is_busy():
            yield Wait.R
            pg.consume_input()
        answer = pg.get_result()
        if answer is None:
            continue
        if answer.status == SYNC:
            return answers
        answers.append(answer)


def _result(answer: Any) -> Result:
    if answer.status != TUPLES:
        return Result([], answer.command_tuples or 0)
    loader = Transformer()  # not the user's own ways to load values
    loader.set_pgresult(answer)
    return Result(loader.load_rows(0, answer.ntuples, tuple), answer.command_tuples or 0)
