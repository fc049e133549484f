"""What can be told of a handler before it is called: whether calling it runs it, in which colour, what it returns."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any
from weakref import ref

from .errors import ColourMismatch, UsageError

GENERATORS = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
NOT_PLAIN = inspect.CO_COROUTINE | GENERATORS


def is_plain(handler: Callable[..., Any]) -> bool:
    """Whether calling a handler runs it: not so for coroutines and generators."""
    try:
        return not handler.__code__.co_flags & NOT_PLAIN
    except AttributeError:
        if not callable(handler):
            raise UsageError(f"{handler!r} can't be called, so it can't handle anything.") from None
        return not (is_awaited(handler) or _is_generator(handler) or _is_generator(type(handler).__call__))


def is_awaited(function: Any) -> bool:
    """Whether a function has to be awaited: a coroutine function, or an object whose ``__call__`` is one."""
    called = getattr(type(function), "__call__", None)  # noqa: B004 - of the class: None, which is no function, has none
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)


def _is_generator(handler: Any) -> bool:
    return inspect.isgeneratorfunction(handler) or inspect.isasyncgenfunction(handler)


def check_awaited(handler: Any, name: str) -> None:
    """Raise if awaiting what a handler returns would not run it. ``name``: the call that was made."""
    try:
        runs = not handler.__code__.co_flags & GENERATORS
    except AttributeError:
        runs = callable(handler) and not _is_generator(handler)
    if not runs:
        refuse(handler, name)


def refuse(handler: Any, instead: str) -> None:
    """Raise what is wrong with a handler that is not plain."""
    if not callable(handler):
        raise UsageError(f"{handler!r} can't be called, so it can't handle anything.")
    if _is_generator(handler) or _is_generator(type(handler).__call__):
        raise UsageError(
            f"{handler!r} is a generator: calling it runs nothing. Return a list instead of yielding."
        )
    raise ColourMismatch(f"{handler!r} is a coroutine function. Use `await receiver.{instead}(...)` for it.")


def hint_of_plain(handler: Callable[..., Any], instead: str) -> Any:
    """What a handler returns that is called and no more; raises if it is no such handler."""
    known = _PLAIN.get(id(handler))
    if known is None or known[0]() is not handler:
        if not is_plain(handler):
            refuse(handler, instead)
        known = _looked_at(_PLAIN, handler)
    return known[1]


def hint_of_awaited(handler: Callable[..., Any], name: str) -> Any:
    """What a handler returns that is called and awaited; raises if it is no such handler."""
    known = _AWAITED.get(id(handler))
    if known is None or known[0]() is not handler:
        check_awaited(handler, name)
        known = _looked_at(_AWAITED, handler)
    return known[1]


Known = tuple[Callable[[], Any], Any]
_PLAIN: dict[int, Known] = {}
_AWAITED: dict[int, Known] = {}
"""Functions that were looked at, and what they return, by their place: every call asks, and a WeakKeyDictionary would
take ten times as long."""


def _looked_at(known: dict[int, Known], handler: Callable[..., Any]) -> Known:
    """Remember what a function returns, for as long as others keep it. (Methods are made anew for every call.)"""
    hint = hint_of(handler)
    if type(handler) is not FunctionType:
        return (lambda: None), hint
    place = id(handler)
    found = known[place] = ref(handler, lambda _: known.pop(place, None)), hint
    return found


def hint_of(function: Callable[..., Any], name: str = "return") -> Any:
    """What an annotation says of a function's result, or of a parameter; Any if it says nothing that can be resolved.

    A partial function is asked what it was made of, an object how it is called, and a class makes instances of itself.
    """
    if type(function) is FunctionType:  # as most handlers are
        return resolved_hint(function, name) if name in function.__annotations__ else Any
    if isinstance(function, MethodType):  # to remember it would be to keep its object
        return hint_of(function.__func__, name)
    if name in (getattr(function, "__annotations__", None) or ()) and not isinstance(function, type):
        return resolved_hint(function, name)
    if isinstance(function, partial):
        return hint_of(function.func, name)
    if isinstance(function, type):
        return function if name == "return" else Any
    return resolved_hint(type(function).__call__, name)


_RESOLVED: dict[int, tuple[Callable[[], Any], dict[str, Any]]] = {}
"""By the place of what has the annotations, as above."""


def resolved_hint(function: Callable[..., Any], name: str = "return") -> Any:
    """The same of what has the annotation itself, remembered for as long as others keep it, if that can be told."""
    place = id(function)
    known = _RESOLVED.get(place)
    if known is None or known[0]() is not function:
        try:
            known = _RESOLVED[place] = ref(function, lambda _: _RESOLVED.pop(place, None)), {}
        except TypeError:  # it does not tell
            return _resolved(function, name)
    hints = known[1]
    if name not in hints:
        hints[name] = _resolved(function, name)
    return hints[name]


def _resolved(function: Callable[..., Any], name: str) -> Any:
    try:
        return typing.get_type_hints(function, include_extras=True).get(name, Any)
    except Exception:  # an annotation that can't be resolved says nothing about the type
        return Any
