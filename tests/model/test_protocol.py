"""The protocol's three decisions over every small situation, against its table and against the order of its rules."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from effectonce._protocol import (
    ENDINGS,
    MOVES,
    decide_claim,
    decide_ending,
    decide_renewal,
    is_abandoned,
    is_expired,
)
from effectonce._records import NOBODY, Claim, Completion, Ending, Record, Renewal, State, Verdict

ROOT = Path(__file__).parents[2]
NOW, LEASE, KEEP = 100.0, 10.0, 50.0
PAST, FUTURE = NOW - 1, NOW + 1
GRANTED = (Verdict.CLAIMED, Verdict.TAKEN_OVER)


def all_records() -> Iterator[Record]:
    """Every record that can be in a store, as far as a decision can tell them apart."""
    for state, fence, fingerprint, attempts, expires_at, once in product(
        State, (1, 2), (b"x", b"y"), (1, 2), (PAST, FUTURE), (False, True)
    ):
        if state is State.PENDING:
            for owner, lease_until in product((b"me", b"other"), (PAST, NOW, FUTURE)):
                yield Record(
                    "k", state, owner, fence, fingerprint, lease_until, attempts, None, expires_at, once
                )
        else:
            for result in (None, b"1") if state in (State.COMPLETED, State.FAILED) else (None,):
                yield Record("k", state, NOBODY, fence, fingerprint, 0.0, attempts, result, expires_at, once)


RECORDS: list[Record | None] = [None, *all_records()]
CLAIMS = [
    Claim("k", b"me", b"x", LEASE, KEEP, once, most, may_create)
    for once, most, may_create in product((False, True), (None, 1, 2), (True, False))
]
ENDINGS_SENT = [
    Completion("k", owner, fence, state, result, KEEP)
    for owner, fence, state in product((b"me", NOBODY), (1, 2), ENDINGS)
    for result in ((None, b"1") if state in (State.COMPLETED, State.FAILED) else (None,))
]
RENEWALS = [Renewal("k", owner, fence, LEASE, KEEP) for owner, fence in product((b"me", b"other"), (1, 2))]


def known(record: Record | None) -> Record | None:
    """What a claim sees: an expired record is none."""
    return None if record is None or is_expired(record, NOW) else record


def move_of_claim(record: Record | None, claim: Claim, verdict: Verdict) -> str:
    if verdict is Verdict.CLAIMED:
        again = record is not None and record.state is State.PENDING
        return "claim again" if again else "claim"
    return {Verdict.TAKEN_OVER: "take over", Verdict.IN_DOUBT: "doubt", Verdict.EXHAUSTED: "exhaust"}[verdict]


def moves_made() -> Iterator[tuple[State, str, State]]:
    """Every change that the decisions make over all situations: from, what, to."""
    for record in RECORDS:
        before = known(record)
        if record is not None and before is None:
            yield record.state, "expire", State.ABSENT
        for claim in CLAIMS:
            verdict, after, _ = decide_claim(record, claim, NOW, 0)
            if after is not record and after is not None:
                origin = before.state if before else State.ABSENT
                yield origin, move_of_claim(before, claim, verdict), after.state
        for ending in ENDINGS_SENT:
            _, after = decide_ending(record, ending, NOW)
            if after is not record and record is not None and after is not None:
                yield record.state, ENDINGS[ending.state], after.state
        for renewal in RENEWALS:
            renewed = decide_renewal(record, renewal, NOW)
            if renewed is not None and record is not None:
                yield record.state, "renew", renewed.state


def test_what_is_not_in_the_table_does_not_happen() -> None:
    """Every change that a decision makes, in any situation, is a move of the table."""
    strangers = {
        (start.name, move, end.name) for start, move, end in moves_made() if MOVES[start].get(move) is not end
    }
    assert not strangers


def test_what_is_in_the_table_happens() -> None:
    """Every move of the table is made by some decision in some situation."""
    made = {(start, move) for start, move, _ in moves_made()}
    assert {(state, move) for state, moves in MOVES.items() for move in moves} == made


def test_every_state_is_reached_and_left() -> None:
    """From a free key every state can be reached, and from each of them the key can become free again."""

    def reachable(start: State) -> set[State]:
        seen, todo = {start}, [start]
        while todo:
            todo += set(MOVES[todo.pop()].values()) - seen
            seen |= set(todo)
        return seen

    assert reachable(State.ABSENT) == set(State)
    assert all(State.ABSENT in reachable(state) for state in State)


RULES = [
    ("expired or unknown, and late", lambda r, c: known(r) is None and not c.may_create, Verdict.LATE),
    ("expired or unknown", lambda r, c: known(r) is None, Verdict.CLAIMED),
    ("another payload", lambda r, c: r.fingerprint != c.fingerprint, Verdict.MISMATCH),
    ("done", lambda r, c: r.state in (State.COMPLETED, State.FAILED), Verdict.REPLAY),
    ("in doubt", lambda r, c: r.state is State.IN_DOUBT, Verdict.IN_DOUBT),
    ("mine", lambda r, c: r.state is State.PENDING and r.owner == c.owner, Verdict.CLAIMED),
    ("running", lambda r, c: r.state is State.PENDING and r.lease_until > NOW, Verdict.BUSY),
    ("crashed, at most once", lambda r, c: r.state is State.PENDING and (r.once or c.once), Verdict.IN_DOUBT),
    ("used up", lambda r, c: c.max_attempts is not None and r.attempts >= c.max_attempts, Verdict.EXHAUSTED),
    ("crashed", lambda r, c: r.state is State.PENDING, Verdict.TAKEN_OVER),
    ("released", lambda r, c: True, Verdict.CLAIMED),
]
"""The order of DESIGN's rule for a claim, written down a second time: the first that fits decides."""


def test_a_claim_is_decided_by_the_first_rule_that_fits() -> None:
    """In every situation the verdict is that of the first rule, and every rule decides some situation."""
    used = set()
    for record, claim in product(RECORDS, CLAIMS):
        name, _, verdict = next(rule for rule in RULES if rule[1](record, claim))
        used.add(name)
        assert decide_claim(record, claim, NOW, 0).verdict is verdict, (name, record, claim)
    assert used == {name for name, _, _ in RULES}


def test_only_a_decision_that_changes_something_gives_another_record() -> None:
    """A store writes when the record is not the one it read; an answer from memory writes nothing."""
    for record, claim in product(RECORDS, CLAIMS):
        verdict, after, _ = decide_claim(record, claim, NOW, 0)
        if verdict in (Verdict.REPLAY, Verdict.BUSY, Verdict.MISMATCH, Verdict.LATE):
            assert after is record


def test_fences_only_grow() -> None:
    """A new claim's fence is above the record's and above every deleted one's; nothing ever lowers a fence."""
    for record, claim, floor in product(RECORDS, CLAIMS, (0, 1, 7)):
        verdict, after, _ = decide_claim(record, claim, NOW, floor)
        before = known(record)
        if verdict in GRANTED and after is not None:
            if before is None:
                assert after.fence > max(floor, record.fence if record else 0)
            else:
                again = before.state is State.PENDING and before.owner == claim.owner
                assert after.fence == before.fence if again else after.fence == before.fence + 1
        elif record is not None and after is not None:
            assert after.fence == record.fence
    for record, ending in product(RECORDS, ENDINGS_SENT):
        _, after = decide_ending(record, ending, NOW)
        assert after is None or record is None or after.fence == record.fence


def test_a_granted_claim_counts_its_attempts() -> None:
    """The first attempt is number one, each next one more; asking again for the same one doesn't count."""
    for record, claim in product(RECORDS, CLAIMS):
        verdict, after, _ = decide_claim(record, claim, NOW, 0)
        before = known(record)
        if verdict in GRANTED and after is not None:
            again = before is not None and before.state is State.PENDING and before.owner == claim.owner
            assert after.attempts == (before.attempts if before else 0) + (not again)


def test_a_claim_sent_twice_is_granted_twice() -> None:
    """Whoever was granted a claim and asks again, because the reply was lost, is granted the same one."""
    for record, claim in product(RECORDS, CLAIMS):
        verdict, after, _ = decide_claim(record, claim, NOW, 0)
        if verdict in GRANTED:
            again = decide_claim(after, claim, NOW + 1, 0)
            assert again.verdict is Verdict.CLAIMED
            assert again.record is not None and after is not None
            assert again.record == after._replace(
                lease_until=after.lease_until + 1, expires_at=after.expires_at + 1
            )


def test_an_ending_sent_twice_is_accepted_twice() -> None:
    """The second time it changes nothing, and says so."""
    for record, ending in product(RECORDS, ENDINGS_SENT):
        answer, after = decide_ending(record, ending, NOW)
        if answer is not Ending.FENCED:
            assert decide_ending(after, ending, NOW + 1) == (Ending.REPEATED, after)


def test_only_the_holder_renews_or_ends() -> None:
    """A PENDING record yields to its owner with its fence; one in doubt to its fence and nobody's name."""
    for record, renewal in product(RECORDS, RENEWALS):
        holds = record is not None and record.state is State.PENDING and record.owner == renewal.owner
        allowed = holds and record is not None and record.fence == renewal.fence
        assert (decide_renewal(record, renewal, NOW) is not None) is allowed
    for record, ending in product(RECORDS, ENDINGS_SENT):
        answer, after = decide_ending(record, ending, NOW)
        if answer is Ending.DONE:
            assert record is not None and after is not None
            assert (record.owner, record.fence) == (ending.owner, ending.fence)
            assert record.state in (State.PENDING, State.IN_DOUBT)
        else:
            assert after is record


def test_a_lease_is_counted_on_the_stores_clock_and_outlived_by_retention() -> None:
    """A granted or renewed claim is held for a lease from now and remembered for keep after that."""
    for record, claim in product(RECORDS, CLAIMS):
        verdict, after, _ = decide_claim(record, claim, NOW, 0)
        if verdict in GRANTED and after is not None:
            assert (after.lease_until, after.expires_at) == (NOW + LEASE, NOW + LEASE + KEEP)
    for record, renewal in product(RECORDS, RENEWALS):
        renewed = decide_renewal(record, renewal, NOW)
        if renewed is not None:
            assert (renewed.lease_until, renewed.expires_at) == (NOW + LEASE, NOW + LEASE + KEEP)


def test_what_ends_is_kept_and_held_by_nobody() -> None:
    """An ended record has no owner and no lease, and is remembered for keep from its end."""
    for record, ending in product(RECORDS, ENDINGS_SENT):
        answer, after = decide_ending(record, ending, NOW)
        if answer is Ending.DONE and after is not None:
            assert (after.owner, after.lease_until, after.expires_at) == (NOBODY, 0.0, NOW + KEEP)
            assert (after.state, after.result) == (ending.state, ending.result)


def test_what_may_be_forgotten() -> None:
    """Only what has outlived its retention: never a live lease, a doubt, or a crashed at-most-once attempt."""
    for record in filter(None, RECORDS):
        guarded = record.state is State.PENDING and (record.lease_until > NOW or record.once)
        kept = record.expires_at > NOW or record.state is State.IN_DOUBT or guarded
        assert is_expired(record, NOW) is not kept


def test_a_claim_is_abandoned_when_its_lease_is_over() -> None:
    """Nothing but a PENDING record can be abandoned, and only from the moment at which it may be taken over."""
    for record in filter(None, RECORDS):
        over = record.state is State.PENDING and record.lease_until <= NOW
        assert is_abandoned(record, NOW) is over


def test_the_diagram_is_drawn_from_the_table() -> None:
    """ARCHITECTURE.md shows every move that the table has, and no other."""
    spec = importlib.util.spec_from_file_location("diagram", ROOT / "scripts" / "diagram.py")
    assert spec is not None and spec.loader is not None
    drawing = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    spec.loader.exec_module(drawing)
    sys.path[:] = path
    drawn = drawing.diagram()
    for state, moves in MOVES.items():
        assert state.name in drawn
        assert all(move in drawn for move in moves)
    assert drawn in (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
