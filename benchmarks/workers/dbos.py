"""DBOS: a workflow without steps, started under the key as its workflow id, on SQLite or PostgreSQL."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Iterable
from typing import Any

from dbos import DBOS, SetWorkflowID

from benchmarks.workers.base import RESULT, Counter, Setup, Subject
from benchmarks.workers.forms import Forms, subject
from benchmarks.workers.startup import ImportTime
from benchmarks.workers.timing import FileSize

DISTRIBUTION = "dbos"


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
