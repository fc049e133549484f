"""Batches: one round trip to claim, one to record, handlers side by side, and an outcome for each in order."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import pytest
from tests.integration.sqlite_helpers import Caller, output_of
from tests.unit.receiving import (
    Blocking,
    Colour,
    Counted,
    Crash,
    NarrowStore,
    SpoiltStore,
    StagedStore,
    Told,
    by_hand,
    crash,
    must_not_run,
    running,
)

from effectonce import InProgress, KeyReused, Message, Policy, Receiver, StoreUnavailable, current
from effectonce._blocking import run
from effectonce._helpers import Errand, Helpers
from effectonce._records import Claim, Completion, Decision, Ending
from effectonce.errors import EffectOnceError, ResultUnavailable, StoreError, UsageError
from effectonce.policy import Resolution
from effectonce.stores.base import PartlyAnswered, Store, all_answered
from effectonce.stores.memory import MemoryStore
from effectonce.testing.clocks import ManualClock, wait_until

THREE = [Message("a"), Message("b"), Message("c")]


class Ids(Counter[str]):
    """A handler that returns the message's id and counts runs by id."""

    def __call__(self, message: Message) -> str:
        self[message.id] += 1
        return message.id


@pytest.fixture
def staged(clock: ManualClock) -> StagedStore:
    """A store whose round trips are listed."""
    return StagedStore(clock=clock)


@pytest.fixture
def batching(staged: StagedStore, clock: ManualClock, told: Told) -> Receiver:
    """A receiver on that store."""
    return by_hand(Receiver(staged, monotonic=clock, hooks=[told]))


def statuses(outcomes: Any) -> list[str]:
    return [outcome.status for outcome in outcomes]


# Outcomes


def test_outcomes_are_in_order(receiver: Receiver, colour: Colour) -> None:
    """Each message has its own outcome, at its own place."""
    messages = [Message(f"e-{number}") for number in range(20)]
    outcomes = colour.batch(receiver, messages, Ids())
    assert [outcome.value for outcome in outcomes] == [message.id for message in messages]
    assert set(statuses(outcomes)) == {"executed"}


def test_known_messages_are_replayed(receiver: Receiver, colour: Colour) -> None:
    """Duplicates of what the store knows are answered from it; the others run."""
    colour.process(receiver, THREE[1], Counted("before"))
    ids = Ids()
    outcomes = colour.batch(receiver, THREE, ids)
    assert statuses(outcomes) == ["executed", "replayed", "executed"]
    assert [outcome.value for outcome in outcomes] == ["a", "before", "c"]
    assert ids == {"a": 1, "c": 1}


def test_duplicates_inside_a_batch_run_once(receiver: Receiver, colour: Colour) -> None:
    """A message that comes twice in one batch runs once; the repeat has the first one's result."""
    ids = Ids()
    outcomes = colour.batch(receiver, [THREE[0], THREE[1], THREE[0], THREE[0]], ids)
    assert statuses(outcomes) == ["executed", "executed", "replayed", "replayed"]
    assert [outcome.value for outcome in outcomes] == ["a", "b", "a", "a"]
    assert [outcome.replayed for outcome in outcomes] == [False, False, True, True]
    assert ids == {"a": 1, "b": 1}


def test_nothing_to_do(batching: Receiver, colour: Colour, staged: StagedStore) -> None:
    """An empty batch has no outcomes and asks nobody."""
    assert colour.batch(batching, [], must_not_run) == []
    assert staged.calls == []


def test_any_iterable_is_a_batch(receiver: Receiver, colour: Colour) -> None:
    """Messages may come from a generator."""
    assert statuses(colour.batch(receiver, (message for message in THREE), Ids())) == ["executed"] * 3


# Round trips


def test_two_round_trips(batching: Receiver, colour: Colour, staged: StagedStore) -> None:
    """However many messages and duplicates, they are claimed together and recorded together."""
    colour.process(batching, THREE[1], Counted())
    staged.calls.clear()
    colour.batch(batching, THREE * 10, Ids())
    assert staged.calls == ["claim_many", "complete_many"]


def test_a_batch_of_duplicates_is_one_round_trip(
    batching: Receiver, colour: Colour, staged: StagedStore
) -> None:
    """When nothing has to run, nothing has to be recorded."""
    colour.batch(batching, THREE, Ids())
    staged.calls.clear()
    assert statuses(colour.batch(batching, THREE, must_not_run)) == ["replayed"] * 3
    assert staged.calls == ["claim_many"]


def test_a_large_batch_goes_in_pieces(batching: Receiver, colour: Colour, staged: StagedStore) -> None:
    """``size`` messages to a round trip, a hundred by default; a duplicate in a later piece is a replay."""
    messages = [Message(f"e-{number}") for number in range(9)] + [Message("e-0")]
    assert statuses(colour.batch(batching, messages, Ids(), size=4))[-1] == "replayed"
    assert staged.calls == ["claim_many", "complete_many"] * 3
    staged.calls.clear()
    colour.batch(batching, [Message(f"f-{number}") for number in range(101)], Ids())
    assert staged.calls.count("claim_many") == 2


@pytest.mark.parametrize("choices", [{"size": 0}, {"size": 1001}, {"concurrency": 0}, {"size": -1}], ids=repr)
def test_a_batch_has_limits(
    batching: Receiver, colour: Colour, staged: StagedStore, choices: dict[str, int]
) -> None:
    """At most a thousand to a round trip; nonsense is refused before anything is claimed."""
    with pytest.raises(UsageError):
        colour.batch(batching, THREE, must_not_run, **choices)
    assert staged.calls == []


def test_a_thousand_at_once(receiver: Receiver, colour: Colour) -> None:
    """The largest piece works on both stores."""
    messages = [Message(f"e-{number}") for number in range(1000)]
    assert set(statuses(colour.batch(receiver, messages, Ids(), size=1000))) == {"executed"}
    assert set(statuses(colour.batch(receiver, messages, must_not_run, size=1000))) == {"replayed"}


# One failure spoils no other


class Mixed:
    """A handler with a result, or an error, for each id."""

    def __init__(self, **results: Any) -> None:
        self.results = results

    def __call__(self, message: Message) -> Any:
        return Counted(self.results.get(message.id, message.id))()


LEFT_BEHIND = """
import asyncio, gc
from effectonce import Message, Receiver
from effectonce.testing.clocks import wait_until

receiver = Receiver("memory://")

async def handler(message):
    return message.id

def messages(name):
    return [Message(f"{name}{number}") for number in range(20)]

async def on_a_loop(name):
    gc.collect()
    await receiver.aprocess_batch(messages(name), handler)
    return gc.collect()

def blocking(name):
    gc.collect()
    receiver.process_batch(messages(name), lambda message: message.id)
    helpers = receiver.blocking._crew(16)
    wait_until(lambda: len(helpers._idle) == helpers._hired)  # they have let go of what they were asked
    return gc.collect()

async def main():
    return [await on_a_loop(name) for name in "abc"]

gc.disable()
print(asyncio.run(main())[1:], [blocking(name) for name in "def"][1:])
"""


def test_a_batch_leaves_nothing_to_collect() -> None:
    """No object waits for the garbage collector, in a process of its own: here other tests' threads leave some."""
    assert output_of(LEFT_BEHIND) == "[0, 0] [0, 0]\n"


def test_an_error_is_one_messages_own(receiver: Receiver, colour: Colour) -> None:
    """Its outcome says failed with the exception, the others are done, and a retry runs only that one."""
    error = ValueError("no")
    outcomes = colour.batch(receiver, THREE, Mixed(b=error))
    assert statuses(outcomes) == ["executed", "failed", "executed"]
    assert outcomes[1].error is error
    assert statuses(colour.batch(receiver, THREE, Ids())) == ["replayed", "executed", "replayed"]


def test_a_remembered_error_stays_in_its_place(receiver: Receiver, colour: Colour) -> None:
    """The policy says what an exception means, for each message by itself."""
    policy = Policy(remember=LookupError, in_doubt=TimeoutError)
    colour.batch(receiver, THREE, Mixed(a=KeyError("k"), b=TimeoutError()), policy=policy)
    outcomes = colour.batch(receiver, THREE, must_not_run, policy=policy)
    assert statuses(outcomes) == ["failed", "in_doubt", "replayed"]
    assert repr(outcomes[0].error) == "KeyError('k')"


def test_a_result_without_a_stored_form_spoils_nothing(receiver: Receiver, colour: Colour) -> None:
    """It is given once, and repeats say that it is not stored."""
    thing = object()
    outcomes = colour.batch(receiver, THREE, Mixed(b=thing))
    assert [outcome.value for outcome in outcomes] == ["a", thing, "c"]
    again = colour.batch(receiver, THREE, must_not_run)
    assert [type(outcome.error) for outcome in again] == [type(None), ResultUnavailable, type(None)]


def test_an_answer_that_the_store_cant_take_spoils_no_other(clock: ManualClock, colour: Colour) -> None:
    """It happened all the same: its caller has the result, a repeat hears that it was not stored."""
    receiver = by_hand(Receiver(NarrowStore(clock=clock), monotonic=clock))
    outcomes = colour.batch(receiver, THREE, lambda message: message.id * (5000 if message.id == "b" else 1))
    assert [outcome.value for outcome in outcomes] == ["a", "b" * 5000, "c"]
    again = colour.batch(receiver, THREE, must_not_run)
    assert [outcome.value for outcome in again] == ["a", None, "c"]
    assert isinstance(again[1].error, ResultUnavailable)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_key_that_is_not_ours_spoils_no_other(clock: ManualClock, colour: Colour, when: str) -> None:
    """Also when the store refuses all for it: the others run, and no claim is left behind to become a doubt."""
    store = SpoiltStore(clock=clock)
    receiver = by_hand(Receiver(store, monotonic=clock, policy=Policy(on_crash="in_doubt")))
    spoilt = frozenset({receiver.key_of(THREE[1])})
    store.spoilt = spoilt if when == "before" else store.spoilt

    def handler(message: Message) -> str:
        store.spoilt = spoilt
        return message.id

    outcomes = colour.batch(receiver, THREE, handler, concurrency=1)
    assert statuses(outcomes) == ["executed", "store_error", "executed"]
    clock.advance(500)
    assert colour.process(receiver, THREE[0], must_not_run).value == "a"


def test_duplicates_share_a_failure(receiver: Receiver, colour: Colour) -> None:
    """A repeat inside the batch does not try again by itself what its first has just failed at."""
    failing = Counted(ValueError("no"))
    outcomes = colour.batch(receiver, [THREE[0], THREE[0]], failing)
    assert statuses(outcomes) == ["failed", "failed"]
    assert failing.runs == 1


def test_a_reused_key_inside_a_batch(receiver: Receiver, colour: Colour) -> None:
    """The first of two payloads under one id runs; the other is refused."""
    messages = [Message("a", 1), Message("a", 2), Message("a", 1)]
    outcomes = colour.batch(receiver, messages, Ids())
    assert statuses(outcomes) == ["executed", "mismatch", "replayed"]
    assert isinstance(outcomes[1].error, KeyReused)


def test_a_reused_key_does_not_hide_the_right_one(receiver: Receiver, colour: Colour) -> None:
    """A message the store knows is replayed, also behind one that reuses its key."""
    colour.process(receiver, Message("a", 1), Counted("known"))
    outcomes = colour.batch(receiver, [Message("a", 2), Message("a", 1)], must_not_run)
    assert statuses(outcomes) == ["mismatch", "replayed"]


def test_what_repeats_a_refusal_is_refused(staged: StagedStore, batching: Receiver, colour: Colour) -> None:
    """A repeat of a message that was not done is not a replay of anything."""
    staged.fail("claim_many", error=StoreUnavailable("gone"))
    for outcome in colour.batch(batching, [THREE[0], THREE[0]], must_not_run):
        assert (outcome.status, outcome.replayed) == ("store_error", False)


@pytest.mark.parametrize("callback", ["prober", "dead_letter"])
def test_a_callback_that_raises_spoils_nothing(
    receiver: Receiver, clock: ManualClock, colour: Colour, callback: str
) -> None:
    """A policy's own functions may fail for one message; the others are run and recorded all the same."""

    def failing(*_: Any) -> Any:
        raise RuntimeError("not today")

    choices: dict[str, dict[str, Any]] = {
        "prober": {"on_crash": "in_doubt", "prober": failing},
        "dead_letter": {"max_attempts": 1, "dead_letter": failing},
    }
    policy = Policy(**choices[callback])
    crash(receiver, THREE[1], policy=policy)
    clock.advance(500)
    outcomes = colour.batch(receiver, THREE, Ids(), policy=policy)
    assert [outcomes[0].status, outcomes[2].status] == ["executed", "executed"]
    assert outcomes[1].status in ("in_doubt", "failed")
    assert not receiver._keeper.live


def test_an_unusable_message_refuses_the_batch(
    batching: Receiver, colour: Colour, staged: StagedStore
) -> None:
    """What can't be named is a mistake of the caller's: nothing is claimed."""
    with pytest.raises(UsageError):
        colour.batch(batching, [THREE[0], "not a message"], must_not_run)
    assert staged.calls == []


def test_what_is_no_policy_refuses_the_batch(batching: Receiver, colour: Colour, staged: StagedStore) -> None:
    """So is a mistake in how all of them are to be treated."""
    with pytest.raises(UsageError, match="is not a Policy"):
        colour.batch(batching, THREE, must_not_run, policy="24h")
    assert staged.calls == []


def test_each_message_is_named_by_its_own_source(receiver: Receiver, colour: Colour) -> None:
    """In whatever order sources come: the same id from two of them is two effects, and one that can't be is refused."""
    sources: list[Any] = ["orders", "refunds", "orders", "", "refunds", 7, "orders"]
    messages = [Message(f"e-{number}", source=source) for number, source in enumerate(sources)]
    keys: dict[str, str] = {}

    def handler(message: Message) -> None:
        keys[message.id] = current().key

    outcomes = colour.batch(receiver, messages, handler)
    assert [outcome.status for outcome in outcomes] == ["executed"] * 5 + ["failed", "executed"]
    assert keys == {each.id: receiver.key_of(each) for each in messages if each.source != 7}


def test_a_payload_without_a_form_spoils_no_other(receiver: Receiver, colour: Colour) -> None:
    """A message that can't be fingerprinted has its own failed outcome; the others run."""
    odd = Message("odd", object())
    outcomes = colour.batch(receiver, [Message("a"), odd, Message("b")], Counted("done"))
    assert [outcome.status for outcome in outcomes] == ["executed", "failed", "executed"]
    assert isinstance(outcomes[1].error, UsageError)


# Side by side


def test_handlers_run_side_by_side(receiver: Receiver, colour: Colour) -> None:
    """All of a batch are in their handlers at once, up to the limit; each sees its own attempt."""
    seen = []
    if isinstance(colour, Blocking):
        together = threading.Barrier(3)

        def handler(message: Message) -> None:
            together.wait(20)
            seen.append((message.id, current().key))

        receiver.process_batch(THREE, handler)
    else:

        async def main() -> None:
            inside = 0
            all_inside = asyncio.Event()

            async def handler(message: Message) -> None:
                nonlocal inside
                inside += 1
                if inside == 3:
                    all_inside.set()
                await all_inside.wait()
                seen.append((message.id, current().key))

            await receiver.aprocess_batch(THREE, handler)

        asyncio.run(main())
    assert sorted(seen) == [(message.id, receiver.key_of(message)) for message in THREE]


def test_concurrency_has_a_limit(receiver: Receiver, colour: Colour) -> None:
    """No more than ``concurrency`` handlers are running at any time."""
    running_now, most = 0, 0
    lock = threading.Lock()

    def enter() -> None:
        nonlocal running_now, most
        with lock:
            running_now += 1
            most = max(most, running_now)

    def leave() -> None:
        nonlocal running_now
        with lock:
            running_now -= 1

    messages = [Message(f"e-{number}") for number in range(12)]
    if isinstance(colour, Blocking):
        pairs = threading.Barrier(2)

        def handler(_: Message) -> None:
            enter()
            pairs.wait(20)
            leave()

        receiver.process_batch(messages, handler, concurrency=2)
    else:

        async def async_handler(_: Message) -> None:
            enter()
            for _ in range(3):
                await asyncio.sleep(0)
            leave()

        asyncio.run(receiver.aprocess_batch(messages, async_handler, concurrency=2))
    assert most == 2


def test_without_threads_a_batch_is_processed_all_the_same(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is lost where the system has no more threads, and they help again when it has."""

    def refused(_: object) -> NoReturn:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        outcomes = receiver.process_batch(THREE, Ids(), concurrency=2)
    assert [(outcome.status, outcome.value) for outcome in outcomes] == [("executed", id) for id in "abc"]
    together = threading.Barrier(3)
    more = [Message(id) for id in "def"]
    assert statuses(receiver.process_batch(more, lambda _: together.wait(20))) == ["executed"] * 3


def test_no_handler_that_runs_is_left_behind(receiver: Receiver) -> None:
    """Who is done first waits for the threads that help."""
    both, mine_is_over = threading.Barrier(2), threading.Event()

    def handler(message: Message) -> str:
        if message.id in ("a", "b"):
            both.wait(20)
            if threading.current_thread() is threading.main_thread():
                mine_is_over.set()
            else:
                assert mine_is_over.wait(20)
        return message.id

    outcomes = receiver.process_batch(THREE, handler, concurrency=2)
    assert [(outcome.status, outcome.value) for outcome in outcomes] == [("executed", id) for id in "abc"]


def test_helpers_are_begun_when_nobody_is_free() -> None:
    """No more than there may be, and none is left when they are let go of."""
    helpers, started, leave = Helpers(2), threading.Semaphore(0), threading.Event()
    ran: list[str] = []

    def errand() -> None:
        ran.append(threading.current_thread().name)
        started.release()
        assert leave.wait(20)

    for _ in range(3):
        helpers.ask(errand)
    assert started.acquire(timeout=20)
    assert started.acquire(timeout=20)
    assert len(set(ran)) == 2
    leave.set()
    assert started.acquire(timeout=20)
    assert len(set(ran)) == 2
    del helpers
    wait_until(lambda: not set(ran) & {thread.name for thread in threading.enumerate()})


def test_a_busy_key_is_waited_for(store: Store, colour: Colour, told: Told) -> None:
    """A message that another process is running gets its answer when there is one; the others don't wait."""
    receiver, other = Receiver(store, hooks=[told]), Receiver(store)
    ids = Ids()
    with running(other, THREE[1], "the other's") as leave:
        batch = Caller(lambda: colour.batch(receiver, THREE, ids))
        wait_until(lambda: "busy" in told.kinds() and ids.total() == 2)
        leave.set()
        outcomes = batch.answer()
    assert [outcome.value for outcome in outcomes] == ["a", "the other's", "c"]


def test_what_is_done_is_recorded_before_another_is_waited_for(store: Store, colour: Colour) -> None:
    """Two batches that hold a key of each other's both end, and what a batch has done is not lost while it waits."""
    receiver, other = Receiver(store), Receiver(store)
    with running(other, THREE[1], "the other's") as leave:
        batch = Caller(lambda: colour.batch(receiver, THREE, Ids()))
        wait_until(lambda: in_store(other, "a") == in_store(other, "c") == "COMPLETED")
        assert batch.is_alive()
        leave.set()
        assert statuses(batch.answer()) == ["executed", "replayed", "executed"]


def test_a_thread_that_helps_two_batches_may_wait_for_what_it_has_done(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads are shared: one that has run a key for a batch that goes on waits for it in another, as any would."""
    helpers = Helpers(1)
    monkeypatch.setattr(receiver.blocking, "_crew", lambda _: helpers)
    done, entered, leave = list[Message](), threading.Event(), threading.Event()

    def handler(message: Message) -> None:
        if threading.current_thread().name.startswith("effectonce_"):
            assert entered.wait(20)
            done.append(message)
        else:
            entered.set()
            assert leave.wait(20)

    first = Caller(lambda: receiver.process_batch(THREE, handler, concurrency=2))
    wait_until(lambda: len(done) == 2)  # by the one helper, and their batch is still at the third
    second = Caller(lambda: receiver.process_batch(done, must_not_run, concurrency=2))
    wait_until(lambda: receiver.stats().since_start.counts.get("waited") == 2)
    leave.set()
    assert statuses(first.answer()) == ["executed"] * 3
    assert statuses(second.answer()) == ["replayed"] * 2


def test_a_busy_key_may_be_rejected(store: Store, colour: Colour) -> None:
    """busy="reject" is an outcome there, with the error that says when to ask again."""
    receiver = Receiver(store)
    with running(receiver, THREE[1]):
        outcomes = colour.batch(receiver, THREE, Ids(), policy=Policy(busy="reject"))
    assert statuses(outcomes) == ["executed", "in_progress", "executed"]
    assert isinstance(outcomes[1].error, InProgress)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "3", True, None])
@pytest.mark.parametrize("word", ["size", "concurrency"])
def test_what_is_no_number_to_count_by_is_told(
    receiver: Receiver, colour: Colour, word: str, wrong: Any
) -> None:
    """Before anything is claimed, by the word that is wrong."""
    with pytest.raises(UsageError, match=f"{word}={wrong!r} must be a whole number, 1 "):
        colour.batch(receiver, [Message("e-1")], must_not_run, **{word: wrong})


def test_a_prober_is_asked_in_a_batch(receiver: Receiver, clock: ManualClock, colour: Colour) -> None:
    """A message in doubt is settled where the prober knows, beside the others."""
    policy = Policy(on_crash="in_doubt", prober=lambda _: Resolution.completed("found"))
    crash(receiver, THREE[1], policy=policy)
    clock.advance(500)
    outcomes = colour.batch(receiver, THREE, Ids(), policy=policy)
    assert [outcome.value for outcome in outcomes] == ["a", "found", "c"]


# Trouble with the store


def test_without_a_store_nothing_runs(staged: StagedStore, batching: Receiver, colour: Colour) -> None:
    """Every outcome is a store error, and no handler ran."""
    staged.fail("claim_many", error=StoreUnavailable("gone"))
    outcomes = colour.batch(batching, THREE, must_not_run)
    assert statuses(outcomes) == ["store_error"] * 3
    assert all(isinstance(outcome.error, StoreUnavailable) for outcome in outcomes)


@pytest.mark.parametrize("verb", ["claim_many", "complete_many"])
def test_a_lost_reply_is_asked_for_again(
    staged: StagedStore, batching: Receiver, colour: Colour, verb: str
) -> None:
    """When only the answer got lost, every message is executed once and says so."""

    def lose_one() -> None:
        staged.after.clear()
        raise StoreUnavailable("the line broke")

    staged.after[verb] = lose_one
    ids = Ids()
    outcomes = colour.batch(batching, THREE, ids)
    assert statuses(outcomes) == ["executed"] * 3
    assert [outcome.attempt for outcome in outcomes] == [1, 1, 1]
    assert ids == {"a": 1, "b": 1, "c": 1}


@dataclass(frozen=True)
class Declined(Exception):
    """An error that takes no notes."""

    why: str


def test_a_remembered_error_that_takes_no_notes_is_the_same_error(batching: Receiver, colour: Colour) -> None:
    """Alone and in a batch, where it costs no other its turn."""

    def decline(message: Message) -> str:
        if message.id == "b":
            raise Declined("empty")
        return message.id

    policy = Policy(remember=(Declined,))
    colour.batch(batching, [THREE[1]], decline, policy=policy)
    outcomes = colour.batch(batching, THREE, decline, policy=policy)
    assert statuses(outcomes) == ["executed", "failed", "executed"]
    assert outcomes[1].error == Declined("empty")
    with pytest.raises(Declined):
        colour.process(batching, THREE[1], must_not_run, policy=policy)


def test_what_can_not_be_told_of_one_costs_no_other_its_turn(
    batching: Receiver, colour: Colour, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is that message's failure."""
    colour.batch(batching, [THREE[1]], Ids())
    monkeypatch.setattr(batching.flow, "replay", Counted(LookupError("odd")))
    outcomes = colour.batch(batching, THREE, Ids())
    assert statuses(outcomes) == ["executed", "failed", "executed"]
    assert isinstance(outcomes[1].error, LookupError)


def test_a_late_copy_does_not_keep_a_fresh_one_from_running(
    batching: Receiver, clock: ManualClock, colour: Colour
) -> None:
    """Whichever stands first in the batch."""
    late, fresh = Message("a", None, 1.0), Message("a", None, time.time())
    ids = Ids()
    assert statuses(colour.batch(batching, [late, fresh], ids)) == ["replayed", "executed"]
    assert ids == {"a": 1}


class PartlyStore(MemoryStore):
    """A store that does not answer for some keys, so many times."""

    silent: frozenset[str] = frozenset()
    times = 1

    async def claim_many(self, claims: Sequence[Claim]) -> list[Decision]:
        silent = [claim.key in self.silent and self.times > 0 for claim in claims]
        decisions = [None if no else await self.claim(c) for c, no in zip(claims, silent, strict=True)]
        if any(silent):
            self.times -= 1
            raise PartlyAnswered(StoreUnavailable("away"), decisions)
        return [decision for decision in decisions if decision is not None]


@pytest.mark.parametrize(("times", "second"), [(1, "executed"), (2, "store_error")])
def test_what_was_granted_is_run_though_others_were_not_answered(
    clock: ManualClock, colour: Colour, times: int, second: str
) -> None:
    """Nobody else would run it before its lease ends; who was not answered is asked for a second time."""
    store = PartlyStore(clock=clock)
    receiver = by_hand(Receiver(store, monotonic=clock, policy=Policy(on_crash="in_doubt")))
    store.silent, store.times = frozenset([receiver.key_of(THREE[1])]), times
    ids = Ids()
    assert statuses(colour.batch(receiver, THREE, ids)) == ["executed", second, "executed"]
    clock.advance(500)
    colour.batch(receiver, THREE, ids)
    assert ids == {"a": 1, "b": 1, "c": 1}


def test_a_server_that_is_away_costs_only_its_own_results(clock: ManualClock, colour: Colour) -> None:
    """What the others have recorded is given; what was not is a store error, and is not run again."""
    store = PartlyRecordingStore(clock=clock)
    receiver = by_hand(Receiver(store, monotonic=clock))
    store.silent = frozenset([receiver.key_of(THREE[1])])
    ids = Ids()
    assert statuses(colour.batch(receiver, THREE, ids)) == ["executed", "store_error", "executed"]
    store.silent = frozenset()
    run(receiver._keeper.tick(store, clock() + 2))
    assert statuses(colour.batch(receiver, THREE, ids)) == ["replayed"] * 3
    assert ids == {"a": 1, "b": 1, "c": 1}


class PartlyRecordingStore(MemoryStore):
    """A store one of whose servers, which has some keys, takes no endings."""

    silent: frozenset[str] = frozenset()

    async def complete(self, completion: Completion) -> Ending:
        if completion.key in self.silent:
            raise StoreUnavailable("away")
        return await super().complete(completion)

    async def complete_many(self, completions: Sequence[Completion]) -> list[Ending]:
        answers: list[Ending | StoreError] = []
        for completion in completions:
            try:
                answers.append(await self.complete(completion))
            except StoreUnavailable as error:
                answers.append(error)
        return all_answered(answers)


def test_results_that_could_not_be_recorded_are_not_given(
    staged: StagedStore, batching: Receiver, colour: Colour
) -> None:
    """They are store errors, their claims stay, and a retry runs nothing again."""
    staged.fail("complete_many", "complete", error=StoreUnavailable("gone"))
    assert statuses(colour.batch(batching, THREE, Ids())) == ["store_error"] * 3
    again = colour.batch(batching, THREE, must_not_run, policy=Policy(busy="reject"))
    assert statuses(again) == ["in_progress"] * 3


def test_a_lost_lease_is_one_messages_own(clock: ManualClock, staged: StagedStore, colour: Colour) -> None:
    """The attempt that was overtaken gets the other's result; the others are recorded."""
    receiver, other = by_hand(Receiver(staged, monotonic=clock)), by_hand(Receiver(staged, monotonic=clock))

    def handler(message: Message) -> str:
        if message.id == "b":
            clock.advance(500)
            other.process(message, Counted("the other's"))
        return message.id

    outcomes = colour.batch(receiver, THREE, handler, concurrency=1)
    assert [outcome.value for outcome in outcomes] == ["a", "the other's", "c"]
    assert outcomes[1].replayed


def test_what_its_lease_did_not_wait_for_is_asked_for_again(
    clock: ManualClock, staged: StagedStore, colour: Colour
) -> None:
    """A handler whose turn comes after its lease begins only if nobody else has begun it meanwhile."""
    at_most_once = Policy(on_crash="in_doubt", prober=lambda _: Resolution.not_applied())
    receiver = by_hand(Receiver(staged, monotonic=clock, policy=at_most_once))
    other = by_hand(Receiver(staged, monotonic=clock, policy=at_most_once))
    ids, others = Ids(), Ids()

    def handler(message: Message) -> str:
        if message.id == "a":
            clock.advance(500)
            other.process(THREE[1], others)
        return ids(message)

    outcomes = colour.batch(receiver, THREE, handler, concurrency=1)
    assert statuses(outcomes) == ["executed", "replayed", "executed"]
    assert ids == {"a": 1, "c": 1}
    assert others == {"b": 1}


def test_claims_that_are_granted_after_their_lease_are_asked_for_again(
    clock: ManualClock, staged: StagedStore, colour: Colour
) -> None:
    """A reply that took longer than the lease begins nothing that another has begun since."""
    receiver, other = by_hand(Receiver(staged, monotonic=clock)), by_hand(Receiver(staged, monotonic=clock))
    ids, others = Ids(), Ids()

    def too_late() -> None:
        clock.advance(500)
        other.process(THREE[1], others)

    staged.after["claim_many"] = too_late
    assert statuses(colour.batch(receiver, THREE, ids)) == ["executed", "replayed", "executed"]
    assert ids == {"a": 1, "c": 1}
    assert others == {"b": 1}


# Interrupted


def in_store(receiver: Receiver, name: str) -> str:
    record = receiver.get(receiver.key_of(Message(name)))
    return "unknown" if record is None else record.state.name


def test_a_cancelled_batch_records_what_finished(staged: StagedStore, batching: Receiver) -> None:
    """What finished is recorded, what was in its handler keeps its claim, what never began is given back."""

    async def main() -> None:
        inside = asyncio.Event()

        async def handler(message: Message) -> str:
            if message.id == "b":
                inside.set()
                await asyncio.Event().wait()
            return message.id

        batch = asyncio.ensure_future(batching.aprocess_batch(THREE, handler, concurrency=1))
        await inside.wait()
        batch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await batch

    asyncio.run(main())
    assert [in_store(batching, name) for name in "abc"] == ["COMPLETED", "PENDING", "ABSENT"]
    assert not batching._keeper.live


def test_a_batch_cancelled_while_claiming_leaves_no_claim(staged: StagedStore, batching: Receiver) -> None:
    """The store had granted the claims; nothing ran, so they are given back."""

    async def main() -> None:
        granted, go_on = asyncio.Event(), asyncio.Event()

        async def hold() -> None:
            granted.set()
            await go_on.wait()

        staged.after["claim_many"] = hold
        batch = asyncio.ensure_future(batching.aprocess_batch(THREE, must_not_run))
        await granted.wait()
        batch.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await batch

    asyncio.run(main())
    assert {in_store(batching, name) for name in "abc"} == {"ABSENT"}


def test_a_batch_cancelled_while_recording_is_recorded(staged: StagedStore, batching: Receiver) -> None:
    """All results are written before the cancellation is heard."""

    async def main() -> None:
        writing, go_on = asyncio.Event(), asyncio.Event()

        async def hold() -> None:
            writing.set()
            await go_on.wait()

        staged.before["complete_many"] = hold
        batch = asyncio.ensure_future(batching.aprocess_batch(THREE, Ids()))
        await writing.wait()
        batch.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await batch

    asyncio.run(main())
    assert {in_store(batching, name) for name in "abc"} == {"COMPLETED"}


@pytest.mark.parametrize("is_known", [False, True])
def test_a_handler_that_awaits_what_was_cancelled_is_one_messages_own(
    batching: Receiver, clock: ManualClock, is_known: bool
) -> None:
    """Nobody cancelled the batch: the others have their outcomes, and that claim stays, as after any cancellation."""

    async def handler(message: Message) -> str:
        if message.id == "b":
            given_up = asyncio.ensure_future(asyncio.sleep(0))
            given_up.cancel()
            await given_up
        return message.id

    probing = Policy(on_crash="in_doubt", prober=lambda _: Resolution.not_applied())
    if is_known:  # then it goes its own way
        crash(batching, Message("b"), policy=probing)
        clock.advance(500)
    outcomes = asyncio.run(batching.aprocess_batch(THREE, handler, policy=probing))
    assert statuses(outcomes) == ["executed", "failed", "executed"]
    assert isinstance(outcomes[1].error, asyncio.CancelledError)
    assert [in_store(batching, name) for name in "abc"] == ["COMPLETED", "PENDING", "COMPLETED"]
    assert not batching._keeper.live


def test_an_interrupt_in_a_handler_spoils_nothing(receiver: Receiver, colour: Colour) -> None:
    """It is raised when what ended before is recorded; its own claim is kept, since it is not the handler's word."""
    with pytest.raises(Crash):
        colour.batch(receiver, THREE[:2], Mixed(b=Crash()), concurrency=1)
    assert [in_store(receiver, name) for name in "ab"] == ["COMPLETED", "PENDING"]
    assert not receiver._keeper.live


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_after_an_interrupt_the_rest_of_a_batch_never_begins(
    receiver: Receiver, colour: Colour, interrupt: type[BaseException]
) -> None:
    """Who presses Ctrl-C need not wait for all the others; their claims are given back."""
    handler = Mixed(b=interrupt(), c=AssertionError("ran"))
    with pytest.raises(interrupt):
        colour.batch(receiver, THREE, handler, concurrency=1)
    assert [in_store(receiver, name) for name in "abc"] == ["COMPLETED", "PENDING", "ABSENT"]
    record = receiver.get(receiver.key_of(Message("c")))
    assert record is not None and record.attempts == 0
    assert not receiver._keeper.live


def test_an_interrupt_while_helpers_are_called_for(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a helper has begun is waited for and recorded, and nothing begins after the batch is over."""
    receiver, runs, begun = Receiver(store), Counter[str](), threading.Event()
    ask = Helpers.ask

    def interrupted(helpers: Helpers, errand: Errand) -> None:
        ask(helpers, errand)
        if threading.current_thread() is threading.main_thread():
            begun.wait(20)
            raise KeyboardInterrupt

    def handle(message: Message) -> str:
        begun.set()
        runs[message.id] += 1
        return message.id

    monkeypatch.setattr(Helpers, "ask", interrupted)
    with pytest.raises(KeyboardInterrupt):
        receiver.process_batch(THREE, handle)
    assert {in_store(receiver, name) for name in runs} == {"COMPLETED"}
    monkeypatch.setattr(Helpers, "ask", ask)
    assert {outcome.value for outcome in receiver.process_batch(THREE, handle)} == {"a", "b", "c"}
    assert set(runs.values()) == {1}


def test_an_interrupt_before_any_handler_has_begun(
    store: Store, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of the batch is given back: a retry need not wait for leases that nobody uses."""
    receiver = by_hand(Receiver(store, monotonic=clock))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(receiver.blocking, "gather", interrupted)
        receiver.process_batch(THREE, must_not_run)
    assert [in_store(receiver, name) for name in "abc"] == ["PENDING"] * 3
    assert given_back(receiver, clock) == "abc"


def test_a_handler_that_has_begun_keeps_its_claim(
    store: Store, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt while all of them are recorded gives nothing back, or they would run again."""
    receiver = by_hand(Receiver(store, monotonic=clock))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(receiver.blocking.store, "complete_many", interrupted)
        receiver.process_batch(THREE, lambda message: message.id)
    assert given_back(receiver, clock) == ""


async def interrupted(*_: Any) -> NoReturn:
    raise KeyboardInterrupt


def given_back(receiver: Receiver, clock: ManualClock) -> str:
    """Which of the three are free after a moment."""
    clock.advance(1)
    run(receiver._keeper.tick(receiver.store, clock()))
    return "".join(name for name in "abc" if in_store(receiver, name) == "ABSENT")


def test_after_an_interrupt_nobody_is_waited_for(store: Store, colour: Colour) -> None:
    """What another is at would be asked for when the batch is recorded; an interrupted one is at its end by then."""
    receiver, policy = Receiver(store), Policy(on_crash="in_doubt", prober=lambda _: Resolution.not_applied())
    handler = Mixed(a=KeyboardInterrupt(), b=AssertionError("ran"))
    for message in THREE[:2]:
        receiver.process_batch(
            [message], Mixed(**{message.id: TimeoutError()}), policy=policy.but(in_doubt=(TimeoutError,))
        )
    with pytest.raises(KeyboardInterrupt):
        colour.batch(receiver, THREE[:2], handler, concurrency=1, policy=policy)
    assert [in_store(receiver, name) for name in "ab"] == ["PENDING", "IN_DOUBT"]


# Colours


def test_a_coroutine_function_needs_the_awaitable_form(receiver: Receiver) -> None:
    """It is refused before anything is claimed, and the error names the call to use."""

    async def handler(_: Message) -> None: ...

    with pytest.raises(EffectOnceError, match="aprocess_batch"):
        receiver.process_batch(THREE, handler)
    assert in_store(receiver, "a") == "unknown"


def test_events_are_told_for_each(batching: Receiver, colour: Colour, told: Told) -> None:
    """A batch tells what single calls tell."""
    colour.batch(batching, [*THREE, THREE[0]], Mixed(b=ValueError()))
    assert Counter(told.kinds()) == {"claimed": 3, "completed": 2, "released": 1, "replayed": 1}
