"""Type hints, read as: which classes may stand where."""

from __future__ import annotations

import inspect
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, lru_cache
from typing import Annotated, Any, ClassVar, Final, Literal, NewType, TypeVar, Union, get_args, get_origin

from ._kinds import Kind, derives, kind_of

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


class Plan:
    """What hints say about one spot: the classes that may stand there, and the hints for what is inside.

    The inside is compiled when the data gets there, so recursive types need no special care.
    """

    def __init__(self, hints: Iterable[Any]) -> None:
        self.classes: dict[type, Candidate] = {}
        self.names: dict[str, Candidate] = {}
        self._inside: dict[object, list[Any]] = {}
        self._plans: dict[object, Plan] = {}
        for hint in hints:
            self._read(hint)

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
        if kind is not None and cls not in self.classes:
            name = cls.__qualname__
            while name in self.names:
                name += "'"
            self.classes[cls] = self.names[name] = Candidate(cls, args, kind, name)


class Candidate:
    """A class that a hint allows at one spot, under the name that it has in the data."""

    def __init__(self, cls: type, args: tuple[Any, ...], kind: Kind, name: str) -> None:
        self.cls, self.args, self.kind, self.name = cls, args, kind, name

    def plan(self, field: str) -> Plan:
        return self._plans.get(field, ANY)

    @cached_property
    def _plans(self) -> dict[str, Plan]:
        """By field; the base tells the content of a subclass of list or dict, as in ``Lines(list[Line])``."""
        content = plan_of(*getattr(self.cls, "__orig_bases__", ()))
        hints = _field_hints(self.cls, self.args)
        return {"value": content} | {name: plan_of(hint) for name, hint in hints.items()}


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

    return {name: filled(hint) for name, hint in _annotations(cls).items()}


def _annotations(cls: Any) -> dict[str, Any]:
    if derives("pydantic", "BaseModel", cls):
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
