"""Worker processes of frameworks: started, killed, and kept going while a test waits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.integration.consumers_helpers import ROOT, Books, deliveries

from effectonce.testing.clocks import wait_until


class Workers:
    """A framework's own worker command, in a session of its own; started again whenever it has ended by itself."""

    def __init__(self, folder: Path, command: list[str], **environment: str) -> None:
        self.folder, self._command = folder, [sys.executable, "-m", *command]
        paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "EFFECTONCE_FOLDER": str(folder)}
        self._environment = {**os.environ, **paths, **environment}
        self._log = folder / "worker.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self) -> None:
        """SIGKILL to the worker and to all its children at once."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def until(self, condition: Callable[[], object], seconds: float = 60.0, what: str = "") -> None:
        """Wait for a condition, with a worker at work."""

        def look() -> bool:
            if self._process is None or self._process.poll() is not None:
                self.kill()
                self.start()
            return bool(condition())

        try:
            wait_until(look, seconds=seconds, what=what)
        except AssertionError as error:
            error.add_note(self._log.read_text(errors="replace")[-6000:])
            raise

    def noted(self, kind: str, word: str = "") -> list[str]:
        """What the workers have noted, line by line: those with a word in them."""
        path = self.folder / kind
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if word in line]


@contextmanager
def working(folder: Path, command: list[str], **environment: str) -> Iterator[Workers]:
    workers = Workers(folder, command, **environment)
    workers.start()
    try:
        yield workers
    finally:
        workers.kill()


def storm(
    folder: Path,
    messages: int,
    workers: Workers,
    send: Callable[[list[str]], object],
    is_drained: Callable[[], bool],
    *,
    loses: bool = False,
) -> None:
    """Messages that come up to four times, and workers killed in the middle: each effect once, nothing left.

    A broker that ``loses`` what it has given to a worker that is killed at that moment is sent it again.
    """
    books = Books(folder / "books.db")
    (folder / "most").write_text(str(messages * 5 // 8))
    orders = deliveries(messages)
    send(orders)
    seconds = 60 + messages / 10
    left: list[int] = []
    for part in (1, 2):
        workers.until(lambda part=part: len(books.effects()) >= messages * part // 4, seconds)
        workers.kill()
        left.append(messages - len(books.effects()))
    assert all(left), "the worker was too quick to be killed in the middle"
    (folder / "most").unlink()

    def is_over() -> bool:
        # Together: some brokers give back what a dead worker held only when there is traffic, which looking is.
        if not is_drained():
            return False
        missing = set(orders).difference(books.effects())
        if missing and loses:
            heard = {line.split()[1].rpartition("|")[2] for line in workers.noted("events")}
            assert not heard & missing, "a worker had these, so they were not the broker's to lose"
            send(sorted(missing))
        return not missing

    workers.until(is_over, seconds, "Each effect, and no backlog")
    counts = Counter(books.effects())
    assert len(counts) == messages
    assert set(counts.values()) == {1}
    assert books.runs() >= messages
