"""What HTTP clients of a session do before and after a request: give it its number, and hear what became of it."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from hashlib import sha256
from urllib.parse import SplitResult, urljoin, urlsplit

from ..errors import UsageError
from ..sessions import ClientSession, Request
from ..sessions._request import CLIENT, HEADERS, NUMBER
from ._retrying import Answer, Rules, is_redirect, problem_in

REFUSALS = frozenset({"session-expired", "request-stale", "client-fenced", "request-invalid"})
"""Codes of the session's own answers: this try did nothing, and what became of an earlier one they do not say."""
TO_A_GET = (301, 302, 303)
"""Redirections that clients follow with a GET, whatever was redirected."""


class Numbering:
    """Numbers the requests of one session."""

    def __init__(self, session: ClientSession, rules: Rules) -> None:
        if not isinstance(session, ClientSession):
            raise UsageError(f"{session!r} is not a ClientSession. Write http_session(url, client).")
        self.session, self.rules = session, rules

    def covers(self, method: str) -> bool:
        """Whether requests of this method get a number."""
        return method in self.rules.methods

    @property
    def is_quick(self) -> bool:
        """Whether a number is to be had without waiting for answers or for a disk."""
        return self.session.is_quick

    @property
    def is_noted(self) -> bool:
        """Whether what became of a request is written to a disk."""
        return self.session.has_journal

    def begin(
        self, method: str, url: str, headers: MutableMapping[str, str], body: bytes, name: str | None
    ) -> Request:
        """The number of a request: the one that it has, if it was sent before, or that its name has, or the next."""
        session = self.session
        if headers.get(CLIENT) == session.client and headers.get(NUMBER, "").isdigit():
            numbered = session.again(Request(session.client, int(headers[NUMBER])))
        else:
            parts = urlsplit(url)
            place = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
            asked = [method, place, sha256(f"{url}\n".encode() + body).hexdigest()]
            numbered = session.begin(asked, name=name)
        for header, value in numbered.headers.items():
            headers[header] = value
        return numbered

    def settle(self, request: Request, answer: Answer, url: str, headers: MutableMapping[str, str]) -> None:
        """Acknowledge an answer that says what became of a request; else it stays outstanding.

        A redirection is one, if the session's server says so, which echoes the number. What follows it takes nothing
        of the session along, unless it is the same request (307, 308), not yet answered, to the same host.
        """
        is_answer = self.rules.settles(answer) and problem_in(answer)[0] not in REFUSALS
        if is_redirect(answer):
            is_answer = answer.headers.get(NUMBER.lower()) == str(request.number)
            if is_answer or answer.status in TO_A_GET or _leads_away(url, answer.headers["location"]):
                for name in HEADERS:
                    headers.pop(name, None)
        if is_answer:
            self.session.done(request, answer.status)

    @contextmanager
    def noted(self, request: Request) -> Iterator[None]:
        """Where a request is sent: an error says what can be done about it."""
        try:
            yield
        except Exception as error:
            error.add_note(
                f"Request {request.number} of the session has no answer. Send the same request object, or the same "
                f"name, again to find out; or say session.give_up({request.number})."
            )
            raise


def _leads_away(url: str, location: str) -> bool:
    """Whether a redirection leads to another host, or to one that is the same but in the clear."""
    try:
        here, there = urlsplit(url), urlsplit(urljoin(url, location))
        is_same = (here.scheme, _port(here)) == (there.scheme, _port(there))
        is_upgrade = (here.scheme, _port(here), there.scheme, _port(there)) == ("http", 80, "https", 443)
        return here.hostname != there.hostname or not (is_same or is_upgrade)
    except ValueError:  # a location that nobody can follow
        return True


def _port(parts: SplitResult) -> int | None:
    return parts.port or {"http": 80, "https": 443}.get(parts.scheme)
