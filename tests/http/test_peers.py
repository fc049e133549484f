"""The hostile cases of ``benchmarks/peers``, on effectonce alone: what is compared with others holds here.

`benchmarks/run peers` runs them on the others as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from benchmarks.peers.cases import CASES, Failed
from benchmarks.peers.stage import BARE, EFFECTONCE, Contender, Servers
from tests.http.world import World
from tests.servers.fixtures import HasURL


@pytest.fixture(scope="module")
def stage(valkey: HasURL, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with open_stage(EFFECTONCE, valkey.url, tmp_path_factory.mktemp("peers")) as servers:
        yield servers


@pytest.fixture(scope="module")
def unprotected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with open_stage(BARE, "none", tmp_path_factory.mktemp("peers")) as servers:
        yield servers


@contextmanager
def open_stage(contender: Contender, store: str, folder: Path) -> Iterator[Servers]:
    world = World(folder)
    servers = Servers(contender, world, store)
    try:
        yield servers
    finally:
        servers.close()
        world.close()


@pytest.mark.parametrize("row", CASES)
def test_what_others_get_wrong(stage: Servers, row: str) -> None:
    """Every row of the table of peers holds."""
    stage.run(CASES[row])


@pytest.mark.parametrize("row", ["204", "send error", "key, other body", "client leaves"])
def test_the_cases_can_fail(unprotected: Servers, row: str) -> None:
    """The app alone fails them."""
    with pytest.raises(Failed):
        unprotected.run(CASES[row])
