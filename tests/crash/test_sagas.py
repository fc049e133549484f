"""kill -9 at every boundary of a saga's steps and at random moments, then two sweepers at once: each step's effect
happens once at a sink that checks the derived key, and every saga ends completed or fully undone, never half.

Victims die with sagas of their own, many on one store; then some sweepers die on them; then two sweepers race for what
is left. So one lease is waited for, not one for each kill.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any
from uuid import uuid4

import pytest
from tests.crash.saga_victims import SCENARIOS, STEPS, Process
from tests.crash.talking import ForkServer

from effectonce._blocking import run
from effectonce._records import State
from effectonce.testing.clocks import wait_until

SOAK = bool(os.environ.get("EFFECTONCE_SOAK"))
POINTS = 8
"""Boundaries for each scenario in an ordinary run, evenly spread; all of them in the soak."""
MOMENTS = 500 if SOAK else 6
SWEEPERS = 60 if SOAK else 4
"""Sweepers that are killed at work."""


@pytest.fixture(scope="module")
def executioner() -> Iterator[ForkServer]:
    executioner = ForkServer("saga_victims")
    yield executioner
    executioner.close()


STORES = ("sqlite", "postgres", "valkey")


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """A store of the test's own, and a sink."""
    name = uuid4().hex[:12]
    urls: dict[str, Callable[[], str]] = {
        "sqlite": lambda: f"sqlite:///{tmp_path / 'effects.db'}",
        "postgres": lambda: f"{request.getfixturevalue('postgres').url}?table=sagas_{name}",
        "valkey": lambda: f"{request.getfixturevalue('valkey').url}?prefix=sagas_{name}:",
    }
    return {"store": urls[request.param](), "sink": str(tmp_path / "sink.db")}


def spread(length: int, points: int) -> list[int]:
    """So many different points from the first to the last."""
    return sorted({1 + (length - 1) * number // (points - 1) for number in range(points)})


def kill_all(executioner: ForkServer, place: dict[str, Any], random: Random) -> list[str]:
    """Run many sagas to their victims' deaths; their ids."""
    ids, numbers = list[str](), iter(range(10**6))

    def victim(scenario: str, at: int | None = None, by: str = "statement") -> dict[str, Any]:
        number = next(numbers)
        ids.append(f"{scenario}-{number}")
        return executioner.order(id=ids[-1], awaits=number % 2 == 1, **place, by=by, at=at)

    for scenario in SCENARIOS:
        length = victim(scenario)["count"]
        assert length > 20
        points = spread(length, length if SOAK else length // 2 if scenario == "torn" else POINTS)
        killed = sum(victim(scenario, at)["killed"] for at in points)
        assert killed >= 0.9 * len(points)
    for _ in range(MOMENTS):
        victim(random.choice(SCENARIOS), at=random.randrange(120_000), by="time")
    return ids


def sweep_all(process: Process, other: Process) -> None:
    """Two sweepers race until nothing is left."""
    threads = [threading.Thread(target=each.sweeper.run) for each in (process, other)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: not run(process.receiver.store.for_blocking().scan(State.PENDING)), seconds=100)
    finally:
        process.sweeper.stop()
        other.sweeper.stop()
        for thread in threads:
            thread.join(60)


def judge(process: Process, id: str, effects: list[str]) -> str:
    """A saga's end agrees with the world."""
    assert len(effects) == len(set(effects)), "a step's effect happened twice: under two keys"
    state = process.saga.state(id)
    done = {name.partition(" ")[2] for name in effects if name.startswith("do ")}
    undone = {name.partition(" ")[2] for name in effects if name.startswith("undo ")}
    if state is None or state.began is None:  # killed before it had begun: its client may ask again
        assert not effects
        return "never began"
    assert state.status == ("completed" if id.startswith("completes") else "compensated")
    if state.status == "completed":
        assert (done, undone) == (set(STEPS), set())
    else:
        assert done == undone
        assert not {"ship", "mail"} & done
    return state.status


@pytest.mark.timeout(7200 if SOAK else 300)
@pytest.mark.parametrize("place", STORES, indirect=True)
def test_no_saga_is_left_half(executioner: ForkServer, place: dict[str, Any]) -> None:
    """Wherever clients and sweepers die, the sweepers that live bring all to one of the two ends."""
    random = Random(int(os.environ.get("EFFECTONCE_SEED", "3")))
    ids = kill_all(executioner, place, random)
    processes = [Process(place["store"], Path(place["sink"])) for _ in range(2)]
    try:
        for _ in range(SWEEPERS):
            executioner.order(id=None, **place, by="statement", at=random.randint(1, 60))
        sweep_all(*processes)
        effects = processes[0].sink.effects()
        ends = Counter(judge(processes[0], id, effects.get(id, [])) for id in ids)
        assert ends["completed"] and ends["compensated"]
        assert (
            sum(process.sweeper.figures.failed + process.sweeper.figures.in_doubt for process in processes)
            == 0
        )
        for id in ids:  # every repeat of a client gets its end, or begins what never began
            processes[0].run(id, awaits=False)
        assert all(len(names) == len(set(names)) for names in processes[0].sink.effects().values())
    finally:
        for process in processes:
            process.close()
