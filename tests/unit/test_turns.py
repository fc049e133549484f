"""Callers on an event loop share round trips: who goes with whom, and who hears of what."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from effectonce.stores import _turns
from effectonce.stores._loops import PerLoop
from effectonce.stores._turns import Turns


class Server:
    """Does steps when it is told to, and remembers in which company they came."""

    def __init__(self, lanes: int = 2) -> None:
        self.trips: list[list[Any]] = []
        self.tasks: list[Any] = []
        self.gates: list[asyncio.Event] = []
        self.turns: Turns[Any, Any] = Turns(self.execute, lanes)

    async def execute(self, steps: Sequence[Any]) -> list[Any]:
        self.trips.append(list(steps))
        self.tasks.append(asyncio.current_task())
        gate = asyncio.Event()
        self.gates.append(gate)
        await gate.wait()
        if "bad trip" in steps:
            raise ConnectionError("bad trip")
        return [ValueError(step) if step == "bad" else f"{step}!" for step in steps]

    def ask(self, *steps: str) -> asyncio.Task[Any]:
        return asyncio.ensure_future(self.turns.submit(steps))

    def answer(self, trip: int) -> None:
        self.gates[trip].set()


async def turn(times: int = 3) -> None:
    for _ in range(times):
        await asyncio.sleep(0)


def test_who_is_alone_goes_straight_through() -> None:
    """At once, in its own task, and alone again when it comes back."""

    async def main() -> None:
        server = Server()
        for trip in range(3):
            asked = server.ask("a")
            await turn(1)
            assert server.tasks[trip] is asked
            server.answer(trip)
            assert await asked == ["a!"]
        assert server.trips == [["a"]] * 3

    asyncio.run(main())


def test_those_of_one_turn_go_together() -> None:
    """While one is on its way, all who come in a turn of the loop share the next; replies find their askers."""

    async def main() -> None:
        server = Server()
        first, *others = server.ask("a"), server.ask("b", "c"), server.ask("d"), server.ask("e")
        await turn()
        assert server.trips == [["a"], ["b", "c", "d", "e"]]
        late = server.ask("f")
        await turn()
        assert len(server.trips) == 2, "both lanes are busy"
        server.answer(1)
        assert await asyncio.gather(*others) == [["b!", "c!"], ["d!"], ["e!"]]
        await turn()
        assert server.trips[2] == ["f"]
        server.answer(2)
        server.answer(0)
        assert await asyncio.gather(first, late) == [["a!"], ["f!"]]

    asyncio.run(main())


def test_who_was_answered_may_go_along_with_the_next() -> None:
    """A lane's next round trip waits for those whom the last one has just woken."""

    async def main() -> None:
        server = Server(lanes=1)
        first = server.ask("a")

        async def twice() -> None:
            await server.turns.submit(("b",))
            await server.turns.submit(("b again",))

        await turn()
        busy, waiting = asyncio.ensure_future(twice()), server.ask("c")
        server.answer(0)
        await first
        await turn()
        assert server.trips[1] == ["b", "c"]
        late = server.ask("d")
        server.answer(1)
        await waiting
        await turn()
        assert server.trips[2] == ["d", "b again"]
        server.answer(2)
        await asyncio.gather(busy, late)

    asyncio.run(main())


def test_many_are_shared_out_among_free_lanes() -> None:
    """So that one part can be served while the other is on its way; few are not worth it."""

    async def main() -> None:
        server = Server(lanes=3)
        asked = [server.ask(str(number)) for number in range(41)]
        await turn()
        assert [len(trip) for trip in server.trips] == [1, 20, 20]
        for trip in range(3):
            server.answer(trip)
        await asyncio.gather(*asked)

    asyncio.run(main())


def test_few_beside_many_go_with_the_next_who_come_back() -> None:
    """A lane of their own would be a round trip for a few; but while only one other is busy, they don't wait for it."""

    async def main() -> None:
        server = Server(lanes=3)
        crowd = [server.ask(str(number)) for number in range(41)]
        await turn()
        assert [len(trip) for trip in server.trips] == [1, 20, 20]
        server.answer(0)
        await crowd[0]
        few = [server.ask("few"), server.ask("more")]
        await turn()
        assert len(server.trips) == 3, "they wait"
        server.answer(1)
        await asyncio.gather(*crowd[1:21])
        await turn()
        assert server.trips[3] == ["few", "more"], "a lane has come back, and takes them along"
        server.answer(3)
        await asyncio.gather(*few)
        await turn()
        last = server.ask("last")
        await turn()
        assert server.trips[4] == ["last"], "the only one on its way may take long"
        for trip in (2, 4):
            server.answer(trip)
        await asyncio.gather(last, *crowd)

    asyncio.run(main())


def test_a_round_trip_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of a long queue does not wait for all of it; what one asked for stays together."""

    async def main() -> None:
        server = Server(lanes=2)
        asked = [server.ask("first"), *(server.ask(*"abcd") for _ in range(3)), server.ask(*"abcdefghijkl")]
        for trip in range(4):
            await turn(6)
            server.answer(trip)
        await asyncio.gather(*asked)
        assert [len(trip) for trip in server.trips] == [1, 8, 4, 12]

    monkeypatch.setattr(_turns, "MOST_AT_ONCE", 10)
    asyncio.run(main())


def test_a_failing_step_is_its_own_callers() -> None:
    """The others of the round trip have their replies."""

    async def main() -> None:
        server = Server()
        asked = [server.ask("a"), server.ask("b"), server.ask("bad"), server.ask("c")]
        await turn()
        server.answer(0)
        server.answer(1)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(answers.pop(2), ValueError)
        assert answers == [["a!"], ["b!"], ["c!"]]

    asyncio.run(main())


def test_a_failing_round_trip_is_everybodys_in_it() -> None:
    """And nobody else's: the lane goes on."""

    async def main() -> None:
        server = Server()
        asked = [server.ask("a"), server.ask("b"), server.ask("bad trip")]
        await turn()
        late = server.ask("c")
        server.answer(1)
        answers = await asyncio.gather(*asked[1:], return_exceptions=True)
        assert [type(answer) for answer in answers] == [ConnectionError] * 2
        await turn()
        server.answer(2)
        server.answer(0)
        assert await asyncio.gather(asked[0], late) == [["a!"], ["c!"]]

    asyncio.run(main())


def test_a_cancelled_caller_harms_nobody() -> None:
    """Before the round trip it has asked for nothing; afterwards its reply is dropped; alone, it takes nobody along."""

    async def main() -> None:
        server = Server(lanes=2)
        alone, gone, stays = server.ask("a"), server.ask("b"), server.ask("c")
        await turn(1)
        gone.cancel()
        await turn()
        assert server.trips == [["a"], ["c"]]
        leaves, waits = server.ask("d"), server.ask("e")
        alone.cancel()
        await turn()
        assert server.trips[2] == ["d", "e"]
        leaves.cancel()
        server.answer(1)
        server.answer(2)
        assert await asyncio.gather(stays, waits) == [["c!"], ["e!"]]
        for task in (alone, gone, leaves):
            with pytest.raises(asyncio.CancelledError):
                await task
        again = server.ask("f")
        await turn()
        server.answer(3)
        assert await again == ["f!"]

    asyncio.run(main())


def test_a_loop_that_ends_leaves_nobody_waiting() -> None:
    """When everything on the loop is cancelled, so is who waits for a round trip."""
    asked: list[asyncio.Task[Any]] = []

    async def main() -> None:
        server = Server()
        asked.extend(server.ask(step) for step in "abc")
        await turn()

    asyncio.run(main())
    assert all(task.cancelled() for task in asked)


# What belongs to a loop


class Thing:
    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


def test_each_loop_has_its_own_thing() -> None:
    """It is the same one as long as the loop lives, and it is put away when the loop is shut down."""
    things = PerLoop(Thing)

    async def main() -> Thing:
        thing = things.here()
        assert things.here() is thing
        assert thing.closed == 0
        return thing

    first, second = asyncio.run(main()), asyncio.run(main())
    assert first is not second
    assert first.closed >= 1
    assert second.closed >= 1
    assert list(things) == []


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_loops_that_take_turns_on_a_thread_are_told_apart(kind: str) -> None:
    """Each finds its own, whichever ran last, there and on another thread; and none outside of all loops."""
    new_loop: Any = (
        asyncio.new_event_loop if kind == "asyncio" else pytest.importorskip("uvloop").new_event_loop
    )
    things, loops = PerLoop(Thing), [new_loop() for _ in range(3)]

    async def main() -> Thing:
        return things.here()

    try:
        first, second = (loop.run_until_complete(main()) for loop in loops[:2])
        assert first is not second
        for _ in range(2):
            assert loops[0].run_until_complete(main()) is first
            assert loops[1].run_until_complete(main()) is second
        with ThreadPoolExecutor(1) as thread:
            third = thread.submit(loops[2].run_until_complete, main()).result()
            assert third is not second
            assert thread.submit(loops[0].run_until_complete, main()).result() is first, "it has moved"
        assert loops[1].run_until_complete(main()) is second
        with pytest.raises(RuntimeError, match="no running event loop"):
            things.here()
    finally:
        for loop in loops:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()


def test_what_is_closed_is_closed_on_its_loop() -> None:
    """A loop that runs in another thread puts its thing away itself."""
    things = PerLoop(Thing)

    async def main() -> int:
        thing = things.here()
        await asyncio.to_thread(things.close)
        await turn()
        return thing.closed

    assert asyncio.run(main()) == 1


def test_a_loop_that_was_only_closed_is_cleared_up_by_the_next() -> None:
    """Nobody shut it down in good order."""
    things = PerLoop(Thing)

    async def main() -> Thing:
        return things.here()

    loop = asyncio.new_event_loop()
    thing = loop.run_until_complete(main())
    loop.close()
    assert thing.closed == 0
    asyncio.run(main())
    assert thing.closed == 1
