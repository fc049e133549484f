"""The executioner, its victims' directories, and the count of kills at the end of the run."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.crash.examiner import Examiner
from tests.crash.talking import ForkServer
from tests.crash.workloads import EXPIRED, SETTLED, START, WORKLOADS, World, furnish, key_of

from effectonce import Receiver, Record
from effectonce.stores.sqlite import SQLiteStore

FILES = ("effects.db", "sink.db")
tally_key = pytest.StashKey[Counter[str]]()


class Kill(NamedTuple):
    """Where a victim dies: which script, in which mode, and at which count of what."""

    workload: str
    by: str
    at: int | None
    once: bool = False
    beside: bool = False
    """Another process has the file open all the while."""
    fault: str = ""
    durability: str = "full"


class Executioner:
    """Talks to the fork server, and has every death examined."""

    def __init__(self, directory: Path, tally: Counter[str]) -> None:
        self.directory, self.tally = directory, tally
        self.base = directory / "base"
        self.base.mkdir()
        furnish(self.base)
        with Receiver(SQLiteStore(self.base / "effects.db")) as receiver:
            found = {id: receiver.get(key_of(id)) for id in (*SETTLED, *EXPIRED)}
        self.furnished: dict[str, Record] = {id: record for id, record in found.items() if record is not None}
        self.server = ForkServer("forkserver", "-W", "error")
        self.can_trace: bool = self.server.read()["ptrace"]
        self.lengths: dict[Kill, int] = {}

    def length(self, kill: Kill) -> int:
        """How many points a script has in its whole life; with threads, in the shortest of three."""
        whole = kill._replace(at=None)
        if whole not in self.lengths:
            self.lengths[whole] = min(self.whole_life(whole) for _ in range(3))
        return self.lengths[whole]

    def whole_life(self, whole: Kill) -> int:
        with self.scene(whole) as (directory, _):
            count: int = self.order(whole, directory)["count"]
            return count

    def execute(self, kill: Kill, parent: Path | None = None) -> bool:
        """Kill once and examine what is left. False if the victim came to its end before its point."""
        with self.scene(kill, parent) as (directory, neighbour):
            killed: bool = self.order(kill, directory)["killed"]
            examiner = Examiner(directory, WORKLOADS[kill.workload], once=kill.once, furnished=self.furnished)
            try:
                stage = examiner.examine(neighbour)
            except Exception as error:
                error.add_note(f"after {kill}")
                raise
        if killed and not kill.fault:
            self.tally[stage] += 1
        return killed

    @contextmanager
    def scene(self, kill: Kill, parent: Path | None = None) -> Iterator[tuple[Path, World | None]]:
        """A directory as the script wants it, and the neighbour if there is one."""
        with tempfile.TemporaryDirectory(dir=parent or self.directory) as name:
            directory = Path(name)
            for file in () if WORKLOADS[kill.workload].from_nothing else FILES:
                shutil.copy(self.base / file, directory / file)
            neighbour = World(directory, START, once=kill.once, durability="off") if kill.beside else None
            try:
                yield directory, neighbour
            finally:
                if neighbour is not None:
                    neighbour.close()

    def order(self, kill: Kill, directory: Path) -> dict[str, Any]:
        return self.server.order(**kill._asdict(), directory=str(directory))

    def close(self) -> None:
        self.server.close()


@pytest.fixture(scope="session")
def executioner(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Executioner]:
    """One fork server for the session. SIGKILL can't tell a disk from memory: the kernel keeps both its caches.

    So the directories are in memory where that is to be had, and the waiting for a disk is saved.
    """
    memory = Path("/dev/shm")
    inside = memory if os.access(memory, os.W_OK) else tmp_path_factory.mktemp("crash")
    with tempfile.TemporaryDirectory(prefix="effectonce-crash-", dir=inside) as directory:
        executioner = Executioner(Path(directory), pytestconfig.stash.setdefault(tally_key, Counter()))
        yield executioner
        executioner.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say how many were killed, and where."""
    if tally := config.stash.get(tally_key, Counter()):
        stages = ", ".join(f"{count} {stage}" for stage, count in sorted(tally.items()))
        terminalreporter.line(f"kill -9: {tally.total()} kill points ({stages})")
