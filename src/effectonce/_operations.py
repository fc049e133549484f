"""What operations are called in a key. Messages, blocks and steps have names that no function may have."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast

from . import keys
from ._attempt import STEP_OPERATION
from .codec import module_of
from .errors import InvalidKey, UsageError

CLAIM_OPERATION, MESSAGE_OPERATION = "claim", "message"
SAGA_OPERATION = "saga:"
"""Begins the operation in the keys of sagas."""


class Functions:
    """The names of a receiver's functions: by default their own, and each stands for one function."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[Any, ...]] = {}

    def name_of(self, function: Callable[..., Any] | str) -> str:
        """The name of a function. Another function may not have it already."""
        if isinstance(function, str):
            raise UsageError(f"{function!r} is no function. Write @receiver.idempotent(key={function!r}).")
        code = getattr(inspect.unwrap(function), "__code__", None)
        if code is None or not hasattr(function, "__qualname__"):
            raise UsageError(
                f"{function!r} has no name of its own to be remembered by. Give it an operation=."
            )
        name = f"{module_of(function)}.{function.__qualname__}"
        bound = (getattr(function, "__closure__", None), getattr(function, "__self__", None))
        place = (code.co_filename, code.co_firstlineno, code if code.co_name == "<lambda>" else None, *bound)
        if self._places.setdefault(name, place) != place:
            raise UsageError(
                f"Two functions are called {name}, or one with other things bound to it, so they would share keys. "
                "Give each an operation=, or pass what differs as an argument."
            )
        return name


def own_name(operation: Any) -> str:
    """A name that somebody gives a function, or a block. It may not be one of those that others have."""
    name = operation if isinstance(operation, str) else ""  # any other is refused where keys are made
    if name in (CLAIM_OPERATION, MESSAGE_OPERATION, STEP_OPERATION) or name.startswith(
        (f"{MESSAGE_OPERATION}:", SAGA_OPERATION)
    ):
        raise UsageError(
            f"operation={operation!r} is the name of blocks, messages, steps or sagas. Give what you do its own."
        )
    return cast("str", operation)


def is_saga(key: str) -> bool:
    """Whether a key is a saga's. A doubt about that is more than the missing answer of one effect."""
    return key.partition("|")[2].startswith(SAGA_OPERATION)


def message_prefix(scope: str, operation: str, consumer: str, source: str, version: str | int) -> str:
    """What the keys of messages begin with."""
    try:
        return _prefix(scope, operation, consumer, source, version)
    except (TypeError, AttributeError):
        given = (scope, operation, consumer, source, version)
        as_text = tuple(map(keys.plain, given))
        if [*map(type, as_text)] != [*map(type, given)]:
            return message_prefix(*as_text)
        parts: dict[str, Any] = {"operation": operation, "consumer": consumer, "source": source}
        wrong = ", ".join(
            f"{name}={keys.shown(part)}" for name, part in parts.items() if not isinstance(part, str)
        )
        raise InvalidKey(
            f"{wrong or f'scope={scope!r}, version={version!r}'}: parts of a key are text."
        ) from None


@lru_cache(maxsize=1024, typed=True)
def _prefix(scope: str, operation: str, consumer: str, source: str, version: str | int) -> str:
    """``message:operation:consumer:source``, each in its own place, without the empty ones at the end."""
    keys.check_plain(scope, operation, consumer, source, version)
    parts = [part.replace("%", "%25").replace(":", "%3A") for part in (operation, consumer, source)]
    return keys.prefix(scope, ":".join([MESSAGE_OPERATION, *parts]).rstrip(":"), version)
