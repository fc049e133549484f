"""Jobs side by side on an event loop: few tasks, a context for each job, and nobody is disturbed by another."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from functools import partial
from typing import Any

import pytest

from effectonce import Message, Receiver, _asyncio, current
from effectonce._asyncio import SideBySide

MESSAGES = [Message(f"e-{number}") for number in range(10)]
MINE: ContextVar[str] = ContextVar("mine", default="nobody's")


@pytest.mark.parametrize("limit", [1, 3])
def test_variables_stay_apart(limit: int) -> None:
    """What a handler sets, before or after it has waited, no other handler and no caller sees."""
    seen: list[str] = []

    async def handler(message: Message) -> None:
        seen.append(MINE.get())
        MINE.set(message.id)
        await asyncio.sleep(0)
        assert MINE.get() == message.id
        MINE.set(message.id + " again")
        await asyncio.sleep(0)
        assert MINE.get() == message.id + " again"
        assert current().key.endswith(message.id)

    async def main() -> None:
        MINE.set("the caller's")
        outcomes = await Receiver("memory://").aprocess_batch(MESSAGES, handler, concurrency=limit)
        assert [outcome.status for outcome in outcomes] == ["executed"] * 10
        assert MINE.get() == "the caller's"

    asyncio.run(main())
    assert seen == ["the caller's"] * 10


def test_what_a_handler_starts_has_its_variables() -> None:
    """A task that a handler starts takes the handler's context with it, wherever that handler is awaited."""

    async def show() -> str:
        return MINE.get()

    async def handler(message: Message) -> str:
        MINE.set(message.id)
        await asyncio.sleep(0)
        return await asyncio.ensure_future(show())

    outcomes = asyncio.run(Receiver("memory://").aprocess_batch(MESSAGES, handler, concurrency=2))
    assert [outcome.value for outcome in outcomes] == [message.id for message in MESSAGES]


def test_no_task_for_a_message() -> None:
    """There are as many tasks as handlers may run side by side, however many messages there are."""
    tasks = set[Any]()

    async def handler(_: Message) -> None:
        tasks.add(asyncio.current_task())
        await asyncio.sleep(0)

    asyncio.run(Receiver("memory://").aprocess_batch(MESSAGES, handler, concurrency=3))
    assert len(tasks) == 3


def test_a_handler_that_cancels_its_task_at_its_end_has_run() -> None:
    """Its result is recorded, and the cancellation that it left behind is not heard by the handler that comes next."""
    receiver = Receiver("memory://")

    async def handler(message: Message) -> str:
        if message.id == "e-3":
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            return message.id
        await asyncio.sleep(0)
        return message.id

    outcomes = asyncio.run(receiver.aprocess_batch(MESSAGES, handler, concurrency=1))
    assert [(outcome.status, outcome.value) for outcome in outcomes] == [("executed", m.id) for m in MESSAGES]


def test_a_cancellation_between_two_jobs_harms_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody has kept a handler's task and cancels it while it lets others go on: a new one does what is left."""
    monkeypatch.setattr(_asyncio, "LONGEST_TURN", 0.0)

    async def main() -> list[int | None]:
        async def job(number: int) -> int:
            if number == 1:
                task = asyncio.current_task()
                assert task is not None
                asyncio.get_running_loop().call_soon(task.cancel)
            return number

        side = SideBySide([partial(job, number) for number in range(5)], 1)
        assert await side.run() is None
        return side.results

    assert asyncio.run(main()) == [0, 1, 2, 3, 4]


def test_jobs_that_never_wait_let_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop is not held up by a long batch of handlers none of which waits for anything."""
    monkeypatch.setattr(_asyncio, "LONGEST_TURN", 0.0)
    turns: list[str] = []

    async def other() -> None:
        while True:
            turns.append("other")
            await asyncio.sleep(0)

    async def handler(message: Message) -> None:
        turns.append(message.id)

    async def main() -> None:
        beside = asyncio.ensure_future(other())
        await Receiver("memory://").aprocess_batch(MESSAGES, handler, concurrency=1)
        beside.cancel()

    asyncio.run(main())
    between = turns[turns.index("e-0") : turns.index("e-9")]
    assert between.count("other") >= 9


def test_an_error_is_raised_when_all_have_ended() -> None:
    """A job that raises stops no other; what was raised first is told at the end."""

    async def main() -> SideBySide[int]:
        async def job(number: int) -> int:
            await asyncio.sleep(0)
            if number in (1, 2):
                raise ValueError(number)
            return number

        side = SideBySide([partial(job, number) for number in range(4)], 2)
        await side.run()
        return side

    side = asyncio.run(main())
    assert side.results == [0, None, None, 3]
    assert str(side.error) == "1"


def test_tasks_that_begin_with_a_variable_of_their_own_do_their_jobs() -> None:
    """As those of a loop whose task factory sets one: what was there before a job is no trace of it."""

    async def main() -> list[Any]:
        loop = asyncio.get_running_loop()

        def make(loop: Any, coroutine: Any, **options: Any) -> Any:
            async def marked() -> Any:
                MINE.set("the factory's")
                return await coroutine

            return asyncio.Task(marked(), loop=loop, **options)

        loop.set_task_factory(make)

        async def handler(message: Message) -> str:
            await asyncio.sleep(0)
            return MINE.get()

        return await Receiver("memory://").aprocess_batch(MESSAGES, handler, concurrency=2)

    assert [outcome.value for outcome in asyncio.run(main())] == ["the factory's"] * 10
