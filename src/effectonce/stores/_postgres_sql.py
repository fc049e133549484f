"""What the PostgreSQL store says to a server, whichever driver carries it, and what it makes of a refusal."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any, Final, NamedTuple, Protocol

from .._protocol import decide_claim
from .._records import NOBODY, Claim, Completion, Record, State, make
from ..errors import EffectOnceError, InvalidKey, StoreMismatch, StoreUnavailable, UsageError
from ._named import statements
from ._steps import DONE, Add, Added, End, Found, Hold, Read, Step, Swap

SCHEMA: Final = 1
OLDEST_SERVER: Final = 14
"""The oldest version that can walk through a range of a table's pages, as the purge does."""
ENCODINGS: Final = ("UTF8", "SQL_ASCII")
"""Databases that keep every character of a key."""

PENDING, ONCE, IN_STATE, ATTEMPT = State.PENDING, 8, 15, 32
"""In the column ``state``: what is added for a claim at most once, what masks both, and what an attempt counts."""
CLAIMED, CLAIMED_ONCE = PENDING + ATTEMPT, PENDING + ONCE + ATTEMPT
STATES: Final = {int(state) + once: (state, once == ONCE) for state in State for once in (0, ONCE)}

MICROS: Final = 1_000_000
"""A new record's fence is the server's clock in millionths of a second."""

Row = tuple[Any, ...]
Values = Sequence[Any]


class Refusal(Exception):
    """The server answered a statement with an error; the connection is as good as before."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


Answer = list[Row] | Refusal


class Lost(Exception):
    """There is no connection, or no longer. What was on its way may have been done or not."""


class TimedOut(Lost):
    """The server did not answer in time, so that connection was given up."""


# How a session is set up. Without this a plan that was made while the table was small may be kept when it is not.

_PLANS = dict.fromkeys(
    ("enable_seqscan", "enable_bitmapscan", "enable_hashjoin", "enable_mergejoin", "jit"), "off"
)


def settings(seconds: float) -> dict[str, str]:
    """What is told to a server when a session begins. It gives up just before the client does."""
    return {
        **_PLANS,
        "plan_cache_mode": "force_generic_plan",
        "default_transaction_isolation": "read committed",
        "statement_timeout": str(int(900 * seconds)),
        "lock_timeout": str(int(500 * seconds)),
    }


def check_version(major: int) -> None:
    """Raise if a server is too old."""
    if major < OLDEST_SERVER:
        raise StoreMismatch(
            f"The server is PostgreSQL {major}; effectonce needs {OLDEST_SERVER} or newer. Nothing was changed."
        )


# Parameters and results travel in PostgreSQL's binary form.

_ENCODERS: dict[str, Callable[[Any], bytes]] = {
    "text": str.encode,
    "bytea": bytes,
    "uuid": bytes,
    "float8": struct.Struct(">d").pack,
    "bigint": struct.Struct(">q").pack,
    "integer": struct.Struct(">i").pack,
    "smallint": struct.Struct(">h").pack,
}
_OIDS = {"text": 25, "bytea": 17, "uuid": 2950, "float8": 701, "bigint": 20, "integer": 23, "smallint": 21}
_LENGTH = struct.Struct(">i").pack
_NULL = _LENGTH(-1)


def _array_encoder(kind: str) -> Callable[[Sequence[Any]], bytes]:
    """One dimension that begins at 1 and may hold NULL."""
    encode, head = _ENCODERS[kind], struct.pack(">iii", 1, 1, _OIDS[kind])

    def array(values: Sequence[Any]) -> bytes:
        count = len(values)
        if values.count(values[0]) == count:  # as leases, retentions and kinds of claims usually are
            body = item(values[0]) * count
        else:
            body = b"".join([item(value) for value in values])
        return head + struct.pack(">ii", count, 1) + body

    def item(value: Any) -> bytes:
        if value is None:
            return _NULL
        data = encode(value)
        return _LENGTH(len(data)) + data

    return array


class Statement:
    """A statement with a name to prepare it under. Every parameter is written with its type, such as ``$1::text``."""

    __slots__ = ("_encoders", "formats", "name", "text")

    def __init__(self, name: str, text: str) -> None:
        self.name = name.encode()
        self.text = text
        kinds = dict(re.findall(r"\$(\d+)::(\w+(?:\[\])?)", text))
        self._encoders = [
            _array_encoder(kind[:-2]) if kind.endswith("[]") else _ENCODERS[kind]
            for kind in (kinds[str(number + 1)] for number in range(len(kinds)))
        ]
        self.formats = [1] * len(kinds)

    def encoded(self, values: Values) -> list[bytes | None]:
        """Parameters as they travel."""
        try:
            return [
                None if value is None else encode(value)
                for encode, value in zip(self._encoders, values, strict=True)
            ]
        except (UnicodeError, struct.error, OverflowError) as error:
            raise Refusal("22000", f"a value can't be sent: {error}") from error


class Call(NamedTuple):
    """A statement with its parameters."""

    statement: Statement
    values: Values = ()


class Statements:
    """The statements of one table: those for a step come for one record and for many."""

    def __init__(self, table: str) -> None:
        put = f'{table[:-1]}_put"'
        named = {
            name: text.replace("{table}", table).replace("{put}", put)
            for name, text in statements("postgres.sql").items()
        }
        self.schema = named.pop("schema").rstrip(";").split(";\n\n")
        self.one: dict[str, Statement] = {}
        self.many: dict[str, Statement] = {}
        for name, text in named.items():
            head, _, body = text.partition("\n")
            if not head.startswith("-- asked: "):
                self.one[name] = Statement(f"effectonce_{name}", text)
                continue
            columns = [column.split() for column in head.removeprefix("-- asked: ").split(", ")]
            single = ", ".join(f"${n}::{kind} AS {column}" for n, (column, kind) in enumerate(columns, 1))
            arrays = ", ".join(f"${n}::{kind}[]" for n, (_, kind) in enumerate(columns, 1))
            names = ", ".join(column for column, _ in columns)
            rows = f"unnest({arrays}) WITH ORDINALITY AS asked ({names}, place)"
            self.one[name] = Statement(
                f"effectonce_{name}", body.replace("{asked}", f"(SELECT {single}, 1 AS place) AS asked")
            )
            self.many[name] = Statement(f"effectonce_{name}_many", body.replace("{asked}", rows))


# Steps and rows. What is empty in a record is NULL in a row, which takes no room.

AGAIN: Any = object()
"""In place of a reply: the step has to be sent again."""
LOOK: Any = object()
"""In place of a reply: the step was in vain, and the record has to be read."""
NOTHING = Found(None, 0.0)


class Kind(NamedTuple):
    """How a kind of step is put to the server, and what its answer means."""

    name: str
    values: Callable[[Any], tuple[Any, ...]]
    reply: Callable[[str, Row], Any]
    """What a row says of a key."""
    without_row: Any
    """The reply when there is no row."""


def id_of(key: str) -> bytes:
    """What a record is found by."""
    return sha256(key.encode("utf-8", "surrogatepass")).digest()[:16]


def add_values(claim: Claim) -> tuple[Any, ...]:
    """What is asked for when a claim's record is to be put in place."""
    key, owner, fingerprint, lease, keep, once, _, _ = claim
    return id_of(key), key, fingerprint or None, CLAIMED_ONCE if once else CLAIMED, lease, keep, owner or None


def end_values(completion: Completion) -> tuple[Any, ...]:
    """What is asked for when a claim is to be ended."""
    key, owner, fence, state, result, keep, _ = completion
    return id_of(key), owner, fence, state, result, keep


def _hold_values(step: Hold) -> tuple[Any, ...]:
    key, owner, fence, lease, keep = step.renewal
    return id_of(key), owner, fence, lease, keep


def _swap_values(step: Swap) -> tuple[Any, ...]:
    fence, _, state, expires_at, lease_until, _ = _columns(step.before)
    return id_of(step.key), fence, state, lease_until, expires_at, *_columns(step.after)


def _columns(record: Record) -> tuple[Any, ...]:
    _, state, owner, fence, fingerprint, lease_until, attempts, result, expires_at, once = record
    return (
        fence, fingerprint or None, state + ONCE * once + ATTEMPT * attempts, expires_at, lease_until or None,
        (owner or None) if state is PENDING else result,
    )  # fmt: skip


def record_of(key: str, row: Row) -> Record:
    """The record that a row holds, in the columns after its first."""
    _, code, fence, lease_until, expires_at, fingerprint, content = row[:7]
    try:
        state, once = STATES[code & IN_STATE]
    except KeyError:
        raise StoreMismatch(
            f"A record is in state {code}, which this effectonce does not know. Use a newer one."
        ) from None
    owner, result = (content or NOBODY, None) if state is PENDING else (NOBODY, content)
    fields = (
        key, state, owner, fence, fingerprint or b"", lease_until or 0.0, code // ATTEMPT, result, expires_at, once,
    )  # fmt: skip
    return make(Record, fields)


def _found(key: str, row: Row) -> Found:
    return Found(record_of(key, row), row[7])


def _added_or_found(key: str, row: Row) -> Any:
    if row[1] is not None:
        return Found(record_of(key, row), row[7])
    fence = row[2]
    return AGAIN if fence is None else Added(fence, fence / MICROS)


KINDS: dict[type, Kind] = {
    Add: Kind("add", lambda step: add_values(step.claim), _added_or_found, AGAIN),
    End: Kind("end", lambda step: end_values(step.completion), lambda key, row: DONE, LOOK),
    Hold: Kind("hold", _hold_values, lambda key, row: DONE, LOOK),
    Swap: Kind("swap", _swap_values, lambda key, row: True, False),
    Read: Kind("read", lambda step: (id_of(step.key),), _found, NOTHING),
}
"""In the order in which they go."""


def _shared(step: Step, reply: Any) -> Any:
    """The reply to another step of the same kind for the same key, just after this one; AGAIN if it has to be sent."""
    if type(step) is Add and type(reply) is Added:
        return Found(decide_claim(None, step.claim, reply.now, reply.fence - 1).record, reply.now)
    return reply if type(reply) is Found and type(step) in (Add, Read) else AGAIN


class Group(NamedTuple):
    """Steps of one kind, which go as the rows of one statement: the places of each key's steps. The first is sent."""

    kind: Kind
    keys: list[str]
    places: list[list[int]]

    def call(self, sql: Statements, steps: Sequence[Step]) -> Call:
        """The statement that does them."""
        name, values = self.kind.name, self.kind.values
        if len(self.places) == 1:
            return Call(sql.one[name], values(steps[self.places[0][0]]))
        rows = [values(steps[places[0]]) for places in self.places]
        return Call(sql.many[name], list(zip(*rows, strict=True)))

    def settle(self, rows: list[Row], steps: Sequence[Step], replies: list[Any]) -> None:
        """Put the replies in their places."""
        keys, reply_to = self.keys, self.kind.reply
        answers = [self.kind.without_row] * len(keys)
        for row in rows:
            number = row[0] - 1
            answers[number] = reply_to(keys[number], row)
        for places, reply in zip(self.places, answers, strict=True):
            replies[places[0]] = reply
            for place in places[1:]:
                replies[place] = _shared(steps[places[0]], reply)


def grouped(steps: Sequence[Step], places: Sequence[int]) -> list[Group]:
    """The steps at these places by kind, and by key in the order that everyone keeps to, so that nobody deadlocks."""
    groups: dict[type, dict[str, list[int]]] = {}
    for place in places:
        step = steps[place]
        groups.setdefault(type(step), {}).setdefault(step.key, []).append(place)
    return [
        Group(kind, keys, [groups[of][key] for key in keys])
        for of, kind in KINDS.items()
        if of in groups and (keys := sorted(groups[of]))
    ]


# The table: made when it is missing, and looked at before it is used.

ALREADY_THERE = {"42P07", "42710", "23505"}
"""Somebody else made the table at the same moment."""


class Run(Protocol):
    """Has statements executed, each a transaction of its own or all of them one."""

    async def __call__(self, calls: Sequence[Call], together: bool = False) -> Sequence[Answer]: ...


async def make_ready(sql: Statements, table: str, run: Run, *, create: bool) -> bool:
    """Make sure that the table is there and ours; whether it had to be made."""
    made = False
    while True:
        (answer,) = await run([Call(sql.one["whose"], (table,))])
        if isinstance(answer, Refusal):
            raise translated(answer, table)
        if answer:
            _check(table, *answer[0])
            return made
        if made or not create:
            raise StoreMismatch(
                f"There is no table {table} in this database. Run `effectonce migrate URL` with a role that may create "
                "it, or leave out create=no."
            )
        answers = await run([Call(Statement("", text)) for text in sql.schema], together=True)
        refusal = next((answer for answer in answers if isinstance(answer, Refusal)), None)
        if refusal is None:
            made = True
        elif refusal.code not in ALREADY_THERE:
            raise StoreMismatch(
                f"There is no table {table}, and it could not be created: {refusal}. Have a role that may do so run "
                "`effectonce migrate URL`, or the statements that `effectonce migrate --print URL` prints."
            )


def _check(table: str, comment: str | None, encoding: str) -> None:
    ours = re.match(r"effectonce schema (\d+)\b", comment or "")
    if ours is None:
        raise StoreMismatch(
            f"The table {table} belongs to another program. Nothing was changed. Choose another name with ?table=."
        )
    if int(ours[1]) > SCHEMA:
        raise StoreMismatch(
            f"The table {table} has schema {ours[1]}, this effectonce knows {SCHEMA}. Nothing was changed. Use the "
            "effectonce that made it, or newer."
        )
    if encoding not in ENCODINGS:
        raise StoreMismatch(
            f"The database's encoding is {encoding}, which can't hold every key. Use a database with encoding UTF8."
        )


# Refusals

TRY_AGAIN: Final = {"40001", "40P01"}
"""Serialization failure and deadlock: the statement did nothing and may be sent again."""
STALE: Final = {"0A000", "26000"}
"""A prepared statement that is no longer there, or no longer fits."""
ITS_OWN: Final = ("22", "54", "55")
"""Classes of refusals that are about one row: a value that does not fit, or a record that somebody keeps locked."""
_ADVICE = {
    "42501": "Grant this role SELECT, INSERT, UPDATE and DELETE on the table.",
    "42P01": "It was there before: find out who dropped it. Without it nobody knows what has happened already.",
}


def translated(refusal: Refusal, table: str) -> EffectOnceError:
    """An error of the tree that says what to do."""
    code, what = (
        refusal.code,
        f"PostgreSQL refused a command on {table}: {refusal} (SQLSTATE {refusal.code}).",
    )
    if code == "54000":
        return InvalidKey(
            f"{what} The key is too long for an index: shorten it, or use keys.content_id of it."
        )
    if code.startswith("22"):
        return UsageError(f"{what} Nothing was changed; a value does not fit.")
    if code.startswith("42"):
        return StoreMismatch(f"{what} {_ADVICE.get(code, 'Is the table the one that this effectonce made?')}")
    if code.startswith("53"):
        return StoreUnavailable(f"{what} The server is short of resources; make room, then try again.")
    if code == "25006":
        return StoreUnavailable(f"{what} This server is a standby; connect to the primary.")
    return StoreUnavailable(f"{what} Try again.")
