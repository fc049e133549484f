"""The one flow: claim, run, record. Every boundary goes through here; both colours share every line.

A handler's result is given to its caller only after it has been recorded. What ends without the handler's own
word (a cancelled task, a dying process, an unanswered write) never releases the claim.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Protocol

from . import _answers as answers
from ._answers import UNAVAILABLE, Call
from ._attempt import CURRENT, RENEW_SHARE, Attempt, Unprotected, take_back
from ._cache import Cache
from ._colours import Colour, insist
from ._keeper import ENDED, Keeper
from ._messages import Outcome, Status
from ._records import Claim, Completion, Decision, Ending, Guarantee, Record, State, Verdict, make
from ._waiting import Waiting
from .errors import ColourMismatch, LeaseLost, StoreClosed, StoreError, StoreUnavailable, UsageError
from .hooks import ASIDE, EventKind, Events
from .policy import Resolution

if TYPE_CHECKING:
    from ._receiver import Receiver

CLAIMED, TAKEN_OVER, REPLAY, BUSY, MISMATCH, IN_DOUBT, EXHAUSTED, LATE = Verdict
DONE, REPEATED, FENCED = Ending
GRANTED = (CLAIMED, TAKEN_OVER)
NO_ANSWER: tuple[None, None, float] = (None, None, 0.0)
COMPLETED = State.COMPLETED

LATE_GRANTS = 10
"""How often a claim may be granted after its lease before its store is too slow for it."""


class Home(Protocol):
    """Whose flow it is: who knows the colours, and other people's connections."""

    @property
    def blocking(self) -> Colour: ...
    @property
    def asyncio(self) -> Any: ...  # a Colour too; a cached one is none to every type checker
    def on(self, connection: Any) -> Receiver: ...


class Flow:
    """Claims a key, runs the handler, records how it ended."""

    home: Home

    def __init__(self, keeper: Keeper, events: Events, monotonic: Callable[[], float]) -> None:
        self.keeper = keeper
        self.events = events
        self.monotonic = monotonic
        self.cache = Cache(monotonic)

    async def run(
        self,
        colour: Colour,
        call: Call,
        handler: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Outcome[Any]:
        """Run a handler for a call, or answer from what is remembered.

        The straight way of a new key is written out, since every call pays for each step of it. Every turn off that
        way is a method; ``open`` and ``finish`` are its two halves for those who need them apart.
        """
        claim, policy, hint = call
        store = colour.store
        started = self.monotonic()
        answer: Decision | BaseException | None = None
        has_begun = False
        try:
            if not policy.local_cache:
                try:
                    answer = await store.claim(claim)
                except colour.trouble as error:
                    answer = error
            verdict, record, left = answer if type(answer) is Decision else NO_ANSWER
            if verdict is REPLAY and record is not None:
                self.note_replay(call, record, left)
                return answers.replayed(call, record)
            if verdict is CLAIMED and record is not None and self.monotonic() - started < claim.lease:
                attempt = self.begin(call, CLAIMED, record, started)
            else:
                attempt = await self.open(colour, call, answer, started)
            if not isinstance(attempt, Attempt):
                return attempt
            token = CURRENT.set(attempt)
            try:
                has_begun = True
                value = handler(*args, **kwargs)
                if type(value) is CoroutineType or (colour.awaits and inspect.isawaitable(value)):
                    value = await colour.attend(attempt, value)
            except BaseException as error:
                take_back(CURRENT, token)
                return await self.fail(colour, call, attempt, error)
            CURRENT.reset(token)
            if type(attempt) is not Attempt:
                return await self.finish(colour, call, attempt, value)
            attempt.ending = True
            result = answers.encoded(policy, hint, value)
            completion = make(
                Completion, (claim.key, claim.owner, attempt.fence, COMPLETED, result, claim.keep, True)
            )
            try:
                ending = await store.complete(completion)
            except colour.trouble as error:
                return await self.finish(colour, call, attempt, value, error)
            if ending is FENCED:
                return await self.overtaken(colour, call, attempt)
            return self.recorded(call, attempt, completion, value)
        except BaseException as error:
            # Ctrl-C, anywhere: nobody brings this to its end, so its lease must not be kept.
            self.keeper.abandon(claim)
            if not has_begun:
                self.interrupted(colour, claim, error)
            raise

    async def open(
        self,
        colour: Colour,
        call: Call,
        answer: Decision | BaseException | None = None,
        started: float = 0.0,
    ) -> Attempt | Outcome[Any]:
        """Claim the key: an attempt that may run, or the outcome of not running.

        ``answer`` is what a first claim met that was sent at ``started``.
        """
        try:
            return await self._open(colour, call, answer, started)
        except BaseException as error:
            self.interrupted(colour, call.claim, error)
            raise

    def interrupted(self, colour: Colour, claim: Claim, error: BaseException) -> None:
        """A caller is gone before it began (Ctrl-C, a time limit): what it was granted unheard is to be given back.

        Who is cancelled has done that itself, and who asked for what can't be was not granted anything.
        """
        if not isinstance(error, (UsageError, *colour.cancelled)):
            self.keeper.withdraw(claim)

    async def _open(
        self, colour: Colour, call: Call, answer: Decision | BaseException | None, started: float
    ) -> Attempt | Outcome[Any]:
        claim, policy, _ = call
        if answer is None and policy.local_cache:
            cached = self.cache.get(call.key)
            if cached is not None and cached.fingerprint == call.fingerprint:
                return self.replay(call, cached)
        waiting: Waiting | None = None
        probed = False
        late: Decision | None = None
        times_late = 0
        while True:
            if answer is None:
                started = self.monotonic()
                try:
                    answer = await colour.store.claim(claim)
                except colour.trouble as error:
                    answer = error
            if type(answer) is Decision and answer.verdict is REPLAY and answer.record is not None:
                return self.replay(call, answer.record, answer.retry_after)
            if isinstance(answer, BaseException):
                answer = await self._claim_again(colour, claim, answer)
                if isinstance(answer, StoreError):
                    return self.fall_back(call, answer, started)
            if answer.verdict is BUSY:
                waiting = waiting or Waiting(self, call)
                refused = await waiting.turn(colour, answer)
                if refused is not None:
                    return refused
            elif answer.verdict is IN_DOUBT and answer.record and policy.prober and not probed:
                probed = True  # and asked again in any case: others may have settled it meanwhile
                await self.probe(colour, call, answer.record)
            elif answer.verdict in GRANTED and self.monotonic() - started >= claim.lease:
                late = answer  # after its lease: only if nobody took over meanwhile may this attempt begin
                times_late += 1
                if times_late >= LATE_GRANTS:
                    await self.withdraw(colour, claim)
                    return self.store_error(call, answers.too_slow(claim))
            else:
                return self.admit(call, answers.repeated(answer, late), started)
            answer = None

    def admit(self, call: Call, decision: Decision, started: float) -> Attempt | Outcome[Any]:
        """Turn a store's answer into an attempt, or into the outcome that it stands for."""
        verdict, record, _ = decision
        if verdict in GRANTED and record is not None:
            return self.begin(call, verdict, record, started)
        if verdict is REPLAY and record is not None:
            return self.replay(call, record, decision.retry_after)
        return self.refuse(call, decision)

    def begin(self, call: Call, verdict: Verdict, record: Record, started: float) -> Attempt | Outcome[Any]:
        """A claim was granted: from here on its lease is kept, or it is given back, if its receiver is being closed."""
        claim = call.claim
        attempt = Attempt(claim, record.fence, record.attempts, started, self.monotonic)
        attempt.flow, attempt.policy = self, call.policy
        if record.result is not None:
            attempt.progress = record.result
        keeper = self.keeper
        keeper.live[claim.owner] = attempt
        if keeper.closing is not None and keeper.turns_away(attempt):
            closed = StoreClosed(
                "This receiver was closed before the handler began, so nothing was run. Make a new one.",
                key=call.key,
            )
            return self.store_error(call, closed)
        if started + claim.lease / RENEW_SHARE < keeper.wake_at:
            keeper.rouse(attempt.renew_at)
        kind: EventKind = "taken_over" if verdict is TAKEN_OVER else "claimed"
        self.events.note(kind, started)
        if self.events.hooks:
            self.events.tell(kind, attempt.key, attempt.fence, attempt.number, attempt.guarantee)
        return attempt

    async def finish(
        self, colour: Colour, call: Call, attempt: Attempt, value: Any, trouble: BaseException | None = None
    ) -> Outcome[Any]:
        """Record a result, then give it. ``trouble`` is what a first try met."""
        if isinstance(attempt, Unprotected):
            return self.unrecorded(attempt, value)
        attempt.ending = True
        completion = answers.completion_of(call, attempt, value)
        ending: Ending | None = None
        if trouble is None:
            try:
                ending = await colour.store.complete(completion)
            except colour.trouble as error:
                trouble = error
        if ending is None:
            try:
                ending = await self._end(colour, attempt, completion, trouble)
            except StoreError as unanswered:
                return self.store_error(call, unanswered)
        if ending is FENCED:
            return await self.overtaken(colour, call, attempt)
        return self.recorded(call, attempt, completion, value)

    def recorded(self, call: Call, attempt: Attempt, completion: Completion, value: Any) -> Outcome[Any]:
        """The outcome of an attempt whose result has been recorded."""
        events, claim = self.events, attempt.claim
        now = self.monotonic()
        took = now - attempt.started
        events.note("completed", now, took)
        if events.hooks:
            events.tell("completed", claim.key, attempt.fence, attempt.number, attempt.guarantee, took)
        if call.policy.cached:
            self.hold(attempt, completion)
        if completion.result is not None and completion.result.startswith(UNAVAILABLE):
            _warn_of(completion.key, completion.result)
        guarantee = "at_most_once" if claim.once else "fenced"
        outcome = make(Outcome, ("executed", value, False, attempt.number, attempt.fence, guarantee, None))
        attempt.recorded = completion
        self.close(attempt, outcome)
        return outcome

    async def fail(self, colour: Colour, call: Call, attempt: Attempt, error: BaseException) -> Outcome[Any]:
        """Record what a handler's exception means. One that is not the handler's word leaves the claim alone."""
        if isinstance(attempt, Unprotected):
            return self.unrecorded(attempt, None, error)
        if not isinstance(error, Exception):
            self.events.note("abandoned", self.monotonic())
            self.close(attempt, None)
            raise error
        if isinstance(error, LeaseLost) and attempt.lost:
            return await self.overtaken(colour, call, attempt)
        ending = answers.failure_of(call, attempt, error)
        try:
            answer = await self._end(colour, attempt, ending, None)
        except StoreError as unanswered:
            if ending.state is State.ABSENT:  # nothing to remember: the handler's own error says it best
                return answers.failed(attempt, "failed", error)
            return self.store_error(call, unanswered)
        if answer is FENCED and ending.state is not State.ABSENT:  # a remembered error is an answer, too
            return await self.overtaken(colour, call, attempt)
        return self.unfinished(attempt, ending, answer, error)

    def unfinished(
        self, attempt: Attempt, ending: Completion, answer: Ending, error: BaseException
    ) -> Outcome[Any]:
        """The outcome of an attempt whose handler raised, after its ending has been recorded."""
        if ending.state is State.FAILED and answer is not FENCED:
            self.hold(attempt, ending)
        kind = "fenced" if answer is FENCED else ENDED[ending.state]
        self._tell_end(kind, attempt, type(error).__name__)
        status: Status = "in_doubt" if ending.state is State.IN_DOUBT else "failed"
        outcome = answers.failed(attempt, status, error)
        self.close(attempt, outcome)
        return outcome

    def hold(self, attempt: Attempt, ending: Completion) -> None:
        """Remember here what has been recorded, if the policy wants to answer from it."""
        if most := attempt.policy.cached:
            record = answers.record_of(attempt, ending)
            self.cache.put(record, attempt.started + attempt.claim.keep, most)

    async def overtaken(self, colour: Colour, call: Call, attempt: Attempt) -> Outcome[Any]:
        """The lease was lost and the result refused. The record's answer counts, never this attempt's own."""
        self._tell_end("fenced", attempt)
        self.close(attempt, None)
        try:
            record = await colour.store.get(call.key)
        except StoreError as error:
            return self.store_error(call, error)
        done = record is not None and record.state in (State.COMPLETED, State.FAILED)
        if record is not None and done and record.fingerprint == call.fingerprint:
            self.events.note(ASIDE, self.monotonic())
            return self.replay(call, record)
        lost = LeaseLost(
            "The handler ran longer than its lease could be kept, so its result was refused. Ask again with the "
            "same key to get the answer that counts; a longer lease= avoids this.",
            key=call.key,
        )
        return answers.failed(attempt, "failed", lost)

    def replay(self, call: Call, record: Record, seconds_left: float = 0.0) -> Outcome[Any]:
        """Answer a duplicate from the record, which the store remembers for so long still."""
        self.note_replay(call, record, seconds_left)
        return answers.replayed(call, record)

    def note_replay(self, call: Call, record: Record, seconds_left: float) -> None:
        """A duplicate is answered from the record, perhaps by who knows its form better than the codec."""
        events, now = self.events, self.monotonic()
        events.note("replayed", now)
        if events.hooks:
            events.tell("replayed", call.key, record.fence, record.attempts, record.guarantee)
        if seconds_left > 0 and call.policy.cached:
            self.cache.put(record, now + seconds_left, call.policy.cached)

    def join(self, call: Call, outcome: Outcome[Any]) -> Outcome[Any]:
        """Answer a duplicate with the outcome of the attempt that it met."""
        kind, shared = answers.joined(outcome)
        self.tell(kind, call.key, outcome.fence, outcome.attempt, outcome.guarantee)
        return shared

    def close(self, attempt: Attempt, outcome: Outcome[Any] | None) -> None:
        """Let go of an attempt. A caller that was cancelled meanwhile hears of it now, when all is recorded."""
        self.keeper.forget(attempt)
        attempt.end(outcome)
        if attempt.cancelled is not None:
            raise attempt.hear_cancelled()

    async def _claim_again(self, colour: Colour, claim: Claim, error: BaseException) -> Decision | StoreError:
        """Perhaps only the reply was lost: the same owner may ask again, and gets the same answer."""
        sent = isinstance(error, StoreUnavailable) and error.sent
        try:
            if not isinstance(error, StoreUnavailable):
                raise error
            return await colour.store.claim(claim)
        except StoreUnavailable as again:
            again.sent = again.sent or sent
            return again
        except StoreError as again:
            return again
        except colour.cancelled as cancelled:
            await self.withdraw(colour, claim, cancelled)
            raise

    async def withdraw(self, colour: Colour, claim: Claim, cancelled: BaseException | None = None) -> None:
        """Give back a claim whose handler has not begun, if the store granted it."""
        decision, cancelled = await insist(colour, lambda: colour.store.claim(claim), cancelled)
        error = decision if isinstance(decision, Exception) else None
        if isinstance(decision, Decision) and decision.verdict in GRANTED and decision.record:
            fence = decision.record.fence
            released, _ = await insist(
                colour,
                lambda: colour.store.release(claim.key, claim.owner, fence, claim.keep, began=False),
                cancelled,
            )
            error = released if isinstance(released, Exception) else None
        if error is not None:
            self.keeper.withdraw(claim)
            self.tell("store_error", claim.key, detail=str(error))

    async def _end(
        self, colour: Colour, attempt: Attempt, ending: Completion, first: BaseException | None
    ) -> Ending:
        """Write an ending, through cancellation and short outages; the keeper goes on where this gives up."""
        attempt.ending = True
        cancelled = first if isinstance(first, colour.cancelled) else None
        answer, cancelled = await insist(colour, lambda: colour.store.complete(ending), cancelled)
        if isinstance(answer, UsageError):  # it can't take this answer; that there is one counts more
            short = answers.shortened(ending, answer)
            answer, cancelled = await insist(colour, lambda: colour.store.complete(short), cancelled)
        attempt.cancelled = cancelled
        if isinstance(answer, UsageError):
            raise answer
        if isinstance(answer, StoreError):
            raise self.left_to_keeper(attempt, ending, answer)
        return answer

    def left_to_keeper(self, attempt: Attempt, ending: Completion, error: StoreError) -> BaseException:
        """Have the keeper go on with an ending that could not be written, and say so to the caller."""
        self.keeper.carry(attempt, ending)
        unanswered = attempt.hear_cancelled() or StoreUnavailable(
            f"The handler has run, but how it ended could not be recorded yet: {error} Recording goes on being tried "
            "while this receiver is open; until then nobody may run it again before its lease ends. Ask again with the "
            "same key.",
            key=attempt.key,
        )
        unanswered.__cause__ = error
        return unanswered

    async def probe(self, colour: Colour, call: Call, record: Record) -> bool:
        """Ask the policy's prober about a doubt and settle it. A prober that fails can't tell yet."""
        assert call.policy.prober is not None
        try:
            resolution: Any = call.policy.prober(record)
            if isinstance(resolution, CoroutineType) and not colour.awaits:
                resolution.close()
                raise ColourMismatch(
                    "A blocking call can't await its prober. Give it a plain function.", key=call.key
                )
            if inspect.isawaitable(resolution):
                resolution = await resolution
            return resolution is not None and await self.settle(colour, call, record, resolution)
        except Exception as error:
            import logging

            logging.getLogger("effectonce").exception("the prober failed on key=%r", record.key)
            self.tell_aside("in_doubt", record, f"the prober failed: {error!r}")
            return False

    async def settle(self, colour: Colour, call: Call, record: Record, resolution: Resolution) -> bool:
        """End a record in doubt; False when somebody else was first."""
        settlement = answers.settlement_of(call, record, resolution, await colour.store.now())
        if await colour.store.complete(settlement) is FENCED:
            return False
        self.tell_aside(ENDED[settlement.state], record, "settled")
        return True

    def refuse(self, call: Call, decision: Decision) -> Outcome[Any]:
        """The outcome of a claim that was neither granted nor done before."""
        kind, outcome = answers.refused(call, decision)
        self.tell(kind, call.key, outcome.fence, outcome.attempt, outcome.guarantee, outcome.status)
        if call.policy.dead_letter and decision.verdict in (LATE, EXHAUSTED):
            try:
                parked = call.policy.dead_letter(call.key, decision.verdict.value)
                if isinstance(parked, CoroutineType):
                    parked.close()
                    raise ColourMismatch(
                        "A coroutine can't put messages aside. Give dead_letter= a plain function.",
                        key=call.key,
                    )
            except Exception as error:  # then the caller has to know: what was not parked is not done with
                return outcome._replace(error=outcome.error or error)
        return outcome

    def fall_back(self, call: Call, error: StoreError, started: float) -> Attempt | Outcome[Any]:
        """What a call gets whose claim the store did not answer: a refusal, unless its policy says otherwise."""
        is_away = isinstance(error, StoreUnavailable) and not isinstance(error, StoreClosed)
        if isinstance(error, StoreUnavailable) and error.sent:
            self.keeper.withdraw(call.claim)
        if call.policy.fallback == "closed" or not is_away:
            return self.store_error(call, error)
        known = self.cache.get(call.key)
        if known is not None and known.fingerprint == call.fingerprint:
            return self.replay(call, known)
        if known is not None:
            return self.refuse(call, Decision(MISMATCH, known))
        attempt = Unprotected(call.claim, 0, 0, started, self.monotonic)
        attempt.flow, attempt.policy = self, call.policy
        if call.policy.fallback != "open" or not self.keeper.enter(attempt):
            return self.store_error(call, error)
        return attempt

    def unrecorded(self, attempt: Attempt, value: Any, error: BaseException | None = None) -> Outcome[Any]:
        """The outcome of an attempt that ran without a store: said out loud, and counted."""
        attempt.end(None)
        took = self.monotonic() - attempt.started
        self.events.note("unprotected", self.monotonic())
        detail = "the store was away" if error is None else type(error).__name__
        self.events.tell("unprotected", attempt.key, 0, 0, "none", took, detail)
        if error is not None and not isinstance(error, Exception):
            raise error
        status: Status = "executed" if error is None else "failed"
        return Outcome(status, value, False, 0, 0, "none", error)

    def store_error(self, call: Call, error: StoreError) -> Outcome[Any]:
        """The outcome of a command that the store did not answer."""
        outcome = answers.store_error(call, error)
        self.tell("store_error", call.key, 0, 0, outcome.guarantee, type(error).__name__)
        return outcome

    def tell_aside(self, kind: EventKind, record: Record, detail: str) -> None:
        """Tell of a key what is not the outcome of a delivery."""
        self.events.note(ASIDE, self.monotonic())
        self.tell(kind, record.key, record.fence, record.attempts, record.guarantee, detail)

    def tell_step(self, attempt: Attempt, detail: str) -> None:
        """Tell of a step that an attempt has finished, or was given from its journal."""
        self.tell("step", attempt.key, attempt.fence, attempt.number, attempt.guarantee, detail)

    def tell(
        self,
        kind: EventKind,
        key: str,
        fence: int = 0,
        attempt: int = 0,
        guarantee: Guarantee = "fenced",
        detail: str = "",
    ) -> None:
        """Count an event and tell whoever listens."""
        self.events.note(kind, self.monotonic())
        if self.events.hooks:
            self.events.tell(kind, key, fence, attempt, guarantee, None, detail)

    def _tell_end(self, kind: EventKind, attempt: Attempt, detail: str = "") -> None:
        now = self.monotonic()
        took = now - attempt.started
        self.events.note(kind, now, took)
        if self.events.hooks:
            guarantee = attempt.guarantee
            self.events.tell(kind, attempt.key, attempt.fence, attempt.number, guarantee, took, detail)


def _warn_of(key: str, result: bytes) -> None:
    """Say that a result was not stored when it happens: its caller has it, and misses nothing before a repeat does."""
    import logging

    logging.getLogger("effectonce").warning(
        "a result can't be stored: %s. A repeat would raise ResultUnavailable; where nobody needs the result, say "
        "store_result=False. key=%r",
        answers.why_unstored(result),
        key,
        extra={"effect_key": key},
    )
