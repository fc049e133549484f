"""The observer: what somebody who sees every step remembers of a key, to compare with what others claim."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..._progress import read
from ..._records import Record, State, Verdict

FINISHED = (State.COMPLETED, State.FAILED)
GRANTED = (Verdict.CLAIMED, Verdict.TAKEN_OVER)


class Done(NamedTuple):
    """A finished record that the store has held."""

    state: State
    fence: int
    fingerprint: bytes
    result: bytes | None


class Ghost(NamedTuple):
    """What an observer who sees every step remembers of one key."""

    key: str
    top: int = 0
    """The highest fence that was ever given out."""
    lease_end: float = 0.0
    """When the lease of the last grant or renewal really ends, on the store's clock."""
    done: tuple[Done, ...] = ()
    running: frozenset[bytes] = frozenset()
    """Owners whose handler has begun and has not reported; a crashed one never does."""
    begun: int = 0
    """Handlers begun since the key was last free."""
    effects: tuple[tuple[str, str], ...] = ()
    """What the sink has applied: the step, and the derived key."""
    sink_fence: int = 0
    """The highest fence that the sink has seen."""
    late: frozenset[bytes] = frozenset()
    """Owners one of whose commands arrived after they had given up on it."""
    recorded: tuple[str, ...] = ()
    """Steps that have ever been in the journal."""
    found: tuple[tuple[int, tuple[str, ...]], ...] = ()
    """By fence: the steps that its claim has found finished."""
    tried: tuple[tuple[int, str], ...] = ()
    """By fence: the steps that have been run."""


class Applied(NamedTuple):
    """One command as the store carried it out. A purge and an effect have no item."""

    verb: str
    item: Any
    before: Record | None
    after: Record | None
    reply: Any
    now: float
    ghost: Ghost

    @property
    def granted(self) -> bool:
        """Whether this gave somebody the right to run."""
        return self.verb == "claim" and self.reply.verdict in GRANTED

    @property
    def repeated(self) -> bool:
        """Whether this claim comes from the one who holds the key already."""
        return self.before is not None and is_pending(self.before) and self.before.owner == self.item.owner


def is_pending(record: Record | None) -> bool:
    """Whether somebody holds the key."""
    return record is not None and record.state is State.PENDING


def is_known(record: Record | None, now: float, ghost: Ghost) -> bool:
    """Whether the store still has to remember a record."""
    if record is None:
        return False
    held = is_pending(record) and (record.once or ghost.lease_end > now)
    return held or record.state is State.IN_DOUBT or record.expires_at > now


def steps_of(record: Record | None) -> tuple[str, ...]:
    """The steps that a record's journal has, in order."""
    return () if record is None else tuple(entry.name for entry in read(record.progress))


def observed(a: Applied, late: bool) -> Ghost:
    """What the observer remembers after a command."""
    ghost, before, after = a.ghost, a.before, a.after
    if after is not None and after.progress is not None:
        recorded = [step for step in steps_of(after) if step not in ghost.recorded]
        ghost = ghost._replace(recorded=(*ghost.recorded, *recorded))
    if late and a.verb != "purge":
        ghost = ghost._replace(late=ghost.late | {a.item.owner})
    if a.granted and after is not None:
        if not is_known(before, a.now, a.ghost):
            ghost = ghost._replace(begun=0)
        elif not a.repeated and (steps := steps_of(before)):
            ghost = ghost._replace(found=(*ghost.found, (after.fence, steps)))
        ghost = ghost._replace(top=max(ghost.top, after.fence), lease_end=a.now + a.item.lease)
    elif a.verb == "renew" and a.reply is True:
        ghost = ghost._replace(lease_end=a.now + a.item.lease)
    if after is not None and after != before:
        if after.state in FINISHED:
            done = Done(after.state, after.fence, after.fingerprint, after.result)
            ghost = ghost._replace(done=(*ghost.done, done))
        elif after.state is State.ABSENT:
            ghost = ghost._replace(begun=0)
    return ghost
