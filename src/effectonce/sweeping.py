"""The sweep: finds attempts that stopped renewing, and settles or re-drives them before a retry comes."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from ._answers import call_of
from ._colours import Colour
from ._flow import Flow
from ._operations import is_saga
from ._protocol import is_abandoned
from ._records import Record, State, Verdict
from .policy import Policy

Redrive = Callable[[Record], object]
"""Starts the work of an abandoned key again, usually by calling the decorated function with arguments found by key."""

CHUNK = 1000
"""Records to a page. Where keys have no order, every page is a way through all of them, so pages are large."""


@dataclass(slots=True)
class Swept:
    """What a sweep found and did."""

    abandoned: int = 0
    in_doubt: int = 0
    settled: int = 0
    redriven: int = 0
    failed: int = 0
    """Re-drives that raised; their records are left as they were."""


async def sweep(flow: Flow, colour: Colour, policy: Policy, redrive: Redrive | None, limit: int) -> Swept:
    """Settle or re-drive up to ``limit`` abandoned attempts.

    One claimed at most once becomes IN_DOUBT, and the policy's prober is asked. Any other is handed to ``redrive``,
    whose own claim takes over with a higher fence, so that several sweepers never double a run.
    """
    done = Swept()
    now = await colour.store.now()
    async for record in every(colour, State.PENDING):
        if done.abandoned >= limit:
            break
        if not is_abandoned(record, now):
            continue
        done.abandoned += 1
        if record.once:
            done.in_doubt += await doubted(flow, colour, record, policy)
        elif redrive is not None:
            done.redriven += await _redriven(flow, record, done, redrive)
    if policy.prober is not None:
        async for record in every(colour, State.IN_DOUBT):
            if done.settled >= limit:
                break
            if is_saga(record.key):
                continue  # a person says how it goes on
            done.settled += await flow.probe(colour, call_of(record.key, record.fingerprint, policy), record)
    return done


async def doubted(flow: Flow, colour: Colour, record: Record, policy: Policy) -> bool:
    """Let the protocol find the doubt. If the attempt ended meanwhile, a claim that this won is given back."""
    claim = call_of(record.key, record.fingerprint, policy, may_create=False).claim
    # The attempt may have had another policy than the sweep has.
    claim = claim._replace(keep=max(claim.keep, record.expires_at - record.lease_until))
    decision = await colour.store.claim(claim)
    if decision.verdict in (Verdict.CLAIMED, Verdict.TAKEN_OVER):
        await flow.withdraw(colour, claim)
    is_doubt = decision.verdict is Verdict.IN_DOUBT
    if is_doubt:
        flow.tell_aside("in_doubt", record, "found by a sweep")
    return is_doubt


async def every(colour: Colour, state: State) -> AsyncIterator[Record]:
    """All records of a state, a chunk at a time. A page may lack some that have ended meanwhile, but not half of it."""
    after = ""
    while True:
        chunk = await colour.store.scan(state, after, CHUNK)
        for record in chunk:
            yield record
        if len(chunk) <= CHUNK // 2:
            return
        after = chunk[-1].key


async def _redriven(flow: Flow, record: Record, done: Swept, redrive: Redrive) -> bool:
    """Start one key's work again; what it raises is told and stops nobody else's."""
    try:
        result = redrive(record)
        if inspect.isawaitable(result):
            await result
        return True
    except Exception as error:
        done.failed += 1
        flow.tell_aside("failed", record, f"sweep: {error!r}")
        return False
