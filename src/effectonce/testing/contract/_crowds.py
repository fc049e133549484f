"""Crowds: many callers at the same moment, threads or tasks, and still one of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from functools import partial

import pytest

from ..._records import Claim, Completion, Decision, Ending, State, Verdict
from ...keys import new_owner
from ._subject import ASKED, LONG, A, B, Subject
from ._suite import Suite

CROWD = 64


class Crowds(Suite):
    """What holds for one caller after another holds for all of them at once."""

    def claim_at_once(self, subject: Subject, claims: Sequence[Claim]) -> list[Decision]:
        """Send claims from as many callers, together."""
        return subject.race([partial(subject.verbs.claim, claim) for claim in claims])

    def test_of_many_claims_at_once_one_is_granted(self, subject: Subject) -> None:
        """64 callers, one key: one of them runs, and the others hear of the very attempt that does."""
        claims = [_claim("k") for _ in range(CROWD)]
        decisions = self.claim_at_once(subject, claims)
        assert Counter(d.verdict for d in decisions) == {Verdict.CLAIMED: 1, Verdict.BUSY: CROWD - 1}
        winner = claims[[d.verdict for d in decisions].index(Verdict.CLAIMED)].owner
        assert {d.record.owner for d in decisions if d.record} == {winner}
        assert subject.read().owner == winner

    def test_many_keys_at_once_are_all_granted(self, subject: Subject) -> None:
        """64 callers, 64 keys: nobody is in anybody's way."""
        decisions = self.claim_at_once(subject, [_claim(f"key {number}") for number in range(CROWD)])
        assert {d.verdict for d in decisions} == {Verdict.CLAIMED}
        assert [d.record.key for d in decisions if d.record] == [f"key {number}" for number in range(CROWD)]
        assert subject.stats().keys == CROWD

    def test_of_many_takeovers_at_once_one_is_granted(self, subject: Subject) -> None:
        """64 callers find a crashed attempt: one of them takes over, with one higher fence."""
        crashed = subject.hold(lease=self.lease)
        self.outlive(subject, "k")
        decisions = self.claim_at_once(subject, [_claim("k") for _ in range(CROWD)])
        assert Counter(d.verdict for d in decisions) == {Verdict.TAKEN_OVER: 1, Verdict.BUSY: CROWD - 1}
        assert len({d.record.fence for d in decisions if d.record}) == 1
        assert subject.read().fence > crashed.fence

    def test_of_many_claims_after_a_release_one_is_granted(self, subject: Subject) -> None:
        """A key that was given back goes to one of those who want it."""
        subject.release(subject.hold())
        decisions = self.claim_at_once(subject, [_claim("k") for _ in range(CROWD)])
        assert Counter(d.verdict for d in decisions) == {Verdict.CLAIMED: 1, Verdict.BUSY: CROWD - 1}

    def test_of_many_claims_after_expiry_one_is_granted(self, subject: Subject) -> None:
        """A key that was forgotten goes to one of those who want it."""
        subject.complete(subject.hold(), keep=self.keep)
        self.advance(subject, self.keep)
        decisions = self.claim_at_once(subject, [_claim("k") for _ in range(CROWD)])
        assert Counter(d.verdict for d in decisions) == {Verdict.CLAIMED: 1, Verdict.BUSY: CROWD - 1}

    def test_a_claim_sent_many_times_at_once_is_one_claim(self, subject: Subject) -> None:
        """Copies of one claim that race each other are all granted: one fence, one attempt."""
        decisions = self.claim_at_once(subject, [_claim("k", A)] * 16)
        assert {d.verdict for d in decisions} == {Verdict.CLAIMED}
        assert len({(d.record.fence, d.record.attempts) for d in decisions if d.record}) == 1

    def test_of_many_completions_at_once_one_is_recorded(self, subject: Subject) -> None:
        """One attempt's different answers at the same moment: one is recorded, and it is the one that was told so."""
        held = subject.hold()
        endings = [
            Completion("k", A, held.fence, State.COMPLETED, b"%d" % number, LONG) for number in range(16)
        ]
        answers = subject.race([partial(subject.verbs.complete, ending) for ending in endings])
        assert Counter(answers) == {Ending.DONE: 1, Ending.FENCED: 15}
        assert subject.read().result == endings[answers.index(Ending.DONE)].result

    def test_a_crowd_runs_a_key_through_its_whole_life(self, subject: Subject) -> None:
        """Callers who claim, release and complete as they please never hold a key together, nor share a fence."""
        holders: list[bytes] = []
        fences: list[int] = []

        async def attempt() -> bool:
            alone = True
            for turn in range(8):
                claim = _claim(f"key {turn % 2}")
                decision = await subject.verbs.claim(claim)
                if decision.verdict is Verdict.CLAIMED and decision.record is not None:
                    holders.append(claim.owner)
                    fences.append(decision.record.fence * 2 + turn % 2)
                    ending = await subject.verbs.release(claim.key, claim.owner, decision.record.fence, LONG)
                    alone = alone and ending is Ending.DONE
            return alone

        assert all(subject.race([attempt] * 16))
        assert len(set(fences)) == len(fences) == len(holders)
        assert sum(subject.read(f"key {turn}").attempts for turn in (0, 1)) == len(fences)

    @pytest.mark.parametrize("subject", ["asyncio"], indirect=True)
    def test_a_waiting_store_does_not_block_the_event_loop(self, subject: Subject) -> None:
        """While the store makes its callers wait, everything else on the loop goes on."""

        async def claim_while_stalled() -> Decision:
            with self.stall():
                claiming = asyncio.ensure_future(subject.verbs.claim(_claim("k", B)))
                for _ in range(1000):  # the heartbeat: each tick is a turn of the loop
                    await asyncio.sleep(0)
                assert not claiming.done()
            return await claiming

        assert subject.driver.run(claim_while_stalled()).verdict is Verdict.CLAIMED


def _claim(key: str, owner: bytes | None = None) -> Claim:
    return Claim(key, owner or new_owner(), ASKED, LONG, LONG)
