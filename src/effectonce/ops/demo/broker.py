"""The broker: hands deliveries to worker processes, kills some by plan, replaces them, redelivers what they held.

It does what a real one does. A delivery stays until it is acknowledged; what a dead worker held is delivered again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import cycle
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from ...errors import EffectOnceError
from .storm import Storm

WINDOW = 4
"""Deliveries a worker holds unacknowledged."""
LONGEST_DELAY_SECONDS = 0.25
"""A refused delivery comes back after this at the latest, whatever it was told."""
SILENCE_SECONDS = 30.0


class DemoFailed(EffectOnceError):
    """A worker ended or fell silent without being told to."""


@dataclass(slots=True)
class Tally:
    """What the broker saw."""

    deliveries: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    unanswered: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def acknowledged(self) -> int:
        """Deliveries that are done with."""
        return self.answers["executed"] + self.answers["replayed"]


class Worker:
    """A worker process as the broker knows it."""

    def __init__(self, command: Sequence[str], heard: SimpleQueue[tuple[Worker, str]]) -> None:
        # In a group of its own, so that Ctrl-C reaches the broker alone, which then ends its workers itself.
        apart: dict[str, Any] = {"process_group": 0} if os.name == "posix" else {}
        self.process = subprocess.Popen(  # noqa: S603 — this interpreter, this package
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=environment(),
            **apart,
        )
        self.holds: dict[int, None] = {}
        self.ready = self.killed = False
        self._heard = heard
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def tell(self, words: dict[str, Any]) -> None:
        """Send a line. To a worker that has just died it is lost, as on any wire."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(words) + "\n")

    def kill(self) -> None:
        """SIGKILL: the process does nothing any more, not even say goodbye."""
        self.killed = True
        self.process.kill()

    def dismiss(self) -> None:
        """Hang up, and let the process close its books."""
        self._hang_up()
        self.process.wait()

    def bury(self) -> int:
        """Give back what the dead process took, and its exit code."""
        code = self.process.wait()
        self._listener.join()
        self._hang_up()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def _hang_up(self) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # a line it never read
            self.process.stdin.close()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._heard.put((self, line))
        self._heard.put((self, ""))


def environment() -> dict[str, str]:
    """The environment in which a worker finds this very package, installed or not."""
    source = str(Path(__file__).resolve().parents[3])
    others = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([source, others] if others else [source])}


class Broker:
    """Brings one storm over one service."""

    def __init__(
        self, storm: Storm, arguments: Sequence[str], workers: int, progress: Callable[[Tally], None]
    ) -> None:
        self._storm, self._progress = storm, progress
        self._command = [sys.executable, "-m", f"{__package__}.worker", *arguments]
        self._heard: SimpleQueue[tuple[Worker, str]] = SimpleQueue()
        self._hired: list[Worker] = []
        self._workers = [self._hire() for _ in range(workers)]
        self._victims = cycle(range(workers))
        self._aimed = dict(storm.kills_at)
        self._blind = deque(storm.kills_after)
        self._ready = deque(range(len(storm.deliveries)))
        self._delayed: list[tuple[float, int]] = []
        self.tally = Tally()

    def run(self) -> Tally:
        """Deliver until everything is acknowledged."""
        started = time.monotonic()
        try:
            while self.tally.acknowledged < len(self._storm.deliveries):
                self._deliver()
                self._hear()
                self._progress(self.tally)
            for worker in self._workers:
                worker.dismiss()
        finally:
            for worker in self._hired:
                worker.process.kill()
                worker.bury()
        self.tally.seconds = time.monotonic() - started
        return self.tally

    def _hire(self) -> Worker:
        worker = Worker(self._command, self._heard)
        self._hired.append(worker)
        return worker

    def _deliver(self) -> None:
        while self._delayed and self._delayed[0][0] <= time.monotonic():
            self._ready.appendleft(heappop(self._delayed)[1])
        for _ in range(WINDOW):
            for worker in self._workers:
                if self._ready and worker.ready and not worker.killed and len(worker.holds) < WINDOW:
                    self._hand(worker, self._ready.popleft())

    def _hand(self, worker: Worker, number: int) -> None:
        index = self._storm.deliveries[number]
        worker.holds[number] = None
        self.tally.deliveries += 1
        worker.tell({"n": number, "transfer": self._storm.transfers[index], "halt": self._aimed.get(index)})

    def _hear(self) -> None:
        due = self._delayed[0][0] - time.monotonic() if self._delayed else SILENCE_SECONDS
        try:
            worker, line = self._heard.get(timeout=max(due, 0.0))
        except Empty:
            if not self._delayed:
                raise DemoFailed(f"No worker has answered for {SILENCE_SECONDS:.0f} s.") from None
            return
        if not line:
            self._bury(worker)
            return
        words = json.loads(line)
        if "ready" in words:
            worker.ready = True
        elif "at" in words:
            self._halted(worker, words["n"], words["at"])
        else:
            self._answered(worker, words)

    def _answered(self, worker: Worker, words: dict[str, Any]) -> None:
        number = words["n"]
        del worker.holds[number]
        self.tally.answers[words["did"]] += 1
        if words["did"] == "refused":
            heappush(self._delayed, (time.monotonic() + min(words["after"], LONGEST_DELAY_SECONDS), number))
        elif self._blind and self.tally.acknowledged > self._blind[0]:
            self._blind.popleft()
            self._kill(self._workers[next(self._victims)], "anywhere")

    def _halted(self, worker: Worker, number: int, place: str) -> None:
        if worker.killed:  # it died there by a blind kill; the aimed one is still to come
            return
        if self._aimed.pop(self._storm.deliveries[number], None):
            self._kill(worker, place)
        else:
            worker.tell({"go": True})

    def _kill(self, worker: Worker, place: str) -> None:
        worker.kill()
        self.tally.kills[place] += 1
        self._workers[self._workers.index(worker)] = self._hire()

    def _bury(self, worker: Worker) -> None:
        """Everything the worker said has been heard; what it still holds goes back to the front of the queue."""
        code = worker.bury()
        if not worker.killed:
            raise DemoFailed(f"A worker ended by itself with exit code {code}; its own words are above.")
        self.tally.unanswered += len(worker.holds)
        self._ready.extendleft(reversed(worker.holds))
        worker.holds = {}
