"""Records in Redis or Valkey, also in a cluster: one string for each key, one EVALSHA for each step.

The protocol decides here, in Python; a server knows only the five steps (``lua``) and its own clock. It forgets what
has expired by itself; what must not be forgotten has no expiry. What an answer survives is up to the server: with
``appendonly yes`` it remembers all but the last second across a crash, with ``appendfsync always`` everything; a
replica that is promoted may lack the last writes, unless ``durability="wait:1"`` waited for it. A server that evicts
keys is refused. Leases, expiry and fences go by the clock of the server that has the key: servers that may take one
another's place have to agree on the time, to within what is kept.

``_redis_records`` says how records and steps look to a server, ``_redis_routes`` which server has them, and
``_redis_wire`` and ``_redis_loop`` speak to servers, for blocking callers and for event loops.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, Literal, TypeVar, cast
from urllib.parse import unquote, urlsplit

from .._fork import tell_of_forks
from .._protocol import decide_claim, is_expired
from .._records import Claim, Completion, Decision, Ending, Record, State, make
from ..errors import StoreError, StoreUnavailable, UsageError
from ._redis_loop import Lines
from ._redis_records import OUTLINE_SIZE, Commands, command, outline, understood
from ._redis_routes import Dialogue, Routes
from ._redis_wire import Address, Answers, Pool, ReplyError, Requests, Target, closed, complaint
from ._steps import DONE, Add, Added, Conversation, End, Found, Read, Step, SteppingStore, claiming, ending
from ._urls import shown
from .base import Features, Store, StoreStats

T = TypeVar("T")

SCHEMES: Final = {
    kind + secure + cluster: (bool(secure), bool(cluster))
    for kind in ("redis", "valkey")
    for secure in ("", "s")
    for cluster in ("", "+cluster")
}
"""What a URL may begin with: whether it means TLS, and a cluster."""
PAGE: Final = 1000
"""Keys in one page of a SCAN."""
SAMPLE: Final = 10_000
"""Keys of each server that ``stats`` looks at."""
WEIGHED: Final = 32
"""Records of each server whose size in memory it asks for."""


class _Verbs(SteppingStore):
    """The verbs, once: the two colours differ in who carries requests to servers."""

    features = Features()
    routes: Routes
    commands: Commands

    async def take(self, step: Step) -> Any:
        """Take one step, by a shorter way than many of them if everything is as usual."""
        raise NotImplementedError

    async def exchange(self, requests: Requests) -> Answers:
        """Ask servers, all at once."""
        raise NotImplementedError

    async def listen(self, server: Address, channel: bytes, request: bytes, seconds: float) -> Any:
        """Send a request to be told something on a channel, and wait until it is."""
        raise NotImplementedError

    async def send(self, steps: Sequence[Step]) -> list[Any]:
        """Take steps: in one round trip, unless a server has lost its scripts or a key has moved."""
        commands, only = list(map(self.commands.of, steps)), self.routes.only
        if only is not None:
            replies = await self._ask(only, *commands)
            if ReplyError not in map(type, replies):
                return list(map(understood, steps, replies))
        return await self._deliver(steps, commands)

    async def claim(self, claim: Claim) -> Decision:
        """Decide one claim. New or known, it is one round trip; only what is neither goes on as a conversation."""
        if not claim.may_create:
            return await self._converse(claiming(claim))
        reply = await self.take(make(Add, (claim,)))
        if type(reply) is Added:
            fence, now = reply
            return decide_claim(None, claim, now, fence - 1)
        record, now = cast("Found", reply)
        decision = decide_claim(record, claim, now, 0)
        return decision if decision.record is record else await self._converse(claiming(claim), reply)

    async def complete(self, completion: Completion) -> Ending:
        """End a claim in one round trip, if it is held."""
        if not completion.owner or not completion.began:
            return await self._converse(ending(completion))
        reply = await self.take(make(End, (completion,)))
        return DONE if reply is DONE else await self._converse(ending(completion), reply)

    async def get(self, key: str) -> Record | None:
        """Read a record."""
        return cast("Found", await self.take(Read(key))).record

    async def watch(self, record: Record, seconds: float) -> bool:
        """Mark a record as waited for, and wait until its server tells of a change: of no other record it does."""
        name, request = self.commands.name(record.key), self.commands.watching(record)
        server = await self._hold(self.routes.finding(record.key))
        reply = await self.listen(server, name, request, seconds)
        if isinstance(reply, ReplyError):  # the script is not there, or the key; the next claim finds out
            await self._ask(server, *self.commands.load)
            return False
        return reply is not None

    async def purge(self, limit: int = 256) -> int:
        """Nothing to do: Redis forgets what has expired by itself."""
        await self.now()
        return 0

    async def scan(self, state: State | None = None, after: str = "", limit: int = 256) -> list[Record]:
        """Records in key order. Redis has its keys in no order, so every page is a way through all of them."""
        prefix, first = self.commands.name(""), self.commands.name(after)
        chosen: list[bytes] = []
        for server in await self._hold(self.routes.servers()):
            async for page in self._pages(server):
                names = [name for name in page if name > first and name.startswith(prefix)]
                outlines = await self._outlines(server, names)
                wanted = [name for name, record in outlines.items() if state in (None, record.state)]
                chosen = sorted({*chosen, *wanted})[: max(limit, 0)]
        keys = [name[len(prefix) :].decode("utf-8", "replace") for name in chosen]
        founds: list[Found] = await self.send([Read(key) for key in keys]) if keys else []
        records = [found.record for found in founds if found.record is not None]
        return [record for record in records if state in (None, record.state)]

    async def now(self) -> float:
        """The clock of the server; of a cluster's first one."""
        address, *_ = await self._hold(self.routes.servers(anew=False))
        seconds, microseconds = await self._demand(address, command(b"TIME"))
        return (int(seconds) * 1_000_000 + int(microseconds)) / 1_000_000

    async def stats(self) -> StoreStats:
        """Count what is there: exactly up to ten thousand keys, beyond that as a sample of as many suggests.

        The keys of other programs in the same database count for this limit.
        """
        servers, now = await self._hold(self.routes.servers()), await self.now()
        samples = [await self._sample(server) for server in servers]
        by_state = Counter[str]()
        for scale, _, records in samples:
            counts = Counter(record.state.name for record in records)
            by_state.update({state: round(count * scale) for state, count in counts.items()})
        pending = [
            r.lease_until - now for _, _, records in samples for r in records if r.state is State.PENDING
        ]
        return StoreStats(
            keys=by_state.total(),
            bytes=round(sum(scale * weight * len(records) for scale, weight, records in samples)),
            by_state=dict(by_state),
            oldest_pending_lease=min(pending, default=None),
            expired=sum(is_expired(record, now) for _, _, records in samples for record in records),
        )

    async def _sample(self, server: Address) -> tuple[float, float, list[Record]]:
        """Some records of a server, each for so many, and how many bytes each of them takes."""
        prefix, looked = self.commands.name(""), 0
        records, weights = dict[bytes, Record](), list[int]()
        async for page in self._pages(server, SAMPLE):
            looked += len(page)
            outlines = await self._outlines(server, [name for name in page if name.startswith(prefix)])
            records |= outlines
            weighed = [
                command(b"MEMORY", b"USAGE", name) for name in list(outlines)[: WEIGHED - len(weights)]
            ]
            weights += [weight for weight in await self._ask(server, *weighed) if type(weight) is int]
        size = await self._demand(server, command(b"DBSIZE"))
        scale = max(1.0, size / looked) if looked >= SAMPLE else 1.0
        return scale, sum(weights) / max(len(weights), 1), list(records.values())

    async def _pages(self, server: Address, most: int = sys.maxsize) -> AsyncIterator[list[bytes]]:
        """The names of keys, in no order, until there are no more or enough."""
        cursor, seen = b"0", 0
        while True:
            cursor, names = await self._demand(server, command(b"SCAN", cursor, b"COUNT", b"%d" % PAGE))
            yield names
            seen += len(names)
            if cursor == b"0" or seen >= most:
                return

    async def _outlines(self, server: Address, names: Sequence[bytes]) -> dict[bytes, Record]:
        """Those of some keys that hold records."""
        last = b"%d" % (OUTLINE_SIZE - 1)
        starts = await self._ask(server, *[command(b"GETRANGE", name, b"0", last) for name in names])
        outlines = zip(names, map(outline, starts), strict=True)
        return {name: record for name, record in outlines if record is not None}

    async def _ask(self, server: Address, *commands: bytes) -> list[Any]:
        """Ask a server; its replies, some of which may be errors."""
        if not commands:
            return []
        answer = (await self.exchange({server: (b"".join(commands), len(commands))}))[server]
        if isinstance(answer, StoreError):
            raise answer
        return answer

    async def _demand(self, server: Address, command: bytes) -> Any:
        """Ask a server something that it must be able to answer."""
        (reply,) = await self._ask(server, command)
        if isinstance(reply, ReplyError):
            raise complaint(server, reply)
        return reply

    async def _deliver(self, steps: Sequence[Step], commands: Sequence[bytes]) -> list[Any]:
        """Take steps wherever that leads. What was done before may be done again."""
        return list(map(understood, steps, await self._hold(self.routes.delivering(steps, commands))))

    async def _hold(self, dialogue: Dialogue[T]) -> T:
        try:
            requests = next(dialogue)
            while True:
                requests = dialogue.send(await self.exchange(requests))
        except StopIteration as done:
            return cast("T", done.value)

    async def _converse(self, conversation: Conversation[T], reply: Any = None) -> T:
        """Hold a conversation; ``reply`` is the one to its first step, if that has been taken."""
        step = next(conversation)
        try:
            while True:
                step = conversation.send(await self.take(step) if reply is None else reply)
                reply = None
        except StopIteration as done:
            return cast("T", done.value)


class RedisStore(_Verbs):
    """A store in the Redis or Valkey server, or the cluster, that a URL names.

    prefix      begins the name of every key; no store's prefix may begin another's in the same database
    timeout     how many seconds a server may take to answer before StoreUnavailable
    durability  "server": an answer survives what the server is set up to survive; "wait:1": it has been confirmed by
                one replica as well (or more), and is StoreUnavailable if it hasn't
    eviction    "refuse" a server that may forget records when memory gets short, or "accept" it
    ca          a file of certificates to trust, for TLS with an authority of your own
    tls         an SSLContext, for everything else about TLS
    """

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
        self._target = replace(
            parsed(url, ca, tls),
            timeout=timeout,
            replicas=int(replicas[1]) if replicas else 0,
            may_evict=eviction == "accept",
        )
        self.commands = Commands(prefix, waits_for_replicas=replicas is not None)
        self.routes = Routes(self._target, self.commands)
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

    async def take(self, step: Step) -> Any:
        """Take one step, on the caller's own thread."""
        data, server = self.commands.of(step), self.routes.only or self.routes.guess(step.key)
        if server is not None:
            try:
                (reply,) = self._pool.ask(server, (data, 1))
            except StoreUnavailable:
                self.routes.forget()
                raise
            if type(reply) is not ReplyError:
                return understood(step, reply)
        return (await self._deliver((step,), (data,)))[0]

    async def exchange(self, requests: Requests) -> Answers:
        """Ask servers, all at once."""
        return self._pool.exchange(requests)

    async def listen(self, server: Address, channel: bytes, request: bytes, seconds: float) -> Any:
        """Wait to be told, on the caller's own thread."""
        return self._pool.watch(server, channel, request, seconds)

    def for_asyncio(self) -> Store:
        """The same verbs for event loops."""
        return OnLoops(self)

    def lines(self) -> Lines:
        """The connections of the running event loop."""
        loop = asyncio.get_running_loop()
        try:
            return self._lines[loop]
        except KeyError:
            pass
        if self._closed:
            raise closed()
        for other in [other for other in self._lines if other.is_closed()]:
            del self._lines[other]
        lines = self._lines[loop] = Lines(self._target)
        return lines

    def close(self) -> None:
        """Hang up everywhere."""
        self._closed = True
        self._pool.close()
        for loop, lines in list(self._lines.items()):
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
        self._lines: dict[asyncio.AbstractEventLoop, Lines] = {}
        if self._closed:
            self._pool.close()


class OnLoops(_Verbs):
    """The store for callers on event loops: what a loop asks for in one turn goes out together."""

    def __init__(self, store: RedisStore) -> None:
        self._store, self.routes, self.commands = store, store.routes, store.commands

    async def take(self, step: Step) -> Any:
        """Take one step, together with what others ask for in this turn of the loop."""
        data, server = self.commands.of(step), self.routes.only or self.routes.guess(step.key)
        if server is not None and (link := self._store.lines().links.get(server)):
            try:
                reply = await link.ask(data)
            except StoreUnavailable:
                self.routes.forget()
                raise
            if type(reply) is not ReplyError:
                return understood(step, reply)
        return (await self._deliver((step,), (data,)))[0]

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
        context = tls or (ssl.create_default_context(cafile=ca) if secure else None)
    except (ValueError, OSError) as error:
        raise UsageError(f"{shown(url)!r} can't be used: {error}. Write redis://host:port/0.") from None
    if not secure and (ca or tls):
        raise UsageError(f"{shown(url)!r} has no TLS, so it needs no certificates. Write rediss://.")
    return Target(seeds, clustered, unquote(user), unquote(password), int(path or 0), context)


def _address(host: str) -> Address:
    parts = urlsplit(f"//{host}")
    if not parts.hostname or parts.path or parts.query or parts.fragment:
        raise ValueError(f"{host!r} names no host")
    return parts.hostname, parts.port or 6379
