"""kill -9 around every step and at random moments, on every kind of store: each step's effect happens once.

Victims die with a key of their own, many on one store, and when their leases are over somebody goes on with each key.
Then every step has had its effect once, at a sink that dedupes on the derived key; and what a dead handler had been
given was recorded, so that nobody even tried it again.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from uuid import uuid4

import pytest
from tests.crash.atomic_executioner import Executioner
from tests.crash.step_victims import STEPS, Worker, is_awaited

from effectonce import InProgress
from effectonce.testing.clocks import wait_until

SOAK = bool(os.environ.get("EFFECTONCE_SOAK"))
MOMENTS = 500 if SOAK else 10
STORES = ("sqlite", "postgres", "valkey")


class Where(NamedTuple):
    """What a victim has to know: a store and a sink."""

    dialect: str
    url: str
    name: str


class Mourner(Executioner):
    """Orders victims, and goes on where they died, when all their leases are over."""

    victims = "step_victims"

    def __init__(self, place: Any, folder: Path) -> None:
        super().__init__(place, folder)
        self.dead: dict[str, set[str]] = {}

    def examine(self, name: str, answered: dict[str, str]) -> None:
        """Not now: its lease is not over."""
        self.dead[name] = set(answered)

    def go_on(self) -> Counter[str]:
        """Bring every key to its end, and look at what has happened; how far the victims had come."""
        stages: Counter[str] = Counter()
        with closing(Worker(self.place.url, Path(self.place.name))) as worker:
            for id, given in self.dead.items():
                before = Counter(worker.sink.tries(id))
                assert self.finished(worker, id) == [f"{id} {step}" for step in STEPS]
                after = Counter(worker.sink.tries(id))
                assert worker.sink.effects(id) == list(STEPS), "an effect happened twice, or not at all"
                again = {step for step in STEPS if after[step] > before[step]}
                assert not again & given, (
                    f"{again & given} ran again, though a handler had been given its result"
                )
                stages[f"{len(given)} given"] += 1
        return stages

    def finished(self, worker: Worker, id: str) -> Any:
        """What the key's next attempts come to: the first one fails, if nobody has tried before."""
        answers: list[Any] = []

        def answered() -> bool:
            try:
                answers.append(worker.process(id, not is_awaited(id)))
            except InProgress:
                return False
            except Exception as error:
                assert type(error).__name__ == "Stumbled"
                return False
            return True

        wait_until(answered, seconds=60)
        return answers[0]


@pytest.fixture(params=STORES)
def mourner(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Mourner]:
    memory = Path("/dev/shm")  # a killed process leaves the kernel's caches alone: no need to wait for a disk
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as name:
        folder, own = Path(name), uuid4().hex[:12]
        if request.param == "sqlite":
            url = f"sqlite:///{folder / 'effects.db'}"
        elif request.param == "postgres":
            url = f"{request.getfixturevalue('postgres').url}?table=steps_{own}"
        else:
            url = f"{request.getfixturevalue('valkey').url}?prefix=steps_{own}:"
        mourner = Mourner(Where(request.param, url, str(folder / "sink.db")), folder)
        yield mourner
        mourner.close()


def test_each_step_happens_once(mourner: Mourner) -> None:
    """Killed before and after every command and every effect, in both colours, and at any moment."""
    lives = [mourner.execute("statement", None) for _ in range(4)]  # two of each colour
    whole, seconds = min(life["count"] for life in lives), sorted(life["seconds"] for life in lives)[2]
    assert whole >= 2 * (2 + 2 * len(STEPS))
    for _ in range(2 if SOAK else 1):  # every point, in the soak in either colour
        killed = [mourner.execute("statement", at)["killed"] for at in range(1, whole + whole % 2)]
        assert all(killed)
    random = Random(int(os.environ.get("EFFECTONCE_SEED", "7")))
    moments = [int(random.uniform(0.2, 1.2) * seconds * 1e6) for _ in range(MOMENTS)]
    killed = [mourner.execute("time", moment)["killed"] for moment in moments]
    assert any(killed)
    stages = mourner.go_on()
    print(dict(sorted(stages.items())))
    assert len(stages) >= len(STEPS) - 1, "victims died at few stages only"


@pytest.mark.parametrize("mourner", ["sqlite"], indirect=True)
def test_a_step_that_is_given_before_it_is_recorded_is_found_out(mourner: Mourner) -> None:
    """The examiner can say no."""
    for at in range(1, 24):
        mourner.execute("statement", at, "given before it is recorded")
    with pytest.raises(AssertionError, match="ran again"):
        mourner.go_on()
