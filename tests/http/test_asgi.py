"""The ASGI middleware in this process: apps that break the rules, leases that are lost, words that are wrong."""

from __future__ import annotations

import asyncio
import gc
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import fields
from itertools import product
from typing import Any

import anyio
import pytest
from tests.http.world import PATIENCE_SECONDS
from tests.unit.receiving import StagedStore, by_hand

from effectonce import Policy, Receiver, State, current
from effectonce.errors import StoreUnavailable, UsageError
from effectonce.http import PUBLIC, Route, _asgi_app, no_store, remember
from effectonce.http._quota import Quota
from effectonce.http._rules import Headers, Rules, RuleWords
from effectonce.http.asgi import IdempotencyMiddleware
from effectonce.testing.clocks import ManualClock

App = Callable[[Any, Any, Any], Awaitable[None]]
START = {"type": "http.response.start", "status": 201, "headers": []}
END = {"type": "http.response.body", "body": b"done"}


def scope_of(method: str = "POST", key: str | None = "k", *headers: tuple[bytes, bytes], **more: Any) -> Any:
    lines = list(headers) + ([(b"idempotency-key", key.encode())] if key is not None else [])
    return {"type": "http", "method": method, "path": "/p", "query_string": b"", "headers": lines, **more}


class Client:
    """One request, and what is sent for it."""

    def __init__(self, *pieces: bytes) -> None:
        bodies = pieces or (b"",)
        self._coming = [
            {"type": "http.request", "body": piece, "more_body": at < len(bodies)}
            for at, piece in enumerate(bodies, 1)
        ]
        self.messages: list[Any] = []
        self.gone = asyncio.Event()

    async def receive(self) -> Any:
        if not self._coming:
            await self.gone.wait()
            return {"type": "http.disconnect"}
        return self._coming.pop(0)

    async def send(self, message: Any) -> None:
        self.messages.append(message)

    @property
    def status(self) -> int | None:
        return self.messages[0]["status"] if self.messages else None

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages[1:])

    @property
    def code(self) -> str | None:
        return json.loads(self.body)["code"] if self.status and self.status >= 400 else None

    @property
    def replayed(self) -> bool:
        return (b"x-idempotency-replayed", b"true") in self.messages[0]["headers"]


async def ask(app: App, scope: Any = None, *pieces: bytes) -> Client:
    client = Client(*pieces)
    await app(scope_of() if scope is None else scope, client.receive, client.send)
    return client


async def until(condition: Callable[[], object]) -> None:
    """Let others have their turns until something is so."""
    while not condition():  # noqa: ASYNC110 - nobody is there to set an event
        await asyncio.sleep(0)


class Handler:
    """An app that sends what it is told, and counts."""

    def __init__(self, *messages: Any, then: Callable[[], Awaitable[None]] | None = None) -> None:
        self.messages, self.then, self.runs = messages or (START, END), then, 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.runs += 1
        for message in self.messages:
            await send(message)
        if self.then is not None:
            await self.then()


def covered(app: App, store: Any = "memory://", **words: Any) -> IdempotencyMiddleware:
    return IdempotencyMiddleware(app, Receiver(store), **{"scope": PUBLIC, **words})


# -- What passes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scope", [{"type": "lifespan"}, {"type": "websocket", "path": "/p"}, scope_of("GET")]
)
def test_everything_else_passes_as_it_is(scope: Any) -> None:
    """The very objects that the server gave: nothing is wrapped, nothing is copied."""
    seen: list[Any] = []

    async def app(*given: Any) -> None:
        seen.extend(given)

    client = Client()
    asyncio.run(covered(app)(scope, receive := client.receive, send := client.send))
    assert seen[0] is scope
    assert seen[1:] == [receive, send]


def test_a_method_in_small_letters_is_covered() -> None:
    """Frameworks that take it for what it means must not open a way around."""
    handler = Handler()

    async def main() -> None:
        app = covered(handler)
        assert [(await ask(app, scope_of("post"))).status for _ in range(2)] == [201, 201]

    asyncio.run(main())
    assert handler.runs == 1


def test_extensions_that_would_send_past_the_body_are_not_offered() -> None:
    """Others, such as who the client is by TLS, are."""
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["extensions"])
        await send({"type": "http.response.early_hint", "links": []})
        await Handler()(scope, receive, send)

    offered = {"tls": {"cn": "ann"}, "http.response.pathsend": {}, "http.response.trailers": {}}
    client = asyncio.run(ask(covered(app), scope_of(extensions=offered)))
    assert seen == [{"tls": {"cn": "ann"}}]
    assert [message["type"] for message in client.messages] == ["http.response.start", "http.response.body"]


# -- Apps that break the rules -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "messages",
    [
        (END,),
        ({**START, "headers": [(b"content-length", b"5")]}, END),
        (
            {**START, "headers": [(b"content-length", b"3")]},
            {**END, "more_body": True},
            {"type": "http.response.body"},
        ),
        (START, {**END, "more_body": True}, {**START, "status": 409}, END),
        (START, END, END),
        (START, END, START, END),
    ],
    ids=["body before start", "too short", "too long", "two in one", "more than all", "one after another"],
)
def test_an_answer_that_can_not_be_sent_is_not_recorded(messages: tuple[Any, ...]) -> None:
    """It is the app's error, so a retry may run, as after any other."""
    handler = Handler(*messages)

    async def main() -> None:
        app = covered(handler)
        for _ in range(2):
            with pytest.raises(RuntimeError):
                await ask(app)

    asyncio.run(main())
    assert handler.runs == 2


@pytest.mark.parametrize("length", [[], [(b"Content-Length", b"4")]])
@pytest.mark.parametrize("status", [204, 304])
def test_an_answer_that_can_have_no_body_loses_the_one_it_has(status: int, length: list[Any]) -> None:
    """``JSONResponse(None, 204)`` is a mistake that no server tells of: what it did is done, once. Nor is a length left
    that server or client would wait for.
    """

    async def story() -> None:
        handler = Handler({**START, "status": status, "headers": [(b"x-kept", b"1"), *length]}, END)
        app = covered(handler)
        answers = [await ask(app) for _ in range(2)]
        assert [(answer.status, answer.body) for answer in answers] == [(status, b"")] * 2
        for answer in answers:
            names = [name.lower() for name, _ in answer.messages[0]["headers"]]
            assert b"x-kept" in names and b"content-length" not in names
        assert (handler.runs, answers[1].replayed) == (1, True)

    asyncio.run(story())


def test_an_app_that_returns_without_a_response_has_failed() -> None:
    """Nothing was said, so a retry may run."""
    runs = 0

    async def silent(scope: Any, receive: Any, send: Any) -> None:
        nonlocal runs
        runs += 1

    async def main() -> None:
        app = covered(silent)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="without a complete response"):
                await ask(app)

    asyncio.run(main())
    assert runs == 2


def test_an_app_that_returns_in_the_middle_of_its_response_has_done_it() -> None:
    """What it did is done; what it said is lost, and no repeat runs it again."""
    handler = Handler(START, {**END, "more_body": True})

    async def main() -> None:
        app = covered(handler)
        with pytest.raises(RuntimeError, match="without a complete response"):
            await ask(app)
        assert (await ask(app)).code == "response-not-replayable"

    asyncio.run(main())
    assert handler.runs == 1


@pytest.mark.parametrize("grace", [0.01, 0.0], ids=["quiet loop", "busy loop"])
def test_a_response_without_a_length_is_complete_when_the_app_ends_well(
    grace: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starlette sends the end of a stream that broke off, and raises only then, some turns of the loop later.

    A loop that others keep busy may not have had these when the time is over.
    """
    monkeypatch.setattr(_asgi_app, "GRACE_SECONDS", grace)

    async def break_off() -> None:
        for _ in range(20):
            await asyncio.sleep(0)
        raise ValueError("the stream broke off")

    handler = Handler(START, {**END, "more_body": True}, {"type": "http.response.body"}, then=break_off)

    async def main() -> None:
        app = covered(handler)
        for _ in range(2):
            with pytest.raises(ValueError, match="broke off"):
                await ask(app)

    asyncio.run(main())
    assert handler.runs == 2


def test_an_answer_does_not_wait_for_what_the_app_does_after_it() -> None:
    """Background tasks may take their time, whether the response had a length or not."""
    for headers in ([], [(b"content-length", b"4")]):

        async def main(start: Any) -> None:
            client, background = Client(), asyncio.Event()

            async def after() -> None:
                await background.wait()

            app = covered(Handler(start, END, then=after))
            running = asyncio.ensure_future(app(scope_of(), client.receive, client.send))
            await until(lambda: len(client.messages) == 2)
            assert (client.status, client.body, running.done()) == (201, b"done", False)
            background.set()
            await running

        asyncio.run(main({**START, "headers": headers}))


def test_pieces_may_be_any_bytes_and_headers_any_iterable() -> None:
    """All that ASGI, and Starlette beyond it, allow."""
    pieces = (
        {"type": "http.response.body", "body": memoryview(b"do"), "more_body": True},
        {"type": "http.response.body", "body": bytearray(b"ne")},
    )

    async def main() -> None:
        handler = Handler({**START, "headers": iter([[b"x-a", b"1"], [b"x-a", b"2"]])}, *pieces)
        app = covered(handler)
        for replayed in (False, True):
            client = await ask(app)
            assert (client.body, client.replayed) == (b"done", replayed)
            assert client.messages[0]["headers"][:2] == [(b"x-a", b"1"), (b"x-a", b"2")]

    asyncio.run(main())


@pytest.mark.parametrize("length", [[], [(b"content-length", b"6")]])
def test_an_app_may_use_one_buffer_for_all_pieces(length: list[Any]) -> None:
    """Servers have written a piece when it was sent; what is held of it does not change with the next."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({**START, "headers": length})
        buffer = bytearray(3)
        for piece in (b"one", b"two"):
            buffer[:] = piece
            await send(
                {"type": "http.response.body", "body": memoryview(buffer), "more_body": piece == b"one"}
            )
        buffer[:] = b"end"

    async def main() -> None:
        middleware = covered(app)
        assert [(await ask(middleware)).body for _ in range(2)] == [b"onetwo"] * 2

    asyncio.run(main())


def test_what_a_handler_says_of_its_answer_adds_up() -> None:
    """Whoever says for how long has not taken back that it is not to be stored."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        no_store()
        remember(keep="1h")
        await Handler()(scope, receive, send)

    async def main() -> None:
        middleware, store, clock = on_a_clock(app)
        await ask(middleware)
        assert (await ask(middleware)).code == "response-not-replayable"
        (record,) = await store.scan()
        assert record.expires_at - clock() == 3600

    asyncio.run(main())


def test_nothing_of_an_answer_that_is_not_to_be_stored_is_stored() -> None:
    """Neither its body nor its headers, where tokens and places are told as well."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        no_store()
        headers = [(b"location", b"/reset?token=s3cret")]
        await send({"type": "http.response.start", "status": 201, "headers": headers})
        await send({"type": "http.response.body", "body": b"s3cret"})

    async def main() -> None:
        middleware, store, _ = on_a_clock(app)
        assert (await ask(middleware)).messages[0]["headers"][0] == (b"location", b"/reset?token=s3cret")
        (record,) = await store.scan()
        assert b"s3cret" not in (record.result or b"")
        assert (await ask(middleware)).code == "response-not-replayable"

    asyncio.run(main())


# -- Leases, stores and cancellation -------------------------------------------------------------------------------


def on_a_clock(app: App, **words: Any) -> tuple[IdempotencyMiddleware, StagedStore, ManualClock]:
    clock = ManualClock()
    store = StagedStore(clock=clock)
    receiver = by_hand(Receiver(store, monotonic=clock, policy=Policy(lease=60, **words)))
    return IdempotencyMiddleware(app, receiver, scope=PUBLIC), store, clock


@pytest.mark.parametrize("streams", [False, True])
def test_of_two_attempts_the_recorded_one_answers(streams: bool) -> None:
    """A lease ended and another attempt took over: its answer is everyone's, and a stream of the other one stops."""
    gates: list[asyncio.Event] = []
    stopped: list[BaseException] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        gates.append(gate := asyncio.Event())
        number = len(gates)
        if number == 1:
            await gate.wait()
        if number == 1 and streams:
            await send({**START, "headers": [(b"content-type", b"text/event-stream")]})
            try:
                while True:
                    await send({"type": "http.response.body", "body": b"data", "more_body": True})
                    await asyncio.sleep(0)
            except ConnectionAbortedError as error:
                stopped.append(error)
                raise
        await Handler(START, {"type": "http.response.body", "body": b"%d" % number})(scope, receive, send)

    async def main() -> None:
        middleware, _, clock = on_a_clock(app)
        first = asyncio.ensure_future(ask(middleware))
        await until(lambda: gates)
        clock.advance(61)
        assert (await ask(middleware)).body == b"2"
        gates[0].set()
        client = await first
        assert (client.status, client.body, client.replayed) == (201, b"2", True)

    asyncio.run(main())
    assert len(stopped) == streams


@pytest.mark.parametrize("claim", ["boundary", "handler"])
def test_a_handler_whose_lease_is_lost_is_cancelled(claim: Any) -> None:
    """Whoever claimed: what it would still do is another attempt's, whose answer its client gets."""
    runs: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert claim == "boundary" or await scope["effectonce"].claim("ann")
        runs.append("began")
        if len(runs) == 1:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                runs.append("cancelled")
                raise
        await Handler()(scope, receive, send)

    async def main() -> None:
        middleware, store, clock = on_a_clock(app)
        receiver = middleware.boundary.receiver
        api = IdempotencyMiddleware(app, receiver, scope=PUBLIC if claim == "boundary" else None, claim=claim)
        first = asyncio.ensure_future(ask(api))
        await until(lambda: runs)
        clock.advance(61)
        assert (await ask(api)).status == 201
        await receiver.flow.keeper.tick(store, clock())
        client = await first
        assert (client.status, client.replayed) == (201, True)

    asyncio.run(asyncio.wait_for(main(), PATIENCE_SECONDS))
    assert runs == ["began", "began", "cancelled"]


def test_what_goes_wrong_while_recording_is_not_the_apps_word() -> None:
    """A store that breaks in a way of its own: the claim stays, and nobody runs it again."""
    handler = Handler()

    async def main() -> None:
        middleware, store, _ = on_a_clock(handler)
        store.fail("complete", error=RuntimeError("a bug in the driver"))
        with pytest.raises(RuntimeError, match="driver"):
            await ask(middleware)
        store.recover()
        assert (await ask(middleware)).code == "in-progress"
        assert not middleware.boundary.receiver.flow.keeper.live
        (record,) = await store.scan()
        assert record.state is State.PENDING

    asyncio.run(main())
    assert handler.runs == 1


def test_a_store_that_is_silent_while_recording_gets_503() -> None:
    """Also for longer than the lease: what the app did is recorded when the store is back, and never done again."""
    handler = Handler()

    async def main() -> None:
        middleware, store, clock = on_a_clock(handler)
        keeper = middleware.boundary.receiver.flow.keeper

        async def silence() -> None:
            clock.advance(61)
            await keeper.tick(store, clock())
            await asyncio.sleep(0)  # where a handler that lost its lease would be cancelled
            raise StoreUnavailable("no answer")

        store.fail("renew_many", error=StoreUnavailable("no answer"))
        store.before["complete"] = silence
        client = await ask(middleware)
        assert (client.status, client.code) == (503, "store-unavailable")
        store.recover()
        clock.advance(61)
        await keeper.tick(store, clock())
        client = await ask(middleware)
        assert (client.status, client.replayed) == (201, True)

    asyncio.run(main())
    assert handler.runs == 1


def test_an_impatient_handler_is_recorded_all_the_same() -> None:
    """A cancel scope of anyio cancels again and again what takes longer than it may, and recording does."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        with anyio.CancelScope() as patience:
            store.before["complete"] = lambda: patience.cancel() or asyncio.sleep(0.01)
            await Handler({**START, "headers": [(b"content-length", b"4")]}, END)(scope, receive, send)

    async def main() -> None:
        with pytest.raises(RuntimeError, match="without a complete response"):
            await ask(middleware)
        client = await ask(middleware)
        assert (client.status, client.body, client.replayed) == (201, b"done", True)

    middleware, store, _ = on_a_clock(app)
    asyncio.run(main())
    assert store.calls.count("complete") == 2


def test_a_handler_that_listens_hears_of_a_gone_client_after_its_answer() -> None:
    """Frameworks act on a disconnect: it is held back until the answer is recorded, and told then."""
    heard: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        listening = asyncio.ensure_future(receive())
        for _ in range(20):  # longer than a disconnect takes that is not held back
            await asyncio.sleep(0)
        if listening.done():
            raise ConnectionError("the client has gone, so nothing is done for it")
        await Handler({**START, "headers": [(b"content-length", b"4")]}, END)(scope, receive, send)
        heard.append((await listening)["type"])

    async def main() -> None:
        client, middleware = Client(), covered(app)
        client.gone.set()
        await middleware(scope_of(), client.receive, client.send)
        assert (client.status, heard) == (201, ["http.disconnect"])

    asyncio.run(main())


def test_an_error_that_nobody_waits_for_is_reported() -> None:
    """The client had gone; whoever watches the event loop hears of it."""
    told: list[Any] = []
    gate = asyncio.Event()

    async def fail() -> None:
        await gate.wait()
        raise ValueError("nobody hears this")

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
        app = covered(Handler(START, then=fail))
        running = asyncio.ensure_future(ask(app))
        await asyncio.sleep(0)
        await until(lambda: app.running)
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled()
        gate.set()
        await until(lambda: not app.running)

    asyncio.run(main())
    assert [repr(error) for error in told] == ["ValueError('nobody hears this')"]


def test_a_request_leaves_nothing_to_collect() -> None:
    """No object waits for the garbage collector, which would be a cost of every request.

    Threads that other tests have left may add some of theirs to one count, but not to all of them.
    """

    async def left_by_one(app: Any, key: str) -> int:
        gc.collect()
        gc.disable()
        try:
            await ask(app, scope_of(key=key))
            return gc.collect()
        finally:
            gc.enable()

    async def main() -> None:
        app = covered(Handler())
        await ask(app)
        for number in range(20):
            if not await left_by_one(app, f"k-{number}"):
                return
        raise AssertionError("every request left something")

    asyncio.run(main())


# -- Bodies --------------------------------------------------------------------------------------------------------


def test_a_body_that_is_shorter_than_it_says_is_refused() -> None:
    """Where a server takes the end of a connection for the end of a body."""
    handler = Handler()
    client = asyncio.run(ask(covered(handler), scope_of("POST", "k", (b"content-length", b"10")), b"5 EUR"))
    assert (client.status, client.code, handler.runs) == (400, "request-incomplete", 0)


def test_a_length_beyond_all_numbers_is_refused() -> None:
    """Without reading the number, which would take long."""
    handler = Handler()
    client = asyncio.run(ask(covered(handler), scope_of("POST", "k", (b"content-length", b"9" * 5000))))
    assert (client.status, handler.runs) == (413, 0)


def test_a_client_that_leaves_before_its_body_has_asked_nothing() -> None:
    """Nothing runs, and nothing is sent."""

    async def main() -> None:
        client = Client(b"5 ", b"EUR")
        client._coming.pop()
        client.gone.set()
        await covered(handler)(scope_of(), client.receive, client.send)
        assert client.messages == []

    handler = Handler()
    asyncio.run(main())
    assert handler.runs == 0


@pytest.mark.parametrize("size", [10, 70_000, 1_500_000])
@pytest.mark.parametrize("fingerprint", ["body", "json"])
def test_a_body_reaches_the_app_as_it_was(size: int, fingerprint: Any) -> None:
    """In one piece or in many, from memory or from the disk, hashed here or in a thread."""
    body = json.dumps({"x": "y" * size}).encode()
    heard: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while True:
            message = await receive()
            heard.append(message["body"])
            if not message["more_body"]:
                break
        await Handler()(scope, receive, send)

    async def main() -> None:
        middleware = covered(app, fingerprint=fingerprint)
        assert (await ask(middleware, None, body)).status == 201
        third = len(body) // 3
        assert (await ask(middleware, None, body[:third], body[third:])).replayed
        assert (await ask(middleware, scope_of(key="l"), body[:third], body[third:])).status == 201

    asyncio.run(main())
    assert b"".join(heard) == body * 2


# -- Handlers that claim -------------------------------------------------------------------------------------------


def claiming(then: Callable[[Any, Any, Any], Awaitable[None]]) -> IdempotencyMiddleware:
    return covered(then, scope=None, claim="handler")


def test_a_handler_claims_once() -> None:
    """And not after it has answered."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if not scope["effectonce"].claimed and scope["path"] == "/late":
            await Handler()(scope, receive, send)
        else:
            assert await scope["effectonce"].claim("ann")
            assert current().key == "ann|http||k"
        await scope["effectonce"].claim("ann")

    async def main() -> None:
        for path in ("/p", "/late"):
            with pytest.raises(UsageError, match="claimed already"):
                await ask(claiming(app), scope_of(path=path))

    asyncio.run(main())


def test_what_no_handler_claims_is_cancelled_as_ever() -> None:
    """Without a claim there is nothing to protect."""
    ended: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(5):  # it takes its time to clean up
                await asyncio.sleep(0)
            ended.append("cancelled")

    async def main() -> None:
        running = asyncio.ensure_future(ask(claiming(app)))
        for _ in range(5):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled()
        assert ended == ["cancelled"]

    asyncio.run(main())


def test_a_handler_that_claims_has_the_body_before_and_after() -> None:
    """What it read before is part of what was asked, and what it did not read is still there."""
    heard: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        heard.append((await receive())["body"])
        if await scope["effectonce"].claim("ann"):
            heard.append((await receive())["body"])
            await Handler()(scope, receive, send)

    async def main() -> None:
        middleware = claiming(app)
        assert (await ask(middleware, None, b"5 ", b"EUR")).status == 201
        assert (await ask(middleware, None, b"5 ", b"EUR")).replayed
        assert (await ask(middleware, None, b"5 ", b"USD")).code == "key-reused"

    asyncio.run(main())
    assert heard == [b"5 ", b"EUR", b"5 ", b"5 "]


@pytest.mark.parametrize("ending", ["returns", "raises"])
def test_a_repeat_is_answered_once_whatever_the_handler_says_then(
    monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """An answer without a length waits for the app's end, and must not be followed by itself."""
    monkeypatch.setattr(_asgi_app, "GRACE_SECONDS", 0)
    monkeypatch.setattr(_asgi_app, "GRACE_TURNS", 0)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        may_run = await scope["effectonce"].claim("ann")
        await Handler()(scope, receive, send)
        if not may_run and ending == "raises":
            raise ZeroDivisionError

    async def main() -> None:
        middleware = claiming(app)
        for replayed in (False, True):
            client = await ask(middleware)
            for _ in range(10):  # turns in which it could be answered again
                await asyncio.sleep(0)
            starts = [message for message in client.messages if "status" in message]
            assert (len(starts), client.status, client.replayed) == (1, 201, replayed)

    asyncio.run(main())


# -- Words ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ({"methods": "POST"}, "methods="),
        ({"methods": ["GET", "POST"]}, "methods="),
        ({"max_request": -1}, "max_request="),
        ({"max_new_keys": "5"}, "max_new_keys="),
        ({"busy": 503}, "busy="),
        ({"not_yet": [500]}, "not_yet="),
        ({"not_yet": "401"}, "not_yet="),
        ({"not_yet": 401.5}, "not_yet="),
        ({"header": "a b"}, "header="),
        ({"documentation": "https://example.com/schlüssel"}, "documentation="),
        ({"documentation": "https://example.com/>\r\nX: 1"}, "documentation="),
        ({"keys": 5}, "no such rule"),
        ({"scope": None}, "scope="),
        ({"scope": "everybody"}, "scope="),
    ],
)
def test_a_wrong_word_is_told(words: dict[str, Any], match: str) -> None:
    """When the app is made, not when the first request comes."""
    with pytest.raises(UsageError, match=match):
        covered(Handler(), **words)


def test_what_is_no_receiver_is_told() -> None:
    """Such as the URL of a store."""
    with pytest.raises(UsageError, match="not a Receiver"):
        IdempotencyMiddleware(Handler(), "memory://", scope=PUBLIC)  # type: ignore[arg-type]


def test_the_typed_words_are_the_rules() -> None:
    """Neither has one that the other lacks."""
    assert set(RuleWords.__annotations__) == {each.name for each in fields(Rules) if each.init}


def test_a_scope_function_may_be_awaited_and_may_fail() -> None:
    """What it raises goes to the server, and nothing was claimed."""

    async def whose(request: Any) -> str:
        await asyncio.sleep(0)
        return {"ann": "ann"}[request.headers["x-user"]]

    async def main() -> None:
        app = covered(handler, scope=whose)
        assert (await ask(app, scope_of("POST", "k", (b"x-user", b"ann")))).status == 201
        with pytest.raises(KeyError):
            await ask(app, scope_of("POST", "k", (b"x-user", b"bob")))

    handler = Handler()
    asyncio.run(main())
    assert handler.runs == 1


def test_headers_by_name() -> None:
    """Whatever the case; several lines are one, cookies by semicolons."""
    headers = Headers([(b"a", b"1"), (b"cookie", b"b=2"), (b"a", b"3"), (b"cookie", b"c=\xfc")])
    assert (headers["A"], headers["cookie"], headers.get("d"), len(headers)) == ("1, 3", "b=2; c=ü", None, 2)
    assert list(headers) == ["a", "cookie"]
    assert "ж" not in headers


def test_a_quota_is_for_a_minute() -> None:
    """Then every caller may go on."""
    clock = ManualClock()
    quota = Quota(clock)
    assert (quota.take("ann", 1), quota.take("ann", 1), quota.take("bob", 1)) == (True, False, True)
    clock.advance(59)
    assert (quota.take("ann", 1), quota.refusal().retry_after) == (False, 1.0)
    clock.advance(1)
    assert quota.take("ann", 1)


def test_a_crowd_gets_no_more_new_keys_than_one_after_another() -> None:
    """However many ask before the store has answered the first; and repeats, in a crowd too, use none."""

    async def main() -> None:
        store = StagedStore()
        store.before["claim"] = lambda: until(lambda: store.calls.count("claim") % 8 == 0)  # all, or nobody

        async def statuses(app: App, keys: str) -> list[int | None]:
            clients = await asyncio.gather(*(ask(app, scope_of(key=key)) for key in keys))
            return [client.status for client in clients]

        app = covered(Handler(), store, max_new_keys=5)
        assert await statuses(app, "abcdefgh") == [201] * 5 + [429] * 3
        assert await statuses(app, "aaaaaaaa") == [201] * 8
        other = covered(Handler(), store, max_new_keys=1)
        assert await statuses(other, "aaaaaaaa") == [201] * 8
        store.recover()
        assert await statuses(other, "ik") == [201, 429]

    asyncio.run(main())


@pytest.mark.parametrize("claim", ["boundary", "handler"])
def test_a_refusal_says_its_key(claim: Any) -> None:
    """As it was sent, and so that scripts may read it: a caller without a name, a large body, too many keys."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        name = scope["headers"][0][1].decode() or None
        if claim == "boundary" or await scope["effectonce"].claim(name):
            await Handler()(scope, receive, send)

    async def main() -> None:
        scope = None if claim == "handler" else lambda request: request.headers["x-user"]
        api = covered(app, scope=scope, claim=claim, max_request=3, max_new_keys=1)
        for name, key, body, status in (
            (b"", "a", b"", 403),
            (b"ann", '"b"', b"1234", 413),
            (b"ann", "c", b"", 201),
            (b"ann", '"d"', b"", 429),
        ):
            client = await ask(api, scope_of("POST", key, (b"x-user", name)), body)
            headers = client.messages[0]["headers"]
            assert (client.status, [value for each, value in headers if each == b"idempotency-key"]) == (
                status,
                [key.encode()],
            )
            assert b"access-control-expose-headers" in dict(headers)

    asyncio.run(main())


@pytest.mark.parametrize("claim", ["boundary", "handler"])
@pytest.mark.parametrize("line", ['"open', "two, keys", "\xff"])
def test_what_is_no_key_is_told_first_and_is_not_echoed(claim: Any, line: str) -> None:
    """Whoever may be calling: a header of the answer is no place for what a stranger has sent."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if await scope["effectonce"].claim(None):
            await Handler()(scope, receive, send)

    async def main() -> None:
        scope = None if claim == "handler" else lambda request: None
        api = covered(app, scope=scope, claim=claim)
        client = await ask(api, scope_of("POST", None, (b"idempotency-key", line.encode("latin-1"))))
        assert client.code == "key-invalid"
        assert b"idempotency-key" not in dict(client.messages[0]["headers"])

    asyncio.run(main())


def test_what_is_no_document_has_no_documents_fingerprint() -> None:
    """With ``fingerprint="json"`` a body that is none counts by its bytes, which say what they are."""

    async def main() -> None:
        app = covered(Handler(), fingerprint="json")
        bodies = (b'{"a": 1}', b'{ "a":1 }', b'json{"a":1}', b'body{"a":1}')
        assert [(await ask(app, None, body)).status for body in bodies] == [201, 201, 422, 422]
        bodies = (b'json{"a":1}', b'{"a":1}', b'json{"a": 1}')
        assert [(await ask(app, scope_of(key="l"), body)).status for body in bodies] == [201, 422, 422]

    asyncio.run(main())


@pytest.mark.parametrize("given", [17, b"17"], ids=repr)
def test_a_key_function_that_gives_no_text_is_told(given: Any) -> None:
    """In the words of whoever wrote it."""
    app = covered(Handler(), key=lambda request, body: given)
    with pytest.raises(UsageError, match=f"gave a {type(given).__name__}"):
        asyncio.run(ask(app, scope_of(key=None)))


@pytest.mark.parametrize("length", [[(b"content-length", b"4")], []], ids=["one piece", "unknown length"])
def test_an_app_does_not_hear_that_its_answer_could_not_be_sent(length: list[Any]) -> None:
    """What it has to do afterwards, such as its background tasks, is done; the server hears of its error then."""
    done: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({**START, "headers": length})
        await send(END)
        done.append("afterwards")

    async def lost(message: Any) -> None:
        raise ConnectionResetError("nobody is there")

    async def main() -> None:
        api = covered(app)
        with pytest.raises(ConnectionResetError):
            await api(scope_of(), Client().receive, lost)
        assert (await ask(api)).replayed

    asyncio.run(main())
    assert done == ["afterwards"]


def test_an_outer_time_out_of_anyio_is_known_as_its_own() -> None:
    """Also around a request that has no key for its handler to claim: it goes on after its scope."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        api = covered(app, scope=None, claim="handler")
        with anyio.CancelScope() as scope:
            asyncio.get_running_loop().call_soon(scope.cancel)
            await ask(api, scope_of(key=None))
        assert scope.cancelled_caught

    asyncio.run(main())


@pytest.mark.parametrize(
    ("path", "root", "status"),
    [
        ("/api/free", "/api", 201),
        ("/api/api/free", "/api", 400),
        ("/apifree", "/api", 400),
        ("/free", "/api", 201),
    ],
)
def test_routes_are_the_paths_that_the_app_sees(path: str, root: str, status: int) -> None:
    """Wherever it is mounted, and whether the server says so in the path or not."""
    seen: list[str] = []

    def whose(request: Any) -> str:
        seen.append(request.path)
        return "ann"

    app = covered(Handler(), routes=[Route("/free", covered=False)], scope=whose)
    assert asyncio.run(ask(app, scope_of("POST", None, path=path, root_path=root))).status == status
    assert asyncio.run(ask(app, scope_of(path="/api/pay", root_path="/api"))).status == 201
    assert seen == ["/pay"]


def test_stars_mean_what_they_say() -> None:
    """``*`` is a part of a path, ``**`` any number: in every short pattern, on every short path."""
    paths = ["".join(each) for size in range(6) for each in product("/ab", repeat=size)]
    for signs in product(("/", "a", "*", "**"), repeat=4):
        pattern = "/" + "".join(signs)
        plain = {"*": "[^/]*", "**": ".*"}
        meant = re.compile("".join(plain.get(part, part) for part in re.split(r"(\*\*?)", pattern)))
        route = Route(pattern)
        for path in paths:
            assert route.matches(f"/{path}") == (meant.fullmatch(f"/{path}") is not None), (pattern, path)


def test_nobody_chooses_a_path_that_takes_long_to_compare() -> None:
    """Tried in every way, the stars of this route would keep the loop busy for hours."""
    assert not Route("/**/a/**/a/**/a/**/b").matches("/a" * 4000)


def test_a_route_may_have_rules_of_its_own() -> None:
    """By path, where a star stands for a part and two for any number of them."""
    handler = Handler()

    async def main() -> None:
        app = covered(handler, routes=[Route("/free/*", covered=False), Route("/loose/**", required=False)])
        for path, status in (("/free/a", 201), ("/free/a/b", 400), ("/loose/a/b", 201), ("/other", 400)):
            assert (await ask(app, scope_of("POST", None, path=path))).status == status

    asyncio.run(main())
