"""claim: every verdict, and the order in which the rules are asked."""

from __future__ import annotations

from typing import Any

import pytest

from ..._records import NOBODY, State, Verdict
from ._subject import ASKED, GRANTED, LONG, OTHER, A, B, Subject
from ._suite import SITUATIONS, Suite


class ClaimRules(Suite):
    """What a claim gets, and what it leaves behind."""

    def test_an_unknown_key_is_claimed(self, subject: Subject) -> None:
        """A key that nobody has used is granted, as the first attempt."""
        before = subject.now()
        decision = subject.claim("k", A, ASKED, lease=LONG, keep=2 * LONG)
        after = subject.now()
        record = decision.record
        assert record is not None
        assert decision.verdict is Verdict.CLAIMED
        assert (record.key, record.state, record.owner, record.fingerprint) == ("k", State.PENDING, A, ASKED)
        assert (record.attempts, record.result, record.once) == (1, None, False)
        assert record.fence >= 1
        assert before + LONG - self.resolution <= record.lease_until <= after + LONG + self.resolution
        assert self.close_to(record.expires_at, record.lease_until + 2 * LONG)

    def test_the_answer_is_what_is_stored(self, subject: Subject) -> None:
        """The record in a claim's answer is the record that the next reader sees."""
        assert subject.claim().record == subject.get()

    @pytest.mark.parametrize("situation", SITUATIONS)
    def test_each_situation_has_its_verdict(self, subject: Subject, situation: str) -> None:
        """Held: busy. Crashed: taken over. Released: claimed. Done: replay. In doubt: in doubt."""
        self.bring_about(subject, situation)
        assert subject.claim(owner=B).verdict is SITUATIONS[situation]

    @pytest.mark.parametrize("situation", SITUATIONS)
    def test_another_fingerprint_is_refused_first(self, subject: Subject, situation: str) -> None:
        """Whatever became of the key: who asks something else under it gets mismatch, before any other rule."""
        self.bring_about(subject, situation)
        before = subject.get()
        for once in (False, True):
            decision = subject.claim("k", B, OTHER, once=once, max_attempts=1)
            assert (decision.verdict, decision.record) == (Verdict.MISMATCH, before)
        assert subject.get() == before

    def test_the_holder_itself_may_not_ask_for_something_else(self, subject: Subject) -> None:
        """Not even the owner of a live claim gets it again under another fingerprint."""
        held = subject.hold()
        assert subject.claim("k", A, OTHER).verdict is Verdict.MISMATCH
        assert subject.get() == held

    def test_an_empty_fingerprint_is_a_fingerprint(self, subject: Subject) -> None:
        """Nothing asked equals nothing asked, and differs from something."""
        subject.hold("k", A, b"")
        assert subject.claim("k", B, b"").verdict is Verdict.BUSY
        assert subject.claim("k", B, ASKED).verdict is Verdict.MISMATCH

    @pytest.mark.parametrize("situation", ["pending", "completed", "failed", "in doubt"])
    def test_a_refusal_changes_nothing(self, subject: Subject, situation: str) -> None:
        """Busy, replay and in doubt are read from the record and leave it as it was."""
        self.bring_about(subject, situation)
        before = subject.get()
        decision = subject.claim(owner=B, lease=1.0, keep=1.0, once=True, max_attempts=1)
        assert decision.record == before
        assert subject.get() == before

    def test_busy_says_how_long(self, subject: Subject) -> None:
        """A duplicate of a running attempt hears how much of the lease is left, and whose record it met."""
        held = subject.hold(lease=LONG)
        decision = subject.claim(owner=B, lease=1.0)
        assert (decision.verdict, decision.record) == (Verdict.BUSY, held)
        assert 0 < decision.retry_after <= LONG
        assert abs(decision.retry_after - (held.lease_until - subject.now())) <= 1.0

    def test_only_busy_and_replay_name_a_time(self, subject: Subject) -> None:
        """What the lease has left, or what the memory has; every other answer is final for this attempt."""
        for number, situation in enumerate(SITUATIONS):
            key = f"key {number}"
            self.bring_about(subject, situation, key)
            decision = subject.claim(key, B)
            assert (decision.retry_after > 0) is (decision.verdict in (Verdict.BUSY, Verdict.REPLAY))

    def test_a_replay_carries_the_result(self, subject: Subject) -> None:
        """Whoever asks again gets the first answer, with nobody holding the record any more."""
        held = subject.hold()
        subject.complete(held, b"receipt 7")
        record = subject.claim(owner=B).record
        assert record is not None
        assert (record.state, record.result, record.fence) == (State.COMPLETED, b"receipt 7", held.fence)
        assert (record.owner, record.attempts) == (NOBODY, 1)

    def test_the_owner_of_a_finished_key_gets_the_replay_too(self, subject: Subject) -> None:
        """A claim that arrives once more after its own completion does not run again."""
        subject.complete(subject.hold())
        assert subject.claim(owner=A).verdict is Verdict.REPLAY

    # The reply was lost: the same owner asks again.

    def test_a_repeated_claim_gets_the_same_fence(self, subject: Subject) -> None:
        """A claim whose answer was lost, sent again, is granted again: same fence, same attempt."""
        first = subject.hold()
        for _ in range(3):
            again = subject.claim()
            assert again.verdict is Verdict.CLAIMED
            assert again.record is not None
            assert (again.record.fence, again.record.attempts) == (first.fence, 1)

    def test_a_repeated_claim_counts_its_lease_anew(self, subject: Subject) -> None:
        """The lease runs from the claim that was answered."""
        first = subject.hold(lease=self.lease)
        self.advance(subject, self.lease / 2)
        again = subject.hold(lease=self.lease)
        assert again.lease_until >= first.lease_until + self.lease / 2 - self.resolution
        assert subject.get() == again

    def test_a_repeated_claim_after_the_lease_gets_the_same_fence(self, subject: Subject) -> None:
        """An owner is never locked out by its own claim: if nobody took over meanwhile, it is still the holder."""
        kinds: dict[str, dict[str, Any]] = {"plain": {}, "once": {"once": True}, "last": {"max_attempts": 1}}
        for key, choices in kinds.items():
            first = subject.hold(key, lease=self.lease, **choices)
            self.outlive(subject, key)
            again = subject.claim(key, **choices)
            assert again.verdict is Verdict.CLAIMED
            assert again.record is not None
            assert (again.record.fence, again.record.attempts) == (first.fence, 1)

    def test_a_repeated_takeover_gets_the_same_fence(self, subject: Subject) -> None:
        """The reply to a takeover may be lost like any other."""
        self.bring_about(subject, "lapsed")
        taken = subject.hold(owner=B)
        again = subject.hold(owner=B)
        assert (again.fence, again.attempts) == (taken.fence, 2)

    def test_an_owner_that_was_taken_over_has_no_claim_to_repeat(self, subject: Subject) -> None:
        """The old owner's claim, arriving again after a takeover, is a duplicate like any other."""
        self.bring_about(subject, "lapsed")
        taken = subject.hold(owner=B)
        assert subject.claim(owner=A).verdict is Verdict.BUSY
        assert subject.get() == taken

    # Attempts

    def test_attempts_are_counted_across_takeover_and_release(self, subject: Subject) -> None:
        """Every grant is one attempt, however the one before it ended."""
        assert self.bring_about(subject, "lapsed").attempts == 1
        second = subject.hold(owner=B)
        assert second.attempts == 2
        subject.release(second)
        assert subject.hold(owner=A).attempts == 3

    @pytest.mark.parametrize("situation", ["lapsed", "released"])
    def test_used_up_attempts_fail_the_key(self, subject: Subject, situation: str) -> None:
        """After the last allowed attempt crashed or was released, the key fails for good, without a result."""
        held = self.bring_about(subject, situation)
        decision = subject.claim(owner=B, max_attempts=1)
        record = decision.record
        assert decision.verdict is Verdict.EXHAUSTED
        assert record is not None
        assert (record.state, record.result, record.owner) == (State.FAILED, None, NOBODY)
        assert (record.attempts, record.fence) == (1, held.fence)
        assert subject.get() == record
        again = subject.claim(owner=B)
        assert (again.verdict, again.record) == (Verdict.REPLAY, record)

    def test_the_last_allowed_attempt_is_granted(self, subject: Subject) -> None:
        """max_attempts=3 is three attempts, not two."""
        for number in (1, 2, 3):
            held = subject.hold(max_attempts=3)
            assert held.attempts == number
            subject.release(held)
        assert subject.claim(max_attempts=3).verdict is Verdict.EXHAUSTED

    def test_used_up_attempts_do_not_end_a_live_one(self, subject: Subject) -> None:
        """While the last attempt runs, its duplicates wait for it."""
        subject.hold(max_attempts=1)
        assert subject.claim(owner=B, max_attempts=1).verdict is Verdict.BUSY

    def test_used_up_attempts_do_not_touch_a_result(self, subject: Subject) -> None:
        """What has completed is replayed, however many attempts it took."""
        self.bring_about(subject, "completed")
        assert subject.claim(owner=B, max_attempts=1).verdict is Verdict.REPLAY

    # Late arrivals

    def test_a_late_arrival_does_not_create(self, subject: Subject) -> None:
        """A message that is too old to be proven new is not granted an unknown key, and leaves nothing behind."""
        decision = subject.claim(may_create=False)
        assert (decision.verdict, decision.record) == (Verdict.LATE, None)
        assert subject.get() is None
        assert subject.claim().verdict is Verdict.CLAIMED

    @pytest.mark.parametrize("situation", SITUATIONS)
    def test_a_late_arrival_of_a_known_key_is_answered_as_any_other(
        self, subject: Subject, situation: str
    ) -> None:
        """What the store remembers decides: a late duplicate of a known key is a duplicate."""
        self.bring_about(subject, situation)
        assert subject.claim("k", B, OTHER, may_create=False).verdict is Verdict.MISMATCH
        decision = subject.claim(owner=B, may_create=False)
        assert decision.verdict is SITUATIONS[situation]
        assert decision.record is not None
        if decision.verdict in GRANTED:
            assert decision.record.attempts == 2

    def test_a_late_arrival_of_an_expired_key_does_not_create(self, subject: Subject) -> None:
        """What has expired is unknown, whether or not it has been purged."""
        subject.complete(subject.hold(), keep=self.keep)
        self.advance(subject, self.keep)
        assert subject.claim(may_create=False).verdict is Verdict.LATE
        assert subject.claim("k", B, OTHER, may_create=False).verdict is Verdict.LATE
