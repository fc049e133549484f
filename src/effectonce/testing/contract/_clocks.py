"""The store's clock decides, and no other."""

from __future__ import annotations

import time

import pytest

from ..._records import Verdict
from ._subject import LONG, B, Subject
from ._suite import Suite

SKEWS = [-LONG, LONG]


class StoreClock(Suite):
    """A caller's clock may be wrong by an hour without anyone running twice."""

    def skew(self, patch: pytest.MonkeyPatch, seconds: float) -> None:
        """Set the wall clock of this process wrong."""
        right = time.time
        patch.setattr(time, "time", lambda: right() + seconds)

    def test_the_clock_does_not_run_backwards(self, subject: Subject) -> None:
        """Of two looks at the store's clock, the second is not earlier."""
        times = [subject.now() for _ in range(10)]
        assert times == sorted(times)

    @pytest.mark.parametrize("seconds", SKEWS)
    def test_a_skewed_caller_reads_the_same_clock(
        self, subject: Subject, monkeypatch: pytest.MonkeyPatch, seconds: float
    ) -> None:
        """The store's clock is not the caller's."""
        before = subject.now()
        self.skew(monkeypatch, seconds)
        assert 0 <= subject.now() - before < LONG / 2

    @pytest.mark.parametrize("seconds", SKEWS)
    def test_a_skewed_caller_does_not_end_a_lease(
        self, subject: Subject, monkeypatch: pytest.MonkeyPatch, seconds: float
    ) -> None:
        """A live lease is live for everyone, whatever their own clocks say."""
        held = subject.hold(lease=LONG / 2)
        self.skew(monkeypatch, seconds)
        decision = subject.claim(owner=B)
        assert decision.verdict is Verdict.BUSY
        assert 0 < decision.retry_after <= LONG / 2
        assert subject.renew(held) is True

    @pytest.mark.parametrize("seconds", SKEWS)
    def test_a_skewed_caller_does_not_prolong_a_lease(
        self, subject: Subject, monkeypatch: pytest.MonkeyPatch, seconds: float
    ) -> None:
        """A lease that a skewed caller took ends by the store's clock, and is over for skewed callers too."""
        self.skew(monkeypatch, seconds)
        held = subject.hold(lease=self.lease)
        assert (
            self.lease - self.resolution
            <= held.lease_until - subject.now() + 1.0
            <= self.lease + 1.0 + self.resolution
        )
        self.outlive(subject, "k")
        assert subject.claim(owner=B).verdict is Verdict.TAKEN_OVER

    @pytest.mark.parametrize("seconds", SKEWS)
    def test_a_skewed_caller_does_not_expire_a_result(
        self, subject: Subject, monkeypatch: pytest.MonkeyPatch, seconds: float
    ) -> None:
        """A result is kept by the store's clock: neither replay, purge nor count goes by a caller's."""
        subject.complete(subject.hold(), keep=LONG / 2)
        self.skew(monkeypatch, seconds)
        assert subject.stats().expired == 0
        assert subject.purge() == 0
        assert subject.claim(owner=B).verdict is Verdict.REPLAY

    def test_an_injected_clock_alone_decides(self, subject: Subject) -> None:
        """Where the clock is given, years pass when it says so, and nothing passes when it does not."""
        if not subject.has_manual_clock:
            pytest.skip("the store has a clock of its own")
        subject.hold("leased", lease=LONG)
        subject.complete(subject.hold("kept"), keep=100 * LONG)
        subject.clock.advance(LONG)
        assert subject.claim("leased", B).verdict is Verdict.TAKEN_OVER
        assert subject.claim("kept", B).verdict is Verdict.REPLAY
        subject.clock.advance(99 * LONG)
        assert subject.claim("kept", B).verdict is Verdict.CLAIMED

    def test_a_clock_set_back_keeps_duplicates_out(self, subject: Subject) -> None:
        """When the store's clock is corrected backwards, leases and results last longer, never shorter."""
        if not subject.has_manual_clock:
            pytest.skip("the store has a clock of its own")
        subject.hold("leased", lease=self.lease)
        subject.complete(subject.hold("kept"), keep=self.keep)
        subject.clock.advance(-LONG)
        subject.clock.advance(self.lease)
        assert subject.claim("leased", B).verdict is Verdict.BUSY
        subject.clock.advance(self.keep)
        assert subject.claim("kept", B).verdict is Verdict.REPLAY
