"""Version vectors: who has seen what, when several writers change the same thing without asking each other.

A vector counts the changes of each writer. One that has everything another has, and more, *dominates* it: it is
newer and may replace it. When each has something that the other lacks they are *concurrent*: neither is newer, and
somebody who knows what the data means has to bring them together; the result carries the *merge* of the two.

    | of each writer, the left one has          | ``left.compare(right)`` | in signs                        |
    |-------------------------------------------|-------------------------|---------------------------------|
    | the same count                            | "equal"                 | ``left == right``               |
    | no less, and somewhere more               | "dominates"             | ``left > right``                |
    | no more, and somewhere less               | "dominated"             | ``left < right``                |
    | here more and there less                  | "concurrent"            | neither ``<=`` nor ``>=``       |
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Final, Literal

from ..errors import UsageError

Comparison = Literal["equal", "dominates", "dominated", "concurrent"]

_WORDS: Final[dict[tuple[bool, bool], Comparison]] = {
    (True, True): "equal",
    (True, False): "dominates",
    (False, True): "dominated",
    (False, False): "concurrent",
}


class VersionVector(Mapping[str, int]):
    """How many changes of each writer are in here. Never changes itself; a writer that is not named counts 0.

    >>> here = VersionVector({"berlin": 2, "tokyo": 1})
    >>> here.tick("berlin").compare(here)
    'dominates'
    >>> here.tick("berlin").compare(here.tick("tokyo"))
    'concurrent'
    """

    __slots__ = ("_counts",)

    def __init__(self, counts: Mapping[str, int] | None = None) -> None:
        if counts is not None and not isinstance(counts, Mapping):
            raise UsageError(f"A vector is made of a mapping from writer to count, not of {_shown(counts)}.")
        # In one order, and without zeros: what is equal looks equal, and is stored alike.
        checked = sorted(_checked(writer, count) for writer, count in (counts or {}).items())
        self._counts = {writer: count for writer, count in checked if count}

    def tick(self, writer: str) -> VersionVector:
        """This, and one more change by that writer. A writer ticks its own name only, once for each change."""
        return VersionVector({**self._counts, writer: self[writer] + 1})

    def merge(self, other: VersionVector) -> VersionVector:
        """The smallest vector that has everything either of them has. Also ``one | other``."""
        theirs = _vector(other)
        return VersionVector({writer: max(self[writer], theirs[writer]) for writer in {*self, *theirs}})

    def compare(self, other: VersionVector) -> Comparison:
        """How this stands to the other: "equal", "dominates", "dominated" or "concurrent"."""
        theirs = _vector(other)
        return _WORDS[self._covers(theirs), theirs._covers(self)]

    def dominates(self, other: VersionVector) -> bool:
        """Whether this has all that the other has, and more: it is newer."""
        return self.compare(other) == "dominates"

    def concurrent(self, other: VersionVector) -> bool:
        """Whether each has something that the other lacks: a conflict."""
        return self.compare(other) == "concurrent"

    def to_text(self) -> str:
        """One text for one vector: for a column, a header or a comparison in SQL."""
        return json.dumps(self._counts, separators=(",", ":"), ensure_ascii=False)

    @classmethod
    def from_text(cls, text: str) -> VersionVector:
        """The vector that has this text; the empty text is the empty vector."""
        try:
            counts = json.loads(text or "{}")
        except (ValueError, TypeError, RecursionError):
            counts = None
        if not isinstance(counts, dict):
            raise UsageError(f"{_shown(text)} is not the text of a version vector, which to_text() makes.")
        return cls(counts)

    def _covers(self, other: VersionVector) -> bool:
        return all(self[writer] >= count for writer, count in other._counts.items())

    def __getitem__(self, writer: str) -> int:
        return self._counts.get(writer, 0)

    def __contains__(self, writer: object) -> bool:
        return writer in self._counts

    def __iter__(self) -> Iterator[str]:
        return iter(self._counts)

    def __len__(self) -> int:
        return len(self._counts)

    def __eq__(self, other: object) -> bool:
        return self._counts == other._counts if isinstance(other, VersionVector) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self._counts.items()))

    def __or__(self, other: object) -> VersionVector:
        return self.merge(other) if isinstance(other, VersionVector) else NotImplemented

    def __ge__(self, other: object) -> bool:
        return self._covers(other) if isinstance(other, VersionVector) else NotImplemented

    def __gt__(self, other: object) -> bool:
        return self != other and self._covers(other) if isinstance(other, VersionVector) else NotImplemented

    def __le__(self, other: object) -> bool:
        return other._covers(self) if isinstance(other, VersionVector) else NotImplemented

    def __lt__(self, other: object) -> bool:
        return self != other and other._covers(self) if isinstance(other, VersionVector) else NotImplemented

    def __repr__(self) -> str:
        return f"VersionVector({self._counts})"


def _checked(writer: object, count: object) -> tuple[str, int]:
    if not isinstance(writer, str) or not writer.strip():
        raise UsageError(
            f"The writer {_shown(writer)} has no name. Use one that is its own, such as 'berlin-1'."
        )
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise UsageError(
            f"The count of writer {writer!r} is {_shown(count)}. Changes are counted in whole numbers from 0."
        )
    return writer, count


def _vector(other: object) -> VersionVector:
    if isinstance(other, VersionVector):
        return other
    raise UsageError(f"A version vector can't be compared with {_shown(other)}. Wrap it: VersionVector(…).")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:40]}…{text[-15:]}"
