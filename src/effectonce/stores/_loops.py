"""What belongs to an event loop: made when somebody on the loop first asks, put away when the loop ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import suppress
from typing import Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary, finalize, ref


class Closable(Protocol):
    """Something that belongs to a loop."""

    def close(self) -> None:
        """Give back what it holds. Called on the loop, or when the loop does not run any more; perhaps twice."""


C = TypeVar("C", bound=Closable)
Loop = asyncio.AbstractEventLoop


class PerLoop(Generic[C]):
    """One thing for each loop that asks. Several loops may run, in several threads."""

    def __init__(self, make: Callable[[], C]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._things: WeakKeyDictionary[Loop, C] = WeakKeyDictionary()
        self._latest: tuple[Callable[[], Loop | None], C | None] = (_no_loop, None)

    def here(self) -> C:
        """What belongs to the running loop."""
        loop = asyncio.get_running_loop()
        latest, thing = self._latest
        if thing is None or latest() is not loop:
            thing = self._find(loop)
            self._latest = (ref(loop), thing)
        return thing

    def close(self) -> None:
        """Put everything away, on each loop's own thread where it runs."""
        with self._lock:
            things = list(self._things.items())
            self._things.clear()
            self._latest = (_no_loop, None)
        for loop, thing in things:
            if loop.is_running() and loop is not asyncio._get_running_loop():
                loop.call_soon_threadsafe(thing.close)
            else:
                thing.close()

    def __iter__(self) -> Iterator[C]:
        return iter(list(self._things.values()))

    def _find(self, loop: Loop) -> C:
        with self._lock:
            for ended in [other for other in self._things if other.is_closed()]:
                self._things.pop(ended).close()
            if loop not in self._things:
                thing = self._things[loop] = self._make()
                _say_farewell(loop, self._until_the_end(thing, ref(loop)))
                finalize(loop, thing.close)  # for a loop that was not shut down in good order
            return self._things[loop]

    async def _until_the_end(self, thing: C, its_loop: Callable[[], Loop | None]) -> AsyncGenerator[None]:
        """A loop that is shut down closes all asynchronous generators that were begun on it."""
        try:
            yield
        finally:
            with self._lock:
                if (loop := its_loop()) is not None:
                    self._things.pop(loop, None)
                self._latest = (_no_loop, None)
            thing.close()


def _say_farewell(loop: Loop, farewell: AsyncGenerator[None]) -> None:
    """Begin it, and let the loop hold it: it holds the loop."""
    with suppress(StopIteration):
        farewell.__anext__().send(None)
    with suppress(AttributeError):  # a loop that has no room for it is cleared up later
        loop.__dict__.setdefault("_effectonce", []).append(farewell)


def _no_loop() -> None:
    return None
