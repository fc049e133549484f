"""Leaves: values with no parts of their own, which a tag and a text describe completely."""

from __future__ import annotations

import sys
from binascii import a2b_base64, b2a_base64
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from functools import cache, partial
from importlib import import_module
from typing import Any, NamedTuple

from ..errors import Unencodable


class Leaf(NamedTuple):
    """How values of one class are written and read."""

    tag: str
    write: Callable[[Any], Any]
    read: Callable[[Any], Any]

    def pack(self, value: Any) -> dict[str, Any]:
        """The tagged form of a value."""
        return {"$": [self.tag, self.write(value)]}


def _base64(value: Any) -> str:
    return b2a_base64(value, newline=False).decode()


def clock(value: Any) -> list[Any]:
    """What a datetime or time shows, which of two equal hours it is, and its zone's name."""
    zone = _zone_name(value.tzinfo)
    if zone is None and value.tzinfo is not None and value.utcoffset() is None:
        raise Unencodable(
            "", type(value), f"the zone {value.tzinfo!r} has neither an IANA name nor a fixed offset"
        )
    return [value.isoformat(), value.fold, zone]


def _zone_name(zone: Any) -> str | None:
    named = getattr(sys.modules.get("zoneinfo"), "ZoneInfo", None)
    return zone.key if named is not None and type(zone) is named else None


def _read_clock(cls: Any, node: list[Any]) -> Any:
    text, fold, zone = node
    value = cls.fromisoformat(text).replace(fold=fold)
    if zone is None:
        return value
    from zoneinfo import ZoneInfo

    try:
        named = value.replace(tzinfo=ZoneInfo(zone))
    except KeyError:
        named = value
    # Where this machine's zone data disagrees with the writer's, the instant counts more than the zone's name.
    return named if value.tzinfo is None or named.utcoffset() == value.utcoffset() else value


@cache
def _class(module: str, name: str) -> Any:
    # decimal and uuid are slow to import, and most programs never store such a value.
    return getattr(import_module(module), name)


def _decimal(value: str | int) -> Any:
    return _class("decimal", "Decimal")(value)


def _uuid(text: str) -> Any:
    return _class("uuid", "UUID")(text)


LEAVES: dict[str, Leaf] = {
    "builtins:bytes": Leaf("bytes", _base64, a2b_base64),
    "builtins:bytearray": Leaf("bytearray", _base64, lambda node: bytearray(a2b_base64(node))),
    # Only where JSON has no form for them: very long integers, NaN and infinities.
    "builtins:int": Leaf("int", lambda value: str(_decimal(value)), lambda node: int(_decimal(node))),
    "builtins:float": Leaf("float", repr, float),
    "builtins:complex": Leaf(
        "complex", lambda z: [repr(z.real), repr(z.imag)], lambda node: complex(*map(float, node))
    ),
    "decimal:Decimal": Leaf("decimal", str, _decimal),
    "uuid:UUID": Leaf("uuid", str, _uuid),
    "datetime:datetime": Leaf("datetime", clock, partial(_read_clock, datetime)),
    "datetime:date": Leaf("date", date.isoformat, date.fromisoformat),
    "datetime:time": Leaf("time", clock, partial(_read_clock, time)),
    "datetime:timedelta": Leaf(
        "timedelta", lambda d: [d.days, d.seconds, d.microseconds], lambda node: timedelta(*node)
    ),
}
"""By the name of the class, so that its module need not be loaded."""
