"""The client's rules: which answers end the sending, and how long to wait after the others."""

from __future__ import annotations

import json
import ssl
from email.utils import formatdate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effectonce.errors import UsageError
from effectonce.http._retrying import (
    PASSING,
    ROOM_SECONDS,
    Answer,
    Moment,
    Rules,
    at_most,
    is_caused_by,
    retry_after,
)

RULES = Rules()
NOW = 1_790_000_000.0
EARLY = Moment(number=1, left=50.0, chance=1.0, now=NOW)


def answer(status: int, document: Any = None, **headers: str) -> Answer:
    """An answer; header names with _ for -. A document makes it application/problem+json."""
    lines = {name.replace("_", "-"): value for name, value in headers.items()}
    if document is None:
        return Answer(status, lines)
    return Answer(
        status, {"content-type": "application/problem+json", **lines}, json.dumps(document).encode()
    )


# What an answer says


@pytest.mark.parametrize(
    "status", [200, 201, 204, 301, 307, 400, 401, 403, 404, 409, 410, 413, 422, 501, 505]
)
def test_most_answers_end_it(status: int) -> None:
    """Success, redirections and refusals: asking again would change nothing. 409 alone is one of them."""
    assert RULES.word_on(answer(status)) == "end"


@pytest.mark.parametrize("status", sorted(PASSING))
def test_passing_trouble_is_sent_again(status: int) -> None:
    """500 too: with a key it can't run a second time behind anybody's back."""
    assert RULES.word_on(answer(status)) == "again"


@pytest.mark.parametrize("status", [200, 409, 500, 503])
@pytest.mark.parametrize("header", ["x-idempotency-replayed", "idempotent-replayed"])
def test_a_replay_ends_it_whatever_it_says(status: int, header: str) -> None:
    """A remembered failure is the answer for as long as it is remembered."""
    replay = Answer(status, {header: "true", "retry-after": "1"})
    assert RULES.word_on(replay) == "end"
    assert RULES.settles(replay)


@pytest.mark.parametrize("status", [202, 409, 425])
def test_in_progress_is_polled_under_any_status(status: int) -> None:
    """Servers may be set to say it with 409, 425 or 202."""
    assert RULES.word_on(answer(status, {"code": "in-progress", "retryable": True})) == "poll"


@pytest.mark.parametrize(
    "code", ["outcome-unknown", "response-not-replayable", "attempts-exhausted", "other"]
)
def test_any_other_409_with_a_code_ends_it(code: str) -> None:
    """Also with Retry-After, and without a word on retryable."""
    assert RULES.word_on(answer(409, {"code": code}, retry_after="1")) == "end"


def test_a_409_without_a_code_is_sent_again_if_it_names_a_time() -> None:
    """That is how others say that the first try still runs."""
    assert RULES.word_on(answer(409, retry_after="1")) == "again"


def test_a_server_that_says_not_retryable_is_believed() -> None:
    """Under every status; who says retryable without a known status is not."""
    assert RULES.word_on(answer(503, {"code": "gone-for-good", "retryable": False})) == "end"
    assert RULES.word_on(answer(400, {"code": "key-invalid", "retryable": True})) == "end"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'{"code": 5}', b'{"retryable": "no"}', b"\xff", b"[" * 100_000]
)
def test_a_document_that_says_nothing_is_no_document(body: bytes) -> None:
    """Then the status alone counts."""
    headers = {"content-type": "application/problem+json"}
    assert RULES.word_on(Answer(503, headers, body)) == "again"
    assert RULES.word_on(Answer(409, headers, body)) == "end"


def test_the_body_of_a_success_is_not_looked_at() -> None:
    """An order whose code is in-progress is an order."""
    assert RULES.word_on(answer(200, {"code": "in-progress"})) == "end"
    assert RULES.word_on(answer(201, {"code": "in-progress"})) == "end"


def test_what_settles_a_request() -> None:
    """An answer that says what became of it. The others leave a named request in doubt."""
    assert all(RULES.settles(answer(status)) for status in (200, 204, 400, 404, 409, 422))
    assert RULES.settles(answer(409, {"code": "response-not-replayable"}))
    assert not any(RULES.settles(answer(status)) for status in (401, 407, 408, 429, 500, 501, 503))
    assert not RULES.settles(answer(409, {"code": "outcome-unknown"}))
    assert not RULES.settles(answer(409, {"code": "in-progress"}))
    assert not RULES.settles(answer(307, location="/elsewhere"))


def test_a_request_that_arrived_cut_short_is_sent_again() -> None:
    """A server that got only a part of it has done nothing, and says so with a 400; that settles nothing."""
    cut = answer(400, {"code": "request-incomplete", "retryable": True})
    assert RULES.word_on(cut) == "again"
    assert not RULES.settles(cut)


@pytest.mark.parametrize("status", [102, 103])
def test_what_only_announces_an_answer_is_none(status: int) -> None:
    """Python's http.client hands it on as if it were; what became of the request is not known by it."""
    assert RULES.word_on(answer(status)) == "again"
    assert not RULES.settles(answer(status))


# How long to wait


def test_the_wait_doubles_up_to_its_longest() -> None:
    """0.25 s, 0.5 s, … 10 s at most, of which chance takes a part."""
    most = [RULES.wait_after_error(EARLY._replace(number=number)) for number in (1, 2, 3, 6, 7, 5000)]
    assert most == [0.25, 0.5, 1.0, 8.0, 10.0, 10.0]
    assert RULES.wait_after_error(EARLY._replace(chance=0.5)) == 0.125
    assert RULES.wait_after_error(EARLY._replace(chance=0.0)) == 0.0


def test_retry_after_is_waited_for_and_chance_comes_on_top() -> None:
    """Nobody comes sooner than asked, and not all come at once."""
    asked = answer(503, retry_after="7")
    assert RULES.wait_after(asked, EARLY._replace(chance=0.0)) == 7.0
    assert RULES.wait_after(asked, EARLY._replace(chance=1.0)) == 7.25


def test_a_first_try_that_runs_is_asked_for_soon() -> None:
    """Its Retry-After is the end of a lease, when the answer will be there at the latest."""
    for asked, least in (("100", 2.0), ("1", 1.0)):
        running = answer(409, {"code": "in-progress"}, retry_after=asked)
        assert RULES.wait_after(running, EARLY._replace(chance=0.0)) == least
        assert RULES.wait_after(running, EARLY._replace(chance=1.0, number=9)) == least + 2.0


def test_no_wait_that_goes_beyond_the_budget() -> None:
    """What asks for more time than there is, is the answer."""
    late = EARLY._replace(left=5.0)
    assert RULES.wait_after(answer(503, retry_after="5"), late) is None
    assert RULES.wait_after(answer(503, retry_after="4"), late) == pytest.approx(4.25)
    assert RULES.wait_after(answer(503, retry_after="3600"), EARLY) is None
    assert RULES.wait_after_error(late._replace(left=ROOM_SECONDS / 2)) is None
    assert RULES.wait_after_error(late._replace(left=-3.0)) is None


@given(
    st.integers(1, 10_000),
    st.floats(-10, 100),
    st.floats(0, 1),
    st.sampled_from([answer(503), answer(503, retry_after="3"), answer(409, {"code": "in-progress"})]),
)
def test_every_wait_leaves_room_for_a_try(number: int, left: float, chance: float, met: Answer) -> None:
    """Whatever comes together, a wait is not negative and ends within the budget."""
    moment = Moment(number, left, chance, NOW)
    for wait in (RULES.wait_after(met, moment), RULES.wait_after_error(moment)):
        assert wait is None or 0.0 <= wait <= left - ROOM_SECONDS + 1e-9


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0.0),
        ("120", 120.0),
        (" 5 ", 5.0),
        ("1.5", 1.5),
        ("9" * 400, 1e9),
        (formatdate(NOW + 30, usegmt=True), 30.0),
        (formatdate(NOW - 30, usegmt=True), 0.0),
        ("Sun, 06 Nov 1994 08:49:37", 0.0),
        ("", 0.0),
        ("soon", 0.0),
        ("-5", 0.0),
        ("٣", 0.0),
        ("Fri, 99 Foo 99999 99:99:99 GMT", 0.0),
    ],
)
def test_retry_after_is_seconds_or_a_date(text: str, expected: float) -> None:
    """What can't be understood asks for nothing."""
    assert retry_after({"retry-after": text}, NOW) == pytest.approx(expected)


def test_a_date_is_read_against_the_servers_own_clock() -> None:
    """An hour's difference between the clocks is no hour's wait."""
    ahead = NOW + 3600
    headers = {"retry-after": formatdate(ahead + 4, usegmt=True), "date": formatdate(ahead, usegmt=True)}
    assert retry_after(headers, NOW) == 4.0


# What is held


@pytest.mark.parametrize(
    ("headers", "held"),
    [
        ({"content-length": "0"}, True),
        ({"content-length": str(1 << 20), "content-type": "image/png"}, True),
        ({"content-length": str((1 << 20) + 1), "content-type": "application/json"}, False),
        ({"content-type": "application/json; charset=utf-8"}, True),
        ({"content-type": "application/problem+json"}, True),
        ({"content-type": "text/event-stream"}, False),
        ({"content-type": "Text/Event-Stream; charset=utf-8", "content-length": "5"}, False),
        ({"content-type": "application/x-ndjson"}, False),
        ({"content-type": "text/plain"}, True),
        ({}, True),
    ],
)
def test_what_may_be_a_stream_is_not_read_before_its_reader(headers: dict[str, str], held: bool) -> None:
    """A response of any other type is, unless it is long; then a cut is noticed while there is still a try left."""
    assert RULES.holds(headers) is held


def test_a_try_gets_no_more_time_than_is_left() -> None:
    """And no less than it needs to begin; no time-out at all becomes the budget's."""
    assert at_most(5.0, 60.0) == 5.0
    assert at_most(5.0, 2.0) == 2.0
    assert at_most(None, 60.0) == 60.0
    assert at_most(5.0, -1.0) == ROOM_SECONDS


# Errors, choices


def test_the_cause_of_an_error_is_found_wherever_it_is_kept() -> None:
    """As a cause, a context, a reason or an argument; a circle ends."""
    bad = ssl.SSLCertVerificationError("self-signed")
    cause, context, argument = OSError("cause"), OSError("context"), OSError(OSError(bad))
    cause.__cause__, context.__context__ = bad, cause
    circle = OSError("circle")
    circle.__context__ = OSError(circle)
    for error in (bad, cause, context, argument):
        assert is_caused_by(error, ssl.SSLCertVerificationError)
    assert not is_caused_by(circle, ssl.SSLCertVerificationError)


@pytest.mark.parametrize(
    "wrong",
    [
        {"budget": 0},
        {"budget": "soon"},
        {"methods": ("post it",)},
        {"methods": ("post",)},
        {"retry": ("POST",)},
        {"retry": ("PATCH", "GET")},
        {"buffer": -1},
        {"buffer": "1 MiB"},
        {"header": "Idempotency Key"},
        {"header": "X\r\nY"},
    ],
)
def test_choices_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    """Above all the repetition of a POST without a key."""
    with pytest.raises(UsageError):
        Rules(**wrong)
