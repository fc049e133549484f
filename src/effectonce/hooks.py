"""Events: every decision, told to whoever listens; and the tally behind ``receiver.stats()``."""

from __future__ import annotations

import inspect
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import exp, log
from typing import Any, Literal, NamedTuple

from ._fork import tell_of_forks
from ._records import Guarantee
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


@dataclass(frozen=True, slots=True)
class Figures:
    """What happened in a stretch of time."""

    counts: dict[str, int]
    processing_p50: float | None
    processing_p95: float | None
    processing_p99: float | None

    @property
    def deliveries(self) -> int:
        """Everything that arrived and was answered, each once."""
        return self._sum(*DELIVERIES) - self._sum(ASIDE)

    @property
    def duplicate_rate(self) -> float:
        """The share of deliveries whose key was known already."""
        return _share(self._sum("replayed", "busy", "mismatch") - self._sum("waited"), self.deliveries)

    @property
    def lock_conflict_rate(self) -> float:
        """The share of deliveries that met a running attempt."""
        return _share(self._sum("busy"), self.deliveries)

    def _sum(self, *kinds: str) -> int:
        return sum(self.counts.get(kind, 0) for kind in kinds)


ASIDE = "aside"
"""Counted beside an event that is not the only one of its delivery, or of none: a settlement, a wait that went on."""
DELIVERIES = (
    "completed", "replayed", "released", "failed", "in_doubt", "busy", "mismatch", "late", "fenced", "store_error",
    "abandoned", "timed_out", "unprotected",
)  # fmt: skip


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


@dataclass(frozen=True, slots=True)
class Stats:
    """Figures since the receiver was made, and over the last minutes."""

    since_start: Figures
    recent: Figures
    recent_minutes: int


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


class Histogram:
    """Durations in slots that grow by an eighth, so that any quantile is right within 7 %."""

    STEP = log(1.125)
    SAMPLE = 128

    def __init__(self) -> None:
        self.slots: Counter[int] = Counter()

    def add(self, durations: list[float]) -> None:
        """Count durations; of very many at once a share, with more weight."""
        stride = len(durations) // self.SAMPLE + 1
        for slot in [round(log(max(seconds, 1e-9)) / self.STEP) for seconds in durations[::stride]]:
            self.slots[slot] += stride

    def quantile(self, share: float) -> float | None:
        """The duration that ``share`` of all don't exceed."""
        left = share * self.slots.total()
        for slot in sorted(self.slots):
            left -= self.slots[slot]
            if left <= 0:
                return exp(slot * self.STEP)
        return None


class Stretch:
    """Counts and durations of one stretch of time."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.durations = Histogram()

    def add(self, noted: list[tuple[str, float, float | None]]) -> None:
        """Count noted events. Each that ended an attempt has a duration, and stands for its claim too."""
        durations = [seconds for _, _, seconds in noted if seconds is not None]
        kinds = [kind for kind, _, _ in noted]
        self.durations.add(durations)
        self.counts.update(kinds)
        self.counts["claimed"] += len(durations) + kinds.count("abandoned")

    def merge(self, other: Stretch) -> None:
        """Add another stretch to this one."""
        self.counts.update(other.counts)
        self.durations.slots.update(other.durations.slots)

    def figures(self) -> Figures:
        """Read it."""
        quantile = self.durations.quantile
        counts = dict(self.counts)
        counts["claimed"] = counts.get("claimed", 0) - counts.get("taken_over", 0)
        return Figures(counts, quantile(0.5), quantile(0.95), quantile(0.99))


class Events:
    """Tells hooks and keeps the tally. When nobody listens an event costs one append."""

    MINUTES_KEPT = 60
    UNREAD_LIMIT = 4096

    def __init__(self, hooks: tuple[Hook, ...], monotonic: Callable[[], float] = time.monotonic) -> None:
        self.hooks = hooks
        self._monotonic = monotonic
        self._unread: deque[tuple[str, float, float | None]] = deque()
        self._lock = threading.Lock()
        self._older = Stretch()
        self._minutes: dict[int, Stretch] = {}
        tell_of_forks(self)

    def note(self, kind: str, at: float, seconds: float | None = None) -> None:
        """Count an event at local time ``at``; ``seconds`` is given when it ends an attempt."""
        unread = self._unread
        unread.append((kind, at, seconds))
        if len(unread) > self.UNREAD_LIMIT:
            self._fold()

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

    def stats(self, minutes: int) -> Stats:
        """Figures since the start and over the last ``minutes`` (at most an hour)."""
        self._fold()
        total, recent = Stretch(), Stretch()
        oldest = self._monotonic() / 60 - min(minutes, self.MINUTES_KEPT)
        with self._lock:
            total.merge(self._older)
            for minute, stretch in self._minutes.items():
                total.merge(stretch)
                if minute > oldest:
                    recent.merge(stretch)
        return Stats(total.figures(), recent.figures(), minutes)

    def before_fork(self) -> None:
        """Let nobody be in the middle of a change."""
        self._lock.acquire()

    def after_fork(self, *, in_child: bool) -> None:
        """Go on counting, each process for itself."""
        self._lock.release()

    def _fold(self) -> None:
        with self._lock:
            pop = self._unread.popleft
            unread = [pop() for _ in range(len(self._unread))]
            while unread:
                minute = int(unread[0][1] / 60)
                same = len(unread) if unread[-1][1] < (minute + 1) * 60 else _first_after(unread, minute)
                self._minutes.setdefault(minute, Stretch()).add(unread[:same])
                unread = unread[same:]
            oldest = int(self._monotonic() / 60) - self.MINUTES_KEPT
            for number in [number for number in self._minutes if number < oldest]:
                self._older.merge(self._minutes.pop(number))


def _first_after(unread: list[tuple[str, float, float | None]], minute: int) -> int:
    return next(index for index, (_, at, _) in enumerate(unread) if int(at / 60) != minute)
