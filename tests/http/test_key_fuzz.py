"""The pure rules against whatever there may be: keys against the parser of the package ``http_sf``, and round trips.

Lines are made of the characters that decide, so that half of them are nearly right. The soak tries a million.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from itertools import pairwise

import http_sf
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from effectonce.codec import decode, encode
from effectonce.errors import Unencodable
from effectonce.http._exchange import (
    ANSWER,
    LONGEST_KEY,
    Answer,
    Hasher,
    Problem,
    fingerprint_of,
    head_of,
    key_of,
    quoted,
    sound,
)

SOAK = bool(os.environ.get("EFFECTONCE_SOAK"))
LINES = 1_000_000 if SOAK else 20_000
EXAMPLES = settings(max_examples=20_000 if SOAK else 1_000)

DECIDING = [bytes([byte]) for byte in b'""\\ \t,;=:aB7-%@()?\x7f\x00\xc3\xbc~!*/']
"""The characters that decide what a line is, and some that are just there."""
PRINTABLE = st.text(st.characters(min_codepoint=32, max_codepoint=126))


def said_by_the_oracle(line: bytes) -> str | None:
    """The string that a line is, by RFC 8941 and without parameters; None if it is none."""
    try:
        value, parameters = http_sf.parse(line.strip(b" \t"), tltype="item")
    except Exception:
        return None
    return value if type(value) is str and not parameters else None


def said(line: bytes, *, strict: bool) -> str | None:
    try:
        return key_of([line], strict)
    except Problem as problem:
        assert problem.code == "key-invalid"
        return None


def check(line: bytes) -> None:
    """Strict is what the oracle says, within the limits of a key. Otherwise a bare token is a key as well."""
    oracle = said_by_the_oracle(line)
    usable = oracle is not None and oracle.strip(" ") and len(oracle) <= LONGEST_KEY
    expected = oracle if usable else None
    assert said(line, strict=True) == expected, line
    lenient, bare = said(line, strict=False), line.strip(b" \t")
    if lenient != expected:
        assert expected is None and lenient is not None, line
        assert lenient.encode() == bare and len(bare) <= LONGEST_KEY, line
        assert lenient.isascii() and lenient.isprintable() and not set(lenient) & set(' ",;\\'), line


def lines(count: int) -> Iterator[bytes]:
    """Lines that are keys, and lines that just are none."""
    chance = random.Random(20_240_607)
    for _ in range(count):
        inside = b"".join(chance.choices(DECIDING, k=chance.randrange(12)))
        form = chance.randrange(4)
        if form == 0:
            yield inside
        elif form == 1:
            yield b'"' + inside + b'"'
        elif form == 2:
            yield (
                b" " * chance.randrange(2)
                + quoted(inside.decode("latin-1"))
                + chance.choice([b"", b" ", b"\t", b";a"])
            )
        else:
            yield b'"' + b"k" * chance.choice([1, 254, 255, 256]) + b'"' + inside[:1]


def test_keys_are_what_the_oracle_says() -> None:
    """Every line that the generator makes."""
    for line in lines(LINES):
        check(line)


@EXAMPLES
@given(st.binary(max_size=40))
@example(b'"\\')
@example(b'"a"; b')
@example(b"?1")
@example(b":aGk=:")
def test_any_bytes_are_a_key_or_a_problem(line: bytes) -> None:
    """Nothing else is ever raised."""
    check(line)


@EXAMPLES
@given(PRINTABLE.filter(lambda key: bool(key.strip())).map(lambda key: key[:LONGEST_KEY]).filter(str.strip))
def test_a_key_comes_back_as_it_was(key: str) -> None:
    """What is sent to the client names the same key when it comes back, here and for the oracle."""
    assert key_of([quoted(key)], True) == key == said_by_the_oracle(quoted(key))


@EXAMPLES
@given(st.binary(max_size=60), st.lists(st.integers(0, 60), max_size=4))
def test_a_body_in_pieces_is_the_same_request(body: bytes, cuts: list[int]) -> None:
    """However it was cut."""
    hasher = Hasher("POST", b"/a", b"b=c")
    borders = [0, *sorted(cuts), len(body)]
    for start, end in pairwise(borders):
        hasher.update(body[start:end])
    assert hasher.digest() == fingerprint_of(head_of("POST", b"/a", b"b=c"), body)


PART = st.binary(max_size=3)
ASKED = st.tuples(st.sampled_from(["POST", "PATCH", "PO", "PUT"]), PART, PART, PART)


@EXAMPLES
@given(ASKED, ASKED)
@example(("POST", b"/a", b"b", b""), ("POST", b"/ab", b"", b""))
@example(("POST", b"/a", b"", b"b"), ("POST", b"/a", b"b", b""))
def test_no_move_of_a_border_is_the_same_request(
    one: tuple[str, bytes, bytes, bytes], other: tuple[str, bytes, bytes, bytes]
) -> None:
    """Method, path, query and body count each for itself."""
    asked = [fingerprint_of(head_of(*each[:3]), each[3]) for each in (one, other)]
    assert (asked[0] == asked[1]) == (one == other)


NAME = st.from_regex(rb"[a-zA-Z-]{1,8}", fullmatch=True)
VALUE = st.binary(max_size=12).filter(lambda value: not set(value) & set(b"\r\n\0"))
HEADERS = st.lists(st.tuples(NAME, VALUE), max_size=5).map(tuple)


@EXAMPLES
@given(st.integers(100, 599), HEADERS, st.none() | st.binary(max_size=40))
def test_an_answer_comes_back_as_it_was(
    status: int, headers: tuple[tuple[bytes, bytes], ...], body: bytes | None
) -> None:
    """Headers in their order and as often as they came, bodies of any bytes, and none."""
    answer = Answer(status, sound(headers), body)
    assert decode(encode(answer, ANSWER), ANSWER) == answer


@pytest.mark.parametrize(
    "pair",
    [(b"x", b"a\nb: c"), (b"x", b"a\r\nb: c"), (b"x", b"a\0"), (b"x\n", b"a"), (b"x y", b""), (b"", b"a")],
)
def test_a_header_that_would_be_two_is_never_stored(pair: tuple[bytes, bytes]) -> None:
    """Neither by an adapter that asks whether it is sound, nor by one that forgot to."""
    with pytest.raises(ValueError, match="header"):
        sound([pair])
    try:
        stored = encode(Answer(200, (pair,), b""), ANSWER)
    except Unencodable:
        return
    assert decode(stored, ANSWER).headers == (pair,)
