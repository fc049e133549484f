"""Steps as statements, and rows as replies. What is empty in a record is NULL in a row, which takes no room."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from itertools import starmap
from math import ceil
from typing import Any, Final, NamedTuple, cast

from .._protocol import decide_claim
from .._records import NOBODY, Claim, Completion, Record, Renewal, State, make
from ..errors import StoreMismatch
from ._postgres_sql import ENCODERS, Call, Row, Statements
from ._steps import DONE, Add, Added, End, Found, Hold, Read, Save, Step, Swap

PENDING, ONCE, IN_STATE, ATTEMPT = State.PENDING, 8, 15, 32
"""In the column ``state``: what is added for a claim at most once, what masks both, and what an attempt counts."""
CLAIMED, CLAIMED_ONCE = PENDING + ATTEMPT, PENDING + ONCE + ATTEMPT
_ENCODED, _ENCODED_ONCE = map(ENCODERS["integer"], (CLAIMED, CLAIMED_ONCE))
_float, _bigint, _integer = ENCODERS["float8"], ENCODERS["bigint"], ENCODERS["integer"]
STATES: Final = {int(state) + once: (state, once == ONCE) for state in State for once in (0, ONCE)}
OWNER_SIZE: Final = 16
"""Of a pending record's content; what follows is its journal."""
MICROS: Final = 1_000_000
"""A new record's fence is the server's clock in millionths of a second."""

AGAIN: Any = object()
"""In place of a reply: the step has to be sent again."""
LOOK: Any = object()
"""In place of a reply: the step was in vain, and the record has to be read."""
NOTHING = Found(None, 0.0)


class Kind(NamedTuple):
    """How a kind of step is put to the server, and what its answer means."""

    name: str
    columns: Callable[[Iterable[Any]], Sequence[tuple[Any, ...]]]
    """What is asked for, each kind of value for all steps."""
    reply: Callable[[str, Row], Any]
    """What a row says of a key."""
    without_row: Any
    """The reply when there is no row."""


def id_of(key: str) -> bytes:
    """What a record is found by."""
    try:
        name = key.encode()
    except UnicodeEncodeError:
        name = key.encode("utf-8", "surrogatepass")
    return sha256(name).digest()[:16]


def add_columns(claims: Iterable[Claim]) -> list[tuple[Any, ...]]:
    """What is asked for when claims' records are to be put in place; each kind of value for all of them."""
    keys, owners, fingerprints, leases, keeps, onces, _, _ = zip(*claims, strict=True)
    codes = tuple([CLAIMED_ONCE if once else CLAIMED for once in onces])
    prints, holders = tuple([each or None for each in fingerprints]), tuple([each or None for each in owners])
    return [tuple(map(id_of, keys)), keys, prints, codes, leases, keeps, holders]


def add_encoded(claim: Claim) -> list[bytes | None]:
    """The same for one claim, as it travels. Written out, since every claim pays for it."""
    key, owner, fingerprint, lease, keep, once, _, _ = claim
    name = key.encode()
    code = _ENCODED_ONCE if once else _ENCODED
    digest = sha256(name).digest()[:16]
    return [digest, name, fingerprint or None, code, _float(lease), _float(keep), owner or None]


def end_values(completion: Completion) -> tuple[Any, ...]:
    """What is asked for when a claim is to be ended."""
    key, owner, fence, state, result, keep, _ = completion
    return id_of(key), owner, fence, state, result, keep


def end_encoded(completion: Completion) -> list[bytes | None]:
    """The same as it travels."""
    key, owner, fence, state, result, keep, _ = completion
    return [id_of(key), owner, _bigint(fence), _integer(state), result, _float(keep)]


def values_of(command: Claim | Completion) -> tuple[Any, ...]:
    """What is asked for on behalf of a command."""
    if type(command) is Claim:
        return tuple([value for (value,) in add_columns((command,))])
    return end_values(cast("Completion", command))


def encoded(command: Claim | Completion) -> list[bytes | None]:
    """The same as it travels."""
    return add_encoded(command) if type(command) is Claim else end_encoded(cast("Completion", command))


def _hold_values(renewal: Renewal) -> tuple[Any, ...]:
    key, owner, fence, lease, keep, _ = renewal
    return id_of(key), owner, fence, lease, keep


def _save_values(renewal: Renewal) -> tuple[Any, ...]:
    key, owner, fence, lease, keep, journal = renewal
    return id_of(key), owner, fence, lease, keep, journal


def _swap_values(before: Record, after: Record) -> tuple[Any, ...]:
    fence, _, state, expires_at, lease_until, _ = _columns(before)
    return id_of(before.key), fence, state, lease_until, expires_at, *_columns(after)


def _read_values(key: str) -> tuple[Any, ...]:
    return (id_of(key),)


def _columns(record: Record) -> tuple[Any, ...]:
    _, state, owner, fence, fingerprint, lease_until, attempts, result, expires_at, once = record
    return (
        fence, fingerprint or None, state + ONCE * once + ATTEMPT * attempts, expires_at, lease_until or None,
        (owner + (result or b"") or None) if state is PENDING else result,
    )  # fmt: skip


def record_of(key: str, row: Row) -> Record:
    """The record that a row holds, in the columns after its first."""
    return _record(key, *row[1:7])


def found(key: str, row: Row) -> Found:
    """The same, with the clock in the last column."""
    _, code, fence, lease_until, expires_at, fingerprint, content, now = row
    return make(Found, (_record(key, code, fence, lease_until, expires_at, fingerprint, content), now))


def _record(
    key: str,
    code: int,
    fence: int,
    lease_until: float | None,
    expires_at: float,
    fingerprint: bytes | None,
    content: bytes | None,
) -> Record:
    try:
        state, once = STATES[code & IN_STATE]
    except KeyError:
        raise StoreMismatch(
            f"A record is in state {code}, which this effectonce does not know. Use a newer one."
        ) from None
    owner, result = NOBODY, content
    if state is PENDING and content is not None:
        owner, result = content[:OWNER_SIZE], content[OWNER_SIZE:] or None
    fields = (
        key, state, owner, fence, fingerprint or b"", lease_until or 0.0, code // ATTEMPT, result, expires_at, once,
    )  # fmt: skip
    return make(Record, fields)


def added_or_found(key: str, row: Row) -> Any:
    """What became of a claim's first step."""
    if row[1] is not None:
        return found(key, row)
    fence = row[2]
    return AGAIN if fence is None else make(Added, (fence, fence / MICROS))


def latest(rows: Sequence[Row]) -> Row:
    """The row that counts, of those that a key has.

    There is more than one only in a table that rotates, after the server's clock was set back: then what had expired,
    and was claimed anew since, is there once more.
    """
    return max(rows, key=_fence)


def _fence(row: Row) -> int:
    return cast("int", row[2])


def _each(values: Callable[..., tuple[Any, ...]]) -> Callable[[Iterable[Any]], Sequence[tuple[Any, ...]]]:
    """Columns of the values that each step has by what it is about."""
    return lambda steps: list(zip(*starmap(values, steps), strict=True))


KINDS: dict[type, Kind] = {
    Add: Kind("add", lambda steps: add_columns([claim for (claim,) in steps]), added_or_found, AGAIN),
    End: Kind("end", _each(end_values), lambda key, row: DONE, LOOK),
    Hold: Kind("hold", _each(_hold_values), lambda key, row: DONE, LOOK),
    Save: Kind("save", _each(_save_values), lambda key, row: DONE, LOOK),
    Swap: Kind("swap", _each(_swap_values), lambda key, row: True, False),
    Read: Kind("read", _each(_read_values), found, NOTHING),
}
"""In the order in which they go."""
CLAIMS: Final = (Add, Swap)
"""Steps that don't wait until somebody's transaction is over."""
PARTS: Final = 8


def _shared(step: Step, reply: Any) -> Any:
    """The reply to another step of the same kind for the same key, just after this one; AGAIN if it has to be sent."""
    if type(step) is Add and type(reply) is Added:
        return Found(decide_claim(None, step.claim, reply.now, reply.fence - 1).record, reply.now)
    return reply if type(reply) is Found and type(step) in (Add, Read) else AGAIN


class Group(NamedTuple):
    """Steps of one kind, which go as the rows of one statement, in the order of their keys."""

    kind: Kind
    keys: list[str]
    places: list[int]
    """Where each key's first step is. That one is sent."""
    others: list[tuple[int, int]]
    """Where other steps for the same keys are, each after the place of the one that is sent."""

    def call(self, sql: Statements, steps: Sequence[Step]) -> Call:
        """The statement that does them."""
        name, columns = self.kind.name, self.kind.columns([steps[place] for place in self.places])
        if len(self.places) == 1:
            return Call(sql.one[name], [value for (value,) in columns])
        return Call(sql.many[name], columns)

    @property
    def all_places(self) -> list[int]:
        """Where steps for these keys are, sent or not."""
        return self.places + [place for _, place in self.others]

    def apart(self) -> list[Sequence[int]]:
        """The places of those that go together after all were refused for one of them.

        Claims, which don't wait, in a few parts: one of many is to blame, as a rule, and each part is a commit.
        """
        places = self.all_places
        size = ceil(len(places) / PARTS) if self.kind in (KINDS[claim] for claim in CLAIMS) else 1
        return [places[start : start + size] for start in range(0, len(places), size)]

    def settle(self, rows: list[Row], steps: Sequence[Step], replies: list[Any]) -> None:
        """Put the replies in their places."""
        kind, keys, places, others = self
        if len(rows) < len(places):
            for place in places:
                replies[place] = kind.without_row
        elif len(rows) > len(places):
            rows = sorted(rows, key=_fence)
        reply_to = kind.reply
        for row in rows:
            number = row[0] - 1
            try:
                replies[places[number]] = reply_to(keys[number], row)
            except StoreMismatch as error:
                replies[places[number]] = error
        for first, place in others:
            replies[place] = _shared(steps[first], replies[first])


def grouped(steps: Sequence[Step], places: Iterable[int]) -> list[Group]:
    """The steps at these places by kind, and by key in the order that everyone keeps to, so that nobody deadlocks."""
    groups: dict[type, tuple[dict[str, int], list[tuple[int, int]]]] = {}
    for place in places:
        step = steps[place]
        kind = type(step)
        if kind not in groups:
            groups[kind] = {}, []
        firsts, others = groups[kind]
        about: Any = step[0]  # what a step is about begins with its key, or is one
        first = firsts.setdefault(about if kind is Read else about[0], place)
        if first != place:
            others.append((first, place))
    return [
        Group(kind, keys, list(map(firsts.__getitem__, keys)), others)
        for of, kind in KINDS.items()
        if of in groups
        for firsts, others in (groups[of],)
        for keys in (sorted(firsts),)
    ]
