"""Kinds of classes: how an instance of an enum, a dataclass, a model … is taken apart and rebuilt."""

from __future__ import annotations

import dataclasses
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from copy import deepcopy
from enum import Enum
from functools import cached_property, lru_cache, partial
from types import BuiltinFunctionType, MemberDescriptorType
from typing import Any, Generic, NamedTuple

from ..errors import Unencodable
from ._modules import module_of

Fields = dict[str, Any]


class Kind(NamedTuple):
    """``take`` gives what an instance consists of, ``more`` what else it keeps; ``make`` rebuilds it of both."""

    fits: Callable[[type], bool]
    take: Callable[[Any], Fields]
    make: Callable[[Any, Fields], Any]
    more: Callable[[Any], Fields] = lambda value: {}


def qualified(cls: type) -> str:
    """The name of a class in messages, remembered errors and canonical forms."""
    return f"{module_of(cls)}:{cls.__qualname__}"


def derives(module: str, name: str, cls: type) -> bool:
    """Whether a class derives from one of another library. Who holds such a class has imported that library."""
    base = getattr(sys.modules.get(module), name, None)
    return base is not None and issubclass(cls, base)


# -- What objects hold -----------------------------------------------------------------------------------------


def in_slots(value: Any) -> Fields:
    """What an object holds in slots of its class, and of bases that are written in Python."""
    cls: type = type(value)
    return {name: slot.__get__(value) for name, slot in slots_of(cls) if _is_set(value, slot)}


@lru_cache(maxsize=1024)
def slots_of(cls: Any) -> tuple[tuple[str, MemberDescriptorType], ...]:
    """These slots, by their names in objects."""
    return tuple(
        (name, slot)
        for base in cls.__mro__
        if "__slots__" in vars(base)
        for name, slot in vars(base).items()
        if type(slot) is MemberDescriptorType
    )


def _is_set(value: Any, slot: MemberDescriptorType) -> bool:
    try:
        slot.__get__(value)
    except AttributeError:
        return False
    return True


# -- Named tuples ----------------------------------------------------------------------------------------------


def _make_named_tuple(cls: Any, fields: Fields) -> Any:
    known = cls._field_defaults | fields
    return tuple.__new__(cls, [known[name] for name in cls._fields])


def _refuse_attributes(value: Any, *, but_slots: bool = False) -> Fields:
    if getattr(value, "__dict__", None) or (not but_slots and in_slots(value)):
        raise Unencodable("", type(value), "it carries attributes of its own. Use a dataclass")
    return {}


# -- Subclasses of plain types, such as ``class Email(str)`` ---------------------------------------------------

_PLAIN: dict[Any, Callable[[Any], Any]] = {
    str: str.__str__,
    int: int.__pos__,
    float: float.__pos__,
    list: list.copy,
    dict: dict.copy,
}
"""By base, what gives the plain value whatever the subclass overrides."""


def _extends_plain(cls: type) -> bool:
    return (
        cls not in _PLAIN and issubclass(cls, (*_PLAIN,)) and not issubclass(cls, (OrderedDict, defaultdict))
    )


def _plain_base(cls: type) -> Any:
    return next(base for base in _PLAIN if issubclass(cls, base))


def _take_plain(value: Any) -> Fields:
    return {"value": _PLAIN[_plain_base(type(value))](value)}


def _make_plain(cls: Any, fields: Fields) -> Any:
    base, content = _plain_base(cls), fields["value"]
    value = base.__new__(cls, content)
    if base in (list, dict):
        base.__init__(value, content)
    return value


# -- Dataclasses -----------------------------------------------------------------------------------------------


def _is_dataclass(cls: type) -> bool:
    """Whether a class is a dataclass, and not also a number, a date, a collection … with content beside its fields."""
    return dataclasses.is_dataclass(cls) and _made_by(cls) is object


def _made_by(cls: type) -> type:
    """The base whose own code, which is not Python, makes the instances of a class."""
    made = (base for base in cls.__mro__ if isinstance(vars(base).get("__new__"), BuiltinFunctionType))
    return next(base for base in made if base is not Generic)


@lru_cache(maxsize=1024)
def _field_names(cls: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(cls))


def _take_dataclass(value: Any) -> Fields:
    """Its fields, and what bases keep in slots, as a UUID does."""
    cls: type = type(value)
    return {name: getattr(value, name) for name in _field_names(cls)} | in_slots(value)


def _more_of_dataclass(value: Any) -> Fields:
    cls: type = type(value)
    names, held = _field_names(cls), getattr(value, "__dict__", {})
    return {name: held[name] for name in held if name not in names and not _is_computed(cls, name)}


def _is_computed(cls: type, name: str) -> bool:
    return isinstance(getattr(cls, name, None), cached_property)


def _make_dataclass(cls: Any, fields: Fields) -> Any:
    value = object.__new__(cls)
    for name in _field_names(cls):
        if name not in fields:
            object.__setattr__(value, name, _default(cls, name))
    for name, item in fields.items():
        object.__setattr__(value, name, item)
    return value


def _default(cls: Any, name: str) -> Any:
    field: dataclasses.Field[Any] = cls.__dataclass_fields__[name]
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    if field.default is dataclasses.MISSING:
        raise KeyError(name)
    return field.default


# -- Pydantic models -------------------------------------------------------------------------------------------

_MODEL_STATE = ("__pydantic_private__", "__pydantic_fields_set__")


def _take_model(value: Any) -> Fields:
    fields = {name: value.__dict__[name] for name in type(value).model_fields if name in value.__dict__}
    return fields | (value.__pydantic_extra__ or {})


def _more_of_model(value: Any) -> Fields:
    state = value.__getstate__()
    return {name: state.get(name) for name in _MODEL_STATE}  # a RootModel has less of it


def _make_model(cls: Any, fields: Fields) -> Any:
    state: Fields = {name: fields.pop(name) for name in _MODEL_STATE}
    extra = {name: fields.pop(name) for name in [*fields] if name not in cls.model_fields}
    allowed = cls.model_config.get("extra") == "allow"
    value = cls.__new__(cls)
    value.__setstate__(state | {"__dict__": fields, "__pydantic_extra__": extra if allowed else None})
    return value


# -- Structs of msgspec ----------------------------------------------------------------------------------------


def _make_struct(cls: Any, fields: Fields) -> Any:
    if not hasattr(cls, "__post_init__"):
        return cls(**fields)
    # There is no other way to make one. What ``__post_init__`` does to the fields was done before they were stored.
    value = cls(**deepcopy(fields))
    for name, field in fields.items():
        sys.modules["msgspec"].structs.force_setattr(value, name, field)
    return value


# -- Enums -----------------------------------------------------------------------------------------------------


def _take_member(value: Any) -> Fields:
    """What a member is found by, whatever its class makes of that for others. NaN, which equals nothing, is not."""
    content = value._value_
    if content != content:
        raise Unencodable("", type(value), f"{value!r} can't be found by its value. Give it another value")
    return {"value": content}


# -- All of them -----------------------------------------------------------------------------------------------

ENUM = Kind(
    fits=lambda cls: issubclass(cls, Enum),
    take=_take_member,
    make=lambda cls, fields: cls(fields["value"]),
)
NAMED_TUPLE = Kind(
    fits=lambda cls: issubclass(cls, tuple) and hasattr(cls, "_fields"),
    take=lambda value: dict(zip(value._fields, value, strict=True)),
    make=_make_named_tuple,
    more=_refuse_attributes,
)
PLAIN = Kind(_extends_plain, _take_plain, _make_plain, _refuse_attributes)
DATACLASS = Kind(_is_dataclass, _take_dataclass, _make_dataclass, _more_of_dataclass)
MODEL = Kind(partial(derives, "pydantic", "BaseModel"), _take_model, _make_model, _more_of_model)
STRUCT = Kind(
    fits=partial(derives, "msgspec", "Struct"),
    take=lambda value: {name: getattr(value, name) for name in value.__struct_fields__},
    make=_make_struct,
    more=partial(_refuse_attributes, but_slots=True),  # which are its fields
)


@lru_cache(maxsize=1024)
def kind_of(cls: type) -> Kind | None:
    """How to handle instances of this class; None if they can't be rebuilt."""
    return next(
        (kind for kind in (ENUM, NAMED_TUPLE, PLAIN, DATACLASS, MODEL, STRUCT) if kind.fits(cls)), None
    )
