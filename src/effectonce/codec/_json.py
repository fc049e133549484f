"""JSON text: the C writer and reader of the standard library, without what they cost for each call.

Where msgspec is installed (the extra ``fast``) it writes and reads what it spells exactly as the standard library:
everything but floats. The bytes are the same with and without it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from json import encoder as json_encoder
from json.scanner import make_scanner
from typing import Any, cast

DEEPEST = 100
"""A fixed limit, so that what could be written can be read from any stack depth."""

SCALARS: frozenset[type] = frozenset({str, int, float, bool, type(None)})
SPELLED_ALIKE: frozenset[type] = SCALARS - {float}
"""What msgspec writes like the standard library; it writes 1e+16 as 1e16, and NaN as null."""

quoted: Callable[[str], str] = json_encoder.encode_basestring


class Writer:
    """Makes bytes of trees. The canonical one sorts members, and writes tuples as the lists they are equal to."""

    def __init__(self, canonical: bool) -> None:
        self._canonical = canonical
        self._lists: frozenset[type] = frozenset({list, tuple} if canonical else {list})
        self._chunks = _encoder(sort_keys=canonical)
        self._quick: Callable[[Any], bytes] | None = None
        self._looked_for_quick = False

    def write(self, tree: Any) -> bytes:
        """The JSON text of a tree. Raises ``ValueError`` for a number that JSON or Python can't write."""
        return "".join(self._chunks(tree, 0)).encode("utf-8", "surrogatepass")

    def write_plain(self, value: Any) -> bytes | None:
        """The same straight from a value, if it is a tree as it stands. None for all that needs a closer look."""
        try:
            if not self._looked_for_quick:
                self._quick, self._looked_for_quick = _quick_encoder(self._canonical), True
            if self._quick is not None and _is_plain(value, self._lists, SPELLED_ALIKE, 0):
                return self._quick(value)
        except Exception:  # noqa: S110 - text that is no Unicode; the standard library knows how
            pass
        try:
            if _is_plain(value, self._lists, SCALARS, 0):
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


def _quick_encoder(canonical: bool) -> Callable[[Any], bytes] | None:
    try:
        from msgspec.json import Encoder
    except ImportError:
        return None
    return Encoder(order="sorted" if canonical else None).encode


def _is_plain(value: Any, lists: frozenset[type], scalars: frozenset[type], depth: int) -> bool:
    """Whether there are only exact types of JSON here, no key but str, and nothing that looks like a tag.

    Numbers that need a tag pass, because the encoder finds these few at no cost.
    """
    kind = type(value)
    if kind is dict:
        if depth > DEEPEST or (len(value) == 1 and "$" in value):
            return False
        for key, item in value.items():
            if type(key) is not str or (
                type(item) not in scalars and not _is_plain(item, lists, scalars, depth + 1)
            ):
                return False
        return True
    if kind in lists:
        if depth > DEEPEST:
            return False
        for item in value:  # noqa: SIM110 - all() with a generator takes twice as long
            if type(item) not in scalars and not _is_plain(item, lists, scalars, depth + 1):
                return False
        return True
    return kind in scalars


_scan: Callable[[str, int], tuple[Any, int]] = cast("Any", make_scanner)(json.JSONDecoder())


def parse(data: bytes) -> Any:
    """The tree of bytes that were written here, perhaps after a mark that is a blank. Raises some ``Exception`` for any
    others.
    """
    quick = _quick_decoder()
    if quick is not None:
        try:
            return quick(data)
        except Exception:  # noqa: S110 - text that is no Unicode, or no JSON: the standard library knows which
            pass
    text = data.decode("utf-8", "surrogatepass")
    tree, end = _scan(text, int(text.startswith(" ")))
    if end != len(text):
        raise ValueError("more data after the end")
    return tree


def read_json(text: bytes | str) -> Any:
    """The value of any JSON document, as the standard library reads it. What msgspec reads otherwise, it refuses."""
    quick = _quick_decoder()
    if quick is not None:
        try:
            return quick(text)
        except Exception:  # noqa: S110 - NaN, a byte order mark, another encoding; or no JSON at all
            pass
    return json.loads(text)


@cache
def _quick_decoder() -> Callable[[bytes | str], Any] | None:
    try:
        from msgspec.json import Decoder
    except ImportError:
        return None
    return Decoder().decode
