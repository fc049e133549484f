"""An event on its way out: what is stored of it, what a publisher gets, and what a publisher answers.

An event's id never changes. It is what a consumer, or the broker itself, recognises a repetition by, so it is made of
nothing but what is the same when a handler runs again: the key of what is being handled, or of the step that runs, the
topic, the event's key, and how many such events came before it.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Mapping, Sequence
from itertools import count
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable
from uuid import uuid4

from .. import keys
from .._attempt import CURRENT
from .._records import make
from ..errors import EffectOnceError, UsageError

LONGEST: Final = 255
"""Characters of an id, a topic or a key: what an index of every engine can hold."""


NAMES_OF_THE_ID: Final = {"id", "idempotency-key", "nats-msg-id"}
"""Headers in which publishers send an event's id."""


class Event(NamedTuple):
    """One event, as publishers get it."""

    seq: int
    """The order in which events were added."""
    id: str
    """The same each time it is published."""
    topic: str
    key: str | None
    """The aggregate it is about: events of the same key are published in order."""
    payload: bytes
    headers: Mapping[str, str]
    attempts: int
    """How often it was taken to be published, this time included."""
    created_at: float
    """When it was added: seconds since 1970, on the database's clock."""


class DeadEvent(NamedTuple):
    """An event that was given up."""

    event: Event
    reason: str
    blocks: bool
    """Whether later events of its key wait for it."""


class Unsent(EffectOnceError):
    """The broker did not confirm an event, through no fault of the event: it is sent again, and no attempt counted."""


def never_awaited(given: Any) -> UsageError:
    """What to say of a publisher that is async and does not look so: nobody would wait for it."""
    getattr(given, "close", lambda: None)()
    return UsageError(
        f"The publisher gave a {type(given).__name__}, so nothing was sent. Write it as `async def`, so that the "
        "relay can see that it has to be awaited."
    )


Results = Sequence[Exception | None]
"""For each event, in order: None when the broker has it, else why not."""


@runtime_checkable
class Publisher(Protocol):
    """Hands events to a broker. ``publish`` and ``close`` may be ``async def``, both of them; the relay asks.

    ``publish`` answers for each event: None; the error that is that event's own, which counts as an attempt; or
    ``Unsent``, which does not. It raises when the broker is away: then all events were unsent. With ``keeps_order`` it
    promises that after a failed event no later one of the same key in the same call has arrived; without, the relay
    never hands it two of the same key at once.
    """

    keeps_order: bool

    def publish(self, events: Sequence[Event], /) -> Results | Awaitable[Results]:
        """Hand over events, and return when the broker has confirmed them."""
        ...

    def close(self) -> Awaitable[None] | None:
        """Let go of the broker."""
        ...


def event_of(row: Sequence[Any]) -> Event:
    """An event out of a row: seq, id, topic, aggregate, payload, headers, attempts, created_at."""
    seq, name, topic, key, payload, headers, attempts, created_at = row
    named = json.loads(headers) if headers else {}
    return make(Event, (seq, name, topic, key, payload, named, attempts, created_at))


def row_of(
    topic: str, payload: object, key: str | None, headers: Mapping[str, str] | None, id: str | None
) -> tuple[str, str, str | None, bytes, str | None]:
    """What is stored: id, topic, aggregate, payload, headers."""
    texts: tuple[tuple[str, Any], ...] = (("topic", topic), ("key", key), ("id", id))
    for name, text in texts:
        if not (text is None and name != "topic") and not _is_name(text):
            raise UsageError(f"{name}={text!r:.80} must be text of 1 to {LONGEST} characters, without NUL.")
    return id or new_id(topic, key), topic, key, encoded(payload), _encoded_headers(headers)


def new_id(topic: str, key: str | None) -> str:
    """Inside a handler an id that a re-run makes again; elsewhere a random one."""
    attempt = CURRENT.get(None)
    if attempt is None:
        return uuid4().hex
    # Counted apart for each topic and key: a handler that publishes one more elsewhere shifts nobody's ids. And apart
    # for each step: one that is finished is not run again, and those after it must not be given its ids.
    part = attempt.part
    counters: dict[tuple[str, str | None], count[int]] = part.__dict__.setdefault("_outbox_ordinals", {})
    ordinal = next(counters.setdefault((topic, key), count()))
    # A topic's blanks are doubled, so that it ends where the single one is.
    name = f"{topic.replace(' ', '  ')} {'' if key is None else 'of ' + key} #{ordinal}"
    return keys.derived(part.key, name)


def encoded(payload: object) -> bytes:
    """A payload's bytes: text as UTF-8, bytes as they are, everything else as JSON."""
    if isinstance(payload, bytes | bytearray | memoryview):
        return bytes(payload)
    try:
        if isinstance(payload, str):
            return payload.encode()
        return json.dumps(payload, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"The payload has half of a surrogate pair in it ({error.object[error.start]!r} at character "
            f"{error.start}), so it is no text. Replace it, or give bytes of your own encoding."
        ) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"The payload can't be written as JSON: {error}. Give JSON values, text, or bytes of your own encoding."
        ) from None


def _encoded_headers(headers: Mapping[str, str] | None) -> str | None:
    if not headers:
        return None
    if not isinstance(headers, Mapping):
        raise UsageError(
            f"headers= is a {type(headers).__name__}. Give a dictionary of texts: one value for each name."
        )
    pairs: Any = headers.items()
    for name, value in pairs:
        if not (name and _is_text(name) and _is_text(value)):
            raise UsageError(f"The header {name!r:.80} must be text with a text for its value.")
        if name.lower() in NAMES_OF_THE_ID:
            raise UsageError(
                f"The header {name!r} is where consumers look for the event's id. Give that as id=…."
            )
        if any(forbidden in name + value for forbidden in "\r\n\0"):
            raise UsageError(f"The header {name!r:.80} has a line break or a NUL in it.")
    return json.dumps(dict(headers), separators=(",", ":"))


def _is_name(text: Any) -> bool:
    return _is_text(text) and 0 < len(text) <= LONGEST and "\0" not in text


def _is_text(text: Any) -> bool:
    try:
        return isinstance(text, str) and text.encode() is not None
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
