"""FastAPI: the ASGI middleware, a dependency for single routes, and the problem documents in OpenAPI.

    install(app, receiver, scope=caller)                     every POST and PATCH, claimed before the app runs

    install(app, receiver)                                   only routes with the dependency, claimed after those
    @app.post("/payments", dependencies=[idempotent(caller)])    dependencies that say who is calling

``caller`` is a function of the request in the first form, and a dependency in the second: so whoever may not call is
refused before anything is claimed or replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Unpack

from .._receiver import Receiver
from ..errors import MissingExtra, UsageError
from ._boundary import SAFE, Boundary, Route, RuleWords, Scope
from ._exchange import PROBLEMS
from .asgi import HANDLE, IdempotencyMiddleware

try:
    from fastapi import Depends, FastAPI, Header, HTTPException
    from starlette.requests import Request
except ImportError as error:
    raise MissingExtra("effectonce.http.fastapi needs FastAPI: pip install 'effectonce[fastapi]'.") from error

__all__ = ["PROBLEM_RESPONSES", "IdempotencyMiddleware", "idempotent", "install"]

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


def _responses() -> dict[int | str, dict[str, Any]]:
    titles: dict[int, list[str]] = {}
    for status, title, _ in PROBLEMS.values():
        titles.setdefault(status, []).append(title)
    content = {"application/problem+json": {"schema": PROBLEM_SCHEMA}}
    return {status: {"description": "; ".join(found), "content": content} for status, found in titles.items()}


PROBLEM_RESPONSES = _responses()
"""What a covered route may answer besides its own, for ``responses=``."""


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
    if scope is None:
        rules.setdefault("claim", "handler")
    routes = list(routes)
    app.add_middleware(IdempotencyMiddleware, receiver=receiver, scope=scope, routes=routes, **rules)
    boundary = Boundary(receiver, scope, routes, **rules)
    app.state.effectonce = boundary
    describe = app.openapi

    def openapi() -> dict[str, Any]:
        return _with_problems(describe(), boundary) if scope is not None else describe()

    app.openapi = openapi  # type: ignore[method-assign]


def idempotent(scope: Callable[..., Any], *, header: str = "Idempotency-Key") -> Any:
    """A dependency that makes one route happen once. ``scope`` is a dependency too: it says who is calling.

    Name it after the dependencies that refuse callers, and give the route ``responses=PROBLEM_RESPONSES``.
    """

    async def claim(
        request: Request,
        whose: Any = Depends(scope),  # noqa: B008 - how FastAPI is told
        key: str | None = Header(
            None, alias=header, description="Names this request; the same on every repeat."
        ),
    ) -> None:
        covered = request.scope.get(HANDLE)
        if covered is None:
            _check_uncovered(request)
        elif not await covered.claim(whose):
            raise HTTPException(covered.instead.status)  # the boundary sends the answer in its place

    claim.__annotations__ = {"request": Request, "whose": Any, "key": str | None, "return": None}
    return Depends(claim)


def _check_uncovered(request: Request) -> None:
    """A method that is not covered passes. A boundary that is not there must not go unnoticed."""
    boundary: Boundary | None = getattr(request.app.state, "effectonce", None)
    if request.method in SAFE:
        return
    if boundary is None or boundary.rules_for(request.method, request.scope["path"]) is not None:
        raise UsageError("The boundary is missing: call install(app, receiver) without a scope first.")


def _with_problems(document: dict[str, Any], boundary: Boundary) -> dict[str, Any]:
    for path, operations in document.get("paths", {}).items():
        for method, operation in operations.items():
            rules = boundary.rules_for(method.upper(), path)
            if rules is None:
                continue
            parameters = operation.setdefault("parameters", [])
            if not any(each.get("name") == rules.header for each in parameters):
                schema = {"type": "string", "maxLength": 257}
                parameters.append(
                    {"name": rules.header, "in": "header", "required": rules.required, "schema": schema}
                )
            for status, response in PROBLEM_RESPONSES.items():
                operation.setdefault("responses", {}).setdefault(str(status), response)
    return document
