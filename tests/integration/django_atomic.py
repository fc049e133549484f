"""Atomic mode inside ``transaction.atomic``, told as one story; run in a process of its own, which has its settings."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any
from uuid import uuid4
from wsgiref.util import setup_testing_defaults

import django
from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.db import connection, models, transaction
from django.http import HttpResponse, StreamingHttpResponse
from django.urls import clear_url_caches, path

from effectonce import Message, Policy, Receiver
from effectonce.errors import UsageError
from effectonce.http import PUBLIC


class Declined(Exception):
    """An error that is a result."""


urlpatterns: list[Any] = []


def replayed_in(headers: list[tuple[str, str]]) -> str | None:
    return {name.lower(): value for name, value in headers}.get("x-idempotency-replayed")


def post(app: Any, key: str, body: bytes, query: str = "") -> tuple[str, bytes, str | None]:
    """What a client gets: the status, the body, and whether it is a replay."""
    environ: dict[str, Any] = {
        "REQUEST_METHOD": "POST", "PATH_INFO": "/pay", "QUERY_STRING": query, "CONTENT_LENGTH": str(len(body)),
        "wsgi.input": io.BytesIO(body), "HTTP_IDEMPOTENCY_KEY": f'"{key}"',
    }  # fmt: skip
    setup_testing_defaults(environ)
    said: list[Any] = []
    content = b"".join(app(environ, lambda status, headers, exc_info=None: said.append((status, headers))))
    status, headers = said[-1]
    return status, content, replayed_in(headers)


def main(database: dict[str, Any], store_url: str) -> None:
    """Every step says what it shows."""
    settings.configure(
        DATABASES={"default": database},
        INSTALLED_APPS=[],
        USE_TZ=True,
        ROOT_URLCONF=__name__,
        ALLOWED_HOSTS=["*"],
    )
    django.setup()

    class Payment(models.Model):
        id = models.CharField(max_length=50, primary_key=True)

        class Meta:
            app_label = "shop"
            db_table = f"payments_{uuid4().hex[:12]}"

    receiver = Receiver(store_url, policy=Policy(remember=(Declined,)))
    receiver.get("nothing")
    with connection.schema_editor() as editor:
        editor.create_model(Payment)

    def pay(message: Message) -> str:
        Payment.objects.create(id=message.id)
        if "declined" in message.id:
            raise Declined(message.id)
        if "twice" in message.id:
            Payment.objects.create(id=message.id)
        return message.id

    def process(id: str) -> Any:
        return receiver.on(connection).process(Message(id=id), pay)

    # 1. Without atomic() it is an error that explains.
    try:
        process("a")
        raise SystemExit("autocommit was taken")
    except UsageError as error:
        assert "transaction.atomic()" in str(error), error

    # 2. Commit, and a repeat.
    for replayed in (False, True):
        with transaction.atomic():
            outcome = process("a")
            assert (outcome.replayed, outcome.value, outcome.guarantee) == (replayed, "a", "atomic"), outcome
    assert Payment.objects.count() == 1

    # 3. A rollback removes record and effect.
    class Changed(Exception): ...

    try:
        with transaction.atomic():
            process("b")
            raise Changed
    except Changed:
        pass
    with transaction.atomic():
        assert process("b").attempt == 1
    assert Payment.objects.filter(id="b").count() == 1

    # 4. A remembered error undoes the effect and is committed; the block around it goes on.
    for _ in range(2):
        with transaction.atomic():
            try:
                process("declined")
                raise SystemExit("not declined")
            except Declined:
                pass
            Payment.objects.update_or_create(id="after")
    assert not Payment.objects.filter(id="declined").exists()
    assert Payment.objects.filter(id="after").exists()

    # 5. An error of the database in a handler does not spoil the block.
    with transaction.atomic():
        try:
            process("twice")
            raise SystemExit("made twice")
        except django.db.IntegrityError:
            pass
        Payment.objects.create(id="unspoilt")
    assert not Payment.objects.filter(id="twice").exists()
    assert Payment.objects.filter(id="unspoilt").exists()

    # 6. Nested blocks are savepoints: what was processed in one goes with it.
    with transaction.atomic():
        try:
            with transaction.atomic():
                process("c")
                raise Changed
        except Changed:
            pass
        assert process("c").status == "executed"
    assert Payment.objects.filter(id="c").count() == 1

    # 7. A batch, and what waits for the commit.
    heard: list[str] = []
    with transaction.atomic():
        messages = [Message(id=id) for id in ("d", "declined2", "e", "d")]
        outcomes = receiver.on(connection).process_batch(messages, pay)
        assert [outcome.status for outcome in outcomes] == ["executed", "failed", "executed", "replayed"], (
            outcomes
        )
        transaction.on_commit(lambda: heard.append("committed"))
    assert heard == ["committed"]
    assert Payment.objects.filter(id__in=["d", "e"]).count() == 2

    # 8. A request: its record, its answer and its effect are in one transaction.
    settings.EFFECTONCE = {"receiver": receiver, "scope": PUBLIC}
    settings.MIDDLEWARE = ["effectonce.http.django_atomic.AtomicMiddleware"]

    def view(request: Any) -> HttpResponse:
        Payment.objects.create(id=request.body.decode())
        return HttpResponse("paid", status=int(request.GET.get("status", "201")))

    def large(request: Any) -> StreamingHttpResponse:
        def pieces() -> Iterator[bytes]:
            yield bytes(2 << 20)
            Payment.objects.create(id=request.body.decode())
            if "breaks" in request.GET:
                raise Changed

        return StreamingHttpResponse(pieces())

    urlpatterns[:] = [path("pay", lambda request: (large if "large" in request.GET else view)(request))]

    app = get_wsgi_application()
    first = post(app, "k1", b"http")
    assert first == ("201 Created", b"paid", None), first
    assert post(app, "k1", b"http") == ("201 Created", b"paid", "true")
    assert post(app, "k2", b"undone", "status=503")[0].startswith("503")
    assert post(app, "k2", b"undone", "status=503")[0].startswith("503")
    assert Payment.objects.filter(id="http").count() == 1
    assert not Payment.objects.filter(id="undone").exists()
    assert post(app, "k1", b"other")[0].startswith("422")
    assert post(app, "k4", b"large", "large&breaks")[0].startswith("500")
    assert not Payment.objects.filter(id="large").exists()
    assert post(app, "k5", b"large", "large")[1] == bytes(2 << 20)
    assert post(app, "k5", b"large", "large")[0].startswith("409")  # it was done, and is too large to repeat
    assert Payment.objects.filter(id="large").count() == 1
    settings.EFFECTONCE["on_server_error"] = "remember"
    app = get_wsgi_application()
    assert post(app, "k3", b"undone", "status=503")[0].startswith("503")
    assert post(app, "k3", b"undone", "status=503")[1:] == (b"paid", "true")
    assert not Payment.objects.filter(id="undone").exists()

    # 9. The same under ASGI, where the boundary is in a thread: a stream of events is sent when all is committed.
    settings.EFFECTONCE["on_server_error"] = "release"

    async def later(request: Any) -> StreamingHttpResponse:
        async def pieces() -> AsyncIterator[bytes]:
            yield bytes(2 << 20)
            await Payment.objects.acreate(id=request.body.decode())
            if "breaks" in request.GET:
                raise Changed

        async def events() -> AsyncIterator[bytes]:
            while True:
                yield b"data: tick\n\n"

        if "events" not in request.GET:
            return StreamingHttpResponse(pieces())
        await Payment.objects.acreate(id=request.body.decode())
        return StreamingHttpResponse(events(), content_type="text/event-stream")

    async def talk() -> None:
        from django.test import AsyncClient

        client = AsyncClient(raise_request_exception=False)

        async def ask(key: str, body: str, query: str) -> Any:
            more: dict[str, Any] = {"headers": {"Idempotency-Key": key}, "content_type": "text/plain"}
            return await client.post(f"/pay?{query}", body, **more)

        assert (await ask("k6", "async", "breaks")).status_code == 500
        assert not await Payment.objects.filter(id="async").aexists()
        assert b"".join([piece async for piece in await ask("k7", "async", "")]) == bytes(2 << 20)
        assert (await ask("k7", "async", "")).status_code == 409
        assert await Payment.objects.filter(id="async").acount() == 1
        stream = aiter(await ask("k8", "events", "events"))
        assert await Payment.objects.filter(id="events").acount() == 1
        assert [await anext(stream) for _ in range(2)] == [b"", b"data: tick\n\n"]
        assert (await ask("k8", "events", "events")).status_code == 409

    urlpatterns[:] = [path("pay", later)]
    clear_url_caches()
    asyncio.run(talk())
    with connection.schema_editor() as editor:
        editor.delete_model(Payment)
    receiver.close()
    print("told to its end")


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
