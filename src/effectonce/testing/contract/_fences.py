"""Fences: given out once per key, and only growing, also across release, expiry and deletion."""

from __future__ import annotations

from ..._records import Ending, Verdict
from ._subject import OTHER, A, B, Subject
from ._suite import Suite


class Fences(Suite):
    """The number that tells an attempt from every earlier one at the same key."""

    def test_a_takeover_has_a_higher_fence(self, subject: Subject) -> None:
        """Who takes over a crashed attempt's key can be told from it by any sink that compares fences."""
        crashed = subject.hold(lease=self.lease)
        self.outlive(subject, "k")
        decision = subject.claim(owner=B)
        assert decision.verdict is Verdict.TAKEN_OVER
        assert decision.record is not None
        assert decision.record.fence > crashed.fence
        assert subject.get() == decision.record

    def test_fences_grow_across_release(self, subject: Subject) -> None:
        """Each attempt after a release has a higher fence than the one before."""
        fences = []
        for _ in range(5):
            held = subject.hold()
            fences.append(held.fence)
            subject.release(held)
        assert fences == sorted(set(fences))

    def test_fences_grow_across_takeovers(self, subject: Subject) -> None:
        """Each attempt after a crash has a higher fence than the one before."""
        fences = []
        for owner in (A, B, A):
            fences.append(subject.hold(owner=owner, lease=self.lease).fence)
            self.outlive(subject, "k")
        assert fences == sorted(set(fences))

    def test_fences_grow_across_expiry(self, subject: Subject) -> None:
        """A key that is used again after its result expired starts over, but not its fence."""
        first = subject.hold()
        subject.complete(first, keep=self.keep)
        self.advance(subject, self.keep)
        again = subject.hold("k", B, OTHER)
        assert again.fence > first.fence
        assert again.attempts == 1

    def test_fences_grow_across_deletion(self, subject: Subject) -> None:
        """Also when nothing is left of the earlier record, a new claim gets a fence that was never given out."""
        firsts = {}
        for number in range(8):
            held = subject.hold(f"key {number}", lease=self.lease, keep=self.keep)
            for _ in range(number):  # so that the fences of the keys differ
                subject.release(held, keep=self.keep)
                held = subject.hold(f"key {number}", lease=self.lease, keep=self.keep)
            subject.complete(held, keep=self.keep)
            firsts[held.key] = held
        self.forget_expired(subject, self.keep)
        assert subject.scan() == []
        for key, first in firsts.items():
            again = subject.hold(key, B)
            assert again.fence > first.fence
            assert again.attempts == 1

    def test_a_deleted_attempt_is_fenced_out(self, subject: Subject) -> None:
        """A worker that slept until its record was forgotten can't end the claim that followed, nor make one."""
        stale = subject.hold(lease=self.lease, keep=self.keep)
        self.forget_expired(subject, self.lease + self.keep)
        assert subject.renew(stale) is False
        assert subject.complete(stale) is Ending.FENCED
        assert subject.release(stale) is Ending.FENCED
        assert subject.get() is None
        following = subject.hold(owner=A)
        assert following.fence > stale.fence
        assert subject.complete(stale) is Ending.FENCED
        assert subject.renew(stale) is False
        assert subject.get() == following
