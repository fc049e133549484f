"""A duplicate's patience with a running attempt: in this process by its end, elsewhere by the store's word."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import _answers as answers
from ._attempt import here, surrounding
from .errors import StoreError
from .hooks import ASIDE

if TYPE_CHECKING:
    from ._answers import Call
    from ._attempt import Attempt
    from ._colours import Colour
    from ._flow import Flow
    from ._messages import Outcome
    from ._records import Decision

FIRST_PAUSE, LAST_PAUSE = 0.001, 0.05
"""Between two looks at a key that another process holds, where the store can't tell of its end."""


class Waiting:
    """One call that has met a running attempt."""

    def __init__(self, flow: Flow, call: Call) -> None:
        self._flow = flow
        self._call = call
        self._deadline = flow.monotonic() + call.policy.wait
        self._pause = FIRST_PAUSE
        self._told = False

    async def turn(self, colour: Colour, decision: Decision) -> Outcome[Any] | None:
        """Wait a turn and give None to claim again, or the outcome when waiting is over."""
        flow, call = self._flow, self._call
        left = self._deadline - flow.monotonic()
        if call.policy.busy in ("reject", "skip"):
            return flow.refuse(call, decision)
        if left <= 0:
            flow.events.note("timed_out", flow.monotonic())
            return answers.refused(call, decision)[1]
        if not self._told:
            self._told = True
            flow.events.note("waited", flow.monotonic())
            flow.events.note(ASIDE, flow.monotonic())
            flow.tell("busy", call.key, detail="waits")
        left = min(left, decision.retry_after + FIRST_PAUSE)
        running = flow.keeper.running(call.key)
        if self._is_inside_of_its_holder(colour, decision, running):
            raise answers.waits_for_itself(call)
        if running is None:
            await self._wait_for_another_process(colour, decision, left)
            return None
        await colour.wait(running, left)
        if running.claim.fingerprint != call.fingerprint:
            return None
        if call.policy.busy == "join" and running.outcome is not None:
            return flow.join(call, self._own(running))
        if running.recorded is not None:  # what the store would say, without asking it
            return flow.replay(call, answers.record_of(running, running.recorded))
        return None

    def _own(self, running: Attempt) -> Outcome[Any]:
        """The outcome of an attempt with a value of this caller's own: that of the other may be changed meanwhile."""
        outcome: Outcome[Any] = running.outcome
        if running.recorded is None or running.recorded.result is None:
            return outcome
        stored = answers.replayed(self._call, answers.record_of(running, running.recorded))
        return outcome._replace(value=stored.value) if stored.error is None else outcome

    def _is_inside_of_its_holder(self, colour: Colour, decision: Decision, running: Attempt | None) -> bool:
        """Whether the key's holder can't end before this call does, because its handler runs around it.

        The holder is known by its owner, for a key of the same name may be somebody else's: in another store, perhaps.
        """
        key, owner = self._call.key, decision.record and decision.record.owner
        around = [attempt for attempt in surrounding() if attempt.key == key]
        if running is not None and (_is_of_this_line(running, colour) or _is_of_this_party(running)):
            around.append(running)
        return any(not owner or attempt.claim.owner == owner for attempt in around)

    async def _wait_for_another_process(self, colour: Colour, decision: Decision, seconds: float) -> None:
        if decision.record is None:  # an open transaction has it: nothing can be watched
            await colour.pause(min(decision.retry_after, seconds))
            return
        try:
            if await colour.store.watch(decision.record, seconds):
                return
        except StoreError:  # the next claim meets it too, and knows what to do
            pass
        await colour.pause(min(self._pause, seconds))
        self._pause = min(self._pause * 2, LAST_PAUSE)


def _is_of_this_party(attempt: Attempt) -> bool:
    """Whether it is in one batch with what runs around this: its result is recorded when both have run."""
    return attempt.party is not None and any(each.party is attempt.party for each in surrounding())


def _is_of_this_line(attempt: Attempt, colour: Colour) -> bool:
    """Whether a handler runs in the task that is about to wait for it; who blocks has its whole thread wait."""
    return attempt.line == here() if colour.awaits else not attempt.is_aside
