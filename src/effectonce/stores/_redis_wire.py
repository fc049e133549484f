"""Connections to Redis and Valkey: commands go out as bytes, replies come in through hiredis, and nothing is between.

A client library's command layer costs more than the network. What it would be good for is little: a greeting that logs
in and looks whether this server can be trusted with records, and errors that say what to do. These are here, and
``Pool``, the connections of blocking callers; those of event loops are in ``_redis_loop``.

A reply that is an error is a value here: who asked decides what it means. A server that can't be reached is
``StoreUnavailable``. Commands whose replies were lost are not sent again, unless the connection had been idle: then the
server has most likely closed it before, and every step may be taken twice.
"""

from __future__ import annotations

import socket
import ssl
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from ..errors import MissingExtra, StoreError, StoreMismatch, StoreUnavailable
from ._redis_records import command

try:
    from hiredis import ProtocolError as ProtocolError
    from hiredis import PushNotification as PushNotification
    from hiredis import Reader
    from hiredis import ReplyError as ReplyError
except ImportError as error:
    raise MissingExtra("Redis needs the package hiredis: pip install effectonce[redis]") from error

OLDEST: Final = (7, 0)
"""The first version with PEXPIRETIME."""
RECEIVE_BYTES: Final = 65_536
MORE: Final = object()
"""What a reader says when a reply isn't complete."""
WAIT_SHARE: Final = 0.8
"""How much of the time-out replicas may take."""

Address = tuple[str, int]
Request = tuple[bytes, int]
"""Commands to one server, and how many replies they have."""
HANG_UP: Final[Request] = (b"", 0)
"""Asks to give up the connections to a server."""
Requests = dict[Address, Request]
Answers = dict[Address, list[Any] | StoreError]
"""The replies of each server that was asked, or why there are none."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where the servers are, how to be let in, and what is asked of them."""

    seeds: tuple[Address, ...]
    clustered: bool = False
    user: str = ""
    password: str = field(default="", repr=False)
    database: int = 0
    tls: ssl.SSLContext | None = None
    timeout: float = 5.0
    replicas: int = 0
    """How many replicas must have what is answered."""
    may_evict: bool = False

    @property
    def waiting(self) -> bytes:
        """The command that waits for replicas; none if there is nothing to wait for."""
        milliseconds = b"%d" % (self.timeout * WAIT_SHARE * 1000)
        return command(b"WAIT", b"%d" % self.replicas, milliseconds) if self.replicas else b""

    def check_replicas(self, confirmed: int) -> None:
        """See that enough of them have what was written."""
        if confirmed < self.replicas:
            raise StoreUnavailable(
                f"Written, but {confirmed} of {self.replicas} replicas confirmed it in time. Ask again with the same "
                "key; if this goes on, look after the replicas, or ask for fewer of them with durability=."
            )


# The greeting


def greeting(target: Target) -> list[bytes]:
    """What is said first on every connection."""
    login = [text.encode() for text in (target.user, target.password) if text]
    return [
        *([command(b"AUTH", *login)] if login else []),
        command(b"HELLO", b"3"),
        *([command(b"SELECT", b"%d" % target.database)] if target.database else []),
        command(b"INFO", b"server"),
        command(b"INFO", b"memory"),
    ]


def check_greeting(target: Target, address: Address, replies: list[Any]) -> bool:
    """See that we are let in, and that this server keeps what it is given. True if it can also tell unasked."""
    *access, server, memory = replies
    refusals = [reply for reply in access if isinstance(reply, ReplyError)]
    speaks_old = [reply for reply in refusals if str(reply).startswith(("NOPROTO", "ERR unknown command"))]
    for reply in refusals:
        if reply not in speaks_old:
            raise complaint(address, reply)
    if not isinstance(server, ReplyError) and not isinstance(memory, ReplyError):
        _check_facts(target, address, _text(server) + _text(memory))
    elif not target.may_evict:
        raise StoreMismatch(
            f"{shown(address)} does not let this user ask INFO, so it can't be checked whether it evicts keys. Allow "
            "INFO, or say eviction=accept if you know that it does not."
        )
    return not speaks_old


def _check_facts(target: Target, address: Address, text: str) -> None:
    facts = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    version = facts.get("redis_version", "0.0")
    if tuple(map(int, version.split(".")[:2])) < OLDEST:
        raise StoreMismatch(f"{shown(address)} is Redis {version}. The store needs 7.0 or newer, or Valkey.")
    if (facts.get("server_mode", facts.get("redis_mode")) == "cluster") != target.clustered:
        right = (
            "no cluster. Write redis://" if target.clustered else "part of a cluster. Write redis+cluster://"
        )
        raise StoreMismatch(f"{shown(address)} is {right} in the URL.")
    policy = facts.get("maxmemory_policy", "noeviction")
    if policy != "noeviction" and not target.may_evict:
        raise StoreMismatch(
            f"{shown(address)} has maxmemory-policy {policy}: when memory gets short it forgets records, and their "
            "effects would happen again. Set it to noeviction, use another server, or accept this with eviction=accept."
        )


def _text(reply: Any) -> str:
    return reply.decode("utf-8", "replace") if isinstance(reply, bytes) else str(reply)


# What goes wrong

ADVICE: Final = {
    "BUSY": "Somebody's script runs too long there.",
    "CLUSTERDOWN": "A part of the cluster is down.",
    "LOADING": "It has just started and loads its data.",
    "MASTERDOWN": "It is a replica that has lost its primary.",
    "MISCONF": "It can't save its data; look into its log.",
    "NOAUTH": "Put user and password into the URL: redis://user:password@host.",
    "NOPERM": "Allow its user EVALSHA, SCRIPT LOAD and what the scripts call, on the store's keys and channels.",
    "NOREPLICAS": "It wants more replicas than it has before it writes.",
    "OOM": "It is out of memory. Nothing was written; give it more, or keep records for a shorter time.",
    "READONLY": "It is a replica. Name the primary; after a failover, ask again.",
    "WRONGPASS": "Check user and password in the URL.",
}


def complaint(address: Address, reply: ReplyError, key: str | None = None) -> StoreError:
    """What a server's error means for who asked."""
    text = str(reply).partition(" script: ")[0].rstrip(".")
    code = text.partition(" ")[0]
    if code == "WRONGTYPE":
        return StoreMismatch(
            "The Redis key of this effect holds something that is no record. Nothing was changed. Give this store a "
            "prefix= of its own, or remove that key.",
            key=key,
        )
    if "DB index" in text:
        return StoreMismatch(f"{shown(address)} has no such database: {text}. Check the number in the URL.")
    if "without any password configured" in text:
        code, text = "WRONGPASS", "it has no password for the default user, but one was given"
    return StoreUnavailable(f"{shown(address)} refused: {text}. {ADVICE.get(code, 'Try again.')}", key=key)


def unreachable(target: Target, address: Address, error: BaseException | None) -> StoreError:
    """What a failed connection means for who asked."""
    if isinstance(error, StoreError):
        return type(error)(str(error))
    if isinstance(error, ProtocolError):
        return StoreMismatch(
            f"What answers at {shown(address)} does not speak Redis's language. Check the URL."
        )
    if isinstance(error, ssl.SSLError):
        why = f"no secure connection: {error}. Check the certificates, and that the server's port is one for TLS"
    elif isinstance(error, TimeoutError):
        why = f"no answer within {target.timeout:g} s"
    else:
        why = str(error or "the connection was lost")
    return StoreUnavailable(f"{shown(address)} can't be reached: {why}. Try again with the same key.")


def closed() -> StoreUnavailable:
    """What whoever comes after ``close`` is told."""
    return StoreUnavailable("The store is closed.")


def shown(address: Address) -> str:
    """An address in a message."""
    return f"Redis at {address[0]}:{address[1]}"


# Replies


def new_reader() -> Reader:
    """Makes replies of bytes."""
    return Reader(notEnoughData=MORE)


# Blocking callers


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
        except BaseException:
            self.close()
            raise

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
        if reply == 1 and not self._refusals:
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
            self._socket.settimeout(self._timeout)

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

    def _receive(self) -> None:
        data = self._socket.recv(RECEIVE_BYTES)
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

    def ask(self, address: Address, request: Request) -> list[Any]:
        """Send commands to a server and wait for their replies."""
        return self._finish(address, request, self._begin(address, request))

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
