"""How often what happened and how long it took, since the start and minute by minute.

Every call is counted, on any thread, so that an event costs one call of C and leaves no object behind: a number that
is raised, and a duration in a queue.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from math import exp, inf, log

MINUTES_KEPT = 60
UNREAD_MOST = 4096
"""Durations that wait to be sorted into slots."""

ASIDE = "aside"
"""Counted beside an event that is not the only one of its delivery, or of none: a settlement, a wait that went on."""
DELIVERIES = (
    "completed", "replayed", "released", "failed", "in_doubt", "busy", "mismatch", "late", "fenced", "store_error",
    "abandoned", "timed_out", "unprotected",
)  # fmt: skip


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


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


@dataclass(frozen=True, slots=True)
class Stats:
    """Figures since the receiver was made, and over the last minutes."""

    since_start: Figures
    recent: Figures
    recent_minutes: int


class Numbers(dict[str, Callable[[], int]]):
    """What raises the number of a kind by one, by its kind. No other thread can come in between."""

    def __init__(self) -> None:
        self._looks: Counter[str] = Counter()

    def __missing__(self, kind: str) -> Callable[[], int]:
        return self.setdefault(kind, count().__next__)

    def read(self) -> dict[str, int]:
        """The numbers; for one thread at a time. A look raises a number, too, and is taken off the next one."""
        numbers = {kind: raised() - self._looks[kind] for kind, raised in list(self.items())}
        self._looks.update(numbers.keys())
        return numbers


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


class Minute:
    """What is being counted. ``unread`` are durations of attempts that ended."""

    def __init__(self) -> None:
        self.numbers = Numbers()
        self.unread: deque[float] = deque()
        self.durations = Histogram()

    def sort(self) -> None:
        """Put durations into slots; for one thread at a time."""
        pop = self.unread.popleft
        self.durations.add([pop() for _ in range(len(self.unread))])


class Total:
    """The sum of some minutes."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.durations = Histogram()

    def add(self, other: Minute | Total) -> None:
        """Add what was counted; for one thread at a time."""
        if isinstance(other, Minute):
            other.sort()
            self.counts.update(other.numbers.read())
        else:
            self.counts.update(other.counts)
        self.durations.slots.update(other.durations.slots)

    def figures(self) -> Figures:
        """Read it."""
        quantile = self.durations.quantile
        return Figures({"claimed": 0} | self.counts, quantile(0.5), quantile(0.95), quantile(0.99))


class Tally:
    """Counts for all threads of a process."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._older = Total()
        self._minutes: dict[int, Minute] = {}
        self._minute, self._ends = Minute(), -inf

    def note(self, kind: str, at: float, seconds: float | None = None) -> None:
        """Count an event at local time ``at``; ``seconds`` is given when it ends an attempt."""
        minute = self._minute if at < self._ends else self._turn(at)
        minute.numbers[kind]()
        if seconds is not None:
            minute.unread.append(seconds)
            if len(minute.unread) > UNREAD_MOST:
                with self._lock:
                    minute.sort()

    def _turn(self, at: float) -> Minute:
        """Begin a new minute. Who was just about to count does so in the last one, which is still there."""
        with self._lock:
            if at >= self._ends:
                self._minute.sort()
                number = int(at // 60)
                self._minute = self._minutes[number] = Minute()
                self._ends = (number + 1) * 60.0
                for old in [each for each in self._minutes if each < number - MINUTES_KEPT]:
                    self._older.add(self._minutes.pop(old))
            return self._minute

    def stats(self, minutes: int) -> Stats:
        """Figures since the start and over the last ``minutes`` (at most an hour)."""
        total, recent = Total(), Total()
        oldest = self._monotonic() / 60 - min(minutes, MINUTES_KEPT)
        with self._lock:
            total.add(self._older)
            for number, minute in self._minutes.items():
                sum_ = Total()
                sum_.add(minute)
                total.add(sum_)
                if number > oldest:
                    recent.add(sum_)
        return Stats(total.figures(), recent.figures(), minutes)

    def before_fork(self) -> None:
        """Let nobody be in the middle of a change."""
        self._lock.acquire()

    def after_fork(self, *, in_child: bool) -> None:
        """Go on counting, each process for itself."""
        self._lock.release()
