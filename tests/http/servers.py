"""Web servers with an app of ``tests/http/apps`` inside, as processes of their own on free ports.

``start("gunicorn-sync", world)`` is ready when it has answered a request, and is ended by its process id.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from http.client import HTTPConnection
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from tests.http.site import Site
from tests.http.world import World
from tests.servers.base import HOST
from tests.servers.process import ASK_SECONDS, ProcessServer

ROOT = Path(__file__).parents[2]
APPS = "tests.http.apps"

Command = Callable[[int], list[str]]
"""What to run for a server on a port."""


def gunicorn(app: str, *options: str) -> Command:
    """Workers are processes; ``--threads`` gives each a pool of them."""
    return lambda port: [
        "gunicorn",
        f"--bind={HOST}:{port}",
        "--no-control-socket",
        *options,
        f"{APPS}.{app}",
    ]


def granian(app: str) -> Command:
    return lambda port: [
        "granian", "--interface=wsgi", f"--host={HOST}", f"--port={port}", "--workers=2", "--blocking-threads=8",
        "--workers-kill-timeout=5", f"{APPS}.{app}",
    ]  # fmt: skip


def runserver(port: int) -> list[str]:
    """Django's own server for development: a thread for each connection."""
    settings = f"--settings={APPS}.django_settings"
    return ["django", "runserver", settings, "--noreload", "--skip-checks", f"{HOST}:{port}"]


def uvicorn(app: str) -> Command:
    return lambda port: ["uvicorn", "--factory", f"--host={HOST}", f"--port={port}", f"{APPS}.{app}"]


def asgi(server: str, *options: str) -> Callable[[str], Command]:
    """ASGI servers name their options alike; hypercorn speaks HTTP/1.1 and HTTP/2 on one port."""
    place = ["--bind={host}:{port}"] if server == "hypercorn" else ["--host={host}", "--port={port}"]
    return lambda app: (
        lambda port: [
            server,
            *(word.format(host=HOST, port=port) for word in place),
            *options,
            f"{APPS}.{app}",
        ]
    )


h11 = asgi("uvicorn", "--http=h11", "--loop=asyncio", "--log-level=warning")
httptools = asgi("uvicorn", "--http=httptools", "--loop=uvloop", "--log-level=warning")
hypercorn = asgi("hypercorn")
granian_asgi = asgi("granian", "--interface=asgi", "--workers-kill-timeout=5")

SERVERS: dict[str, Command] = {
    "gunicorn-sync": gunicorn("plain:application", "--workers=4"),
    "gunicorn-gthread": gunicorn("plain:application", "--workers=2", "--threads=8"),
    "granian": granian("plain:application"),
    "flask-gunicorn": gunicorn("flask_app:app", "--workers=2", "--threads=8"),
    "django-gunicorn": gunicorn("django_app:application", "--workers=2", "--threads=8"),
    "django-runserver": runserver,
    "django-uvicorn": uvicorn("django_async:application"),
    "django-uvicorn-threads": uvicorn("django_async:threaded"),
    "django-uvicorn-mixed": uvicorn("django_async:mixed"),
    "bare-h11": h11("bare_asgi:application"),
    "bare-httptools": httptools("bare_asgi:application"),
    "bare-hypercorn": hypercorn("bare_asgi:application"),
    "bare-granian": granian_asgi("bare_asgi:application"),
    "starlette-httptools": httptools("starlette_app:application"),
    "starlette-granian": granian_asgi("starlette_app:application"),
    "fastapi-h11": h11("fastapi_app:application"),
    "dependency-httptools": httptools("fastapi_app:by_dependency"),
    "hostile-h11": h11("hostile_asgi:application"),
    "hostile-httptools": httptools("hostile_asgi:application"),
    "hostile-hypercorn": hypercorn("hostile_asgi:application"),
    "hostile-granian": granian_asgi("hostile_asgi:application"),
}
"""Every server, and what runs in it."""


class WebServer(ProcessServer):
    """One of ``SERVERS``, on a free port."""

    name = "web"

    def __init__(self, kind: str, world: World, environment: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.kind, self.world = kind, world
        self._environment = environment or {}

    @classmethod
    def get(cls) -> None:
        """Nothing: they all are packages of the environment."""

    def prepare(self) -> None:
        """Nothing: the store is the world's."""

    def command(self) -> list[str]:
        return [sys.executable, "-P", "-m", *SERVERS[self.kind](self.port)]

    def environment(self) -> dict[str, str]:
        return {
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
            "PYTHONDONTWRITEBYTECODE": "1",
            **self.world.environment,
            **self._environment,
        }

    def ask(self) -> None:
        connection = HTTPConnection(HOST, self.port, timeout=ASK_SECONDS)
        try:
            connection.request("GET", "/plain/ready?n=ready")
            status = connection.getresponse().status
        finally:
            connection.close()
        if status != 200:
            raise ConnectionError(f"{self.kind} answers with {status}")

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"


def start(kind: str, world: World, environment: Mapping[str, str] | None = None) -> WebServer:
    """Start one of ``SERVERS``."""
    return WebServer(kind, world, environment).start()


def sites(*kinds: str, lacks: Mapping[str, Iterable[str]] = MappingProxyType({})) -> Any:
    """A fixture ``site`` for each of some kinds of servers, with a world of its own; and what each kind lacks."""

    @pytest.fixture(scope="module", params=kinds, name="site")
    def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
        world = World(tmp_path_factory.mktemp(request.param))
        with start(request.param, world) as server:
            yield Site(server.url, world, lacks.get(request.param, ()))
        world.close()

    return site
