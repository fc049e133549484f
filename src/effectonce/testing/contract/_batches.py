"""Batch forms: many commands in one round trip, each answered as if it had come alone."""

from __future__ import annotations

from ..._records import Claim, Completion, Decision, Ending, Record, Renewal, State, Verdict
from ._subject import ASKED, LONG, OTHER, A, B, Subject
from ._suite import SITUATIONS, Suite

MANY = 1000


class BatchForms(Suite):
    """claim_many, renew_many and complete_many."""

    def claim_many(self, subject: Subject, claims: list[Claim]) -> list[Decision]:
        """Send a batch of claims."""
        return subject.driver.run(subject.verbs.claim_many(claims))

    def renew_many(self, subject: Subject, renewals: list[Renewal]) -> list[bool]:
        """Send a batch of renewals."""
        return subject.driver.run(subject.verbs.renew_many(renewals))

    def complete_many(self, subject: Subject, completions: list[Completion]) -> list[Ending]:
        """Send a batch of endings."""
        return subject.driver.run(subject.verbs.complete_many(completions))

    def test_empty_batches_have_empty_answers(self, subject: Subject) -> None:
        """Nothing asked, nothing answered."""
        assert self.claim_many(subject, []) == []
        assert self.renew_many(subject, []) == []
        assert self.complete_many(subject, []) == []

    def test_a_batch_of_claims_is_answered_like_single_claims(self, subject: Subject) -> None:
        """In one batch each claim gets its own verdict, in order, whatever the others get."""
        names = [*SITUATIONS, "unknown"]
        for situation in SITUATIONS:  # a lapsed lease needs time, and time is the same for both
            for form in ("single", "batch"):
                self.bring_about(subject, situation, f"{form} {situation}")
        singly = [subject.claim(f"single {name}", B) for name in names]
        singly += [subject.claim(f"single {name}", B, OTHER) for name in names]
        claims = [Claim(f"batch {name}", B, ASKED, LONG, LONG) for name in names]
        together = self.claim_many(subject, claims)
        together += self.claim_many(subject, [claim._replace(fingerprint=OTHER) for claim in claims])
        assert [d.verdict for d in together] == [d.verdict for d in singly]
        for claim, decision in zip([*claims, *claims], together, strict=True):
            assert decision.record is not None
            assert decision.record == subject.get(claim.key)
        assert [d.record.attempts for d in together if d.record] == [
            d.record.attempts for d in singly if d.record
        ]

    def test_a_batch_of_claims_sent_twice_gets_the_same_fences(self, subject: Subject) -> None:
        """A batch whose answer was lost can be sent again as it is."""
        claims = [Claim(f"key {number}", A, ASKED, LONG, LONG) for number in range(20)]
        first, again = self.claim_many(subject, claims), self.claim_many(subject, claims)
        assert {d.verdict for d in [*first, *again]} == {Verdict.CLAIMED}
        assert _fences(first) == _fences(again)

    def test_a_batch_may_mix_kinds_of_claims(self, subject: Subject) -> None:
        """Each claim of a batch has its own lease, keep, mode and limits."""
        for key in ("used up", "released"):
            subject.release(subject.hold(key))
        claims = [
            Claim("late", A, ASKED, LONG, LONG, may_create=False),
            Claim("once", A, ASKED, LONG, LONG, once=True),
            Claim("used up", A, ASKED, LONG, LONG, max_attempts=1),
            Claim("released", A, ASKED, 2 * LONG, 3 * LONG, max_attempts=2),
        ]
        late, once, used_up, released = self.claim_many(subject, claims)
        assert (late.verdict, late.record) == (Verdict.LATE, None)
        assert once.record is not None
        assert (once.verdict, once.record.once) == (Verdict.CLAIMED, True)
        assert used_up.verdict is Verdict.EXHAUSTED
        assert released.record is not None
        assert (released.verdict, released.record.attempts) == (Verdict.CLAIMED, 2)
        assert self.close_to(released.record.expires_at, released.record.lease_until + 3 * LONG)

    def test_a_batch_of_renewals_tells_the_lost_from_the_held(self, subject: Subject) -> None:
        """One lost claim in a batch costs no other its lease."""
        held = [subject.hold(f"key {number}", lease=self.lease) for number in range(6)]
        subject.complete(held[1])
        subject.release(held[3])
        stale = held[5]._replace(owner=B)
        asked = [*held[:5], stale, held[5]._replace(key="unknown")]
        before = subject.now()
        answers = self.renew_many(subject, [Renewal(r.key, r.owner, r.fence, LONG, LONG) for r in asked])
        assert answers == [True, False, True, False, True, False, False]
        for number in (0, 2, 4):
            assert subject.read(f"key {number}").lease_until >= before + LONG - self.resolution
        assert subject.read("key 1").state is State.COMPLETED
        assert subject.get("key 5") == held[5]

    def test_a_batch_of_endings_is_answered_like_single_endings(self, subject: Subject) -> None:
        """Done, repeated or fenced out: each for itself, in order."""
        held = [subject.hold(f"key {number}") for number in range(6)]
        subject.complete(held[1], b"result 1")
        subject.complete(held[2], b"something else")
        endings = [
            (held[0], State.COMPLETED, b"result 0"),
            (held[1], State.COMPLETED, b"result 1"),
            (held[2], State.COMPLETED, b"result 2"),
            (held[3], State.FAILED, b"error"),
            (held[4], State.ABSENT, None),
            (held[5], State.IN_DOUBT, None),
            (held[0]._replace(key="unknown"), State.COMPLETED, b"result"),
        ]
        done, repeated, fenced = Ending.DONE, Ending.REPEATED, Ending.FENCED
        batch = [Completion(r.key, r.owner, r.fence, state, result, LONG) for r, state, result in endings]
        assert self.complete_many(subject, batch) == [done, repeated, fenced, done, done, done, fenced]
        assert self.complete_many(subject, batch) == [
            repeated,
            repeated,
            fenced,
            repeated,
            repeated,
            repeated,
            fenced,
        ]
        found = [(subject.read(r.key).state, subject.read(r.key).result) for r, _, _ in endings[:-1]]
        expected = [(state, result) for _, state, result in endings[:-1]]
        expected[2] = (State.COMPLETED, b"something else")
        assert found == expected

    def test_a_large_batch_is_one_batch(self, subject: Subject) -> None:
        """A thousand keys are claimed, renewed and completed, every one of them, in order."""
        claims = [Claim(f"key {number:04}", A, ASKED, LONG, LONG) for number in range(MANY)]
        decisions = self.claim_many(subject, claims)
        held = [decision.record for decision in decisions if decision.record]
        assert [record.key for record in held] == [claim.key for claim in claims]
        assert {decision.verdict for decision in decisions} == {Verdict.CLAIMED}
        assert all(self.renew_many(subject, [Renewal(r.key, r.owner, r.fence, LONG, LONG) for r in held]))
        endings = [Completion(r.key, r.owner, r.fence, State.COMPLETED, r.key.encode(), LONG) for r in held]
        assert self.complete_many(subject, endings) == [Ending.DONE] * MANY
        replays = self.claim_many(subject, [claim._replace(owner=B) for claim in claims])
        assert [d.record.result for d in replays if d.record] == [claim.key.encode() for claim in claims]
        assert subject.stats().by_state.get("COMPLETED") == MANY


def _fences(decisions: list[Decision]) -> list[int]:
    records: list[Record] = [decision.record for decision in decisions if decision.record]
    return [record.fence for record in records]
