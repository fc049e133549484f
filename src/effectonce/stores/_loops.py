"""What belongs to an event loop: made when somebody on the loop first asks, put away when the loop ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import suppress
from threading import get_ident
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary, finalize, ref


class Closable(Protocol):
    """Something that belongs to a loop."""

    def close(self) -> None:
        """Give back what it holds. Called on the loop, or when the loop does not run any more; perhaps twice."""


C = TypeVar("C", bound=Closable)
Loop = asyncio.AbstractEventLoop


def whereabouts(loop: Loop) -> Any:
    """What has as its ``_thread_id`` the thread that a loop runs on now: None, if it does not.

    So ``whereabouts(loop)._thread_id == get_ident()`` says that a loop is the running one, in a quarter of the time
    that asyncio takes on Python 3.11, where it asks the system for the number of the process each time.
    """
    return loop if hasattr(loop, "_thread_id") else _Whereabouts(loop)


class _Whereabouts:
    """The same for loops that don't tell, as uvloop's."""

    def __init__(self, loop: Loop) -> None:
        self._loop = ref(loop)

    @property
    def _thread_id(self) -> int | None:
        return get_ident() if asyncio._get_running_loop() is self._loop() else None


class PerLoop(Generic[C]):
    """One thing for each loop that asks. Several loops may run, in several threads."""

    def __init__(self, make: Callable[[], C]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._things: WeakKeyDictionary[Loop, C] = WeakKeyDictionary()
        self._latest: tuple[Callable[[], Any], C | None] = (_no_loop, None)

    def here(self) -> C:
        """What belongs to the running loop."""
        latest, thing = self._latest
        where = latest()
        if thing is None or where is None or where._thread_id != get_ident():
            loop = asyncio.get_running_loop()
            thing, where = self._find(loop), whereabouts(loop)
            self._latest = (ref(loop) if where is loop else lambda: where, thing)
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
