"""Claims beside purging: what a caller feels while expired keys are removed from a large SQLite store."""

from __future__ import annotations

import threading
from time import monotonic, perf_counter, sleep

from benchmarks.workers.base import Counter, Figure, Setup, chunks, new_keys
from effectonce import Message, Policy, Receiver

LIVE, EXPIRED = 200_000, 100_000
PAUSE_SECONDS = 0.005


class ClaimsBesidePurge:
    """Times single new calls: quiet, while traffic purges by itself, or with a thread that purges beside it."""

    def __init__(self, setup: Setup, url: str) -> None:
        self._receiver, self._variant, self._handle = Receiver(url), setup.variant, Counter().handle
        start = monotonic()
        self._fill(LIVE, Policy())
        self._seconds_per_key = (monotonic() - start) / LIVE
        if self._variant == "quiet":
            self._fill(EXPIRED, Policy())

    def _fill(self, count: int, policy: Policy) -> None:
        for chunk in chunks(new_keys(count), 500):
            self._receiver.process_batch([Message(id=key) for key in chunk], self._handle, policy=policy)

    def slice(self, operations: int) -> Figure:
        """The slowest hundredth of that many new calls; the median is told beside it."""
        if self._variant != "quiet":
            self._expire()
        done = threading.Event()
        purger = threading.Thread(target=self._purge, args=(done,))
        if self._variant == "thread":
            purger.start()
        latencies = []
        for key in new_keys(operations):
            start = perf_counter()
            self._receiver.process(Message(id=key), self._handle)
            latencies.append(perf_counter() - start)
        done.set()
        if self._variant == "thread":
            purger.join()
        latencies.sort()
        return {
            "value": latencies[int(operations * 0.99)],
            "operations": operations,
            "p50": latencies[operations // 2],
        }

    def _expire(self) -> None:
        """Add keys that have expired when this returns, but none of which did so while others were added."""
        keep = self._seconds_per_key * EXPIRED * 2 + 2
        self._fill(EXPIRED, Policy(keep=keep))
        sleep(keep)

    def _purge(self, done: threading.Event) -> None:
        while not done.is_set():
            self._receiver.purge()
            sleep(PAUSE_SECONDS)

    def close(self) -> None:
        """Close the receiver."""
        self._receiver.close()
