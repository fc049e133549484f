"""JSON text: the C writer and reader of the standard library, without what they cost for each call."""

from __future__ import annotations

import json
from collections.abc import Callable
from json import encoder as json_encoder
from json.scanner import make_scanner
from typing import Any, cast

DEEPEST = 100
"""A fixed limit, so that what could be written can be read from any stack depth."""

SCALARS: frozenset[type] = frozenset({str, int, float, bool, type(None)})

quoted: Callable[[str], str] = json_encoder.encode_basestring


class Writer:
    """Makes bytes of trees. The canonical one sorts members, and writes tuples as the lists they are equal to."""

    def __init__(self, canonical: bool) -> None:
        self._canonical = canonical
        self._lists: frozenset[type] = frozenset({list, tuple} if canonical else {list})
        self._chunks = _encoder(sort_keys=canonical)

    def write(self, tree: Any) -> bytes:
        """The JSON text of a tree. Raises ``ValueError`` for a number that JSON or Python can't write."""
        return "".join(self._chunks(tree, 0)).encode("utf-8", "surrogatepass")

    def write_plain(self, value: Any) -> bytes | None:
        """The same straight from a value, if it is a tree as it stands. None for all that needs a closer look."""
        try:
            if _is_plain(value, self._lists, 0):
                text = "".join(self._chunks(value, 0))
                # -0.0 is 0.0 canonically; text that only looks like it takes the long way for nothing.
                return None if self._canonical and "-0.0" in text else text.encode()
        except Exception:  # noqa: S110 - mostly a number without a JSON form; the closer look tells
            pass
        return None


def _encoder(sort_keys: bool) -> Callable[[Any, int], Any]:
    options: dict[str, Any] = {"ensure_ascii": False, "allow_nan": False, "sort_keys": sort_keys}
    portable = json.JSONEncoder(separators=(",", ":"), check_circular=False, **options)
    make: Any = getattr(json_encoder, "c_make_encoder", None)
    if make is None:
        return lambda tree, level: portable.iterencode(tree)
    # ``JSONEncoder.encode`` makes this object again for each call, which costs more than the encoding.
    chunks: Callable[[Any, int], Any] = make(
        None, portable.default, quoted, None, ":", ",", sort_keys, False, False
    )
    return chunks


def _is_plain(value: Any, lists: frozenset[type], depth: int) -> bool:
    """Whether there are only exact types of JSON here, no key but str, and nothing that looks like a tag.

    Numbers that need a tag pass, because the encoder finds these few at no cost.
    """
    kind = type(value)
    if kind is dict:
        if depth > DEEPEST or (len(value) == 1 and "$" in value):
            return False
        for key, item in value.items():
            if type(key) is not str or (type(item) not in SCALARS and not _is_plain(item, lists, depth + 1)):
                return False
        return True
    if kind in lists:
        if depth > DEEPEST:
            return False
        for item in value:  # noqa: SIM110 - all() with a generator takes twice as long
            if type(item) not in SCALARS and not _is_plain(item, lists, depth + 1):
                return False
        return True
    return kind in SCALARS


_scan: Callable[[str, int], tuple[Any, int]] = cast("Any", make_scanner)(json.JSONDecoder())


def parse(text: str) -> Any:
    """The tree of a text that was written here. Raises some ``Exception`` for any other text."""
    tree, end = _scan(text, 0)
    if end != len(text):
        raise ValueError("more data after the end")
    return tree
