"""Connections to a MySQL or MariaDB server: PyMySQL's for threads, asyncmy's for event loops.

A line is one connection; it is used by one caller at a time and stays open. ``Lines`` carries talks over lines, in
coroutines that never suspend where a thread waits for the answers itself. What a driver raises is one of three things
here: the server's ``Refusal``, a ``Lost`` connection, or one that ``TimedOut``.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from importlib import import_module
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from ..errors import MissingExtra, StoreMismatch, StoreUnavailable, UsageError
from ._mysql_sql import LOCKED, LOCKED_NOW, Lost, Refusal, Result, Server, Talk, TimedOut

T = TypeVar("T")

MULTI_STATEMENTS: Final = 1 << 16
"""The client's word that a packet may hold several statements."""
FAREWELLS: Final = {1053, 1079, 1152, 1158, 1159, 1160, 1161, 1184, 1243, 1927, 3169, 4031}
"""Errors with which a server ends a connection, or says that it has forgotten what it was told on it."""
TURNED_AWAY: Final = {1044, 1045, 1049, 1130, 1698}
READ_ONLY: Final = {1290, 1792, 1836}
"""A replica, or a primary that is one no longer: this connection leads to the wrong place."""

# MySQL's protocol, as far as it is read here.
QUERY: Final = b"\0\3"
"""The first packet of an exchange, and what it is."""
QUIT: Final = b"\1\0\0\0\1"
OK, NULL, END, ERROR = 0x00, 0xFB, 0xFE, 0xFF
END_LENGTH: Final = 9
"""What is longer is a row that begins with a large value."""
LARGEST: Final = (1 << 24) - 1
"""A packet of this size goes on in the next."""
NUMBER_SIZES: Final = {0xFC: 2, 0xFD: 3, 0xFE: 8}
MORE_RESULTS: Final = 8


class Address(NamedTuple):
    """Where the server is, and as whom to speak to it."""

    host: str
    port: int
    user: str | None
    password: str
    database: str
    socket: str | None
    tls: str
    tls_ca: str | None
    timeout: float

    def __repr__(self) -> str:
        """Debuggers and error trackers show what variables hold; the password is not theirs to show."""
        return f"<{self.shown}>"

    @property
    def shown(self) -> str:
        """Enough to recognise it by."""
        return f"{self.database} at {self.socket or f'{self.host}:{self.port}'}"

    def options(self) -> dict[str, Any]:
        """What both drivers understand."""
        options: dict[str, Any] = {
            "host": self.host, "port": self.port, "user": self.user, "password": self.password.encode(),
            "database": self.database, "unix_socket": self.socket, "charset": "utf8mb4", "autocommit": True,
            "client_flag": MULTI_STATEMENTS, "connect_timeout": self.timeout, "program_name": "effectonce",
        }  # fmt: skip
        if self.tls != "no":
            options["ssl"] = self._context()
        return options

    def _context(self) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(cafile=self.tls_ca)
        except OSError as error:
            raise UsageError(f"tls_ca={self.tls_ca!r} is no file with certificates: {error}.") from None
        if self.tls == "yes":
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


def driver(name: str) -> Any:
    """A driver's module, imported when it is needed."""
    try:
        return import_module(name)
    except ImportError as error:
        raise MissingExtra(
            f"A mysql:// or mariadb:// store needs {name}. Install effectonce[mysql]."
        ) from error


class Line(Protocol):
    """One connection."""

    server: Server

    async def ask(self, said: list[str]) -> list[Result]:
        """Send statements in one packet, and give their results."""
        ...

    def close(self) -> None:
        """Hang up."""


class ThreadLine:
    """PyMySQL's connection. Its coroutines never suspend.

    PyMySQL connects and sends. Results are read here, because it takes longer over the descriptions of eleven columns
    than the server takes over everything, and what they hold is known.
    """

    server: Server

    def __init__(self, address: Address) -> None:
        pymysql = driver("pymysql")
        # Not pymysql.err's: posing as MySQLdb puts another module there.
        self._errors: Any = pymysql.MySQLError
        seconds = {"read_timeout": address.timeout, "write_timeout": address.timeout}
        try:
            self._connection: Any = pymysql.connect(
                **address.options(), **seconds, ssl_disabled=address.tls == "no"
            )
        except self._errors as error:
            raise heard(error) from error
        self._read: Callable[[int], bytes] = self._connection._rfile.read

    async def ask(self, said: list[str]) -> list[Result]:
        return self.ask_now(";".join(said))

    def ask_now(self, text: str) -> list[Result]:
        """The same, without a coroutine."""
        results: list[Result] = []
        try:
            self._send(text.encode())
            while self._take(results) & MORE_RESULTS:
                pass
        except self._errors as error:
            raise heard(error) from error
        except TimeoutError as error:
            raise TimedOut("it took too long") from error
        except (OSError, IndexError, ValueError) as error:
            raise Lost(str(error)) from error
        return results

    def close(self) -> None:
        with suppress(self._errors):  # what broke it has closed it
            self._connection.close()

    def _send(self, text: bytes) -> None:
        size = len(text) + 1
        if size < LARGEST:
            self._connection._sock.sendall(size.to_bytes(3, "little") + QUERY + text)
        else:
            self._connection._execute_command(QUERY[1], text)

    def _take(self, results: list[Result]) -> int:
        """Take in the result of one statement, and give the server's status after it."""
        packet = self._packet()
        if packet[0] == OK:
            changed, place = _length(packet, 1)
            clock, place = _length(packet, place)
            results.append(Result(changed, (), clock))
            return packet[place]
        read = self._read
        for _ in range(packet[0] + 1):  # the descriptions, and their end
            head = read(4)
            read(head[0] | head[1] << 8)
        rows: list[list[bytes | None]] = []
        while (packet := self._packet())[0] != END or len(packet) >= END_LENGTH:
            rows.append(_values(packet))
        results.append(Result(len(rows), rows))
        return packet[3]

    def _packet(self) -> bytes:
        packet = part = self._part()
        while len(part) == LARGEST:
            part = self._part()
            packet += part
        if packet[0] == ERROR:
            raise meaning(int.from_bytes(packet[1:3], "little"), packet[9:].decode(errors="replace"))
        return packet

    def _part(self) -> bytes:
        head = self._read(4)
        size = int.from_bytes(head[:3], "little")
        part = self._read(size)
        if len(head) < 4 or len(part) < size:
            raise ConnectionError("it hung up")
        return part


def _length(packet: bytes, place: int) -> tuple[int, int]:
    """A number of one to nine bytes, and where it ends."""
    first = packet[place]
    if first < 0xFB:
        return first, place + 1
    size = NUMBER_SIZES[first]
    return int.from_bytes(packet[place + 1 : place + 1 + size], "little"), place + 1 + size


def _values(packet: bytes) -> list[bytes | None]:
    values: list[bytes | None] = []
    place, end = 0, len(packet)
    while place < end:
        size = packet[place]
        if size < 0xFB:
            start = place + 1
        elif size == NULL:
            values.append(None)
            place += 1
            continue
        else:
            size, start = _length(packet, place)
        place = start + size
        values.append(packet[start:place])
    return values


async def open_thread_line(address: Address) -> Line:
    """Connect, and wait for it."""
    return ThreadLine(address)


class LoopLine:
    """asyncmy's connection."""

    server: Server

    def __init__(self, connection: Any, errors: Any, timeout: float) -> None:
        self._connection, self._errors, self._timeout = connection, errors, timeout
        self._cursor: Any = connection.cursor()

    async def ask(self, said: list[str]) -> list[Result]:
        cursor = self._cursor
        try:
            async with asyncio.timeout(self._timeout):
                await cursor.execute(";".join(said))
                results = [Result(cursor.rowcount, await cursor.fetchall(), cursor.lastrowid)]
                while await cursor.nextset():
                    results.append(Result(cursor.rowcount, await cursor.fetchall(), cursor.lastrowid))
        except self._errors as error:
            raise heard(error) from error
        except TimeoutError as error:
            raise TimedOut("it took too long") from error
        except OSError as error:
            raise Lost(str(error)) from error
        return results

    def close(self) -> None:
        with suppress(RuntimeError):  # its loop is closed
            transport = self._connection._transport
            if transport is not None:
                transport.write(QUIT)
            self._connection.close()


async def open_loop_line(address: Address) -> Line:
    """Connect on the running loop."""
    asyncmy, errors = driver("asyncmy"), driver("asyncmy.errors").MySQLError
    try:
        async with asyncio.timeout(address.timeout):
            connection = await asyncmy.connect(**address.options(), conv={}, use_unicode=False)
    except errors as error:
        raise heard(error) from error
    except TimeoutError as error:
        raise TimedOut("it took too long to connect") from error
    except OSError as error:
        raise Lost(str(error)) from error
    return LoopLine(connection, errors, address.timeout)


def heard(error: Exception) -> Lost | Refusal:
    """What a driver's error means."""
    code, message = (*error.args, "", "")[:2]
    if isinstance(error.__context__, TimeoutError):
        return TimedOut("it took too long")
    return meaning(code, message) if isinstance(code, int) else Lost(str(error))


def meaning(code: int, message: str) -> Lost | Refusal:
    """What an error of the server means, or one that a driver gives such a number."""
    if code < 1000 or 2000 <= code < 3000 or code in FAREWELLS:
        return Lost(message or f"error {code}")
    if code in READ_ONLY:
        return Lost(f"it only reads at present: {message}")
    return Refusal(LOCKED if code == LOCKED_NOW else code, message)


class Lines:
    """Lines that are open and not in use, at most ``most`` of them, and talks over them.

    ``introduce`` is what is said first on a new one.
    """

    def __init__(
        self,
        connect: Callable[[Address], Awaitable[Line]],
        address: Address,
        introduce: Callable[[], Talk[Server]],
        most: int = 1,
    ) -> None:
        self._connect = connect
        self._address = address
        self._introduce = introduce
        self._most = most
        self._idle: list[Line] = []

    def ask_at_once(self, statement: str) -> Result | None:
        """Have one statement done on a thread's line to a MariaDB; None if none is open, or something is in the way.

        It can be said again then, in a talk. This is for what is said all the time: a talk costs as much as PyMySQL.
        """
        line = self._idle[-1] if self._idle else None
        if not isinstance(line, ThreadLine) or not line.server.is_mariadb:
            return None
        try:
            return line.ask_now(statement)[0]
        except Refusal:
            return None
        except BaseException as error:
            self.hang_up()
            if isinstance(error, TimedOut):
                raise self._unanswered(error) from error
            if not isinstance(error, Lost):
                raise
            return None

    async def carry(self, begin: Callable[[Server], Talk[T]]) -> T:
        """Have a talk. If a line broke while nobody used it, the talk is begun anew on another."""
        line = self._idle.pop() if self._idle else None
        is_new = line is None
        try:
            line = line or await self._open()
            answer = await _carried(line, begin(line.server))
        except BaseException as error:
            if line is not None:  # also after Ctrl-C or a cancellation: its answers are still on their way
                line.close()
            if not isinstance(error, Lost):
                raise
            if is_new or isinstance(error, TimedOut):
                raise self._unanswered(error) from error
        else:
            if len(self._idle) < self._most:
                self._idle.append(line)
            else:
                line.close()
            return answer
        self.hang_up()  # what broke this one broke them all
        return await self.carry(begin)

    def hang_up(self) -> None:
        """Close what is not in use."""
        while self._idle:
            self._idle.pop().close()

    def _unanswered(self, error: Lost) -> StoreUnavailable:
        return StoreUnavailable(
            f"{self._address.shown} gave no answer: {error}. Try again; asking twice does no harm."
        )

    async def _open(self) -> Line:
        try:
            line = await self._connect(self._address)
        except Refusal as refusal:
            advice = (
                "Check the URL's user, password and database."
                if refusal.code in TURNED_AWAY
                else "Try again."
            )
            raise StoreUnavailable(
                f"{self._address.shown} is not open to us: {refusal} (error {refusal.code}). {advice}"
            ) from refusal
        except RuntimeError as error:  # neither driver can give some kinds of passwords without help
            raise StoreMismatch(
                f"{self._address.shown} wants the password in another way: {error}. Use tls=yes, or install "
                "cryptography."
            ) from error
        try:
            line.server = await _carried(line, self._introduce())
        except BaseException:
            line.close()
            raise
        return line


async def _carried(line: Line, talk: Talk[T]) -> T:
    """Carry a talk to its end."""
    try:
        said = next(talk)
        while True:
            try:
                results = await line.ask(said)
            except Refusal as refusal:
                said = talk.throw(refusal)
            else:
                said = talk.send(results)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
