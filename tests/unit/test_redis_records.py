"""Records as Redis has them: one form for each, which gives back what was packed."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effectonce._records import NOBODY, Claim, Record, State
from effectonce.errors import StoreMismatch
from effectonce.stores._redis_commands import SCRIPTS, Commands
from effectonce.stores._redis_records import (
    EPOCH,
    HEADS,
    OUTLINE_SIZE,
    SHORT_FENCES,
    TIMES,
    last_of,
    outline,
    packed,
    told,
)
from effectonce.stores._redis_routes import slot_of

PLAIN = Record("k", State.COMPLETED, NOBODY, EPOCH + 7, b"f" * 16, 0.0, 1, b"{}", 1_800_000_000.123, False)
WATCHED = 0xA5

times = st.floats(1.7e9, 4e9) | st.integers(1_700_000_000_000, 4_000_000_000_000).map(lambda ms: ms / 1000)
fences = st.integers(0, EPOCH + 100_000) | st.sampled_from(
    [SHORT_FENCES[0], SHORT_FENCES[-1], SHORT_FENCES[-1] + 1]
)
fingerprints = st.binary(min_size=16, max_size=16) | st.just(b"") | st.binary(max_size=300)
attempts = st.just(1) | st.integers(0, 2**32 - 1)
pending = st.builds(
    Record, st.just("k"), st.just(State.PENDING), st.binary(max_size=255), fences, fingerprints, times, attempts,
    st.none(), times, st.booleans(),
)  # fmt: skip
ended = st.builds(
    Record, st.just("k"), st.sampled_from([s for s in State if s is not State.PENDING]), st.just(NOBODY), fences,
    fingerprints, st.just(0.0), attempts, st.none() | st.binary(max_size=200), times, st.booleans(),
)  # fmt: skip


def stored(record: Record) -> Record:
    """What is read of a record that was written."""
    last = last_of(record)
    return read(packed(record), inf if last is None else (last + 1) / 1000)


def read(value: bytes, ends: float = 0.006) -> Record:
    """What is read of the bytes that a server has at the key ``k``, and will forget at a time."""
    record, now = told("k", TIMES.pack(1.5, ends) + value)
    assert now == 1.5
    assert record is not None
    return record


@given(pending | ended)
def test_a_record_comes_back_as_it_was(record: Record) -> None:
    """All of it, to the last bit of its times; but a fence ahead of its expiry makes it stay for as long."""
    read = stored(record)
    expires_at = record.expires_at
    if record.fence >= expires_at * 1000 - 1:
        expires_at = read.expires_at
        assert expires_at >= record.expires_at
    assert read == record._replace(expires_at=expires_at)


@given(pending | ended)
def test_a_record_has_one_form(record: Record) -> None:
    """What was read is packed into the bytes that were read, so that a swap can compare them."""
    assert packed(stored(record)) == packed(record)


@given(pending | ended)
def test_the_last_millisecond_is_not_too_early(record: Record) -> None:
    """Neither before a record's time nor before its fence is Redis told to forget it."""
    last = last_of(record)
    unsettled = record.state is State.IN_DOUBT or (record.state is State.PENDING and record.once)
    assert (last is None) is unsettled
    if last is not None:
        assert last >= record.fence
        assert (last + 1) / 1000 >= record.expires_at


@given(pending | ended)
def test_an_outline_is_enough_to_count_by(record: Record) -> None:
    """State, lease, and whether it may be forgotten are in a record's first bytes."""
    if len(record.owner) > 16:
        record = record._replace(owner=record.owner[:16])
    seen = outline(packed(record)[:OUTLINE_SIZE])
    assert seen is not None
    assert (seen.state, seen.lease_until) == (record.state, record.lease_until)
    assert seen.expires_at in (record.expires_at, inf)
    if record.state is State.PENDING:
        assert (seen.expires_at, seen.once) == (record.expires_at, record.once)


@pytest.mark.parametrize("fingerprint", [b"f" * 16, b""])
def test_a_plain_record_is_six_bytes_longer_than_what_it_holds(fingerprint: bytes) -> None:
    """That is what keeps it within the room of the two."""
    assert len(packed(PLAIN._replace(fingerprint=fingerprint))) == 6 + len(fingerprint) + 2


@pytest.mark.parametrize(
    "change",
    [
        {"attempts": 2},
        {"once": True},
        {"fingerprint": b"f" * 15},
        {"fence": SHORT_FENCES[-1] + 1},
        {"fence": 7},
        {"expires_at": 1_800_000_000.1234},
        {"state": State.IN_DOUBT},
    ],
)
def test_what_is_out_of_the_ordinary_is_told_in_full(change: dict[str, object]) -> None:
    """Anything that a plain record leaves out, and not only by chance, is in the long form."""
    assert len(packed(PLAIN._replace(**change))) > 6 + 16 + 2 + 10


def test_a_watched_record_is_the_same_record() -> None:
    """That somebody waits for its end is no part of it."""
    record = Record("k", State.PENDING, b"o" * 16, 7, b"f", 1.5, 1, None, 2.5, False)
    value = packed(record)
    assert read(bytes([WATCHED]) + value[1:]) == record


@given(st.binary(max_size=60))
def test_bytes_of_others_are_refused_or_read_but_never_break(value: bytes) -> None:
    """Whatever stands at a key, it is a record or it is a StoreMismatch."""
    try:
        record = read(value)
    except StoreMismatch as error:
        assert error.key == "k"
    else:
        assert value[0] in HEADS
        assert isinstance(record, Record)
    outline(value)


def test_a_fingerprint_of_any_size_can_be_claimed() -> None:
    """Also one whose size would mean something in a format."""
    commands = Commands("eo:", waits_for_replicas=False)
    for size in (0, 16, ord("%"), ord("%") * 257):
        data = commands.of(Claim("100%", b"%" * 16, b"%" * size, 1.0, 2.0))
        assert data.count(b"%") == 1 + 16 + size + size.to_bytes(2, "big").count(b"%") + 0


def test_every_script_is_in_its_file() -> None:
    """Nothing else is in the folder, and nothing is missing."""
    files = {path.stem for path in Path("src/effectonce/stores/lua").glob("*.lua")}
    parts = {part for parts in SCRIPTS.values() for part in parts}
    assert files == {*SCRIPTS, *parts, "opening", "telling", "rewriting", "closing"}


@pytest.mark.parametrize(
    ("name", "slot"),
    [
        (b"123456789", 12739),
        (b"foo", 12182),
        (b"{foo}bar", 12182),
        (b"bar{foo}{baz}", 12182),
        (b"foo{}{bar}", 8363),
        (b"foo{{bar}}zap", 4015),
    ],
)
def test_slots(name: bytes, slot: int) -> None:
    """The slot of a key is that of what stands in its first braces, if anything does."""
    assert slot_of(name) == slot
