"""FastAPI: what the OpenAPI document says is what happens, whatever is sent (schemathesis); and it says everything."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import httpx
import pytest
import schemathesis
from fastapi import APIRouter, FastAPI, Header, Path
from hypothesis import HealthCheck, settings
from pydantic import BaseModel, Field
from schemathesis.specs.openapi.checks import positive_data_acceptance, unsupported_method

from effectonce import Receiver
from effectonce.errors import UsageError
from effectonce.http import PUBLIC, Route
from effectonce.http.fastapi import idempotent, install


class Payment(BaseModel):
    cents: Annotated[int, Field(gt=0, lt=10**12)]
    to: str


class Receipt(BaseModel):
    number: int
    cents: int


# What FastAPI answers by itself and does not say.
UNREADABLE: dict[int | str, dict[str, Any]] = {400: {"content": {"application/json": {}}}}


def caller(x_caller: Annotated[str, Header(pattern="^[a-z]{1,20}$")]) -> str:
    return x_caller


def payments_api(*, by_dependency: bool) -> FastAPI:
    """An API whose own answers are in its document."""
    app, router = FastAPI(), APIRouter()
    numbers: list[int] = []

    async def pay(payment: Payment) -> Receipt:
        numbers.append(payment.cents)
        return Receipt(number=len(numbers), cents=payment.cents)

    async def pay_from(
        account: Annotated[str, Path(pattern="^[a-z0-9]{1,10}$")], payment: Payment
    ) -> Receipt:
        return await pay(payment)

    router.post("/payments/{account}", status_code=201, responses=UNREADABLE)(pay_from)
    if by_dependency:
        install(app, Receiver("memory://"), busy=425)
        app.include_router(router, dependencies=[idempotent(caller)])
    else:
        install(app, Receiver("memory://"), scope=PUBLIC, routes=[Route("/free", covered=False)])
        app.include_router(router)
    app.post("/free", responses=UNREADABLE)(pay)
    return app


def call(app: FastAPI, method: str, path: str, **words: Any) -> httpx.Response:
    """Send a request to an app, in this process."""

    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
            return await client.request(method, path, **words)

    return asyncio.run(send())


APPS = {kind: payments_api(by_dependency=kind == "dependency") for kind in ("whole", "dependency")}
whole = schemathesis.openapi.from_asgi("/openapi.json", APPS["whole"])
single = schemathesis.openapi.from_asgi("/openapi.json", APPS["dependency"])
EFFORT = settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))


def check(case: schemathesis.Case, *excluded: Any) -> None:
    """Send a request, and hold the answer against the document. That a key is new is no matter of syntax."""
    response = case.call()
    reused = [positive_data_acceptance] if '"key-reused"' in response.text else []
    case.validate_response(response, excluded_checks=[*excluded, *reused])


@whole.parametrize()
@EFFORT
def test_a_whole_app_keeps_to_its_document(case: schemathesis.Case) -> None:
    """Every status, content type and body is as described; nothing breaks.

    A method that no route has needs a key, too: the boundary stands before the routes.
    """
    check(case, unsupported_method)


@single.parametrize()
@EFFORT
def test_a_single_route_keeps_to_its_document(case: schemathesis.Case) -> None:
    """The same with the dependency, where nothing stands before the routes."""
    check(case)


@pytest.mark.parametrize("kind", APPS)
def test_the_document_says_what_the_boundary_answers(kind: str) -> None:
    """The key, and every problem with its status, at covered operations; nothing at others."""
    document = call(APPS[kind], "GET", "/openapi.json").json()
    covered, free = document["paths"]["/payments/{account}"]["post"], document["paths"]["/free"]["post"]
    header = [each for each in covered["parameters"] if each["name"] == "Idempotency-Key"]
    assert [(each["in"], each["required"]) for each in header] == [("header", True)]
    assert "Idempotency-Key" not in str(free)
    assert "problem+json" not in str(free)
    problems = {
        status
        for status, each in covered["responses"].items()
        if "application/problem+json" in each.get("content", {})
    }
    busy = {"425"} if kind == "dependency" else set()
    assert problems == {"400", "403", "408", "409", "410", "411", "413", "422", "429", "503"} | busy
    assert "application/json" in covered["responses"]["422"]["content"]  # FastAPI's own refusal


@pytest.mark.parametrize("alias", ["idempotency-key", "Idempotency-Key"])
@pytest.mark.parametrize("by_dependency", [False, True])
def test_a_route_that_declares_the_key_itself_has_it_once(alias: str, by_dependency: bool) -> None:
    """Names of headers know no case: two of one name would not be a valid document. The problems are there, too."""
    app = FastAPI()
    install(app, Receiver("memory://"), scope=None if by_dependency else PUBLIC)

    @app.post("/pay", dependencies=[idempotent(lambda: "ann")] if by_dependency else [])
    def pay(x_note: Annotated[str, Header()], key: str = Header(alias=alias)) -> str:
        return key + x_note

    operation = app.openapi()["paths"]["/pay"]["post"]
    parameters = [(each["in"], each["name"]) for each in operation["parameters"]]
    assert sorted(parameters) == [("header", "Idempotency-Key"), ("header", "x-note")]
    assert "409" in operation["responses"]


def test_a_boundary_that_is_missing_is_noticed() -> None:
    """A route that asks for it in an app that has none must not run as if it were there."""
    app = FastAPI()

    @app.api_route("/pay", methods=["GET", "POST"], dependencies=[idempotent(lambda: "ann")])
    def pay() -> str:
        return "paid"

    assert call(app, "GET", "/pay").status_code == 200
    with pytest.raises(UsageError, match="install"):
        call(app, "POST", "/pay", headers={"Idempotency-Key": "a"})
