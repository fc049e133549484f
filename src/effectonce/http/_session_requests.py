"""A session's adapter for requests: that of ``client``, with a number for each request."""

from __future__ import annotations

from typing import Any, cast

import requests

from ..errors import UsageError
from ..sessions import ClientSession
from ._numbering import Numbering
from ._requests import IdempotencyAdapter
from ._retrying import Answer, Rules
from .client import DEFAULT_RULES, NAME


class SessionAdapter(IdempotencyAdapter):
    """Numbers the requests of a ``requests.Session`` and sends them again until there is an answer.

    Takes a ``ClientSession``, and what ``IdempotencyAdapter`` takes.
    """

    __attrs__: list[str] = [*IdempotencyAdapter.__attrs__, "_numbering"]  # noqa: RUF012

    def __init__(
        self, session: ClientSession, *args: Any, rules: Rules = DEFAULT_RULES, **choices: Any
    ) -> None:
        super().__init__(*args, rules=rules, **choices)
        self._numbering = Numbering(session, rules)

    def send(self, request: requests.PreparedRequest, *args: Any, **choices: Any) -> requests.Response:
        """Send a request, again where that helps."""
        if not self._numbering.covers(request.method or ""):
            return super().send(request, *args, **choices)
        body = request.body
        if not (body is None or isinstance(body, str | bytes)):
            raise UsageError("The body of a session's request has to be bytes, so that it can be sent again.")
        content = body.encode() if isinstance(body, str) else body or b""
        headers: Any = request.headers
        name = NAME.get()
        numbered = self._numbering.begin(request.method or "", request.url or "", headers, content, name)
        token = NAME.set(None)  # the name belongs to the session's journal
        try:
            with self._numbering.noted(numbered):
                response = super().send(request, *args, **choices)
        finally:
            NAME.reset(token)
        said = Answer(response.status_code, cast("Any", response.headers), response.content)
        self._numbering.settle(numbered, said, request.url or "", headers)
        return response
