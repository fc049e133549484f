"""Webhooks: an event is a POST whose ``Idempotency-Key`` is the event's id, so that its receiver can drop repetitions.

An answer of 2xx means that it arrived. 409, 425, 429 and 503 mean "later", as does a connection that breaks: no attempt
is counted. Every other answer is a failure of this event.
"""

from __future__ import annotations

import http.client
import ssl
import threading
from base64 import b64encode
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Self
from urllib.parse import SplitResult, quote, unquote

from ...errors import UsageError
from ...stores._urls import shown, split
from .._events import Event, Results, Unsent

LATER = {409, 425, 429, 503}
TIMEOUT_SECONDS = 10.0
REASON_BYTES = 300
"""How much of a refusal's body is told."""


class Refused(Exception):
    """The receiver answered that it does not take an event."""


class Webhook:
    """Sends events to a URL; ``{topic}`` in it stands for the topic.

    headers  sent along with each, such as an Authorization
    at_once  how many requests are on their way at the same time
    """

    keeps_order = False

    def __init__(
        self,
        url: str,
        *,
        headers: dict[str, str] | None = None,
        timeout: float = TIMEOUT_SECONDS,
        at_once: int = 8,
    ) -> None:
        parts = split(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"{shown(url)!r} is no URL of a webhook: write https://host/path.")
        self._parts, self._headers, self._timeout = parts, {**_login(parts), **(headers or {})}, timeout
        self._target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="effectonce-webhook")
        self._own = threading.local()
        self._open: set[http.client.HTTPConnection] = set()

    @classmethod
    def from_url(cls, url: str) -> Self:
        """``https://user:password@host/hooks/{topic}``."""
        return cls(url)

    def publish(self, events: Sequence[Event]) -> Results:
        """Send each event, some at a time."""
        return list(self._threads.map(self._send, events))

    def _send(self, event: Event) -> Exception | None:
        try:
            return self._answer(event, self._connection())
        except (OSError, http.client.HTTPException) as error:
            self._hang_up()
            return Unsent(f"{type(error).__name__}: {error}")
        except ValueError as error:  # a header that HTTP can't carry
            self._hang_up()
            return error

    def _answer(self, event: Event, connection: http.client.HTTPConnection) -> Exception | None:
        headers = {"Content-Type": "application/json", **self._headers, **event.headers}
        headers |= {
            "Idempotency-Key": f'"{quote(event.id, safe=SAFE)}"',
            "Effectonce-Topic": quote(event.topic),
        }
        if event.key is not None:
            headers["Effectonce-Key"] = quote(event.key, safe=SAFE)
        target = self._target.replace("{topic}", quote(event.topic, safe=""))
        connection.request("POST", target, event.payload, headers)
        response = connection.getresponse()
        text = response.read(REASON_BYTES)
        if response.read(1):
            self._hang_up()  # a body that nobody will read
        if 200 <= response.status < 300:
            return None
        reason = f"{response.status} {response.reason}: {text.decode(errors='replace')}"
        return Unsent(reason) if response.status in LATER else Refused(reason)

    def _connection(self) -> http.client.HTTPConnection:
        found: http.client.HTTPConnection | None = getattr(self._own, "connection", None)
        if found is None:
            host, port = self._parts.hostname or "", self._parts.port
            if self._parts.scheme == "https":
                context = ssl.create_default_context()
                found = http.client.HTTPSConnection(host, port, timeout=self._timeout, context=context)
            else:
                found = http.client.HTTPConnection(host, port, timeout=self._timeout)
            self._own.connection = found
            self._open.add(found)
        return found

    def _hang_up(self) -> None:
        found: http.client.HTTPConnection | None = getattr(self._own, "connection", None)
        if found is not None:
            found.close()

    def close(self) -> None:
        """End the threads and the connections."""
        self._threads.shutdown()
        for connection in self._open:
            with suppress(OSError):
                connection.close()


def _login(parts: SplitResult) -> dict[str, str]:
    """User and password of a URL as a header, which is all that they can mean."""
    if parts.username is None:
        return {}
    login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return {"Authorization": f"Basic {b64encode(login.encode()).decode()}"}


SAFE = "!#$&'()*+,-./:;<=>?@[]^_`{|}~ "
"""What may stand in a header as it is."""
