"""The client's side: it counts. A number for each request, the same on every try, and what is waited for no longer."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from .. import keys
from ..errors import KeyReused, UsageError, WindowExceeded
from ._journal import Entry, Journal
from ._request import ACKED, CLIENT, EPOCH, Opened, Request

WAIT_SECONDS: Final = 60.0


class ClientSession:
    """The numbers of one session, safe to share between threads; a process that was forked needs one of its own.

    opened    what the server gave: ``sessions.open()``, or the answer to a POST to the server's session path
    journal   a ``Journal``, so that a restarted program goes on with the same numbers and knows what is in doubt

    With a journal that knows a session, resume that one first: ``sessions.resume(journal.client)``.
    """

    def __init__(self, opened: Opened, *, journal: Journal | None = None) -> None:
        self.client, self.epoch, self.lease, self.window = (
            opened.client, opened.epoch, opened.lease, opened.window,
        )  # fmt: skip
        if journal is None and opened.epoch > 1:
            raise UsageError(
                "This session was resumed, and which of its numbers are used is known by its journal alone. Give the "
                "journal=, or open a new session."
            )
        self._journal = journal
        self._outstanding: dict[int, str | None] = {}  # with their names
        self._next = opened.acked + 1
        self._changed = threading.Condition()
        self._process = os.getpid()
        if journal is not None:
            self._next = journal.begin_session(opened)
            self._outstanding = {entry.number: entry.name for entry in journal.in_doubt()}

    @property
    def acked(self) -> int:
        """Every request up to this number is answered or given up."""
        with self._changed:
            return self._acked()

    @property
    def outstanding(self) -> list[int]:
        """The numbers that are waited for."""
        with self._changed:
            return sorted(self._outstanding)

    @property
    def headers(self) -> dict[str, str]:
        """Who this is and what is acknowledged, for a heartbeat (PUT) or the end (DELETE) at a session path."""
        texts = (self.client, str(self.acked), str(self.epoch))
        return dict(zip((CLIENT, ACKED, EPOCH), texts, strict=True))

    @property
    def has_journal(self) -> bool:
        """Whether ``begin`` and ``done`` write to a disk."""
        return self._journal is not None

    @property
    def is_quick(self) -> bool:
        """Whether ``begin`` waits for nothing: there is room in the window, and no journal."""
        with self._changed:
            return self._journal is None and self._has_room()

    def in_doubt(self) -> list[Entry]:
        """Requests in the journal that were sent, or were about to be, and have no answer."""
        return [] if self._journal is None else self._journal.in_doubt()

    def begin(self, payload: Any = None, *, name: str | None = None, wait: float = WAIT_SECONDS) -> Request:
        """A new request with the next number; waits while the window is full. By ``name`` the journal knows it."""
        self._check_process()
        with self._changed:
            known = self._known(name, payload)
            if known is None and not self._has_room():
                if not self._changed.wait_for(lambda: self._has_room() or self._is_begun(name), wait):
                    raise WindowExceeded(
                        f"{len(self._outstanding)} requests are waited for, from {self._acked() + 1} on. Wait for "
                        "answers, send unanswered ones again, or give them up.",
                        window=self.window,
                    )
                known = self._known(name, payload)  # another thread may have begun it meanwhile
            if known is not None:
                return known
            number = self._next
            if self._journal is not None:
                self._journal.begin(self.epoch, number, name, _asked(payload), payload)
            self._next = number + 1
            self._outstanding[number] = name
            if name is not None:
                self._changed.notify_all()  # who waits to begin the same needs no room
            return Request(self.client, number, self._acked(), payload, self.epoch)

    def again(self, request: Request) -> Request:
        """The same request for another try, with what is acknowledged by now."""
        self._check_process()
        with self._changed:
            if request.number not in self._outstanding:
                raise UsageError(
                    f"Request {request.number} is answered or given up: it must not be sent again."
                )
            return request._replace(acked=self._acked(), epoch=self.epoch)

    def done(self, request: Request, answer: Any = None) -> None:
        """The answer is here: from now on the server may forget it. A named one's is in the journal."""
        self._settle(request.number, answer, given_up=False)

    def give_up(self, request: Request | Entry | int) -> None:
        """Wait for it, or for its number, no longer. It may have happened or not; once that is told it will not."""
        number = request if isinstance(request, int) else request.number
        self._settle(number, None, given_up=True)

    @contextmanager
    def request(
        self, payload: Any = None, *, name: str | None = None, wait: float = WAIT_SECONDS
    ) -> Iterator[Request]:
        """A request for a block that sends it until it is answered. After an error it stays outstanding."""
        request = self.begin(payload, name=name, wait=wait)
        yield request
        self.done(request)

    def answer_to(self, name: str) -> Any:
        """What a named request was answered, before or after a restart. ``KeyError`` if it has no answer yet."""
        entry = None if self._journal is None else self._journal.get(name)
        if entry is None or not entry.done:
            raise KeyError(name)
        return entry.answer

    def resumed(self, opened: Opened) -> None:
        """The session goes on under another epoch."""
        if opened.client != self.client:
            raise UsageError("This is another client's session.")
        with self._changed:
            self.epoch = opened.epoch
            if self._journal is not None:
                self._journal.begin_session(opened)

    def _check_process(self) -> None:
        """Two processes that count for one client would give one number to two requests."""
        if os.getpid() != self._process:
            raise UsageError(
                "This session was made before its process forked, and the other one counts on with its numbers. Open a "
                "session of its own in each process, after the fork."
            )

    def _known(self, name: str | None, payload: Any) -> Request | None:
        if name is None:
            return None
        if self._journal is None:
            raise UsageError(f"The request is named {name!r}, but this session has no journal=.")
        entry = self._journal.get(keys.check_id(name))
        if entry is None:
            return None
        if entry.asked != _asked(payload):
            raise KeyReused(f"The name {name!r} stands for another request in the journal.")
        if entry.done:
            raise UsageError(
                f"{name!r} was answered as request {entry.number}, and must not be sent again. answer_to({name!r}) is "
                "its answer."
            )
        return Request(self.client, entry.number, self._acked(), payload, self.epoch)

    def _settle(self, number: int, answer: Any, given_up: bool) -> None:
        with self._changed:
            if number not in self._outstanding:
                return
            if self._journal is not None:
                self._journal.settle(number, answer, given_up, self.epoch)
            del self._outstanding[number]
            self._changed.notify_all()

    def _is_begun(self, name: str | None) -> bool:
        return name is not None and name in self._outstanding.values()

    def _acked(self) -> int:
        return min(self._outstanding, default=self._next) - 1

    def _has_room(self) -> bool:
        return self._next - self._acked() <= self.window


def _asked(payload: Any) -> bytes:
    return b"" if payload is None else keys.fingerprint(payload)
