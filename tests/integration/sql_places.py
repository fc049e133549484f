"""What the tests of the SQL stores share: claims that do not end, a table of one's own, callers of each colour."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar
from urllib.parse import quote, urlsplit
from uuid import uuid4

import pytest

from effectonce import Message, Outcome, Receiver
from effectonce._blocking import run
from effectonce._records import Claim, Completion, Decision, Record, State, Verdict
from effectonce.keys import new_owner
from effectonce.stores import Store, open_store

S = TypeVar("S")

LONG = 3600.0
ASKED = b"asked" * 3


class SqlPlace(ABC, Generic[S]):
    """A table of a test's own, and a user of its own whose connections can be counted. ``S``: a session there."""

    scheme: ClassVar[str]
    narrow: ClassVar[dict[str, object]] = {}
    """Options of a store that has few connections."""

    def __init__(self, url: str) -> None:
        self.admin_url = url
        self.table = f"it_{uuid4().hex}"
        self.user = f"u{uuid4().hex[:16]}"
        self.password = "p:/?#@ü'%"  # all that a URL or a statement might stumble over
        self.database = urlsplit(url).path[1:]
        self.prepare()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def url(self, server_url: str = "", driver: str = "", **options: object) -> str:
        """The URL of the store, of this server or one that stands before it."""
        parts = urlsplit(server_url or self.admin_url)
        query = "&".join(f"{name}={value}" for name, value in {"table": self.table, **options}.items())
        who = f"{self.user}:{quote(self.password, safe='')}"
        return f"{self.scheme}{driver}://{who}@{parts.hostname}:{parts.port}/{self.database}?{query}"

    def store(self, server_url: str = "", driver: str = "", **options: object) -> Any:
        """A handle on the store."""
        return open_store(self.url(server_url, driver, **options))

    @abstractmethod
    def session(self) -> S:
        """A connection that may do everything."""

    @abstractmethod
    def prepare(self) -> None:
        """Make the user."""

    @abstractmethod
    def remove(self) -> None:
        """Remove the table and the user."""

    @abstractmethod
    def connections(self) -> list[int]:
        """The ids of the store's connections."""

    @abstractmethod
    def end(self, connections: Sequence[int]) -> None:
        """Have the server end connections."""

    @abstractmethod
    def describe(self, text: str) -> None:
        """Change the comment of the table."""

    @abstractmethod
    def lock(self, session: S, *keys: str) -> None:
        """Hold the rows of some keys, as a transaction of somebody's may."""

    @abstractmethod
    def hold(self, session: S, *keys: str) -> None:
        """Begin a transaction that has put pending records in place, as calls in atomic mode do."""

    @abstractmethod
    def is_waiting(self, session: S) -> bool:
        """Whether a command of the store waits for a lock, as far as a session can tell."""


class Effects:
    """What handlers have done, and how often."""

    def __init__(self) -> None:
        self.runs: Counter[str] = Counter()
        self._lock = threading.Lock()

    def handle(self, message: Message) -> str:
        with self._lock:
            self.runs[message.id] += 1
        return f"receipt of {message.id}"

    async def ahandle(self, message: Message) -> str:
        return self.handle(message)


class Colour(NamedTuple):
    """How to get a store's verbs in one colour, how to run them, and what stands in the URL for it."""

    of: Callable[[Store], Store]
    run: Callable[..., Any]
    driver: str

    @property
    def awaits(self) -> bool:
        return self.run is not run

    def process(self, receiver: Receiver, message: Message, effects: Effects) -> Outcome[Any]:
        """Have a message processed."""
        if self.awaits:
            return self.run(receiver.aprocess(message, effects.ahandle))  # type: ignore[no-any-return]
        return receiver.process(message, effects.handle)


@contextmanager
def coloured(name: str) -> Iterator[Colour]:
    """A colour: ``blocking``, ``asyncio``, or that of a driver that is not the usual one on event loops."""
    if name == "blocking":
        yield Colour(lambda store: store.for_blocking(), run, "")
        return
    with asyncio.Runner() as runner:
        yield Colour(lambda store: store.for_asyncio(), runner.run, "" if name == "asyncio" else f"+{name}")


def colours(*names: str) -> Any:
    """The fixture ``colour`` of an engine that has these."""

    @pytest.fixture(params=names)
    def colour(request: pytest.FixtureRequest) -> Iterator[Colour]:
        with coloured(request.param) as colour:
            yield colour

    return colour


def claim_of(key: str = "k", owner: bytes | None = None, **choices: Any) -> Claim:
    """A claim that does not end while a test runs."""
    return Claim(key, owner or new_owner(), choices.pop("fingerprint", ASKED), LONG, LONG, **choices)


def ending_of(decision: Decision, result: bytes | None = b"done", keep: float = LONG) -> Completion:
    """The completion of what was granted."""
    record = granted(decision)
    return Completion(record.key, record.owner, record.fence, State.COMPLETED, result, keep)


def granted(decision: Decision) -> Record:
    """The record of a claim that must have been granted."""
    assert decision.verdict in (Verdict.CLAIMED, Verdict.TAKEN_OVER), decision
    assert decision.record is not None
    return decision.record


def claim_together(store: Store, claims: Sequence[Claim]) -> list[Any]:
    """Claim from as many tasks in one turn of a loop; answers, or what was raised."""

    async def crowd() -> list[Any]:
        verbs = store.for_asyncio()
        await verbs.now()
        return await asyncio.gather(*map(verbs.claim, claims), return_exceptions=True)

    return asyncio.run(crowd())
