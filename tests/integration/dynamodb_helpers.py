"""What tests of the DynamoDB store need: a gateway that counts and refuses requests, commands, tables of their own."""

from __future__ import annotations

import http.client
import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from uuid import uuid4

import boto3
import pytest

from effectonce._blocking import run
from effectonce._records import Claim, Completion, Decision, Ending, Record, Renewal, State
from effectonce.stores import Store
from effectonce.stores.dynamodb import DynamoDBStore

REGION = "eu-central-1"
ASKED = b"asked" * 6
LONG = 3600.0

Refusal = tuple[int, str] | tuple[int, str, dict[str, Any]]
"""A status and a code, and what else the reply says."""
Judge = Callable[[str, dict[str, Any]], Refusal | None]


class Gateway:
    """An HTTP server before DynamoDB's that notes each operation, and answers instead when ``judge`` says so."""

    def __init__(self, endpoint: str) -> None:
        self.seen: list[str] = []
        self.judge: Judge = lambda operation, request: None
        self.broken_off = 0
        """So many more replies end within their headers, when what they answer has been done."""
        self._target = endpoint.removeprefix("http://")
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def refuse(self, code: str, *operations: str, status: int = 400, times: int = 10**6) -> None:
        """Answer these operations (all, if none is named) with an error, so many times."""
        left = [times]

        def judge(operation: str, request: dict[str, Any]) -> Refusal | None:
            if (operations and operation not in operations) or not left[0]:
                return None
            left[0] -= 1
            return status, code

        self.judge = judge

    def allow(self) -> None:
        """Refuse nothing any more."""
        self.judge = lambda operation, request: None

    def counted(self) -> Counter[str]:
        """What was asked since the last time."""
        seen, self.seen = self.seen, []
        return Counter(seen)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_POST(self) -> None:
                with suppress(BrokenPipeError):  # who asked has given up
                    self.answer()

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                operation = self.headers["X-Amz-Target"].partition(".")[2]
                gateway.seen.append(operation)
                refusal = gateway.judge(operation, json.loads(body))
                if refusal is None:
                    status, reply = gateway._forward(body, dict(self.headers))
                    if gateway.broken_off:
                        gateway.broken_off -= 1
                        self.close_connection = True
                        self.wfile.write(b"HTTP/1.1 %d OK\r\nContent-Ty" % status)
                        return
                else:
                    status, code, *more = refusal
                    told = {"__type": f"com.amazonaws.dynamodb.v20120810#{code}", "message": "no"}
                    reply = json.dumps(told | (more[0] if more else {})).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/x-amz-json-1.0")
                self.send_header("Content-Length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler

    def pass_on(self, operation: str, request: dict[str, Any]) -> tuple[int, bytes]:
        """Have something done that was asked of the gateway, whatever that will say of it."""
        headers = {
            "X-Amz-Target": f"DynamoDB_20120810.{operation}",
            "Content-Type": "application/x-amz-json-1.0",
        }
        headers["Authorization"] = (
            "AWS4-HMAC-SHA256 Credential=test/20200101/eu-central-1/dynamodb/aws4_request"
        )
        return self._forward(json.dumps(request).encode(), headers)

    def _forward(self, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self._target, timeout=20)
        try:
            connection.request("POST", "/", body, headers)
            reply = connection.getresponse()
            return reply.status, reply.read()
        finally:
            connection.close()


@cache
def _session(make: Any = boto3.Session) -> Any:
    return make(region_name=REGION)


def one_session(patch: pytest.MonkeyPatch) -> None:
    """Let all stores share one of boto3's: what takes longest about a client is reading what DynamoDB can do."""
    patch.setattr(boto3, "Session", lambda **_: _session())


@cache
def client(endpoint: str) -> Any:
    """A plain client, to look behind the store's back."""
    return boto3.Session(region_name=REGION).client("dynamodb", endpoint_url=endpoint)


def new_table() -> str:
    """A name that no other test uses."""
    return f"test-{uuid4().hex}"


def make_table(endpoint: str, table: str, key: str = "k") -> None:
    """A table without a time to live, for clocks that are not the server's."""
    client(endpoint).create_table(
        TableName=table,
        BillingMode="PAY_PER_REQUEST",
        KeySchema=[{"AttributeName": key, "KeyType": "HASH"}],
        AttributeDefinitions=[{"AttributeName": key, "AttributeType": "S"}],
    )


@contextmanager
def opened(endpoint: str, table: str | None = None, **choices: Any) -> Iterator[DynamoDBStore]:
    """A store in a table of its own, or in the one that is named."""
    choices = {"timeout": 60.0} | choices  # a loaded machine isn't a failing test
    with DynamoDBStore(table or new_table(), region=REGION, endpoint=endpoint, **choices) as store:
        yield store


def items(endpoint: str, store: DynamoDBStore) -> dict[str, dict[str, Any]]:
    """Everything in the store's table, by key."""
    pages = client(endpoint).get_paginator("scan").paginate(TableName=store._table.name, ConsistentRead=True)
    return {item["k"]["S"]: item for page in pages for item in page["Items"]}


def claim_of(key: str, owner: bytes | None = None, **choices: Any) -> Claim:
    return Claim(key, owner or os.urandom(16), ASKED, **{"lease": LONG, "keep": LONG} | choices)


def claim(store: Store, key: str, owner: bytes | None = None, **choices: Any) -> Decision:
    return run(store.for_blocking().claim(claim_of(key, owner, **choices)))


def hold(store: Store, key: str, **choices: Any) -> Record:
    record = claim(store, key, **choices).record
    assert record is not None
    assert record.owner
    return record


def ending_of(
    held: Record, result: bytes | None = b"done", keep: float = LONG, state: State = State.COMPLETED
) -> Completion:
    return Completion(held.key, held.owner, held.fence, state, result, keep)


def complete(store: Store, held: Record, result: bytes | None = b"done", keep: float = LONG) -> Ending:
    return run(store.for_blocking().complete(ending_of(held, result, keep)))


def renew(store: Store, held: Record, lease: float = LONG, keep: float = LONG) -> bool:
    return run(store.for_blocking().renew(Renewal(held.key, held.owner, held.fence, lease, keep)))
