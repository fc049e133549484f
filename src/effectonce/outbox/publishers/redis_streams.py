"""Redis and Valkey Streams: an event is an entry of the stream that its topic names.

Its fields are ``id``, ``payload`` and, where there are such, ``key`` and ``headers`` (as JSON). A script adds many
events in one round trip and stops a key at its first failure. Redis knows no repetitions: consumers go by ``id``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qsl

from ...errors import MissingExtra, UsageError
from ...stores._urls import shown, split
from .._events import Event, Results, Unsent

try:
    import redis
except ImportError as error:
    raise MissingExtra("Redis Streams need the package redis: pip install effectonce[redis]") from error

SCRIPT = (Path(__file__).parents[1] / "lua" / "add.lua").read_text(encoding="utf-8")
AT_ONCE = 250
"""Events of one script: the server does nothing else meanwhile, which takes it about a millisecond."""
TIMEOUT_SECONDS = 10.0


class RedisStreams:
    """Adds events to streams of a Redis or Valkey server.

    client   of redis-py; it must not decode responses
    prefix   what the names of streams begin with; the topic follows
    maxlen   about how many entries a stream may have; by default it grows until somebody trims it
    """

    keeps_order = True

    def __init__(self, client: redis.Redis, *, prefix: str = "", maxlen: int | None = None) -> None:
        self._client, self._prefix = client, prefix
        self._longest = "" if maxlen is None else str(maxlen)
        self._script: Any = client.register_script(SCRIPT)

    @classmethod
    def from_url(cls, url: str) -> Self:
        """``redis://host:6379/0?prefix=events.&maxlen=1000000``."""
        parts = split(url)
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        prefix, maxlen = options.pop("prefix", ""), options.pop("maxlen", "")
        if options or not (maxlen == "" or maxlen.isdecimal()):
            raise UsageError(
                f"{shown(url)!r} has an unknown option. Known are prefix=TEXT and maxlen=NUMBER."
            )
        scheme = parts.scheme.replace("valkey", "redis")
        plain = parts._replace(scheme=scheme, query="").geturl()
        seconds = {"socket_timeout": TIMEOUT_SECONDS, "socket_connect_timeout": TIMEOUT_SECONDS}
        client = redis.Redis.from_url(plain, **seconds)
        return cls(client, prefix=prefix, maxlen=int(maxlen) if maxlen else None)

    def publish(self, events: Sequence[Event]) -> Results:
        """Add events, each topic's in their order."""
        by_topic: dict[str, list[Event]] = {}
        for event in events:
            by_topic.setdefault(event.topic, []).append(event)
        answers: dict[int, Exception | None] = {}
        stuck: set[str | None] = set()
        try:
            for topic, group in by_topic.items():
                for start in range(0, len(group), AT_ONCE):
                    some = [event for event in group[start : start + AT_ONCE] if event.key not in stuck]
                    answers |= self._answers(some, self._add(topic, some), stuck)
        except redis.RedisError as error:
            if not answers:
                raise
            missing: Exception = Unsent(f"{type(error).__name__}: {error}")
        else:
            missing = Unsent("An earlier event of its key failed.")
        # What has no answer was not sent, and must never be taken for published.
        return [answers.get(event.seq, missing) for event in events]

    @staticmethod
    def _answers(
        events: Sequence[Event], failed: dict[int, Exception], stuck: set[str | None]
    ) -> dict[int, Exception | None]:
        """Who was added, and who failed; a key's events behind a failure have no answer."""
        if not failed:
            return dict.fromkeys((event.seq for event in events), None)
        answers: dict[int, Exception | None] = {}
        for event in events:
            if event.key in stuck:
                continue
            answers[event.seq] = failed.get(event.seq)
            if event.seq in failed and event.key is not None:
                stuck.add(event.key)
        return answers

    def _add(self, topic: str, events: Sequence[Event]) -> dict[int, Exception]:
        arguments: list[Any] = [self._longest]
        for event in events:
            headers = event.headers
            arguments += (
                event.key or "",
                event.id,
                event.payload,
                json.dumps(dict(headers)) if headers else "",
            )
        replies = self._script(keys=[self._prefix + topic], args=arguments)
        failed = [reply.decode(errors="replace").partition(" ") for reply in replies]
        return {events[int(number)].seq: redis.ResponseError(text) for number, _, text in failed}

    def close(self) -> None:
        """Close the connections."""
        self._client.close()
