"""A few threads that do steps for many callers, on event loops or not: as many in one go as have queued up.

For stores whose driver blocks and whose server takes several requests at once. A free thread takes what waits, up to
what fits into one request; so a caller alone is served at once, and a crowd shares requests.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from ..errors import StoreError, StoreUnavailable

T = TypeVar("T")


class Order:
    """Steps of one caller, and their replies. The first error is the whole order's, unless ``each`` has its own."""

    __slots__ = ("each", "future", "left", "replies", "steps")

    def __init__(self, steps: Sequence[Any], each: bool) -> None:
        self.steps, self.each = steps, each
        self.replies: list[Any] = [None] * len(steps)
        self.left = len(steps)
        self.future: Future[list[Any]] = Future()


class Crew:
    """Threads for steps, at most ``most_at_once()`` of them in one go, and others for errands, which may take long.

    ``perform`` gives a reply or an exception for each step; what it raises is everyone's.
    """

    def __init__(
        self,
        perform: Callable[[list[Any]], list[Any]],
        threads: int,
        most_at_once: Callable[[], int],
        errands: int = 1,
    ) -> None:
        self._perform = perform
        self._threads = threads
        self._most_at_once = most_at_once
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="effectonce-store")
        self._errands = ThreadPoolExecutor(errands, thread_name_prefix="effectonce-store-errands")
        self._lock = threading.Lock()
        self._inbox: deque[tuple[Order, int]] = deque()
        self._hired = self._busy = 0

    def submit(self, steps: Sequence[Any], each: bool = False) -> Future[list[Any]]:
        """Have steps done. Cancelling the future drops what has not been begun."""
        order = Order(steps, each)
        with self._lock:
            waiting = len(self._inbox) + len(steps)
            while self._hired < self._threads and (self._hired - self._busy) * self._most_at_once() < waiting:
                self._start(self._pool, self._work)
                self._hired += 1
            self._inbox.extend((order, number) for number in range(len(steps)))
        return order.future

    def run(self, errand: Callable[[], T]) -> Future[T]:
        """Have something done that is no step."""
        return self._start(self._errands, errand)

    def close(self) -> None:
        """End the threads when their work is done."""
        self._pool.shutdown(wait=True)
        self._errands.shutdown(wait=True)

    def _start(self, pool: ThreadPoolExecutor, job: Callable[[], T]) -> Future[T]:
        try:
            return pool.submit(job)
        except RuntimeError as error:
            raise StoreUnavailable("The store is closed, or the process is ending.") from error

    def _work(self) -> None:
        while taken := self._take():
            try:
                replies = self._perform([order.steps[number] for order, number in taken])
            except Exception as error:  # whatever a driver throws, the thread has to live on
                replies = [error] * len(taken)
            with self._lock:
                self._busy -= 1
                for (order, number), reply in zip(taken, replies, strict=True):
                    _deliver(order, number, reply)

    def _take(self) -> list[tuple[Order, int]]:
        most = self._most_at_once()
        taken: list[tuple[Order, int]] = []
        with self._lock:
            while self._inbox and len(taken) < most:
                order, number = self._inbox.popleft()
                if not order.future.done():
                    taken.append((order, number))
            if taken:
                self._busy += 1
            else:
                self._hired -= 1
        return taken


async def awaited(work: Future[T]) -> T:
    """Wait for a future on an event loop. A cancelled caller drops what has not been begun."""
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[T] = loop.create_future()

    def tell(_: Future[T]) -> None:
        with suppress(RuntimeError):  # a closed loop: nobody waits any more
            loop.call_soon_threadsafe(_settle, waiter, work)

    work.add_done_callback(tell)
    try:
        return await waiter
    except asyncio.CancelledError:
        work.cancel()
        raise


def _deliver(order: Order, number: int, reply: Any) -> None:
    order.replies[number] = reply
    order.left -= 1
    with suppress(InvalidStateError):  # it was cancelled, or another of its steps failed
        if isinstance(reply, Exception) and not (order.each and isinstance(reply, StoreError)):
            order.future.set_exception(reply)
        elif not order.left:
            order.future.set_result(order.replies)


def _settle(waiter: asyncio.Future[T], work: Future[T]) -> None:
    if waiter.done():
        return
    error = None if work.cancelled() else work.exception()
    if work.cancelled():
        waiter.cancel()
    elif error is not None:
        waiter.set_exception(error)
    else:
        waiter.set_result(work.result())
