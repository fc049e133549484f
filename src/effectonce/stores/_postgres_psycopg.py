"""Held connections to PostgreSQL on psycopg's own interface to libpq: below its cursors, where a call costs half.

A wire is one connection. It sends a few statements at once, prepared when they are first used, and takes in their
answers; who waits for them, a thread or an event loop, is all that differs between the two colours. Wires stay open,
and the one used last is used next.
"""

from __future__ import annotations

import asyncio
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import ceil
from typing import Any

import psycopg
from psycopg import pq
from psycopg.adapt import Transformer
from psycopg.conninfo import conninfo_to_dict

from ..errors import UsageError
from ._postgres_sql import (
    STALE,
    Answer,
    Call,
    Lost,
    Refusal,
    Statement,
    TimedOut,
    Values,
    check_version,
    settings,
)  # fmt: skip
from ._urls import shown

Encoded = tuple[Statement, list[bytes | None]]
Connect = Callable[[], "psycopg.Connection[Any]"]
Then = Callable[[Sequence[Answer]], None]

OK, TUPLES, COMMAND = pq.ConnStatus.OK, pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK
SYNC, ABORTED = pq.ExecStatus.PIPELINE_SYNC, pq.ExecStatus.PIPELINE_ABORTED
SQLSTATE, MESSAGE = pq.DiagnosticField.SQLSTATE, pq.DiagnosticField.MESSAGE_PRIMARY


def dialler(url: str, seconds: float, prepare: bool) -> Connect:
    """What opens connections to the database that a URL names."""
    try:
        given = conninfo_to_dict(url)
    except psycopg.ProgrammingError as error:
        # Other complaints may quote a password.
        why = f": {error}" if str(error).startswith("invalid URI query parameter") else ""
        raise UsageError(
            f"{shown(url)!r} is no URL that libpq understands{why.strip()}. Write postgresql://user:password@host/database."
        ) from None
    parameters: dict[str, Any] = {"connect_timeout": ceil(seconds), "application_name": "effectonce", **given}
    if prepare:
        said = ["-c " + f"{name}={value}".replace(" ", "\\ ") for name, value in settings(seconds).items()]
        parameters["options"] = " ".join([str(parameters.get("options", "")), *said])

    def connect() -> psycopg.Connection[Any]:
        try:
            connection = psycopg.connect(**parameters, autocommit=True, client_encoding="UTF8")
        except psycopg.OperationalError as error:
            raise Lost(str(error)) from error
        try:
            check_version(connection.pgconn.server_version // 10000)
        except BaseException:
            connection.close()
            raise
        return connection

    return connect


class Wire:
    """One connection. It is used by one caller at a time.

    A single statement that is prepared goes as such. Several go in libpq's pipeline mode, and so does one that has to
    be prepared first: it is still one round trip.
    """

    def __init__(self, connection: psycopg.Connection[Any], prepare: bool) -> None:
        self._connection = connection
        self._pg = connection.pgconn
        self._pg.nonblocking = 1
        self._prepare = prepare
        self._prepared: set[Statement] = set()
        self._loader = Transformer(connection)
        self._sent: deque[tuple[Statement, bool]] = (
            deque()
        )  # what is to be answered; whether it only prepares
        self._syncs = 0  # how many more are to come in pipeline mode
        self._answers: list[Answer] = []
        self._why = Refusal("25P02", "an earlier statement failed")
        self.socket = self._pg.socket

    def send(self, calls: Sequence[Encoded], together: bool) -> bool:
        """Send statements, each a transaction of its own or all of them one; whether everything has left."""
        pg = self._pg
        try:
            if len(calls) == 1 and calls[0][0] in self._prepared:
                ((statement, values),) = calls
                pg.send_query_prepared(statement.name, values, statement.formats, 1)
                self._sent.append((statement, False))
            else:
                pg.enter_pipeline_mode()
                for statement, values in calls:
                    self._send_one(statement, values)
                    if not together:
                        pg.pipeline_sync()
                if together:
                    pg.pipeline_sync()
                self._syncs = 1 if together else len(calls)
            return not pg.flush()
        except psycopg.OperationalError as error:
            raise self._lost() from error

    def _send_one(self, statement: Statement, values: list[bytes | None]) -> None:
        pg = self._pg
        if not (self._prepare and statement.name):
            pg.send_query_params(statement.text.encode(), values, None, statement.formats, 1)
        else:
            if statement not in self._prepared:
                pg.send_prepare(statement.name, statement.text.encode())
                self._sent.append((statement, True))
            pg.send_query_prepared(statement.name, values, statement.formats, 1)
        self._sent.append((statement, False))

    def flush(self) -> bool:
        """Send more of what did not fit; whether everything has left."""
        try:
            self._pg.consume_input()  # a server that can't speak does not listen
            return not self._pg.flush()
        except psycopg.OperationalError as error:
            raise self._lost() from error

    def receive(self) -> list[Answer] | None:
        """Take in what has come, and give the answers when all of them are there."""
        pg = self._pg
        try:
            pg.consume_input()
            while not pg.is_busy():
                result = pg.get_result()
                if result is None:
                    if pg.status != OK:
                        raise self._lost()
                    if not self._syncs:
                        break
                elif result.status != SYNC:
                    self._take(result)
                elif self._syncs > 1:
                    self._syncs -= 1
                else:
                    self._syncs = 0
                    pg.exit_pipeline_mode()
                    break
            else:
                return None
        except psycopg.OperationalError as error:
            raise self._lost() from error
        answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        """Hang up."""
        self._connection.close()

    def forget(self) -> None:
        """Let go in a forked child, without a word to the server: the connection is the parent's."""
        nowhere = os.open(os.devnull, os.O_RDWR)
        with suppress(OSError):
            os.dup2(nowhere, self.socket)
        os.close(nowhere)
        self._connection.close()

    def _take(self, result: pq.abc.PGresult) -> None:
        statement, only_prepares = self._sent.popleft()
        status = result.status
        if status == TUPLES:
            self._loader.set_pgresult(result)
            self._answers.append(self._loader.load_rows(0, result.ntuples, tuple))
        elif status == COMMAND and only_prepares:
            self._prepared.add(statement)
        elif status == COMMAND:
            self._answers.append([])
        else:
            if status != ABORTED:
                code, message = result.error_field(SQLSTATE), result.error_field(MESSAGE)
                self._why = Refusal((code or b"").decode(), (message or b"").decode(errors="replace"))
                if self._why.code in STALE:
                    raise Lost(str(self._why))
            if not only_prepares:
                self._answers.append(self._why)

    def _lost(self) -> Lost:
        return Lost(self._pg.get_error_message().strip() or "the connection was lost")


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

    def ask_one(self, statement: Statement, values: list[bytes | None], seconds: float) -> Answer:
        """The same for one statement. What nearly always happens is written out, since every call pays for it."""
        if statement not in self._prepared or self.then is not None:
            return self.ask(((statement, values),), False, seconds)[0]
        pg = self._pg
        try:
            pg.send_query_prepared(statement.name, values, statement.formats, 1)
            self._sent.append((statement, False))
            all_sent = not pg.flush()
            if all_sent and self._is_readable(seconds):
                pg.consume_input()
                if not pg.is_busy() and (result := pg.get_result()) is not None:
                    self._take(result)
                    if not pg.is_busy() and pg.get_result() is None and pg.status == OK:
                        return self._answers.pop()
                    return (self.receive() or self._answers_in(seconds, all_sent=True))[0]
        except psycopg.OperationalError as error:
            raise self._lost() from error
        return self._answers_in(seconds, all_sent=all_sent)[0]

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
                raise TimedOut(f"no answer in {seconds:g} s")
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
        self._given_back = threading.Condition()

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

    def run_one(self, statement: Statement, values: Values) -> Answer | None:
        """Have one statement executed if there is a wire for it at once. Without an answer, ``run`` tries harder."""
        try:
            encoded = statement.encoded(values)
            wire = self._stack.pop()
        except (IndexError, Refusal):
            return None
        if wire is None:
            self._stack.append(None)
            return None
        try:
            answer = wire.ask_one(statement, encoded, self._seconds)
        except BaseException as error:
            self._drop(wire)
            if type(error) is not Lost:
                raise
            self._empty_stack()
            return None
        self._put_back(wire)
        return answer

    def run_aside(self, calls: Sequence[Call], then: Then) -> None:
        """Have statements executed that nobody waits for; their wire rests at the bottom of the stack meanwhile."""
        try:
            wire = self._stack.pop(0)
        except IndexError:  # everybody is busy: another time
            return
        try:
            wire = wire or self._open()
            if wire.then is None:
                wire.send([(statement, statement.encoded(values)) for statement, values in calls], False)
                wire.then = then
            self._stack.insert(0, wire)
        except Lost:
            self._drop(wire)

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
            answers = wire.ask(calls, together, self._seconds)
        except BaseException:  # Ctrl-C too: answers are still on their way to it
            self._drop(wire)
            raise
        self._put_back(wire)
        return answers

    def _put_back(self, wire: ThreadWire) -> None:
        self._stack.append(wire)
        if self._waiting:
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
        with self._given_back:
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
                raise Lost("the store is closed")
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
        with self._given_back:
            self._given_back.notify()


class LoopWire(Wire):
    """A wire that an event loop watches: whoever waits for its answers may leave, and it takes them in all the same."""

    def __init__(self, connection: psycopg.Connection[Any], home: LoopWires, prepare: bool) -> None:
        super().__init__(connection, prepare)
        self._home = home
        self._waiter: asyncio.Future[list[Answer]] | None = None
        self._deadline = 0.0
        self._timer: asyncio.TimerHandle | None = None
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
        if self._timer is None:
            self._timer = loop.call_at(self._deadline, self._look_at_the_clock)
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

    def _look_at_the_clock(self) -> None:
        """One timer for many answers: it looks again when the latest of them is due."""
        self._timer = None
        loop = asyncio.get_running_loop()
        if self._waiter is None:
            return
        if loop.time() >= self._deadline:
            self.fail(TimedOut("no answer in time"))
        else:
            self._timer = loop.call_at(self._deadline, self._look_at_the_clock)

    def fail(self, error: Lost) -> None:
        """Hang up, and tell who waits."""
        self._home.let_go(self)
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
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
        if self._stack:
            try:
                return await self._stack.pop().ask(encoded, together, self._seconds)
            except TimedOut:
                raise
            except Lost as error:
                for wire in list(self._stack):  # what broke this one broke them all
                    wire.fail(error)
        return await (await self._open()).ask(encoded, together, self._seconds)

    def take_back(self, wire: LoopWire) -> None:
        """A wire is free again."""
        if self._closed or len(self._stack) >= self._most:
            wire.fail(Lost("the store is closed"))
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
            wire.fail(Lost("the store is closed"))

    def forget(self) -> None:
        """Let go of everything in a forked child."""
        for wire in self._all:
            wire.forget()

    async def _open(self) -> LoopWire:
        """Connecting may have to wait for a name to be resolved, which libpq does not do beside a loop."""
        if self._closed:
            raise Lost("the store is closed")
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


def _waiter(socket: int, *, to_write: bool) -> Callable[[float], object]:
    """What waits until a socket has something to read (or can be written), at most so many seconds."""
    if not hasattr(select, "poll"):  # Windows
        return lambda seconds: any(select.select([socket], [socket] if to_write else [], [], seconds))
    poll = select.poll()
    poll.register(socket, select.POLLIN | select.POLLOUT if to_write else select.POLLIN)
    return lambda seconds: poll.poll(seconds * 1000)
