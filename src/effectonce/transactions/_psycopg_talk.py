"""Several statements in one round trip over a user's psycopg connection, below its cursors and its pipeline.

Both cost more than a round trip does: what is known in advance (a claim and its savepoint, a release and a completion)
is sent as libpq's own pipeline, prepared when it is first used, and waited for once. psycopg does the waiting, so that
an interrupt or a cancelled task leaves the connection as it would after any other statement.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from psycopg import errors, pq
from psycopg.adapt import Transformer
from psycopg.generators import fetch_many, send

from .._records import make
from ..stores._postgres_sql import Statement
from .base import Result

Spoken = tuple[Statement | str, list[bytes | None]]
"""A statement with its values as they travel; or a command without any."""

SYNC, TUPLES, COMMAND = pq.ExecStatus.PIPELINE_SYNC, pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK
OFF = pq.PipelineStatus.OFF
IN_TRANSACTION = (pq.TransactionStatus.INTRANS, pq.TransactionStatus.INERROR)

Names = dict[Any, bytes]
"""What is prepared on a connection, by its text, in psycopg's own register: psycopg has everything forgotten at every
rollback, and what it does not know of would be gone without a word."""


def may_talk(connection: Any) -> bool:
    """Whether a connection is in a transaction, and not in a pipeline of its user's: else it is psycopg's to begin.

    And whether it speaks UTF-8, as the values of a store do: else it is psycopg's to translate.
    """
    pg = connection.pgconn
    return bool(
        pg.transaction_status in IN_TRANSACTION
        and pg.pipeline_status == OFF
        and pg.parameter_status(b"client_encoding") == b"UTF8"
    )


def talk(connection: Any, calls: Sequence[Spoken]) -> Generator[Any, Any, list[Result]]:
    """Have statements done, for ``connection.wait``. The first error is raised; what follows it was not done."""
    pg = connection.pgconn
    prepared = _register(connection)
    prepares: dict[int, tuple[bytes, bytes]] = {}
    pg.enter_pipeline_mode()
    for place, (statement, values) in enumerate(calls):
        if isinstance(statement, str):
            pg.send_query_params(statement.encode(), None)
            continue
        text, name = named = statement.sent, statement.name
        if prepared is None:
            pg.send_query_params(text, values, None, statement.formats, 1)
            continue
        if named not in prepared:
            pg.send_prepare(name, text)
            prepares[place + len(prepares)] = named
        pg.send_query_prepared(name, values, statement.formats, 1)
    pg.pipeline_sync()
    yield from send(pg)
    answers: list[Any] = []
    while not answers or answers[-1].status != SYNC:
        more = yield from fetch_many(pg)
        if not more:
            raise errors.OperationalError(f"the connection was lost: {pg.get_error_message()}")
        answers += more
    del answers[-1]
    if prepares and prepared is not None:
        _note(prepares, answers, prepared)
    pg.exit_pipeline_mode()  # last: who is interrupted before does not know what is prepared
    return [_result(connection, answer) for answer in answers]


class in_one_piece:  # noqa: N801 - a word of a with statement, and contextlib's take longer than the statement
    """Closes a connection that was interrupted in a way which psycopg does not know, as by a signal that raises: it is
    left in the middle of a pipeline, where nobody could tell which answer is whose.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        pg = self._connection.pgconn
        if error is not None and pg.status == pq.ConnStatus.OK and pg.pipeline_status != OFF:
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
        names, forgetting = connection._prepared._names, connection._prepared._to_flush
    except AttributeError:
        return None
    return None if forgetting or connection.prepare_threshold is None else names


def _result(connection: Any, answer: Any) -> Result:
    status = answer.status
    if status == COMMAND:
        return make(Result, ([], answer.command_tuples or 0))
    if status != TUPLES:
        raise errors.error_from_result(answer, encoding=connection.info.encoding)
    loader = Transformer()  # not the user's own ways to load values
    loader.set_pgresult(answer)
    rows = loader.load_rows(0, answer.ntuples, tuple)
    return make(Result, (rows, len(rows)))
