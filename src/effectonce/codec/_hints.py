"""Type hints, read as: which classes may stand where."""

from __future__ import annotations

import inspect
import sys
import types
import typing
from collections import Counter
from collections.abc import Awaitable, Coroutine, Iterable, Iterator, Mapping
from functools import cached_property, lru_cache
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

from ._kinds import Kind, derives, kind_of, qualified

ITEM, KEY, VALUE = object(), object(), object()
"""The roles of what is inside a container."""

_UNIONS = (Union, types.UnionType)
_WRAPPERS = (
    Annotated,
    Final,
    ClassVar,
    typing.Required,
    typing.NotRequired,
    getattr(typing, "ReadOnly", Final),
)

_AWAITED = (Awaitable, Coroutine)
"""What a handler may say that it returns: what comes of that is its result."""


class Plan:
    """What hints say about one spot: the classes that may stand there, and the hints for what is inside.

    The inside is compiled when the data gets there, so recursive types need no special care.
    """

    def __init__(self, hints: Iterable[Any]) -> None:
        self.classes: dict[type, Candidate] = {}
        self.names: dict[str, Candidate] = {}
        self.nameless: set[type] = set()
        self._inside: dict[object, list[Any]] = {}
        self._plans: dict[object, Plan] = {}
        for hint in hints:
            self._read(hint)
        self._name_classes()

    def at(self, role: object, place: object = None) -> Plan:
        """The plan for a part: by its role, and by its place where a hint is about that place alone."""
        if not self._inside:
            return ANY
        spot = (role, place) if place in self._inside else (role,)
        if spot not in self._plans:
            self._plans[spot] = plan_of(*(hint for part in spot for hint in self._inside.get(part, ())))
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
        kind = kind_of(cls)
        if kind is not None:
            self.classes.setdefault(cls, Candidate(cls, kind)).args.append(args)

    def _name_classes(self) -> None:
        """Give each class its name in the data: its own, or where several are called alike, with its module's.

        It never depends on the order of hints: to Python ``A | B`` and ``B | A`` are one. Classes that not even their
        modules tell apart have no name, and can't be stored here.
        """
        alike = Counter(cls.__qualname__ for cls in self.classes)
        named = [
            (cls.__qualname__ if alike[cls.__qualname__] == 1 else qualified(cls), cls)
            for cls in self.classes
        ]
        times = Counter(name for name, _ in named)
        for name, cls in named:
            if times[name] > 1:
                del self.classes[cls]
                self.nameless.add(cls)
            else:
                self.names[name] = self.classes[cls]
                self.classes[cls].name = name


class Candidate:
    """A class that a hint allows at one spot, under the name that it has in the data."""

    name = ""

    def __init__(self, cls: type, kind: Kind) -> None:
        self.cls, self.kind = cls, kind
        self.args: list[tuple[Any, ...]] = []
        """Of a generic class: what each hint that names it says of its parameters."""

    def plan(self, field: str) -> Plan:
        return self._plans.get(field, ANY)

    @cached_property
    def _plans(self) -> dict[str, Plan]:
        """By field; the base tells the content of a subclass of list or dict, as in ``Lines(list[Line])``."""
        content = plan_of(*getattr(self.cls, "__orig_bases__", ()))
        each = [_field_hints(self.cls, args) for args in self.args]
        return {"value": content} | {name: plan_of(*(hints[name] for hints in each)) for name in each[0]}


def plan_of(*hints: Any) -> Plan:
    """The plan that these hints make together. The usual hints are compiled once."""
    try:
        return _cached_plan(*hints)
    except TypeError:  # a hint that can't be hashed, such as Annotated[int, []]
        return Plan(hints)


@lru_cache(maxsize=1024)
def _cached_plan(*hints: Any) -> Plan:
    return Plan(hints)


ANY = Plan(())


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """The hints that this one only stands for; none if it names a type itself."""
    origin, args = get_origin(hint), get_args(hint)
    alias = origin or hint
    if origin in _UNIONS:
        return args
    if origin in _WRAPPERS:
        return args[:1]
    if origin in _AWAITED:
        return args[-1:]
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
        return zip((KEY, VALUE), args, strict=False)
    return [(ITEM, args[0])] if args and issubclass(base, Iterable) else ()


def _field_hints(cls: type, args: tuple[Any, ...]) -> dict[str, Any]:
    """A class's annotations, resolved, with the arguments of a generic class in place of its parameters."""
    given: dict[Any, Any] = dict(zip(getattr(cls, "__parameters__", ()), args, strict=False))

    def filled(hint: Any) -> Any:
        if isinstance(hint, TypeVar):
            return given.get(hint, hint)
        free = getattr(hint, "__parameters__", ()) if get_origin(hint) else ()
        return hint[tuple(given.get(parameter, parameter) for parameter in free)] if free else hint

    return {name: filled(hint) for name, hint in annotations_of(cls).items()}


def annotations_of(owner: Any) -> dict[str, Any]:
    """The annotations of a class or a function, resolved as far as they can be."""
    is_class = isinstance(owner, type)
    if is_class and derives("pydantic", "BaseModel", cast("type", owner)):
        return {name: field.annotation for name, field in owner.model_fields.items()}
    try:
        return typing.get_type_hints(owner)
    except Exception:
        # One name that exists only for type checkers must not hide what the other annotations say.
        bases = reversed(owner.__mro__) if is_class else (owner,)
        return {name: hint for base in bases for name, hint in _one_by_one(base)}


def _one_by_one(cls: Any) -> Iterator[tuple[str, Any]]:
    scope = {**getattr(sys.modules.get(cls.__module__), "__dict__", {}), cls.__name__: cls}
    for name, note in inspect.get_annotations(cls).items():
        try:
            alone = types.SimpleNamespace(__annotations__={name: note})
            yield name, typing.get_type_hints(alone, scope)[name]
        except Exception:
            yield name, Any
