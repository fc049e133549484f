"""What an operation leaves behind on a server, or costs it: bytes in memory or on disk, of log, dead rows, seconds."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.workers.base import Figure, Subject

Gauge = Callable[[str], float]
WARM_UP = 64


class Gauged:
    """Reads a gauge of the server before and after each slice of a stream."""

    def __init__(self, stream: Subject, gauge: Gauge, url: str) -> None:
        self._stream, self._gauge, self._url = stream, gauge, url
        # What is made at first use isn't part of a key.
        stream.slice(WARM_UP)

    def slice(self, operations: int) -> Figure:
        """What one operation added."""
        before = self._gauge(self._url)
        self._stream.slice(operations)
        return {"value": (self._gauge(self._url) - before) / operations, "operations": operations}

    def close(self) -> None:
        """Close the contender."""
        self._stream.close()


def _redis_memory(url: str) -> float:
    """Everything that the server uses: keys, values, expiries, and its tables of them."""
    import redis

    with redis.Redis.from_url(url) as client:
        return float(client.info("memory")["used_memory"])


def _redis_processor(url: str) -> float:
    """Seconds of a processor that the server has used, also in the kernel."""
    import redis

    with redis.Redis.from_url(url) as client:
        used = client.info("cpu")
    return float(used["used_cpu_user"]) + float(used["used_cpu_sys"])


def _postgres_processor(url: str) -> float:
    """The same of all processes of a server on this machine; those that have ended are counted by their parent."""
    import psycopg

    with psycopg.connect(url) as connection:
        server = _parent(connection.info.backend_pid)
        children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
        return sum(_seconds(int(pid)) for pid in children) + _seconds(server, ended=True)


def _parent(pid: int) -> int:
    return int(_stat(pid)[1])


def _seconds(pid: int, *, ended: bool = False) -> float:
    used = _stat(pid)[11 : 15 if ended else 13]
    return sum(map(int, used)) / os.sysconf("SC_CLK_TCK")


def _stat(pid: int) -> list[str]:
    """What the kernel says of a process, after its name."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()


def _postgres(query: str) -> Gauge:
    def ask(url: str) -> float:
        import psycopg

        with psycopg.connect(url, autocommit=True) as connection:
            cursor = connection.execute(query.encode())
            while cursor.nextset():
                pass
            row: Any = cursor.fetchone()
        return float(row[0])

    return ask


def _mariadb_pages(url: str) -> float:
    """Bytes of the pages that rows lie in, of all indexes: a table is one, too. The file itself has up to some
    megabytes more, reserved ahead of need and in steps, which would decide what a few thousand keys weigh.
    """
    import pymysql

    from benchmarks.workers.raw_mariadb import address_of

    with pymysql.connect(**address_of(url)) as connection, connection.cursor() as cursor:
        cursor.execute("SHOW TABLES")
        for (table,) in cursor.fetchall():
            cursor.execute(f"ANALYZE TABLE `{table}`")
        cursor.execute(LEAVES)
        row: Any = cursor.fetchone()
    return float(row[0])


def _dynamodb_items(url: str) -> float:
    from benchmarks.workers.dynamodb_table import bytes_of_items

    return bytes_of_items(url)


LEAVES = """
SELECT COALESCE(SUM(stat_value), 0) * @@innodb_page_size FROM mysql.innodb_index_stats
WHERE database_name = DATABASE() AND stat_name = 'n_leaf_pages'
"""

DEAD_ROWS = """
CREATE EXTENSION IF NOT EXISTS pgstattuple;
SELECT coalesce(sum((pgstattuple(relid)).dead_tuple_count), 0) FROM pg_stat_user_tables
"""

GAUGES: dict[str, Gauge] = {
    "redis-memory": _redis_memory,
    "redis-processor": _redis_processor,
    "postgres-processor": _postgres_processor,
    # Tables, indexes, and what belongs to them.
    "postgres-size": _postgres("SELECT pg_database_size(current_database())"),
    "postgres-wal": _postgres("SELECT pg_current_wal_insert_lsn() - '0/0'"),
    "postgres-dead-rows": _postgres(DEAD_ROWS),
    "mariadb-pages": _mariadb_pages,
    "dynamodb-items": _dynamodb_items,
}


def settle(url: str) -> None:
    """Do at once what the server would begin within a minute, or it does so in somebody's slice."""
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("VACUUM (ANALYZE)")
