"""The rules of the HTTP boundary, pure: what names a request, what is remembered of its answer, what a repeat gets.

An *exchange* is one request with an Idempotency-Key and its answer. Adapters read requests and write answers as
their framework wants it; everything else is decided here:

    key_of            the key in the header lines, or why there is none
    Hasher            what was asked: method, path, query and body, never headers
    word_on           whether an answer is remembered, given back, or leaves a doubt
    remembered        an answer as it is stored; ``replay`` and ``first`` as they are sent
    problem_of        the problem document (RFC 9457) that stands for an error of the tree
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from hashlib import sha256
from math import ceil
from struct import Struct
from typing import Any, Literal, NamedTuple

from .._records import Record, State, make
from ..codec import Form, canonical_json
from ..errors import (
    AttemptsExhausted,
    BadRequest,
    EffectOnceError,
    Fenced,
    InDoubt,
    InProgress,
    InvalidKey,
    KeyReused,
    LeaseLost,
    ResultUnavailable,
    SessionExpired,
    StaleRequest,
    StoreError,
    StoreUnavailable,
    Unencodable,
    UsageError,
)

Header = tuple[bytes, bytes]
COMPLETED = State.COMPLETED

LONGEST_KEY = 255
QUOTE = ord('"')
SPECIFICATION = "https://datatracker.ietf.org/doc/draft-ietf-httpapi-idempotency-key-header/"
PUBLIC = "public"
"""The scope of an API whose callers share their keys: said out loud, never assumed."""


# -- The key -------------------------------------------------------------------------------------------------------

_STRING = rb'"([ !#-\[\]-~]*(?:\\["\\][ !#-\[\]-~]*)*)"'
_TOKEN = rb"([!#-+\--:<-\[\]-~]+)"
"""Visible characters, without those that lists, parameters and strings are made of."""
_KEY = re.compile(rb"[ \t]*(?:" + _STRING + rb"|" + _TOKEN + rb")[ \t]*")
_ESCAPED = re.compile(rb'\\(["\\])')
_PLAIN = bytes(code for code in range(0x21, 0x7F) if code not in b'"\\')
"""What nearly every key is made of: a string of these alone needs no parsing."""


def key_of(lines: Sequence[bytes], strict: bool = False) -> str | None:
    """The key that the header's lines give; None if there are none. Raises ``Problem`` for what is no key.

    An RFC 8941 string, ``"8e03978e"``; unless ``strict``, also the bare token that many clients send for it.
    """
    if not lines:
        return None
    if len(lines) > 1:
        raise Problem("key-invalid", "The request has more than one key. Send one.")
    line = lines[0]
    if (
        2 < len(line) <= LONGEST_KEY + 2
        and line.translate(None, _PLAIN) == b'""'
        and line[0] == line[-1] == QUOTE
    ):
        return line[1:-1].decode("ascii")
    found = _KEY.fullmatch(line)
    if found is not None and found.lastindex == 1:
        string = found[1]
        key = (_ESCAPED.sub(rb"\1", string) if b"\\" in string else string).decode("ascii")
    elif found is not None and not strict:
        key = found[2].decode("ascii")
    else:
        form = 'a string in double quotes, such as "8e03978e-40d5-43dd-bc93-6894a57f9324"'
        raise Problem("key-invalid", f"The key must be {form}.")
    if not key or key.isspace() or len(key) > LONGEST_KEY:
        raise Problem(
            "key-invalid", f"The key must have between 1 and {LONGEST_KEY} characters, not all of them blank."
        )
    return key


def quoted(key: str) -> bytes:
    """A key as an RFC 8941 string."""
    if '"' in key or "\\" in key:
        key = re.sub(r'(["\\])', r"\\\1", key)
    return b'"%b"' % key.encode("ascii", "replace")


def echoed(key: str, lines: Sequence[bytes]) -> bytes:
    """A key as an answer tells it: as it was sent, if it was."""
    return lines[0].strip(b" \t") if lines else quoted(key)


# -- What was asked ------------------------------------------------------------------------------------------------

Fingerprint = Literal["body", "json"]


def fingerprint_of(head: bytes, body: bytes) -> bytes:
    """What was asked under a key: 16 bytes that tell one request from another. ``head_of`` gives what goes first."""
    return sha256(head + body).digest()[:16]


def head_of(method: str, path: bytes, query: bytes) -> bytes:
    """With their lengths in front, no move of the borders between the parts gives the same bytes."""
    return b"%b %d %d\n%b%b" % (method.encode("latin-1"), len(path), len(query), path, query)


class Hasher:
    """What was asked under a key, taken in piece by piece."""

    def __init__(self, method: str, path: bytes, query: bytes, form: Fingerprint = "body") -> None:
        self._hash = sha256(head_of(method, path, query))
        self._document: list[bytes] | None = [] if form == "json" else None

    def update(self, piece: bytes) -> None:
        """Take in a piece of the body."""
        if self._document is None:
            self._hash.update(piece)
        else:
            self._document.append(piece)

    def digest(self) -> bytes:
        """The same as ``fingerprint_of``, for a body that counts by its bytes."""
        if self._document is not None:
            body = b"".join(self._document)
            try:
                self._hash.update(b"json" + canonical_json(body))
            except UsageError:  # not a document after all: then its bytes are what it says
                self._hash.update(b"body" + body)
        return self._hash.digest()[:16]


# -- Answers -------------------------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """A response. ``body`` is None for one that was sent but could not be held: too large, or without an end."""

    status: int
    headers: Sequence[Header]
    body: bytes | None


HELD_BACK: frozenset[bytes] = frozenset(
    b"connection keep-alive proxy-connection te trailer transfer-encoding upgrade date set-cookie set-cookie2 "
    b"www-authenticate proxy-authenticate authorization proxy-authorization authentication-info "
    b"proxy-authentication-info idempotency-key x-idempotency-replayed idempotent-replayed".split()
)
"""Headers of one connection, one moment or one login: no part of the answer to a repeat. The last three are a
boundary's own; an app that hands on what another service answered has that one's."""


BODILESS = frozenset({204, 304})
"""Answers that have no body, whatever they say of its length."""

_NAME, _VALUE = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"), re.compile(rb"[^\0\r\n]*")


@lru_cache(maxsize=1024)
def _is_name(name: bytes) -> bool:
    return _NAME.fullmatch(name) is not None


def sound(headers: Iterable[Header]) -> tuple[Header, ...]:
    """Headers that may be sent, now and on every replay. A line break in one would begin another."""
    kept = tuple([(name, value) for name, value in headers])
    for name, value in kept:
        if not _is_name(name) or _VALUE.fullmatch(value) is None:
            raise ValueError(f"The header {name!r} can't be sent: its name or its value is not valid.")
    return kept


def pairs_of(headers: Iterable[tuple[str, str]]) -> list[Header]:
    """Headers of frameworks that have them as text."""
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]


class Start(NamedTuple):
    """The start of an answer, and what it says of its body: how long it is, if it says so, and whether it ends."""

    headers: tuple[Header, ...]
    length: int | None
    endless: bool


def start_of(status: int, headers: Iterable[Header]) -> Start:
    """What an app has said. Raises ``ValueError`` for headers that can't be sent."""
    said = tuple(headers)
    try:
        return _start(status, said)
    except TypeError:  # something in it can't be hashed, such as a bytearray
        return _start.__wrapped__(status, tuple([(bytes(name), bytes(value)) for name, value in said]))


@lru_cache(maxsize=128)
def _start(status: int, headers: tuple[Header, ...]) -> Start:
    """Answers of one kind begin alike, so most beginnings have been looked at before."""
    kept = sound(headers)
    if status in BODILESS:  # a length would have server and client wait for what isn't sent
        kept = tuple([pair for pair in kept if pair[0].lower() != b"content-length"])
    return Start(kept, *outlook(status, headers))


def outlook(status: int, headers: Iterable[Header]) -> tuple[int | None, bool]:
    """What the start of an answer says of its body: how long it is, if it says so, and whether it has no end."""
    length = 0 if status in BODILESS else None
    endless = False
    for name, value in headers:
        lower = name.lower()
        if lower == b"content-length" and length is None and value.isdigit():
            length = int(value[:19])
        elif lower == b"content-type":
            endless = value.lower().startswith(b"text/event-stream")
    return length, endless


TWO_STARTS = "The app sent the start of a response twice."
TOO_MUCH = "The app sent more after the end of its response."
"""What no server lets an app do. A boundary that holds answers has to notice it, or a mixture would be remembered."""


def body_of(status: int, length: int | None, body: bytes) -> bytes:
    """The body of a complete answer. Raises ``RuntimeError`` for one that is not as long as the app has said."""
    if status in BODILESS:  # servers drop it, as clients don't read it
        return b""
    if length is not None and len(body) != length:
        raise RuntimeError(f"The app said that it answers {length} bytes, and sent {len(body)}.")
    return body


def remembered(answer: Answer) -> Answer:
    """What is stored of an answer. Headers keep their order and their repetitions."""
    status, headers, body = answer
    return make(Answer, (status, _kept(tuple(headers)), body))


@lru_cache(maxsize=128)
def _kept(headers: tuple[Header, ...]) -> tuple[Header, ...]:
    held_back = HELD_BACK
    for name, value in headers:
        if name.lower() == b"connection":
            held_back |= {each.strip().lower() for each in value.split(b",")}
    return tuple([pair for pair in headers if pair[0].lower() not in held_back])


_HEAD = Struct(">BHI?")
_HEAD_SIZE = _HEAD.size
_VERSION = 1


def _write(answer: Answer) -> bytes:
    status, headers, body = answer
    lines = _lines(tuple(headers))
    return _HEAD.pack(_VERSION, status, len(lines), body is not None) + lines + (body or b"")


@lru_cache(maxsize=128)
def _lines(headers: tuple[Header, ...]) -> bytes:
    lines = b"\n".join([b"%b\0%b" % pair for pair in headers])
    if lines.count(b"\0") != len(headers) or lines.count(b"\n") != max(len(headers) - 1, 0):
        raise Unencodable("headers", bytes, "it has a line break or a NUL, and would be read as two")
    return lines


def _read(data: bytes) -> Answer:
    version, status, length, has_body = _HEAD.unpack_from(data)
    if version != _VERSION:
        raise ValueError(f"version {version} of a stored response is not known here")
    end = _HEAD_SIZE + length
    headers = _headers(data[_HEAD_SIZE:end])
    return make(Answer, (status, headers, data[end:] if has_body else None))


@lru_cache(maxsize=256)
def _headers(lines: bytes) -> tuple[Header, ...]:
    """Read header lines. Answers of one kind have the same, so most have been read before."""
    pairs = (line.partition(b"\0") for line in lines.split(b"\n") if line)
    return tuple((name, value) for name, _, value in pairs)


ANSWER = Form(_write, _read)
"""How answers are stored."""


def answer_in(record: Record) -> Answer | None:
    """The answer that a record holds, if it has been stored whole: nearly every one. Else the codec says what it is."""
    result = record.result
    if record.state is not COMPLETED or result is None or len(result) < _HEAD_SIZE or result[0] != _VERSION:
        return None
    answer = _read(result)
    return None if answer.body is None else answer


# -- What is remembered --------------------------------------------------------------------------------------------

OnServerError = Literal["release", "remember", "in_doubt"]
Word = Literal["remember", "release", "in_doubt"]

NOT_YET: frozenset[int] = frozenset({408, 425, 429})
"""Refusals of the moment: a retry is what they ask for."""


def word_on(status: int, on_server_error: OnServerError, not_yet: frozenset[int]) -> Word:
    """What an answer's status says about the effect."""
    if status >= 500:
        return on_server_error
    return "release" if status in not_yet else "remember"


class ServerFault(Exception):
    """Stands for an answer that is not remembered, where the flow wants a handler's exception."""


# -- Problems ------------------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """A kind of problem: its status, its title, and whether sending the same request again may help."""

    status: int
    title: str
    retryable: bool


PROBLEMS: dict[str, Kind] = {
    "key-missing": Kind(400, "Idempotency-Key is missing", False),
    "key-invalid": Kind(400, "Idempotency-Key is not valid", False),
    "scope-missing": Kind(403, "The caller could not be told from others", False),
    "request-timeout": Kind(408, "The request body came too slowly", True),
    "request-incomplete": Kind(400, "The request body ended too early", True),
    "length-required": Kind(411, "The length of the request body is not known", False),
    "request-too-large": Kind(413, "The request body is too large", False),
    "too-many-keys": Kind(429, "Too many new requests by this caller", True),
    "key-reused": Kind(422, "Idempotency-Key was used for another request", False),
    "in-progress": Kind(409, "The first request with this key is still running", True),
    "response-not-replayable": Kind(409, "The request was done, but its response can't be repeated", False),
    "outcome-unknown": Kind(409, "It is not known whether the first request was done", False),
    "attempts-exhausted": Kind(409, "The request was tried too often", False),
    "session-expired": Kind(410, "The client's session has expired", False),
    "request-stale": Kind(409, "The client has acknowledged a request of this number", False),
    "client-fenced": Kind(409, "Another process goes on with the client's session", False),
    "request-invalid": Kind(400, "The request has no place in the client's session", False),
    "store-unavailable": Kind(503, "The request can't be handled safely now", True),
}
"""Every kind of problem by its code."""


class Problem(Exception):
    """A request that is answered with a problem document instead of being handled."""

    def __init__(self, code: str, detail: str, *, retry_after: float | None = None, status: int = 0) -> None:
        super().__init__(detail)
        self.code, self.detail, self.retry_after = code, detail, retry_after
        self.status = status or PROBLEMS[code].status

    @property
    def document(self) -> dict[str, Any]:
        """The members of the document."""
        _, title, retryable = PROBLEMS[self.code]
        return {
            "type": f"urn:effectonce:problem:{self.code}",
            "title": title,
            "status": self.status,
            "detail": self.detail,
            "code": self.code,
            "retryable": retryable,
        }

    def answer(self, documentation: str = SPECIFICATION) -> Answer:
        """The response that tells of it."""
        body = json.dumps(self.document, ensure_ascii=False).encode()
        headers: list[Header] = [
            (b"content-type", b"application/problem+json"),
            (b"content-length", b"%d" % len(body)),
            (b"cache-control", b"no-store"),
        ]
        if self.retry_after is not None:
            headers.append((b"retry-after", b"%d" % max(1, ceil(self.retry_after))))
        if self.code.startswith("key-"):
            headers.append((b"link", b'<%b>; rel="describedby"' % documentation.encode("ascii")))
        return Answer(self.status, tuple(headers), body)


def _in_progress(error: EffectOnceError, busy_status: int) -> Problem:
    after = getattr(error, "retry_after", 1.0)
    return Problem(
        "in-progress", "Wait, then send the same request again.", retry_after=after, status=busy_status
    )


_PROBLEM_OF: tuple[tuple[type[EffectOnceError], Callable[[EffectOnceError, int], Problem]], ...] = (
    (InProgress, _in_progress),
    (LeaseLost, _in_progress),
    (SessionExpired, lambda *_: Problem("session-expired", "Nothing was done. Open a new session.")),
    (StaleRequest, lambda *_: Problem("request-stale", "Send a new request with a new number.")),
    (Fenced, lambda *_: Problem("client-fenced", "Nothing was done. Open a session of your own.")),
    (BadRequest, lambda error, _: Problem("request-invalid", str(error))),
    (KeyReused, lambda *_: Problem("key-reused", "Send a new request with a new key.")),
    (InDoubt, lambda *_: Problem("outcome-unknown", "It has to be looked into before it can be answered.")),
    (ResultUnavailable, lambda *_: Problem("response-not-replayable", "Ask for its result by other means.")),
    (
        AttemptsExhausted,
        lambda *_: Problem("attempts-exhausted", "It has to be looked into; don't send it again."),
    ),
    (InvalidKey, lambda *_: Problem("key-invalid", "The key has characters that a key can't have.")),
    (
        StoreUnavailable,
        lambda error, _: Problem(
            "store-unavailable",
            "Send the same request with the same key again.",
            retry_after=getattr(error, "retry_after", 1.0),
        ),
    ),
    (
        StoreError,
        lambda *_: Problem(
            "store-unavailable", "Send the same request with the same key again.", retry_after=5.0
        ),
    ),
)


def problem_of(error: BaseException, busy_status: int = 409) -> Problem | None:
    """The problem that stands for an error of the tree, without its internals; None for any other error."""
    if isinstance(error, Problem):
        return error
    for kind, problem in _PROBLEM_OF:
        if isinstance(error, kind):
            return problem(error, busy_status)
    return None


NOT_REPLAYABLE = ResultUnavailable(
    "The response was sent once, but it was too large to be remembered, or had no end."
)
