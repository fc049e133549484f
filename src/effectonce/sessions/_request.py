"""What goes between a client and a server: what a client gets at first, and what it sends with each request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from ..errors import BadRequest
from ._rules import HIGHEST

CLIENT, NUMBER, ACKED, EPOCH = "Client-Id", "Request-Number", "Acked-Through", "Client-Epoch"
HEADERS: Final = (CLIENT, NUMBER, ACKED, EPOCH)
LONGEST: Final = 64
"""Characters of a client id; the server's own have 32."""


class Opened(NamedTuple):
    """A session, as its client knows it. The id is a secret between the two: whoever has it can go on in its name."""

    client: str
    epoch: int = 1
    acked: int = 0
    """Every request up to this number is acknowledged."""
    lease: float = 3600.0
    """How many seconds the session lives without contact."""
    window: int = 512
    """How many requests may be waited for at once."""

    def __repr__(self) -> str:
        return f"Opened(client='…', epoch={self.epoch}, acked={self.acked}, lease={self.lease}, window={self.window})"


class Request(NamedTuple):
    """One request of a session: the same number on every try, and nothing at or below ``acked`` is waited for."""

    client: str
    number: int
    acked: int = 0
    payload: Any = None
    epoch: int = 1

    def __repr__(self) -> str:
        return f"Request(client='…', number={self.number}, acked={self.acked}, epoch={self.epoch})"

    @property
    def headers(self) -> dict[str, str]:
        """Its place in its session, for HTTP and for messages."""
        texts = (self.client, str(self.number), str(self.acked), str(self.epoch))
        return dict(zip(HEADERS, texts, strict=True))

    @classmethod
    def from_headers(cls, headers: Mapping[str, str | bytes], payload: Any = None) -> Request:
        """The request that headers tell of; their names may be in any case. Raises ``BadRequest``."""
        found = {_text(name).lower(): _text(value) for name, value in headers.items()}
        client = found.get(CLIENT.lower(), "")
        if not client or len(client) > LONGEST or not client.isascii() or not client.isalnum():
            raise BadRequest(f"{CLIENT} must be the id that the server gave: letters and digits.")
        number, acked = _number(found, NUMBER, None), _number(found, ACKED, None)
        return cls(client, number, acked, payload, _number(found, EPOCH, 1))


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


def _number(found: Mapping[str, str], name: str, default: int | None) -> int:
    text = found.get(name.lower())
    if text is None and default is not None:
        return default
    if text is None or not (text.isascii() and text.isdigit() and len(text) <= len(str(HIGHEST))):
        raise BadRequest(f"{name} must be a whole number, such as 7.")
    return int(text)
