"""IN_DOUBT: an attempt ended without a word. It waits, for as long as it takes, until someone settles it."""

from __future__ import annotations

from functools import partial

import pytest

from ..._records import NOBODY, Completion, Ending, Record, State, Verdict
from ._subject import ASKED, LONG, OTHER, A, B, Subject
from ._suite import Suite

SETTLEMENTS = [(State.COMPLETED, b"it happened"), (State.FAILED, b"it was refused"), (State.ABSENT, None)]


class Doubt(Suite):
    """At-most-once claims, and how a doubt is settled."""

    def crash(self, subject: Subject, key: str = "k") -> Record:
        """Let an at-most-once attempt crash, be found in doubt, and give the record that says so."""
        subject.hold(key, lease=self.lease, once=True)
        self.outlive(subject, key)
        decision = subject.claim(key, B)
        assert decision.verdict is Verdict.IN_DOUBT
        assert decision.record is not None
        return decision.record

    def test_a_crashed_once_claim_is_in_doubt(self, subject: Subject) -> None:
        """After the lease of an at-most-once claim, the next one does not take over: nobody knows what happened."""
        held = subject.hold(lease=self.lease, once=True)
        self.outlive(subject, "k")
        decision = subject.claim(owner=B)
        record = decision.record
        assert decision.verdict is Verdict.IN_DOUBT
        assert record is not None
        assert (record.state, record.owner, record.result) == (State.IN_DOUBT, NOBODY, None)
        assert (record.fence, record.attempts, record.once) == (held.fence, 1, True)
        assert subject.get() == record

    def test_a_once_claim_does_not_take_over_another(self, subject: Subject) -> None:
        """Who must start at most once does not start where another may have."""
        subject.hold(lease=self.lease)
        self.outlive(subject, "k")
        assert subject.claim(owner=B, once=True).verdict is Verdict.IN_DOUBT

    def test_doubt_comes_before_used_up_attempts(self, subject: Subject) -> None:
        """A crash that left a doubt is not closed as poison: its effect may have happened."""
        subject.hold(lease=self.lease, once=True)
        self.outlive(subject, "k")
        assert subject.claim(owner=B, max_attempts=1).verdict is Verdict.IN_DOUBT
        assert subject.claim(owner=B, max_attempts=1).verdict is Verdict.IN_DOUBT

    def test_a_live_once_claim_is_busy(self, subject: Subject) -> None:
        """While its lease lives, an at-most-once attempt is an attempt like any other."""
        subject.hold(once=True)
        assert subject.claim(owner=B, once=True).verdict is Verdict.BUSY

    def test_a_released_once_claim_may_start_again(self, subject: Subject) -> None:
        """The handler's own word that nothing happened is enough."""
        subject.release(subject.hold(once=True))
        assert subject.claim(owner=B, once=True).verdict is Verdict.CLAIMED

    def test_everyone_is_told_of_the_doubt(self, subject: Subject) -> None:
        """Every later claim, of whatever kind, gets in doubt; the crashed owner's own too."""
        doubt = self.crash(subject)
        for owner, once in ((A, True), (B, False), (B, True)):
            assert subject.claim(owner=owner, once=once) == (Verdict.IN_DOUBT, doubt, 0.0)
        assert subject.claim("k", B, OTHER).verdict is Verdict.MISMATCH
        assert subject.claim(owner=B, may_create=False).verdict is Verdict.IN_DOUBT

    def test_the_crashed_attempt_is_fenced_out(self, subject: Subject) -> None:
        """An attempt that wakes up after it was found in doubt can't renew, complete, fail or release any more."""
        held = subject.hold(lease=self.lease, once=True)
        self.outlive(subject, "k")
        subject.claim(owner=B)
        before = subject.get()
        assert subject.renew(held) is False
        assert subject.complete(held) is Ending.FENCED
        assert subject.complete(held, b"error", State.FAILED) is Ending.FENCED
        assert subject.release(held) is Ending.FENCED
        assert subject.get() == before

    @pytest.mark.parametrize(("state", "result"), SETTLEMENTS)
    def test_a_doubt_is_settled_by_quoting_its_fence(
        self, subject: Subject, state: State, result: bytes | None
    ) -> None:
        """It happened, it was refused, or nothing happened: the record says so from then on."""
        doubt = self.crash(subject)
        assert subject.settle(doubt, state, result) is Ending.DONE
        record = subject.read()
        assert (record.state, record.result, record.fence) == (state, result, doubt.fence)
        assert (record.fingerprint, record.attempts) == (ASKED, 1)
        following = subject.claim(owner=B)
        if state is State.ABSENT:
            assert following.verdict is Verdict.CLAIMED
            assert following.record is not None
            assert (following.record.fence > doubt.fence, following.record.attempts) == (True, 2)
        else:
            assert (following.verdict, following.record) == (Verdict.REPLAY, record)

    @pytest.mark.parametrize(("state", "result"), SETTLEMENTS)
    def test_settling_twice_is_settling(self, subject: Subject, state: State, result: bytes | None) -> None:
        """A settlement that is sent again is told that it happened."""
        doubt = self.crash(subject)
        answers = [subject.settle(doubt, state, result) for _ in range(3)]
        assert answers == [Ending.DONE, Ending.REPEATED, Ending.REPEATED]

    def test_of_two_different_settlements_the_first_counts(self, subject: Subject) -> None:
        """A doubt is settled once; whoever says something else afterwards is fenced out."""
        for number, (state, result) in enumerate(SETTLEMENTS):
            doubt = self.crash(subject, f"key {number}")
            assert subject.settle(doubt, state, result) is Ending.DONE
            before = subject.get(doubt.key)
            for other_state, other_result in [
                *SETTLEMENTS,
                (State.COMPLETED, b"otherwise"),
                (State.IN_DOUBT, None),
            ]:
                if (other_state, other_result) != (state, result):
                    assert subject.settle(doubt, other_state, other_result) is Ending.FENCED
            assert subject.get(doubt.key) == before

    def test_of_many_settlements_at_once_one_counts(self, subject: Subject) -> None:
        """People and probers who settle at the same moment do not overwrite each other."""
        doubt = self.crash(subject)

        def settle(result: bytes) -> Completion:
            return Completion("k", NOBODY, doubt.fence, State.COMPLETED, result, LONG)

        results = [b"%d" % number for number in range(16)]
        answers = subject.race([partial(subject.verbs.complete, settle(result)) for result in results])
        assert answers.count(Ending.DONE) == 1
        assert answers.count(Ending.FENCED) == 15
        assert subject.read().result == results[answers.index(Ending.DONE)]

    def test_a_wrong_fence_settles_nothing(self, subject: Subject) -> None:
        """A settlement made for an earlier or an imagined doubt does not count."""
        doubt = self.crash(subject)
        for fence in (doubt.fence - 1, doubt.fence + 1):
            assert subject.settle(doubt._replace(fence=fence), State.COMPLETED, b"wrong") is Ending.FENCED
        assert subject.settle(doubt._replace(key="unknown"), State.COMPLETED, b"wrong") is Ending.FENCED
        assert subject.get() == doubt

    def test_only_a_doubt_can_be_settled(self, subject: Subject) -> None:
        """Nobody settles what an attempt still holds, nor what has ended."""
        held = subject.hold()
        assert subject.settle(held, State.COMPLETED, b"guessed") is Ending.FENCED
        assert subject.settle(held, State.ABSENT) is Ending.FENCED
        assert subject.get() == held
        subject.complete(held, b"done")
        assert subject.settle(held, State.COMPLETED, b"guessed") is Ending.FENCED
        assert subject.settle(held, State.ABSENT) is Ending.FENCED
        assert subject.read().result == b"done"

    def test_a_doubt_never_expires(self, subject: Subject) -> None:
        """However long it waits and however often the store is purged, a doubt is there until it is settled."""
        self.finish(subject, "told", State.IN_DOUBT)
        subject.hold("found", lease=self.lease, keep=self.keep, once=True)
        subject.hold("not yet found", lease=self.lease, keep=self.keep, once=True)
        self.outlive(subject, "found", "not yet found")
        subject.claim("found", B, keep=self.keep)
        self.forget_expired(subject, self.lease + 2 * self.keep)
        for key in ("told", "found", "not yet found"):
            assert subject.claim(key, B, keep=self.keep, may_create=False).verdict is Verdict.IN_DOUBT
            assert subject.claim(key, B, OTHER).verdict is Verdict.MISMATCH
        assert [record.key for record in subject.scan(State.IN_DOUBT)] == ["found", "not yet found", "told"]

    def test_a_settled_doubt_is_kept_from_its_settlement(self, subject: Subject) -> None:
        """The answer that a person gave is remembered as long as any other."""
        doubt = self.crash(subject)
        before = subject.now()
        subject.settle(doubt, State.COMPLETED, b"it happened", keep=2 * LONG)
        assert subject.read().expires_at >= before + 2 * LONG - self.resolution
