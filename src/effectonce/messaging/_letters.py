"""What a dead letter looks like on any broker: what is told of it, and how one that is too large comes in parts. Pure.

The whole message is put aside, with its own headers; what is told stands beside them, under names that begin with
``dead-``. A broker has limits, for a message and for its headers, and a letter must never be lost to them.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Final

from ._delivery import BYTES, DeadLetter, Delivery

LEAST_ROOM: Final = 1 << 15
"""What a part of a dead letter has room for at least; a message whose own headers leave less comes without them."""


def labels(letter: DeadLetter, delivery: Delivery) -> dict[str, str]:
    """What goes with a dead letter, as headers or fields beside the message's own."""
    sent = letter.first_seen if delivery.timestamp is None else delivery.timestamp
    found = {
        "dead-reason": letter.reason,
        "dead-detail": letter.detail,
        "dead-source": delivery.source,
        "dead-consumer": letter.consumer,
        "dead-attempts": str(letter.attempts),
        "dead-deliveries": str(delivery.times),
        "dead-first-seen": "" if sent is None else _written(sent),
    }
    return {name: text for name, text in found.items() if text}


def parts(body: bytes, room: int) -> list[tuple[dict[str, str], bytes]]:
    """The body of a dead letter, and what to say of it: one that is too large with all that is told comes in parts."""
    found = _cut(body, room)
    return [({}, body)] if len(found) == 1 else _numbered([({}, each) for each in found])


def crowded(body: bytes, room: int) -> bool:
    """Whether a message's own headers leave too little room for it, together with what is told: see ``apart``."""
    return room < min(len(body), LEAST_ROOM)


def apart(own: object, body: bytes, room: int) -> list[tuple[dict[str, str], bytes]]:
    """The same for a message whose own headers leave no room for what is told: they follow its body, as JSON."""
    headers = json.dumps(own, default=_text).encode()
    bodies = [(dict[str, str](), each) for each in _cut(body, room)]
    return _numbered([*bodies, *(({"dead-headers": "json"}, each) for each in _cut(headers, room))])


def _cut(body: bytes, room: int) -> list[bytes]:
    room = max(room, LEAST_ROOM)
    return [body[start : start + room] for start in range(0, len(body), room)] or [body]


def _numbered(found: list[tuple[dict[str, str], bytes]]) -> list[tuple[dict[str, str], bytes]]:
    count = len(found)
    return [({"dead-part": f"{place}/{count}", **more}, each) for place, (more, each) in enumerate(found, 1)]


def _text(value: object) -> str:
    return value.decode("utf-8", "backslashreplace") if isinstance(value, BYTES) else str(value)


def _written(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    except (OverflowError, ValueError, OSError):  # a sender may claim any time
        return repr(seconds)
