"""Running a whole transaction again: when the engine asks for it, when a key is in progress, when nobody knows.

A transaction that lost a race (a deadlock, a serialization failure, a lock that did not come) has done nothing, and is
run again from its beginning. So is one whose COMMIT was not answered: the key tells whether it happened, because what
was committed is replayed then and not run again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from itertools import count
from typing import Final, TypeVar

from ..errors import InProgress, UsageError
from .base import is_lost, is_retryable

C = TypeVar("C")
R = TypeVar("R")

TRIES: Final = 10
FIRST_PAUSE, LAST_PAUSE = 0.005, 1.0


def retrying(
    begin: Callable[[], AbstractContextManager[C]], body: Callable[[C], R], *, tries: int = TRIES
) -> R:
    """Run ``body(connection)`` in a transaction, and all of it again where that may help; at most ``tries`` times.

    ``begin()`` gives a context manager that commits when it is left, and rolls back when it is left by an exception: a
    pool's ``connection``, ``engine.begin``, ``Session.begin``, ``lambda: psycopg.connect(url)``. All that ``body``
    changes has to be done by handlers of ``receiver.on(connection)``: only that is done once however often it runs.
    """
    _check(tries)
    for tried in count(1):
        try:
            with begin() as connection:
                return body(connection)
        except Exception as error:
            if tried >= tries or not may_help(error):
                raise
            time.sleep(pause(tried, error))
        else:
            raise swallowed()
    raise AssertionError("unreachable")


async def aretrying(
    begin: Callable[[], AbstractAsyncContextManager[C]],
    body: Callable[[C], Awaitable[R]],
    *,
    tries: int = TRIES,
) -> R:
    """``retrying`` for callers on an event loop."""
    from asyncio import sleep

    _check(tries)
    for tried in count(1):
        try:
            async with begin() as connection:
                return await body(connection)
        except Exception as error:
            if tried >= tries or not may_help(error):
                raise
            await sleep(pause(tried, error))
        else:
            raise swallowed()
    raise AssertionError("unreachable")


def swallowed() -> UsageError:
    """What to say when neither a result nor an error has come out of a transaction."""
    return UsageError(
        "The transaction has kept an error of its body to itself, so nobody knows what became of it. What begin() "
        "gives has to roll back and raise."
    )


def may_help(error: BaseException) -> bool:
    """Whether running the whole transaction again may end otherwise."""
    return isinstance(error, InProgress) or is_retryable(error) or is_lost(error)


def pause(tried: int, error: BaseException) -> float:
    """How long to wait after so many tries: longer each time, never in step with others, never longer than needed."""
    longest: float = min(FIRST_PAUSE * 2**tried, LAST_PAUSE)
    if isinstance(error, InProgress):
        longest = min(longest, error.retry_after)
    return longest * (0.5 + random.random() / 2)


def _check(tries: int) -> None:
    if tries < 1:
        raise UsageError(f"tries={tries} must be at least 1.")
