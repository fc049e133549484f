"""Records and steps in Redis's own terms: a record is one string, a step is one EVALSHA on one key.

The first byte of a record tells it from other programs' values and says what follows:

    pending     head, size of owner, owner, fence, lease_until, expires_at, traits, fingerprint
    ended       head, fence, expires_at, traits, fingerprint, result
    plain       head, fence in five bytes, fingerprint of sixteen, result

Traits are once, attempts and the size of the fingerprint. A plain record is what most records become: ended at the
first attempt, and it expires when its key does. Its six bytes beside what was asked and answered fit into
the room that the server's allocator leaves anyway. Every record has one form only: packing what was read gives the
bytes that were read, and so a swap compares them whole.

Fences are the server's clock in milliseconds. No record is forgotten before the clock has passed its fence, so that
they only grow.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from hashlib import sha1
from math import floor, inf
from pathlib import Path
from struct import Struct, error
from typing import Any, Final

from .._records import NOBODY, Record, State, make
from ..errors import StoreMismatch
from ._steps import DONE, Add, Added, End, Found, Hold, Read, Step, Swap

PENDING, IN_DOUBT = State.PENDING, State.IN_DOUBT

MARK: Final = 0xA0
"""The upper three bits of every head. Neither text nor a pickle begins with them."""
HEADS: Final = {
    MARK | state << 2 | has_result << 1 | form: (state, has_result, form)
    for state in State
    for has_result in (0, 1)
    for form in (0, 1)
}
"""State, whether there is a result, and the form: plain if the record has ended, watched if it is pending."""
HELD: Final = MARK | PENDING << 2
EPOCH: Final = 1_735_689_600_000
"""The year 2025. Counted from here, fences fit into five bytes until 2059; later records are never plain."""
PLAIN_FENCES: Final = range(EPOCH, EPOCH + (1 << 40))

PLAIN_SIZE: Final = 22
OUTLINE_SIZE: Final = 49
"""Bytes of a record that tell all but what was asked and answered, if its owner is of 16 bytes, as owners are."""

FENCE, TIMES, TRAITS, ENDED = Struct(">Q"), Struct(">dd"), Struct(">?IH"), Struct(">BQd")
PLAIN_TRAITS: Final = TRAITS.pack(False, 1, 16)


# Records


def packed(record: Record) -> bytes:
    """A record as it is stored; a watched one as if nobody watched."""
    _, state, owner, fence, fingerprint, lease_until, attempts, result, expires_at, once = record
    traits, head = TRAITS.pack(once, attempts, len(fingerprint)), _head(state, result)
    if state is PENDING:
        times = FENCE.pack(fence) + TIMES.pack(lease_until, expires_at)
        return b"%c%c%b%b%b%b" % (HELD, len(owner), owner, times, traits, fingerprint)
    plain = (
        traits == PLAIN_TRAITS and fence in PLAIN_FENCES and state is not IN_DOUBT and _is_whole(expires_at)
    )
    if plain:
        return b"%c%b%b%b" % (head | 1, (fence - EPOCH).to_bytes(5, "big"), fingerprint, result or b"")
    return b"%b%b%b%b" % (ENDED.pack(head, fence, expires_at), traits, fingerprint, result or b"")


def unpacked(key: str, value: bytes, last: int) -> Record:
    """The record that is stored under a key which is there until the millisecond ``last`` is over (-1: for ever)."""
    try:
        state, has_result, form = HEADS[value[0]]
        if state is PENDING:
            return _unpacked_pending(key, value)
        if form:
            fence, expires_at = EPOCH + int.from_bytes(value[1:6], "big"), _expires_at(last)
            start, once, attempts, size = 6, False, 1, 16
        else:
            _, fence, expires_at = ENDED.unpack_from(value)
            once, attempts, size = TRAITS.unpack_from(value, ENDED.size)
            start = ENDED.size + TRAITS.size
        end = start + size
        if len(value) < end:
            raise IndexError
    except (LookupError, error):
        raise _not_ours(key, value) from None
    result = value[end:] if has_result else None
    return make(
        Record, (key, state, NOBODY, fence, value[start:end], 0.0, attempts, result, expires_at, once)
    )


def _unpacked_pending(key: str, value: bytes) -> Record:
    end = 2 + value[1]
    (fence,) = FENCE.unpack_from(value, end)
    lease_until, expires_at = TIMES.unpack_from(value, end + 8)
    once, attempts, size = TRAITS.unpack_from(value, end + 24)
    owner, fingerprint = value[2:end], value[end + 31 :]
    if len(fingerprint) != size:
        raise IndexError
    fields = (key, PENDING, owner, fence, fingerprint, lease_until, attempts, None, expires_at, once)
    return make(Record, fields)


def outline(start: Any) -> Record | None:
    """A record without what it is about, from the first ``OUTLINE_SIZE`` bytes of a value; None if it is no record."""
    try:
        state, _, form = HEADS[start[0]]
        lease_until, expires_at, once = 0.0, inf, False
        if state is PENDING:
            lease_until, expires_at = TIMES.unpack_from(start, 10 + start[1])
            once, _, _ = TRAITS.unpack_from(start, 26 + start[1])
        elif not form:
            _, _, expires_at = ENDED.unpack_from(start)
        elif len(start) < PLAIN_SIZE:
            return None
    except (LookupError, TypeError, error):
        return None
    return Record("", state, NOBODY, 0, b"", lease_until, 0, None, expires_at, once)


def last_of(record: Record) -> int | None:
    """The last millisecond of a record's key; None for ever. ``held.lua`` has the same rule."""
    if record.state is IN_DOUBT or (record.state is PENDING and record.once):
        return None
    milliseconds = record.expires_at * 1000
    whole = _is_whole(record.expires_at)
    return max(round(milliseconds) - 1 if whole else floor(milliseconds), record.fence)


def _head(state: State, result: bytes | None) -> int:
    return MARK | state << 2 | (result is not None) << 1


def _expires_at(last: int) -> float:
    return (last + 1) / 1000 if last > 0 else inf  # an operator may have made it stay


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


# Steps


class Commands:
    """Steps as commands to a server. ``prefix`` begins the name of every key."""

    def __init__(self, prefix: str, waits_for_replicas: bool) -> None:
        self._prefix = prefix
        found = "found_written" if waits_for_replicas else "found"
        scripts = {name: _lua("opening", found, *parts, name) for name, parts in SCRIPTS.items()}
        self.load = [command(b"SCRIPT", b"LOAD", text) for text in scripts.values()]
        names = {
            name: sha1(text, usedforsecurity=False).hexdigest().encode() for name, text in scripts.items()
        }
        self._add = lru_cache(maxsize=256)(partial(_adding_format, names["add"]))
        self._end = lru_cache(maxsize=256)(partial(_ending_format, names["end"]))
        self._hold = _format(names["hold"], 3, HOLDER + b"%b")
        self._swap = _format(names["swap"], 3, ARGUMENT * 3)
        self._swap_for_ever = _format(names["swap"], 2, ARGUMENT * 2)
        self._read = _format(names["read"], 0, b"")
        self._watch = _format(names["watch"], 1, HOLDER)
        self._kinds: dict[type, Callable[[Any], bytes]] = {
            Add: self._adding, End: self._ending, Hold: self._holding, Swap: self._swapping, Read: self._reading,
        }  # fmt: skip

    def name(self, key: str) -> bytes:
        """What a record's key is called in Redis."""
        return (self._prefix + key).encode()

    def of(self, step: Step) -> bytes:
        """The command that takes a step."""
        return self._kinds[type(step)](step)

    def watching(self, record: Record) -> bytes:
        """The command that asks to be told when a held record changes."""
        name, owner, fence = self.name(record.key), record.owner, FENCE.pack(record.fence)
        return self._watch % (len(name), name, len(owner) + 9, len(owner), owner, fence)

    def _adding(self, step: Add) -> bytes:
        key, owner, fingerprint, lease, keep, once, _, _ = step.claim
        name, size = (self._prefix + key).encode(), len(owner)
        shape = self._add(once, len(fingerprint), lease, keep)
        return shape % (len(name), name, size + 2, size, owner, fingerprint)

    def _ending(self, step: End) -> bytes:
        key, owner, fence, state, result, keep, _ = step.completion
        name, size = (self._prefix + key).encode(), len(owner)
        plain = (fence - EPOCH).to_bytes(5, "big") if fence in PLAIN_FENCES and state is not IN_DOUBT else b""
        shape, body = self._end(state, result is not None, keep, bool(plain)), result or b""
        return shape % (len(name), name, size + 9, size, owner, FENCE.pack(fence), plain, len(body), body)

    def _holding(self, step: Hold) -> bytes:
        key, owner, fence, lease, keep = step.renewal
        name, length = self.name(key), len(owner)
        held = (len(name), name, length + 9, length, owner, FENCE.pack(fence))
        return self._hold % (*held, _seconds(lease, keep))

    def _swapping(self, step: Swap) -> bytes:
        texts, last = [self.name(step.key), packed(step.before), packed(step.after)], last_of(step.after)
        if last is not None:
            texts.append(b"%d" % last)
        fields = [field for text in texts for field in (len(text), text)]
        return (self._swap_for_ever if last is None else self._swap) % tuple(fields)

    def _reading(self, step: Read) -> bytes:
        name = self.name(step.key)
        return self._read % (len(name), name)


def understood(step: Step, reply: Any) -> Any:
    """The reply to a step, from the server's reply to its command."""
    if type(reply) is list:
        value, last, now = reply
        record = None if value is None else unpacked(step.key, value, last)
        return make(Found, (record, now / 1_000_000))
    if type(step) is Add:
        return make(Added, (reply // 1000, reply / 1_000_000))
    return reply == 1 if type(step) is Swap else DONE


def command(*texts: bytes) -> bytes:
    """A command as a server wants it."""
    return b"*%d\r\n" % len(texts) + b"".join([ARGUMENT % (len(text), text) for text in texts])


SCRIPTS: Final = {"add": (), "end": ("held",), "hold": ("held",), "swap": (), "read": (), "watch": ("held",)}
"""The files in ``lua`` that are scripts, and what stands before each, after what stands before all."""
ARGUMENT: Final = b"$%d\r\n%b\r\n"
HOLDER: Final = b"$%d\r\n%c%b%b\r\n"
FOR_EVER: Final = b"$1\r\n1\r\n"


def _format(script: bytes, count: int, arguments: bytes) -> bytes:
    """A format for the bytes of a command: the size of the key's name and the name come first, then its arguments."""
    return b"*%d\r\n$7\r\nEVALSHA\r\n$40\r\n%b\r\n$1\r\n1\r\n" % (4 + count, script) + ARGUMENT + arguments


def _adding_format(script: bytes, once: bool, size: int, lease: float, keep: float) -> bytes:
    """A format for all claims of a policy: few policies make many claims. Owner and fingerprint are left to fill in."""
    traits = TRAITS.pack(once, 1, size).replace(b"%", b"%%")
    record = b"$%%d\r\n%c%%c%%b\r\n" % HELD + b"$%d\r\n%b%%b\r\n" % (size + 7, traits)
    return _format(script, 4 + once, record + _seconds(lease, keep) + (FOR_EVER if once else b""))


def _ending_format(script: bytes, state: State, has_result: bool, keep: float, plain: bool) -> bytes:
    """A format for all ends of one kind. Holder, fence and result are left to fill in."""
    head, for_ever = _head(state, b"" if has_result else None), state is IN_DOUBT
    plainly = b"$6\r\n%c%%b\r\n" % (head | 1) if plain else b"$0\r\n%b\r\n"
    arguments = HOLDER + plainly + b"$1\r\n%c\r\n" % head + ARGUMENT + _seconds(keep)
    return _format(script, 5 + for_ever, arguments + (FOR_EVER if for_ever else b""))


@lru_cache(maxsize=256)
def _seconds(*durations: float) -> bytes:
    """Durations as arguments. Few policies make many calls, so most of them are known."""
    texts = [repr(seconds).encode() for seconds in durations]
    return b"".join([ARGUMENT % (len(text), text) for text in texts])


def _lua(*parts: str) -> bytes:
    folder = Path(__file__).parent / "lua"
    return b"\n".join([(folder / f"{part}.lua").read_bytes() for part in parts])
