"""What the tests of the SQLite store share."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from effectonce._blocking import run
from effectonce._records import Claim, Decision
from effectonce.keys import new_owner
from effectonce.stores.base import Store

ROOT = Path(__file__).parents[2]
LONG = 3600.0


def claim_of(key: str, **changes: Any) -> Claim:
    return Claim(key, new_owner(), b"asked", LONG, LONG)._replace(**changes)


def claim(store: Store, key: str, **changes: Any) -> Decision:
    return run(store.claim(claim_of(key, **changes)))


@contextmanager
def write_lock(path: Path) -> Iterator[None]:
    """Hold the file's write lock, as another process would."""
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


class Caller(threading.Thread):
    """A thread that calls a function and keeps what came of it. A daemon: one that hangs fails its own test only."""

    def __init__(self, function: Callable[[], Any], name: str | None = None) -> None:
        super().__init__(daemon=True, name=name)
        self._function = function
        self.result: Any = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._function()
        except BaseException as error:
            self.error = error

    def answer(self, seconds: float = 20.0) -> Any:
        """The result, or the error raised here."""
        self.join(seconds)
        assert not self.is_alive(), f"{self.name} still waits after {seconds} s"
        if self.error is not None:
            raise self.error
        return self.result


def python(script: str, *arguments: object, **choices: Any) -> subprocess.Popen[str]:
    """Start a script in an interpreter of its own, with effectonce importable and pipes for all it says."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **choices,
    )


def output_of(script: str, *arguments: object) -> str:
    """Run a script to its end and give what it printed; what it complained of fails the test."""
    process = python(script, *arguments)
    output, complaints = process.communicate(timeout=60)
    assert process.returncode == 0, complaints
    assert "ResourceWarning" not in complaints
    return output


def open_files(path: Path) -> list[str]:
    """Which of a database's files this process has open."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except FileNotFoundError:  # it was the descriptor of this very listing
            continue
        if target.startswith(str(path)):
            found.append(target)
    return sorted(found)
