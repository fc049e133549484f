"""Wires that an event loop watches: who waits for an answer may leave, and it is taken in all the same."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from contextlib import suppress
from math import inf
from typing import Any

import psycopg

from ._postgres_sql import PATIENCE, Answer, Call, Closed, Lost, TimedOut
from ._postgres_wire import Connect, Encoded, Wire, dialler

__all__ = ["LoopWires", "dialler"]


class LoopWire(Wire):
    """A wire that an event loop watches: whoever waits for its answers may leave, and it takes them in all the same."""

    def __init__(self, connection: psycopg.Connection[Any], home: LoopWires, prepare: bool) -> None:
        super().__init__(connection, prepare)
        self._home = home
        self._waiter: asyncio.Future[list[Answer]] | None = None
        self._deadline = 0.0
        self._alarm = inf
        asyncio.get_running_loop().add_reader(self.socket, self._readable)

    def ask(self, calls: Sequence[Encoded], together: bool, seconds: float) -> asyncio.Future[list[Answer]]:
        """Have statements executed."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[list[Answer]] = loop.create_future()
        try:
            if not self.send(calls, together):
                loop.add_writer(self.socket, self._writable)
        except Lost as error:
            self.fail(error)
            raise
        self._waiter = waiter
        self._deadline = loop.time() + seconds
        if self._deadline < self._alarm:
            self._set_alarm(loop)
        return waiter

    def _readable(self) -> None:
        try:
            answers = self.receive()
        except Lost as error:
            self.fail(error)
            return
        waiter = self._waiter
        if answers is not None and waiter is not None:
            self._waiter = None
            self._home.take_back(self)
            if not waiter.done():
                waiter.set_result(answers)

    def _writable(self) -> None:
        try:
            if self.flush():
                asyncio.get_running_loop().remove_writer(self.socket)
        except Lost as error:
            self.fail(error)
            return
        self._readable()  # what came meanwhile has been taken in, and does not wake the loop again

    def _set_alarm(self, loop: asyncio.AbstractEventLoop) -> None:
        self._alarm = self._deadline
        loop.call_at(self._alarm, self._look_at_the_clock)

    def _look_at_the_clock(self) -> None:
        """One timer for many answers: it looks again when the latest of them is due."""
        loop = asyncio.get_running_loop()
        self._alarm = inf
        if self._waiter is not None and loop.time() < self._deadline:
            self._set_alarm(loop)
        elif self._waiter is not None:
            self.fail(TimedOut("no answer in time"))

    def fail(self, error: Lost) -> None:
        """Hang up, and tell who waits."""
        self._home.let_go(self)
        waiter, self._waiter = self._waiter, None
        # Who waited on a loop that was closed meanwhile hears nothing any more; to tell would fail whoever calls this.
        if waiter is not None and not waiter.done() and not waiter.get_loop().is_closed():
            waiter.set_exception(error)


class LoopWires:
    """Wires for the callers of one event loop."""

    def __init__(self, connect: Connect, prepare: bool, seconds: float, most: int) -> None:
        self._connect = connect
        self._prepare, self._seconds, self._most = prepare, seconds, most
        self._loop = weakref.ref(asyncio.get_running_loop())  # whose end may be the end of this
        self._stack: list[LoopWire] = []
        self._all: set[LoopWire] = set()
        self._closed = False

    async def run(self, calls: Sequence[Call], together: bool = False) -> Sequence[Answer]:
        """Have statements executed. If a wire broke before its answer came, they are sent again on a new one."""
        encoded = [(statement, statement.encoded(values)) for statement, values in calls]
        seconds = self._seconds * (PATIENCE if together else 1)
        if self._stack:
            try:
                return await self._stack.pop().ask(encoded, together, seconds)
            except TimedOut:
                raise
            except Lost as error:
                for wire in list(self._stack):  # what broke this one broke them all
                    wire.fail(error)
        return await (await self._open()).ask(encoded, together, seconds)

    def take_back(self, wire: LoopWire) -> None:
        """A wire is free again."""
        if self._closed or len(self._stack) >= self._most:
            wire.fail(Closed("the store is closed"))
        else:
            self._stack.append(wire)

    def let_go(self, wire: LoopWire) -> None:
        """A wire is of no use any more."""
        self._all.discard(wire)
        with suppress(ValueError):
            self._stack.remove(wire)
        loop = self._loop()
        if loop is not None and not loop.is_closed():
            loop.remove_reader(wire.socket)
            loop.remove_writer(wire.socket)
        wire.close()

    def close(self) -> None:
        """Close every wire. To be called on the loop, or when it does not run any more."""
        self._closed = True
        for wire in list(self._all):
            wire.fail(Closed("the store is closed"))

    def forget(self) -> None:
        """Let go of everything in a forked child."""
        for wire in self._all:
            wire.forget()

    async def _open(self) -> LoopWire:
        """Connecting may have to wait for a name to be resolved, which libpq does not do beside a loop."""
        if self._closed:
            raise Closed("the store is closed")
        opening = asyncio.get_running_loop().run_in_executor(None, self._connect)
        try:
            connection = await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_unused)
            raise
        wire = LoopWire(connection, self, self._prepare)
        self._all.add(wire)
        return wire


def _close_unused(opening: asyncio.Future[psycopg.Connection[Any]]) -> None:
    if not opening.cancelled() and not opening.exception():
        opening.result().close()
