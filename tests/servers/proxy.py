"""A TCP proxy that breaks connections on purpose, at the moment a test wants.

>>> with FaultProxy(server.url) as proxy:  # doctest: +SKIP
...     store = open_store(proxy.url)  # the same URL, with the proxy's port
...     proxy.lose_reply()  # the next request is carried out, but its answer never arrives
...     store.purge()
ConnectionError

``bursts`` counts round trips. A burst is what a client sends until the server says something: a request, or a pipeline
of them. ``connections`` counts the connections that clients have made.

Faults:

- ``lose_request(nth)`` cuts the connection when the nth burst from now arrives: the server never sees it.
- ``lose_reply(nth)`` forwards the nth burst from now, and cuts the connection when its answer begins: the server has
  done what it was asked, and the client can't know.
- ``cut()`` cuts every connection now.
- ``stall()`` holds back what both sides say from now on; new connections are made, and as silent as the others.
- ``refuse()`` refuses new connections; those that are there go on.
- ``heal()`` ends all of these: what was held back is delivered, and a fault that has not happened yet is off.

One fault is planned at a time, and ``fired`` says how many have happened. So a test meets every loss there is by
``lose_reply(1)``, ``lose_reply(2)`` and so on, until one doesn't fire.

It stands in front of one server: the nodes of a cluster tell clients their own addresses, behind its back.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeVar

from tests.servers.base import HOST
from tests.servers.ports import reserve_port

CHUNK_BYTES = 65_536
ANSWER_SECONDS = 20.0
"""How long the proxy's own thread may take for what it is told; it never comes close."""
LOOK_SECONDS = 0.01
ADDRESS = re.compile(r"([\w.-]+):(\d+)(?![\w@])")
Result = TypeVar("Result")


@dataclass
class Plan:
    """Lose the request or the reply of a burst, ``left`` bursts from now."""

    lose: Literal["request", "reply"]
    left: int


@dataclass(eq=False)
class Link:
    """A client's connection and its twin to the server."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    in_burst: bool = False
    losing_reply: bool = False

    def cut(self) -> None:
        self.client.transport.abort()
        self.server.transport.abort()

    def close(self) -> None:
        """End it in good order: what was forwarded still goes out."""
        self.client.close()
        self.server.close()

    @property
    def is_cut(self) -> bool:
        return self.client.transport.is_closing() or self.server.transport.is_closing()


class FaultProxy:
    """Stands in front of the server that a URL names. Use it in a ``with`` block."""

    def __init__(self, url: str) -> None:
        if (address := ADDRESS.search(url)) is None:
            raise ValueError(f"{url!r} names no host and port")
        self._target = (address[1], int(address[2]))
        self.port, self._reservation = reserve_port()
        self.url = f"{url[: address.start()]}{HOST}:{self.port}{url[address.end() :]}"
        self.bursts = self.connections = self.fired = 0
        self._plan: Plan | None = None
        self._links: set[Link] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._listener: asyncio.Server | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._wait_for(self._listen())
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._wait_for(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._reservation.close()

    def lose_request(self, nth: int = 1) -> None:
        """Cut the connection instead of forwarding the nth burst from now."""
        self._do(lambda: self._set_plan(Plan("request", nth)))

    def lose_reply(self, nth: int = 1) -> None:
        """Cut the connection when the answer to the nth burst from now begins."""
        self._do(lambda: self._set_plan(Plan("reply", nth)))

    def cut(self) -> None:
        """Cut every connection."""
        self._do(lambda: [link.cut() for link in self._links])

    def stall(self) -> None:
        """Forward nothing until ``heal``."""
        self._do(self._flowing.clear)

    def refuse(self) -> None:
        """Refuse new connections until ``heal``."""
        self._do(self._stop_listening)

    def heal(self) -> None:
        """End every fault."""
        self._do(lambda: (self._set_plan(None), self._flowing.set()))
        self._wait_for(self._listen())

    # Everything below runs in the proxy's own thread, so nothing needs a lock.

    def _do(self, action: Callable[[], object]) -> None:
        async def act() -> None:
            action()

        self._wait_for(act())

    def _wait_for(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(ANSWER_SECONDS)

    def _set_plan(self, plan: Plan | None) -> None:
        self._plan = plan

    async def _listen(self) -> None:
        if self._listener is None:
            self._listener = await asyncio.start_server(self._connected, HOST, self.port)

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def _close(self) -> None:
        """Cut every connection, and wait until each has noticed: one may be coming up just now."""
        self._stop_listening()
        self._flowing.set()
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            for link in self._links:
                link.cut()
            await asyncio.wait(others, timeout=LOOK_SECONDS)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Called for each connection; it lasts as long as the connection does."""
        self.connections += 1
        try:
            server_reader, server_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            return
        link = Link(writer, server_writer)
        self._links.add(link)
        await asyncio.gather(
            self._forward(reader, server_writer, link, self._from_client),
            self._forward(server_reader, writer, link, self._from_server),
        )
        for end in (writer, server_writer):
            with contextlib.suppress(OSError):
                await end.wait_closed()
        self._links.discard(link)

    async def _forward(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        link: Link,
        arrived: Callable[[Link], None],
    ) -> None:
        """Pass on what one side says until it ends, or the connection is cut; that ends the other direction too."""
        with contextlib.suppress(OSError):
            while chunk := await reader.read(CHUNK_BYTES):
                arrived(link)
                await self._flowing.wait()
                if link.is_cut:
                    break
                writer.write(chunk)
                await writer.drain()
        link.close()

    def _from_client(self, link: Link) -> None:
        if link.in_burst:
            return
        link.in_burst = True
        self.bursts += 1
        if self._plan is None:
            return
        self._plan.left -= 1
        if self._plan.left:
            return
        plan, self._plan = self._plan, None
        if plan.lose == "request":
            self._fire(link)
        else:
            link.losing_reply = True

    def _from_server(self, link: Link) -> None:
        link.in_burst = False
        if link.losing_reply:
            self._fire(link)

    def _fire(self, link: Link) -> None:
        self.fired += 1
        link.cut()
