"""Progress: the journal of finished steps, which stays with a key until the key has an answer."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from ..._records import NOBODY, Ending, Record, Renewal, State, Verdict
from ._content import MIB
from ._subject import ASKED, LONG, OTHER, A, B, Subject
from ._suite import Suite

ONE, TWO = b'[["one",1]]', b'[["one",1],["two",2]]'
JOURNALS = {"every byte": bytes(range(256)), "a mebibyte": bytes(range(255, -1, -1)) * (MIB // 256)}
WRITES = 16


class Progress(Suite):
    """Written by a renewal of the holder, handed from attempt to attempt, and replaced by the answer alone."""

    def advanced(self, subject: Subject, journal: bytes = ONE, **choices: Any) -> Record:
        """A claim of A's that has come so far."""
        held = subject.hold(lease=self.lease, **choices)
        assert subject.renew(held, journal, lease=self.lease) is True
        return held

    # Writing it

    def test_a_renewal_records_progress(self, subject: Subject) -> None:
        """What the holder has finished is in its record, and its lease is renewed."""
        held = subject.hold(lease=self.lease)
        before = subject.now()
        assert subject.renew(held, ONE) is True
        record = subject.read()
        assert (record.progress, record.result) == (ONE, ONE)
        assert record.lease_until >= before + LONG - self.resolution
        assert record == held._replace(
            result=ONE, lease_until=record.lease_until, expires_at=record.expires_at
        )
        assert self.close_to(record.expires_at, record.lease_until + LONG)

    def test_progress_grows(self, subject: Subject) -> None:
        """Each renewal brings the whole of it, and may be sent twice."""
        held = subject.hold()
        for journal in (ONE, ONE, TWO, TWO):
            assert subject.renew(held, journal) is True
            assert subject.read().progress == journal

    def test_progress_that_arrives_late_undoes_nothing(self, subject: Subject) -> None:
        """An earlier journal that was on its way for long is granted, renews the lease, and leaves the later one."""
        held = self.advanced(subject, TWO)
        before = subject.now()
        assert subject.renew(held, ONE) is True
        record = subject.read()
        assert record.progress == TWO
        assert record.lease_until >= before + LONG - self.resolution

    def test_a_renewal_without_progress_leaves_it(self, subject: Subject) -> None:
        """The keeper knows nothing of steps."""
        held = self.advanced(subject)
        assert subject.renew(held) is True
        assert subject.read().progress == ONE

    def test_only_the_holder_records_progress(self, subject: Subject) -> None:
        """Another owner, another fence or an unknown key is denied, and changes nothing."""
        held = subject.hold()
        assert subject.renew(held, ONE, owner=B) is False
        assert subject.renew(held, ONE, owner=NOBODY) is False
        assert subject.renew(held, ONE, fence=held.fence + 1) is False
        assert subject.renew(held, ONE, fence=held.fence - 1) is False
        assert subject.renew(held._replace(key="unknown"), ONE) is False
        assert subject.get() == held
        assert subject.get("unknown") is None

    @pytest.mark.parametrize("state", [State.ABSENT, State.COMPLETED, State.FAILED, State.IN_DOUBT])
    def test_what_has_ended_makes_no_progress(self, subject: Subject, state: State) -> None:
        """A step that is finished after its attempt has ended is not recorded."""
        held = subject.hold()
        subject.complete(held, None, state)
        before = subject.get()
        assert subject.renew(held, ONE) is False
        assert subject.get() == before

    def test_a_stale_attempt_makes_no_progress(self, subject: Subject) -> None:
        """Who was taken over is denied, however much it has finished: its successor's journal counts."""
        stale = self.advanced(subject)
        self.outlive(subject, "k")
        taken = subject.hold(owner=B)
        assert subject.renew(stale, TWO) is False
        assert subject.get() == taken
        assert subject.renew(taken, TWO) is True
        assert subject.renew(stale, TWO + b"more") is False
        assert subject.read().progress == TWO

    @pytest.mark.parametrize("journal", JOURNALS.values(), ids=JOURNALS.keys())
    def test_progress_comes_back_byte_for_byte(self, subject: Subject, journal: bytes) -> None:
        """Whatever is in it, and however long it is."""
        self.advanced(subject, journal)
        assert subject.read().progress == journal
        self.outlive(subject, "k")
        taken = subject.hold(owner=B)
        assert taken.progress == journal
        assert subject.renew(taken, journal + b"more") is True
        assert subject.read().progress == journal + b"more"

    def test_many_renewals_record_progress_at_once(self, subject: Subject) -> None:
        """A batch may have renewals with a journal and without, and of attempts that are stale."""
        held = [subject.hold(f"key {number}") for number in range(6)]
        subject.renew(held[3], TWO)
        subject.complete(held[4])
        journals = [ONE, None, TWO, ONE, ONE, b"[" * 5000]
        batch = [
            Renewal(r.key, r.owner, r.fence, LONG, LONG, journal)
            for r, journal in zip(held, journals, strict=True)
        ]
        for _ in range(2):
            answers = subject.driver.run(subject.verbs.renew_many(batch))
            assert answers == [True, True, True, True, False, True]
            found = [subject.read(r.key).progress for r in held]
            assert found == [ONE, None, TWO, TWO, None, b"[" * 5000]

    def test_of_progress_recorded_at_once_the_longest_stays(self, subject: Subject) -> None:
        """Steps that end at the same moment each send the journal as they know it; none is refused, none gets lost."""
        held = subject.hold()
        journals = [b"x" * (number + 1) for number in range(WRITES)]
        commands = [Renewal(held.key, held.owner, held.fence, LONG, LONG, journal) for journal in journals]
        assert (
            subject.race([partial(subject.verbs.renew, command) for command in commands]) == [True] * WRITES
        )
        assert subject.read().progress == journals[-1]

    # Handing it on

    @pytest.mark.parametrize("once", [False, True])
    def test_a_repeated_claim_gets_its_progress(self, subject: Subject, once: bool) -> None:
        """A claim whose answer was lost, or that comes once more, finds what it has recorded."""
        held = self.advanced(subject, once=once)
        again = subject.hold(once=once)
        assert (again.fence, again.progress) == (held.fence, ONE)
        assert subject.get() == again

    def test_a_takeover_gets_the_progress(self, subject: Subject) -> None:
        """Who takes over goes on where the crashed attempt was, also when the answer to its claim was lost."""
        self.advanced(subject, TWO)
        self.outlive(subject, "k")
        for _ in range(2):
            taken = subject.hold(owner=B)
            assert (taken.attempts, taken.progress) == (2, TWO)
            assert subject.get() == taken

    def test_a_duplicate_leaves_the_progress(self, subject: Subject) -> None:
        """Busy and mismatch are read from the record and leave it as it was."""
        held = subject.hold()
        subject.renew(held, ONE)
        before = subject.get()
        assert subject.claim(owner=B).record == before
        assert subject.claim("k", B, OTHER).verdict is Verdict.MISMATCH
        assert subject.get() == before

    @pytest.mark.parametrize("began", [True, False])
    def test_a_release_keeps_the_progress(self, subject: Subject, began: bool) -> None:
        """An attempt that failed has finished its steps all the same; sent again, its release is a repeat."""
        held = self.advanced(subject)
        assert subject.release(held, began=began) is Ending.DONE
        assert (subject.read().state, subject.read().progress) == (State.ABSENT, ONE)
        assert subject.release(held, began=began) is Ending.REPEATED
        assert subject.hold(owner=B).progress == ONE

    def test_a_release_may_bring_progress(self, subject: Subject) -> None:
        """What could not be recorded before goes with the release; what is there and longer stays."""
        held = self.advanced(subject)
        assert subject.complete(held, TWO, State.ABSENT) is Ending.DONE
        assert subject.complete(held, TWO, State.ABSENT) is Ending.REPEATED
        taken = subject.hold(owner=B)
        assert taken.progress == TWO
        assert subject.complete(taken, ONE, State.ABSENT) is Ending.DONE
        assert subject.read().progress == TWO
        fresh = subject.hold("fresh")
        assert subject.complete(fresh, ONE, State.ABSENT) is Ending.DONE
        assert subject.hold("fresh", B).progress == ONE

    def test_a_doubt_keeps_the_progress(self, subject: Subject) -> None:
        """Who has to find out what became of an attempt can see how far it came, and it goes on from there."""
        held = self.advanced(subject)
        assert subject.doubt(held) is Ending.DONE
        doubt = subject.read()
        assert (doubt.state, doubt.progress) == (State.IN_DOUBT, ONE)
        assert subject.doubt(held) is Ending.REPEATED
        assert subject.settle(doubt, State.ABSENT) is Ending.DONE
        assert subject.hold(owner=B).progress == ONE

    def test_a_doubt_that_is_found_keeps_the_progress(self, subject: Subject) -> None:
        """So does what was claimed at most once, and crashed."""
        self.advanced(subject, once=True)
        self.outlive(subject, "k")
        decision = subject.claim(owner=B)
        assert decision.verdict is Verdict.IN_DOUBT
        assert decision.record is not None
        assert decision.record.progress == ONE
        assert subject.get() == decision.record
        assert subject.settle(decision.record, State.COMPLETED, b"done") is Ending.DONE
        assert (subject.read().progress, subject.read().result) == (None, b"done")

    @pytest.mark.parametrize("once", [False, True])
    @pytest.mark.parametrize("result", [b"done", b"", None])
    @pytest.mark.parametrize("state", [State.COMPLETED, State.FAILED])
    def test_an_answer_takes_the_place_of_progress(
        self, subject: Subject, state: State, result: bytes | None, once: bool
    ) -> None:
        """When the key has its answer, however short, nobody needs its steps any more."""
        held = self.advanced(subject, b"x" * 5000, once=once)
        assert subject.complete(held, result, state) is Ending.DONE
        record = subject.read()
        assert (record.state, record.result, record.progress) == (state, result, None)
        assert (record.fingerprint, record.fence, record.owner) == (ASKED, held.fence, NOBODY)
        assert subject.complete(held, result, state) is Ending.REPEATED
        assert subject.claim(owner=B).record == record

    def test_used_up_attempts_forget_the_progress(self, subject: Subject) -> None:
        """A key that fails for good has an answer: that it does."""
        self.advanced(subject)
        self.outlive(subject, "k")
        decision = subject.claim(owner=B, max_attempts=1)
        assert decision.verdict is Verdict.EXHAUSTED
        assert (subject.read().state, subject.read().result) == (State.FAILED, None)

    def test_what_has_expired_has_no_progress(self, subject: Subject) -> None:
        """A key that was forgotten begins anew."""
        held = subject.hold(lease=self.lease, keep=self.keep)
        subject.complete(held, ONE, State.ABSENT, keep=self.keep)
        self.forget_expired(subject, self.keep)
        assert subject.hold(owner=A).progress is None

    def test_progress_is_there_in_every_handle(self, subject: Subject) -> None:
        """Where another process goes on, it finds what this one has finished."""
        if not subject.store.features.durable:
            pytest.skip("the store declares durable=False")
        self.advanced(subject, TWO)
        with self.reopen(subject.clock) as store:
            other = self.speak_to(store, subject.clock, subject.driver)
            assert other.get() == subject.get()
            self.outlive(other, "k")
            assert other.hold(owner=B).progress == TWO
