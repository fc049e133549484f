"""What a broker is told: the table of verdicts, stable ids, and the watchdog, without any broker."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effectonce import InDoubt, InProgress, KeyReused, LeaseLost, Message, NotApplied, Outcome, Policy
from effectonce._messages import Status
from effectonce.errors import (
    AttemptsExhausted,
    LateArrival,
    RememberedError,
    ResultUnavailable,
    StoreMismatch,
    StoreUnavailable,
    Unencodable,
)
from effectonce.messaging._delivery import (
    FUTURE_SECONDS,
    LONGEST_DETAIL,
    TABLE,
    Ack,
    DeadLetter,
    Delivery,
    Held,
    Intake,
    Nack,
    Pace,
    Watchdog,
    candidates,
    decide,
    stable_id,
    to_extend,
)
from effectonce.messaging._letters import labels

PACE = Pace(first=1.0, longest=60.0)
POLICY = Policy(remember=(PermissionError,))
NOW = 1_000_000.0


def told(status: Status, error: BaseException | None = None, **more: Any) -> Any:
    return decide(Outcome(status, error=error, **more), POLICY, PACE)


def delivery(body: Any = b"1", id: object = "e-1", **more: Any) -> Delivery:
    return Delivery(None, "orders", (("the header id", id),), body, len(body), **more)


# The table


def test_the_table_has_every_status() -> None:
    """A new status can't be forgotten."""
    assert set(TABLE) == set(get_args(Status))


def test_what_is_done_is_acknowledged_with_its_value() -> None:
    """Also when the stored result can't be shown any more: the effect happened."""
    assert told("executed", value=7) == Ack(7)
    assert told("replayed", value=7, replayed=True) == Ack(7, replayed=True)
    hidden = ResultUnavailable()
    assert told("replayed", hidden, replayed=True) == Ack(None, replayed=True, error=hidden)


def test_an_attempt_that_runs_elsewhere_is_never_acknowledged() -> None:
    """It is delivered again, soon at first, and when the other's lease is over; also when the policy says "skip"."""
    busy = Outcome("in_progress", error=InProgress(retry_after=12.0))
    assert [decide(busy, POLICY, PACE, times).delay for times in (1, 2, 3, 4, 5, 9)] == [1, 2, 4, 8, 12, 12]
    busy = Outcome("in_progress", error=InProgress(retry_after=900.0))
    assert decide(busy, POLICY, PACE, 99) == Nack(60.0, "in_progress")
    assert told("in_progress", InProgress(retry_after=0.0)).delay > 0
    assert isinstance(told("in_progress", None), Nack)


@pytest.mark.parametrize(
    ("attempt", "delay"), [(0, 1.0), (1, 1.0), (2, 2.0), (5, 16.0), (7, 60.0), (5000, 60.0)]
)
def test_a_failure_waits_longer_with_each_attempt(attempt: int, delay: float) -> None:
    """Attempts, not deliveries: what the store did not answer is none."""
    assert told("failed", ValueError(), attempt=attempt) == Nack(delay, "failed")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (PermissionError("declined"), "remembered_error"),
        (RememberedError("declined"), "remembered_error"),
        (AttemptsExhausted("3 attempts"), "attempts_exhausted"),
    ],
    ids=["rebuilt", "not-rebuilt", "exhausted"],
)
def test_what_stays_failed_is_put_aside(error: Exception, reason: str) -> None:
    """Another delivery would get the same answer."""
    letter = told("failed", error, attempt=3, replayed=True)
    assert (letter.reason, letter.attempts) == (reason, 3)


def test_a_failure_shared_inside_a_batch_is_not_taken_for_a_remembered_one() -> None:
    """A repeat in the same batch joins its first's failure, as a replay; its claim was released all the same."""
    assert told("failed", ValueError(), attempt=1, replayed=True) == Nack(1.0, "failed")


def test_the_handlers_own_word_goes_before_the_policys_list() -> None:
    """``NotApplied`` means that a retry may run, also where its type is in ``remember``."""
    assert isinstance(
        decide(Outcome("failed", error=NotApplied()), Policy(remember=(Exception,)), PACE), Nack
    )


def test_a_message_that_can_not_be_named_is_put_aside_but_a_handlers_error_is_not() -> None:
    """The same type of error before an attempt and in it: the message's fault, and the handler's."""
    error = Unencodable("$", object, "no form")
    assert told("failed", error).reason == "unusable"
    assert isinstance(told("failed", error, attempt=1), Nack)


def test_refusals() -> None:
    """A reused id and a late message are put aside; a lost lease, a doubt and a silent store come again."""
    assert told("mismatch", KeyReused("other")).reason == "mismatch"
    assert told("late", LateArrival("old")).reason == "late"
    assert told("late", None) == Ack(), "the policy's own dead_letter has it"
    assert told("failed", LeaseLost(), attempt=1) == Nack(1.0, "lease_lost")
    assert told("failed", Held()).excused
    assert told("in_doubt", InDoubt()) == Nack(60.0, "in_doubt")
    assert told("store_error", StoreUnavailable(retry_after=3.0)) == Nack(3.0, "store_error", excused=True)
    assert told("store_error", StoreMismatch()) == Nack(60.0, "store_error", excused=True)


@given(st.sampled_from(sorted(TABLE)), st.integers(0, 10**6), st.floats(0, 10**9))
def test_pauses_are_bounded(status: Any, attempt: int, asked: float) -> None:
    """Nobody's wish makes a message come at once for ever, or never."""
    for error in (InProgress(retry_after=asked), StoreUnavailable(retry_after=asked), ValueError()):
        verdict = told(status, error, attempt=attempt)
        if isinstance(verdict, Nack):
            assert 0 < verdict.delay <= PACE.longest


# What comes in

INTAKE = Intake(json.loads, max_body=10)


def test_a_delivery_becomes_a_message() -> None:
    """Id, payload, timestamp and source are where they belong."""
    assert INTAKE.admit(delivery(b'{"a": 1}', timestamp=NOW), NOW) == Message("e-1", {"a": 1}, NOW, "orders")


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (delivery(b"{"), "undecodable"),
        (delivery(b"[" * 9), "undecodable"),
        (delivery(b"\xff"), "undecodable"),
        (delivery(b'"12345678901"'), "too_large"),
        (delivery(timestamp=NOW + FUTURE_SECONDS + 1), "future"),
        (delivery(timestamp=float("inf")), "future"),
        (delivery(timestamp=float("nan")), "unusable"),
        (delivery(id=None), "no_id"),
        (delivery(id=""), "invalid_id"),
        (delivery(id="x" * 256), "invalid_id"),
        (delivery(id="line\nbreak"), "invalid_id"),
        (delivery(id=b"\xff"), "invalid_id"),
        (delivery(id=["e-1"]), "invalid_id"),
        (delivery(id=7), "invalid_id"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input_is_a_dead_letter_with_its_reason(bad: Delivery, reason: str) -> None:
    """The message is at fault, and the consumer goes on."""
    letter = INTAKE.admit(bad, NOW)
    assert isinstance(letter, DeadLetter)
    assert letter.reason == reason
    assert letter.detail


@given(
    st.binary(max_size=40), st.one_of(st.none(), st.text(), st.binary(), st.integers(), st.lists(st.text()))
)
def test_nothing_that_comes_in_raises(body: bytes, id: object) -> None:
    """Whatever bytes and headers a sender makes up, there is a message or a reason."""
    admitted = INTAKE.admit(delivery(body, id), NOW)
    assert isinstance(admitted, Message | DeadLetter)
    if isinstance(admitted, DeadLetter):
        assert all(text.isprintable() for text in labels(admitted, delivery(body, id)).values())


def test_ids_are_looked_for_in_order() -> None:
    """The first that is there counts; one of the wrong type is refused rather than passed over."""
    assert stable_id([("a", None), ("b", "two"), ("c", "three")]) == "two"
    assert stable_id([("a", b"one"), ("b", "two")]) == "one"
    refused = stable_id([("a", 1), ("b", "two")])
    assert isinstance(refused, DeadLetter)
    assert refused.reason == "invalid_id"


def test_a_place_that_the_user_names_is_the_only_one() -> None:
    """A header's name or a function; a function that fails is the message's fault."""
    headers = {"order": "o-1"}
    usual = (("the header id", "usual"),)
    assert stable_id(candidates(None, headers, headers.get, usual)) == "usual"
    assert stable_id(candidates("order", headers, headers.get, usual)) == "o-1"
    assert stable_id(candidates(lambda each: each["order"], headers, headers.get, usual)) == "o-1"
    for wanted in ("missing", lambda each: each["missing"]):
        assert isinstance(stable_id(candidates(wanted, headers, headers.get, usual)), DeadLetter)


def test_labels_say_reason_attempts_and_when_it_was_first_seen() -> None:
    """Short, printable, and without what is not known."""
    letter = DeadLetter("mismatch", "x" * LONGEST_DETAIL, attempts=2)
    found = labels(letter, delivery(timestamp=0.0, times=3))
    assert found["dead-reason"] == "mismatch"
    assert (found["dead-attempts"], found["dead-deliveries"]) == ("2", "3")
    assert found["dead-first-seen"] == "1970-01-01T00:00:00.000+00:00"
    assert not {"dead-first-seen", "dead-consumer"} & set(labels(letter, delivery()))
    assert labels(letter._replace(consumer="billing"), delivery())["dead-consumer"] == "billing"
    long = told("mismatch", KeyReused("x" * 10_000))
    assert len(long.detail) <= LONGEST_DETAIL


# Extending


def test_deadlines_are_extended_unless_the_lease_was_lost() -> None:
    """What waits, runs or is a duplicate is extended; what another has taken over is let go."""
    waits, runs, lost = (delivery(id=name) for name in ("waits", "runs", "lost"))
    under_way = [("waits", waits), ("runs", runs), ("lost", lost), ("runs", waits)]
    assert to_extend(under_way, {"runs", "lost"}, {"runs", "else"}) == [waits, runs, waits]


# The watchdog

AGAIN = delivery(times=2)
NEW, KNOWN = Outcome("executed", attempt=1), Outcome("replayed", attempt=1, replayed=True)


def hear(
    dog: Watchdog, outcome: Outcome[Any], times: int, now: float = 0.0, heard: Delivery = AGAIN
) -> list[str]:
    said = [dog.hear(heard, outcome, decide(outcome, POLICY, PACE), now) for _ in range(times)]
    return [text for text in said if text]


def test_repetitions_that_the_store_never_saw_are_said_loudly_once() -> None:
    """The broker knows it delivers again; the store does not know the id: so the id has changed."""
    dog = Watchdog(threshold=10, window_seconds=60)
    assert hear(dog, NEW, 9) == []
    (said,) = hear(dog, NEW, 50)
    assert "orders" in said
    assert hear(dog, NEW, 50, now=59) == []
    assert len(hear(dog, NEW, 50, now=61)) == 1, "once in each window"


def test_known_repetitions_and_first_deliveries_are_no_sign() -> None:
    """A stable id is known when it comes again; a few that died before they were claimed don't matter."""
    dog = Watchdog(threshold=10)
    assert hear(dog, NEW, 1000, heard=delivery(times=1)) == []
    assert hear(dog, KNOWN, 20) == []
    assert hear(dog, NEW, 100) == []
    assert hear(dog, Outcome("failed", error=ValueError(), attempt=2), 100) == []


def test_what_was_given_back_unseen_is_excused() -> None:
    """After the store was away, every redelivery is new to it, and that is no sign."""
    dog = Watchdog(threshold=10)
    hear(dog, Outcome("store_error", error=StoreUnavailable()), 100, heard=delivery(times=1))
    assert hear(dog, NEW, 100) == []
    assert len(hear(dog, NEW, 10)) == 1
