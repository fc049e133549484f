"""Every rule of the HTTP boundary on ASGI, over real sockets: three servers, HTTP/1.1 and HTTP/2, four apps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.http import servers
from tests.http.rules import HttpRules
from tests.http.site import Site
from tests.http.world import World


@pytest.fixture(
    scope="module",
    params=[
        "bare-h11",
        "bare-httptools",
        "bare-hypercorn",
        "bare-granian",
        "starlette-httptools",
        "fastapi-h11",
        "dependency-httptools",
    ],
)
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server with an app inside, and a world of its own."""
    world = World(tmp_path_factory.mktemp(request.param))
    with servers.start(request.param, world) as server:
        yield Site(server.url, world)
    world.close()


class TestAsgi(HttpRules):
    """The apps of ``apps/bare_asgi.py``, ``starlette_app.py`` and ``fastapi_app.py``."""
