"""What comes in and what goes out: a message, and the outcome of processing it."""

from __future__ import annotations

from datetime import datetime
from math import inf
from typing import Any, Generic, Literal, NamedTuple, Self, TypeVar

from . import keys
from ._records import Guarantee, make
from .errors import UsageError

T = TypeVar("T")
NOT_SECONDS = 1e11
"""The year 5138 in seconds, and March 1973 in milliseconds: no time of a message is both."""

Status = Literal[
    "executed", "replayed", "in_progress", "mismatch", "failed", "in_doubt", "late", "store_error"
]


class _MessageFields(NamedTuple):
    id: str
    payload: Any = None
    timestamp: datetime | float | None = None
    source: str = ""


class Message(_MessageFields):
    """Something that may arrive twice.

    ``id`` is the sender's and the same on every delivery; ``source`` says whose ids these are; ``payload`` is what
    is asked (its hash is the fingerprint); ``timestamp`` (aware datetime or seconds since 1970) is when it was sent.
    """

    __slots__ = ()

    def __new__(
        cls, id: str, payload: Any = None, timestamp: datetime | float | None = None, source: str = ""
    ) -> Self:
        keys.check_id(id)
        if timestamp is not None and not (type(timestamp) is float and -inf < timestamp < NOT_SECONDS):
            _check_time(timestamp)
        return make(cls, (id, payload, timestamp, source))

    def _replace(self, **changes: Any) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        """A changed copy, checked like a new one."""
        return type(self)(**(self._asdict() | changes))

    @classmethod
    def with_content_id(
        cls, payload: Any, *, source: str = "", timestamp: datetime | float | None = None
    ) -> Message:
        """A message whose sender gave it no id: the same content from the same source has the same id."""
        return cls(keys.content_id(payload, source), payload, timestamp, source)


def _check_time(timestamp: object) -> None:
    if isinstance(timestamp, datetime):
        if timestamp.tzinfo is None:
            raise UsageError(f"timestamp={timestamp!r} has no time zone, so its age can't be told.")
    elif (
        isinstance(timestamp, bool)
        or not isinstance(timestamp, int | float)
        or not -NOT_SECONDS < timestamp < inf
    ):
        raise UsageError(
            f"timestamp={timestamp!r} is not a time. Give an aware datetime or seconds since 1970."
        )
    elif timestamp >= NOT_SECONDS:  # it would never be too old, and late= would protect from nothing
        raise UsageError(
            f"timestamp={timestamp!r} can't be seconds since 1970. Divide milliseconds, as brokers give them, by 1000."
        )


class Outcome(NamedTuple, Generic[T]):
    """What became of one delivery. A duplicate is a value here, not an exception."""

    status: Status
    value: T | None = None
    replayed: bool = False
    attempt: int = 0
    fence: int = 0
    guarantee: Guarantee = "fenced"
    error: BaseException | None = None

    def unwrap(self) -> Outcome[T]:
        """This outcome, unless it has no result to give: then its error is raised."""
        if self.error is not None:
            raise self.error
        return self
