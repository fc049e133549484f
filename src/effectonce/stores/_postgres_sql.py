"""What the PostgreSQL store says to a server, whichever driver carries it: statements, and values in binary form."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from typing import Any, Final, NamedTuple, Protocol

from ..errors import StoreMismatch
from ._named import statements

OLDEST_SERVER: Final = 14
"""The oldest version that can walk through a range of a table's pages, as the purge does."""
STALE: Final = {"0A000", "25006", "26000"}
"""Refusals that are about the connection: a prepared statement that is gone or no longer fits, a server that has become
a standby."""

PATIENCE: Final = 60
"""How much longer than a usual command one that goes through a whole table may take."""

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


class Closed(Lost):
    """The store was closed."""


class TimedOut(Lost):
    """The server did not answer in time, so that connection was given up."""


class Wires(Protocol):
    """Connections in one colour."""

    async def run(self, calls: Sequence[Call], together: bool = False) -> Sequence[Answer]:
        """Have statements executed in one round trip, each a transaction of its own or all of them one."""
        ...

    def close(self) -> None:
        """Close them."""

    def forget(self) -> None:
        """Let go of them in a forked child."""


# How a session is set up. Without this a plan that was made while the table was small may be kept when it is not.

_PLANS = dict.fromkeys(
    ("enable_seqscan", "enable_bitmapscan", "enable_hashjoin", "enable_mergejoin", "jit"), "off"
)


LOCK_SECONDS: Final = 0.25
"""How long a statement waits for a row: those of other receivers hold one for less, others' transactions for ever."""
IMPATIENT: Final = "set_config('lock_timeout', '2', true) IS NOT NULL"
"""In a claim: it waits no longer than 2 ms, about as long as another's commit takes, because others may be waiting for
its connection. It is set before anything waits, and for this transaction, so that a pooler's next one knows nothing."""


def settings(seconds: float) -> dict[str, str]:
    """What is told to a server when a session begins. It gives up just before the client does."""
    return {
        **_PLANS,
        "plan_cache_mode": "force_generic_plan",
        "default_transaction_isolation": "read committed",
        "statement_timeout": str(int(900 * seconds)),
        "lock_timeout": str(int(1000 * min(LOCK_SECONDS, seconds / 2))),
    }


def check_version(major: int) -> None:
    """Raise if a server is too old."""
    if major < OLDEST_SERVER:
        raise StoreMismatch(
            f"The server is PostgreSQL {major}; effectonce needs {OLDEST_SERVER} or newer. Nothing was changed."
        )


# Parameters and results travel in PostgreSQL's binary form.

ENCODERS: dict[str, Callable[[Any], bytes]] = {
    "text": str.encode,
    "bytea": bytes,
    "uuid": bytes,
    "float8": struct.Struct(">d").pack,
    "bigint": struct.Struct(">q").pack,
    "integer": struct.Struct(">i").pack,
    "smallint": struct.Struct(">h").pack,
}
_OIDS = {"text": 25, "bytea": 17, "uuid": 2950, "float8": 701, "bigint": 20, "integer": 23, "smallint": 21}
LOADS: dict[int, Callable[[bytes], Any]] = {
    _OIDS["text"]: bytes.decode,
    _OIDS["bytea"]: bytes,
    _OIDS["float8"]: lambda data: struct.unpack(">d", data)[0],
    **{
        _OIDS[kind]: partial(int.from_bytes, byteorder="big", signed=True)
        for kind in ("bigint", "integer", "smallint")
    },
}
"""By the number that a column's type has there: what its values are."""
_LENGTH = struct.Struct(">i").pack
_NULL = _LENGTH(-1)


def _array_encoder(kind: str) -> Callable[[Sequence[Any]], bytes]:
    """One dimension that begins at 1 and may hold NULL."""
    encode, head = ENCODERS[kind], struct.pack(">iii", 1, 1, _OIDS[kind])

    def array(values: Sequence[Any]) -> bytes:
        count = len(values)
        if values.count(values[0]) == count:  # as leases, retentions and kinds of claims usually are
            body = item(values[0]) * count
        else:
            try:
                body = items(values if encode is bytes else list(map(encode, values)))
            except (TypeError, struct.error):  # one may be NULL
                body = b"".join(map(item, values))
        return head + struct.pack(">ii", count, 1) + body

    def items(data: Sequence[bytes]) -> bytes:
        sizes = set(map(len, data))
        if len(sizes) > 1:
            return b"".join([_LENGTH(len(datum)) + datum for datum in data])
        length = _LENGTH(sizes.pop())  # of one size, as ids, owners, numbers and most people's keys are
        return length + length.join(data)

    def item(value: Any) -> bytes:
        if value is None:
            return _NULL
        data = encode(value)
        return _LENGTH(len(data)) + data

    return array


class Statement:
    """A statement with a name to prepare it under. Every parameter is written with its type, such as ``$1::text``.

    Its text is part of its name. Behind a pooler a session may be another store's at other times; what has the same
    name there must be the same statement, or a record would go to that store's table.
    """

    __slots__ = ("_encoders", "formats", "name", "named", "sent", "text")

    def __init__(self, name: str, text: str) -> None:
        self.text, self.sent = text, text.encode()
        self.name = f"{name}_{sha256(self.sent).hexdigest()[:16]}".encode() if name else b""
        self.named = self.sent, self.name
        kinds = dict(re.findall(r"\$(\d+)::(\w+(?:\[\])?)", text))
        self._encoders = [
            _array_encoder(kind[:-2]) if kind.endswith("[]") else ENCODERS[kind]
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


# The end of a claim of the same transaction, for the two statements that say so.

_MINE: Final = (
    "record.state & 7 = 1 AND record.fence = $3::bigint AND substr(record.content, 1, 16) = $2::bytea"
)
_SETTLED: Final = """
    state = record.state & -8 | $4::integer, content = $5::bytea, lease_until = NULL,
    expires_at = date_part('epoch', clock_timestamp()) + $6::float8
"""

# What a table that rotates adds to them: postgres_rotating.sql says why.

_CURRENT: Final = """(
    SELECT slot FROM {ring} WHERE current_setting('transaction_isolation') LIKE 'read %'
    UNION ALL
    SELECT slot FROM (
        SELECT slot FROM {ring} WHERE current_setting('transaction_isolation') NOT LIKE 'read %' FOR SHARE
    ) AS held
)"""
_UNEXPIRED: Final = """(
    record.expires_at > date_part('epoch', clock_timestamp()) OR record.state & 7 = 4 OR record.state & 15 = 9
)"""

_BEGINS_ONLY: Final = "has_any_column_privilege(oid, 'INSERT') AND NOT has_table_privilege(oid, 'UPDATE')"
_IS_MEANT: Final = """EXISTS (
    SELECT FROM pg_proc AS beside
    WHERE beside.oid = to_regproc('{put}') AND {named}
)"""
"""Whether the function beside a table still writes there: it keeps to the old name when its schema gets a new one."""
_NAMED: Final = """strpos(
        replace(prosrc, '"', ''),
        replace('INSERT INTO ' || relnamespace::regnamespace || '.' || quote_ident(relname) || ' ', '"', '')
    ) > 0"""
"""By its text, which has quotes or not as that session wished that made it."""
_NAMED_BY_PATH: Final = """strpos(prosrc, 'INSERT INTO {table}') > 0 AND EXISTS (
        SELECT FROM unnest(proconfig) AS setting
        WHERE replace(setting, '"', '') = replace('search_path=' || relnamespace::regnamespace || ', pg_temp', '"', '')
    )"""
"""Or by a path of its own."""


class Statements:
    """The statements of one table: those for a step come for one record and for many.

    Those of a user's transaction are patient: its own settings say how long it waits, and must stay as they are.
    """

    def __init__(self, table: str, *, patient: bool = True, rotating: bool = False) -> None:
        self.channel = table.split('"')[-2]  # two schemas may share it: who is told in vain looks in vain
        stem = table[:-1]
        own = {
            "{follow}": ", slot = {current}" if rotating else "",
            "{and_unexpired}": " AND {unexpired}" if rotating else "",
            "{mine}": _MINE, "{settled}": _SETTLED, "{is_meant}": _IS_MEANT,
            "{begins_only}": _BEGINS_ONLY,
            "{named}": _NAMED_BY_PATH if rotating else _NAMED,
            "{current}": _CURRENT, "{unexpired}": _UNEXPIRED, "{hurries}": "false" if patient else "true",
            "{table}": table, "{put}": f'{stem}_put"', "{channel}": self.channel,
            "{may_wait}": "true" if patient else IMPATIENT,
            "{slot}": f"{stem}_", "{ring}": f'{stem}_ring"', "{sweep}": f'{stem}_sweep"', "{turn}": f'{stem}_turn"',
        }  # fmt: skip
        named = statements("postgres.sql") | (statements("postgres_rotating.sql") if rotating else {})
        for place, name in own.items():
            named = {statement: text.replace(place, name) for statement, text in named.items()}
        self.schema = named.pop("schema").rstrip(";").split(";\n\n")
        self.functions = [
            text for text in self.schema if re.search(r"(CREATE OR REPLACE|ALTER) FUNCTION", text)
        ]
        self.one: dict[str, Statement] = {}
        self.many: dict[str, Statement] = {}
        for name, text in named.items():
            head, _, body = text.partition("\n")
            if not head.startswith("-- asked: "):
                self.one[name] = Statement(f"effectonce_{name}", text)
                continue
            one, many = _asked(head.removeprefix("-- asked: "))
            if not name.endswith("_many"):
                self.one[name] = Statement(f"effectonce_{name}", body.replace("{asked}", one))
            if f"{name}_many" not in named:
                name = name.removesuffix("_many")
                self.many[name] = Statement(f"effectonce_{name}_many", body.replace("{asked}", many))


def _asked(columns: str) -> tuple[str, str]:
    """What is asked for as one row of parameters, and as many rows out of arrays."""
    pairs = [column.split() for column in columns.split(", ")]
    one = ", ".join(f"${number}::{kind} AS {name}" for number, (name, kind) in enumerate(pairs, 1))
    arrays = ", ".join(f"${number}::{kind}[]" for number, (_, kind) in enumerate(pairs, 1))
    names = ", ".join(name for name, _ in pairs)
    return (
        f"(SELECT {one}, 1 AS place) AS asked",
        f"unnest({arrays}) WITH ORDINALITY AS asked ({names}, place)",
    )
