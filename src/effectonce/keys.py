"""What names an effect: ``Key``, and the four ways to come by its id.

1. The sender's own id, or one made by the client: ``uuid4``, ``uuid7``.
2. A natural key, from fields of the payload that the business knows it by: ``natural``.
3. A composite of what is known: ``composite("order", 7, "refund")``.
4. The content itself: ``content_id``, ``content_id_of_json``.

Prefer them in this order. A broker's delivery id is none of these: it changes when a message is sent again.

A key's text is ``scope|operation|version|id``. The first three have ``|`` and ``%`` percent-escaped; the id comes
last and stands as it is, so a hot caller makes the text with ``prefix(scope, operation, version) + id``.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Mapping
from functools import lru_cache
from hashlib import sha256
from threading import Lock
from time import time_ns
from typing import TYPE_CHECKING, Any, NamedTuple

from .codec import canonical, canonical_json
from .errors import InvalidKey

if TYPE_CHECKING:
    from uuid import UUID

__all__ = [
    "Key",
    "check_id",
    "composite",
    "content_id",
    "content_id_of_json",
    "derived",
    "fingerprint",
    "lookup",
    "natural",
    "new_owner",
    "prefix",
    "uuid4",
    "uuid7",
]

LONGEST = 255
"""Characters that an id, scope, operation or version may have."""

_BYTES = (bytes, bytearray, memoryview)
_FORBIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


class Key(NamedTuple):
    """One intended effect. The same id under another scope, operation or version is another effect."""

    scope: str
    operation: str
    version: str
    id: str

    @classmethod
    def of(cls, id: str, operation: str, scope: str = "", version: str | int = "") -> Key:
        """A key whose parts have been checked. Raises ``InvalidKey``."""
        prefix(scope, operation, version)
        return cls(scope, operation, str(version), check_id(id))

    @classmethod
    def parse(cls, text: str) -> Key:
        """The key that has this text."""
        parts = text.split("|", 3)
        scope, operation, version = map(_unescaped, (parts + [""] * 3)[:3])
        key = cls(scope, operation, version, parts[-1])
        if len(parts) != 4 or prefix(scope, operation, version) + check_id(key.id) != text:
            raise InvalidKey(f"{shown(text)} is not the text of a key, which is scope|operation|version|id.")
        return key

    @property
    def text(self) -> str:
        """The form that stores and logs use; ``Key.parse`` is its inverse."""
        return prefix(*self[:3]) + self.id

    def __str__(self) -> str:
        return self.text


def prefix(scope: str, operation: str, version: str | int = "") -> str:
    """The text of a key up to its id. Checks its arguments, once for each combination."""
    try:
        return _prefix(scope, operation, version)
    except TypeError:
        # One that can't be hashed, which does not pass the check; or text of a class of its own.
        return _prefix.__wrapped__(*map(plain, (scope, operation, version)))


@lru_cache(maxsize=4096, typed=True)
def _prefix(scope: str, operation: str, version: str | int) -> str:
    check_plain(scope, operation, version)
    edition = digits(version) if type(version) is int else version
    parts = (_checked("scope", scope), _checked("operation", operation), _checked("version", edition))
    if not operation.strip():
        raise InvalidKey("The operation is empty. Name what is done, such as 'payments.charge'.")
    return "".join(part.replace("%", "%25").replace("|", "%7C") + "|" for part in parts)


def check_plain(*parts: object) -> None:
    """Raise ``TypeError`` for text of a class of its own, in what is remembered by its arguments.

    Others may be equal to it: then each would have the prefix of whoever came first, in every process another.
    """
    if any(isinstance(part, str) and type(part) is not str for part in parts):
        raise TypeError("text of a class of its own")


def plain(part: Any) -> Any:
    """Text as it is, whatever its class makes of it."""
    return str.__str__(part) if isinstance(part, str) else part


def _unescaped(part: str) -> str:
    return part.replace("%7C", "|").replace("%25", "%")


def check_id(id: str) -> str:
    """The id itself, if it can name an effect. Raises ``InvalidKey`` with what is wrong and what to do."""
    if type(id) is str and id.isprintable() and len(id) <= LONGEST and id and not id.isspace():
        return id
    text = _checked("id", id)
    if not text.strip():
        raise InvalidKey(f"The id {shown(id)} is empty or blank. Give each intended effect an id of its own.")
    return text


def _checked(part: str, value: Any) -> str:
    if not isinstance(value, str):
        kind = type(value).__name__
        raise InvalidKey(
            f"The {part} {shown(value)} is of type {kind}. Pass a string, such as {_advice(part, value)}."
        )
    if len(value) > LONGEST:
        raise InvalidKey(
            f"The {part} {shown(value)} has {len(value)} characters, more than {LONGEST}."
            " Shorten it, or use keys.content_id of it."
        )
    if not value.isprintable() and (found := _FORBIDDEN.search(value)):
        raise InvalidKey(
            f"The {part} {shown(value)} has the control or surrogate character {found[0]!r}"
            f" at position {found.start()}. Remove it, or use keys.content_id of it."
        )
    return str.__str__(value)


def _advice(part: str, value: Any) -> str:
    if value is None:
        return f"the sender's {part} or keys.uuid4()" if part == "id" else "''"
    return f"{part}.hex() or {part}.decode()" if isinstance(value, _BYTES) else f"str({part})"


def digits(number: object) -> str:
    """An integer or a UUID as it stands in a key, whatever its own class makes of that for people to read.

    Python refuses to write out very long integers.
    """
    try:
        return int.__repr__(number) if isinstance(number, int) else _plain_uuid(number)
    except ValueError:
        raise InvalidKey(
            f"A number of thousands of digits has more than {LONGEST}. Use keys.content_id of it."
        ) from None


def _plain_uuid(part: Any) -> str:
    from uuid import UUID  # slow to import, and whoever passes one has done so

    return UUID.__str__(part)


def shown(value: Any) -> str:
    """A value in a message: not all of it, if it is long."""
    try:
        text = repr(value)
    except Exception:  # a very long integer, for one
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 60 else f"{text[:40]}…{text[-15:]}"


# -- Made by the client ----------------------------------------------------------------------------------------


def uuid4() -> str:
    """A random id (RFC 9562, version 4). Make it once, before the first try, and send it with every retry."""
    number = int.from_bytes(os.urandom(16))
    return _uuid_text(number >> 80, 0x4000 | number >> 64 & 0xFFF, number & (1 << 62) - 1)


def uuid7() -> str:
    """A random id that sorts by time (RFC 9562, version 7), also within one millisecond and one process."""
    return _clock.next()


def _uuid_text(high: int, middle: int, low: int) -> str:
    text = f"{high:012x}{middle:04x}{1 << 63 | low:016x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


class _Clock:
    """Counts upwards in 48 bits of milliseconds and 74 random bits, even if the time of day steps back."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._last = 0

    def next(self) -> str:
        entropy = int.from_bytes(os.urandom(14))
        with self._lock:
            now = time_ns() // 1_000_000
            if now > self._last >> 74:
                # The highest bit stays free, so that a busy millisecond doesn't run into the next one.
                self._last = now << 74 | entropy & (1 << 73) - 1
            else:
                self._last += 1 + (entropy >> 80)
            value = self._last
        return _uuid_text(value >> 74, 0x7000 | value >> 62 & 0xFFF, value & (1 << 62) - 1)

    def restart(self) -> None:
        """In a forked child: the parent goes on from the same number, and may have held the lock."""
        self._lock = Lock()
        self._last = (self._last >> 74) + 1 << 74 | int.from_bytes(os.urandom(9))


_clock = _Clock()
_random = random.Random(os.urandom(32))
_random_bits = _random.getrandbits


def new_owner() -> bytes:
    """The 128-bit name of one attempt. Unique, but no secret."""
    return _random_bits(128).to_bytes(16, "big")


def _after_fork() -> None:
    _clock.restart()
    _random.seed(os.urandom(32))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


# -- Made of what is known --------------------------------------------------------------------------------------


def composite(*parts: str | int | UUID) -> str:
    """``entity:operation:…``, with ``:`` and ``%`` inside a part escaped. A number counts as its digits.

    >>> composite("order", 7, "refund")
    'order:7:refund'
    """
    if not parts:
        raise InvalidKey("A composite key needs at least one part, such as composite('order', 7, 'refund').")
    return check_id(":".join(_part(index, part) for index, part in enumerate(parts)))


def _part(index: int, part: str | int | UUID) -> str:
    if isinstance(part, bool) or not (isinstance(part, str | int) or is_uuid(part)):
        kind = type(part).__name__
        raise InvalidKey(
            f"Part {index} of the composite key, {shown(part)}, is of type {kind}. Pass str, int or UUID."
        )
    text = str.__str__(part) if isinstance(part, str) else digits(part)
    if not text.strip():
        raise InvalidKey(f"Part {index} of the composite key is empty. Leave it out, or name what is meant.")
    return text.replace("%", "%25").replace(":", "%3A")


def is_uuid(part: Any) -> bool:
    from uuid import UUID  # slow to import, and whoever passes one has done so

    return isinstance(part, UUID)


def natural(payload: Any, *fields: str) -> str:
    """The id that the named fields make, dotted where they lie deeper: mapping keys, else attributes.

    Text and number differ. What is too long, or has characters an id can't have, becomes its hash.

    >>> natural({"order": {"id": 7}, "kind": "refund"}, "order.id", "kind")
    'order.id=7&kind="refund"'
    """
    if not fields:
        raise InvalidKey("A natural key needs at least one field, such as natural(payload, 'order.id').")
    text = "&".join(f"{_field_name(field)}={_field_text(payload, field)}" for field in fields)
    if len(text) <= LONGEST and not _FORBIDDEN.search(text):
        return text
    # A plain one always has "=", so no plain key looks like this.
    return "sha256:" + sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _field_name(field: str) -> str:
    return field.replace("%", "%25").replace("=", "%3D").replace("&", "%26")


def _field_text(payload: Any, field: str) -> str:
    return canonical(lookup(payload, field)).decode("utf-8", "surrogatepass")


def lookup(payload: Any, field: str) -> Any:
    """What lies under a dotted name. Raises ``InvalidKey`` if that is nothing to know an effect by."""
    value = payload
    for step in field.split("."):
        value = value.get(step) if isinstance(value, Mapping) else getattr(value, step, None)
    if value is None or (isinstance(value, str) and not value.strip()):
        state = "missing or None" if value is None else "blank"
        raise InvalidKey(
            f"The field {field!r} is {state}, so it names nothing. Use fields that are always set."
        )
    return value


# -- Made of the content ----------------------------------------------------------------------------------------


_VALUE_HASH = sha256(b"v")


def content_id(payload: Any, source: str = "") -> str:
    """The id of this content from this source: the same for any order of keys. Bytes count as they are."""
    return _hash(source, _content(payload))


def content_id_of_json(text: str | bytes, source: str = "") -> str:
    """The id of what a JSON document says, whatever its spacing: that of ``content_id`` of its value."""
    return _hash(source, b"v" + canonical_json(text))


def fingerprint(payload: Any) -> bytes:
    """16 bytes that tell one request from another under the same key; none for ``None``, which asks nothing."""
    if payload is None:
        return b""
    if isinstance(payload, _BYTES):
        return sha256(_content(payload)).digest()[:16]
    # The same as above, by a copy of a hash that has begun, which is quicker than a new one.
    hasher = _VALUE_HASH.copy()
    hasher.update(canonical(payload))
    return hasher.digest()[:16]


def derived(key_text: str, name: str) -> str:
    """The key to hand downstream, such as to a payment provider: it depends on nothing but the two texts.

    At most 64 characters, all of them fit for an HTTP header.
    """
    if not _checked("name", name).strip():
        raise InvalidKey("The name of the downstream call is empty. Use one such as 'stripe.charge'.")
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:23]
    return f"{readable}-{_hash(key_text, name.encode())[:40]}"


def _content(payload: Any) -> bytes:
    if isinstance(payload, _BYTES):
        return b"b" + bytes(payload)
    return b"v" + canonical(payload)


def _hash(first: str, second: bytes) -> str:
    # With the length in front, no move of the border between the two gives the same bytes.
    try:
        head = first.encode("utf-8", "surrogatepass")
    except AttributeError:
        raise InvalidKey(f"source={shown(first)}: parts of a key are text.") from None
    return sha256(b"%d:%b%b" % (len(head), head, second)).hexdigest()
