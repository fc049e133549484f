"""Every error effectonce raises, in one tree.

EffectOnceError
├── UsageError                  the call or its configuration is wrong; nothing was claimed
│   ├── InvalidKey              an id, scope, operation or version that can't name an effect
│   ├── Unencodable             a value that has no faithful stored form; ``path`` names the spot
│   ├── ColourMismatch          a coroutine handed to a blocking call, or the other way round
│   └── MissingExtra            an optional dependency is not installed
├── Refused                     the handler was not run, and this call has no result
│   ├── InProgress              another attempt holds the key; ``retry_after`` says when to ask again
│   ├── KeyReused               the key was used before with another payload
│   ├── InDoubt                 an attempt ended without a word; a prober or a person has to settle it
│   ├── LateArrival             the message is older than what the store remembers
│   ├── AttemptsExhausted       every allowed attempt crashed or failed
│   ├── RememberedError         the first attempt's error, when its own type can't be rebuilt here
│   ├── AlreadyUndone           the compensation of this action came before it, so it never runs
│   ├── SessionExpired          there is no such client session, or no longer; nothing runs in it
│   ├── StaleRequest            the client has acknowledged a request of this number, so it never runs again
│   ├── Fenced                  another process goes on with this client session
│   └── BadRequest              a number or a mark that no client session can have
│       └── WindowExceeded      the number is too far above what the client has acknowledged
├── StaleVersion                the row is not at the version that was read; ``actual`` is where it is
├── VersionGap                  an event came before an earlier one of its entity; ``applied`` is where that is
├── StepMismatch                a handler asks for other steps than an earlier attempt has finished
├── Compensated                 a saga could not go on, and what it had done is undone; ``step`` and ``reason``
├── LeaseLost                   the attempt outlived its lease; its result was not recorded
├── ResultUnavailable           the effect happened once, but its result was never stored
├── StoreError                  the store gave no usable answer
│   ├── StoreUnavailable        it can't be reached or can't write now; ``retry_after`` says when to ask again
│   │   └── StoreClosed         the receiver was closed, and its store with it
│   └── StoreMismatch           it is not ours: another program's file, a newer schema, a corrupt record
└── NotApplied                  raised by a handler: "nothing happened, a retry may run again"

Each message says what happened, to which key, and what to do next.
"""

from __future__ import annotations

from typing import Any


class EffectOnceError(Exception):
    """The root of the tree. ``key`` names the effect concerned, where there is one."""

    key: str | None = None

    def __init__(self, message: str = "", *, key: str | None = None) -> None:
        super().__init__(f"{message} [key {key}]" if key else message)
        self.key = key


class UsageError(EffectOnceError, ValueError):
    """The call or its configuration is wrong; nothing was claimed and nothing ran."""


class InvalidKey(UsageError):
    """An id, scope, operation or version that can't name an effect."""


class Unencodable(UsageError, TypeError):
    """A value without a faithful stored form. ``path`` names the spot, ``type`` its class, ``why`` the reason."""

    def __init__(self, path: str, type: type, why: str) -> None:
        super().__init__()
        self.path, self.type, self.why = path, type, why

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.type, self.why)

    def __str__(self) -> str:
        path = self.path if len(self.path) <= 120 else f"{self.path[:60]}…{self.path[-60:]}"
        kind = f"{self.type.__module__}:{self.type.__qualname__}"
        return f"{path} is a {kind}, which can't be encoded: {self.why}"


class ColourMismatch(UsageError, TypeError):
    """A coroutine function was handed to a blocking call, or a blocking one where it can't run."""


class MissingExtra(UsageError, ImportError):
    """An optional dependency is not installed; the message names the extra that brings it."""


class Refused(EffectOnceError):
    """The handler was not run and there is no result to give."""


class InProgress(Refused):
    """Another attempt holds the key. Ask again after ``retry_after`` seconds."""

    def __init__(self, message: str = "", *, key: str | None = None, retry_after: float = 1.0) -> None:
        super().__init__(message, key=key)
        self.retry_after = retry_after


class KeyReused(Refused):
    """The key was used before with another payload. Use a new key for a new request."""


class InDoubt(Refused):
    """An attempt ended without a word. ``Receiver.resolve`` or a prober settles what happened."""


class LateArrival(Refused):
    """The message is older than the window the store remembers, so it can't be proven new."""


class AttemptsExhausted(Refused):
    """Every allowed attempt crashed or failed; the key is closed for as long as it is remembered."""


class RememberedError(Refused):
    """The first attempt's error, replayed, when its own type can't be rebuilt in this process."""

    def __init__(self, message: str = "", *, key: str | None = None, error_type: str = "") -> None:
        super().__init__(message, key=key)
        self.error_type = error_type


class AlreadyUndone(Refused):
    """The compensation of this action came before it. ``may_have_happened`` is what the compensation had to assume."""

    def __init__(self, message: str = "", *, key: str | None = None, may_have_happened: bool = False) -> None:
        super().__init__(message, key=key)
        self.may_have_happened = may_have_happened


class SessionExpired(Refused):
    """There is no such client session: its lease is over, or it was never opened, or it is another client's."""


class StaleRequest(Refused):
    """The client has acknowledged a request of this number: its answer is gone, and it never runs again."""


class Fenced(Refused):
    """Another process goes on with this client session, under a later epoch."""


class BadRequest(Refused, UsageError):
    """A number or a mark that no client session can have: nothing was claimed, and nothing ran."""


class WindowExceeded(BadRequest):
    """The request's number is ``window`` or more above what the client has acknowledged."""

    def __init__(self, message: str = "", *, key: str | None = None, window: int = 0) -> None:
        super().__init__(message, key=key)
        self.window = window


class StaleVersion(EffectOnceError):
    """The row is not at the ``expected`` version, so nothing was written. ``actual`` is None where there is no row."""

    def __init__(self, message: str = "", *, expected: int = 0, actual: int | None = None) -> None:
        super().__init__(message)
        self.expected, self.actual = expected, actual


class VersionGap(EffectOnceError):
    """An event came too early: ``version``, while its ``entity`` is at ``applied``. Let it be delivered again."""

    def __init__(self, message: str = "", *, entity: str = "", applied: int = 0, version: int = 0) -> None:
        super().__init__(message)
        self.entity, self.applied, self.version = entity, applied, version


class StepMismatch(EffectOnceError):
    """The handler asked for one step where an earlier attempt had finished another; it was not run."""

    def __init__(
        self, message: str = "", *, key: str | None = None, recorded: str = "", asked: str = ""
    ) -> None:
        super().__init__(message, key=key)
        self.recorded, self.asked = recorded, asked


class Compensated(EffectOnceError):
    """A saga could not go on at ``step``, for a ``reason``, and what it had done is undone: the answer to its id."""

    def __init__(
        self,
        message: str = "",
        *,
        key: str | None = None,
        step: str = "",
        reason: str = "",
        journal: str = "{}",
    ) -> None:
        super().__init__(message, key=key)
        self.step, self.reason, self.journal = step, reason, journal


class LeaseLost(EffectOnceError):
    """The attempt outlived its lease; its result was not recorded and must not be trusted."""


class ResultUnavailable(EffectOnceError):
    """The effect happened once, but its result could not be stored, so there is nothing to replay."""


class StoreError(EffectOnceError):
    """The store gave no usable answer; without one nothing runs."""


class StoreUnavailable(StoreError):
    """The store can't be reached or can't write now. Ask again after ``retry_after`` seconds."""

    sent = True
    """Whether the store may have got the command, and only its answer is missing."""

    def __init__(self, message: str = "", *, key: str | None = None, retry_after: float = 1.0) -> None:
        super().__init__(message, key=key)
        self.retry_after = retry_after


class StoreClosed(StoreUnavailable):
    """The receiver was closed, and its store with it. Asking it again does not help; another process may answer."""

    sent = False


class StoreMismatch(StoreError):
    """What is there is not ours to use: another program's data, a newer schema, a corrupt record."""


class NotApplied(EffectOnceError):
    """Raised by a handler to say that nothing happened: the claim is released and a retry may run."""
