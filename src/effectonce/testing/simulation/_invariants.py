"""What must hold at every step of every schedule. Each function says in its docstring what it demands.

A check returns None, or a sentence that says how its demand was broken. The checks trust nothing that a store or a
worker says about itself: they compare it with a ``Ghost``, what an observer who sees every step remembers of a key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ... import codec
from ..._messages import Outcome
from ..._records import NOBODY, Completion, Ending, Record, State, Verdict
from ...errors import EffectOnceError
from ._ghosts import FINISHED, Applied, Done, Ghost, is_known, is_pending, steps_of
from ._requests import Began, Cancelled, Ended, Running, Task

ANSWERED = ("executed", "replayed")


# Checks of a command.


def finished_stays(a: Applied) -> str | None:
    """A COMPLETED or FAILED record never changes before it expires, and never expires before the policy's keep."""
    before, after = a.before, a.after
    if before is not None and before.state in FINISHED:
        if a.now < before.expires_at and after != before:
            return f"a {before.state.name} record with fence {before.fence} was changed"
    elif after is not None and after.state in FINISHED and after.expires_at < a.now + a.item.keep:
        return f"a finished record would be forgotten {a.now + a.item.keep - after.expires_at:g} s too early"
    return None


def holder_only(a: Applied) -> str | None:
    """Only the owner of a claim, with its fence, renews or ends it; a record in doubt is ended by its fence."""
    if a.verb not in ("renew", "complete"):
        return None
    before, item = a.before, a.item
    holds = before is not None and before.owner == item.owner and before.fence == item.fence
    if holds and before is not None and (is_pending(before) or before.state is State.IN_DOUBT):
        return None
    if a.after != before or a.reply is True or a.reply is Ending.DONE:
        return f"{item.owner!r} with fence {item.fence} was let {a.verb} what {_who(before)}"
    return None


def live_lease_respected(a: Applied) -> str | None:
    """Nobody takes over or removes a claim before its lease is over on the store's clock."""
    if not is_pending(a.before) or a.ghost.lease_end <= a.now or a.verb not in ("claim", "purge"):
        return None
    if a.after == a.before or (a.verb == "claim" and a.repeated):
        return None
    return (
        f"{a.verb} changed what {_who(a.before)}, {a.ghost.lease_end - a.now:g} s before its lease was over"
    )


def fences_grow(a: Applied) -> str | None:
    """Each new claim of a key has a higher fence than all before, also after release and purge."""
    if a.granted and not a.repeated and a.after is not None and a.after.fence <= a.ghost.top:
        return f"a new claim got fence {a.after.fence} after fence {a.ghost.top} had been given out"
    return None


def repeated_claim_granted(a: Applied) -> str | None:
    """An owner is never locked out by its own claim: asking again gives the same fence."""
    if a.verb != "claim" or not a.repeated or not is_known(a.before, a.now, a.ghost) or a.before is None:
        return None
    if not a.granted or a.after is None or a.after.fence != a.before.fence:
        return f"{a.item.owner!r} holds fence {a.before.fence}, asked again and got {a.reply.verdict.name}"
    return None


def repeated_ending_accepted(a: Applied) -> str | None:
    """An ending that is sent again is not refused while the record is what it left behind."""
    before, item = a.before, a.item
    if a.verb != "complete" or before is None or a.reply is not Ending.FENCED:
        return None
    if (before.fence, before.state, before.result) == (item.fence, item.state, item.result):
        return f"the ending of fence {item.fence} was refused though the record is just that"
    return None


def other_payload_refused(a: Applied) -> str | None:
    """A claim with another fingerprint than a remembered record's is answered "mismatch" and changes nothing."""
    if a.verb != "claim" or not is_known(a.before, a.now, a.ghost) or a.before is None:
        return None
    if a.before.fingerprint == a.item.fingerprint:
        return None
    if a.reply.verdict is not Verdict.MISMATCH or a.after != a.before:
        return f"a claim for another payload got {a.reply.verdict.name}"
    return None


def late_is_not_started(a: Applied) -> str | None:
    """A message older than what the store remembers is never started as if it were new."""
    if a.granted and not a.item.may_create and not is_known(a.before, a.now, a.ghost):
        return f"a late message was granted fence {a.reply.record.fence}"
    return None


def handler_has_the_word(a: Applied) -> str | None:
    """A claim whose handler has begun is released or ended only after the handler has returned or raised."""
    if a.verb == "complete" and a.reply is Ending.DONE and a.item.owner in a.ghost.running:
        return f"the claim of {a.item.owner!r} became {a.item.state.name} while its handler had not ended"
    return None


def recorded_effect_stands(a: Applied) -> str | None:
    """When a result is recorded, the sink's last accepted effect is that of the recorded fence.

    So a sink that refuses lower fences than it has seen, and overwrites, holds the effect whose result is replayed.
    """
    if not _records_a_result(a) or a.after is None or a.ghost.sink_fence == a.after.fence:
        return None
    return f"fence {a.after.fence} was recorded, but the sink's last effect has fence {a.ghost.sink_fence}"


def one_effect(a: Applied) -> str | None:
    """A sink that dedupes on the derived key applies one effect, and has applied it when the result is recorded.

    Of a handler that has steps that is one for each step.
    """
    steps = [step for step, _ in a.ghost.effects]
    if len(steps) > len(set(steps)):
        return f"the sink has applied {len(steps)} effects of {len(set(steps))}"
    if _records_a_result(a) and not steps:
        return "a result was recorded without an effect"
    return None


def journal_stays(a: Applied) -> str | None:
    """Until the key has its answer or is forgotten, steps that were recorded stay so, and in their order."""
    if not is_known(a.before, a.now, a.ghost) or a.before is None or a.before.state in FINISHED:
        return None
    before, after = steps_of(a.before), steps_of(a.after)
    if a.after is not None and a.after.state not in FINISHED and after[: len(before)] != before:
        return f"{a.verb} left {after} of the finished steps {before}"
    return None


class Tried(NamedTuple):
    """A step that is about to have its effect, and what the observer knew before."""

    fence: int
    step: str
    ghost: Ghost


def finished_step_rests(tried: Tried) -> str | None:
    """A step that an attempt has found finished is not run by it again."""
    found = dict(tried.ghost.found).get(tried.fence, ())
    if tried.step in found:
        return f"fence {tried.fence} ran {tried.step!r} again, though its claim had found {found} finished"
    return None


def step_recorded_first(tried: Tried) -> str | None:
    """An attempt goes on to its next step only when the one before it is recorded."""
    earlier = [step for fence, step in tried.ghost.tried if fence == tried.fence and step != tried.step]
    missing = [step for step in earlier if step not in tried.ghost.recorded]
    if missing:
        return f"fence {tried.fence} went on to {tried.step!r}, and {missing[0]!r} was never recorded"
    return None


def _records_a_result(a: Applied) -> bool:
    completes = isinstance(a.item, Completion) and a.item.state is State.COMPLETED and a.item.owner != NOBODY
    return completes and a.reply is Ending.DONE


def _who(record: Record | None) -> str:
    if record is None:
        return "nobody holds"
    return f"{record.owner!r} left {record.state.name} with fence {record.fence}"


# Checks of what workers are seen to do.


def starts_once(began: Began, ghost: Ghost) -> str | None:
    """In at-most-once mode a handler starts once, unless the key was released, settled or forgotten since."""
    if began.once and ghost.begun:
        return f"a second handler was started, with fence {began.fence}"
    return None


class Call(NamedTuple):
    """A task's end, for one of its keys: the ghost now, and how many finished records there were at its start."""

    task: Task
    ended: Ended
    outcome: Outcome[Any] | None
    fingerprint: bytes
    ghost: Ghost
    done_before: int
    record: Record | None


def answer_is_the_record(call: Call) -> str | None:
    """What is given as an answer is in the store, and was not replaced before the call began.

    An answer is a result, or an error that the policy remembers. It is never given before it is recorded, never to
    another payload, and never from an attempt that was fenced out.
    """
    answer = _answer_of(call)
    if answer is None:
        return None
    state, text = answer
    fence = call.outcome.fence if call.outcome else None
    found = [
        index for index, done in enumerate(call.ghost.done) if _is(done, state, text, fence, call.fingerprint)
    ]
    if not found:
        return f"{call.task.name} was given {text!r}, which was never recorded"
    if found[-1] < call.done_before - 1:
        return f"{call.task.name} was given {text!r}, which had expired and been replaced before it asked"
    return None


def cancelled_leaves_nothing(call: Call) -> str | None:
    """A task cancelled before its handler began gives its claim back before it ends."""
    ended, record = call.ended, call.record
    if not isinstance(ended.error, Cancelled) or ended.began or not is_pending(record) or record is None:
        return None
    if (record.key, record.owner) in ended.owners and record.owner not in call.ghost.late:
        return (
            f"{call.task.name} was cancelled before its handler began, and still holds fence {record.fence}"
        )
    return None


def cancellation_is_heard(call: Call) -> str | None:
    """A task that was cancelled ends cancelled, whatever the store did meanwhile."""
    if call.ended.cancelled and not isinstance(call.ended.error, Cancelled):
        return f"{call.task.name} was cancelled and ended with {call.outcome or call.ended.error!r}"
    return None


def _answer_of(call: Call) -> tuple[State, str] | None:
    error = call.ended.error or (call.outcome.error if call.outcome else None)
    if isinstance(error, call.task.remember):
        return State.FAILED, str(error)
    if error is None and call.outcome is not None and call.outcome.status in ANSWERED:
        return State.COMPLETED, str(call.outcome.value)
    return None


def _is(done: Done, state: State, text: str, fence: int | None, fingerprint: bytes) -> bool:
    if done.state is not state or done.fingerprint != fingerprint or done.result is None:
        return False
    if state is State.COMPLETED:
        return done.fence == fence and str(codec.decode(done.result)) == text
    return str(codec.decode_error(done.result, (Exception,))) == text


def errors_are_known(task: Task, ended: Ended) -> str | None:
    """A task ends with an outcome, with what its handler raises, or with an error of the tree; never with a crash."""
    known = (EffectOnceError, Cancelled, *task.remember, *task.raises)
    return (
        None if isinstance(ended.error, (type(None), *known)) else f"{task.name} ended with {ended.error!r}"
    )


# Checks that look at a whole moment; the world knows when to ask.


def loser_is_told(denied: list[Running]) -> str | None:
    """When a renewal is denied, the handler that still runs is told that its lease is lost."""
    untold = [running for running in denied if not running.told]
    return (
        f"the handler with fence {untold[0].fence} was not told that its renewal was denied"
        if untold
        else None
    )


def loser_knows_in_time(overtaken: list[Running], now: float) -> str | None:
    """Before a claim is taken over, its handler's ``attempt.lost`` is true by the local clock alone."""
    unaware = [running for running in overtaken if not running.told and running.lost_at > now]
    if not unaware:
        return None
    return f"the handler with fence {unaware[0].fence} still believes in its lease for {unaware[0].lost_at - now:g} s"


def nothing_orphaned(record: Record | None, ghost: Ghost, now: float) -> str | None:
    """Without faults, when every task has ended, nobody holds a lease that still lives."""
    if is_pending(record) and record is not None and ghost.lease_end > now:
        return f"every task has ended, but {record.owner!r} still holds fence {record.fence}"
    return None


def nothing_stuck(refusals: list[str]) -> str | None:
    """If all workers stop for good, then after the lease one retry of each key ends with an answer (or in doubt)."""
    return f"a retry after the lease got only: {', '.join(refusals)}" if refusals else None


OF_COMMANDS: tuple[Callable[[Applied], str | None], ...] = (
    finished_stays,
    holder_only,
    live_lease_respected,
    fences_grow,
    repeated_claim_granted,
    repeated_ending_accepted,
    other_payload_refused,
    late_is_not_started,
    handler_has_the_word,
    recorded_effect_stands,
    one_effect,
    journal_stays,
)
OF_CALLS: tuple[Callable[[Call], str | None], ...] = (
    answer_is_the_record,
    cancelled_leaves_nothing,
    cancellation_is_heard,
)
OF_MOMENTS: tuple[Callable[..., str | None], ...] = (
    errors_are_known,
    starts_once,
    finished_step_rests,
    step_recorded_first,
    loser_is_told,
    loser_knows_in_time,
    nothing_orphaned,
    nothing_stuck,
)
EVERY: tuple[Callable[..., str | None], ...] = OF_COMMANDS + OF_CALLS + OF_MOMENTS
INVARIANTS = {check.__name__: check.__doc__ or "" for check in EVERY}
"""Every invariant by name, with what it demands."""
