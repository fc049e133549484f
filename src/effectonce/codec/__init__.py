"""Values to bytes and back, without pickle: what a replay returns, and what ids and fingerprints are made of.

The format is JSON. ``None``, ``bool``, ``str``, ``int``, finite ``float``, ``list`` and ``dict`` with ``str``
keys stand for themselves; everything else is a tag, an object whose only member is ``"$"``::

    {"$": ["decimal", "1.10"]}                      a value that describes itself
    {"$": ["as", "Receipt", {"cents": 500}]}        an instance of a class that the type hint names
    {"$": ["dict", [["$", 1]]]}                     a dict that would look like a tag, or has other keys than str

A class is only ever taken from the hint; the name in the data picks one of the classes the hint allows, so
data can't make this package import or call anything. The *exact* class has to be there: a subclass is refused,
because replaying it as its base would be another type.

Rebuilding runs neither ``__init__`` nor ``__post_init__``: their side effects belong to the first run, and what
they computed is in the stored attributes (``InitVar`` needs no storing, then). Pydantic models are rebuilt by
their own ``__setstate__``, without validation. Only a msgspec Struct, which offers no other way, is constructed.

``canonical`` is the same format with one spelling for each logical value. Equal there: list and tuple, set and
frozenset, bytes and bytearray, 0.0 and -0.0, Decimal("1.0") and Decimal("1.00"), every NaN, zones of one UTC
offset. Apart: 1, 1.0, True and "1"; a naive and an aware time; one instant written with two UTC offsets.

Where to look::

    _values     encode, decode: trees of plain data and tags       _json      trees to text, and the short way
    _leaves     what one text says all about: bytes, times …       _hints     which classes may stand where
    _canonical  canonical, canonical_json                          _kinds     how a class is taken apart, rebuilt
    _errors     encode_error, decode_error                         _modules   names, however a module was started
"""

from ..errors import Unencodable
from ._canonical import canonical, canonical_json
from ._errors import decode_error, encode_error, shorter_error
from ._json import parse, read_json
from ._modules import module_of
from ._values import Form, decode, encode, prepare, unpack

__all__ = [
    "Form",
    "Unencodable",
    "canonical",
    "canonical_json",
    "decode",
    "decode_error",
    "encode",
    "encode_error",
    "module_of",
    "parse",
    "prepare",
    "read_json",
    "shorter_error",
    "unpack",
]
