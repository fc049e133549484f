"""Atomic mode over every driver: commit, rollback, savepoint, duplicate, concurrent duplicate, crash."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.transaction_drivers import DRIVERS, REJECT, Beside, Place
from tests.integration.transaction_worlds import ROTATING, Declined, World, told, world_of

from effectonce import Message, Receiver
from effectonce._blocking import run
from effectonce._records import Claim, Completion, State
from effectonce.errors import InProgress
from effectonce.keys import Key, fingerprint, new_owner

ROOT = Path(__file__).parents[2]


@pytest.fixture(
    params=[*DRIVERS, *(driver + ROTATING for driver in ("psycopg", "asyncpg", "django-psycopg"))]
)
def world(request: pytest.FixtureRequest, places: Callable[..., Place]) -> Iterator[World]:
    yield from world_of(request.param, places, World)


@told
async def test_commit(world: World, id: str) -> None:
    """Record and effect are there together, and not before the user commits; a repeat gets the first answer."""
    async with world.desk() as desk:
        outcome = await desk.process(world.receiver, id)
        assert (outcome.status, outcome.value, outcome.guarantee) == ("executed", {"done": id}, "atomic")
        # On MySQL a reader without a lock is told nothing either, but by waiting.
        if world.place.dialect != "mysql":
            assert world.place.count(id) == 0
        await desk.commit()
        assert (world.place.count(id), world.state(id)) == (1, State.COMPLETED)
        again = await desk.process(world.receiver, id)
        assert (again.status, again.value, again.guarantee) == ("replayed", {"done": id}, "atomic")
        await desk.commit()
        assert world.place.count(id) == 1


@told
async def test_first_use(world: World, id: str) -> None:
    """Where there is no table yet, the receiver makes its own beside the transaction, which goes on; seen once, it is
    not looked for again, and nobody needs the receiver's own way to the database.
    """
    place = Place(world.place.dialect, world.place.url)
    place.effects = world.place.effects
    try:
        async with world.desk() as desk:
            await desk.effect(f"{id}-before")
            with Receiver(place.store_url) as receiver:
                assert (await desk.process(receiver, id)).status == "executed"
                await desk.commit()
                assert (await desk.process(receiver, id)).status == "replayed"
                await desk.commit()
            with Receiver(place.store_url) as receiver:
                receiver.store.close()
                assert (await desk.process(receiver, id)).status == "replayed"
                await desk.commit()
        assert (place.count(id), place.count(f"{id}-before")) == (1, 1)
    finally:
        place.ask(f"DROP TABLE IF EXISTS records_{place.name}")


@told
async def test_rollback(world: World, id: str) -> None:
    """A rollback removes record and effect, and the next attempt is the first."""
    async with world.desk() as desk:
        await desk.process(world.receiver, id)
        await desk.rollback()
        assert (world.place.count(id), world.state(id)) == (0, None)
        assert (await desk.process(world.receiver, id)).attempt == 1
        await desk.commit()
        assert world.place.count(id) == 1


@told
async def test_savepoint(world: World, id: str) -> None:
    """What was processed after a savepoint of the user's goes with it, and stays with it."""
    async with world.desk() as desk:
        await desk.effect(f"{id}-before")
        await desk.savepoint()
        assert (await desk.process(world.receiver, id)).status == "executed"
        await desk.roll_back_to_savepoint()
        await desk.savepoint()
        assert (await desk.process(world.receiver, id)).attempt == 1
        await desk.release_savepoint()
        assert (await desk.process(world.receiver, id)).status == "replayed"
        await desk.commit()
        assert (world.place.count(id), world.place.count(f"{id}-before")) == (1, 1)
        assert world.state(id) is State.COMPLETED


@told
async def test_duplicate(world: World, id: str) -> None:
    """A repeat has the first answer: in the same transaction, in the next one, and over another connection."""
    async with world.desk() as desk, world.desk() as other:
        outcomes = [await desk.process(world.receiver, id) for _ in range(2)]
        await desk.commit()
        for each in (desk, other):
            outcomes.append(await each.process(world.receiver, id))
            await each.commit()
    assert [outcome.status for outcome in outcomes] == ["executed", *["replayed"] * 3]
    assert {str(outcome.value) for outcome in outcomes} == {str({"done": id})}
    assert world.place.count(id) == 1


@told
async def test_fenced_and_atomic_calls_share_their_keys(world: World, id: str) -> None:
    """What was done in a transaction is replayed outside of one, and the other way round."""
    async with world.desk() as desk:
        await desk.process(world.receiver, id)
        await desk.commit()
        message = Message(id=id, payload={"id": id})
        outside = world.receiver.process(message, lambda message: "never")
        assert (outside.status, outside.value, outside.guarantee) == ("replayed", {"done": id}, "atomic")
        other = Message(id=f"{id}-other", payload={"id": f"{id}-other"})
        world.receiver.process(other, lambda message: "fenced")
        inside = await desk.process(world.receiver, other.id)
        assert (inside.value, inside.guarantee) == ("fenced", "fenced")
        await desk.rollback()


@told
async def test_an_error_undoes_what_its_handler_did(world: World, id: str) -> None:
    """The user catches the error and commits: what came before stays, the handler's effect does not, a retry runs."""
    async with world.desk() as desk:
        await desk.effect(f"{id}-before")
        error = ValueError("no")
        with pytest.raises(ValueError, match="no") as caught:
            await desk.process(world.receiver, id, error)
        assert caught.value is error
        await desk.commit()
        assert (world.place.count(id), world.place.count(f"{id}-before")) == (0, 1)
        assert world.state(id) is State.ABSENT
        assert (await desk.process(world.receiver, id)).attempt == 2
        await desk.commit()
        assert world.place.count(id) == 1


@told
async def test_a_remembered_error_is_an_answer(world: World, id: str) -> None:
    """Committed, it is what every repeat gets; rolled back, it never was. The handler's effect is undone either way."""
    async with world.desk() as desk:
        for finish in (desk.rollback, desk.commit):
            with pytest.raises(Declined, match="too much"):
                await desk.process(world.receiver, id, Declined("too much"))
            await finish()
        assert (world.place.count(id), world.state(id)) == (0, State.FAILED)
        with pytest.raises(Declined, match="too much"):
            await desk.process(world.receiver, id)
        await desk.rollback()


@told
async def test_a_batch(world: World, id: str) -> None:
    """Handlers succeed and fail one by one; repeats in the batch join; all is recorded together, or not at all."""
    ids = [f"{id}-{name}" for name in "cabda"]
    errors = {ids[2]: ValueError("no"), ids[3]: Declined("no")}
    async with world.desk() as desk:
        for finish in (desk.rollback, desk.commit):
            outcomes = await desk.batch(world.receiver, ids, errors)
            assert [each.status for each in outcomes] == [
                "executed", "executed", "failed", "failed", "replayed",
            ]  # fmt: skip
            assert {each.guarantee for each in outcomes} == {"atomic"}
            await finish()
        assert [world.place.count(each) for each in ids] == [1, 1, 0, 0, 1]
        states = [State.COMPLETED, State.COMPLETED, State.ABSENT, State.FAILED, State.COMPLETED]
        assert [world.state(each) for each in ids] == states
        again = await desk.batch(world.receiver, ids)
        assert [each.status for each in again] == ["replayed", "replayed", "executed", "failed", "replayed"]
        await desk.rollback()


@told
async def test_a_block(world: World, id: str) -> None:
    """``with receiver.on(connection).claim(key)`` is atomic too."""
    async with world.desk() as desk:
        for number, finish in enumerate((desk.rollback, desk.commit, desk.commit)):
            claiming = world.receiver.on(desk.connection).claim(id)
            if desk.awaits:
                async with claiming as claim:
                    assert claim.first is (number < 2)
                    if claim.first:
                        await desk.effect(id)
                        await claim.acomplete(number)
            else:
                with claiming as claim:
                    assert claim.first is (number < 2)
                    if claim.first:
                        await desk.effect(id)
                        claim.complete(number)
            assert (claim.value, claim.outcome.guarantee) == (min(number, 1), "atomic")
            await finish()
        assert world.place.count(id) == 1


@told
async def test_a_concurrent_duplicate_waits_and_replays(world: World, id: str) -> None:
    """The second waits for the first's transaction, and has its answer when that is committed."""

    async def second() -> Any:
        async with world.desk() as desk:
            outcome = await desk.process(world.receiver, id)
            await desk.commit()
            return outcome

    async with world.desk() as desk:
        first = await desk.process(world.receiver, id)
        beside = Beside(second)
        world.place.wait_for_waiters()
        assert not beside.is_done
        await desk.commit()
        outcome = beside.result()
    assert (outcome.status, outcome.value, outcome.fence) == ("replayed", {"done": id}, first.fence)
    assert world.place.count(id) == 1


@told
async def test_a_concurrent_duplicate_goes_on_after_a_rollback(world: World, id: str) -> None:
    """The second waits for the first's transaction, and is the first when that is rolled back."""

    async def second() -> Any:
        async with world.desk() as desk:
            outcome = await desk.process(world.receiver, id)
            await desk.commit()
            return outcome

    async with world.desk() as desk:
        await desk.process(world.receiver, id)
        beside = Beside(second)
        world.place.wait_for_waiters()
        await desk.rollback()
        assert beside.result().status == "executed"
    assert world.place.count(id) == 1


@told
async def test_a_concurrent_duplicate_that_must_not_wait(world: World, id: str) -> None:
    """With busy="reject" the second has InProgress while the first goes on; its transaction is as good as before."""
    if world.place.dialect == "sqlite":
        pytest.skip("SQLite has one lock for all keys: who waits for it can't tell which key it is for")
    async with world.desk() as desk, world.desk() as other:
        await desk.process(world.receiver, id)
        await other.effect(f"{id}-before")
        with pytest.raises(InProgress) as refused:
            await other.process(world.receiver, id, policy=REJECT)
        assert refused.value.retry_after > 0
        assert (await other.process(world.receiver, f"{id}-free", policy=REJECT)).status == "executed"
        await other.commit()
        assert world.place.count(f"{id}-before") == world.place.count(f"{id}-free") == 1
        await desk.commit()
        assert (await other.process(world.receiver, id, policy=REJECT)).status == "replayed"
        await other.rollback()
    assert world.place.count(id) == 1


@told
async def test_a_running_fenced_attempt_is_not_waited_for(world: World, id: str) -> None:
    """A key that is claimed outside of transactions is in progress: nobody waits for it with a transaction open."""
    key = Key.of(id, "claim")
    claim = Claim(key.text, new_owner(), fingerprint(None), 60.0, 60.0)
    store = world.receiver.blocking.store
    async with world.desk() as desk:
        running = run(store.claim(claim)).record
        assert running is not None
        refused = world.receiver.on(desk.connection).claim(key)
        with pytest.raises(InProgress):
            await refused.__aenter__() if desk.awaits else refused.__enter__()
        await desk.rollback()
        run(store.complete(Completion(key.text, claim.owner, running.fence, State.COMPLETED, b"7", 60.0)))
        known = world.receiver.on(desk.connection).claim(key)
        await known.__aenter__() if desk.awaits else known.__enter__()
        assert (known.first, known.value) == (False, 7)
        await desk.rollback()


MATRIX = {
    "commit": ["test_commit"],
    "rollback": ["test_rollback"],
    "savepoint": ["test_savepoint", "test_an_error_undoes_what_its_handler_did"],
    "duplicate": ["test_duplicate"],
    "concurrent duplicate": [
        "test_a_concurrent_duplicate_waits_and_replays",
        "test_a_concurrent_duplicate_goes_on_after_a_rollback",
    ],
    "crash": ["test_crash"],
}
"""What shows each column of the table in docs/atomic.md; each runs over every driver."""


def test_the_matrix_in_the_documentation() -> None:
    """It has a row for every driver here and for no other, and a column for all that is shown of each."""
    lines = (ROOT / "docs" / "atomic.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.endswith("| ✓ |")]
    assert [row[0].strip("`") for row in rows] == list(DRIVERS)
    assert all(row[1:] == ["✓"] * len(MATRIX) for row in rows)
    assert f"| | {' | '.join(MATRIX)} |" in lines
    tests = [name for names in MATRIX.values() for name in names]
    assert all(callable(globals()[name]) for name in tests)


VICTIM = """
import asyncio, json, sys
from tests.integration.transaction_drivers import DRIVERS, Place
from effectonce import Receiver

async def main():
    held = []
    for name, (dialect, url, place) in json.loads(sys.argv[1]).items():
        desk = DRIVERS[name][1](Place(dialect, url, place))
        await desk.open()
        receiver = Receiver(desk.place.store_url)
        await desk.process(receiver, f"crash-{name}")
        held.append((desk, receiver))
    print("all are in the middle of their transactions", flush=True)
    sys.stdin.read()

asyncio.run(main())
"""


def test_crash(places: Callable[[str], Place], tmp_path: Path) -> None:
    """Killed between the handler's effect and the commit, over every driver: nothing happened, and nobody waits."""
    orders: dict[str, tuple[str, str, str]] = {}
    on: dict[str, Place] = {}
    for name, (dialect, _) in DRIVERS.items():
        place = places(dialect)
        if dialect == "sqlite":  # one transaction at a time: each driver has a file of its own
            place = Place("sqlite", f"sqlite:///{tmp_path / name}.db")
            place.prepare()
        on[name] = place
        orders[name] = (dialect, place.url, place.name)
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    command = [sys.executable, "-c", VICTIM, json.dumps(orders)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, **pipes) as victim:
        assert victim.stdout is not None
        assert victim.stdout.readline()
        victim.send_signal(signal.SIGKILL)

    async def survivor(name: str) -> None:
        world = World(on[name], DRIVERS[name][1])
        id = f"crash-{name}"
        async with world.desk() as desk:
            assert world.place.count(id) == 0
            assert (await desk.process(world.receiver, id)).status == "executed"
            await desk.commit()
        assert (world.place.count(id), world.state(id)) == (1, State.COMPLETED)
        world.receiver.close()

    for name in DRIVERS:
        asyncio.run(survivor(name))
