"""Values to bytes and back, without pickle: what a replay returns, and what ids and fingerprints are made of.

The format is JSON. ``None``, ``bool``, ``str``, ``int``, finite ``float``, ``list`` and ``dict`` with ``str``
keys stand for themselves; everything else is a tag, an object whose only member is ``"$"``::

    {"$": ["decimal", "1.10"]}                      a value that describes itself
    {"$": ["as", "Receipt", {"cents": 500}]}        an instance of a class that the type hint names
    {"$": ["dict", [["$", 1]]]}                     a dict that would look like a tag, or has other keys than str

A class is only ever taken from the hint; the name in the data picks one of the classes the hint allows, so
data can't make this module import or call anything. The *exact* class has to be there: a subclass is refused,
because replaying it as its base would be another type.

Rebuilding runs neither ``__init__`` nor ``__post_init__``: their side effects belong to the first run, and what
they computed is in the stored attributes (``InitVar`` needs no storing, then). Pydantic models are rebuilt by
their own ``__setstate__``, without validation. Only a msgspec Struct, which offers no other way, is constructed.

``canonical`` is the same format with one spelling for each logical value. Equal there: list and tuple, set and
frozenset, bytes and bytearray, 0.0 and -0.0, Decimal("1.0") and Decimal("1.00"), every NaN, zones of one UTC
offset. Apart: 1, 1.0, True and "1"; a naive and an aware time; one instant written with two UTC offsets.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
import types
import typing
from base64 import b64decode, b64encode
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import cached_property, lru_cache, partial
from json import encoder as json_encoder
from typing import (
    Annotated,
    Any,
    ClassVar,
    Final,
    Literal,
    NewType,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
)
from uuid import UUID

from .errors import RememberedError, ResultUnavailable, UsageError

__all__ = [
    "Unencodable",
    "canonical",
    "canonical_json",
    "decode",
    "decode_error",
    "encode",
    "encode_error",
]

_DEEPEST = 100
"""A fixed limit, so that what could be written can be read from any stack depth."""

_DIGITS = 600
_BIG = 10**_DIGITS
"""Python may be set to refuse integers of more than 640 digits, so from here on they travel as tagged text."""


class Unencodable(UsageError, TypeError):
    """A value without a faithful stored form. ``path`` names the spot, ``type`` its class, ``why`` the reason."""

    def __init__(self, path: str, type: type, why: str) -> None:
        super().__init__()
        self.path, self.type, self.why = path, type, why

    def __str__(self) -> str:
        path = self.path if len(self.path) <= 120 else f"{self.path[:60]}…{self.path[-60:]}"
        return f"{path} is a {_qualified(self.type)}, which can't be encoded: {self.why}"


def encode(value: Any, hint: Any = Any) -> bytes:
    """The bytes from which ``decode`` with the same hint gives back the same value and type.

    Raises ``Unencodable`` and nothing else.
    """
    if value is None:
        return b"null"
    if type(value) is str:
        return _quoted(value).encode("utf-8", "surrogatepass")
    return _write("result", value, hint, _STORED)


def decode(data: bytes, hint: Any = Any) -> Any:
    """The value that ``encode`` was given. Raises ``ResultUnavailable`` if the hint doesn't fit the data."""
    try:
        text = data.decode("utf-8", "surrogatepass")
        tree, end = _parse(text)
        if end != len(text):
            raise ValueError("more data after the end")
        return _unpack(tree, _plan(hint)) if '"$"' in text else tree
    except Exception as error:
        raise ResultUnavailable(
            f"The stored result can't be read back as {hint!r} ({error!r}). If that type changed since the"
            " result was stored, give the operation a new version."
        ) from error


def canonical(value: Any) -> bytes:
    """One deterministic form for each logical value, whatever the order of keys: for ids and fingerprints.

    Dataclasses, named tuples, enums, pydantic models and structs count by class and fields; any object may offer
    ``__effect_key__()``, which returns what counts instead. Anything else is ``Unencodable``.
    """
    if type(value) is str:
        return _quoted(value).encode("utf-8", "surrogatepass")
    return _write("payload", value, Any, _CANONICAL)


def canonical_json(text: str | bytes) -> bytes:
    """The canonical form of a JSON document, equal to ``canonical`` of the value it stands for.

    Numbers keep their written value: ``0.1`` and ``0.10000000000000000001`` differ, ``1.5`` and ``15e-1`` don't.
    """
    try:
        tree = _parse_exactly(text if isinstance(text, str) else text.decode("utf-8-sig"))
        return _write("document", tree, Any, _CANONICAL)
    except UsageError:
        raise
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"This is not a JSON document to make an id of: {error}. Send UTF-8 JSON."
        ) from error


# -- Errors that are remembered ------------------------------------------------------------------------------


def encode_error(error: BaseException) -> bytes:
    """The bytes of an exception: its class's name, message, arguments and attributes.

    An argument or attribute that can't be encoded is kept as its text.
    """
    reduced: Any = _builtin_base(type(error)).__reduce__(error)
    _, make, *state = reduced
    stored = {
        "type": _qualified(type(error)),
        "message": _message(error),
        "make": [_or_text(item) for item in make],
        "args": [_or_text(item) for item in error.args],
        "state": {name: _or_text(item) for name, item in (state[0] if state else {}).items()},
    }
    return _dump(stored).encode("utf-8", "surrogatepass")


def decode_error(data: bytes, known: tuple[type[BaseException], ...]) -> BaseException:
    """The exception again, if its class is one of ``known`` or derived from one; else a ``RememberedError``.

    No ``__init__`` or ``__new__`` of the class itself runs, so odd signatures do no harm.
    """
    stored = decode(data)
    for cls in _with_subclasses(known):
        if _qualified(cls) == stored["type"]:
            try:
                return _rebuilt(cls, **stored)
            except Exception:
                break
    return RememberedError(stored["message"], error_type=stored["type"])


def _rebuilt(
    cls: type[BaseException], make: Any, args: Any, state: dict[str, Any], **_: Any
) -> BaseException:
    base = _builtin_base(cls)
    error = base.__new__(cls, *make)
    base.__init__(error, *make)
    object.__setattr__(error, "args", tuple(args))
    for name, value in state.items():
        if hasattr(base, name):
            object.__setattr__(error, name, value)
        else:
            error.__dict__[name] = value
    str(error)
    return error


def _builtin_base(cls: type[BaseException]) -> type[BaseException]:
    # OSError, ImportError and others keep state outside ``__dict__``, which only their own C code can write.
    base: Any = cls
    while base.__module__ != "builtins":
        base = base.__base__
    return cast("type[BaseException]", base)


def _with_subclasses(classes: Iterable[type[BaseException]]) -> Iterator[type[BaseException]]:
    for cls in classes:
        yield cls
        yield from _with_subclasses(type.__subclasses__(cls))


def _or_text(value: Any) -> Any:
    try:
        return _STORED.exact.pack(value, _ANY, 0)
    except Exception:
        return _message(value)


def _message(value: Any) -> str:
    try:
        return str(value)
    except Exception:
        return f"<{_qualified(type(value))}>"


def _qualified(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


# -- Hints: which classes may stand where --------------------------------------------------------------------

_UNIONS = (Union, types.UnionType)
_WRAPPERS = (
    Annotated,
    Final,
    ClassVar,
    typing.Required,
    typing.NotRequired,
    getattr(typing, "ReadOnly", Final),
)
_ITEM, _KEY, _VALUE = object(), object(), object()


class _Plan:
    """What hints say about one spot: the classes that may stand there, and the hints for what is inside.

    The inside is compiled when the data gets there, so recursive types need no special care.
    """

    def __init__(self, hints: Iterable[Any]) -> None:
        self.adapters: dict[type, _Adapter] = {}
        self.names: dict[str, _Adapter] = {}
        self._inside: dict[object, list[Any]] = {}
        self._plans: dict[object, _Plan] = {}
        for hint in hints:
            self._read(hint)

    def at(self, role: object, place: object = None) -> _Plan:
        """The plan for a part: by its role, and by its place where a hint is about that place alone."""
        if not self._inside:
            return _ANY
        spot = (role, place) if place in self._inside else (role,)
        if spot not in self._plans:
            self._plans[spot] = _plan(*(hint for part in spot for hint in self._inside.get(part, ())))
        return self._plans[spot]

    def _read(self, hint: Any) -> None:
        alternatives = _alternatives(hint)
        for alternative in alternatives:
            self._read(alternative)
        base, args = get_origin(hint) or hint, get_args(hint)
        if not alternatives and isinstance(base, type):
            for role, inner in _inner(base, args):
                self._inside.setdefault(role, []).append(inner)
            self._admit(base, args)

    def _admit(self, cls: type, args: tuple[Any, ...]) -> None:
        kind = _kind_of(cls)
        if kind is not None and cls not in self.adapters:
            name = cls.__qualname__
            while name in self.names:
                name += "'"
            self.adapters[cls] = self.names[name] = _Adapter(cls, args, kind, name)


def _plan(*hints: Any) -> _Plan:
    try:
        return _cached_plan(*hints)
    except TypeError:
        return _Plan(hints)


@lru_cache(maxsize=1024)
def _cached_plan(*hints: Any) -> _Plan:
    return _Plan(hints)


_ANY = _Plan(())


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """The hints that this one only stands for; none if it names a type itself."""
    origin, args = get_origin(hint), get_args(hint)
    alias = origin or hint
    if origin in _UNIONS:
        return args
    if origin in _WRAPPERS:
        return args[:1]
    if origin is Literal:
        return tuple(map(type, args))
    if isinstance(hint, NewType):
        return (hint.__supertype__,)
    if isinstance(hint, TypeVar):
        return hint.__constraints__ or (hint.__bound__,)
    if type(alias).__name__ == "TypeAliasType":
        return (alias.__value__[args] if args else alias.__value__,)
    return ()


def _inner(base: type, args: tuple[Any, ...]) -> Iterable[tuple[object, Any]]:
    """What a hint says about the inside of a container, by role or place."""
    if typing.is_typeddict(base):
        return _field_hints(base, args).items()
    if base is tuple and args[1:] != (...,):
        return enumerate(args)
    if issubclass(base, Mapping):
        return zip((_KEY, _VALUE), args, strict=False)
    return [(_ITEM, args[0])] if args and issubclass(base, Iterable) else ()


def _field_hints(cls: type, args: tuple[Any, ...]) -> dict[str, Any]:
    """A class's annotations, resolved, with the arguments of a generic class in place of its parameters."""
    given: dict[Any, Any] = dict(zip(getattr(cls, "__parameters__", ()), args, strict=False))

    def filled(hint: Any) -> Any:
        if isinstance(hint, TypeVar):
            return given.get(hint, hint)
        free = getattr(hint, "__parameters__", ()) if get_origin(hint) else ()
        return hint[tuple(given.get(parameter, parameter) for parameter in free)] if free else hint

    return {name: filled(hint) for name, hint in _annotations(cls).items()}


def _annotations(cls: Any) -> dict[str, Any]:
    if _derives("pydantic", "BaseModel", cls):
        return {name: field.annotation for name, field in cls.model_fields.items()}
    try:
        return typing.get_type_hints(cls)
    except Exception:
        # One name that exists only for type checkers must not hide what the other annotations say.
        return {name: hint for base in reversed(cls.__mro__) for name, hint in _one_by_one(base)}


def _one_by_one(cls: type) -> Iterator[tuple[str, Any]]:
    scope = {**getattr(sys.modules.get(cls.__module__), "__dict__", {}), cls.__name__: cls}
    for name, note in inspect.get_annotations(cls).items():
        try:
            alone = types.SimpleNamespace(__annotations__={name: note})
            yield name, typing.get_type_hints(alone, scope)[name]
        except Exception:
            yield name, Any


# -- Kinds of classes: how an instance is taken apart and rebuilt --------------------------------------------


class _Kind(typing.NamedTuple):
    """``take`` gives what an instance consists of, ``more`` what else it keeps; ``make`` rebuilds it of both."""

    fits: Callable[[type], bool]
    take: Callable[[Any], dict[str, Any]]
    make: Callable[[Any, dict[str, Any]], Any]
    more: Callable[[Any], dict[str, Any]] = lambda value: {}


def _make_named_tuple(cls: Any, fields: dict[str, Any]) -> Any:
    known = cls._field_defaults | fields
    return tuple.__new__(cls, [known[name] for name in cls._fields])


_PLAIN: dict[Any, Callable[[Any], Any]] = {
    str: str.__str__,
    int: int.__pos__,
    float: float.__pos__,
    list: list.copy,
    dict: dict.copy,
}


def _extends_plain(cls: type) -> bool:
    return (
        issubclass(cls, tuple(_PLAIN))
        and cls not in _PLAIN
        and not issubclass(cls, (OrderedDict, defaultdict))
    )


def _plain_base(cls: type) -> Any:
    return next(base for base in _PLAIN if issubclass(cls, base))


def _take_plain(value: Any) -> dict[str, Any]:
    return {"value": _PLAIN[_plain_base(type(value))](value)}


def _make_plain(cls: Any, fields: dict[str, Any]) -> Any:
    base, content = _plain_base(cls), fields["value"]
    value = base.__new__(cls, content)
    if base in (list, dict):
        base.__init__(value, content)
    return value


def _refuse_attributes(value: Any) -> dict[str, Any]:
    if getattr(value, "__dict__", None):
        raise Unencodable("", type(value), "it carries attributes of its own. Use a dataclass")
    return {}


def _is_dataclass(cls: type) -> bool:
    return dataclasses.is_dataclass(cls) and not issubclass(cls, (*_SELF_DESCRIBING, BaseException))


@lru_cache(maxsize=1024)
def _field_names(cls: Any) -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(cls))


def _take_dataclass(value: Any) -> dict[str, Any]:
    cls: type = type(value)
    return {name: getattr(value, name) for name in _field_names(cls)}


def _more_of_dataclass(value: Any) -> dict[str, Any]:
    cls: type = type(value)
    held: dict[str, Any] = getattr(value, "__dict__", {})
    return {name: held[name] for name in held.keys() - _field_names(cls) if not _is_computed(cls, name)}


def _is_computed(cls: type, name: str) -> bool:
    return isinstance(getattr(cls, name, None), cached_property)


def _make_dataclass(cls: Any, fields: dict[str, Any]) -> Any:
    value = object.__new__(cls)
    if not fields.keys() >= _field_names(cls):
        missing = [field for field in dataclasses.fields(cls) if field.name not in fields]
        fields |= {field.name: _default(field) for field in missing}
    for name, item in fields.items():
        object.__setattr__(value, name, item)
    return value


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    if field.default is dataclasses.MISSING:
        raise KeyError(field.name)
    return field.default


_MODEL_STATE = ("__pydantic_private__", "__pydantic_fields_set__")


def _take_model(value: Any) -> dict[str, Any]:
    fields = {name: value.__dict__[name] for name in type(value).model_fields if name in value.__dict__}
    return fields | (value.__pydantic_extra__ or {})


def _more_of_model(value: Any) -> dict[str, Any]:
    state = value.__getstate__()
    return {name: state[name] for name in _MODEL_STATE}


def _make_model(cls: Any, fields: dict[str, Any]) -> Any:
    state: dict[str, Any] = {name: fields.pop(name) for name in _MODEL_STATE}
    extra = {name: fields.pop(name) for name in [*fields] if name not in cls.model_fields}
    allowed = cls.model_config.get("extra") == "allow"
    value = cls.__new__(cls)
    value.__setstate__(state | {"__dict__": fields, "__pydantic_extra__": extra if allowed else None})
    return value


def _derives(module: str, name: str, cls: type) -> bool:
    # Who holds such a class has imported its module; this one never does.
    base = getattr(sys.modules.get(module), name, None)
    return base is not None and issubclass(cls, base)


_KINDS = (
    _Kind(
        lambda cls: issubclass(cls, Enum), lambda it: {"value": it.value}, lambda cls, it: cls(it["value"])
    ),
    _Kind(
        lambda cls: issubclass(cls, tuple) and hasattr(cls, "_fields"),
        lambda value: dict(zip(value._fields, value, strict=True)),
        _make_named_tuple,
        _refuse_attributes,
    ),
    _Kind(_extends_plain, _take_plain, _make_plain, _refuse_attributes),
    _Kind(_is_dataclass, _take_dataclass, _make_dataclass, _more_of_dataclass),
    _Kind(partial(_derives, "pydantic", "BaseModel"), _take_model, _make_model, _more_of_model),
    _Kind(
        partial(_derives, "msgspec", "Struct"),
        lambda value: {name: getattr(value, name) for name in value.__struct_fields__},
        lambda cls, fields: cls(**fields),
    ),
)


@lru_cache(maxsize=1024)
def _kind_of(cls: type) -> _Kind | None:
    return next((kind for kind in _KINDS if kind.fits(cls)), None)


class _Adapter:
    """A class that a hint allows at one spot, under the name that it has in the data."""

    def __init__(self, cls: type, args: tuple[Any, ...], kind: _Kind, name: str) -> None:
        self.cls, self.args, self.kind, self.name = cls, args, kind, name

    @cached_property
    def plans(self) -> dict[str, _Plan]:
        """By field; the base tells the content of a subclass of list or dict, as in ``Lines(list[Line])``."""
        content = _plan(*getattr(self.cls, "__orig_bases__", ()))
        return {"value": content} | {
            name: _plan(hint) for name, hint in _field_hints(self.cls, self.args).items()
        }

    def plan(self, field: str) -> _Plan:
        return self.plans.get(field, _ANY)

    def pack(self, value: Any, packer: _Packer, depth: int) -> Any:
        fields = self.kind.take(value) | self.kind.more(value)
        return {"$": ["as", self.name, packer.pack_fields(fields, self.plan, depth)]}

    def unpack(self, node: dict[str, Any]) -> Any:
        return self.kind.make(self.cls, {name: _unpack(item, self.plan(name)) for name, item in node.items()})


# -- Packing: values to JSON trees ---------------------------------------------------------------------------


def _base64(value: Any) -> str:
    return b64encode(value).decode()


def _clock(value: Any) -> list[Any]:
    zone = _zone_key(value.tzinfo)
    if zone is None and value.tzinfo is not None and value.utcoffset() is None:
        raise Unencodable(
            "", type(value), f"the zone {value.tzinfo!r} has neither an IANA name nor a fixed offset"
        )
    return [value.isoformat(), value.fold, zone]


def _zone_key(zone: Any) -> str | None:
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


class _Leaf(typing.NamedTuple):
    tag: str
    write: Callable[[Any], Any]
    read: Callable[[Any], Any]

    def pack(self, value: Any, plan: _Plan, depth: int) -> Any:
        return {"$": [self.tag, self.write(value)]}


_LEAVES: dict[type, _Leaf] = {
    bytes: _Leaf("bytes", _base64, b64decode),
    bytearray: _Leaf("bytearray", _base64, lambda node: bytearray(b64decode(node))),
    int: _Leaf("int", lambda value: str(Decimal(value)), lambda node: int(Decimal(node))),
    float: _Leaf("float", repr, float),
    complex: _Leaf(
        "complex", lambda z: [repr(z.real), repr(z.imag)], lambda node: complex(*map(float, node))
    ),
    Decimal: _Leaf("decimal", str, Decimal),
    UUID: _Leaf("uuid", str, UUID),
    datetime: _Leaf("datetime", _clock, partial(_read_clock, datetime)),
    date: _Leaf("date", date.isoformat, date.fromisoformat),
    time: _Leaf("time", _clock, partial(_read_clock, time)),
    timedelta: _Leaf(
        "timedelta", lambda d: [d.days, d.seconds, d.microseconds], lambda node: timedelta(*node)
    ),
}
_READERS = {leaf.tag: leaf.read for leaf in _LEAVES.values()}
_COLLECTIONS: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_SELF_DESCRIBING = (str, list, dict, *_COLLECTIONS.values(), *_LEAVES)

_STR: frozenset[type] = frozenset({str})
_EXACT: frozenset[type] = frozenset({str, bool, type(None)})
_QUICK: frozenset[type] = frozenset({*_EXACT, int, float})


class _Packer:
    """Turns values into trees for the JSON encoder.

    Values of the ``trusted`` types pass unseen. The quick packer trusts all numbers and leaves it to the
    encoder, and to a look at the text, to find the few that need a tag; the exact one then looks at each.
    """

    def __init__(self, trusted: frozenset[type]) -> None:
        self.trusted = trusted
        self.table: dict[type, Callable[[Any, _Plan, int], Any]] = {
            **{kind: leaf.pack for kind, leaf in _LEAVES.items()},
            **{kind: partial(self.pack_collection, tag) for tag, kind in _COLLECTIONS.items()},
            int: self.pack_int,
            float: self.pack_float,
            list: self.pack_list,
            dict: self.pack_dict,
        }

    def pack(self, value: Any, plan: _Plan, depth: int) -> Any:
        kind = type(value)
        if kind in self.trusted:
            return value
        if depth > _DEEPEST:
            raise Unencodable("", kind, f"it lies more than {_DEEPEST} levels deep, or contains itself")
        return self.table.get(kind, self.pack_other)(value, plan, depth + 1)

    def walk(
        self,
        parts: Iterable[tuple[Any, Any]],
        plan: Callable[[Any], _Plan],
        step: Callable[[Any], str],
        depth: int,
    ) -> list[Any]:
        """Each part packed, with its key as a step of the path of any error."""
        packed = []
        for key, value in parts:
            try:
                packed.append(self.pack(value, plan(key), depth))
            except Unencodable as error:
                error.path = step(key) + error.path
                raise
        return packed

    def pack_int(self, value: int, plan: _Plan, depth: int) -> Any:
        return value if -_BIG < value < _BIG else _LEAVES[int].pack(value, plan, depth)

    def pack_float(self, value: float, plan: _Plan, depth: int) -> Any:
        return value if value - value == 0 else _LEAVES[float].pack(value, plan, depth)

    def pack_list(self, value: Any, plan: _Plan, depth: int) -> Any:
        if self.trusted.issuperset(map(type, value)):
            return list(value)
        return self.walk(enumerate(value), partial(plan.at, _ITEM), _index, depth)

    def pack_collection(self, tag: str, value: Any, plan: _Plan, depth: int) -> Any:
        return {"$": [tag, self.pack_list(value, plan, depth)]}

    def pack_dict(self, value: Any, plan: _Plan, depth: int) -> Any:
        if not _STR.issuperset(map(type, value)) or (len(value) == 1 and "$" in value):
            return {"$": ["dict", self.pack_pairs(value, plan, depth)]}
        if self.trusted.issuperset(map(type, value.values())):
            return value
        return dict(
            zip(value, self.walk(value.items(), partial(plan.at, _VALUE), _member, depth), strict=True)
        )

    def pack_pairs(self, value: Any, plan: _Plan, depth: int) -> list[Any]:
        keys = self.walk(((key, key) for key in value), lambda _: plan.at(_KEY), _member, depth)
        items = self.walk(value.items(), lambda key: plan.at(_VALUE, _place(key)), _member, depth)
        return list(map(list, zip(keys, items, strict=True)))

    def pack_other(self, value: Any, plan: _Plan, depth: int) -> Any:
        adapter = plan.adapters.get(type(value))
        if adapter is None:
            raise Unencodable("", type(value), _why_not(type(value)))
        return adapter.pack(value, self, depth)

    def pack_fields(self, fields: dict[str, Any], plan: Callable[[str], _Plan], depth: int) -> dict[str, Any]:
        if self.trusted.issuperset(map(type, fields.values())):
            return fields
        return dict(zip(fields, self.walk(fields.items(), plan, _attribute, depth), strict=True))


def _why_not(kind: type) -> str:
    if _kind_of(kind) is None:
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


# -- Unpacking -----------------------------------------------------------------------------------------------


def _unpack(node: Any, plan: _Plan) -> Any:
    if type(node) is list:
        return [_unpack(item, plan.at(_ITEM, place)) for place, item in enumerate(node)]
    if type(node) is not dict:
        return node
    if len(node) == 1 and "$" in node:
        return _untagged(*node["$"], plan=plan)
    return {name: _unpack(item, plan.at(_VALUE, name)) for name, item in node.items()}


def _untagged(tag: str, *body: Any, plan: _Plan) -> Any:
    if tag == "as":
        name, node = body
        return plan.names[name].unpack(node)
    if tag == "dict":
        keys, values = plan.at(_KEY), partial(plan.at, _VALUE)
        return {_unpack(key, keys): _unpack(item, values(_place(key))) for key, item in body[0]}
    if tag in _COLLECTIONS:
        return _COLLECTIONS[tag](_unpack(body[0], plan))
    return _READERS[tag](body[0])


# -- The canonical form --------------------------------------------------------------------------------------


class _Number(typing.NamedTuple):
    """A number of a JSON document that no Python number stands for exactly."""

    tag: str
    digits: str


class _CanonicalPacker(_Packer):
    """One tree for each logical value. Classes count by name: there is no hint, and nothing to rebuild."""

    def __init__(self, trusted: frozenset[type]) -> None:
        super().__init__(trusted)
        self.table |= {
            _Number: lambda number, plan, depth: {"$": list(number)},
            tuple: self.pack_list,
            set: self.pack_set,
            frozenset: self.pack_set,
            bytearray: _LEAVES[bytes].pack,
            memoryview: _LEAVES[bytes].pack,
            Decimal: lambda value, plan, depth: {"$": ["decimal", _significant(str(value))]},
            complex: lambda z, plan, depth: {"$": ["complex", [repr(z.real + 0.0), repr(z.imag + 0.0)]]},
            datetime: lambda value, plan, depth: {"$": ["datetime", value.isoformat()]},
            time: lambda value, plan, depth: {"$": ["time", _clock(value)[::2]]},
        }

    def pack_float(self, value: float, plan: _Plan, depth: int) -> Any:
        return super().pack_float(value + 0.0, plan, depth)

    def pack_set(self, value: Any, plan: _Plan, depth: int) -> Any:
        return {"$": ["set", sorted(self.pack_list(value, plan, depth), key=_dump_sorted)]}

    def pack_pairs(self, value: Any, plan: _Plan, depth: int) -> list[Any]:
        return sorted(super().pack_pairs(value, plan, depth), key=_dump_sorted)

    def pack_other(self, value: Any, plan: _Plan, depth: int) -> Any:
        cls: type = type(value)
        kind = _kind_of(cls)
        if hasattr(cls, "__effect_key__"):
            fields = {"__effect_key__()": value.__effect_key__()}
        elif kind is not None and kind.take is not _take_plain:
            fields = kind.take(value)
        else:
            raise Unencodable("", cls, "it is not data. Leave it out of the key, or give it __effect_key__()")
        return {"$": ["as", _qualified(cls), self.pack_fields(fields, plan.at, depth)]}


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


def _whole_number(text: str) -> int | _Number:
    return int(text) if len(text.lstrip("-")) <= _DIGITS else _Number("int", text)


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


# -- JSON text -----------------------------------------------------------------------------------------------

_quoted = json_encoder.encode_basestring
_parse = json.JSONDecoder().raw_decode
_parse_exactly = json.JSONDecoder(
    parse_int=_whole_number,
    parse_float=_broken_number,
    parse_constant=_no_constant,
    object_pairs_hook=_unique_members,
).decode


def _encoder(sort_keys: bool) -> Callable[[Any], str]:
    options: dict[str, Any] = {"ensure_ascii": False, "allow_nan": False, "sort_keys": sort_keys}
    portable = json.JSONEncoder(separators=(",", ":"), check_circular=False, **options)
    make = getattr(json_encoder, "c_make_encoder", None)
    if make is None:
        return portable.encode
    # ``JSONEncoder.encode`` makes this object again for each call, which costs more than the encoding.
    write = make(None, portable.default, _quoted, None, ":", ",", sort_keys, False, False)
    return lambda tree: "".join(write(tree, 0))


_dump = _encoder(sort_keys=False)
_dump_sorted = _encoder(sort_keys=True)
_LONG_NUMBER = re.compile(rf"\d{{{_DIGITS + 1}}}")


def _has_long_number(text: str) -> bool:
    return len(text) > _DIGITS and _LONG_NUMBER.search(text) is not None


def _has_second_spelling(text: str) -> bool:
    return "-0.0" in text or _has_long_number(text)


class _Form(typing.NamedTuple):
    quick: _Packer
    exact: _Packer
    dump: Callable[[Any], str]
    is_odd: Callable[[str], bool]


_STORED = _Form(_Packer(_QUICK), _Packer(_EXACT), _dump, _has_long_number)
_CANONICAL = _Form(_CanonicalPacker(_QUICK), _CanonicalPacker(_EXACT), _dump_sorted, _has_second_spelling)


def _write(root: str, value: Any, hint: Any, form: _Form) -> bytes:
    try:
        plan = _ANY if hint is Any else _plan(hint)
        text = _quick_text(value, plan, form) or form.dump(form.exact.pack(value, plan, 0))
        return text.encode("utf-8", "surrogatepass")
    except Unencodable as error:
        error.path = root + error.path
        raise
    except Exception as error:
        raise Unencodable(root, type(value), f"reading it failed with {error!r}") from error


def _quick_text(value: Any, plan: _Plan, form: _Form) -> str | None:
    try:
        text = form.dump(form.quick.pack(value, plan, 0))
    except Unencodable:
        raise
    except ValueError:
        return None
    return None if form.is_odd(text) else text
