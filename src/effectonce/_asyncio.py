"""The asyncio colour: the core's coroutines on the caller's own event loop and in the caller's own task."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ._blocking import Gathered
from .errors import LeaseLost, StoreError, UsageError

if TYPE_CHECKING:
    from ._attempt import Attempt
    from .stores.base import Store

T = TypeVar("T")


class Asyncio:
    """Callers on an event loop."""

    awaits = True
    cancelled: tuple[type[BaseException], ...] = (asyncio.CancelledError,)
    trouble: tuple[type[BaseException], ...] = (StoreError, UsageError, asyncio.CancelledError)

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
        loop = asyncio.get_running_loop()  # asks the system each time, so once has to do
        watch = Watch(attempt, loop, asyncio.current_task(loop))
        try:
            return await handler
        except asyncio.CancelledError as cancelled:
            if (lost := watch.meaning(cancelled)) is not cancelled:
                raise lost from None
            raise
        finally:
            watch.end()

    async def apart(self, work: Coroutine[Any, Any, T]) -> T:
        """Await something in a task of its own, to its end, however often this one is cancelled meanwhile."""
        task = asyncio.ensure_future(work)
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        return task.result()

    async def gather(self, jobs: Sequence[Callable[[], Coroutine[Any, Any, T]]], limit: int) -> Gathered[T]:
        """Run jobs side by side, at most ``limit`` at a time, also to a cancelled caller's end; results in order."""
        side = SideBySide(jobs, limit)
        interrupted: BaseException | None = None
        side.begin()
        while side.running:
            try:
                await side.over
            except asyncio.CancelledError as error:
                interrupted = error
                side.cancel()
        results = [None if task.cancelled() else task.result() for task in side.tasks]
        return results + [None] * (len(jobs) - len(results)), interrupted


class SideBySide(Generic[T]):
    """Jobs, at most ``limit`` of them at a time. Closures would hold on to each other, and to all, until collected."""

    def __init__(self, jobs: Sequence[Callable[[], Coroutine[Any, Any, T]]], limit: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._todo, self._limit = deque(jobs), limit
        self.tasks: list[asyncio.Task[T]] = []
        self.running = 0
        self.over: asyncio.Future[None] = self._loop.create_future()

    def begin(self) -> None:
        """Begin as many as may run."""
        while self._todo and self.running < self._limit:
            self.running += 1
            task = self._loop.create_task(self._todo.popleft()())  # a task, and so a context, for each
            task.add_done_callback(self._end)
            self.tasks.append(task)

    def cancel(self) -> None:
        """Bring to an end what has begun; the rest never begins."""
        self._todo.clear()
        self.over = self._loop.create_future()
        for task in self.tasks:
            task.cancel()

    def _end(self, _: object) -> None:
        self.running -= 1
        self.begin()
        if not self.running and not self.over.done():
            self.over.set_result(None)


class Watch:
    """Cancels the task that a handler runs in, when the lease of its attempt is lost."""

    __slots__ = ("_attempt", "_cancelled_here", "_loop", "_task")

    def __init__(
        self, attempt: Attempt, loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any] | None
    ) -> None:
        self._attempt, self._loop, self._task, self._cancelled_here = attempt, loop, task, False
        attempt.line = task
        attempt.when_lost(self._lose)

    def meaning(self, error: BaseException) -> BaseException:
        """What a handler met: a cancellation that was made here says that its lease was lost."""
        if not self._cancelled_here or not isinstance(error, asyncio.CancelledError):
            return error
        self._cancelled_here = False
        if self._task is None or self._task.uncancel() > 0:
            return error
        return LeaseLost("The handler was cancelled because its lease was lost.", key=self._attempt.key)

    def end(self) -> None:
        """The handler has ended: there is nothing to cancel; a cancellation that it kept to itself is taken back."""
        if self._cancelled_here and self._task is not None:
            self._task.uncancel()
        self._task = self._attempt.line = None  # else attempt, task and context would hold on to each other
        self._attempt.when_lost(_nobody)

    def _lose(self) -> None:
        _on(self._loop, self._cancel)  # from the keeper's thread

    def _cancel(self) -> None:
        if self._task is not None:
            self._cancelled_here = True
            self._task.cancel()


def _nobody() -> None:
    """Hears that a lease was lost when nothing is left to be cancelled."""


def _on(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    """Call back on a loop. On its own thread it needs no waking up."""
    if asyncio._get_running_loop() is loop:
        loop.call_soon(callback)
        return
    with suppress(RuntimeError):  # a closed loop has nobody left to tell
        loop.call_soon_threadsafe(callback)
