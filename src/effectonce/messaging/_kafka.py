"""What Kafka's two clients have in common: records, and what follows for offsets from what became of them.

A partition has one offset, so its records are handled in order and committed up to the first that has to come again.
That one is sought after its pause; what follows it is fetched again with it. Records that were done before are then
absorbed by their claims.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from .._records import make
from ._delivery import DeadLetter, Delivery, Nack, Verdict, candidates, or_place
from ._letters import apart, crowded, parts

WAIT_SECONDS: Final = 1.0
DEFAULT_POLL_SECONDS: Final = 300.0
"""Kafka's max.poll.interval.ms: a consumer that asks for nothing for so long loses its partitions."""


AROUND: Final = 512
"""Bytes that a record needs besides what is in it, at most."""
AROUND_HEADER: Final = 10
"""And a header: the lengths of its name and its value."""
ANY_SIZE: Final = 1 << 31
"""More than a record can have."""
TOO_LARGE: Final = 10
TOPIC: Final = re.compile(r"[A-Za-z0-9._-]{1,249}")
REFUSALS: Final = frozenset({17, 24, 29, 30, 31, 33, 53, 58, -169})
"""Kafka's codes, and librdkafka's own, for names that can't be, for what a user may not do and for who is not known.
That there is no such topic is not among them: it may be on its way."""


class Place(NamedTuple):
    """A partition. As text it names the cursor."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}"


class Record(NamedTuple):
    """A record as either client hands it over."""

    place: Place
    offset: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, Any]]
    timestamp: float | None

    def header(self, name: str) -> object:
        """The value of a header; one that comes twice is no text, and so no id."""
        found = [value for each, value in self.headers if each == name]
        return found[0] if len(found) == 1 else found or None


class Output(NamedTuple):
    """A record to be produced by a Transformer."""

    topic: str
    value: bytes | str | None
    key: bytes | str | None = None
    headers: Mapping[str, bytes | str] = {}

    def size(self) -> int:
        """How many bytes it takes, about."""
        parts = [self.value, self.key, *self.headers, *self.headers.values()]
        sizes = [len(each.encode() if isinstance(each, str) else each) for each in parts if each]
        return AROUND + sum(sizes)


def is_topic(name: object) -> bool:
    """Whether it can be the name of a topic."""
    return isinstance(name, str) and TOPIC.fullmatch(name) is not None and name not in (".", "..")


def code_of(error: Exception) -> int | None:
    """Kafka's own code for an error, of either client."""
    if isinstance(error, OSError):  # whose numbers are the system's
        return None
    told: Any = error.args[0] if error.args else None
    found = told.code() if hasattr(told, "code") else getattr(error, "errno", None)
    return found if isinstance(found, int) else None


def is_refusal(error: Exception) -> bool:
    """Whether Kafka does not let us in, or never does what is asked for."""
    return code_of(error) in REFUSALS


def delivery_of(record: Record, wanted: Any) -> Delivery:
    """A delivery. Kafka does not count them."""
    place, offset, _, value, _, sent = record
    ids = or_place("the header id", record.header("id"), place.partition, offset)
    if wanted is not None:
        ids = candidates(wanted, record, record.header, ids)
    at, size = (str(place), offset), len(value or b"")
    return make(Delivery, (record, place.topic, ids, value, size, sent, 1, place, at))


def decoding(decode: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same, but for tombstones: a record without a value is one with the payload None."""
    return lambda value: None if value is None else decode(value)


def pieces(
    record: Record, told: Mapping[str, str], largest: int
) -> Iterator[tuple[bytes | None, list[tuple[str, Any]]]]:
    """The value and headers of a dead letter. What is too large with all that is told comes in parts, in order."""
    headers, body = [*record.headers, *_encoded(told)], record.value or b""
    room = largest - len(record.key or b"") - AROUND
    if crowded(body, room - size_of(headers)):
        headers = _encoded(told)
        found = apart(record.headers, body, room - size_of(headers))
    else:
        found = parts(body, room - size_of(headers))
    for more, value in found:
        yield value if value or record.value is not None else None, [*headers, *_encoded(more)]


def size_of(headers: Iterable[tuple[str, Any]]) -> int:
    """How many bytes headers take, at most."""
    return sum(len(name.encode()) + len(value or b"") + AROUND_HEADER for name, value in headers)


def _encoded(told: Mapping[str, str]) -> list[tuple[str, Any]]:
    return [(name, text.encode()) for name, text in told.items()]


class Plan(NamedTuple):
    """What follows from a batch."""

    commits: dict[Place, int]
    """The next offset of each partition in which something is done."""
    again: dict[Place, tuple[int, float]]
    """The offset to go back to, and the pause before."""
    letters: list[tuple[Delivery, DeadLetter]]
    """What to put aside before anything is committed."""


def plan(settled: Iterable[tuple[Delivery, Verdict]]) -> Plan:
    """Up to the first record of a partition that comes again, all is done; nothing after it is."""
    commits: dict[Place, int] = {}
    again: dict[Place, tuple[int, float]] = {}
    letters: list[tuple[Delivery, DeadLetter]] = []
    for delivery, verdict in settled:
        record: Record = delivery.handle
        if record.place in again:
            continue
        if isinstance(verdict, Nack):
            again[record.place] = (record.offset, verdict.delay)
            continue
        if isinstance(verdict, DeadLetter):
            letters.append((delivery, verdict))
        commits[record.place] = record.offset + 1
    return Plan(commits, again, letters)


class Pauses:
    """Partitions that rest until it is time to fetch a record again."""

    def __init__(self) -> None:
        self._until: dict[Place, float] = {}

    def rest(self, place: Place, until: float) -> None:
        """Let a partition rest."""
        self._until[place] = until

    def forget(self, places: Iterable[Place]) -> None:
        """They are somebody else's now."""
        for place in places:
            self._until.pop(place, None)

    def due(self, now: float) -> list[Place]:
        """Those that have rested long enough."""
        due = [place for place, until in self._until.items() if until <= now]
        self.forget(due)
        return due

    def resting(self) -> set[Place]:
        """Those that rest."""
        return set(self._until)

    def wait(self, now: float) -> float:
        """How long to wait for records before somebody has to look here again."""
        return min([WAIT_SECONDS, *(max(until - now, 0.0) for until in self._until.values())])
