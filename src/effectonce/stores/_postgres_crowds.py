"""PostgreSQL for callers on event loops: each loop has connections of its own, and its callers share round trips."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from .._protocol import decide_claim
from .._records import Claim, Completion, Decision, Ending, Record, make
from ..errors import EffectOnceError, StoreUnavailable
from ._crowds import CrowdStore
from ._loops import PerLoop
from ._postgres_sql import Wires
from ._postgres_steps import id_of
from ._postgres_table import Table
from ._postgres_verbs import Verbs
from ._steps import BUSY, DONE, KEPT, Add, Added, End, Found, Step, claiming, ending
from ._turns import Turns
from ._waiters import Waiter

LANES = 3
"""Round trips of an event loop that may be on their way at once."""


class _Loop:
    """What one event loop has: its connections, and the turns in which its callers go."""

    def __init__(self, wires: Wires, execute: Callable[[Sequence[Step]], Any]) -> None:
        self.wires = wires
        self.turns: Turns[Step, Any] = Turns(execute, LANES)
        self.purge: asyncio.Task[None] | None = None

    def close(self) -> None:
        """Close the connections."""
        self.wires.close()


class OnLoops(Verbs, CrowdStore):
    """The store for callers on event loops: each loop has its own connections."""

    def __init__(self, table: Table, ears: Any, make_wires: Callable[[], Wires]) -> None:
        super().__init__(table)
        self._ears = ears
        self._make_wires = make_wires
        self._closed = False
        self._start()

    def _start(self) -> None:
        self._loops = PerLoop(lambda: _Loop(self._make_wires(), self.execute))

    def here(self) -> _Loop:
        """What belongs to the running loop."""
        if self._closed:
            raise StoreUnavailable(f"The store {self._table.shown} is closed.")
        return self._loops.here()

    def wires(self) -> Wires:
        """Connections for the running loop."""
        return self.here().wires

    async def send_once(self, steps: Sequence[Step]) -> Sequence[Any]:
        """Have steps done, together with those of everyone who waits on this loop."""
        return await self.here().turns.answers(steps)

    async def pause(self, seconds: float) -> None:
        """Let time pass on the loop."""
        await asyncio.sleep(seconds)

    async def claim(self, claim: Claim) -> Decision:
        """Decide one claim."""
        if not claim.may_create:
            return await super().claim(claim)
        replies = await self.here().turns.answers((make(Add, (claim,)),))
        return self.decided(claim, replies) or await self.claim_on(claim, replies)

    def claim_soon(self, claim: Claim) -> Waiter[Any] | None:
        """Have a claim decided with others, if some are on their way."""
        if self._closed or not claim.may_create:
            return None
        return self._loops.here().turns.join((make(Add, (claim,)),))

    def decided(self, claim: Claim, answer: Sequence[Any]) -> Decision | None:
        """A new key and a finished one are decided; so is one that a transaction keeps."""
        (reply,) = answer
        if type(reply) is Found:
            record, now = reply
            decision = decide_claim(record, claim, now, 0)
            return decision if decision.record is record else None
        if type(reply) is Added:
            return decide_claim(None, claim, reply.now, reply.fence - 1)
        return BUSY if reply is KEPT else None

    async def claim_on(self, claim: Claim, answer: Sequence[Any]) -> Decision:
        """Take over, or wait for a transaction that has the key."""
        (reply,) = answer
        if type(reply) is Found:
            return await self.go_on(claiming(claim), reply)
        return await self.claim_held(claim, reply)

    async def complete(self, completion: Completion) -> Ending:
        """End a claim."""
        if not (completion.owner and completion.began):
            return await super().complete(completion)
        replies = await self.here().turns.answers((make(End, (completion,)),))
        return self.ended(completion, replies) or await self.end_on(completion, replies)

    def end_soon(self, completion: Completion) -> Waiter[Any] | None:
        """Have a claim ended with others, if some are on their way."""
        if self._closed or not (completion.owner and completion.began):
            return None
        return self._loops.here().turns.join((make(End, (completion,)),))

    def ended(self, completion: Completion, answer: Sequence[Any]) -> Ending | None:
        """What is held is ended."""
        return Ending.DONE if answer[0] is DONE else None

    async def end_on(self, completion: Completion, answer: Sequence[Any]) -> Ending:
        """Find out what there is instead."""
        (reply,) = answer
        if isinstance(reply, Exception):
            raise reply
        return await self.go_on(ending(completion), reply)

    async def watch(self, record: Record, seconds: float) -> bool:
        """Wait to be told of a record's end; the loop goes on meanwhile."""
        if self._ears is None:
            return False
        loop = asyncio.get_running_loop()
        word: asyncio.Future[bool] = loop.create_future()

        def settle(heard: bool) -> None:
            if not word.done():
                word.set_result(heard)

        def wake(heard: bool) -> None:
            with suppress(RuntimeError):  # a closed loop has nobody left to tell
                loop.call_soon_threadsafe(settle, heard)

        timer = loop.call_later(seconds, settle, True)
        try:
            with self._ears.listening(name_of(record), wake):
                hears = self._ears.open or await loop.run_in_executor(None, self._ears.hears, seconds)
                return bool(hears) and (not await self.mark(record) or await word)
        finally:
            timer.cancel()

    def purge_aside(self, rows: int) -> bool:
        """Let the hand pass some rows in a task of its own."""
        here = self.here()
        if here.purge is not None:
            return False
        here.purge = asyncio.get_running_loop().create_task(self._purge_quietly(here, rows))
        return True

    async def _purge_quietly(self, here: _Loop, rows: int) -> None:
        try:
            with suppress(EffectOnceError):  # nobody asked for it
                await self.tend(rows)
        finally:
            here.purge = None

    def close(self) -> None:
        """Close the connections of every loop."""
        self._closed = True
        self._loops.close()

    def forget(self) -> None:
        """Let go of everything in a forked child."""
        for here in self._loops:
            here.wires.forget()
        self._start()


def name_of(record: Record) -> str:
    """What the server calls a record when it tells of it."""
    return str(uuid.UUID(bytes=id_of(record.key)))
