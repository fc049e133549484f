"""NATS JetStream: an event is a message on the subject that its topic names, with its id as ``Nats-Msg-Id``.

JetStream drops a message whose id it has seen within the stream's duplicate window, and says so; for the relay that is
as good as an acknowledgement. A window of messages is on its way at once; the acknowledgements come to one inbox.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Self

from ...errors import MissingExtra
from .._events import Event, Results, Unsent

try:
    import nats
    from nats.errors import Error as NatsError
    from nats.errors import MaxPayloadError
except ImportError as error:
    raise MissingExtra("NATS needs the package nats-py: pip install effectonce[nats]") from error

ACK_SECONDS = 10.0
CONNECT_SECONDS = 5
NO_RESPONDERS = "503"
AROUND_HEADER, AROUND_HEADERS = 4, 12
"""Bytes that headers take besides their names and values: each of them, and all together."""


class Refused(Exception):
    """JetStream did not store an event; the message says why."""


class JetStream:
    """Publishes to the streams of a NATS server: a stream has to be there for each topic."""

    keeps_order = False

    def __init__(self, *servers: str, timeout: float = ACK_SECONDS, **options: Any) -> None:
        self._servers, self._timeout, self._options = list(servers), timeout, options
        self._client: Any = None
        self._inbox = ""
        self._round = 0
        self._waiting: _Window | None = None

    @classmethod
    def from_url(cls, url: str) -> Self:
        """``nats://user:password@host:4222``."""
        return cls(url)

    async def publish(self, events: Sequence[Event]) -> Results:
        """Send all events, then wait for their acknowledgements."""
        client = await self._connected()
        self._round += 1  # an acknowledgement that comes too late is not taken for one of another window
        window = self._waiting = _Window(self._round, len(events))
        for number, event in enumerate(events):
            headers = {**event.headers, "Nats-Msg-Id": event.id}
            if event.key is not None:
                headers["key"] = event.key
            try:
                if len(event.payload) + _size(headers) > client.max_payload:
                    raise MaxPayloadError  # nats-py does not count headers, and the server would hang up
                reply = f"{self._inbox}.{self._round}.{number}"
                await client.publish(event.topic, event.payload, reply=reply, headers=headers)
            except (NatsError, ValueError) as error:  # too large, or no subject: its own fault
                window.answer(number, error if client.is_connected else Unsent(str(error)))
        await window.all_answered(self._timeout)
        return window.answers

    async def _connected(self) -> Any:
        if self._client is None or self._client.is_closed:
            # The relay knows when to try again. nats-py alone would try for minutes, and print each error.
            once = {"allow_reconnect": False, "max_reconnect_attempts": 1, "reconnect_time_wait": 0}
            words = {"error_cb": _quietly, "disconnected_cb": self._lost, "closed_cb": self._lost}
            self._client = await nats.connect(
                self._servers, **{"connect_timeout": CONNECT_SECONDS, **self._options, **once, **words}
            )
            self._inbox = self._client.new_inbox()
            await self._client.subscribe(f"{self._inbox}.*.*", cb=self._heard)
        if not self._client.is_connected:
            await self.close()
            raise Unsent("NATS has closed the connection.")
        return self._client

    async def _heard(self, message: Any) -> None:
        _, window, number = message.subject.rsplit(".", 2)
        if self._waiting is not None and self._waiting.round == int(window):
            self._waiting.answer(int(number), _meaning(message))

    async def _lost(self) -> None:
        if self._waiting is not None:
            self._waiting.give_up()

    async def close(self) -> None:
        """Close the connection."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()


class _Window:
    """The answers to one window of messages."""

    def __init__(self, round: int, size: int) -> None:
        self.round = round
        self.answers: list[Exception | None] = [Unsent("NATS did not acknowledge it in time.")] * size
        self._left = size
        self._done = asyncio.Event()

    def answer(self, number: int, error: Exception | None) -> None:
        """The answer to one of them."""
        self.answers[number] = error
        self._left -= 1
        if self._left == 0:
            self._done.set()

    def give_up(self) -> None:
        """No more answers will come."""
        self._done.set()

    async def all_answered(self, seconds: float) -> None:
        """Wait for the last of them, at most so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._done.wait()


def _size(headers: dict[str, str]) -> int:
    texts = (name + text for name, text in headers.items())
    return AROUND_HEADERS + sum(len(each.encode()) + AROUND_HEADER for each in texts)


async def _quietly(_: Exception) -> None:
    """Whoever publishes hears of it."""


def _meaning(message: Any) -> Exception | None:
    if message.data.startswith(b'{"stream":'):
        return None
    if message.header and message.header.get("Status") == NO_RESPONDERS:
        return Refused("no stream takes this subject")
    problem = json.loads(message.data or b"{}").get("error", {})
    return Refused(f"{problem.get('description', 'no acknowledgement')} (code {problem.get('err_code')})")


__all__ = ["JetStream", "Refused"]
