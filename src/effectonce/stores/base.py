"""What a store is: six atomic verbs over records, their batch forms, and a few questions for operators.

The protocol decides; a store reads one record, asks it, and writes the answer, all in one atomic step on the
store's own clock. Each verb is safe to send twice. A store that can't do so raises ``StoreUnavailable``.

The verbs are coroutines. In the blocking colour they never suspend (see ``_blocking``); in the asyncio colour
they never block the event loop. A store that has one implementation for both returns itself from both.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Self, TypeVar, cast

from .._records import Claim, Completion, Decision, Ending, Record, Renewal, State
from ..errors import StoreError, StoreUnavailable

T = TypeVar("T")

NOBODYS_KEY: Final = "|health||"
"""Is asked for to see whether a store answers. Without an id it can't be the key of an effect."""


class Features(NamedTuple):
    """What a store can't do, said out loud; the contract suite leaves out only what is declared here."""

    blocking: bool = True
    asyncio: bool = True
    durable: bool = True
    shared: bool = True
    """Several processes can use it at once."""
    purge_delay: float = 0.0
    """Seconds that a record may stay out of purge's sight after the expiry that it was claimed with."""


@dataclass(frozen=True, slots=True)
class StoreStats:
    """A store's size at a glance."""

    keys: int
    bytes: int
    by_state: dict[str, int] = field(default_factory=dict)
    oldest_pending_lease: float | None = None
    """Seconds until the first lease ends; negative when an attempt has been abandoned."""
    expired: int = 0


class Health(NamedTuple):
    """Whether a store answers, for a readiness probe."""

    ok: bool
    seconds: float
    """How long the answer took."""
    detail: str = ""
    """Why it is not ok."""


class PartlyAnswered(StoreUnavailable):
    """Some commands of many were answered, and claims among them may have been granted; of the others, nobody knows.

    ``answers`` has what became of each, in order: None where there was no answer, for a ``reason``.
    """

    def __init__(self, reason: StoreError, answers: Sequence[Any]) -> None:
        super().__init__(str(reason))
        self.reason, self.answers = reason, answers


def all_answered(answers: Sequence[T | StoreError]) -> list[T]:
    """What many commands were told, if all of them were; else the error that says it."""
    errors = [answer for answer in answers if isinstance(answer, StoreError)]
    lasting = [error for error in errors if not isinstance(error, StoreUnavailable)]
    if lasting or len(errors) == len(answers) > 0:
        raise (lasting or errors)[0]
    if errors:
        heard = [None if isinstance(answer, StoreError) else answer for answer in answers]
        raise PartlyAnswered(errors[0], heard)
    return cast("list[T]", answers)


class Store(ABC):
    """Where records live. Subclass it in one file and run ``effectonce.testing.contract`` on it."""

    features: Features = Features()
    is_scattered: bool = False
    """Whether its keys are on several servers, each of which may be away by itself; ``place_of`` tells which."""

    # The six verbs.

    @abstractmethod
    async def claim(self, claim: Claim) -> Decision:
        """Decide one claim by ``decide_claim`` and write what it leaves behind."""

    @abstractmethod
    async def renew(self, renewal: Renewal) -> bool:
        """Extend a lease by ``decide_renewal``, with the journal that it brings; False when it is no longer held."""

    @abstractmethod
    async def complete(self, completion: Completion) -> Ending:
        """End a claim by ``decide_ending``. The answer is given when the write is as durable as promised."""

    async def release(self, key: str, owner: bytes, fence: int, keep: float, began: bool = True) -> Ending:
        """Give a claim back, so that a retry may run again. One that never ``began`` does not count as an attempt."""
        return await self.complete(Completion(key, owner, fence, State.ABSENT, None, keep, began))

    @abstractmethod
    async def get(self, key: str) -> Record | None:
        """Read a record. Decides nothing; an expired record may or may not still be there."""

    @abstractmethod
    async def purge(self, limit: int = 256) -> int:
        """Look at a bounded piece of the store, forget what has expired there, and say how many that were."""

    async def watch(self, record: Record, seconds: float) -> bool:
        """Wait, at most ``seconds``, until a PENDING record that another process holds may have ended.

        False at once from a store that can't tell: then who waits looks again by itself.
        """
        return False

    # Batch forms: one round trip for many keys where the store can, in order. A batch never names a key twice. A store
    # that sends several requests for it may be ``PartlyAnswered``.

    async def claim_many(self, claims: Sequence[Claim]) -> list[Decision]:
        """Decide many claims."""
        return [await self.claim(claim) for claim in claims]

    async def renew_many(self, renewals: Sequence[Renewal]) -> list[bool]:
        """Renew many leases."""
        return [await self.renew(renewal) for renewal in renewals]

    async def complete_many(self, completions: Sequence[Completion]) -> list[Ending]:
        """End many claims."""
        return [await self.complete(completion) for completion in completions]

    def place_of(self, key: str) -> Hashable:
        """The server that has a key, as far as is known."""
        return None

    # Questions for operators and sweepers.

    @abstractmethod
    async def scan(self, state: State | None = None, after: str = "", limit: int = 256) -> list[Record]:
        """Records of one state (or all) whose key follows ``after``, in key order."""

    @abstractmethod
    async def now(self) -> float:
        """The store's clock."""

    @abstractmethod
    async def stats(self) -> StoreStats:
        """Keys by state, bytes, the oldest pending claim and what waits to be purged."""

    def health(self) -> Health:
        """Ask the store for a key that nobody has, and say how that went. Raises nothing; may take its time-out."""
        asked = self.for_blocking()._health()
        try:
            asked.send(None)
        except StopIteration as answered:
            return cast("Health", answered.value)
        asked.close()
        return Health(False, 0.0, "this store has no blocking form; use ahealth()")

    async def ahealth(self) -> Health:
        """``health`` for callers on an event loop."""
        return await self.for_asyncio()._health()

    async def _health(self) -> Health:
        started = time.monotonic()
        try:
            await self.get(NOBODYS_KEY)  # not its clock, which may be this machine's
        except Exception as error:
            return Health(False, time.monotonic() - started, str(error))
        return Health(True, time.monotonic() - started)

    # Colours and lifetime.

    def for_blocking(self) -> Store:
        """The verbs for callers without an event loop: coroutines that never suspend."""
        return self

    def for_asyncio(self) -> Store:
        """The verbs for callers on an event loop: coroutines that never block it."""
        return self

    def close(self) -> None:  # noqa: B027 — most stores hold nothing that must be given back
        """Give back what the store holds. Using it afterwards is an error."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
