"""``Receiver``: the object people hold. It names effects, picks the colour, and leaves the rest to the flow."""

from __future__ import annotations

import os
import sys
import time
import typing
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, overload

from . import batch, codec, keys
from ._answers import Call, call_of
from ._attempt import Attempt, surrounding
from ._blocking import Blocking, run
from ._colours import Colour
from ._durations import Duration, seconds
from ._flow import Flow
from ._fork import tell_of_forks
from ._handlers import check_awaited, hint_of, hint_of_awaited, hint_of_plain, is_plain, refuse
from ._keeper import Keeper
from ._messages import Message, Outcome
from ._operations import CLAIM_OPERATION, Functions, is_saga, message_prefix, own_name
from ._records import Claim, Record, State, make
from .claims import Claiming
from .errors import EffectOnceError, InvalidKey, UsageError
from .functions import AsyncFunction, ClassFunction, Function, Identity, KeySource, P, decorate
from .hooks import ASIDE, EventKind, Events, Hook, Stats, checked
from .keys import Key, new_owner
from .policy import Fallback, Policy, Resolution
from .stores import Breaker, Circuit, Health, Store, guarded, open_store
from .sweeping import Redrive, Swept, sweep

if TYPE_CHECKING:
    from ._asyncio import Asyncio

R = TypeVar("R")

DEFAULT_STORE = "sqlite:///effects.db"
DEFAULT_BREAKER = Breaker()


class Receiver:
    """Makes effects happen once. One per process and store is plenty; it is safe to share between threads and loops.

    store      a URL (``sqlite:///effects.db``, ``memory://``), the Path of a SQLite file, or a Store
    policy     how operations are treated unless they say otherwise
    consumer   who processes messages here: two consumers of the same message each have their own effect
    scope      whose keys these are (a tenant, an API key), unless a call says so
    fallback   what callers get while the store is away, unless their policy says so: see ``Policy``
    breaker    when to stop asking a store that does not answer, as a ``stores.Breaker``; None never stops
    hooks      functions that are told every event
    clock      the wall clock that says how old a message is
    monotonic  the local clock that says when a lease is about to end
    """

    def __init__(
        self,
        store: str | os.PathLike[str] | Store = DEFAULT_STORE,
        *,
        policy: Policy | None = None,
        consumer: str = "",
        scope: str = "",
        fallback: Fallback | None = None,
        breaker: Breaker | None = DEFAULT_BREAKER,
        hooks: Iterable[Hook] = (),
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = open_store(store)
        self.policy = Policy() if policy is None else _policy(policy)
        if fallback is not None:
            self.policy = self.policy.but(fallback=fallback)
        self.consumer, self.scope = consumer, scope
        self._clock = clock
        if not (breaker is None or isinstance(breaker, Breaker)):
            raise UsageError(
                f"breaker={breaker!r} is not a Breaker. Write Breaker(errors=3), or None for none."
            )
        self.events = Events(checked(hooks), monotonic)
        self.circuit = None if breaker is None else Circuit(breaker, monotonic, self._hear_circuit)
        self.blocking = Blocking(self._guarded())
        self._keeper = Keeper(self.blocking.store, monotonic, self._hear)
        self.flow = Flow(self._keeper, self.events, monotonic)
        self.flow.home = self
        self._prefix = message_prefix(scope, "", consumer, "", "")
        self._functions = Functions()
        codec.prepare()
        tell_of_forks(self._keeper)
        if self.circuit is not None:
            tell_of_forks(self.circuit)

    @cached_property
    def asyncio(self) -> Asyncio:
        """The colour of callers on an event loop; only they pay for importing asyncio."""
        from ._asyncio import Asyncio

        return Asyncio(self._guarded())

    # Messages

    def process(
        self,
        message: Message,
        handler: Callable[[Message], R],
        *,
        operation: str = "",
        version: str | int = "",
        scope: str | None = None,
        policy: Policy | None = None,
    ) -> Outcome[R]:
        """Run ``handler(message)`` once; every repeat gets the first result. Raises what gave no result."""
        hint = hint_of_plain(handler, "aprocess")
        call = self._call(message, hint, operation, version, scope, policy)
        outcome = run(self.flow.run(self.blocking, call, handler, (message,), {}))
        return outcome if outcome.error is None else outcome.unwrap()

    async def aprocess(
        self,
        message: Message,
        handler: Callable[[Message], Awaitable[R]],
        *,
        operation: str = "",
        version: str | int = "",
        scope: str | None = None,
        policy: Policy | None = None,
    ) -> Outcome[R]:
        """Await ``handler(message)`` once; every repeat gets the first result. Raises what gave no result."""
        hint = hint_of_awaited(handler, "aprocess")
        call = self._call(message, hint, operation, version, scope, policy)
        outcome = await self.flow.run(self.asyncio, call, handler, (message,), {})
        return outcome if outcome.error is None else outcome.unwrap()

    def process_batch(
        self,
        messages: Iterable[Message],
        handler: Callable[[Message], R],
        *,
        operation: str = "",
        version: str | int = "",
        scope: str | None = None,
        policy: Policy | None = None,
        size: int = batch.DEFAULT_SIZE,
        concurrency: int = batch.DEFAULT_CONCURRENCY,
    ) -> list[Outcome[R]]:
        """Process many messages, ``size`` to a round trip; an outcome for each, in order, nothing raised."""
        if not is_plain(handler):
            refuse(handler, "aprocess_batch")
        slots = self._slots(messages, handler, operation, version, scope, policy)
        return run(self._run_batch(self.flow, self.blocking, slots, handler, size, concurrency))

    async def aprocess_batch(
        self,
        messages: Iterable[Message],
        handler: Callable[[Message], Awaitable[R]],
        *,
        operation: str = "",
        version: str | int = "",
        scope: str | None = None,
        policy: Policy | None = None,
        size: int = batch.DEFAULT_SIZE,
        concurrency: int = batch.DEFAULT_CONCURRENCY,
    ) -> list[Outcome[R]]:
        """Process many messages, ``size`` to a round trip; an outcome for each, in order, nothing raised."""
        check_awaited(handler, "aprocess_batch")
        slots = self._slots(messages, handler, operation, version, scope, policy)
        return await self._run_batch(self.flow, self.asyncio, slots, handler, size, concurrency)

    _run_batch = staticmethod(batch.run_batch)

    # Functions and blocks

    @overload
    def idempotent(  # type: ignore[overload-overlap]  # pyright: ignore[reportOverlappingOverload]
        self, function: Callable[P, Coroutine[Any, Any, R]], /
    ) -> AsyncFunction[P, R]: ...
    @overload
    def idempotent(self, function: Callable[P, R], /) -> Function[P, R]: ...
    @overload
    def idempotent(
        self,
        /,
        *,
        key: KeySource = None,
        operation: str = "",
        version: str | int = "",
        scope: str | Callable[..., str] | None = None,
        policy: Policy | None = None,
        ignore: tuple[str, ...] = (),
        on: str = "",
    ) -> _Decorator: ...
    def idempotent(
        self,
        function: Callable[..., Any] | None = None,
        /,
        *,
        key: KeySource = None,
        operation: str = "",
        version: str | int = "",
        scope: str | Callable[..., str] | None = None,
        policy: Policy | None = None,
        ignore: tuple[str, ...] = (),
        on: str = "",
    ) -> Any:
        """Decorate a function, or a method: its effect happens once per key, every repeat gets the first answer.

        key        a parameter's name (``"order_id"``, ``"order.id"``), several names, or a function of the arguments;
                   without it all arguments together are the key
        operation  the effect's name; by default the function's module and qualified name
        version    change it when the function's meaning changes, so that old results are not replayed
        scope      whose keys these are: one name for all callers, or a function of the arguments
        ignore     parameters that are tools (a session, a client) rather than content
        on         the parameter that is the database connection or session whose transaction each call is part of
        """

        def decorator(function: Any) -> Any:
            if isinstance(function, staticmethod):
                return staticmethod(decorator(function.__func__))
            if isinstance(function, classmethod):
                return ClassFunction(decorator(function.__func__))
            name = own_name(operation) if operation else self._functions.name_of(function)
            whose = self.scope if scope is None else scope
            identity = Identity(function, key, whose, name, version, (*ignore, on) if on else ignore)
            identity.check_scope(scope)
            return decorate(self, function, identity, self._policy(policy), on)

        return decorator if function is None else decorator(function)

    def claim(
        self,
        key: str | Key,
        *,
        payload: Any = None,
        operation: str = CLAIM_OPERATION,
        version: str | int = "",
        scope: str | None = None,
        policy: Policy | None = None,
        hint: Any = Any,
    ) -> Claiming:
        """Claim a key for a block: ``with receiver.claim("key") as claim``, or ``async with``.

        ``hint`` is the type of its result, where that is none of plain data. What a message has for a key only a
        ``Key`` can name.
        """
        if isinstance(key, Key):
            named = Key.of(key.id, key.operation, key.scope, key.version)
        else:
            own = operation if operation == CLAIM_OPERATION else own_name(operation)
            named = Key.of(key, own, self.scope if scope is None else scope, version)
        return Claiming(self, call_of(named.text, keys.fingerprint(payload), self._policy(policy), hint))

    def on(self, connection: Any, *, commit: bool = False) -> Receiver:
        """The receiver for calls inside the transaction that a connection is in: record and effect commit together.

        ``connection`` is one of sqlite3, psycopg, asyncpg, PyMySQL or asyncmy, a connection or session of SQLAlchemy,
        or ``django.db.connection``, to the database of this receiver's store. The transaction is yours: nothing here
        commits or rolls it back. Outcomes say ``guarantee="atomic"``.

        With ``commit=True`` each call is a transaction: it begins with the claim and is committed with the result, over
        psycopg in the same round trips. The connection is one of a driver, and in no transaction yet.
        """
        return self._on(self, connection, commit)

    @cached_property
    def _on(self) -> Callable[[Receiver, Any, bool], Receiver]:
        """What ``on`` makes; only who needs it pays for importing it."""
        from .transactions._receiver import OnConnection

        return OnConnection

    # Operations

    def resolve(
        self,
        key: str | Key,
        kind: Literal["completed", "failed", "not_applied"],
        value: Any = None,
        *,
        hint: Any = Any,
        policy: Policy | None = None,
    ) -> bool:
        """Settle an attempt in doubt: it completed with a value, failed with an exception, or was not applied.

        ``key`` is the text an error carries, or the id given to ``claim``; ``hint`` the type of a value that needs one,
        as the function's return annotation says it. False when it is not in doubt (any more).
        """
        return run(self._resolve(self.blocking, key, kind, value, hint, policy))

    async def aresolve(
        self,
        key: str | Key,
        kind: Literal["completed", "failed", "not_applied"],
        value: Any = None,
        *,
        hint: Any = Any,
        policy: Policy | None = None,
    ) -> bool:
        """``resolve`` for callers on an event loop."""
        return await self._resolve(self.asyncio, key, kind, value, hint, policy)

    def key_of(
        self, message: Message, *, operation: str = "", version: str | int = "", scope: str | None = None
    ) -> str:
        """The key of a message, as errors, events and ``get`` name it."""
        return self._call(message, Any, operation, version, scope, None).key

    def get(self, key: str | Key) -> Record | None:
        """What the store remembers of a key."""
        return run(self._find(self.blocking, key))

    def sweep(
        self, redrive: Redrive | None = None, *, policy: Policy | None = None, limit: int = 1000
    ) -> Swept:
        """Find attempts whose lease is over and settle or re-drive them, without waiting for a retry to come."""
        return run(sweep(self.flow, self.blocking, self._policy(policy), redrive, limit))

    async def asweep(
        self, redrive: Redrive | None = None, *, policy: Policy | None = None, limit: int = 1000
    ) -> Swept:
        """``sweep`` for callers on an event loop."""
        return await sweep(self.flow, self.asyncio, self._policy(policy), redrive, limit)

    def purge(self, limit: int = 256) -> int:
        """Look at a bounded piece of the store and forget what has expired there. Traffic does so by itself."""
        gone = run(self.blocking.store.purge(limit))
        if gone:
            self.events.note("purged", self.flow.monotonic())
            self.events.tell("purged", "", detail=f"{gone} records")
        return gone

    def stats(self, minutes: int = 5) -> Stats:
        """Counts, rates and processing times since the start and over the last minutes."""
        return self.events.stats(minutes)

    def close(self, drain: Duration = "5s") -> None:
        """Wait for running attempts (at most ``drain``; 0 is not at all), stop renewing leases and close the store.

        Claims that are on their way are waited for, too, and given back, so that their keys are free at once.
        Calls that still come get ``StoreClosed``, except from handlers that are running; only ``memory://`` serves them
        until the end. What runs when ``drain`` is over ends unrecorded, and its key waits for its lease.

        Called inside a handler or on an event loop it does not wait: then it would wait for itself, and what is running
        ends unrecorded. On an event loop use ``aclose`` or ``async with``.
        """
        deadline = time.monotonic() + seconds(drain, "drain", may_be_zero=True)
        inside = _is_inside() or ("asyncio" in sys.modules and _on_a_loop())
        self._turn_away(unless=_is_inside)
        for pause in () if inside else self._pauses(deadline):
            time.sleep(pause)
        self._keeper.close()
        self.blocking.close()
        self._turn_away()
        self.store.close()

    async def aclose(self, drain: Duration = "5s") -> None:
        """``close`` for callers on an event loop: it waits, and the loop goes on meanwhile."""
        from asyncio import sleep

        deadline = time.monotonic() + seconds(drain, "drain", may_be_zero=True)
        self._turn_away(unless=_is_inside)
        for pause in () if _is_inside() else self._pauses(deadline):
            await sleep(pause)
        self.close()

    def _pauses(self, deadline: float) -> Iterator[float]:
        """Pauses until nothing is under way: attempts end on any thread and any loop, and none should pay for telling.

        A store that will be closed is looked at twice: who has just been granted its claim is about to begin.
        """
        for look in range(2 if self.store.features.durable else 1):
            if look:
                yield 0.001
            while self._is_busy() and time.monotonic() < deadline:
                yield 0.005

    def _is_busy(self) -> bool:
        """Whether something runs, is about to be recorded or given back, or is asked for, so that it may be granted."""
        return bool(self._keeper.live or (self.circuit is not None and self.circuit.asked))

    def _turn_away(self, unless: Callable[[], bool] = lambda: False) -> None:
        """Refuse every call from now on."""
        if self.store.features.durable:  # what is in memory is not closed, and serves until the end
            self._keeper.closing = unless
        if self.circuit is not None:
            self.circuit.shut("This receiver was closed, so nothing was run. Make a new one.", unless)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def health(self) -> Health:
        """Whether the store answers: for a readiness probe."""
        return self._guarded().health()

    async def ahealth(self) -> Health:
        """``health`` for callers on an event loop."""
        return await self._guarded().ahealth()

    # Naming

    def _guarded(self) -> Store:
        """The store behind the circuit. One that can't be away needs none."""
        if self.circuit is None or not self.store.features.durable:
            return self.store
        return guarded(self.store, self.circuit)

    def _call(
        self,
        message: Message,
        hint: Any,
        operation: str,
        version: str | int,
        scope: str | None,
        policy: Policy | None,
    ) -> Call:
        """The call that a message makes, whose result is of a type."""
        if not isinstance(message, Message):
            raise _no_message(message)
        source = message[3]
        if source or operation or version or scope is not None:
            prefix = self._prefix_of(source, operation, version, scope)
        else:
            prefix = self._prefix
        return self._asked(message, prefix, self.policy if policy is None else _policy(policy), hint)

    def _asked(self, message: Message, prefix: str, policy: Policy, hint: Any) -> Call:
        """The same, with what a batch has in common worked out."""
        id_, payload, sent, _ = message
        fingerprint = b"" if payload is None else keys.fingerprint(payload)
        may_create = sent is None or policy.late == "process" or self._age(sent) <= policy.keep
        lease, keep, once, most = policy.terms
        claim = make(Claim, (prefix + id_, new_owner(), fingerprint, lease, keep, once, most, may_create))
        return make(Call, (claim, policy, hint))

    def _slots(
        self,
        messages: Iterable[Message],
        handler: Callable[..., Any],
        operation: str,
        version: str | int,
        scope: str | None,
        policy: Policy | None,
    ) -> list[batch.Slot | Outcome[Any]]:
        """A call for each message; one that can't be named or fingerprinted has its outcome already."""
        slots: list[batch.Slot | Outcome[Any]] = []
        policy, hint, asked = self._policy(policy), hint_of(handler), self._asked
        prefix, source = "", object()
        for message in messages:
            if not isinstance(message, Message):
                raise _no_message(message)  # a mistake in the program, not in a message
            try:
                if message[3] is not source:  # mostly all come from one
                    prefix, source = self._prefix_of(message[3], operation, version, scope), message[3]
                slots.append((asked(message, prefix, policy, hint), (message,)))
            except EffectOnceError as error:
                slots.append(Outcome("failed", error=error))
        return slots

    def _prefix_of(self, source: str, operation: str, version: str | int, scope: str | None) -> str:
        whose = self.scope if scope is None else scope
        return message_prefix(whose, operation, self.consumer, source, version)

    def _policy(self, policy: Policy | None) -> Policy:
        return self.policy if policy is None else _policy(policy)

    def _age(self, sent: datetime | float) -> float:
        return self._clock() - (sent.timestamp() if isinstance(sent, datetime) else sent)

    async def _find(self, colour: Colour, key: str | Key) -> Record | None:
        """The record of a key by its text, or of a block by the id that was given to ``claim``."""
        if isinstance(key, Key):
            return await colour.store.get(key.text)
        if not isinstance(key, str):
            raise InvalidKey(
                f"{key!r} is not a key. Give a Key, the text an error carries, or the id of a claim."
            )
        is_text = key.count("|") >= 3
        record = await colour.store.get(key) if is_text else None
        if record is not None or (is_text and len(key) > keys.LONGEST):  # too long to be an id as well
            return record
        return await colour.store.get(Key.of(key, CLAIM_OPERATION, self.scope).text)

    async def _resolve(
        self, colour: Colour, key: str | Key, kind: Any, value: Any, hint: Any, policy: Policy | None
    ) -> bool:
        if kind not in ("completed", "failed", "not_applied"):
            raise UsageError(f'{kind!r}: an attempt in doubt is "completed", "failed" or "not_applied".')
        if kind == "failed" and not isinstance(value, BaseException):
            raise UsageError("An attempt that failed needs the exception that its repeats shall get.")
        record = await self._find(colour, key)
        if record is not None and is_saga(record.key):
            raise UsageError(
                "This is a saga, which goes on from its journal: saga.resume(id), with undone= for what was taken back "
                "by hand.",
                key=record.key,
            )
        if record is None or record.state is not State.IN_DOUBT:
            return False
        call = call_of(record.key, record.fingerprint, self._policy(policy), hint)
        return await self.flow.settle(colour, call, record, Resolution(kind, value))

    def _hear(self, kind: EventKind, attempt: Attempt, detail: str) -> None:
        """What the keeper has to tell, from its own thread."""
        now = self.flow.monotonic()
        self.events.note(kind, now)
        if kind != "lease_lost":
            self.events.note(ASIDE, now)
        self.events.tell(kind, attempt.key, attempt.fence, attempt.number, attempt.guarantee, None, detail)

    def _hear_circuit(self, change: str) -> None:
        now = self.flow.monotonic()
        self.events.note("circuit", now)
        self.events.tell("circuit", "", detail=change)


class _Decorator(typing.Protocol):
    """What ``@receiver.idempotent(...)`` gives: it keeps the function's parameters, result and colour."""

    @overload
    def __call__(  # type: ignore[overload-overlap]  # pyright: ignore[reportOverlappingOverload]
        self, function: Callable[P, Coroutine[Any, Any, R]], /
    ) -> AsyncFunction[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> Function[P, R]: ...


def _is_inside() -> bool:
    """Whether a handler is running around this. A task that outlives the one that began it is inside of nothing."""
    return next(surrounding(), None) is not None


def _on_a_loop() -> bool:
    from asyncio import _get_running_loop

    return _get_running_loop() is not None


def _no_message(message: object) -> UsageError:
    return UsageError(f"{message!r} is not a Message. Wrap it: Message(id=..., payload=...).")


def _policy(policy: Policy) -> Policy:
    if not isinstance(policy, Policy):
        raise UsageError(f'{policy!r} is not a Policy. Write Policy(keep="24h", ...) or Policy.payments().')
    return policy
