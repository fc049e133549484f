"""keep and purge: what is remembered how long, and how it is forgotten."""

from __future__ import annotations

from functools import partial

import pytest

from ..._records import Claim, Ending, State, Verdict
from ._subject import ASKED, LONG, OTHER, A, B, Subject
from ._suite import ROUNDS, Suite

TRAFFIC = 600
"""Keys that come and go, one a second."""


class Retention(Suite):
    """Expiry never lets a duplicate in, and nothing expired stays for ever."""

    def test_retention_is_counted_from_completion(self, subject: Subject) -> None:
        """A result is remembered for its keep after it was recorded, however long the attempt took."""
        held = subject.hold(lease=self.lease, keep=self.keep)
        self.outlive(subject, "k")
        before = subject.now()
        subject.complete(held, keep=LONG)
        after = subject.now()
        expires_at = subject.read().expires_at
        assert before + LONG - self.resolution <= expires_at <= after + LONG + self.resolution

    def test_a_result_is_replayed_until_its_keep_is_over(self, subject: Subject) -> None:
        """Within the keep a duplicate gets the result; afterwards the key is new, whatever was asked under it."""
        subject.complete(subject.hold(), keep=self.keep)
        if subject.has_manual_clock:
            self.advance(subject, self.keep - 1.0)
            assert subject.claim(owner=B).verdict is Verdict.REPLAY
            self.advance(subject, 1.0)
        else:
            self.advance(subject, self.keep)
        decision = subject.claim("k", B, OTHER)
        assert decision.verdict is Verdict.CLAIMED
        assert decision.record is not None
        assert (decision.record.attempts, decision.record.result) == (1, None)

    def test_a_lease_ends_when_it_says(self, subject: Subject) -> None:
        """Until its end a lease keeps everyone out; from its end on the key can be taken over."""
        subject.hold(lease=self.lease)
        if subject.has_manual_clock:
            self.advance(subject, self.lease - 1.0)
            assert subject.claim(owner=B).verdict is Verdict.BUSY
            self.advance(subject, 1.0)
        else:
            self.outlive(subject, "k")
        assert subject.claim(owner=B).verdict is Verdict.TAKEN_OVER

    def test_expiry_during_processing_lets_no_duplicate_in(self, subject: Subject) -> None:
        """A live lease outlasts every retention: an attempt that runs longer than its keep is still the only one."""
        held = subject.hold(lease=LONG, keep=self.keep)
        self.forget_expired(subject, 2 * self.keep)
        assert subject.claim(owner=B).verdict is Verdict.BUSY
        assert subject.get() == held
        assert subject.complete(held) is Ending.DONE

    def test_a_renewed_attempt_outlasts_its_keep(self, subject: Subject) -> None:
        """Renewing holds off expiry as well."""
        held = subject.hold(lease=self.lease, keep=self.keep)
        subject.renew(held, lease=LONG)
        self.forget_expired(subject, self.lease + 2 * self.keep)
        assert subject.claim(owner=B).verdict is Verdict.BUSY

    def test_a_crashed_attempt_is_remembered_for_its_keep(self, subject: Subject) -> None:
        """After its lease a claim is kept as long as a result would be: its takeover checks what was asked."""
        subject.hold(lease=self.lease, keep=LONG)
        self.outlive(subject, "k")
        self.forget_expired(subject)
        assert subject.claim("k", B, OTHER).verdict is Verdict.MISMATCH
        assert subject.claim("k", B).verdict is Verdict.TAKEN_OVER

    def test_a_crashed_attempt_is_forgotten_after_its_keep(self, subject: Subject) -> None:
        """Lease and keep over: the key is new, and its attempts are counted from one."""
        held = subject.hold(lease=self.lease, keep=self.keep)
        self.outlive(subject, "k")
        self.advance(subject, self.keep)
        decision = subject.claim("k", B, OTHER, max_attempts=1)
        assert decision.verdict is Verdict.CLAIMED
        assert decision.record is not None
        assert decision.record.attempts == 1
        assert decision.record.fence > held.fence

    def test_a_released_record_expires_like_a_result(self, subject: Subject) -> None:
        """What was asked under a released key is checked until the keep is over."""
        self.finish(subject, "kept", State.ABSENT, keep=LONG)
        self.finish(subject, "forgotten", State.ABSENT)
        self.advance(subject, self.keep)
        assert subject.claim("kept", B, OTHER).verdict is Verdict.MISMATCH
        assert subject.claim("forgotten", B, OTHER).verdict is Verdict.CLAIMED

    def test_used_up_attempts_are_kept_from_when_they_were_found(self, subject: Subject) -> None:
        """A poisoned key stays closed for the keep of the claim that found it."""
        subject.release(subject.hold(), keep=LONG)
        before = subject.now()
        subject.claim(owner=B, max_attempts=1, keep=2 * LONG)
        assert subject.read().expires_at >= before + 2 * LONG - self.resolution

    # purge

    def test_purge_forgets_what_has_expired_and_nothing_else(self, subject: Subject) -> None:
        """Completed, failed, released and crashed records go when their keep is over; everything else stays."""
        for number, keep in enumerate((self.keep, LONG)):
            self.finish(subject, f"completed {number}", keep=keep)
            self.finish(subject, f"failed {number}", State.FAILED, keep=keep)
            self.finish(subject, f"released {number}", State.ABSENT, keep=keep)
            self.finish(subject, f"in doubt {number}", State.IN_DOUBT, keep=keep)
            subject.hold(f"crashed {number}", lease=self.lease, keep=keep)
            subject.hold(f"running {number}", lease=LONG, keep=keep)
        self.forget_expired(subject, self.lease + self.keep)
        kept = [
            "completed 1",
            "crashed 1",
            "failed 1",
            "in doubt 0",
            "in doubt 1",
            "released 1",
            "running 0",
            "running 1",
        ]
        assert [record.key for record in subject.scan()] == kept
        assert subject.stats().keys == len(kept)

    def test_purge_says_how_many_and_keeps_to_its_limit(self, subject: Subject) -> None:
        """A purge is a bounded piece of work; repeated, it comes to everything, and counts each record once."""
        for number in range(50):
            self.finish(subject, f"key {number}")
        live = subject.hold("live")
        self.advance(subject, self.keep + self.purge_delay)
        expired = subject.stats().expired
        counts = []
        while subject.stats().expired:
            counts.append(subject.purge(8))
            assert len(counts) < ROUNDS * 7
        assert max(counts, default=0) <= 8
        assert sum(counts) == expired
        assert subject.scan() == [live]
        assert subject.purge() == 0

    def test_purge_of_an_empty_store_is_nothing(self, subject: Subject) -> None:
        """There is nothing to forget where nothing is; nor where nothing may be looked at."""
        assert subject.purge() == 0
        self.finish(subject, "k")
        self.advance(subject, self.keep + self.purge_delay)
        assert subject.purge(0) == 0

    def test_traffic_alone_keeps_the_store_bounded(self, subject: Subject) -> None:
        """Without anyone calling purge, new claims pay for forgetting old ones: size follows traffic."""
        if not subject.has_manual_clock:
            pytest.skip("the store has a clock of its own")
        sizes = []
        for number in range(TRAFFIC):
            self.finish(subject, f"{number * 7919 % 100_003:06}")
            self.advance(subject, 1.0)
            if number % 100 == 99:
                sizes.append(subject.stats().keys)
        assert max(sizes) <= 3 * (self.lease + self.keep + self.purge_delay)

    def test_purge_beside_traffic_loses_nothing_that_lives(self, subject: Subject) -> None:
        """While expired records are forgotten, everyone else gets the answers they would have got anyway."""
        olds = [self.finish(subject, f"old {number}") for number in range(100)]
        done = [subject.hold(f"done {number}") for number in range(16)]
        for held in done:
            subject.complete(held, held.key.encode())
        running = [subject.hold(f"running {number}") for number in range(16)]
        self.advance(subject, self.keep + self.purge_delay)
        verbs = subject.verbs

        async def purge() -> bool:
            return sum([await verbs.purge(16) for _ in range(12)]) <= 100

        async def use(number: int) -> bool:
            return all(
                [
                    (await verbs.claim(claim_of(done[number].key))).verdict is Verdict.REPLAY,
                    (await verbs.claim(claim_of(running[number].key))).verdict is Verdict.BUSY,
                    (await verbs.claim(claim_of(f"new {number}"))).verdict is Verdict.CLAIMED,
                    (await verbs.claim(claim_of(f"new {number}"))).verdict is Verdict.CLAIMED,
                    (await verbs.claim(claim_of(f"new {number}", A))).verdict is Verdict.BUSY,
                    (await verbs.claim(claim_of(f"old {number}"))).verdict is Verdict.CLAIMED,
                    (await verbs.claim(claim_of(f"old {number}", A))).verdict is Verdict.BUSY,
                ]
            )

        users = [partial(use, number) for number in range(16)]
        assert all(subject.race([purge, purge, *users]))
        self.forget_expired(subject)
        states = {record.key: record for record in subject.scan()}
        assert len(states) == 4 * 16
        for number in range(16):
            assert states[f"done {number}"].result == f"done {number}".encode()
            assert states[f"running {number}"] == running[number]
            assert states[f"new {number}"].owner == B
            assert states[f"old {number}"].fence > olds[number].fence


def claim_of(key: str, owner: bytes = B) -> Claim:
    """A claim that does not end while a test runs."""
    return Claim(key, owner, ASKED, LONG, LONG)
