"""FastAPI in this process: who may call is asked first, and what a handler does works as it does without a boundary."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Any

import httpx
import pytest
from fastapi import BackgroundTasks, Body, Depends, FastAPI, HTTPException, Request, WebSocket
from starlette.requests import HTTPConnection
from starlette.responses import StreamingResponse

from effectonce import NotApplied, Receiver, current
from effectonce.errors import UsageError
from effectonce.http import remember
from effectonce.http.fastapi import idempotent, install

ALLOWED = {"ann", "bob"}


def signed_in(request: Request) -> str:
    """Who is calling; refuses whoever may not."""
    user = request.headers.get("x-user", "")
    if user not in ALLOWED:
        raise HTTPException(401, "Sign in first.")
    return user


def api(form: str) -> FastAPI:
    """An app whose every POST is covered, in one form or the other."""
    receiver = Receiver("memory://")
    if form == "dependency":
        app = FastAPI(dependencies=[idempotent(signed_in)])
        install(app, receiver)
    else:
        app = FastAPI(dependencies=[Depends(signed_in)])
        install(app, receiver, scope=lambda request: request.headers.get("x-user"))
    return app


@pytest.fixture(params=["dependency", "whole"])
def app(request: pytest.FixtureRequest) -> FastAPI:
    return api(request.param)


def talk(app: FastAPI, conversation: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    """Have a conversation with an app as Ann."""

    async def main() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://here", headers={"X-User": "ann"}
        ) as client:
            await conversation(client)

    asyncio.run(main())


KEY = {"Idempotency-Key": '"k"'}
events: list[str] = []


async def session() -> AsyncIterator[str]:
    """Something that is opened for a request and closed after it."""
    events.append("opened")
    yield "session"
    events.append("closed")


def test_who_may_not_call_is_refused_before_anything_is_replayed() -> None:
    """With the dependency, authorisation is asked on every repeat: also one that was allowed and is no more."""
    app, runs = api("dependency"), []

    @app.post("/pay")
    def pay() -> str:
        runs.append(current().key)
        return "paid"

    async def conversation(client: httpx.AsyncClient) -> None:
        assert (await client.post("/pay", headers=KEY)).status_code == 200
        stranger = await client.post("/pay", headers=KEY | {"X-User": "mallory"})
        assert (stranger.status_code, stranger.json()) == (401, {"detail": "Sign in first."})
        ALLOWED.remove("ann")
        try:
            assert (await client.post("/pay", headers=KEY)).status_code == 401
        finally:
            ALLOWED.add("ann")
        assert (await client.post("/pay", headers=KEY)).headers["x-idempotency-replayed"] == "true"

    talk(app, conversation)
    assert runs == ["ann|http||k"]


def test_a_caller_without_a_name_is_refused_by_the_whole_boundary() -> None:
    """It stands before the app, so the scope function is what refuses."""
    app = api("whole")
    app.post("/pay")(lambda: "paid")

    async def conversation(client: httpx.AsyncClient) -> None:
        reply = await client.post("/pay", headers=KEY | {"X-User": ""})
        assert (reply.status_code, reply.json()["code"]) == (403, "scope-missing")

    talk(app, conversation)


def test_handlers_in_threads_and_dependencies_that_yield(app: FastAPI) -> None:
    """``current()`` and what a handler says of its answer work in a plain function; what was opened is closed."""
    events.clear()

    @app.post("/pay", status_code=201)
    def pay(session: Annotated[str, Depends(session)], background: BackgroundTasks) -> dict[str, Any]:
        remember(keep="1h")
        background.add_task(events.append, "after")
        return {"fence": current().fence, "session": session}

    async def conversation(client: httpx.AsyncClient) -> None:
        first, second = [await client.post("/pay", headers=KEY) for _ in range(2)]
        assert (first.status_code, second.status_code, first.json()) == (201, 201, second.json())
        assert second.headers["x-idempotency-replayed"] == "true"

    talk(app, conversation)
    assert sorted(events[:3]) == ["after", "closed", "opened"]
    opened = events.count("opened")
    assert (events.count("after"), events.count("closed")) == (1, opened)


@pytest.mark.parametrize(("status", "runs"), [(402, 1), (429, 2), (503, 2)])
def test_an_http_exception_is_an_answer(app: FastAPI, status: int, runs: int) -> None:
    """Remembered by its status, like any other."""
    ran: list[int] = []

    @app.post("/pay")
    async def pay() -> None:
        ran.append(1)
        raise HTTPException(status, "no")

    async def conversation(client: httpx.AsyncClient) -> None:
        replies = [await client.post("/pay", headers=KEY) for _ in range(2)]
        assert [reply.status_code for reply in replies] == [status, status]

    talk(app, conversation)
    assert len(ran) == runs


def test_an_exception_goes_where_it_went(app: FastAPI) -> None:
    """To the handlers that the app has for it; and to the server, if it has none. Then a retry may run."""
    ran: list[str] = []

    @app.exception_handler(KeyError)
    async def handle(request: Request, error: Exception) -> Any:
        return StreamingResponse(iter(["known"]), 500)

    @app.post("/known")
    async def known() -> None:
        ran.append("known")
        raise KeyError

    @app.post("/unknown")
    async def unknown() -> None:
        ran.append("unknown")
        raise NotApplied

    async def conversation(client: httpx.AsyncClient) -> None:
        for _ in range(2):
            assert (await client.post("/known", headers=KEY)).text == "known"
            with pytest.raises(NotApplied):
                await client.post("/unknown", headers={"Idempotency-Key": "another"})

    talk(app, conversation)
    assert ran == ["known", "unknown"] * 2


def test_a_large_body_comes_as_it_was_sent(app: FastAPI) -> None:
    """Two megabytes, read by the handler after the claim, or by the framework before it."""
    sizes: list[int] = []

    @app.post("/stream")
    async def stream(request: Request) -> int:
        sizes.append(sum([len(piece) async for piece in request.stream()]))
        return sizes[-1]

    @app.post("/document")
    async def document(text: Annotated[str, Body()]) -> int:
        sizes.append(len(text))
        return sizes[-1]

    async def conversation(client: httpx.AsyncClient) -> None:
        for path in ("/stream", "/document"):
            for replayed in (None, "true"):
                key = {"Idempotency-Key": path}
                reply = await client.post(path, headers=key, json="x" * (2 << 20))
                assert (reply.status_code, reply.headers.get("x-idempotency-replayed")) == (200, replayed)

    talk(app, conversation)
    assert sizes == [(2 << 20) + 2, 2 << 20]


def test_a_dependency_in_an_app_that_is_covered_as_a_whole_is_told() -> None:
    """Twice is a mistake: nobody could say whose key it is."""
    app = FastAPI(dependencies=[idempotent(signed_in)])
    install(app, Receiver("memory://"), scope=lambda request: "ann")
    app.post("/pay")(lambda: "paid")

    async def conversation(client: httpx.AsyncClient) -> None:
        with pytest.raises(UsageError, match="covered as a whole"):
            await client.post("/pay", headers=KEY)

    talk(app, conversation)


def test_a_websocket_below_the_dependency_passes() -> None:
    """Said of a whole app, it is meant for requests; who opens a WebSocket is asked for a name, and for no key."""
    asked: list[str] = []

    def whoever(connection: HTTPConnection) -> str:
        asked.append(connection.scope["type"])
        return "ann"

    app = FastAPI(dependencies=[idempotent(whoever)])
    install(app, Receiver("memory://"))

    @app.websocket("/live")
    async def live(socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text(await socket.receive_text())
        await socket.close()

    @app.post("/pay")
    def pay() -> str:
        return "paid"

    async def conversation(client: httpx.AsyncClient) -> None:
        heard = await opened(app, "/live", "hello")
        assert [each["type"] for each in heard] == ["websocket.accept", "websocket.send", "websocket.close"]
        assert heard[1]["text"] == "hello"
        assert [(await client.post("/pay", headers=KEY)).json() for _ in range(2)] == ["paid", "paid"]

    talk(app, conversation)
    assert asked == ["websocket", "http", "http"]


async def opened(app: FastAPI, path: str, text: str) -> list[Any]:
    """Open a WebSocket and say something: what is heard."""
    said = [{"type": "websocket.connect"}, {"type": "websocket.receive", "text": text}]
    heard: list[Any] = []
    scope = {"type": "websocket", "path": path, "query_string": b"", "headers": [], "subprotocols": []}

    async def receive() -> Any:
        return said.pop(0)

    async def send(message: Any) -> None:
        heard.append(message)

    await app(scope, receive, send)
    return heard


class CancelsWhenTheClientLeaves:
    """Listens for the end of a connection from the first message on, as many apps do."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        messages: asyncio.Queue[Any] = asyncio.Queue()
        handler = asyncio.ensure_future(self.app(scope, messages.get, send))

        async def listen() -> None:
            while (message := await receive())["type"] == "http.request":
                messages.put_nowait(message)
            handler.cancel()

        listener = asyncio.ensure_future(listen())
        try:
            await handler
        finally:
            listener.cancel()


def test_a_client_that_leaves_does_not_cut_off_a_handler_that_has_claimed() -> None:
    """Not even where a middleware asked before the claim to be told of it, and cancels then."""
    effects: list[str] = []
    leaving = asyncio.Event()
    app = FastAPI()
    app.add_middleware(CancelsWhenTheClientLeaves)
    install(app, Receiver("memory://"))

    @app.post("/pay", dependencies=[idempotent(signed_in)])
    async def pay() -> str:
        effects.append("begun")
        leaving.set()
        for _ in range(50):  # turns of the loop in which a cancellation would come
            await asyncio.sleep(0)
        effects.append("ended")
        return "paid"

    async def conversation(client: httpx.AsyncClient) -> None:
        arriving = [{"type": "http.request", "body": b"", "more_body": False}]

        async def leaves(scope: Any, _: Any, send: Any) -> None:
            async def receive() -> Any:
                if arriving:
                    return arriving.pop()
                await leaving.wait()
                return {"type": "http.disconnect"}

            await app(scope, receive, send)

        transport = httpx.ASGITransport(leaves)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://here", headers=client.headers
        ) as gone:
            await gone.post("/pay", headers={"Idempotency-Key": "1"})
        assert (await client.post("/pay", headers={"Idempotency-Key": "1"})).json() == "paid"
        assert effects == ["begun", "ended"]

    talk(app, conversation)
