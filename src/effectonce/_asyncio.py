"""The asyncio colour: the core's coroutines on the caller's own event loop and in the caller's own task."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from ._blocking import Gathered
from .errors import LeaseLost, StoreError

if TYPE_CHECKING:
    from ._attempt import Attempt
    from .stores.base import Store

T = TypeVar("T")


class Asyncio:
    """Callers on an event loop."""

    awaits = True
    cancelled: tuple[type[BaseException], ...] = (asyncio.CancelledError,)
    trouble: tuple[type[BaseException], ...] = (StoreError, asyncio.CancelledError)

    def __init__(self, store: Store) -> None:
        self.store = store.for_asyncio()

    async def pause(self, seconds: float) -> None:
        """Let time pass."""
        await asyncio.sleep(seconds)

    async def wait(self, attempt: Attempt, seconds: float) -> None:
        """Wait until an attempt of this process ends, at most ``seconds``."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not ended.done():
                ended.set_result(None)

        attempt.when_ended(lambda: _on(loop, wake))
        timer = loop.call_later(seconds, wake)
        try:
            await ended
        finally:
            timer.cancel()

    async def attend(self, attempt: Attempt, handler: Awaitable[T]) -> T:
        """Await the handler, and cancel it when the keeper says that the attempt's lease is lost."""
        task = asyncio.current_task()
        running = _Running(asyncio.get_running_loop(), task)
        attempt.when_lost(running.lose)
        try:
            return await handler
        except asyncio.CancelledError:
            if running.cancelled_here and task is not None and task.uncancel() == 0:
                raise LeaseLost(
                    "The handler was cancelled because its lease was lost.", key=attempt.key
                ) from None
            raise
        finally:
            running.task = None
            attempt.when_lost(_nobody)  # else attempt, task and context would hold on to each other

    async def apart(self, work: Coroutine[Any, Any, T]) -> T:
        """Await something in a task of its own, to its end, however often this one is cancelled meanwhile."""
        task = asyncio.ensure_future(work)
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        return task.result()

    async def gather(self, jobs: Sequence[Callable[[], Coroutine[Any, Any, T]]], limit: int) -> Gathered[T]:
        """Run jobs side by side, at most ``limit`` at a time, also to a cancelled caller's end; results in order."""
        slots = asyncio.Semaphore(limit)
        interrupted: BaseException | None = None

        async def one(job: Callable[[], Coroutine[Any, Any, T]]) -> T | None:
            async with slots:
                return None if interrupted else await job()

        tasks = [asyncio.ensure_future(one(job)) for job in jobs]
        while not all(task.done() for task in tasks):
            try:
                await asyncio.wait(tasks)
            except asyncio.CancelledError as error:
                interrupted = error
                for task in tasks:
                    task.cancel()
        return [None if task.cancelled() else task.result() for task in tasks], interrupted


class _Running:
    """The task that a handler runs in; none when it has ended."""

    __slots__ = ("cancelled_here", "loop", "task")

    def __init__(self, loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any] | None) -> None:
        self.loop, self.task, self.cancelled_here = loop, task, False

    def lose(self) -> None:
        """Called from the keeper's thread when the lease is lost."""
        _on(self.loop, self.cancel)

    def cancel(self) -> None:
        """Cancel it, if it is still running."""
        if self.task is not None:
            self.cancelled_here = True
            self.task.cancel()


def _nobody() -> None:
    """Hears that a lease was lost when nothing is left to be cancelled."""


def _on(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    """Call back on a loop. On its own thread it needs no waking up."""
    if asyncio._get_running_loop() is loop:
        loop.call_soon(callback)
        return
    with suppress(RuntimeError):  # a closed loop has nobody left to tell
        loop.call_soon_threadsafe(callback)
