"""Sagas in both colours: forward, back, with a person; retries, time-outs, pivots, groups, and another process."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.unit.receiving import COLOURS, Colour, StagedStore, Told, coroutine_function

from effectonce import (
    InDoubt,
    InProgress,
    KeyReused,
    LeaseLost,
    NotApplied,
    Outcome,
    Policy,
    Receiver,
    State,
    current,
)
from effectonce._blocking import run
from effectonce.errors import ColourMismatch, ResultUnavailable, StepMismatch, StoreUnavailable, UsageError
from effectonce.policy import Resolution
from effectonce.saga import Compensated, Saga, pivot, step, together
from effectonce.saga._outline import Group
from effectonce.testing.clocks import ManualClock

LEASE = 60.0
QUICK = ("1ms", "1ms")


@dataclass
class Order:
    id: str
    cents: int


@dataclass
class Receipt:
    number: str


class Declined(Exception):
    """The provider says no."""


class Crash(BaseException):
    """Ends a process where it is."""


class Shop:
    """Functions for steps that note what they did, and do what a test says instead."""

    def __init__(self) -> None:
        self.did: list[str] = []
        self.keys: dict[str, set[str]] = {}
        self.instead: dict[str, list[BaseException | None]] = {}

    def do(self, what: str) -> None:
        self.did.append(what)
        self.keys.setdefault(what, set()).add(current().key_for("sink"))
        planned = self.instead.get(what)
        if planned and (error := planned.pop(0)) is not None:
            raise error

    def reserve(self, order: Order) -> str:
        self.do("reserve")
        return f"shelf of {order.id}"

    def release(self, order: Order, reserve: str | None) -> None:
        self.do("release")

    def charge(self, order: Order, reserve: str) -> Receipt:
        self.do("charge")
        return Receipt(f"{order.cents} for {reserve}")

    def refund(self, order: Order, charge: Receipt | None) -> None:
        assert charge is None or isinstance(charge, Receipt)
        self.do("refund")

    def ship(self, order: Order, charge: Receipt) -> str:
        assert isinstance(charge, Receipt)
        self.do("ship")
        return "parcel"

    def mail(self, order: Order, ship: str) -> None:
        self.do("mail")


class World:
    """A store, a clock, and sagas of one colour over it, in as many processes as a test wants."""

    def __init__(self, colour: Colour) -> None:
        self.colour = colour
        self.clock = ManualClock()
        self.store = StagedStore(clock=self.clock)
        self.shop = Shop()
        self.receivers: list[Receiver] = []

    def function(self, name: str) -> Callable[..., Any]:
        plain = getattr(self.shop, name)
        return coroutine_function(plain) if self.colour.name == "asyncio" else plain

    def step(self, name: str, undo: str | None = None, **choices: Any) -> Group:
        choices.setdefault("backoff", QUICK)
        if undo is None:
            return step(self.function(name), **choices)
        return step(self.function(name), self.function(undo), **choices)

    def pivot(self, name: str, **choices: Any) -> Group:
        return pivot(self.function(name), **{"backoff": QUICK, **choices})

    def saga(self, *steps: Group, **choices: Any) -> Saga:
        """A saga in a process of its own."""
        receiver = Receiver(self.store, policy=Policy(lease=LEASE), clock=self.clock, monotonic=self.clock)
        receiver._keeper.wake_at = float("-inf")  # its thread takes no part in a clock that jumps
        self.receivers.append(receiver)
        return Saga(receiver, "fulfil", *(steps or self.steps()), **choices)

    def steps(self) -> tuple[Group, ...]:
        return (
            self.step("reserve", "release"),
            self.step("charge", "refund", refused=(Declined,), attempts=3),
            self.pivot("ship", refused=(Declined,)),
            self.step("mail"),
        )

    def outcome(self, saga: Saga, id: str = "o-1", cents: int = 500) -> Outcome[dict[str, Any]]:
        if self.colour.name == "asyncio":
            return asyncio.run(saga.aoutcome(id, Order(id, cents)))
        return saga.outcome(id, Order(id, cents))

    def resume(self, saga: Saga, id: str = "o-1", **choices: Any) -> Outcome[dict[str, Any]]:
        if self.colour.name == "asyncio":
            return asyncio.run(saga.aresume(id, **choices))
        return saga.resume(id, **choices)

    def crash(self, saga: Saga) -> None:
        with pytest.raises(Crash):
            self.outcome(saga)
        self.clock.advance(LEASE + 1)


@pytest.fixture(params=COLOURS, ids=lambda colour: colour.name)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    world = World(request.param)
    yield world
    for receiver in world.receivers:
        receiver._keeper.close()


# Forward


def test_all_steps_happen_in_order(world: World) -> None:
    """Each gets what was asked for and the results of steps before it, by name; the end has all results, typed."""
    outcome = world.outcome(world.saga())
    assert world.shop.did == ["reserve", "charge", "ship", "mail"]
    assert outcome.value == {
        "reserve": "shelf of o-1",
        "charge": Receipt("500 for shelf of o-1"),
        "ship": "parcel",
        "mail": None,
    }
    assert (outcome.status, outcome.replayed) == ("executed", False)


def test_every_repeat_gets_the_first_answer(world: World) -> None:
    """Also in another process; and another payload under the same id is refused."""
    first = world.outcome(world.saga())
    again = world.outcome(world.saga())
    assert again.replayed
    assert again.value == first.value
    assert len(world.shop.did) == 4
    assert isinstance(world.outcome(world.saga(), cents=1).error, KeyReused)


def test_one_write_for_every_step(world: World) -> None:
    """A claim, what was asked for, an entry for each step, and the end."""
    world.outcome(world.saga())
    assert world.store.calls == ["claim", *["renew"] * 5, "complete"]


def test_steps_have_keys_of_their_own(world: World) -> None:
    """``current().key_for(…)`` differs from step to step, and is the same at each try and in each process."""
    world.shop.instead = {"charge": [Crash()], "mail": [ValueError(), None]}
    world.crash(world.saga())
    assert world.outcome(world.saga()).status == "executed"
    assert world.shop.did == ["reserve", "charge", "charge", "ship", "mail", "mail"]
    keys = [key for each in world.shop.keys.values() for key in each]
    assert len(keys) == len(set(keys)) == 4


def test_a_failed_step_is_tried_again(world: World) -> None:
    """As often as it may be, with pauses; what it raised is in the state."""
    world.shop.instead = {"charge": [ValueError("busy"), ValueError("busy")]}
    saga = world.saga()
    assert world.outcome(saga).status == "executed"
    state = saga.state("o-1")
    assert state is not None
    assert [failure.error for failure in state.steps[1].failures] == ["ValueError: busy"] * 2


def test_steps_side_by_side(world: World) -> None:
    """Members of a group run at the same time, and the next step waits for all of them."""
    meet = threading.Barrier(2)

    async def meeting(order: Order) -> str:
        here.append(asyncio.get_running_loop().create_future())
        if len(here) == 2:
            here[0].set_result(None)
        else:
            await here[0]
        return "met"

    def waiting(order: Order) -> str:
        meet.wait(20)
        return "met"

    here: list[asyncio.Future[None]] = []
    met = meeting if world.colour.name == "asyncio" else waiting
    group = together(step(met, None, name="one"), step(met, None, name="other"))
    saga = world.saga(group, step(lambda order, one, other: one + other, None, name="last"))
    assert world.outcome(saga).value == {"one": "met", "other": "met", "last": "metmet"}


def test_many_threads_side_by_side() -> None:
    """Each looks at the journal while others are recorded, failures included."""
    failed: set[int] = set()

    def member(number: int) -> Group:
        def work(order: str) -> int:
            if number not in failed:
                failed.add(number)
                raise ValueError(number)
            return number

        return step(work, None, name=f"s{number}", backoff=QUICK)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with Receiver("memory://") as receiver:
            saga = Saga(receiver, "s", together(*map(member, range(24))))
            for round in range(5):
                failed.clear()
                assert list(saga.run(f"o-{round}", "x").values()) == list(range(24))
    finally:
        sys.setswitchinterval(interval)


def test_a_group_whose_process_ends(world: World) -> None:
    """Whatever ends a member without a word ends the saga there, on whichever thread; another process goes on."""
    world.shop.instead = {"reserve": [Crash()], "charge": [Crash()]}

    def charge(order: Order) -> Receipt:
        return world.shop.charge(order, "")

    group = together(step(world.shop.reserve, None), step(charge, None))
    world.crash(world.saga(group))
    assert world.outcome(world.saga(group)).status == "executed"


# Back


def test_a_refusal_undoes_what_was_done(world: World) -> None:
    """In reverse; the step that said no has nothing to undo. Every repeat gets the same answer."""
    world.shop.instead = {"charge": [Declined("no money")]}
    saga = world.saga()
    outcome = world.outcome(saga)
    assert world.shop.did == ["reserve", "charge", "release"]
    assert isinstance(outcome.error, Compensated)
    assert (outcome.status, outcome.error.step, outcome.error.reason) == (
        "failed",
        "charge",
        "Declined: no money",
    )
    again = world.outcome(world.saga())
    assert again.replayed
    assert isinstance(again.error, Compensated)
    assert (again.error.step, again.error.reason) == ("charge", "Declined: no money")
    assert len(world.shop.did) == 3


def test_what_may_have_happened_is_undone_too(world: World) -> None:
    """A step whose tries are used up without a word of what happened is compensated like those before it."""
    world.shop.instead = {"charge": [TimeoutError(), TimeoutError(), TimeoutError()]}
    outcome = world.outcome(world.saga())
    assert world.shop.did == ["reserve", "charge", "charge", "charge", "refund", "release"]
    assert isinstance(outcome.error, Compensated)
    assert "3 times" in outcome.error.reason


def test_not_applied_is_tried_again_and_leaves_nothing_behind(world: World) -> None:
    """NotApplied is the step's word that this try did nothing."""
    world.shop.instead = {"charge": [NotApplied("later"), NotApplied("later"), NotApplied("later")]}
    world.outcome(world.saga())
    assert world.shop.did == ["reserve", "charge", "charge", "charge", "release"]


def test_one_of_a_group_fails(world: World) -> None:
    """Its companions are undone, also one that was about to be tried again."""
    world.shop.instead = {"charge": [Declined()], "reserve": [None]}

    def charge(order: Order) -> Receipt:
        return world.shop.charge(order, "")

    members = (
        step(world.shop.reserve, world.shop.release),
        step(charge, world.shop.refund, refused=(Declined,)),
    )
    outcome = world.outcome(world.saga(together(*members)))
    assert isinstance(outcome.error, Compensated)
    assert sorted(world.shop.did) == ["charge", "release", "reserve"]


def test_a_result_that_cannot_be_recorded_is_undone(world: World) -> None:
    """The effect happened, but nobody could go on from it: it is not tried again, and taken back."""

    def odd(order: Order) -> Any:
        world.shop.do("reserve")
        return threading.Lock()

    outcome = world.outcome(world.saga(step(odd, world.shop.release, name="reserve")))
    assert world.shop.did == ["reserve", "release"]
    assert isinstance(outcome.error, Compensated)
    assert "can't be encoded" in outcome.error.reason


def test_a_compensation_is_tried_until_it_holds(world: World) -> None:
    """Errors of a compensation are no reason to leave it."""
    world.shop.instead = {"charge": [Declined()], "release": [ValueError()] * 5}
    assert isinstance(world.outcome(world.saga()).error, Compensated)
    assert world.shop.did.count("release") == 6


def test_a_compensation_that_does_not_hold_waits_for_a_person(world: World) -> None:
    """After its attempts the saga is in doubt; repeats don't run it; a person lets it go on."""
    world.shop.instead = {"charge": [Declined()], "release": [ValueError("jammed")] * 3}
    steps = (world.step("reserve", "release", undo_attempts=2), *world.steps()[1:])
    saga = world.saga(*steps)
    outcome = world.outcome(saga)
    assert (outcome.status, type(outcome.error)) == ("in_doubt", InDoubt)
    assert "jammed" in str(outcome.error)
    repeated = world.outcome(world.saga(*steps)).error
    assert isinstance(repeated, InDoubt)
    assert "resume(id)" in str(repeated)
    assert "receiver.resolve" not in str(repeated)
    assert world.shop.did.count("release") == 2
    state = saga.state("o-1")
    assert state is not None and state.step is not None
    assert (state.status, state.step.name, state.step.status) == ("in_doubt", "reserve", "stuck")
    world.clock.advance(1)
    resumed = world.resume(world.saga(*steps))
    assert isinstance(resumed.error, Compensated)
    assert world.shop.did.count("release") == 4


def test_a_saga_that_waits_for_a_person_is_settled_by_nobody_else(world: World) -> None:
    """Neither a prober that a sweep asks nor receiver.resolve may put a result in the place of its journal."""
    world.shop.instead = {"charge": [Declined()], "release": [ValueError("jammed")] * 2}
    saga = world.saga(world.step("reserve", "release", undo_attempts=2), *world.steps()[1:])
    assert world.outcome(saga).status == "in_doubt"
    sweeping = Policy(prober=lambda record: Resolution.completed("tx-1"))
    receiver = world.receivers[-1]
    assert receiver.sweep(policy=sweeping).settled == 0
    (record,) = run(world.store.scan(State.IN_DOUBT))
    with pytest.raises(UsageError, match=r"saga\.resume"):
        receiver.resolve(record.key, "completed", "tx-1")
    state = saga.state("o-1")
    assert state is not None and state.status == "in_doubt"


def test_what_a_person_has_undone_is_not_undone_again(world: World) -> None:
    """``resume(id, undone=…)`` goes on behind it."""
    world.shop.instead = {"ship": [Declined()], "refund": [ValueError("jammed")] * 2}
    steps = (
        world.step("reserve", "release"),
        world.step("charge", "refund", undo_attempts=2),
        *world.steps()[2:],
    )
    assert isinstance(world.outcome(world.saga(*steps)).error, InDoubt)
    world.clock.advance(1)
    with pytest.raises(UsageError, match="delivery"):
        world.resume(world.saga(*steps), undone=["delivery"])
    assert isinstance(world.resume(world.saga(*steps), undone=["charge"]).error, Compensated)
    assert world.shop.did == ["reserve", "charge", "ship", "refund", "refund", "release"]
    assert isinstance(world.resume(world.saga(*steps), undone=["charge"]).error, Compensated)  # told before
    with pytest.raises(UsageError, match=r"waits for nobody: it has ended.*key"):
        world.resume(world.saga(*steps), undone=["ship"])


def test_what_was_undone_by_hand_is_told_to_no_saga_that_goes_forward(world: World) -> None:
    """It would not be heard, or would be taken for undone when the saga turns back later."""
    world.shop.instead = {"charge": [Crash()]}
    world.crash(world.saga())
    with pytest.raises(UsageError, match=r"waits for nobody: it is on its way forward"):
        world.resume(world.saga(), undone=["reserve"])
    assert world.resume(world.saga()).status == "executed"
    with pytest.raises(UsageError, match=r"waits for nobody: it has ended"):
        world.resume(world.saga(), undone=["reserve"])
    assert world.shop.did == ["reserve", "charge", "charge", "ship", "mail"]


def test_what_was_undone_by_hand_may_be_told_again_after_a_crash(world: World) -> None:
    """The process that was told first died on the way back, before or after it had recorded what it was told."""
    world.shop.instead = {"ship": [Declined()], "refund": [Crash()]}
    world.crash(world.saga())
    world.shop.instead = {"release": [Crash()]}
    with pytest.raises(Crash):
        world.resume(world.saga(), undone=["charge"])
    busy = world.resume(world.saga(), undone=["charge"])
    assert isinstance(busy.error, InProgress)  # for all that anybody knows its process is alive
    world.clock.advance(LEASE + 1)
    assert isinstance(world.resume(world.saga(), undone=["charge"]).error, Compensated)
    assert world.shop.did == ["reserve", "charge", "ship", "refund", "release", "release"]


def test_a_compensation_that_is_refused_waits_for_a_person_at_once(world: World) -> None:
    """A type of ``refused=`` says no for good, also when a step is undone: more tries would not help."""
    world.shop.instead = {"ship": [Declined()], "refund": [Declined("closed account")]}
    outcome = world.outcome(world.saga())
    assert isinstance(outcome.error, InDoubt)
    assert "closed account" in str(outcome.error)
    assert world.shop.did.count("refund") == 1
    world.clock.advance(1)
    assert isinstance(world.resume(world.saga()).error, Compensated)
    assert world.shop.did.count("refund") == 2


# The pivot


def test_a_pivot_that_refuses_undoes_all_before_it(world: World) -> None:
    """Until it has happened there is a way back."""
    world.shop.instead = {"ship": [Declined()]}
    assert isinstance(world.outcome(world.saga()).error, Compensated)
    assert world.shop.did == ["reserve", "charge", "ship", "refund", "release"]


def test_a_pivot_that_may_have_happened_is_tried_again(world: World) -> None:
    """More often than its attempts: nobody may undo what is final."""
    world.shop.instead = {"ship": [TimeoutError()] * 12}
    assert world.outcome(world.saga()).status == "executed"
    assert world.shop.did.count("ship") == 13


def test_after_the_pivot_steps_are_tried_until_they_hold(world: World) -> None:
    """However often that is; the journal does not grow with it for ever."""
    world.shop.instead = {"mail": [ValueError()] * 30}
    saga = world.saga()
    assert world.outcome(saga).status == "executed"
    assert world.shop.did.count("mail") == 31
    state = saga.state("o-1")
    assert state is not None
    assert world.shop.did.count("refund") == 0


def test_a_pivot_that_refuses_after_many_tries(world: World) -> None:
    """Its word is recorded, also where the journal has stopped to count."""
    world.shop.instead = {"ship": [*[TimeoutError()] * 25, Declined("never")]}
    saga = world.saga()
    assert isinstance(world.outcome(saga).error, Compensated)
    state = saga.state("o-1")
    assert state is not None
    failures = [failure.error for failure in state.steps[2].failures]
    assert (len(failures), failures[-1]) == (21, "Declined: never")


# Time


def test_a_saga_that_takes_too_long_is_undone(world: World) -> None:
    """When its time is over no step before the pivot begins."""

    def slow(order: Order) -> None:
        world.clock.advance(20)
        world.shop.do("reserve")

    first = step(slow, lambda order: world.shop.release(order, None), name="reserve")
    outcome = world.outcome(world.saga(first, *world.steps()[1:], timeout="10s"))
    assert isinstance(outcome.error, Compensated)
    assert "10 s" in outcome.error.reason
    assert world.shop.did == ["reserve", "release"]


def test_after_the_pivot_time_does_not_matter(world: World) -> None:
    """What can't be undone goes on."""

    def slow(order: Order) -> str:
        world.clock.advance(20)
        return "parcel"

    saga = world.saga(*world.steps()[:2], pivot(slow, name="ship"), world.step("mail"), timeout="10s")
    assert world.outcome(saga).status == "executed"


def test_a_try_that_takes_too_long_is_cancelled() -> None:
    """A coroutine's ``timeout`` ends the try; nobody knows then whether it happened."""
    did: list[str] = []

    async def hang(order: None) -> None:
        did.append("hang")
        await asyncio.Event().wait()

    async def unhang(order: None) -> None:
        did.append("unhang")

    with Receiver("memory://") as receiver:
        saga = Saga(receiver, "s", step(hang, unhang, timeout="10ms", attempts=2, backoff=QUICK))
        with pytest.raises(Compensated, match="TimeoutError"):
            asyncio.run(saga.arun("o-1"))
    assert did == ["hang", "hang", "unhang"]


# Another process


@pytest.mark.parametrize("where", ["reserve", "charge", "ship", "mail"])
def test_another_process_goes_on(world: World, where: str) -> None:
    """Finished steps are not run again; the one that died is, with the same key."""
    world.shop.instead = {where: [Crash()]}
    world.crash(world.saga())
    outcome = world.outcome(world.saga())
    names = ["reserve", "charge", "ship", "mail"]
    at = names.index(where)
    assert outcome.status == "executed"
    assert world.shop.did == [*names[: at + 1], *names[at:]]
    assert len(world.shop.keys[where]) == 1
    assert outcome.attempt == 2


@pytest.mark.parametrize("where", ["refund", "release"])
def test_another_process_goes_on_undoing(world: World, where: str) -> None:
    """A decision to compensate is kept: nobody goes forward again."""
    world.shop.instead = {"ship": [Declined("never")], where: [Crash()]}
    world.crash(world.saga())
    outcome = world.outcome(world.saga())
    assert isinstance(outcome.error, Compensated)
    assert outcome.error.reason == "Declined: never"
    assert world.shop.did.count("ship") == 1
    assert world.shop.did.count(where) == 2
    assert len(world.shop.keys[where]) == 1


def test_the_journal_knows_what_was_asked_for(world: World) -> None:
    """``resume`` needs the id alone, and gives steps what the client sent, with its type."""
    world.shop.instead = {"charge": [Crash()]}
    world.crash(world.saga())
    assert world.resume(world.saga()).value["charge"] == Receipt("500 for shelf of o-1")  # type: ignore[index]


def test_a_saga_that_never_began_can_be_asked_for_again(world: World) -> None:
    """Its process died before it had recorded what was asked: nothing was done, so nothing has to be."""

    def crash() -> None:
        raise Crash

    world.store.after["claim"] = crash
    with pytest.raises(Crash):
        world.outcome(world.saga())
    world.store.recover()
    world.clock.advance(LEASE + 1)
    assert isinstance(world.resume(world.saga()).error, NotApplied)
    assert world.outcome(world.saga()).status == "executed"


def test_processes_that_die_in_one_step_too_often(world: World) -> None:
    """With ``max_attempts`` a step that kills its process is undone; without a limit it is tried again and again."""
    world.shop.instead = {"charge": [Crash(), Crash(), Crash()]}
    policy = Policy(lease=LEASE, max_attempts=2)
    world.crash(world.saga(policy=policy))
    world.crash(world.saga(policy=policy))
    outcome = world.outcome(world.saga(policy=policy))
    assert isinstance(outcome.error, Compensated)
    assert "died 2 times" in outcome.error.reason
    assert world.shop.did == ["reserve", "charge", "charge", "refund", "release"]


def test_a_worker_that_was_overtaken_records_nothing(world: World) -> None:
    """Its lease is over, another goes on: the late one is told so and takes no further step."""
    others: list[Outcome[Any]] = []
    begun: list[bool] = []

    def overtaken(order: Order, reserve: str) -> Receipt:
        if not begun:
            begun.append(True)
            world.clock.advance(LEASE + 1)
            others.append(in_another_thread(lambda: world.outcome(world.saga(*steps))))
        world.shop.do("charge")
        return Receipt("x")

    function = coroutine_function(overtaken) if world.colour.name == "asyncio" else overtaken
    plain = world.steps()
    steps = (plain[0], step(function, world.function("refund"), name="charge"), *plain[2:])
    late = world.outcome(world.saga(*steps))
    assert others[0].status == "executed"
    assert late.replayed or isinstance(late.error, LeaseLost)
    assert world.shop.did == ["reserve", "charge", "ship", "mail", "charge"]


def in_another_thread(function: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join(20)
    return results[0]


def test_a_changed_definition_is_refused(world: World) -> None:
    """Steps that were added while a saga was under way: an error that says so, nothing runs; a new version is apart."""
    world.shop.instead = {"charge": [Crash()]}
    world.crash(world.saga())
    done = list(world.shop.did)
    other = world.saga(*world.steps()[:3])
    error = world.outcome(other).error
    assert isinstance(error, StepMismatch)
    assert "version=" in str(error)
    assert world.shop.did == done
    world.clock.advance(LEASE + 1)
    assert world.outcome(world.saga()).status == "executed"


def test_a_saga_that_has_ended_keeps_its_answer_under_a_changed_definition(world: World) -> None:
    """The first answer: nothing is said of steps that it did not have."""
    first = world.outcome(world.saga(*world.steps()[:3])).value
    assert list(first or ()) == ["reserve", "charge", "ship"]
    again = world.outcome(world.saga())
    assert (again.value, again.replayed) == (first, True)
    assert "mail" not in world.shop.did


def test_an_error_without_words_is_counted_like_any_other(world: World) -> None:
    """The saga is undone after its attempts, and does not try for ever."""

    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError("no words")

    world.shop.instead = {"charge": [Mute()] * 9}
    error = world.outcome(world.saga()).error
    assert isinstance(error, Compensated)
    assert error.reason == "tried 3 times, the last error was Mute"
    assert world.shop.did.count("charge") == 3


def test_a_store_that_is_away_leaves_the_saga_where_it_is(world: World) -> None:
    """What can't be recorded does not count; the claim stays, and the next process goes on."""

    def away() -> None:
        if len(world.shop.did) == 2:
            raise StoreUnavailable("The disk is full.")

    world.store.before["renew"] = away
    outcome = world.outcome(world.saga())
    assert (outcome.status, type(outcome.error)) == ("store_error", StoreUnavailable)
    world.clock.advance(LEASE + 1)
    world.store.recover()
    assert world.outcome(world.saga()).status == "executed"
    assert world.shop.did == ["reserve", "charge", "charge", "ship", "mail"]


def test_a_compensation_that_could_not_be_recorded_has_not_failed(world: World) -> None:
    """The store's trouble is not the step's: it is no try that failed, and nothing is run again here."""
    world.shop.instead = {"charge": [Declined()]}
    lost = iter(range(4))  # as often as a command is sent

    def away() -> None:
        if "release" in world.shop.did and next(lost, None) is not None:
            raise StoreUnavailable("The disk is full.")

    world.store.before["renew"] = away
    assert world.outcome(world.saga()).status == "store_error"
    assert world.shop.did.count("release") == 1
    world.clock.advance(LEASE + 1)
    assert isinstance(world.outcome(world.saga()).error, Compensated)


def test_results_that_cannot_be_read_any_more(world: World) -> None:
    """A type has changed under a saga: an error that says so, nothing runs, and the claim stays for the right code."""
    world.shop.instead = {"ship": [Crash()]}
    world.crash(world.saga())
    done = list(world.shop.did)

    def charge(order: Order, reserve: str) -> str:
        raise AssertionError

    steps = list(world.steps())
    steps[1] = step(charge, None)
    error = world.outcome(world.saga(*steps)).error
    assert isinstance(error, ResultUnavailable)
    assert world.shop.did == done
    state = world.saga().state("o-1")
    assert state is not None
    assert state.status == "running"
    world.clock.advance(LEASE + 1)
    assert world.outcome(world.saga()).status == "executed"


def test_two_at_once_are_one(world: World) -> None:
    """The second caller is told that the saga is under way, by its policy."""
    inner: list[Outcome[Any]] = []

    def meanwhile(order: Order) -> None:
        rejecting = world.saga(*steps, policy=Policy(lease=LEASE, busy="reject"))
        inner.append(in_another_thread(lambda: world.outcome(rejecting)))

    function = coroutine_function(meanwhile) if world.colour.name == "asyncio" else meanwhile
    steps = (step(function, None, name="reserve"),)
    assert world.outcome(world.saga(*steps)).status == "executed"
    assert isinstance(inner[0].error, InProgress)


# The state


def test_the_state_of_a_saga_that_was_left(world: World) -> None:
    """Any process can read it: the step it is at, tries, times, results, errors."""
    world.shop.instead = {"charge": [ValueError("busy"), Crash()]}
    saga = world.saga()
    assert saga.state("o-1") is None
    began = world.clock()
    world.crash(saga)
    state = world.saga().state("o-1")
    assert state is not None
    assert (state.status, state.attempt, state.input, state.began) == (
        "abandoned",
        1,
        Order("o-1", 500),
        began,
    )
    reserve, charge, ship, mail = state.steps
    assert (reserve.status, reserve.result, reserve.at) == ("done", "shelf of o-1", began)
    assert (charge.status, charge.failures[0].error) == ("failing", "ValueError: busy")
    assert (ship.status, ship.is_pivot, mail.status) == ("waiting", True, "waiting")
    assert state.step == charge


def test_the_state_after_the_end(world: World) -> None:
    """A saga that has ended is still told in full."""
    saga = world.saga()
    world.outcome(saga)
    state = saga.state("o-1")
    assert state is not None
    assert (state.status, {each.status for each in state.steps}) == ("completed", {"done"})
    assert state.steps[1].result == Receipt("500 for shelf of o-1")
    world.shop.instead = {"charge": [Declined("no")]}
    world.outcome(saga, "o-2")
    undone = asyncio.run(saga.astate("o-2"))
    assert undone is not None
    assert (undone.status, undone.reason) == ("compensated", "Declined: no")
    assert [each.status for each in undone.steps] == ["undone", "failed", "skipped", "skipped"]


# Definitions


def nothing(order: Order) -> None:
    """A step."""


def needs_more(order: Order, charge: str) -> None:
    """A step that needs another."""


def generator(order: Order) -> Iterator[None]:
    """No step."""
    yield


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (lambda: (), "made of steps"),
        (lambda: (step(nothing),), "has no undo="),
        (lambda: (step(nothing, None), step(nothing, None)), "Two steps are called 'nothing'"),
        (lambda: (step(needs_more, None),), "no step before it"),
        (lambda: (step(lambda order, b=1: b, None, name="a"), step(nothing, None, name="b")), "no step before it"),
        (lambda: (step(lambda order: None, None),), "can't be called '<lambda>'"),
        (lambda: (step(lambda: None, None, name="a"),), "first parameter"),
        (lambda: (step(generator, None),), "generator"),
        (lambda: (step("nothing", None),), "can't be called"),  # type: ignore[arg-type]
        (lambda: (step(nothing, None, timeout="1s"),), "timeout= needs coroutine functions"),
        (lambda: (step(nothing, None, attempts=0),), "1 or more"),
        (lambda: (step(nothing, None, refused=(3,)),), "exception types"),  # type: ignore[arg-type]
        (lambda: (pivot(nothing), pivot(nothing, name="other")), "has one at most"),
        (lambda: (pivot(nothing), step(nothing, nothing, name="b")), "leave out undo="),
        (lambda: (pivot(nothing), step(nothing, name="b", attempts=3)), "leave out attempts="),
        (lambda: (pivot(nothing), step(nothing, name="b", refused=(Declined,))), "leave out refused="),
        (lambda: (together(step(nothing, None)),), "two steps or more"),
        (lambda: (together(step(nothing, None), pivot(nothing, name="b")),), "stands alone"),
        (lambda: (together(together(step(nothing, None), pivot(nothing)), step(nothing, None)),), "stands alone"),
        (lambda: (together(step(nothing, None), step(nothing, None) * 2),), "takes steps"),
        (lambda: (together(step(nothing, None, name="charge"), step(needs_more, None)),), "no step before it"),
    ],
)  # fmt: skip
def test_a_definition_is_checked_at_once(steps: Callable[[], tuple[Group, ...]], message: str) -> None:
    """Before anything runs, with words that say what to write instead."""
    with Receiver("memory://") as receiver, pytest.raises(UsageError, match=message):
        Saga(receiver, "s", *steps())


@pytest.mark.parametrize(
    "policy", [Policy(on_crash="in_doubt"), Policy(store_result=False), Policy(fallback="open")]
)
def test_a_policy_that_no_saga_can_keep_to(policy: Policy) -> None:
    """Each would leave sagas half done."""
    with (
        Receiver("memory://", policy=policy) as receiver,
        pytest.raises(UsageError, match="policy= of its own"),
    ):
        Saga(receiver, "s", step(nothing, None))


def test_a_saga_is_no_part_of_a_transaction(tmp_path: Path) -> None:
    """It outlives every one; said at once."""
    with (
        Receiver(f"sqlite:///{tmp_path / 'effects.db'}") as receiver,
        closing(sqlite3.connect(tmp_path / "effects.db")) as connection,
        pytest.raises(UsageError, match="outlives every transaction"),
    ):
        Saga(receiver.on(connection), "s", step(nothing, None))


def test_every_entry_is_told() -> None:
    """To hooks, as steps are."""
    told = Told()
    with Receiver("memory://", hooks=[told]) as receiver:
        Saga(receiver, "s", step(nothing, None)).run("o-1")
    steps = [event.detail for event in told if event.kind == "step"]
    assert steps == ["begin", "do:nothing"]


def test_coroutines_need_an_event_loop() -> None:
    """Said before anything is claimed."""

    async def coroutine(order: Order) -> None: ...

    with Receiver("memory://") as receiver:
        saga = Saga(receiver, "s", step(coroutine, None))
        with pytest.raises(ColourMismatch, match="arun"):
            saga.run("o-1")
        assert receiver.get(saga.key("o-1")) is None


def test_what_cannot_be_recorded_is_not_begun() -> None:
    """An input without a stored form, or one that is too large: nothing is claimed."""
    with Receiver("memory://", policy=Policy(max_result=100)) as receiver:
        saga = Saga(receiver, "s", step(nothing, None))
        with pytest.raises(UsageError):
            saga.run("o-1", threading.Lock())
        with pytest.raises(UsageError, match="max_result"):
            saga.run("o-1", "x" * 200)
        assert receiver.get(saga.key("o-1")) is None


def test_ids_of_tenants_are_apart() -> None:
    """``scope=`` keeps them so."""
    with Receiver("memory://") as receiver:
        saga = Saga(receiver, "s", step(lambda order: order, None, name="a"))
        assert saga.run("1", "mine", scope="me") == {"a": "mine"}
        assert saga.run("1", "yours", scope="you") == {"a": "yours"}
