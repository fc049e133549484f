"""Contenders, and the servers that a case runs on: real ones, on free ports, ended by their process id."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Self

from tests.http.site import Site
from tests.http.world import World
from tests.servers.base import HOST
from tests.servers.process import ASK_SECONDS, ProcessServer

from benchmarks.peers.kitchen import KEEP, LEASE, STORE

ROOT = Path(__file__).parents[2]
DAY = 86_400.0


def uvicorn(app: str) -> list[str]:
    """Any ASGI app."""
    return ["uvicorn", "--factory", "--log-level=warning", f"--host={HOST}", "--port={port}", app]


def gunicorn(app: str) -> list[str]:
    """Any WSGI app: a process with threads, so that a duplicate meets the first."""
    return ["gunicorn", "--threads=8", "--no-control-socket", f"--bind={HOST}:{{port}}", app]


@dataclass(frozen=True, eq=False)
class Contender:
    """Something that promises that a request with a key happens once."""

    name: str
    distribution: str
    """As PyPI calls it."""
    command: list[str]
    waiting: list[str] | None = None
    """What to run where duplicates are to wait; by default the same."""
    store: str = "redis"
    """Or "sqlite", a file."""
    lacks: Mapping[str, str] = field(default_factory=dict)
    """Rows that it can't have, and why."""


def _asgi(name: str, factory: str, store: str = "redis") -> Contender:
    return Contender(name, name, uvicorn(f"benchmarks.peers.apps:{factory}"), store=store)


BARE = _asgi("nothing", "bare")
"""The app alone, which shows that the cases can fail."""
EFFECTONCE = Contender(
    "effectonce",
    "effectonce",
    uvicorn("benchmarks.peers.apps:effectonce"),
    uvicorn("benchmarks.peers.apps:effectonce_waiting"),
)
RIVALS = (
    _asgi("idemkit", "idemkit"),
    _asgi("asgi-idempotency-header", "asgi_idempotency_header"),
    _asgi("fastapi-idempotency", "fastapi_idempotency", store="sqlite"),
    _asgi("fastapi-idempotency-key", "fastapi_idempotency_key", store="sqlite"),
    Contender(
        "django-idempotency-key",
        "django-idempotency-key",
        gunicorn("benchmarks.peers.django_app:application"),
        lacks={
            "BaseHTTPMiddleware inside": "Django has none",
            "send error": "WSGI servers send when the app has returned",
            "several header lines": "a Django response has one line of each",
        },
    ),
)


class PeerServer(ProcessServer):
    """A web server with a contender inside."""

    name = "peer"

    def __init__(self, command: list[str], python: Path, environment: Mapping[str, str]) -> None:
        super().__init__()
        self._command, self._python, self._environment = command, python, environment

    @classmethod
    def get(cls) -> None:
        """Nothing: what it needs is in the environment of its Python."""

    def prepare(self) -> None:
        """Nothing: the store is elsewhere."""

    def command(self) -> list[str]:
        words = [word.format(port=self.port) for word in self._command]
        return [str(self._python), "-P", "-m", *words]

    def environment(self) -> dict[str, str]:
        return {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "PYTHONDONTWRITEBYTECODE": "1", **self._environment}

    def ask(self) -> None:
        connection = HTTPConnection(HOST, self.port, timeout=ASK_SECONDS)
        try:
            connection.request("GET", "/stream")
            connection.getresponse()
        finally:
            connection.close()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"


@dataclass
class Servers:
    """The stage of one contender. Servers are started when a case asks, and kept for cases that ask for the same."""

    contender: Contender
    world: World
    store: str
    python: Path = Path(sys.executable)
    _stack: ExitStack = field(default_factory=ExitStack)
    _running: list[tuple[object, PeerServer, Site]] = field(default_factory=list)
    _lent: list[Site] = field(default_factory=list)

    def site(self, *, lease: float = 60.0, keep: float = DAY, waits: bool = False) -> Site:
        """A server that this case does not have yet."""
        kind = (lease, keep, waits and self.contender.waiting is not None)
        for known, _, site in self._running:
            if known == kind and site not in self._lent:
                self._lent.append(site)
                return site
        command = self.contender.waiting if waits and self.contender.waiting else self.contender.command
        environment = {**self.world.environment, STORE: self.store, LEASE: str(lease), KEEP: str(keep)}
        server = self._stack.enter_context(PeerServer(command, self.python, environment))
        server.start()
        site = Site(server.url, self.world)
        self._running.append((kind, server, site))
        self._lent.append(site)
        return site

    def kill(self, site: Site) -> None:
        """End it as a crash would, with SIGKILL."""
        ((index, server),) = [(i, s) for i, (_, s, each) in enumerate(self._running) if each is site]
        server.kill()
        del self._running[index]

    def run(self, case: Callable[[Self], None]) -> None:
        """Run a case; its servers are free again afterwards. Those on a file end: who idles there may hold a lock."""
        try:
            case(self)
        finally:
            self._lent.clear()
            if self.contender.store == "sqlite":
                self.close()

    def close(self) -> None:
        """End all servers."""
        self._stack.close()
        self._running.clear()
