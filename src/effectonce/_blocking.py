"""The blocking colour: the same coroutines as asyncio's, driven to their end on the caller's own thread.

The core is written once, as coroutines. Here every store verb, pause and wait does its work before it returns, so
a coroutine never suspends and ``run`` needs no event loop, no second thread and no generated twin.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, TypeVar

from .errors import ColourMismatch, StoreError

if TYPE_CHECKING:
    from ._attempt import Attempt
    from .stores.base import Store

T = TypeVar("T")

Gathered = tuple[list[T | None], BaseException | None]
"""Results in order (None: never begun), and what interrupted the caller meanwhile."""


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Drive a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    coroutine.close()
    raise ColourMismatch(
        "A blocking call had to wait for an event loop. Use the awaitable form of this call."
    )


class Blocking:
    """Callers without an event loop."""

    awaits = False
    cancelled: tuple[type[BaseException], ...] = ()
    trouble: tuple[type[BaseException], ...] = (StoreError,)

    def __init__(self, store: Store) -> None:
        self.store = store.for_blocking()

    async def pause(self, seconds: float) -> None:
        """Let time pass."""
        time.sleep(seconds)  # noqa: ASYNC251 — there is no loop here to block

    async def wait(self, attempt: Attempt, seconds: float) -> None:
        """Wait until an attempt of this process ends, at most ``seconds``."""
        ended = threading.Lock()  # woken in half the time that an Event takes
        ended.acquire()

        def wake() -> None:
            with suppress(RuntimeError):  # it may be told twice
                ended.release()

        attempt.when_ended(wake)
        ended.acquire(timeout=min(seconds, threading.TIMEOUT_MAX))

    async def attend(self, attempt: Attempt, handler: Awaitable[T]) -> T:
        """A coroutine can't be awaited here; it has not begun, so nothing happened."""
        if isinstance(handler, Coroutine):
            handler.close()
        raise ColourMismatch(
            "The handler returned a coroutine to a blocking call; it was not run. Use the awaitable form of this call.",
            key=attempt.key,
        )

    async def gather(self, jobs: Sequence[Callable[[], Coroutine[Any, Any, T]]], limit: int) -> Gathered[T]:
        """Run jobs side by side on at most ``limit`` threads; results in order."""
        from concurrent.futures import ThreadPoolExecutor, wait

        interrupted: BaseException | None = None
        with ThreadPoolExecutor(min(limit, len(jobs)), thread_name_prefix="effectonce") as pool:
            futures = [pool.submit(copy_context().run, lambda job=job: run(job())) for job in jobs]
            try:
                wait(futures)
            except (
                BaseException
            ) as error:  # Ctrl-C: what has begun is brought to its end, the rest never begins
                interrupted = error
                pool.shutdown(cancel_futures=True)
        return [None if future.cancelled() else future.result() for future in futures], interrupted
