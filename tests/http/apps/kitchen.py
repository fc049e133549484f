"""What the apps under test do, whatever framework they are written in.

``/{rules}/{what}?n={name}`` does ``what`` under the rules of ``ROUTES``, and causes the effect ``name``. An app only
translates its framework's requests into ``cook``, and what that gives into its framework's responses.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from tests.http.world import FOLDER, effect, refuses

from effectonce import NotApplied, Policy, Receiver, current
from effectonce._records import Claim, Completion, Decision, Ending, Record, Renewal, State
from effectonce.errors import StoreUnavailable
from effectonce.http import Request, Route, no_store, nothing_happened, remember
from effectonce.stores import Store, StoreStats
from effectonce.stores.sqlite import SQLiteStore

PIECES, PIECE_SIZE = 20, 1000
HUGE = 3 << 19
"""1.5 MiB: more than is remembered."""
SMALL_REQUEST, SMALL_RESPONSE = 100_000, 10_000
LEASE_SECONDS = 1.0


class NoAnswer(Exception):
    """A handler's call downstream came to no end that it knows of."""


class Dish(NamedTuple):
    """A response. ``pieces`` are sent one by one, ``body`` at once."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes = b""
    pieces: Iterable[bytes] | None = None


TEXT = ("Content-Type", "text/plain; charset=utf-8")


def cook(what: str, name: str, body: bytes) -> Dish:
    """Do something, once more."""
    return MENU[what](effect(name), body)


def _status(status: int, *headers: tuple[str, str]) -> Callable[[int, bytes], Dish]:
    def dish(number: int, body: bytes) -> Dish:
        return Dish(status, [TEXT, *headers], b"" if status in (204, 303) else b"number %d" % number)

    return dish


def _pay(number: int, body: bytes) -> Dish:
    digest = sha256(body).hexdigest()
    return Dish(201, [TEXT, ("X-Number", str(number))], f"{number} {len(body)} {digest}".encode())


def _headers(number: int, body: bytes) -> Dish:
    headers = [
        TEXT,
        ("X-Part", "first"),
        ("X-Other", "between"),
        ("X-Part", "second"),
        ("Set-Cookie", "session=secret; Path=/"),
        ("WWW-Authenticate", 'Basic realm="one login"'),
        ("Location", "/payments/1"),
    ]
    return Dish(200, headers, b"with headers")


def _pieces(number: int, body: bytes) -> Dish:
    return Dish(200, [TEXT], pieces=(b"%04d" % at * (PIECE_SIZE // 4) for at in range(PIECES)))


def _huge(number: int, body: bytes) -> Dish:
    return Dish(200, [TEXT], pieces=(b"x" * (HUGE // 24) for _ in range(24)))


def _large(number: int, body: bytes) -> Dish:
    return Dish(200, [TEXT, ("Content-Length", str(HUGE))], b"x" * HUGE)


def _just(number: int, body: bytes) -> Dish:
    return Dish(200, [TEXT], b"x" * int(body))


def _flood(number: int, body: bytes) -> Dish:
    piece = b"x" * (1 << 16)
    return Dish(200, [TEXT], pieces=(piece for _ in range(int(body))))


def _events(number: int, body: bytes) -> Dish:
    return Dish(
        200, [("Content-Type", "text/event-stream")], pieces=(b"data: %d\n\n" % at for at in range(3))
    )


def _raise(number: int, body: bytes) -> Dish:
    raise RuntimeError("the handler has a bug")


def _time_out(number: int, body: bytes) -> Dish:
    raise NoAnswer("nobody knows whether it happened")


def _not_applied(number: int, body: bytes) -> Dish:
    raise NotApplied("nothing happened")


def _break_off(number: int, body: bytes) -> Dish:
    def pieces() -> Iterator[bytes]:
        yield b"the first piece"
        raise RuntimeError("the handler has a bug in its stream")

    return Dish(200, [TEXT], pieces=pieces())


def _inject(number: int, body: bytes) -> Dish:
    return Dish(200, [TEXT, ("X-Note", "a\r\nX-Injected: b")], b"")


def _secret(number: int, body: bytes) -> Dish:
    no_store()
    return Dish(200, [TEXT], b"shown once")


def _briefly(number: int, body: bytes) -> Dish:
    remember(keep="1ms")
    return Dish(200, [TEXT], b"number %d" % number)


def _undone(number: int, body: bytes) -> Dish:
    nothing_happened()
    return Dish(200, [TEXT], b"number %d" % number)


def _attempt(number: int, body: bytes) -> Dish:
    attempt = current()
    return Dish(200, [TEXT], f"{attempt.key} {attempt.fence} {attempt.key_for('bank')}".encode())


MENU: dict[str, Callable[[int, bytes], Dish]] = {
    "pay": _pay,
    "headers": _headers,
    "pieces": _pieces,
    "huge": _huge,
    "large": _large,
    "just": _just,
    "flood": _flood,
    "events": _events,
    "raise": _raise,
    "time-out": _time_out,
    "not-applied": _not_applied,
    "break-off": _break_off,
    "inject": _inject,
    "secret": _secret,
    "briefly": _briefly,
    "undone": _undone,
    "attempt": _attempt,
    "ready": _status(200),
    **{
        str(status): _status(status)
        for status in (200, 202, 204, 400, 401, 402, 404, 408, 409, 425, 429, 500, 503)
    },
    "303": _status(303, ("Location", "/elsewhere")),
}


# -- The boundary --------------------------------------------------------------------------------------------------


def caller(request: Request) -> str:
    """Whose key it is: the scope function of every app under test."""
    return request.headers.get("x-caller", "somebody")


def natural_key(request: Request, body: bytes) -> str | None:
    """The order that a body names, if it does."""
    word, _, order = body.decode().partition(" ")
    return order if word == "order" else None


ROUTES = [
    Route("/uncovered/**", covered=False),
    Route("/optional/**", required=False),
    Route("/strict/**", strict=True),
    Route("/all/**", methods={"POST", "PATCH", "PUT", "DELETE"}),
    Route("/natural/**", key=natural_key),
    Route("/json/**", fingerprint="json"),
    Route("/wait/**", busy="wait"),
    Route("/early/**", busy=425),
    Route("/accepted/**", busy=202),
    Route("/lease/**", busy="wait", policy=Policy(lease=LEASE_SECONDS)),
    Route("/late/**", busy="wait", policy=Policy(lease=2 * LEASE_SECONDS)),
    Route("/once/**", busy="wait", policy=Policy(lease=LEASE_SECONDS, on_crash="in_doubt")),
    Route("/remember/**", on_server_error="remember"),
    Route("/doubt/**", on_server_error="in_doubt"),
    Route("/challenge/**", not_yet=(401,)),
    Route("/types/**", policy=Policy(in_doubt=(NoAnswer,))),
    Route("/small/**", max_request=SMALL_REQUEST, max_response=SMALL_RESPONSE),
    Route("/stripe/**", replayed_header="Idempotent-Replayed"),
    Route("/open/**", policy=Policy(fallback="open")),
]
"""Everything else, such as ``/plain/…``, has the rules as they are without a word."""


class Breakable(Store):
    """A store that refuses what the world says, and tells it of renewals."""

    def __init__(self, store: Store) -> None:
        self._store, self.features = store, store.features

    def for_blocking(self) -> Store:
        return Breakable(self._store.for_blocking())

    def for_asyncio(self) -> Store:
        return Breakable(self._store.for_asyncio())

    async def claim(self, claim: Claim) -> Decision:
        _check("claim")
        return await self._store.claim(claim)

    async def complete(self, completion: Completion) -> Ending:
        _check("complete")
        return await self._store.complete(completion)

    async def renew(self, renewal: Renewal) -> bool:
        return await self._store.renew(renewal)

    async def renew_many(self, renewals: Sequence[Renewal]) -> list[bool]:
        held = await self._store.renew_many(renewals)
        for renewal in renewals:
            effect(f"renewed {renewal.key.rpartition('|')[2]}")
        return held

    async def get(self, key: str) -> Record | None:
        return await self._store.get(key)

    async def purge(self, limit: int = 256) -> int:
        return await self._store.purge(limit)

    async def scan(self, state: State | None = None, after: str = "", limit: int = 256) -> list[Record]:
        return await self._store.scan(state, after, limit)

    async def now(self) -> float:
        return await self._store.now()

    async def stats(self) -> StoreStats:
        return await self._store.stats()

    def close(self) -> None:
        self._store.close()


def _check(verb: str) -> None:
    if refuses(verb):
        raise StoreUnavailable(f"The store refuses to {verb}.", retry_after=7.0)


def open_receiver() -> Receiver:
    """The receiver of a process under test; all of one world share a file."""
    store = SQLiteStore(Path(os.environ[FOLDER]) / "effects.db")
    return Receiver(Breakable(store), breaker=None)


def boundary() -> dict[str, Any]:
    """What every adapter is told."""
    return {"scope": caller, "routes": ROUTES}
