"""What RabbitMQ's two clients have in common: where the id is, how a pause is made, and what a dead letter looks like.

AMQP can't put off a delivery. So a message that is to come later stays here, unacknowledged, and goes back to its
queue when its pause is over. It keeps its place in the queue and is never copied; if this process dies, the broker
delivers it at once, which is early but harmless. What is held counts against the prefetch: a consumer whose messages
all fail comes to rest, rather than carrying the queue in circles.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Any, Final

from .._records import make
from ._delivery import Delivery, candidates
from ._letters import apart

WAIT_SECONDS: Final = 1.0
PREFETCH_BATCHES: Final = 2
"""How many batches a consumer holds at most: one that is under way and one that waits."""
ROOM_FOR_HEADERS: Final = (1 << 17) - (1 << 12)
"""All properties of a message are in one frame, of 128 KiB by default. At one that is larger the broker hangs up."""
ANY_SIZE: Final = 1 << 31
KEPT: Final = (
    "message_id", "timestamp", "content_type", "content_encoding", "correlation_id", "reply_to", "type", "app_id",
    "priority",
)  # fmt: skip
ROUTES: Final = {"CC": "dead-cc", "BCC": "dead-bcc"}
"""Headers by which the broker sends copies to other queues, to the one that a dead letter comes from for example."""


def delivery_of(
    handle: Any,
    queue: str,
    wanted: Any,
    *,
    message_id: object,
    headers: Mapping[str, Any] | None,
    timestamp: float | None,
    body: bytes,
    redelivered: bool,
) -> Delivery:
    """A delivery; quorum queues count, others only say that it is not the first."""
    found = headers or {}
    ids: tuple[tuple[str, object], ...] = (
        ("the property message_id", message_id),
        ("the header id", found.get("id")),
    )
    if wanted is not None:
        ids = candidates(wanted, handle, found.get, ids)
    counted = found.get("x-delivery-count")
    times = counted + 1 if isinstance(counted, int) else 1 + redelivered
    return make(Delivery, (handle, queue, ids, body, len(body), timestamp, times, None, None))


def kept(about: Any) -> dict[str, Any]:
    """What a dead letter has of its message's properties; both clients call them by the same names."""
    return {name: getattr(about, name) for name in KEPT}


def letters_of(
    own: Mapping[str, Any] | None, told: Mapping[str, str], body: bytes
) -> list[tuple[dict[str, Any], bytes]]:
    """The headers and body of a dead letter: in parts, if its own headers leave no room for what is told."""
    whole = {ROUTES.get(name, name): value for name, value in (own or {}).items()} | dict(told)
    if size_of(whole) <= ROOM_FOR_HEADERS:
        return [(whole, body)]
    return [({**told, **more}, each) for more, each in apart(own, body, ANY_SIZE)]


def size_of(value: object) -> int:
    """How many bytes a value takes in a table of AMQP, at most."""
    if isinstance(value, str):
        return 5 + len(value.encode("utf-8", "surrogatepass"))
    if isinstance(value, bytes | bytearray):
        return 5 + len(value)
    if isinstance(value, Mapping):
        return 5 + sum(size_of(name) + size_of(each) for name, each in value.items())
    if isinstance(value, list | tuple):
        return 5 + sum(map(size_of, value))
    return 9


class Unsettled:
    """The tags of a channel's deliveries that are not settled, by which many can be acknowledged at once.

    An acknowledgement of *multiple* is of every tag up to one. So it stops before the first that has to wait: held
    back, or not even looked at.
    """

    def __init__(self) -> None:
        self._tags: set[int] = set()

    def add(self, tag: int) -> None:
        """It was delivered."""
        self._tags.add(tag)

    def drop(self, tag: int) -> None:
        """It went back to its queue."""
        self._tags.discard(tag)

    def settle(self, tags: Iterable[int]) -> tuple[int, list[int]]:
        """These are done: the tag up to which to acknowledge (0: none), and those to acknowledge one by one."""
        done = sorted(tags)
        self._tags.difference_update(done)
        first = min(self._tags, default=inf)
        together = [tag for tag in done if tag < first]
        return (together[-1] if together else 0), done[len(together) :]


class Held:
    """Messages that go back to their queue later."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Any]] = []
        self._order = count()

    def hold(self, until: float, handle: Any) -> None:
        """Keep a message until then."""
        heappush(self._heap, (until, next(self._order), handle))

    def due(self, now: float) -> list[Any]:
        """Those whose pause is over."""
        found: list[Any] = []
        while self._heap and self._heap[0][0] <= now:
            found.append(heappop(self._heap)[2])
        return found

    def wait(self, now: float) -> float:
        """How long to wait for new messages before somebody has to look here again."""
        return min(max(self._heap[0][0] - now, 0.0), WAIT_SECONDS) if self._heap else WAIT_SECONDS
