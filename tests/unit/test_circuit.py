"""When the store is away: refused at once, answered from what was seen, or run unprotected, as the policy says."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from tests.integration.sqlite_helpers import Caller
from tests.unit.receiving import (
    ClosedMeanwhile,
    Colour,
    Counted,
    Crash,
    StagedStore,
    Told,
    by_hand,
    must_not_run,
    running,
)

from effectonce import KeyReused, Message, Policy, Receiver, StoreUnavailable, current
from effectonce._blocking import run
from effectonce._protocol import decide_claim
from effectonce._records import Claim, Completion, Decision, Ending, State, Verdict
from effectonce.errors import StoreClosed, StoreMismatch, UsageError
from effectonce.keys import Key
from effectonce.stores import Breaker, Features, open_store
from effectonce.stores._circuit import Circuit
from effectonce.stores._crowds import CrowdStore
from effectonce.stores._guarded import GuardedStore, guarded
from effectonce.stores._waiters import Waiter
from effectonce.stores.memory import MemoryStore
from effectonce.testing.clocks import ManualClock, wait_until

EVENT = Message("e-1", {"cents": 5})
GONE = StoreUnavailable("gone")


class AwayStore(StagedStore):
    """A store that may be away, unlike one in memory."""

    features = Features()


class Stage:
    """A receiver on a store that goes away and comes back, and the changes that were told."""

    def __init__(self, colour: Colour, **choices: Any) -> None:
        self.clock, self.told = ManualClock(), Told()
        self.colour, self.store = colour, AwayStore(clock=self.clock)
        self.receiver = Receiver(
            self.store, hooks=[self.told], monotonic=self.clock, clock=self.clock, **choices
        )

    def process(self, handler: Any, message: Message = EVENT, **choices: Any) -> Any:
        return self.colour.process(self.receiver, message, handler, **choices)

    def go_away(self) -> None:
        self.store.fail("claim", "claim_many", "complete", "get", error=GONE)

    def changes(self) -> list[str]:
        return [event.detail.partition(":")[0] for event in self.told if event.kind == "circuit"]


@pytest.fixture
def stage(colour: Colour) -> Stage:
    return Stage(colour)


# The circuit


def fail(circuit: Circuit, times: int = 1) -> None:
    for _ in range(times):
        circuit.failed(GONE, circuit.monotonic())


def test_failures_in_a_row_open_it() -> None:
    """So many and no fewer; one answer between them starts the count again."""
    circuit = Circuit(Breaker(errors=3), ManualClock())
    fail(circuit, 2)
    circuit.answered(0.01)
    fail(circuit, 2)
    assert circuit.state == "closed"
    fail(circuit)
    assert circuit.state == "open"


def test_an_open_circuit_names_nobody_elses_key(stage: Stage) -> None:
    """Why the store is away is told to all; of whom it was learned is not."""
    refused = StoreUnavailable("It refused.", key="another tenant's")
    stage.store.fail("claim", error=refused)
    for _ in range(6):
        with pytest.raises(StoreUnavailable) as caught:
            stage.process(must_not_run)
    assert "away (It refused.)" in str(caught.value)
    assert "tenant" not in str(caught.value)


def test_what_fails_at_once_with_a_connection_is_one_failure() -> None:
    """A crowd that loses the connection which it shares asks again, and is not refused."""
    clock = ManualClock()
    circuit = Circuit(Breaker(errors=3, calls=10), clock)
    for _ in range(2):
        sent = clock()
        clock.advance(0.01)
        for _ in range(64):
            circuit.failed(GONE, sent)
        assert circuit.state == "closed"
    fail(circuit)
    assert circuit.state == "open"


def test_each_that_has_waited_in_vain_is_a_failure() -> None:
    """A server that hangs is found out by a crowd as soon as its commands time out, not by five of them in turn."""
    clock = ManualClock()
    circuit = Circuit(Breaker(errors=3), clock)
    clock.advance(5.0)
    for sent in (0.0, 0.1, 0.2):
        circuit.failed(GONE, clock() - 5.0 + sent)
    assert circuit.state == "open"


def test_a_share_of_failures_opens_it() -> None:
    """Of enough commands, half of them: not of the first few."""
    circuit = Circuit(Breaker(errors=100, calls=10, failure_rate=0.5), ManualClock())
    for _ in range(4):
        circuit.answered(0.01)
        fail(circuit)
    assert circuit.state == "closed"
    circuit.answered(0.01)
    fail(circuit)
    assert circuit.state == "open"


def test_slow_answers_open_it() -> None:
    """A store that answers, but after seconds, is as good as away."""
    circuit = Circuit(Breaker(calls=4, slow="1s", slow_rate=0.75), ManualClock())
    circuit.answered(0.1)
    for _ in range(3):
        assert circuit.state == "closed"
        circuit.answered(1.5)
    assert circuit.state == "open"


def test_what_is_long_ago_does_not_count() -> None:
    """Failures are counted within the window."""
    clock = ManualClock()
    circuit = Circuit(Breaker(errors=100, calls=4, window="30s"), clock)
    fail(circuit, 3)
    clock.advance(31)
    fail(circuit)
    assert circuit.state == "closed"


def test_one_look_at_a_time() -> None:
    """After the recovery time one claim goes through; the others wait for what it finds."""
    clock = ManualClock()
    circuit = Circuit(Breaker(errors=1, recovery="5s"), clock)
    fail(circuit)
    with pytest.raises(StoreUnavailable) as refused:
        circuit.admit()
    assert refused.value.retry_after == 5
    clock.advance(5)
    circuit.admit()
    assert circuit.state == "half_open"
    with pytest.raises(StoreUnavailable):
        circuit.admit()
    circuit.answered(0.01)
    assert circuit.state == "closed"
    circuit.admit()


def test_a_look_that_fails_keeps_it_open() -> None:
    """And the next look is a recovery time later."""
    clock = ManualClock()
    circuit = Circuit(Breaker(errors=1, recovery="5s"), clock)
    fail(circuit)
    clock.advance(5)
    circuit.admit()
    fail(circuit)
    clock.advance(4)
    with pytest.raises(StoreUnavailable):
        circuit.admit()
    clock.advance(1)
    circuit.admit()


def test_a_look_that_never_ends_is_not_waited_for() -> None:
    """Its caller was cancelled: another may look after a recovery time."""
    clock = ManualClock()
    circuit = Circuit(Breaker(errors=1, recovery="5s"), clock)
    fail(circuit)
    for _ in range(2):
        clock.advance(5)
        circuit.admit()


@pytest.mark.parametrize(
    "words", [{"errors": 0}, {"calls": 1.5}, {"failure_rate": 0}, {"slow_rate": 2}, {"recovery": "soon"}]
)
def test_a_breaker_that_makes_no_sense_is_refused(words: dict[str, Any]) -> None:
    """With the word that is wrong."""
    with pytest.raises(UsageError, match=next(iter(words))):
        Breaker(**words)


# The receiver behind it


def test_an_open_circuit_does_not_ask_the_store(stage: Stage) -> None:
    """After a few failures nobody waits for the store any more, and what is refused was not run."""
    stage.go_away()
    for _ in range(3):
        with pytest.raises(StoreUnavailable, match="gone"):
            stage.process(must_not_run)
    stage.store.calls.clear()
    with pytest.raises(StoreUnavailable, match=r"gone.* not asked for another 5\.0 s") as refused:
        stage.process(must_not_run)
    assert stage.store.calls == []
    assert 0 < refused.value.retry_after <= 5
    assert stage.changes() == ["opened"]


@pytest.mark.parametrize("breaker", [Breaker(), None])
@pytest.mark.parametrize("way", ["process", "batch", "block"])
@pytest.mark.parametrize("moment", ["granted", "begun", "over"])
def test_a_claim_that_is_granted_while_its_receiver_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, moment: str, breaker: Breaker | None
) -> None:
    """Nobody would record what its handler did: it never begins. Its key is free, unless the store is closed, too."""
    receiver = Receiver(f"sqlite:///{tmp_path / 'e.db'}", breaker=breaker)
    store: Any = receiver.blocking.store

    async def granted(ask: Any, asked: Any) -> Any:
        answer = await ask(asked)
        if moment == "begun":
            receiver._keeper.live = ClosedMeanwhile(receiver)
        else:
            receiver.close() if moment == "over" else receiver._turn_away()
        return answer

    for verb in ("claim", "claim_many"):
        monkeypatch.setattr(store, verb, partial(granted, getattr(store, verb)))

    def block() -> None:
        with receiver.claim(Key.parse(receiver.key_of(EVENT))):
            must_not_run(EVENT)

    if way == "batch":
        (outcome,) = receiver.process_batch([EVENT], must_not_run)
        assert isinstance(outcome.error, StoreClosed)
    else:
        with pytest.raises(StoreClosed, match="closed before the handler began"):
            block() if way == "block" else receiver.process(EVENT, must_not_run)
    receiver.close()
    assert not receiver._keeper.live
    with Receiver(f"sqlite:///{tmp_path / 'e.db'}") as other:
        record = other.get(other.key_of(EVENT))
        assert record is not None
        assert record.state is (State.PENDING if moment == "over" else State.ABSENT)


@pytest.mark.parametrize("way", ["process", "batch"])
def test_a_claim_that_is_on_its_way_when_its_receiver_is_closed(
    tmp_path: Path, colour: Colour, way: str
) -> None:
    """Its answer is waited for: what was granted is given back, so that its key is free and in no doubt."""
    receiver = Receiver(f"sqlite:///{tmp_path / 'e.db'}")
    own = receiver.blocking if colour.name == "blocking" else receiver.asyncio
    store: Any = own.store.store
    asked = threading.Event()

    async def slowly(ask: Any, claim: Any) -> Any:
        answer = await ask(claim)
        asked.set()
        wait_until(lambda: receiver._keeper.closing is not None)
        return answer

    def caller() -> None:
        if way == "process":
            colour.process(receiver, EVENT, must_not_run)
        for outcome in colour.batch(receiver, [EVENT], must_not_run):
            raise outcome.error or AssertionError

    store.claim, store.claim_many = partial(slowly, store.claim), partial(slowly, store.claim_many)
    calling = Caller(caller)
    assert asked.wait(20)
    receiver.close()
    with pytest.raises(StoreClosed):
        calling.answer()
    with Receiver(f"sqlite:///{tmp_path / 'e.db'}") as other:
        record = other.get(other.key_of(EVENT))
        assert record is not None
        assert record.state is State.ABSENT


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system can't fork")
def test_a_child_does_not_wait_for_its_parents_claims(tmp_path: Path) -> None:
    """What other threads of the parent have asked for is answered to them alone."""
    with Receiver(f"sqlite:///{tmp_path / 'e.db'}") as receiver:
        circuit = receiver.circuit
        assert circuit is not None
        with circuit.asking(), circuit._lock:
            assert receiver._is_busy()
            child = os.fork()
            if child == 0:
                os._exit(int(receiver._is_busy() or circuit._lock.locked()))
            assert os.waitpid(child, 0)[1] == 0
            assert receiver._is_busy()


def test_a_closed_receiver_says_so_and_runs_nothing(stage: Stage) -> None:
    """Asking again does not help, and what would be run without protection while a store is away is not run."""
    stage.process(Counted(5))
    stage.receiver.close()
    for _ in range(6):  # however often it is asked, no store is said to be away
        with pytest.raises(StoreClosed, match=r"was closed.*Make a new one"):
            stage.process(must_not_run, Message("e-2"), policy=Policy(fallback="open"))
    assert stage.changes() == []


def test_it_recovers_without_a_restart(stage: Stage) -> None:
    """The store comes back: the next look closes the circuit."""
    stage.go_away()
    for _ in range(3):
        with pytest.raises(StoreUnavailable):
            stage.process(must_not_run)
    stage.store.recover()
    with pytest.raises(StoreUnavailable):
        stage.process(must_not_run)
    stage.clock.advance(5)
    assert stage.process(Counted()).status == "executed"
    assert stage.process(must_not_run).status == "replayed"
    assert stage.changes() == ["opened", "closed"]


def test_a_store_that_answers_wrongly_is_not_away(stage: Stage) -> None:
    """It came back without its records, say: everybody is told so, and not that it is away still."""
    by_hand(
        stage.receiver
    )  # whose keeper would ask for the claims that were not answered, and be refused, too
    stage.go_away()
    for _ in range(5):
        with pytest.raises(StoreUnavailable):
            stage.process(must_not_run)
    stage.store.fail("claim", error=StoreMismatch("the table was dropped"))
    stage.clock.advance(5)
    for _ in range(2):
        with pytest.raises(StoreMismatch, match="dropped"):
            stage.process(must_not_run)


def test_an_ending_goes_through_an_open_circuit(stage: Stage) -> None:
    """Whoever ran the handler has something to record, and is let through; the answer closes the circuit."""

    def handler(*_: Any) -> str:
        circuit = stage.receiver.circuit
        assert circuit is not None
        fail(circuit, 5)
        assert circuit.state == "open"
        return "done"

    assert stage.process(handler).status == "executed"
    assert stage.changes() == ["opened", "closed"]


class CrowdedStore(MemoryStore, CrowdStore):
    """A store whose callers wait for an answer that the test gives; what is not sent so is asked for alone."""

    features = Features()

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self.loop, self.sent, self.alone = loop, list[Waiter[Any]](), 0

    def for_asyncio(self) -> CrowdedStore:
        return self

    async def claim(self, claim: Claim) -> Decision:
        self.alone += 1
        return await super().claim(claim)

    def claim_soon(self, claim: Claim) -> Waiter[Any] | None:
        if not claim.may_create:
            return None
        self.sent.append(Waiter(self.loop))
        return self.sent[-1]

    def decided(self, claim: Claim, answer: Any) -> Decision | None:
        return decide_claim(None, claim, 0.0, 0) if answer == "new" else None

    async def claim_on(self, claim: Claim, answer: Any) -> Decision:
        raise answer if isinstance(answer, Exception) else AssertionError(answer)

    def end_soon(self, completion: Completion) -> Waiter[Any] | None:
        waiter: Waiter[Any] = Waiter(self.loop)
        waiter.set_result(Ending.DONE)
        return waiter

    def ended(self, completion: Completion, answer: Any) -> Ending | None:
        return cast("Ending", answer)


def crowd(story: Callable[[CrowdedStore, Circuit, GuardedStore], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        circuit = Circuit(Breaker(errors=2), ManualClock())
        store = CrowdedStore(asyncio.get_running_loop())
        await story(store, circuit, guarded(store, circuit))

    asyncio.run(main())


def claim(key: str = "k", **terms: Any) -> Claim:
    return Claim(key, b"me", b"", 60.0, 60.0, **terms)


def test_a_crowd_tells_the_circuit() -> None:
    """What its callers meet, while they wait or afterwards, counts as it does for one who asks alone."""

    async def story(store: CrowdedStore, circuit: Circuit, front: GuardedStore) -> None:
        for answer in ("new", GONE, StoreMismatch("not ours"), GONE, GONE):
            asking = asyncio.ensure_future(wrapped(front.claim(claim())))
            await asyncio.sleep(0)
            if isinstance(answer, StoreUnavailable):
                store.sent[-1].set_exception(answer)
            else:
                store.sent[-1].set_result(answer)
            if isinstance(answer, Exception):
                with pytest.raises(type(answer)):
                    await asking
            else:
                assert (await asking).verdict is Verdict.CLAIMED
            cast("ManualClock", circuit.monotonic).advance(0.1)
        assert (circuit.state, store.alone) == ("open", 0)

    crowd(story)


def test_an_open_circuit_refuses_a_crowd_and_lets_one_of_it_look() -> None:
    """Nothing is sent until it is time; then one goes alone, as everybody else's. Endings always go."""

    async def story(store: CrowdedStore, circuit: Circuit, front: GuardedStore) -> None:
        fail(circuit, 2)
        with pytest.raises(StoreUnavailable, match="not asked"):
            await front.claim(claim())
        assert (store.sent, store.alone) == ([], 0)
        assert await front.complete(Completion("k", b"me", 1, State.COMPLETED, None, 60.0)) is Ending.FENCED
        assert circuit.state == "closed", "an answer is an answer"
        fail(circuit, 2)
        cast("ManualClock", circuit.monotonic).advance(10)
        assert (await front.claim(claim())).verdict is Verdict.CLAIMED
        assert (store.sent, store.alone, circuit.state) == ([], 1, "closed")

    crowd(story)


def test_what_a_crowd_can_not_send_is_asked_alone() -> None:
    """A message that is too old to be new, or whatever else its store has no quick way for."""

    async def story(store: CrowdedStore, circuit: Circuit, front: GuardedStore) -> None:
        assert (await front.claim(claim(may_create=False))).verdict is Verdict.LATE
        assert (store.sent, store.alone) == ([], 1)
        assert await front.complete(Completion("k", b"me", 1, State.COMPLETED, None, 60.0)) is Ending.DONE

    crowd(story)


def test_one_of_a_crowd_who_is_cancelled_says_nothing_of_the_store() -> None:
    """Neither that it answers nor that it is away; what comes afterwards is nobody's."""

    async def story(store: CrowdedStore, circuit: Circuit, front: GuardedStore) -> None:
        fail(circuit)
        asking = asyncio.ensure_future(wrapped(front.claim(claim())))
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert store.sent[0].done()
        assert circuit._in_a_row == 1

    crowd(story)


async def wrapped(command: Any) -> Any:
    """A command in a coroutine: what a crowd awaits is no task by itself."""
    return await command


def test_no_breaker_asks_every_time(colour: Colour) -> None:
    """``breaker=None`` leaves it to the store."""
    stage = Stage(colour, breaker=None)
    stage.go_away()
    for _ in range(10):
        with pytest.raises(StoreUnavailable, match="gone"):
            stage.process(must_not_run)


def test_health(stage: Stage) -> None:
    """Ready while the store answers."""
    assert stage.receiver.health().ok
    assert stage.store.health().ok
    stage.receiver.close()
    health = stage.receiver.health()
    assert not health.ok
    assert "closed" in health.detail


def test_a_clock_is_no_sign_of_health(stage: Stage) -> None:
    """A store may have no other clock than this machine's: that it goes neither is an answer nor ends an outage."""
    stage.go_away()
    for _ in range(5):
        with pytest.raises(StoreUnavailable):
            stage.process(must_not_run)
    assert not stage.receiver.health().ok
    assert not asyncio.run(stage.receiver.ahealth()).ok
    run(stage.receiver.blocking.store.now())
    assert stage.changes() == ["opened"]
    stage.store.recover()
    assert stage.receiver.health().ok
    assert stage.changes() == ["opened", "closed"]


def test_a_file_that_is_gone_is_not_healthy(tmp_path: Path) -> None:
    """Nor is one that is no longer where others would find it, although this process still has it open."""
    with Receiver(tmp_path / "effects.db") as receiver:
        assert receiver.health().ok
        (tmp_path / "effects.db").rename(tmp_path / "elsewhere.db")
        assert "removed or replaced" in receiver.health().detail
        assert not asyncio.run(receiver.ahealth()).ok
        (tmp_path / "elsewhere.db").rename(tmp_path / "effects.db")
        assert receiver.health().ok
    assert "closed" in receiver.health().detail


def test_health_on_a_loop() -> None:
    """The same, awaited."""
    with open_store("memory://") as store:
        assert asyncio.run(store.ahealth()).ok


# Fallbacks


def test_closed_is_the_default(stage: Stage) -> None:
    """Also a duplicate that this process has seen is refused."""
    stage.process(Counted())
    stage.go_away()
    with pytest.raises(StoreUnavailable):
        stage.process(must_not_run)


@pytest.mark.parametrize("fallback", ["cached_response", "open"])
def test_duplicates_seen_here_are_answered(colour: Colour, fallback: Any) -> None:
    """By the attempt that ran here, or by a replay that this process gave before."""
    stage = Stage(colour, fallback=fallback)
    stage.process(Counted("first"))
    elsewhere = Receiver(stage.store, clock=stage.clock, monotonic=stage.clock)
    elsewhere.process(Message("e-2"), Counted("elsewhere"))
    stage.process(must_not_run, Message("e-2"))
    stage.go_away()
    assert stage.process(must_not_run).value == "first"
    assert stage.process(must_not_run, Message("e-2")).value == "elsewhere"
    (again,) = stage.colour.batch(stage.receiver, [EVENT], must_not_run)
    assert (again.status, again.value, again.guarantee) == ("replayed", "first", "fenced")


@pytest.mark.parametrize("fallback", ["cached_response", "open"])
@pytest.mark.parametrize("in_a_batch", [False, True], ids=["alone", "in a batch"])
def test_a_remembered_error_seen_here_is_an_answer(colour: Colour, fallback: Any, in_a_batch: bool) -> None:
    """What was refused for good by an attempt of this process is not run unprotected when the store is away."""
    stage = Stage(colour, policy=Policy(remember=LookupError), fallback=fallback)
    refusing = Counted(LookupError("no such account"))
    if in_a_batch:
        stage.colour.batch(stage.receiver, [EVENT], refusing)
    else:
        with pytest.raises(LookupError):
            stage.process(refusing)
    stage.go_away()
    with pytest.raises(LookupError, match="no such account"):
        stage.process(must_not_run)


@pytest.mark.parametrize("fallback", ["cached_response", "open"])
def test_a_reused_key_is_told_also_then(colour: Colour, fallback: Any) -> None:
    """Another payload under a key that was seen here is no duplicate."""
    stage = Stage(colour, fallback=fallback)
    stage.process(Counted())
    stage.go_away()
    with pytest.raises(KeyReused):
        stage.process(must_not_run, Message("e-1", {"cents": 6}))


def test_a_small_cache_of_one_operation_drops_nothing_of_another(colour: Colour) -> None:
    """Policies share the cache, and each has at least as many keys in it as it says."""
    stage = Stage(colour, fallback="cached_response")
    for number in range(3):
        stage.process(Counted(number), Message(f"e-{number}"))
    stage.process(Counted(), Message("small"), policy=Policy(local_cache=1))
    stage.go_away()
    assert [stage.process(must_not_run, Message(f"e-{number}")).value for number in range(3)] == [0, 1, 2]


def test_cached_response_refuses_what_is_new(colour: Colour) -> None:
    """What was not seen here can't be proven new."""
    stage = Stage(colour, fallback="cached_response")
    stage.go_away()
    with pytest.raises(StoreUnavailable):
        stage.process(must_not_run)


def test_a_cached_response_is_not_kept_longer_than_the_store_keeps_it(colour: Colour) -> None:
    """After its retention a key is unknown here too."""
    stage = Stage(colour, policy=Policy(keep="1h"), fallback="cached_response")
    stage.process(Counted())
    stage.go_away()
    stage.clock.advance(3601)
    with pytest.raises(StoreUnavailable):
        stage.process(must_not_run)


def test_open_runs_unprotected_and_says_so(colour: Colour) -> None:
    """Every time it arrives; the outcome, an event and the figures tell of it."""
    stage = Stage(colour, fallback="open")
    stage.go_away()
    seen: list[tuple[str, int, bool]] = []

    def handler(*_: Any) -> str:
        attempt = current()
        attempt.check()
        seen.append((attempt.guarantee, attempt.fence, attempt.lost))
        return "ran"

    for _ in range(2):
        outcome = stage.process(handler)
        assert (outcome.status, outcome.value, outcome.guarantee) == ("executed", "ran", "none")
    assert seen == [("none", 0, False)] * 2
    assert stage.receiver.stats().since_start.counts["unprotected"] == 2
    assert [event.guarantee for event in stage.told if event.kind == "unprotected"] == ["none"] * 2


@pytest.mark.parametrize("form", ["alone", "in a batch"])
def test_open_runs_nothing_that_this_process_is_at(colour: Colour, form: str) -> None:
    """Neither beside a running attempt nor after one whose ending waits to be written; what was given back may run."""
    stage = Stage(colour, fallback="open")
    by_hand(stage.receiver)

    def again() -> str:
        if form == "in a batch":
            return stage.colour.batch(stage.receiver, [EVENT], Counted("again"))[0].status
        try:
            return str(stage.process(Counted("again")).status)
        except StoreUnavailable:
            return "store_error"

    with running(stage.receiver, EVENT):
        stage.go_away()
        while_it_runs = again()
    assert (while_it_runs, again()) == ("store_error", "store_error")
    stage.store.recover()
    stage.clock.advance(60)
    run(stage.receiver._keeper.tick(stage.store, stage.clock()))
    assert stage.process(must_not_run).value == "first"


@pytest.mark.parametrize("result", ["first", Crash(), LookupError()])
def test_open_runs_nothing_beside_what_runs_unprotected(colour: Colour, result: Any) -> None:
    """A burst of one message is one effect in this process, also while there is nobody to claim it from."""
    stage = Stage(colour, fallback="open")
    stage.go_away()
    with running(stage.receiver, EVENT, result):
        with pytest.raises(StoreUnavailable):
            stage.process(must_not_run)
        assert stage.colour.batch(stage.receiver, [EVENT], must_not_run)[0].status == "store_error"
        key = Key.parse(stage.receiver.key_of(EVENT))
        with pytest.raises(StoreUnavailable), stage.receiver.claim(key, payload=EVENT.payload):
            pytest.fail("ran")
        assert stage.process(Counted("another's"), Message("e-2")).value == "another's"
    assert stage.process(Counted("again")).value == "again"


def test_open_runs_what_was_given_back(colour: Colour) -> None:
    """A handler that failed may be tried again, though nobody could write that down."""
    stage = Stage(colour, fallback="open")
    by_hand(stage.receiver)

    def failing(*_: Any) -> None:
        stage.go_away()
        raise LookupError

    with pytest.raises(LookupError):
        stage.process(failing)
    assert stage.process(Counted("again")).guarantee == "none"


def test_open_batches_and_blocks(colour: Colour) -> None:
    """The other forms run unprotected too, and nothing is recorded."""
    stage = Stage(colour, fallback="open")
    stage.go_away()
    outcomes = stage.colour.batch(stage.receiver, [EVENT, EVENT, Message("e-2")], Counted("ran"))
    assert [(o.status, o.value, o.guarantee) for o in outcomes] == [
        ("executed", "ran", "none"), ("replayed", "ran", "none"), ("executed", "ran", "none"),
    ]  # fmt: skip
    with stage.receiver.claim("k") as claim:
        assert claim.first
        assert claim.complete(7) == 7
    assert claim.outcome.guarantee == "none"
    stage.store.recover()
    assert not stage.receiver._keeper.live


def test_an_error_of_an_unprotected_handler_is_its_own(colour: Colour) -> None:
    """The caller gets it as always."""
    stage = Stage(colour, fallback="open")
    stage.go_away()
    with pytest.raises(LookupError):
        stage.process(Counted(LookupError("no")))


def test_what_is_not_an_outage_is_refused_in_every_mode(colour: Colour) -> None:
    """Data of another program is no reason to run unprotected."""
    stage = Stage(colour, fallback="open")
    stage.store.fail("claim", error=StoreMismatch("not ours"))
    with pytest.raises(StoreMismatch):
        stage.process(must_not_run)


def test_a_policy_may_say_it_for_one_operation(stage: Stage) -> None:
    """Money waits for the store; a mail may go out twice."""
    stage.go_away()
    with pytest.raises(StoreUnavailable):
        stage.process(must_not_run)
    assert stage.process(Counted("sent"), policy=Policy.notifications(fallback="open")).value == "sent"
