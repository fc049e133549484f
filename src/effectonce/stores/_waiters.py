"""Callers on an event loop who are answered together go on together, without a place of their own in the loop's queue.

Whoever waits for one of asyncio's futures is put into the queue of its loop when the answer is there, and that costs
more than taking in an answer which many share. A ``Waiter`` is what a task may wait for instead, by the protocol that
asyncio has for other people's futures. ``answer_all`` has the tasks go on, one after the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable
from contextvars import Context
from typing import Any, ClassVar, Generic, TypeVar

T = TypeVar("T")

WAITING: Any = object()
"""In place of an answer: there is none yet."""
NONE: Any = object()
"""In place of an answer: there won't be one."""


class Waiter(Generic[T]):
    """An answer that is to come. One task awaits it, once."""

    __slots__ = ("_asyncio_future_blocking", "_context", "_loop", "_wake", "answer", "error")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.answer: T = WAITING
        self._wake: Callable[[Waiter[T]], object] | None = None
        self._asyncio_future_blocking = True

    def done(self) -> bool:
        """Whether nothing is left to wait for."""
        return self.answer is not WAITING

    def set_result(self, answer: T) -> None:
        """Here is the answer: its task goes on at the next turn of the loop."""
        self.answer = answer
        self._wake_soon()

    def set_exception(self, error: BaseException) -> None:
        """There won't be an answer."""
        self.answer, self.error = NONE, error
        self._wake_soon()

    def _wake_soon(self) -> None:
        if self._wake is not None:
            self._loop.call_soon(self._wake, self, context=self._context)

    def __await__(self) -> Generator[Waiter[T], None, T]:
        if self.answer is WAITING:
            yield self
        if self.answer is NONE:
            raise self.error
        return self.answer

    # What a task calls

    def add_done_callback(self, wake: Callable[[Waiter[T]], object], *, context: Context) -> None:
        """A task waits."""
        self._wake, self._context = wake, context

    def cancel(self, msg: object = None) -> bool:
        """The task is cancelled; False if it is about to go on anyway."""
        if self.done():
            return False
        self.set_exception(asyncio.CancelledError() if msg is None else asyncio.CancelledError(msg))
        return True

    result: ClassVar[Callable[[], object]] = bool
    """What a woken task asks for first. It finds out the rest where it goes on, so that anything will do, and what is
    no Python costs least."""


def answer_all(waiters: Iterable[Waiter[T]], answers: Iterable[T]) -> None:
    """Give each its answer and have its task go on, here and now. The loop has to call this, no task may."""
    left = zip(waiters, answers, strict=True)
    try:
        for waiter, answer in left:
            if waiter.answer is WAITING:
                waiter.answer = answer
                if waiter._wake is not None:  # a signal may have come before its task could wait
                    waiter._context.run(waiter._wake, waiter)
    except BaseException:  # Ctrl-C in one of the tasks: the others have their answers all the same
        for waiter, answer in left:
            if not waiter.done():
                waiter.set_result(answer)
        raise
