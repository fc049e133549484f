"""Connections of blocking callers: as many as are needed at once, and those who come together share a round trip.

A caller who is alone goes at once, on its own thread and on a connection of its own. While it is under way, those who
come queue up; when it is back, or has been away for longer than a near server takes, the first of them goes for all.
So a crowd of threads has one system call for many steps, where each would have to win the interpreter's lock back after
its own. Two may well go at the same time: nothing but speed depends on who goes with whom.

A signal may end a caller with an exception at any moment. Whoever waits for it goes by itself after a while: every step
may be taken twice. For the same reason commands whose replies were lost on a connection that had been idle are sent
again: the server has most likely closed it before.
"""

from __future__ import annotations

import socket
import ssl
import struct
import sys
import time
from collections import deque
from contextlib import suppress
from threading import Lock
from typing import Any, Final

from ..errors import StoreError
from ._redis_commands import Answer, Bundles, Parts, answers, command
from ._redis_wire import (
    HANG_UP,
    MORE,
    Address,
    Answers,
    ProtocolError,
    PushNotification,
    ReplyError,
    Request,
    Requests,
    Target,
    check_greeting,
    closed,
    greeting,
    new_reader,
    unreachable,
)

RECEIVE_BYTES: Final = 65_536
PATIENCE_SECONDS: Final = 0.001
"""How long the first in a queue waits for who is under way, so that a far server is not waited for twice."""
LOOK_AFTER_SECONDS: Final = 0.5
"""After so long without a word, who waits looks for itself."""
MOST_TOGETHER: Final = 512
"""Steps of one round trip, so that the last in a long queue does not wait for all of them."""


class Wire:
    """A connection for one blocking caller at a time."""

    def __init__(self, target: Target, address: Address) -> None:
        self._timeout = target.timeout
        self._reader = new_reader()
        self._told: set[bytes] = set()
        self._unconfirmed = 0
        self._refusals: list[ReplyError] = []
        self._socket = socket.create_connection(address, target.timeout)
        self.used = False
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if target.tls is not None:
                self._socket = target.tls.wrap_socket(self._socket, server_hostname=address[0])
            hello = greeting(target)
            self.write(b"".join(hello))
            self.can_tell = check_greeting(target, address, self.read(len(hello)))
            self._rest()
        except BaseException:
            self.close()
            raise

    def write(self, data: bytes) -> None:
        """Send commands."""
        try:
            self._socket.sendall(data)
        except BlockingIOError as error:
            raise TimeoutError from error

    def read(self, count: int) -> list[Any]:
        """Wait for so many replies."""
        replies: list[Any] = []
        gets = self._reader.gets
        while len(replies) < count:
            reply = gets()
            if reply is MORE:
                self._receive()
            elif type(reply) is PushNotification or self._unconfirmed:
                self._hear(reply)
            else:
                replies.append(reply)
        return replies

    def watch(self, channel: bytes, request: bytes, seconds: float) -> Any:
        """Send a request to be told something on a channel and wait until it is; the reply to the request."""
        self._refusals.clear()
        self.write(command(b"SUBSCRIBE", channel) + request)
        self._unconfirmed += 1
        (reply,) = self.read(1)
        if type(reply) is int and not self._refusals:
            self._listen(channel, seconds)
        self.write(command(b"UNSUBSCRIBE", channel))
        self._unconfirmed += 1
        return self._refusals[0] if self._refusals else reply

    def _listen(self, channel: bytes, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        try:
            while channel not in self._told:
                reply = self._reader.gets()
                if reply is not MORE:
                    self._hear(reply)
                    continue
                self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
                self._receive()
        except TimeoutError:
            pass
        finally:
            self._told.clear()
            self._rest()

    def _hear(self, reply: Any) -> None:
        """What is told, or the confirmation of a wish to be told or not: it is told too, but a refusal is a reply."""
        if type(reply) is PushNotification and reply[0] == b"message":
            self._told.add(reply[1])
            return
        self._unconfirmed -= 1
        if isinstance(reply, ReplyError):
            self._refusals.append(reply)

    def close(self) -> None:
        """Hang up, without a word."""
        self._socket.close()

    def _rest(self) -> None:
        """Let the system watch the time where it can: otherwise Python asks it twice, when it may read and to read."""
        if sys.platform == "linux" and not isinstance(self._socket, ssl.SSLSocket):
            seconds, part = divmod(self._timeout, 1)
            limit = struct.pack("ll", int(seconds), int(part * 1_000_000) or 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            self._socket.settimeout(None)
        else:
            self._socket.settimeout(self._timeout)

    def _receive(self) -> None:
        try:
            data = self._socket.recv(RECEIVE_BYTES)
        except BlockingIOError as error:
            raise TimeoutError from error
        if not data:
            raise ConnectionError("the server closed the connection")
        self._reader.feed(data)


class Pool:
    """Connections for blocking callers: as many to each server as were ever needed at once."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._idle: dict[Address, list[Wire]] = {}
        self._closed = False
        self._wait = target.waiting
        self.timeout = target.timeout

    def ask(self, address: Address, request: Request) -> list[Any]:
        """Send commands to a server and wait for their replies."""
        if self._wait or self._closed or not (idle := self._idle.get(address)):
            return self._finish(address, request, self._begin(address, request))
        try:
            wire = idle.pop()
        except IndexError:  # another thread was quicker
            return self._finish(address, request, self._begin(address, request))
        try:
            wire.write(request[0])
            replies = wire.read(request[1])
        except ConnectionError:
            return self._finish(address, request, wire)
        except BaseException as error:  # nobody knows what is still to come on it
            wire.close()
            if isinstance(error, OSError | ProtocolError):
                raise unreachable(self._target, address, error) from error
            raise
        self._take_back(address, wire)
        return replies

    def exchange(self, requests: Requests) -> Answers:
        """Ask several servers at once."""
        answers: Answers = {}
        begun: dict[Address, Wire] = {}
        try:
            for address, request in requests.items():
                if request is HANG_UP:
                    self._hang_up(address)
                    continue
                try:
                    begun[address] = self._begin(address, request)
                except StoreError as error:
                    answers[address] = error
            while begun:
                address, wire = begun.popitem()
                try:
                    answers[address] = self._finish(address, requests[address], wire)
                except StoreError as error:
                    answers[address] = error
        except BaseException:
            for wire in begun.values():
                wire.close()
            raise
        return answers

    def watch(self, address: Address, channel: bytes, request: bytes, seconds: float) -> Any:
        """Send a request to be told something and wait until it is; its reply, or None if the server can't tell."""
        wire = self._lend(address)
        try:
            reply = wire.watch(channel, request, seconds) if wire.can_tell else None
        except (OSError, ProtocolError) as error:
            wire.close()
            raise unreachable(self._target, address, error) from error
        except BaseException:
            wire.close()
            raise
        self._take_back(address, wire)
        return reply

    def close(self) -> None:
        """Hang up; who waits for a reply gets it, and whoever comes later does not."""
        self._closed = True
        for address in list(self._idle):
            self._hang_up(address)

    def _begin(self, address: Address, request: Request) -> Wire:
        wire = self._lend(address)
        try:
            wire.write(request[0] + self._wait)
        except ConnectionError:  # whoever reads will notice
            pass
        except OSError as error:
            wire.close()
            raise unreachable(self._target, address, error) from error
        except BaseException:
            wire.close()
            raise
        return wire

    def _finish(self, address: Address, request: Request, wire: Wire) -> list[Any]:
        data, count = request
        if self._wait:
            data, count = data + self._wait, count + 1
        try:
            try:
                replies = wire.read(count)
            except ConnectionError:
                if not wire.used:
                    raise
                wire.close()
                wire = Wire(self._target, address)
                wire.write(data)
                replies = wire.read(count)
        except (OSError, ProtocolError) as error:
            wire.close()
            raise unreachable(self._target, address, error) from error
        except BaseException:  # nobody knows what is still to come on it
            wire.close()
            raise
        self._take_back(address, wire)
        if self._wait:
            self._target.check_replicas(replies.pop())
        return replies

    def _lend(self, address: Address) -> Wire:
        if self._closed:
            raise closed()
        try:
            return self._idle[address].pop()
        except (KeyError, IndexError):
            pass
        try:
            return Wire(self._target, address)
        except (OSError, ProtocolError) as error:
            raise unreachable(self._target, address, error) from error

    def _take_back(self, address: Address, wire: Wire) -> None:
        wire.used = True
        self._idle.setdefault(address, []).append(wire)
        if self._closed:
            self._hang_up(address)

    def _hang_up(self, address: Address) -> None:
        idle = self._idle.get(address, [])
        with suppress(IndexError):
            while True:
                idle.pop().close()


class Ticket:
    """A step in the queue, and who waits for it."""

    __slots__ = ("answer", "error", "is_taken", "parts", "word")

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.answer: Answer | None = None
        self.error: StoreError | None = None
        self.is_taken = False
        self.word = Lock()
        self.word.acquire()

    @property
    def is_served(self) -> bool:
        """Whether there is nothing to wait for any more."""
        return self.answer is not None or self.error is not None

    def tell(self) -> None:
        """Wake who waits."""
        with suppress(RuntimeError):  # it was told already
            self.word.release()


class Company:
    """Has the steps of threads taken by one server, many in a round trip."""

    def __init__(self, pool: Pool, server: Address) -> None:
        self._pool, self._server = pool, server
        self._queue: deque[Ticket] = deque()
        self._under_way: object = None
        """The last who left and is not back. A hint: whoever misreads it goes alone, or waits a little."""

    def take(self, parts: Parts) -> Answer:
        """Take a step, alone or in company."""
        if self._under_way is not None or self._queue:
            return self._queue_up(Ticket(parts))
        shape, name, argument = parts
        self._under_way = parts
        try:
            (reply,) = self._pool.ask(self._server, (shape.command(name, argument), 1))
        finally:
            self._is_back(parts)
        return reply  # type: ignore[no-any-return]

    def _is_back(self, who: object) -> None:
        if self._under_way is who:
            self._under_way = None
        if self._queue:
            with suppress(IndexError):  # just served
                self._queue[0].tell()

    def _queue_up(self, mine: Ticket) -> Answer:
        self._queue.append(mine)
        try:
            self._wait(mine)
        except BaseException:  # Ctrl-C: nobody is to wait for one who left
            with suppress(ValueError):
                self._queue.remove(mine)
            raise
        if mine.error is not None:
            raise type(mine.error)(str(mine.error)) from mine.error
        assert mine.answer is not None
        return mine.answer

    def _wait(self, mine: Ticket) -> None:
        looks = 0
        while not mine.is_served:
            if mine.is_taken:
                looks += not mine.word.acquire(timeout=LOOK_AFTER_SECONDS)
                if looks * LOOK_AFTER_SECONDS > 3 * self._pool.timeout and not mine.is_served:
                    self._serve([mine])
            elif (
                self._under_way is not None and mine.word.acquire(timeout=PATIENCE_SECONDS)
            ) or not self._queue:
                pass  # told, or taken
            else:
                self._lead(mine)

    def _lead(self, mine: Ticket) -> None:
        """Go for all in the queue."""
        batch: list[Ticket] = []
        self._under_way = batch
        try:
            with suppress(IndexError):
                while len(batch) < MOST_TOGETHER:
                    batch.append(self._queue.popleft())
                    batch[-1].is_taken = True
            if batch:
                self._serve(batch)
        finally:
            for ticket in reversed(batch):
                if not ticket.is_served:  # a signal ended this leader
                    ticket.is_taken = False
                    if ticket is not mine:
                        self._queue.appendleft(ticket)
            self._is_back(batch)
            for ticket in batch:
                if ticket is not mine:
                    ticket.tell()

    def _serve(self, batch: list[Ticket]) -> None:
        bundles = Bundles[Ticket]()
        for ticket in batch:
            bundles.add(ticket.parts, ticket)
        commands = [bundle.command for bundle in bundles.all]
        try:
            replies = self._pool.ask(self._server, (b"".join(commands), len(commands)))
        except StoreError as error:
            for ticket in batch:
                ticket.error = error
            return
        for bundle, reply in zip(bundles.all, replies, strict=True):
            whose = bundle.whose
            for ticket, answer in zip(whose, answers(reply, len(whose)), strict=True):
                ticket.answer = answer
