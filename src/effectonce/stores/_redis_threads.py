"""Connections of blocking callers: each has one to itself, from its question to the answer.

A caller takes a connection that is free, asks on its own thread and gives it back. No lock is on the way, and nobody
waits for anybody: a system call lets other threads run meanwhile, and to be woken by one of them takes longer than a
near server does. Only when very many are under way do others wait in line.

A signal may end a caller with an exception at any moment. Its connection ends with it, because nobody knows what is
still to come on it. Commands whose replies were lost on a connection that had been idle are sent again: every step may
be taken twice, and the server has most likely closed it before.
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
from typing import Any, Final, NoReturn
from weakref import WeakSet

from ..errors import StoreError, StoreUnavailable
from ._redis_commands import command
from ._redis_wire import (
    HANG_UP,
    MAP,
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
    shown,
    unreachable,
)

RECEIVE_BYTES: Final = 65_536
MOST_AT_ONCE: Final = 64
"""Connections to one server that are in use or kept, besides those that listen."""
LOOK_AFTER_SECONDS: Final = 0.5
"""After so long without a word, who waits looks for itself."""


class Wire:
    """A connection for one blocking caller at a time."""

    def __init__(self, target: Target, address: Address) -> None:
        self._target, self._address = target, address
        self._reader = new_reader()
        self._told: set[bytes] = set()
        self._unconfirmed = 0
        self._refusals: list[ReplyError] = []
        self._socket: Any = None
        self.used = False

    @property
    def is_open(self) -> bool:
        """Whether it leads anywhere yet."""
        return self._socket is not None

    def open(self) -> None:
        """Connect, and see that we are let in."""
        target = self._target
        self._socket = socket.create_connection(self._address, target.timeout)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if target.tls is not None:
            self._socket = target.tls.wrap_socket(self._socket, server_hostname=self._address[0])
        hello = greeting(target)
        self.write(b"".join(hello))
        self.can_tell = check_greeting(target, self._address, self.read(len(hello)))
        self._rest()
        self._ways = self._socket.sendall, self._socket.recv, self._reader.feed, self._reader.gets

    def ask(self, data: bytes) -> Any:
        """Send a command and wait for its reply: as ``write`` and ``read`` do, without their detours."""
        if self._unconfirmed:
            self.write(data)
            return self.read(1)[0]
        send, receive, feed, gets = self._ways
        send(data)
        while got := receive(RECEIVE_BYTES):
            feed(got)
            reply = gets()
            if reply is not MORE:
                return reply
        raise hung_up()

    def write(self, data: bytes) -> None:
        """Send commands."""
        self._socket.sendall(data)

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
        if self._socket is not None:
            self._socket.close()

    def wake(self) -> None:
        """Have whoever waits here, on another thread, find that it was hung up."""
        with suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def _rest(self) -> None:
        """Let the system watch the time where it can: otherwise Python asks it twice, when it may read and to read."""
        timeout = self._target.timeout
        if sys.platform == "linux" and not isinstance(self._socket, ssl.SSLSocket):
            seconds, part = divmod(timeout, 1)
            limit = struct.pack("ll", int(seconds), int(part * 1_000_000) or 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            self._socket.settimeout(None)
        else:
            self._socket.settimeout(timeout)

    def _receive(self) -> None:
        data = self._socket.recv(RECEIVE_BYTES)
        if not data:
            raise hung_up()
        self._reader.feed(data)


class Place:
    """Where somebody waits for a connection, and the one that was handed over."""

    __slots__ = ("wire", "word")

    def __init__(self) -> None:
        self.wire: Wire | None = None
        self.word = Lock()
        self.word.acquire()


class Station:
    """The connections of blocking callers to one server: as many as were ever needed at once, up to a limit."""

    def __init__(self, target: Target, address: Address) -> None:
        self._target, self._address = target, address
        self._idle: list[Wire] = []
        self._wires: WeakSet[Wire] = WeakSet()
        """All that there are but for those that listen. Who is interrupted forgets its own without a word."""
        self._listening: set[Wire] = set()
        self._line: deque[Place] = deque()
        """Where others wait for one. A place that was left by an interruption costs the connection it is given."""
        self._confirm = target.waiting
        self._closed = False

    def ask(self, data: bytes) -> Any:
        """Send a command and wait for its reply."""
        if self._confirm:
            return self._ask_anyhow(data)
        try:
            wire = self._idle.pop()
        except IndexError:
            return self._ask_anyhow(data)
        try:
            reply = wire.ask(data)
        except ConnectionError:
            return self.finish((data, 1), wire)[0]
        except BaseException as error:
            self._lose(wire, error)
        self._take_back(wire)
        return reply

    def begin(self, request: Request) -> Wire:
        """Send commands; ``finish`` waits for their replies."""
        wire = self._lend()
        try:
            wire.write(request[0] + self._confirming(request))
        except ConnectionError:  # whoever reads will notice
            pass
        except BaseException as error:
            self._lose(wire, error)
        return wire

    def finish(self, request: Request, wire: Wire) -> list[Any]:
        """Wait for replies. If the connection was closed before they were asked for, ask again on a new one."""
        data, count = request
        confirm = self._confirming(request)
        if confirm:
            data, count = data + confirm, count + 1
        try:
            try:
                replies = wire.read(count)
            except ConnectionError:
                if not wire.used:
                    raise
                wire.close()
                self._wires.discard(wire)
                wire = self._opened(self._new())  # in its place; what is idle may be as old
                wire.write(data)
                replies = wire.read(count)
        except BaseException as error:
            self._lose(wire, error)
        self._take_back(wire)
        if confirm:
            self._target.check_replicas(self._address, replies.pop(), replies)
        return replies

    def watch(self, channel: bytes, request: bytes, seconds: float) -> Any:
        """Send a request to be told something and wait until it is; its reply, or None if the server can't tell."""
        wire = self._lend()
        self._wires.discard(wire)  # it may take long, and nobody is to wait in line for it
        self._hand_over(None)
        try:
            self._listening.add(wire)
            if self._closed:  # also by who did not see it listen
                raise closed()
            reply = wire.watch(channel, request, seconds) if wire.can_tell else None
        except BaseException as error:
            self._lose(wire, error)
        finally:
            self._listening.discard(wire)
        self._wires.add(wire)
        self._take_back(wire)
        return reply

    def close(self) -> None:
        """Hang up; who waits for a reply gets it, and whoever listens or comes later does not."""
        self._closed = True
        self.hang_up()
        for wire in list(self._listening):
            wire.wake()
        while self._hand_over(None):
            pass

    def hang_up(self) -> None:
        """Give up the connections that nobody uses."""
        with suppress(IndexError):
            while True:
                self.drop(self._idle.pop())

    def drop(self, wire: Wire) -> None:
        """Give up a connection."""
        wire.close()
        self._wires.discard(wire)
        self._hand_over(None)

    def _ask_anyhow(self, data: bytes) -> Any:
        request = (data, 1)
        return self.finish(request, self.begin(request))[0]

    def _confirming(self, request: Request) -> bytes:
        """What is asked after a request."""
        return b"" if request is MAP else self._confirm

    def _lose(self, wire: Wire, error: BaseException) -> NoReturn:
        """Give up a connection because nobody knows what is still to come on it, and tell the caller why."""
        self.drop(wire)
        if isinstance(error, OSError | ProtocolError):
            raise unreachable(self._target, self._address, error) from error
        raise error

    def _take_back(self, wire: Wire) -> None:
        wire.used = True
        if self._closed or not (self._line and self._hand_over(wire)):
            self._idle.append(wire)
            if self._line:  # whoever joined it just now has looked too early
                self._hand_over(None)
        if self._closed:
            self.hang_up()

    def _lend(self) -> Wire:
        """A connection that is free, or a new one."""
        wire = self._free() or self._wait_in_line()
        return wire if wire.is_open else self._opened(wire)

    def _opened(self, wire: Wire) -> Wire:
        try:
            wire.open()
        except BaseException as error:
            self._lose(wire, error)
        return wire

    def _new(self) -> Wire:
        wire = Wire(self._target, self._address)
        self._wires.add(wire)
        return wire

    def _free(self) -> Wire | None:
        """A connection that nobody uses, or one that is still to be opened, if there may be one more."""
        if self._closed:
            raise closed()
        with suppress(IndexError):
            return self._idle.pop()
        wire = self._new()
        if len(self._wires) <= MOST_AT_ONCE:
            return wire
        self._wires.discard(wire)
        return None

    def _wait_in_line(self) -> Wire:
        """Wait until a connection is handed over, or another one may be opened."""
        deadline = time.monotonic() + self._target.timeout
        place, wire = Place(), None
        self._line.append(place)
        try:
            while (wire := place.wire or self._free()) is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise StoreUnavailable(
                        f"{shown(self._address)} was not asked: all {MOST_AT_ONCE} connections of this process were in "
                        f"use for {self._target.timeout:g} s. Try again with the same key."
                    )
                if place.word.acquire(timeout=min(left, LOOK_AFTER_SECONDS)) and place.wire is None:
                    self._line.appendleft(place)
            return wire
        finally:
            with suppress(ValueError):
                self._line.remove(place)
            if place.wire is not wire and place.wire is not None:  # too late, or one too many
                self._take_back(place.wire)

    def _hand_over(self, wire: Wire | None) -> bool:
        """Give a connection, or word that another one may be opened, to the first in line, if there is one."""
        try:
            place = self._line.popleft()
        except IndexError:
            return False
        place.wire = wire
        place.word.release()
        return True


class Pool:
    """The connections of blocking callers to all servers."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._stations: dict[Address, Station] = {}
        self._closed = False

    def to(self, address: Address) -> Station:
        """The connections to a server."""
        try:
            return self._stations[address]
        except KeyError:
            station = self._stations.setdefault(address, Station(self._target, address))
        if self._closed:
            station.close()
        return station

    def exchange(self, requests: Requests) -> Answers:
        """Ask several servers at once. In order, so that no two who wait in line hold what the other waits for."""
        answers: Answers = {}
        begun: dict[Address, Wire] = {}
        try:
            for address, request in sorted(requests.items()):
                if request is HANG_UP:
                    self.to(address).hang_up()
                    continue
                try:
                    begun[address] = self.to(address).begin(request)
                except StoreError as error:
                    answers[address] = error
            while begun:
                address, wire = begun.popitem()
                try:
                    answers[address] = self.to(address).finish(requests[address], wire)
                except StoreError as error:
                    answers[address] = error
        except BaseException:
            for address, wire in begun.items():
                self.to(address).drop(wire)
            raise
        return answers

    def close(self) -> None:
        """Hang up; who waits for a reply gets it, and whoever comes later does not."""
        self._closed = True
        for station in list(self._stations.values()):
            station.close()


def hung_up() -> ConnectionError:
    """What an empty answer means."""
    return ConnectionError("the server closed the connection")
