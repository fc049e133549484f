"""How one operation is treated: how long it is remembered, and what happens when it meets trouble."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, fields
from inspect import iscoroutinefunction
from typing import Any, Literal, NamedTuple, Self

from ._durations import Duration, seconds
from ._records import Record
from .errors import UsageError

Busy = Literal["wait", "reject", "join", "skip"]
OnCrash = Literal["retry", "in_doubt"]
Late = Literal["reject", "process", "dead_letter"]
Fallback = Literal["closed", "cached_response", "open"]
ExceptionTypes = tuple[type[BaseException], ...]


class Resolution(NamedTuple):
    """What a prober or a person found out about an attempt that ended without a word."""

    kind: Literal["completed", "failed", "not_applied"]
    value: Any = None
    hint: Any = Any

    @classmethod
    def completed(cls, value: Any = None, *, hint: Any = Any) -> Resolution:
        """The effect happened; ``value`` is its result.

        ``hint`` is the type of a value that needs one, as the function's return annotation says it. A call of the
        function knows it by itself; a sweep does not.
        """
        return cls("completed", value, hint)

    @classmethod
    def failed(cls, error: BaseException) -> Resolution:
        """The effect was refused for good; every repeat gets ``error``.

        It comes back with its type where ``remember=`` lists that, elsewhere as a ``RememberedError`` with its text.
        """
        return cls("failed", error)

    @classmethod
    def not_applied(cls) -> Resolution:
        """Nothing happened: the next delivery may run."""
        return cls("not_applied")


Prober = Callable[[Record], "Resolution | Awaitable[Resolution | None] | None"]
"""Asks the outside world what became of an attempt in doubt; None when it can't tell yet. On a loop it may be async."""

WORDS: dict[str, tuple[str, ...]] = {
    "busy": ("wait", "reject", "join", "skip"),
    "on_crash": ("retry", "in_doubt"),
    "late": ("reject", "process", "dead_letter"),
    "fallback": ("closed", "cached_response", "open"),
}
FALLBACK_CACHE = 10_000
"""Finished keys that a process holds to answer duplicates while the store is away."""


@dataclass(frozen=True, init=False, slots=True)
class Policy:
    """How an operation is treated. Immutable; ``policy.but(keep="7d")`` gives a changed copy.

    keep          how long a finished key is remembered
    lease         how long a claim holds without renewal; a crashed worker's key is free after this
    busy          a duplicate of a running attempt: "wait" for it, "reject" (InProgress), "join" it (its error is
                  shared too), or "skip" (an outcome without a result)
    wait          how long "wait" and "join" wait at most, 0 is not at all; by default the lease and a little more
    remember      exception types that are a result: every repeat gets the same error
    in_doubt      exception types after which nobody knows what happened, such as a time-out; in an ExceptionGroup, too
    on_crash      an attempt that ended without a word, by a crash, Ctrl-C or cancellation. "retry": the next delivery
                  takes over when its lease is over; "in_doubt": it waits for a prober or a person
    max_attempts  after so many attempts the key fails for good; None is no limit
    late          a message older than ``keep`` that the store doesn't know: "reject", "process" or "dead_letter"
    dead_letter   called with the key and the reason, for late messages and used-up attempts
    store_result  False remembers that it happened but not what it returned; repeats then return None
    max_result    a larger encoded result is not stored; repeats then raise ResultUnavailable. Of a larger error that is
                  remembered, the beginning of its message is
    local_cache   how many finished keys this process answers without asking the store; 0 is none
    fallback      while the store is away: "closed" refuses; "cached_response" answers duplicates that this process has
                  seen, and refuses the rest; "open" runs them too, unprotected, but nothing that this process is at
    prober        called with the record of an attempt in doubt; says what happened, or None
    """

    keep: float
    lease: float
    busy: Busy
    wait: float
    remember: ExceptionTypes
    in_doubt: ExceptionTypes
    on_crash: OnCrash
    max_attempts: int | None
    late: Late
    dead_letter: Callable[[str, str], object] | None
    store_result: bool
    max_result: int
    local_cache: int
    fallback: Fallback
    prober: Prober | None
    terms: tuple[float, float, bool, int | None] = field(init=False, repr=False, compare=False)
    cached: int = field(init=False, repr=False, compare=False)
    """How many finished keys this process holds, for one use or the other."""

    def __init__(
        self,
        *,
        keep: Duration = "24h",
        lease: Duration = "2m",
        busy: Busy = "wait",
        wait: Duration | None = None,
        remember: ExceptionTypes = (),
        in_doubt: ExceptionTypes = (),
        on_crash: OnCrash = "retry",
        max_attempts: int | None = None,
        late: Late = "reject",
        dead_letter: Callable[[str, str], object] | None = None,
        store_result: bool = True,
        max_result: int = 1 << 20,
        local_cache: int = 0,
        fallback: Fallback = "closed",
        prober: Prober | None = None,
    ) -> None:
        lease_seconds = seconds(lease, "lease")
        values = {
            "keep": seconds(keep, "keep"),
            "lease": lease_seconds,
            "busy": _word("busy", busy),
            "wait": lease_seconds * 1.1 + 1.0 if wait is None else seconds(wait, "wait", may_be_zero=True),
            "remember": _types("remember", remember),
            "in_doubt": _types("in_doubt", in_doubt),
            "on_crash": _word("on_crash", on_crash),
            "max_attempts": None if max_attempts is None else _count("max_attempts", max_attempts, 1),
            "late": _word("late", late),
            "dead_letter": _callback("dead_letter", dead_letter),
            "store_result": _flag("store_result", store_result),
            "max_result": _count("max_result", max_result, 0),
            "local_cache": _count("local_cache", local_cache, 0),
            "fallback": _word("fallback", fallback),
            "prober": _callback("prober", prober),
        }
        if values["late"] == "dead_letter" and dead_letter is None:
            raise UsageError(
                'late="dead_letter" needs dead_letter=, a function that takes the key and the reason.'
            )
        if iscoroutinefunction(dead_letter):  # nobody would await it, and what it should put aside were lost
            raise UsageError(
                f"dead_letter={dead_letter!r} is a coroutine function. Give a plain one, such as a queue's put_nowait."
            )
        for name, value in values.items():
            object.__setattr__(self, name, value)
        terms = (self.lease, self.keep, self.on_crash == "in_doubt", max_attempts)  # as a claim has them
        object.__setattr__(self, "terms", terms)
        spare = 0 if self.fallback == "closed" else FALLBACK_CACHE
        object.__setattr__(self, "cached", max(self.local_cache, spare))

    def but(self, **changes: Any) -> Self:
        """A copy with some words changed. A derived ``wait`` follows a changed lease."""
        mine = {each.name: getattr(self, each.name) for each in fields(self) if each.init}
        if mine["wait"] == self.lease * 1.1 + 1.0:
            mine["wait"] = None
        return type(self)(**(mine | changes))

    @classmethod
    def _preset(cls, words: dict[str, Any], changes: dict[str, Any]) -> Self:
        return cls(**(words | changes))

    @classmethod
    def payments(cls, **changes: Any) -> Self:
        """Money: two days of memory, so that a weekend's retry still meets its first answer."""
        return cls._preset({"keep": "48h"}, changes)

    @classmethod
    def notifications(cls, **changes: Any) -> Self:
        """Mails and pushes: four hours; a duplicate is skipped rather than waited for."""
        return cls._preset({"keep": "4h", "busy": "skip"}, changes)

    @classmethod
    def api(cls, **changes: Any) -> Self:
        """Requests: a day; a duplicate in flight is told to come back."""
        return cls._preset({"keep": "24h", "busy": "reject"}, changes)

    @classmethod
    def async_messages(cls, **changes: Any) -> Self:
        """Queues: a week, because brokers redeliver late; a duplicate in flight goes back to the queue."""
        return cls._preset({"keep": "7d", "busy": "reject"}, changes)


def _word(name: str, word: Any) -> str:
    # People write dead-letter and in-doubt, too.
    plain = word.replace("-", "_") if isinstance(word, str) else word
    if plain not in WORDS[name]:
        raise UsageError(
            f"{name}={word!r} is not a word of the policy. Choose one of {', '.join(WORDS[name])}."
        )
    return plain


def _types(name: str, types: Any) -> ExceptionTypes:
    listed = (types,) if isinstance(types, type) else types
    if not isinstance(listed, tuple) or not all(
        isinstance(t, type) and issubclass(t, BaseException) for t in listed
    ):
        raise UsageError(f"{name}={types!r} must be a tuple of exception types, such as (CardDeclined,).")
    for kind in listed:
        if not issubclass(kind, Exception):  # it would never be heard of, and the key be run again
            raise UsageError(
                f"{name}= lists {kind.__name__}, which is no Exception: such a thing stops a handler from outside, as "
                "Ctrl-C and cancellation do, and is never its answer. Its key is left to its lease; where it must not "
                'be run again after that, say on_crash="in_doubt".'
            )
    return listed


def _count(name: str, number: Any, least: int) -> int:
    if type(number) is not int or number < least:
        raise UsageError(f"{name}={number!r} must be a whole number, {least} or more.")
    return number


def _flag(name: str, flag: Any) -> bool:
    if type(flag) is not bool:
        raise UsageError(f"{name}={flag!r} must be True or False.")
    return flag


def _callback(name: str, function: Any) -> Any:
    if function is not None and not callable(function):
        raise UsageError(f"{name}={function!r} must be a function.")
    return function
