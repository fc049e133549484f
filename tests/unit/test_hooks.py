"""Events: every decision is told once, with its key; and what ``stats()`` makes of them."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any, get_args

import pytest
from tests.integration.sqlite_helpers import Caller
from tests.unit.receiving import Colour, Counted, StagedStore, Told, by_hand, crash, must_not_run, running

from effectonce import Message, Policy, Receiver, StoreUnavailable, current
from effectonce import hooks as hooks_module
from effectonce._tally import UNREAD_MOST
from effectonce.hooks import Event, EventKind, Events, Figures, log_events
from effectonce.policy import Resolution
from effectonce.stores.memory import MemoryStore
from effectonce.testing.clocks import ManualClock, wait_until

EVENT = Message("e-1", {"card": "4111-secret"})
ONCE = Policy(on_crash="in_doubt")
DAY = 86400.0


class Stage:
    """A receiver, its store, its clock, and what it tells."""

    def __init__(self, colour: Colour) -> None:
        self.colour = colour
        self.clock = ManualClock()
        self.store = StagedStore(clock=self.clock)
        self.told = Told()
        self.receiver = self.another(hooks=[self.told])

    def another(self, **choices: Any) -> Receiver:
        return by_hand(Receiver(self.store, clock=self.clock, monotonic=self.clock, **choices))

    def process(self, handler: Any = None, message: Message = EVENT, **choices: Any) -> Any:
        """Process a message; what it raises is of no interest here."""
        try:
            return self.colour.process(self.receiver, message, handler or Counted(), **choices)
        except Exception as error:
            return error

    def figures(self) -> Figures:
        return self.receiver.stats().since_start


@pytest.fixture
def stage(colour: Colour) -> Stage:
    return Stage(colour)


# Each kind


def overtake(stage: Stage) -> None:
    other = stage.another()

    def handler(_: Message) -> None:
        stage.clock.advance(500)
        other.process(EVENT, Counted())

    stage.process(handler)


def lose(stage: Stage) -> None:
    other = stage.another()

    def handler(_: Message) -> None:
        from effectonce._blocking import run

        stage.clock.advance(500)
        other.process(EVENT, Counted())
        run(stage.receiver._keeper.tick(stage.store, stage.clock()))

    stage.process(handler)


def take_over(stage: Stage) -> None:
    crash(stage.another(), EVENT)
    stage.clock.advance(500)
    stage.process()


def take_over_slowly(stage: Stage) -> None:
    """The store's reply comes after the lease that it grants, so the claim is sent again."""

    def reply_late() -> None:
        stage.store.after.clear()
        stage.clock.advance(500)

    crash(stage.another(), EVENT)
    stage.clock.advance(500)
    stage.store.after["claim"] = reply_late
    stage.process()


def doubt(stage: Stage) -> None:
    crash(stage.another(), EVENT, policy=ONCE)
    stage.clock.advance(500)
    stage.process(must_not_run, policy=ONCE)


def exhaust(stage: Stage) -> None:
    policy = Policy(max_attempts=1)
    crash(stage.another(), EVENT, policy=policy)
    stage.clock.advance(500)
    stage.process(must_not_run, policy=policy)


def go_away(stage: Stage) -> None:
    stage.store.fail("claim", error=StoreUnavailable("gone"))
    stage.process(must_not_run)


def run_unprotected(stage: Stage) -> None:
    stage.store.fail("claim", error=StoreUnavailable("gone"))
    stage.process(policy=Policy(fallback="open"))


def mismatch(stage: Stage) -> None:
    stage.another().process(EVENT, Counted())
    stage.process(must_not_run, Message("e-1", "else"))


def replay(stage: Stage) -> None:
    stage.another().process(EVENT, Counted())
    stage.process(must_not_run)


def reject(stage: Stage) -> None:
    crash(stage.another(), EVENT)
    stage.process(must_not_run, policy=Policy(busy="reject"))


def purge(stage: Stage) -> None:
    stage.another().process(EVENT, Counted())
    stage.clock.advance(2 * DAY)
    assert stage.receiver.purge() == 1


def late(stage: Stage) -> None:
    stage.process(must_not_run, Message("e-1", timestamp=stage.clock() - 2 * DAY))


STORIES: list[tuple[list[str], Callable[[Stage], Any]]] = [
    (["claimed", "completed"], Stage.process),
    (["replayed"], replay),
    (["busy"], reject),
    (["mismatch"], mismatch),
    (["claimed", "released"], lambda stage: stage.process(Counted(ValueError()))),
    (
        ["claimed", "failed"],
        lambda stage: stage.process(Counted(ValueError()), policy=Policy(remember=ValueError)),
    ),
    (
        ["claimed", "in_doubt"],
        lambda stage: stage.process(Counted(OSError()), policy=Policy(in_doubt=OSError)),
    ),
    (["taken_over", "completed"], take_over),
    (["taken_over", "completed"], take_over_slowly),
    (["claimed", "fenced", "replayed"], overtake),
    (["claimed", "lease_lost", "fenced", "replayed"], lose),
    (["late"], late),
    (["in_doubt"], doubt),
    (["failed"], exhaust),
    (["store_error"], go_away),
    (["unprotected"], run_unprotected),
    (["purged"], purge),
    (["claimed", "step", "completed"], lambda stage: stage.process(lambda _: current().step("one", dict))),
]


def named(story: tuple[list[str], Any]) -> str:
    return "-".join(story[0])


EACH_STORY = pytest.mark.parametrize(("kinds", "story"), STORIES, ids=map(named, STORIES))


@EACH_STORY
def test_every_decision_is_told_once(stage: Stage, kinds: list[str], story: Callable[[Stage], Any]) -> None:
    """One event for each decision, in order, each with the key it is about."""
    story(stage)
    assert stage.told.kinds() == kinds
    about_all = {"purged"}
    assert all(
        event.key == stage.receiver.key_of(EVENT) for event in stage.told if event.kind not in about_all
    )


def test_every_kind_has_its_story() -> None:
    """The stories above leave out no kind of event; test_circuit and test_consumers tell the rest."""
    elsewhere = {"circuit", "dead_letter", "unstable_id"}
    assert {kind for kinds, _ in STORIES for kind in kinds} == set(get_args(EventKind)) - elsewhere


def test_an_event_says_which_attempt(stage: Stage) -> None:
    """Fence, number, guarantee and, at its end, how long the handler ran."""

    def handler(_: Message) -> None:
        stage.clock.advance(2.5)

    outcome = stage.process(handler, policy=ONCE)
    claimed, completed = stage.told
    for event in (claimed, completed):
        assert (event.fence, event.attempt, event.guarantee) == (outcome.fence, 1, "at_most_once")
    assert (claimed.seconds, completed.seconds) == (None, 2.5)


def test_an_event_says_why(stage: Stage) -> None:
    """A release names the exception's type, an outage the error's."""
    stage.process(Counted(ValueError("do not tell")))
    assert stage.told[-1].detail == "ValueError"
    go_away(stage)
    assert stage.told[-1].detail == "StoreUnavailable"


def test_a_waiter_is_told_once(told: Told) -> None:
    """However often it looks, a waiting duplicate is busy once, and then gets its answer."""
    store = MemoryStore()
    first, second = Receiver(store), Receiver(store, hooks=[told])
    with running(first, EVENT) as leave:
        waiter = Caller(lambda: second.process(EVENT, must_not_run))
        wait_until(lambda: told.kinds() == ["busy"])
        leave.set()
        waiter.answer()
    assert told.kinds() == ["busy", "replayed"]


SETTLED = {
    "completed": (Resolution.completed(1), "completed"),
    "failed": (Resolution.failed(ValueError()), "failed"),
    "not applied": (Resolution.not_applied(), "released"),
}


@pytest.mark.parametrize("how", SETTLED)
@pytest.mark.parametrize("who", ["person", "prober", "sweep"])
def test_a_settlement_is_told(stage: Stage, who: str, how: str) -> None:
    """What a person or a prober decides about a doubt is a decision like any other."""
    doubt(stage)
    stage.told.clear()
    resolution, kind = SETTLED[how]
    if who == "person":
        stage.colour.resolve(stage.receiver, stage.receiver.key_of(EVENT), resolution.kind, resolution.value)
    elif who == "prober":
        stage.process(policy=Policy(prober=lambda _: resolution))
    else:
        stage.colour.sweep(stage.receiver, policy=Policy(prober=lambda _: resolution))
    assert stage.told.kinds()[0] == kind


def test_a_sweep_tells_of_doubt(stage: Stage) -> None:
    """An abandoned attempt that a sweep puts in doubt is told as one that a duplicate meets."""
    crash(stage.another(), EVENT, policy=ONCE)
    stage.clock.advance(500)
    stage.colour.sweep(stage.receiver)
    assert stage.told.kinds() == ["in_doubt"]


def test_an_ending_that_is_carried_home_is_told(stage: Stage) -> None:
    """A result that could be recorded only later is completed then."""
    from effectonce._blocking import run

    stage.store.fail("complete", error=StoreUnavailable("gone"))
    stage.process()
    stage.store.recover()
    stage.clock.advance(60)
    run(stage.receiver._keeper.tick(stage.store, stage.clock()))
    assert stage.told.kinds() == ["claimed", "store_error", "completed"]


# Hooks


def test_a_hook_that_raises_harms_nobody(
    colour: Colour, told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    """The call goes on, the other hooks are told, and the failure is logged with the key."""

    def broken(_: Event) -> None:
        raise RuntimeError("not today")

    receiver = Receiver("memory://", hooks=[broken, told])
    assert colour.process(receiver, EVENT, Counted(5)).value == 5
    assert told.kinds() == ["claimed", "completed"]
    assert all("e-1" in record.getMessage() for record in caplog.records)
    assert len(caplog.records) == 2


def test_events_are_frozen(stage: Stage) -> None:
    """A hook can't change what the next one is told."""
    stage.process()
    with pytest.raises(AttributeError):
        stage.told[0].kind = "busy"  # type: ignore[misc]


def test_nobody_listens_nothing_is_made(monkeypatch: pytest.MonkeyPatch, colour: Colour) -> None:
    """Without hooks no event object is made on the way of a message."""
    monkeypatch.setattr(hooks_module, "Event", must_not_run)
    receiver = Receiver("memory://")
    colour.process(receiver, EVENT, Counted())
    colour.process(receiver, EVENT, must_not_run)
    with pytest.raises(ValueError):
        colour.process(receiver, Message("e-2"), Counted(ValueError()))
    colour.batch(receiver, [EVENT, Message("e-3")], Counted())
    assert receiver.stats().since_start.counts["replayed"] == 2


# Log lines


@EACH_STORY
def test_every_line_carries_its_key(
    stage: Stage, kinds: list[str], story: Callable[[Stage], Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Each event is one line that names kind and key, and has both as fields for structured logs."""
    caplog.set_level(logging.DEBUG, "effectonce")
    stage.receiver.events.hooks = (log_events,)
    story(stage)
    assert [record.__dict__["effect_event"] for record in caplog.records] == kinds
    for record, kind in zip(caplog.records, kinds, strict=True):
        assert record.getMessage().startswith(f"{kind} key=")
        assert record.__dict__["effect_key"] in record.getMessage()
        assert record.name == "effectonce"
        assert "\n" not in record.getMessage()


def test_what_needs_a_person_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Losses, doubts, outages, reused keys and dead letters are warnings; the rest is information."""
    caplog.set_level(logging.DEBUG, "effectonce")
    for kind in get_args(EventKind):
        log_events(Event(kind, "k"))
    loud = {record.__dict__["effect_event"] for record in caplog.records if record.levelno == logging.WARNING}
    quiet = {
        "claimed",
        "completed",
        "replayed",
        "busy",
        "failed",
        "released",
        "taken_over",
        "late",
        "purged",
        "step",
    }
    assert loud == set(get_args(EventKind)) - quiet
    assert {record.levelno for record in caplog.records} == {logging.INFO, logging.WARNING}


@EACH_STORY
def test_no_line_shows_the_payload(
    stage: Stage, kinds: list[str], story: Callable[[Stage], Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Neither what was asked nor what was answered is logged."""
    caplog.set_level(logging.DEBUG)
    stage.receiver.events.hooks = (log_events,)
    story(stage)
    stage.process(Counted("result-secret"), Message("e-2", "payload-secret"))
    stage.process(Counted(ValueError("error-secret")), Message("e-3"))
    assert "secret" not in caplog.text


def test_a_quiet_logger_costs_no_line(caplog: pytest.LogCaptureFixture) -> None:
    """Lines below the level are not made."""
    caplog.set_level(logging.WARNING, "effectonce")
    log_events(Event("claimed", "k"))
    assert caplog.records == []


# Figures


def test_figures_count_what_happened(stage: Stage) -> None:
    """Counts by kind, everything that arrived, and the shares of it that were duplicates and conflicts."""
    for _ in range(4):
        stage.process()
    stage.process(message=Message("e-2"))
    stage.process(Counted(ValueError()), Message("e-3"))
    reject_other = Message("e-4")
    crash(stage.another(), reject_other)
    stage.process(must_not_run, reject_other, policy=Policy(busy="reject"))
    figures = stage.figures()
    assert {kind: figures.counts[kind] for kind in ("claimed", "completed", "replayed", "busy", "released")} == {
        "claimed": 3, "completed": 2, "replayed": 3, "busy": 1, "released": 1
    }  # fmt: skip
    assert figures.deliveries == 7
    assert figures.duplicate_rate == pytest.approx(4 / 7)
    assert figures.lock_conflict_rate == pytest.approx(1 / 7)


DELIVERED = [story for story in STORIES if story[0] not in (["purged"], ["store_error"])]


@pytest.mark.parametrize(("kinds", "story"), DELIVERED, ids=map(named, DELIVERED))
def test_every_delivery_is_counted_once(
    stage: Stage, kinds: list[str], story: Callable[[Stage], Any]
) -> None:
    """Whatever a message is answered with, it is one delivery."""
    story(stage)
    assert stage.figures().deliveries == 1


REPEATS = [
    ("replayed", Counted, Policy()),
    ("replayed", lambda: Counted(ValueError()), Policy()),
    ("in_doubt", lambda: Counted(TimeoutError()), Policy(in_doubt=(TimeoutError,))),
    ("busy", lambda: must_not_run, Policy(busy="reject")),
    ("late", lambda: must_not_run, Policy(keep="1s")),
]


@pytest.mark.parametrize(
    ("kind", "handler", "policy"), REPEATS, ids=lambda each: str(each) * isinstance(each, str)
)
def test_every_repeat_inside_a_batch_is_counted_once(
    stage: Stage, kind: str, handler: Callable[[], Any], policy: Policy
) -> None:
    """It gets the outcome of the first, whatever that is, and is a delivery as that is."""
    message = Message("e-2", timestamp=0.0 if kind == "late" else None)
    if kind == "busy":
        crash(stage.another(), message)
    stage.colour.batch(stage.receiver, [message] * 3, handler(), policy=policy)
    assert stage.figures().deliveries == 3
    assert stage.told.kinds()[-2:] == [kind] * 2


@EACH_STORY
def test_figures_agree_with_hooks(stage: Stage, kinds: list[str], story: Callable[[Stage], Any]) -> None:
    """What hooks are told is what is counted."""
    story(stage)
    counts = stage.figures().counts
    assert {kind: counts.get(kind) for kind in kinds} == dict.fromkeys(kinds, 1)


@pytest.mark.parametrize("busy", ["wait", "join"])
def test_a_waiter_is_one_delivery(busy: Any, told: Told) -> None:
    """One that met a running attempt and then got its answer counts once, as a duplicate and as a conflict."""
    receiver = Receiver("memory://", hooks=[told])
    with running(receiver, EVENT) as leave:
        waiter = Caller(lambda: receiver.process(EVENT, must_not_run, policy=Policy(busy=busy)))
        wait_until(lambda: "busy" in told.kinds())
        leave.set()
        waiter.answer()
    figures = receiver.stats().since_start
    assert (figures.deliveries, figures.duplicate_rate, figures.lock_conflict_rate) == (2, 0.5, 0.5)


def test_a_wait_over_the_edge_of_a_stretch_makes_no_negative_rate(clock: ManualClock) -> None:
    """A duplicate that began to wait before the last minutes and ran within them is no duplicate of theirs."""
    store = StagedStore(clock=clock)
    receiver = by_hand(Receiver(store, monotonic=clock))
    crash(by_hand(Receiver(store, monotonic=clock)), EVENT)

    def pass_time() -> None:
        if store.calls.count("claim") == 3:
            clock.advance(600)

    store.before["claim"] = pass_time
    assert receiver.process(EVENT, Counted(), policy=Policy(wait="1h")).attempt == 2
    for number in range(3):
        receiver.process(Message(f"n-{number}"), Counted())
    recent = receiver.stats(minutes=5).recent
    assert recent.deliveries >= 3
    assert 0 <= recent.duplicate_rate <= 1
    assert 0 <= recent.lock_conflict_rate <= 1


def test_processing_times(stage: Stage) -> None:
    """Quantiles of how long handlers ran, right within a few percent; replays take no part."""
    for number in range(100):
        seconds = 10.0 if number >= 98 else 1.0 if number >= 90 else 0.01
        stage.process(lambda _, seconds=seconds: stage.clock.advance(seconds), Message(f"e-{number}"))
    for number in range(100):
        stage.process(must_not_run, Message(f"e-{number}"))
    figures = stage.figures()
    assert figures.processing_p50 == pytest.approx(0.01, rel=0.08)
    assert figures.processing_p95 == pytest.approx(1.0, rel=0.08)
    assert figures.processing_p99 == pytest.approx(10.0, rel=0.08)


def test_no_figures_yet() -> None:
    """A receiver that did nothing has no rates and no times, and divides nothing by nothing."""
    stats = Receiver("memory://").stats()
    for figures in (stats.since_start, stats.recent):
        assert (figures.deliveries, figures.duplicate_rate, figures.lock_conflict_rate) == (0, 0.0, 0.0)
        assert (figures.processing_p50, figures.processing_p95, figures.processing_p99) == (None, None, None)


def test_the_last_minutes(stage: Stage) -> None:
    """Recent figures forget what is older than the minutes asked for; those since the start never do."""
    stage.process()
    stage.clock.advance(600)
    stage.process()
    stats = stage.receiver.stats(minutes=5)
    assert stats.recent_minutes == 5
    assert (stats.since_start.deliveries, stats.recent.deliveries) == (2, 1)
    assert stats.recent.duplicate_rate == 1.0
    assert stage.receiver.stats(minutes=15).recent.deliveries == 2
    stage.clock.advance(2 * 3600)
    stats = stage.receiver.stats(minutes=60)
    assert (stats.since_start.deliveries, stats.recent.deliveries) == (2, 0)
    stage.clock.advance(30 * DAY)
    assert stage.figures().deliveries == 2


def test_counting_is_bounded(stage: Stage) -> None:
    """Figures of a busy process that nobody asks for don't pile up."""
    receiver = stage.another()
    for _ in range(3):
        receiver.process_batch([Message(f"{stage.clock()}-{n}") for n in range(3000)], Counted(), size=1000)
        stage.clock.advance(60)
    receiver.process_batch([Message(f"{stage.clock()}-{n}") for n in range(6000)], Counted(), size=1000)
    assert sum(len(minute.unread) for minute in receiver.events._minutes.values()) <= UNREAD_MOST
    stage.clock.advance(DAY)
    receiver.process(Message("much later"), Counted())
    assert len(receiver.events._minutes) == 1, "what is older than an hour is one sum"
    assert receiver.stats().since_start.counts["completed"] == 15_001


def test_attempts_count_when_they_begin(stage: Stage) -> None:
    """While they run, and also if their end is recorded late, or never: as many as were told of."""

    def look(_: Message) -> None:
        assert (stage.figures().counts["claimed"], stage.told.kinds().count("claimed")) == (1, 1)

    stage.process(look)
    stage.store.fail("complete", error=StoreUnavailable("gone"))
    stage.process(Counted(), Message("e-2"))
    assert (stage.figures().counts["claimed"], stage.told.kinds().count("claimed")) == (2, 2)
    stage.store.recover()
    stage.clock.advance(500)
    stage.process(Counted(), Message("e-2"))
    counts = stage.figures().counts
    assert (counts["claimed"], counts["taken_over"]) == (2, 1)


def test_no_event_gets_lost_between_threads(clock: ManualClock) -> None:
    """However many count at once, over the end of a minute and while others look: each event counts once."""
    events, threads, each = Events((), clock), 8, 5_000
    ready = threading.Barrier(threads + 1)

    def count() -> None:
        ready.wait()
        for number in range(each):
            events.note("replayed", clock())
            events.note("completed", clock(), 0.01)
            if number % 500 == 0:
                clock.advance(7)

    callers = [Caller(count) for _ in range(threads)]
    ready.wait()
    looks = [0]
    while any(caller.is_alive() for caller in callers):
        looks.append(events.stats(60).since_start.counts.get("replayed", 0))
    for caller in callers:
        caller.answer()
    counts = events.stats(5).since_start.counts
    assert looks == sorted(looks)
    assert (counts["replayed"], counts["completed"]) == (threads * each, threads * each)
    assert events.stats(5).since_start.counts == counts, "to look changes nothing"


def test_loops_and_threads_count_together() -> None:
    """One receiver's figures have what all its callers did."""
    receiver = Receiver("memory://")
    receiver.process(EVENT, Counted())
    asyncio.run(receiver.aprocess(EVENT, must_not_run))
    assert receiver.stats().since_start.counts["replayed"] == 1
