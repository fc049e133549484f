"""DBOS: a workflow without steps, started under the key as its workflow id, on SQLite or PostgreSQL.

Where there is work to be done in a transaction, the workflow has one step, which is DBOS's own transactional one.
"""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Callable, Iterable
from typing import Any

from dbos import DBOS, SetWorkflowID, SQLAlchemyDatasource
from sqlalchemy import text

from benchmarks.workers.base import RESULT, Counter, Setup, Subject
from benchmarks.workers.forms import Forms, subject
from benchmarks.workers.startup import ImportTime
from benchmarks.workers.timing import FileSize

DISTRIBUTION = "dbos"
WORK = "CREATE TABLE IF NOT EXISTS work (id text, cents integer)"
DO = "INSERT INTO work VALUES (:id, 1999)"


def open_subject(setup: Setup) -> Subject:
    """Open one case of DBOS."""
    if setup.op == "import":
        return ImportTime("dbos")
    if setup.url:
        return subject(setup, open_forms(setup))
    if sys.version_info >= (3, 12) and sqlite3.sqlite_version_info < (3, 42):
        raise RuntimeError("DBOS needs SQLite >= 3.42 on Python >= 3.12")
    # It keeps the journal mode it finds. WAL is what every other contender has, and it is faster.
    with sqlite3.connect(setup.file()) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
    connection.close()
    forms = open_forms(setup)
    if setup.op == "bytes":
        return FileSize(setup, forms.run, DBOS.destroy)
    return subject(setup, forms)


def open_forms(setup: Setup) -> Forms:
    """Launch it on the row's database, where it makes its tables."""
    DBOS(
        config={
            "name": "bench",
            "system_database_url": setup.url or f"sqlite:///{setup.file()}",
            "log_level": "ERROR",
            "console_log_level": "ERROR",
        }
    )
    counter = Counter()
    tick = counter.tick

    @DBOS.workflow()
    def charge(order_id: str) -> dict[str, Any]:
        tick()
        return RESULT

    @DBOS.workflow()
    async def acharge(order_id: str) -> dict[str, Any]:
        tick()
        return RESULT

    if setup.variant == "transaction":
        charge = transactional(setup, counter)
    DBOS.launch()

    def run(keys: Iterable[str]) -> None:
        for key in keys:
            with SetWorkflowID(key):
                charge(key)

    async def arun(keys: Iterable[str]) -> None:
        for key in keys:
            with SetWorkflowID(key):
                await acharge(key)

    return Forms(counter=counter, run=run, arun=arun, close=DBOS.destroy)


def transactional(setup: Setup, counter: Counter) -> Callable[[str], dict[str, Any]]:
    """A workflow whose only step writes a row in a transaction, together with DBOS's record of the step."""
    place = setup.url.partition("://")[2]
    datasource = SQLAlchemyDatasource.create(f"postgresql+psycopg://{place}")
    with datasource.engine.begin() as connection:
        connection.execute(text(WORK))

    # What the others run under; its own default, SERIALIZABLE, costs it a little more.
    @datasource.transaction(isolation_level="READ COMMITTED")
    def work(order_id: str) -> dict[str, Any]:
        datasource.sql_session().execute(text(DO), {"id": order_id})
        counter.tick()
        return RESULT

    @DBOS.workflow()
    def charge(order_id: str) -> dict[str, Any]:
        return work(order_id)

    return charge
