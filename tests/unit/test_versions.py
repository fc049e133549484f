"""The rules of versions: writes, events and vectors, without a database."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effectonce.errors import EffectOnceError, UsageError
from effectonce.versions import (
    EventOrder,
    StaleVersion,
    UniqueEffect,
    VersionGap,
    VersionGuard,
    VersionVector,
    schema,
)
from effectonce.versions._rules import Arrival, decide_event, may_write, run_after

vectors = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 4)).map(VersionVector)


# Vectors: a partial order, and its least upper bound


@given(vectors, vectors)
def test_two_vectors_compare_in_exactly_one_way(one: VersionVector, other: VersionVector) -> None:
    """Equal, newer, older or in conflict; and the other way round it is the mirror image."""
    mirror = {
        "equal": "equal",
        "dominates": "dominated",
        "dominated": "dominates",
        "concurrent": "concurrent",
    }
    word = one.compare(other)
    assert other.compare(one) == mirror[word]
    assert [word == "equal", word == "dominates", word == "dominated", word == "concurrent"] == [
        one == other,
        one > other and one.dominates(other),
        one < other and other.dominates(one),
        not one <= other and not one >= other and one.concurrent(other),
    ]


@given(vectors, vectors)
def test_comparison_is_what_the_counts_say(one: VersionVector, other: VersionVector) -> None:
    """The definition, count by count."""
    assert (one <= other) == all(one[writer] <= other[writer] for writer in "abcd")


@given(vectors, vectors, vectors)
def test_being_at_least_is_a_partial_order(
    one: VersionVector, two: VersionVector, three: VersionVector
) -> None:
    """Reflexive, antisymmetric, transitive."""
    assert one <= one
    if one <= two and two <= one:
        assert one == two and hash(one) == hash(two)
    if one <= two and two <= three:
        assert one <= three


@given(vectors, vectors, vectors)
def test_a_merge_is_the_least_upper_bound(
    one: VersionVector, two: VersionVector, any_bound: VersionVector
) -> None:
    """It has what either has, and whatever else has both has at least as much."""
    merged = one.merge(two)
    assert merged >= one and merged >= two
    bound = any_bound | one | two
    assert merged <= bound
    if any_bound >= one and any_bound >= two:
        assert merged <= any_bound


@given(vectors, vectors, vectors)
def test_the_order_of_merging_does_not_matter(
    one: VersionVector, two: VersionVector, three: VersionVector
) -> None:
    """Commutative, associative, idempotent: replicas that have heard the same agree."""
    assert one | two == two | one
    assert (one | two) | three == one | (two | three)
    assert one | one == one
    assert one | VersionVector() == one


@given(vectors, st.sampled_from("abcd"), st.sampled_from("abcd"))
def test_a_change_makes_a_newer_vector(vector: VersionVector, one: str, other: str) -> None:
    """One writer's change dominates what it was based on; changes of two writers side by side are in conflict."""
    assert vector.tick(one).dominates(vector)
    if one != other:
        assert vector.tick(one).concurrent(vector.tick(other))


@given(vectors)
def test_a_vector_survives_being_written_down(vector: VersionVector) -> None:
    """As text, and as plain data."""
    assert VersionVector.from_text(vector.to_text()) == vector
    assert VersionVector(json.loads(json.dumps(dict(vector)))) == vector


@given(st.dictionaries(st.text(min_size=1).filter(str.strip), st.integers(0, 9)))
def test_equal_vectors_have_one_text(counts: dict[str, int]) -> None:
    """Neither the order of writers nor a count of zero shows, so that texts can be compared in SQL."""
    turned = dict(reversed([*counts.items(), ("nobody yet", 0)]))
    if "nobody yet" not in counts:
        assert VersionVector(turned).to_text() == VersionVector(counts).to_text()
        assert VersionVector(turned) == VersionVector(counts)


def test_a_vector_reads_as_a_mapping() -> None:
    """Of the writers that have changed something; others count zero."""
    vector = VersionVector({"tokyo": 1, "berlin": 2, "lima": 0})
    assert dict(vector) == {"berlin": 2, "tokyo": 1} and len(vector) == 2
    assert vector["lima"] == 0 and "lima" not in vector and vector["nowhere"] == 0
    assert repr(vector) == "VersionVector({'berlin': 2, 'tokyo': 1})"
    assert isinstance(vector, Mapping) and VersionVector(vector) == vector
    assert vector != {"berlin": 2, "tokyo": 1}


@pytest.mark.parametrize(
    ("counts", "says"),
    [
        ({"a": -1}, "whole numbers from 0"),
        ({"a": 1.5}, "whole numbers from 0"),
        ({"a": True}, "whole numbers from 0"),
        ({"a": None}, "whole numbers from 0"),
        ({"": 1}, "no name"),
        ({7: 1}, "no name"),
        ([("a", 1)], "mapping"),
        ("a", "mapping"),
    ],
    ids=str,
)
def test_what_is_no_vector_is_refused(counts: Any, says: str) -> None:
    """With what is wrong, and what a count is."""
    with pytest.raises(UsageError, match=says):
        VersionVector(counts)


@pytest.mark.parametrize("text", ["[]", "{", '{"a":-1}', '{"a":"1"}', "7", "null"])
def test_what_is_no_text_of_a_vector_is_refused(text: str) -> None:
    """A column that holds something else is heard of."""
    with pytest.raises(UsageError, match=r"version vector|whole numbers"):
        VersionVector.from_text(text)


def test_vectors_compare_with_vectors_only() -> None:
    """A dict beside a vector is a slip, and no conflict."""
    vector: Any = VersionVector({"a": 1})
    for compare in (vector.compare, vector.merge, vector.dominates, vector.concurrent):
        with pytest.raises(UsageError, match="Wrap it"):
            compare({"a": 1})
    for compare in (vector.__le__, vector.__ge__, vector.__or__):
        assert compare({"a": 1}) is NotImplemented
    with pytest.raises(TypeError):
        _ = vector < {"a": 1}
    with pytest.raises(TypeError):
        _ = vector > {"a": 1}


# Writes and events


@pytest.mark.parametrize(("actual", "may"), [(3, True), (4, False), (2, False), (None, False)], ids=str)
def test_what_a_write_at_version_3_may_do(actual: int | None, may: bool) -> None:
    """Only a row that is where it was read may be written."""
    assert may_write(actual, 3) is may


@given(st.integers(0, 9), st.integers(1, 9))
def test_events_are_old_due_or_early(applied: int, version: int) -> None:
    """The table of events."""
    verdict = decide_event(applied, version)
    assert verdict is (Arrival.OLD, Arrival.DUE, Arrival.GAP)[min(max(version - applied, 0), 2)]


@given(st.integers(0, 5), st.sets(st.integers(1, 12)))
def test_what_waits_goes_up_to_the_next_gap(applied: int, versions: set[int]) -> None:
    """And not beyond it."""
    waiting = [(version, str(version)) for version in sorted(versions) if version > applied]
    expected = itertools.takewhile(versions.__contains__, itertools.count(applied + 1))
    assert run_after(applied, waiting) == [(version, str(version)) for version in expected]


# Configuration that can't be right is refused where it is written


@pytest.mark.parametrize(
    "name",
    [
        "",
        "1st",
        'a"b',
        "a`b",
        "a'b",
        "a;b",
        "a%b",
        "a?b",
        "a$1",
        "a:b",
        "a\0b",
        "a\nb",
        "x" * 64,
        " a",
        7,
        "a.b.c",
    ],
    ids=repr,
)
def test_names_that_could_be_something_else_are_refused(name: Any) -> None:
    """Whatever a driver or an engine might take for a quote, a parameter or an end."""
    for make in (VersionGuard, UniqueEffect):
        with pytest.raises(UsageError, match="not a name"):
            make(name)
    for column in ("id", "version"):
        with pytest.raises(UsageError, match="not a name"):
            VersionGuard("accounts", **{column: name})
    with pytest.raises(UsageError, match="not a name"):
        VersionGuard("accounts").check_values({name: 1})


@pytest.mark.parametrize(
    "columns", [{"id": "version"}, {"version": "ID"}, {"id": ("a", "A")}, {"id": ()}], ids=str
)
def test_a_guard_needs_columns_of_their_own(columns: Any) -> None:
    """One column can't be two things."""
    with pytest.raises(UsageError, match="columns of their own"):
        VersionGuard("accounts", **columns)


@pytest.mark.parametrize(
    "choice", [{"gaps": "ignore"}, {"first": -1}, {"first": "1"}, {"first": True}], ids=str
)
def test_an_order_of_events_is_checked_when_it_is_made(choice: Any) -> None:
    """Not when the first event comes."""
    with pytest.raises(UsageError):
        EventOrder("shipping", **choice)


@pytest.mark.parametrize("consumer", ["", " ", "x" * 256, "a\0", None, 7], ids=repr)
def test_a_consumer_has_a_name(consumer: Any) -> None:
    """That fits its column."""
    with pytest.raises(UsageError, match="consumer"):
        EventOrder(consumer)


def test_an_unknown_dialect_is_refused() -> None:
    """With those that are known."""
    wrong: Any = "oracle"
    for ask in (schema, UniqueEffect("payments").schema):
        with pytest.raises(UsageError, match="sqlite, postgresql, mysql"):
            ask(wrong)


def test_errors_say_where_things_stand() -> None:
    """So that a caller can act on them without reading the message."""
    stale, gap = StaleVersion("…", expected=3, actual=5), VersionGap("…", entity="o-1", applied=1, version=3)
    assert isinstance(stale, EffectOnceError) and (stale.expected, stale.actual) == (3, 5)
    assert isinstance(gap, EffectOnceError) and (gap.entity, gap.applied, gap.version) == ("o-1", 1, 3)
