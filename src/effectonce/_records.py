"""The frozen data that crosses every line: records, commands to a store, and its answers.

Times are seconds. ``lease_until`` and ``expires_at`` are on the store's clock and never compared with a local one.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Final, Literal, NamedTuple

Guarantee = Literal["fenced", "at_most_once", "atomic", "none"]
"""The rungs of the ladder; "none" is a run without a store, which a policy has to ask for."""

make: Final = tuple.__new__
"""Makes a NamedTuple from a tuple of all its fields, in a third of the time its own constructor takes."""


class State(IntEnum):
    """What a store remembers of a key. The numbers are stored; never reuse one."""

    ABSENT = 0
    PENDING = 1
    COMPLETED = 2
    FAILED = 3
    IN_DOUBT = 4

    __hash__ = int.__hash__  # Enum's own is Python code, and every command looks states up


NOBODY: Final = b""
"""The owner of a record that no attempt holds."""


ATOMIC: Final = b" "
"""Begins a stored result that was recorded in the transaction of its effects. To JSON it is nothing."""


class Record(NamedTuple):
    """What a store remembers of one key.

    An ABSENT record may still exist: a released claim keeps its fence, its attempts and its fingerprint.
    """

    key: str
    state: State
    owner: bytes
    fence: int
    fingerprint: bytes
    lease_until: float
    attempts: int
    result: bytes | None
    """What a COMPLETED or FAILED record has for an answer. In every other state: the journal of its finished steps."""
    expires_at: float
    once: bool
    """Claimed at most once: when its attempt crashes, the record becomes IN_DOUBT instead of being taken over."""

    @property
    def progress(self) -> bytes | None:
        """The journal of the steps that attempts have finished, as long as the record has no answer."""
        return None if self.state in (State.COMPLETED, State.FAILED) else self.result

    @property
    def guarantee(self) -> Guarantee:
        """The rung of the guarantee ladder this record was claimed on, as far as the record tells."""
        if self.result is not None and self.result[:1] == ATOMIC:
            return "atomic"
        return "at_most_once" if self.once else "fenced"


class Claim(NamedTuple):
    """Ask for a key. Sent again with the same owner it gets the same answer."""

    key: str
    owner: bytes
    fingerprint: bytes
    lease: float
    keep: float
    once: bool = False
    max_attempts: int | None = None
    may_create: bool = True
    """False for a message older than the window: it may be answered from memory, never started."""


class Renewal(NamedTuple):
    """Ask to hold a claim for another lease, and to remember which steps it has finished."""

    key: str
    owner: bytes
    fence: int
    lease: float
    keep: float
    progress: bytes | None = None
    """The whole journal of finished steps; None leaves the one that is there."""


class Completion(NamedTuple):
    """Ask to end a claim: COMPLETED with a result, FAILED with an error, IN_DOUBT, or ABSENT (released)."""

    key: str
    owner: bytes
    fence: int
    state: State
    result: bytes | None
    """The answer; of a claim that gets none (ABSENT, IN_DOUBT), its journal, or None for the one that is there."""
    keep: float
    began: bool = True
    """False when a claim is given back before its handler began: that was no attempt."""


class Verdict(Enum):
    """The answer to a claim."""

    CLAIMED = "claimed"
    TAKEN_OVER = "taken over"
    REPLAY = "replay"
    BUSY = "busy"
    MISMATCH = "mismatch"
    IN_DOUBT = "in doubt"
    EXHAUSTED = "exhausted"
    LATE = "late"


class Decision(NamedTuple):
    """A verdict with the record it leaves behind (None only when there is none)."""

    verdict: Verdict
    record: Record | None
    retry_after: float = 0.0
    """Seconds until another answer is possible: what a lease has left (BUSY), or what the memory has (REPLAY)."""


class Ending(Enum):
    """The answer to a completion or a release."""

    DONE = "done"
    REPEATED = "repeated"
    FENCED = "fenced"
