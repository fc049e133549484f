"""When a request is sent again, pure: no clock, no chance, no I/O.

An answer ends the sending, or it is a reason to send the same request with the same key again. In this order:

1. A replay is the first answer given again. It ends the sending whatever it says, because it will not change.
2. A problem document with the code "in-progress", under any status: the first try still runs. It is asked for again
   soon. The Retry-After of such an answer says when the other one's lease ends *at the latest*, so that it is
   followed up to ``poll`` only.
3. Any other problem document that says ``retryable: false`` ends it, and so does any other 409 with a code.
4. A 409 with Retry-After is how others say that the first try still runs: again, not before that time.
5. What says that trouble may pass (408, 425, 429, 500, 502, 503, 504): again, not before its Retry-After. A 500 is
   among them because of the key: who remembered the failure replays it (rule 1), who did not may run again. So is a
   400 with the code "request-incomplete": the server got only a part of the request, and has done nothing. And a 102
   or 103, which only announces the answer: requests knows no better than to hand it on.
6. Everything else ends it: success, redirection, and every other refusal, 422 above all.

Between two tries lies a random part of a time that doubles (full jitter), on top of what Retry-After asks for. No
try begins that could not end within the budget; then the last answer is the answer, and the last error is raised.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from math import inf
from typing import Any, Literal, NamedTuple

from .._durations import Duration, seconds
from ..errors import UsageError

Headers = Mapping[str, str]
"""Headers by name. Both packages give mappings that know a name in any case."""

SAFE_TO_REPEAT = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE"})
PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
REPLAY_HEADERS = ("x-idempotency-replayed", "idempotent-replayed")
UNSETTLED = frozenset({"outcome-unknown", "attempts-exhausted"})
"""Codes of answers that end the sending and yet leave open what became of the request."""
INTERIM = frozenset({100, 102, 103})
"""What a server says before its answer, and requests takes for one."""
CUT_SHORT = "request-incomplete"
"""The code of a server that got less of a request than was sent: nothing was done."""
UNAUTHORIZED = frozenset({401, 407})
"""They leave that open, too: who calls is asked before what became of an earlier try is looked up."""

AS_THEY_HAPPEN = frozenset(
    {
        "text/event-stream",
        "application/x-ndjson",
        "application/ndjson",
        "application/jsonl",
        "application/json-seq",
        "multipart/x-mixed-replace",
    }
)
"""Media types whose parts are sent one by one, and wanted before the last."""

ROOM_SECONDS = 0.05
"""What has to be left of the budget for a try to be worth its beginning."""
DOUBLINGS = 32
"""After so many, a wait has long met its limit; more would only overflow."""

Word = Literal["end", "again", "poll"]


class Answer(NamedTuple):
    """What is known of a response: ``body`` is there when it may be a problem document."""

    status: int
    headers: Headers
    body: bytes = b""


class Moment(NamedTuple):
    """The end of a try: which one it was, the seconds left, a number from 0 to 1, and the time of day."""

    number: int
    left: float
    chance: float
    now: float


@dataclass(frozen=True, init=False, slots=True)
class Rules:
    """Which requests get a key, which are sent again, and for how long.

    methods   get a key, unless the request has one, and are sent again with it
    retry     are sent again without a key; only methods that may be repeated by their meaning, such as GET
    statuses  answers after which the same request is sent again
    budget    the time of all tries and waits together, and of reading an answer that is held; the time-outs of a try
              are no longer than what is left of it
    backoff   the longest wait after the first try; it doubles with each …
    longest   … up to this
    poll      the longest wait for a first try that still runs
    buffer    bytes of a body that are held: a request's, to send a stream again; a response's, to notice within
              the try that it was cut off. Streams of events are not held
    header    the name of the key's header
    """

    methods: frozenset[str]
    retry: frozenset[str]
    statuses: frozenset[int]
    budget: float
    backoff: float
    longest: float
    poll: float
    buffer: int
    header: str

    def __init__(
        self,
        *,
        methods: Iterable[str] = ("POST", "PATCH"),
        retry: Iterable[str] = (),
        statuses: Iterable[int] = PASSING,
        budget: Duration = "60s",
        backoff: Duration = "250ms",
        longest: Duration = "10s",
        poll: Duration = "2s",
        buffer: int = 1 << 20,
        header: str = "Idempotency-Key",
    ) -> None:
        values = {
            "methods": _methods("methods", methods),
            "retry": _methods("retry", retry),
            "statuses": frozenset(statuses),
            "budget": seconds(budget, "budget"),
            "backoff": seconds(backoff, "backoff"),
            "longest": seconds(longest, "longest"),
            "poll": seconds(poll, "poll"),
            "buffer": buffer,
            "header": header,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        if unsafe := self.retry - SAFE_TO_REPEAT:
            raise UsageError(f"retry={sorted(unsafe)}: without a key these may happen twice. Use methods=.")
        if type(buffer) is not int or buffer < 0:
            raise UsageError(f"buffer={buffer!r} must be a whole number of bytes, 0 or more.")
        if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", header):
            raise UsageError(f"header={header!r} is not the name of a header.")

    # What an answer says

    def word_on(self, answer: Answer) -> Word:
        """The rules above, in their order."""
        status, headers, _ = answer
        if is_replay(headers):
            return "end"
        code, retryable = problem_in(answer)
        if code == "in-progress":
            return "poll"
        if retryable is False or (status == 409 and code):
            return "end"
        if status in self.statuses or status in INTERIM or code == CUT_SHORT:
            return "again"
        if status == 409 and "retry-after" in headers:
            return "again"
        return "end"

    def settles(self, answer: Answer) -> bool:
        """Whether an answer says what became of the request, so that nobody needs to ask again."""
        if is_replay(answer.headers):
            return True
        if answer.status in UNAUTHORIZED:
            return False
        known = answer.status < 500 and not is_redirect(answer)
        return known and self.word_on(answer) == "end" and problem_in(answer)[0] not in UNSETTLED

    def holds(self, headers: Headers) -> bool:
        """Whether a response is read within its try: one that does not say that it is long, or comes as things happen.

        Everything else is meant to be read while it comes. Who reads it sees for himself that it was cut off.
        """
        return length_of(headers) <= self.buffer and _media_type(headers) not in AS_THEY_HAPPEN

    # How long to wait; None: that was the last try

    def wait_after(self, answer: Answer, moment: Moment) -> float | None:
        """Seconds until the next try after an answer."""
        word = self.word_on(answer)
        if word == "end":
            return None
        asked = retry_after(answer.headers, moment.now)
        if word == "poll":
            return self._wait(moment, min(asked, self.poll), self.poll)
        return self._wait(moment, asked, self.longest)

    def wait_after_error(self, moment: Moment) -> float | None:
        """Seconds until the next try after one that brought no answer."""
        return self._wait(moment, 0.0, self.longest)

    def _wait(self, moment: Moment, asked: float, longest: float) -> float | None:
        doubled = self.backoff * 2.0 ** min(moment.number - 1, DOUBLINGS)
        wait = asked + moment.chance * min(doubled, longest)
        # It is not cut short to fit: ever shorter waits would be a storm just before the end.
        return wait if wait <= moment.left - ROOM_SECONDS else None


def _methods(name: str, methods: Iterable[str]) -> frozenset[str]:
    listed = frozenset([methods] if isinstance(methods, str) else methods)
    if not all(re.fullmatch("[A-Z]+", str(method)) for method in listed):
        raise UsageError(f'{name}={methods!r} must be names of methods, such as ("POST", "PATCH").')
    return listed


# -- What answers say -----------------------------------------------------------------------------------------------


def is_replay(headers: Headers) -> bool:
    """Whether a response says that it is the first answer given again."""
    return any(headers.get(name, "").strip().lower() == "true" for name in REPLAY_HEADERS)


def is_redirect(answer: Answer) -> bool:
    """Whether an answer sends the client elsewhere."""
    return answer.status in (301, 302, 303, 307, 308) and "location" in answer.headers


def length_of(headers: Headers) -> int:
    """How many bytes a body has by its headers; 0 if they don't say."""
    text = headers.get("content-length", "")
    return int(text[:20]) if text.isascii() and text.isdigit() else 0


def may_tell(status: int, headers: Headers) -> bool:
    """Whether a body has to be read to know what an answer says."""
    return (status >= 400 or status == 202) and _is_json(headers)


def problem_in(answer: Answer) -> tuple[str, bool | None]:
    """The ``code`` and ``retryable`` of a problem document; ("", None) where there are none."""
    if not answer.body or not may_tell(answer.status, answer.headers):
        return "", None
    try:
        document: Any = json.loads(answer.body)
    except (ValueError, RecursionError):
        return "", None
    if not isinstance(document, dict):
        return "", None
    code, retryable = document.get("code"), document.get("retryable")
    return code if isinstance(code, str) else "", retryable if isinstance(retryable, bool) else None


def retry_after(headers: Headers, now: float) -> float:
    """How many seconds a response asks to wait; 0.0 where it says nothing that can be understood.

    A date is read against the server's own Date, where it sent one: the two clocks need not agree.
    """
    text = headers.get("retry-after", "").strip()
    if text.isascii() and re.fullmatch(r"\d+(\.\d+)?", text):
        return min(float(text[:20]), 1e9)
    moment = _time_of(text)
    if moment is None:
        return 0.0
    sent = _time_of(headers.get("date", ""))
    return max(0.0, moment - (now if sent is None else sent))


def _time_of(text: str) -> float | None:
    try:
        moment = parsedate_to_datetime(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, TypeError, IndexError, OverflowError):
        return None


def _is_json(headers: Headers) -> bool:
    media_type = _media_type(headers)
    return media_type == "application/json" or media_type.endswith("+json")


def _media_type(headers: Headers) -> str:
    return headers.get("content-type", "").partition(";")[0].strip().lower()


# -- Errors ---------------------------------------------------------------------------------------------------------


def is_caused_by(error: BaseException, kind: type[BaseException]) -> bool:
    """Whether an error of this kind is behind another one: raised before it, or handed on inside it."""
    seen: set[int] = set()
    waiting: list[object] = [error]
    while waiting:
        each = waiting.pop()
        if isinstance(each, kind):
            return True
        if isinstance(each, BaseException) and id(each) not in seen:
            seen.add(id(each))
            waiting += [each.__cause__, each.__context__, getattr(each, "reason", None), *each.args]
    return False


def at_most(timeout: float | None, left: float) -> float:
    """A time-out that keeps within the budget."""
    return max(min(inf if timeout is None else timeout, left), ROOM_SECONDS)
