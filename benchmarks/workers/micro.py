"""What the parts of a key, a fingerprint and a stored result cost by themselves."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable, Iterable

from benchmarks.workers.base import ENCODED, RESULT, Counter, Setup, Subject
from benchmarks.workers.timing import stream

Work = Callable[[str], object]

# About 1 KB as JSON, in an order that has to be sorted.
PAYLOAD = {f"field_{number:02}": f"value {number:02} of a payload of one KB" for number in range(20, 0, -1)}


def _content_id(_: str) -> str:
    text = json.dumps(PAYLOAD, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


RAW_WORK: dict[str, Work] = {
    "uuid4": lambda _: uuid.uuid4().hex,
    "content-id": _content_id,
    "encode": lambda _: json.dumps(RESULT, separators=(",", ":")),
    "decode": lambda _: json.loads(ENCODED),
}


def micro_stream(setup: Setup, work: Work) -> Subject:
    """Time one small function over and over; it stands for the handler's run, so it is counted as one."""
    counter = Counter()

    def run(keys: Iterable[str]) -> None:
        tick = counter.tick
        for key in keys:
            work(key)
            tick()

    return stream(setup, run, counter)
