"""The sweeper: finds what was left behind, goes on with it once, leaves everything else alone, and stops when told."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import copy_context
from typing import Any

import pytest
from tests.unit.receiving import COLOURS, Colour, Counted, Crash, coroutine_function, crash

from effectonce import Message, Policy, Receiver, Record, State
from effectonce._blocking import run
from effectonce.errors import StoreUnavailable, UsageError
from effectonce.keys import Key
from effectonce.policy import Resolution
from effectonce.saga import Saga, pivot, step
from effectonce.stores.memory import MemoryStore
from effectonce.sweeper import Figures, Sweeper
from effectonce.testing.clocks import ManualClock, wait_until

LEASE = 60.0
QUICK = ("1ms", "1ms")


class Declined(Exception):
    """The provider says no."""


class World:
    """A store, a clock, and processes with a saga and a sweeper each."""

    def __init__(self, colour: Colour) -> None:
        self.colour = colour
        self.clock = ManualClock()
        self.store = MemoryStore(clock=self.clock)
        self.did = Counter[str]()
        self.instead: dict[str, list[BaseException]] = {}
        self.receivers: list[Receiver] = []

    def receiver(self, **choices: Any) -> Receiver:
        policy = Policy(lease=LEASE, busy="reject", **choices)
        receiver = Receiver(self.store, policy=policy, clock=self.clock, monotonic=self.clock)
        receiver._keeper.wake_at = float("-inf")  # its thread takes no part in a clock that jumps
        self.receivers.append(receiver)
        return receiver

    def function(self, name: str) -> Callable[..., Any]:
        def work(order: str) -> str:
            self.did[f"{name} {order}"] += 1
            planned = self.instead.get(name)
            if planned:
                raise planned.pop(0)
            return f"{name} of {order}"

        return coroutine_function(work) if self.colour.name == "asyncio" else work

    def saga(self, receiver: Receiver | None = None, **choices: Any) -> Saga:
        """A saga in a process of its own."""
        named = {name: self.function(name) for name in ("reserve", "release", "ship", "mail")}
        return Saga(
            receiver or self.receiver(),
            "fulfil",
            step(named["reserve"], named["release"], name="reserve", backoff=QUICK),
            pivot(named["ship"], name="ship", refused=(Declined,), backoff=QUICK),
            step(named["mail"], name="mail", backoff=QUICK),
            **choices,
        )

    def leave(self, id: str, where: str) -> None:
        """A process begins a saga and dies at a step."""
        self.instead = {where: [Crash()]}
        saga = self.saga()
        with pytest.raises(Crash):
            if self.colour.name == "asyncio":
                asyncio.run(saga.aoutcome(id, id))
            else:
                saga.outcome(id, id)

    def sweeper(self, **choices: Any) -> Sweeper:
        receiver = self.receiver()
        return Sweeper(receiver, self.saga(receiver), **choices)

    def states(self) -> set[str]:
        return {record.state.name for record in run(self.store.scan())}


@pytest.fixture(params=COLOURS, ids=lambda colour: colour.name)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    world = World(request.param)
    yield world
    for receiver in world.receivers:
        receiver._keeper.close()


@pytest.mark.parametrize("where", ["reserve", "ship", "mail"])
def test_it_brings_a_saga_to_its_end(world: World, where: str) -> None:
    """Without its client: what was asked for is in the journal; what was done is not done again."""
    world.leave("o-1", where)
    world.clock.advance(LEASE + 1)
    done = world.sweeper().run_once()
    assert (done.abandoned, done.completed, done.failed) == (1, 1, 0)
    assert world.states() == {"COMPLETED"}
    assert world.did == Counter({"reserve o-1": 1, "ship o-1": 1, "mail o-1": 1}) + Counter(
        {f"{where} o-1": 1}
    )


def test_it_goes_on_undoing(world: World) -> None:
    """A saga that had turned back is undone to its end."""
    world.instead = {"ship": [Declined()], "release": [Crash()]}
    saga = world.saga()
    with pytest.raises(Crash):
        asyncio.run(saga.aoutcome("o-1", "o-1"))
    world.clock.advance(LEASE + 1)
    assert world.sweeper().run_once().compensated == 1
    assert world.did["release o-1"] == 2
    assert world.states() == {"FAILED"}


def test_live_leases_are_left_alone(world: World) -> None:
    """Who still renews is at work."""
    world.leave("o-1", "ship")
    assert world.sweeper().run_once() == Figures(looks=1, seconds=pytest.approx(0, abs=20))
    assert world.states() == {"PENDING"}


def test_several_sweepers_never_double_a_step(world: World) -> None:
    """Each claims before it goes on; who comes second leaves it alone."""
    for number in range(20):
        world.leave(f"o-{number}", "ship")
    world.clock.advance(LEASE + 1)
    sweepers = [world.sweeper() for _ in range(3)]
    threads = [threading.Thread(target=sweeper.run_once) for sweeper in sweepers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sum(sweeper.figures.completed for sweeper in sweepers) == 20
    assert {count for name, count in world.did.items() if name.startswith("mail")} == {1}
    assert {count for name, count in world.did.items() if name.startswith("ship")} == {2}
    assert sum(sweeper.figures.failed for sweeper in sweepers) == 0


def test_a_saga_that_never_began_is_given_back(world: World) -> None:
    """Nothing was done, and what was asked for is not known: the client may ask again."""
    receiver = world.receiver()
    key = Key.of("o-1", "saga:fulfil")
    claiming = receiver.claim(key, policy=world.saga(receiver).policy)
    copy_context().run(claiming.__enter__)
    world.clock.advance(LEASE + 1)
    done = world.sweeper().run_once()
    assert (done.given_back, done.failed) == (1, 0)
    assert world.states() == {"ABSENT"}


def test_a_saga_that_is_forgotten_meanwhile_is_not_begun_anew(world: World) -> None:
    """Between the look and the claim it ended and expired: there is nothing to go on with."""
    world.leave("o-1", "ship")
    world.clock.advance(LEASE + 1)
    plain = world.store.scan

    async def scan(*args: Any, **choices: Any) -> list[Record]:
        found = await plain(*args, **choices)
        world.store._records.clear()
        return found

    world.store.scan = scan  # type: ignore[method-assign]
    done = world.sweeper().run_once()
    assert (done.abandoned, done.completed, done.given_back, done.failed) == (1, 0, 0, 0)
    assert world.store._records == {}


def test_old_versions_go_on_under_their_own_definition(world: World) -> None:
    """A sweeper has both, until the old ones have ended."""
    world.leave("o-1", "ship")
    world.clock.advance(LEASE + 1)
    receiver = world.receiver()
    new = Saga(receiver, "fulfil", step(world.function("reserve"), None, name="all"), version=2)
    assert Sweeper(receiver, new).run_once().unknown == 1
    assert Sweeper(receiver, new, world.saga(receiver)).run_once().completed == 1


# Other operations


def test_registered_handlers_are_called(world: World) -> None:
    """By operation, with the record; what has no handler is said once, and left alone."""
    receiver = world.receiver()
    message = Message(id="m-1", source="orders")
    crash(receiver, message, operation="charge")
    crash(receiver, Message(id="m-2"), operation="other")
    world.clock.advance(LEASE + 1)
    handled = Counted("paid")
    keys: list[str] = []

    def again(record: Record) -> None:
        keys.append(record.key)
        receiver.process(message, handled, operation="charge")

    handler = coroutine_function(again) if world.colour.name == "asyncio" else again
    done = Sweeper(receiver, handlers={"message:charge::orders": handler}).run_once()
    assert (done.redriven, done.unknown, handled.runs) == (1, 1, 1)
    assert keys == [receiver.key_of(message, operation="charge")]


def test_a_handler_that_fails_spoils_nothing_else(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """It is counted and told; the others go on."""
    receiver = world.receiver()
    for number in range(3):
        crash(receiver, Message(id=f"m-{number}"), operation="charge")
    world.clock.advance(LEASE + 1)

    def again(record: Record) -> None:
        if record.key.endswith("1"):
            raise ValueError("no such order")

    with caplog.at_level(logging.WARNING, "effectonce.sweeper"):
        done = Sweeper(receiver, handlers={"message:charge": again}).run_once()
    assert (done.redriven, done.failed) == (2, 1)
    assert "no such order" in caplog.text


def test_what_was_claimed_at_most_once_is_in_doubt(world: World) -> None:
    """It is not run again; a prober settles it, or a person."""
    receiver = world.receiver(on_crash="in_doubt")
    crash(receiver, Message(id="m-1"))
    world.clock.advance(LEASE + 1)
    assert Sweeper(receiver).run_once().in_doubt == 1
    assert world.states() == {"IN_DOUBT"}
    prober = Policy(prober=lambda record: Resolution.completed("yes"))
    assert Sweeper(receiver, policy=prober).run_once().settled == 1
    assert world.states() == {"COMPLETED"}


# Its life


def test_a_prober_is_not_asked_about_sagas(world: World) -> None:
    """It would let a saga that is half undone be forgotten; a person says how that goes on."""
    world.instead = {"ship": [Declined()], "release": [ValueError("jammed")] * 10}
    saga = world.saga()
    if world.colour.name == "asyncio":
        asyncio.run(saga.aoutcome("o-1", "o-1"))
    else:
        saga.outcome("o-1", "o-1")
    assert world.states() == {"IN_DOUBT"}
    receiver = world.receiver()
    policy = Policy(prober=lambda record: Resolution.not_applied())
    assert Sweeper(receiver, world.saga(receiver), policy=policy).run_once().settled == 0
    assert world.states() == {"IN_DOUBT"}


def test_a_step_that_ends_its_thread_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """A sweeper that is asked to leave by a step has not brought it to an end."""
    world = World(COLOURS[0])
    world.leave("o-1", "ship")
    world.clock.advance(LEASE + 1)
    world.instead = {"ship": [SystemExit(3)]}
    assert world.sweeper().run_once().failed == 1
    assert "could not go on with" in caplog.text
    for receiver in world.receivers:
        receiver._keeper.close()


def test_it_runs_until_it_is_stopped(world: World) -> None:
    """It looks again and again; ``stop`` ends it soon."""
    sweeper = world.sweeper(every="1ms")
    thread = threading.Thread(target=sweeper.run)
    thread.start()
    wait_until(lambda: sweeper.figures.looks >= 2)
    world.leave("o-1", "ship")
    world.clock.advance(LEASE + 1)
    wait_until(lambda: sweeper.figures.completed == 1)
    sweeper.stop()
    thread.join(20)
    assert not thread.is_alive()


def test_a_stop_finishes_the_step_and_leaves_the_rest(world: World) -> None:
    """The step that runs is brought to its end and recorded; the next one is somebody else's."""
    world.leave("o-1", "ship")
    world.clock.advance(LEASE + 1)
    receiver = world.receiver()
    saga = world.saga(receiver)
    sweeper = Sweeper(receiver, saga)

    def ship(order: str) -> str:
        sweeper.stop()
        return "shipped"

    function = coroutine_function(ship) if world.colour.name == "asyncio" else ship
    (task,) = saga.outline.groups[1]
    saga.outline = saga.outline._replace(
        groups=(saga.outline.groups[0], (task._replace(action=function),), saga.outline.groups[2])
    )
    done = sweeper.run_once()
    assert (done.completed, done.failed, world.did["mail o-1"]) == (0, 0, 0)
    state = saga.state("o-1")
    assert state is not None
    assert [each.status for each in state.steps] == ["done", "done", "next"]
    world.clock.advance(LEASE + 1)
    assert world.sweeper().run_once().completed == 1


def failing_mail(world: World, pause: str) -> tuple[Saga, Sweeper]:
    """A saga that was left before its parcel, and whose mail fails at first."""
    world.leave("o-1", "ship")
    world.clock.advance(LEASE + 1)
    world.instead = {"mail": [ValueError()]}
    receiver = world.receiver()
    saga = Saga(
        receiver,
        "fulfil",
        step(world.function("reserve"), world.function("release"), name="reserve"),
        pivot(world.function("ship"), name="ship"),
        step(world.function("mail"), name="mail", backoff=(pause, pause)),
    )
    return saga, Sweeper(receiver, saga, concurrency=1)


def test_a_stop_ends_the_wait_for_the_next_try(world: World) -> None:
    """A saga that waits for seconds does not hold up the end."""
    _, sweeper = failing_mail(world, "5s")
    thread = threading.Thread(target=sweeper.run)
    thread.start()
    wait_until(lambda: world.did["mail o-1"] == 1)
    sweeper.stop()
    thread.join(20)
    assert not thread.is_alive()
    assert (world.did["mail o-1"], world.states()) == (1, {"PENDING"})


def test_a_saga_that_waits_for_long_holds_nobody_up(world: World) -> None:
    """It is let go, and left alone, without a claim, until its next try is due."""
    saga, sweeper = failing_mail(world, "1h")
    assert sweeper.run_once().completed == 0
    assert world.did["mail o-1"] == 1
    before = saga.state("o-1")
    world.clock.advance(LEASE + 1)
    assert sweeper.run_once().waiting == 1
    after = saga.state("o-1")
    assert before is not None
    assert after is not None
    assert (after.attempt, after.status) == (before.attempt, "abandoned")
    world.clock.advance(3600)
    assert sweeper.run_once().completed == 1
    assert world.did["mail o-1"] == 2


def test_a_store_that_is_away_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    """A sweeper outlives it."""
    world = World(COLOURS[0])
    failures = [StoreUnavailable("The server is away.")] * 2
    plain = world.store.scan

    async def scan(*args: Any, **choices: Any) -> list[Record]:
        if failures:
            raise failures.pop()
        return await plain(*args, **choices)

    world.store.scan = scan  # type: ignore[method-assign]
    sweeper = world.sweeper(every="1ms")
    with caplog.at_level(logging.WARNING, "effectonce.sweeper"):
        thread = threading.Thread(target=sweeper.run)
        thread.start()
        wait_until(lambda: sweeper.figures.looks >= 1)
        sweeper.stop()
        thread.join(20)
    assert caplog.text.count("The server is away") == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda world, saga: Sweeper(world.receiver(), saga, concurrency=0), "concurrency"),
        (lambda world, saga: Sweeper(saga.receiver, saga, saga), "same name and version"),
        (lambda world, saga: Sweeper(saga.receiver, handlers={"a": "b"}), "can't be called"),
        (lambda world, saga: Sweeper(Receiver("memory://"), saga), "another receiver"),
    ],
)
def test_mistakes_are_told_at_once(make: Callable[[World, Saga], Sweeper], message: str) -> None:
    """Before anything is looked at."""
    world = World(COLOURS[0])
    with pytest.raises(UsageError, match=message):
        make(world, world.saga())


def test_many_pages_are_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many attempts there are, and however few fit on a page."""
    monkeypatch.setattr("effectonce.sweeping.CHUNK", 3)
    world = World(COLOURS[0])
    receiver = world.receiver(on_crash="in_doubt")
    for number in range(10):
        crash(receiver, Message(id=f"m-{number}"))
    world.clock.advance(LEASE + 1)
    assert Sweeper(receiver).run_once().in_doubt == 10
    assert {record.state for record in run(world.store.scan())} == {State.IN_DOUBT}
