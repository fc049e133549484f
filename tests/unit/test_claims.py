"""Claims as blocks: for code that is neither a function nor a message handler."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack, nullcontext
from contextvars import copy_context
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest
from tests.unit.receiving import Asyncio, Colour, Crash, StagedStore, Told, by_hand

from effectonce import (
    InDoubt,
    InProgress,
    KeyReused,
    LeaseLost,
    Message,
    Policy,
    Receiver,
    State,
    StoreUnavailable,
    current,
)
from effectonce._blocking import run
from effectonce.claims import Claiming
from effectonce.errors import ColourMismatch, InvalidKey, ResultUnavailable, UsageError
from effectonce.keys import Key
from effectonce.testing.clocks import ManualClock

REJECT = Policy(busy="reject")

Block = Callable[[Claiming], Any]
"""What is done in a block; what it returns is the claim's result, unless it is ``NOTHING``."""
NOTHING = object()


def block(colour: Colour, claiming: Claiming, inside: Block) -> Claiming:
    """Enter a claim in a colour, do something if it is the first, complete it, leave."""
    if colour.name == "blocking":
        with claiming as claim:
            if claim.first and (value := inside(claim)) is not NOTHING:
                assert claim.complete(value) == value
        return claim

    async def main() -> Claiming:
        async with claiming as claim:
            if claim.first and (value := inside(claim)) is not NOTHING:
                assert await claim.acomplete(value) == value
        return claim

    return asyncio.run(main())


@dataclass
class Report:
    pages: int
    at: datetime


def never(_: Claiming) -> Any:
    raise AssertionError("the block ran")


def fail(error: BaseException) -> Block:
    def inside(_: Claiming) -> Any:
        raise error

    return inside


def test_the_first_block_does_the_work(receiver: Receiver, colour: Colour) -> None:
    """claim.first says who runs; claim.value is the first result, for everyone."""
    first = block(colour, receiver.claim("k"), lambda _: {"n": 1})
    second = block(colour, receiver.claim("k"), never)
    assert (first.first, first.value, first.outcome.status) == (True, {"n": 1}, "executed")
    assert (second.first, second.value, second.outcome.status) == (False, {"n": 1}, "replayed")


def test_a_block_has_an_attempt(receiver: Receiver, colour: Colour) -> None:
    """The attempt has the fence, current() gives it inside the block, and not after it."""
    seen: list[Any] = []

    def inside(claim: Claiming) -> None:
        seen.append(claim.attempt)
        assert current() is claim.attempt
        assert claim.attempt.fence >= 1

    block(colour, receiver.claim("k"), inside)
    assert seen
    with pytest.raises(UsageError):
        current()
    with pytest.raises(UsageError, match="done before"):
        _ = block(colour, receiver.claim("k"), never).attempt


def test_leaving_without_a_word_completes_with_none(receiver: Receiver, colour: Colour) -> None:
    """The block came to its end, so the work is done."""
    assert block(colour, receiver.claim("k"), lambda _: NOTHING).value is None
    assert block(colour, receiver.claim("k"), never).outcome.status == "replayed"


def test_an_exception_is_the_blocks_word(receiver: Receiver, colour: Colour) -> None:
    """It goes on to the caller, and the policy says what it means: by default the next one may try."""
    with pytest.raises(ValueError, match="no"):
        block(colour, receiver.claim("k"), fail(ValueError("no")))
    assert block(colour, receiver.claim("k"), lambda claim: claim.attempt.number).value == 2


def test_a_remembered_exception_is_raised_on_entering(receiver: Receiver, colour: Colour) -> None:
    """The repeat's block is not entered; it gets the first one's error."""
    policy = Policy(remember=LookupError)
    for inside in (fail(KeyError("k")), never):
        with pytest.raises(KeyError):
            block(colour, receiver.claim("k", policy=policy), inside)


def test_an_exception_may_leave_doubt(receiver: Receiver, colour: Colour) -> None:
    """Repeats are refused until it is settled, by the id that was claimed."""
    with pytest.raises(TimeoutError):
        block(colour, receiver.claim("k", policy=Policy(in_doubt=TimeoutError)), fail(TimeoutError()))
    with pytest.raises(InDoubt):
        block(colour, receiver.claim("k"), never)
    assert receiver.resolve("k", "completed", 5)
    assert block(colour, receiver.claim("k"), never).value == 5


def test_an_interrupt_keeps_the_claim(receiver: Receiver, colour: Colour, clock: ManualClock) -> None:
    """Only its lease ends it."""
    with pytest.raises(Crash):
        block(colour, receiver.claim("k"), fail(Crash()))
    with pytest.raises(InProgress):
        block(colour, receiver.claim("k", policy=REJECT), never)
    clock.advance(500)
    assert block(colour, receiver.claim("k"), lambda claim: claim.attempt.number).value == 2


def test_an_exception_after_completing_changes_nothing(receiver: Receiver, colour: Colour) -> None:
    """What was completed is completed; the exception goes on to the caller."""

    async def asynchronous() -> None:
        async with receiver.claim("k") as claim:
            await claim.acomplete("done")
            raise ValueError("afterwards")

    def blocking() -> None:
        with receiver.claim("k") as claim:
            claim.complete("done")
            raise ValueError("afterwards")

    with pytest.raises(ValueError, match="afterwards"):
        blocking() if colour.name == "blocking" else asyncio.run(asynchronous())
    assert block(colour, receiver.claim("k"), never).value == "done"


def test_a_running_block_is_busy(receiver: Receiver, colour: Colour) -> None:
    """A second claim meets the first: rejected, or skipped with no result."""

    def inside(_: Claiming) -> str:
        with pytest.raises(InProgress), receiver.claim("k", policy=REJECT):
            raise AssertionError("entered")
        with receiver.claim("k", policy=Policy(busy="skip")) as skipped:
            assert (skipped.first, skipped.value, skipped.outcome.status) == (False, None, "in_progress")
        return "done"

    block(colour, receiver.claim("k"), inside)


def test_blocks_may_be_nested(receiver: Receiver, colour: Colour) -> None:
    """Each has its own attempt; after the inner one the outer's is current again."""

    def inside(outer: Claiming) -> str:
        with receiver.claim("inner") as inner:
            assert current() is inner.attempt
            inner.complete("inner result")
        assert current() is outer.attempt
        return "outer result"

    assert block(colour, receiver.claim("outer"), inside).value == "outer result"


def test_what_a_claim_is_for_may_be_said(receiver: Receiver, colour: Colour) -> None:
    """payload= is compared: another one under the same key is refused."""
    block(colour, receiver.claim("k", payload={"cents": 5}), lambda _: 1)
    with pytest.raises(KeyReused):
        block(colour, receiver.claim("k", payload={"cents": 6}), never)


@pytest.mark.parametrize("choices", [{"scope": "t"}, {"operation": "o"}, {"version": 2}], ids=repr)
def test_a_claim_has_a_whole_key(receiver: Receiver, colour: Colour, choices: dict[str, Any]) -> None:
    """The same id under another scope, operation or version is another effect; a Key says all of it."""
    block(colour, receiver.claim("k"), lambda _: "plain")
    assert block(colour, receiver.claim("k", **choices), lambda _: "other").value == "other"
    key = Key.of("k", **({"operation": "claim"} | choices))
    assert block(colour, receiver.claim(key), never).value == "other"


# Mistakes


@pytest.mark.parametrize("key", ["", " ", "a\nb", "x" * 256, None, 5, b"k"], ids=repr)
def test_a_key_has_to_name_something(receiver: Receiver, key: Any) -> None:
    """Nothing is claimed under a key that is empty, no text, too long or has control characters."""
    with pytest.raises(InvalidKey):
        receiver.claim(key)


def test_a_claim_is_entered_once(receiver: Receiver, colour: Colour) -> None:
    """A second use of the object is refused, and its record stays."""
    claiming = receiver.claim("k")
    block(colour, claiming, lambda _: 1)
    with pytest.raises(UsageError, match="entered once"):
        block(colour, claiming, never)


def test_a_claim_is_completed_once(receiver: Receiver) -> None:
    """A second result, in the same block or by one who is not first, is refused."""
    with receiver.claim("k") as claim:
        claim.complete(1)
        with pytest.raises(UsageError, match="result already"):
            claim.complete(2)
    with receiver.claim("k") as again:
        with pytest.raises(UsageError, match="result already"):
            again.complete(3)
        assert again.value == 1


def test_a_block_that_was_not_entered_has_nothing(receiver: Receiver) -> None:
    """complete() and value need a block around them."""
    claiming = receiver.claim("k")
    with pytest.raises(UsageError, match="not been entered"):
        claiming.complete(1)
    with pytest.raises(UsageError, match="no outcome yet"):
        _ = claiming.value
    assert receiver.get("k") is None


def test_the_colour_of_a_block_is_kept(receiver: Receiver) -> None:
    """What has to be awaited has no place in a plain ``with``: the error says so, and nothing is harmed."""

    async def main() -> None:
        with receiver.claim("b") as claim:
            with pytest.raises(ColourMismatch, match=r"claim\.complete"):
                await claim.acomplete(2)
            claim.complete(2)

    asyncio.run(main())
    assert receiver.claim("b").__enter__().value == 2


@pytest.mark.parametrize("left", ["plainly", "by an exception", "cancelled"])
@pytest.mark.parametrize("awaited", [True, False])
def test_completing_is_one_word_in_both_colours(receiver: Receiver, awaited: bool, left: str) -> None:
    """``complete`` in an ``async with`` is awaited like ``acomplete``. Forgotten, it is recorded at the block's end."""
    errors: dict[str, BaseException] = {
        "by an exception": ValueError("mine"),
        "cancelled": asyncio.CancelledError(),
    }

    async def main() -> None:
        async with receiver.claim("k") as claim:
            said = claim.complete(0)
            if awaited:
                assert await said == 0 == claim.value
            else:
                with pytest.raises(UsageError, match="no outcome yet"):
                    _ = claim.value
            for again in (claim.complete, claim.acomplete):
                with pytest.raises(UsageError, match="result already"):
                    await again(1)
            if left in errors:
                raise errors[left]

    with pytest.raises(type(errors[left])) if left in errors else nullcontext():
        asyncio.run(main())
    with receiver.claim("k") as repeat:
        assert (repeat.first, repeat.value) == (False, 0)
        with pytest.raises(UsageError, match="result already"):
            repeat.complete(1)


# Trouble


@pytest.fixture
def staged(clock: ManualClock) -> StagedStore:
    return StagedStore(clock=clock)


def test_a_block_is_not_entered_without_the_store(staged: StagedStore, colour: Colour) -> None:
    """No claim, no work."""
    staged.fail("claim", error=StoreUnavailable("gone"))
    with pytest.raises(StoreUnavailable):
        block(colour, Receiver(staged).claim("k"), never)


@pytest.mark.parametrize("how", ["complete", "leave"])
def test_a_result_that_could_not_be_recorded_is_an_error(
    staged: StagedStore, colour: Colour, how: str
) -> None:
    """complete() raises, and so does leaving a block whose end could not be recorded; the claim stays."""
    staged.fail("complete", error=StoreUnavailable("gone"))
    receiver = Receiver(staged)
    with pytest.raises(StoreUnavailable, match="could not be recorded"):
        block(colour, receiver.claim("k"), lambda _: 1 if how == "complete" else NOTHING)
    with pytest.raises(InProgress):
        block(colour, receiver.claim("k", policy=REJECT), never)


@pytest.mark.parametrize("again", [False, True])
def test_a_time_out_while_recording_is_heard_once(staged: StagedStore, again: bool) -> None:
    """Who handles it goes on: the result has been recorded, and nobody is cancelled a second time."""
    receiver = Receiver(staged)

    async def main() -> Claiming:
        recording = asyncio.Event()

        async def stop() -> None:
            staged.before.clear()
            recording.set()
            await asyncio.sleep(3600)

        staged.before["complete"] = stop
        async with receiver.claim("k") as claim:
            task = asyncio.ensure_future(claim.acomplete(5))
            await recording.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            if again:
                with pytest.raises(UsageError, match="has its result"):
                    await claim.acomplete(6)
        return claim

    claim = asyncio.run(main())
    assert (claim.outcome.status, claim.value) == ("executed", 5)
    assert block(Asyncio(), receiver.claim("k"), never).value == 5


def test_a_result_that_is_still_to_be_recorded_is_not_followed_by_another(staged: StagedStore) -> None:
    """A block that was cancelled while the store was away leaves its own result to the keeper, and no None."""
    receiver = by_hand(Receiver(staged))

    async def main() -> None:
        async with receiver.claim("k") as claim:
            staged.fail("complete", error=StoreUnavailable("gone"))
            task = asyncio.ensure_future(claim.acomplete(5))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            staged.recover()

    asyncio.run(main())
    run(receiver._keeper.tick(staged, receiver.flow.monotonic() + 5))
    assert block(Asyncio(), receiver.claim("k"), never).value == 5


def test_the_blocks_own_exception_goes_before_the_stores(staged: StagedStore, colour: Colour) -> None:
    """When both fail, the caller gets the exception that left the block."""
    staged.fail("complete", error=StoreUnavailable("gone"))
    with pytest.raises(ValueError, match="mine"):
        block(colour, Receiver(staged).claim("k"), fail(ValueError("mine")))


@pytest.mark.parametrize("others", ["finished", "running"])
def test_a_block_that_was_overtaken_gets_the_answer_that_counts(
    staged: StagedStore, colour: Colour, clock: ManualClock, told: Told, others: str
) -> None:
    """complete() returns the other's result where there is one, and raises LeaseLost where there is none yet."""
    receiver = by_hand(Receiver(staged, monotonic=clock, hooks=[told]))
    other = by_hand(Receiver(staged, monotonic=clock))
    values = []

    def overtaken(_: Claiming) -> None:
        clock.advance(500)
        if others == "finished":
            with other.claim("k") as second:
                second.complete("the other's")
        else:
            with pytest.raises(Crash), other.claim("k"):
                raise Crash

    async def asynchronous() -> None:
        async with receiver.claim("k") as claim:
            overtaken(claim)
            values.append(await claim.acomplete("mine"))

    def blocking() -> None:
        with receiver.claim("k") as claim:
            overtaken(claim)
            values.append(claim.complete("mine"))

    run: Callable[[], Any] = blocking if colour.name == "blocking" else lambda: asyncio.run(asynchronous())
    if others == "finished":
        run()
        assert values == ["the other's"]
    else:
        with pytest.raises(LeaseLost):
            run()
    assert "fenced" in told.kinds()


def test_a_block_may_be_left_elsewhere_than_it_was_entered(receiver: Receiver, colour: Colour) -> None:
    """A generator around it may be resumed in another context, as web frameworks do: it is recorded all the same."""
    if colour.name == "blocking":
        claim = receiver.claim("k")
        copy_context().run(claim.__enter__)
        copy_context().run(claim.__exit__, None, None, None)
    else:

        async def main() -> None:
            async with AsyncExitStack() as stack:
                await asyncio.create_task(stack.enter_async_context(receiver.claim("k")))

        asyncio.run(main())
    record = receiver.get("k")
    assert record is not None and record.state is State.COMPLETED


def test_a_step_may_be_left_elsewhere_than_it_was_entered(receiver: Receiver) -> None:
    """The same of the step of a block."""
    with receiver.claim("k") as claim:
        step = claim.attempt.stepping("reserve")
        copy_context().run(step.__enter__)
        step.complete(4)
        step.__exit__(None, None, None)
        assert claim.attempt.step("charge", lambda: current().key_for("x")) != claim.attempt.key_for("x")


def test_a_typed_result_comes_back_by_its_hint(receiver: Receiver, colour: Colour) -> None:
    """A block has no annotation, so the claim says what its result is; without that, repeats are told why not."""
    at = datetime(2026, 11, 1, tzinfo=UTC)
    for _ in range(2):
        claim = block(colour, receiver.claim("typed", hint=Report), lambda _: Report(12, at))
        assert claim.value == Report(12, at)
    block(colour, receiver.claim("untyped"), lambda _: Report(12, at))
    with pytest.raises(ResultUnavailable, match="Report"):
        block(colour, receiver.claim("untyped"), never)


@pytest.mark.parametrize("operation", ["message", "message:billing", "step"])
def test_a_block_has_no_messages_key_by_accident(receiver: Receiver, operation: str) -> None:
    """A block and a handler under one key would take each other for a repetition; whoever means it says so by a Key."""
    with pytest.raises(UsageError, match="its own"):
        receiver.claim("e-1", operation=operation)
    receiver.process(Message("e-1"), lambda _: "of the message")
    with receiver.claim(Key.parse(receiver.key_of(Message("e-1")))) as claim:
        assert (claim.first, claim.value) == (False, "of the message")
