"""Threads that help a blocking caller, who asks for them without a lock that an interruption could leave behind.

A signal handler may raise anywhere in Python code, also within ``ThreadPoolExecutor.submit``, whose locks are Python
code: one that stays held there stops every executor of the process, for good. The queue here is written in C.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import count
from queue import SimpleQueue
from threading import Thread

Errand = Callable[[], None]
_NUMBERS = count(1)


class Helpers:
    """At most so many threads, each begun when nobody is free. They end when this is closed, or let go of."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._errands: SimpleQueue[Errand | None] = SimpleQueue()
        self._idle: list[None] = []
        self._hired = 0

    def ask(self, errand: Errand) -> None:
        """Have an errand run by whoever is free, now or later; by nobody, if no thread is to be had."""
        try:
            self._idle.pop()
        except IndexError:
            if self._hired < self.most:
                self._hire(errand)
                return
        self._errands.put(errand)

    def close(self) -> None:
        """Let the threads go, when their errands are done."""
        for _ in range(self._hired):
            self._errands.put(None)

    __del__ = close

    def _hire(self, errand: Errand) -> None:
        # What they do is waited for by who asked; so an interpreter that ends need not wait for them.
        name = f"effectonce_{next(_NUMBERS)}"
        helper = Thread(target=_serve, args=(errand, self._errands, self._idle), name=name, daemon=True)
        with suppress(RuntimeError):
            helper.start()
            self._hired += 1


def _serve(errand: Errand | None, errands: SimpleQueue[Errand | None], idle: list[None]) -> None:
    """Run one errand after the other. What one raises has been told to who asked."""
    while errand is not None:
        with suppress(BaseException):
            errand()
        errand = None  # nothing that it holds is kept
        idle.append(None)
        errand = errands.get()
