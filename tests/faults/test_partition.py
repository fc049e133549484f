"""Workers that are cut off from their store by a network that loses every packet and says nothing.

Each ends with: no answer but the one effect that the sink has, and no key that is stuck.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest
from tests.faults.networks import Elsewhere, elsewhere
from tests.faults.test_workers import Worker, Workers
from tests.servers import Server
from tests.servers.base import HOST

from effectonce.testing.clocks import wait_until

SETTINGS = {
    "postgres": {"listen_addresses": "*"},
    "valkey": {"bind": "0.0.0.0", "protected_mode": "no"},
    "mariadb": {"bind_address": "0.0.0.0"},
}
OUTAGES = 20 if os.environ.get("EFFECTONCE_SOAK") else 2


@pytest.fixture
def far() -> Iterator[Elsewhere]:
    with elsewhere() as place:
        yield place


@pytest.fixture(params=SETTINGS)
def server(request: pytest.FixtureRequest, start_server: Callable[..., Server], far: Elsewhere) -> Server:
    """A server that can be reached from there too."""
    server = start_server(request.param, **SETTINGS[request.param])
    if request.param == "postgres":
        with psycopg.connect(server.url, autocommit=True) as connection:
            ((rules,),) = connection.execute("SHOW hba_file").fetchall()
            with Path(rules).open("a") as file:
                file.write(f"host all all {far.address}/24 scram-sha-256\n")
            connection.execute("SELECT pg_reload_conf()")
    return server


@pytest.fixture
def workers(server: Server, tmp_path: Path) -> Iterator[Workers]:
    with ExitStack() as stack:
        yield Workers(server.url, tmp_path, stack)


def start_far(workers: Workers, far: Elsewhere, seed: object, ids: list[str]) -> Worker:
    """Start a worker there, which gives its store up after a second."""
    url = f"{workers.url.replace(HOST, far.address)}?timeout=1"
    return workers.start(seed, ids, url=url, within=far.within)


def statuses(worker: Worker) -> list[str]:
    return [status for _, status, _ in worker.answers()]


def test_a_worker_that_is_cut_off_is_fenced_out(workers: Workers, far: Elsewhere) -> None:
    """Its lease ends, another takes over; its own effect comes too late, and it gets that answer when it is back."""
    lost = start_far(workers, far, "pause", ["m"])
    wait_until((workers.directory / "entered").exists, seconds=60, what="The worker's handler")
    far.cut()
    other = workers.start(1, ["m"])
    other.end()
    (workers.directory / "leave").touch()
    wait_until(lambda: lost.answers(), seconds=60, what="The word that it lost its lease or its store")
    assert not {"executed", "replayed"} & set(statuses(lost))
    far.mend()
    lost.end()
    assert statuses(other)[-1] == "executed"
    assert (statuses(lost)[-1], lost.answers()[-1][2]) == ("replayed", other.answers()[-1][2])
    workers.check(["m"])


def test_a_network_that_comes_and_goes(workers: Workers, far: Elsewhere) -> None:
    """Workers on both sides have the same messages; whatever was on its way, each has one effect and one answer."""
    ids = [f"id {number}" for number in range(200 * OUTAGES)]
    there = [start_far(workers, far, seed, ids) for seed in (1, 2)]
    here = workers.start(3, ids)
    for _ in range(OUTAGES):
        answered = [len(worker.answers()) for worker in there]
        moved = [
            lambda worker=worker, before=before: (
                len(worker.answers()) > before + 20 or worker.process.poll() == 0
            )
            for worker, before in zip(there, answered, strict=True)
        ]
        wait_until(lambda moved=moved: all(has() for has in moved), seconds=60, what="Traffic")
        unavailable = [statuses(worker).count("StoreUnavailable") for worker in there]
        far.cut()
        felt = [
            lambda worker=worker, before=before: (
                statuses(worker).count("StoreUnavailable") > before or worker.process.poll() == 0
            )
            for worker, before in zip(there, unavailable, strict=True)
        ]
        wait_until(lambda felt=felt: all(has() for has in felt), seconds=60, what="StoreUnavailable")
        far.mend()
    for worker in (*there, here):
        worker.end()
    assert any("StoreUnavailable" in statuses(worker) for worker in there)
    workers.check(ids)
