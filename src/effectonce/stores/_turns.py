"""Callers on one event loop share round trips: what is asked for in a loop's turn, or while others wait, goes together.

A caller who is alone goes straight through, in its own task and at once. As long as any round trip is on its way,
those who come queue up; at the end of the loop's turn all of them go together, on lanes that are free or as soon as one
is. There is no task per caller: one task serves a lane for as long as there is something to do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from math import ceil
from typing import Generic, TypeVar, cast
from weakref import ref

from ._waiters import WAITING, Waiter, answer_all

S = TypeVar("S")
R = TypeVar("R")
Loop = asyncio.AbstractEventLoop

MOST_AT_ONCE, FEW = 512, 16
"""Steps in one round trip, so that the last caller of a long queue does not wait for all of it; and how many go
together even if other lanes are free."""
MANY = 8
"""Who waits takes no lane of their own while so many times as many are on their way: they go with the next who come
back. Else whoever went alone once would go alone again and again, beside a crowd."""


class Turns(Generic[S, R]):
    """Executes the steps of one event loop's callers, at most ``lanes`` round trips at a time.

    ``execute`` has steps done and gives their replies in order; an Exception in place of a reply goes to the caller
    whose step it was, and to no other. When ``execute`` itself raises, no caller of that round trip has an answer. It
    is run in the task of a caller who is alone: when that one is cancelled, it has to leave its connection usable, or
    not leave it at all.
    """

    def __init__(
        self, execute: Callable[[Sequence[S]], Awaitable[Sequence[R | Exception]]], lanes: int
    ) -> None:
        self._execute = execute
        self._lanes = lanes
        self._its_loop = ref(asyncio.get_running_loop())  # whose end may be the end of this
        self._busy = self._under_way = 0
        self._queue: list[tuple[Sequence[S], Waiter[Sequence[R | Exception]]]] = []
        self._flushing = False
        self._serving: set[asyncio.Task[None]] = set()

    @property
    def _loop(self) -> Loop:
        loop = self._its_loop()
        assert loop is not None  # it runs
        return loop

    async def submit(self, steps: Sequence[S]) -> list[R]:
        """Have steps done. Cancelling the caller does not stop what others asked for."""
        replies = await self.answers(steps)
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return cast("list[R]", list(replies))

    def answers(self, steps: Sequence[S]) -> Awaitable[Sequence[R | Exception]]:
        """The same, with an Exception in place of a reply: no coroutine for who is in a crowd."""
        waiter = self.join(steps)
        if waiter is None:
            self._busy = self._under_way = 1
            return self._go_alone(steps)
        return waiter

    def join(self, steps: Sequence[S]) -> Waiter[Sequence[R | Exception]] | None:
        """The same for who is not alone."""
        if not (self._busy or self._queue):
            return None
        waiter: Waiter[Sequence[R | Exception]] = Waiter(cast("Loop", self._its_loop()))  # on which this runs
        self._queue.append((steps, waiter))
        if not self._flushing and self._busy < self._lanes:
            self._flush_soon()
        return waiter

    async def _go_alone(self, steps: Sequence[S]) -> Sequence[R | Exception]:
        try:
            return await self._execute(steps)
        finally:
            self._busy -= 1
            self._under_way -= 1
            if self._queue and not self._flushing:
                self._flush_soon()

    def _flush_soon(self) -> None:
        """At the end of this turn of the loop, so that everyone who comes in it is there."""
        self._flushing = True
        self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        while self._queue and self._busy < self._lanes:
            if self._busy > 1 and len(self._queue) * MANY <= self._under_way:
                break
            share = max(FEW, ceil(len(self._queue) / (self._lanes - self._busy)))
            self._busy += 1
            task = self._loop.create_task(self._serve(self._next(share)))
            self._serving.add(task)  # a loop holds its tasks weakly
            task.add_done_callback(self._serving.discard)

    def _next(self, most: int = MOST_AT_ONCE) -> list[tuple[Sequence[S], Waiter[Sequence[R | Exception]]]]:
        """Those who share the next round trip; who was cancelled while waiting has asked for nothing."""
        size, count = 0, 0
        for steps, _ in self._queue[:most]:
            size += len(steps)
            if count and size > MOST_AT_ONCE:
                break
            count += 1
        batch, self._queue = self._queue[:count], self._queue[count:]
        return [each for each in batch if each[1].answer is WAITING]

    async def _serve(self, batch: list[tuple[Sequence[S], Waiter[Sequence[R | Exception]]]]) -> None:
        """Serve a lane until nobody waits."""
        try:
            while batch:
                await self._round_trip(batch)
                await asyncio.sleep(0)  # who was just answered may ask again, and goes along
                batch = self._next()
        finally:
            self._busy -= 1
            if self._queue and not self._flushing:
                self._flush_soon()

    async def _round_trip(self, batch: list[tuple[Sequence[S], Waiter[Sequence[R | Exception]]]]) -> None:
        asked = [step for steps, _ in batch for step in steps]
        self._under_way += len(batch)
        try:
            replies = await self._execute(asked)
        except BaseException as error:
            for _, waiter in batch:
                if waiter.done():
                    continue
                if isinstance(error, Exception):
                    waiter.set_exception(error)
                else:  # the loop is ending, and everyone on it
                    waiter.cancel()
            if not isinstance(error, Exception):
                raise
            return
        finally:
            self._under_way -= len(batch)
        waiters = [waiter for _, waiter in batch]
        shares: Iterable[Sequence[R | Exception]] = zip(replies, strict=False)
        if len(asked) > len(batch):
            following = iter(replies)
            shares = [[next(following) for _ in steps] for steps, _ in batch]
        self._loop.call_soon(answer_all, waiters, shares)
