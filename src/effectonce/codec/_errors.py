"""Errors that are remembered: an exception to bytes and back, without running its class's code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

from ..errors import RememberedError
from ._hints import Plan, annotations_of, plan_of
from ._json import parse
from ._kinds import in_slots, qualified, slots_of
from ._values import STORED, unpack_as

LONGEST_MESSAGE = 1000
DEEPEST_GROUP = 8
"""Groups in groups, of which the members are kept."""


def encode_error(error: BaseException, most: int = 1 << 20) -> bytes:
    """The bytes of an exception: its class's name, message, arguments and attributes.

    These keep their types as results do, by the annotations of its class and of its ``__init__``. What can't be encoded
    is kept as its text. More than ``most`` bytes are shortened.
    """
    written = STORED.writer.write(_parts(error))
    return written if len(written) <= most else shorter_error(written)


def _parts(error: BaseException, depth: int = 0) -> dict[str, Any]:
    cls = type(error)
    plan = _plan(cls)
    reduced: Any = _builtin_base(cls).__reduce__(error)
    _, make, *state = reduced
    held = in_slots(error) | (state[0] if state else {})
    parts = {
        "type": qualified(cls),
        "message": _text(error),
        "make": [_or_text(item, plan) for item in make],
        "args": [_or_text(item, plan) for item in error.args],
        "state": {name: _or_text(item, plan) for name, item in held.items()},
    }
    if isinstance(error, BaseExceptionGroup) and depth < DEEPEST_GROUP:
        parts["make"] = [error.message, [_parts(each, depth + 1) for each in error.exceptions]]
    return parts


def shorter_error(data: bytes) -> bytes:
    """The same error with nothing but the beginning of its message."""
    stored = parse(data)
    message = stored["message"]
    if len(message) > LONGEST_MESSAGE:
        message = f"{message[:LONGEST_MESSAGE]}… (shortened)"
    return STORED.writer.write(
        {"type": stored["type"], "message": message, "make": [message], "args": [message], "state": {}}
    )


def decode_error(data: bytes, known: tuple[type[BaseException], ...]) -> BaseException:
    """The exception again, if its class is one of ``known`` or derived from one; else a ``RememberedError``.

    No ``__init__`` or ``__new__`` of the class itself runs, so odd signatures do no harm.
    """
    return _error_of(parse(data), known)


def _error_of(parts: dict[str, Any], known: tuple[type[BaseException], ...]) -> BaseException:
    for cls in _with_subclasses(known):
        if qualified(cls) == parts["type"]:
            try:
                if issubclass(cls, BaseExceptionGroup):
                    message, members = parts["make"]
                    make = args = [message, [_error_of(each, known) for each in members]]
                else:
                    make, args = (_items(parts[part], cls) for part in ("make", "args"))
                state = dict(zip(parts["state"], _items(parts["state"].values(), cls), strict=True))
                return _rebuilt(cls, make, args, state)
            except Exception:
                break
    return RememberedError(parts["message"], error_type=parts["type"])


def _items(trees: Iterable[Any], cls: type[BaseException]) -> list[Any]:
    plan = _plan(cls)
    return [unpack_as(tree, plan) for tree in trees]


def _rebuilt(cls: type[BaseException], make: Any, args: Any, state: dict[str, Any]) -> BaseException:
    base, slots = _builtin_base(cls), [name for name, _ in slots_of(cast("Any", cls))]
    error = base.__new__(cls, *make)
    base.__init__(error, *make)
    object.__setattr__(error, "args", tuple(args))
    for name, value in state.items():
        if name in slots or hasattr(base, name):
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


def _plan(cls: type[BaseException]) -> Plan:
    """What may be among an exception's arguments and attributes, in whichever place."""
    return plan_of(*annotations_of(cls).values(), *annotations_of(cls.__init__).values())


def _or_text(value: Any, plan: Plan) -> Any:
    try:
        return STORED.pack(value, plan, 0)
    except Exception:
        return _text(value)


def _text(value: Any) -> str:
    try:
        return str(value)
    except Exception:
        return f"<{qualified(type(value))}>"
