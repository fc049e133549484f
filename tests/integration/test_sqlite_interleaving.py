"""Two processes in one SQLite file, and every way in which their statements can fall.

Another handle acts right before each single statement of a verb. Whatever it does there, both answers and the record
that is left must be those of one verb after the other, in one order or the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.integration.sqlite_helpers import connections_opened

from effectonce._blocking import run
from effectonce._records import NOBODY, Claim, Completion, Decision, Record, Renewal, State, Verdict
from effectonce.errors import StoreUnavailable
from effectonce.stores.base import Store
from effectonce.stores.sqlite import SQLiteStore
from effectonce.testing.clocks import ManualClock

A, B, C = (letter * 16 for letter in (b"A", b"B", b"C"))
LEASE, KEEP = 8.0, 64.0
FENCE = 2
"""The fence of the attempt in each setting: the key was released once before."""

Verb = Callable[[Store], Any]


def claim(owner: bytes, **changes: Any) -> Verb:
    return lambda store: run(store.claim(Claim("k", owner, b"asked", LEASE, KEEP)._replace(**changes)))


def end(owner: bytes, state: State, result: bytes | None = None) -> Verb:
    return lambda store: run(store.complete(Completion("k", owner, FENCE, state, result, KEEP)))


def claim_two(store: Store) -> list[Decision]:
    claims = [Claim(key, C, b"asked", LEASE, KEEP) for key in ("k", "other")]
    return run(store.claim_many(claims))


VERBS: dict[str, Verb] = {
    "claim by B": claim(B),
    "claim by C": claim(C),
    "claim by A": claim(A),
    "last claim by C": claim(C, max_attempts=1),
    "once claim by C": claim(C, once=True),
    "late claim by C": claim(C, may_create=False),
    "claim of two by C": claim_two,
    "renew by A": lambda store: run(store.renew(Renewal("k", A, FENCE, LEASE, KEEP))),
    "complete by A": end(A, State.COMPLETED, b"A's"),
    "release by A": end(A, State.ABSENT),
    "settle": end(NOBODY, State.COMPLETED, b"settled"),
    "settle otherwise": end(NOBODY, State.FAILED, b"settled"),
    "purge": lambda store: run(store.purge()),
    "purge by one": lambda store: run(store.purge(1)),
}


def unknown(store: Store, clock: ManualClock) -> None:
    """Nobody has used the key."""


def pending(store: Store, clock: ManualClock) -> None:
    """A holds the key, as its second attempt."""
    first = claim(A)(store).record
    run(store.release("k", A, first.fence, KEEP))
    assert claim(A)(store).record.fence == FENCE


def lapsed(store: Store, clock: ManualClock) -> None:
    """A's lease is over."""
    pending(store, clock)
    clock.advance(LEASE)


def forgotten(store: Store, clock: ManualClock) -> None:
    """A's record has expired, and nobody has purged it."""
    pending(store, clock)
    clock.advance(LEASE + KEEP)


def completed_and_expired(store: Store, clock: ManualClock) -> None:
    """The result has expired, and nobody has purged it."""
    pending(store, clock)
    end(A, State.COMPLETED, b"A's")(store)
    clock.advance(KEEP)


def in_doubt(store: Store, clock: ManualClock) -> None:
    """Nobody knows what became of A's attempt."""
    pending(store, clock)
    end(A, State.IN_DOUBT)(store)


def released(store: Store, clock: ManualClock) -> None:
    """A gave the key back."""
    pending(store, clock)
    end(A, State.ABSENT)(store)


SETTINGS = {
    setting: [verb for verb in VERBS if verb.split()[0] in words]
    for setting, words in (
        (unknown, ("claim", "once", "late", "purge")),
        (pending, ("claim", "renew", "complete", "release", "purge")),
        (lapsed, ("claim", "last", "once", "renew", "complete", "release", "purge")),
        (forgotten, ("claim", "late", "renew", "complete", "purge")),
        (completed_and_expired, ("claim", "late", "complete", "purge")),
        (in_doubt, ("claim", "settle", "purge")),
        (released, ("claim", "last", "release", "purge")),
    )
}
FIRSTS = [
    pytest.param(setting, verb, id=f"{setting.__name__}: {verb}")
    for setting, verbs in SETTINGS.items()
    for verb in verbs
]


class Story:
    """A file in a setting, and two handles on it."""

    def __init__(self, path: Path, setting: Callable[[Store, ManualClock], None]) -> None:
        self.clock = ManualClock()
        with connections_opened() as self.connections:
            self.one = SQLiteStore(path, durability="off", busy_timeout=0.0, clock=self.clock)
            setting(self.one, self.clock)
        self.other = SQLiteStore(path, durability="off", busy_timeout=0.0, clock=self.clock)

    def run(self, first: str, second: str, moment: int) -> tuple[Any, Any, int]:
        """Let the second verb come right before a statement of the first, if it gets in; else after it."""
        answers: list[Any] = []
        statements = 0

        def intrude(_: str) -> None:
            nonlocal statements
            if statements == moment:
                with suppress(StoreUnavailable):  # the first one holds the lock: nobody gets in here
                    answers.append(VERBS[second](self.other))
            statements += 1

        for connection in self.connections:
            connection.set_trace_callback(intrude)
        first_answer = VERBS[first](self.one)
        for connection in self.connections:
            connection.set_trace_callback(None)
        return first_answer, answers[0] if answers else VERBS[second](self.other), statements

    def end(self) -> tuple[Record | None, ...]:
        """What is left; then the files are closed."""
        left = tuple(run(self.one.get(key)) for key in ("k", "other"))
        self.one.close()
        self.other.close()
        return left


@pytest.fixture
def paths(tmp_path: Path) -> Iterator[Path]:
    """A new file each time."""
    return (tmp_path / f"{number}.db" for number in count())


def one_after_the_other(path: Path, setting: Any, first: str, second: str, *, swapped: bool) -> Any:
    story = Story(path, setting)
    if swapped:
        second_answer = VERBS[second](story.other)
        first_answer = VERBS[first](story.one)
    else:
        first_answer = VERBS[first](story.one)
        second_answer = VERBS[second](story.other)
    return first_answer, second_answer, story.end()


@pytest.mark.parametrize(("setting", "first"), FIRSTS)
def test_two_processes_are_as_one_after_the_other(paths: Iterator[Path], setting: Any, first: str) -> None:
    """Whatever another process does between two statements, it is as if it had come before or after."""
    for second in SETTINGS[setting]:
        serial = [one_after_the_other(next(paths), setting, first, second, swapped=s) for s in (False, True)]
        for moment in count():
            story = Story(next(paths), setting)
            first_answer, second_answer, statements = story.run(first, second, moment)
            assert (first_answer, second_answer, story.end()) in serial, f"{second} before statement {moment}"
            if statements <= moment:
                break


def test_the_settings_are_what_they_say(paths: Iterator[Path]) -> None:
    """Alone, each setting gives the verdict that its name promises."""
    verdicts = {}
    for setting in SETTINGS:
        story = Story(next(paths), setting)
        verdicts[setting.__name__] = VERBS["claim by B"](story.one).verdict
        story.end()
    assert verdicts == {
        "unknown": Verdict.CLAIMED,
        "pending": Verdict.BUSY,
        "lapsed": Verdict.TAKEN_OVER,
        "forgotten": Verdict.CLAIMED,
        "completed_and_expired": Verdict.CLAIMED,
        "in_doubt": Verdict.IN_DOUBT,
        "released": Verdict.CLAIMED,
    }
