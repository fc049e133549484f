"""What a process will do next, as a value: where its coroutines stand, and what they and its receiver remember.

Two processes with equal digests behave alike from there on, whatever brought them there, so a search goes on from
only one of them. Anything unknown is looked into rather than left out: that can cost time, never a schedule.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from contextvars import Token
from enum import Enum
from functools import cache
from types import BuiltinFunctionType, CoroutineType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

from ..._receiver import Receiver
from ...hooks import Events
from ...policy import Policy
from ...stores.base import Store

PLAIN = (type(None), bool, int, float, str, Enum)
BLAND: tuple[Any, ...] = (
    BuiltinFunctionType,
    Events,
    GeneratorType,  # only ``ask`` is one: what it asked for stands in the process's list of requests
    ModuleType,
    Policy,
    Receiver,
    Store,
    Token,
    threading.Event,
    type(threading.Lock()),
    type(threading.RLock()),
    type,
)
"""What is the same in every run of a process, or changes nothing that it does."""


class Digester:
    """Digests the values of one process. ``rename`` gives its random names a form that repeats."""

    def __init__(self, rename: Callable[[bytes], bytes]) -> None:
        self._rename = rename
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []  # an object that is gone could give its id to another

    def of(self, value: Any) -> Hashable:
        """The digest of any value."""
        kind: Any = type(value)
        name: str = kind.__name__
        sort = _sort(kind)
        if sort == "plain":
            return name, value
        if sort == "bytes":
            return self._rename(value)
        if sort == "list":
            return (name, *map(self.of, value))
        if sort == "bland":
            return name
        if sort == "error":
            return name, str(value)
        return self._of_object(value, sort)

    def _of_object(self, value: Any, sort: str) -> Hashable:
        if id(value) in self._seen:
            return "again", self._seen[id(value)]
        self._seen[id(value)] = len(self._kept)
        self._kept.append(value)
        if sort == "dict":
            return "dict", *((self.of(key), self.of(held)) for key, held in value.items())
        if sort == "set":
            return "set", frozenset(map(self.of, value))
        if sort == "coroutine":
            return self._of_coroutine(value)
        if sort == "method":
            return value.__func__.__qualname__, self.of(value.__self__)
        if sort == "function":
            return value.__qualname__, *(self.of(cell.cell_contents) for cell in value.__closure__ or ())
        return type(value).__name__, self.of(getattr(value, "__dict__", repr(value)))

    def _of_coroutine(self, value: Any) -> Hashable:
        frame = value.cr_frame
        if frame is None:
            return "ended"
        return frame.f_code.co_qualname, frame.f_lasti, self.of(dict(frame.f_locals)), self.of(value.cr_await)


SORTS: dict[str, tuple[Any, ...]] = {
    "plain": PLAIN,
    "bytes": (bytes,),
    "bland": BLAND,
    "list": (tuple, list),
    "error": (BaseException,),
    "dict": (dict,),
    "set": (set, frozenset),
    "coroutine": (CoroutineType,),
    "method": (MethodType,),
    "function": (FunctionType,),
}


@cache
def _sort(kind: type) -> str:
    """How values of a type are digested."""
    bland = getattr(kind, "digested_by_name", False)
    return (
        "bland"
        if bland
        else next((sort for sort, kinds in SORTS.items() if issubclass(kind, kinds)), "object")
    )
