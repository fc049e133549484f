"""A session store is a ``Store`` whose records are requests of clients' sessions, and whose claims know their place.

So the one flow runs sessions as it runs everything: it claims, keeps leases, takes over, waits, completes. Every verb
is one atomic step about one session. Where a store has transactions, that step is the same everywhere: look at the
session and the request (``Desk.look``), ask the rules, write what they say (``Desk.write``); memory, SQLite, MySQL and
every user's transaction share this body, in both colours. Servers that can do it in one command of their own do so.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, cast

from .._protocol import decide_ending, decide_renewal
from .._records import Claim, Completion, Decision, Ending, Record, Renewal, State
from ..errors import Refused, UsageError
from ..stores.base import Store
from ._rules import (
    Contact,
    Session,
    SessionClaim,
    granted,
    is_dropped,
    parts_of,
    rule_on_claim,
    rule_on_contact,
)


class Sight(NamedTuple):
    """What a store has of a session and of one of its requests, and its clock."""

    session: Session | None
    record: Record | None
    now: float


class Desk(Protocol):
    """One session, for as long as a verb takes: nobody else changes it between the look and the write."""

    async def look(self, session: str, key: str | None = None) -> Sight:
        """Read a session, and one of its requests."""
        ...

    async def write(self, session: Session, is_new: bool, drops: bool) -> None:
        """Write a session; if its mark has moved, drop what has ended below it."""
        ...

    async def put(self, session: str, number: int, record: Record, is_new: bool) -> None:
        """Write a request."""
        ...

    async def drop(self, session: str, number: int | None = None) -> None:
        """Forget a request, or a session with all of them."""
        ...


class SessionStore(Store):
    """The verbs of a store, and one more: what a client wants of its session itself."""

    @abstractmethod
    async def contact(self, contact: Contact) -> Session:
        """Open, resume, touch or end a session, by ``rule_on_contact``. Raises what it refuses."""

    async def scan(self, state: State | None = None, after: str = "", limit: int = 256) -> list[Record]:
        """Refused: what a session remembers is its client's, who asks again by itself."""
        raise UsageError(
            "The requests of sessions are found by their numbers only; there is no list of them."
        )


class DeskStore(SessionStore):
    """A session store whose verbs are the shared ones, each at a desk."""

    async def at_desk(self, work: Any) -> Any:
        """Have ``work(desk)``, a coroutine function, done as one atomic step."""
        raise NotImplementedError

    async def contact(self, contact: Contact) -> Session:
        """Open, resume, touch or end a session."""
        return cast("Session", or_raised(await self.at_desk(lambda desk: contacting(desk, contact))))

    async def claim(self, claim: Claim) -> Decision:
        """Decide one request, with everything that its contact means for its session."""
        return granted(await self.at_desk(lambda desk: claiming(desk, cast("SessionClaim", claim))))

    async def renew(self, renewal: Renewal) -> bool:
        """Extend a lease, and the session's with it."""
        return cast("bool", await self.at_desk(lambda desk: renewing(desk, renewal)))

    async def complete(self, completion: Completion) -> Ending:
        """End a claim."""
        return cast("Ending", await self.at_desk(lambda desk: ending(desk, completion)))

    async def get(self, key: str) -> Record | None:
        """Read a request."""
        return cast("Sight", await self.at_desk(lambda desk: desk.look(parts_of(key)[0], key))).record

    async def claim_many(self, claims: Sequence[Claim]) -> list[Decision]:
        """Decide many requests, in order, each by itself: one that is refused spoils no other."""
        raise UsageError("The requests of sessions come one by one, since each of them may be refused.")


async def contacting(desk: Desk, contact: Contact) -> Session | Refused:
    """Do what a client wants of its session."""
    session, _, now = await desk.look(contact.session)
    after, answer = rule_on_contact(session, contact, now)
    if after is None and not isinstance(answer, Refused):
        await desk.drop(contact.session)
    else:
        await _moved(desk, session, after)
    return cast("Session | Refused", answer)


async def claiming(desk: Desk, claim: SessionClaim) -> Decision | Refused:
    """Decide a request."""
    place = claim.place
    session, record, now = await desk.look(place.session, claim.key)
    after, answer = rule_on_claim(session, record, claim, now)
    await _moved(desk, session, after)
    if isinstance(answer, Decision) and answer.record is not None and answer.record is not record:
        await desk.put(place.session, place.number, answer.record, record is None)
    return cast("Decision | Refused", answer)


async def renewing(desk: Desk, renewal: Renewal) -> bool:
    """Extend the lease of a request. That of its session is never shorter."""
    name, number = parts_of(renewal.key)
    session, record, now = await desk.look(name, renewal.key)
    renewed = decide_renewal(record, renewal, now)
    if session is None or renewed is None:
        return False
    await desk.put(name, number, renewed, False)
    if renewed.lease_until > session.lease_until:
        await desk.write(session._replace(lease_until=renewed.lease_until), False, False)
    return True


async def ending(desk: Desk, completion: Completion) -> Ending:
    """End a request. The answer to one that its client has given up is for nobody."""
    name, number = parts_of(completion.key)
    session, record, now = await desk.look(name, completion.key)
    answer, after = decide_ending(record, completion, now)
    if after is None or after is record:
        return answer
    if session is not None and number < session.low and is_dropped(after, now):
        await desk.drop(name, number)
    else:
        await desk.put(name, number, after, False)
    return answer


async def _moved(desk: Desk, before: Session | None, after: Session | None) -> None:
    if after is not None and after != before:
        await desk.write(after, before is None, before is not None and after.low > before.low)


def or_raised(answer: Any) -> Any:
    """An answer, unless it is a refusal: that is raised."""
    if isinstance(answer, Refused):
        raise answer
    return answer
