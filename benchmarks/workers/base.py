"""What all workers share: the setup, the no-op handler and the keys."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import random
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
Run = Callable[[Iterable[str]], object]
AsyncRun = Callable[[Iterable[str]], Awaitable[object]]
Fill = Callable[[Sequence[str]], object]
Figure = dict[str, Any]

# 102 bytes as compact JSON: the size that PERFORMANCE figures are given for.
RESULT = {
    "receipt": "rcpt-000000000001",
    "status": "captured",
    "cents": 1999,
    "currency": "EUR",
    "customer": "c-10001",
}

ENCODED = json.dumps(RESULT, separators=(",", ":"))

RANDOM = random.Random(20240607)


@dataclass(frozen=True)
class Setup:
    """What the harness asks a worker to open: one row of one case."""

    store: str
    op: str
    folder: str
    variant: str = ""
    threads: int = 1
    slice_seconds: float = 0.0
    """With threads: how long a slice lasts; 0 means until all is done."""
    prefill: int = 0
    url: str = ""
    """A place on a server that is this row's alone: a database, or a table."""
    tasks: int = 0
    """Callers on one event loop; 0 means blocking callers."""
    gauge: str = ""
    """What to read before and after, instead of the clock."""

    def file(self) -> Path:
        """The database file of this row."""
        return Path(self.folder) / "effects.db"


class Subject(Protocol):
    """Something opened that can be measured slice by slice."""

    def slice(self, operations: int) -> Figure:
        """Do that many operations; `value` is the cost of one (seconds, or bytes)."""

    def close(self) -> None:
        """Give everything back."""


class Counter:
    """Counts the handler's runs, so that a slice which skipped or doubled work is refused."""

    def __init__(self) -> None:
        count = itertools.count()
        # One C call per run, safe across threads, and the same cost for every contender.
        tick = self.tick = count.__next__
        self._reads = 0

        def handle(_: object) -> dict[str, Any]:
            tick()
            return RESULT

        async def ahandle(_: object) -> dict[str, Any]:
            tick()
            return RESULT

        # Plain functions, as users have: a bound method would cost extra wherever handlers are looked up.
        self.handle, self.ahandle = handle, ahandle

    def runs(self) -> int:
        """How often the handler ran so far. Reading takes a tick itself, which is left out."""
        self._reads += 1
        return self.tick() - self._reads + 1


def new_keys(count: int) -> list[str]:
    """Random 36-character keys. Random order matters: sorted keys would flatter every B-tree."""
    return [str(uuid.UUID(int=RANDOM.getrandbits(128))) for _ in range(count)]


def version_of(distribution: str | None) -> str:
    """The installed version, or nothing where there is no distribution (the raw cases, a source tree)."""
    if distribution is None:
        return ""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "source tree"


def chunks(keys: Sequence[T], size: int) -> Iterable[Sequence[T]]:
    """The keys, or whatever else, in pieces of at most `size`."""
    return (keys[start : start + size] for start in range(0, len(keys), size))
