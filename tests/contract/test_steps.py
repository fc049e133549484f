"""The conversations of stores on servers keep the contract, over the plainest server there can be."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import pytest

from effectonce._blocking import run
from effectonce._protocol import is_expired
from effectonce._records import NOBODY, Claim, Completion, Record, Renewal, State, Verdict, make
from effectonce.errors import StoreMismatch, StoreUnavailable
from effectonce.stores import Features, Store, StoreStats
from effectonce.stores._dynamodb_items import Kept
from effectonce.stores._steps import (
    DONE,
    MOST_REFUSALS,
    Add,
    Added,
    End,
    Found,
    Hold,
    Read,
    Save,
    Step,
    SteppingStore,
    Swap,
)
from effectonce.testing.clocks import ManualClock
from effectonce.testing.contract import StoreContract


class Steps(SteppingStore):
    """A server that does the six steps on a dictionary. Its fences come from its clock, as real servers' do."""

    features = Features(durable=False, shared=False)

    def __init__(self, clock: ManualClock) -> None:
        self.clock: Callable[[], float] = clock
        self.lock, self.records, self.fence = threading.Lock(), dict[str, Record](), 0

    async def send(self, steps: Sequence[Step]) -> list[Any]:
        if any(type(step) is Add for step in steps):
            await self.purge(4)
        with self.lock:
            return [self.do(step, self.clock()) for step in steps]

    def close(self) -> None:
        self.clock = _closed

    def do(self, step: Step, now: float) -> Any:
        record = self.records.get(step.key)
        match step:
            case Add(claim) if record is None:
                self.fence += 7
                until = now + claim.lease
                self.records[claim.key] = Record(
                    claim.key, State.PENDING, claim.owner, self.fence, claim.fingerprint, until, 1, None,
                    until + claim.keep, claim.once,
                )  # fmt: skip
                return Added(self.fence, now)
            case End(ended) if record and _held(record, ended.owner, ended.fence) and _may_end(record, ended):
                self.records[ended.key] = record._replace(
                    state=ended.state,
                    owner=NOBODY,
                    lease_until=0.0,
                    result=ended.result,
                    expires_at=now + ended.keep,
                )
                return DONE
            case Save(renewal) if record and _held(record, renewal.owner, renewal.fence):
                if renewal.progress is None or len(record.result or b"") >= len(renewal.progress):
                    return Found(record, now)
                until = now + renewal.lease
                self.records[renewal.key] = record._replace(
                    lease_until=until, expires_at=until + renewal.keep, result=renewal.progress
                )
                return DONE
            case Hold(renewal) if record and _held(record, renewal.owner, renewal.fence):
                until = now + renewal.lease
                self.records[renewal.key] = record._replace(
                    lease_until=until, expires_at=until + renewal.keep
                )
                return DONE
            case Swap(before, after):
                if record == before:
                    self.records[step.key] = after
                return record == before
            case Add() | End() | Hold() | Save() | Read():
                return Found(record, now)

    async def purge(self, limit: int = 256) -> int:
        with self.lock:
            now = self.clock()
            gone = [r.key for r in self.records.values() if is_expired(r, now)][:limit]
            for key in gone:
                del self.records[key]
            return len(gone)

    async def scan(self, state: State | None = None, after: str = "", limit: int = 256) -> list[Record]:
        self.clock()
        with self.lock:
            records = sorted(r for r in self.records.values() if r.key > after and state in (None, r.state))
        return records[:limit]

    async def now(self) -> float:
        return self.clock()

    async def stats(self) -> StoreStats:
        now = self.clock()
        with self.lock:
            records = list(self.records.values())
        leases = [r.lease_until - now for r in records if r.state is State.PENDING]
        return StoreStats(
            len(records),
            sum(len(r.key) + len(r.fingerprint) + len(r.result or b"") for r in records),
            dict(Counter(r.state.name for r in records)),
            min(leases, default=None),
            sum(is_expired(r, now) for r in records),
        )


def _closed() -> NoReturn:
    raise StoreUnavailable("The store is closed.")


def _held(record: Record, owner: bytes, fence: int) -> bool:
    return (record.state, record.owner, record.fence) == (State.PENDING, owner, fence)


def _may_end(record: Record, ended: Completion) -> bool:
    """A journal is kept until there is an answer."""
    return record.result is None or ended.state in (State.COMPLETED, State.FAILED)


class TestSteps(StoreContract):
    """Conversations, by the suite's clock."""

    def make_store(self, clock: ManualClock) -> Store:
        return Steps(clock)


class Stubborn(Steps):
    """A server that shows a record and changes it for nobody, as one does whose rows are hidden from an UPDATE."""

    def do(self, step: Step, now: float) -> Any:
        match step:
            case End() | Hold() | Save():
                return Found(self.records[step.key], now)
            case Swap():
                return False
        return super().do(step, now)


def test_a_server_that_changes_nothing() -> None:
    """Whoever asks it to is told so, instead of asking for ever."""
    clock = ManualClock()
    store, owner = Stubborn(clock), b"o" * 16
    claim = Claim("k", owner, b"", 1.0, 60.0)
    record = run(store.claim(claim)).record
    assert record is not None
    completion = Completion("k", owner, record.fence, State.COMPLETED, b"1", 60.0, True)
    renewal = Renewal("k", owner, record.fence, 1.0, 60.0)
    clock.advance(5)
    for verb in (
        lambda: store.complete(completion),
        lambda: store.renew(renewal),
        lambda: store.claim(claim._replace(owner=b"p" * 16)),
        lambda: store.complete_many([completion]),
    ):
        with pytest.raises(StoreMismatch, match="does not change it"):
            run(verb())


class Contested(Steps):
    """A server without a clock, on which somebody else renews the record just before each of the first changes."""

    def __init__(self, clock: ManualClock, times: int) -> None:
        super().__init__(clock)
        self.times = times

    def do(self, step: Step, now: float) -> Any:
        if type(step) is Swap and self.times:
            self.times -= 1
            return False
        reply = super().do(step, now)
        return Found(self.as_read(reply.record, now), now) if type(reply) is Found and reply.record else reply

    def as_read(self, record: Record, now: float) -> Record:
        kept: Kept = make(Kept, record)
        kept.held, kept.seen_at = f"version {self.times}", now
        return kept


def test_a_record_that_others_renew_meanwhile() -> None:
    """A change that comes too late is asked for again and again, though times that stand tell no renewals apart."""
    store = Contested(ManualClock(), 5 * MOST_REFUSALS)
    claim = Claim("k", b"o" * 16, b"", 1.0, 60.0)
    first, again = run(store.claim(claim)), run(store.claim(claim))
    assert (first.verdict, again.verdict) == (Verdict.CLAIMED, Verdict.CLAIMED)
    assert not store.times
