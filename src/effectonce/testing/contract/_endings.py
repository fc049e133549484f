"""renew, complete and release: only the holder, and each of them twice."""

from __future__ import annotations

import pytest

from ..._records import NOBODY, Ending, Record, State, Verdict
from ._subject import ASKED, LONG, A, B, Subject
from ._suite import Suite


class Endings(Suite):
    """What the holder of a claim may do, and what nobody else may."""

    # renew

    def test_renewing_moves_the_lease(self, subject: Subject) -> None:
        """A renewed claim holds for another lease from now, and is remembered for its keep beyond that."""
        held = subject.hold(lease=self.lease)
        before = subject.now()
        assert subject.renew(held, lease=2 * LONG) is True
        record = subject.read()
        assert record.lease_until >= before + 2 * LONG - self.resolution
        assert self.close_to(record.expires_at, record.lease_until + LONG)
        assert record == held._replace(lease_until=record.lease_until, expires_at=record.expires_at)

    def test_a_renewed_claim_outlives_its_first_lease(self, subject: Subject) -> None:
        """An attempt that renews in time keeps duplicates out for as long as it runs."""
        subject.renew(subject.hold(lease=self.lease))
        self.outlive(subject, "k")
        assert subject.claim(owner=B).verdict is Verdict.BUSY

    def test_renewing_twice_is_renewing(self, subject: Subject) -> None:
        """A renewal that is sent again is granted again."""
        held = subject.hold()
        assert [subject.renew(held) for _ in range(3)] == [True, True, True]

    def test_renewing_late_is_granted_while_nobody_took_over(self, subject: Subject) -> None:
        """A lease that is over can be renewed: its holder was slow, and nobody else has begun."""
        held = subject.hold(lease=self.lease)
        self.outlive(subject, "k")
        assert subject.renew(held) is True
        assert subject.claim(owner=B).verdict is Verdict.BUSY

    def test_only_the_holder_renews(self, subject: Subject) -> None:
        """Another owner, another fence or an unknown key is no claim; being refused changes nothing."""
        held = subject.hold()
        assert subject.renew(held, owner=B) is False
        assert subject.renew(held, owner=NOBODY) is False
        assert subject.renew(held, fence=held.fence + 1) is False
        assert subject.renew(held, fence=held.fence - 1) is False
        assert subject.renew(held._replace(key="unknown")) is False
        assert subject.get() == held
        assert subject.get("unknown") is None

    # complete

    @pytest.mark.parametrize(
        ("state", "result"),
        [
            (State.COMPLETED, b"done"),
            (State.COMPLETED, None),
            (State.FAILED, b"error"),
            (State.IN_DOUBT, None),
        ],
    )
    def test_the_holder_ends_its_claim(self, subject: Subject, state: State, result: bytes | None) -> None:
        """A claim ends once, with a state and a result; nobody holds it afterwards."""
        held = subject.hold()
        assert subject.complete(held, result, state) is Ending.DONE
        record = subject.read()
        assert (record.state, record.result, record.owner) == (state, result, NOBODY)
        assert (record.fence, record.attempts, record.fingerprint) == (held.fence, 1, ASKED)

    @pytest.mark.parametrize(
        ("state", "result"),
        [
            (State.COMPLETED, b"done"),
            (State.COMPLETED, None),
            (State.FAILED, b"error"),
            (State.IN_DOUBT, None),
        ],
    )
    def test_completing_twice_is_completing(
        self, subject: Subject, state: State, result: bytes | None
    ) -> None:
        """A completion whose answer was lost, sent again, is told that it happened, and changes nothing."""
        held = subject.hold()
        subject.complete(held, result, state)
        before = subject.get()
        assert [subject.complete(held, result, state, keep=2 * LONG) for _ in range(2)] == [
            Ending.REPEATED
        ] * 2
        assert subject.get() == before

    def test_a_completed_record_never_changes(self, subject: Subject) -> None:
        """Not even its own owner can give a second, different answer, or take the first one back."""
        held = subject.hold()
        subject.complete(held, b"first")
        before = subject.get()
        self.refuse_everything(subject, held)
        for owner in (A, B, NOBODY):
            self.refuse_everything(subject, held._replace(owner=owner))
        assert subject.get() == before

    def test_an_attempt_that_outlived_its_lease_may_complete(self, subject: Subject) -> None:
        """While nobody took over, the first attempt's result counts, however late it comes."""
        held = subject.hold(lease=self.lease)
        self.outlive(subject, "k")
        assert subject.complete(held) is Ending.DONE
        assert subject.claim(owner=B).verdict is Verdict.REPLAY

    def test_only_the_holder_completes(self, subject: Subject) -> None:
        """Another owner, another fence or an unknown key is fenced out; being refused changes nothing."""
        held = subject.hold()
        for stranger in (
            held._replace(owner=B),
            held._replace(owner=NOBODY),
            held._replace(fence=held.fence + 1),
            held._replace(fence=held.fence - 1),
            held._replace(key="unknown"),
        ):
            self.refuse_everything(subject, stranger)
        assert subject.get() == held
        assert subject.get("unknown") is None

    # release

    def test_a_released_key_can_be_claimed_at_once(self, subject: Subject) -> None:
        """The next attempt need not wait for the lease."""
        held = subject.hold()
        assert subject.release(held) is Ending.DONE
        decision = subject.claim(owner=B)
        assert decision.verdict is Verdict.CLAIMED
        assert decision.record is not None
        assert (decision.record.owner, decision.record.attempts) == (B, 2)

    def test_a_claim_that_never_began_is_no_attempt(self, subject: Subject) -> None:
        """Given back before its handler began, it leaves its fence behind but does not count as tried."""
        held = subject.hold()
        assert subject.release(held, began=False) is Ending.DONE
        record = subject.claim(owner=B).record
        assert record is not None
        assert (record.attempts, record.fence > held.fence) == (1, True)

    def test_a_released_record_remembers(self, subject: Subject) -> None:
        """Fence, attempts and fingerprint outlast a release, and are kept as long as a result is."""
        held = subject.hold()
        before = subject.now()
        subject.release(held, keep=2 * LONG)
        record = subject.read()
        assert (record.state, record.owner, record.result) == (State.ABSENT, NOBODY, None)
        assert (record.fence, record.attempts, record.fingerprint) == (held.fence, 1, ASKED)
        assert record.expires_at >= before + 2 * LONG - self.resolution

    def test_releasing_twice_is_releasing(self, subject: Subject) -> None:
        """A release that is sent again is told that it happened, and changes nothing."""
        held = subject.hold()
        subject.release(held)
        before = subject.get()
        assert [subject.release(held) for _ in range(2)] == [Ending.REPEATED] * 2
        assert subject.get() == before

    def test_a_release_that_arrives_again_does_not_free_the_next_claim(self, subject: Subject) -> None:
        """A late copy of a release belongs to its own fence: the claim that followed is untouched."""
        held = subject.hold()
        subject.release(held)
        following = subject.hold(owner=A)
        assert subject.release(held) is Ending.FENCED
        assert subject.get() == following

    # Stale attempts

    def test_a_released_attempt_can_do_nothing_more(self, subject: Subject) -> None:
        """Who gave a claim back can't complete or renew it afterwards."""
        held = subject.hold()
        subject.release(held)
        assert subject.renew(held) is False
        assert subject.complete(held) is Ending.FENCED
        assert subject.claim(owner=B).verdict is Verdict.CLAIMED

    def test_a_stale_attempt_is_fenced_out_after_a_takeover(self, subject: Subject) -> None:
        """A worker that woke up after another took over can't complete, fail, doubt, release or renew."""
        stale = subject.hold(lease=self.lease)
        self.outlive(subject, "k")
        taken = subject.hold(owner=B)
        self.refuse_everything(subject, stale)
        assert subject.get() == taken
        assert subject.complete(taken, b"B's") is Ending.DONE

    def test_a_stale_attempt_is_fenced_out_after_the_other_ended(self, subject: Subject) -> None:
        """Completed, failed, released or in doubt by another: the stale attempt changes none of it."""
        for state, result in (
            (State.COMPLETED, b"B's"),
            (State.FAILED, b"B's"),
            (State.ABSENT, None),
            (State.IN_DOUBT, None),
        ):
            key = state.name
            stale = subject.hold(key, lease=self.lease)
            self.outlive(subject, key)
            subject.complete(subject.hold(key, B), result, state)
            before = subject.get(key)
            self.refuse_everything(subject, stale)
            assert subject.get(key) == before

    def test_a_stale_attempt_is_fenced_out_by_its_own_later_claim(self, subject: Subject) -> None:
        """The fence decides, not the owner: an owner's command from an earlier grant is stale as well."""
        first = subject.hold()
        subject.release(first)
        second = subject.hold(owner=A)
        assert second.fence > first.fence
        self.refuse_everything(subject, first)
        assert subject.get() == second

    def refuse_everything(self, subject: Subject, stale: Record) -> None:
        """Check that an attempt without a claim gets nowhere by any verb."""
        assert subject.renew(stale) is False
        assert subject.complete(stale, b"stale") is Ending.FENCED
        assert subject.complete(stale, b"stale", State.FAILED) is Ending.FENCED
        assert subject.doubt(stale) is Ending.FENCED
        assert subject.release(stale) is Ending.FENCED
