"""Steps: what a handler has finished is finished, however often its attempt is repeated."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from tests.unit.receiving import Colour, Counted, Crash, StagedStore, Told, by_hand, must_not_run

from effectonce import (
    InDoubt,
    LeaseLost,
    Message,
    Outcome,
    Policy,
    Receiver,
    State,
    StoreUnavailable,
    current,
)
from effectonce._blocking import run
from effectonce._records import Claim
from effectonce.errors import (
    AttemptsExhausted,
    ColourMismatch,
    InvalidKey,
    ResultUnavailable,
    StepMismatch,
    StoreMismatch,
    UsageError,
)
from effectonce.keys import new_owner
from effectonce.steps import Step, finished
from effectonce.stores.memory import MemoryStore
from effectonce.testing.clocks import ManualClock

EVENT = Message("e-1", {"order": 7})
LEASE = 120.0

Ask = Callable[..., Awaitable[Any]]
Body = Callable[[Ask], Awaitable[Any]]


@dataclass
class Receipt:
    """A result that only its annotation brings back."""

    cents: int


class Bench:
    """A receiver whose store lists its round trips, a sink that counts, and a colour to speak in."""

    def __init__(self, colour: Colour) -> None:
        self.colour, self.clock, self.told = colour, ManualClock(), Told()
        self.store = StagedStore(clock=self.clock)
        self.receiver = by_hand(Receiver(self.store, monotonic=self.clock, hooks=[self.told]))
        self.sink: list[str] = []

    def does(self, name: str, value: Any = None) -> Callable[..., Any]:
        """A function for a step: it has an effect, and returns something."""

        def effect(*args: Any) -> Any:
            self.sink.append(name)
            if isinstance(value, BaseException):
                raise value
            return args[0] if value is None and args else value

        return effect

    def deliver(self, body: Body, message: Message = EVENT, **choices: Any) -> Outcome[Any]:
        """Process a message with a handler that asks for steps."""
        return deliver(self.colour, self.receiver, message, body, **choices)

    def fails(
        self,
        body: Body,
        error: type[BaseException] | tuple[type[BaseException], ...] = OSError,
        **choices: Any,
    ) -> Any:
        """The same with a handler that has to fail; what it raises."""
        with pytest.raises(error) as raised:
            self.deliver(body, **choices)
        return raised.value

    def crashes(self, body: Body, **choices: Any) -> None:
        """The same with a handler that ends without a word, until its lease is over."""

        async def dying(ask: Ask) -> None:
            await body(ask)
            raise Crash

        self.fails(dying, Crash, **choices)
        self.clock.advance(LEASE + 1)

    def record(self) -> Any:
        return self.receiver.get(self.receiver.key_of(EVENT))


def deliver(colour: Colour, receiver: Receiver, message: Message, body: Body, **choices: Any) -> Outcome[Any]:
    """Process a message with a handler that asks for steps in a colour."""
    if colour.name == "blocking":

        async def step(*args: Any, **kwargs: Any) -> Any:
            return current().step(*args, **kwargs)

        return receiver.process(message, lambda _: run(body(step)), **choices)  # type: ignore[arg-type]

    async def astep(*args: Any, **kwargs: Any) -> Any:
        return await current().astep(*args, **kwargs)

    async def handler(_: Message) -> Any:
        return await body(astep)

    return asyncio.run(receiver.aprocess(message, handler, **choices))


@pytest.fixture
def bench(colour: Colour) -> Iterator[Bench]:
    bench = Bench(colour)
    with bench.receiver:
        yield bench


def asks(*steps: tuple[str, Callable[..., Any]] | BaseException) -> Body:
    """A handler that asks for steps one after the other, and returns what they gave; an exception is raised."""

    async def body(ask: Ask) -> list[Any]:
        results = []
        for step in steps:
            if isinstance(step, BaseException):
                raise step
            results.append(await ask(*step))
        return results

    return body


# Once


def test_a_finished_step_is_not_run_again(bench: Bench) -> None:
    """A retry after an error is given what the first attempt has finished, and goes on from there."""
    reserve, charge = bench.does("reserve", [4, "left"]), bench.does("charge", "ch_1")
    bench.fails(asks(("reserve", reserve), OSError("away")))
    outcome = bench.deliver(asks(("reserve", must_not_run), ("charge", charge)))
    assert (outcome.value, outcome.attempt) == ([[4, "left"], "ch_1"], 2)
    assert bench.sink == ["reserve", "charge"]
    assert bench.deliver(must_not_run).value == [[4, "left"], "ch_1"]


def test_a_crash_costs_the_step_that_was_running(bench: Bench) -> None:
    """Who takes over is given what is finished; the step that was not is run again."""
    dying = bench.does("charge", Crash())
    bench.fails(asks(("reserve", bench.does("reserve")), ("charge", dying)), Crash)
    bench.clock.advance(LEASE + 1)
    again = asks(("reserve", must_not_run), ("charge", bench.does("charge")), ("ship", bench.does("ship")))
    assert bench.deliver(again).attempt == 2
    assert bench.sink == ["reserve", "charge", "charge", "ship"]


def test_a_step_passes_its_arguments(bench: Bench) -> None:
    """Positional ones and named ones, as the function has them."""

    def reserve(order: int, *, shelf: str) -> str:
        return f"{order} from {shelf}"

    async def body(ask: Ask) -> Any:
        return await ask("reserve", reserve, 7, shelf="B")

    assert bench.deliver(body).value == "7 from B"


def test_a_step_may_be_awaited(bench: Bench) -> None:
    """On an event loop a step is a coroutine function, or a plain one; a blocking one can't await anything."""
    if bench.colour.name == "blocking":
        pytest.skip("nothing is awaited here")

    async def reserve(order: int = 7) -> Receipt:
        bench.sink.append("reserve")
        return Receipt(order)

    async def charge() -> int:
        return 500

    # What a lambda gives is awaited, too.
    bench.crashes(asks(("reserve", reserve), ("charge", lambda: charge())))
    outcome = bench.deliver(asks(("reserve", reserve), ("charge", must_not_run), ("ship", dict)))
    assert bench.sink == ["reserve"]
    assert outcome.status == "executed"


def test_a_replayed_step_has_its_type(bench: Bench) -> None:
    """The function's annotation says what comes back, as it does for results."""

    def charge(cents: int) -> Receipt:
        bench.sink.append("charge")
        return Receipt(cents)

    async def body(ask: Ask) -> Any:
        receipt = await ask("charge", charge, 500)
        assert type(receipt) is Receipt
        return receipt.cents

    bench.crashes(body)
    assert bench.deliver(body).value == 500
    assert bench.sink == ["charge"]


def test_steps_survive_many_attempts(bench: Bench) -> None:
    """Each attempt finishes one step more, and none of them twice."""
    for finished_steps in range(5):
        steps = [(f"step {n}", bench.does(f"step {n}", n)) for n in range(finished_steps + 1)]
        bench.crashes(asks(*steps))
    outcome = bench.deliver(asks(*[(f"step {n}", must_not_run) for n in range(5)]))
    assert (outcome.value, outcome.attempt) == ([0, 1, 2, 3, 4], 6)
    assert bench.sink == [f"step {n}" for n in range(5)]


def test_a_step_that_raises_is_not_finished(bench: Bench) -> None:
    """It may be asked for again, at once or by the next attempt: only results are remembered."""

    async def body(ask: Ask) -> Any:
        with pytest.raises(OSError, match="away"):
            await ask("charge", bench.does("charge", OSError("away")))
        return await ask("charge", bench.does("charge", "ch_1"))

    assert bench.deliver(body).value == "ch_1"
    assert bench.sink == ["charge", "charge"]


@pytest.mark.parametrize(
    "value", [None, 0, "", [], {}, {"$": 1}, (1, (2,)), {1: {2}}, 1.5, b"\x00"], ids=repr
)
def test_every_result_comes_back(bench: Bench, value: Any) -> None:
    """What a step returned is what later attempts are given, with its type."""
    bench.crashes(asks(("step", lambda: value), ("another", lambda: [value, value])))
    first, both = bench.deliver(asks(("step", must_not_run), ("another", must_not_run))).value
    assert (first, type(first)) == (value, type(value))
    assert both == [value, value]


# Cost


def test_a_step_is_one_round_trip(bench: Bench) -> None:
    """Claim, one renewal for each step, completion; going on where another stopped costs nothing more."""
    bench.fails(asks(("one", dict), ("two", dict), OSError()))
    assert bench.store.calls == ["claim", "renew", "renew", "complete"]
    bench.store.calls.clear()
    bench.deliver(asks(("one", must_not_run), ("two", must_not_run), ("three", dict)))
    assert bench.store.calls == ["claim", "renew", "complete"]


def test_a_handler_without_steps_has_no_journal(bench: Bench) -> None:
    """Who asks for no step sends nothing and stores nothing for it."""
    bench.fails(asks(OSError()))
    assert bench.store.calls == ["claim", "complete"]
    assert bench.record().result is None


def test_the_answer_takes_the_place_of_the_journal(bench: Bench) -> None:
    """When the key is done its steps are forgotten."""
    bench.deliver(asks(("one", lambda: "x" * 1000)))
    assert bench.record().progress is None
    assert b"one" not in bench.record().result


def test_a_step_renews_the_lease(bench: Bench) -> None:
    """An attempt that finishes a step every now and then is not lost, whoever looks after its lease."""

    async def body(ask: Ask) -> Any:
        for number in range(4):
            bench.clock.advance(LEASE * 0.9)
            await ask(f"step {number}", dict)
        assert not current().lost
        return "done"

    assert bench.deliver(body).value == "done"


# Recording


def test_a_lost_reply_is_asked_for_again(bench: Bench) -> None:
    """The journal is sent twice, the step is run once."""
    replies = iter([StoreUnavailable("lost")])

    def lose() -> None:
        error = next(replies, None)
        if error is not None:
            raise error

    bench.store.after["renew"] = lose
    assert bench.deliver(asks(("charge", bench.does("charge", 1)))).value == [1]
    assert bench.store.calls == ["claim", "renew", "renew", "complete"]
    assert bench.sink == ["charge"]


def test_a_step_that_could_not_be_recorded_has_no_result(bench: Bench) -> None:
    """The handler is told so; the release takes the step along, and the next attempt does not run it again."""
    bench.store.fail("renew", error=StoreUnavailable("away"))
    error = bench.fails(asks(("charge", bench.does("charge", 1))), StoreUnavailable)
    assert "'charge'" in str(error)
    assert "could not be recorded" in str(error)
    bench.store.recover()
    assert bench.deliver(asks(("charge", must_not_run))).value == [1]
    assert bench.sink == ["charge"]


def test_a_step_that_could_not_be_recorded_may_be_asked_for_again(bench: Bench) -> None:
    """Then it is recorded, not run."""

    async def body(ask: Ask) -> Any:
        bench.store.fail("renew", error=StoreUnavailable("away"))
        with pytest.raises(StoreUnavailable):
            await ask("charge", bench.does("charge", 1))
        bench.store.recover()
        return await ask("charge", must_not_run)

    bench.crashes(body)
    assert finished(bench.record()) == {"charge": 1}
    assert bench.sink == ["charge"]


def test_the_next_step_takes_along_what_was_not_recorded(bench: Bench) -> None:
    """Every write has the whole journal."""

    async def body(ask: Ask) -> Any:
        bench.store.fail("renew", error=StoreUnavailable("away"))
        with pytest.raises(StoreUnavailable):
            await ask("one", dict)
        bench.store.recover()
        await ask("two", dict)

    bench.crashes(body)
    assert list(finished(bench.record())) == ["one", "two"]


def take_over(bench: Bench, value: str = "theirs") -> None:
    """Let another process take the key over and answer it."""
    bench.clock.advance(LEASE + 1)
    by_hand(Receiver(bench.store, monotonic=bench.clock)).process(EVENT, Counted(value))


def test_a_denied_step_gives_no_result(bench: Bench) -> None:
    """Who was taken over while its step ran has lost: LeaseLost in the handler, and the other's answer outside."""
    heard: list[BaseException] = []

    def late() -> str:
        bench.sink.append("late")
        take_over(bench)
        return "mine"

    async def body(ask: Ask) -> Any:
        try:
            return await ask("late", late)
        except LeaseLost as error:
            heard.append(error)
            assert current().lost
            raise

    outcome = bench.deliver(body)
    assert (outcome.value, outcome.replayed) == ("theirs", True)
    assert "must not be used" in str(heard[0])
    assert bench.told.kinds().count("lease_lost") == 1


def test_a_lost_attempt_begins_no_step(bench: Bench) -> None:
    """Before a step runs, the lease is looked at."""

    async def body(ask: Ask) -> Any:
        take_over(bench)
        await ask("late", must_not_run)

    assert bench.deliver(body).value == "theirs"


def test_a_step_after_the_end_is_refused(bench: Bench) -> None:
    """A task or thread that outlives the handler can't finish anything any more."""
    kept: list[Any] = []

    async def body(ask: Ask) -> None:
        kept.append(current())

    bench.deliver(body)
    with pytest.raises(UsageError, match="after the end of its attempt"):
        kept[0].step("late", must_not_run)


def test_a_cancelled_step_is_recorded_first() -> None:
    """A task that is cancelled while its step is being recorded hears of it when that is done."""
    store = StagedStore()

    async def handler(_: Message) -> Any:
        return await current().astep("charge", Counted(1))

    async def main() -> None:
        with Receiver(store) as receiver:
            task = asyncio.ensure_future(receiver.aprocess(EVENT, handler))

            def strike() -> None:
                store.after.pop("renew")
                task.cancel()

            store.after["renew"] = lambda: (strike(), asyncio.sleep(0))[1]
            with pytest.raises(asyncio.CancelledError):
                await task
            record = receiver.get(receiver.key_of(EVENT))
            assert record is not None
            assert (record.state, finished(record)) == (State.PENDING, {"charge": 1})

    asyncio.run(main())


# Order


def test_another_step_where_one_is_recorded_is_refused(bench: Bench) -> None:
    """A program that has changed is told what was recorded, what it asked for, and what to do; nothing is run."""
    bench.crashes(asks(("reserve", dict), ("charge", dict)))
    error = bench.fails(asks(("reserve", must_not_run), ("check", must_not_run)), StepMismatch)
    assert (error.recorded, error.asked) == ("charge", "check")
    for word in ("'charge'", "'check'", "version=2", bench.receiver.key_of(EVENT)):
        assert word in str(error)
    assert list(finished(bench.record())) == ["reserve", "charge"]
    assert bench.deliver(asks(("reserve", must_not_run), ("charge", must_not_run))).status == "executed"


def test_steps_in_another_order_are_refused(bench: Bench) -> None:
    """A handler that asks in another order each time is as wrong as one that has changed."""
    bench.crashes(asks(("one", dict), ("two", dict)))
    error = bench.fails(asks(("two", must_not_run)), StepMismatch)
    assert (error.recorded, error.asked) == ("one", "two")


def test_a_mismatch_is_never_remembered(bench: Bench) -> None:
    """It is about the program: with the right one the key goes on, also where every error is an answer."""
    every = Policy(remember=(Exception,))
    bench.crashes(asks(("one", dict)), policy=every)
    bench.fails(asks(("two", must_not_run)), StepMismatch, policy=every)
    assert bench.deliver(asks(("one", must_not_run)), policy=every).value == [{}]


def test_a_step_that_was_added_has_a_version(bench: Bench) -> None:
    """The order is checked among steps of one version: what is new may stand anywhere."""
    bench.crashes(asks(("reserve", dict), ("charge", dict)))

    async def body(ask: Ask) -> None:
        await ask("reserve", must_not_run)
        await ask("check", bench.does("check"), version=2)
        await ask("charge", must_not_run)
        await ask("ship", bench.does("ship"))

    bench.crashes(body)
    assert bench.sink == ["check", "ship"]
    bench.deliver(body)
    assert bench.sink == ["check", "ship"]


def test_a_step_that_has_moved_has_a_version(bench: Bench) -> None:
    """It is found by its name, and not run again; a step that is gone is passed over likewise."""
    bench.crashes(asks(("a", dict), ("gone", dict), ("b", dict), ("c", dict)))

    async def body(ask: Ask) -> None:
        await ask("c", must_not_run, version=2)
        await ask("a", must_not_run)
        await ask("b", must_not_run, version=2)

    bench.deliver(body)


def test_a_name_is_used_once(bench: Bench) -> None:
    """Two steps of one name are refused at once, also when the first was given from the journal."""
    bench.crashes(asks(("charge", dict)))
    error = bench.fails(asks(("charge", must_not_run), ("charge", must_not_run)), UsageError)
    assert "'charge'" in str(error)
    bench.fails(asks(("charge", must_not_run), ("ship", dict), ("ship", must_not_run)), UsageError)


@pytest.mark.parametrize("name", ["", "  ", "x" * 256, 7, None, b"step", "a\nb"])
def test_a_step_needs_a_name(bench: Bench, name: Any) -> None:
    """Text that a person can read, and not too long."""
    bench.fails(asks((name, must_not_run)), (UsageError, InvalidKey))


@pytest.mark.parametrize("version", [0, -1, "2", 1.0, None, True])
def test_a_version_is_a_number(bench: Bench, version: Any) -> None:
    """1 or more."""

    async def body(ask: Ask) -> None:
        await ask("step", must_not_run, version=version)

    bench.fails(body, UsageError)


def test_a_step_has_no_steps_of_its_own(bench: Bench) -> None:
    """A step is done as a whole or not at all."""

    def outer() -> Any:
        return current().step("inner", must_not_run)

    error = bench.fails(asks(("outer", outer)), UsageError)
    assert "'inner' is inside of the step 'outer'" in str(error)


# Keys


def test_each_step_has_a_key_of_its_own(bench: Bench) -> None:
    """Inside a step the derived keys are the step's: the same on every attempt, and no other step's."""
    seen: list[list[str]] = []

    async def body(ask: Ask) -> None:
        keys = [current().key_for("bank")]
        seen.append(keys)
        for name in ("one", "two"):
            with pytest.raises(OSError, match="no result"):
                await ask(name, lambda: [keys.append(current().key_for("bank")), _raise("no result")])
        keys.append(current().key_for("bank"))
        raise OSError

    bench.fails(body)
    bench.fails(body)
    first, again = seen
    assert first == again
    assert first[0] == first[-1]
    assert len(set(first)) == 3
    step = Step(current_attempt(bench), "one")
    assert (step.key_for("bank"), step.key[:4]) == (first[1], "one-")


def _raise(text: str) -> None:
    raise OSError(text)


def current_attempt(bench: Bench) -> Any:
    kept: list[Any] = []

    async def body(ask: Ask) -> None:
        kept.append(current())

    bench.deliver(body)
    return kept[0]


# Side by side


def test_tasks_ask_for_steps_in_any_order() -> None:
    """Steps of tasks are matched by their names: whichever was finished first, and whichever asks first."""
    store, clock, runs = MemoryStore(clock=(clock := ManualClock())), clock, []

    def handler_of(names: str, dies: bool) -> Any:
        async def step(name: str) -> str:
            return await current().astep(name, lambda: (runs.append(name), name)[1])

        async def handler(_: Message) -> list[str]:
            start = await current().astep("start", lambda: runs.append("start"))
            assert start is None
            results = await asyncio.gather(*map(step, names))
            await current().astep("end", lambda: runs.append("end"))
            if dies:
                raise Crash
            return results

        return handler

    with by_hand(Receiver(store, monotonic=clock)) as receiver:
        for names in ("ba", "cab"):
            with pytest.raises((Crash, StepMismatch)):
                asyncio.run(receiver.aprocess(EVENT, handler_of(names, dies=True)))
            clock.advance(LEASE + 1)
        assert asyncio.run(receiver.aprocess(EVENT, handler_of("abc", dies=False))).value == ["a", "b", "c"]
    assert runs == ["start", "b", "a", "end", "c"]


def test_threads_ask_for_steps_in_any_order() -> None:
    """The same for threads; all of them are recorded, whoever writes first."""
    store, clock, runs = MemoryStore(clock=(clock := ManualClock())), clock, []
    names = [f"step {number}" for number in range(16)]

    def handler_of(order: list[str], dies: bool) -> Any:
        def handler(_: Message) -> list[str]:
            attempt, results, barrier = current(), {}, threading.Barrier(len(order))

            def step(name: str) -> str:
                runs.append(name)
                return name

            def work(name: str) -> None:
                barrier.wait(20)
                results[name] = attempt.step(name, step, name)

            threads = [threading.Thread(target=work, args=(name,)) for name in order]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if dies:
                raise Crash
            return [results[name] for name in names]

        return handler

    with by_hand(Receiver(store, monotonic=clock)) as receiver:
        with pytest.raises(Crash):
            receiver.process(EVENT, handler_of(names, dies=True))
        assert sorted(runs) == sorted(names)
        clock.advance(LEASE + 1)
        assert receiver.process(EVENT, handler_of(names[::-1], dies=False)).value == names
    assert sorted(runs) == sorted(names)


def test_a_handler_on_a_thread_of_its_loop_has_steps() -> None:
    """What a framework runs on a thread for an event loop asks as blocking code does."""

    async def handler(_: Message) -> Any:
        return await asyncio.to_thread(lambda: current().step("charge", Counted(1)))

    with Receiver("memory://") as receiver:
        assert asyncio.run(receiver.aprocess(EVENT, handler)).value == 1


# Blocks


def test_a_step_is_also_a_block(bench: Bench) -> None:
    """``first`` says whether the work is to be done; ``value`` is its result, then and later."""
    seen: list[tuple[bool, Any]] = []

    async def body(ask: Ask) -> None:
        attempt = current()
        step = attempt.stepping("charge", hint=Receipt)
        if bench.colour.name == "blocking":
            with step:
                if step.first:
                    assert step.complete(Receipt(5)) == Receipt(5)
        else:
            async with step:
                if step.first:
                    assert await step.acomplete(Receipt(5)) == Receipt(5)
        seen.append((step.first, step.value))

    bench.crashes(body)
    bench.deliver(body)
    assert seen == [(True, Receipt(5)), (False, Receipt(5))]


def in_block(colour: Colour, step: Step, inside: Callable[[Step], Any]) -> None:
    """Enter a step in a colour, and do something there."""
    if colour.name == "blocking":
        with step:
            inside(step)
        return

    async def main() -> None:
        async with step:
            inside(step)

    asyncio.run(main())


def blocks(bench: Bench, use: Callable[[Any], Any]) -> Any:
    """Let a handler on this thread use blocks of a colour: asyncio's on a loop of their own."""
    return bench.receiver.process(EVENT, lambda _: use(current())).value


def test_a_block_that_does_not_complete_has_no_result(bench: Bench) -> None:
    """Leaving it is finishing it, with None."""

    def use(attempt: Any) -> None:
        step = attempt.stepping("mail")
        in_block(bench.colour, step, lambda step: None)
        assert step.value is None
        raise Crash

    with pytest.raises(Crash):
        blocks(bench, use)
    assert finished(bench.record()) == {"mail": None}


def test_a_block_that_is_left_by_an_exception_is_not_finished(bench: Bench) -> None:
    """It may be asked for again."""

    def use(attempt: Any) -> Any:
        with pytest.raises(OSError, match="away"):
            in_block(bench.colour, attempt.stepping("mail"), lambda step: _raise("away"))
        step = attempt.stepping("mail")
        in_block(bench.colour, step, lambda step: None)
        return step.first

    assert blocks(bench, use) is True


def test_a_result_that_could_not_be_recorded_stays_the_result_of_its_block(bench: Bench) -> None:
    """Leaving the block does not finish it with None; completing it again tells the store what it was told at first."""

    def use(attempt: Any) -> Any:
        with attempt.stepping("charge") as charge:
            bench.store.fail("renew", error=StoreUnavailable("away"))
            with pytest.raises(StoreUnavailable):
                charge.complete("ch_1")
        with attempt.stepping("mail") as mail:
            with pytest.raises(StoreUnavailable):
                mail.complete("queued")
            bench.store.recover()
            assert mail.complete("another") == "queued"
        with attempt.stepping("label") as label, pytest.raises(ResultUnavailable):
            label.complete(object())
        raise Crash

    with pytest.raises(Crash):
        blocks(bench, use)
    assert finished(bench.record()) == {"charge": "ch_1", "mail": "queued", "label": None}
    bench.clock.advance(LEASE + 1)

    def again(attempt: Any) -> Any:
        values = [attempt.step(name, must_not_run) for name in ("charge", "mail")]
        with pytest.raises(ResultUnavailable):
            attempt.step("label", must_not_run)
        return values

    assert blocks(bench, again) == ["ch_1", "queued"]


def test_inside_a_block_keys_are_the_step_s(bench: Bench) -> None:
    """As they are inside a function; after it they are the attempt's again."""

    def use(attempt: Any) -> Any:
        before, step, inside = attempt.key_for("bank"), attempt.stepping("mail"), list[str]()
        in_block(bench.colour, step, lambda step: inside.append(current().key_for("bank")))
        assert inside == [step.key_for("bank")]
        assert inside != [before] == [attempt.key_for("bank")]

    blocks(bench, use)


def test_a_block_is_used_as_it_is_meant(bench: Bench) -> None:
    """Entered once, completed once and in its colour; a value only when there is one."""

    def use(attempt: Any) -> None:
        step = attempt.stepping("mail")
        with pytest.raises(UsageError, match="not been entered"):
            step.complete()
        with pytest.raises(UsageError, match="no result yet"):
            _ = step.value

        def inside(step: Step) -> None:
            other = step.complete if bench.colour.name == "asyncio" else lambda: run(step.acomplete())
            with pytest.raises(ColourMismatch, match="other colour"):
                other()

        in_block(bench.colour, step, inside)
        with pytest.raises(UsageError, match="entered once"):
            in_block(bench.colour, step, must_not_run)
        with attempt.stepping("again") as again:
            again.complete(1)
            with pytest.raises(UsageError, match="has its result already"):
                again.complete(2)

    blocks(bench, use)


# What can't be remembered


@pytest.mark.parametrize(
    ("value", "why"),
    [(object(), "can't be encoded"), ("x" * 2000, "max_result")],
    ids=["unencodable", "too large"],
)
def test_a_result_that_can_t_be_remembered_is_an_error_at_once(bench: Bench, value: Any, why: str) -> None:
    """The effect has happened, so the step is finished: nobody runs it again, and every attempt hears the same."""
    small = Policy(max_result=1000)
    for _ in range(3):
        error = bench.fails(asks(("charge", bench.does("charge", value))), ResultUnavailable, policy=small)
        assert why in str(error)
        assert "'charge' has been done" in str(error)
    assert bench.sink == ["charge"]


def test_who_needs_no_result_goes_on_without_it(bench: Bench) -> None:
    """The error is the same whenever the step is asked for, so a handler may pass over it."""

    async def body(ask: Ask) -> str:
        with pytest.raises(ResultUnavailable):
            await ask("charge", bench.does("charge", object()))
        with pytest.raises(ResultUnavailable):
            await ask("charge", must_not_run)
        await ask("ship", bench.does("ship"))
        return "done"

    bench.crashes(body)
    assert bench.deliver(body).value == "done"
    assert bench.sink == ["charge", "ship"]


def test_all_steps_together_have_a_limit(bench: Bench) -> None:
    """The journal is a part of the record, and may be as large as a result."""
    steps = [(f"step {number}", lambda: "x" * 300) for number in range(4)]
    error = bench.fails(asks(*steps), ResultUnavailable, policy=Policy(max_result=1000))
    assert "'step 3'" in str(error) or "'step 2'" in str(error)


def test_a_result_of_a_type_that_is_gone_says_so(bench: Bench) -> None:
    """As for results: the error names the step and the way out."""

    def charge() -> Receipt:
        return Receipt(5)

    bench.crashes(asks(("charge", charge)))
    error = bench.fails(asks(("charge", must_not_run)), ResultUnavailable)
    assert "The step 'charge' was done once" in str(error)


def test_a_journal_that_can_t_be_read_runs_nothing(bench: Bench) -> None:
    """A newer effectonce's, or another program's."""
    claim = Claim(bench.receiver.key_of(EVENT), new_owner(), b"", LEASE, LEASE)
    held = run(bench.store.claim(claim)).record
    assert held is not None
    key, owner, fence = held.key, held.owner, held.fence
    from effectonce._records import Completion

    run(bench.store.complete(Completion(key, owner, fence, State.ABSENT, b"?journal", LEASE)))
    error = bench.fails(asks(("charge", must_not_run)), StoreMismatch, message=Message("e-1"))
    assert "can't be read" in str(error)


def test_a_coroutine_is_not_a_blocking_step(bench: Bench) -> None:
    """It is not run, and the handler may ask again in the right way."""

    async def charge() -> None:
        raise AssertionError

    if bench.colour.name == "blocking":
        bench.fails(asks(("charge", charge)), ColourMismatch)
        assert bench.record().progress is None
    else:
        bench.fails(asks(("charge", charge)), AssertionError)


# With the rest


def test_steps_are_told(bench: Bench) -> None:
    """An event for each step that is finished, and for each that is given from the journal."""
    bench.fails(asks(("reserve", dict), OSError()))
    bench.deliver(asks(("reserve", must_not_run), ("charge", dict)))
    steps = [(event.detail, event.attempt) for event in bench.told if event.kind == "step"]
    assert steps == [("reserve", 1), ("reserve: replayed", 2), ("charge", 2)]
    assert bench.receiver.stats().since_start.counts["step"] == 3
    assert bench.receiver.stats().since_start.deliveries == 2


def test_a_crash_in_doubt_shows_what_was_finished(bench: Bench) -> None:
    """At most once: a prober sees how far it came, and what it says was not applied goes on from there."""
    once = Policy(on_crash="in_doubt")
    bench.crashes(asks(("reserve", lambda: 4)), policy=once)
    bench.fails(must_not_run, InDoubt, policy=once)
    assert finished(bench.record()) == {"reserve": 4}
    assert bench.receiver.resolve(bench.record().key, "not_applied")
    assert bench.deliver(asks(("reserve", must_not_run), ("charge", dict)), policy=once).value == [4, {}]


def test_an_error_in_doubt_keeps_the_steps(bench: Bench) -> None:
    """So does an error after which nobody knows."""
    unsure = Policy(in_doubt=(OSError,))
    bench.fails(asks(("reserve", lambda: 4), OSError()), policy=unsure)
    record = bench.record()
    assert (record.state, finished(record)) == (State.IN_DOUBT, {"reserve": 4})


def test_attempts_are_counted_whatever_they_finish(bench: Bench) -> None:
    """max_attempts is about attempts: when they are used up the key fails, with all its steps."""
    twice = Policy(max_attempts=2)
    bench.crashes(asks(("one", dict)), policy=twice)
    bench.crashes(asks(("one", must_not_run), ("two", dict)), policy=twice)
    bench.fails(must_not_run, AttemptsExhausted, policy=twice)


def test_an_unprotected_attempt_runs_its_steps(bench: Bench) -> None:
    """Nobody remembers them; names are checked all the same."""
    bench.store.fail("claim", "renew", error=StoreUnavailable("away"))
    open_ = Policy(fallback="open")
    assert bench.deliver(asks(("one", lambda: 1), ("two", lambda: 2)), policy=open_).value == [1, 2]
    bench.fails(asks(("one", dict), ("one", must_not_run)), UsageError, policy=open_)


def test_decorated_functions_have_steps(colour: Colour) -> None:
    """A call that is repeated with the same arguments goes on."""
    runs: list[str] = []
    with Receiver("memory://") as receiver:

        @receiver.idempotent(key="order")
        def ship(order: str, dies: bool) -> list[str]:
            first = current().step("reserve", lambda: (runs.append("reserve"), "r")[1])
            if dies:
                raise OSError
            return [first, current().step("charge", lambda: (runs.append("charge"), "c")[1])]

        function = receiver.idempotent(key="order", operation="ship it", ignore=("dies",))(ship.__wrapped__)  # type: ignore[attr-defined]
        with pytest.raises(OSError):
            function("o-1", True)
        assert function("o-1", False) == ["r", "c"]
    assert runs == ["reserve", "charge"]


def test_claimed_blocks_have_steps(colour: Colour) -> None:
    """``current()`` and ``claim.attempt`` are the attempt of the block."""
    with Receiver("memory://") as receiver:
        for dies in (True, False):
            sink: list[int] = []
            try:
                with receiver.claim("k") as claim:
                    claim.attempt.step("one", sink.append, 1)
                    if dies:
                        raise OSError
                    claim.complete(current().step("two", lambda: 2))
            except OSError:
                assert sink == [1]
            else:
                assert (sink, claim.value) == ([], 2)


def test_handlers_of_a_batch_have_steps(bench: Bench) -> None:
    """Each message has its own, however many are handled side by side."""
    messages = [Message(f"e-{number}") for number in range(40)]
    sink: list[str] = []

    def handler(message: Message) -> str:
        current().step("one", sink.append, message.id)
        if len(sink) <= len(messages) and int(message.id[2:]) % 2:
            raise OSError
        return str(current().step("two", lambda: message.id))

    first = bench.colour.batch(bench.receiver, messages, handler)
    assert [outcome.status for outcome in first] == ["executed", "failed"] * 20
    sink.append("the second time")
    second = bench.colour.batch(bench.receiver, messages, handler)
    assert [outcome.value for outcome in second] == [message.id for message in messages]
    assert len(sink) == len(messages) + 1


def test_an_attempt_with_steps_leaves_nothing_to_the_garbage_collector(bench: Bench) -> None:
    """Attempt, journal and steps go when the handler has ended."""
    seen: list[weakref.ref[Any]] = []

    async def body(ask: Ask) -> None:
        seen.append(weakref.ref(current()))
        await ask("one", dict)
        await ask("two", dict)

    gc.collect()
    gc.disable()
    try:
        bench.deliver(body)
        assert seen[0]() is None
    finally:
        gc.enable()


def test_finished_reads_a_record() -> None:
    """Of a key that has no answer: what its attempts have finished, in order; of any other nothing."""
    with Receiver("memory://") as receiver:
        with pytest.raises(OSError):
            receiver.process(
                EVENT, lambda _: [current().step("b", dict), current().step("a", list), _raise("")]
            )
        record = receiver.get(receiver.key_of(EVENT))
        assert record is not None
        assert list(finished(record).items()) == [("b", {}), ("a", [])]
        receiver.process(EVENT, Counted())
        done = receiver.get(receiver.key_of(EVENT))
        assert done is not None
        assert finished(done) == {}
