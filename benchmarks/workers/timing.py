"""The timed loops: one thread, many threads, and the weighing of a file."""

from __future__ import annotations

import gc
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter, process_time

from benchmarks.workers.base import RANDOM, Counter, Figure, Fill, Run, Setup, Subject, chunks, new_keys


class Stream:
    """Times `run(keys)` on one thread: fresh keys for "new", keys seen before for "dup"."""

    def __init__(
        self,
        setup: Setup,
        run: Run,
        counter: Counter,
        *,
        fill: Fill | None = None,
        close: Callable[[], object] = lambda: None,
    ) -> None:
        self._run, self._counter, self._close = run, counter, close
        self._is_dup = setup.op == "dup"
        self._known = _filled(setup, fill or run)
        if not self._is_dup:
            self._known = []
        # Else the collection before each slice would go through all these keys, where a small store has few.
        gc.freeze()

    def slice(self, operations: int) -> Figure:
        """Run the operations and check that the handler ran exactly as often as it should."""
        keys = RANDOM.choices(self._known, k=operations) if self._is_dup else new_keys(operations)
        before = self._counter.runs()
        start, start_cpu = perf_counter(), process_time()
        self._run(keys)
        seconds, cpu = perf_counter() - start, process_time() - start_cpu
        _check(self._counter.runs() - before, 0 if self._is_dup else operations)
        # The contender's own time on a core tells something even where others keep the cores busy.
        return {"value": seconds / operations, "operations": operations, "cpu": cpu / operations}

    def close(self) -> None:
        """Close the contender."""
        self._close()


class Crowd:
    """Times `run(keys)` of new keys on many threads: a share for each, or as much as they can for a while.

    The two differ more than one would think. SQLite's busy handler is unfair: a thread that has just committed
    mostly gets the lock again, while the others sleep longer and longer. Given equal shares, the slice lasts until
    the last sleeper is done, as a user's work would. For a while, the lucky thread does nearly everything.
    """

    def __init__(
        self, setup: Setup, run: Run, counter: Counter, *, close: Callable[[], object] = lambda: None
    ) -> None:
        self._run, self._counter, self._close = run, counter, close
        self._threads, self._seconds = setup.threads, setup.slice_seconds
        self._pool = ThreadPoolExecutor(setup.threads)

    def slice(self, operations: int) -> Figure:
        """Do the operations, or what the time allows of them, and tell the slowest hundredth too."""
        keys = new_keys(operations)
        before = self._counter.runs()
        # The barrier hands each pooled thread exactly one share, and all of them start together.
        barrier = threading.Barrier(self._threads + 1)
        jobs = [
            self._pool.submit(self._work, barrier, keys[number :: self._threads])
            for number in range(self._threads)
        ]
        barrier.wait()
        start = perf_counter()
        latencies = sorted(latency for job in jobs for latency in job.result())
        seconds = perf_counter() - start
        _check(self._counter.runs() - before, len(latencies))
        # With a time limit only what ended in time counts: each thread's last operation came too late.
        done = len(latencies) - self._threads if self._seconds else len(latencies)
        if done <= 0:
            raise AssertionError(f"nothing ended within {self._seconds} s")
        return {
            "value": (self._seconds or seconds) / done,
            "operations": done,
            "p99": latencies[int(len(latencies) * 0.99)],
        }

    def _work(self, barrier: threading.Barrier, keys: Sequence[str]) -> list[float]:
        latencies = []

        def share() -> Iterator[str]:
            for key in keys:
                begun = perf_counter()
                yield key
                # Asked for the next key, so this one is done.
                done = perf_counter()
                latencies.append(done - begun)
                if self._seconds and done > end:
                    return
            if self._seconds:
                raise AssertionError("the keys ran out before the time did")

        barrier.wait()
        end = perf_counter() + self._seconds
        self._run(share())
        return latencies

    def close(self) -> None:
        """End the threads, then the contender."""
        self._pool.shutdown()
        self._close()


def stream(
    setup: Setup,
    run: Run,
    counter: Counter,
    *,
    fill: Fill | None = None,
    close: Callable[[], object] = lambda: None,
) -> Subject:
    """The timed loop that fits the setup."""
    if setup.threads > 1:
        return Crowd(setup, run, counter, close=close)
    return Stream(setup, run, counter, fill=fill, close=close)


def _filled(setup: Setup, fill: Fill) -> list[str]:
    """The keys that are in the store beforehand: put there now, or by the process of an earlier repetition."""
    kept = Path(setup.folder) / "keys"
    if kept.exists():
        RANDOM.seed()  # what is new now must not be what was new then
        return kept.read_text().split()
    known = new_keys(setup.prefill)
    for chunk in chunks(known, 500):
        fill(chunk)
    kept.write_text("\n".join(known))
    return known


def _check(ran: int, due: int) -> None:
    if ran != due:
        raise AssertionError(f"the handler ran {ran} times where {due} were due")


class FileSize:
    """What a key adds to a SQLite file, indexes included, after a checkpoint. Nothing is vacuumed."""

    def __init__(self, setup: Setup, fill: Fill, close: Callable[[], object]) -> None:
        self._file, self._fill, self._close_store = setup.file(), fill, close
        # The empty schema is left out, because a rival too slow for many keys would be judged by it.
        self._empty_bytes = self._weigh()

    def _weigh(self) -> int:
        connection = sqlite3.connect(self._file, timeout=30)
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.close()
        return self._file.stat().st_size

    def slice(self, operations: int) -> Figure:
        """Fill the store, close it, and weigh the file."""
        for chunk in chunks(new_keys(operations), 500):
            self._fill(chunk)
        self._close_store()
        added = self._weigh() - self._empty_bytes
        return {"value": added / operations, "operations": operations, "empty_file_bytes": self._empty_bytes}

    def close(self) -> None:
        """The store was closed before it was weighed."""
