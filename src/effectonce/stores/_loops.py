"""What belongs to an event loop: made when somebody on the loop first asks, put away when the loop has ended."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary, finalize, ref


class Closable(Protocol):
    """Something that belongs to a loop."""

    def close(self) -> None:
        """Give back what it holds. Called on the loop, or when the loop does not run any more."""


C = TypeVar("C", bound=Closable)


class PerLoop(Generic[C]):
    """One thing for each loop that asks. Several loops may run in several threads."""

    def __init__(self, make: Callable[[], C]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._things: WeakKeyDictionary[asyncio.AbstractEventLoop, C] = WeakKeyDictionary()
        self._latest: tuple[Callable[[], asyncio.AbstractEventLoop | None], C | None] = (_none, None)

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
            self._latest = (_none, None)
        for loop, thing in things:
            if loop.is_running() and loop is not asyncio._get_running_loop():
                loop.call_soon_threadsafe(thing.close)
            else:
                thing.close()

    def __iter__(self) -> Iterator[C]:
        return iter(list(self._things.values()))

    def _find(self, loop: asyncio.AbstractEventLoop) -> C:
        with self._lock:
            for ended in [other for other in self._things if other.is_closed()]:
                self._things.pop(ended).close()
            if loop not in self._things:
                thing = self._things[loop] = self._make()
                finalize(loop, thing.close)  # for a loop that is dropped without being closed
            return self._things[loop]


def _none() -> None:
    return None
