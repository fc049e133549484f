"""Amazon SQS: an event is a message of the queue that its topic names, with its id as attribute ``id``.

A FIFO queue, whose name ends in ``.fifo``, gets the id for deduplication and the key as the message's group.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any, Self
from urllib.parse import parse_qsl

from ...errors import MissingExtra, UsageError
from ...stores._urls import shown, split
from .._events import Event, Results, Unsent

try:
    boto3: Any = import_module("boto3")
    core: Any = import_module("botocore.exceptions")
except ImportError as error:
    raise MissingExtra("SQS needs the package boto3: pip install effectonce[sqs]") from error

IN_A_CALL = 10
"""What SQS takes at most; and as many headers beside the id and the key, less two."""
BYTES_IN_A_CALL = 250_000
AT_ONCE = 8
FIT = re.compile(r"[A-Za-z0-9!-/:-@\[-`{-~]{1,128}")


class Refused(Exception):
    """SQS did not take an event; the message says why."""


class SQS:
    """Sends to queues of SQS. ``prefix`` stands before each topic to make the name of its queue."""

    keeps_order = False

    def __init__(self, client: Any, *, prefix: str = "") -> None:
        self._client, self._prefix = client, prefix
        self._urls: dict[str, str] = {}
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="effectonce-sqs")

    @classmethod
    def from_url(cls, url: str) -> Self:
        """``sqs://?region=eu-central-1&prefix=events-&endpoint=http://localhost:4566``."""
        options = dict(parse_qsl(split(url).query, keep_blank_values=True))
        region, endpoint, prefix = (options.pop(name, None) for name in ("region", "endpoint", "prefix"))
        if options:
            raise UsageError(f"{shown(url)!r} has an unknown option. Known are region, endpoint and prefix.")
        config = import_module("botocore.config").Config(
            max_pool_connections=AT_ONCE, retries={"max_attempts": 2}
        )
        client = boto3.client("sqs", region_name=region, endpoint_url=endpoint, config=config)
        return cls(client, prefix=prefix or "")

    def publish(self, events: Sequence[Event]) -> Results:
        """Send events in calls of ten, several calls at once."""
        answers: dict[int, Exception | None] = {}
        for part in self._threads.map(self._send, _calls(events)):
            answers |= part
        return [answers[event.seq] for event in events]

    def _send(self, events: Sequence[Event]) -> dict[int, Exception | None]:
        try:
            url = self._url_of(events[0].topic)
            entries = [_entry(str(number), event, url) for number, event in enumerate(events)]
            reply = self._client.send_message_batch(QueueUrl=url, Entries=entries)
        except core.ClientError as error:
            return dict.fromkeys((event.seq for event in events), _meaning(error))
        except core.BotoCoreError as error:
            return dict.fromkeys((event.seq for event in events), Unsent(f"SQS: {error}"))
        answers: dict[int, Exception | None] = {event.seq: None for event in events}
        for failed in reply.get("Failed", ()):
            text = f"{failed['Code']}: {failed.get('Message', '')}"
            answers[events[int(failed["Id"])].seq] = Refused(text) if failed["SenderFault"] else Unsent(text)
        return answers

    def _url_of(self, topic: str) -> str:
        if topic not in self._urls:
            self._urls[topic] = self._client.get_queue_url(QueueName=self._prefix + topic)["QueueUrl"]
        return self._urls[topic]

    def close(self) -> None:
        """End the threads and the connections."""
        self._threads.shutdown()
        self._client.close()


def _calls(events: Sequence[Event]) -> list[list[Event]]:
    """Events in groups of one topic that fit into one call."""
    calls: list[list[Event]] = []
    room: dict[str, tuple[list[Event], int]] = {}
    for event in events:
        call, size = room.get(event.topic, ([], 0))
        grown = size + 2 * len(event.payload)
        if not call or len(call) == IN_A_CALL or grown > BYTES_IN_A_CALL:
            call, grown = [], 2 * len(event.payload)
            calls.append(call)
        call.append(event)
        room[event.topic] = (call, grown)
    return calls


def _entry(number: str, event: Event, url: str) -> dict[str, Any]:
    attributes = {**event.headers, "id": event.id}
    if event.key is not None:
        attributes["key"] = event.key
    try:
        body = event.payload.decode()
    except UnicodeDecodeError:
        body, attributes["encoding"] = base64.b64encode(event.payload).decode(), "base64"
    entry: dict[str, Any] = {
        "Id": number,
        "MessageBody": body,
        "MessageAttributes": {
            name: {"DataType": "String", "StringValue": value} for name, value in attributes.items() if value
        },
    }
    if url.endswith(".fifo"):
        entry["MessageDeduplicationId"] = _fit(event.id)
        entry["MessageGroupId"] = _fit(event.id if event.key is None else event.key)
    return entry


def _fit(text: str) -> str:
    """A text within the alphabet of SQS, or its hash."""
    return text if FIT.fullmatch(text) else hashlib.sha256(text.encode()).hexdigest()


def _meaning(error: Any) -> Exception:
    """A queue that is not there, or a body that is too long, is nobody's moment of weakness."""
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 500)
    return Refused(str(error)) if 400 <= status < 500 and status != 429 else Unsent(str(error))
