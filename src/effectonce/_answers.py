"""Translation, pure: a call into commands for a store, a store's answers into outcomes for a caller."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from . import codec
from ._attempt import Attempt
from ._messages import Outcome, Status
from ._records import ATOMIC, NOBODY, Claim, Completion, Decision, Guarantee, Record, State, Verdict, make
from .errors import (
    AttemptsExhausted,
    EffectOnceError,
    InDoubt,
    InProgress,
    KeyReused,
    LateArrival,
    NotApplied,
    ResultUnavailable,
    StepMismatch,
    StoreUnavailable,
    UsageError,
)
from .hooks import EventKind
from .keys import new_owner
from .policy import ExceptionTypes, Policy, Resolution

COMPLETED = State.COMPLETED
UNAVAILABLE = b"!"
"""Begins a stored result that says why there is none. JSON never begins so."""
LONGEST_ERROR = 1 << 16
"""Bytes that an error may have whatever ``max_result`` says. Of a longer one no more than its message is stored."""


class Call(NamedTuple):
    """One delivery: the claim it makes, how to treat it, and what its result looks like."""

    claim: Claim
    policy: Policy
    hint: Any = Any

    @property
    def key(self) -> str:
        """Which effect is meant."""
        return self.claim.key

    @property
    def fingerprint(self) -> bytes:
        """What was asked."""
        return self.claim.fingerprint


def call_of(key: str, fingerprint: bytes, policy: Policy, hint: Any = Any, may_create: bool = True) -> Call:
    """A delivery under ``policy``, with a new owner."""
    lease, keep, once, most = policy.terms
    claim = make(Claim, (key, new_owner(), fingerprint, lease, keep, once, most, may_create))
    return make(Call, (claim, policy, hint))


# Commands


def completion_of(call: Call, attempt: Attempt, value: Any) -> Completion:
    """The command that records a result. A result that can't be stored never costs the completion."""
    claim = attempt.claim
    result = encoded(call.policy, call.hint, value)
    return make(Completion, (claim.key, claim.owner, attempt.fence, COMPLETED, result, claim.keep, True))


def failure_of(call: Call, attempt: Attempt, error: BaseException) -> Completion:
    """The command that a handler's exception asks for, by the policy."""
    policy = call.policy
    state, result = State.ABSENT, None if attempt.journal is None else attempt.journal.unsaved
    if isinstance(error, NotApplied | StepMismatch):
        pass  # that nothing happened, by the handler's own word or by ours, goes before every list of types
    elif _has(error, policy.in_doubt):
        state = State.IN_DOUBT
    elif isinstance(error, policy.remember):
        state, result = State.FAILED, _encoded_error(policy, error)
    return Completion(call.key, attempt.claim.owner, attempt.fence, state, result, policy.keep)


def _has(error: BaseException, types: ExceptionTypes) -> bool:
    """Whether an exception is of some type, or one in the group that it is: task groups raise nothing else."""
    if isinstance(error, types):
        return True
    return isinstance(error, BaseExceptionGroup) and any(_has(each, types) for each in error.exceptions)


def shortened(ending: Completion, error: UsageError) -> Completion:
    """The same ending without the answer that a store can't take, or with as much of it as it surely can."""
    if ending.result is None:
        raise error
    if ending.state is State.FAILED:
        return ending._replace(result=codec.shorter_error(ending.result))
    if ending.state is not COMPLETED:  # a journal: the one that is there stays
        return ending._replace(result=None)
    return ending._replace(result=UNAVAILABLE + str(error).encode("utf-8", "backslashreplace"))


def settlement_of(call: Call, record: Record, resolution: Resolution, now: float) -> Completion:
    """The command that ends a record in doubt as a prober or a person says; a value has to be storable.

    Whoever settles it may have another policy than the attempt had, whose memory must not be cut short.
    """
    state, result = State.ABSENT, None
    if resolution.kind == "completed":
        hint = call.hint if resolution.hint is Any else resolution.hint
        state, result = State.COMPLETED, encoded(call.policy, hint, resolution.value)
        if result is not None and result.startswith(UNAVAILABLE):
            raise UsageError(
                f"This can't be the result of an attempt in doubt: {why_unstored(result)}. What is no plain data needs "
                "its type, hint=.",
                key=call.key,
            )
    elif resolution.kind == "failed":
        state, result = State.FAILED, _encoded_error(call.policy, resolution.value)
    elif resolution.kind != "not_applied":  # a slip of the pen must not run it again
        raise UsageError(
            f"{resolution!r}: write Resolution.completed, .failed or .not_applied.", key=call.key
        )
    keep = max(call.policy.keep, record.expires_at - now)
    return Completion(record.key, NOBODY, record.fence, state, result, keep)


# Outcomes


def failed(attempt: Attempt, status: Status, error: BaseException) -> Outcome[Any]:
    """The handler ran and raised, or lost its lease."""
    return Outcome(status, None, False, attempt.number, attempt.fence, attempt.guarantee, error)


def store_error(call: Call, error: BaseException) -> Outcome[Any]:
    """The store gave no answer."""
    return Outcome("store_error", None, False, 0, 0, guarantee_of(call.policy), _about(call.key, error))


def _about(key: str, error: BaseException) -> BaseException:
    """A store's error, told of one key: a store says the same to all who wait for it."""
    if not isinstance(error, EffectOnceError) or error.key is not None:
        return error
    own = type(error).__new__(type(error), f"{error} [key {key}]")
    own.__dict__.update(error.__dict__, key=key)
    own.__cause__ = error
    return own


def replayed(call: Call, record: Record) -> Outcome[Any]:
    """The first answer, again."""
    _, state, _, fence, _, _, attempts, result, _, once = record
    guarantee: Guarantee = "at_most_once" if once else "fenced"
    if state is COMPLETED and result is not None and (first := result[:1]) != UNAVAILABLE:
        if first == ATOMIC:
            guarantee = "atomic"
        try:  # written out: this is the way of nearly every duplicate
            value = codec.decode(result, call[2])
        except Exception as error:
            unreadable = ResultUnavailable(
                f"This was done once, but its stored result can't be read here: {error}", key=call.key
            )
            unreadable.__cause__ = error
            return Outcome("replayed", None, True, attempts, fence, guarantee, unreadable)
        return make(Outcome, ("replayed", value, True, attempts, fence, guarantee, None))
    status, why = _without_value(call, record)
    return Outcome(status, None, True, attempts, fence, record.guarantee, why)


def joined(outcome: Outcome[Any]) -> tuple[EventKind, Outcome[Any]]:
    """The outcome of the attempt that was joined, its error included, and the event that tells of it."""
    kind = REFUSED.get(outcome.status)
    if kind is not None:  # a refusal stays a refusal
        return kind, outcome
    status: Status = "replayed" if outcome.status == "executed" else outcome.status
    return "replayed", outcome._replace(status=status, replayed=True)


def refused(call: Call, decision: Decision) -> tuple[EventKind, Outcome[Any]]:
    """A claim that was neither granted nor done before, and the event that tells of it."""
    policy, record = call.policy, decision.record
    kind, status, error = REFUSALS[decision.verdict](call.key, decision)
    attempts, fence = (record.attempts, record.fence) if record else (0, 0)
    parked = decision.verdict is Verdict.LATE and policy.late == "dead_letter"
    skipped = decision.verdict is Verdict.BUSY and policy.busy == "skip"
    shown = None if parked or skipped else error
    return kind, Outcome(status, None, False, attempts, fence, guarantee_of(policy), shown)


def repeated(decision: Decision, earlier: Decision | None) -> Decision:
    """A claim that was sent again is told that it is held already; what it was granted is what it was told first."""
    before, now = earlier and earlier.record, decision.record
    is_same = (
        before is not None and now is not None and before.owner == now.owner and before.fence == now.fence
    )
    return decision._replace(verdict=earlier.verdict) if earlier and is_same else decision


def record_of(attempt: Attempt, completion: Completion) -> Record:
    """The record that a completion has left in the store, as far as a replay needs it."""
    claim, fence, tries = attempt.claim, attempt.fence, attempt.number
    state, result = completion.state, completion.result
    return Record(claim.key, state, NOBODY, fence, claim.fingerprint, 0.0, tries, result, 0.0, claim.once)


def guarantee_of(policy: Policy) -> Guarantee:
    """The rung of the guarantee ladder that a policy asks for."""
    return "at_most_once" if policy.on_crash == "in_doubt" else "fenced"


def encoded(policy: Policy, hint: Any, value: Any) -> bytes | None:
    """A result as it is stored: None when the policy stores none, else its bytes or why there are none."""
    if not policy.store_result:
        return None
    try:
        encoded = codec.encode(value, hint)
    except codec.Unencodable as error:
        return UNAVAILABLE + str(error).encode("utf-8", "backslashreplace")
    if len(encoded) > policy.max_result:
        return UNAVAILABLE + f"it has {len(encoded)} bytes, max_result is {policy.max_result}".encode()
    return encoded


def why_unstored(result: bytes) -> str:
    """What is stored in place of a result that can't be."""
    return result.removeprefix(UNAVAILABLE).decode("utf-8", "replace")


def _encoded_error(policy: Policy, error: BaseException) -> bytes:
    return codec.encode_error(error, max(policy.max_result, LONGEST_ERROR))


def _without_value(call: Call, record: Record) -> tuple[Status, BaseException | None]:
    """The answer of a record that holds no value: an error, nothing, or why it holds none."""
    result, key = record.result, call.key
    if record.state is State.FAILED:
        if result is None:
            return "failed", _exhausted(key, record)
        error = codec.decode_error(result, call.policy.remember)
        with suppress(Exception):  # an error that takes no notes is the same error without one
            error.add_note(
                f"Replayed by effectonce: asking again with the same key gives this same error. [key {key}]"
            )
        return "failed", error
    if result is None:
        return "replayed", None
    why = why_unstored(result)
    return "replayed", ResultUnavailable(f"This was done once, but its result was not stored: {why}", key=key)


def too_slow(claim: Claim) -> StoreUnavailable:
    """The error of a claim whose lease is over whenever the store has granted it."""
    return StoreUnavailable(
        f"The store takes longer to answer than the lease of {claim.lease:g} s lasts, so nothing was run. A longer "
        "lease= helps, or a quicker store.",
        key=claim.key,
    )


def waits_for_itself(call: Call) -> UsageError:
    """The error of a handler that asks for its own key."""
    return UsageError(
        "A handler asked for the key that it is running for, or that a handler around it is running for, and would "
        "wait for itself. Give the inner call another key, or an operation= of its own.",
        key=call.key,
    )


def _exhausted(key: str, record: Record | None) -> AttemptsExhausted:
    tried = record.attempts if record else 0
    return AttemptsExhausted(
        f"{tried} attempts crashed or failed and no more are allowed. Look at why, then use a new key.",
        key=key,
    )


REFUSED: dict[Status, EventKind] = {
    "in_progress": "busy", "mismatch": "mismatch", "in_doubt": "in_doubt", "late": "late", "store_error": "store_error"
}  # fmt: skip
"""Outcomes without an answer that could be shared, and the events that tell of them."""

Refusal = tuple[EventKind, Status, EffectOnceError]

REFUSALS: dict[Verdict, Callable[[str, Decision], Refusal]] = {
    Verdict.BUSY: lambda key, decision: (
        "busy",
        "in_progress",
        InProgress(
            "Another attempt is running. Ask again with the same key in "
            f"{max(decision.retry_after, 0.0):.1f} s at the latest.",
            key=key,
            retry_after=max(decision.retry_after, 0.0),
        ),
    ),
    Verdict.MISMATCH: lambda key, _: (
        "mismatch",
        "mismatch",
        KeyReused("This key was used before with another payload. Use a new key for a new request.", key=key),
    ),
    Verdict.IN_DOUBT: lambda key, _: (
        "in_doubt",
        "in_doubt",
        InDoubt(
            "An earlier attempt ended without saying whether its effect happened. Find out, then settle it with "
            "receiver.resolve(key, ...); a prober= in the policy does so by itself.",
            key=key,
        ),
    ),
    Verdict.EXHAUSTED: lambda key, decision: ("failed", "failed", _exhausted(key, decision.record)),
    Verdict.LATE: lambda key, _: (
        "late",
        "late",
        LateArrival(
            "This message is older than what the store remembers, so it can't be proven new. Check by hand whether "
            'it was processed; late="process" runs such messages, a longer keep= remembers more.',
            key=key,
        ),
    ),
}
