"""DBOS: a workflow without steps, started under the key as its workflow id. It has no in-memory store."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Iterable
from typing import Any

from dbos import DBOS, SetWorkflowID

from benchmarks.workers.base import RESULT, Counter, Setup, Subject
from benchmarks.workers.startup import ImportTime
from benchmarks.workers.timing import FileSize, stream

DISTRIBUTION = "dbos"


def open_subject(setup: Setup) -> Subject:
    """Open one case of DBOS."""
    if setup.op == "import":
        return ImportTime("dbos")
    if sys.version_info >= (3, 12) and sqlite3.sqlite_version_info < (3, 42):
        raise RuntimeError("DBOS needs SQLite >= 3.42 on Python >= 3.12")
    # It keeps the journal mode it finds. WAL is what every other contender has, and it is faster.
    with sqlite3.connect(setup.file()) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
    connection.close()
    DBOS(
        config={
            "name": "bench",
            "system_database_url": f"sqlite:///{setup.file()}",
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

    DBOS.launch()

    def run(keys: Iterable[str]) -> None:
        for key in keys:
            with SetWorkflowID(key):
                charge(key)

    if setup.op == "bytes":
        return FileSize(setup, run, DBOS.destroy)
    return stream(setup, run, counter, close=DBOS.destroy)
