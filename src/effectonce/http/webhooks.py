"""Webhooks: the signature first, then the event, once; every repeat gets the first answer.

::

    hooks = Webhooks(receiver, Stripe("whsec_…"), endpoint="/hooks/stripe")

    def paid(event: Event) -> dict: ...

    outcome = hooks.process(request.headers, request.body, paid)    # await hooks.aprocess(…) on an event loop
    outcome.value                                                   # what paid returned the first time, every time

``headers`` is a mapping or a list of pairs, in any case and as str or bytes; ``body`` is the raw bytes, for a signature
says nothing of a body that was parsed and written anew. What the provider calls its event is the key, in a scope of its
own for each provider and endpoint: providers send the same event, with the same id, to every endpoint that wants it.
Services that share a store, and may have endpoints of the same name, say who they are: ``Receiver(…, consumer="crm")``.
An event is remembered for a week, longer than providers repeat themselves.

WebhookRefused              nothing ran; ``status`` is the HTTP status to answer with, and its text is fit to be sent
├── SignatureInvalid        no signature, one that can't be read, or none that fits
├── SignatureStale          the signature is right, but was made too long ago, or in the future
├── BodyTooLarge            more than ``max_body`` bytes
└── EventInvalid            rightly signed, but no event: not JSON, or without an id

A repeat with another content raises ``KeyReused``, and one that meets a running attempt ``InProgress``: answer with
an error, and the provider comes again. So it does after an exception of the handler, whose claim is given back.

A new provider is a class like ``Stripe``: a name, and ``verify``.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import json
import re
import time
import typing
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import parse_qs

from .. import keys
from .._answers import Call, call_of
from .._blocking import run
from .._durations import Duration, seconds
from .._receiver import Receiver
from ..errors import InvalidKey, Refused, Unencodable, UsageError
from ..policy import Policy

if TYPE_CHECKING:
    from .._messages import Outcome

__all__ = [
    "BodyTooLarge",
    "Event",
    "EventInvalid",
    "GitHub",
    "Headers",
    "Scheme",
    "SignatureInvalid",
    "SignatureStale",
    "StandardWebhooks",
    "Stripe",
    "WebhookRefused",
    "Webhooks",
]

R = TypeVar("R")

HeaderPairs = Iterable[tuple[str | bytes, str | bytes]]
OPERATION = "webhook"
LONGEST_HEADER = 4096
"""Characters of a header that is looked at: room for dozens of signatures."""


class WebhookRefused(Refused):
    """Nothing ran. Its text tells the sender what is wrong and nothing of what is right."""

    status = 400


class SignatureInvalid(WebhookRefused):
    """There is no signature, it can't be read, or none fits: this may be anyone."""

    status = 401


class SignatureStale(WebhookRefused):
    """The signature is right but not of now: perhaps somebody repeats what he has recorded."""

    status = 401


class BodyTooLarge(WebhookRefused):
    """More bytes than an event has."""

    status = 413


class EventInvalid(WebhookRefused):
    """The provider signed it, but it is no event."""


@dataclass(frozen=True, slots=True)
class Event:
    """An event that its provider signed.

    id        the provider's name for it, the same on every delivery
    kind      what happened, where the provider says so, such as "invoice.paid"
    payload   the parsed body
    body      the raw one
    sent      when this delivery was signed, in seconds since 1970; None if the provider doesn't say
    content   what a repeat must have in common with the first delivery
    """

    provider: str
    id: str
    kind: str
    payload: Any = field(repr=False)
    body: bytes = field(repr=False)
    sent: float | None
    content: Any = field(repr=False)


class Scheme(Protocol):
    """How a provider signs."""

    provider: str

    def verify(self, headers: Headers, body: bytes, now: float) -> Event:
        """The event in a request. Raises ``WebhookRefused``; looks at nothing before the signature."""
        ...


class Webhooks:
    """Handles each event of one endpoint once.

    receiver   remembers the events
    scheme     how the provider signs: ``Stripe(…)``, ``GitHub(…)``, ``StandardWebhooks(…)``
    endpoint   which of your endpoints this is, such as its path
    policy     how events are treated; by default the receiver's, with a week of memory, and a repeat that meets a
               running attempt is told to come back
    max_body   a longer body is refused
    clock      the wall clock
    """

    def __init__(
        self,
        receiver: Receiver,
        scheme: Scheme,
        *,
        endpoint: str,
        policy: Policy | None = None,
        max_body: int = 1 << 20,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if not isinstance(receiver, Receiver):
            raise UsageError(f"A {type(receiver).__name__} is not a Receiver. Write Receiver(url).")
        if not callable(getattr(scheme, "verify", None)):
            raise UsageError(
                "Webhooks need a scheme that says how the provider signs, such as Stripe(secret)."
            )
        self.receiver, self.scheme, self.max_body, self._clock = receiver, scheme, max_body, clock
        self.policy = receiver.policy.but(keep="7d", busy="reject") if policy is None else policy
        if not isinstance(self.policy, Policy):
            raise UsageError(f'policy={policy!r} is not a Policy. Write Policy(keep="7d", ...).')
        whose = (OPERATION, receiver.consumer) if receiver.consumer else (OPERATION,)
        self._prefix = keys.prefix(keys.composite(scheme.provider, endpoint), keys.composite(*whose))

    def process(
        self, headers: Mapping[str, str] | HeaderPairs, body: bytes, handler: Callable[[Event], R]
    ) -> Outcome[R]:
        """Verify a request and run ``handler(event)`` once. Raises what gave no result."""
        event = self.verify(headers, body)
        receiver = self.receiver
        call = self._call(event, handler)
        return run(receiver.flow.run(receiver.blocking, call, handler, (event,), {})).unwrap()

    async def aprocess(
        self, headers: Mapping[str, str] | HeaderPairs, body: bytes, handler: Callable[[Event], Awaitable[R]]
    ) -> Outcome[R]:
        """Verify a request and await ``handler(event)`` once. Raises what gave no result."""
        event = self.verify(headers, body)
        receiver = self.receiver
        call = self._call(event, handler)
        return (await receiver.flow.run(receiver.asyncio, call, handler, (event,), {})).unwrap()

    def verify(self, headers: Mapping[str, str] | HeaderPairs, body: bytes) -> Event:
        """The event in a request, or ``WebhookRefused``. Nothing is remembered."""
        if not isinstance(body, bytes | bytearray | memoryview):
            raise UsageError(
                f"The body is of type {type(body).__name__}. A signature is of the raw bytes: pass them as they came."
            )
        if len(body) > self.max_body:
            raise BodyTooLarge(f"The body has more than {self.max_body} bytes.")
        return self.scheme.verify(Headers(headers), bytes(body), self._clock())

    def key_of(self, event: Event) -> str:
        """The key of an event, as errors, hooks and ``Receiver.get`` name it."""
        return self._prefix + event.id

    def _call(self, event: Event, handler: Callable[..., Any]) -> Call:
        if not callable(handler):
            raise UsageError(f"{handler!r} can't be called, so it can't handle anything.")
        try:
            asked = keys.fingerprint(event.content)
        except Unencodable:
            raise EventInvalid("The event is nested too deeply.") from None
        return call_of(self.key_of(event), asked, self.policy, _result_type(handler))


def _result_type(handler: Callable[..., Any]) -> Any:
    if "return" not in (getattr(handler, "__annotations__", None) or ()):
        return Any
    try:
        return typing.get_type_hints(handler, include_extras=True).get("return", Any)
    except Exception:  # an annotation that can't be resolved says nothing about the type
        return Any


# -- What schemes are made of ---------------------------------------------------------------------------------------


class Headers:
    """Headers in one form, whatever the framework gives. One that comes twice is none: which was signed?"""

    def __init__(self, headers: Mapping[str, str] | HeaderPairs) -> None:
        items = getattr(headers, "items", None)
        pairs: Any = headers if items is None else items()
        self._values: dict[str, str | None] = {}
        for name, value in pairs:
            known = _text(name).strip().lower()
            self._values[known] = None if known in self._values else _text(value).strip()

    def one(self, name: str) -> str:
        """The value of a header that has to be there once."""
        value = self.get(name)
        if not value:
            raise SignatureInvalid(f"The header {name} is missing.")
        return value

    def get(self, name: str) -> str:
        """The value of a header; empty if it isn't there."""
        value = self._values.get(name.lower(), "")
        if value is None:
            raise SignatureInvalid(f"The header {name} was sent more than once.")
        if len(value) > LONGEST_HEADER:
            raise SignatureInvalid(f"The header {name} is too long.")
        return value


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value


class _Signed:
    """Secrets, of which any may have been used, and how far a signature's time may be from now."""

    def __init__(self, secrets: tuple[Any, ...], tolerance: Duration = "5m") -> None:
        if not secrets or not all(isinstance(secret, str) and secret.strip() for secret in secrets):
            raise UsageError(
                "A scheme needs the secret that the provider gave you, or several while it changes."
            )
        self._keys = [self._key_of(secret) for secret in secrets]
        self._tolerance = seconds(tolerance, "tolerance")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._keys)} secrets)"

    def _key_of(self, secret: str) -> bytes:
        return secret.encode()

    def _check(self, content: bytes, given: list[str], write: Callable[[bytes], bytes]) -> None:
        """Whether a given signature fits one of the secrets. Every pair is compared, in constant time."""
        expected = [write(hmac.digest(key, content, "sha256")) for key in self._keys]
        fits = [
            hmac.compare_digest(each.encode("utf-8", "replace"), mine) for mine in expected for each in given
        ]
        if not any(fits):
            raise SignatureInvalid("No signature fits the body.")

    def _check_time(self, timestamp: str, now: float) -> float:
        sent = float(timestamp)
        if abs(now - sent) > self._tolerance:
            raise SignatureStale("The signature's time is too far from now.")
        return sent


_TIMESTAMP = re.compile(r"[0-9]{1,12}")
_HEX = binascii.hexlify
_BASE64 = base64.b64encode


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise EventInvalid("The body is not JSON.") from None


def _event_id(id: Any) -> str:
    try:
        return keys.check_id(id)
    except InvalidKey:
        raise EventInvalid("The event has no id, or none that can be remembered.") from None


def _kind(payload: Any) -> str:
    kind = payload.get("type") if isinstance(payload, dict) else None
    return kind if isinstance(kind, str) else ""


# -- Providers ------------------------------------------------------------------------------------------------------


class Stripe(_Signed):
    """``Stripe-Signature: t=…,v1=…``: HMAC-SHA256 of ``t.body``. The id is in the body.

    secrets    the endpoint's signing secret; the old and the new one while it is rolled
    tolerance  how far the signature's time may be from now
    """

    provider = "stripe"

    def __init__(self, *secrets: str, tolerance: Duration = "5m") -> None:
        super().__init__(secrets, tolerance)

    def verify(self, headers: Headers, body: bytes, now: float) -> Event:
        """The event in a request of Stripe's."""
        parts = [part.strip().partition("=") for part in headers.one("Stripe-Signature").split(",")]
        times = [value for name, _, value in parts if name == "t"]
        if len(times) != 1 or not _TIMESTAMP.fullmatch(times[0]):
            raise SignatureInvalid("The header Stripe-Signature has not exactly one time.")
        given = [value for name, _, value in parts if name == "v1"]
        self._check(times[0].encode() + b"." + body, given, _HEX)
        sent = self._check_time(times[0], now)
        payload = _parsed(body)
        if not isinstance(payload, dict):
            raise EventInvalid("The body is not an event.")
        # How many endpoints have not answered yet is no part of the event, and differs between its deliveries.
        content = {name: value for name, value in payload.items() if name != "pending_webhooks"}
        return Event(
            self.provider, _event_id(payload.get("id")), _kind(payload), payload, body, sent, content
        )


class GitHub(_Signed):
    """``X-Hub-Signature-256: sha256=…``: HMAC-SHA256 of the body. The id is the header X-GitHub-Delivery.

    GitHub signs the body alone, without id or time. Who can record a delivery can send it again under another id, so
    what the body says must not be worse when it is said twice by such a one; TLS is what keeps others from recording.
    """

    provider = "github"

    def __init__(self, *secrets: str) -> None:
        super().__init__(secrets)

    def verify(self, headers: Headers, body: bytes, now: float) -> Event:
        """The event in a request of GitHub's."""
        algorithm, _, given = headers.one("X-Hub-Signature-256").partition("=")
        if algorithm != "sha256":
            raise SignatureInvalid("The header X-Hub-Signature-256 has another form than sha256=….")
        self._check(body, [given], _HEX)
        form = headers.get("Content-Type").partition(";")[0].strip().lower()
        document = _form_field(body) if form == "application/x-www-form-urlencoded" else body
        name = _event_id(headers.get("X-GitHub-Delivery"))
        return Event(self.provider, name, headers.get("X-GitHub-Event"), _parsed(document), body, None, body)


def _form_field(body: bytes) -> bytes:
    """The document in a form with one field, which is GitHub's other way to send it."""
    try:
        values = parse_qs(body.decode("ascii")).get("payload", [])
    except ValueError:
        values = []
    return values[0].encode() if len(values) == 1 else b""


class StandardWebhooks(_Signed):
    """``webhook-signature: v1,…``: HMAC-SHA256 of ``id.timestamp.body``, as standardwebhooks.com has it.

    secrets    "whsec_" and Base64, as the provider gave it; the old and the new one while it is changed
    provider   whose webhooks these are: many use this scheme, each with ids of its own
    tolerance  how far the signature's time may be from now
    """

    def __init__(self, *secrets: str, provider: str = "standard", tolerance: Duration = "5m") -> None:
        super().__init__(secrets, tolerance)
        self.provider = provider

    def _key_of(self, secret: str) -> bytes:
        try:
            key = base64.b64decode(secret.removeprefix("whsec_"), validate=True)
        except binascii.Error:
            key = b""
        if not key:
            raise UsageError(
                "The secret is not Base64, as it would be after whsec_. Pass it as the provider gave it."
            )
        return key

    def verify(self, headers: Headers, body: bytes, now: float) -> Event:
        """The event in a request."""
        name, timestamp = headers.one("webhook-id"), headers.one("webhook-timestamp")
        if not name.isascii() or not _TIMESTAMP.fullmatch(timestamp):
            raise SignatureInvalid("The headers webhook-id and webhook-timestamp can't be read.")
        parts = [part.partition(",") for part in headers.one("webhook-signature").split()]
        given = [value for version, _, value in parts if version == "v1"]
        self._check(f"{name}.{timestamp}.".encode() + body, given, _BASE64)
        sent = self._check_time(timestamp, now)
        payload = _parsed(body)
        return Event(self.provider, _event_id(name), _kind(payload), payload, body, sent, body)
