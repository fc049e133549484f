"""The whole protocol: five states, the moves between them, and who may make them. Pure: no I/O, clock or chance.

Who decides what
    claim       ``decide_claim``, by the seven rules in its body, in that order
    renew       ``decide_renewal``: the holder of a PENDING record
    complete    ``decide_ending``: the holder of a PENDING record, or whoever quotes an IN_DOUBT record's fence
    release     the same, back to ABSENT
    purge       ``is_expired``
    get         reads and decides nothing

A record without an answer may have a journal: the steps that its attempts have finished. A renewal brings the whole of
it. It passes from attempt to attempt, by takeover, release and doubt, and it only grows, so that of two the longer one
is the later one, in whatever order they arrive.

Every command may arrive twice. A repeated claim is known by its owner, a repeated ending by its fence: a fence
is given out once per key and only grows, also across release, expiry and deletion.
"""

from __future__ import annotations

from typing import Final

from ._records import NOBODY, Claim, Completion, Decision, Ending, Record, Renewal, State, Verdict, make

ABSENT, PENDING, COMPLETED, FAILED, IN_DOUBT = State
CLAIMED, REPLAY, DONE, REPEATED, FENCED = (
    Verdict.CLAIMED, Verdict.REPLAY, Ending.DONE, Ending.REPEATED, Ending.FENCED,
)  # fmt: skip

MOVES: Final[dict[State, dict[str, State]]] = {
    ABSENT: {"claim": PENDING, "exhaust": FAILED, "expire": ABSENT},
    PENDING: {
        "claim again": PENDING,
        "renew": PENDING,
        "take over": PENDING,
        "complete": COMPLETED,
        "fail": FAILED,
        "exhaust": FAILED,
        "doubt": IN_DOUBT,
        "release": ABSENT,
        "expire": ABSENT,
    },
    IN_DOUBT: {"complete": COMPLETED, "fail": FAILED, "release": ABSENT},
    COMPLETED: {"expire": ABSENT},
    FAILED: {"expire": ABSENT},
}
"""The transition table. What is not in it does not happen; ARCHITECTURE.md's diagram is drawn from it."""

ENDINGS: Final = {COMPLETED: "complete", FAILED: "fail", IN_DOUBT: "doubt", ABSENT: "release"}
"""The move that a completion's target state asks for."""


def decide_claim(record: Record | None, claim: Claim, now: float, floor: int) -> Decision:
    """Say what a claim gets. ``floor`` is at least the highest fence of any record the store has deleted.

    The answer's record is to be written when it is not the one that was read.
    """
    if record is None or (
        record.expires_at <= now and is_expired(record, now)
    ):  # 1. unknown: new, unless it is too old to be proven new
        if not claim.may_create:
            return Decision(Verdict.LATE, record)
        fence = floor if record is None else max(floor, record.fence)
        return make(Decision, (CLAIMED, _held(claim, fence + 1, 1, now), 0.0))
    _, state, _, _, fingerprint, _, _, _, expires_at, _ = record
    if fingerprint != claim.fingerprint:  # 2. known, but something else was asked
        return Decision(Verdict.MISMATCH, record)
    if state is COMPLETED or state is FAILED:  # 3. known and done
        return make(Decision, (REPLAY, record, expires_at - now))
    if state is IN_DOUBT:  # 4. ended without a word
        return Decision(Verdict.IN_DOUBT, record)
    if state is PENDING:  # 5. held: by me (the reply was lost), or by another, whose lease lives or is over
        if record.owner == claim.owner:
            return Decision(CLAIMED, _held(claim, record.fence, record.attempts, now, record.result))
        if record.lease_until > now:
            return Decision(Verdict.BUSY, record, record.lease_until - now)
        if record.once or claim.once:
            return Decision(Verdict.IN_DOUBT, _ended(record, IN_DOUBT, record.result, now + claim.keep))
    if claim.max_attempts is not None and record.attempts >= claim.max_attempts:  # 6. tried often enough
        return Decision(Verdict.EXHAUSTED, _ended(record, FAILED, None, now + claim.keep))
    verdict = Verdict.TAKEN_OVER if state is PENDING else CLAIMED  # 7. crashed or released: next attempt
    return Decision(verdict, _held(claim, record.fence + 1, record.attempts + 1, now, record.result))


def decide_renewal(record: Record | None, renewal: Renewal, now: float) -> Record | None:
    """Give the record with its lease renewed, or None to a worker that no longer holds it."""
    if record is None or record.state is not PENDING or not _holds(record, renewal):
        return None
    until = now + renewal.lease
    journal = _later(record.result, renewal.progress)
    return record._replace(lease_until=until, expires_at=until + renewal.keep, result=journal)


def decide_ending(record: Record | None, ending: Completion, now: float) -> tuple[Ending, Record | None]:
    """Say whether this attempt may end the record, and what it becomes."""
    _, owner, fence, state, result, keep, began = ending
    if record is None or record.fence != fence:
        return FENCED, record
    if state is not COMPLETED and state is not FAILED:  # no answer, so what it brings is its journal
        result = _later(record.result, result)
    if record.owner == owner and ENDINGS[state] in MOVES[record.state]:
        after = _ended(record, state, result, now + keep)
        return DONE, after if began else after._replace(attempts=after.attempts - 1)
    if record.state is state and record.result == result:
        return REPEATED, record
    return FENCED, record


def is_expired(record: Record, now: float) -> bool:
    """Whether a record may be forgotten. A live lease and an unsettled doubt outlast every retention."""
    if record.expires_at > now or record.state is IN_DOUBT:
        return False
    return record.state is not PENDING or (record.lease_until <= now and not record.once)


def is_abandoned(record: Record, now: float) -> bool:
    """Whether an attempt stopped renewing: it crashed, was paused, or was cancelled."""
    return record.state is PENDING and record.lease_until <= now


def _holds(record: Record, command: Renewal) -> bool:
    return record.owner == command.owner and record.fence == command.fence


def _later(journal: bytes | None, other: bytes | None) -> bytes | None:
    """The later of two journals of a key."""
    return journal if other is None or (journal is not None and len(journal) >= len(other)) else other


def _held(claim: Claim, fence: int, attempts: int, now: float, journal: bytes | None = None) -> Record:
    key, owner, fingerprint, lease, keep, once, _, _ = claim
    until = now + lease
    return make(
        Record, (key, PENDING, owner, fence, fingerprint, until, attempts, journal, until + keep, once)
    )


def _ended(record: Record, state: State, result: bytes | None, expires_at: float) -> Record:
    key, _, _, fence, fingerprint, _, attempts, _, _, once = record
    return make(Record, (key, state, NOBODY, fence, fingerprint, 0.0, attempts, result, expires_at, once))
