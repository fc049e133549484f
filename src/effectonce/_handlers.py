"""What can be told of a handler before it is called: whether calling it runs it, in which colour, what it returns."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from functools import lru_cache
from typing import Any

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
        return not any(_is_async(each) or _is_generator(each) for each in (handler, type(handler).__call__))


def _is_async(handler: Any) -> bool:
    return inspect.iscoroutinefunction(handler)


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


@lru_cache(maxsize=1024)
def resolved_hint(handler: Callable[..., Any]) -> Any:
    """The type that a handler says it returns."""
    try:
        return typing.get_type_hints(handler, include_extras=True).get("return", Any)
    except Exception:  # an annotation that can't be resolved says nothing about the type
        return Any


def hint_of(handler: Callable[..., Any]) -> Any:
    """The same; what says nothing of it costs no look."""
    annotations = getattr(handler, "__annotations__", None)
    return resolved_hint(handler) if annotations and "return" in annotations else Any
