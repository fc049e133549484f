"""A web server with a contender around its app: what it uses of a core for each request.

`variant` is the web server, the factory in `benchmarks/web/apps.py` and the store. The server has a core to itself
where there is another for its clients. Its own time on the core is the value, because it says what the contender
costs whatever else the machine does; `wall` is the time between two answers.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from time import perf_counter

from tests.servers.base import HOST

from benchmarks.contenders import environment
from benchmarks.peers.stage import PeerServer
from benchmarks.peers_http import PACKAGES
from benchmarks.web.apps import STORE
from benchmarks.web.load import GET, RUNS, Load, post
from benchmarks.web.processes import cpu_seconds, pin
from benchmarks.workers.base import RANDOM, Figure, Setup, new_keys

PLACE = [f"--host={HOST}", "--port={port}"]
COMMANDS = {
    "uvicorn": [
        "uvicorn",
        "--http=httptools",
        "--loop=uvloop",
        "--no-access-log",
        "--log-level=warning",
        "--timeout-keep-alive=3600",  # others take their turns meanwhile
        *PLACE,
    ],
    "granian": ["granian", "--interface=asgi", "--loop=uvloop", "--no-ws", *PLACE],
}
OURS = ("bare", "effectonce", "effectonce_scoped")
CONNECTIONS = 64


def open_subject(setup: Setup) -> Web:
    """Open one row."""
    return Web(setup)


class Web:
    """A server that runs, and connections to it."""

    def __init__(self, setup: Setup) -> None:
        kind, app, store = setup.variant.split()
        stores = {"redis": setup.url, "sqlite": f"sqlite:///{setup.file()}", "file": str(setup.file())}
        python = Path(sys.executable) if app in OURS else environment("peers", PACKAGES)
        command = [*COMMANDS[kind], "--factory", f"benchmarks.web.apps:{app}"]
        self._server = PeerServer(command, python, {STORE: stores.get(store, "memory://")}).start()
        cores = sorted(os.sched_getaffinity(0))
        pin(self._server.pid, {cores[-1]})
        os.sched_setaffinity(0, cores[:-1] or cores)
        self._load = Load(self._server.port, CONNECTIONS)
        self._op, self._protects = setup.op, app != "bare"
        self._known = new_keys(setup.prefill)
        self._load.send([post(key) for key in self._known])

    def slice(self, operations: int) -> Figure:
        """Send requests, and see that the app ran exactly as often as it should."""
        requests = self._requests(operations)
        before, cpu, start = self._runs(), cpu_seconds(self._server.pid), perf_counter()
        self._load.send(requests)
        wall, cpu = perf_counter() - start, cpu_seconds(self._server.pid) - cpu
        ran = self._runs() - before
        expected = operations if self._op == "new" or (self._op == "dup" and not self._protects) else 0
        if ran != expected:
            raise RuntimeError(f"the app ran {ran} times for {operations} requests, not {expected}")
        return {"value": cpu / operations, "operations": operations, "wall": wall / operations}

    def close(self) -> None:
        """End the server."""
        self._load.close()
        self._server.stop()

    def _requests(self, operations: int) -> list[bytes]:
        if self._op == "get":
            return [GET] * operations
        keys = RANDOM.choices(self._known, k=operations) if self._op == "dup" else new_keys(operations)
        return [post(key) for key in keys]

    def _runs(self) -> int:
        (reply,) = self._load.send([RUNS])
        return int(reply.partition(b"\r\n\r\n")[2])
