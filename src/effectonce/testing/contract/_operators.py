"""get, scan and stats: what operators and sweepers ask. Nothing is changed by asking."""

from __future__ import annotations

from ..._records import State
from ._subject import LONG, Subject
from ._suite import Suite

KEYS = ["A", "B", "Z", "a", "a b", "aa", "a|b", "z", "é", "日本", "😀"]
"""In order: by code point, which is also the order of their UTF-8 bytes."""


class Operators(Suite):
    """The questions that decide nothing."""

    def test_get_reads_what_is_there(self, subject: Subject) -> None:
        """A record is read as it was written; an unknown key has none."""
        assert subject.get("unknown") is None
        held = subject.hold(once=True)
        assert subject.get() == held

    def test_reading_changes_nothing(self, subject: Subject) -> None:
        """Operators may look as often as they like."""
        held = subject.hold()
        for _ in range(2):
            subject.get()
            subject.scan()
            subject.stats()
        assert subject.get() == held

    def test_scan_goes_in_key_order(self, subject: Subject) -> None:
        """Whatever the order in which they came, records are listed by key, each as it is."""
        held = {key: subject.hold(key) for key in reversed(KEYS)}
        assert subject.scan() == [held[key] for key in KEYS]

    def test_scan_goes_page_by_page(self, subject: Subject) -> None:
        """``after`` is where the last page ended: pages neither overlap nor leave a gap, and the last is empty."""
        for key in KEYS:
            subject.hold(key)
        seen: list[str] = []
        while page := subject.scan(after=seen[-1] if seen else "", limit=3):
            assert len(page) <= 3
            seen += [record.key for record in page]
        assert seen == KEYS
        assert [record.key for record in subject.scan(after="a a", limit=2)] == ["a b", "aa"]
        assert subject.scan(after=KEYS[-1]) == []

    def test_scan_by_state(self, subject: Subject) -> None:
        """Only records of the state that is asked for are listed, in the same order and pages."""
        for number in range(3):
            subject.hold(f"pending {number}")
            subject.complete(subject.hold(f"completed {number}"))
            subject.complete(subject.hold(f"failed {number}"), b"error", State.FAILED)
            subject.doubt(subject.hold(f"in doubt {number}"))
            subject.release(subject.hold(f"absent {number}"))
        for state in State:
            name = state.name.lower().replace("_", " ")
            assert [r.key for r in subject.scan(state)] == [f"{name} {number}" for number in range(3)]
            assert {r.state for r in subject.scan(state)} == {state}
            assert [r.key for r in subject.scan(state, limit=2)] == [f"{name} 0", f"{name} 1"]
            assert [r.key for r in subject.scan(state, after=f"{name} 1")] == [f"{name} 2"]
        assert len(subject.scan()) == 15

    def test_scan_finds_what_was_abandoned(self, subject: Subject) -> None:
        """A sweeper sees pending records whose lease is over, and by the store's clock that it is."""
        subject.hold("abandoned", lease=self.lease)
        subject.hold("running", lease=LONG)
        self.outlive(subject, "abandoned")
        now = subject.now()
        assert [(r.key, r.lease_until <= now) for r in subject.scan(State.PENDING)] == [
            ("abandoned", True),
            ("running", False),
        ]

    def test_stats_of_an_empty_store(self, subject: Subject) -> None:
        """Nothing is there, so nothing is counted and nothing pends."""
        stats = subject.stats()
        assert (stats.keys, stats.expired, stats.oldest_pending_lease) == (0, 0, None)
        assert not any(stats.by_state.values())
        assert stats.bytes >= 0

    def test_stats_count_by_state(self, subject: Subject) -> None:
        """Each record is counted once, under the name of its state; a released one too."""
        for number, state in enumerate((State.COMPLETED, State.FAILED, State.IN_DOUBT, State.ABSENT)):
            for index in range(number + 1):
                subject.complete(subject.hold(f"{state.name} {index}"), None, state)
        subject.hold("pending")
        stats = subject.stats()
        expected = {"COMPLETED": 1, "FAILED": 2, "IN_DOUBT": 3, "ABSENT": 4, "PENDING": 1}
        assert {name: count for name, count in stats.by_state.items() if count} == expected
        assert (stats.keys, stats.expired) == (11, 0)
        assert stats.bytes > 0

    def test_stats_know_the_lease_that_ends_first(self, subject: Subject) -> None:
        """The oldest pending lease is told in seconds from now; below zero it has been abandoned."""
        subject.complete(subject.hold("done", lease=self.lease))
        subject.hold("later", lease=3 * LONG)
        subject.hold("sooner", lease=2 * LONG)
        left = subject.stats().oldest_pending_lease
        assert left is not None
        assert LONG < left <= 2 * LONG + self.resolution
        held = subject.hold("abandoned", lease=self.lease)
        self.advance(subject, 2 * self.lease)
        left = subject.stats().oldest_pending_lease
        assert left is not None
        assert left < 0
        subject.complete(held)
        left = subject.stats().oldest_pending_lease
        assert left is not None
        assert left > 0

    def test_stats_tell_the_expired_from_the_live(self, subject: Subject) -> None:
        """What waits to be purged is counted as such: not a doubt, not a live lease, not what is still kept."""
        for key in ("one", "two"):
            self.finish(subject, key)
        subject.hold("crashed", lease=self.lease, keep=self.keep)
        subject.hold("once", lease=self.lease, keep=self.keep, once=True)
        subject.hold("running", lease=LONG, keep=self.keep)
        subject.doubt(subject.hold("in doubt", lease=self.lease, keep=self.keep), keep=self.keep)
        subject.complete(subject.hold("kept"), keep=LONG)
        self.advance(subject, self.lease + self.keep)
        stats = subject.stats()
        assert stats.keys - stats.expired == 4
        self.forget_expired(subject)
        assert (subject.stats().keys, subject.stats().expired) == (4, 0)
