"""Every rule of the HTTP boundary on ASGI, over real sockets: three servers, HTTP/1.1 and HTTP/2, four apps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.http import servers
from tests.http.http2 import Http2Site
from tests.http.rules import HttpRules
from tests.http.site import Site
from tests.http.world import World

SITES: dict[str, type[Site]] = {
    "bare-h11": Site,
    "bare-httptools": Site,
    "bare-hypercorn": Site,
    "bare-hypercorn http2": Http2Site,
    "bare-granian": Site,
    "starlette-httptools": Site,
    "starlette-granian http2": Http2Site,
    "fastapi-h11": Site,
    "dependency-httptools": Site,
}
"""What runs, and how it is spoken to."""


@pytest.fixture(scope="module", params=SITES)
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server with an app inside, and a world of its own."""
    server = request.param.partition(" ")[0]
    world = World(tmp_path_factory.mktemp(server))
    with servers.start(server, world) as started:
        yield SITES[request.param](started.url, world)
    world.close()


class TestAsgi(HttpRules):
    """The apps of ``apps/bare_asgi.py``, ``starlette_app.py`` and ``fastapi_app.py``."""
