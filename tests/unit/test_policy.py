"""Policies: the words they know, how durations are written, and what presets say."""

from __future__ import annotations

import asyncio
from dataclasses import FrozenInstanceError
from datetime import timedelta
from typing import Any

import pytest

from effectonce import Policy, Receiver
from effectonce.errors import EffectOnceError, UsageError
from effectonce.policy import Resolution, seconds

HOUR, DAY = 3600.0, 86400.0


# Durations


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (90, 90.0), (0.5, 0.5), (timedelta(minutes=2), 120.0), ("90s", 90.0), ("250ms", 0.25), ("2m", 120.0),
        ("24h", DAY), ("7d", 7 * DAY), ("2w", 14 * DAY), ("1h30m", 5400.0), ("1.5h", 5400.0), (" 1 h  5 s ", 3605.0),
    ],
)  # fmt: skip
def test_durations(written: Any, meant: float) -> None:
    """Seconds, a timedelta, or text with units."""
    assert seconds(written) == pytest.approx(meant)
    assert Policy(keep=written).keep == pytest.approx(meant)


@pytest.mark.parametrize(
    "written",
    ["", "90", "h", "5 years", "-5s", "1h,5m", "1e3s", "24H", "s90", "1h 5", None, True, [], b"90s",
     0, -1, 0.0, float("nan"), float("inf"), -float("inf"), "0s", timedelta(0), timedelta(-1), "11000d", 1e12],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize("word", ["keep", "lease"])
def test_what_is_no_duration_is_refused(word: str, written: Any) -> None:
    """Nothing is guessed; the error names the word and what was given."""
    with pytest.raises(UsageError, match=word):
        Policy(**{word: written})


# Words


def test_defaults() -> None:
    """A day of memory, two minutes of lease, duplicates wait, errors are forgotten, results are stored."""
    policy = Policy()
    assert (policy.keep, policy.lease, policy.busy, policy.late, policy.on_crash) == (
        DAY, 120.0, "wait", "reject", "retry",
    )  # fmt: skip
    assert (policy.remember, policy.in_doubt, policy.max_attempts) == ((), (), None)
    assert (policy.store_result, policy.local_cache, policy.prober, policy.dead_letter) == (
        True,
        0,
        None,
        None,
    )


def test_a_waiter_outlasts_a_crash() -> None:
    """By default it waits for the lease and a little more, so that it is the one who takes over."""
    for lease in (0.1, 120.0, DAY):
        assert Policy(lease=lease).wait > lease
    assert Policy(wait=5).wait == 5.0
    assert Policy(wait=0).wait == Policy(wait="0s").wait == Policy(wait=timedelta(0)).wait == 0.0


UNKNOWN = [
    ("busy", "queue"), ("busy", None), ("busy", []), ("on_crash", "explode"), ("on_crash", True), ("late", "drop"),
    ("late", ""), ("remember", [ValueError]), ("remember", ("ValueError",)), ("remember", (int,)),
    ("remember", ValueError()), ("in_doubt", "TimeoutError"), ("in_doubt", None), ("max_attempts", 0),
    ("max_attempts", -1), ("max_attempts", 1.0), ("max_attempts", True), ("max_attempts", "3"),
    ("store_result", 1), ("store_result", "no"), ("store_result", None), ("max_result", -1), ("max_result", 1.5),
    ("local_cache", -1), ("local_cache", True), ("local_cache", None), ("prober", "ask"), ("dead_letter", 5),
    ("wait", -1), ("wait", "soon"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), UNKNOWN, ids=repr)
def test_an_unknown_word_is_refused(name: str, value: Any) -> None:
    """The error names the setting and what was given."""
    with pytest.raises(UsageError) as refused:
        Policy(**{name: value})
    assert name in str(refused.value)
    assert isinstance(refused.value, EffectOnceError)
    assert isinstance(refused.value, ValueError)


@pytest.mark.parametrize("word", ["remember", "in_doubt"])
@pytest.mark.parametrize(
    "kind", [KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError, BaseException]
)
def test_what_stops_a_handler_from_outside_is_no_answer(word: str, kind: type[BaseException]) -> None:
    """Neither is ever recorded, so nobody may count on it; the error says what does keep such a key from a retry."""
    with pytest.raises(UsageError, match=rf'{word}= lists {kind.__name__}.*on_crash="in_doubt"'):
        Policy(**{word: (ValueError, kind)})


@pytest.mark.parametrize(("name", "words"), [("busy", "wait, reject, join, skip"), ("on_crash", "retry, in_doubt"),
                                             ("late", "reject, process, dead_letter")])  # fmt: skip
def test_an_unknown_word_is_answered_with_the_known_ones(name: str, words: str) -> None:
    """One reads what could have been written."""
    with pytest.raises(UsageError, match=words):
        Policy(**{name: "huh"})  # type: ignore[arg-type]


def test_dead_letters_need_a_place() -> None:
    """late="dead_letter" without a callback would lose messages."""
    with pytest.raises(UsageError, match="dead_letter="):
        Policy(late="dead_letter")
    Policy(late="dead_letter", dead_letter=print)


def test_words_may_be_written_with_a_hyphen() -> None:
    """As people write them; what they mean is the same, in every way."""
    with pytest.raises(UsageError, match="dead_letter="):
        Policy(late="dead-letter")  # type: ignore[arg-type]
    hyphens: dict[str, Any] = {"late": "dead-letter", "on_crash": "in-doubt", "fallback": "cached-response"}
    policy = Policy(dead_letter=print, **hyphens)
    meant = Policy(dead_letter=print, late="dead_letter", on_crash="in_doubt", fallback="cached_response")
    assert (policy, policy.terms, policy.cached) == (meant, meant.terms, meant.cached)


def test_one_exception_type_needs_no_tuple() -> None:
    """A single type stands for itself."""
    policy = Policy(remember=ValueError, in_doubt=TimeoutError)  # type: ignore[arg-type]
    assert (policy.remember, policy.in_doubt) == ((ValueError,), (TimeoutError,))


@pytest.mark.parametrize("where", ["receiver", "process", "decorator", "claim"])
def test_only_a_policy_is_a_policy(where: str) -> None:
    """A dictionary or a word in its place is refused, wherever it is given."""
    from effectonce import Message

    receiver = Receiver("memory://")
    wrong: Any = {"keep": "24h"}
    calls = {
        "receiver": lambda: Receiver("memory://", policy=wrong),
        "process": lambda: receiver.process(Message("m"), print, policy=wrong),
        "decorator": lambda: receiver.idempotent(policy=wrong)(lambda n: n),
        "claim": lambda: receiver.claim("k", policy=wrong),
    }
    with pytest.raises(UsageError, match="not a Policy"):
        calls[where]()


# Copies


def test_a_policy_does_not_change() -> None:
    """It may be shared by many operations."""
    with pytest.raises(FrozenInstanceError):
        Policy().keep = 5.0  # type: ignore[misc]


def test_a_changed_copy() -> None:
    """but() changes some words of a copy, checks them, and leaves the rest and the original alone."""
    policy = Policy(keep="7d", busy="reject", remember=(ValueError,))
    changed = policy.but(lease="1m", busy="join")
    assert (changed.keep, changed.lease, changed.busy, changed.remember) == (
        7 * DAY,
        60.0,
        "join",
        (ValueError,),
    )
    assert (policy.lease, policy.busy) == (120.0, "reject")
    with pytest.raises(UsageError, match="busy"):
        policy.but(busy="huh")


def test_a_derived_wait_follows_the_lease() -> None:
    """Unless it was given, the wait is worked out anew."""
    assert Policy().but(lease="1h").wait > HOUR
    assert Policy(wait=5).but(lease="1h").wait == 5.0


def test_policies_are_compared_by_their_words() -> None:
    """Equal words are equal policies, and they can be keys."""
    assert Policy(keep="24h") == Policy(keep=timedelta(days=1)) == Policy().but()
    assert Policy(keep="24h") != Policy(keep="25h")
    assert len({Policy(), Policy(), Policy(busy="skip")}) == 2


# Presets


@pytest.mark.parametrize(
    ("preset", "shortest", "longest", "busy"),
    [
        ("payments", 24 * HOUR, 48 * HOUR, "wait"),
        ("notifications", HOUR, 4 * HOUR, "skip"),
        ("api", 24 * HOUR, 24 * HOUR, "reject"),
        ("async_messages", 7 * DAY, 7 * DAY, "reject"),
    ],
)
def test_presets(preset: str, shortest: float, longest: float, busy: str) -> None:
    """Each has the memory that its use needs, and any word of it may be changed."""
    policy = getattr(Policy, preset)()
    assert shortest <= policy.keep <= longest
    assert policy.busy == busy
    changed = getattr(Policy, preset)(keep="36h", max_attempts=3)
    assert (changed.keep, changed.max_attempts, changed.busy) == (36 * HOUR, 3, busy)


# Resolutions


def test_resolutions_have_three_kinds() -> None:
    """What a prober may answer."""
    error = ValueError()
    assert Resolution.completed(5) == ("completed", 5, Any)
    assert Resolution.completed(5, hint=int) == ("completed", 5, int)
    assert Resolution.failed(error) == ("failed", error, Any)
    assert Resolution.not_applied() == ("not_applied", None, Any)
