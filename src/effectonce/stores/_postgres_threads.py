"""Wires for threads: whoever asks waits for the answers. They stay open, and the one used last is used next."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import psycopg
from psycopg import pq

from ._postgres_sql import PATIENCE, Answer, Call, Closed, Lost, Row, Statement, TimedOut
from ._postgres_wire import OK, TUPLES, Connect, Encoded, Wire, dialler

__all__ = ["ThreadWires", "dialler"]

Then = Callable[[Sequence[Answer]], None]


class ThreadWire(Wire):
    """A wire for threads: who asks waits for the answers."""

    then: Then | None = None
    """Takes the answers that nobody waited for, as soon as somebody wants to use this wire."""

    def __init__(self, connection: psycopg.Connection[Any], prepare: bool) -> None:
        super().__init__(connection, prepare)
        self._is_readable = _waiter(self.socket, to_write=False)

    def ask(self, calls: Sequence[Encoded], together: bool, seconds: float) -> list[Answer]:
        """Have statements executed."""
        if self.then is not None:
            self.then(self._answers_in(seconds, all_sent=False))
            self.then = None
        return self._answers_in(seconds, all_sent=self.send(calls, together))

    def is_free(self) -> bool:
        """Whether there is nothing more to come; what nobody waited for is taken in."""
        if self.then is not None and (answers := self.receive()) is not None:
            self.then(answers)
            self.then = None
        return self.then is None

    def ask_one(self, statement: Statement, values: list[bytes | None], seconds: float) -> Answer:
        """The same for one statement. What nearly always happens is written out, since every call pays for it."""
        if statement not in self._prepared or self.then is not None:
            return self.ask(((statement, values),), False, seconds)[0]
        pg = self._pg
        try:
            pg.send_query_prepared(statement.name, values, statement.formats, 1)
            all_sent = not pg.flush()
            if all_sent:
                if not self._is_readable(seconds):
                    raise _timed_out(seconds)
                pg.consume_input()
                if not pg.is_busy():
                    result = pg.get_result()
                    if result is not None and result.status == TUPLES and not pg.is_busy():
                        self._loader.set_pgresult(result)
                        rows: list[Row] = self._loader.load_rows(0, result.ntuples, tuple)
                        result = pg.get_result()
                        if result is None and pg.status == OK:
                            return rows
                        self._answers.append(rows)
                    else:
                        self._sent.append((statement, False))
                    return self._rest(result, seconds)
            self._sent.append((statement, False))
        except psycopg.OperationalError as error:
            raise self._lost() from error
        return self._answers_in(seconds, all_sent=all_sent)[0]

    def _rest(self, result: pq.abc.PGresult | None, seconds: float) -> Answer:
        """What follows a result that was already taken."""
        if result is not None:
            self._take(result)
        return (self.receive() or self._answers_in(seconds, all_sent=True))[0]

    def _answers_in(self, seconds: float, *, all_sent: bool) -> list[Answer]:
        answers = None
        if not all_sent:
            while not self.flush():
                if not _waiter(self.socket, to_write=True)(seconds):
                    raise TimedOut(f"it took nothing in for {seconds:g} s")
            answers = self.receive()  # flushing takes in what has come, and then there is nothing to wait for
        deadline = time.monotonic() + seconds
        while answers is None:
            left = deadline - time.monotonic()
            if left <= 0 or not self._is_readable(left):
                raise _timed_out(seconds)
            answers = self.receive()
        return answers


class ThreadWires:
    """Wires for threads. The stack has a place for every wire there may be; the empty ones are at the bottom."""

    def __init__(self, connect: Connect, prepare: bool, seconds: float, most: int) -> None:
        self._connect = connect
        self._prepare, self._seconds, self._most = prepare, seconds, most
        self._closed = False
        self._start()

    def _start(self) -> None:
        self._stack: list[ThreadWire | None] = [None] * self._most
        self._all: set[ThreadWire] = set()
        self._waiting = 0
        self._lock = threading.RLock()
        self._given_back = threading.Condition(self._lock)
        """Entered by its lock: an exception of a signal handler could leave the condition itself locked."""

    async def run(self, calls: Sequence[Call], together: bool = False) -> Sequence[Answer]:
        """Have statements executed. If a wire broke while nobody used it, they are sent again on a new one."""
        encoded = [(statement, statement.encoded(values)) for statement, values in calls]
        wire = self._take()
        if wire is not None:
            try:
                return self._use(wire, encoded, together)
            except TimedOut:
                raise
            except Lost:
                self._empty_stack()  # what broke this one broke them all
                wire = self._take()
        return self._use(wire or self._open(), encoded, together)

    def run_one(self, statement: Statement, values: list[bytes | None]) -> Answer | None:
        """Have one statement executed if there is a wire for it at once. Without an answer, ``run`` tries harder."""
        try:
            wire = self._stack.pop()
        except IndexError:
            return None
        if wire is None:
            self._stack.append(None)
            return None
        try:
            answer = wire.ask_one(statement, values, self._seconds)
        except BaseException as error:
            self._drop(wire)
            if type(error) is not Lost:
                raise
            self._empty_stack()
            return None
        self._stack.append(wire)
        if self._waiting or self._closed:
            self._changed_hands()
        return answer

    def run_aside(self, calls: Sequence[Call], then: Then) -> bool:
        """Have statements executed that nobody waits for; their wire rests at the bottom of the stack meanwhile.

        False if everybody is busy, or the last ones are still on their way.
        """
        try:
            wire = self._stack.pop(0)
        except IndexError:
            return False
        wire = wire or self._open()
        try:
            is_free = wire.is_free()
            if is_free:
                wire.send([(statement, statement.encoded(values)) for statement, values in calls], False)
                wire.then = then
            self._stack.insert(0, wire)
        except Lost:
            self._drop(wire)
            return True
        return is_free

    def close(self) -> None:
        """Close every wire, and one that is in use as soon as it is not."""
        self._closed = True
        self._empty_stack()

    def forget(self) -> None:
        """Let go of everything in a forked child."""
        for wire in self._all:
            wire.forget()
        self._start()

    def _use(self, wire: ThreadWire, calls: Sequence[Encoded], together: bool) -> list[Answer]:
        try:
            answers = wire.ask(calls, together, self._seconds * (PATIENCE if together else 1))
        except BaseException:  # Ctrl-C too: answers are still on their way to it
            self._drop(wire)
            raise
        self._stack.append(wire)
        if self._waiting or self._closed:
            self._changed_hands()
        return answers

    def _changed_hands(self) -> None:
        """Somebody waits for a wire that is back, or the store was closed meanwhile."""
        self._tell()
        if self._closed:
            self._empty_stack()

    def _take(self) -> ThreadWire | None:
        """The place on top of the stack, empty or not."""
        try:
            return self._stack.pop()
        except IndexError:
            pass
        deadline = time.monotonic() + self._seconds
        with self._lock:
            self._waiting += 1
            try:
                while not self._stack:
                    if not self._given_back.wait(deadline - time.monotonic()):
                        raise TimedOut(
                            f"all {self._most} connections were busy for {self._seconds:g} s; see pool="
                        )
            finally:
                self._waiting -= 1
        return self._take()

    def _open(self) -> ThreadWire:
        """A new wire, for an empty place that was taken."""
        try:
            if self._closed:
                raise Closed("the store is closed")
            wire = ThreadWire(self._connect(), self._prepare)
        except BaseException:
            self._drop(None)
            raise
        self._all.add(wire)
        return wire

    def _drop(self, wire: ThreadWire | None) -> None:
        if wire is not None:
            self._all.discard(wire)
            wire.close()
        self._stack.insert(0, None)
        self._tell()

    def _empty_stack(self) -> None:
        stale: list[ThreadWire | None] = []
        with suppress(IndexError):
            while True:
                stale.append(self._stack.pop())
        for wire in stale:
            self._drop(wire)

    def _tell(self) -> None:
        with self._lock:
            self._given_back.notify()


def _timed_out(seconds: float) -> TimedOut:
    return TimedOut(f"no answer in {seconds:g} s")


def _waiter(socket: int, *, to_write: bool) -> Callable[[float], object]:
    """What waits until a socket has something to read (or can be written), at most so many seconds."""
    if not hasattr(select, "poll"):  # Windows
        return lambda seconds: any(select.select([socket], [socket] if to_write else [], [], seconds))
    poll = select.poll()
    poll.register(socket, select.POLLIN | select.POLLOUT if to_write else select.POLLIN)
    return lambda seconds: poll.poll(seconds * 1000)
