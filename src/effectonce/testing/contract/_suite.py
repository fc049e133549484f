"""What a store's author tells the suite, and what every part of the specification starts from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack

import pytest

from ..._records import Record, State, Verdict
from ...stores.base import Store
from ..clocks import ManualClock, wait_until
from ._subject import DRIVERS, LONG, Driver, Subject

SITUATIONS = {
    "pending": Verdict.BUSY,
    "lapsed": Verdict.TAKEN_OVER,
    "released": Verdict.CLAIMED,
    "completed": Verdict.REPLAY,
    "failed": Verdict.REPLAY,
    "in doubt": Verdict.IN_DOUBT,
}
"""What a key can have come to, and what the next attempt at it gets."""
ROUNDS = 10
"""How many times a store may be gone through before everything that has expired must be gone."""


class Suite(ABC):
    """What a store's author says, and the fixture every test of the specification uses."""

    lease: float = 8.0
    """A lease that is to end, in seconds. Where the clock is a server's, a fraction of one: the suite waits for it."""
    keep: float = 64.0
    """A retention that is to end, likewise."""
    resolution: float = 0.01
    """The finest difference between two times that the store remembers."""
    purge_delay: float = 0.0
    """How long after its expiry a record may stay out of purge's sight, if that is more than its features say."""
    colour: str = ""

    @abstractmethod
    def make_store(self, clock: ManualClock) -> Store:
        """A fresh and empty store. A store with a clock of its own ignores ``clock``."""

    def reopen(self, clock: ManualClock) -> Store:
        """Another handle on the records of the store that ``make_store`` made, for what is durable or shared."""
        raise NotImplementedError(
            "features say durable or shared: define reopen(), a second handle on the same records."
        )

    def stall(self) -> AbstractContextManager[object]:
        """While it is entered, the store's writes have to wait."""
        pytest.skip("the suite does not define stall()")

    def advance(self, subject: Subject, seconds: float) -> None:
        """Let time pass on the store's clock: at once where the suite moves it, else when it has passed."""
        until = subject.now() + seconds
        subject.clock.advance(seconds)
        wait_until(lambda: subject.now() >= until, seconds=seconds + 20.0, what="The store's clock")

    def outlive(self, subject: Subject, *keys: str) -> None:
        """Let the leases of these keys end; each was claimed with ``self.lease``."""
        self.advance(subject, self.lease)

    def forget_expired(self, subject: Subject, after: float = 0.0, limit: int = 256) -> int:
        """Let time pass, then purge until everything that has expired is gone; say how many that were."""
        self.advance(subject, after + self.purge_delay)
        gone = 0
        for _ in range(ROUNDS * (subject.stats().keys // limit + 2)):
            gone += subject.purge(limit)
            if not subject.stats().expired:
                return gone
        raise AssertionError(f"{subject.stats().expired} expired records are left after many purges.")

    def finish(
        self, subject: Subject, key: str, state: State = State.COMPLETED, *, keep: float = 0.0
    ) -> Record:
        """Let an attempt at a key end, to be remembered for ``keep`` (by default one that is to end)."""
        keep = keep or self.keep
        held = subject.hold(key, lease=self.lease, keep=keep)
        subject.complete(held, None, state, keep=keep)
        return held

    def bring_about(self, subject: Subject, situation: str, key: str = "k") -> Record:
        """Let the attempt A bring a key into a situation, and give the record as A knew it."""
        held = subject.hold(key, lease=self.lease if situation == "lapsed" else LONG)
        if situation == "lapsed":
            self.outlive(subject, key)
        elif situation == "released":
            subject.release(held)
        elif situation == "completed":
            subject.complete(held)
        elif situation == "failed":
            subject.complete(held, b"error", State.FAILED)
        elif situation == "in doubt":
            subject.doubt(held)
        return held

    @pytest.fixture(params=["blocking", "asyncio"])
    def subject(self, request: pytest.FixtureRequest) -> Iterator[Subject]:
        """A fresh store in one colour."""
        self.colour = request.param
        clock = ManualClock()
        with ExitStack() as stack:
            driver = DRIVERS[self.colour]()
            stack.callback(driver.close)
            store = self.make_store(clock)
            stack.callback(store.close)
            if not getattr(store.features, self.colour):
                pytest.skip(f"the store declares {self.colour}=False")
            if late := store.features.purge_delay:  # counted from when its first lease would have ended
                self.purge_delay = max(self.purge_delay, self.lease + late)
            yield self.speak_to(store, clock, driver)

    def speak_to(self, store: Store, clock: ManualClock, driver: Driver) -> Subject:
        """A store's verbs in the colour of this test."""
        verbs = store.for_blocking() if self.colour == "blocking" else store.for_asyncio()
        return Subject(store, verbs, clock, driver)

    def close_to(self, one: float, other: float) -> bool:
        """Whether two times are the same as far as the store can tell."""
        return abs(one - other) <= self.resolution
