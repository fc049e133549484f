"""The decisions about a batch: which events go together, and what becomes of each."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effectonce.outbox import Event, Unsent
from effectonce.outbox._batch import Retrying, Sorting, waves

RETRYING = Retrying(max_attempts=3, first_pause=1.0, longest_pause=10.0)
ANSWERS = st.sampled_from([None, "own", "unsent"])


def event(seq: int, key: str | None, attempts: int = 1) -> Event:
    return Event(seq, f"e-{seq}", "t", key, b"", {}, attempts, 0.0)


@st.composite
def batches(draw: st.DrawFn) -> list[Event]:
    keys = draw(st.lists(st.sampled_from([None, "a", "b", "c"]), max_size=30))
    return [event(seq, key, draw(st.integers(1, 4))) for seq, key in enumerate(keys)]


@given(batches())
def test_waves_are_the_batch_with_no_key_twice_in_one(batch: list[Event]) -> None:
    """Every event once, each key's in order, and as few waves as the busiest key has events."""
    groups = waves(batch)
    flat = [one for group in groups for one in group]
    assert sorted(flat) == batch
    for key in ("a", "b", "c"):
        assert [one.seq for one in flat if one.key == key] == [one.seq for one in batch if one.key == key]
    for group in groups:
        keys = [one.key for one in group if one.key is not None]
        assert len(keys) == len(set(keys))
    busiest = max((sum(one.key == key for one in batch) for key in "abc"), default=0)
    assert len(groups) == (max(busiest, 1) if batch else 0)


@given(batches(), st.data())
def test_everything_is_settled_once_and_nothing_passes_a_failure(
    batch: list[Event], data: st.DataObject
) -> None:
    """Each event is published, retried, given up or given back; behind a failure of its key none is published."""
    sorting = Sorting(RETRYING, lambda: 0.0)
    answers: dict[int, Exception | None] = {}
    for group in waves(batch):
        going = sorting.may_go(group)
        drawn = [data.draw(ANSWERS) for _ in going]
        results = [None if one is None else ValueError("x") if one == "own" else Unsent("x") for one in drawn]
        answers |= {one.seq: result for one, result in zip(going, results, strict=True)}
        sorting.answered(going, results)
    settled = sorting.settlement
    retried, given_up = [row[0] for row in settled.retried], [row[0] for row in settled.given_up]
    everything = [*settled.published, *settled.released, *retried, *given_up]
    assert sorted(everything) == [one.seq for one in batch]
    for seq in settled.published:
        assert answers[seq] is None
    for seq in given_up:
        assert batch[seq].attempts >= RETRYING.max_attempts
        assert not isinstance(answers[seq], Unsent)
    for key in ("a", "b", "c"):
        own = [one.seq for one in batch if one.key == key]
        published = [seq for seq in own if seq in settled.published]
        assert published == own[: len(published)]


def test_attempts_count_only_when_the_event_itself_failed() -> None:
    """What was unsent is retried as if it had not been tried."""
    sorting = Sorting(RETRYING, lambda: 0.0)
    sorting.answered(
        [event(1, "a", 3), event(2, "b", 3), event(3, "c", 2)], [Unsent("x"), ValueError("y"), None]
    )
    assert sorting.settlement.retried == [(1, 1.0, "Unsent: x", False)]
    assert sorting.settlement.given_up == [(2, "ValueError: y")]
    assert sorting.away is None
    sorting.answered([event(4, "d")], [Unsent("z")])
    assert isinstance(sorting.away, Unsent)


@pytest.mark.parametrize(
    ("attempts", "chance", "pause"),
    [(1, 0.0, 1.0), (2, 0.0, 2.0), (3, 1.0, 3.0), (9, 0.0, 10.0), (5000, 1.0, 7.5)],
)
def test_pauses_double_up_to_the_longest(attempts: int, chance: float, pause: float) -> None:
    """Less up to a quarter by chance."""
    assert RETRYING.pause(attempts, chance) == pause
