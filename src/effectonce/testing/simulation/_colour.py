"""The third colour: callers that stand still at every wait, until the explorer lets them go on."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ..._records import Claim, Completion, Decision, Ending, Record, Renewal, State
from ...errors import LeaseLost, StoreError
from ...stores.base import Store, StoreStats
from ._requests import Began, Cancelled, Command, Pause, Reported, ask

if TYPE_CHECKING:
    from ..._attempt import Attempt
    from ..._blocking import Gathered, Job
    from ._processes import Process

T = TypeVar("T")


class SimulatedStore(Store):
    """The store as one process sees it: every verb is a request. Owners get readable names on the way out."""

    def __init__(self, process: Process) -> None:
        self._process = process

    async def claim(self, claim: Claim) -> Decision:
        """Ask for a key."""
        decision: Decision = await ask(Command("claim", self._claim(claim)))
        return decision

    async def claim_many(self, claims: Sequence[Claim]) -> list[Decision]:
        """Ask for many keys in one request."""
        return list(await ask(Command("claim_many", tuple(map(self._claim, claims)))))

    async def renew(self, renewal: Renewal) -> bool:
        """Ask to hold a claim."""
        return (await self.renew_many([renewal]))[0]

    async def renew_many(self, renewals: Sequence[Renewal]) -> list[bool]:
        """Ask to hold many claims in one request."""
        renamed = tuple(r._replace(owner=self._process.alias(r.owner)) for r in renewals)
        held = await ask(Command("renew_many", renamed))
        self._process.denied |= {r.owner for r, still in zip(renamed, held, strict=True) if not still}
        return list(held)

    async def complete(self, completion: Completion) -> Ending:
        """Ask to end a claim."""
        ending: Ending = await ask(Command("complete", self._completion(completion)))
        return ending

    async def complete_many(self, completions: Sequence[Completion]) -> list[Ending]:
        """Ask to end many claims in one request."""
        return list(await ask(Command("complete_many", tuple(map(self._completion, completions)))))

    async def get(self, key: str) -> Record | None:
        """Ask for a record."""
        record: Record | None = await ask(Command("get", key))
        return record

    async def purge(self, limit: int = 256) -> int:
        """Ask to forget what has expired."""
        gone: int = await ask(Command("purge", limit))
        return gone

    async def scan(self, state: State | None = None, after: str = "", limit: int = 256) -> list[Record]:
        """Ask for records."""
        return list(await ask(Command("scan", (state, after, limit))))

    async def now(self) -> float:
        """Ask for the store's clock."""
        now: float = await ask(Command("now", None))
        return now

    async def stats(self) -> StoreStats:
        """No protocol looks at it."""
        raise NotImplementedError

    def _claim(self, claim: Claim) -> Claim:
        renamed = claim._replace(owner=self._process.alias(claim.owner))
        self._process.asks(renamed)
        return renamed

    def _completion(self, completion: Completion) -> Completion:
        return completion._replace(owner=self._process.alias(completion.owner))


class Simulated:
    """What Blocking and Asyncio are elsewhere."""

    digested_by_name = True
    awaits = True
    cancelled: tuple[type[BaseException], ...] = (Cancelled,)
    trouble: tuple[type[BaseException], ...] = (StoreError, Cancelled)

    def __init__(self, process: Process) -> None:
        self.store: Store = process.store
        self._process = process

    async def pause(self, seconds: float) -> None:
        """Let time pass."""
        process = self._process
        await ask(Pause(process.now + seconds, process.last.kind == "unavailable"))

    async def wait(self, attempt: Attempt, seconds: float) -> None:
        """Wait until an attempt of this process ends, at most ``seconds``."""
        await ask(WaitFor(attempt, self._process.now + seconds))

    async def apart(self, work: Awaitable[T]) -> T:
        """Await something. Here a second cancellation strikes it all the same, and it is sent again: the worse case."""
        return await work

    async def attend(self, attempt: Attempt, handler: Awaitable[T]) -> T:
        """Await the handler; interrupt it when the keeper says that the attempt's lease is lost."""
        process = self._process
        slot, key, owner = process.slot, attempt.key, process.alias(attempt.claim.owner)
        process.running[slot] = attempt
        process.began.add(slot)
        process.events.append(Began(key, owner, attempt.fence, attempt.claim.once))
        attempt.when_lost(lambda: process.told.add(slot))
        try:
            value = await handler
        except Cancelled:
            if slot in process.interrupted and slot not in process.cancelled:
                raise LeaseLost("The handler was interrupted because its lease was lost.", key=key) from None
            raise
        except Exception:
            process.events.append(Reported(key, owner))
            raise
        else:
            process.events.append(Reported(key, owner))
            return value
        finally:
            del process.running[slot]
            process.interrupted.discard(slot)

    async def gather(self, jobs: Sequence[Job[T]], limit: int) -> Gathered[T]:
        """Run jobs one after the other; after a cancellation, which a job may keep to itself, the rest never begin."""
        results: list[T | None] = [None] * len(jobs)
        interrupted: BaseException | None = None
        for place, job in enumerate(jobs):
            if interrupted is not None:
                break
            try:
                if (waits := job()) is not None:
                    results[place] = await waits
            except Cancelled as error:
                interrupted = error
            if interrupted is None and self._process.slot in self._process.cancelled:
                interrupted = Cancelled()
        return results, interrupted


class WaitFor(NamedTuple):
    """An attempt of the same process has to end."""

    attempt: Attempt
    until: float
