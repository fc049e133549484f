"""The app under test on FastAPI: behind the boundary as a whole, and with a dependency where a route asks for it."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import FastAPI, Header, HTTPException, Request, Response
from tests.http.apps.bare_asgi import asked
from tests.http.apps.kitchen import ROUTES, boundary, cook, open_receiver
from tests.http.apps.starlette_app import METHODS, as_response

from effectonce.http.fastapi import idempotent, install


async def answer(request: Request) -> Response:
    return as_response(await asyncio.to_thread(cook, *asked(request.scope), await request.body()))


async def caller(x_caller: Annotated[str, Header()] = "somebody") -> str:
    """Who is calling; whoever may not is refused here."""
    if x_caller == "mallory":
        raise HTTPException(401)
    return x_caller


application = FastAPI()
install(application, open_receiver(), **boundary())
application.api_route("/{path:path}", methods=METHODS)(answer)

by_dependency = FastAPI()
install(by_dependency, open_receiver(), routes=[route for route in ROUTES if route.covered])
by_dependency.api_route("/uncovered/{path:path}", methods=METHODS)(answer)
by_dependency.api_route("/{path:path}", methods=METHODS, dependencies=[idempotent(caller)])(answer)
