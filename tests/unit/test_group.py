"""Group commit: whoever queues up is served, whatever becomes of those who lead."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from tests.integration.sqlite_helpers import Caller

from effectonce.stores import _group
from effectonce.stores._group import Group
from effectonce.testing.clocks import wait_until


class Disk:
    """Writes numbers, a batch at a time; ``gate`` holds it up and ``fail`` makes it fail."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.batches: list[list[int]] = []
        self.fail: Callable[[list[int]], None] = lambda _: None

    def write(self, numbers: list[int]) -> list[int]:
        self.batches.append(numbers)
        assert self.gate.wait(10)
        self.fail(numbers)
        return [-number for number in numbers]


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """A disk under a group whose members rely on each other's word alone."""
    monkeypatch.setattr(_group, "LOOK_AFTER_SECONDS", 60.0)
    return Disk()


@pytest.fixture
def group(disk: Disk) -> Group[int, int]:
    return Group(disk.write, (OSError,))


def queue_up(group: Group[int, int], *numbers: int) -> list[Caller]:
    """Callers, one after the other."""
    callers = []
    for number in numbers:
        before = len(group.queue)
        callers.append(Caller(lambda number=number: group.submit([number])))
        wait_until(lambda before=before: len(group.queue) > before, what="The queue")
    return callers


def test_those_who_wait_share_the_next_write(group: Group[int, int], disk: Disk) -> None:
    """While one write is on its way the others gather, and go together."""
    disk.gate.clear()
    first = Caller(lambda: group.submit([1]))
    wait_until(lambda: disk.batches == [[1]], what="The first write")
    others = queue_up(group, 2, 3, 4)
    disk.gate.set()
    assert [caller.answer(5) for caller in (first, *others)] == [[-1], [-2], [-3], [-4]]
    assert disk.batches == [[1], [2, 3, 4]]


def test_everybody_in_a_crowd_is_served(group: Group[int, int]) -> None:
    """Callers that lead, queue up and keep others from writing all get their own answers, and the lead is free then."""

    def calls(first: int) -> None:
        for number in range(first, first + 200):
            if number % 3 == 0:
                with group.lead:
                    pass
            assert group.submit([number]) == [-number]

    for caller in [Caller(lambda first=first: calls(first)) for first in range(0, 8000, 1000)]:
        caller.answer()
    assert not group.lead.locked()


def test_a_long_queue_is_written_in_pieces(
    group: Group[int, int], disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for a write without end, and the rest of the queue goes next."""
    monkeypatch.setattr(_group, "MOST_AT_ONCE", 2)
    with group.lead:
        callers = queue_up(group, 1, 2, 3, 4, 5)
    assert [caller.answer(5) for caller in callers] == [[-1], [-2], [-3], [-4], [-5]]
    assert disk.batches == [[1, 2], [3, 4], [5]]


def test_a_bad_command_is_its_own_callers_only(group: Group[int, int], disk: Disk) -> None:
    """Who is not to blame gets an answer."""

    def refuse_2(numbers: list[int]) -> None:
        if 2 in numbers:
            raise ValueError("2")

    disk.fail = refuse_2
    with group.lead:
        good, bad, fine = queue_up(group, 1, 2, 3)
    assert good.answer(5) == [-1]
    with pytest.raises(ValueError, match="2"):
        bad.answer(5)
    assert fine.answer(5) == [-3]


def test_a_failing_disk_is_everybodys(group: Group[int, int], disk: Disk) -> None:
    """What no command is to blame for is not tried for each alone."""

    def refuse(numbers: list[int]) -> None:
        raise OSError("full")

    disk.fail = refuse
    with group.lead:
        callers = queue_up(group, 1, 2)
    for caller in callers:
        with pytest.raises(OSError, match="full"):
            caller.answer(5)
    assert disk.batches == [[1, 2]]


def test_a_leader_that_a_signal_ends_takes_nobody_along(group: Group[int, int], disk: Disk) -> None:
    """Ctrl-C in the leader is its own: the first of the others writes for them."""

    def interrupt_once(numbers: list[int]) -> None:
        disk.fail = lambda _: None
        raise KeyboardInterrupt

    disk.fail = interrupt_once
    with group.lead:
        leader, *others = queue_up(group, 1, 2, 3)
    with pytest.raises(KeyboardInterrupt):
        leader.answer(5)
    assert [caller.answer(5) for caller in others] == [[-2], [-3]]
    assert disk.batches == [[1, 2, 3], [2, 3]]


def test_one_who_leaves_the_queue_is_not_waited_for(group: Group[int, int]) -> None:
    """The first of the queue is who will lead. If a signal ends it while it waits, the second is the first."""
    with group.lead:
        first, second = queue_up(group, 1, 2)
        group._leave(group.queue[0])  # as its exception would
        wait_until(lambda: group.queue[0].word.empty(), what="The word to the second")
    assert second.answer(5) == [-2]
    assert first.answer(5) == [-1]


def test_a_lost_word_is_not_waited_for(
    group: Group[int, int], disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader that is ended before it could tell anybody leaves them a little late, not stuck."""
    monkeypatch.setattr(_group, "LOOK_AFTER_SECONDS", 0.01)
    monkeypatch.setattr(group, "_tell", lambda _: None)
    with group.lead:
        callers = queue_up(group, 1, 2, 3)
    assert [caller.answer(5) for caller in callers] == [[-1], [-2], [-3]]
