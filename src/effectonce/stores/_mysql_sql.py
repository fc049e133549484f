"""What is said to a MySQL or MariaDB server about one table, whichever driver carries it. No I/O here.

A talk is a generator: it yields statements, which go to the server in one packet, and gets a result for each of them.
So blocking and asyncio callers share every line. A server that refuses a statement does none of those that follow it,
and the talk hears a ``Refusal`` where it yielded. The talks about steps are in ``_mysql_steps``.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from hashlib import sha256
from typing import Any, Final, NamedTuple, TypeVar

from .._records import NOBODY, Record, State, make
from ..errors import StoreMismatch, StoreUnavailable, UsageError
from ._named import statements
from .base import StoreStats

T = TypeVar("T")

SCHEMA: Final = 1
OLDEST: Final = {"MariaDB": (10, 5), "MySQL": (8, 0)}
LONGEST_NAME: Final = 767
"""Bytes of a key that every server can index. A longer one is named by its beginning and its hash."""
PREPARED: Final = ("add_one", "end", "hold")
"""The usual steps. A MariaDB that has been told once how to do them takes half as long."""
STATES: Final = {b"%d" % state: state for state in State}

# Refusals, by the server's numbers.
LOCKED, LOCKED_NOW, DEADLOCK, ALREADY_THERE = 1205, 3572, 1213, 1050
"""The second is MySQL's, for whoever would not wait."""
UNFIT: Final = {1264, 1366, 1367, 1406, 1690}
GRANT: Final = "Grant this user SELECT, INSERT, UPDATE and DELETE on the table."
MISMATCHES: Final = {
    1054: "Is the table the one that this effectonce made?",
    1142: GRANT,
    1143: GRANT,
    1146: "It was there before: find out who dropped it. Without it nobody knows what has happened already.",
    1665: "Set the server's binlog_format to ROW or MIXED.",
}
ADVICE: Final = {
    1021: "Its disk is full; make room, then try again.",
    1114: "Its disk is full; make room, then try again.",
    LOCKED: "Another session has held a lock on the record for long; SHOW ENGINE INNODB STATUS says which.",
    DEADLOCK: "Too many sessions want the same records; try again.",
}


class Refusal(Exception):
    """The server answered a statement with an error; the connection is as good as before."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Lost(Exception):
    """There is no connection, or no longer. What was on its way may have been done or not."""


class TimedOut(Lost):
    """The server did not answer in time, so that connection was given up."""


Row = Sequence[Any]
"""Values as the server writes them, bytes or None. Which is what is known from the statement."""


class Result(NamedTuple):
    """What one statement came to."""

    changed: int
    rows: Sequence[Row]
    clock: int = 0
    """What the statement gave to LAST_INSERT_ID, if it did."""


class Server(NamedTuple):
    """What has to be known of a server to speak with it."""

    is_mariadb: bool
    """Its INSERT can return rows, its EXECUTE takes values, and its VALUES need no ROW."""
    largest_packet: int


Talk = Generator[list[str], list[Result], T]


# Literals and rows. Bytes travel in hexadecimal, which needs no escaping.


def binary(value: bytes | None) -> str:
    """A literal for bytes."""
    return "NULL" if value is None else f"X'{value.hex()}'"


def double(value: float) -> str:
    """A literal for a number that is not a decimal, as it would be without an exponent."""
    text = repr(value)
    if "n" in text:
        raise UsageError(f"{text} seconds can't be stored.")
    return text if "e" in text else text + "e0"


def name_of(key: str) -> bytes:
    """What a key is indexed by. No key's own UTF-8 has the byte that stands before the hash."""
    name = key.encode()
    if len(name) > LONGEST_NAME:
        name = name[: LONGEST_NAME - 33] + b"\xff" + sha256(name).digest()
    return name


def read_record(row: Row) -> tuple[int, Record]:
    """The clock in microseconds, and a record."""
    now, state, once, attempts, fence, lease, expiry, owner, fingerprint, key, result = row
    try:
        fields = (
            key.decode(), STATES[state], owner or NOBODY, int(fence), fingerprint, float(lease or 0), int(attempts),
            result, float(expiry), once == b"1",
        )  # fmt: skip
    except (KeyError, ValueError):
        raise StoreMismatch(
            f"A record reads {row[1:-1]}, which makes no sense to this effectonce. Use the one that wrote it, or newer."
        ) from None
    return int(now), make(Record, fields)


class Language:
    """The statements about one table, and the talks that are not about steps."""

    def __init__(self, table: str) -> None:
        self.table = table
        self.sql = _named(table, f"`{table}`")

    def in_session_of_others(self, database: str) -> dict[str, str]:
        """The statements for a connection that is somebody else's: whose current database may be another one, and
        whose LAST_INSERT_ID() is not ours to set.
        """
        named = _named(self.table, "`" + database.replace("`", "``") + f"`.`{self.table}`")
        clock = named["clock"]
        spoken = {
            f"LAST_INSERT_ID({clock})": clock, "LAST_INSERT_ID()": clock,
            "DATABASE()": f"CONVERT({binary(database.encode())} USING utf8mb4)",
        }  # fmt: skip
        for part, text in spoken.items():
            named = {name: body.replace(part, text) for name, body in named.items()}
        return named

    # The server and the table

    def greet(self, durable: bool) -> Talk[Server]:
        """Set up a new connection, and see whom it speaks to."""
        *_, result = yield [*self.sql["session"].split(";"), self.sql["server"]]
        version, largest_packet, is_durable = (value.decode() for value in result.rows[0])
        kind = "MariaDB" if "mariadb" in version.lower() else "MySQL"
        numbers = re.match(r"(\d+)\.(\d+)", version)
        if numbers is None or tuple(map(int, numbers.groups())) < OLDEST[kind]:
            raise StoreMismatch(
                f"The server is {kind} {version}. MySQL 8.0 and MariaDB 10.5 are the oldest that will do."
            )
        if durable and is_durable != "1":
            raise StoreMismatch(
                "The server may forget what it has acknowledged when its machine loses power: set "
                "innodb_flush_log_at_trx_commit = 1, and sync_binlog = 1 if it writes a binary log. If that is meant, "
                "say so with durability=server."
            )
        return Server(kind == "MariaDB", int(largest_packet))

    def find_table(self, create: bool) -> Talk[bool]:
        """Make sure that the table is there and ours; whether it had to be made."""
        if (yield from self._is_there()):
            return False
        if not create:
            raise StoreMismatch(
                f"There is no table {self.table} in this database. Run `effectonce migrate URL` as a user who may "
                "create it, or leave out create=no."
            )
        try:
            yield [self.sql["schema"]]
            made = True
        except Refusal as refusal:
            made = False
            if refusal.code != ALREADY_THERE:  # not just now by another process
                raise StoreMismatch(
                    f"There is no table {self.table}, and this user can't create it: {refusal} (error {refusal.code}). "
                    "Have somebody who may run `effectonce migrate URL`."
                ) from refusal
        if not (yield from self._is_there()):
            raise StoreMismatch(f"There is a table {self.table}, but this user may not see it. {GRANT}")
        return made

    def _is_there(self) -> Talk[bool]:
        (result,) = yield [self.sql["whose"]]
        for row in result.rows:
            engine, comment = ((value or b"").decode() for value in row)
            self.check(engine, comment)
        return bool(result.rows)

    def check(self, engine: str, comment: str) -> None:
        """Raise if a table of this kind, with this comment, is not one that this store can trust."""
        ours = re.match(r"effectonce schema (\d+)\b", comment)
        if ours is None:
            raise StoreMismatch(
                f"The table {self.table} belongs to another program. Nothing was changed. Choose another name with "
                "?table=."
            )
        if int(ours[1]) > SCHEMA:
            raise StoreMismatch(
                f"The table {self.table} has schema {ours[1]}, this effectonce knows {SCHEMA}. Nothing was changed. "
                "Use the effectonce that made it, or newer."
            )
        if engine != "InnoDB":
            raise StoreMismatch(
                f"The table {self.table} is kept by {engine}, which has no transactions. Nothing was changed. Move it: "
                f"ALTER TABLE {self.table} ENGINE = InnoDB."
            )

    def teach(self, server: Server) -> Talk[None]:
        """Tell a MariaDB how to do the usual steps."""
        if server.is_mariadb:
            texts = {name: self.sql[name].replace("%s", "?").replace("'", "''") for name in PREPARED}
            yield [f"PREPARE effectonce_{name} FROM '{text}'" for name, text in texts.items()]

    # Questions

    def scan(self, state: State | None, after: str, limit: int) -> Talk[list[Record]]:
        """Records in key order; keys too long for the index that begin alike are in some order."""
        place = binary(name_of(after))
        if state is None:
            (result,) = yield [self.sql["scan"] % (place, limit)]
        else:
            (result,) = yield [self.sql["scan_state"] % (place, int(state), limit)]
        return [read_record(row)[1] for row in result.rows]

    def now(self) -> Talk[float]:
        """The server's clock."""
        (result,) = yield [self.sql["now"]]
        return int(result.rows[0][0]) / 1e6

    def stats(self) -> Talk[StoreStats]:
        """Count what is there."""
        census, size = yield [self.sql["census"], self.sql["size"]]
        counts = {STATES[state]: int(count) for state, count, _, _ in census.rows}
        leases = {STATES[state]: lease for state, _, _, lease in census.rows}
        return StoreStats(
            keys=sum(counts.values()),
            bytes=int(size.rows[0][0]),
            by_state={state.name: count for state, count in counts.items()},
            oldest_pending_lease=float(leases[State.PENDING]) if State.PENDING in leases else None,
            expired=sum(int(expired) for _, _, expired, _ in census.rows),
        )

    def translated(self, refusal: Refusal) -> Exception:
        """An error of the tree that says what to do."""
        what = f"The server refused a command on {self.table}: {refusal} (error {refusal.code})."
        if refusal.code in UNFIT:
            return UsageError(f"{what} Nothing was changed; a value does not fit.")
        if refusal.code in MISMATCHES:
            return StoreMismatch(f"{what} {MISMATCHES[refusal.code]}")
        return StoreUnavailable(f"{what} {ADVICE.get(refusal.code, 'Try again.')}")


def _named(name: str, table: str) -> dict[str, str]:
    """All statements about one table, by name."""
    named = {each: _bare(text) for each, text in statements("mysql.sql").items()}
    named["schema"] = _bare(statements("mysql.sql")["schema"], between="\n")
    record, clock = named["record"], named["clock"]
    parts = {
        "{record}": record % clock, "{record_added}": record % "LAST_INSERT_ID()", "{clock}": clock,
        "{table}": table, "{name}": name,
    }  # fmt: skip
    for part, text in parts.items():
        named = {each: body.replace(part, text) for each, body in named.items()}
    named["add_one"] = f"{named['at_once']} {named['add'] % named['new']} {named['returning']}"
    return named


def _bare(text: str, between: str = " ") -> str:
    """A statement without comments, which would travel with it every time."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("--")]
    return between.join(line.strip() if between == " " else line for line in lines).rstrip(";")
