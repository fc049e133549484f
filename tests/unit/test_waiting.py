"""Duplicates that wait: for this process's own attempts, and for another's by the store's word."""

from __future__ import annotations

import asyncio
import threading
from contextvars import copy_context
from typing import Any

import pytest
from tests.unit.receiving import Counted, StagedStore, must_not_run

from effectonce import Message, Policy, Receiver, StoreUnavailable
from effectonce._records import Record, Verdict
from effectonce.errors import UsageError

EVENT = Message("e-1")


class Watched(StagedStore):
    """A store that can tell of endings. ``word`` is what happens while somebody waits."""

    def __init__(self, word: Any) -> None:
        super().__init__()
        self.word = word

    async def watch(self, record: Record, seconds: float) -> bool:
        self.calls.append("watch")
        return bool(self.word())


def held_elsewhere(store: StagedStore) -> Any:
    """An attempt of another process, as a block that can be ended."""
    claim = copy_context().run(Receiver(store).claim("k").__enter__)
    store.calls.clear()
    return claim


def wait_for(store: StagedStore) -> tuple[bool, Any]:
    with Receiver(store).claim("k") as claim:
        return claim.first, claim.value


def test_the_stores_word_ends_the_wait() -> None:
    """One look, one word, one look: no polling."""
    store = Watched(lambda: holder.complete("done") and True)
    holder = held_elsewhere(store)
    assert wait_for(store) == (False, "done")
    assert store.calls == ["claim", "watch", "complete", "claim"]


@pytest.mark.parametrize("trouble", [False, StoreUnavailable("gone")])
def test_without_a_word_it_looks_again_by_itself(trouble: Any) -> None:
    """A store that can't tell, or can't be asked to, is polled."""

    def word() -> bool:
        if store.calls.count("watch") > 2:
            holder.complete("done")
        if trouble:
            raise trouble
        return False

    store = Watched(word)
    holder = held_elsewhere(store)
    assert wait_for(store) == (False, "done")
    assert store.calls.count("watch") == 3


@pytest.mark.parametrize("busy", ["wait", "join"])
def test_a_handler_does_not_wait_for_itself(busy: Any) -> None:
    """Asking for one's own key is a mistake, and told at once."""
    receiver = Receiver("memory://", policy=Policy(busy=busy))
    inner = Counted()

    def handler(_: Message) -> Any:
        return receiver.process(EVENT, inner)

    with pytest.raises(UsageError, match="wait for itself"):
        receiver.process(EVENT, handler)
    assert inner.runs == 0


@pytest.mark.parametrize("colour", ["blocking", "asyncio", "mixed"])
@pytest.mark.parametrize("busy", ["wait", "join"])
def test_a_handler_does_not_wait_for_itself_by_way_of_another_key(busy: Any, colour: str) -> None:
    """However many keys are in between: nobody waits for what can't end before the wait does."""
    receiver = Receiver("memory://", policy=Policy(busy=busy))
    after = {"e-1": "e-2", "e-2": "e-3", "e-3": "e-1"}
    runs: list[str] = []

    def handler(message: Message) -> Any:
        runs.append(message.id)
        return receiver.process(Message(after[message.id]), handler).value

    async def ahandler(message: Message) -> Any:
        runs.append(message.id)
        return (await receiver.aprocess(Message(after[message.id]), ahandler)).value

    with pytest.raises(UsageError, match="wait for itself"):
        if colour == "blocking":
            receiver.process(EVENT, handler)
        else:
            asyncio.run(receiver.aprocess(EVENT, ahandler if colour == "asyncio" else handler))
    assert runs == ["e-1", "e-2", "e-3"]


def test_a_key_of_the_batch_that_has_its_turn_later_is_not_waited_for() -> None:
    """It was claimed with the others, and begins when this handler has ended."""
    receiver = Receiver("memory://")

    def handler(message: Message) -> Any:
        return receiver.process(Message("e-2"), handler).value if message.id == "e-1" else message.id

    first, second = receiver.process_batch([Message("e-1"), Message("e-2")], handler)
    assert isinstance(first.error, UsageError)
    assert second.value == "e-2"


@pytest.mark.parametrize("colour", ["blocking", "asyncio"])
def test_a_key_of_the_batch_that_has_run_is_not_waited_for(colour: str) -> None:
    """Wherever it ran, it is recorded with all the others, when this handler has ended."""
    receiver, ran = Receiver("memory://"), threading.Event()

    def handler(message: Message) -> Any:
        if message.id == "e-1":
            assert ran.wait(20)
            return receiver.process(Message("e-2"), must_not_run).value
        ran.set()
        return message.id

    async def ahandler(message: Message) -> Any:
        if message.id == "e-1":
            await asyncio.to_thread(ran.wait, 20)
            return (await receiver.aprocess(Message("e-2"), must_not_run)).value
        ran.set()
        return message.id

    both = [Message("e-1"), Message("e-2")]
    if colour == "blocking":
        first, second = receiver.process_batch(both, handler)
    else:
        first, second = asyncio.run(receiver.aprocess_batch(both, ahandler))
    assert isinstance(first.error, UsageError)
    assert second.value == "e-2"


def test_tasks_of_one_loop_wait_for_each_other() -> None:
    """Who waits for a plain function's result, which is being recorded, does not run inside of it."""
    recording, waits = asyncio.Event(), asyncio.Event()

    class Slow(StagedStore):
        async def complete(self, completion: Any) -> Any:
            recording.set()
            await waits.wait()
            return await super().complete(completion)

        async def claim(self, claim: Any) -> Any:
            decision = await super().claim(claim)
            if decision.verdict is Verdict.BUSY:
                waits.set()
            return decision

    receiver = Receiver(Slow())

    async def both() -> Any:
        first = asyncio.ensure_future(receiver.aprocess(EVENT, lambda _: "done"))
        await recording.wait()
        return await receiver.aprocess(EVENT, lambda _: "again"), await first

    replayed, executed = asyncio.run(both())
    assert (replayed.status, replayed.value, executed.value) == ("replayed", "done", "done")


def test_the_end_of_an_attempt_in_this_process_is_the_answer() -> None:
    """Who waited for it gets a copy of the recorded result, and the store is not asked again."""
    store = StagedStore()
    receiver = Receiver(store)
    result = {"paid": [1]}

    async def both() -> tuple[Any, Any]:
        begun, gate = asyncio.Event(), asyncio.Event()

        async def handler(_: Message) -> dict[str, list[int]]:
            begun.set()
            await gate.wait()
            return result

        first = asyncio.ensure_future(receiver.aprocess(EVENT, handler))
        await begun.wait()
        second = asyncio.ensure_future(receiver.aprocess(EVENT, handler))
        while store.calls != ["claim", "claim"]:  # noqa: ASYNC110 - the store has no event to set
            await asyncio.sleep(0)
        gate.set()
        return await asyncio.gather(first, second)

    executed, replayed = asyncio.run(both())
    assert (replayed.status, replayed.value, replayed.fence) == ("replayed", result, executed.fence)
    assert replayed.value is not executed.value
    assert store.calls == ["claim", "claim", "complete"]


def test_a_task_that_waits_goes_on_at_once() -> None:
    """In the loop's next turn after the end: not in one that only wakes it up."""
    receiver = Receiver(StagedStore())

    async def turns() -> int:
        begun, gate = asyncio.Event(), asyncio.Event()

        async def handler(_: Message) -> str:
            begun.set()
            await gate.wait()
            return "done"

        first = asyncio.ensure_future(receiver.aprocess(EVENT, handler))
        await begun.wait()
        second = asyncio.ensure_future(receiver.aprocess(EVENT, handler))
        await asyncio.sleep(0)
        gate.set()
        await first
        count = 0
        while not second.done():
            count += 1
            await asyncio.sleep(0)
        return count

    assert asyncio.run(turns()) == 0


def test_a_key_of_the_same_name_in_another_store_is_another_key() -> None:
    """A handler that hands its message on to another receiver waits there as everybody does."""
    store = Watched(lambda: holder.complete("done") and True)
    holder = held_elsewhere(store)
    with Receiver("memory://").claim("k") as claim:
        assert wait_for(store) == (False, "done")
        assert claim.first
