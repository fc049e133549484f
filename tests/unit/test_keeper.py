"""The keeper: leases are renewed together, whatever handlers do, and a lost one is told."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import pytest
from tests.integration.sqlite_helpers import Caller, output_of
from tests.unit.receiving import (
    Colour,
    Counted,
    SpoiltStore,
    StagedStore,
    Told,
    by_hand,
    must_not_run,
    running,
)

from effectonce import InProgress, LeaseLost, Message, Policy, Receiver, StoreUnavailable, current
from effectonce import _keeper as keeper_module
from effectonce._attempt import Attempt
from effectonce._blocking import run
from effectonce._keeper import Keeper
from effectonce._records import Claim, Completion, Renewal, State
from effectonce.hooks import Event
from effectonce.keys import Key, new_owner
from effectonce.sessions import Request, Sessions
from effectonce.stores import Breaker
from effectonce.stores.base import PartlyAnswered
from effectonce.testing.clocks import ManualClock, wait_until

LEASE, KEEP = 30.0, 3600.0
EVENT = Message("e-1")
SHORT = Policy(lease=0.3)


class Kept:
    """A keeper without its thread: the test says when it looks."""

    def __init__(self, clock: ManualClock, store: StagedStore) -> None:
        self.clock, self.store = clock, store
        self.told: list[tuple[str, str, str]] = []
        self.keeper = Keeper(
            store, clock, lambda kind, attempt, why: self.told.append((kind, attempt.key, why))
        )

    def begin(self, key: str = "k", lease: float = LEASE) -> Attempt:
        claim = Claim(key, new_owner(), b"", lease, KEEP)
        record = run(self.store.claim(claim)).record
        assert record is not None
        attempt = Attempt(claim, record.fence, 1, self.clock(), self.clock)
        self.keeper.live[claim.owner] = attempt
        self.store.calls.clear()
        return attempt

    def look(self, after: float = 0.0) -> float:
        """Let time pass and the keeper look; gives how long it wants to rest."""
        self.clock.advance(after)
        return run(self.keeper.tick(self.store, self.clock())) - self.clock()

    def is_held(self, attempt: Attempt) -> bool:
        record = run(self.store.get(attempt.key))
        assert record is not None
        return record.state is State.PENDING and record.lease_until > self.clock()


@pytest.fixture
def store(clock: ManualClock) -> StagedStore:
    return StagedStore(clock=clock)


@pytest.fixture
def kept(clock: ManualClock, store: StagedStore) -> Kept:
    return Kept(clock, store)


# Renewing


def test_leases_are_renewed_together(kept: Kept) -> None:
    """All that is due takes one round trip, at a third of the lease."""
    attempts = [kept.begin(f"k-{number}") for number in range(5)]
    assert kept.look(after=LEASE / 3) == pytest.approx(LEASE / 3)
    assert kept.store.calls == ["renew_many"]
    kept.clock.advance(LEASE * 0.9)
    assert all(kept.is_held(attempt) for attempt in attempts)


def test_what_is_not_due_is_left_alone(kept: Kept) -> None:
    """The keeper rests until the first lease is a third over."""
    kept.begin()
    assert kept.look(after=LEASE / 6) == pytest.approx(LEASE / 6)
    assert kept.store.calls == []


def test_leases_of_different_lengths(kept: Kept) -> None:
    """Each is renewed by its own measure."""
    short, long = kept.begin("short", lease=3.0), kept.begin("long", lease=3000.0)
    for _ in range(10):
        kept.look(after=1.0)
    assert kept.store.calls == ["renew_many"] * 10
    assert kept.is_held(short)
    assert long.renew_at == pytest.approx(kept.clock() - 10 + 1000)


def test_nothing_to_keep_is_no_reason_to_look(kept: Kept) -> None:
    """Without attempts there is no next time."""
    attempt = kept.begin()
    kept.keeper.forget(attempt)
    assert kept.look(after=LEASE) == float("inf")
    assert kept.store.calls == []


def test_a_denied_renewal_is_a_lost_attempt(kept: Kept, clock: ManualClock) -> None:
    """When another took over, the attempt is told at once, others are renewed, and nobody asks again."""
    attempt = kept.begin("taken")
    clock.advance(LEASE)
    run(kept.store.claim(Claim("taken", new_owner(), b"", LEASE, KEEP)))
    other = kept.begin("mine")
    told = threading.Event()
    attempt.when_lost(told.set)
    kept.look(after=LEASE / 3)
    assert (attempt.lost, told.is_set(), kept.is_held(other), other.lost) == (True, True, True, False)
    assert kept.told == [("lease_lost", "taken", "another attempt took over")]
    with pytest.raises(LeaseLost):
        attempt.check()
    kept.look(after=LEASE / 3)
    assert len(kept.told) == 1


@pytest.mark.parametrize("error", [StoreUnavailable("gone"), RuntimeError("a driver's own")], ids=repr)
def test_an_error_is_not_a_denial(kept: Kept, error: Exception) -> None:
    """Whatever a store throws, renewal is tried again, and an outage shorter than the lease harms nobody."""
    attempt = kept.begin()
    kept.store.fail("renew_many", error=error)
    rest = kept.look(after=LEASE / 3)
    while kept.clock() + rest < attempt.deadline - LEASE / 6:
        rest = kept.look(after=rest)
    assert kept.store.calls.count("renew_many") >= 4
    kept.store.recover()
    kept.look(after=rest)
    assert (attempt.lost, kept.is_held(attempt), kept.told) == (False, True, [])


def test_an_error_that_lasts_is_a_lost_attempt(kept: Kept) -> None:
    """Shortly before the lease ends on the local clock, and not after it, the attempt is given up."""
    attempt = kept.begin()
    kept.store.fail("renew_many", error=StoreUnavailable("gone"))
    rest = kept.look(after=LEASE / 3)
    while rest != float("inf"):
        rest = kept.look(after=rest)
    assert kept.clock() < attempt.deadline
    assert attempt.lost
    ((kind, _, why),) = kept.told
    assert kind == "lease_lost"
    assert "gone" in why


def test_a_key_that_is_not_ours_costs_no_other_its_lease(clock: ManualClock) -> None:
    """The store refuses the renewals of all for the one that somebody has written over; alone they are renewed."""
    store = SpoiltStore(clock=clock)
    receiver = by_hand(Receiver(store, monotonic=clock))
    renewed: list[bool] = []

    def handler(message: Message) -> None:
        if message.id == "b":
            store.spoilt = frozenset({receiver.key_of(message)})
            clock.advance(LEASE * 2)
            run(receiver._keeper.tick(store, clock()))
            clock.advance(LEASE * 3)
            renewed.extend(not each.lost for each in receiver._keeper.live.values())

    receiver.process_batch([Message(id) for id in "abc"], handler, concurrency=1)
    assert renewed == [True, False, True]


def test_a_server_that_is_away_costs_only_its_own_leases(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the other servers of the store have renewed is held, however long that one stays away."""
    here, away = kept.begin("here"), kept.begin("away")
    renew_many = kept.store.renew_many

    async def partly(renewals: Sequence[Renewal]) -> list[bool]:
        answers = [
            None if renewal.key == "away" else (await renew_many([renewal]))[0] for renewal in renewals
        ]
        raise PartlyAnswered(StoreUnavailable("one is away"), answers)

    monkeypatch.setattr(kept.store, "renew_many", partly)
    for _ in range(24):
        kept.look(after=LEASE / 12)
    assert kept.told == [("lease_lost", "away", "the store did not answer: one is away")]
    assert (here.lost, away.lost) == (False, True)
    assert kept.is_held(here)


def test_an_attempt_is_over_by_its_own_clock(kept: Kept, clock: ManualClock) -> None:
    """Even if nobody tells it: a lease that could not be renewed is over when its time is."""
    attempt = kept.begin()
    clock.advance(LEASE - 0.001)
    attempt.check()
    clock.advance(0.001)
    with pytest.raises(LeaseLost):
        attempt.check()


def test_a_lease_counts_from_when_it_was_asked_for(kept: Kept, clock: ManualClock) -> None:
    """A slow answer makes the local lease shorter, never longer than the store's."""
    attempt = kept.begin()
    kept.store.before["renew_many"] = lambda: clock.advance(5)
    before = clock()
    kept.look(after=LEASE / 3)
    assert attempt.deadline == before + LEASE / 3 + LEASE


def test_a_handler_that_asks_stops_before_the_next_effect(clock: ManualClock, colour: Colour) -> None:
    """check() raises LeaseLost when the lease is over, and the caller gets LeaseLost, not a release."""
    receiver = by_hand(Receiver(StagedStore(clock=clock), monotonic=clock))

    def handler(_: Message) -> None:
        clock.advance(500)
        current().check()

    with pytest.raises(LeaseLost):
        colour.process(receiver, EVENT, handler)
    taken_over = colour.process(receiver, EVENT, Counted())
    assert taken_over.attempt == 2


async def handles(receiver: Receiver) -> None:
    await receiver.aprocess(EVENT, lambda _: asyncio.Event().wait())


async def holds(receiver: Receiver) -> None:
    async with receiver.claim(Key.of("e-1", "message")):
        await asyncio.Event().wait()


@pytest.mark.parametrize("work", [handles, holds])
def test_a_closed_loop_holds_no_key_for_ever(
    clock: ManualClock, store: StagedStore, told: Told, work: Callable[[Receiver], Any]
) -> None:
    """A handler whose loop was closed under it never goes on: its lease is kept no longer, and the next takes over."""
    receiver = by_hand(Receiver(store, monotonic=clock, hooks=[told]))
    loop = asyncio.new_event_loop()
    stranded = loop.create_task(work(receiver))
    loop.run_until_complete(asyncio.sleep(0))
    (attempt,) = receiver._keeper.live.values()
    clock.advance(60)
    run(receiver._keeper.tick(store, clock()))
    assert not attempt.lost, "a loop that only rests may go on"
    loop.close()
    clock.advance(60)
    run(receiver._keeper.tick(store, clock()))
    assert (attempt.lost, attempt.ended, receiver._keeper.live) == (True, True, {})
    assert told.kinds()[-1] == "lease_lost"
    clock.advance(120)
    with receiver.claim(Key.of("e-1", "message")) as claim:
        assert (claim.first, claim.attempt.number) == (True, 2)
    stranded.get_coro().close()  # as the garbage collector does, in a context of its own
    stranded._log_destroy_pending = False  # type: ignore[attr-defined]


# Endings that could not be written


@pytest.mark.parametrize("seconds", [1, 60])
def test_an_ending_is_carried_home(
    clock: ManualClock, store: StagedStore, colour: Colour, seconds: int
) -> None:
    """When the store is back the result of the handler that ran is recorded, and repeats get it.

    If the store was away for a moment, that is soon, and not when a lease would be renewed.
    """
    receiver = by_hand(Receiver(store, monotonic=clock))
    store.fail("complete", error=StoreUnavailable("gone"))
    with pytest.raises(StoreUnavailable):
        colour.process(receiver, EVENT, Counted("late"))
    store.recover()
    clock.advance(seconds)
    run(receiver._keeper.tick(store, clock()))
    assert colour.process(receiver, EVENT, must_not_run).value == "late"
    assert not receiver._keeper.live


def test_an_ending_is_carried_home_after_a_silence_that_outlasts_the_lease(
    clock: ManualClock, store: StagedStore, told: Told, colour: Colour
) -> None:
    """While a result is being written its handler is done: what the store leaves unanswered then is no lost lease."""
    receiver = by_hand(Receiver(store, monotonic=clock, hooks=[told]))

    def silence() -> None:
        for _ in range(3):
            clock.advance(60)
            run(receiver._keeper.tick(store, clock()))
        raise StoreUnavailable("no answer")

    store.fail("renew_many", error=StoreUnavailable("no answer"))
    store.before["complete"] = silence
    with pytest.raises(StoreUnavailable):
        colour.process(receiver, EVENT, Counted("late"))
    store.recover()
    clock.advance(60)
    run(receiver._keeper.tick(store, clock()))
    assert colour.process(receiver, EVENT, must_not_run).value == "late"
    assert "lease_lost" not in told.kinds()


@pytest.mark.parametrize("overtaken", [False, True])
def test_an_ending_is_carried_home_after_its_lease_was_given_up(
    clock: ManualClock, store: StagedStore, told: Told, overtaken: bool
) -> None:
    """The store was away from the middle of the handler on: what it did is recorded, unless another took over."""
    receiver = by_hand(Receiver(store, monotonic=clock, hooks=[told]))

    def handler(_: Message) -> str:
        store.fail("renew_many", error=StoreUnavailable("gone"))
        store.fail("complete", error=StoreUnavailable("gone"))
        for _ in range(3):
            clock.advance(60)
            run(receiver._keeper.tick(store, clock()))
        assert current().lost
        return "late"

    with pytest.raises(StoreUnavailable):
        receiver.process(EVENT, handler)
    store.recover()
    if overtaken:
        Receiver(store, monotonic=clock).process(EVENT, Counted("other"))
    clock.advance(1)
    run(receiver._keeper.tick(store, clock()))
    assert receiver.process(EVENT, must_not_run).value == ("other" if overtaken else "late")
    assert told.kinds().count("lease_lost") == 1
    assert not receiver._keeper.live


def test_a_store_that_stays_away_is_given_an_ending_less_and_less_often(kept: Kept) -> None:
    """After as long again as it has been carried, until that is a twelfth of the lease."""
    attempt = kept.begin(lease=120.0)
    attempt.ending = True
    kept.store.fail("complete", error=StoreUnavailable("gone"))
    kept.keeper.wake_at = -inf
    kept.keeper.carry(attempt, ending_of(attempt))
    rests = [1.0]
    while len(rests) < 8:
        rests.append(kept.look(after=rests[-1]))
    assert rests == [pytest.approx(rest) for rest in (1, 1, 2, 4, 8, 10, 10, 10)]


def test_a_receiver_that_closes_waits_for_an_ending_that_is_carried(
    store: StagedStore, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store comes back while it drains: a process that ends in good order leaves no effect without its record."""
    monkeypatch.setattr(keeper_module, "SOON_SECONDS", 0.01)
    receiver = Receiver(store, hooks=[told])
    store.fail("complete", error=StoreUnavailable("gone"))
    with pytest.raises(StoreUnavailable):
        receiver.process(EVENT, Counted("late"))
    store.recover()
    receiver.close()
    assert (told[-1].kind, told[-1].detail) == ("completed", "recorded late")


def ending_of(attempt: Attempt) -> Completion:
    return Completion("k", attempt.claim.owner, attempt.fence, State.COMPLETED, b"1", KEEP)


def with_an_ending(kept: Kept) -> Attempt:
    """An attempt whose result waits to be written."""
    attempt = kept.begin()
    attempt.ending = True
    attempt.unrecorded = ending_of(attempt)
    return attempt


def test_an_ending_stays_true_after_the_lease(kept: Kept) -> None:
    """As long as nobody took over it is still written, however late the store comes back."""
    with_an_ending(kept)
    kept.store.fail("complete", error=StoreUnavailable("gone"))
    for _ in range(5):
        kept.look(after=LEASE)
    kept.store.recover()
    kept.look(after=LEASE)
    record = run(kept.store.get("k"))
    assert record is not None
    assert (record.state, record.result) == (State.COMPLETED, b"1")
    assert [kind for kind, _, _ in kept.told] == ["completed"]


def test_an_ending_that_comes_too_late_is_given_up(kept: Kept) -> None:
    """When another took over meanwhile, its record counts, and the loss is told."""
    with_an_ending(kept)
    kept.clock.advance(LEASE)
    run(kept.store.claim(Claim("k", new_owner(), b"", LEASE, KEEP)))
    kept.look(after=LEASE / 3)
    assert [(kind, key) for kind, key, _ in kept.told] == [("lease_lost", "k")]
    assert not kept.keeper.live


def test_a_finished_attempt_is_not_lost(clock: ManualClock, store: StagedStore, told: Told) -> None:
    """A renewal that crosses its attempt's completion is denied, and that is no loss."""
    receiver = by_hand(Receiver(store, monotonic=clock, hooks=[told]))

    def cross() -> None:
        clock.advance(60)
        run(receiver._keeper.tick(store, clock()))

    store.after["complete"] = cross
    assert receiver.process(EVENT, Counted()).status == "executed"
    assert told.kinds() == ["claimed", "completed"]


# Claims whose answers were lost


def lost_twice(store: StagedStore) -> None:
    """Have the store grant claims, and nobody hear of it."""
    lost = StoreUnavailable("no answer")

    def losing() -> None:
        raise lost

    store.after.update(claim=losing, claim_many=losing)


AT_MOST_ONCE = Policy(on_crash="in_doubt", busy="reject")


def test_an_unheard_claim_is_given_back(clock: ManualClock, store: StagedStore, colour: Colour) -> None:
    """When the store answers again a retry runs at once, also at most once: nothing had begun."""
    receiver = by_hand(Receiver(store, policy=AT_MOST_ONCE, monotonic=clock))
    lost_twice(store)
    with pytest.raises(StoreUnavailable):
        colour.process(receiver, EVENT, must_not_run)
    store.recover()
    with pytest.raises(InProgress):
        colour.process(receiver, EVENT, must_not_run)
    clock.advance(1)
    run(receiver._keeper.tick(store, clock()))
    outcome = colour.process(receiver, EVENT, Counted())
    assert (outcome.status, outcome.attempt) == ("executed", 1)


class TimeLimit(Exception):
    """What the signal handler of a job queue raises wherever it finds the job."""


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, TimeLimit])
@pytest.mark.parametrize("way", ["process", "batch", "block", "second claim"])
def test_a_claim_whose_caller_was_interrupted_is_given_back(
    clock: ManualClock, store: StagedStore, interrupt: type[BaseException], way: str
) -> None:
    """It was granted, and nobody heard of it: a retry need not wait for a lease that nobody uses."""
    receiver = by_hand(Receiver(store, policy=AT_MOST_ONCE, monotonic=clock))

    def block() -> None:
        with receiver.claim(Key.parse(receiver.key_of(EVENT))):
            must_not_run(EVENT)

    ways: dict[str, Callable[[], object]] = {
        "process": lambda: receiver.process(EVENT, must_not_run),
        "batch": lambda: receiver.process_batch([EVENT, Message("e-2")], must_not_run),
        "block": block,
        "second claim": lambda: receiver.process(EVENT, must_not_run),
    }
    lost = iter(
        [StoreUnavailable("the reply was lost"), interrupt()] if way == "second claim" else [interrupt()]
    )

    def losing() -> None:
        raise next(lost)

    store.after.update(claim=losing, claim_many=losing)
    with pytest.raises(interrupt):
        ways[way]()
    store.recover()
    record = receiver.get(receiver.key_of(EVENT))
    assert record is not None
    assert record.state is State.PENDING
    clock.advance(1)
    run(receiver._keeper.tick(store, clock()))
    outcome = receiver.process(EVENT, Counted())
    assert (outcome.status, outcome.attempt) == ("executed", 1)
    assert not receiver._keeper._unheard


def test_unheard_claims_of_a_batch_are_given_back(
    clock: ManualClock, store: StagedStore, colour: Colour
) -> None:
    """All of them, and nobody else's: a key that another holds stays held."""
    receiver = by_hand(Receiver(store, policy=AT_MOST_ONCE, monotonic=clock))
    other = Claim(receiver.key_of(Message("held")), new_owner(), b"", LEASE, KEEP)
    run(store.claim(other))
    messages = [Message("a"), Message("held"), Message("b")]
    lost_twice(store)
    outcomes = colour.batch(receiver, messages, must_not_run)
    assert [outcome.status for outcome in outcomes] == ["store_error"] * 3
    store.recover()
    clock.advance(1)
    run(receiver._keeper.tick(store, clock()))
    outcomes = colour.batch(receiver, messages, Counted())
    assert [outcome.status for outcome in outcomes] == ["executed", "in_progress", "executed"]


def test_an_unheard_claim_is_asked_for_until_its_lease_ends(kept: Kept) -> None:
    """While the store is away it is asked now and then, once for all of them; after the lease there is no use in it."""
    for key in ("k", "l"):
        kept.keeper.withdraw(Claim(key, new_owner(), b"", LEASE, KEEP))
    kept.store.fail("get", error=StoreUnavailable("gone"))
    rests = [kept.look(after=1) for _ in range(10)]
    assert all(0 <= rest <= 1 for rest in rests)
    assert kept.store.calls == ["get"] * 10
    while kept.look(after=1) <= 1:
        assert len(kept.store.calls) <= 2 * LEASE
    assert kept.look(after=1) > LEASE


def test_an_attempt_that_began_is_never_given_back(kept: Kept) -> None:
    """A claim that was not granted has a key whose holder is another: it stays held, also when its lease is over."""
    attempt = kept.begin()
    kept.keeper.live.clear()
    kept.keeper.withdraw(Claim(attempt.key, new_owner(), b"", LEASE, KEEP))
    kept.clock.advance(LEASE)
    kept.look()
    record = run(kept.store.get(attempt.key))
    assert record is not None
    assert (record.state, record.owner, record.fence) == (State.PENDING, attempt.claim.owner, attempt.fence)


def test_what_the_circuit_refuses_needs_no_giving_back(
    clock: ManualClock, store: StagedStore, colour: Colour
) -> None:
    """No more is remembered of an outage than the few claims that were sent."""
    store.features = store.features._replace(durable=True)
    receiver = by_hand(Receiver(store, breaker=Breaker(errors=2), monotonic=clock))
    store.fail("claim", error=StoreUnavailable("gone"))
    for number in range(50):
        with pytest.raises(StoreUnavailable):
            colour.process(receiver, Message(f"e-{number}"), must_not_run)
    sent = store.calls.count("claim")
    assert len(receiver._keeper._unheard) <= sent < 10


def test_the_thread_gives_unheard_claims_back() -> None:
    """By itself, soon after: a duplicate that waits for the key need not wait for a lease."""
    store = StagedStore()
    with Receiver(store) as receiver:
        lost_twice(store)
        with pytest.raises(StoreUnavailable):
            receiver.process(EVENT, must_not_run)
        store.recover()
        assert receiver.process(EVENT, Counted(), policy=Policy(wait=20)).status == "executed"


# The thread


def renewed(store: StagedStore, times: int) -> None:
    wait_until(lambda: store.calls.count("renew_many") >= times, what=f"{times} renewals")


@pytest.mark.parametrize("blocked", ["handler", "event loop"])
def test_a_blocked_handler_keeps_its_lease(blocked: str) -> None:
    """A handler that computes for many leases, or blocks its loop, is renewed beside it and completes."""
    store = StagedStore()
    receiver, other = Receiver(store, policy=SHORT), Receiver(store, policy=Policy(busy="reject"))

    def handler(_: Message) -> str:
        renewed(store, 5)
        with pytest.raises(InProgress):
            other.process(EVENT, must_not_run)
        current().check()
        return "kept"

    async def blocking_the_loop(message: Message) -> str:
        return handler(message)

    outcome = (
        receiver.process(EVENT, handler)
        if blocked == "handler"
        else asyncio.run(receiver.aprocess(EVENT, blocking_the_loop))
    )
    assert (outcome.status, outcome.value, outcome.attempt) == ("executed", "kept", 1)


class Overtaking:
    """A first attempt whose renewals are held up, until a second receiver took its key."""

    def __init__(self, clock: ManualClock, told: Told) -> None:
        self.clock = clock
        self.store = StagedStore(clock=clock)
        self.first = Receiver(self.store, policy=SHORT, hooks=[told])
        self.second = Receiver(self.store, policy=Policy(lease="1h"))
        self.renew = threading.Event()
        self.store.before["renew_many"] = self._held_up

    def _held_up(self) -> None:
        assert self.renew.wait(20)

    def take_over(self, handler: Callable[[Message], Any]) -> Any:
        self.clock.advance(1)
        return self.second.process(EVENT, handler)


@pytest.fixture
def overtaking(clock: ManualClock, told: Told) -> Overtaking:
    return Overtaking(clock, told)


def loss_is_told(told: Told) -> None:
    """The keeper tells of it from its own thread, perhaps a little later than the attempt's end is told."""
    wait_until(lambda: "lease_lost" in told.kinds(), what="A lease_lost event")
    assert [kind for kind in told.kinds() if kind != "lease_lost"] == ["claimed", "fenced", "replayed"]


def test_a_lost_coroutine_is_cancelled(overtaking: Overtaking, told: Told) -> None:
    """The keeper cancels a handler on an event loop that lost its lease; its caller gets the other's result."""
    seen = []

    async def handler(_: Message) -> str:
        overtaking.take_over(Counted("the other's"))
        overtaking.renew.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append(current().lost)
            raise
        return "mine"

    outcome = asyncio.run(overtaking.first.aprocess(EVENT, handler))
    assert (outcome.status, outcome.value, outcome.attempt) == ("replayed", "the other's", 2)
    assert seen == [True]
    loss_is_told(told)


def test_a_cancelled_handler_leaves_its_task_alive(overtaking: Overtaking) -> None:
    """Losing a lease ends the handler, not the task around it: what comes after may await as ever."""

    async def handler(_: Message) -> None:
        overtaking.take_over(Counted("the other's"))
        overtaking.renew.set()
        await asyncio.Event().wait()

    async def caller() -> Any:
        outcome = await overtaking.first.aprocess(EVENT, handler)
        await asyncio.sleep(0)
        task = asyncio.current_task()
        assert task is not None
        return outcome.value, task.cancelling()

    assert asyncio.run(caller()) == ("the other's", 0)


def test_a_lost_attempt_without_an_answer(overtaking: Overtaking) -> None:
    """While the one who took over is still running there is no result to give: LeaseLost."""
    leave = threading.Event()
    entered = threading.Event()

    def slow(_: Message) -> str:
        entered.set()
        assert leave.wait(20)
        return "the other's"

    async def handler(_: Message) -> None:
        nonlocal other
        other = Caller(lambda: overtaking.take_over(slow))
        assert entered.wait(20)
        overtaking.renew.set()
        await asyncio.Event().wait()

    other: Caller | None = None
    with pytest.raises(LeaseLost, match="Ask again"):
        asyncio.run(overtaking.first.aprocess(EVENT, handler))
    leave.set()
    assert other is not None
    assert other.answer().value == "the other's"


def test_a_lost_thread_is_told(overtaking: Overtaking, told: Told) -> None:
    """A blocking handler can't be cancelled; it can look, and its result is refused either way."""

    def handler(_: Message) -> str:
        overtaking.take_over(Counted("the other's"))
        overtaking.renew.set()
        wait_until(lambda: current().lost)
        return "mine"

    outcome = overtaking.first.process(EVENT, handler)
    assert (outcome.status, outcome.value) == ("replayed", "the other's")
    loss_is_told(told)


def test_an_outage_shorter_than_the_lease_is_survived() -> None:
    """The thread goes on when the store errs, and renews when it is back."""
    store = StagedStore()
    receiver = Receiver(store, policy=Policy(lease=3))

    def handler(_: Message) -> bool:
        store.fail("renew_many", error=StoreUnavailable("gone"))
        renewed(store, 2)
        store.recover()
        store.calls.clear()
        renewed(store, 1)
        return current().lost

    assert receiver.process(EVENT, handler).value is False


def keepers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "effectonce-keeper"}


def test_one_thread_for_all_attempts() -> None:
    """Attempts that run at the same time share one thread, and calls that come and go make no more."""
    before = keepers()
    receiver = Receiver("memory://")
    with running(receiver, Message("a")), running(receiver, Message("b")), running(receiver, Message("c")):
        for number in range(50):
            receiver.process(Message(f"e-{number}"), Counted())
        assert len(keepers() - before) == 1


def test_no_thread_for_what_needs_none() -> None:
    """A receiver that runs nothing has no thread."""
    before = keepers()
    with Receiver("memory://") as receiver:
        receiver.get("k")
        receiver.purge()
        assert keepers() == before


def test_the_thread_ends_when_idle_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some time after the last attempt it goes; the next attempt has a keeper again."""
    monkeypatch.setattr(keeper_module, "LINGER_SECONDS", 0.01)
    store = StagedStore()
    receiver = Receiver(store, policy=Policy(lease=0.15))
    before = keepers()
    for number in range(2):
        store.calls.clear()
        receiver.process(Message(f"e-{number}"), lambda _: renewed(store, 2))
        wait_until(lambda: keepers() <= before, what="The end of the thread")


def test_sessions_that_nobody_closes_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their threads hold up no process, end when there is nothing to renew, and keep nothing alive."""
    monkeypatch.setattr(keeper_module, "LINGER_SECONDS", 0.01)
    before, clock, kept = keepers(), ManualClock(), list[weakref.ref[Keeper]]()
    receiver = Receiver("memory://", policy=Policy(lease=LEASE), monotonic=clock)
    for _ in range(5):
        sessions = Sessions(receiver)
        sessions.process(Request(sessions.open().client, 1), lambda _: None)
        kept.append(weakref.ref(sessions.receiver._keeper))
    del sessions
    assert len(keepers() - before) == 5
    assert all(thread.daemon for thread in keepers())
    clock.advance(LEASE)
    wait_until(lambda: keepers() <= before, what="The end of the threads")
    gc.collect()
    assert [keeper() for keeper in kept] == [None] * 5
    receiver.close()


def test_a_thread_that_is_not_to_be_had_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Short of threads, or at the end of the interpreter: a handler runs while its lease lasts, and is recorded."""
    store = StagedStore()
    receiver = Receiver(store, policy=SHORT)

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as short_of_threads:
        short_of_threads.setattr(threading.Thread, "start", refused)
        assert receiver.process(Message("e-1"), Counted()).status == "executed"
    assert "can't start new thread" in caplog.text
    receiver.process(Message("e-2"), lambda _: renewed(store, 2))


def test_a_hook_that_wants_to_exit_costs_nobody_a_lease(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """``sys.exit`` on the keeper's thread would end that thread without a word: all other leases went with it."""

    def exits(event: Event) -> None:
        if event.kind == "lease_lost":
            raise SystemExit(1)

    store = StagedStore()
    receiver = Receiver(store, policy=SHORT, hooks=[exits])

    def handler(_: Message) -> None:
        store._records.clear()
        wait_until(lambda: current()._lost, what="The word that the lease is lost")

    with pytest.raises(LeaseLost):
        receiver.process(Message("e-1"), handler)
    store.calls.clear()
    receiver.process(Message("e-2"), lambda _: renewed(store, 2))
    assert "SystemExit" in caplog.text


def test_close_ends_the_thread() -> None:
    """A closed receiver leaves no thread behind."""
    before = keepers()
    receiver = Receiver("memory://")
    receiver.process(EVENT, Counted())
    receiver.close()
    wait_until(lambda: keepers() <= before, seconds=2, what="The end of the thread")


FORK = """
import os, sys, threading, warnings
warnings.simplefilter("ignore")  # newer Pythons warn of forking beside threads, which is what this is about
from effectonce import Message, Policy, Receiver
from effectonce.stores.sqlite import SQLiteStore
from effectonce.sessions import Request, Sessions
from effectonce.stores import Breaker
from effectonce.stores.base import PartlyAnswered
from effectonce.testing.clocks import wait_until

class Counting(SQLiteStore):
    renewed = []
    async def renew_many(self, renewals):
        self.renewed.append({renewal.key for renewal in renewals})
        return await super().renew_many(renewals)

receiver = Receiver(Counting(sys.argv[1]), policy=Policy(lease=0.3))

def until_renewed(message):
    Counting.renewed.clear()
    wait_until(lambda: len(Counting.renewed) >= 3)
    return message.id

def parents(message):
    child = os.fork()
    if child == 0:
        receiver.process(Message("child"), until_renewed)
        os._exit(0 if set().union(*Counting.renewed) == {"|message||child"} else 1)
    until_renewed(message)
    return os.waitpid(child, 0)[1]

print(receiver.process(Message("parent"), parents).value, sorted(set().union(*Counting.renewed)))
"""


def test_a_forked_child_keeps_only_its_own(tmp_path: Any) -> None:
    """After a fork each process has its own keeper: the child renews nothing of the parent's, and both go on."""
    assert output_of(FORK, tmp_path / "effects.db") == "0 ['|message||parent']\n"


FORKS_OF_THREADS = """
import os, sys, threading
from effectonce import Message, Policy, Receiver

receiver = Receiver(sys.argv[1], policy=Policy(local_cache=100))
receiver.process(Message("before"), lambda _: 1)

def fork():
    for _ in range(25):
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)

threads = [threading.Thread(target=fork, daemon=True) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(30)
assert not any(thread.is_alive() for thread in threads), "they wait for each other"
print(receiver.process(Message("after"), lambda _: 2).value)
"""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("scheme", ["sqlite", "memory"])
def test_threads_may_fork_side_by_side(tmp_path: Any, scheme: str) -> None:
    """Each waits for its turn; none takes away what another has brought to rest, and calls go on."""
    url = f"sqlite:///{tmp_path / 'effects.db'}" if scheme == "sqlite" else "memory://"
    assert output_of(FORKS_OF_THREADS, url) == "2\n"


AT_THE_END = """
from effectonce import Message, Receiver

receiver = Receiver("memory://")

class Last:
    def __del__(self):
        receiver.process(Message("last"), lambda _: print("ran"))

last = Last()
last.itself = last
"""


def test_a_process_that_ends_starts_no_thread() -> None:
    """What objects do on their way out is done, and the interpreter ends."""
    assert output_of(AT_THE_END) == "ran\n"
