"""The loop of every consumer, with a broker made of lists: order of groups, what is told, and how it stops."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tests.unit.receiving import StagedStore, Told

from effectonce import Message, Policy, Receiver, State, StoreUnavailable, current
from effectonce.errors import ColourMismatch, StoreClosed, UsageError
from effectonce.messaging._consumer import Consumer
from effectonce.messaging._delivery import Ack, DeadLetter, Delivery, Nack, Verdict
from effectonce.messaging._letters import labels
from effectonce.stores.memory import MemoryStore
from effectonce.testing.clocks import ManualClock, wait_until


class Away(Exception):
    """The broker can't be reached."""


class Refused(Away):
    """The broker does not let us in."""


class ListBroker:
    """Hands out batches that a test made, and keeps what it is told."""

    away: tuple[type[Exception], ...] = (Away,)

    group = ""
    is_let_in = True

    def __init__(self, *batches: list[Delivery], awaits: bool = False, deadline: float | None = None) -> None:
        self.batches, self.awaits, self.deadline = list(batches), awaits, deadline
        self.told: list[tuple[Delivery, Verdict]] = []
        self.calls: list[str] = []
        self.extended: list[Delivery] = []
        self.on_fetch: Callable[[], None] = lambda: None

    def refuses(self, error: Exception) -> bool:
        return isinstance(error, Refused)

    async def open(self) -> None:
        self.calls.append("open")

    async def fetch(self, most: int) -> Sequence[Delivery]:
        self.on_fetch()
        return self.batches.pop(0) if self.batches else []

    async def settle(self, settled: Sequence[tuple[Delivery, Verdict]]) -> None:
        self.told += settled

    async def extend(self, deliveries: Sequence[Delivery]) -> None:
        self.extended += deliveries

    async def close(self) -> None:
        self.calls.append("close")

    def verdicts(self) -> dict[str, Any]:
        return {str(delivery.ids[0][1]): verdict for delivery, verdict in self.told}


def of(id: str, group: Any = None, payload: Any = None, times: int = 1) -> Delivery:
    body = json.dumps(id if payload is None else payload).encode()
    return Delivery(None, "orders", (("id", id),), body, len(body), None, times, group)


def consume(broker: ListBroker, receiver: Receiver, handler: Any, **options: Any) -> int:
    consumer = Consumer(broker, receiver, options)
    if not broker.awaits:
        return consumer.run_once(handler)

    async def coroutine(message: Message) -> Any:
        return handler(message)

    return asyncio.run(consumer.arun_once(coroutine))


COLOURS = pytest.mark.parametrize("awaits", [False, True], ids=["blocking", "asyncio"])


@COLOURS
def test_a_batch_is_claimed_and_recorded_in_one_round_trip_each(awaits: bool) -> None:
    """However many messages a poll brings, with and without groups."""
    for group in (None, "g"):
        store = StagedStore()
        with Receiver(store) as receiver:
            broker = ListBroker([of(f"{number}", group) for number in range(100)], awaits=awaits)
            assert consume(broker, receiver, lambda message: message.payload) == 100
        assert [call for call in store.calls if call.endswith("many")] == ["claim_many", "complete_many"]
        assert broker.verdicts() == {f"{number}": Ack(f"{number}") for number in range(100)}


def test_a_dead_letter_says_when_it_was_first_seen() -> None:
    """By its sender's time, else by this consumer's, from its first delivery on; what was done is forgotten."""
    clock = ManualClock()
    with Receiver(MemoryStore(clock=clock), clock=clock, policy=Policy(max_attempts=2)) as receiver:

        def handler(message: Message) -> None:
            clock.advance(60)
            if message.payload == "poison" or clock() < began + 120:
                raise ValueError(message.payload)

        began = clock()
        again = [of(name, times=2) for name in ("poison", "passing")]
        broker = ListBroker([of("poison"), of("passing")], again, again, [of("passing", payload=1, times=3)])
        consumer = Consumer(broker, receiver, {"concurrency": 1})
        while broker.batches:
            consumer.run_once(handler)
        (poison, seen), (_, mismatch) = [each for each in broker.told if isinstance(each[1], DeadLetter)]
    assert (seen.reason, seen.first_seen) == ("attempts_exhausted", began + 120)
    assert labels(seen, poison) == labels(seen, poison._replace(timestamp=began + 120))
    assert mismatch.reason == "mismatch"
    assert mismatch.first_seen is not None
    assert mismatch.first_seen > began + 120


@COLOURS
def test_groups_keep_their_order_and_stop_at_the_first_failure(awaits: bool) -> None:
    """What comes after a failure is given back unbegun, and no attempt is counted; other groups go on."""
    ran: list[str] = []

    def handler(message: Message) -> None:
        ran.append(message.payload)
        if message.payload == "a2" and ran.count("a2") == 1:
            raise ValueError("not yet")

    batch = [of(name, name[0]) for name in ("a1", "b1", "a2", "b2", "a3", "b3", "a4")] + [of("single")]
    with Receiver("memory://") as receiver:
        broker = ListBroker(batch, awaits=awaits)
        consume(broker, receiver, handler, concurrency=4)
        assert [name for name in ran if name[0] == "a"] == ["a1", "a2"]
        assert [name for name in ran if name[0] == "b"] == ["b1", "b2", "b3"]
        assert "single" in ran
        told = broker.verdicts()
        assert told["a2"] == Nack(1.0, "failed")
        assert all(told[name].reason == "held" for name in ("a3", "a4"))
        held = receiver.get(receiver.key_of(Message("a3", "a3", source="orders")))
        assert held is None or (held.state, held.attempts) == (State.ABSENT, 0)
        consume(ListBroker(batch, awaits=awaits), receiver, handler)
    assert [name for name in ran if name[0] == "a"] == ["a1", "a2", "a2", "a3", "a4"]
    assert len(ran) == 9, "what was done is not done again"


@COLOURS
def test_an_id_that_comes_twice_in_a_group_with_other_payloads_is_put_aside_in_its_turn(awaits: bool) -> None:
    """It is not claimed with the others; those behind it wait until the broker has it put aside."""
    ran: list[str] = []
    batch = [of("a1", "a"), of("a1", "a", "another"), of("b1", "b"), of("a2", "a")]
    with Receiver("memory://") as receiver:
        broker = ListBroker(batch, awaits=awaits)
        consume(broker, receiver, lambda message: ran.append(message.id))
    assert sorted(ran) == ["a1", "b1"]
    assert [type(verdict) for _, verdict in broker.told] == [Ack, DeadLetter, Ack, Nack]


def test_a_group_waits_for_a_member_that_runs_elsewhere() -> None:
    """A claim that is refused stops its group like a failure does."""
    entered, leave = threading.Event(), threading.Event()
    ran: list[str] = []

    def slow(message: Message) -> None:
        entered.set()
        assert leave.wait(20)

    with Receiver("memory://") as receiver:
        first = threading.Thread(target=consume, args=(ListBroker([of("a1", "a")]), receiver, slow))
        first.start()
        assert entered.wait(20)
        broker = ListBroker([of("a1", "a"), of("a2", "a")])
        consume(broker, receiver, lambda message: ran.append(message.id))
        leave.set()
        first.join()
    assert ran == []
    assert [verdict.reason for verdict in broker.verdicts().values()] == ["in_progress", "held"]


def test_what_is_put_aside_does_not_stop_its_group_for_good() -> None:
    """A message that can't be decoded is passed over at once; one that is used up, with the next delivery."""
    ran: list[str] = []

    def handler(message: Message) -> None:
        ran.append(message.id)
        if message.id == "poison":
            raise ValueError("never")

    bad = of("bad", "a")._replace(body=b"{")
    batch = [bad, of("poison", "a"), of("last", "a")]
    with Receiver("memory://", policy=Policy(max_attempts=1)) as receiver:
        first, second = ListBroker(batch), ListBroker(batch[1:])
        consume(first, receiver, handler)
        consume(second, receiver, handler)
        third = ListBroker(batch[2:])
        consume(third, receiver, handler)
    assert isinstance(first.verdicts()["bad"], DeadLetter)
    assert second.verdicts()["poison"].reason == "attempts_exhausted"
    assert ran == ["poison", "last"]


def test_two_groups_of_one_source_are_two_consumers() -> None:
    """Also when they share a receiver that does not say who consumes: nobody's message is taken for another's."""
    ran: list[str] = []

    def consume_as(group: str, receiver: Receiver) -> None:
        broker = ListBroker([of("o-1")])
        broker.group = group
        consume(broker, receiver, lambda message: ran.append(group))

    with Receiver("memory://") as receiver:
        for group in ("billing", "shipping", "billing"):
            consume_as(group, receiver)
    assert ran == ["billing", "shipping"]
    with Receiver("memory://", consumer="both") as receiver:
        for group in ("old", "new"):
            consume_as(group, receiver)
    assert ran == ["billing", "shipping", "old"], "a consumer that says its name is one, whatever its group"


def test_handlers_that_would_not_run_are_refused_before_anything_is_fetched() -> None:
    """Coroutine functions for a blocking client, objects that hide one, and generators for either."""

    class Hidden:
        async def __call__(self, message: Message) -> None: ...

    async def coroutine(message: Message) -> None: ...

    def generator(message: Message) -> Any:
        yield

    with Receiver("memory://") as receiver:
        blocking, awaiting = ListBroker([of("o-1")]), ListBroker([of("o-1")], awaits=True)
        for wrong in (coroutine, Hidden(), generator):
            with pytest.raises(ColourMismatch, match="plain function"):
                Consumer(blocking, receiver, {}).run(wrong)
        with pytest.raises(UsageError, match="generator"):
            asyncio.run(Consumer(awaiting, receiver, {}).arun(generator))
    assert len(blocking.batches) == len(awaiting.batches) == 1


def test_why_a_message_comes_again_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A handler's own words, with its traceback; a message that only has to wait is not worth a line."""

    def handler(message: Message) -> None:
        raise ValueError("no such customer")

    with Receiver("memory://") as receiver:
        consume(ListBroker([of("a1", "a"), of("a2", "a")]), receiver, handler)
    (line,) = caplog.records
    assert line.getMessage() == (
        "a handler failed, orders a1 comes again (attempt 1): ValueError: no such customer"
    )
    assert line.exc_info is not None


def test_that_the_store_does_not_answer_is_logged_once_for_a_batch(caplog: pytest.LogCaptureFixture) -> None:
    """Else a consumer without a store looks like one without messages."""
    store = StagedStore()

    def away(*_: Any) -> Any:
        raise StoreUnavailable("The database is away.")

    store.claim_many = away  # type: ignore[method-assign]
    with Receiver(store) as receiver:
        consume(ListBroker([of("a"), of("b")]), receiver, lambda message: None, retry=("50ms", "50ms"))
    lines = [line.getMessage() for line in caplog.records if line.name == "effectonce.messaging"]
    assert len(lines) == 1
    assert lines[0].startswith("the store did not answer, messages come again: The database is away. [key ")


def test_a_consumer_runs_in_one_thread_at_a_time() -> None:
    """Its client and what is under way are one run's. When that has ended, it may run again."""
    with Receiver("memory://") as receiver:
        broker = ListBroker([of("a")])
        consumer = Consumer(broker, receiver, {})

        def handler(message: Message) -> None:
            with pytest.raises(UsageError, match="one for each thread"):
                consumer.run_once(handler)

        consumer.run_once(handler)
        assert broker.verdicts() == {"a": Ack(None)}
        assert consumer.run_once(handler) == 0


def test_dead_letters_are_events() -> None:
    """Each is told to hooks, with its id and the reason, and counted."""
    told = Told()
    with Receiver("memory://", hooks=[told]) as receiver:
        consume(ListBroker([of("bad")._replace(body=b"{")]), receiver, lambda _: None)
        (event,) = told
        assert (event.kind, event.key, event.detail) == ("dead_letter", "bad", "undecodable")
        assert receiver.stats().since_start.counts["dead_letter"] == 1


def test_ids_that_change_with_each_delivery_are_told() -> None:
    """A broker that repeats what the store has never seen: an event, once."""
    told = Told()
    with Receiver("memory://", hooks=[told]) as receiver:
        batch = [of(f"random-{number}", times=2) for number in range(60)]
        consume(ListBroker(batch), receiver, lambda _: None)
    assert told.kinds().count("unstable_id") == 1


def test_a_repeat_in_the_same_batch_has_its_firsts_verdict() -> None:
    """Both are acknowledged, or both come again."""
    batch = [of("good"), of("good"), of("bad"), of("bad")]

    def handler(message: Message) -> str:
        if message.id == "bad":
            raise ValueError("not yet")
        return "done"

    with Receiver("memory://") as receiver:
        broker = ListBroker(batch)
        consume(broker, receiver, handler)
    good, again, bad, bad_again = (verdict for _, verdict in broker.told)
    assert (good, again) == (Ack("done"), Ack("done", replayed=True))
    assert bad == bad_again == Nack(1.0, "failed")


@COLOURS
def test_deadlines_are_extended_while_handlers_run(awaits: bool) -> None:
    """All of the batch, also what only waits for its acknowledgement; and nothing any more when it is settled."""
    broker = ListBroker([of("slow"), of("bad")._replace(body=b"{")], awaits=awaits, deadline=0.03)

    def blocks(message: Message) -> None:
        wait_until(lambda: len(broker.extended) >= 4)

    async def waits(message: Message) -> None:
        await asyncio.to_thread(blocks, message)

    with Receiver("memory://") as receiver:
        consumer = Consumer(broker, receiver, {})
        if awaits:
            asyncio.run(consumer.arun_once(waits))
        else:
            consumer.run_once(blocks)
    assert {delivery.ids[0][1] for delivery in broker.extended} == {"slow", "bad"}
    assert isinstance(broker.verdicts()["slow"], Ack)


def test_a_lost_lease_is_not_kept_alive_at_the_broker() -> None:
    """Where another attempt has taken over, the broker may deliver to whom it likes."""
    broker = ListBroker([of("mine"), of("lost")], deadline=0.03)

    def handler(message: Message) -> None:
        before = len(broker.extended)
        wait_until(lambda: len(broker.extended) >= before + 4)  # the first beat may not know of the claim yet
        if message.id == "lost":
            receiver.flow.keeper.forget(current())
            seen = len(broker.extended)
            wait_until(lambda: len(broker.extended) >= seen + 4)
        else:
            wait_until(lambda: [d.ids[0][1] for d in broker.extended[-3:]] == ["mine"] * 3)

    with Receiver("memory://") as receiver:
        Consumer(broker, receiver, {"concurrency": 2}).run_once(handler)
    assert [d.ids[0][1] for d in broker.extended[-3:]] == ["mine"] * 3


@COLOURS
def test_a_broker_that_is_away_is_opened_again(awaits: bool) -> None:
    """The consumer rests and goes on; ``stop`` ends it after what is under way."""
    broker = ListBroker([of("late")], awaits=awaits)
    troubles = [Away("no route"), Away("no route")]
    ran: list[str] = []

    def trouble() -> None:
        if troubles:
            raise troubles.pop()

    broker.on_fetch = trouble

    def handler(message: Message) -> None:
        ran.append(message.id)
        consumer.stop()

    async def coroutine(message: Message) -> None:
        handler(message)

    with Receiver("memory://") as receiver:
        consumer = Consumer(broker, receiver, {})
        if awaits:
            asyncio.run(consumer.arun(coroutine))
        else:
            consumer.run(handler)
    assert ran == ["late"]
    assert isinstance(broker.verdicts()["late"], Ack), "it is acknowledged before the consumer ends"
    assert broker.calls == ["open", "open", "open", "close"]


def refused_by(broker: ListBroker, *, settling: bool = False, others: int = 0, well: int = 0) -> str:
    """Consume from a broker that refuses; what the consumer ends with.

    ``well`` fetches go well before, and ``others`` meet trouble of another kind.
    """
    errors: list[Exception] = [Away("no route")] * others + [Refused("no such user")] * 30
    clock, heard, left = ManualClock(), list[float](), [None] * well

    def refuse() -> None:
        if left:
            left.pop()
            return
        heard.append(clock())
        raise errors.pop(0)

    async def refuse_settling(_: Any) -> None:
        broker.batches.insert(0, [of("a")])  # it comes again
        refuse()

    patched: Any = broker
    if settling:
        patched.settle = refuse_settling
    else:
        patched.on_fetch = refuse
    with Receiver("memory://", monotonic=clock) as receiver:
        consumer: Any = Consumer(broker, receiver, {})

        async def rest(*_: Any) -> None:
            clock.advance(10.0)
            if len(heard) >= 20:
                consumer.stop()

        consumer._rest = rest
        try:
            consumer.run(lambda _: None)
        except UsageError as error:
            assert isinstance(error.__cause__, Refused)
            return f"after {heard[-1] - heard[0]:.0f} s: {error}"
    return "never"


@pytest.mark.parametrize("settling", [False, True], ids=["fetching", "settling"])
def test_a_broker_that_refuses_for_good_ends_the_consumer(settling: bool) -> None:
    """With what it said and where to look; not at once, because a refusal may pass, too."""
    broker = ListBroker([of("a")])
    told = refused_by(broker, settling=settling)
    assert told.startswith("after 30 s: The broker does not")
    assert "Refused: no such user" in told
    assert ("acknowledgement" in told) is settling
    assert broker.calls[-1] == "close"


def test_other_trouble_makes_a_refusal_less_certain() -> None:
    """A server that comes and goes may not know its users yet: it is given its time anew."""
    assert refused_by(ListBroker(), others=5).startswith("after 80 s")


@pytest.mark.parametrize("settling", [False, True], ids=["fetching", "settling"])
def test_what_has_worked_before_is_tried_for_ever(settling: bool) -> None:
    """Then this consumer was let in, and will be again, also if there was nothing for it."""
    assert refused_by(ListBroker([of("a")]), settling=settling, well=1) == "never"
    if not settling:
        assert refused_by(ListBroker(), well=1) == "never"


def test_nothing_is_no_proof_where_it_may_mean_anything() -> None:
    """Who waits for partitions of a topic has not been let in."""
    broker = ListBroker()
    broker.is_let_in = False
    assert refused_by(broker, well=3).startswith("after 30 s")


def test_a_consumer_rests_while_the_store_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not carry the whole queue back and forth meanwhile."""
    store = StagedStore()
    store.fail("claim_many", error=StoreUnavailable("away", retry_after=60.0))
    rests: list[float] = []
    with Receiver(store) as receiver:
        broker = ListBroker([of("one")])
        consumer: Any = Consumer(broker, receiver, {})

        async def rest(colour: Any, pause: float) -> None:
            rests.append(pause)

        monkeypatch.setattr(consumer, "_rest", rest)
        consumer.run_once(lambda _: None)
    assert rests == [5.0]
    assert broker.verdicts()["one"] == Nack(60.0, "store_error", excused=True)


@COLOURS
def test_a_consumer_whose_receiver_was_closed_ends(awaits: bool) -> None:
    """Its messages are given back, and it says why, instead of fetching them for ever."""
    broker, receiver = ListBroker([of("one")], awaits=awaits), Receiver("memory://")
    receiver.close()
    with pytest.raises(StoreClosed, match="closed"):
        consume(broker, receiver, lambda _: None)
    assert isinstance(broker.verdicts()["one"], Nack)
    assert broker.calls == ["open", "close"]
