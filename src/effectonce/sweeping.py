"""The sweep: finds attempts that stopped renewing, and settles or re-drives them before a retry comes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ._answers import call_of, settlement_of
from ._flow import Colour, Flow
from ._protocol import is_abandoned
from ._records import Ending, Record, State, Verdict
from .policy import Policy

Redrive = Callable[[Record], object]
"""Starts the work of an abandoned key again, usually by calling the decorated function with arguments found by key."""

CHUNK = 256


@dataclass(slots=True)
class Swept:
    """What a sweep found and did."""

    abandoned: int = 0
    in_doubt: int = 0
    settled: int = 0
    redriven: int = 0
    failed: int = 0
    """Re-drives and probes that raised; their records are left as they were."""


async def sweep(flow: Flow, colour: Colour, policy: Policy, redrive: Redrive | None, limit: int) -> Swept:
    """Look at up to ``limit`` unfinished records.

    One claimed at most once becomes IN_DOUBT, and the policy's prober is asked. Any other is handed to ``redrive``,
    whose own claim takes over with a higher fence, so that several sweepers never double a run.
    """
    done = Swept()
    now = await colour.store.now()
    for record in await _unfinished(colour, State.PENDING, limit):
        if not is_abandoned(record, now):
            continue
        done.abandoned += 1
        if record.once:
            done.in_doubt += await _doubted(flow, colour, record, policy)
        elif redrive is not None:
            done.redriven += await _tried(flow, colour, record, done, redrive)
    for record in await _unfinished(colour, State.IN_DOUBT, limit) if policy.prober else []:
        done.settled += await _tried(flow, colour, record, done, lambda r: _settle(colour, policy, r))
    return done


async def _doubted(flow: Flow, colour: Colour, record: Record, policy: Policy) -> bool:
    """Let the protocol find the doubt. If the attempt ended meanwhile, a claim that this won is given back."""
    claim = call_of(record.key, record.fingerprint, policy, may_create=False).claim
    decision = await colour.store.claim(claim)
    if decision.verdict in (Verdict.CLAIMED, Verdict.TAKEN_OVER):
        await flow.withdraw(colour, claim)
    return decision.verdict is Verdict.IN_DOUBT


async def _unfinished(colour: Colour, state: State, limit: int) -> list[Record]:
    found: list[Record] = []
    after = ""
    while len(found) < limit:
        chunk = await colour.store.scan(state, after, min(CHUNK, limit - len(found)))
        if not chunk:
            break
        found += chunk
        after = chunk[-1].key
    return found


async def _tried(
    flow: Flow, colour: Colour, record: Record, done: Swept, act: Callable[[Record], Any]
) -> bool:
    """Do something for one record; what it raises is told and stops nobody else's."""
    try:
        result = act(record)
        if inspect.isawaitable(result):
            result = await result
        return result is not False
    except Exception as error:
        done.failed += 1
        flow.events.tell(
            "failed", record.key, record.fence, record.attempts, record.guarantee, None, f"sweep: {error!r}"
        )
        return False


async def _settle(colour: Colour, policy: Policy, record: Record) -> bool:
    assert policy.prober is not None
    resolution: Any = policy.prober(record)
    if colour.awaits and inspect.isawaitable(resolution):
        resolution = await resolution
    if resolution is None:
        return False
    call = call_of(record.key, record.fingerprint, policy)
    return await colour.store.complete(settlement_of(call, record, resolution)) is not Ending.FENCED
