"""Records in Redis or Valkey, also in a cluster: one string for each key, one EVALSHA for the steps of a moment.

The protocol decides here, in Python; a server knows only the five steps (``lua``) and its own clock. It forgets what
has expired by itself; what must not be forgotten has no expiry. What an answer survives is up to the server: with
``appendonly yes`` it remembers all but the last second across a crash, with ``appendfsync always`` everything; a
replica that is promoted may lack the last writes, unless ``durability="wait:1"`` waited for it. A server that evicts
keys is refused. Leases, expiry and fences go by the clock of the server that has the key: servers that may take one
another's place have to agree on the time, to within what is kept.

``_redis_records`` and ``_redis_commands`` say how records and steps look to a server, ``_redis_verbs`` what is made of
them, ``_redis_routes`` which server has them, and ``_redis_threads`` and ``_redis_loop`` carry them there, for blocking
callers and for event loops.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import threading
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import replace
from threading import get_ident
from typing import Any, Final, Literal
from urllib.parse import unquote, urlsplit

from .._fork import tell_of_forks
from .._records import Claim, Completion
from ..errors import StoreUnavailable, UsageError
from ._crowds import CrowdStore
from ._redis_commands import Commands, Order, key_of
from ._redis_loop import Lines, Link
from ._redis_routes import Routes
from ._redis_threads import Pool
from ._redis_verbs import Verbs
from ._redis_wire import Address, Answers, ReplyError, Requests, Target, closed
from ._urls import shown
from ._waiters import Waiter
from .base import Store

SCHEMES: Final = {
    kind + secure + cluster: (bool(secure), bool(cluster))
    for kind in ("redis", "valkey")
    for secure in ("", "s")
    for cluster in ("", "+cluster")
}
"""What a URL may begin with: whether it means TLS, and a cluster."""
NO_WAY: Final = ReplyError("It is not known which server has this key.")
NOWHERE: Final[Address] = ("", 0)


class RedisStore(Verbs):
    """A store in the Redis or Valkey server, or the cluster, that a URL names.

    Threads have a connection each while they ask, at most 64 to a server, and one while they wait for another process;
    an event loop has one for all of its tasks.

    prefix      begins the name of every key, and ends with its only colon: so no store's prefix begins another's
    timeout     how many seconds a server may take to answer before StoreUnavailable
    durability  "server": an answer survives what the server is set up to survive; "wait:1": it has been confirmed by
                one replica as well (or more), and is StoreUnavailable if it hasn't
    eviction    "refuse" a server that may forget records when memory gets short, or "accept" it
    ca          a file of certificates to trust, for TLS with an authority of your own
    tls         an SSLContext, for everything else about TLS
    """

    suspends = False

    def __init__(
        self,
        url: str = "redis://localhost:6379/0",
        *,
        prefix: str = "eo:",
        timeout: float = 5.0,
        durability: str = "server",
        eviction: Literal["refuse", "accept"] = "refuse",
        ca: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        replicas = re.fullmatch(r"wait:([1-9]\d?)", str(durability))
        if replicas is None and durability != "server":
            raise UsageError(f'durability={durability!r} must be "server" or "wait:1", "wait:2" …')
        if eviction not in ("refuse", "accept"):
            raise UsageError(f'eviction={eviction!r} must be "refuse" or "accept".')
        if type(timeout) not in (int, float) or not 0 < timeout <= 3600:
            raise UsageError(f"timeout={timeout!r} must be seconds, more than none and at most an hour.")
        if not all(isinstance(text, str) for text in (url, prefix)):
            raise UsageError(f"url and prefix={prefix!r} must be strings.")
        if prefix.find(":") != len(prefix) - 1 or len(prefix) < 2:
            instead = ".".join(filter(None, prefix.split(":"))) or "eo"
            raise UsageError(
                f"prefix={prefix!r} must end with a colon and have no other, so that it begins no other store's: each "
                f"would take the other's keys for its own. Write prefix={instead + ':'!r}."
            )
        self._target = replace(
            parsed(url, ca, tls),
            timeout=timeout,
            replicas=int(replicas[1]) if replicas else 0,
            may_evict=eviction == "accept",
        )
        self.commands = Commands(prefix, waits_for_replicas=replicas is not None)
        self.routes = Routes(self._target, self.commands)
        self.is_scattered = self._target.clustered
        self._closed = False
        self._start()
        tell_of_forks(self)

    @classmethod
    def from_url(cls, url: str, options: dict[str, str]) -> RedisStore:
        """``redis://user:password@host:6379/0``, ``rediss://`` for TLS, ``redis+cluster://host1,host2``.

        Options: ``?prefix=eo:&timeout=5&durability=wait:1&eviction=accept&ca=/etc/ssl/redis.pem``. ``valkey://`` means
        the same as ``redis://``.
        """
        known: dict[str, Any] = {
            "prefix": str,
            "timeout": float,
            "durability": str,
            "eviction": str,
            "ca": str,
        }
        try:
            chosen = {name: known[name](value) for name, value in options.items()}
        except (KeyError, ValueError):
            raise UsageError(
                f"{shown(url)!r} has an option that is unknown or makes no sense. Known are prefix=TEXT, "
                "timeout=SECONDS, durability=server|wait:N, eviction=refuse|accept and ca=FILE."
            ) from None
        return cls(url.partition("?")[0], **chosen)

    def take(self, order: Order) -> Any:
        """Take one step, on the caller's own thread."""
        server = self.routes.only or self.routes.guess(key_of(order))
        if server is None:
            return NO_WAY
        try:
            return self._pool.to(server).ask(self.commands.of(order))
        except StoreUnavailable:
            self.routes.forget()
            raise

    async def exchange(self, requests: Requests) -> Answers:
        """Ask servers, all at once."""
        return self._pool.exchange(requests)

    async def listen(self, server: Address, channel: bytes, request: bytes, seconds: float) -> Any:
        """Wait to be told, on the caller's own thread."""
        return self._pool.to(server).watch(channel, request, seconds)

    def for_asyncio(self) -> Store:
        """The same verbs for event loops."""
        return OnLoops(self)

    def lines(self) -> Lines:
        """The connections of the running event loop."""
        loop = asyncio.get_running_loop()
        lines = self._lines.get(loop)
        if lines is not None:
            return lines
        if self._closed:
            raise closed()
        with self._lock:
            for ended in [other for other in self._lines if other.is_closed()]:
                del self._lines[ended]
            lines = self._lines[loop] = Lines(self._target)
        return lines

    def close(self) -> None:
        """Hang up everywhere."""
        self._closed = True
        self._pool.close()
        with self._lock:
            held = list(self._lines.items())
        for loop, lines in held:
            with suppress(RuntimeError):  # a closed loop has hung up
                loop.call_soon_threadsafe(lines.close)

    def before_fork(self) -> None:
        """Nothing to bring to rest: the child will have connections of its own."""

    def after_fork(self, *, in_child: bool) -> None:
        """In the child: leave the parent's connections alone. An event loop's are not even closed."""
        if in_child:
            self._left_behind = self._lines
            self._pool.close()
            self._start()

    def _start(self) -> None:
        self._pool = Pool(self._target)
        self._lock = threading.Lock()
        """For whoever changes what is next: several loops may begin, in several threads."""
        self._lines: dict[asyncio.AbstractEventLoop, Lines] = {}
        self.latest: Link | None = None
        """What a step was last sent by, where one server has all keys."""
        if self._closed:
            self._pool.close()


class OnLoops(Verbs, CrowdStore):
    """The store for callers on event loops: what a loop asks for in one turn goes out together."""

    suspends = True

    def __init__(self, store: RedisStore) -> None:
        self._store, self.routes, self.commands = store, store.routes, store.commands
        self.is_scattered = store.is_scattered

    def take(self, order: Order) -> Awaitable[Any]:
        """Take one step, together with what others ask for in this turn of the loop."""
        link = self._store.latest
        if link is None or link.where._thread_id != get_ident() or not link.is_open:
            link = self._store.lines().links.get(
                self.routes.only or self.routes.guess(key_of(order)) or NOWHERE
            )
            if link is None:
                return self._take_anyhow(order)
            if self.routes.only is None:
                return self._take_in_cluster(order, link)
            self._store.latest = link
        return link.take(self.commands.parts(order))

    def claim_soon(self, claim: Claim) -> Waiter[Any] | None:
        """Have a claim taken with others of this turn, if one server has all keys and its connection is open here."""
        link = self._store.latest
        if link is None or link.where._thread_id != get_ident():
            return None
        return link.take(self.commands.claim(claim)) if link.is_open and claim.may_create else None

    def end_soon(self, completion: Completion) -> Waiter[Any] | None:
        """The same for a completion."""
        link = self._store.latest
        if link is None or link.where._thread_id != get_ident() or not completion.owner:
            return None
        return link.take(self.commands.completion(completion)) if link.is_open and completion.began else None

    async def _take_in_cluster(self, order: Order, link: Link) -> Any:
        try:
            return await link.ask(self.commands.of(order))
        except StoreUnavailable:
            self.routes.forget()
            raise

    async def _take_anyhow(self, order: Order) -> Any:
        (answer,) = await self._deliver([order])
        return answer

    async def exchange(self, requests: Requests) -> Answers:
        """Ask servers, all at once."""
        return await self._store.lines().exchange(requests)

    async def listen(self, server: Address, channel: bytes, request: bytes, seconds: float) -> Any:
        """Wait to be told."""
        lines = self._store.lines()
        return await (lines.links.get(server) or await lines.open(server)).watch(channel, request, seconds)

    def close(self) -> None:
        """Hang up everywhere."""
        self._store.close()


def parsed(url: str, ca: str | None, tls: ssl.SSLContext | None) -> Target:
    """What a URL says, checked."""
    scheme, _, rest = url.partition("://")
    if scheme not in SCHEMES or not rest:
        raise UsageError(f"{shown(url)!r} is no URL of a Redis server. Write redis://localhost:6379/0.")
    secure, clustered = SCHEMES[scheme]
    place, _, path = rest.partition("/")
    login, _, hosts = place.rpartition("@")
    user, _, password = login.partition(":")
    if not re.fullmatch(r"\d*", path):
        raise UsageError(f"{shown(url)!r} does not end with the number of a database, such as /0.")
    try:
        seeds = tuple([_address(host) for host in hosts.split(",")])
    except ValueError as error:
        raise UsageError(f"{shown(url)!r} can't be used: {error}. Write redis://host:port/0.") from None
    if len(seeds) > 1 and not clustered:
        raise UsageError(
            f"{shown(url)!r} names several servers that know nothing of each other. Of a cluster, write "
            f"{scheme}+cluster://; else, name one."
        )
    if not secure and (ca or tls):
        raise UsageError(f"{shown(url)!r} has no TLS, so it needs no certificates. Write rediss://.")
    try:
        context = tls or (ssl.create_default_context(cafile=ca) if secure else None)
    except (OSError, ValueError) as error:
        raise UsageError(f"ca={ca!r} is no file with certificates: {error}.") from None
    return Target(seeds, clustered, unquote(user), unquote(password), int(path or 0), context)


def _address(host: str) -> Address:
    parts = urlsplit(f"//{host}")
    if not parts.hostname or parts.path or parts.query or parts.fragment:
        raise ValueError(f"{host!r} names no host")
    if parts.port == 0:
        raise ValueError("no server has port 0")
    return parts.hostname, parts.port or 6379
