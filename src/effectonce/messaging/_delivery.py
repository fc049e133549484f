"""What to tell a broker, decided here for all of them and without I/O.

A delivery is first **admitted**: it becomes a ``Message`` with a stable id, or a dead letter that says what is wrong
with it. What the receiver then says of it, an ``Outcome``, becomes a **verdict**:

=============  ==========================================  ====================================================
outcome        means                                       the broker is told
=============  ==========================================  ====================================================
executed       the effect happened and is recorded         ack
replayed       it had happened before                      ack, with the first value
in_progress    another consumer is at it                   nack, until its lease is over at most; never an ack
failed         the handler raised, its claim was released  nack, with a pause that doubles with each attempt
failed         the error is remembered, or the attempts    dead letter: another delivery would get the same
               are used up
mismatch       the id was used before for another payload  dead letter
late           older than what the store remembers         dead letter, unless the policy has parked it already
in_doubt       nobody knows whether the effect happened    nack, with the longest pause: each delivery asks the
                                                           prober again, and nothing is lost while a person looks
store_error    the store did not answer                    nack; no attempt is counted
=============  ==========================================  ====================================================

A broker's word that it delivers something *again* tells more: if the store has never seen what the broker has, again
and again, then ids change between deliveries and protect nobody. ``Watchdog`` listens for that.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from .. import keys
from .._messages import Message, Outcome, Status
from .._records import make
from ..errors import (
    AttemptsExhausted,
    EffectOnceError,
    InProgress,
    InvalidKey,
    LeaseLost,
    NotApplied,
    RememberedError,
    StoreUnavailable,
    UsageError,
)
from ..policy import Busy, Policy

BYTES: Final = (bytes, bytearray)
FUTURE_SECONDS: Final = 300.0
"""How far ahead a sender's clock may be. A message from further on could not be known to be late."""
SHORTEST_DELAY: Final = 0.05
EXTEND_SHARE: Final = 3.0
"""A broker's deadline is extended after a third of it, as a lease is: two extensions may fail."""
LONGEST_DETAIL: Final = 500
WEEK_SECONDS: Final = 7 * 86_400.0
DONE: Final = ("executed", "replayed")
"""What lets the next message of a group begin."""

Reason = Literal[
    "no_id", "invalid_id", "undecodable", "unusable", "too_large", "future", "late", "mismatch", "remembered_error",
    "attempts_exhausted", "no_result",
]  # fmt: skip
"""Why a message can never be processed, however often it is delivered."""


# What comes in


class Delivery(NamedTuple):
    """One message as its broker handed it over."""

    handle: Any
    """What the adapter settles it by."""
    source: str
    """Whose ids these are: the queue, stream or topic."""
    ids: tuple[tuple[str, object], ...]
    """Where a stable id may be and what is there (None: nothing), the best first."""
    body: Any
    """Its bytes, or what the broker has instead of them."""
    size: int
    """In bytes."""
    timestamp: float | None = None
    """When it was sent, in seconds since 1970."""
    times: int = 1
    """How often the broker has handed it over, this time included."""
    group: Hashable | None = None
    """What it must keep its order in."""
    at: tuple[str, int] | None = None
    """Its place: the ordered source that it comes from, and its number there."""


class DeadLetter(NamedTuple):
    """It will never be processed: put it aside, with the reason."""

    reason: Reason
    detail: str = ""
    attempts: int = 0
    consumer: str = ""
    """Who gave it up: others that get the same messages may have handled it."""
    first_seen: float | None = None
    """When that consumer first met it, in seconds since 1970: for messages that don't say when they were sent."""


@dataclass(frozen=True, slots=True)
class Intake:
    """How deliveries become messages: ``decode`` makes a payload of a body, up to ``max_body`` bytes."""

    decode: Callable[[Any], Any]
    max_body: int

    def admit(self, delivery: Delivery, now: float) -> Message | DeadLetter:
        """The message in a delivery, or why there is none."""
        _, source, ids, body, size, sent, _, _, _ = delivery
        if size > self.max_body:
            return DeadLetter("too_large", f"It has {size} bytes, max_body is {self.max_body}.")
        if sent is not None and sent > now + FUTURE_SECONDS:
            return DeadLetter("future", f"It was sent {sent - now:.0f} s from now, by its own timestamp.")
        name = stable_id(ids)
        if isinstance(name, DeadLetter):
            return name
        try:
            payload = self.decode(body)
        except Exception as error:  # whatever a decoder raises, the message is at fault and not the consumer
            return DeadLetter("undecodable", explained(error))
        try:
            return Message(name, payload, sent, source)
        except InvalidKey as error:
            return DeadLetter("invalid_id", explained(error))
        except UsageError as error:
            return DeadLetter("unusable", explained(error))


def stable_id(candidates: Iterable[tuple[str, object]]) -> str | DeadLetter:
    """The first id that is there. One that is no text is not skipped: the next might name another effect."""
    looked: list[str] = []
    for where, found in candidates:
        if found is None:
            looked.append(where)
        elif isinstance(found, str):
            return found
        elif isinstance(found, BYTES):
            try:
                return found.decode()
            except UnicodeDecodeError:
                return DeadLetter("invalid_id", f"Its id, in {where}, is not UTF-8.")
        else:
            kind = type(found).__name__
            return DeadLetter("invalid_id", f"Its id, in {where}, is of type {kind}, not text.")
    return DeadLetter(
        "no_id",
        f"It has no id that is the same on every delivery (looked in {', '.join(looked) or 'no place'}). Have "
        "the sender set one, or name where it is with id=.",
    )


def candidates(
    wanted: str | Callable[[Any], object] | None,
    message: Any,
    header: Callable[[str], object],
    usual: tuple[tuple[str, object], ...],
) -> tuple[tuple[str, object], ...]:
    """Where to look for an id: in the one place that the user names, else in the broker's usual ones."""
    if wanted is None:
        return usual
    if isinstance(wanted, str):
        return ((f"the header {wanted}", header(wanted)),)
    try:
        return (("what id= finds", wanted(message)),)
    except Exception as error:  # the message is at fault: refused, and the consumer goes on
        return (("what id= finds", error),)


def message_policy(mine: Policy, wanted: Policy | None, busy: Busy = "reject") -> Policy:
    """How messages are treated: as the user says, else as the receiver's policy does, but brokers redeliver late, so
    for a week at least; and a duplicate of a running attempt goes back instead of being waited for.
    """
    return mine.but(busy=busy, keep=max(mine.keep, WEEK_SECONDS)) if wanted is None else wanted


# What to tell the broker


class Ack(NamedTuple):
    """It is done. ``value`` is the handler's, for those who pass results on; ``error`` says why it can't be shown."""

    value: Any = None
    replayed: bool = False
    error: BaseException | None = None


class Nack(NamedTuple):
    """Deliver it again, not before ``delay`` seconds have passed."""

    delay: float
    reason: str
    excused: bool = False
    """Whether the store has not seen it, so that its next delivery is no sign of an id that changes."""


Verdict = Ack | Nack | DeadLetter


class Pace(NamedTuple):
    """The pauses before another delivery: the first, which doubles, and the longest."""

    first: float = 1.0
    longest: float = 300.0

    def after(self, attempts: int) -> float:
        """The pause after so many attempts, or deliveries."""
        return min(self.first * 2.0 ** min(max(attempts, 1) - 1, 64), self.longest)

    def bounded(self, delay: float) -> float:
        """A pause that somebody else asks for."""
        return min(max(delay, SHORTEST_DELAY), self.longest)


def decide(outcome: Outcome[Any], policy: Policy, pace: Pace, times: int = 1) -> Verdict:
    """What to tell the broker of a delivery, its ``times``-th, that had this outcome under this policy."""
    return TABLE[outcome.status](outcome, policy, pace, times)


def _done(outcome: Outcome[Any], policy: Policy, pace: Pace, times: int) -> Verdict:
    # Also when its result can't be shown: the effect happened.
    return make(Ack, (outcome.value, outcome.replayed, outcome.error))


def _busy(outcome: Outcome[Any], policy: Policy, pace: Pace, times: int) -> Verdict:
    # Mostly it is done long before its lease is over, and this one may hold up its partition: so ask early at first.
    left = outcome.error.retry_after if isinstance(outcome.error, InProgress) else pace.first
    return Nack(pace.bounded(min(left, pace.after(times))), "in_progress")


def _failed(outcome: Outcome[Any], policy: Policy, pace: Pace, times: int) -> Verdict:
    error = outcome.error
    if isinstance(error, AttemptsExhausted):
        return DeadLetter("attempts_exhausted", explained(error), outcome.attempt)
    if is_remembered(error, policy):
        return DeadLetter("remembered_error", explained(error), outcome.attempt)
    if isinstance(error, UsageError) and not outcome.attempt:  # it could not even be named or fingerprinted
        return DeadLetter("unusable", explained(error))
    if isinstance(error, LeaseLost):  # somebody took over: soon there is an answer
        return Nack(pace.first, "lease_lost")
    if isinstance(error, Held):
        return Nack(SHORTEST_DELAY, "held", excused=True)
    return Nack(pace.after(outcome.attempt), "failed")


def _doubtful(outcome: Outcome[Any], policy: Policy, pace: Pace, times: int) -> Verdict:
    return Nack(pace.longest, "in_doubt")


def _mismatched(outcome: Outcome[Any], policy: Policy, pace: Pace, times: int) -> Verdict:
    return DeadLetter("mismatch", explained(outcome.error), outcome.attempt)


def _late(outcome: Outcome[Any], policy: Policy, pace: Pace, times: int) -> Verdict:
    if outcome.error is None:
        return Ack()  # the policy's own dead_letter has it
    return DeadLetter("late", explained(outcome.error), outcome.attempt)


def _unanswered(outcome: Outcome[Any], policy: Policy, pace: Pace, times: int) -> Verdict:
    error = outcome.error
    delay = error.retry_after if isinstance(error, StoreUnavailable) else pace.longest
    return Nack(pace.bounded(delay), "store_error", excused=True)


TABLE: Mapping[Status, Callable[[Outcome[Any], Policy, Pace, int], Verdict]] = {
    "executed": _done,
    "replayed": _done,
    "in_progress": _busy,
    "failed": _failed,
    "mismatch": _mismatched,
    "late": _late,
    "in_doubt": _doubtful,
    "store_error": _unanswered,
}


class Held(NotApplied):
    """Not begun, because an earlier message of its group has to come first."""


def is_remembered(error: BaseException | None, policy: Policy) -> bool:
    """Whether another delivery would get this same error, because it is the recorded answer."""
    if isinstance(error, NotApplied):
        return False
    return isinstance(error, (RememberedError, *policy.remember))


def explained(error: BaseException | None) -> str:
    """An error in one printable line, for people who look at dead letters."""
    if error is None:
        return ""
    text = str(error) if isinstance(error, EffectOnceError) else f"{type(error).__name__}: {error}"
    line = "".join(each if each.isprintable() else " " for each in text)
    return line if len(line) <= LONGEST_DETAIL else f"{line[: LONGEST_DETAIL - 1]}…"


def named(delivery: Delivery) -> str:
    """How to name a delivery that perhaps has no key."""
    found = next((found for _, found in delivery.ids if found is not None), "")
    return (found.decode("utf-8", "replace") if isinstance(found, bytes) else str(found))[:255]


# What to tell a framework that runs tasks and passes their results on


class Return(NamedTuple):
    """Go on with this result: the first one, also on a repetition."""

    value: Any


class Raise(NamedTuple):
    """Fail with this error. Unless it is ``final``, the framework's own rules say whether to try again."""

    error: BaseException
    final: bool


class Later(NamedTuple):
    """Neither done nor failed: have the message come again, not before ``delay`` seconds have passed."""

    delay: float
    error: BaseException


Answer = Return | Raise | Later


def answer(outcome: Outcome[Any], verdict: Verdict) -> Answer:
    """The same verdict for a framework. A result that can't be shown is never passed on as None."""
    error = outcome.error
    match verdict:
        case Ack(value=value, error=None):
            return Return(value)
        case Ack() | DeadLetter():
            assert error is not None
            return Raise(error, final=True)
        case Nack(reason="failed") if error is not None:
            return Raise(error, final=False)
        case Nack(delay=delay, reason=reason):
            return Later(delay, error or NotApplied(f"Not now: {reason}."))


# Whether ids are stable


class Watchdog:
    """Says when deliveries that the broker repeats are new to the store, again and again.

    Some always are: a consumer may die between getting a message and claiming it. So it takes ``threshold`` of them in
    a window, and hardly any repetition that was known. What was given back before it was claimed is excused.
    """

    KNOWN_SHARE = 0.1

    def __init__(self, threshold: int = 20, window_seconds: float = 600.0) -> None:
        self.threshold, self.window = threshold, window_seconds
        self._since = 0.0
        self._known = self._unknown = self._excuses = 0
        self._told = False

    def hear(self, delivery: Delivery, outcome: Outcome[Any], verdict: Verdict, now: float) -> str | None:
        """Take note of a delivery; what to say loudly, at most once in a window."""
        if now - self._since >= self.window:
            self._since, self._known, self._unknown, self._told = now, 0, 0, False
        if isinstance(verdict, Nack) and verdict.excused:
            self._excuses += 1
        elif delivery.times > 1 and outcome.status != "late":
            self._count(is_new=outcome.attempt <= 1 and outcome.status in ("executed", "failed"))
        if self._told or self._unknown < self.threshold or self._known > self.KNOWN_SHARE * self._unknown:
            return None
        self._told = True
        return (
            f"{self._unknown} deliveries from {delivery.source!r} were repetitions by the broker's word, and new to "
            "the store: ids that change with each delivery protect nobody. Have the sender set an id; if it does, look "
            "for a store that forgets, or for consumers that die before they begin."
        )

    def _count(self, *, is_new: bool) -> None:
        if not is_new:
            self._known += 1
        elif self._excuses:
            self._excuses -= 1
        else:
            self._unknown += 1


def to_extend(
    under_way: Iterable[tuple[str, Delivery]], held_before: set[str], held_now: set[str]
) -> list[Delivery]:
    """The deliveries whose deadline to extend, out of pairs with their keys: all, but none whose lease was lost."""
    lost = held_before - held_now
    return [delivery for key, delivery in under_way if key not in lost]


def or_place(where: str, found: object, *place: str | int) -> tuple[tuple[str, object], ...]:
    """An id that the sender gave, or else a place in the broker's log: the same whenever that is delivered again."""
    if found is not None:
        return ((where, found),)
    return ((where, None), ("its place", keys.composite("at", *place)))
