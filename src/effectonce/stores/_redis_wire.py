"""Connections to Redis and Valkey: commands go out as bytes, replies come in through hiredis, and nothing is between.

A client library's command layer costs more than the network. What it would be good for is little: a greeting that logs
in and looks whether this server can be trusted with records, and errors that say what to do. These are here; the
connections of blocking callers are in ``_redis_threads``, those of event loops in ``_redis_loop``.

A reply that is an error is a value here: who asked decides what it means. A server that can't be reached is
``StoreUnavailable``.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from typing import Any, Final

from ..errors import MissingExtra, StoreError, StoreMismatch, StoreUnavailable
from ._redis_commands import command

try:
    from hiredis import ProtocolError as ProtocolError
    from hiredis import PushNotification as PushNotification
    from hiredis import Reader
    from hiredis import ReplyError as ReplyError
except ImportError as error:
    raise MissingExtra("Redis needs the package hiredis: pip install effectonce[redis]") from error

OLDEST: Final = (7, 0)
"""The first version with PEXPIRETIME."""
MORE: Final = object()
"""What a reader says when a reply isn't complete."""
WAIT_SHARE: Final = 0.8
"""How much of the time-out replicas may take."""

Address = tuple[str, int]
Request = tuple[bytes, int]
"""Commands to one server, and how many replies they have."""
HANG_UP: Final[Request] = (b"", 0)
"""Asks to give up the connections to a server."""
MAP: Final[Request] = (command(b"CLUSTER", b"SLOTS"), 1)
"""Asks which server has which keys. Replicas have nothing to confirm then."""
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

    def check_replicas(self, address: Address, confirmed: Any, replies: list[Any]) -> None:
        """See that enough of them have what was written: something was, unless all replies are refusals."""
        if all(type(reply) is ReplyError for reply in replies):
            return
        if isinstance(confirmed, ReplyError):
            raise complaint(address, confirmed)
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
    "NOPERM": "Allow its user EVALSHA, SCRIPT LOAD and what the scripts call, on the store's keys and channels; with "
    "durability=wait:1 also WAIT.",
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
    elif isinstance(error, TimeoutError | BlockingIOError):  # Python kept the time, or the system
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
