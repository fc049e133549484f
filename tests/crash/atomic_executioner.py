"""Who orders the victims of atomic mode, on every engine, and has each death examined."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.crash.talking import ForkServer
from tests.integration.transaction_drivers import Place

ENGINES = ["sqlite", "postgresql", "mysql"]
FINAL = {2, 3}
"""States of a record that has its answer."""

Execute = Callable[..., dict[str, Any]]


class Executioner:
    """Talks to a process that forks victims. Subclasses name those, and examine."""

    victims: str

    def __init__(self, place: Place, folder: Path) -> None:
        self.place, self.folder, self.numbers = place, folder, count(1)
        self.server = ForkServer(self.victims)

    def new_name(self) -> str:
        """What the next victim's keys begin with."""
        return f"p{next(self.numbers)}"

    def execute(self, by: str, at: int | None, fault: str = "") -> dict[str, Any]:
        """Have one victim killed, and examine."""
        name = self.new_name()
        journal = self.folder / name
        place = (self.place.dialect, self.place.url, self.place.name)
        order = {"by": by, "at": at, "pair": name, "journal": str(journal), "place": place, "fault": fault}
        answer = self.server.order(**order)
        told = journal.read_text().splitlines() if journal.exists() else []
        try:
            self.examine(name, dict(line.split() for line in told))
        except AssertionError as error:
            error.add_note(f"after {order}")
            raise
        return answer

    def examine(self, name: str, answered: dict[str, str]) -> None:
        """Look at what a victim has left behind, which had given these answers."""
        raise NotImplementedError

    def record_of(self, key: str) -> str:
        """A subquery for the state of a record."""
        if self.place.dialect == "sqlite":
            return f"SELECT state FROM effectonce_records WHERE key = '{key}'"
        state, column = ("state & 7", "key") if self.place.dialect == "postgresql" else ("state", "`key`")
        return f"SELECT {state} FROM records_{self.place.name} WHERE {column} = '{key}'"

    def close(self) -> None:
        """Let the process end, which has no more victims."""
        self.server.close()


@contextmanager
def scene(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Place, Path]]:
    """A database on the engine that the request names, and a folder."""
    memory = Path("/dev/shm")  # a killed process leaves the kernel's caches alone: no need to wait for a disk
    inside = memory if os.access(memory, os.W_OK) else tmp_path_factory.mktemp("atomic")
    folder = Path(tempfile.mkdtemp(prefix="effectonce-atomic-", dir=inside))
    if request.param == "sqlite":
        place = Place("sqlite", f"sqlite:///{folder / 'bank.db'}")
    else:
        server = request.getfixturevalue("postgres" if request.param == "postgresql" else "mariadb")
        place = Place(request.param, server.url)
    place.prepare()
    yield place, folder
    place.remove()
    shutil.rmtree(folder)


def kill_at_boundaries(execute: Execute, every: int = 1) -> int:
    """Kill before and after each statement, or every so many of these points; how many there are in a whole life."""
    whole: int = execute("statement", None)["count"]
    assert all(execute("statement", at)["killed"] for at in range(1, whole + 1, every))
    return whole


def kill_at_random(execute: Execute, random: Random, kills: int) -> None:
    """Kill so many victims, each at some moment of its life; those that came to their end first don't count."""
    life = min(execute("statement", None)["seconds"] for _ in range(3))
    while kills:
        killed = execute("time", random.randrange(int(life * 1e6)))["killed"]
        kills -= killed
        # How long a life lasts changes with what else the machine has to do; one in seven or so may come to its end.
        life *= 1.005 if killed else 0.97
