"""Connections of event loops: all callers of a loop share one to each server, and a turn's commands are one write.

Replies come in the order of the commands, so a connection only has to remember who waits for how many. A caller who
stops waiting disturbs nobody: its replies are thrown away when they come. No call has a task or a timer of its own.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from typing import Any, cast

from ..errors import StoreError
from ._loops import whereabouts
from ._redis_commands import Answer, Parts, answers, bundled, command
from ._redis_wire import (
    HANG_UP,
    MAP,
    MORE,
    Address,
    Answers,
    ProtocolError,
    PushNotification,
    Requests,
    Target,
    check_greeting,
    closed,
    greeting,
    new_reader,
    unreachable,
)
from ._waiters import Waiter, answer_all

Waiting = asyncio.Future[Any] | Waiter[Any]
ONE = 0
"""Stands for the number of replies when there is one and it is to come alone, not in a list."""
TOLD = -1
"""Stands for the number of replies when there is none, but the server tells that it has done it, unless it refuses."""
CONFIRMED = -2
"""Marks the one reply to WAIT."""
LOOK = -4
"""Stands for the number of replies when there is one, in a list, that no replica has to confirm."""
BUNDLE = -3
"""Stands for the number of replies when there is one, for all who share a bundle of steps."""
ROOM = 65_536
"""Bytes that are taken in at once. A connection has its own: a new piece of memory for every read would cost more."""
MOST_AT_ONCE = 32
"""Steps in one write: the server works on them while this process still makes the others of a crowd."""


class Link(asyncio.BufferedProtocol):
    """A connection that all callers of one event loop share. ``links`` has it as long as it is open."""

    def __init__(self, target: Target, address: Address, links: dict[Address, Link]) -> None:
        self._target, self._address, self._links = target, address, links
        self.loop = asyncio.get_running_loop()
        self.where = whereabouts(self.loop)
        self._reader = new_reader()
        self._room: Any = memoryview(bytearray(ROOM))  # its reader takes any buffer, but says otherwise
        self._transport: asyncio.Transport | None = None
        self.is_open = False
        self._outbox: list[tuple[bytes, Sequence[Waiting], int]] = []
        self._steps: list[Parts] = []
        self._waiters: list[Waiter[Answer]] = []
        self._sent: deque[tuple[Sequence[Waiting], int, float]] = deque()
        self._replies: list[Any] = []
        self._unconfirmed: list[tuple[Waiting, Any]] = []
        self._wait = b""
        self._timer: asyncio.TimerHandle | None = None
        self._can_tell = False
        self._listeners: dict[bytes, set[asyncio.Future[None]]] = {}

    async def greet(self) -> None:
        """Log in, and let others use the connection."""
        hello = greeting(self._target)
        replies = await self.ask(b"".join(hello), len(hello))
        self._can_tell = check_greeting(self._target, self._address, replies)
        if self._transport is None:
            raise ConnectionError("the server closed the connection")
        self._wait = self._target.waiting
        self._links[self._address] = self
        self.is_open = True

    def ask(self, data: bytes, count: int = ONE) -> asyncio.Future[Any]:
        """Have commands sent at the end of this turn of the loop."""
        future = self.loop.create_future()
        self._post(data, [future], count)
        return future

    def take(self, parts: Parts) -> Waiter[Answer]:
        """Have a step taken together with others of this turn of the loop, or as soon as they are many."""
        if self._transport is None:
            raise unreachable(self._target, self._address, None)
        waiter: Waiter[Answer] = Waiter(self.loop)
        steps = self._steps
        steps.append(parts)
        self._waiters.append(waiter)
        count = len(steps)
        if count >= MOST_AT_ONCE:
            self._flush()
        elif count == 1:
            self.loop.call_soon(self._flush)
        return waiter

    def _post(self, data: bytes, whose: Sequence[Waiting], count: int) -> None:
        if self._transport is None:
            for future in whose:
                future.set_exception(unreachable(self._target, self._address, None))
            return
        if not self._outbox:
            self.loop.call_soon(self._flush)
        self._outbox.append((data, whose, count))

    async def watch(self, channel: bytes, request: bytes, seconds: float) -> Any:
        """Send a request to be told something and wait until it is; its reply, or None if the server can't tell."""
        if not self._can_tell:
            return None
        listeners = self._listeners.setdefault(channel, set())
        end = self.loop.create_future()
        listeners.add(end)
        timer = self.loop.call_later(seconds, _wake, end)
        try:
            refusal, reply = await asyncio.gather(
                self.ask(command(b"SUBSCRIBE", channel), TOLD), self.ask(request)
            )
            if type(reply) is int and refusal is None:
                await end
            return refusal or reply
        finally:
            timer.cancel()
            listeners.discard(end)
            if not listeners:
                self._listeners.pop(channel, None)
                self._post(command(b"UNSUBSCRIBE", channel), [], TOLD)

    def hang_up(self, error: BaseException | None = None) -> None:
        """End the connection at once, and tell who waits."""
        if self._links.get(self._address) is self:
            del self._links[self._address]
        self.is_open = False
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
        self._pack()
        waiting = [future for future, _ in self._unconfirmed]
        waiting += [future for whose, _, _ in self._sent for future in whose]
        waiting += [future for _, whose, _ in self._outbox for future in whose]
        self._unconfirmed, self._outbox = [], []
        self._sent.clear()
        for future in waiting:
            if not future.done():
                future.set_exception(unreachable(self._target, self._address, error))
        for channel in list(self._listeners):
            self._tell(channel)

    # What asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def connection_lost(self, exc: Exception | None) -> None:
        self.hang_up(exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._room  # type: ignore[no-any-return]

    def buffer_updated(self, nbytes: int) -> None:
        gets, sent = self._reader.gets, self._sent
        waiters: list[Waiter[Answer]] = []
        their_answers: list[Any] = []
        try:
            self._reader.feed(self._room, 0, nbytes)
            while (reply := gets()) is not MORE:
                if type(reply) is PushNotification:
                    if reply[0] == b"message":
                        self._tell(reply[1])
                        continue
                    reply = None  # it was told that a wish to be told, or not, was heard
                whose, count, _ = sent[0]
                if count > ONE:
                    self._replies.append(reply)
                    if len(self._replies) < count:
                        continue
                    reply, self._replies = self._replies, []
                elif count == LOOK:
                    reply = [reply]
                replies = answers(reply, len(whose)) if count == BUNDLE else [reply] * len(whose)
                sent.popleft()
                if self._wait and count != LOOK:
                    self._hold_back(whose, count, replies, reply)
                elif count == BUNDLE:
                    waiters += cast("list[Waiter[Answer]]", whose)
                    their_answers += replies
                else:
                    for future in whose:
                        if not future.done():
                            future.set_result(reply)
        except ProtocolError as error:
            self.hang_up(error)
        answer_all(waiters, their_answers)  # only now: whoever goes on may close this connection

    def _flush(self) -> None:
        """Send what this turn of the loop asked for."""
        self._pack()
        outbox, transport = self._outbox, self._transport
        if not outbox or transport is None:
            return
        if self._wait and any(count != LOOK for _, _, count in outbox):
            outbox.append((self._wait, [], CONFIRMED))
        self._outbox = []
        now = self.loop.time()
        self._sent.extend([(whose, count, now) for _, whose, count in outbox])
        transport.write(b"".join([data for data, _, _ in outbox]))
        if self._timer is None:
            self._timer = self.loop.call_later(self._target.timeout, self._look)

    def _pack(self) -> None:
        """Make commands of the steps."""
        if self._steps:
            bundles = bundled(self._steps, self._waiters)
            self._outbox += [(bundle.command, bundle.whose, BUNDLE) for bundle in bundles]
            self._steps, self._waiters = [], []

    def _look(self) -> None:
        """See whether somebody has waited too long: then nobody can tell what the next reply belongs to."""
        self._timer = None
        if not self._sent:
            return
        left = self._sent[0][2] + self._target.timeout - self.loop.time()
        if left <= 0:
            self.hang_up(TimeoutError())
        else:
            self._timer = self.loop.call_later(left, self._look)

    def _tell(self, channel: bytes) -> None:
        for listener in self._listeners.get(channel, ()):
            _wake(listener)

    def _hold_back(self, whose: Sequence[Waiting], count: int, replies: Sequence[Any], reply: Any) -> None:
        """Replies count when replicas have what was written, which the reply to WAIT tells for all before it."""
        self._unconfirmed += zip(whose, replies, strict=True)
        if count != CONFIRMED:
            return
        unconfirmed, self._unconfirmed = self._unconfirmed, []
        for waiting, answer in unconfirmed:
            if not waiting.done():
                try:
                    self._target.check_replicas(
                        self._address, reply, answer if type(answer) is list else [answer]
                    )
                    waiting.set_result(answer)
                except StoreError as error:
                    waiting.set_exception(error)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Lines:
    """The connections of one event loop: one to each server."""

    def __init__(self, target: Target) -> None:
        self.links: dict[Address, Link] = {}
        """Those that are open."""
        self._target = target
        self._closed = False
        self._opening: dict[Address, asyncio.Task[Link]] = {}
        self._end = self._until_the_loop_ends()
        with suppress(StopIteration):  # as far as the yield: from now on the loop knows that there is an end
            self._end.__anext__().send(None)

    async def exchange(self, requests: Requests) -> Answers:
        """Ask several servers at once."""
        answers: Answers = {}
        asked: dict[Address, asyncio.Future[Any]] = {}
        try:
            for address, request in requests.items():
                if request is HANG_UP:
                    if link := self.links.get(address):
                        link.hang_up()
                    continue
                try:
                    data, count = request
                    link = self.links.get(address) or await self.open(address)
                    asked[address] = link.ask(data, LOOK if request is MAP else count)
                except StoreError as error:
                    answers[address] = error
            for address, waiting in asked.items():
                try:
                    answers[address] = await waiting
                except StoreError as error:
                    answers[address] = error
        except BaseException:
            for waiting in asked.values():
                waiting.cancel()
            raise
        return answers

    async def open(self, address: Address) -> Link:
        """Connect. All who want the same server wait for one connection, whoever of them stops waiting."""
        if self._closed:
            raise closed()
        task = self._opening.get(address)
        if task is None:
            task = self._opening[address] = asyncio.ensure_future(self._open(address))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(task)

    def close(self) -> None:
        """Hang up."""
        self._closed = True
        for link in list(self.links.values()):
            link.hang_up(closed())

    async def _open(self, address: Address) -> Link:
        host, port = address
        target, loop, link = self._target, asyncio.get_running_loop(), None
        try:
            async with asyncio.timeout(target.timeout):
                _, link = await loop.create_connection(
                    lambda: Link(target, address, self.links),
                    host,
                    port,
                    ssl=target.tls,
                    server_hostname=host if target.tls else None,
                )
                await link.greet()
            if self._closed:
                raise closed()
        except BaseException as error:
            if link is not None:
                link.hang_up()
            if isinstance(error, OSError | ProtocolError):
                raise unreachable(target, address, error) from error
            raise
        finally:
            del self._opening[address]
        return link

    async def _until_the_loop_ends(self) -> AsyncGenerator[None, None]:
        """An asynchronous generator that never goes on is closed when its loop comes to an end."""
        try:
            yield
        finally:
            self.close()
