"""What goes on until it is told to stop, such as a relay or a sweeper. ``run`` blocks; ``arun`` is for event loops.

Both drive one body, of coroutines. What differs is who does the work: a crew on threads, or one beside an event loop.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any, Generic, Protocol, TypeVar

from . import _blocking


class Crew(Protocol):
    """Who does the work."""

    async def end(self) -> None:
        """Finish what was begun, and go."""
        ...


C = TypeVar("C", bound=Crew)
R = TypeVar("R")
T = TypeVar("T")


class Service(ABC, Generic[C, R]):
    """Works until it is stopped, or once for all there is. Who inherits has the body, and a crew for either colour."""

    _crew: C | None = None

    def run(self) -> None:
        """Go on until ``stop``. What is under way then is finished first; the rest is left for others."""
        if self._awaits():
            asyncio.run(self.arun())
        else:
            _blocking.run(self._with(self._on_threads(), self._run))

    async def arun(self) -> None:
        """The same on an event loop. Cancelled, it finishes what is under way too."""
        running = asyncio.ensure_future(self._with(self._on_loop(), self._run))
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            self.stop()
            await running
            raise

    def run_once(self) -> R:
        """Do what there is to do now."""
        if self._awaits():
            return asyncio.run(self.arun_once())
        return _blocking.run(self._with(self._on_threads(), self._run_once))

    async def arun_once(self) -> R:
        """The same on an event loop."""
        return await self._with(self._on_loop(), self._run_once)

    @abstractmethod
    def stop(self) -> None:
        """Have ``run`` return soon. May be called in a signal handler, and from any thread."""

    async def _with(self, crew: C, body: Callable[[C], Coroutine[Any, Any, T]]) -> T:
        self._crew = crew
        try:
            return await body(crew)
        finally:
            await crew.end()

    @abstractmethod
    def _awaits(self) -> bool:
        """Whether something in it has to be awaited, so that ``run`` needs an event loop too."""

    @abstractmethod
    def _on_threads(self) -> C: ...
    @abstractmethod
    def _on_loop(self) -> C: ...
    @abstractmethod
    async def _run(self, crew: C) -> None: ...
    @abstractmethod
    async def _run_once(self, crew: C) -> R: ...
