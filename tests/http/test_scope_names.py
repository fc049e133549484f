"""What a scope function may give, what is kept of it, and what an operator is told."""

from __future__ import annotations

import asyncio
import logging
from typing import Any
from uuid import UUID

import httpx
import pytest
from pydantic import BaseModel

from effectonce import Receiver, current
from effectonce.errors import UsageError
from effectonce.http import PUBLIC
from effectonce.http._exchange import Problem
from effectonce.http._names import checked_scope
from effectonce.http.asgi import IdempotencyMiddleware
from effectonce.stores.memory import MemoryStore

HASH = "0123456789abcdef" * 4


class Lazy:
    """Such as the lazy objects of Django: it has a text of its own."""

    def __repr__(self) -> str:
        return "Lazy"

    def __str__(self) -> str:
        return "ann"


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("ann", "ann"),
        (7, "7"),
        (b"ann", "ann"),
        (Lazy(), "ann"),
        (UUID(int=7), "00000000-0000-0000-0000-000000000007"),
        ("01a1e32d-cdbe-72ce-a5f6-c062cb1ce126", "01a1e32d-cdbe-72ce-a5f6-c062cb1ce126"),
        ("ann.of.accounting@42nd-street.example", "ann.of.accounting@42nd-street.example"),
        ("customer-17", "customer-17"),
    ],
    ids=repr,
)
def test_names_are_kept_as_they_are(given: Any, name: str) -> None:
    """Strings and whole numbers, such as the primary key of a user."""
    assert checked_scope(given) == name


@pytest.mark.parametrize("given", [None, False, 0, "", b"", " ", "a\nb"], ids=repr)
def test_nothing_is_nobody(given: Any) -> None:
    """The request is refused, and nothing is looked up."""
    with pytest.raises(Problem) as refused:
        checked_scope(given)
    assert refused.value.code == "scope-missing"


@pytest.mark.parametrize(
    "given", [True, object(), ("ann",), {"name": "hunter2"}, 1.5], ids=lambda it: type(it).__name__
)
def test_what_has_no_name_is_told(given: Any) -> None:
    """An address, or a text that changes with what it holds, would not be known again. Its content is not shown."""
    with pytest.raises(UsageError, match="a string or a whole number") as told:
        checked_scope(given)
    assert "hunter2" not in str(told.value)


@pytest.mark.parametrize(
    "secret",
    [
        "Bearer abc",
        b"Bearer abc",
        "sk_live_51H8abcdEFGH",
        "sk_acme",
        "ghp_16C7e42F292c6912E7710c838347Ae178B4a",
        "AKIAIOSFODNN7EXAMPLE",
        "9f86d081884c7d659a2feaa0c55ad015",
        "53oxj7wfmfmcy77pyea9e1hn1cjq5k8x",
        "sessionid=abc",
        "x" * 65,
        HASH,
    ],
    ids=repr,
)
def test_what_looks_like_credentials_is_kept_as_a_hash(secret: Any) -> None:
    """Tokens, whole headers, session keys: neither the store nor a log has them."""
    name = checked_scope(secret)
    assert len(name) == 64
    assert name != secret


def test_a_hash_is_no_credential() -> None:
    """Whoever reads the hash of a caller's credentials in a log can't use it to get that caller's answers."""
    name = checked_scope("Bearer ann's")
    assert checked_scope(name) not in (name, checked_scope("Bearer ann's"))


class User:
    """As frameworks have them: who is not logged in is one, too."""

    is_authenticated = False

    def __str__(self) -> str:
        return "AnonymousUser"


class Proxy:
    """Such as Flask's: its text is that of what it stands for, which may be an address."""

    def __str__(self) -> str:
        return str(object())


class Model(BaseModel):
    """Its text is all that it holds, which may be another at the next request."""

    id: int = 1
    seen: str = "today"


class Row:
    """As an object-relational mapper has them."""

    pk = 1

    def __str__(self) -> str:
        return "Ann Miller"


@pytest.mark.parametrize("given", [User(), Proxy(), Model(), Row()], ids=lambda it: type(it).__name__)
def test_a_user_is_no_name(given: Any) -> None:
    """Everybody who isn't logged in would be one caller, and get the others' answers; or none would be known again."""
    with pytest.raises(UsageError, match="such as the id of a user"):
        checked_scope(given)


def test_services_that_share_a_store_may_get_the_same_key() -> None:
    """Each that says who it is has effects and answers of its own: a gateway hands keys on."""
    store = MemoryStore()
    effects: list[str] = []

    async def service(scope: Any, receive: Any, send: Any) -> None:
        effects.append(current().key)
        await app(scope, receive, send)

    for consumer in ("", "billing", "billing"):
        receiver = Receiver(store, consumer=consumer)
        assert post(IdempotencyMiddleware(service, receiver, scope=PUBLIC), "k", "k") == [201, 201]
    assert effects == ["public|http||k", "public|http:billing||k"]


# -- What an operator is told -----------------------------------------------------------------------------------------


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Says yes to everything."""
    await send({"type": "http.response.start", "status": 201, "headers": []})
    await send({"type": "http.response.body", "body": b"paid"})


def post(asgi: Any, *keys: str) -> list[int]:
    """Send requests with these keys, and give what they are answered."""

    async def send() -> list[int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(asgi), base_url="http://here") as client:
            return [(await client.post("/", headers={"Idempotency-Key": key})).status_code for key in keys]

    return asyncio.run(send())


@pytest.mark.parametrize("busy", [409, "wait"])
def test_a_boundary_inside_itself_is_told(busy: Any) -> None:
    """The inner one meets the key of the outer one. Its 409 would be remembered, and nothing would ever run."""
    receiver = Receiver("memory://")
    inner = IdempotencyMiddleware(app, receiver, scope=PUBLIC, busy=busy)
    with pytest.raises(UsageError, match=r"two boundaries of one receiver|would wait for itself"):
        post(IdempotencyMiddleware(inner, receiver, scope=PUBLIC, busy=busy), "k")


def test_why_requests_are_refused_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """A client that gets 503 is not told why, so the log is."""
    covered = IdempotencyMiddleware(app, Receiver("redis://:hunter2@127.0.0.1:1/0"), scope=PUBLIC)
    with caplog.at_level(logging.WARNING, logger="effectonce.http"):
        assert post(covered, "a", "b", "c") == [503, 503, 503]
    assert caplog.messages
    assert caplog.messages[0].startswith("Requests get 503: Redis at 127.0.0.1:1 can't be reached")
    assert "hunter2" not in caplog.text
