"""A store behind its circuit breaker: commands are watched, and new claims refused while the circuit is open."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from functools import partial
from types import coroutine
from typing import Any, TypeVar

from .._records import Claim, Completion, Decision, Ending, Record, Renewal, State
from ..errors import StoreError, StoreUnavailable
from ._circuit import Circuit
from ._crowds import CrowdStore
from ._waiters import NONE, WAITING, Waiter
from .base import PartlyAnswered, Store, StoreStats, all_answered

T = TypeVar("T")
O = TypeVar("O", Claim, Completion)  # noqa: E741


def guarded(store: Store, circuit: Circuit) -> GuardedStore:
    """The store behind a circuit, or behind one for each of its servers."""
    if store.is_scattered:
        return GuardedServers(store, circuit)
    return GuardedCrowd(store, circuit) if isinstance(store, CrowdStore) else GuardedStore(store, circuit)


class GuardedStore(Store):
    """A store behind a circuit."""

    def __init__(self, store: Store, circuit: Circuit) -> None:
        self.store, self.circuit = store, circuit
        self.features = store.features

    async def claim(self, claim: Claim) -> Decision:
        """Ask for a key, unless the circuit is open."""
        circuit = self.circuit
        if not circuit.closed:
            circuit.admit()
        started = circuit.monotonic()
        try:
            circuit.asked.add(claim.owner)
            decision = await self.store.claim(claim)
        except StoreError as error:
            circuit.failed(error, started)
            raise
        finally:
            circuit.asked.discard(claim.owner)
        circuit.answered(circuit.monotonic() - started)
        return decision

    async def claim_many(self, claims: Sequence[Claim]) -> list[Decision]:
        """Ask for many keys, unless the circuit is open."""
        if not self.circuit.closed:
            self.circuit.admit()
        with self.circuit.asking():
            return await self._watched(self.store.claim_many(claims))

    async def complete(self, completion: Completion) -> Ending:
        """End a claim, whatever the circuit says."""
        circuit = self.circuit
        started = circuit.monotonic()
        try:
            ending = await self.store.complete(completion)
        except StoreError as error:
            circuit.failed(error, started)
            raise
        circuit.answered(circuit.monotonic() - started)
        return ending

    async def complete_many(self, completions: Sequence[Completion]) -> list[Ending]:
        """End many claims, whatever the circuit says."""
        return await self._watched(self.store.complete_many(completions))

    async def renew(self, renewal: Renewal) -> bool:
        """Extend a lease, whatever the circuit says."""
        return await self._watched(self.store.renew(renewal))

    async def renew_many(self, renewals: Sequence[Renewal]) -> list[bool]:
        """Extend many leases, whatever the circuit says."""
        return await self._watched(self.store.renew_many(renewals))

    async def get(self, key: str) -> Record | None:
        """Read a record."""
        return await self._watched(self.store.get(key))

    async def watch(self, record: Record, seconds: float) -> bool:
        """Wait for a record's end; how long that takes says nothing about the store."""
        return await self.store.watch(record, seconds)

    async def purge(self, limit: int = 256) -> int:
        """Forget what has expired."""
        return await self._watched(self.store.purge(limit))

    async def scan(self, state: State | None = None, after: str = "", limit: int = 256) -> list[Record]:
        """Read many records; that may take long."""
        return await self.store.scan(state, after, limit)

    async def now(self) -> float:
        """The store's clock. It may be this machine's own, so that an answer says nothing about the store."""
        return await self.store.now()

    async def stats(self) -> StoreStats:
        """Count records; that may take long."""
        return await self.store.stats()

    def for_blocking(self) -> Store:
        """The store's own view for callers without an event loop, behind the same circuit."""
        return guarded(self.store.for_blocking(), self.circuit)

    def for_asyncio(self) -> Store:
        """The store's own view for callers on an event loop, behind the same circuit."""
        return guarded(self.store.for_asyncio(), self.circuit)

    def close(self) -> None:
        """Close the store."""
        self.store.close()

    async def _watched(self, command: Awaitable[T]) -> T:
        circuit = self.circuit
        started = circuit.monotonic()
        try:
            answer = await command
        except StoreError as error:
            circuit.failed(error, started)
            raise
        circuit.answered(circuit.monotonic() - started)
        return answer


class GuardedCrowd(GuardedStore):
    """The same for a store whose callers are many: sending, waiting, deciding and watching are one generator."""

    claim: Any
    complete: Any

    def __init__(self, store: CrowdStore, circuit: Circuit) -> None:
        super().__init__(store, circuit)
        # Not methods that call it: a crowd would pay for those, too.
        self.claim = partial(_asked, circuit, store.claim_soon, store.decided, store.claim_on, super().claim)
        self.complete = partial(_asked, circuit, store.end_soon, store.ended, store.end_on, super().complete)


@coroutine
def _asked(
    circuit: Circuit,
    send: Callable[[O], Waiter[Any] | None],
    decided: Callable[[O, Any], T | None],
    go_on: Callable[[O, Any], Coroutine[Any, Any, T]],
    otherwise: Callable[[O], Coroutine[Any, Any, T]],
    order: O,
) -> Generator[Any, Any, T]:
    """Have a claim or a completion sent with others, and wait; ``otherwise`` it is asked for alone."""
    waiter = send(order) if circuit.closed else None
    if waiter is None:
        return (yield from otherwise(order).__await__())
    started = circuit.monotonic()
    try:
        circuit.asked.add(order.owner)
        if waiter.answer is WAITING:
            yield waiter
        answer = waiter.answer
        if answer is NONE:
            raise waiter.error
        decision = decided(order, answer)
        if decision is None:
            decision = yield from go_on(order, answer).__await__()
    except StoreError as error:
        circuit.failed(error, started)
        raise
    finally:
        circuit.asked.discard(order.owner)
    circuit.answered(circuit.monotonic() - started)
    return decision


class GuardedServers(GuardedStore):
    """The same for a store of several servers, each of which may be away by itself: it has a circuit of its own."""

    async def claim(self, claim: Claim) -> Decision:
        """Ask for a key, unless its server's circuit is open."""
        return await self._at(claim.key).claim(claim)

    async def claim_many(self, claims: Sequence[Claim]) -> list[Decision]:
        """Ask for many keys, except for those whose server's circuit is open."""
        answers: list[Decision | StoreError | None] = [self._refusal(claim.key) for claim in claims]
        admitted = [number for number, refusal in enumerate(answers) if refusal is None]
        asked = [claims[number] for number in admitted]
        heard: Sequence[Decision | StoreError] = ()
        if asked:
            try:
                keys = [claim.key for claim in asked]
                with self.circuit.asking():
                    decided = await self._tell_of_each(self.store.claim_many(asked), keys)
                heard = decided
            except PartlyAnswered as error:
                heard = [error.reason if answer is None else answer for answer in error.answers]
            except StoreUnavailable as error:
                heard = [error] * len(asked)
        for number, answer in zip(admitted, heard, strict=True):
            answers[number] = answer
        return all_answered([answer for answer in answers if answer is not None])

    async def complete(self, completion: Completion) -> Ending:
        """End a claim, whatever the circuit says."""
        return await self._at(completion.key).complete(completion)

    async def complete_many(self, completions: Sequence[Completion]) -> list[Ending]:
        """End many claims, whatever the circuits say."""
        return await self._tell_of_each(
            self.store.complete_many(completions), [completion.key for completion in completions]
        )

    async def renew(self, renewal: Renewal) -> bool:
        """Extend a lease, whatever the circuit says."""
        return await self._at(renewal.key).renew(renewal)

    async def renew_many(self, renewals: Sequence[Renewal]) -> list[bool]:
        """Extend many leases, whatever the circuits say."""
        return await self._tell_of_each(
            self.store.renew_many(renewals), [renewal.key for renewal in renewals]
        )

    async def get(self, key: str) -> Record | None:
        """Read a record."""
        return await self._at(key).get(key)

    def _circuit_of(self, key: str) -> Circuit:
        return self.circuit.at(self.store.place_of(key))

    def _at(self, key: str) -> GuardedStore:
        return GuardedStore(self.store, self._circuit_of(key))

    def _refusal(self, key: str) -> StoreUnavailable | None:
        circuit = self._circuit_of(key)
        try:
            if not circuit.closed:
                circuit.admit()
        except StoreUnavailable as refusal:
            return refusal
        return None

    async def _tell_of_each(self, command: Awaitable[list[T]], keys: Sequence[str]) -> list[T]:
        """Have a command done that says something about the server of each key."""
        circuits = [self._circuit_of(key) for key in keys]
        started = self.circuit.monotonic()
        try:
            answers = await command
        except StoreError as error:
            heard = error.answers if isinstance(error, PartlyAnswered) else [None] * len(keys)
            there = {circuit for circuit, answer in zip(circuits, heard, strict=True) if answer is not None}
            for circuit in there:
                circuit.answered(circuit.monotonic() - started)
            for circuit in set(circuits) - there:
                circuit.failed(error.reason if isinstance(error, PartlyAnswered) else error, started)
            raise
        for circuit in set(circuits):
            circuit.answered(circuit.monotonic() - started)
        return answers
