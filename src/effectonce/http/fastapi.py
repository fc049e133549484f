"""FastAPI: the ASGI middleware, a dependency for single routes, and the problem documents in OpenAPI.

    install(app, receiver, scope=caller)                     every POST and PATCH, claimed before the app runs

    install(app, receiver)                                   only routes with the dependency, claimed after those
    @app.post("/payments", dependencies=[idempotent(caller)])    dependencies that say who is calling

``caller`` is a function of the request in the first form, and a dependency in the second: so whoever may not call is
refused before anything is claimed or replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Unpack

from .._receiver import Receiver
from ..errors import MissingExtra, UsageError
from ._asgi_app import HANDLE, seen_path
from ._boundary import Boundary
from ._exchange import PROBLEMS
from ._rules import SAFE, Route, Rules, RuleWords, Scope
from .asgi import IdempotencyMiddleware

try:
    from fastapi import Depends, FastAPI, Header, HTTPException
    from starlette.requests import HTTPConnection
except ImportError as error:
    raise MissingExtra("effectonce.http.fastapi needs FastAPI: pip install 'effectonce[fastapi]'.") from error

__all__ = ["IdempotencyMiddleware", "idempotent", "install"]

PROBLEM_SCHEMA: dict[str, Any] = {
    "type": "object",
    "title": "Problem",
    "required": ["type", "title", "status", "detail", "code", "retryable"],
    "properties": {
        "type": {"type": "string", "format": "uri"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "code": {"type": "string", "enum": sorted(PROBLEMS)},
        "retryable": {"type": "boolean"},
    },
}

CLAIMED = "x-effectonce"
"""Marks the header of a dependency that claims, to be found again in the document."""
STRICT_PATTERN = r'^"(?! *"$)([ !#-\[\]-~]|\\["\\]){1,255}"$'
PATTERN = rf"{STRICT_PATTERN}|^[!#-+\--:<-\[\]-~]{{1,255}}$"
"""What is a key, for the document; ``_exchange.key_of`` decides."""
KEY: Any = Header(None, alias="IDEMPOTENCY-KEY", json_schema_extra={CLAIMED: True})
"""Written as no route would: of two parameters of one name FastAPI keeps one, and the mark could be lost."""


def install(
    app: FastAPI,
    receiver: Receiver,
    *,
    scope: Scope = None,
    routes: Iterable[Route] = (),
    **rules: Unpack[RuleWords],
) -> None:
    """Put an app behind the boundary, and say so in its OpenAPI document.

    Without a scope, only routes with ``idempotent(...)`` among their dependencies are covered.
    """
    if hasattr(app.state, "effectonce"):
        raise UsageError("This app has a boundary already. A second one would wait for the first.")
    if scope is None:
        rules.setdefault("claim", "handler")
    routes = list(routes)
    boundary = Boundary(receiver, scope, routes, **rules)
    app.add_middleware(IdempotencyMiddleware, receiver=receiver, scope=scope, routes=routes, **rules)
    app.state.effectonce = boundary
    describe = app.openapi

    def openapi() -> dict[str, Any]:
        is_new = app.openapi_schema is None
        document = describe()
        if is_new:
            for operation, its_rules in _covered(boundary, document):
                _describe(operation, its_rules)
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def idempotent(scope: Callable[..., Any]) -> Any:
    """A dependency that makes one route happen once. ``scope`` is a dependency too: it says who is calling.

    Name it after the dependencies that refuse callers. Said for a whole router, it lets WebSockets pass, which have no
    keys; then ``scope`` has to take what they have, too, such as an ``HTTPConnection`` instead of a ``Request``.
    """
    if not callable(scope):
        raise UsageError(f"idempotent({scope!r}): name a dependency, a function that says who is calling.")

    async def claim(
        request: HTTPConnection,
        whose: Any = Depends(scope),  # noqa: B008 - how FastAPI is told
        key: Any = KEY,
    ) -> None:
        if request.scope["type"] != "http":
            return
        covered = request.scope.get(HANDLE)
        if covered is None:
            _check_uncovered(request)
        elif not await covered.claim(whose):
            raise HTTPException(covered.instead.status)  # the boundary sends the answer in its place

    claim.__annotations__ = {"request": HTTPConnection, "whose": Any, "key": Any, "return": None}
    return Depends(claim)


def _check_uncovered(request: HTTPConnection) -> None:
    """A method that is not covered passes, and is named in the log. A boundary that is not there must not pass."""
    boundary: Boundary | None = getattr(request.app.state, "effectonce", None)
    method: str = request.scope["method"]
    if method in SAFE:
        return
    if boundary is None:
        raise UsageError(
            "The boundary is missing: call install(app, receiver) without a scope first. An app that is mounted has "
            f"that of the app around it, where {method} has to be among methods=."
        )
    path = seen_path(request.scope)
    if boundary.rules_for(method, path) is not None:
        raise UsageError(
            "This app is covered as a whole, and the key was claimed before its routes. Leave out either "
            "scope= of install(app, receiver, scope=...) or idempotent(...) of the route."
        )
    rules = next((rules for route, rules in boundary.routes if route.matches(path)), boundary.rules)
    if rules is not None:  # None: covered=False was said of it
        boundary.warn_of_method(method, getattr(request.scope.get("route"), "path", path), rules)


# -- OpenAPI -------------------------------------------------------------------------------------------------------


def _covered(boundary: Boundary, document: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Rules]]:
    """The operations of a document that the boundary covers, with their rules."""
    for path, operations in document.get("paths", {}).items():
        for method, operation in operations.items():
            rules = boundary.rules_for(method.upper(), path)
            claimed = any(map(_is_claim, operation.get("parameters", ())))
            if rules is not None and (rules.claim == "boundary" or claimed):
                yield operation, rules


def _is_claim(parameter: dict[str, Any]) -> bool:
    return CLAIMED in parameter.get("schema", {})


def _is_key(parameter: dict[str, Any], header: str) -> bool:
    """Whether a parameter stands for the key: a dependency's, or one that the route declares itself."""
    place, name = parameter.get("in"), str(parameter.get("name"))
    return _is_claim(parameter) or (place == "header" and name.lower() == header.lower())


def _describe(operation: dict[str, Any], rules: Rules) -> None:
    """Add the key, and what the boundary may answer, to what an operation says of itself."""
    parameter = {
        "name": rules.header,
        "in": "header",
        "required": rules.required and rules.key is None,
        "description": f"Names this request; the same on every repeat of it. See {rules.documentation}",
        "schema": {"type": "string", "pattern": STRICT_PATTERN if rules.strict else PATTERN},
    }
    others = [each for each in operation.get("parameters", ()) if not _is_key(each, rules.header)]
    operation["parameters"] = [*others, parameter]
    titles: dict[int, list[str]] = {}
    for code, (status, title, _) in PROBLEMS.items():
        titles.setdefault(rules.busy_status if code == "in-progress" else status, []).append(title)
    responses = operation.setdefault("responses", {})
    for status, found in sorted(titles.items()):
        response = responses.setdefault(str(status), {"description": "; ".join(found)})
        response.setdefault("content", {})["application/problem+json"] = {"schema": PROBLEM_SCHEMA}
