"""On an event loop: what a cancellation leaves behind, many tasks on one key, and no task or thread for a call."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
from tests.integration.sqlite_helpers import Caller
from tests.unit.receiving import Counted, StagedStore, Told, by_hand, must_not_run

from effectonce import InProgress, Message, Policy, Receiver, State, StoreUnavailable, current
from effectonce.errors import UsageError
from effectonce.stores.base import Store
from effectonce.testing.clocks import ManualClock, wait_until

EVENT = Message("e-1")
REJECT = Policy(busy="reject")


@pytest.fixture
def staged(clock: ManualClock) -> StagedStore:
    return StagedStore(clock=clock)


@pytest.fixture
def receiving(staged: StagedStore, clock: ManualClock, told: Told) -> Receiver:
    return by_hand(Receiver(staged, monotonic=clock, hooks=[told]))


def state_of(receiver: Receiver, message: Message = EVENT) -> str:
    record = receiver.get(receiver.key_of(message))
    return "unknown" if record is None else record.state.name


class Gate:
    """A place where a coroutine stands until it may go on."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.open = asyncio.Event()

    async def __call__(self) -> None:
        self.reached.set()
        await self.open.wait()


async def cancelled(call: Awaitable[Any], gate: Gate) -> None:
    """Cancel a call that stands at a gate, open the gate, and see it end as cancelled."""
    task = asyncio.ensure_future(call)
    await gate.reached.wait()
    task.cancel()
    gate.open.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()


Call = Callable[[Receiver, Any], Awaitable[Any]]


async def claim_block(receiver: Receiver, handler: Any) -> None:
    async with receiver.claim("k"):
        await handler(EVENT)


CALLS: dict[str, Call] = {
    "aprocess": lambda receiver, handler: receiver.aprocess(EVENT, handler),
    "decorated": lambda receiver, handler: receiver.idempotent(operation="o")(handler)(EVENT),
    "outcome": lambda receiver, handler: receiver.idempotent(operation="o")(handler).outcome(EVENT),
    "claim": claim_block,
}


async def never(_: Message) -> None:
    raise AssertionError("the handler ran")


def states(store: StagedStore) -> list[str]:
    return [record.state.name for record in store._records.values()]


# Cancelled while claiming


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("moment", ["before", "after"])
def test_cancelled_while_claiming_leaves_no_claim(
    receiving: Receiver, staged: StagedStore, moment: str, call: str
) -> None:
    """Whether the store had granted the claim or not: the handler never began, so the key is free."""

    async def main() -> None:
        gate = Gate()
        getattr(staged, moment)["claim"] = gate
        await cancelled(CALLS[call](receiving, never), gate)

    asyncio.run(main())
    assert "PENDING" not in states(staged)
    assert not receiving._keeper.live


def test_a_cancelled_claim_is_no_attempt(receiving: Receiver, staged: StagedStore) -> None:
    """A key whose callers went away before its handler began has used up nothing."""

    async def main() -> None:
        for _ in range(3):
            gate = Gate()
            staged.after["claim"] = gate
            await cancelled(receiving.aprocess(EVENT, never, policy=Policy(max_attempts=1)), gate)
        staged.recover()
        outcome = await receiving.aprocess(EVENT, Counted(), policy=Policy(max_attempts=1))
        assert outcome.status == "executed"

    asyncio.run(main())


def test_cancelled_while_the_store_is_away(receiving: Receiver, staged: StagedStore) -> None:
    """When the claim can't be given back either, its lease ends it, and the cancellation is heard all the same."""

    async def main() -> None:
        gate = Gate()
        staged.after["claim"] = gate
        task = asyncio.ensure_future(receiving.aprocess(EVENT, never))
        await gate.reached.wait()
        staged.recover()
        staged.fail("claim", "complete", error=StoreUnavailable("gone"))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert not receiving._keeper.live


def test_cancelled_while_waiting(receiving: Receiver) -> None:
    """A duplicate that gives up leaves the running attempt alone."""

    async def main() -> None:
        gate = Gate()

        async def handler(_: Message) -> str:
            await gate()
            return "first"

        first = asyncio.ensure_future(receiving.aprocess(EVENT, handler))
        await gate.reached.wait()
        second = asyncio.ensure_future(receiving.aprocess(EVENT, never))
        for _ in range(5):
            await asyncio.sleep(0)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        gate.open.set()
        assert (await first).value == "first"

    asyncio.run(main())


# Cancelled in the handler


@pytest.mark.parametrize("call", CALLS)
def test_cancelled_in_the_handler_keeps_the_claim(
    receiving: Receiver, staged: StagedStore, clock: ManualClock, call: str
) -> None:
    """Nobody knows how far it came: a cancellation is not the handler's word, and only the lease ends the claim."""

    async def main() -> None:
        gate = Gate()

        async def handler(_: Message) -> None:
            await gate()

        task = asyncio.ensure_future(CALLS[call](receiving, handler))
        await gate.reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert states(staged) == ["PENDING"]
    assert not receiving._keeper.live


def test_after_a_cancelled_handler(receiving: Receiver, clock: ManualClock) -> None:
    """A retry is refused while the lease lasts, and takes over after it."""

    async def main() -> None:
        gate = Gate()

        async def handler(_: Message) -> None:
            await gate()

        task = asyncio.ensure_future(receiving.aprocess(EVENT, handler))
        await gate.reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(InProgress):
            await receiving.aprocess(EVENT, never, policy=REJECT)
        clock.advance(500)
        assert (await receiving.aprocess(EVENT, Counted())).attempt == 2

    asyncio.run(main())


def test_a_timeout_around_a_call(receiving: Receiver, staged: StagedStore) -> None:
    """asyncio.timeout() works as around any await, and the claim is kept."""

    async def main() -> None:
        async def handler(_: Message) -> None:
            await asyncio.Event().wait()

        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await receiving.aprocess(EVENT, handler)

    asyncio.run(main())
    assert states(staged) == ["PENDING"]


def test_a_callers_cancellation_is_heard_after_the_lease(receiving: Receiver, clock: ManualClock) -> None:
    """Also when the lease happens to be over by then: the task ends as cancelled, not with LeaseLost."""

    async def main() -> None:
        gate = Gate()

        async def handler(_: Message) -> None:
            await gate()

        task = asyncio.ensure_future(receiving.aprocess(EVENT, handler))
        await gate.reached.wait()
        clock.advance(500)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    asyncio.run(main())


def test_a_handler_may_keep_the_loss_of_its_lease_to_itself(receiving: Receiver) -> None:
    """Its task was cancelled for that alone, and is not taken for cancelled afterwards: time-outs go on to work."""

    async def handler(_: Message) -> str:
        receiving._keeper.lose(current(), "by hand")
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return "done"

    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(None) as limit:
                await receiving.aprocess(EVENT, handler)
                limit.reschedule(0)
                await asyncio.Event().wait()

    asyncio.run(main())


def test_a_handler_that_ends_its_own_task_is_cancelled(receiving: Receiver, staged: StagedStore) -> None:
    """A CancelledError from inside, such as of a cancelled helper task, is no word either."""

    async def handler(_: Message) -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(receiving.aprocess(EVENT, handler, policy=Policy(remember=Exception)))
    assert states(staged) == ["PENDING"]


# Cancelled while recording


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("moment", ["before", "after"])
def test_cancelled_while_completing_is_recorded(
    receiving: Receiver, staged: StagedStore, moment: str, call: str
) -> None:
    """The handler has run, so its result is written first; then the cancellation is heard."""

    async def handler(_: Message) -> str:
        return "ran"

    async def main() -> None:
        gate = Gate()
        getattr(staged, moment)["complete"] = gate
        await cancelled(CALLS[call](receiving, handler), gate)

    asyncio.run(main())
    assert states(staged) == ["COMPLETED"]
    assert not receiving._keeper.live


def test_a_result_recorded_through_a_cancellation_is_replayed(
    receiving: Receiver, staged: StagedStore
) -> None:
    """The retry gets what the cancelled caller would have got."""

    async def main() -> None:
        gate = Gate()
        staged.before["complete"] = gate
        await cancelled(receiving.aprocess(EVENT, Counted("ran")), gate)
        staged.recover()
        assert (await receiving.aprocess(EVENT, never)).value == "ran"

    asyncio.run(main())


def test_cancelled_while_releasing_is_released(receiving: Receiver, staged: StagedStore) -> None:
    """The handler said that it failed; a retry may run at once."""

    async def main() -> None:
        gate = Gate()
        staged.before["complete"] = gate
        await cancelled(receiving.aprocess(EVENT, Counted(ValueError())), gate)
        staged.recover()
        assert (await receiving.aprocess(EVENT, Counted())).attempt == 2

    asyncio.run(main())


@pytest.mark.parametrize("verb", ["claim", "complete"])
def test_cancelled_again_and_again(receiving: Receiver, staged: StagedStore, verb: str) -> None:
    """However impatient the caller is, and anyio cancels at every turn: the store is asked twice at most."""

    async def main() -> None:
        async def slow() -> None:
            cancel()
            for _ in range(20):  # a round trip takes some turns of the loop
                await asyncio.sleep(0)

        def cancel() -> None:
            task.cancel()
            if not task.done():
                asyncio.get_running_loop().call_soon(cancel)

        staged.before[verb] = slow
        task = asyncio.ensure_future(receiving.aprocess(EVENT, Counted("ran")))
        await asyncio.wait([task])
        assert task.cancelled()

    asyncio.run(main())
    assert staged.calls.count(verb) == 2
    assert state_of(receiving) == ("ABSENT" if verb == "claim" else "COMPLETED")


def test_cancelled_while_the_result_cant_be_recorded(receiving: Receiver, staged: StagedStore) -> None:
    """The cancellation is heard, and the keeper goes on with the write."""

    async def main() -> None:
        gate = Gate()
        staged.before["complete"] = gate
        task = asyncio.ensure_future(receiving.aprocess(EVENT, Counted("ran")))
        await gate.reached.wait()
        staged.fail("complete", error=StoreUnavailable("gone"))
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    asyncio.run(main())
    (attempt,) = receiving._keeper.live.values()
    assert attempt.unrecorded is not None
    assert attempt.unrecorded.state is State.COMPLETED


# Many tasks


def test_many_tasks_one_key(store: Store) -> None:
    """Of a hundred tasks with one message one runs it, all get its result, and the loop is never blocked."""
    receiver = Receiver(store)
    runs = []

    async def handler(_: Message) -> str:
        runs.append(current().fence)
        await asyncio.sleep(0.01)
        return "once"

    async def main() -> list[Any]:
        return await asyncio.gather(*(receiver.aprocess(EVENT, handler) for _ in range(100)))

    outcomes = asyncio.run(main())
    assert {outcome.value for outcome in outcomes} == {"once"}
    assert sorted(outcome.status for outcome in outcomes) == ["executed"] + ["replayed"] * 99
    assert len(runs) == 1


def test_many_tasks_many_keys(store: Store) -> None:
    """Handlers of different keys run side by side; each sees its own attempt."""
    receiver = Receiver(store)

    async def main() -> list[Any]:
        inside = 0
        all_inside = asyncio.Event()

        async def handler(message: Message) -> bool:
            nonlocal inside
            inside += 1
            if inside == 20:
                all_inside.set()
            await all_inside.wait()
            return current().key == receiver.key_of(message)

        messages = [Message(f"e-{number}") for number in range(20)]
        return await asyncio.gather(*(receiver.aprocess(message, handler) for message in messages))

    assert all(outcome.value for outcome in asyncio.run(main()))


def test_two_loops_one_key(store: Store, told: Told) -> None:
    """A duplicate on another thread's loop is woken when the first has ended."""
    receiver = Receiver(store, hooks=[told])
    entered, leave = threading.Event(), threading.Event()

    async def handler(_: Message) -> str:
        entered.set()
        await asyncio.to_thread(leave.wait, 20)
        return "first"

    first = Caller(lambda: asyncio.run(receiver.aprocess(EVENT, handler)))
    assert entered.wait(20)
    second = Caller(lambda: asyncio.run(receiver.aprocess(EVENT, must_not_run)))
    wait_until(lambda: "busy" in told.kinds())
    leave.set()
    assert [first.answer().value, second.answer().value] == ["first", "first"]


def test_no_task_for_a_call(store: Store) -> None:
    """A call runs in its caller's own task; while its handler runs there is no other, and none is left."""
    receiver = Receiver(store)
    tasks = []

    async def handler(_: Message) -> None:
        tasks.append(asyncio.all_tasks() == {asyncio.current_task()})

    async def main() -> None:
        task = asyncio.current_task()
        for number in range(3):
            await receiver.aprocess(Message(f"e-{number}"), handler)
            await receiver.aprocess(Message(f"e-{number}"), never)
        assert asyncio.all_tasks() == {task}

    asyncio.run(main())
    assert tasks == [True] * 3


def test_no_thread_for_a_call(store: Store) -> None:
    """However many calls there are at a time, threads don't grow with them."""
    receiver = Receiver(store)

    async def main() -> int:
        await asyncio.gather(*(receiver.aprocess(Message(f"e-{number}"), Counted()) for number in range(100)))
        return threading.active_count()

    before = threading.active_count()
    assert asyncio.run(main()) - before <= 3


def test_a_task_keeps_its_context(store: Store) -> None:
    """After a call the task is as before: no attempt is current, and nothing is cancelled."""
    receiver = Receiver(store)

    async def main() -> None:
        outer = []

        async def handler(_: Message) -> None:
            mine = current()
            await receiver.aprocess(Message("inner"), Counted())
            outer.append(current() is mine)

        await receiver.aprocess(EVENT, handler)
        assert outer == [True]
        with pytest.raises(Exception, match="only inside a handler"):
            current()

    asyncio.run(main())


def test_trio_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call from trio claims nothing, and its error says how to call from there instead."""
    receiver, running = Receiver("memory://"), SimpleNamespace(in_trio_run=lambda: True)
    monkeypatch.setitem(sys.modules, "trio", cast("ModuleType", SimpleNamespace(lowlevel=running)))
    with pytest.raises(UsageError, match=r"trio\.to_thread\.run_sync"):
        receiver.aprocess(EVENT, never).send(None)
    with pytest.raises(UsageError, match=r"trio\.to_thread\.run_sync"):
        claim_block(receiver, never).send(None)
    assert state_of(receiver) == "unknown"
