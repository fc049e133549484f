"""Callers on an event loop who are answered together: what asyncio's tasks may count on."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextvars import ContextVar
from typing import Any

import pytest

from effectonce.stores._waiters import Waiter, answer_all

Loop = asyncio.AbstractEventLoop
Coro = Coroutine[Any, Any, Any]
WHO: ContextVar[str] = ContextVar("WHO")


def task_in_c(loop: Loop, coro: Coro) -> asyncio.Task[Any]:
    return asyncio.Task(coro, loop=loop)


def task_in_python(loop: Loop, coro: Coro) -> asyncio.Task[Any]:
    return asyncio.tasks._PyTask(coro, loop=loop)  # type: ignore[attr-defined,no-any-return]


def uvloop() -> Loop:
    return pytest.importorskip("uvloop").new_event_loop()  # type: ignore[no-any-return]


@pytest.fixture(
    params=[
        (asyncio.new_event_loop, task_in_c),
        (asyncio.new_event_loop, task_in_python),
        (uvloop, task_in_c),
    ],
    ids=["asyncio", "asyncio in Python", "uvloop"],
)
def loop(request: pytest.FixtureRequest) -> Iterator[Loop]:
    """Loops and tasks of every make."""
    new_loop, new_task = request.param
    loop = new_loop()
    loop.set_task_factory(lambda loop, coro, **_: new_task(loop, coro))
    yield loop
    loop.close()


class Crowd:
    """Callers who wait, each in a task; ``told`` says who went on, in order, and with what."""

    def __init__(self, loop: Loop, names: str, after: Callable[[str], object] = lambda name: None) -> None:
        self.told: list[tuple[str, Any]] = []
        self.waiters: list[Waiter[int]] = [Waiter(loop) for _ in names]
        self.tasks = [
            loop.create_task(self._wait(name, waiter, after))
            for name, waiter in zip(names, self.waiters, strict=True)
        ]

    async def _wait(self, name: str, waiter: Waiter[int], after: Callable[[str], object]) -> None:
        WHO.set(name)
        try:
            answer: Any = await waiter
        except BaseException as error:
            self.told.append((WHO.get(), error))
            raise
        self.told.append((WHO.get(), answer))
        after(name)


def test_all_go_on_at_once_in_order_and_in_their_own_context(loop: Loop) -> None:
    """When ``answer_all`` returns, every task has got its answer, and found its own context variables."""

    async def main() -> None:
        crowd = Crowd(loop, "abc")
        await asyncio.sleep(0)
        told: list[tuple[str, Any]] = []

        def answer_and_look() -> None:
            answer_all(crowd.waiters, [1, 2, 3])
            told.extend(crowd.told)

        loop.call_soon(answer_and_look)
        await asyncio.gather(*crowd.tasks)
        assert told == [("a", 1), ("b", 2), ("c", 3)]

    loop.run_until_complete(main())


def test_who_is_cancelled_hears_it_and_its_answer_is_thrown_away(loop: Loop) -> None:
    """With the words of whoever cancelled, and nobody else is disturbed."""

    async def main() -> None:
        crowd = Crowd(loop, "ab")
        await asyncio.sleep(0)
        crowd.tasks[0].cancel("not needed")
        await asyncio.sleep(0)
        assert crowd.waiters[0].done()
        loop.call_soon(answer_all, crowd.waiters, [1, 2])
        await asyncio.wait(crowd.tasks)
        assert [name for name, _ in crowd.told] == ["a", "b"]
        assert crowd.tasks[0].cancelled()
        assert crowd.told[0][1].args == ("not needed",)
        assert crowd.told[1] == ("b", 2)

    loop.run_until_complete(main())


def test_who_goes_on_may_cancel_who_comes_next(loop: Loop) -> None:
    """Then that one is cancelled instead of answered, and those after it are answered."""
    crowd: Crowd

    def after(name: str) -> None:
        if name == "a":
            crowd.tasks[1].cancel()

    async def main() -> None:
        nonlocal crowd
        crowd = Crowd(loop, "abc", after)
        await asyncio.sleep(0)
        loop.call_soon(answer_all, crowd.waiters, [1, 2, 3])
        await asyncio.wait(crowd.tasks)
        assert [task.cancelled() for task in crowd.tasks] == [False, True, False]

    loop.run_until_complete(main())


def test_an_answer_that_will_not_come_is_an_error(loop: Loop) -> None:
    """It is raised where the task waits."""

    async def main() -> None:
        crowd = Crowd(loop, "a")
        await asyncio.sleep(0)
        crowd.waiters[0].set_exception(ValueError("no"))
        with pytest.raises(ValueError, match="no"):
            await crowd.tasks[0]
        answer_all(crowd.waiters, [1])
        assert [type(answer) for _, answer in crowd.told] == [ValueError]

    loop.run_until_complete(main())


def test_who_never_came_to_wait_is_in_nobodys_way(loop: Loop) -> None:
    """A signal may end a caller before its task waits; and who comes late finds the answer there."""

    async def main() -> None:
        crowd = Crowd(loop, "ab")
        await asyncio.sleep(0)
        first, failed = Waiter[int](loop), Waiter[int](loop)
        failed.set_exception(ValueError("no"))
        loop.call_soon(answer_all, [first, failed, *crowd.waiters], [0, 0, 1, 2])
        await asyncio.gather(*crowd.tasks)
        assert await first == 0
        with pytest.raises(ValueError, match="no"):
            await failed
        assert crowd.told == [("a", 1), ("b", 2)]

    loop.run_until_complete(main())


def test_who_waits_may_have_a_timeout(loop: Loop) -> None:
    """The one of asyncio, as around any future."""

    async def main() -> None:
        waiter: Waiter[int] = Waiter(loop)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await waiter

    loop.run_until_complete(main())


def test_a_keyboard_interrupt_in_one_is_not_the_end_of_the_others(loop: Loop) -> None:
    """It leaves the loop at once; when the loop goes on, the others have their answers."""

    def after(name: str) -> None:
        if name == "a":
            raise KeyboardInterrupt

    crowd: Crowd

    async def main() -> None:
        nonlocal crowd
        crowd = Crowd(loop, "abc", after)
        await asyncio.sleep(0)
        crowd.tasks[1].cancel()
        loop.call_soon(answer_all, crowd.waiters, [1, 2, 3])
        await asyncio.wait(crowd.tasks[1:])

    task = loop.create_task(main())
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(task)
    assert [name for name, _ in crowd.told[:2]] == ["b", "a"]
    loop.run_until_complete(task)
    assert crowd.tasks[1].cancelled()
    assert crowd.told[-1] == ("c", 3)
    with pytest.raises(KeyboardInterrupt):
        crowd.tasks[0].result()


@pytest.mark.skipif(sys.version_info < (3, 12), reason="tasks begin at once since Python 3.12")
def test_a_task_that_began_at_once_waits_like_others() -> None:
    """Its first steps are made inside of another task."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined]
        crowd = Crowd(loop, "ab")
        loop.call_soon(answer_all, crowd.waiters, [1, 2])
        await asyncio.gather(*crowd.tasks)
        assert crowd.told == [("a", 1), ("b", 2)]

    asyncio.run(main())
