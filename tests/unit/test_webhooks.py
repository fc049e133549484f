"""Webhooks: nothing runs without a signature that fits, and no event runs twice.

Signatures are made here by hand, HMAC from its definition (RFC 2104), so that a mistake is not made twice.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.message import Message as Mail
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from effectonce import InProgress, KeyReused, Outcome, Policy, Receiver, current
from effectonce.errors import ColourMismatch, EffectOnceError, InvalidKey, UsageError
from effectonce.http.webhooks import (
    BodyTooLarge,
    Event,
    EventInvalid,
    GitHub,
    Headers,
    SignatureInvalid,
    SignatureStale,
    StandardWebhooks,
    Stripe,
    WebhookRefused,
    Webhooks,
)
from effectonce.stores.memory import MemoryStore
from effectonce.testing.clocks import ManualClock

NOW = 1_790_000_000
SECRET, SECRET_BYTES = "whsec_AQIDBAUGBwgJCgsMDQ4PEBESExQVFhcY", bytes(range(1, 25))
OTHER_SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


def hmac_sha256(key: bytes, content: bytes) -> bytes:
    """RFC 2104, written out."""
    block = (hashlib.sha256(key).digest() if len(key) > 64 else key).ljust(64, b"\0")
    inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in block) + content).digest()
    return hashlib.sha256(bytes(byte ^ 0x5C for byte in block) + inner).digest()


def test_the_hand_written_hmac_is_one() -> None:
    """The second test case of RFC 4231."""
    assert hmac_sha256(b"Jefe", b"what do ya want for nothing?").hex() == (
        "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"
    )


@dataclass
class Provider:
    """A provider as it sends: what its requests look like, and how ours checks them."""

    scheme: Callable[..., Any]
    sign: Callable[..., dict[str, str]]
    event: dict[str, Any]

    def request(self, body: bytes | None = None, **how: Any) -> tuple[dict[str, str], bytes]:
        body = json.dumps(self.event).encode() if body is None else body
        return self.sign(body, **how), body


def sign_stripe(body: bytes, secret: str = SECRET, at: int = NOW) -> dict[str, str]:
    signature = hmac_sha256(secret.encode(), f"{at}.".encode() + body).hex()
    return {"Stripe-Signature": f"t={at},v0={'0' * 64},v1={signature}", "Content-Type": "application/json"}


def sign_github(body: bytes, secret: str = SECRET, id: str = "72d3162e-cc78-11e3") -> dict[str, str]:
    signature = hmac_sha256(secret.encode(), body).hex()
    return {
        "X-Hub-Signature-256": f"sha256={signature}",
        "X-GitHub-Delivery": id,
        "X-GitHub-Event": "push",
        "Content-Type": "application/json",
    }


def sign_standard(
    body: bytes, secret: bytes = SECRET_BYTES, at: int = NOW, id: str = "msg_2KWPBgLlAfxd"
) -> dict[str, str]:
    signature = b64encode(hmac_sha256(secret, f"{id}.{at}.".encode() + body)).decode()
    return {"webhook-id": id, "webhook-timestamp": str(at), "webhook-signature": f"v1,{signature}"}


PROVIDERS = {
    "stripe": Provider(Stripe, sign_stripe, {"id": "evt_1", "type": "invoice.paid", "data": {"cents": 500}}),
    "github": Provider(GitHub, sign_github, {"ref": "refs/heads/main"}),
    "standard": Provider(StandardWebhooks, sign_standard, {"type": "invoice.paid", "data": {"cents": 500}}),
}


@pytest.fixture(params=PROVIDERS)
def provider(request: pytest.FixtureRequest) -> Provider:
    """Each in turn."""
    return PROVIDERS[request.param]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(float(NOW))


@pytest.fixture
def receiver(clock: ManualClock) -> Iterator[Receiver]:
    with Receiver(MemoryStore(clock=clock), clock=clock, monotonic=clock) as receiver:
        yield receiver


@pytest.fixture
def hooks(provider: Provider, receiver: Receiver, clock: ManualClock) -> Webhooks:
    return Webhooks(receiver, provider.scheme(SECRET), endpoint="/hooks", clock=clock)


class Runs(list[Event]):
    """A handler that keeps the events it was given."""

    def __call__(self, event: Event) -> dict[str, int]:
        self.append(event)
        return {"run": len(self)}


def must_not_run(event: Event) -> None:
    raise AssertionError("the handler ran")


# Once


def test_an_event_is_handled_once(hooks: Webhooks, provider: Provider) -> None:
    """Every repeat gets the first answer."""
    runs = Runs()
    outcomes = [hooks.process(*provider.request(), runs) for _ in range(3)]
    assert [(o.status, o.value) for o in outcomes] == [("executed", {"run": 1})] + [
        ("replayed", {"run": 1})
    ] * 2
    (event,) = runs
    assert event.payload == provider.event
    assert event.body == provider.request()[1]
    assert event.provider == hooks.scheme.provider


def test_on_an_event_loop_too(hooks: Webhooks, provider: Provider) -> None:
    """The same event in the other colour is the same event."""

    async def handler(event: Event) -> dict[str, int]:
        await asyncio.sleep(0)
        return {"run": 1}

    outcome = asyncio.run(hooks.aprocess(*provider.request(), handler))
    assert (outcome.status, outcome.value) == ("executed", {"run": 1})
    assert hooks.process(*provider.request(), must_not_run).replayed


@pytest.mark.parametrize("provider", [PROVIDERS["stripe"], PROVIDERS["standard"]])
def test_a_delivery_signed_anew_is_the_same_event(
    provider: Provider, hooks: Webhooks, clock: ManualClock
) -> None:
    """These sign each delivery with its own time."""
    hooks.process(*provider.request(), Runs())
    clock.advance(3600)
    assert hooks.process(*provider.request(at=NOW + 3600), must_not_run).replayed


def test_an_event_is_remembered_for_a_week(hooks: Webhooks, provider: Provider, clock: ManualClock) -> None:
    """And no longer."""
    runs, day = Runs(), 86_400
    for days in (0, 6.9, 7.1):
        clock.advance(NOW + days * day - clock())
        how = {} if provider.scheme is GitHub else {"at": int(clock())}
        hooks.process(*provider.request(**how), runs)
    assert len(runs) == 2


def test_the_same_id_with_another_content_is_refused(hooks: Webhooks, provider: Provider) -> None:
    """However rightly it is signed."""
    hooks.process(*provider.request(), Runs())
    other = json.dumps({**provider.event, "data": {"cents": 900}}).encode()
    with pytest.raises(KeyReused):
        hooks.process(*provider.request(other), must_not_run)


def test_endpoints_are_apart(provider: Provider, receiver: Receiver, clock: ManualClock) -> None:
    """Providers send one event, with one id, to every endpoint that wants it."""
    runs = Runs()
    for endpoint in ("/billing", "/mail", "/billing"):
        hooks = Webhooks(receiver, provider.scheme(SECRET), endpoint=endpoint, clock=clock)
        hooks.process(*provider.request(), runs)
    assert len(runs) == 2


def test_services_that_share_a_store_are_apart(receiver: Receiver, clock: ManualClock) -> None:
    """Each that says who it is has an endpoint of its own, whatever its name."""
    runs, provider = Runs(), PROVIDERS["stripe"]
    for consumer in ("", "crm", "crm"):
        service = Receiver(receiver.store, consumer=consumer, clock=clock, monotonic=clock)
        hooks = Webhooks(service, provider.scheme(SECRET), endpoint="/hooks", clock=clock)
        hooks.process(*provider.request(), runs)
    assert len(runs) == 2


def test_providers_are_apart(receiver: Receiver, clock: ManualClock) -> None:
    """Also two of them with the same scheme, the same endpoint and the same id."""
    runs = Runs()
    for name in ("clerk", "resend", "clerk"):
        scheme = StandardWebhooks(SECRET, provider=name)
        Webhooks(receiver, scheme, endpoint="/hooks", clock=clock).process(
            *PROVIDERS["standard"].request(), runs
        )
    assert [event.provider for event in runs] == ["clerk", "resend"]


def test_stripes_count_of_endpoints_is_no_part_of_the_event(receiver: Receiver, clock: ManualClock) -> None:
    """It differs between the deliveries of one event."""
    hooks = Webhooks(receiver, Stripe(SECRET), endpoint="/hooks", clock=clock)
    provider, runs = PROVIDERS["stripe"], Runs()
    for pending in (2, 1):
        body = json.dumps({**provider.event, "pending_webhooks": pending}).encode()
        hooks.process(*provider.request(body), runs)
    assert len(runs) == 1


def test_a_handler_that_fails_is_run_again(hooks: Webhooks, provider: Provider) -> None:
    """The provider hears of it, and comes again."""

    def fails(event: Event) -> None:
        raise OSError("the database is away")

    with pytest.raises(OSError, match="database"):
        hooks.process(*provider.request(), fails)
    assert hooks.process(*provider.request(), Runs()).status == "executed"


def test_a_repeat_that_meets_a_running_attempt_is_told_to_come_back(
    hooks: Webhooks, provider: Provider
) -> None:
    """Providers don't wait for long, and their worker is not held."""

    def handler(event: Event) -> str:
        with pytest.raises(InProgress):
            hooks.process(*provider.request(), must_not_run)
        return "done"

    assert hooks.process(*provider.request(), handler).value == "done"


def test_a_handler_has_its_attempt(hooks: Webhooks, provider: Provider) -> None:
    """With the key that ``key_of`` tells, and keys to hand on."""

    def handler(event: Event) -> str:
        assert current().key == hooks.key_of(event)
        return current().key_for("mail")

    assert hooks.process(*provider.request(), handler).value is not None
    event = hooks.verify(*provider.request())
    assert hooks.receiver.get(hooks.key_of(event)) is not None


@dataclass
class Receipt:
    cents: int


def test_a_result_comes_back_with_its_type(hooks: Webhooks, provider: Provider) -> None:
    """By the handler's annotation."""

    def handler(event: Event) -> Receipt:
        return Receipt(500)

    hooks.process(*provider.request(), handler)
    again: Outcome[Receipt] = hooks.process(*provider.request(), handler)
    assert (again.replayed, again.value) == (True, Receipt(500))


def test_the_policy_can_be_chosen(provider: Provider, receiver: Receiver, clock: ManualClock) -> None:
    """By default it is the receiver's, with a week of memory."""
    chosen = Policy(keep="1h", max_attempts=3)
    hooks = Webhooks(receiver, provider.scheme(SECRET), endpoint="/hooks", policy=chosen, clock=clock)
    assert hooks.policy is chosen
    plain = Webhooks(receiver, provider.scheme(SECRET), endpoint="/hooks")
    assert (plain.policy.keep, plain.policy.busy) == (7 * 86_400, "reject")


# The signature first


def tampered(provider: Provider) -> Iterator[tuple[str, dict[str, str], bytes]]:
    """A right request, changed in one place at a time."""
    headers, body = provider.request()
    yield "body", headers, body.replace(b"5", b"9") if b"5" in body else body.replace(b"main", b"evil")
    yield "space", headers, body + b" "
    yield "empty", headers, b""
    for name, value in headers.items():
        if name not in ("Content-Type", "X-GitHub-Delivery", "X-GitHub-Event"):
            yield f"no {name}", {n: v for n, v in headers.items() if n != name}, body
            yield f"empty {name}", {**headers, name: ""}, body
            yield f"cut {name}", {**headers, name: value[:-1]}, body
            yield f"longer {name}", {**headers, name: value + "0"}, body
            yield f"endless {name}", {**headers, name: value + "," * 5000}, body
            yield f"unicode {name}", {**headers, name: value[:-1] + "é☃"}, body
            yield f"surrogate {name}", {**headers, name: value[:-1] + "\udc80"}, body


@pytest.mark.parametrize(
    ("provider", "change"),
    [
        pytest.param(provider, number, id=f"{name}-{what}")
        for name, provider in PROVIDERS.items()
        for number, (what, _, _) in enumerate(tampered(provider))
    ],
)
def test_a_request_that_was_changed_anywhere_is_refused(
    hooks: Webhooks, provider: Provider, change: int
) -> None:
    """Before anything else is looked at, and without a word that helps."""
    _, headers, body = list(tampered(provider))[change]
    with pytest.raises(SignatureInvalid) as refused:
        hooks.process(headers, body, must_not_run)
    assert refused.value.status == 401
    assert SECRET not in str(refused.value)
    assert hooks.receiver.stats().since_start.counts == {"claimed": 0}


@given(st.binary(max_size=40), st.text(max_size=80))
def test_no_signature_but_the_right_one_fits(body: bytes, signature: str) -> None:
    """Whatever is sent, it is refused by its own kind of error."""
    with Receiver("memory://") as receiver:
        for name, header in (("stripe", "Stripe-Signature"), ("github", "X-Hub-Signature-256")):
            hooks = Webhooks(receiver, PROVIDERS[name].scheme(SECRET), endpoint="/hooks", clock=lambda: NOW)
            for value in (signature, f"t={NOW},v1={signature}", f"sha256={signature}"):
                with pytest.raises(SignatureInvalid):
                    hooks.process({header: value}, body, must_not_run)
        hooks = Webhooks(receiver, StandardWebhooks(SECRET), endpoint="/hooks", clock=lambda: NOW)
        headers = {"webhook-id": "m", "webhook-timestamp": str(NOW), "webhook-signature": f"v1,{signature}"}
        with pytest.raises(SignatureInvalid):
            hooks.process(headers, body, must_not_run)


def test_anothers_secret_does_not_fit(provider: Provider, receiver: Receiver, clock: ManualClock) -> None:
    """Signed, but by someone else."""
    hooks = Webhooks(receiver, provider.scheme(OTHER_SECRET), endpoint="/hooks", clock=clock)
    with pytest.raises(SignatureInvalid):
        hooks.process(*provider.request(), must_not_run)


def test_a_secret_can_be_changed(provider: Provider, receiver: Receiver, clock: ManualClock) -> None:
    """While the old and the new one are in use, either fits."""
    hooks = Webhooks(receiver, provider.scheme(OTHER_SECRET, SECRET), endpoint="/hooks", clock=clock)
    assert hooks.process(*provider.request(), Runs()).status == "executed"


def test_one_of_several_signatures_is_enough(receiver: Receiver, clock: ManualClock) -> None:
    """Providers sign with the old and the new secret for a while; other versions count for nothing."""
    for name, header, wrong in (
        ("stripe", "Stripe-Signature", f"v1={'0' * 64},{{}},v1={'f' * 64}"),
        ("standard", "webhook-signature", f"v1a,{'A' * 88} v1,{'A' * 44} {{}} v2,x"),
    ):
        headers, body = PROVIDERS[name].request()
        hooks = Webhooks(receiver, PROVIDERS[name].scheme(SECRET), endpoint="/hooks", clock=clock)
        several = {**headers, header: wrong.format(headers[header])}
        assert hooks.process(several, body, Runs()).status == "executed"
        only_others = {**headers, header: headers[header].replace("v1", "v2")}
        with pytest.raises(SignatureInvalid):
            hooks.process(only_others, body, must_not_run)


def test_the_time_is_part_of_what_is_signed(receiver: Receiver, clock: ManualClock) -> None:
    """A recorded request can't be made young."""
    clock.advance(10_000)
    headers, body = PROVIDERS["stripe"].request()
    fresh = headers["Stripe-Signature"].replace(str(NOW), str(NOW + 10_000))
    with pytest.raises(SignatureInvalid):
        Webhooks(receiver, Stripe(SECRET), endpoint="/", clock=clock).process(
            {"Stripe-Signature": fresh}, body, must_not_run
        )
    headers, body = PROVIDERS["standard"].request()
    with pytest.raises(SignatureInvalid):
        Webhooks(receiver, StandardWebhooks(SECRET), endpoint="/", clock=clock).process(
            {**headers, "webhook-timestamp": str(NOW + 10_000)}, body, must_not_run
        )


@pytest.mark.parametrize("name", ["stripe", "standard"])
@pytest.mark.parametrize(
    ("age", "stale"), [(300, False), (301, True), (-300, False), (-301, True), (10**9, True)]
)
def test_a_signature_of_another_time_is_refused(receiver: Receiver, name: str, age: int, stale: bool) -> None:
    """Five minutes either way. An event that is known is refused too: this is a recording."""
    provider = PROVIDERS[name]
    hooks = Webhooks(receiver, provider.scheme(SECRET), endpoint="/hooks", clock=lambda: NOW + age)
    if not stale:
        assert hooks.process(*provider.request(), Runs()).status == "executed"
        return
    with pytest.raises(SignatureStale):
        hooks.process(*provider.request(), must_not_run)


@pytest.mark.parametrize(
    "times", ["", "t=,", "t=abc,", "t=-5,", "t=1e9,", "t=٣,", f"t={NOW},t={NOW},", "t=" + "9" * 99 + ","]
)
def test_a_time_that_is_none_is_refused(receiver: Receiver, times: str) -> None:
    """Also two of them: which one was signed?"""
    headers, body = PROVIDERS["stripe"].request()
    header = times + headers["Stripe-Signature"].partition(",")[2]
    with pytest.raises(SignatureInvalid):
        Webhooks(receiver, Stripe(SECRET), endpoint="/", clock=lambda: NOW).process(
            {"Stripe-Signature": header}, body, must_not_run
        )


def test_an_id_is_part_of_what_is_signed() -> None:
    """In Standard Webhooks: a recorded request can't be made another event."""
    headers, body = PROVIDERS["standard"].request(id="msg_?")
    scheme = StandardWebhooks(SECRET)
    assert scheme.verify(Headers(headers), body, NOW).id == "msg_?"
    for other in ("msg_!", "msg_é", "msg_☃"):
        with pytest.raises(SignatureInvalid):
            scheme.verify(Headers({**headers, "webhook-id": other}), body, NOW)


# Headers and bodies as frameworks give them


def test_headers_come_in_many_forms(hooks: Webhooks, provider: Provider) -> None:
    """In any case, as pairs, as bytes, as other libraries' mappings."""
    headers, body = provider.request()
    mail = Mail()
    for name, value in headers.items():
        mail[name] = value
    forms: list[Any] = [
        {name.lower(): value for name, value in headers.items()},
        {name.upper(): value for name, value in headers.items()},
        list(headers.items()),
        [(name.lower().encode(), value.encode()) for name, value in headers.items()],
        httpx.Headers(headers),
        mail,
    ]
    runs = Runs()
    for form in forms:
        hooks.process(form, body, runs)
    assert len(runs) == 1


def test_a_signature_that_comes_twice_is_none(hooks: Webhooks, provider: Provider) -> None:
    """Proxies and frameworks may choose differently between the two."""
    headers, body = provider.request()
    name = next(name for name in headers if "signature" in name.lower())
    for doubled in ([*headers.items(), (name.upper(), headers[name])], [*headers.items(), (name, "other")]):
        with pytest.raises(SignatureInvalid, match="more than once"):
            hooks.process(doubled, body, must_not_run)


def test_headers_that_nobody_asks_for_may_come_twice(hooks: Webhooks, provider: Provider) -> None:
    """As they do."""
    headers, body = provider.request()
    hooks.process([*headers.items(), ("Accept", "a"), ("Accept", "b")], body, Runs())


@pytest.mark.parametrize("text", ["größer", "日本語", "💶", "\u2028", "é", "e\u0301", "\\u00e9"])
def test_a_body_is_its_bytes(hooks: Webhooks, provider: Provider, text: str) -> None:
    """Whatever their text: nothing is normalised, decoded or written anew before the check."""
    for ascii_only in (True, False):
        runs = Runs()
        id = f"evt_{ascii_only}"
        body = json.dumps({**provider.event, "id": id, "text": text}, ensure_ascii=ascii_only).encode()
        how = {} if provider.scheme is Stripe else {"id": id}
        hooks.process(*provider.request(body, **how), runs)
        assert runs[0].payload["text"] == text


def test_a_body_may_be_any_kind_of_bytes(hooks: Webhooks, provider: Provider) -> None:
    """But not text, of which nobody knows the bytes."""
    headers, body = provider.request()
    for form in (bytearray(body), memoryview(body)):
        hooks.process(headers, form, Runs())  # type: ignore[arg-type]
    for wrong in (body.decode(), provider.event, None):
        with pytest.raises(UsageError, match="raw bytes"):
            hooks.process(headers, wrong, must_not_run)  # type: ignore[arg-type]


def test_a_body_that_is_too_large_is_refused(
    provider: Provider, receiver: Receiver, clock: ManualClock
) -> None:
    """Before it is hashed."""
    headers, body = provider.request()
    small = Webhooks(receiver, provider.scheme(SECRET), endpoint="/", max_body=len(body), clock=clock)
    small.process(headers, body, Runs())
    small.max_body -= 1
    with pytest.raises(BodyTooLarge) as refused:
        small.process(headers, body, must_not_run)
    assert refused.value.status == 413


@pytest.mark.parametrize(
    "body", [b"", b"{", b"not json", b"\xff\xfe\xff", b"[" * 50_000, b'{"id": "evt_1"} x']
)
def test_a_signed_body_that_is_no_json_is_refused(hooks: Webhooks, provider: Provider, body: bytes) -> None:
    """Clearly: the signature was right."""
    with pytest.raises(EventInvalid, match="JSON") as refused:
        hooks.process(*provider.request(body), must_not_run)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    "body", [b"{}", b"[]", b'"evt"', b'{"id": 5}', b'{"id": ""}', b'{"id": "a\\u0000b"}', b'{"id": null}']
)
def test_a_signed_body_without_an_id_is_refused(receiver: Receiver, body: bytes) -> None:
    """Stripe has it there."""
    hooks = Webhooks(receiver, Stripe(SECRET), endpoint="/", clock=lambda: NOW)
    with pytest.raises(EventInvalid):
        hooks.process(sign_stripe(body), body, must_not_run)


def test_an_event_of_endless_depth_is_refused(receiver: Receiver) -> None:
    """Its content could not be told from another's."""
    hooks = Webhooks(receiver, Stripe(SECRET), endpoint="/", clock=lambda: NOW)
    body = b'{"id": "evt_1", "data": ' + b"[" * 400 + b"]" * 400 + b"}"
    with pytest.raises(EventInvalid):
        hooks.process(sign_stripe(body), body, must_not_run)


def test_a_delivery_without_an_id_is_refused(receiver: Receiver) -> None:
    """GitHub has it in a header."""
    headers, body = PROVIDERS["github"].request()
    del headers["X-GitHub-Delivery"]
    with pytest.raises(EventInvalid):
        Webhooks(receiver, GitHub(SECRET), endpoint="/").process(headers, body, must_not_run)


def test_github_may_send_a_form(receiver: Receiver) -> None:
    """Its other content type; the signature is of the form as it was sent."""
    hooks = Webhooks(receiver, GitHub(SECRET), endpoint="/")
    body = urlencode({"payload": json.dumps({"ref": "größer"})}).encode()
    headers = {**sign_github(body), "content-type": "application/x-www-form-urlencoded; charset=utf-8"}
    del headers["Content-Type"]
    event = hooks.verify(headers, body)
    assert (event.payload, event.kind, event.sent) == ({"ref": "größer"}, "push", None)
    for wrong in (b"payload=1&payload=2", b"other={}", b"\xff", b"&".join([b"a=1"] * 20)):
        with pytest.raises(EventInvalid):
            hooks.verify({**headers, **dict(list(sign_github(wrong).items())[:1])}, wrong)


def test_what_an_event_tells() -> None:
    """Its id, kind and time; its repr has nothing of its content."""
    event = Stripe(SECRET).verify(
        Headers(sign_stripe(b'{"id": "evt_1", "type": "a.b"}')), b'{"id": "evt_1", "type": "a.b"}', NOW
    )
    assert (event.provider, event.id, event.kind, event.sent) == ("stripe", "evt_1", "a.b", NOW)
    assert "body" not in repr(event)
    headers, body = PROVIDERS["standard"].request()
    event = StandardWebhooks(SECRET).verify(Headers(headers), body, NOW)
    assert (event.id, event.kind, event.sent) == ("msg_2KWPBgLlAfxd", "invoice.paid", NOW)


# Choices


@pytest.mark.parametrize("scheme", [Stripe, GitHub, StandardWebhooks])
@pytest.mark.parametrize("secrets", [(), ("",), ("  ",), (None,), (b"bytes",), (SECRET, "")])
def test_a_scheme_needs_its_secret(scheme: Any, secrets: tuple[Any, ...]) -> None:
    """An empty one would be everybody's."""
    with pytest.raises(UsageError):
        scheme(*secrets)


@pytest.mark.parametrize("secret", ["whsec_", "whsec_not base64!", "whsec_abc"])
def test_a_standard_secret_is_base64(secret: str) -> None:
    """One that is cut or of another kind is found when it is given, and not shown."""
    with pytest.raises(UsageError) as refused:
        StandardWebhooks(secret)
    assert secret == "whsec_" or secret not in str(refused.value)


def test_a_standard_secret_may_come_without_its_prefix() -> None:
    """Some providers leave it out."""
    headers, body = PROVIDERS["standard"].request()
    assert StandardWebhooks(SECRET.removeprefix("whsec_")).verify(Headers(headers), body, NOW)


def test_secrets_are_not_shown(provider: Provider) -> None:
    """Not in logs that print a scheme."""
    assert SECRET not in repr(provider.scheme(SECRET))
    assert "SECRET" not in repr(vars(Webhooks))


def test_a_wrong_set_up_is_found_at_once(receiver: Receiver) -> None:
    """No endpoint, or no policy."""
    with pytest.raises(InvalidKey):
        Webhooks(receiver, Stripe(SECRET), endpoint="")
    with pytest.raises(UsageError):
        Webhooks(receiver, Stripe(SECRET), endpoint="/", policy="7d")  # type: ignore[arg-type]


def test_a_coroutine_function_needs_the_other_call(hooks: Webhooks, provider: Provider) -> None:
    """It is told before anything is lost: the event can be handled then."""

    async def handler(event: Event) -> str:
        return "done"

    with pytest.raises(ColourMismatch):
        hooks.process(*provider.request(), handler)
    assert asyncio.run(hooks.aprocess(*provider.request(), handler)).value == "done"


def test_a_handler_may_be_any_callable(hooks: Webhooks, provider: Provider) -> None:
    """Also an object that can't be hashed; not something that can't be called."""

    @dataclass
    class Counter:
        runs: int = 0

        def __call__(self, event: Event) -> int:
            self.runs += 1
            return self.runs

    counter = Counter()
    for _ in range(2):
        assert hooks.process(*provider.request(), counter).value == 1
    with pytest.raises(UsageError):
        hooks.process(*provider.request(), "handler")  # type: ignore[arg-type]


def test_refusals_are_in_the_tree() -> None:
    """One except clause for all of them."""
    for kind in (SignatureInvalid, SignatureStale, BodyTooLarge, EventInvalid):
        assert issubclass(kind, WebhookRefused)
    assert issubclass(WebhookRefused, EffectOnceError)


def test_a_scheme_of_ones_own(receiver: Receiver) -> None:
    """A class with a name and ``verify``."""

    class Ours:
        provider = "ours"

        def verify(self, headers: Headers, body: bytes, now: float) -> Event:
            if headers.one("X-Token") != "secret":
                raise SignatureInvalid("The token is wrong.")
            return Event(self.provider, headers.one("X-Id"), "", body, body, None, body)

    hooks = Webhooks(receiver, Ours(), endpoint="/ours")
    assert hooks.process({"x-token": "secret", "x-id": "1"}, b"hello", Runs()).status == "executed"
    with pytest.raises(SignatureInvalid):
        hooks.process({"x-token": "guess", "x-id": "1"}, b"hello", must_not_run)


def test_events_survive_a_restart(tmp_path: Path, provider: Provider, clock: ManualClock) -> None:
    """In a store that does."""
    runs = Runs()
    for _ in range(2):
        with Receiver(tmp_path / "effects.db") as receiver:
            hooks = Webhooks(receiver, provider.scheme(SECRET), endpoint="/hooks", clock=clock)
            assert hooks.process(*provider.request(), runs).value == {"run": 1}
    assert len(runs) == 1
