"""Keys and results: every text is a key of its own, and every byte comes back."""

from __future__ import annotations

import pytest

from ..._records import State, Verdict
from ...keys import LONGEST, Key
from ._subject import B, Subject
from ._suite import Suite

MIB = 1 << 20
RESULTS = {
    "none": None,
    "empty": b"",
    "zero": b"0",
    "null": b"null",
    "false": b"false",
    "one zero byte": b"\x00",
    "zero bytes": b"a\x00b\x00",
    "not utf-8": b"\xff\xfe\x80",
    "every byte": bytes(range(256)),
    "line ends": b"\r\n\n\r",
    "quotes": b"'\"`\\%s{}$1",
    "a mebibyte": bytes(range(256)) * (MIB // 256),
}
ALIKE = [
    "order",
    "Order",
    "ORDER",
    "order ",
    " order",
    "order  ",
    "order|1",
    "order%7C1",
    "order%",
    "order_",
    "order'",
    'order"',
    "order`; DROP TABLE records; --",
    "order\\",
    "order\\\\",
    "order*",
    "order?",
    "order[1]",
    "{order}",
    "order:1",
    "order/1",
    "straße",
    "STRASSE",
    "é",
    "e\u0301",
    "ß",
    "ss",
    "ı",
    "i",
    "İ",
    "日本",
    "😀",
    "😁",
    "\ufeffa",
    "a",
    "a\u200b",
    "1",
    "1.0",
    "01",
    "NULL",
    "None",
]
"""Keys that a careless collation, pattern or conversion would take for one another."""


class Content(Suite):
    """Nothing that a caller hands over is bent on its way in or out."""

    @pytest.mark.parametrize("state", [State.COMPLETED, State.FAILED])
    @pytest.mark.parametrize("result", RESULTS.values(), ids=RESULTS.keys())
    def test_a_result_comes_back_byte_for_byte(
        self, subject: Subject, state: State, result: bytes | None
    ) -> None:
        """Falsy, empty, binary or large: the replay carries exactly what was recorded; None is not empty."""
        subject.complete(subject.hold(), result, state)
        decision = subject.claim(owner=B)
        assert decision.verdict is Verdict.REPLAY
        assert decision.record is not None
        assert decision.record.result == result
        assert type(decision.record.result) is type(result)
        assert subject.get() == decision.record

    def test_owners_and_fingerprints_come_back_byte_for_byte(self, subject: Subject) -> None:
        """They are bytes, not text: zero bytes and invalid UTF-8 are as good as any."""
        for number, value in enumerate(
            (b"\x00" * 16, b"\xff" * 16, bytes(range(16)), b"'\"\\%s\r\n\x00{}|;--!")
        ):
            key = f"key {number}"
            held = subject.hold(key, value, value * 2)
            assert (held.owner, held.fingerprint) == (value, value * 2)
            assert subject.get(key) == held
            assert subject.claim(key, value, value * 2).verdict is Verdict.CLAIMED
            assert subject.claim(key, B, value * 2).verdict is Verdict.BUSY
            assert subject.claim(key, value, value).verdict is Verdict.MISMATCH

    def test_keys_that_look_alike_are_different_keys(self, subject: Subject) -> None:
        """Case, blanks, accents, quotes, wildcards and separators all tell keys apart."""
        held = {}
        for key in ALIKE:
            decision = subject.claim(key)
            assert decision.verdict is Verdict.CLAIMED, key
            held[key] = decision.record
        for key in ALIKE:
            assert subject.get(key) == held[key], key
            assert subject.claim(key, B).verdict is Verdict.BUSY, key
        assert [record.key for record in subject.scan(limit=len(ALIKE) + 1)] == sorted(ALIKE)

    def test_the_longest_keys_are_kept_whole(self, subject: Subject) -> None:
        """A key of the greatest length there is differs from one that differs in its last character."""
        for letter in ("x", "é", "😀", "%", "|"):
            longest = Key.of(letter * LONGEST, letter * LONGEST, letter * LONGEST, letter * LONGEST).text
            assert subject.hold(longest).key == longest
            assert subject.claim(longest[:-1] + "y").verdict is Verdict.CLAIMED
            assert subject.claim(longest[:-1]).verdict is Verdict.CLAIMED
            assert subject.read(longest).key == longest
