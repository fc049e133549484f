"""``Sessions``: the server's side. It issues client ids and runs each numbered request once, through the one flow."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Awaitable, Callable
from copy import copy
from importlib import import_module
from typing import Any, Final, TypeVar, cast

from .. import keys
from .._answers import Call
from .._blocking import Blocking, run
from .._colours import Colour
from .._durations import Duration, seconds
from .._flow import Flow
from .._fork import tell_of_forks
from .._handlers import check_awaited, hint_of, is_plain, refuse
from .._keeper import Keeper
from .._messages import Outcome
from .._receiver import Receiver
from .._records import make
from ..errors import Refused, UsageError
from ..keys import new_owner
from ..policy import Policy
from ..stores import Store
from ._request import LONGEST, Opened, Request
from ._rules import WINDOW, Contact, Session, SessionClaim, expired, key_of, place_of, session_id
from ._store import SessionStore

R = TypeVar("R")

STORES: Final = {
    "memory": ("MemoryStore", "_memory", "MemorySessions"),
    "sqlite": ("SQLiteStore", "_sqlite", "SQLiteSessions"),
    "redis": ("RedisStore", "_redis", "RedisSessions"),
    "postgres": ("PostgresStore", "_postgres", "PostgresSessions"),
    "mysql": ("MySQLStore", "_mysql", "MySQLSessions"),
    "dynamodb": ("DynamoDBStore", "_dynamodb", "DynamoDBSessions"),
}
"""By the module of a store: its class, and where the sessions beside its records are."""


class Sessions:
    """The sessions of clients, beside the records of a receiver. One per receiver is plenty.

    receiver  whose store, hooks and clocks these are
    lease     how long a session lives without contact; every request and every heartbeat renews it
    window    how many requests a client may wait for at once, and how many are remembered for it at most
    policy    how requests are treated, by default as the receiver's; ``keep`` means nothing here, since a request is
              remembered until its client has acknowledged it
    """

    def __init__(
        self,
        receiver: Receiver,
        *,
        lease: Duration = "1h",
        window: int = WINDOW,
        policy: Policy | None = None,
    ) -> None:
        if not isinstance(receiver, Receiver):
            raise UsageError(f"A {type(receiver).__name__} is not a Receiver. Write Sessions(Receiver(url)).")
        if type(window) is not int or not 1 <= window <= 1 << 16:
            raise UsageError(f"window={window!r} must be a whole number from 1 to {1 << 16}.")
        self.lease, self.window = seconds(lease, "lease"), window
        self.receiver: Receiver = _Inner(receiver, sessions_beside(receiver.store), policy)

    # A client's session

    def open(self, *, scope: str = "") -> Opened:
        """Register a client of this scope: a new id, which nobody can guess."""
        return run(self._open(self.receiver.blocking.store, scope))

    async def aopen(self, *, scope: str = "") -> Opened:
        """``open`` for callers on an event loop."""
        return await self._open(self.receiver.asyncio.store, scope)

    def resume(self, client: str, *, scope: str = "") -> Opened:
        """Go on with a session after a restart, under the next epoch: who has the last one is fenced out."""
        return run(self._contact(self.receiver.blocking.store, "resume", client, scope))

    async def aresume(self, client: str, *, scope: str = "") -> Opened:
        """``resume`` for callers on an event loop."""
        return await self._contact(self.receiver.asyncio.store, "resume", client, scope)

    def touch(self, client: str, *, epoch: int = 1, acked: int = 0, scope: str = "") -> Opened:
        """A heartbeat: renew the lease of a session that has nothing to ask, and hear what is acknowledged."""
        return run(self._contact(self.receiver.blocking.store, "touch", client, scope, epoch, acked))

    async def atouch(self, client: str, *, epoch: int = 1, acked: int = 0, scope: str = "") -> Opened:
        """``touch`` for callers on an event loop."""
        return await self._contact(self.receiver.asyncio.store, "touch", client, scope, epoch, acked)

    def end(self, client: str, *, epoch: int = 1, scope: str = "") -> None:
        """Forget a session and all its requests: its client has no more to ask."""
        run(self._contact(self.receiver.blocking.store, "end", client, scope, epoch))

    async def aend(self, client: str, *, epoch: int = 1, scope: str = "") -> None:
        """``end`` for callers on an event loop."""
        await self._contact(self.receiver.asyncio.store, "end", client, scope, epoch)

    # Its requests

    def process(
        self,
        request: Request,
        handler: Callable[[Request], R],
        *,
        scope: str = "",
        policy: Policy | None = None,
    ) -> Outcome[R]:
        """Run ``handler(request)`` once; every repeat gets the first result. Raises what gave no result."""
        if not is_plain(handler):
            refuse(handler, "aprocess")
        call = self._call(request, handler, scope, policy)
        return run(self._run(self.receiver.blocking, call, handler, request)).unwrap()

    async def aprocess(
        self,
        request: Request,
        handler: Callable[[Request], Awaitable[R]],
        *,
        scope: str = "",
        policy: Policy | None = None,
    ) -> Outcome[R]:
        """Await ``handler(request)`` once; every repeat gets the first result. Raises what gave no result."""
        check_awaited(handler, "aprocess")
        call = self._call(request, handler, scope, policy)
        return (await self._run(self.receiver.asyncio, call, handler, request)).unwrap()

    async def _run(
        self, colour: Colour, call: Call, handler: Callable[..., Any], request: Request
    ) -> Outcome[Any]:
        try:
            return await self.receiver.flow.run(colour, call, handler, (request,), {})
        except Refused as refused:
            return self.refused(call, refused)

    def on(self, connection: Any) -> Sessions:
        """The same sessions inside the transaction that a connection is in: mark, answer and effect commit together."""
        from ._atomic import inside

        other = copy(self)
        other.receiver = inside(self.receiver, connection)
        return other

    def collect(self, limit: int = 256) -> int:
        """Look at a bounded number of sessions and forget those whose lease is over. Traffic does so by itself."""
        return run(self.receiver.blocking.store.purge(limit))

    def ddl(self) -> str:
        """The statements that make the tables of an SQL store, for databases where programs may not do so."""
        tables = getattr(self.receiver.store, "tables", None)
        if tables is None:
            raise UsageError(f"{type(self.receiver.store).__name__} has no tables.")
        return "".join(f"{statement.strip()};\n" for statement in tables.sql.schema)

    def close(self, drain: Duration = "5s") -> None:
        """Wait for running requests (at most ``drain``) and stop renewing leases. The receiver's store stays open."""
        self.receiver.close(drain)

    # What follows is for boundaries

    def call_of(
        self, request: Request, fingerprint: bytes, policy: Policy, hint: Any = Any, scope: str = ""
    ) -> Call:
        """The delivery that a request is, with its place in its session."""
        _check_client(request.client)
        name = session_id(scope, request.client)
        place = place_of(name, request.number, request.acked, request.epoch, self.window)
        lease, keep, once, most = policy.terms
        key = key_of(scope, name, request.number)
        claim = make(SessionClaim, (key, new_owner(), fingerprint, lease, keep, once, most, True))
        claim.place = place
        return make(Call, (claim, policy, hint))

    def refused(self, call: Call, error: Refused) -> Outcome[Any]:
        """The outcome of a request that its session refuses; who listens is told."""
        self.receiver.flow.tell("late", call.key, detail=type(error).__name__)
        return Outcome("late", error=error)

    def _call(self, request: Request, handler: Callable[..., Any], scope: str, policy: Policy | None) -> Call:
        if type(request) is not Request:
            raise UsageError(f"A {type(request).__name__} is not a Request of a session.")
        fingerprint = b"" if request.payload is None else keys.fingerprint(request.payload)
        terms = self.receiver.policy if policy is None else sound(policy)
        return self.call_of(request, fingerprint, terms, hint_of(handler), scope)

    async def _open(self, store: Store, scope: str) -> Opened:
        client = secrets.token_hex(16)
        contact = Contact("open", session_id(scope, client), lease=self.lease)
        return self._opened(client, await _unguarded(store).contact(contact))

    async def _contact(
        self, store: Store, kind: str, client: str, scope: str, epoch: int = 1, acked: int = 0
    ) -> Opened:
        _check_client(client)
        place = place_of(session_id(scope, client), acked + 1 if type(acked) is int else 1, acked, epoch, 1)
        contact = Contact(kind, place.session, place.epoch, place.low)
        return self._opened(client, await _unguarded(store).contact(contact))

    def _opened(self, client: str, session: Session) -> Opened:
        return Opened(client, session.epoch, session.low - 1, session.lease, self.window)


class _Inner(Receiver):
    """A receiver over a session store: names, hooks, figures and clocks are those of the one that it comes from."""

    def __init__(self, receiver: Receiver, store: SessionStore, policy: Policy | None) -> None:
        own = {name: value for name, value in receiver.__dict__.items() if name != "asyncio"}
        self.__dict__.update(own)
        self.store = store
        self.policy = sound(receiver.policy if policy is None else policy)
        self.blocking = Blocking(self._guarded())
        monotonic = receiver.flow.monotonic
        self._keeper = Keeper(self.blocking.store, monotonic, self._hear)
        self.flow = Flow(self._keeper, self.events, monotonic)
        self.flow.home = self
        tell_of_forks(self._keeper)


def sound(policy: Policy) -> Policy:
    """A policy as sessions need it: only the store knows where the mark is, so nothing is answered without it."""
    if not isinstance(policy, Policy):
        raise UsageError(f'{policy!r} is not a Policy. Write Policy(lease="2m", ...).')
    return policy.but(local_cache=0, fallback="closed") if policy.cached else policy


def sessions_beside(store: Store) -> SessionStore:
    """The session store that is where a store's records are."""
    if isinstance(store, SessionStore):
        return store
    for module, (name, home, form) in STORES.items():
        loaded = sys.modules.get(f"effectonce.stores.{module}")  # one that is not can't be the receiver's
        if loaded is not None and isinstance(store, getattr(loaded, name)):
            kind: Any = getattr(import_module(f".{home}", __package__), form)
            return cast("SessionStore", kind.beside(store))
    raise UsageError(
        f"There are no sessions in a {type(store).__name__}. They need one with transactions: memory, SQLite, Redis, "
        "PostgreSQL, MySQL, MariaDB or DynamoDB. Or write a SessionStore."
    )


def _unguarded(store: Store) -> SessionStore:
    return cast("SessionStore", getattr(store, "store", store))


def _check_client(client: Any) -> None:
    """What can't be a client id is answered as one that is not known: nobody learns what ids look like."""
    if not isinstance(client, str) or not 0 < len(client) <= LONGEST:
        raise expired()
