"""The receiver: one run per key, the first answer for every repeat, and a word for everything else."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.integration.sqlite_helpers import Caller
from tests.unit.receiving import (
    LONG,
    Colour,
    Counted,
    Crash,
    NarrowStore,
    StagedStore,
    Told,
    by_hand,
    crash,
    must_not_run,
    running,
)

from effectonce import (
    InDoubt,
    InProgress,
    KeyReused,
    Message,
    NotApplied,
    Policy,
    Receiver,
    State,
    _cache,
    current,
    keys,
)
from effectonce.errors import (
    AttemptsExhausted,
    ColourMismatch,
    EffectOnceError,
    LateArrival,
    RememberedError,
    ResultUnavailable,
    StoreClosed,
    StoreUnavailable,
    UsageError,
)
from effectonce.policy import Resolution
from effectonce.stores.base import Store
from effectonce.stores.memory import MemoryStore
from effectonce.testing.clocks import ManualClock, wait_until

EVENT = Message("e-1", {"cents": 500})
DAY = 86400.0


class CardDeclined(Exception):
    """A refusal that a bank gives for good."""

    def __init__(self, code: int, bank: str) -> None:
        super().__init__(f"{bank} says {code}")
        self.code, self.bank = code, bank


def key_in(told: Told) -> str:
    """The key of the last event."""
    return told[-1].key


# One run


def test_a_message_is_processed_once(receiver: Receiver, colour: Colour) -> None:
    """The first delivery runs the handler; every repeat gets the first result without running it."""
    handler = Counted({"receipt": 7})
    first = colour.process(receiver, EVENT, handler)
    second = colour.process(receiver, EVENT, handler)
    assert (first.status, first.value, first.replayed) == ("executed", {"receipt": 7}, False)
    assert (second.status, second.value, second.replayed) == ("replayed", {"receipt": 7}, True)
    assert handler.runs == 1


def test_an_outcome_says_how_it_came_about(receiver: Receiver, colour: Colour) -> None:
    """Attempt, fence and guarantee are the first run's, on the first delivery and on every repeat."""
    first = colour.process(receiver, EVENT, Counted())
    second = colour.process(receiver, EVENT, must_not_run)
    assert (first.attempt, first.guarantee, first.error) == (1, "fenced", None)
    assert first.fence >= 1
    assert second[3:] == first[3:]


def test_the_guarantee_is_the_policys(receiver: Receiver, colour: Colour) -> None:
    """A call that is never taken over says at_most_once, also when it is replayed under another policy."""
    once = Policy(on_crash="in_doubt")
    assert colour.process(receiver, EVENT, Counted(), policy=once).guarantee == "at_most_once"
    assert colour.process(receiver, EVENT, must_not_run).guarantee == "at_most_once"


@pytest.mark.parametrize("value", [0, False, "", [], {}, None, 0.0, ()], ids=repr)
def test_results_that_look_like_nothing_are_results(receiver: Receiver, colour: Colour, value: Any) -> None:
    """A falsy result is remembered and replayed as itself, not taken for a missing one."""
    handler = Counted(value)
    for _ in range(2):
        again = colour.process(receiver, EVENT, handler).value
        assert (again, type(again)) == (value, type(value))
    assert handler.runs == 1


def test_a_handler_sees_its_attempt(receiver: Receiver, colour: Colour) -> None:
    """Inside a handler, current() has the fence, the number, and keys that are stable for calls downstream."""
    seen = []

    def handler(_: Message) -> None:
        attempt = current()
        attempt.check()
        seen.append((attempt.fence, attempt.number, attempt.key_for("stripe.charge"), attempt.lost))
        raise ValueError

    for _ in range(2):
        with pytest.raises(ValueError):
            colour.process(receiver, EVENT, handler)
    (fence, number, key, lost), (later_fence, later_number, later_key, _) = seen
    assert (number, later_number, lost) == (1, 2, False)
    assert later_fence > fence
    assert later_key == key


def test_there_is_no_attempt_outside_a_handler(receiver: Receiver, colour: Colour) -> None:
    """current() works only while a handler runs."""
    colour.process(receiver, EVENT, Counted())
    with pytest.raises(UsageError, match="only inside a handler"):
        current()


def test_a_loop_may_have_a_blocking_handler(receiver: Receiver) -> None:
    """On an event loop aprocess takes a plain function as well, such as one that only computes."""
    import asyncio

    assert asyncio.run(receiver.aprocess(EVENT, Counted(1))).value == 1


# What makes two deliveries one


def test_another_payload_under_the_same_key_is_refused(receiver: Receiver, colour: Colour) -> None:
    """A reused id is an error, and the record of its first use stays as it was."""
    colour.process(receiver, EVENT, Counted("first"))
    with pytest.raises(KeyReused, match="another payload") as refused:
        colour.process(receiver, Message("e-1", {"cents": 900}), must_not_run)
    assert refused.value.key is not None
    assert colour.process(receiver, EVENT, must_not_run).value == "first"


def test_the_fingerprint_is_checked_on_takeover(
    receiver: Receiver, colour: Colour, clock: ManualClock
) -> None:
    """After a crash too, the key belongs to the payload it was used with."""
    crash(receiver, EVENT)
    clock.advance(DAY / 2)
    with pytest.raises(KeyReused):
        colour.process(receiver, Message("e-1", {"cents": 900}), must_not_run)


def test_the_order_of_keys_makes_no_other_payload(receiver: Receiver, colour: Colour) -> None:
    """The same content written in another order is the same request."""
    colour.process(receiver, Message("e-1", {"a": 1, "b": 2}), Counted())
    assert colour.process(receiver, Message("e-1", {"b": 2, "a": 1}), must_not_run).replayed


DIFFERENT: dict[str, Callable[[Receiver, Store], Any]] = {
    "scope": lambda r, _: r.process(EVENT, Counted("other"), scope="tenant-b"),
    "operation": lambda r, _: r.process(EVENT, Counted("other"), operation="refund"),
    "version": lambda r, _: r.process(EVENT, Counted("other"), version=2),
    "source": lambda r, _: r.process(Message("e-1", {"cents": 500}, source="shop"), Counted("other")),
    "consumer": lambda _, s: Receiver(s, consumer="mailer").process(EVENT, Counted("other")),
    "receiver's scope": lambda _, s: Receiver(s, scope="tenant-b").process(EVENT, Counted("other")),
}


@pytest.mark.parametrize("how", DIFFERENT)
def test_the_same_id_elsewhere_is_another_effect(receiver: Receiver, store: Store, how: str) -> None:
    """Scope, operation, version, source and consumer are part of a key: none sees another's record."""
    receiver.process(EVENT, Counted("ours"))
    other = DIFFERENT[how](receiver, store)
    assert (other.status, other.value) == ("executed", "other")
    assert receiver.process(EVENT, must_not_run).value == "ours"


def test_two_tenants_never_see_each_others_payload(receiver: Receiver, colour: Colour) -> None:
    """The same id with other content is no clash when it comes from another tenant."""
    colour.process(receiver, EVENT, Counted("a"), scope="tenant-a")
    other = Message("e-1", {"cents": 900})
    assert colour.process(receiver, other, Counted("b"), scope="tenant-b").value == "b"
    assert colour.process(receiver, EVENT, must_not_run, scope="tenant-a").value == "a"


def test_a_consumer_is_not_a_source(store: Store) -> None:
    """A consumer and a source of the same name are different parts of a key."""
    Receiver(store, consumer="orders").process(EVENT, Counted("by consumer"))
    from_source = Message("e-1", {"cents": 500}, source="orders")
    assert Receiver(store).process(from_source, Counted("by source")).value == "by source"


def test_consumers_stay_apart_within_an_operation(store: Store) -> None:
    """Two consumers that call their operation by the same name each have their own effect."""
    for name in ("mailer", "biller"):
        outcome = Receiver(store, consumer=name).process(EVENT, Counted(name), operation="handle")
        assert outcome.value == name


def test_a_claim_and_a_message_do_not_meet(store: Store) -> None:
    """A block's key and a message's key are apart, whatever the consumer is called."""
    receiver = Receiver(store, consumer="claim")
    receiver.process(Message("k"), Counted("message"))
    with receiver.claim("k") as claim:
        assert claim.first


def test_a_message_without_an_id_gets_one_from_its_content(receiver: Receiver, colour: Colour) -> None:
    """The same content from the same source is the same message; from elsewhere it is another."""
    message = Message.with_content_id({"a": 1, "b": 2}, source="shop")
    colour.process(receiver, message, Counted())
    again = Message.with_content_id({"b": 2, "a": 1}, source="shop")
    assert colour.process(receiver, again, must_not_run).replayed
    elsewhere = Message.with_content_id({"a": 1, "b": 2}, source="kiosk")
    assert colour.process(receiver, elsewhere, Counted()).status == "executed"


def test_a_key_is_forgotten_after_its_time(receiver: Receiver, colour: Colour, clock: ManualClock) -> None:
    """A key is remembered for keep= and then may run again."""
    handler = Counted()
    for passed in (0, DAY - 1, 2):
        clock.advance(passed)
        colour.process(receiver, EVENT, handler)
    assert handler.runs == 2


# What handlers raise


def test_an_error_is_forgotten_unless_the_policy_says_otherwise(receiver: Receiver, colour: Colour) -> None:
    """The handler's own exception is raised, and a retry runs again as the next attempt with a higher fence."""
    failing = Counted(ValueError("no"))
    with pytest.raises(ValueError, match="no") as raised:
        colour.process(receiver, EVENT, failing)
    assert raised.value is failing.result
    retry = colour.process(receiver, EVENT, Counted("yes"))
    assert (retry.status, retry.value, retry.attempt) == ("executed", "yes", 2)


def test_a_remembered_error_is_a_result(receiver: Receiver, colour: Colour) -> None:
    """Every repeat gets an error of the same type, arguments and attributes, with a note that it is a replay."""
    policy = Policy(remember=(CardDeclined,))
    for handler in (Counted(CardDeclined(51, "ING")), must_not_run):
        with pytest.raises(CardDeclined) as declined:
            colour.process(receiver, EVENT, handler, policy=policy)
        error = declined.value
        assert (type(error), error.args, error.code, error.bank) == (
            CardDeclined,
            ("ING says 51",),
            51,
            "ING",
        )
    assert any("Replayed by effectonce" in note for note in error.__notes__)


def test_a_remembered_error_includes_its_subtypes(receiver: Receiver, colour: Colour) -> None:
    """A policy names a family of exceptions; the replay is of the exact type that was raised."""
    policy = Policy(remember=LookupError)
    for handler in (Counted(KeyError("k")), must_not_run):
        with pytest.raises(KeyError) as raised:
            colour.process(receiver, EVENT, handler, policy=policy)
        assert raised.value.args == ("k",)


def test_an_error_of_an_unknown_type_is_told_as_text(receiver: Receiver, colour: Colour) -> None:
    """Where the type can't be rebuilt, the replay says its name and its message."""
    with pytest.raises(CardDeclined):
        colour.process(
            receiver, EVENT, Counted(CardDeclined(51, "ING")), policy=Policy(remember=CardDeclined)
        )
    with pytest.raises(RememberedError, match="ING says 51") as replayed:
        colour.process(receiver, EVENT, must_not_run)
    assert "CardDeclined" in replayed.value.error_type


def test_a_handler_may_say_that_nothing_happened(receiver: Receiver, colour: Colour) -> None:
    """NotApplied releases the claim, even where the policy remembers every error."""
    with pytest.raises(NotApplied):
        colour.process(receiver, EVENT, Counted(NotApplied()), policy=Policy(remember=Exception))
    assert colour.process(receiver, EVENT, Counted()).attempt == 2


def test_nothing_happened_is_not_in_doubt(receiver: Receiver, colour: Colour) -> None:
    """NotApplied releases the claim, even where the policy is in doubt about every error."""
    with pytest.raises(NotApplied):
        colour.process(receiver, EVENT, Counted(NotApplied()), policy=Policy(in_doubt=Exception))
    assert colour.process(receiver, EVENT, Counted()).attempt == 2


def test_an_error_that_leaves_doubt(receiver: Receiver, colour: Colour, told: Told) -> None:
    """After such an exception nobody knows: it is raised, and repeats are refused until it is settled."""
    with pytest.raises(TimeoutError):
        colour.process(receiver, EVENT, Counted(TimeoutError()), policy=Policy(in_doubt=TimeoutError))
    with pytest.raises(InDoubt, match="resolve") as refused:
        colour.process(receiver, EVENT, must_not_run)
    assert refused.value.key == key_in(told)


def test_an_error_that_leaves_doubt_may_be_in_a_group(receiver: Receiver, colour: Colour) -> None:
    """A task group wraps what its tasks raise; one time-out among them is enough for nobody to know."""
    group = ExceptionGroup("tasks", [ValueError(), ExceptionGroup("more", [TimeoutError()])])
    with pytest.raises(ExceptionGroup, match="tasks"):
        colour.process(receiver, EVENT, Counted(group), policy=Policy(in_doubt=TimeoutError))
    with pytest.raises(InDoubt, match="resolve"):
        colour.process(receiver, EVENT, must_not_run)
    with pytest.raises(ExceptionGroup, match="tasks"):
        colour.process(receiver, Message("e-2"), Counted(group), policy=Policy(in_doubt=KeyError))
    assert colour.process(receiver, Message("e-2"), Counted()).attempt == 2


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, Crash])
def test_an_interrupt_is_not_the_handlers_word(
    receiver: Receiver, clock: ManualClock, told: Told, kind: type[BaseException]
) -> None:
    """Ctrl-C or an exit in the middle of a handler keeps the claim: only its lease ends it."""
    with pytest.raises(kind):
        receiver.process(EVENT, Counted(kind()), policy=Policy(remember=Exception, in_doubt=Exception))
    with pytest.raises(InProgress):
        receiver.process(EVENT, must_not_run, policy=Policy(busy="reject"))
    clock.advance(LONG * 3)
    assert receiver.process(EVENT, Counted()).attempt == 2
    assert "taken_over" in told.kinds()


@pytest.mark.parametrize("verb", ["claim", "complete"])
def test_an_interrupt_between_two_steps_leaves_nothing_running(clock: ManualClock, verb: str) -> None:
    """Ctrl-C while the store is asked: nobody renews a lease for it."""
    store = StagedStore(clock=clock)
    receiver = by_hand(Receiver(store, monotonic=clock))
    store.fail(verb, error=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        receiver.process(EVENT, Counted())
    store.recover()
    assert not receiver._keeper.live


# Attempts


def test_attempts_are_counted_and_limited(clock: ManualClock, store: Store, colour: Colour) -> None:
    """When every allowed attempt failed the key is closed, a dead letter is written once, and it stays closed."""
    letters: list[tuple[str, str]] = []
    policy = Policy(max_attempts=2, dead_letter=lambda key, why: letters.append((key, why)))
    receiver = by_hand(Receiver(store, policy=policy, monotonic=clock))
    for _ in range(2):
        with pytest.raises(ValueError):
            colour.process(receiver, EVENT, Counted(ValueError()))
    for _ in range(2):
        with pytest.raises(AttemptsExhausted, match="2 attempts") as refused:
            colour.process(receiver, EVENT, must_not_run)
    assert letters == [(refused.value.key, "exhausted")]


def test_crashes_count_as_attempts(receiver: Receiver, clock: ManualClock, colour: Colour) -> None:
    """A message that kills its worker each time is given up, too."""
    policy = Policy(max_attempts=2)
    for _ in range(2):
        crash(receiver, EVENT, policy=policy)
        clock.advance(LONG * 3)
    with pytest.raises(AttemptsExhausted):
        colour.process(receiver, EVENT, must_not_run, policy=policy)


# Late arrivals

SENT = datetime(2024, 5, 1, tzinfo=UTC)


@pytest.fixture
def today(clock: ManualClock) -> ManualClock:
    """A wall clock that is two days after ``SENT``."""
    clock.advance(SENT.timestamp() + 2 * DAY - clock())
    return clock


@pytest.mark.parametrize("sent", [SENT, SENT.timestamp()], ids=["datetime", "seconds"])
def test_a_message_older_than_the_memory_is_refused(
    today: ManualClock, receiver: Receiver, colour: Colour, sent: Any
) -> None:
    """An unknown message that is older than keep= may have been processed and forgotten, so it is not run."""
    with pytest.raises(LateArrival, match="older"):
        colour.process(receiver, Message("e-1", timestamp=sent), must_not_run)


def test_a_late_message_may_be_processed(today: ManualClock, receiver: Receiver, colour: Colour) -> None:
    """late="process" runs it: a repeat is the lesser evil."""
    outcome = colour.process(
        receiver, Message("e-1", timestamp=SENT), Counted(), policy=Policy(late="process")
    )
    assert outcome.status == "executed"


def test_a_late_message_may_be_set_aside(today: ManualClock, receiver: Receiver, colour: Colour) -> None:
    """late="dead_letter" hands the key to the callback; the outcome says late, and nothing is raised or run."""
    letters: list[tuple[str, str]] = []
    policy = Policy(late="dead_letter", dead_letter=lambda key, why: letters.append((key, why)))
    outcome = colour.process(receiver, Message("e-1", timestamp=SENT), must_not_run, policy=policy)
    assert (outcome.status, outcome.value, outcome.error) == ("late", None, None)
    ((key, why),) = letters
    assert (key.endswith("e-1"), why) == (True, "late")


def test_a_place_for_late_messages_that_awaits_is_none(
    today: ManualClock, receiver: Receiver, colour: Colour
) -> None:
    """Nobody would await it, so a coroutine function is refused; what only makes a coroutine fails its message."""

    async def aside(key: str, why: str) -> None: ...

    with pytest.raises(UsageError, match="coroutine function"):
        Policy(late="dead_letter", dead_letter=aside)
    policy = Policy(late="dead_letter", dead_letter=lambda key, why: aside(key, why))
    with pytest.raises(ColourMismatch, match="plain function"):
        colour.process(receiver, Message("e-1", timestamp=SENT), must_not_run, policy=policy)


def test_a_late_repeat_is_a_repeat(today: ManualClock, receiver: Receiver, colour: Colour) -> None:
    """A message of any age whose key is remembered is replayed, not refused."""
    today.advance(-1.5 * DAY)
    message = Message("e-1", timestamp=SENT)
    colour.process(receiver, message, Counted("in time"))
    today.advance(DAY - 1)
    assert colour.process(receiver, message, must_not_run).value == "in time"


def test_a_recent_message_is_not_late(today: ManualClock, receiver: Receiver, colour: Colour) -> None:
    """Younger than keep=, or from a sender whose clock is ahead: it runs."""
    for number, age in enumerate((0, DAY, -DAY)):
        message = Message(f"e-{number}", timestamp=today() - age)
        assert colour.process(receiver, message, Counted()).status == "executed"


def test_a_timestamp_needs_a_zone() -> None:
    """Without one its age can't be told, so the message is refused as it is made."""
    with pytest.raises(UsageError, match="no time zone"):
        Message("e-1", timestamp=datetime(2024, 5, 1))  # noqa: DTZ001


# Duplicates of a running attempt


@pytest.fixture
def shared(store: Store, told: Told) -> Receiver:
    """A receiver with a real local clock, for attempts that run at the same time."""
    return Receiver(store, hooks=[told])


@pytest.fixture(params=["one receiver", "two receivers"])
def other(request: pytest.FixtureRequest, shared: Receiver, store: Store, told: Told) -> Receiver:
    """Who gets the duplicate: the process that runs the first, or one beside it."""
    return shared if request.param == "one receiver" else Receiver(store, hooks=[told])


def is_waiting(told: Told) -> None:
    wait_until(lambda: "busy" in told.kinds(), what="A waiting duplicate")


@pytest.mark.parametrize("busy", ["wait", "join"])
def test_a_duplicate_waits_for_the_answer(
    shared: Receiver, other: Receiver, colour: Colour, told: Told, busy: Any
) -> None:
    """It gets the running attempt's result, once that is recorded."""
    with running(shared, EVENT, "first") as leave:
        second = Caller(lambda: colour.process(other, EVENT, must_not_run, policy=Policy(busy=busy)))
        is_waiting(told)
        leave.set()
        outcome = second.answer()
    assert (outcome.status, outcome.value, outcome.attempt) == ("replayed", "first", 1)


def test_a_waiter_runs_when_the_first_gave_up(
    shared: Receiver, other: Receiver, colour: Colour, told: Told
) -> None:
    """A released claim is the waiter's: it is the retry."""
    with running(shared, EVENT, ValueError("no")) as leave:
        second = Caller(lambda: colour.process(other, EVENT, Counted("second")))
        is_waiting(told)
        leave.set()
        outcome = second.answer()
    assert (outcome.status, outcome.value, outcome.attempt) == ("executed", "second", 2)


def test_a_joined_error_is_shared(shared: Receiver, colour: Colour, told: Told) -> None:
    """busy="join" shares the fate of the running attempt, its error included, and does not try for itself."""
    error = ValueError("no")
    with running(shared, EVENT, error) as leave:
        second = Caller(lambda: colour.process(shared, EVENT, must_not_run, policy=Policy(busy="join")))
        is_waiting(told)
        leave.set()
        with pytest.raises(ValueError) as raised:
            second.answer()
    assert raised.value is error


def test_a_joined_result_is_nobody_elses(shared: Receiver, colour: Colour, told: Told) -> None:
    """Whoever got the first answer may change what it was given: a duplicate has the answer as it was recorded."""
    answer = {"cents": 500}
    with running(shared, EVENT, answer) as leave:
        second = Caller(lambda: colour.process(shared, EVENT, must_not_run, policy=Policy(busy="join")))
        is_waiting(told)
        leave.set()
        joined = second.answer()
    answer["cents"] = 0
    assert (joined.status, joined.value) == ("replayed", {"cents": 500})


@pytest.mark.parametrize("result", [object(), ["not stored"]])
def test_a_joined_result_need_not_be_stored(
    shared: Receiver, colour: Colour, told: Told, result: object
) -> None:
    """Who joins an attempt gets what a later repeat can't have."""
    policy = Policy(busy="join", store_result=False) if isinstance(result, list) else Policy(busy="join")
    with running(shared, EVENT, result, policy=policy) as leave:
        second = Caller(lambda: colour.process(shared, EVENT, must_not_run, policy=policy))
        is_waiting(told)
        leave.set()
        assert second.answer().value is result


def test_a_duplicate_may_be_rejected(shared: Receiver, other: Receiver, colour: Colour) -> None:
    """busy="reject" says at once when to ask again."""
    with running(shared, EVENT, policy=Policy(lease=LONG)), pytest.raises(InProgress) as refused:
        colour.process(other, EVENT, must_not_run, policy=Policy(busy="reject"))
    assert 0 < refused.value.retry_after <= LONG
    assert refused.value.key is not None


def test_a_duplicate_may_be_skipped(shared: Receiver, other: Receiver, colour: Colour) -> None:
    """busy="skip" gives an outcome without a result and without an error."""
    with running(shared, EVENT):
        outcome = colour.process(other, EVENT, must_not_run, policy=Policy(busy="skip"))
    assert (outcome.status, outcome.value, outcome.error) == ("in_progress", None, None)


@pytest.mark.parametrize("wait", [0, 0.05])
@pytest.mark.parametrize("busy", ["wait", "join"])
def test_patience_has_a_bound(
    shared: Receiver, other: Receiver, colour: Colour, busy: Any, wait: float
) -> None:
    """After wait= the duplicate is told that the first is still running; 0 is at once."""
    with running(shared, EVENT), pytest.raises(InProgress):
        colour.process(other, EVENT, must_not_run, policy=Policy(busy=busy, wait=wait))


@pytest.mark.parametrize("busy", ["wait", "reject", "join", "skip"])
def test_another_payload_never_waits(shared: Receiver, colour: Colour, busy: Any) -> None:
    """A key that is running with another payload is reused, not busy."""
    with running(shared, EVENT), pytest.raises(KeyReused):
        colour.process(shared, Message("e-1", "else"), must_not_run, policy=Policy(busy=busy))


def test_a_waiter_takes_over_from_a_crashed_holder(
    shared: Receiver, other: Receiver, colour: Colour, clock: ManualClock, told: Told
) -> None:
    """By default a duplicate waits longer than the lease, so that it is the one who goes on after a crash."""
    crash(shared, EVENT)
    waiter = Caller(lambda: colour.process(other, EVENT, Counted("mine")))
    is_waiting(told)
    clock.advance(LONG * 3)
    outcome = waiter.answer()
    assert (outcome.status, outcome.value, outcome.attempt) == ("executed", "mine", 2)


def test_a_crowd_runs_a_key_once(shared: Receiver, colour: Colour) -> None:
    """Of many threads with one message, one runs it and all get its result."""
    ready = threading.Barrier(8)
    handler = Counted("once")

    def deliver() -> Any:
        ready.wait()
        return colour.process(shared, EVENT, handler)

    outcomes = [caller.answer() for caller in [Caller(deliver) for _ in range(8)]]
    assert {outcome.value for outcome in outcomes} == {"once"}
    assert sorted(outcome.status for outcome in outcomes) == ["executed"] + ["replayed"] * 7
    assert handler.runs == 1


# Results that can't be kept


def test_a_result_need_not_be_stored(receiver: Receiver, colour: Colour) -> None:
    """store_result=False remembers that it happened; repeats return None and run nothing."""
    policy = Policy(store_result=False)
    assert colour.process(receiver, EVENT, Counted("secret"), policy=policy).value == "secret"
    again = colour.process(receiver, EVENT, must_not_run, policy=policy)
    assert (again.status, again.value, again.error) == ("replayed", None, None)
    assert b"secret" not in (receiver.get(receiver.key_of(EVENT)) or [])


@dataclass
class Incomplete:
    """An object that loses a field on the way."""

    number: int


def incomplete() -> Incomplete:
    broken = Incomplete(1)
    del broken.number
    return broken


def deep() -> list[Any]:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    return nested


def looped() -> list[Any]:
    nested: list[Any] = []
    nested.append(nested)
    return nested


@dataclass
class Moody:
    """An object that can't be read."""

    number: int = 1

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("not today")


UNSTORABLE: dict[str, Callable[[], Any]] = {
    "an object without a stored form": object,
    "a generator": lambda: (n for n in ()),
    "a deep nest": deep,
    "a loop": looped,
    "a broken object": incomplete,
    "an object that raises": Moody,
}


@pytest.mark.parametrize("what", UNSTORABLE)
def test_a_result_that_cant_be_stored_is_still_a_completion(
    receiver: Receiver, colour: Colour, what: str
) -> None:
    """The first call returns it; repeats say that it was done but has no stored result, and never run again."""
    value, runs = UNSTORABLE[what](), []

    def handler(_: Message) -> Incomplete | Moody | list[Any]:
        runs.append(what)
        return value

    assert colour.process(receiver, EVENT, handler).value is value
    for _ in range(2):
        with pytest.raises(ResultUnavailable, match="done once, but its result was not stored"):
            colour.process(receiver, EVENT, handler)
    assert runs == [what]
    assert not receiver._keeper.live


@pytest.mark.parametrize(
    ("result", "why"), [(object(), "result is a builtins:object"), ("x" * 200, "it has 202 bytes")]
)
def test_a_result_that_cant_be_stored_is_warned_of(
    receiver: Receiver, colour: Colour, caplog: pytest.LogCaptureFixture, result: object, why: str
) -> None:
    """The log has it when it happens, once and with its key, and not only when a repeat asks in vain."""
    colour.process(receiver, EVENT, Counted(result), policy=Policy(max_result=100))
    (line,) = caplog.records
    assert line.levelname == "WARNING"
    assert f"a result can't be stored: {why}" in line.message
    assert line.effect_key == receiver.key_of(EVENT)  # type: ignore[attr-defined]


def test_a_result_may_be_too_large(receiver: Receiver, colour: Colour) -> None:
    """One larger than max_result= is treated the same, and the replay says both sizes."""
    policy = Policy(max_result=100)
    assert colour.process(receiver, EVENT, Counted("x" * 200), policy=policy).value == "x" * 200
    with pytest.raises(ResultUnavailable, match="max_result is 100"):
        colour.process(receiver, EVENT, must_not_run, policy=policy)


def test_a_generator_is_no_handler(receiver: Receiver) -> None:
    """A generator function would do nothing when it is called, so it is refused before anything is claimed."""

    def handler(_: Message) -> Any:
        yield "never reached"

    with pytest.raises(UsageError, match="generator"):
        receiver.process(EVENT, handler)
    assert receiver.process(EVENT, Counted()).attempt == 1


# The local cache


@pytest.fixture
def staged(clock: ManualClock) -> StagedStore:
    """A store whose round trips are listed."""
    return StagedStore(clock=clock)


@pytest.fixture
def caching(staged: StagedStore, clock: ManualClock) -> Receiver:
    """A receiver that remembers two finished keys by itself."""
    return by_hand(Receiver(staged, policy=Policy(local_cache=2), monotonic=clock))


def test_the_cache_answers_without_the_store(caching: Receiver, staged: StagedStore, colour: Colour) -> None:
    """A key that this process finished or replayed is answered with no round trip."""
    first = colour.process(caching, EVENT, Counted("kept"))
    staged.calls.clear()
    again = colour.process(caching, EVENT, must_not_run)
    assert (again.value, again.status, again[3:]) == ("kept", "replayed", first[3:])
    assert staged.calls == []


def test_the_cache_learns_from_a_replay(caching: Receiver, staged: StagedStore, colour: Colour) -> None:
    """What another process did is cached once it has been replayed here."""
    Receiver(staged).process(EVENT, Counted("theirs"))
    colour.process(caching, EVENT, must_not_run)
    staged.calls.clear()
    assert colour.process(caching, EVENT, must_not_run).value == "theirs"
    assert staged.calls == []


def test_the_cache_respects_the_payload(caching: Receiver, colour: Colour) -> None:
    """A reused key is refused as it is without the cache."""
    colour.process(caching, EVENT, Counted())
    with pytest.raises(KeyReused):
        colour.process(caching, Message("e-1", "else"), must_not_run)


def test_the_cache_has_a_bound(caching: Receiver, staged: StagedStore, colour: Colour) -> None:
    """The oldest key makes room, and is then asked from the store."""
    for number in range(3):
        colour.process(caching, Message(f"e-{number}"), Counted())
    staged.calls.clear()
    for number in (1, 2, 0):
        assert colour.process(caching, Message(f"e-{number}"), must_not_run).replayed
    assert staged.calls == ["claim"]


def test_the_cache_has_a_bound_of_bytes(
    caching: Receiver, staged: StagedStore, colour: Colour, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large result makes the oldest go, and one that is larger than all of it is not held."""
    monkeypatch.setattr(_cache, "MOST_BYTES", 1000)
    for name, size in (("old", 600), ("new", 600), ("huge", 1200)):
        colour.process(caching, Message(name), Counted("x" * size))
    staged.calls.clear()
    assert colour.process(caching, Message("new"), must_not_run).replayed
    assert staged.calls == []
    for name in ("old", "huge"):
        assert colour.process(caching, Message(name), must_not_run).replayed
    assert staged.calls == ["claim"] * 2


def test_the_cache_makes_room_beside_other_threads(caching: Receiver) -> None:
    """Many threads that put something in at once are in nobody's way, and its bounds hold."""
    cache, errors = caching.flow.cache, list[BaseException]()

    def crowd(name: int) -> None:
        try:
            for number in range(300):
                caching.process(Message(f"{name}-{number}"), Counted("x"))
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=crowd, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert errors == []
    assert len(cache._records) == 2
    assert cache._bytes == sum(len(record.result or b"") for _, record in cache._records.values())


def test_the_cache_forgets_with_the_store(
    caching: Receiver, staged: StagedStore, colour: Colour, clock: ManualClock
) -> None:
    """After keep= the key may run again, and its new answer is cached as the old one was."""
    colour.process(caching, EVENT, Counted("old"))
    clock.advance(DAY + 1)
    assert colour.process(caching, EVENT, Counted("new")).value == "new"
    staged.calls.clear()
    assert colour.process(caching, EVENT, must_not_run).value == "new"
    assert staged.calls == []


def test_a_replay_makes_no_cached_answer_older_than_the_record(
    caching: Receiver, staged: StagedStore, colour: Colour, clock: ManualClock
) -> None:
    """A key that was cached late is forgotten when its record is, not keep= after the replay."""
    Receiver(staged).process(EVENT, Counted("old"))
    clock.advance(DAY - 1)
    colour.process(caching, EVENT, must_not_run)
    clock.advance(2)
    assert colour.process(caching, EVENT, Counted("new")).value == "new"


def test_a_message_may_have_a_class_of_its_own(receiver: Receiver, colour: Colour) -> None:
    """It is handed to its handler as it is, and has the key of a plain one."""

    class OrderPlaced(Message):
        __slots__ = ()

    seen: list[Message] = []
    placed = OrderPlaced("e-1", {"order": 7}, source="orders")
    assert colour.process(receiver, placed, lambda message: seen.append(message)).status == "executed"
    assert seen[0] is placed
    plain = Message("e-1", {"order": 7}, source="orders")
    assert [each.status for each in colour.batch(receiver, [plain, placed], must_not_run)] == ["replayed"] * 2


# Trouble with the store


def test_no_answer_no_run(staged: StagedStore, colour: Colour) -> None:
    """When the store can't be asked the handler does not run, and the error says when to ask again."""
    staged.fail("claim", error=StoreUnavailable("gone", retry_after=3.0))
    with pytest.raises(StoreUnavailable, match="gone"):
        colour.process(Receiver(staged), EVENT, must_not_run)


def test_the_stores_error_names_the_key(staged: StagedStore, colour: Colour) -> None:
    """What a store says to all who wait for it is told each of its own key; what it said stays as it was."""

    class Crowded(StoreUnavailable):
        def __init__(self, guests: int) -> None:
            super().__init__(f"{guests} guests", retry_after=3.0)

    shared = Crowded(64)
    staged.fail("claim", error=shared)
    staged.fail("claim_many", error=shared)
    receiver = Receiver(staged, breaker=None)
    with pytest.raises(Crowded) as refused:
        colour.process(receiver, Message("e-1"), must_not_run)
    batch = colour.batch(receiver, [Message("e-2"), Message("e-3")], must_not_run)
    for id, error in zip("123", [refused.value, *(outcome.error for outcome in batch)], strict=True):
        assert isinstance(error, Crowded)
        assert (error.key, error.retry_after) == (receiver.key_of(Message(f"e-{id}")), 3.0)
        assert str(error) == f"64 guests [key {error.key}]"
    assert (shared.key, str(shared)) == (None, "64 guests")


@pytest.mark.parametrize("verb", ["claim", "complete"])
def test_a_lost_reply_is_asked_for_again(staged: StagedStore, colour: Colour, verb: str) -> None:
    """A command whose answer got lost is sent again by the same owner, and nothing runs twice."""

    def lose_one() -> None:
        staged.after.clear()
        raise StoreUnavailable("the line broke")

    staged.after[verb] = lose_one
    handler = Counted("one")
    outcome = colour.process(Receiver(staged), EVENT, handler)
    assert (outcome.status, outcome.attempt, handler.runs) == ("executed", 1, 1)
    assert staged.calls.count(verb) == 2


def test_a_result_that_could_not_be_recorded_is_not_given(staged: StagedStore, colour: Colour) -> None:
    """The caller hears that the store failed, and a retry meets the claim instead of a second run."""
    receiver = Receiver(staged)
    staged.fail("complete", error=StoreUnavailable("gone"))
    with pytest.raises(StoreUnavailable, match="could not be recorded"):
        colour.process(receiver, EVENT, Counted())
    with pytest.raises(InProgress):
        colour.process(receiver, EVENT, must_not_run, policy=Policy(busy="reject"))


def test_a_failed_release_is_still_the_handlers_error(staged: StagedStore, colour: Colour) -> None:
    """When a forgotten error can't be recorded, the handler's own exception says it best."""
    staged.fail("complete", error=StoreUnavailable("gone"))
    with pytest.raises(ValueError, match="no"):
        colour.process(Receiver(staged), EVENT, Counted(ValueError("no")))


# Doubt


ONCE = Policy(on_crash="in_doubt")


@pytest.fixture
def doubtful(receiver: Receiver, clock: ManualClock, told: Told) -> str:
    """The key of EVENT, whose only attempt crashed in a receiver that never starts twice."""
    crash(receiver, EVENT, policy=ONCE)
    clock.advance(LONG * 3)
    with pytest.raises(InDoubt):
        receiver.process(EVENT, must_not_run, policy=ONCE)
    return key_in(told)


def test_at_most_once_waits_for_a_word(doubtful: str, receiver: Receiver, colour: Colour) -> None:
    """A crash of an attempt that may start once is never taken over, under no policy."""
    for policy in (ONCE, Policy()):
        with pytest.raises(InDoubt):
            colour.process(receiver, EVENT, must_not_run, policy=policy)


def test_a_result_that_the_store_cant_take_is_recorded_without_it(colour: Colour, clock: ManualClock) -> None:
    """The caller has it, and nothing runs again: a repeat hears why there is no result."""
    receiver = by_hand(Receiver(NarrowStore(clock=clock), clock=clock, monotonic=clock))
    assert colour.process(receiver, EVENT, Counted("x" * 5000)).value == "x" * 5000
    clock.advance(LONG * 10)
    with pytest.raises(ResultUnavailable, match="no room for it"):
        colour.process(receiver, EVENT, must_not_run)


@pytest.mark.parametrize("is_narrow", [False, True])
def test_a_remembered_error_may_be_too_long(colour: Colour, clock: ManualClock, is_narrow: bool) -> None:
    """Whoever met it has it whole; what is remembered is its type and the beginning of its message."""
    store, size = (NarrowStore(clock=clock), 5000) if is_narrow else (MemoryStore(clock=clock), 1 << 20)
    receiver = by_hand(Receiver(store, clock=clock, monotonic=clock, policy=Policy(remember=ValueError)))
    with pytest.raises(ValueError, match="x") as met:
        colour.process(receiver, EVENT, Counted(ValueError("x" * size)))
    with pytest.raises(ValueError, match="shortened") as remembered:
        colour.process(receiver, EVENT, must_not_run)
    assert [len(str(error.value)) for error in (met, remembered)] == [size, len("x" * 1000 + "… (shortened)")]


def test_a_store_that_is_slower_than_the_lease_is_not_asked_for_ever(
    colour: Colour, clock: ManualClock
) -> None:
    """What is never granted in time never runs: the caller is told why, and no doubt is left behind."""
    store = StagedStore(clock=clock)
    receiver = by_hand(Receiver(store, clock=clock, monotonic=clock, policy=ONCE.but(lease=LONG)))
    store.after["claim"] = lambda: clock.advance(LONG * 2)
    with pytest.raises(StoreUnavailable, match="longer lease="):
        colour.process(receiver, EVENT, must_not_run)
    store.recover()
    assert colour.process(receiver, EVENT, Counted("now")).attempt == 1


def test_doubt_outlasts_every_retention(
    doubtful: str, receiver: Receiver, colour: Colour, clock: ManualClock
) -> None:
    """What is in doubt is never forgotten by time or purged."""
    clock.advance(400 * DAY)
    assert receiver.purge() == 0
    with pytest.raises(InDoubt):
        colour.process(receiver, EVENT, must_not_run)


def test_a_person_says_that_it_completed(doubtful: str, receiver: Receiver, colour: Colour) -> None:
    """resolve(key, "completed", value): every repeat gets that value."""
    assert colour.resolve(receiver, doubtful, "completed", {"receipt": 7})
    assert colour.process(receiver, EVENT, must_not_run).value == {"receipt": 7}


def test_a_person_says_that_it_failed(doubtful: str, receiver: Receiver, colour: Colour) -> None:
    """resolve(key, "failed", error): every repeat gets that error."""
    assert colour.resolve(receiver, doubtful, "failed", CardDeclined(51, "ING"))
    with pytest.raises(CardDeclined) as declined:
        colour.process(receiver, EVENT, must_not_run, policy=Policy(remember=CardDeclined))
    assert declined.value.code == 51


def test_a_person_says_that_nothing_happened(doubtful: str, receiver: Receiver, colour: Colour) -> None:
    """resolve(key, "not_applied"): the next delivery runs, as the next attempt."""
    assert colour.resolve(receiver, doubtful, "not_applied")
    assert colour.process(receiver, EVENT, Counted("now")).attempt == 2


@pytest.mark.parametrize("swept", [False, True])
def test_what_is_settled_is_remembered_as_long_as_its_own_policy_says(
    receiver: Receiver, colour: Colour, clock: ManualClock, swept: bool
) -> None:
    """Whoever finds and settles a doubt may know a shorter policy; late duplicates still get the answer."""
    week = ONCE.but(keep="7d")
    crash(receiver, EVENT, policy=week)
    clock.advance(LONG * 3)
    if swept:
        assert colour.sweep(receiver).in_doubt == 1
    else:
        with pytest.raises(InDoubt):
            receiver.process(EVENT, must_not_run, policy=week)
    assert colour.resolve(receiver, receiver.key_of(EVENT), "completed", "re-77")
    clock.advance(6 * DAY)
    assert colour.process(receiver, EVENT, must_not_run, policy=week).value == "re-77"


@pytest.mark.parametrize("words", [("completed", 1), ("failed", ValueError()), ("not_applied",)])
def test_what_is_settled_stays_settled(
    doubtful: str, receiver: Receiver, colour: Colour, words: tuple[Any, ...]
) -> None:
    """A second word, the same or another, changes nothing and is answered with False."""
    assert colour.resolve(receiver, doubtful, *words)
    before = receiver.get(doubtful)
    assert not colour.resolve(receiver, doubtful, *words)
    assert not colour.resolve(receiver, doubtful, "completed", "another")
    assert receiver.get(doubtful) == before


def test_only_doubt_can_be_settled(receiver: Receiver, colour: Colour, told: Told) -> None:
    """A key that is unknown, running or finished has nothing to settle."""
    assert not colour.resolve(receiver, "nobody's", "completed")
    crash(receiver, EVENT)
    assert not colour.resolve(receiver, key_in(told), "completed")
    colour.process(receiver, Message("e-2"), Counted())
    assert not colour.resolve(receiver, key_in(told), "completed", "another")


@pytest.mark.parametrize("words", [("done",), ("failed", "no exception"), ("failed",), (None,)], ids=repr)
def test_a_settlement_has_three_words(
    doubtful: str, receiver: Receiver, colour: Colour, words: tuple[Any, ...]
) -> None:
    """An unknown word, or a failure without its exception, is refused and settles nothing."""
    with pytest.raises(UsageError):
        colour.resolve(receiver, doubtful, *words)
    record = receiver.get(doubtful)
    assert record is not None
    assert record.state is State.IN_DOUBT


def test_a_settlement_whose_value_cant_be_stored_is_refused(
    doubtful: str, receiver: Receiver, colour: Colour
) -> None:
    """A person who gives a value wants it replayed: one without a stored form is an error, and settles nothing."""
    with pytest.raises(EffectOnceError):
        colour.resolve(receiver, doubtful, "completed", object())
    record = receiver.get(doubtful)
    assert record is not None
    assert record.state is State.IN_DOUBT


RESOLUTIONS: dict[str, Callable[[], Resolution | None]] = {
    "completed": lambda: Resolution.completed("found"),
    "failed": lambda: Resolution.failed(CardDeclined(51, "ING")),
    "not applied": Resolution.not_applied,
    "unknown": lambda: None,
}


@pytest.mark.parametrize("found", RESOLUTIONS)
def test_a_prober_settles_by_itself(doubtful: str, receiver: Receiver, colour: Colour, found: str) -> None:
    """It is asked when a duplicate meets the doubt, with the record; the duplicate gets what follows from its word."""
    asked = []

    def prober(record: Any) -> Resolution | None:
        asked.append((record.key, record.state))
        return RESOLUTIONS[found]()

    policy = Policy(prober=prober, remember=CardDeclined)
    handler = Counted("ran")
    try:
        outcome = colour.process(receiver, EVENT, handler, policy=policy)
        answer: Any = outcome.value
    except Exception as error:
        answer = type(error)
    expected = {"completed": "found", "failed": CardDeclined, "not applied": "ran", "unknown": InDoubt}
    assert (answer, handler.runs) == (expected[found], found == "not applied")
    assert asked == [(doubtful, State.IN_DOUBT)]


@pytest.mark.parametrize(
    "word",
    [Resolution("complete", 1), Resolution.not_applied, "not_applied", True],
    ids=["slip", "method", "text", "yes"],
)
def test_a_prober_that_says_no_word_settles_nothing(
    doubtful: str,
    receiver: Receiver,
    colour: Colour,
    told: Told,
    word: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whatever is not one of the three words leaves the doubt as it is; the hooks and the log hear of it."""
    with pytest.raises(InDoubt):
        colour.process(receiver, EVENT, must_not_run, policy=Policy(prober=lambda _: word))
    assert any("the prober failed" in event.detail for event in told)
    assert f"the prober failed on key={doubtful!r}" in caplog.text


@pytest.mark.parametrize("others", ["completed", "not applied"])
@pytest.mark.parametrize("own", RESOLUTIONS)
def test_a_prober_that_others_overtake(
    doubtful: str, receiver: Receiver, colour: Colour, own: str, others: str
) -> None:
    """What somebody settled while the prober was asked is what counts: nobody is told of a doubt that is no more."""
    words = RESOLUTIONS[others]()
    assert words is not None

    def prober(_: Any) -> Resolution | None:
        receiver.resolve(doubtful, words.kind, words.value)
        return RESOLUTIONS[own]()

    handler = Counted("ran")
    outcome = colour.process(receiver, EVENT, handler, policy=Policy(prober=prober))
    assert (outcome.value, handler.runs) == (("found", 0) if others == "completed" else ("ran", 1))


def test_a_loop_may_have_an_async_prober(doubtful: str, receiver: Receiver) -> None:
    """On an event loop the prober may be a coroutine function."""
    import asyncio

    async def prober(_: Any) -> Resolution:
        return Resolution.completed("found")

    outcome = asyncio.run(receiver.aprocess(EVENT, must_not_run, policy=Policy(prober=prober)))
    assert outcome.value == "found"


def test_a_blocking_call_cant_await_its_prober(doubtful: str, receiver: Receiver) -> None:
    """A coroutine prober in a blocking call is an error of the tree, and the doubt stays."""

    async def prober(_: Any) -> Resolution:
        return Resolution.completed("found")

    with pytest.raises(EffectOnceError):
        receiver.process(EVENT, must_not_run, policy=Policy(prober=prober))
    with pytest.raises(InDoubt):
        receiver.process(EVENT, must_not_run)


# Sweeping


def test_a_sweep_redrives_what_was_abandoned(receiver: Receiver, colour: Colour, clock: ManualClock) -> None:
    """Each abandoned key is handed over once; its own claim takes over, and live attempts are left alone."""
    crash(receiver, EVENT)
    clock.advance(LONG * 3)
    crash(receiver, Message("live"))
    redriven = []

    def redrive(record: Any) -> None:
        redriven.append(record.key)
        assert receiver.process(EVENT, Counted("swept")).attempt == 2

    swept = colour.sweep(receiver, redrive)
    assert (swept.abandoned, swept.redriven, swept.failed, len(redriven)) == (1, 1, 0, 1)
    assert receiver.process(EVENT, must_not_run).value == "swept"
    assert colour.sweep(receiver, redrive).abandoned == 0


def test_a_sweep_without_redrive_only_counts(receiver: Receiver, colour: Colour, clock: ManualClock) -> None:
    """It says what it found and leaves it to the next delivery."""
    crash(receiver, EVENT)
    clock.advance(LONG * 3)
    swept = colour.sweep(receiver)
    assert (swept.abandoned, swept.redriven, swept.in_doubt) == (1, 0, 0)
    assert receiver.process(EVENT, Counted()).attempt == 2


def test_a_sweep_finds_doubt(receiver: Receiver, colour: Colour, clock: ManualClock, told: Told) -> None:
    """An abandoned attempt that may start once becomes IN_DOUBT without waiting for a duplicate."""
    crash(receiver, EVENT, policy=ONCE)
    clock.advance(LONG * 3)
    assert colour.sweep(receiver, must_not_run).in_doubt == 1
    record = receiver.get(told[0].key)
    assert record is not None
    assert record.state is State.IN_DOUBT


@pytest.mark.parametrize("found", RESOLUTIONS)
def test_a_sweep_asks_the_prober(
    receiver: Receiver, colour: Colour, clock: ManualClock, told: Told, found: str
) -> None:
    """Doubt, old and new, is settled where the prober knows, and left where it doesn't."""
    crash(receiver, EVENT, policy=ONCE)
    clock.advance(LONG * 3)
    swept = colour.sweep(receiver, policy=Policy(prober=lambda _: RESOLUTIONS[found]()))
    states = {"completed": "COMPLETED", "failed": "FAILED", "not applied": "ABSENT", "unknown": "IN_DOUBT"}
    record = receiver.get(told[0].key)
    assert record is not None
    assert record.state.name == states[found]
    assert (swept.in_doubt, swept.settled) == (1, found != "unknown")


@dataclass
class Transfer:
    """A result that is no plain data."""

    at: datetime


def test_a_sweeps_prober_says_the_type_of_what_it_found(
    receiver: Receiver, colour: Colour, clock: ManualClock
) -> None:
    """A sweep knows no function's return type; with the prober's word for it, repeats get what they expect."""
    found = Transfer(datetime(2026, 1, 31, tzinfo=UTC))

    @receiver.idempotent(key="id", policy=ONCE)
    def transfer(id: str) -> Transfer:
        raise Crash

    with pytest.raises(Crash):
        transfer("t-1")
    clock.advance(LONG * 3)
    untold, told = Resolution.completed(found), Resolution.completed(found, hint=Transfer)
    assert colour.sweep(receiver, policy=Policy(prober=lambda _: untold)).settled == 0
    assert colour.sweep(receiver, policy=Policy(prober=lambda _: told)).settled == 1
    assert transfer("t-1") == found


def test_one_bad_key_does_not_stop_a_sweep(receiver: Receiver, colour: Colour, clock: ManualClock) -> None:
    """What a re-drive raises is counted, and the others go on."""
    for number in range(3):
        crash(receiver, Message(f"e-{number}"))
    clock.advance(LONG * 3)

    def redrive(record: Any) -> None:
        if record.key.endswith("e-1"):
            raise ValueError("can't")

    swept = colour.sweep(receiver, redrive)
    assert (swept.abandoned, swept.redriven, swept.failed) == (3, 2, 1)


def test_two_sweepers_run_a_key_once(store: Store, clock: ManualClock) -> None:
    """Both may find the same record; one takes over, the other gets its answer."""
    receivers = [Receiver(store) for _ in range(2)]
    crash(receivers[0], EVENT)
    clock.advance(LONG * 3)
    both = threading.Barrier(2)
    handler = Counted("swept")

    def sweep(receiver: Receiver) -> Any:
        def redrive(_: Any) -> Any:
            both.wait(20)
            return receiver.process(EVENT, handler)

        return receiver.sweep(redrive)

    callers = [Caller(lambda r=receiver: sweep(r)) for receiver in receivers]
    assert [caller.answer().redriven for caller in callers] == [1, 1]
    assert handler.runs == 1


def test_a_sweep_never_claims_for_itself(clock: ManualClock) -> None:
    """A key that is released while the sweep looks at it stays free: nobody is sweeping's victim."""
    store = StagedStore(clock=clock)
    receiver = by_hand(Receiver(store, monotonic=clock))
    entered, leave = threading.Event(), threading.Event()

    def handler(_: Message) -> None:
        entered.set()
        leave.wait(20)
        raise ValueError("gave up late")

    slow = Caller(lambda: receiver.process(EVENT, handler, policy=ONCE))
    assert entered.wait(20)
    clock.advance(LONG * 3)

    def release() -> None:
        store.after.clear()
        leave.set()
        slow.join()

    store.after["scan"] = release
    swept = receiver.sweep(policy=ONCE)
    assert isinstance(slow.error, ValueError)
    assert swept.in_doubt == 0
    assert receiver.process(EVENT, Counted(), policy=ONCE.but(busy="reject")).status == "executed"


def test_live_attempts_do_not_hide_abandoned_ones(
    receiver: Receiver, colour: Colour, clock: ManualClock
) -> None:
    """However many attempts are running, sweeps come to the abandoned one behind them."""
    crash(receiver, Message("z"))
    clock.advance(LONG * 3)
    for name in "abc":
        crash(receiver, Message(name))
    assert sum(colour.sweep(receiver, limit=2).abandoned for _ in range(3)) >= 1


# Looking and letting go


def test_what_is_remembered_can_be_looked_at(receiver: Receiver, told: Told) -> None:
    """get() gives the record of a key by its text, or by the id of a claim; None for an unknown one."""
    assert receiver.get("nobody's") is None
    receiver.process(EVENT, Counted())
    record = receiver.get(key_in(told))
    assert record is not None
    assert (record.state, record.attempts) == (State.COMPLETED, 1)
    with receiver.claim("block"):
        pass
    assert receiver.get("block") is not None


def test_an_id_with_bars_is_found_again(receiver: Receiver) -> None:
    """The id given to claim() finds its record, whatever characters it has."""
    with receiver.claim("a|b|c|d"):
        pass
    assert receiver.get("a|b|c|d") is not None


def test_purge_forgets_what_has_expired(receiver: Receiver, clock: ManualClock, told: Told) -> None:
    """It says how many records are gone, tells it, and touches nothing that is still remembered."""
    for number in range(5):
        receiver.process(Message(f"old-{number}"), Counted())
    clock.advance(DAY + 200)
    receiver.process(EVENT, Counted())
    gone = sum(receiver.purge() for _ in range(3))
    assert gone <= 5
    assert receiver.get(receiver.key_of(Message("old-0"))) is None or gone < 5
    assert told.kinds().count("purged") == (1 if gone else 0)
    assert receiver.process(EVENT, must_not_run).replayed


def test_stats_count_what_happened(receiver: Receiver, colour: Colour) -> None:
    """stats() has the counts and the share of duplicates."""
    for _ in range(4):
        colour.process(receiver, EVENT, Counted())
    figures = receiver.stats().since_start
    assert figures.counts["completed"] == 1
    assert figures.counts["replayed"] == 3
    assert (figures.deliveries, figures.duplicate_rate) == (4, 0.75)


def test_a_closed_receiver_runs_nothing(store: Store, colour: Colour) -> None:
    """After close() every call is a store error; closing twice is fine."""
    receiver = Receiver(store)
    receiver.close()
    receiver.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        colour.process(receiver, EVENT, must_not_run)


def test_a_receiver_is_a_context(tmp_path: Any) -> None:
    """``with Receiver(...)`` closes at its end, and what was done is there for the next one."""
    url = f"sqlite:///{tmp_path}/effects.db"
    with Receiver(url) as first:
        first.process(EVENT, Counted("kept"))
    with Receiver(url) as second:
        assert second.process(EVENT, must_not_run).value == "kept"


def test_a_receiver_that_closes_takes_nothing_new(tmp_path: Path) -> None:
    """What runs is brought to its end, with all that it calls itself; whoever comes meanwhile is turned away."""
    url = f"sqlite:///{tmp_path}/effects.db"
    receiver, began, proceed = Receiver(url), threading.Event(), threading.Event()

    def handler(_: Message) -> Any:
        began.set()
        assert proceed.wait(20)
        return receiver.process(Message("nested"), Counted("inside")).value

    def is_turned_away() -> bool:
        try:
            receiver.process(Message(keys.uuid7()), Counted())
        except StoreClosed:
            return True
        return False

    call = Caller(lambda: receiver.process(EVENT, handler))
    assert began.wait(20)
    closing = Caller(lambda: receiver.close(drain=20))
    wait_until(is_turned_away)
    proceed.set()
    assert call.answer().value == "inside"
    closing.answer()
    with Receiver(url) as second:
        assert second.process(EVENT, must_not_run).value == "inside"
        assert second.process(Message("nested"), must_not_run).value == "inside"


def test_closing_on_a_loop_waits_for_what_runs(tmp_path: Path) -> None:
    """``async with Receiver(...)`` and ``aclose`` let a running handler end and be recorded, as ``close`` does."""
    url = f"sqlite:///{tmp_path}/effects.db"

    async def closed_in_the_middle() -> None:
        began, proceed = asyncio.Event(), asyncio.Event()

        async def slow(_: Message) -> str:
            began.set()
            await proceed.wait()
            return "kept"

        async with Receiver(url) as first:
            running = asyncio.create_task(first.aprocess(EVENT, slow))
            await began.wait()
            asyncio.get_running_loop().call_later(0.02, proceed.set)
        assert (await running).value == "kept"

    asyncio.run(closed_in_the_middle())
    with Receiver(url) as second:
        assert second.process(EVENT, must_not_run).value == "kept"


def test_a_task_that_outlives_its_handler_closes_as_anybody_does(tmp_path: Path) -> None:
    """What a handler has started is in that handler's context for good: only while it runs is that inside of it."""
    url = f"sqlite:///{tmp_path}/effects.db"

    async def closed_by_a_task() -> None:
        began, proceed, receiver = asyncio.Event(), asyncio.Event(), Receiver(url)

        async def close_when_it_runs() -> None:
            await began.wait()
            asyncio.get_running_loop().call_later(0.02, proceed.set)
            await receiver.aclose()

        async def start(_: Message) -> None:
            started.append(asyncio.create_task(close_when_it_runs()))

        async def slow(_: Message) -> str:
            began.set()
            await proceed.wait()
            return "kept"

        started: list[asyncio.Task[None]] = []
        await receiver.aprocess(Message("e-0"), start)
        assert (await receiver.aprocess(EVENT, slow)).value == "kept"
        await started[0]

    asyncio.run(closed_by_a_task())
    with Receiver(url) as second:
        assert second.process(EVENT, must_not_run).value == "kept"


def test_closing_on_a_loop_does_not_wait_for_ever() -> None:
    """A handler that goes on for longer than ``drain``, or that closes its own receiver, does not stop ``aclose``."""

    async def closed_inside() -> None:
        receiver = Receiver("memory://")

        async def closing(_: Message) -> None:
            await receiver.aclose(drain="1h")

        with pytest.raises(StoreUnavailable, match="closed"):
            await receiver.aprocess(EVENT, closing)

    async def closed_too_early(drain: float) -> None:
        receiver = Receiver("memory://")
        began = asyncio.Event()

        async def endless(_: Message) -> None:
            began.set()
            await asyncio.Event().wait()

        running = asyncio.create_task(receiver.aprocess(EVENT, endless))
        await began.wait()
        await receiver.aclose(drain=drain)
        running.cancel()

    asyncio.run(closed_inside())
    for drain in (0.01, 0):
        asyncio.run(closed_too_early(drain))


def test_a_path_is_a_sqlite_file(tmp_path: Path) -> None:
    """A receiver may be given the file itself instead of its URL."""
    path = tmp_path / "effects.db"
    with Receiver(path) as first:
        first.process(EVENT, Counted("kept"))
    with Receiver(f"sqlite:///{path}") as second:
        assert second.process(EVENT, must_not_run).value == "kept"


def test_receivers_share_a_store(clock: ManualClock) -> None:
    """Two receivers on one Store object know each other's records."""
    store = MemoryStore(clock=clock)
    Receiver(store).process(EVENT, Counted("one"))
    assert Receiver(store).process(EVENT, must_not_run).value == "one"
