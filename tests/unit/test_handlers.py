"""What can be told of a handler before it is called: what it returns, and whether it is awaited."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import cache, partial, update_wrapper
from typing import Any, cast
from weakref import ref

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


async def paid_later(asked: object) -> Receipt:
    return pay_one(asked)


def promised(asked: object) -> Awaitable[Receipt]:
    return paid_later(asked)


def begun(asked: object) -> Coroutine[Any, Any, Receipt]:
    return paid_later(asked)


@pytest.mark.parametrize("handler", [paid_later, promised, begun])
def test_what_is_awaited_has_the_type_that_comes_of_it(handler: Callable[[Any], Awaitable[Receipt]]) -> None:
    """A plain function that returns something to await says so, and its result comes back all the same."""

    async def twice() -> list[Receipt | None]:
        async with Receiver("memory://") as receiver:
            return [(await receiver.aprocess(Message("e-1"), handler)).value for _ in range(2)]

    assert asyncio.run(twice()) == [Receipt(1)] * 2


def test_what_hints_say() -> None:
    """A class makes its own instances; what can't be resolved, or is nowhere written, says nothing."""
    assert hint_of(Receipt) is Receipt
    assert hint_of(pay, "number") is hint_of(partial(pay, 1), "number") is int
    silents: list[Any] = [lambda message: message, print, unresolvable, Receipt(1)]
    for silent in silents:
        assert hint_of(silent) is Any


class Order:
    """What a handler may hold on to."""

    def handle(self, _: object) -> Receipt:
        return Receipt(1)


def closed_over(order: Order) -> Callable[[Any], Receipt]:
    def handler(_: object) -> Receipt:
        return order.handle(_)

    return handler


def by_default(order: Order) -> Callable[[Any], Receipt]:
    def handler(_: object, order: Order = order) -> Receipt:
        return order.handle(_)

    return handler


@dataclass
class Wrapper:
    """Shows the annotations of what it wraps, and can't be hashed: it can be compared."""

    function: Callable[[Any], Receipt]

    def __call__(self, asked: object) -> Any:
        return self.function(asked)


@pytest.mark.parametrize(
    "handler_for",
    [
        closed_over,
        lambda order: order.handle,
        by_default,
        lambda order: partial(by_default(order)),
        lambda order: update_wrapper(Wrapper(by_default(order)), by_default(order)),
    ],
    ids=["closure", "method", "default", "partial", "wrapper"],
)
def test_what_a_handler_holds_is_let_go_of(handler_for: Callable[[Order], Any]) -> None:
    """A handler that is made for one message is forgotten with it, and so is all that it has: a session, a body."""
    with Receiver("memory://") as receiver:
        order = Order()
        for _ in range(2):
            assert receiver.process(Message("e-1"), handler_for(order)).value == Receipt(1)
        held = ref(order)
        del order
        gc.collect()
        assert held() is None


def test_what_is_awaited() -> None:
    """Coroutine functions, methods that are some, partial ones, and objects that are called like one."""
    assert all(map(is_awaited, (Till().later, partial(Till().later), LaterTill(), LaterTill().__call__)))
    assert not any(map(is_awaited, (pay, Till(), Till().pay, LaterTill, print, None)))
