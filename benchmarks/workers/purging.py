"""Claims beside purging: what a caller feels while expired keys are removed from a large store."""

from __future__ import annotations

import threading
from time import monotonic, perf_counter, sleep

from benchmarks.workers.base import Counter, Figure, Setup, chunks, new_keys
from effectonce import Message, Policy, Receiver

LIVE = {"sqlite": 200_000, "postgres": 50_000, "mariadb": 50_000}
"""Keys that stay; how many expire is up to the case."""
PAUSE_SECONDS = 0.005


class ClaimsBesidePurge:
    """Times single new calls: quiet, while traffic purges by itself, or with a thread that purges beside it."""

    def __init__(self, setup: Setup, url: str) -> None:
        self._receiver, self._variant, self._handle = Receiver(url), setup.variant, Counter().handle
        self._purged, self._expired = 0, setup.prefill
        start, live = monotonic(), LIVE[setup.store]
        self._fill(live, Policy())
        if self._variant == "quiet":
            self._fill(self._expired, Policy())
        else:
            self._expire(fill_seconds=(monotonic() - start) * self._expired / live)

    def _fill(self, count: int, policy: Policy) -> None:
        for chunk in chunks(new_keys(count), 500):
            messages = [Message(id=key) for key in chunk]
            self._receiver.process_batch(messages, self._handle, policy=policy, size=500, concurrency=1)

    def slice(self, operations: int) -> Figure:
        """The slowest hundredth of that many new calls; the median is told beside it."""
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
        if self._purged >= self._expired:
            raise AssertionError("all that had expired was gone before the slice was over")
        latencies.sort()
        return {
            "value": latencies[int(operations * 0.99)],
            "operations": operations,
            "p50": latencies[operations // 2],
            "purged": self._purged,
        }

    def _expire(self, fill_seconds: float) -> None:
        """Add keys that have expired when this returns, but none of which did so while others were added."""
        keep = fill_seconds * 1.5 + 1
        self._fill(self._expired, Policy(keep=keep))
        sleep(keep)

    def _purge(self, done: threading.Event) -> None:
        while not done.is_set():
            self._purged += self._receiver.purge()
            sleep(PAUSE_SECONDS)

    def close(self) -> None:
        """Close the receiver."""
        self._receiver.close()
