"""One form for each logical value, whatever its spelling: what ids and fingerprints are made of."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from ..errors import Unencodable, UsageError
from ._hints import Plan
from ._json import Writer, quoted
from ._kinds import PLAIN, kind_of, qualified
from ._leaves import LEAVES, Leaf, clock
from ._values import LONGEST_INT, Packer


def canonical(value: Any) -> bytes:
    """One deterministic form for each logical value, whatever the order of keys: for ids and fingerprints.

    Dataclasses, named tuples, enums, pydantic models and structs count by class and fields; any object may offer
    ``__effect_key__()``, which returns what counts instead. Anything else is ``Unencodable``.
    """
    if type(value) is str:
        return quoted(value).encode("utf-8", "surrogatepass")
    return _JSON.write_plain(value) or _CANONICAL.encode("payload", value)


def canonical_json(text: str | bytes) -> bytes:
    """The canonical form of a JSON document, equal to ``canonical`` of the value it stands for.

    Numbers keep their written value: ``0.1`` and ``0.10000000000000000001`` differ, ``1.5`` and ``15e-1`` don't.
    """
    try:
        tree = _parse_exactly(text if isinstance(text, str) else text.decode("utf-8-sig"))
        return _JSON.write_plain(tree) or _CANONICAL.encode("document", tree)
    except UsageError:
        raise
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"This is not a JSON document to make an id of: {error}. Send UTF-8 JSON."
        ) from error


# -- Values ----------------------------------------------------------------------------------------------------

_NUMBER = re.compile(r"(-?)(\d+)(?:\.(\d+))?(?:[eE]([+-]?\d+))?")


def _significant(text: str) -> str:
    """The same decimal number without its insignificant zeros; what is not finite stays as it is."""
    match = _NUMBER.fullmatch(text)
    if match is None:
        return text
    sign, whole, fraction, exponent = match.groups("")
    digits = (whole + fraction).lstrip("0")
    short = digits.rstrip("0")
    scale = int(exponent or 0) - len(fraction) + len(digits) - len(short)
    return f"{sign}{short}e{scale}" if short else "0"


_SPELLINGS: dict[str, Callable[[Any], Any]] = {
    "builtins:complex": lambda z: [repr(z.real + 0.0), repr(z.imag + 0.0)],
    "decimal:Decimal": lambda value: _significant(str(value)),
    "datetime:datetime": lambda value: value.isoformat(),
    "datetime:time": lambda value: clock(value)[::2],
}
_LEAVES = {
    **LEAVES,
    **{name: LEAVES[name]._replace(write=write) for name, write in _SPELLINGS.items()},
    "builtins:bytearray": LEAVES["builtins:bytes"],
    "builtins:memoryview": LEAVES["builtins:bytes"],
}


class _Number(NamedTuple):
    """A number of a JSON document that no Python number stands for exactly."""

    tag: str
    digits: str


class _CanonicalPacker(Packer):
    """One tree for each logical value. Classes count by name: there is no hint, and nothing to rebuild."""

    def __init__(self, writer: Writer, leaves: dict[str, Leaf]) -> None:
        super().__init__(writer, leaves)
        self.table |= {
            tuple: self.pack_list,
            set: self.pack_set,
            frozenset: self.pack_set,
            _Number: lambda number, plan, depth: {"$": list(number)},
        }

    def pack_float(self, value: float, plan: Plan, depth: int) -> Any:
        return super().pack_float(value + 0.0, plan, depth)

    def pack_set(self, value: Iterable[Any], plan: Plan, depth: int) -> Any:
        return {"$": ["set", sorted(self.pack_list(value, plan, depth), key=self.writer.write)]}

    def pack_pairs(self, value: dict[Any, Any], plan: Plan, depth: int) -> list[Any]:
        return sorted(super().pack_pairs(value, plan, depth), key=self.writer.write)

    def pack_instance(self, value: Any, plan: Plan, depth: int) -> Any:
        cls: type = type(value)
        kind = kind_of(cls)
        if hasattr(cls, "__effect_key__"):
            fields = {"__effect_key__()": value.__effect_key__()}
        elif kind is not None and kind is not PLAIN:
            fields = kind.take(value)
        else:
            raise Unencodable("", cls, "it is not data. Leave it out of the key, or give it __effect_key__()")
        return {"$": ["as", qualified(cls), self.pack_fields(fields, plan.at, depth)]}


_JSON = Writer(canonical=True)
_CANONICAL = _CanonicalPacker(_JSON, _LEAVES)


# -- Documents -------------------------------------------------------------------------------------------------


def _whole_number(text: str) -> int | _Number:
    return int(text) if len(text.lstrip("-")) <= LONGEST_INT else _Number("int", text)


def _broken_number(text: str) -> float | _Number:
    value, written = float(text), _significant(text)
    return value if _significant(repr(value)) == written else _Number("number", written)


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _unique_members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        twice = ", ".join(sorted({repr(name) for name in names if names.count(name) > 1}))
        raise UsageError(
            f"The JSON document has an object with more than one member called {twice}, which readers take"
            " differently. Send each name once."
        )
    return members


_parse_exactly = json.JSONDecoder(
    parse_int=_whole_number,
    parse_float=_broken_number,
    parse_constant=_no_constant,
    object_pairs_hook=_unique_members,
).decode
