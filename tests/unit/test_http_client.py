"""The client's way with a request: its key, its tries, its time. httpx in both colours, on a clock moved by hand."""

from __future__ import annotations

import asyncio
import gzip
import inspect
import json
import pickle
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import requests
from tests.http.pieces import Pieces

import effectonce.http.client as client_module
from effectonce.errors import InvalidKey, KeyReused, MissingExtra, StoreUnavailable, UsageError
from effectonce.http._requests import _at_most
from effectonce.http.client import (
    AsyncIdempotencyTransport,
    Delivery,
    IdempotencyAdapter,
    IdempotencyTransport,
    Journal,
    Rules,
    delivery,
    named,
    replayed,
)
from effectonce.testing.clocks import ManualClock

URL = "https://api.example.com/charges"
PROBLEM = {"content-type": "application/problem+json"}
CUT = httpx.ReadError("connection lost")
OK = httpx.Response(200, json={"ok": True})

Step = httpx.Response | Exception | Callable[[httpx.Request], httpx.Response]


class Stage:
    """A server that answers as it is told, and time that passes only when somebody sleeps."""

    def __init__(self, colour: str, steps: list[Step], **choices: Any) -> None:
        self.colour, self.steps = colour, steps
        self.seen: list[httpx.Request] = []
        self.slept: list[float] = []
        self.clock = ManualClock()
        kind: Any = IdempotencyTransport if colour == "blocking" else AsyncIdempotencyTransport
        sleep = self.sleep if colour == "blocking" else self.asleep
        choices = {"monotonic": self.clock, "sleep": sleep, **choices}
        self.transport = kind(httpx.MockTransport(self.answer), **choices)

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.seen.append(request)
        step = self.steps.pop(0) if self.steps else OK
        if isinstance(step, Exception):
            raise step
        if isinstance(step, httpx.Response):  # a new one each time: a response is read once
            pieces: Any = list(step.stream) if isinstance(step.stream, httpx.ByteStream) else step.stream
            return httpx.Response(step.status_code, headers=step.headers, stream=Pieces(pieces))
        return step(request)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.clock.advance(seconds)

    async def asleep(self, seconds: float) -> None:
        self.sleep(seconds)

    def request(self, method: str = "POST", url: str = URL, **choices: Any) -> httpx.Response:
        return self.use(lambda client: client.request(method, url, **choices))

    def use(self, action: Callable[[Any], Any], **choices: Any) -> Any:
        """Do something with a client, in the stage's colour."""
        if self.colour == "blocking":
            with httpx.Client(transport=self.transport, **choices) as client:
                return action(client)

        async def awaited() -> Any:
            async with httpx.AsyncClient(transport=self.transport, **choices) as client:
                result = action(client)
                return await result if inspect.isawaitable(result) else result

        return asyncio.run(awaited())

    @property
    def keys(self) -> list[str | None]:
        return [request.headers.get("idempotency-key") for request in self.seen]

    @property
    def bodies(self) -> list[bytes]:
        return [request.content for request in self.seen]


@pytest.fixture(params=["blocking", "asyncio"])
def staged(request: pytest.FixtureRequest) -> Callable[..., Stage]:
    """Make a stage: ``staged(step, step, …)``."""

    def make(*steps: Step, **choices: Any) -> Stage:
        return Stage(request.param, list(steps), **choices)

    return make


Staged = Callable[..., Stage]


# The key


@pytest.mark.parametrize("method", ["POST", "PATCH"])
def test_every_try_has_the_same_key(staged: Staged, method: str) -> None:
    """And the same body; the next request has another key."""
    stage = staged(CUT, httpx.Response(503), CUT)
    response = stage.request(method, json={"cents": 500})
    assert response.json() == {"ok": True}
    assert len(set(stage.keys)) == 1
    assert stage.bodies == [b'{"cents":500}'] * 4
    stage.request(method, json={"cents": 500})
    assert len(set(stage.keys)) == 2


def test_a_key_is_a_string_of_structured_headers(staged: Staged) -> None:
    """In double quotes, a UUID of version 7, so that servers can sort them by time."""
    stage = staged()
    response = stage.request()
    key = stage.keys[0]
    assert key is not None
    assert key[0] == key[-1] == '"'
    assert key[15] == "7"
    assert delivery(response) == Delivery(key[1:-1], 1, False)


@pytest.mark.parametrize("key", ["bare-token", '"quoted"', '"with \\"escapes\\""', "not, valid", ""])
def test_a_key_that_was_set_is_kept_as_it_is(staged: Staged, key: str) -> None:
    """Byte for byte, on every try: whose key it is knows why."""
    stage = staged(CUT)
    stage.request(headers={"idempotency-key": key})
    assert stage.keys == [key, key]


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "PUT", "DELETE", "QUERY"])
def test_other_methods_are_left_alone(staged: Staged, method: str) -> None:
    """No key, no second try, no other time-outs, and nothing on the response."""
    stage = staged(httpx.Response(503))
    response = stage.request(method, timeout=120)
    assert response.status_code == 503
    assert stage.keys == [None]
    assert stage.seen[0].extensions["timeout"]["read"] == 120
    assert delivery(response) is None
    stage.steps.append(CUT)
    with pytest.raises(httpx.ReadError):
        stage.request(method)


def test_methods_can_be_chosen(staged: Staged) -> None:
    """PUT with a key, GET again without one."""
    stage = staged(CUT, CUT, CUT, rules=Rules(methods=("PUT",), retry=("GET",)))
    assert delivery(stage.request("GET")) == Delivery(None, 4, False)
    assert stage.keys == [None] * 4
    stage.request("PUT")
    assert stage.keys[-1] is not None
    stage.request("POST")
    assert stage.keys[-1] is None


def test_the_header_can_be_chosen(staged: Staged) -> None:
    """Some servers call it otherwise."""
    stage = staged(rules=Rules(header="X-Request-Token"))
    stage.request()
    assert stage.seen[0].headers["x-request-token"].startswith('"')
    assert stage.keys == [None]


def test_the_same_request_object_is_the_same_request(staged: Staged) -> None:
    """A caller with tries of his own sends it again with its key."""
    stage = staged()
    request = httpx.Request("POST", URL, content=b"x")
    stage.use(lambda client: client.send(request))
    stage.use(lambda client: client.send(request))
    assert stage.keys[0] == stage.keys[1] is not None


# Trying again


def test_a_first_try_that_runs_is_asked_for_to_the_end(staged: Staged) -> None:
    """Then its answer is here, marked as a replay."""
    running = httpx.Response(409, headers={**PROBLEM, "retry-after": "110"}, json={"code": "in-progress"})
    answered = httpx.Response(201, json={"id": 7}, headers={"X-Idempotency-Replayed": "true"})
    stage = staged(httpx.ReadTimeout("slow"), running, running, answered)
    response = stage.request()
    assert (response.status_code, response.json()) == (201, {"id": 7})
    assert replayed(response)
    found = delivery(response)
    assert found is not None
    assert (found.attempts, found.replayed) == (4, True)
    assert len(set(stage.keys)) == 1
    assert all(2.0 <= wait <= 4.0 for wait in stage.slept[1:])


def test_a_compressed_document_is_understood_and_handed_on_as_it_came(staged: Staged) -> None:
    """The code is read aside; whoever reads the response raw gets the bytes that were sent."""
    packed = gzip.compress(json.dumps({"code": "in-progress"}).encode())
    running = httpx.Response(409, headers={**PROBLEM, "content-encoding": "gzip"}, stream=Pieces([packed]))
    stage = staged(running, rules=Rules(budget="1s", poll="10s"))
    assert stage.request().status_code == 200
    stage = staged(*[running] * 60, rules=Rules(budget="5s"))
    response = stage.request()
    assert response.status_code == 409
    assert response.json() == {"code": "in-progress"}
    broken = httpx.Response(409, headers={**PROBLEM, "content-encoding": "gzip"}, stream=Pieces([b"junk"]))
    with pytest.raises(httpx.DecodingError):
        staged(broken).request()


@pytest.mark.parametrize("status", [400, 401, 404, 409, 422])
def test_a_refusal_is_the_answer(staged: Staged, status: int) -> None:
    """422 above all."""
    stage = staged(httpx.Response(status))
    assert stage.request().status_code == status
    assert len(stage.seen) == 1


@pytest.mark.parametrize("code", ["outcome-unknown", "response-not-replayable"])
def test_a_409_that_can_not_change_is_the_answer(staged: Staged, code: str) -> None:
    """Whatever its Retry-After."""
    stage = staged(httpx.Response(409, headers={**PROBLEM, "retry-after": "1"}, json={"code": code}))
    assert stage.request().json() == {"code": code}
    assert len(stage.seen) == 1


def test_retry_after_is_slept(staged: Staged) -> None:
    """At least that long."""
    stage = staged(httpx.Response(429, headers={"retry-after": "7"}))
    assert stage.request().status_code == 200
    assert 7.0 <= stage.slept[0] <= 7.25


def test_the_last_answer_is_returned_when_the_budget_is_used_up(staged: Staged) -> None:
    """All waits together keep within it."""
    stage = staged(*[httpx.Response(503, json={"n": n}) for n in range(1000)], rules=Rules(budget="30s"))
    response = stage.request()
    assert response.status_code == 503
    assert response.json() == {"n": len(stage.seen) - 1}
    found = delivery(response)
    assert found is not None
    assert found.attempts == len(stage.seen) > 4
    assert sum(stage.slept) <= 30.0


def test_the_last_error_is_raised_when_the_budget_is_used_up(staged: Staged) -> None:
    """With a note that has the key, for whoever goes on from there."""
    stage = staged(*[CUT] * 1000, rules=Rules(budget="5s"))
    with pytest.raises(httpx.ReadError) as raised:
        stage.request()
    key = stage.keys[0]
    assert key is not None
    assert any(key in note and f"{len(stage.seen)} tries" in note for note in raised.value.__notes__)
    assert raised.value.request.headers["idempotency-key"] == key


def test_time_spent_waiting_for_answers_counts(staged: Staged) -> None:
    """Tries that take 20 s each: three of them in a minute, and the last gets only what is left."""

    def slow(request: httpx.Request) -> httpx.Response:
        stage.clock.advance(min(20.0, request.extensions["timeout"]["read"]))
        raise httpx.ReadTimeout("slow")

    stage = staged(*[slow] * 10)
    with pytest.raises(httpx.ReadTimeout):
        stage.request(timeout=20.0)
    assert 3 <= len(stage.seen) <= 4
    assert all(request.extensions["timeout"]["read"] <= 20.0 for request in stage.seen)
    assert stage.clock() <= ManualClock()() + 60.0 + 0.1


def test_no_time_out_becomes_the_budgets(staged: Staged) -> None:
    """A try that never ends would be no try within a budget."""
    stage = staged(rules=Rules(budget="30s"))
    stage.request(timeout=None)
    assert stage.seen[0].extensions["timeout"] == dict.fromkeys(("connect", "read", "write", "pool"), 30.0)


@pytest.mark.parametrize(
    "error",
    [
        httpx.LocalProtocolError("bad header"),
        httpx.UnsupportedProtocol("ftp"),
        httpx.ProxyError("407"),
        ValueError("a bug"),
    ],
)
def test_errors_that_last_are_raised_at_once(staged: Staged, error: Exception) -> None:
    """Ours, or the chosen way's."""
    stage = staged(error)
    with pytest.raises(type(error)):
        stage.request()
    assert len(stage.seen) == 1


# Bodies


def test_a_short_stream_can_be_sent_again(staged: Staged) -> None:
    """It is read once and held."""
    stage = staged(CUT, CUT)
    stage.request(content=stream_of(stage, [b"one ", b"two"]))
    assert stage.bodies == [b"one two"] * 3


def test_a_long_stream_is_sent_once(staged: Staged) -> None:
    """Whole, with a key, and its trouble is the caller's."""
    pieces = [b"x" * 600, b"y" * 600, b"z" * 600]
    stage = staged(lambda request: echo(request), CUT, rules=Rules(buffer=1000))
    response = stage.request(content=stream_of(stage, pieces))
    assert response.content == b"".join(pieces)
    assert stage.keys[0] is not None
    with pytest.raises(httpx.ReadError):
        stage.request(content=stream_of(stage, pieces))
    stage.steps.append(httpx.Response(503))
    assert stage.request(content=stream_of(stage, pieces)).status_code == 503
    assert len(stage.seen) == 3


def test_long_bytes_can_be_sent_again(staged: Staged) -> None:
    """They are held anyway."""
    stage = staged(CUT, rules=Rules(buffer=10))
    stage.request(content=b"x" * 100_000)
    assert stage.bodies == [b"x" * 100_000] * 2


def test_a_form_with_a_file_can_be_sent_again(staged: Staged, tmp_path: Path) -> None:
    """With the same boundary on every try."""
    (tmp_path / "receipt.txt").write_bytes(b"receipt")
    stage = staged(CUT)
    with (tmp_path / "receipt.txt").open("rb") as file:
        stage.request(files={"receipt": file})
    assert b"receipt" in stage.bodies[0]
    assert stage.bodies[0] == stage.bodies[1]


def stream_of(stage: Stage, pieces: list[bytes]) -> Any:
    """A stream that can be read once."""

    async def awaited() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    return iter(pieces) if stage.colour == "blocking" else awaited()


def echo(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, content=request.content)


# Responses


@pytest.mark.parametrize("kind", ["application/json", "text/plain", "application/xml"])
def test_an_answer_cut_off_in_the_middle_is_asked_for_again(staged: Staged, kind: str) -> None:
    """The status was there, the rest was not: the key brings it back, of whatever type it is."""
    cut = Pieces([b'{"ok"', httpx.RemoteProtocolError("peer closed connection")])
    stage = staged(httpx.Response(200, headers={"content-type": kind}, stream=cut))
    assert stage.request().json() == {"ok": True}
    assert len(stage.seen) == 2


def test_a_stream_of_events_is_not_held_back(staged: Staged) -> None:
    """Its first piece is read before its last exists, and its connection is closed by its reader."""
    read: list[str] = []

    def pieces() -> Iterator[bytes]:
        yield b"first"
        assert read == ["first"]
        yield b"second"

    events = Pieces(pieces())
    stage = staged(
        lambda _: httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=events)
    )
    if stage.colour == "blocking":
        with (
            httpx.Client(transport=stage.transport) as client,
            client.stream("POST", URL) as response,
        ):
            read.extend(response.iter_text())
    else:

        async def consume() -> None:
            async with (
                httpx.AsyncClient(transport=stage.transport) as client,
                client.stream("POST", URL) as response,
            ):
                async for text in response.aiter_text():
                    read.append(text)

        asyncio.run(consume())
    assert read == ["first", "second"]
    assert events.closed


def test_a_document_longer_than_the_buffer_is_handed_on_whole(staged: Staged) -> None:
    """What was read of it and what was not, in order; and it is closed."""
    document = Pieces([b"[1,", b"2" * 2000, b",3]"])
    stage = staged(
        lambda _: httpx.Response(200, headers={"content-type": "application/json"}, stream=document),
        rules=Rules(buffer=1000),
    )
    assert stage.request().content == b"[1," + b"2" * 2000 + b",3]"
    assert document.closed


def test_an_answer_that_trickles_beyond_the_budget_is_none(staged: Staged) -> None:
    """It would never end. Its connection is given up, and the error names the key to ask with again."""

    def pieces() -> Iterator[bytes]:
        yield b"[1,"
        stage.clock.advance(61.0)
        yield b"2,"
        pytest.fail("nobody should have waited for this")

    trickle = Pieces(pieces())
    stage = staged(httpx.Response(200, headers={"content-type": "application/json"}, stream=trickle))
    with pytest.raises(httpx.ReadTimeout, match="budget") as raised:
        stage.request()
    assert len(stage.seen) == 1
    assert str(stage.keys[0]) in raised.value.__notes__[0]
    assert raised.value.request.url == URL


def test_a_download_longer_than_the_buffer_takes_its_time(staged: Staged) -> None:
    """It may be meant to be read while it comes: who reads it has its own patience."""

    def pieces() -> Iterator[bytes]:
        yield b"[" + b"1" * 2000
        stage.clock.advance(61.0)
        yield b"]"

    stage = staged(
        lambda _: httpx.Response(200, headers={"content-type": "application/json"}, stream=Pieces(pieces())),
        rules=Rules(buffer=1000),
    )
    assert len(stage.request().content) == 2002


def test_answers_that_are_given_up_are_closed(staged: Staged) -> None:
    """Their connections go back to the pool."""
    streams = [Pieces([b"later"]), Pieces([b"{}"]), Pieces([b"{", CUT])]
    headers = [{}, {"content-type": "application/json"}, {"content-type": "application/json"}]
    steps = [
        lambda _, n=n: httpx.Response(503, headers=headers[n], stream=streams[n]) for n in range(len(streams))
    ]
    staged(*steps).request()
    assert [stream.closed for stream in streams] == [True] * 3


def test_a_replay_is_visible_on_any_response() -> None:
    """Also on one that came another way; the mark is "true" and nothing else."""
    assert replayed(httpx.Response(200, headers={"Idempotent-Replayed": "true"}))
    assert not replayed(httpx.Response(200, headers={"Idempotent-Replayed": "false"}))
    assert not replayed(requests.Response())
    assert delivery(httpx.Response(200)) is None
    assert delivery(requests.Response()) is None


# Redirections


@pytest.mark.parametrize("status", [307, 308])
def test_a_redirected_request_gets_a_key_of_its_own(staged: Staged, status: int) -> None:
    """Under its first key the server would refuse it, as another request. Each keeps its own on every try."""
    stage = staged(CUT, httpx.Response(status, headers={"location": "/v2/charges"}), CUT)
    response = stage.use(lambda client: client.post(URL, content=b"x", follow_redirects=True))
    assert response.status_code == 200
    assert [request.url.path for request in stage.seen] == ["/charges"] * 2 + ["/v2/charges"] * 2
    assert stage.keys[0] == stage.keys[1] != stage.keys[2] == stage.keys[3]
    assert stage.bodies == [b"x"] * 4


def test_a_redirection_to_a_get_takes_no_key_along(staged: Staged) -> None:
    """The key is nobody's business there, least of all another host's."""
    stage = staged(httpx.Response(303, headers={"location": "https://elsewhere.example/receipt"}))
    stage.use(lambda client: client.post(URL, content=b"x", follow_redirects=True))
    assert [request.method for request in stage.seen] == ["POST", "GET"]
    assert stage.keys[1] is None


def test_a_redirection_without_a_key_is_one_too(staged: Staged) -> None:
    """Of a GET that may be sent again."""
    stage = staged(httpx.Response(302, headers={"location": "/elsewhere"}), rules=Rules(retry=("GET",)))
    response = stage.use(lambda client: client.get(URL, follow_redirects=True))
    assert response.status_code == 200
    assert stage.keys == [None, None]


def test_a_key_that_was_set_goes_where_the_package_takes_it(staged: Staged) -> None:
    """It is the caller's."""
    stage = staged(httpx.Response(307, headers={"location": "/v2/charges"}))
    headers = {"idempotency-key": "mine"}
    stage.use(lambda client: client.post(URL, headers=headers, follow_redirects=True))
    assert stage.keys == ["mine", "mine"]


# Names


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "sent.db")


NAMED = {"effectonce_name": "invoice-77"}


def test_the_key_of_a_named_request_is_written_down_before_it_is_sent(
    staged: Staged, journal: Journal
) -> None:
    """And its answer after it. The journal has no query: it may be a secret."""
    doubts: list[Any] = []

    def look(request: httpx.Request) -> httpx.Response:
        doubts.extend(journal.in_doubt())
        return httpx.Response(200)

    stage = staged(look, journal=journal)
    response = stage.request(url=URL + "?token=secret", extensions=NAMED)
    assert [(entry.name, entry.key) for entry in doubts] == [("invoice-77", stage.keys[0])]
    assert doubts[0].request == f"POST {URL}"
    assert journal.in_doubt() == []
    found = delivery(response)
    assert found is not None
    assert found.name == "invoice-77"


def test_a_restarted_program_sends_the_same_key(staged: Staged, journal: Journal) -> None:
    """After no answer, after an answer that left it open, and after an answer that was lost."""
    stage = staged(*[CUT] * 1000, journal=journal, rules=Rules(budget="1s"))
    with pytest.raises(httpx.ReadError):
        stage.request(json={"cents": 5}, extensions=NAMED)
    assert len(journal.in_doubt()) == 1
    again = staged(*[httpx.Response(500)] * 1000, journal=Journal(journal.path), rules=Rules(budget="1s"))
    assert again.request(json={"cents": 5}, extensions=NAMED).status_code == 500
    assert len(journal.in_doubt()) == 1
    third = staged(journal=journal)
    third.request(json={"cents": 5}, extensions=NAMED)
    assert journal.in_doubt() == []
    third.request(json={"cents": 5}, extensions=NAMED)
    assert len({*stage.keys, *again.keys, *third.keys}) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"json": {"cents": 6}},
        {"method": "PATCH", "json": {"cents": 5}},
        {"url": URL + "/7", "json": {"cents": 5}},
        {"url": URL + "?x=1", "json": {"cents": 5}},
        {"url": "https://staging.example.com/charges", "json": {"cents": 5}},
    ],
)
def test_the_same_name_for_another_request_is_not_sent(
    staged: Staged, journal: Journal, other: dict[str, Any]
) -> None:
    """Another body, method, path, query or host."""
    stage = staged(journal=journal)
    stage.request(json={"cents": 5}, extensions=NAMED)
    with pytest.raises(KeyReused):
        stage.request(extensions=NAMED, **other)
    assert len(stage.seen) == 1


@pytest.mark.parametrize("broken", [True, False], ids=["cut off", "whole"])
@pytest.mark.parametrize("kind", ["text/event-stream", "longer/than-the-buffer"])
def test_a_named_answer_that_is_read_while_it_comes_is_settled_when_it_was(
    staged: Staged, journal: Journal, kind: str, broken: bool
) -> None:
    """Its reader has it, or has enough of it. One that is cut off leaves the request in doubt, and says so."""
    in_doubt: list[int] = []

    def pieces() -> Iterator[Any]:
        yield b"1" * 2000
        in_doubt.append(len(journal.in_doubt()))
        yield httpx.ReadError("connection lost") if broken else b"2"

    stage = staged(
        lambda _: httpx.Response(201, headers={"content-type": kind}, stream=Pieces(pieces())),
        journal=journal,
        rules=Rules(buffer=1000),
    )
    if broken:
        with pytest.raises(httpx.ReadError) as cut:
            stage.request(extensions=NAMED)
        assert str(stage.keys[0]) in cut.value.__notes__[-1]
    else:
        assert stage.request(extensions=NAMED).content.endswith(b"12")
    assert in_doubt == [1]  # it has begun, and nobody has it yet
    assert len(journal.in_doubt()) == broken


def test_a_block_names_what_is_sent_in_it(staged: Staged, journal: Journal) -> None:
    """What comes after it has no name."""
    stage = staged(journal=journal)
    with named("invoice-77"):
        first = delivery(stage.request(content=b"x"))
        stage.request("GET")
    with named("invoice-77"):
        second = delivery(stage.request(content=b"x"))
    assert first == second
    assert first is not None
    assert first.name == "invoice-77"
    third = delivery(stage.request(content=b"x"))
    assert third is not None
    assert third.name is None
    with pytest.raises(InvalidKey), named(" "):
        pass


def test_only_a_request_with_a_key_settles_a_name(staged: Staged, journal: Journal) -> None:
    """A GET in the same block, though it may be sent again, says nothing about it."""
    stage = staged(*[CUT] * 1000, journal=journal, rules=Rules(budget="1s", retry=("GET",)))
    with named("invoice-77"):
        with pytest.raises(httpx.ReadError):
            stage.request()
        stage.steps.clear()
        found = delivery(stage.request("GET"))
    assert found == Delivery(None, 1, False)
    assert [entry.name for entry in journal.in_doubt()] == ["invoice-77"]


def test_a_name_needs_a_journal_and_a_body_that_is_known(staged: Staged, journal: Journal) -> None:
    """Or nothing is sent."""
    with pytest.raises(UsageError, match="journal"):
        staged().request(extensions=NAMED)
    stage = staged(journal=journal, rules=Rules(buffer=10))
    with pytest.raises(UsageError, match="stream"):
        stage.request(content=stream_of(stage, [b"x" * 20]), extensions=NAMED)
    assert stage.seen == []
    assert journal.in_doubt() == []


def test_a_named_request_may_have_a_key_of_its_own(staged: Staged, journal: Journal) -> None:
    """The first one; another one is refused."""
    stage = staged(journal=journal)
    stage.request(headers={"idempotency-key": "mine"}, extensions=NAMED)
    stage.request(extensions=NAMED)
    assert stage.keys == ["mine", "mine"]
    with pytest.raises(UsageError, match="another key"):
        stage.request(headers={"idempotency-key": "other"}, extensions=NAMED)


def test_a_named_request_that_is_redirected_is_refused(staged: Staged, journal: Journal) -> None:
    """Loudly, and it stays in doubt: the place it leads to is another request."""
    stage = staged(httpx.Response(307, headers={"location": "/v2/charges"}), journal=journal)
    with pytest.raises(KeyReused):
        stage.use(lambda client: client.post(URL, extensions=NAMED, follow_redirects=True))
    assert [entry.name for entry in journal.in_doubt()] == ["invoice-77"]


def test_without_the_journals_word_nothing_is_sent(
    staged: Staged, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But an answer that can't be written down is still the answer."""

    def fail(*_: object) -> Any:
        raise StoreUnavailable("disk full")

    stage = staged(journal=journal)
    with monkeypatch.context() as broken:
        broken.setattr(Journal, "done", fail)
        assert stage.request(extensions=NAMED).status_code == 200
    assert len(journal.in_doubt()) == 1
    monkeypatch.setattr(Journal, "begin", fail)
    with pytest.raises(StoreUnavailable):
        stage.request(extensions={"effectonce_name": "invoice-78"})
    assert len(stage.seen) == 1


# asyncio


def test_cancellation_stops_the_tries() -> None:
    """While it waits for the next one: nothing more is sent, and the loop was free all the time."""

    async def scenario() -> int:
        waiting, free = asyncio.Event(), 0

        async def sleep(seconds: float) -> None:
            waiting.set()
            await asyncio.sleep(3600)

        stage = Stage("asyncio", [CUT] * 9, sleep=sleep)
        async with httpx.AsyncClient(transport=stage.transport) as client:
            task = asyncio.create_task(client.post(URL))
            await waiting.wait()
            for _ in range(10):
                await asyncio.sleep(0)
                free += 1
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert free == 10
        return len(stage.seen)

    assert asyncio.run(scenario()) == 1


def test_cancellation_while_an_answer_is_read_closes_it() -> None:
    """Its connection is not left behind."""
    stream = Pieces([])

    async def scenario() -> None:
        reading = asyncio.Event()

        class Endless(Pieces):
            async def __aiter__(self) -> AsyncIterator[bytes]:
                yield b"{"
                reading.set()
                await asyncio.sleep(3600)

        nonlocal stream
        stream = Endless([])
        headers = {"content-type": "application/json"}
        stage = Stage("asyncio", [lambda _: httpx.Response(200, headers=headers, stream=stream)])
        async with httpx.AsyncClient(transport=stage.transport) as client:
            task = asyncio.create_task(client.post(URL))
            await reading.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(scenario())
    assert stream.closed


def test_the_journal_waits_for_its_disk_in_a_thread(tmp_path: Path) -> None:
    """Never on the event loop."""
    import threading

    where: list[threading.Thread] = []

    class Watched(Journal):
        def begin(self, *args: Any) -> Any:
            where.append(threading.current_thread())
            return super().begin(*args)

        def done(self, name: str) -> None:
            where.append(threading.current_thread())
            super().done(name)

    Stage("asyncio", [], journal=Watched(tmp_path / "sent.db")).request(extensions=NAMED)
    assert len(where) == 2
    assert threading.main_thread() not in where


# requests; what it does on the wire is in tests/integration


def test_a_pickled_session_keeps_its_adapter(tmp_path: Path) -> None:
    """Worker processes get sessions this way."""
    session = requests.Session()
    adapter = IdempotencyAdapter(
        pool_maxsize=3, rules=Rules(budget="5s"), journal=Journal(tmp_path / "sent.db")
    )
    session.mount("https://", adapter)
    copy = pickle.loads(pickle.dumps(session)).get_adapter("https://x")
    assert isinstance(copy, IdempotencyAdapter)
    assert copy._courier.rules == Rules(budget="5s")
    assert copy._courier.journal.path == tmp_path / "sent.db"


@pytest.mark.parametrize(
    ("timeout", "expected"),
    [
        (None, 8.0),
        (5, 5),
        (20.0, 8.0),
        ((3.0, None), (3.0, 8.0)),
        ((None, 20), (8.0, 8.0)),
        ("wrong", "wrong"),
        ((1, 2, 3), (1, 2, 3)),
    ],
)
def test_time_outs_of_requests_keep_within_the_budget(timeout: Any, expected: Any) -> None:
    """What is no time-out is left for requests to complain of."""
    assert _at_most(timeout, 8.0) == expected


# The module


@pytest.mark.parametrize(
    ("package", "names"),
    [
        ("httpx", ["IdempotencyTransport", "AsyncIdempotencyTransport"]),
        ("requests", ["IdempotencyAdapter"]),
    ],
)
def test_a_missing_package_is_named_with_its_extra(package: str, names: list[str]) -> None:
    """When its class is asked for; everything else works without it, and loads neither package."""
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from effectonce.errors import MissingExtra\n"
        "import effectonce.http.client as client\n"
        "assert client.Rules and client.Journal and not {'httpx', 'requests', 'anyio'} & {m for m in sys.modules"
        " if sys.modules[m]}\n"
        f"for name in {names!r}:\n"
        "    try:\n        getattr(client, name)\n"
        f"    except MissingExtra as error: assert 'effectonce[client]' in str(error) and {package!r} in str(error)\n"
        "    else: sys.exit('no error')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert issubclass(MissingExtra, ImportError)


def test_every_name_of_the_module_is_there() -> None:
    """And no other is invented."""
    assert all(getattr(client_module, name) for name in client_module.__all__)
    with pytest.raises(AttributeError):
        client_module.nonsense  # noqa: B018
    assert issubclass(IdempotencyTransport, httpx.BaseTransport)
    assert issubclass(AsyncIdempotencyTransport, httpx.AsyncBaseTransport)
    assert issubclass(IdempotencyAdapter, requests.adapters.HTTPAdapter)
