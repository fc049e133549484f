"""What can be told of a handler before it is called: what it returns, and whether it is awaited."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

import pytest

from effectonce import Message, Receiver, current
from effectonce._handlers import hint_of, is_awaited


@dataclass
class Receipt:
    """A result that only its annotation brings back."""

    number: int


def pay(number: int, _: object) -> Receipt:
    return Receipt(number)


def pay_one(asked: object) -> Receipt:
    return pay(1, asked)


class Till:
    """Handles, in two ways; the annotation of a field says nothing of a result."""

    number: int = 2

    def __call__(self, _: object) -> Receipt:
        return Receipt(self.number)

    def pay(self, _: object) -> Receipt:
        return Receipt(self.number)

    async def later(self) -> None: ...


class LaterTill:
    """Is awaited."""

    async def __call__(self, _: object) -> Receipt:
        return Receipt(3)


def unresolvable() -> None: ...


unresolvable.__annotations__["return"] = "Nowhere"


HANDLERS: dict[str, Callable[[Any], Receipt]] = {
    "function": pay_one,
    "partial": partial(pay, 1),
    "partial of a partial": partial(partial(pay), 1),
    "partial method": partial(Till().pay),
    "object": Till(),
    "partial object": partial(Till()),
    "method": Till().pay,
    "cached": cache(pay_one),
}


@pytest.mark.parametrize("kind", HANDLERS)
def test_a_typed_result_comes_back_from_every_kind_of_handler(kind: str) -> None:
    """As a handler of messages, of batches, as a step and decorated: every repeat gets what the first got."""
    handler, receiver = HANDLERS[kind], Receiver("memory://")
    failures = iter([OSError("died between two steps")])

    def stepping(message: Message) -> str:
        receipt = current().step("pay", handler, message.id)
        for failure in failures:
            raise failure
        return repr(receipt)

    decorated: Any = receiver.idempotent(key=_first_of, operation="decorated")(handler)
    alone = [receiver.process(Message("m"), partial(_of, handler, receiver)).value for _ in range(2)]
    batches = [receiver.process_batch([Message("b")], handler)[0].unwrap().value for _ in range(2)]
    calls = [decorated("c") for _ in range(2)]
    expected = handler("x")
    assert alone == batches == calls == [expected] * 2
    with pytest.raises(OSError, match="died"):
        receiver.process(Message("s"), stepping)
    assert receiver.process(Message("s"), stepping).value == repr(expected)


def _first_of(asked: str) -> str:
    return asked


def _of(handler: Callable[[Any], Receipt], receiver: Receiver, message: Message) -> Receipt:
    value: Any = receiver.process(message, handler, operation="inner").value
    return cast("Receipt", value)


def test_what_hints_say() -> None:
    """A class makes its own instances; what can't be resolved, or is nowhere written, says nothing."""
    assert hint_of(Receipt) is Receipt
    assert hint_of(pay, "number") is hint_of(partial(pay, 1), "number") is int
    silents: list[Any] = [lambda message: message, print, unresolvable, Receipt(1)]
    for silent in silents:
        assert hint_of(silent) is Any


def test_what_is_awaited() -> None:
    """Coroutine functions, methods that are some, partial ones, and objects that are called like one."""
    assert all(map(is_awaited, (Till().later, partial(Till().later), LaterTill(), LaterTill().__call__)))
    assert not any(map(is_awaited, (pay, Till(), Till().pay, LaterTill, print, None)))
