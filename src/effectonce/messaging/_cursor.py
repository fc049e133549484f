"""How far an ordered source has been handled, in one small value instead of a record per message. Pure.

A partition of Kafka, or a stream of JetStream, numbers its messages. So it is enough to know a number below which all
is done (``low``), and what is done above it (``above``), which is nothing where messages are handled in order. Numbers
have gaps: transactions, compaction and retention leave them. Hence nobody ever waits for ``low`` itself to come, and
the next message is any with ``low <= number``.

What has failed, and is not done yet, is counted (``tries``): there is no record of its own that could. The state is
bounded by what is under way at one time, however many messages there were; it needs no expiry, and forgets nothing.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Final, NamedTuple

from ..errors import UsageError

HIGHEST: Final = 2**63 - 1
"""What a column of 64 bits holds."""
MOST_RANGES: Final = 4096
"""More than can be under way at one time by any broker's default; a limit on what is written with each move."""


class Cursor(NamedTuple):
    """What is done of a source."""

    low: int = 0
    """All below is done."""
    above: tuple[tuple[int, int], ...] = ()
    """What is done beyond that: ranges, the end excluded, in order; they neither touch each other nor ``low``."""
    tries: tuple[tuple[int, int], ...] = ()
    """Numbers that are not done, in order, and how often each has failed."""

    def has(self, number: int) -> bool:
        """Whether it is done."""
        if number < self.low:
            return True
        place = bisect_right(self.above, (number, HIGHEST)) - 1
        return place >= 0 and number < self.above[place][1]

    @property
    def end(self) -> int:
        """The number after the last that is done."""
        return self.above[-1][1] if self.above else self.low

    def add(self, number: int) -> Cursor:
        """One is done, and nothing is said of those before it."""
        if self.has(number):
            return self
        if number == self.low:
            return self.raised(number + 1)
        place = bisect_right(self.above, (number, HIGHEST))
        first, end = number, number + 1
        before, after = self.above[:place], self.above[place:]
        if before and before[-1][1] == first:
            first, before = before[-1][0], before[:-1]
        if after and after[0][0] == end:
            end, after = after[0][1], after[1:]
        return self._replace(above=(*before, (first, end), *after), tries=_without(self.tries, number))

    def raised(self, low: int) -> Cursor:
        """All below ``low`` is done, or will never come."""
        if low <= self.low:
            return self
        above = list(self.above)
        while above and above[0][0] <= low:
            low = max(low, above.pop(0)[1])
        return Cursor(low, tuple(above), tuple(each for each in self.tries if each[0] >= low))

    def failed(self, number: int) -> Cursor:
        """It was tried once more, in vain."""
        if self.has(number):
            return self
        tries = dict(self.tries)
        tries[number] = tries.get(number, 0) + 1
        return self._replace(tries=tuple(sorted(tries.items())))

    def tries_of(self, number: int) -> int:
        """How often it has failed."""
        place = bisect_left(self.tries, (number, 0))
        return self.tries[place][1] if place < len(self.tries) and self.tries[place][0] == number else 0

    def is_full(self) -> bool:
        """Whether nothing more may be done out of turn."""
        return len(self.above) + len(self.tries) >= MOST_RANGES

    # As a column of text holds it: "7-9,12-13;10=2"

    def written(self) -> str:
        """All but ``low``, as text."""
        above = ",".join(f"{first}-{end}" for first, end in self.above)
        tries = ",".join(f"{number}={count}" for number, count in self.tries)
        return f"{above};{tries}" if above or tries else ""

    @classmethod
    def read(cls, low: int, text: str) -> Cursor:
        """The cursor that was written so."""
        above, _, tries = text.partition(";")
        return cls(low, _pairs(above, "-"), _pairs(tries, "="))


def check_end(source: object, at: int, end: int) -> None:
    """Raise if a cursor is beyond the end of its source: then it is that of another source of the same name."""
    if at > end:
        raise UsageError(
            f"The cursor of {source} is at {at}, but the source ends at {end}: was it deleted and made again? Then "
            "what is in it would count as done. If it is new, delete the row of this source from effectonce_cursors."
        )


def check_begin(source: object, low: int, number: int) -> None:
    """Raise if what is delivered lies below a cursor that it was asked for from: the source's numbers began anew."""
    if number < low:
        raise UsageError(
            f"The cursor of {source} is at {low}, and was read from there, but {number} came: was it deleted and made"
            " again, or has it lost what it had? Then what comes now would count as done. If it is new, delete the row"
            " of this source from effectonce_cursors."
        )


def _pairs(text: str, sign: str) -> tuple[tuple[int, int], ...]:
    parts = (part.partition(sign) for part in text.split(",") if part)
    return tuple((int(left), int(right)) for left, _, right in parts)


def _without(tries: tuple[tuple[int, int], ...], number: int) -> tuple[tuple[int, int], ...]:
    return tuple(each for each in tries if each[0] != number) if tries else tries
