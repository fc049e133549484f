"""The blocking colour: the same coroutines as asyncio's, driven to their end on the caller's own thread.

The core is written once, as coroutines. Here every store verb, pause and wait does its work before it returns, so
a coroutine never suspends and ``run`` needs no event loop, no second thread and no generated twin.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

from ._helpers import Helpers
from .errors import ColourMismatch, StoreError, UsageError

if TYPE_CHECKING:
    from ._attempt import Attempt
    from .stores.base import Store

T = TypeVar("T")

Job = Callable[[], Coroutine[Any, Any, T] | None]
"""Does its work at once, or gives a coroutine that does and has a result. Each has a context of its own."""
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


def not_awaited(attempt: Attempt, handler: Awaitable[object]) -> ColourMismatch:
    """The error of a handler that is a coroutine after all; it has not begun, so nothing happened."""
    if isinstance(handler, Coroutine):
        handler.close()
    return ColourMismatch(
        "The handler returned a coroutine to a blocking call; it was not run. Use the awaitable form of this call; "
        "what is decorated has to be an `async def` for that.",
        key=attempt.key,
    )


class Blocking:
    """Callers without an event loop."""

    awaits = False
    cancelled: tuple[type[BaseException], ...] = ()
    trouble: tuple[type[BaseException], ...] = (StoreError, UsageError)

    def __init__(self, store: Store) -> None:
        self.store = store.for_blocking()
        self._helpers: Helpers | None = None
        self._pid = 0

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
        """A coroutine can't be awaited here."""
        raise not_awaited(attempt, handler)

    async def apart(self, work: Awaitable[T]) -> T:
        """Nobody is cancelled here."""
        return await work

    async def gather(self, jobs: Sequence[Job[T]], limit: int) -> Gathered[T]:
        """Run jobs side by side, at most ``limit`` at a time, this thread among them; results in order.

        Quick jobs are done here before another thread has begun; slow ones bring in one thread after the other.
        """
        results: list[T | None] = [None] * len(jobs)
        todo = deque(enumerate(jobs))
        context = copy_context()
        helpers: list[threading.Lock] = []  # each held while its helper works
        workers = count(2)  # this thread is the first

        def work() -> None:
            with suppress(IndexError):  # nothing left to do
                while True:
                    place, job = todo.popleft()
                    own = context.copy()
                    waits = own.run(job)
                    if waits is not None:
                        results[place] = own.run(run, waits)

        def call_for_help(helper: Callable[..., None]) -> None:
            if todo and next(workers) <= limit:
                self._crew(limit).ask(partial(helper, helper))

        def help_out(itself: Callable[..., None]) -> None:  # whose name in here would be left to be collected
            working = threading.Lock()
            with working:
                helpers.append(working)  # before it takes a job, so that nobody goes without waiting for that
                call_for_help(itself)
                work()

        interrupted: BaseException | None = None
        while True:
            try:
                if len(todo) > 1:
                    call_for_help(help_out)
                work()
                for helper in helpers:
                    with helper:
                        pass
                return results, interrupted
            except BaseException as error:
                todo.clear()  # Ctrl-C: what has begun is brought to its end, the rest never begins
                interrupted = error

    def close(self) -> None:
        """Let the threads go."""
        if self._helpers is not None:
            self._helpers.close()

    def _crew(self, limit: int) -> Helpers:
        """Threads to share work with; a forked child has none of its parent's."""
        if self._helpers is None or self._helpers.most < limit or self._pid != os.getpid():
            self._helpers, self._pid = Helpers(limit), os.getpid()
        return self._helpers
