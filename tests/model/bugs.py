"""Bugs on purpose: each is a small change to the real code that an implementer could well make.

A bug is a context manager that is in force while an exploration runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from tests.model.scenarios import CACHE

from effectonce import _answers, _protocol, keys
from effectonce._attempt import CURRENT, Attempt
from effectonce._cache import Cache
from effectonce._flow import Flow
from effectonce._keeper import Keeper
from effectonce._progress import Program
from effectonce._records import Claim, Completion, Decision, Ending, Record, Renewal, State, Verdict
from effectonce.steps import Journal
from effectonce.stores import memory
from effectonce.testing.simulation import Cancelled
from effectonce.testing.simulation._colour import SimulatedStore
from effectonce.testing.simulation._shelf import StoreClock
from effectonce.testing.simulation._world import SKEW

Bug = Callable[[], AbstractContextManager[Any]]

decide_claim, decide_renewal, decide_ending = (
    _protocol.decide_claim,
    _protocol.decide_renewal,
    _protocol.decide_ending,
)


def deciding(**decisions: Any) -> AbstractContextManager[Any]:
    """The memory store asks these instead of the protocol."""
    return patch.multiple(memory, **decisions)


# The protocol.


def unfenced_complete() -> AbstractContextManager[Any]:
    """``UPDATE … WHERE key = ?``: whoever has a result writes it."""

    def decide(record: Record | None, ending: Completion, now: float) -> tuple[Ending, Record | None]:
        if record is None or ending.state is State.ABSENT:
            return decide_ending(record, ending, now)
        return Ending.DONE, _ended(record, ending, now)

    return deciding(decide_ending=decide)


def unfenced_release() -> AbstractContextManager[Any]:
    """A failed attempt frees the key, whoever holds it by now."""

    def decide(record: Record | None, ending: Completion, now: float) -> tuple[Ending, Record | None]:
        if record is None or ending.state is not State.ABSENT or record.state is not State.PENDING:
            return decide_ending(record, ending, now)
        return Ending.DONE, _ended(record, ending, now)

    return deciding(decide_ending=decide)


def unfenced_renew() -> AbstractContextManager[Any]:
    """A renewal extends whatever lease there is."""

    def decide(record: Record | None, renewal: Renewal, now: float) -> Record | None:
        if record is not None:
            renewal = renewal._replace(owner=record.owner, fence=record.fence)
        return decide_renewal(record, renewal, now)

    return deciding(decide_renewal=decide)


def unrepeatable_claim() -> AbstractContextManager[Any]:
    """The owner is not looked at: a claim whose reply was lost meets itself."""

    def decide(record: Record | None, claim: Claim, now: float, floor: int) -> Decision:
        if record is not None and record.state is State.PENDING and record.lease_until > now:
            return Decision(Verdict.BUSY, record, record.lease_until - now)
        return decide_claim(record, claim, now, floor)

    return deciding(decide_claim=decide)


def unrepeatable_ending() -> AbstractContextManager[Any]:
    """An ending whose reply was lost is refused when it is sent again."""

    def decide(record: Record | None, ending: Completion, now: float) -> tuple[Ending, Record | None]:
        answer, after = decide_ending(record, ending, now)
        return (Ending.FENCED if answer is Ending.REPEATED else answer), after

    return deciding(decide_ending=decide)


def unchecked_fingerprint() -> AbstractContextManager[Any]:
    """Only finished records are compared with what is asked; a crashed attempt is taken over by any payload."""

    def decide(record: Record | None, claim: Claim, now: float, floor: int) -> Decision:
        if record is not None and record.state is State.PENDING and record.lease_until <= now:
            record = record._replace(fingerprint=claim.fingerprint)
        return decide_claim(record, claim, now, floor)

    return deciding(decide_claim=decide)


def late_is_new() -> AbstractContextManager[Any]:
    """The age of a message is not looked at."""

    def decide(record: Record | None, claim: Claim, now: float, floor: int) -> Decision:
        return decide_claim(record, claim._replace(may_create=True), now, floor)

    return deciding(decide_claim=decide)


def takeover_at_most_once() -> AbstractContextManager[Any]:
    """A crashed attempt is taken over although it was claimed at most once."""

    def decide(record: Record | None, claim: Claim, now: float, floor: int) -> Decision:
        if record is not None and record.state is State.PENDING:
            record, claim = record._replace(once=False), claim._replace(once=False)
        return decide_claim(record, claim, now, floor)

    return deciding(decide_claim=decide)


def no_takeover() -> AbstractContextManager[Any]:
    """A claim is a lock without a lease."""

    def decide(record: Record | None, claim: Claim, now: float, floor: int) -> Decision:
        if record is not None and record.state is State.PENDING and record.owner != claim.owner:
            return Decision(Verdict.BUSY, record, 1.0)
        return decide_claim(record, claim, now, floor)

    return deciding(decide_claim=decide)


@contextmanager
def expiring_claims() -> Iterator[None]:
    """A claim has a time to live like any cached value, shorter than what it guards."""

    def decide(record: Record | None, claim: Claim, now: float, floor: int) -> Decision:
        decision = decide_claim(record, claim, now, floor)
        if decision.record is None or decision.record is record:
            return decision
        return decision._replace(record=decision.record._replace(expires_at=now + claim.lease / 4))

    def is_expired(record: Record, now: float) -> bool:
        return record.expires_at <= now

    with (
        patch.object(_protocol, "is_expired", is_expired),
        deciding(decide_claim=decide, is_expired=is_expired),
    ):
        yield


def short_memory() -> AbstractContextManager[Any]:
    """A result is kept for the lease instead of the policy's keep."""

    def decide(record: Record | None, ending: Completion, now: float) -> tuple[Ending, Record | None]:
        return decide_ending(record, ending._replace(keep=30.0), now)

    return deciding(decide_ending=decide)


# Progress.


def unfenced_progress() -> AbstractContextManager[Any]:
    """Whoever has finished a step writes it down, whether it holds the key or not."""

    def decide(record: Record | None, renewal: Renewal, now: float) -> Record | None:
        if record is not None and renewal.progress is not None:
            renewal = renewal._replace(owner=record.owner, fence=record.fence)
        return decide_renewal(record, renewal, now)

    return deciding(decide_renewal=decide)


def progress_lost_by_takeover() -> AbstractContextManager[Any]:
    """Who takes over begins with an empty journal."""

    def decide(record: Record | None, claim: Claim, now: float, floor: int) -> Decision:
        decision = decide_claim(record, claim, now, floor)
        if decision.verdict is Verdict.TAKEN_OVER and decision.record is not None:
            return decision._replace(record=decision.record._replace(result=None))
        return decision

    return deciding(decide_claim=decide)


def progress_lost_by_release() -> AbstractContextManager[Any]:
    """A failed attempt leaves nothing behind."""

    def decide(record: Record | None, ending: Completion, now: float) -> tuple[Ending, Record | None]:
        answer, after = decide_ending(record, ending, now)
        if after is not None and after is not record and after.state is State.ABSENT:
            after = after._replace(result=None)
        return answer, after

    return deciding(decide_ending=decide)


def progress_lost_by_doubt() -> AbstractContextManager[Any]:
    """A crash in doubt shows nothing of what was finished."""

    def decide(record: Record | None, claim: Claim, now: float, floor: int) -> Decision:
        decision = decide_claim(record, claim, now, floor)
        if (
            decision.record is not None
            and decision.record is not record
            and decision.verdict is Verdict.IN_DOUBT
        ):
            return decision._replace(record=decision.record._replace(result=None))
        return decision

    return deciding(decide_claim=decide)


def late_progress_counts() -> AbstractContextManager[Any]:
    """The journal that arrives last is taken for the last one."""

    def decide(record: Record | None, renewal: Renewal, now: float) -> Record | None:
        renewed = decide_renewal(record, renewal, now)
        if renewed is not None and renewal.progress is not None:
            renewed = renewed._replace(result=renewal.progress)
        return renewed

    return deciding(decide_renewal=decide)


def step_before_record() -> AbstractContextManager[Any]:
    """A step's result is given to the handler, and recorded with the next one."""

    async def hasty(self: Journal, colour: Any, name: str) -> None:
        pass

    return patch.object(Journal, "save", hasty)


def denied_step_counts() -> AbstractContextManager[Any]:
    """Nobody looks whether a step was let in."""
    renew = SimulatedStore.renew

    async def trusting(self: SimulatedStore, renewal: Renewal) -> bool:
        await renew(self, renewal)
        return True

    return patch.object(SimulatedStore, "renew", trusting)


def steps_run_again() -> AbstractContextManager[Any]:
    """The journal is written, and never read."""
    ask = Program.ask

    def forgetful(self: Program, name: str, version: int, aside: bool) -> Any:
        ask(self, name, version, aside)

    return patch.object(Program, "ask", forgetful)


def one_key_for_all_steps_per_attempt() -> AbstractContextManager[Any]:
    """A step's key depends on the attempt, so a retry of it does not look like one."""

    def key_for(self: Attempt, name: str) -> str:
        return keys.derived(self.key, f"{name}.{self.fence}")

    return patch.object(Attempt, "key_for", key_for)


# The store.


def fence_reset_by_release() -> AbstractContextManager[Any]:
    """A released record is deleted, and its fence forgotten with it."""
    complete = memory.MemoryStore.complete

    async def forgetful(self: memory.MemoryStore, completion: Completion) -> Ending:
        ending = await complete(self, completion)
        if ending is Ending.DONE and completion.state is State.ABSENT:
            self._records.clear()
            self._wheel.clear()
            self._due = float("inf")
        return ending

    return patch.object(memory.MemoryStore, "complete", forgetful)


def fence_reset_by_purge() -> AbstractContextManager[Any]:
    """A purged record takes its fence along."""
    purge = memory.MemoryStore._purge

    def forgetful(self: memory.MemoryStore, now: float, limit: int) -> int:
        floor = self._floor
        gone = purge(self, now, limit)
        self._floor = floor
        return gone

    return patch.object(memory.MemoryStore, "_purge", forgetful)


def client_clock() -> AbstractContextManager[Any]:
    """Leases are counted on the clock of whoever asks."""
    return patch.object(StoreClock, "__call__", lambda self: self.now + self.asker * SKEW)


# The flow.


def answer_before_record() -> AbstractContextManager[Any]:
    """The result is given to the caller while its completion is on the way."""

    async def hasty(self: Flow, colour: Any, call: Any, handler: Any, args: Any, kwargs: Any) -> Any:
        opened = await self.open(colour, call)
        if not isinstance(opened, Attempt):
            return opened
        CURRENT.set(opened)
        value = await colour.attend(opened, handler(*args, **kwargs))
        return self.recorded(call, opened, _answers.completion_of(call, opened, value), value)

    return patch.object(Flow, "run", hasty)


def own_result_when_fenced_out() -> AbstractContextManager[Any]:
    """Nobody looks whether the completion was accepted."""
    complete = SimulatedStore.complete

    async def trusting(self: SimulatedStore, completion: Completion) -> Ending:
        await complete(self, completion)
        return Ending.DONE

    return patch.object(SimulatedStore, "complete", trusting)


def own_error_when_fenced_out() -> AbstractContextManager[Any]:
    """A remembered error is raised without looking whether it was accepted."""

    async def trusting(self: Flow, colour: Any, call: Any, attempt: Attempt, error: BaseException) -> Any:
        if not isinstance(error, Exception):
            raise error
        ending = _answers.failure_of(call, attempt, error)
        await colour.store.complete(ending)
        return self.unfinished(attempt, ending, Ending.DONE, error)

    return patch.object(Flow, "fail", trusting)


def release_on_cancel() -> AbstractContextManager[Any]:
    """A cancelled handler's claim is given back, as if nothing had happened."""
    fail = Flow.fail

    async def tidy(self: Flow, colour: Any, call: Any, attempt: Attempt, error: BaseException) -> Any:
        if isinstance(error, Cancelled):
            claim = attempt.claim
            await colour.store.release(claim.key, claim.owner, attempt.fence, claim.keep)
        return await fail(self, colour, call, attempt, error)

    return patch.object(Flow, "fail", tidy)


def no_withdrawal() -> AbstractContextManager[Any]:
    """A caller that is cancelled while it claims just goes."""

    async def careless(self: Flow, colour: Any, claim: Claim, cancelled: Any = None) -> None:
        pass

    return patch.object(Flow, "withdraw", careless)


def failure_keeps_the_claim() -> AbstractContextManager[Any]:
    """A handler's failure is told to the caller and to nobody else."""

    async def silent(self: Flow, colour: Any, call: Any, attempt: Attempt, error: BaseException) -> Any:
        self.keeper.forget(attempt)
        return _answers.failed(attempt, "failed", error)

    return patch.object(Flow, "fail", silent)


def swallowed_cancellation() -> AbstractContextManager[Any]:
    """Shielding the completion from a cancellation drops the cancellation."""

    def quiet(self: Flow, attempt: Attempt, outcome: Any) -> None:
        self.keeper.forget(attempt)
        attempt.end(outcome)

    return patch.object(Flow, "close", quiet)


def lease_counted_from_the_reply() -> AbstractContextManager[Any]:
    """The lease is believed to begin when its grant arrives."""
    begin = Flow.begin

    def hopeful(self: Flow, *given: Any) -> Attempt:
        return begin(self, *given[:-1], self.monotonic())

    return patch.object(Flow, "begin", hopeful)


def cache_counted_from_the_reply() -> AbstractContextManager[Any]:
    """The process remembers a result for all of keep, counted from when it heard of it."""
    put = Cache.put

    def hopeful(self: Cache, record: Record, until: float, most: int) -> None:
        put(self, record, self._monotonic() + CACHE.keep, most)

    return patch.object(Cache, "put", hopeful)


def unforeseen_loss() -> AbstractContextManager[Any]:
    """Nobody thought of an attempt whose record is not its own any more."""

    async def crash(self: Flow, colour: Any, call: Any, attempt: Attempt) -> Any:
        raise KeyError(attempt.key)

    return patch.object(Flow, "overtaken", crash)


def key_per_attempt() -> AbstractContextManager[Any]:
    """The key for the sink depends on the attempt, so a retry does not look like one."""
    return patch.object(Attempt, "key_for", lambda self, name: keys.derived(self.key, f"{name}.{self.fence}"))


# The keeper.


def silent_keeper() -> AbstractContextManager[Any]:
    """The keeper stops renewing a lost lease and tells nobody."""
    return patch.object(Keeper, "lose", lambda self, attempt, why: self.forget(attempt))


def renewal_counted_from_the_reply() -> AbstractContextManager[Any]:
    """A renewed lease is believed to begin when the keeper hears of it."""
    hold = Attempt.hold
    return patch.object(Attempt, "hold", lambda self, granted_at: hold(self, self._monotonic()))


def _ended(record: Record, ending: Completion, now: float) -> Record:
    return record._replace(
        state=ending.state, owner=b"", result=ending.result, lease_until=0.0, expires_at=now + ending.keep
    )
