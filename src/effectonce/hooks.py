"""Events: every decision, told to whoever listens; and the tally behind ``receiver.stats()``."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

from ._fork import tell_of_forks
from ._records import Guarantee
from ._tally import ASIDE as ASIDE
from ._tally import Figures as Figures
from ._tally import Stats as Stats
from ._tally import Tally
from .errors import UsageError

EventKind = Literal[
    "claimed",
    "completed",
    "replayed",
    "busy",
    "mismatch",
    "failed",
    "released",
    "taken_over",
    "fenced",
    "lease_lost",
    "late",
    "in_doubt",
    "store_error",
    "unprotected",
    "circuit",
    "purged",
    "dead_letter",
    "unstable_id",
    "step",
]


class Event(NamedTuple):
    """One decision about one key."""

    kind: EventKind
    key: str
    fence: int = 0
    attempt: int = 0
    guarantee: Guarantee = "fenced"
    seconds: float | None = None
    """How long the handler ran, on the events that end an attempt."""
    detail: str = ""


Hook = Callable[[Event], object]

LOUD: frozenset[str] = frozenset(
    {
        "fenced", "lease_lost", "in_doubt", "store_error", "mismatch", "unprotected", "circuit", "dead_letter",
        "unstable_id",
    }
)  # fmt: skip


def log_events(event: Event) -> None:
    """A hook that writes one line per event, each with its key; what needs a person is a warning."""
    import logging  # only who logs pays for importing it

    logger = logging.getLogger("effectonce")
    level = logging.WARNING if event.kind in LOUD else logging.INFO
    if logger.isEnabledFor(level):
        took = "" if event.seconds is None else f" seconds={event.seconds:.6f}"
        detail = f" detail={event.detail!r}" if event.detail else ""
        line = f"{event.kind} key={event.key!r} fence={event.fence} attempt={event.attempt}{took}{detail}"
        logger.log(level, "%s", line, extra={"effect_key": event.key, "effect_event": event.kind})


def checked(hooks: Iterable[Hook]) -> tuple[Hook, ...]:
    """The hooks, if each can be called and does something when it is: a coroutine would never run."""
    if not isinstance(hooks, Iterable):
        raise UsageError(f"hooks={hooks!r} must be a list, such as [log_events].")
    known: tuple[Any, ...] = tuple(hooks)
    for hook in known:
        if not callable(hook) or inspect.iscoroutinefunction(hook):
            raise UsageError(
                f"{hook!r} can't be a hook. Give a function, not a coroutine function, of one event."
            )
    return known


class Events(Tally):
    """Tells hooks and keeps the tally. When nobody listens an event costs one number."""

    def __init__(self, hooks: tuple[Hook, ...], monotonic: Callable[[], float] = time.monotonic) -> None:
        super().__init__(monotonic)
        self.hooks = hooks
        tell_of_forks(self)

    def tell(
        self,
        kind: EventKind,
        key: str,
        fence: int = 0,
        attempt: int = 0,
        guarantee: Guarantee = "fenced",
        seconds: float | None = None,
        detail: str = "",
    ) -> None:
        """Tell every hook; one that raises harms nobody."""
        event = Event(kind, key, fence, attempt, guarantee, seconds, detail)
        for hook in self.hooks:
            try:
                hook(event)
            except Exception:
                import logging

                logging.getLogger("effectonce").exception("a hook failed on %s key=%r", kind, key)
