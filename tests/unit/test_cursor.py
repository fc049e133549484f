"""The cursor of an ordered source, against a model that remembers every number."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from effectonce.messaging._cursor import MOST_RANGES, Cursor

NUMBERS = st.integers(0, 40)


class CursorMachine(RuleBasedStateMachine):
    """Whatever is done in whatever order, the cursor says of each number what the set says."""

    def __init__(self) -> None:
        super().__init__()
        self.cursor = Cursor()
        self.done: set[int] = set()
        self.tries: dict[int, int] = {}

    @rule(number=NUMBERS)
    def add(self, number: int) -> None:
        self.cursor = self.cursor.add(number)
        self.done.add(number)
        self.tries.pop(number, None)

    @rule(low=NUMBERS)
    def raise_low(self, low: int) -> None:
        self.cursor = self.cursor.raised(low)
        self.done |= set(range(low))
        self.tries = {number: count for number, count in self.tries.items() if number not in self.done}

    @rule(number=NUMBERS)
    def fail(self, number: int) -> None:
        self.cursor = self.cursor.failed(number)
        if number not in self.done:
            self.tries[number] = self.tries.get(number, 0) + 1

    @rule()
    def store(self) -> None:
        self.cursor = Cursor.read(self.cursor.low, self.cursor.written())

    @invariant()
    def says_what_the_set_says(self) -> None:
        assert {number for number in range(50) if self.cursor.has(number)} == self.done
        assert dict(self.cursor.tries) == self.tries
        assert all(self.cursor.tries_of(number) == self.tries.get(number, 0) for number in range(50))

    @invariant()
    def is_as_small_as_can_be(self) -> None:
        """Ranges are in order and apart, also from ``low``: equal states are equal values."""
        end = self.cursor.low
        for first, last in self.cursor.above:
            assert end < first < last
            end = last


TestCursor = CursorMachine.TestCase


@given(st.lists(st.integers(1, 5), max_size=50))
def test_in_order_it_stays_one_number_whatever_the_gaps(gaps: list[int]) -> None:
    """Numbers that never come are passed over: the next message is any at or above ``low``."""
    cursor, number = Cursor(), 0
    for gap in gaps:
        number += gap
        assert not cursor.has(number)
        cursor = cursor.raised(number + 1)
        assert cursor == (number + 1, (), ())
    assert cursor.written() == ""


@given(st.permutations(range(30)))
def test_in_any_order_it_ends_as_one_number(order: list[int]) -> None:
    """What fills the last gap takes everything above it along."""
    cursor = Cursor()
    for number in order:
        cursor = cursor.failed(number).add(number)
    assert cursor == (30, (), ())


def test_it_says_when_it_is_full() -> None:
    """A limit on what one move writes."""
    cursor = Cursor(1, tuple((number * 2, number * 2 + 1) for number in range(1, MOST_RANGES)))
    assert not cursor.is_full()
    assert cursor.failed(1).is_full()
