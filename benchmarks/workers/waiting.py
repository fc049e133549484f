"""How long a waiting duplicate waits once the handler has ended: in threads, and on an event loop."""

from __future__ import annotations

import asyncio
import statistics
import threading
from collections.abc import Awaitable, Callable
from time import perf_counter, sleep
from typing import Any

from benchmarks.workers.base import RESULT, Figure, new_keys

# Long enough for the duplicate to be parked, short enough that a poller has not slowed its polling down yet.
PARK_SECONDS = 0.005

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
