"""The decisions about a batch, pure: which events may go together, and what becomes of each.

Events of a key are published in order. A publisher that may lose one event and deliver the next gets at most one of a
key at a time, so a batch goes out in waves: the first of every key, then the second of every key, and so on. When one
fails, those behind it are given back untried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from ._database import Settlement, reason_of
from ._events import Event, Results, Unsent

Poison = Literal["block", "skip"]


@dataclass(frozen=True)
class Retrying:
    """When a failed event is tried again, and when it is given up."""

    max_attempts: int
    first_pause: float
    longest_pause: float

    def pause(self, attempts: int, chance: float) -> float:
        """Twice as long after each attempt, less up to a quarter by chance, so that many don't come back at once."""
        pause = self.first_pause * 2.0 ** min(attempts - 1, 60)
        return min(pause, self.longest_pause) * (1 - chance / 4)


def waves(events: Sequence[Event]) -> list[list[Event]]:
    """Events in as few groups as possible with no key twice in one, each key's events in order."""
    if len({event.key for event in events}) == len(events):
        return [list(events)] if events else []
    free: list[Event] = []
    of_key: dict[str, list[Event]] = {}
    for event in events:
        if event.key is None:
            free.append(event)
        else:
            of_key.setdefault(event.key, []).append(event)
    by_turn = [[event for event in turn if event is not None] for turn in zip_longest(*of_key.values())]
    if not by_turn:
        return [free]
    by_turn[0] = sorted(free + by_turn[0])
    return by_turn


class Sorting:
    """Sorts the events of a batch by what became of them."""

    def __init__(self, retrying: Retrying, chance: Callable[[], float]) -> None:
        self.settlement = Settlement()
        self.failures: list[tuple[Event, Exception]] = []
        self.away: Exception | None = None
        """Why the broker did not get an event that was fine."""
        self._retrying, self._chance = retrying, chance
        self._stuck: set[str] = set()

    def may_go(self, events: Iterable[Event]) -> list[Event]:
        """Those with no failure before them; the others are given back untried."""
        if not self._stuck:
            return list(events)
        going = []
        for event in events:
            if event.key in self._stuck:
                self.settlement.released.append(event.seq)
            else:
                going.append(event)
        return going

    def answered(self, events: Sequence[Event], results: Results) -> None:
        """The publisher has answered for each."""
        if not any(results):
            self.settlement.published += [event.seq for event in events]
            return
        if all(isinstance(error, Unsent) for error in results):
            self.away = self.away or results[0]
        for event, error in zip(events, results, strict=True):
            if event.key in self._stuck:
                # With keeps_order it did not arrive. Should it have, it comes twice with one id, which is allowed.
                self.settlement.released.append(event.seq)
            elif error is None:
                self.settlement.published.append(event.seq)
            else:
                self._failed(event, error)

    def untried(self, events: Iterable[Event], error: Exception | None = None) -> None:
        """The broker is away, or the lease is nearly over."""
        self.away = self.away or error
        self.settlement.released += [event.seq for event in events]

    def _failed(self, event: Event, error: Exception) -> None:
        self.failures.append((event, error))
        if event.key is not None:
            self._stuck.add(event.key)
        if isinstance(error, Unsent):
            pause = self._retrying.pause(1, self._chance())
            self.settlement.retried.append((event.seq, pause, reason_of(error), False))
        elif event.attempts >= self._retrying.max_attempts:
            self.settlement.given_up.append((event.seq, reason_of(error)))
        else:
            pause = self._retrying.pause(event.attempts, self._chance())
            self.settlement.retried.append((event.seq, pause, reason_of(error), True))
