"""The asyncio colour: the core's coroutines on the caller's own event loop and in the caller's own task."""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ._blocking import Gathered, Job
from .errors import LeaseLost, StoreError, UsageError

if TYPE_CHECKING:
    from ._attempt import Attempt
    from .stores.base import Store

T = TypeVar("T")

LONGEST_TURN = 0.005
"""Seconds after which jobs let the loop go on with others, in case that they never wait."""


class Asyncio:
    """Callers on an event loop."""

    awaits = True
    cancelled: tuple[type[BaseException], ...] = (asyncio.CancelledError,)
    trouble: tuple[type[BaseException], ...] = (StoreError, UsageError, asyncio.CancelledError)

    def __init__(self, store: Store) -> None:
        _refuse_trio()
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

        def tell() -> None:  # on the loop's own thread it need not wait for a turn of its own
            if asyncio._get_running_loop() is loop:
                wake()
            else:
                _on(loop, wake)

        attempt.when_ended(tell)
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

    async def apart(self, work: Awaitable[T]) -> T:
        """Await something in a task of its own, to its end, however often this one is cancelled meanwhile."""
        return await apart(work)

    async def gather(self, jobs: Sequence[Job[T]], limit: int) -> Gathered[T]:
        """Run jobs side by side, at most ``limit`` at a time, also to a cancelled caller's end; results in order."""
        side = SideBySide(jobs, limit)
        interrupted = await side.run()
        if side.error is not None:
            raise side.error
        return side.results, interrupted


async def apart(work: Awaitable[T]) -> T:
    """Await something in a task of its own, to its end, however often this one is cancelled meanwhile."""
    task = asyncio.ensure_future(_awaited(work))
    while not task.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([task])
    return task.result()


async def _awaited(work: Awaitable[T]) -> T:
    """A coroutine of what may be no coroutine: only that can be a task."""
    return await work


def _refuse_trio() -> None:
    """Say it before anything is claimed: trio, also beneath anyio, would only meet "no running event loop"."""
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_run():
        raise UsageError(
            "This runs on trio, and nothing was run: the awaitable forms need asyncio's event loop (uvloop is one, and "
            "anyio has one). On trio call the blocking form in a thread, with a handler that is no coroutine function: "
            "await trio.to_thread.run_sync(receiver.process, message, handler)."
        )


class SideBySide(Generic[T]):
    """Jobs, at most ``limit`` of them at a time: so many tasks, the lines, take one job after the other.

    A task for each job would cost more than many a handler does: two turns of the loop beside its own. What a job needs
    of one is a context in which no other job has set anything. So a line goes on as long as its jobs leave no trace in
    its context; after one that does, a new line takes the next.
    """

    def __init__(self, jobs: Sequence[Job[T]], limit: int) -> None:
        self._loop, self._context = asyncio.get_running_loop(), copy_context()
        self._todo, self._limit = deque(enumerate(jobs)), limit
        self._lines: set[asyncio.Task[None]] = set()
        self._over: asyncio.Future[None] | None = None
        self.results: list[T | None] = [None] * len(jobs)
        """What each job had to give, in order; None where it never began, or was cancelled."""
        self.error: BaseException | None = None
        """What the first job raised that raised something."""

    async def run(self) -> BaseException | None:
        """Run all jobs, also to a cancelled caller's end; the cancellation that has to be heard then."""
        interrupted: BaseException | None = None
        self._begin()
        while self._lines:
            self._over = self._loop.create_future()
            try:
                await self._over
            except asyncio.CancelledError as error:
                interrupted = error
                self._cancel()
        return interrupted

    def _begin(self) -> None:
        """Have as many lines as there may be."""
        for _ in range(min(self._limit - len(self._lines), len(self._todo))):
            line = self._loop.create_task(self._take_turns(), context=self._context.copy())
            self._lines.add(line)
            line.add_done_callback(self._end)

    def _cancel(self) -> None:
        """Bring to an end what has begun; the rest never begins."""
        self._todo.clear()
        for line in self._lines:
            line.cancel()

    def _end(self, line: asyncio.Task[None]) -> None:
        self._lines.discard(line)
        if not line.cancelled() and (error := line.exception()) is not None:
            self.error = self.error or error
        self._begin()  # a line that has a trace of its last job leaves the others' to a new one
        if not self._lines and self._over is not None and not self._over.done():
            self._over.set_result(None)

    async def _take_turns(self) -> None:
        """Do one job after the other, until there are no more, or one has left a trace."""
        loop, line = self._loop, asyncio.current_task()
        assert line is not None
        context, turn_ends = copy_context(), loop.time() + LONGEST_TURN
        while self._todo:
            place, job = self._todo.popleft()
            try:
                waits = job()
                if waits is not None:
                    self.results[place] = await waits
            except asyncio.CancelledError:
                pass
            except Exception as error:
                self.error = self.error or error
            if line.cancelling() or not _is_like(copy_context(), context):
                return
            if loop.time() >= turn_ends:
                await asyncio.sleep(0)
                turn_ends = loop.time() + LONGEST_TURN


def _is_like(context: Context, other: Context) -> bool:
    """Whether two contexts have the same values, and not only equal ones."""
    if len(context) != len(other):
        return False
    for variable, value in context.items():  # noqa: SIM110 - all() with a generator takes twice as long
        if variable not in other or other[variable] is not value:
            return False
    return True


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
