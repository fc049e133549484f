"""Records as Redis has them: one string for each.

The first byte of a record tells it from other programs' values and says what follows:

    pending     head, lease_until, expires_at, traits, fence, size of owner, owner, fingerprint, journal
    in full     head, fence, expires_at, traits, fingerprint, result
    plain       head, fingerprint of sixteen bytes, fence in five, result
    bare        head, fence in five bytes, result

Traits are once, attempts and the size of the fingerprint. Most records become plain, or bare where nothing but a key
was asked: ended at the first attempt, and they expire when their key does. Their six bytes beside what was asked and
answered fit into the room that the server's allocator leaves anyway. Of a pending record, what all claims of a moment
have in common comes first. Every record has one form only: packing what was read gives the bytes that were read, and so
a swap compares them whole.

Fences are the server's clock in milliseconds. No record is forgotten before the clock has passed its fence, so that
they only grow.
"""

from __future__ import annotations

from math import floor, inf
from struct import Struct, error
from typing import Any, Final, NamedTuple

from .._records import NOBODY, Record, State, make
from ..errors import StoreMismatch

ABSENT, PENDING, COMPLETED, FAILED, IN_DOUBT = State

MARK: Final = 0xA0
"""The upper three bits of every head. Neither text nor a pickle begins with them."""
FULL, PLAIN, BARE = -1, 16, 0
"""The forms of ended records: without traits the size of the fingerprint is known."""


class Head(NamedTuple):
    """What the first byte of a record says."""

    state: State
    has_result: bool = False
    form: int = FULL


ENDED_HEADS: Final = {
    Head(state, has_result, form): MARK | code << 2 | has_result << 1 | bit
    for form, bit, codes in (
        (FULL, 0, {state: state for state in State if state is not PENDING}),
        (PLAIN, 1, {ABSENT: 0, COMPLETED: 2, FAILED: 3}),
        (BARE, 0, {ABSENT: 5, COMPLETED: 6, FAILED: 7}),
    )
    for state, code in codes.items()
    for has_result in (False, True)
}
HELD: Final = MARK | PENDING << 2
WATCHED: Final = HELD | 1
"""Pending too, and somebody waits for the end."""
HEADS: Final = {HELD: Head(PENDING), WATCHED: Head(PENDING)} | {
    byte: head for head, byte in ENDED_HEADS.items()
}

EPOCH: Final = 1_735_689_600_000
"""The year 2025. Counted from here, fences fit into five bytes until 2059; later records are told in full."""
SHORT_FENCES: Final = range(EPOCH, EPOCH + (1 << 40))
SHORT: Final = 5

NO_KEY: Final = -1
"""When nothing will be forgotten."""

TIMES, TRAITS, FENCE = Struct(">dd"), Struct(">?IH"), Struct(">Q")
PENDING_START, FULL_START = Struct(">Bdd?IHQB"), Struct(">BQd?IH")
FORMS: Final = {TRAITS.pack(False, 1, size): size for size in (PLAIN, BARE)}
"""The traits that need not be told."""
HEAD: Final = TIMES.size
"""Where an answer has the head of a record."""
SHORT_STARTS: Final = {form: Struct(f">ddx{form}sBI") for form in (PLAIN, BARE)}
"""How an answer begins that tells of a record in a short form: both times, its head, what was asked, its fence."""
SHORT_KINDS: Final = {
    byte: (SHORT_STARTS[form].unpack_from, state, has_result, SHORT_STARTS[form].size)
    for byte, (state, has_result, form) in HEADS.items()
    if form != FULL
}
OUTLINE_SIZE: Final = 24
"""Bytes of a record that tell all but what was asked and answered."""


# Records


def packed(record: Record) -> bytes:
    """A record as it is stored; a watched one as if nobody watched."""
    _, state, owner, fence, fingerprint, lease_until, attempts, result, expires_at, once = record
    size, has_result = len(fingerprint), result is not None
    if state is PENDING:
        start = PENDING_START.pack(HELD, lease_until, expires_at, once, attempts, size, fence, len(owner))
        return start + owner + fingerprint + (result or b"")
    form = FULL
    if fence in SHORT_FENCES and state is not IN_DOUBT and _is_whole(expires_at):
        form = FORMS.get(TRAITS.pack(once, attempts, size), FULL)
    head = ENDED_HEADS[Head(state, has_result, form)]
    if form == FULL:
        return FULL_START.pack(head, fence, expires_at, once, attempts, size) + fingerprint + (result or b"")
    return b"%c%b%b%b" % (head, fingerprint, short(fence), result or b"")


def told(key: str, answer: bytes) -> tuple[Record | None, float]:
    """What a server tells of a key, with its clock: from the clock, when what is there will be forgotten (never, if an
    operator has made it stay), and what is there. Nearly every duplicate is told of a record in a short form.
    """
    try:
        unpack, state, has_result, end = SHORT_KINDS[answer[HEAD]]
        now, expires_at, fingerprint, high, low = unpack(answer)
    except (LookupError, error):
        return _told_in_full(key, answer)
    fence, result = EPOCH + (high << 32) + low, answer[end:] if has_result else None
    return make(Record, (key, state, NOBODY, fence, fingerprint, 0.0, 1, result, expires_at, False)), now


def _told_in_full(key: str, answer: bytes) -> tuple[Record | None, float]:
    now, ends = TIMES.unpack_from(answer)
    if ends == NO_KEY:
        return None, now
    value = answer[HEAD:]
    try:
        state, has_result, form = HEADS[value[0]]
        if form != FULL:  # then it is too short
            raise IndexError
        if state is PENDING:
            return _unpacked_pending(key, value), now
        _, fence, expires_at, once, attempts, size = FULL_START.unpack_from(value)
        end = FULL_START.size + size
        fingerprint = value[FULL_START.size : end]
        if len(fingerprint) != size:
            raise IndexError
    except (LookupError, error):
        raise _not_ours(key, value) from None
    result = value[end:] if has_result else None
    fields = (key, state, NOBODY, fence, fingerprint, 0.0, attempts, result, expires_at, once)
    return make(Record, fields), now


def _unpacked_pending(key: str, value: bytes) -> Record:
    _, lease_until, expires_at, once, attempts, size, fence, length = PENDING_START.unpack_from(value)
    start = PENDING_START.size
    end = start + length
    journal = end + size
    if len(value) < journal:
        raise IndexError
    fields = (
        key,
        PENDING,
        value[start:end],
        fence,
        value[end:journal],
        lease_until,
        attempts,
        value[journal:] or None,
        expires_at,
        once,
    )
    return make(Record, fields)


def outline(start: Any) -> Record | None:
    """A record without what it is about, from the first ``OUTLINE_SIZE`` bytes of a value; None if it is no record."""
    try:
        state, _, form = HEADS[start[0]]
        lease_until, expires_at, once = 0.0, inf, False
        if state is PENDING:
            lease_until, expires_at = TIMES.unpack_from(start, 1)
            once, _, _ = TRAITS.unpack_from(start, 1 + TIMES.size)
        elif form == FULL:
            _, _, expires_at, once, _, _ = FULL_START.unpack_from(start)
        elif len(start) < 1 + form + SHORT:
            return None
    except (LookupError, TypeError, error):
        return None
    return Record("", state, NOBODY, 0, b"", lease_until, 0, None, expires_at, once)


def short(fence: int) -> bytes:
    """A fence of these years in five bytes."""
    return (fence - EPOCH).to_bytes(SHORT, "big")


def last_of(record: Record) -> int | None:
    """The last millisecond of a record's key; None for ever. ``held.lua`` has the same rule."""
    if record.state is IN_DOUBT or (record.state is PENDING and record.once):
        return None
    milliseconds = record.expires_at * 1000
    whole = _is_whole(record.expires_at)
    return max(round(milliseconds) - 1 if whole else floor(milliseconds), record.fence)


def _is_whole(seconds: float) -> bool:
    """Whether a time survives as the milliseconds of a key's expiry."""
    return seconds == inf or round(seconds * 1000) / 1000 == seconds


def _not_ours(key: str, value: bytes) -> StoreMismatch:
    if value and value[0] >> 5 == MARK >> 5 and value[0] not in HEADS:
        return StoreMismatch(
            "A newer effectonce wrote this record. Nothing was changed. Use that one.", key=key
        )
    return StoreMismatch(
        "The Redis key of this effect holds another program's value. Nothing was changed. Give this store a prefix= of "
        "its own, or remove that value.",
        key=key,
    )
