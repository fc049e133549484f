"""Tasks of frameworks: what a framework is told, and what its own exceptions mean, without any framework."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from effectonce import InProgress, KeyReused, Message, NotApplied, Outcome, Policy, Receiver, current
from effectonce._attempt import CURRENT, Attempt
from effectonce.errors import AttemptsExhausted, InDoubt, LeaseLost, ResultUnavailable, StoreUnavailable
from effectonce.messaging._delivery import Answer, Later, Pace, Raise, Return, answer, decide
from effectonce.messaging._tasks import DEFAULT_RETRY, Task, Tasks

PACE = Pace(first=1.0, longest=60.0)
POLICY = Policy(remember=(PermissionError,))


class Again(Exception):
    """The framework's word for another try."""


class Ended(Exception):
    """The framework's word for an end without a result."""


class TimeIsUp(Exception):
    """The framework's word for a handler that it ended."""


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver("memory://", policy=Policy(remember=(PermissionError,))) as receiver:
        yield receiver


def tasks_of(receiver: Receiver, policy: Policy | None = None) -> Tasks:
    return Tasks(receiver, policy, DEFAULT_RETRY, lambda e: isinstance(e, Again), (Ended,), (TimeIsUp,))


def task(function: Any, *args: Any, asked: Any = None, id: str = "m-1") -> Task:
    return Task(Message(id, asked, None, "charge"), function, args, {})


def told(status: Any, error: BaseException | None = None, **more: Any) -> Answer:
    outcome: Outcome[Any] = Outcome(status, error=error, **more)
    return answer(outcome, decide(outcome, POLICY, PACE))


def test_a_result_is_gone_on_with_the_first_time_and_every_time() -> None:
    """Chains, pipelines and reply publishers need it. One that can't be shown is an error, never None for the next."""
    assert told("executed", value=7) == Return(7)
    assert told("replayed", value=7, replayed=True) == Return(7)
    hidden = ResultUnavailable()
    assert told("replayed", hidden, replayed=True) == Raise(hidden, final=True)


@pytest.mark.parametrize(
    ("status", "error"),
    [
        ("in_progress", InProgress(retry_after=9.0)),
        ("in_progress", None),
        ("in_doubt", InDoubt()),
        ("store_error", StoreUnavailable()),
        ("failed", LeaseLost()),
    ],
)
def test_what_is_neither_done_nor_failed_comes_later(status: Any, error: BaseException | None) -> None:
    """Running elsewhere, in doubt, taken over, or a store that is away: no result, and no failure to count."""
    found = told(status, error)
    assert isinstance(found, Later)
    assert 0 < found.delay <= PACE.longest


@pytest.mark.parametrize(
    ("status", "error", "final"),
    [
        ("failed", ValueError("not today"), False),
        ("failed", NotApplied(), False),
        ("failed", PermissionError("never"), True),
        ("failed", AttemptsExhausted(), True),
        ("mismatch", KeyReused(), True),
    ],
)
def test_an_error_is_final_where_another_try_would_get_the_same(
    status: Any, error: BaseException, final: bool
) -> None:
    """The handler's own error is the framework's to retry; a remembered one and used-up attempts are not."""
    assert told(status, error, attempt=1) == Raise(error, final)


def test_a_repetition_gets_the_first_result_in_both_colours(receiver: Receiver) -> None:
    """Each message runs its function once."""
    ran: list[int] = []
    tasks = tasks_of(receiver)

    async def double(number: int) -> int:
        ran.append(number)
        return number * 2

    assert tasks.run(task(lambda number: ran.append(number) or "done", 1)) == Return("done")
    assert tasks.run(task(lambda number: ran.append(number), 1)) == Return("done")
    assert asyncio.run(tasks.arun(task(double, 4, id="m-2"))) == Return(8)
    assert asyncio.run(tasks.arun(task(double, 4, id="m-2"))) == Return(8)
    assert ran == [1, 4]


def test_a_remembered_error_is_raised_as_itself(receiver: Receiver) -> None:
    """The first time and on each repetition."""
    ran: list[int] = []

    def refuse() -> None:
        ran.append(1)
        raise PermissionError("never")

    for _ in range(2):
        found = tasks_of(receiver).run(task(refuse))
        assert isinstance(found, Raise)
        assert found.final
        assert isinstance(found.error, PermissionError)
    assert ran == [1]


def test_another_try_releases_whatever_the_policy_remembers(receiver: Receiver) -> None:
    """The framework's Retry is not the handler's failure, even where every exception is remembered."""
    tasks = tasks_of(receiver, Policy(remember=(Exception,)))
    again = Again()

    def retry() -> None:
        raise again

    assert tasks.run(task(retry)) == Raise(again, final=False)
    assert tasks.run(task(lambda: "done")) == Return("done")


def test_an_end_without_a_result_is_repeated(receiver: Receiver) -> None:
    """A handler that ended itself with the framework's own word has ended for every repetition."""
    ran: list[int] = []

    def end() -> None:
        ran.append(1)
        raise Ended("enough")

    for _ in range(2):
        found = tasks_of(receiver).run(task(end))
        assert isinstance(found, Raise)
        assert isinstance(found.error, Ended)
    assert ran == [1]


def test_a_handler_that_was_cut_off_keeps_its_claim(receiver: Receiver) -> None:
    """Nobody knows how far it came, so nobody else begins before its lease is over; a policy may call it a doubt."""
    tasks = tasks_of(receiver)

    def slow() -> None:
        raise TimeIsUp("2 s")

    with pytest.raises(TimeIsUp):
        tasks.run(task(slow))
    assert isinstance(tasks.run(task(slow)), Later)
    doubting = tasks_of(receiver, Policy(in_doubt=(TimeIsUp,)))
    assert isinstance(doubting.run(task(slow, id="m-2")), Later)
    key = receiver.key_of(Message("m-2", source="charge"))
    assert receiver.resolve(key, "completed", "found")
    assert doubting.run(task(slow, id="m-2")) == Return("found")


def test_another_message_under_the_same_id_is_refused(receiver: Receiver) -> None:
    """Arguments that can't be fingerprinted are not compared."""
    tasks = tasks_of(receiver)
    assert tasks.run(task(lambda: 1, asked=[1])) == Return(1)
    other = tasks.run(task(lambda: 2, asked=[2]))
    assert isinstance(other, Raise)
    assert isinstance(other.error, KeyReused)
    assert tasks.run(task(lambda: 3, asked=[object()], id="m-2")) == Return(3)
    assert tasks.run(task(lambda: 4, asked=[object()], id="m-2")) == Return(3)


def test_a_task_that_calls_itself_calls_a_function(receiver: Receiver) -> None:
    """It is the same message, so it neither waits for itself nor has an effect of its own."""
    tasks = tasks_of(receiver)

    fences: list[int] = []

    def count(down: int) -> int:
        fences.append(current().fence)
        inner = tasks.run(task(count, down - 1)) if down else Return(0)
        assert isinstance(inner, Return)
        return down + int(inner.value)

    assert tasks.run(task(count, 2)) == Return(3)
    assert len(fences) == 3
    assert len(set(fences)) == 1


def test_an_attempt_that_an_interruption_has_left_here_is_nobody(receiver: Receiver) -> None:
    """A thread may be interrupted before it could let go of its attempt. What comes there next has its own."""
    runs: list[Attempt] = []
    tasks = tasks_of(receiver)

    def handler() -> int:
        runs.append(current())
        return len(runs)

    assert tasks.run(task(handler)) == Return(1)
    token = CURRENT.set(runs[0])
    try:
        assert tasks.run(task(handler)) == Return(1)
    finally:
        CURRENT.reset(token)
    assert len(runs) == 1
