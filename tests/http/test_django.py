"""The Django middleware: settings, what views say of themselves, its place in the stack, Django's test clients."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from io import BytesIO
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any

import django
import pytest
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.files.uploadedfile import SimpleUploadedFile
from django.core.handlers.asgi import ASGIHandler
from django.db.transaction import non_atomic_requests
from django.http import FileResponse, HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse
from django.test import AsyncClient, AsyncRequestFactory, Client, override_settings
from django.test.client import AsyncClientHandler, FakePayload
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View

from effectonce import Receiver, current
from effectonce.errors import UsageError
from effectonce.http import PUBLIC, Request, Route
from effectonce.http.django import IdempotencyMiddleware, Misconfigured, idempotent, not_idempotent
from effectonce.stores.memory import MemoryStore

MIDDLEWARE = "effectonce.http.django.IdempotencyMiddleware"
KEY: dict[str, Any] = {"headers": {"Idempotency-Key": "key"}}

if not settings.configured:
    settings.configure(
        SECRET_KEY="nobody's",
        ALLOWED_HOSTS=["*"],
        ROOT_URLCONF=__name__,
        MIDDLEWARE=[MIDDLEWARE],
        DATABASES={
            "default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:", "ATOMIC_REQUESTS": True}
        },
        LOGGING_CONFIG=None,
        USE_TZ=True,
    )
    django.setup()

runs: list[Any] = []


# -- Views ---------------------------------------------------------------------------------------------------------


def pay(request: HttpRequest) -> HttpResponse:
    runs.append(request)
    response = JsonResponse({"number": len(runs), "size": len(request.body)}, status=201)
    response.set_cookie("session", "secret")
    response.data = "what a framework leaves on a response"
    return response


@non_atomic_requests
async def pay_later(request: HttpRequest) -> HttpResponse:
    runs.append(request)
    return JsonResponse({"number": len(runs), "size": len(request.body)}, status=201)


@idempotent(required=False, replayed_header="Again")
def maybe(request: HttpRequest) -> HttpResponse:
    runs.append(request)
    return HttpResponse(f"{len(runs)}")


@not_idempotent
def search(request: HttpRequest) -> HttpResponse:
    runs.append(request)
    return HttpResponse(f"{len(runs)}")


@method_decorator(idempotent(methods={"PUT"}), name="dispatch")
class Order(View):
    def put(self, request: HttpRequest, number: int) -> HttpResponse:
        runs.append(request)
        return HttpResponse(f"{number} {len(runs)}")


@method_decorator(idempotent, name="dispatch")
class Refund(View):
    def post(self, request: HttpRequest) -> HttpResponse:
        runs.append(request)
        return HttpResponse(f"{len(runs)}")


def upload(request: HttpRequest) -> HttpResponse:
    runs.append(request)
    return HttpResponse(f"{request.POST['title']} {request.FILES['file'].size}")


def file(request: HttpRequest) -> FileResponse:
    return FileResponse(BytesIO(b"x" * int(request.GET["size"])), filename="report.txt", as_attachment=True)


def deleted(request: HttpRequest) -> HttpResponse:
    runs.append(request)
    response = JsonResponse({"deleted": True}, status=204)
    response["Content-Length"] = "17"
    return response


def broken(request: HttpRequest) -> HttpResponse:
    runs.append(request)
    response = StreamingHttpResponse([b"abc"]) if "streamed" in request.GET else HttpResponse(b"abc")
    response["Content-Length"] = "4"
    return response


def stream(request: HttpRequest) -> StreamingHttpResponse:
    def pieces() -> Iterator[str]:
        for number in range(3):
            yield f"{number} {current().fence} "

    return StreamingHttpResponse(pieces())


@non_atomic_requests
async def stream_later(request: HttpRequest) -> StreamingHttpResponse:
    async def pieces() -> AsyncIterator[str]:
        for number in range(3):
            yield f"{number} {current().fence} "

    return StreamingHttpResponse(pieces())


@non_atomic_requests
async def lose(request: HttpRequest) -> HttpResponse:
    runs.append("begun")
    current().lose()
    await asyncio.Event().wait()
    return HttpResponse()


def save(request: HttpRequest) -> HttpResponse:
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute("create table if not exists payments (id integer)")
        cursor.execute("insert into payments values (1)")
        cursor.execute("select count(*) from payments")
        rows = cursor.fetchone()[0]
    if request.GET["fails"] == str(len(runs)):
        runs.append(request)
        raise ZeroDivisionError("a bug")
    return HttpResponse(f"{rows}")


urlpatterns = [
    path("pay", pay),
    path("deleted", deleted),
    path("broken", broken),
    path("pay-later", pay_later),
    path("maybe", maybe),
    path("search", search),
    path("orders/<int:number>", Order.as_view()),
    path("refunds", Refund.as_view()),
    path("upload", upload),
    path("file", file),
    path("stream", stream),
    path("stream-later", stream_later),
    path("save", save),
    path("lose", lose),
]


# -- Set-up --------------------------------------------------------------------------------------------------------


class ReadsTheBody:
    """Something above that looks into requests."""

    def __init__(self, get_response: Any) -> None:
        self.get_response = get_response

    def __call__(self, request: Any) -> Any:
        self.look(request)
        return self.get_response(request)

    def look(self, request: Any) -> None:
        assert request.body is not None


class ReadsPieces(ReadsTheBody):
    def look(self, request: Any) -> None:
        request.read(1)


class AddsHeader(ReadsTheBody):
    """Something that adds to every response."""

    def __call__(self, request: Any) -> Any:
        response = self.get_response(request)
        response["X-Added"] = f"{response.get('X-Added', '')}+"
        return response


def caller(request: Request) -> str:
    """Who is calling, found by its dotted path."""
    assert isinstance(request.raw, HttpRequest)
    return request.headers.get("x-user", "somebody")


async def caller_later(request: Request) -> str:
    return caller(request)


@pytest.fixture
def words(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """The setting EFFECTONCE of a test, with a store of its own; a test may add to it."""
    runs.clear()
    words: dict[str, Any] = {"receiver": Receiver("memory://"), "scope": PUBLIC}
    with override_settings(EFFECTONCE=words, ROOT_URLCONF=__name__, MIDDLEWARE=[MIDDLEWARE]):
        yield words


@pytest.fixture(params=["sync", "async"])
def send(request: pytest.FixtureRequest, words: dict[str, Any]) -> Callable[..., Any]:
    """Send a request with Django's test client of either colour, through a stack that is built anew."""

    def send(method: str, path: str, **more: Any) -> Any:
        return getattr(Client(), method)(path, **more)

    return send if request.param == "sync" else asend


def asend(method: str, path: str, **more: Any) -> Any:
    """Send a request through an asynchronous stack, and read the answer on the same event loop."""

    async def sent() -> Any:
        response = await getattr(AsyncClient(), method)(path, **more)
        if response.streaming:
            response.read = b"".join([piece async for piece in response])
        return response

    return asyncio.run(sent())


def content(response: Any) -> bytes:
    """The body of a response, streaming or not."""
    if not response.streaming:
        return bytes(response.content)
    return bytes(response.read) if hasattr(response, "read") else b"".join(response)


# -- Test clients --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("view", ["/pay", "/pay-later"])
def test_a_request_happens_once_in_both_colours(send: Callable[..., Any], view: str) -> None:
    """Stacks and views of either colour, with Django's own test clients."""
    first, second = (
        send("post", view, data={"cents": 5}, content_type="application/json", **KEY) for _ in range(2)
    )
    assert (first.status_code, second.json()) == (201, first.json())
    assert (first.get("X-Idempotency-Replayed"), second["X-Idempotency-Replayed"]) == (None, "true")
    assert (len(runs), second["Idempotency-Key"]) == (1, "key")


def test_a_request_without_a_body_or_a_key(send: Callable[..., Any]) -> None:
    """A problem, and an empty body that counts as one."""
    assert send("post", "/pay").json()["code"] == "key-missing"
    responses = [send("patch", "/pay", **KEY) for _ in range(2)]
    assert [response.json()["size"] for response in responses] == [0, 0]
    assert len(runs) == 1


def test_the_first_response_is_the_views_own(send: Callable[..., Any]) -> None:
    """With its cookies and all that a framework leaves on it; a repeat has neither."""
    first, second = (send("post", "/pay", **KEY) for _ in range(2))
    assert (first.cookies["session"].value, first.data) == ("secret", "what a framework leaves on a response")
    assert not second.cookies and not hasattr(second, "data")


def test_exceptions_reach_a_test_client_as_they_are(words: dict[str, Any]) -> None:
    """Django turns them into 500 inside, which frees the key, and the client raises them."""
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            Client().post("/save?fails=0", **KEY)
        runs.clear()


# -- Views that say their rules ------------------------------------------------------------------------------------


def test_a_view_says_its_own_rules(send: Callable[..., Any]) -> None:
    """Before those of its path."""
    assert [send("post", "/maybe").content for _ in range(2)] == [b"1", b"2"]
    assert send("post", "/maybe", **KEY).content == b"3"
    repeat = send("post", "/maybe", **KEY)
    assert (repeat.content, repeat["Again"]) == (b"3", "true")


def test_a_view_can_be_left_out(send: Callable[..., Any]) -> None:
    """It runs every time, with a key or without."""
    assert [send("post", "/search", **KEY).content for _ in range(2)] == [b"1", b"2"]


def test_a_class_says_its_rules_on_dispatch(send: Callable[..., Any]) -> None:
    """With Django's own ``method_decorator``; here for a method that is not covered otherwise."""
    assert [send("put", "/orders/7", **KEY).content for _ in range(2)] == [b"7 1", b"7 1"]


def test_only_some_views_can_be_covered(words: dict[str, Any]) -> None:
    """Everything excepted by a route, and views that say otherwise."""
    words["routes"] = [Route("/**", covered=False)]
    client = Client()
    assert [client.post("/pay", **KEY).json()["number"] for _ in range(2)] == [1, 2]
    assert [client.post("/maybe", **KEY).content for _ in range(2)] == [b"3", b"3"]
    assert client.post("/refunds").json()["code"] == "key-missing"
    refund = {"headers": {"Idempotency-Key": "refund"}}
    assert [client.post("/refunds", **refund).content for _ in range(2)] == [b"4", b"4"]


def test_a_path_that_is_not_there_is_djangos_answer(words: dict[str, Any]) -> None:
    """404 from Django, under the general rules."""
    assert Client().post("/nowhere", **KEY).status_code == 404
    assert Client().get("/nowhere").status_code == 404


def test_a_misspelt_rule_is_told_where_it_is_said() -> None:
    """With the words there are."""
    with pytest.raises(UsageError, match="kep: no such rule"):
        idempotent(kep="7d")(pay)


# -- Bodies --------------------------------------------------------------------------------------------------------


def test_an_upload_may_be_larger_than_djangos_memory(send: Callable[..., Any]) -> None:
    """The limit of Django for what a view reads at once is none for files; the body counts to its last byte."""
    size = settings.DATA_UPLOAD_MAX_MEMORY_SIZE + 1

    def form(end: bytes) -> dict[str, Any]:
        return {"title": "a file", "file": SimpleUploadedFile("a.bin", b"x" * size + end)}

    assert [send("post", "/upload", data=form(b"1"), **KEY).content for _ in range(2)] == [
        b"a file %d" % (size + 1)
    ] * 2
    assert send("post", "/upload", data=form(b"2"), **KEY).json()["code"] == "key-reused"
    assert len(runs) == 1


@pytest.mark.parametrize(
    "look",
    [
        lambda request: request.raw.POST["title"],
        lambda request: request.raw.FILES["file"].name,
        lambda request: request.raw.body and "ann",
        lambda request: request.raw.read(3) and "ann",
    ],
    ids=["a field", "a file", "all", "a piece"],
)
def test_a_scope_function_may_read_the_body(
    send: Callable[..., Any], words: dict[str, Any], look: Callable[[Request], str]
) -> None:
    """In any of Django's ways; it is there again for the view, and counts as ever."""
    words["scope"] = look
    for end, code in ((b"1", None), (b"1", None), (b"2", "key-reused")):
        file = SimpleUploadedFile("a.bin", b"x" * 100_000 + end)
        response = send("post", "/upload", data={"title": "ann", "file": file}, **KEY)
        assert response.content == b"ann 100001" if code is None else response.json()["code"] == code
    assert len(runs) == 1


def test_a_body_that_is_too_large_is_refused_though_a_scope_function_looks_away(
    send: Callable[..., Any], words: dict[str, Any]
) -> None:
    """What it is refused for, when the function asks for it, it is refused for afterwards, too."""

    def look(request: Request) -> str:
        with suppress(Exception):
            request.raw.read()
        return "ann"

    words.update(scope=look, max_request=3)
    assert send("post", "/pay", data=b"5 EUR", content_type="text/plain", **KEY).status_code == 413
    assert not runs


def test_a_natural_key_is_made_of_the_whole_body(send: Callable[..., Any], words: dict[str, Any]) -> None:
    """Which the view can read as ever, however large."""
    words["key"] = lambda request, body: body[-3:].decode()
    size = settings.DATA_UPLOAD_MAX_MEMORY_SIZE
    form = {"title": "a file", "file": SimpleUploadedFile("a.bin", b"x" * size)}
    answers = []
    for _ in range(2):
        form["file"] = SimpleUploadedFile("a.bin", b"x" * size)
        answers.append(send("post", "/upload", data=form))
    assert [answer.content for answer in answers] == [b"a file %d" % size] * 2
    assert len(runs) == 1


def test_a_body_that_was_read_above_counts_as_well(send: Callable[..., Any], words: dict[str, Any]) -> None:
    """It is there for everybody."""
    with override_settings(MIDDLEWARE=[f"{__name__}.ReadsTheBody", MIDDLEWARE]):
        for body, code in ((b"5 EUR", None), (b"6 EUR", "key-reused")):
            response = send("post", "/pay", data=body, content_type="text/plain", **KEY)
            assert response.json().get("code") == code
    assert len(runs) == 1


def test_a_body_that_was_taken_above_is_a_mistake(words: dict[str, Any]) -> None:
    """Nobody can tell any more what was asked, so nothing runs."""
    with (
        override_settings(MIDDLEWARE=[f"{__name__}.ReadsPieces", MIDDLEWARE]),
        pytest.raises(UsageError, match="Move it below"),
    ):
        Client().post("/pay", data=b"5 EUR", content_type="text/plain", **KEY)
    assert not runs


def test_a_key_of_two_lines_is_none_where_lines_can_be_told(words: dict[str, Any]) -> None:
    """Under ASGI: halves of a string in two lines are no string, though Django joins them to one."""
    halves = [(b"idempotency-key", b'"a'), (b"idempotency-key", b'b"')]

    async def main() -> Any:
        scope = AsyncRequestFactory()._base_scope(method="POST", path="/pay-later", headers=halves)  # type: ignore[attr-defined]
        return await AsyncClientHandler()(scope | {"_body_file": FakePayload(b"")})

    assert json.loads(asyncio.run(main()).content)["code"] == "key-invalid"
    assert not runs


def test_a_refusal_says_its_key(send: Callable[..., Any], words: dict[str, Any]) -> None:
    """As it was sent."""
    words["max_request"] = 3
    refusal = send("post", "/pay", data=b"12345", content_type="text/plain", **KEY)
    assert (refusal.status_code, refusal["Idempotency-Key"]) == (413, "key")


# -- Responses -----------------------------------------------------------------------------------------------------


def test_a_file_is_remembered(send: Callable[..., Any]) -> None:
    """With its name and its length; Django's way to have the server send it finds no file to send."""
    first, second = (send("post", "/file?size=1000", **KEY) for _ in range(2))
    assert content(first) == content(second) == b"x" * 1000
    assert (second["Content-Length"], "report.txt" in second["Content-Disposition"]) == ("1000", True)
    assert first.file_to_stream is None


def test_a_large_file_is_sent_and_not_remembered(send: Callable[..., Any], words: dict[str, Any]) -> None:
    """All of it, from the beginning."""
    words["max_response"] = 1000
    assert content(send("post", "/file?size=9001", **KEY)) == b"x" * 9001
    assert send("post", "/file?size=9001", **KEY).json()["code"] == "response-not-replayable"


@pytest.mark.parametrize("view", ["/stream", "/stream-later"])
@pytest.mark.parametrize("most", [1000, 5, 0])
def test_a_stream_of_either_colour_is_served_by_either(words: dict[str, Any], view: str, most: int) -> None:
    """Held or let through; it knows its attempt to its end."""
    words["max_response"] = most
    response = Client().post(view, **KEY) if view == "/stream" else asend("post", view, **KEY)
    assert content(response) == b"0 1 1 1 2 1 "
    repeat = Client().post(view, **KEY)
    assert (repeat.get("X-Idempotency-Replayed") == "true") == (most == 1000)


def test_a_plain_stream_on_an_event_loop_is_read_in_threads(words: dict[str, Any]) -> None:
    """Piece by piece, without Django's warning that it reads it all at once."""
    for key, most in (("a", 1000), ("b", 5)):
        words["max_response"] = most
        response = asend("post", "/stream", headers={"Idempotency-Key": key})
        assert content(response) == b"0 1 1 1 2 1 "


def test_an_answer_that_can_have_no_body_loses_the_one_it_has(send: Callable[..., Any]) -> None:
    """``JsonResponse({…}, status=204)``: some servers send what clients take for the next answer."""
    for _ in range(2):
        response = send("post", "/deleted", **KEY)
        assert (response.status_code, response.content) == (204, b"")
        assert "Content-Length" not in response
    assert len(runs) == 1


@pytest.mark.parametrize("query", ["", "?streamed"])
def test_an_answer_that_is_not_as_long_as_it_says_is_not_recorded(
    send: Callable[..., Any], query: str
) -> None:
    """It is the view's error, so a retry may run."""
    for _ in range(2):
        with pytest.raises(RuntimeError, match="said that it answers 4 bytes"):
            send("post", f"/broken{query}", **KEY)
    assert len(runs) == 2


def test_what_is_below_is_remembered_and_what_is_above_runs_again(send: Callable[..., Any]) -> None:
    """A header from below comes once on a repeat, as on the first answer; one from above is added to each."""
    adds = f"{__name__}.AddsHeader"
    with override_settings(MIDDLEWARE=[adds, MIDDLEWARE, adds]):
        assert [send("post", "/pay", **KEY)["X-Added"] for _ in range(2)] == ["++", "++"]


def test_a_views_transaction_has_ended_before_its_answer_is_recorded(words: dict[str, Any]) -> None:
    """With ATOMIC_REQUESTS: what raised was rolled back and may run again; what is remembered was committed."""
    client = Client(raise_request_exception=False)
    assert client.post("/save?fails=0", **KEY).status_code == 500
    assert [client.post("/save?fails=0", **KEY).content for _ in range(2)] == [b"1", b"1"]


# -- Trouble -------------------------------------------------------------------------------------------------------


def test_an_interrupted_record_leaves_the_claim_to_its_lease(
    words: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C between the view's end and the record: the key is not free, and nobody renews it."""
    receiver = words["receiver"]

    async def interrupted(completion: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(receiver.blocking.store, "complete", interrupted)
        Client().post("/pay", **KEY)
    assert receiver.flow.keeper.live == {}
    assert Client().post("/pay", **KEY).json()["code"] == "in-progress"


def test_a_view_on_an_event_loop_is_stopped_when_its_lease_is_lost(words: dict[str, Any]) -> None:
    """It is cancelled at its next await; the client is told to ask again."""
    assert asend("post", "/lose", **KEY).json()["code"] == "in-progress"
    assert runs == ["begun"]


def test_an_attempt_that_was_overtaken_gives_the_answer_that_counts(words: dict[str, Any]) -> None:
    """And gives back what its own response had opened."""
    clock = [1000.0]
    store = MemoryStore(clock=lambda: clock[0])
    words["receiver"] = Receiver(store, monotonic=lambda: clock[0])
    opened = [BytesIO(b"first"), BytesIO(b"second")]

    def overtaken(request: HttpRequest) -> FileResponse:
        mine = opened.pop(0)
        runs.append(mine)
        if opened:  # the lease of the first attempt ends before it does, and another is quicker
            clock[0] += 1000
            assert content(Client().post("/overtaken", **KEY)) == b"second"
        return FileResponse(mine)

    with override_settings(ROOT_URLCONF=(path("overtaken", overtaken),)):
        response = Client().post("/overtaken", **KEY)
        assert (response["X-Idempotency-Replayed"], content(response)) == ("true", b"second")
    assert [file.closed for file in runs] == [True, True]


# -- Under ASGI, above a middleware that knows no event loop -----------------------------------------------------------


def knows_no_loop(get_response: Any) -> Any:
    """A middleware as Django's documentation has it. What is above it runs in a thread, under ASGI as well."""
    return lambda request: get_response(request)


@pytest.fixture
def in_threads(words: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A stack with such a middleware below effectonce's."""
    with override_settings(MIDDLEWARE=[MIDDLEWARE, f"{__name__}.knows_no_loop"]):
        yield words


class Hold:
    """Views of either colour that go on when they are told."""

    def __init__(self) -> None:
        self.begun, self.free = Event(), Event()

    @non_atomic_requests
    def view(self, request: HttpRequest) -> HttpResponse:
        self.begun.set()
        assert self.free.wait(10)
        runs.append("ended")
        return HttpResponse("paid", status=201)

    @non_atomic_requests
    async def view_later(self, request: HttpRequest) -> HttpResponse:
        self.begun.set()
        assert await asyncio.to_thread(self.free.wait, 10)
        runs.append("ended")
        return HttpResponse("paid", status=201)


async def leave(place: str, hold: Hold) -> None:
    """Send a request, and leave when its view has begun, which may go on when that has been heard."""
    sent = [{"type": "http.request", "body": b"5 EUR"}]

    async def receive() -> Any:
        if sent:
            return sent.pop()
        assert await asyncio.to_thread(hold.begun.wait, 10)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        """Nobody hears it."""

    scope = AsyncRequestFactory()._base_scope(method="POST", path=place)  # type: ignore[attr-defined]
    scope["headers"] = [(b"idempotency-key", b"key"), (b"content-length", b"5")]
    request = asyncio.ensure_future(ASGIHandler()(scope, receive, send))
    assert await asyncio.to_thread(hold.begun.wait, 10)
    for _ in range(100):  # turns in which Django is told, and cancels
        await asyncio.sleep(0)
    hold.free.set()
    await asyncio.gather(request, return_exceptions=True)


@pytest.mark.parametrize("place", ["/view", "/view-later"])
def test_a_client_that_leaves_changes_nothing_there_either(in_threads: dict[str, Any], place: str) -> None:
    """Django cancels, and asgiref would carry that into the thread; but the view ends, and its answer is recorded."""
    hold = Hold()
    with override_settings(ROOT_URLCONF=(path("view", hold.view), path("view-later", hold.view_later))):
        asyncio.run(leave(place, hold))
        data = {"data": b"5 EUR", "content_type": "text/plain"}
        repeat = asend("post", place, **data, **KEY)
    assert (runs, repeat.content, repeat["X-Idempotency-Replayed"]) == (["ended"], b"paid", "true")


@pytest.mark.parametrize("most", [1000, 5, 0])
def test_an_async_stream_is_read_piece_by_piece_there(in_threads: dict[str, Any], most: int) -> None:
    """Held or let through; it knows its attempt to its end."""
    in_threads["max_response"] = most
    assert content(asend("post", "/stream-later", **KEY)) == b"0 1 1 1 2 1 "
    repeat = asend("post", "/stream-later", **KEY)
    assert (repeat.get("X-Idempotency-Replayed") == "true") == (most == 1000)


@non_atomic_requests
async def endless(request: HttpRequest) -> StreamingHttpResponse:
    async def pieces() -> AsyncIterator[str]:
        for number in count():
            runs.append(number)
            yield f"data: {number}\n\n" + "." * int(request.GET.get("more", 0))

    kind = "text/plain" if "more" in request.GET else "text/event-stream"
    return StreamingHttpResponse(pieces(), content_type=kind)


@pytest.mark.parametrize(("query", "most"), [("", 1000), ("?more=1000", 1500)], ids=["events", "no end"])
def test_a_stream_without_an_end_is_sent_as_it_comes_there(
    in_threads: dict[str, Any], query: str, most: int
) -> None:
    """A stream of events, or one that says nothing and is longer than what is held: it is done, without a body."""
    in_threads["max_response"] = most

    async def listen() -> tuple[int, Any]:
        response: Any = await AsyncClient().post(f"/endless{query}", **KEY)
        made = len(runs)
        stream = aiter(response)
        assert (await anext(stream)).startswith(b"data: 0" if query else b"")
        await anext(stream)
        return made, await AsyncClient().post(f"/endless{query}", **KEY)

    with override_settings(ROOT_URLCONF=(path("endless", endless),)):
        made, repeat = asyncio.run(listen())
    assert (made, repeat.json()["code"]) == (2 if query else 0, "response-not-replayable")


# -- Settings ------------------------------------------------------------------------------------------------------


def built(words: Any) -> IdempotencyMiddleware:
    with override_settings(EFFECTONCE=words):
        return IdempotencyMiddleware(pay)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (None, "EFFECTONCE is missing"),
        ({}, 'needs "store"'),
        ({"store": "memory://"}, r'\["scope"\] is missing'),
        ({"store": "memory://", "receiver": "memory://", "scope": PUBLIC}, "not both"),
        ({"store": "nothing://", "scope": PUBLIC}, "no known scheme"),
        ({"store": "memory://", "scope": None}, "say whose keys"),
        ({"store": "memory://", "scope": "no.such.module"}, "No module named"),
        ({"store": "memory://", "scope": f"{__name__}.no_such_name"}, "no_such_name"),
        ({"receiver": f"{__name__}.KEY", "scope": PUBLIC}, "is not a Receiver"),
        ({"store": "memory://", "scope": PUBLIC, "kep": "7d"}, "no such rule"),
        ({"store": "memory://", "scope": None, "claim": "handler"}, "is for ASGI"),
    ],
)
def test_a_mistake_in_the_settings_is_told_at_the_start(words: Any, error: str) -> None:
    """As Django's own: and in the tree of errors, too."""
    with pytest.raises(Misconfigured, match=error) as caught:
        built(words)
    assert isinstance(caught.value, ImproperlyConfigured) and isinstance(caught.value, UsageError)


def test_a_missing_setting_is_a_mistake() -> None:
    """Installed in MIDDLEWARE, and that was all."""
    assert not hasattr(settings, "EFFECTONCE")
    with pytest.raises(Misconfigured, match="EFFECTONCE is missing"):
        IdempotencyMiddleware(pay)


def make_receiver() -> Receiver:
    return Receiver("memory://")


receiver = make_receiver()


def test_a_receiver_is_named_made_or_given() -> None:
    """By a dotted path to it or to what makes it, as an object, or by its store's URL; one for each URL."""
    for given in (receiver, f"{__name__}.receiver", make_receiver, f"{__name__}.make_receiver", "memory://"):
        assert isinstance(built({"receiver": given, "scope": PUBLIC}).boundary.receiver, Receiver)
    assert built({"receiver": f"{__name__}.receiver", "scope": PUBLIC}).boundary.receiver is receiver
    stores = [built({"store": "memory://", "scope": PUBLIC}).boundary.receiver for _ in range(2)]
    assert stores[0] is stores[1]


@pytest.mark.parametrize("scope", [caller, caller_later, f"{__name__}.caller", f"{__name__}.caller_later"])
def test_a_scope_function_of_either_colour_serves_either(
    send: Callable[..., Any], words: dict[str, Any], scope: Any
) -> None:
    """Adapted as Django adapts everything."""
    words["scope"] = scope
    users = ("ann", "bob", "ann")
    answers = [send("post", "/pay", headers={"Idempotency-Key": "key", "X-User": user}) for user in users]
    assert [answer.json()["number"] for answer in answers] == [1, 2, 1]


def ask_the_database(request: Request) -> str:
    from django.db import connection

    with connection.cursor() as cursor:
        return str(cursor.execute("select 'ann'").fetchone()[0])


def test_a_plain_scope_function_may_ask_the_database(send: Callable[..., Any], words: dict[str, Any]) -> None:
    """As ``request.user`` does; Django would not let it on an event loop."""
    words["scope"] = ask_the_database
    assert [send("post", "/pay", **KEY).json()["number"] for _ in range(2)] == [1, 1]


def test_without_django_the_extra_is_named() -> None:
    """Who hasn't got Django is told what to install."""
    code = (
        "import sys; sys.modules['django'] = None\n"
        "from effectonce.errors import MissingExtra\n"
        "try: import effectonce.http.django\n"
        "except MissingExtra as error: print(error)\n"
    )
    output = subprocess.check_output(
        [sys.executable, "-c", code], text=True, cwd=Path(__file__).parent.parent
    )
    assert "effectonce[django]" in output
