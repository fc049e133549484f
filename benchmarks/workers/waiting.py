"""How long a waiting duplicate waits once the handler has ended: in threads, on an event loop, across processes."""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import sys
import threading
from collections.abc import Awaitable, Callable
from importlib import import_module
from time import perf_counter, sleep
from typing import Any

from benchmarks.workers.base import RESULT, Figure, Setup, new_keys

# Long enough for the duplicate to be parked, short enough that a poller has not slowed its polling down yet.
PARK_SECONDS = 0.005
PARK_ELSEWHERE_SECONDS = 0.02
PARK_TIMEOUT_SECONDS = 30.0

Body = Callable[[], dict[str, Any]]
AsyncBody = Callable[[], Awaitable[dict[str, Any]]]


def must_not_run() -> dict[str, Any]:
    """The duplicate's body: it has to be answered from the first run."""
    raise AssertionError("the duplicate ran the handler")


async def must_not_run_async() -> dict[str, Any]:
    """The duplicate's body on an event loop."""
    return must_not_run()


class WaitInThreads:
    """One thread runs `call(key, body)`, another calls it for the same key and waits."""

    def __init__(
        self, call: Callable[[str, Body], object], close: Callable[[], object] = lambda: None
    ) -> None:
        self._call, self._close = call, close

    def slice(self, operations: int) -> Figure:
        """The median wait of that many duplicates."""
        waits = [self._wait(key) for key in new_keys(operations)]
        return {"value": statistics.median(waits), "operations": operations}

    def _wait(self, key: str) -> float:
        started, gate = threading.Event(), threading.Event()
        times: dict[str, float] = {}

        def body() -> dict[str, Any]:
            started.set()
            gate.wait()
            times["ended"] = perf_counter()
            return RESULT

        def duplicate() -> None:
            self._call(key, must_not_run)
            times["answered"] = perf_counter()

        first = threading.Thread(target=self._call, args=(key, body))
        second = threading.Thread(target=duplicate)
        first.start()
        started.wait()
        second.start()
        sleep(PARK_SECONDS)
        gate.set()
        first.join()
        second.join()
        return times["answered"] - times["ended"]

    def close(self) -> None:
        """Close the contender."""
        self._close()


class WaitOnLoop:
    """The same with two tasks of one event loop."""

    def __init__(
        self,
        call: Callable[[str, AsyncBody], Awaitable[object]],
        close: Callable[[], object] = lambda: None,
    ) -> None:
        self._call, self._close = call, close
        self._loop = asyncio.new_event_loop()

    def slice(self, operations: int) -> Figure:
        """The median wait of that many duplicates."""
        waits = [self._loop.run_until_complete(self._wait(key)) for key in new_keys(operations)]
        return {"value": statistics.median(waits), "operations": operations}

    async def _wait(self, key: str) -> float:
        started, gate = asyncio.Event(), asyncio.Event()
        times: dict[str, float] = {}

        async def body() -> dict[str, Any]:
            started.set()
            await gate.wait()
            times["ended"] = perf_counter()
            return RESULT

        async def duplicate() -> None:
            await self._call(key, must_not_run_async)
            times["answered"] = perf_counter()

        first = asyncio.ensure_future(self._call(key, body))
        await started.wait()
        second = asyncio.ensure_future(duplicate())
        await asyncio.sleep(PARK_SECONDS)
        gate.set()
        await asyncio.gather(first, second)
        return times["answered"] - times["ended"]

    def close(self) -> None:
        """Close the contender, then the loop."""
        self._close()
        self._loop.close()


class WaitAcrossProcesses:
    """This process runs `call(key, body)`, and another one calls it for the same key and waits.

    The other process opens the same contender with the same setup. Both read the machine's one monotonic clock.
    """

    def __init__(
        self, setup: Setup, call: Callable[[str, Body], object], close: Callable[[], object]
    ) -> None:
        self._call, self._close = call, close
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._other = context.Process(target=_duplicates, args=(sys.argv[1], setup, theirs), daemon=True)
        self._other.start()
        self._hear()

    def slice(self, operations: int) -> Figure:
        """The median wait of that many duplicates."""
        waits = [self._wait(key) for key in new_keys(operations)]
        return {"value": statistics.median(waits), "operations": operations}

    def _wait(self, key: str) -> float:
        started, gate = threading.Event(), threading.Event()
        times: list[float] = []

        def body() -> dict[str, Any]:
            started.set()
            gate.wait()
            times.append(perf_counter())
            return RESULT

        first = threading.Thread(target=self._call, args=(key, body))
        first.start()
        started.wait()
        self._pipe.send(key)
        sleep(PARK_ELSEWHERE_SECONDS)
        gate.set()
        first.join()
        return self._hear() - times[0]

    def _hear(self) -> float:
        if not self._pipe.poll(PARK_TIMEOUT_SECONDS):
            raise TimeoutError("the duplicate in the other process never got its answer")
        word = self._pipe.recv()
        if isinstance(word, str):
            raise RuntimeError(word)
        return float(word)

    def close(self) -> None:
        """End the other process, then close the contender."""
        self._pipe.send(None)
        self._other.join(5)
        self._close()


def _duplicates(contender: str, setup: Setup, pipe: Any) -> None:
    """The other process: says when it is ready, and then when each duplicate was answered."""
    try:
        call = import_module(f"benchmarks.workers.{contender}").open_forms(setup).call
        pipe.send(0.0)
        while (key := pipe.recv()) is not None:
            call(key, must_not_run)
            pipe.send(perf_counter())
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
