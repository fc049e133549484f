"""A SQLite file: opening it, making sure it is ours, waiting for others, and saying what went wrong."""

from __future__ import annotations

import os
import random
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..errors import EffectOnceError, StoreMismatch, StoreUnavailable, UsageError
from ._named import statements

SQL = statements("sqlite.sql")
SCHEMA = 1
FIRST_PAUSE, LAST_PAUSE = 0.0002, 0.005
"""Between two tries for a lock. SQLite's own waiting sleeps up to 0.1 s; a write takes a hundredth of that."""

LOG_ROOM = 4 << 20
"""Bytes that a log in use grows to: SQLite writes it from its beginning again after a thousand pages."""
SPARE = 64
"""So many times as much has to be free on the disk for a log to have its room beforehand."""

Place = tuple[int, int]
"""The device and the number of a file, which no other has while that one is open."""

FAILURES = (sqlite3.Error, OverflowError, OSError, MemoryError)
"""What a command may raise. ``MemoryError`` is how sqlite3 says that SQLite has none. A value of more than 2 GB does
not even get as far as SQLite, nor does a look at a file that this process may not look at."""
NOT_OURS = {sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT}
ADVICE = {
    sqlite3.SQLITE_BUSY: "Another connection holds the write lock; try again, or raise busy_timeout=. If it is one of "
    "yours, whose transaction this call is inside of, use receiver.on(connection).",
    sqlite3.SQLITE_FULL: "The disk is full; make room, then try again with the same key.",
    sqlite3.SQLITE_READONLY: "Give this process the right to write the file and its directory.",
    sqlite3.SQLITE_CANTOPEN: "Check that the path exists and that this process may read and write it.",
}


class DatabaseFile:
    """Opens connections to one file and speaks to them patiently."""

    def __init__(self, path: str | Path, durability: str, busy_timeout: float, beside: bool = False) -> None:
        if not _is_name(path):
            raise UsageError(f"{str(path)[:40]!r}… can't be the name of a file.")
        if not 0 <= busy_timeout <= 3600:
            raise UsageError(
                f"busy_timeout={busy_timeout!r} must be between nothing and an hour, in seconds."
            )
        self.path = Path(path).absolute()  # a process may change its directory
        self.closed = False
        self._durability = durability
        self._busy_timeout = busy_timeout
        self._beside = beside
        self._log, self._log_index = Path(f"{self.path}-wal"), Path(f"{self.path}-shm")
        self._places: dict[Path, Place] = {}

    def check_open(self) -> None:
        """Raise when the store was closed."""
        if self.closed:
            raise StoreUnavailable(f"The store {self.path} is closed.")

    def open(self) -> sqlite3.Connection:
        """A connection that commits every statement by itself and never waits by itself."""
        self.check_open()
        connection = sqlite3.connect(self.path, timeout=0, isolation_level=None, check_same_thread=False)
        try:
            self.patiently(connection.execute, f"PRAGMA synchronous = {self._durability}")
        except BaseException:
            connection.close()
            raise
        return connection

    def open_checked(self) -> sqlite3.Connection:
        """The same, after making the schema or checking that the file has ours."""
        if self.path.is_dir():
            example = self.path / "effects.db"
            raise StoreMismatch(f"{self.path} is a directory. Name a file in it, such as {example}.")
        folder = self.path.parent
        if not folder.is_dir():
            raise StoreUnavailable(f"There is no directory {folder} to keep {self.path.name} in.")
        self.check_places()
        connection = self.open()
        try:
            self.patiently(self._prepare, connection)
        except BaseException:
            connection.close()
            raise
        ours = (self.path, self._log, self._log_index)
        self._places = {path: place for path in ours if (place := _place(path))}
        return connection

    def check_places(self) -> None:
        """Refuse to go on in files that nobody else can find: they would make others, and do everything again."""
        for path, place in list(self._places.items()):
            if _place(path) != place:
                raise StoreMismatch(
                    f"{path} is not the file that this process has opened: somebody has removed or replaced it. "
                    "Nothing was run. Put it back, or start all processes anew; they don't know what it remembered."
                )

    def make_room(self, connection: sqlite3.Connection) -> None:
        """Let a log that is in use have its whole size at once, instead of growing with each commit.

        A disk takes twice as long to make sure of a piece of a file that was not there before. So pages are written
        that nobody will ever see: SQLite puts those of a long transaction into its log before it is committed, and
        when it is rolled back the next ones are written over them. Nothing depends on it, so no failure counts.
        """
        from shutil import disk_usage

        with suppress(*FAILURES):
            if self._durability != "full" or self._log.stat().st_size >= LOG_ROOM:
                return
            if disk_usage(self.path.parent).free < LOG_ROOM * SPARE:
                return
            (usual,) = connection.execute("PRAGMA cache_size").fetchone()
            try:
                connection.execute("PRAGMA cache_size = 10")  # pages; what is more goes to the log
                connection.execute("BEGIN IMMEDIATE")
                connection.execute(SQL["room"], (LOG_ROOM,))
            finally:
                roll_back(connection)
                connection.execute(f"PRAGMA cache_size = {usual}")

    def forget_log(self) -> None:
        """No connection is open any more. The last one of all processes has taken the log with it, and its index."""
        self._places.pop(self._log, None)
        self._places.pop(self._log_index, None)

    def patiently(self, action: Callable[..., Any], *args: Any) -> Any:
        """Try until nobody else is in the way, at most ``busy_timeout``. What failed has changed nothing."""
        try:
            return action(*args)
        except sqlite3.OperationalError as error:
            if not _is_busy(error):
                raise
        return self._wait_for_others(action, args)

    def in_transaction(self, connection: sqlite3.Connection, action: Callable[..., Any], *args: Any) -> Any:
        """Do all of ``action(connection, *args)`` or nothing."""
        try:
            self.patiently(connection.execute, "BEGIN IMMEDIATE")
            result = action(connection, *args)
            connection.execute("COMMIT")
        except BaseException:
            roll_back(connection)
            raise
        return result

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turn what sqlite3 raises into errors of the tree."""
        try:
            yield
        except FAILURES as error:
            raise self.translated(error) from error

    def translated(self, error: Exception) -> EffectOnceError:
        """An error of the tree that says what to do."""
        unknown = sqlite3.SQLITE_CANTOPEN if isinstance(error, OSError) else sqlite3.SQLITE_MISUSE
        code = getattr(error, "sqlite_errorcode", unknown) & 0xFF
        if isinstance(error, (OverflowError, sqlite3.DataError)):
            return UsageError(f"SQLite has no room for a value: {error}. Nothing was changed.")
        if code in NOT_OURS or "no such table" in str(error):
            what = f"{self.path} can't be used as a store: {error}."
            return StoreMismatch(f"{what} Nothing was changed; name another file.")
        return StoreUnavailable(
            f"{self.path} did not take the command: {str(error) or repr(error)}. {ADVICE.get(code, 'Try again.')}"
        )

    def _wait_for_others(self, action: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        deadline = time.monotonic() + self._busy_timeout
        pause = FIRST_PAUSE
        while True:
            time.sleep(pause * random.random())
            pause = min(pause * 1.5, LAST_PAUSE)
            try:
                return action(*args)
            except sqlite3.OperationalError as error:
                if not _is_busy(error) or time.monotonic() >= deadline:
                    raise

    def _prepare(self, connection: sqlite3.Connection) -> None:
        """Look whose file this is. Begun anew when another process is just making it."""
        tables = {name for (name,) in connection.execute(SQL["tables"])}
        if "effectonce_meta" not in tables:
            marks = [
                connection.execute(f"PRAGMA {name}").fetchone()[0]
                for name in ("application_id", "user_version")
            ]
            if (tables or any(marks)) and not self._beside:
                sign = f"the table {min(tables)}" if tables else "another program's mark"
                raise StoreMismatch(
                    f"{self.path} belongs to another program (it has {sign}). Nothing was changed. Name another file. "
                    "If that program is yours, and records shall be in its transactions, say ?beside=yes."
                )
            connection.execute("PRAGMA journal_mode = WAL")
            self.in_transaction(connection, _create)
        version = _version(connection)
        if version < SCHEMA:
            self.in_transaction(connection, _migrate)
        elif version > SCHEMA:
            raise StoreMismatch(
                f"{self.path} has schema {version}, this effectonce knows {SCHEMA}. Nothing was changed. "
                "Use the effectonce that wrote it, or newer."
            )


def _is_name(path: str | Path) -> bool:
    """Whether a file may be called so, with room for what SQLite adds. Names need not be UTF-8."""
    try:
        return "\0" not in str(path) and len(os.fsencode(Path(path).name)) <= 200
    except UnicodeEncodeError:
        return False


def _place(path: Path) -> Place | None:
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


def roll_back(connection: sqlite3.Connection) -> None:
    """Leave a transaction, if there is one: after a full disk SQLite has rolled back by itself."""
    if connection.in_transaction:
        connection.execute("ROLLBACK")


def _create(connection: sqlite3.Connection) -> None:
    for statement in SQL["schema"].split(";"):
        connection.execute(statement)


def _version(connection: sqlite3.Connection) -> int:
    row = connection.execute(SQL["version"]).fetchone()
    if row is None or type(row[0]) is not int:
        raise StoreMismatch(f"The schema version is {row!r}, which makes no sense. Nothing was changed.")
    return row[0]


def _migrate(connection: sqlite3.Connection) -> None:
    """Bring an older schema up to date, a version at a time. Another process may have done so meanwhile."""
    for version in range(_version(connection), SCHEMA):
        for statement in SQL[f"migrate_{version}"].split(";"):
            connection.execute(statement)
    connection.execute(SQL["migrated"], (SCHEMA,))


def _is_busy(error: sqlite3.OperationalError) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY
