"""Blocking work for asyncio callers: everything that one turn of a loop asks for goes to a thread in one hop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Generic, TypeVar

from ..errors import StoreUnavailable

C = TypeVar("C")
A = TypeVar("A")

Waiting = tuple[Sequence[C], "asyncio.AbstractEventLoop", "asyncio.Future[list[A]]"]
Settled = tuple["asyncio.Future[list[A]]", "list[A] | Exception"]


class Handover(Generic[C, A]):
    """Collects commands of event loops and executes them together on one thread, never on a loop.

    ``is_common`` tells failures that no single command is to blame for: all who were executed together get them.
    """

    def __init__(
        self, execute: Callable[[Sequence[C]], list[A]], is_common: Callable[[Exception], bool]
    ) -> None:
        self._execute = execute
        self._is_common = is_common
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="effectonce-store")
        self._lock = threading.Lock()
        self._inbox: list[Waiting[C, A]] = []
        self._draining = False

    async def submit(self, commands: Sequence[C]) -> list[A]:
        """Have commands executed; the loop goes on meanwhile. Cancelling the caller does not stop them."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[A]] = loop.create_future()
        with self._lock:
            if not self._draining:
                try:
                    self._thread.submit(self._drain)
                except RuntimeError as error:
                    raise StoreUnavailable("The store is closed, or the process is ending.") from error
                self._draining = True
            self._inbox.append((commands, loop, future))
        return await future

    def close(self) -> None:
        """End the thread when its work is done."""
        self._thread.shutdown(wait=True)

    def _drain(self) -> None:
        while True:
            with self._lock:
                batch, self._inbox = self._inbox, []
                if not batch:
                    self._draining = False
                    return
            by_loop: dict[asyncio.AbstractEventLoop, list[Settled[A]]] = {}
            for (_, loop, future), answers in zip(batch, self._together(batch), strict=True):
                by_loop.setdefault(loop, []).append((future, answers))
            for loop, settled in by_loop.items():
                with suppress(RuntimeError):  # a closed loop: nobody waits any more
                    loop.call_soon_threadsafe(_settle, settled)

    def _together(self, batch: list[Waiting[C, A]]) -> list[list[A] | Exception]:
        """Execute for all at once; if that fails, for each alone, so that a failure is its own caller's only."""
        try:
            answers = iter(self._execute([command for commands, _, _ in batch for command in commands]))
        except Exception as error:
            if len(batch) == 1 or self._is_common(error):
                return [error for _ in batch]
            return [answer for waiting in batch for answer in self._together([waiting])]
        return [[next(answers) for _ in commands] for commands, _, _ in batch]


def _settle(settled: list[Settled[A]]) -> None:
    for future, answers in settled:
        if future.done():
            continue
        if isinstance(answers, Exception):
            future.set_exception(answers)
        else:
            future.set_result(answers)
