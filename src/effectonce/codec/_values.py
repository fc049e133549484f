"""Values to trees of plain data and tags, and back: what a store remembers of a result."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar

from ..errors import ResultUnavailable, Unencodable
from ._hints import ITEM, KEY, VALUE, Candidate, Plan, plan_of
from ._json import DEEPEST, SCALARS, Writer, parse, quoted
from ._kinds import kind_of, qualified
from ._leaves import LEAVES, Leaf

LONGEST_INT = 4300
"""Digits: Python's own limit, unless it is set to another, for integers that it prints and parses."""

DOLLAR, TAG = ord("$"), b'"$"'
"""What a tag begins with. Most data has no such byte at all, and one byte is looked for in a tenth of the time."""

_BIG = 10**LONGEST_INT
_UNTOUCHED: frozenset[type] = frozenset({str, bool, type(None)})
_STR: frozenset[type] = frozenset({str})
_COLLECTIONS: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_READERS = {leaf.tag: leaf.read for leaf in LEAVES.values()}


class Form(NamedTuple):
    """A hint for values that have bytes of their own: how they are written and read."""

    write: Callable[[Any], bytes]
    read: Callable[[bytes], Any]


def encode(value: Any, hint: Any = Any) -> bytes:
    """The bytes from which ``decode`` with the same hint gives back the same value and type.

    Raises ``Unencodable`` and nothing else.
    """
    if type(hint) is Form:
        return hint.write(value)
    if type(value) is str:
        return quoted(value).encode("utf-8", "surrogatepass")
    if value is None:
        return b"null"
    return _JSON.write_plain(value) or STORED.encode("result", value, hint)


def decode(data: bytes, hint: Any = Any) -> Any:
    """The value that ``encode`` was given. Raises ``ResultUnavailable`` if the hint doesn't fit the data."""
    try:
        if type(hint) is Form:
            return hint.read(data)
        is_tagged = DOLLAR in data and TAG in data
        return unpack_as(parse(data), plan_of(hint)) if is_tagged else parse(data)
    except Exception as error:
        raise _unreadable(hint, error) from error


def unpack(tree: Any, hint: Any = Any) -> Any:
    """The same from what ``parse`` has made of the bytes, perhaps as a part of more."""
    try:
        return unpack_as(tree, plan_of(hint))
    except Exception as error:
        raise _unreadable(hint, error) from error


def _unreadable(hint: Any, error: Exception) -> ResultUnavailable:
    return ResultUnavailable(
        f"The stored result can't be read back as {hint!r} ({error!r}). If that type changed since the"
        " result was stored, give the operation a new version."
    )


def prepare() -> None:
    """Load what encoding and decoding need: an import that a signal interrupts later would strand every thread."""
    decode(encode({}))


# -- Packing ---------------------------------------------------------------------------------------------------

K = TypeVar("K")
Pack = Callable[[Any, Plan, int], Any]


class Packer:
    """Turns values into trees: what JSON can't say is tagged, and a class needs a plan that allows it."""

    def __init__(self, writer: Writer, leaves: dict[str, Leaf]) -> None:
        self.writer, self.leaves = writer, leaves
        # A bounded cache, so that classes made at run time can go again.
        self.beyond_table = lru_cache(maxsize=1024)(self._beyond_table)
        self.table: dict[type, Pack] = {
            **{kind: partial(self.pack_collection, tag) for tag, kind in _COLLECTIONS.items()},
            int: self.pack_int,
            float: self.pack_float,
            list: self.pack_list,
            dict: self.pack_dict,
        }

    def encode(self, root: str, value: Any, hint: Any = Any) -> bytes:
        """The bytes of a value. Raises ``Unencodable``, with a path that begins with ``root``, and nothing else."""
        try:
            return self.writer.write(self.pack(value, plan_of(hint), 0))
        except Unencodable as error:
            error.path = root + error.path
            raise
        except Exception as error:
            raise Unencodable(root, type(value), f"reading it failed with {error!r}") from error

    def pack(self, value: Any, plan: Plan, depth: int) -> Any:
        """The tree of a value. ``depth`` is the number of containers around it."""
        kind: type = type(value)
        if kind in _UNTOUCHED:
            return value
        if depth > DEEPEST and kind not in SCALARS:
            raise Unencodable("", kind, f"it lies more than {DEEPEST} levels deep, or contains itself")
        pack = self.table.get(kind) or self.beyond_table(kind)
        return pack(value, plan, depth + 1)

    def _beyond_table(self, kind: type) -> Pack:
        leaf = self.leaves.get(qualified(kind))
        return self.pack_instance if leaf is None else lambda value, plan, depth: leaf.pack(value)

    def pack_int(self, value: int, plan: Plan, depth: int) -> Any:
        return value if -_BIG < value < _BIG else self.leaves["builtins:int"].pack(value)

    def pack_float(self, value: float, plan: Plan, depth: int) -> Any:
        return value if value - value == 0 else self.leaves["builtins:float"].pack(value)

    def pack_list(self, value: Iterable[Any], plan: Plan, depth: int) -> list[Any]:
        return [*self.pack_parts(enumerate(value), partial(plan.at, ITEM), _index, depth).values()]

    def pack_collection(self, tag: str, value: Iterable[Any], plan: Plan, depth: int) -> Any:
        return {"$": [tag, self.pack_list(value, plan, depth)]}

    def pack_dict(self, value: dict[Any, Any], plan: Plan, depth: int) -> Any:
        if not _STR.issuperset(map(type, value)) or (len(value) == 1 and "$" in value):
            return {"$": ["dict", self.pack_pairs(value, plan, depth)]}
        return self.pack_parts(value.items(), partial(plan.at, VALUE), _member, depth)

    def pack_pairs(self, value: dict[Any, Any], plan: Plan, depth: int) -> list[Any]:
        keys = self.pack_parts(zip(value, value, strict=True), lambda _: plan.at(KEY), _member, depth)
        items = self.pack_parts(value.items(), lambda key: plan.at(VALUE, _place(key)), _member, depth)
        return [[keys[key], items[key]] for key in value]

    def pack_instance(self, value: Any, plan: Plan, depth: int) -> Any:
        candidate = plan.classes.get(type(value))
        if candidate is None:
            raise Unencodable("", type(value), _why_not(type(value), plan))
        fields = candidate.kind.take(value) | candidate.kind.more(value)
        return {"$": ["as", candidate.name, self.pack_fields(fields, candidate.plan, depth)]}

    def pack_fields(self, fields: dict[str, Any], plan: Callable[[str], Plan], depth: int) -> dict[str, Any]:
        return self.pack_parts(fields.items(), plan, _attribute, depth)

    def pack_parts(
        self, parts: Iterable[tuple[K, Any]], plan: Callable[[K], Plan], step: Callable[[K], str], depth: int
    ) -> dict[K, Any]:
        """Each part packed, by its key, which is also a step of the path of any error."""
        packed = {}
        for key, value in parts:
            try:
                packed[key] = value if type(value) in _UNTOUCHED else self.pack(value, plan(key), depth)
            except Unencodable as error:
                error.path = step(key) + error.path
                raise
        return packed


_JSON = Writer(canonical=False)
STORED = Packer(_JSON, LEAVES)


def _why_not(kind: type, plan: Plan) -> str:
    if kind in plan.nameless:
        return "the type hint has another class of the same name and module. Rename one of them"
    if kind_of(kind) is None:
        return (
            "it is neither plain data nor a class this library can rebuild. Return plain data or a dataclass"
        )
    return f"the type hint does not lead to exactly this class. Name {kind.__qualname__} in the annotation"


def _place(key: Any) -> str | None:
    return key if type(key) is str else None


def _index(key: int) -> str:
    return f"[{key}]"


def _attribute(key: str) -> str:
    return f".{key}"


def _member(key: Any) -> str:
    return f".{key}" if type(key) is str and key.isidentifier() else f"[{key!r}]"


# -- Unpacking -------------------------------------------------------------------------------------------------


def unpack_as(node: Any, plan: Plan) -> Any:
    """The value of a tree, as a plan has it."""
    kind = type(node)
    if kind is list:
        return [unpack_as(item, plan.at(ITEM, place)) for place, item in enumerate(node)]
    if kind is not dict:
        return node
    if len(node) == 1 and "$" in node:
        return _untagged(*node["$"], plan=plan)
    return {name: unpack_as(item, plan.at(VALUE, name)) for name, item in node.items()}


def _untagged(tag: str, *body: Any, plan: Plan) -> Any:
    if tag == "as":
        name, fields = body
        return _instance(plan.names[name], fields)
    (node,) = body
    if tag == "dict":
        return {
            unpack_as(key, plan.at(KEY)): unpack_as(item, plan.at(VALUE, _place(key))) for key, item in node
        }
    if tag in _COLLECTIONS:
        return _COLLECTIONS[tag](unpack_as(node, plan))
    return _READERS[tag](node)


def _instance(candidate: Candidate, fields: dict[str, Any]) -> Any:
    values = {name: unpack_as(item, candidate.plan(name)) for name, item in fields.items()}
    return candidate.kind.make(candidate.cls, values)
