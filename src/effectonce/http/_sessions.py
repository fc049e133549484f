"""Client sessions over HTTP: what a request's place is, what it is answered, and the path where clients register.

A covered request with ``Client-Id``, ``Request-Number`` and ``Acked-Through`` (and ``Client-Epoch`` after a restart) is
one of a session; every other goes by its Idempotency-Key. At the session path a client registers (POST), goes on after
a restart (POST with its id), keeps its session alive (PUT) and ends it (DELETE). The methods are coroutines in the
adapter's own colour, so that ASGI and WSGI share every line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .._attempt import Attempt
from .._colours import Colour
from .._messages import Outcome
from ..errors import BadRequest, Refused, StoreError, UsageError
from ..sessions import Opened, Request, Sessions
from ..sessions._request import ACKED, CLIENT, EPOCH, NUMBER
from ..sessions._server import sound
from ..stores import Store
from ._boundary import Boundary, Exchange
from ._exchange import ANSWER, Answer, Header, Problem, problem_of
from ._rules import Rules
from ._wishes import Wish

CLIENT_HEADER = CLIENT.lower().encode()
DEFAULT_PATH = "/session"


def request_in(headers: Mapping[str, str]) -> Request:
    """The place of a request that its headers tell. Raises ``Problem``."""
    try:
        return Request.from_headers(headers)
    except BadRequest as refused:
        raise Problem("request-invalid", str(refused)) from None


class SessionExchange(Exchange):
    """One request of a session, on its way through the flow."""

    def __init__(
        self,
        boundary: Boundary,
        rules: Rules,
        colour: Colour,
        request: Request,
        scope: str,
        sessions: Sessions,
    ) -> None:
        super().__init__(boundary, rules, colour, str(request.number), scope)
        self.flow, self._request, self._sessions = sessions.receiver.flow, request, sessions
        exposed = f"{NUMBER}, {rules.replayed_header}".encode()
        self.marks = (NUMBER.lower().encode(), self.key.encode()), (b"access-control-expose-headers", exposed)

    async def open(self, fingerprint: bytes) -> Answer | None:
        """Claim the number: the answer to give at once, or None if the handler has to run."""
        terms = sound(self.rules.terms)
        try:
            self.call = self._sessions.call_of(self._request, fingerprint, terms, ANSWER, self.scope)
        except BadRequest as refused:
            return self.given(Outcome("failed", error=refused))
        used = False
        try:
            if not self._share.take() and not await self._is_known():
                return self.first(self.quota.refusal().answer(self.rules.documentation))
            opened = await self.flow.open(self.colour, self.call)
            if not isinstance(opened, Attempt):
                return self.given(opened)
            used = True
        except Refused as refused:
            return self.given(self._sessions.refused(self.call, refused))
        except StoreError as error:
            return self.given(Outcome("store_error", error=error))
        finally:
            if not used:
                self._share.give_back()
        self.attempt, self.wish = opened, Wish()
        return None

    async def _is_known(self) -> bool:
        """Whether the number was used before, and so is no new one. It stays so until the client acknowledges it."""
        return await self.colour.store.get(self.call.key) is not None


class SessionPath:
    """The place where clients register."""

    def __init__(self, sessions: Sessions, path: str, boundary: Boundary) -> None:
        if not isinstance(sessions, Sessions):
            raise UsageError(f"sessions={sessions!r} are not Sessions. Write Sessions(receiver).")
        if not path.startswith("/"):
            raise UsageError(f"session_path={path!r} must begin with a slash.")
        self.sessions, self.path, self._boundary = sessions, path, boundary

    async def answer(self, store: Store, method: str, headers: Mapping[str, str], scope: str) -> Answer:
        """What a client gets there."""
        try:
            opened = await self._asked(store, method, headers, scope)
        except (Refused, StoreError) as error:
            problem = problem_of(error)
            if problem is None:
                raise
            return problem.answer()
        if opened is None:
            return Answer(204, ((b"cache-control", b"no-store"),), b"")
        return _told(201 if method == "POST" and CLIENT.lower() not in headers else 200, opened)

    async def _asked(
        self, store: Store, method: str, headers: Mapping[str, str], scope: str
    ) -> Opened | None:
        sessions = self.sessions
        client = headers.get(CLIENT.lower(), "")
        if method == "POST" and not client:
            self._count(scope)
            return await sessions._open(store, scope)
        acked, epoch = headers.get(ACKED.lower(), "0"), headers.get(EPOCH.lower(), "1")
        place = Request.from_headers({CLIENT: client, NUMBER: "1", ACKED: acked, EPOCH: epoch})
        kind = {"POST": "resume", "PUT": "touch", "DELETE": "end"}.get(method)
        if kind is None:
            raise BadRequest(
                "POST opens a session, or resumes the one of Client-Id; PUT keeps it; DELETE ends it."
            )
        opened = await sessions._contact(store, kind, client, scope, place.epoch, place.acked)
        return None if kind == "end" else opened

    def _count(self, scope: str) -> None:
        """A session takes room in the store, as a key does. Raises ``Problem``."""
        boundary = self._boundary
        limit = (boundary.rules_for("POST", self.path) or boundary.rules).max_new_keys
        if limit is not None and not boundary.quota.take(scope, limit):
            raise boundary.quota.refusal()


def _told(status: int, opened: Opened) -> Answer:
    body = json.dumps(opened._asdict()).encode()
    headers: tuple[Header, ...] = (
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"cache-control", b"no-store"),
    )
    return Answer(status, headers, body)


def opened_from(document: Any) -> Opened:
    """What a client reads from the answer at the session path."""
    try:
        opened = Opened(**{name: document[name] for name in Opened._fields})
        if type(opened.client) is str and opened.client and type(opened.epoch) is int:
            return opened
    except (TypeError, KeyError):
        pass
    raise UsageError("This is not the answer of a session path. Check its URL.")
