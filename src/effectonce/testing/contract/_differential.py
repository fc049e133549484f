"""Random commands, answered by the store and by the protocol alone: the answers must be the same."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from ..._protocol import decide_claim, decide_ending, decide_renewal, is_expired
from ..._records import NOBODY, Claim, Completion, Decision, Ending, Record, Renewal, State
from ._subject import ASKED, LONG, OTHER, A, B, C, Subject
from ._suite import Suite

KEYS, OWNERS, FINGERPRINTS = ["k", "K", "k "], [A, B, C], [ASKED, ASKED, OTHER]
ENDINGS = [
    (State.COMPLETED, b"one"),
    (State.COMPLETED, b"two"),
    (State.FAILED, b""),
    (State.IN_DOUBT, None),
    (State.ABSENT, None),
    (State.ABSENT, b"one, two, three"),
]
JOURNALS = [None, None, b"one", b"one, two"]
SEEDS, COMMANDS = 12, 150


class Model:
    """The protocol and a dictionary: what a store is when nothing goes wrong and nothing is ever deleted."""

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}

    def claim(self, claim: Claim, now: float) -> Decision:
        """Decide a claim."""
        decision = decide_claim(self.records.get(claim.key), claim, now, 0)
        if decision.record is not None:
            self.records[claim.key] = decision.record
        return decision

    def renew(self, renewal: Renewal, now: float) -> bool:
        """Decide a renewal."""
        renewed = decide_renewal(self.records.get(renewal.key), renewal, now)
        if renewed is not None:
            self.records[renewal.key] = renewed
        return renewed is not None

    def complete(self, completion: Completion, now: float) -> Ending:
        """Decide an ending."""
        ending, after = decide_ending(self.records.get(completion.key), completion, now)
        if after is not None:
            self.records[completion.key] = after
        return ending

    def knows(self, key: str, now: float) -> bool:
        """Whether the key's record must be there: once it has expired, a store may have forgotten it or not."""
        record = self.records.get(key)
        return record is not None and not is_expired(record, now)


class Run:
    """One random sequence. Fences are compared by their order: a store may leave some out, but not go back."""

    def __init__(self, subject: Subject, seed: int, lease: float, keep: float) -> None:
        self.subject, self.random, self.model = subject, random.Random(seed), Model()
        self.moves_time = subject.has_manual_clock
        self.lease, self.keep = (lease, keep) if self.moves_time else (LONG, LONG)
        self.tickets: list[tuple[Record, Record]] = []  # what was granted: by the model, and by the store
        self.fences: dict[str, list[tuple[int, int]]] = {key: [] for key in KEYS}
        self.story: list[object] = []

    def step(self) -> None:
        """Send one random command to both and compare."""
        steps: list[Callable[[], None]] = (
            [self.claim] * 8 + [self.renew] * 3 + [self.end] * 5 + [self.settle, self.purge]
        )
        if self.moves_time:
            steps += [self.advance] * 4
        self.random.choice(steps)()
        self.compare_records()

    def claim(self) -> None:
        """Ask for a key, with everything chosen by chance."""
        choose = self.random.choice
        lease, keep = self.lease * choose((1, 2)), self.keep * choose((1, 2))
        once, may_create = self.random.random() < 0.1, self.random.random() < 0.9
        limit = choose((None, None, 2, 3))
        claim = Claim(
            choose(KEYS), choose(OWNERS), choose(FINGERPRINTS), lease, keep, once, limit, may_create
        )
        self.story.append(claim)
        expected = self.model.claim(claim, self.subject.now())
        decision = self.subject.driver.run(self.subject.verbs.claim(claim))
        assert decision.verdict is expected.verdict, self.story
        if self.moves_time:
            assert abs(decision.retry_after - expected.retry_after) < 0.01, self.story
        if expected.record is not None and decision.record is not None:
            self.fences[claim.key].append((expected.record.fence, decision.record.fence))
            if expected.record.owner == claim.owner:
                self.tickets.append((expected.record, decision.record))

    def renew(self) -> None:
        """Renew something that was granted once."""
        if ticket := self.pick():
            journal = self.random.choice(JOURNALS)
            mine, yours = (Renewal(r.key, r.owner, r.fence, self.lease, self.keep, journal) for r in ticket)
            self.story.append(mine)
            expected = self.model.renew(mine, self.subject.now())
            assert self.subject.driver.run(self.subject.verbs.renew(yours)) is expected, self.story

    def end(self) -> None:
        """End something that was granted once."""
        if ticket := self.pick():
            self.finish(ticket, *self.random.choice(ENDINGS))

    def settle(self) -> None:
        """Settle something, whether it is in doubt or not."""
        if ticket := self.pick():
            mine, yours = (record._replace(owner=NOBODY) for record in ticket)
            self.finish((mine, yours), *self.random.choice(ENDINGS))

    def finish(self, ticket: tuple[Record, Record], state: State, result: bytes | None) -> None:
        """Send an ending to both."""
        mine, yours = (Completion(r.key, r.owner, r.fence, state, result, self.keep) for r in ticket)
        self.story.append(mine)
        expected = self.model.complete(mine, self.subject.now())
        assert self.subject.driver.run(self.subject.verbs.complete(yours)) is expected, self.story

    def purge(self) -> None:
        """Forget something; the model forgets nothing."""
        self.story.append("purge")
        assert self.subject.purge(self.random.choice((1, 2, 256))) <= len(KEYS)

    def advance(self) -> None:
        """Let some time pass, often to the very end of a lease or a retention."""
        seconds = self.random.choice((1.0, self.lease / 2, self.lease, self.lease, self.keep, 4 * self.keep))
        self.story.append(seconds)
        self.subject.clock.advance(seconds)

    def pick(self) -> tuple[Record, Record] | None:
        """Something that was granted, of late rather than long ago, whose key the store must still know."""
        known = [t for t in self.tickets[-8:] if self.model.knows(t[0].key, self.subject.now())]
        return self.random.choice(known) if known else None

    def compare_records(self) -> None:
        """Whatever a store must remember is what the model says, but for the numbers of its fences."""
        for key, expected in self.model.records.items():
            if self.model.knows(key, self.subject.now()):
                record = self.subject.get(key)
                assert record is not None, self.story
                self.fences[key].append((expected.fence, record.fence))
                if not self.moves_time:
                    expected = expected._replace(lease_until=record.lease_until, expires_at=record.expires_at)
                assert record == expected._replace(fence=record.fence), self.story

    def compare_fences(self) -> None:
        """The same fence where the model has the same, and a higher one where it has a higher one."""
        for pairs in self.fences.values():
            by_model = sorted(set(pairs))
            assert len({mine for mine, _ in by_model}) == len(by_model), self.story
            assert [yours for _, yours in by_model] == sorted({yours for _, yours in by_model}), self.story


class Differential(Suite):
    """The store against the protocol."""

    @pytest.mark.parametrize("seed", range(SEEDS))
    def test_random_commands_are_answered_as_the_protocol_says(self, subject: Subject, seed: int) -> None:
        """Claims, renewals, endings, purges and passing time in any order: each answer is the protocol's."""
        run = Run(subject, seed, self.lease, self.keep)
        for _ in range(COMMANDS):
            run.step()
        run.compare_fences()
