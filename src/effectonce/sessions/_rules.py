"""The rules of client sessions, pure: no I/O, clock or chance. In their order:

1. A session that is missing or whose lease is over: ``SessionExpired``. It is never made on the fly.
2. Another epoch than the session's: ``Fenced``. A twin of the client, or the client restarted, goes on in its place.
3. Any other contact is valid: it renews the lease and moves the low-water mark up to what the client has acknowledged.
   What has ended below the mark is dropped. The mark never moves back.
4. A number below the mark: ``StaleRequest``. It was answered and acknowledged, or given up, and never runs again.
5. Everything else is a claim like any other, by the protocol's own rules: a new number is claimed, also when a higher
   one was seen before; a known one is replayed, busy, taken over, or a mismatch.

That a number at or above the mark is not there proves that it was never seen, because requests leave by the mark alone.
The lease of a session is never shorter than that of a request that runs in it, so that none is collected while one
runs. One clock decides: the store's.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any, Final, NamedTuple

from .. import keys
from .._protocol import decide_claim, is_expired
from .._records import Claim, Decision, Record
from ..errors import BadRequest, Fenced, Refused, SessionExpired, StaleRequest, WindowExceeded

OPERATION: Final = "session"
WINDOW: Final = 512
HIGHEST: Final = (1 << 53) - 1
"""The highest number of a request: every language and every store counts so far exactly."""


class Session(NamedTuple):
    """What a store remembers of a client, beside its requests."""

    id: str
    """Made of scope and client id: whoever does not know both finds nothing."""
    epoch: int
    low: int
    """Every request below it is acknowledged or given up."""
    lease: float
    """How many seconds it lives without contact."""
    lease_until: float


class Place(NamedTuple):
    """Where in its session a request stands: what a client sends along with it."""

    session: str
    number: int
    low: int
    epoch: int


class SessionClaim(Claim):
    """A claim with its place: the mark that it carries differs from one try to the next, the key does not."""

    place: Place


class Contact(NamedTuple):
    """Something that a client wants of its session itself."""

    kind: str
    """"open", "resume" (with the next epoch, which fences whoever has the last one), "touch" or "end"."""
    session: str
    epoch: int = 1
    low: int = 1
    lease: float = 0.0


class Ruling(NamedTuple):
    """What is decided: the session to write (None: none, or none any more), and the answer to give."""

    session: Session | None
    answer: Any


def session_id(scope: str, client: str) -> str:
    """The name of a session in stores and keys. A client id can't be read from it. Raises ``InvalidKey``."""
    keys.prefix(scope, OPERATION)  # a scope that names no request must not name a session either
    return sha256(f"{len(scope)} {scope}{client}".encode("utf-8", "surrogatepass")).hexdigest()[:32]


def key_of(scope: str, session: str, number: int) -> str:
    """The key of a request: what its effect is known by, whoever asks how often."""
    return f"{keys.prefix(scope, OPERATION)}{session}:{number}"


def parts_of(key: str) -> tuple[str, int]:
    """The session and the number in a key."""
    session, _, number = key[key.rindex("|") + 1 :].partition(":")
    return session, int(number)


def place_of(session: str, number: Any, acked: Any, epoch: Any, window: int) -> Place:
    """What a client says of where its request stands, if that can be."""
    for name, value, least in (("number", number, 1), ("acked", acked, 0), ("epoch", epoch, 1)):
        if type(value) is not int or not least <= value <= HIGHEST:
            raise BadRequest(f"{name}={value!r} must be a whole number from {least} to {HIGHEST}.")
    if acked >= number:
        raise BadRequest(
            f"Request {number} says that all up to {acked} are acknowledged, itself among them. Send the highest "
            "number below which nothing is waited for."
        )
    if number - acked > window:
        raise WindowExceeded(
            f"Request {number} is {number - acked} above {acked}, the last one acknowledged; {window} are allowed. "
            "Wait for earlier answers first.",
            window=window,
        )
    return Place(session, number, acked + 1, epoch)


def rule_on_claim(session: Session | None, record: Record | None, claim: SessionClaim, now: float) -> Ruling:
    """What a request gets."""
    place = claim.place
    after = _contacted(session, place.epoch, place.low, claim.lease, now)
    if isinstance(after, Refused):
        return Ruling(session, after)
    if place.number < after.low:
        return Ruling(after, stale(claim.key, place.number, after.low))
    return Ruling(after, decide_claim(record, claim, now, 0))


def rule_on_contact(session: Session | None, contact: Contact, now: float) -> Ruling:
    """What a client gets that asks about its session."""
    kind, name, epoch, low, lease = contact
    if kind == "open":
        made = Session(name, 1, 1, lease, now + lease)
        return Ruling(made, made)
    if kind == "resume" and session is not None:
        epoch, low = session.epoch, session.low  # whoever knows the client id may go on with it
    after = _contacted(session, epoch, low, 0.0, now)
    if isinstance(after, Refused):
        return Ruling(session, after)
    if kind == "resume":
        after = after._replace(epoch=after.epoch + 1)
    return Ruling(None if kind == "end" else after, after)


def _contacted(session: Session | None, epoch: int, low: int, hold: float, now: float) -> Session | Refused:
    """The session after a valid contact. ``hold`` is the lease of a request that may begin with it."""
    refusal = refusal_of(session, epoch, now)
    if refusal is not None or session is None:
        return refusal or expired()
    until = max(session.lease_until, now + max(session.lease, hold))
    return session._replace(low=max(session.low, low), lease_until=until)


def refusal_of(session: Session | None, epoch: int, now: float) -> Refused | None:
    """Why a session is not there for a client; None if it is."""
    if session is None or session.lease_until <= now:
        return expired()
    if session.epoch != epoch:
        return Fenced(
            "Another process goes on with this session: it was resumed since, and this client's epoch is over. Open a "
            "session of your own.",
        )
    return None


def is_dropped(record: Record, now: float) -> bool:
    """Whether a request below the mark may leave: not one that runs, nor one in doubt."""
    return is_expired(record._replace(expires_at=now), now)


def expired() -> SessionExpired:
    """The one answer for a session that is over, was never there, or is another's."""
    return SessionExpired(
        "There is no such session: its lease is over, or it was never opened. Nothing was run. Open a new one, and "
        "find out by other means what became of requests that were not answered."
    )


def stale(key: str, number: int, low: int) -> StaleRequest:
    """The answer to a number below the mark."""
    return StaleRequest(
        f"Request {number} is below {low}: the client has acknowledged it, so its answer is gone and it never runs "
        "again. Give a new request a new number.",
        key=key,
    )


def granted(answer: Any) -> Decision:
    """A decision, unless it is a refusal: that is raised, after what it leaves behind has been written."""
    if isinstance(answer, Refused):
        raise answer
    decision: Decision = answer
    return decision
