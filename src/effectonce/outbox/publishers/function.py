"""Any callable as a publisher: it takes one event, and raises when that event could not be published."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ..._handlers import is_awaited
from .._events import Event, Publisher, Results, Unsent, never_awaited

AT_ONCE = 32
"""How many calls of a coroutine function run side by side."""


def around(function: Callable[[Event], object]) -> Publisher:
    """The publisher that calls a function, or awaits a coroutine function."""
    return _Awaited(function) if is_awaited(function) else _Called(function)


def _meaning(error: Exception) -> Exception:
    """A broken connection says nothing against the event."""
    if isinstance(error, ConnectionError | TimeoutError):
        unsent = Unsent(f"{type(error).__name__}: {error}")
        unsent.__cause__ = error
        return unsent
    return error


class _Called:
    keeps_order = False

    def __init__(self, function: Callable[[Event], object]) -> None:
        self._function = function

    def publish(self, events: Sequence[Event]) -> Results:
        return [self._one(event) for event in events]

    def _one(self, event: Event) -> Exception | None:
        try:
            given = self._function(event)
        except Exception as error:
            return _meaning(error)
        if inspect.isawaitable(given):  # of a lambda, or a wrapper: nothing has been sent yet
            raise never_awaited(given)
        return None

    def close(self) -> None:
        """Nothing is held."""


class _Awaited:
    keeps_order = False

    def __init__(self, function: Callable[[Event], Any]) -> None:
        self._function: Callable[[Event], Awaitable[object]] = function

    async def publish(self, events: Sequence[Event]) -> Results:
        slots = asyncio.Semaphore(AT_ONCE)

        async def one(event: Event) -> Exception | None:
            async with slots:
                try:
                    await self._function(event)
                except Exception as error:
                    return _meaning(error)
                return None

        return await asyncio.gather(*map(one, events))

    def close(self) -> None:
        """Nothing is held."""
