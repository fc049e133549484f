"""Group commit: whoever queues up is served, however the lead changes hands."""

from __future__ import annotations

import threading

import pytest
from tests.integration.sqlite_helpers import Caller

from effectonce.stores import _group
from effectonce.stores._group import Group


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group[int, int]:
    """A group that nobody looks after: it has to work by itself."""
    monkeypatch.setattr(_group, "LOOK_AFTER_SECONDS", 60.0, raising=False)
    return Group(list, ())


def test_a_lead_given_up_while_somebody_queues_up_is_taken(group: Group[int, int]) -> None:
    """A caller that finds a leader, and queues up just after that one let go, does not wait for nobody."""
    assert group.try_lead()
    try_lead = group.try_lead
    tried = threading.Event()

    def let_go_meanwhile() -> bool:
        leads = try_lead()
        if not leads and not tried.is_set():
            tried.set()
            Caller(group.hand_over).join(0.1)  # it may have to wait for the caller that stands in the queue
        return leads

    group.try_lead = let_go_meanwhile  # type: ignore[method-assign]
    assert Caller(lambda: group.submit([1, 2])).answer(5) == [1, 2]
    assert tried.is_set()


def test_everybody_in_a_crowd_is_served(group: Group[int, int]) -> None:
    """Callers that lead, queue up and hand over in any order all get their own answers, and the lead is free then."""

    def calls(first: int) -> None:
        for number in range(first, first + 200):
            if number % 3 == 0 and group.try_lead():
                group.hand_over()
            assert group.submit([number]) == [number]

    for caller in [Caller(lambda first=first: calls(first)) for first in range(0, 8000, 1000)]:
        caller.answer()
    assert group.try_lead()
