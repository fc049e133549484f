"""Worker processes on real servers: killed, frozen, and with wrong clocks. The sink outside checks fences.

Each ends with: no answer but the one effect that the sink has, and no key that is stuck.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from uuid import uuid4

import pytest
from tests.crash.sink import Sink

from effectonce import Receiver, State
from effectonce.testing.clocks import wait_until

ROOT = Path(__file__).parents[2]
KILLS = 200 if os.environ.get("EFFECTONCE_SOAK") else 16
LEASE = 1.0
SKEWS = ["-3600", "3600"]


class Worker:
    """A worker process and what it has printed."""

    def __init__(
        self,
        url: str,
        directory: Path,
        seed: object,
        ids: list[str],
        skew: str = "0",
        within: Sequence[str] = (),
    ) -> None:
        self._output = directory / f"worker-{uuid4().hex}"
        command = [
            *within,
            sys.executable,
            "-m",
            "tests.faults.worker",
            url,
            str(directory),
            str(LEASE),
            str(seed),
            *ids,
        ]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "EFFECTONCE_SKEW": skew}
        self._errors = self._output.with_suffix(".err")
        with self._output.open("wb") as output, self._errors.open("wb") as errors:
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=errors)

    def answers(self) -> list[tuple[str, str, str | None]]:
        """What each message was answered with: its id, the status or the error's name, the value."""
        lines = self._output.read_text().splitlines(keepends=True)
        return [tuple(json.loads(line)) for line in lines if line.endswith("\n")]

    def end(self) -> None:
        """Wait until it has answered everything."""
        self.process.wait(timeout=90)
        assert self.process.returncode == 0, self._errors.read_text()[-3000:]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(params=["valkey", "redis7", "valkey_cluster", "postgres", "mariadb", "dynamodb"])
def url(request: pytest.FixtureRequest) -> str:
    """A store on a real server, shared with other tests: ids are made for each test."""
    server = request.getfixturevalue(request.param)
    return str(server.url)


@pytest.fixture
def ids() -> list[str]:
    run = uuid4().hex[:12]
    return [f"{run}-{number}" for number in range(40)]


@pytest.fixture
def workers(url: str, tmp_path: Path) -> Iterator[Workers]:
    with ExitStack() as stack:
        yield Workers(url, tmp_path, stack)


class Workers:
    """Starts workers, and ends those that a failed test leaves behind."""

    def __init__(self, url: str, directory: Path, stack: ExitStack) -> None:
        self.url, self.directory, self._stack = url, directory, stack
        self.all: list[Worker] = []

    def start(
        self, seed: object, ids: list[str], skew: str = "0", url: str = "", within: Sequence[str] = ()
    ) -> Worker:
        """Start one, on this machine or ``within`` what a command makes of it, where the store may have another URL."""
        worker = Worker(url or self.url, self.directory, seed, ids, skew, within)
        self._stack.callback(worker.kill)
        self.all.append(worker)
        return worker

    def check(self, ids: list[str]) -> None:
        """Every answer anybody got is the sink's one effect, every key is completed with it."""
        sink = Sink(self.directory / "sink.db")
        answers = [answer for worker in self.all for answer in worker.answers()]
        given = {(id, value) for id, status, value in answers if status in ("executed", "replayed")}
        assert given == {(id, sink.effect(id)) for id in ids}
        with Receiver(self.url) as receiver:
            for id in ids:
                record = receiver.get(f"|message||{id}")
                assert record is not None
                assert record.state is State.COMPLETED
        sink.close()


def test_killed_workers_lose_nothing_and_double_nothing(workers: Workers, ids: list[str]) -> None:
    """SIGKILL anywhere, again and again: what a dead worker held is taken over, with one effect and one answer."""
    chance = random.Random(7)
    running = [workers.start(seed, ids) for seed in range(4)]
    for kill in range(KILLS):
        place = chance.randrange(len(running))
        victim = running[place]
        wait_until(
            lambda victim=victim: victim.answers() or victim.process.poll() is not None,
            seconds=60,
            what="A worker's first answer",
        )
        victim.kill()
        running[place] = workers.start(100 + kill, ids)
    for worker in running:
        worker.end()
    workers.check(ids)


def test_a_frozen_worker_is_fenced_out(workers: Workers, ids: list[str]) -> None:
    """SIGSTOP beyond the lease: another takes over; the first, when it wakes, changes nothing and gets that answer."""
    frozen = workers.start("pause", ids[:1])
    entered = workers.directory / "entered"
    wait_until(entered.exists, seconds=60, what="The worker's handler")
    frozen.process.send_signal(signal.SIGSTOP)
    other = workers.start(1, ids[:1])
    other.end()
    (workers.directory / "leave").touch()
    frozen.process.send_signal(signal.SIGCONT)
    frozen.end()
    assert [status for _, status, _ in other.answers()][-1] == "executed"
    assert "executed" not in [status for _, status, _ in frozen.answers()]
    workers.check(ids[:1])


@pytest.mark.parametrize("skew", SKEWS)
def test_a_wrong_clock_takes_nothing_over(workers: Workers, ids: list[str], skew: str) -> None:
    """A worker whose clock is an hour off waits for a live lease like any other, and answers duplicates."""
    holder = workers.start("pause", ids[:1])
    entered = workers.directory / "entered"
    wait_until(entered.exists, seconds=60, what="The worker's handler")
    skewed = workers.start(2, ids[1:] + ids[:1], skew)
    wait_until(lambda: len(skewed.answers()) >= len(ids) - 1, seconds=60, what="The skewed worker's answers")
    (workers.directory / "leave").touch()
    holder.end()
    skewed.end()
    assert [status for _, status, _ in holder.answers()] == ["executed"]
    last = [status for id, status, _ in skewed.answers() if id == ids[0]]
    assert last[-1] == "replayed"
    workers.check(ids)
