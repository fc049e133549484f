"""Decorated methods keep their types, of all kinds and in both colours. Read by mypy and pyright, never run."""

from typing import assert_type

from effectonce import Outcome, Receiver

receiver = Receiver("memory://")


class Till:
    """A class with decorated methods."""

    @receiver.idempotent(key="order_id")
    def take(self, order_id: str, cents: int = 0) -> int:
        """Take the money."""
        return cents

    @receiver.idempotent(key="order_id")
    async def take_later(self, order_id: str) -> int:
        """Take the money on an event loop."""
        return len(order_id)


def a_method_loses_only_self() -> None:
    till = Till()
    assert_type(till.take("o-1", cents=5), int)
    assert_type(till.take.outcome("o-1"), Outcome[int])
    assert_type(till.take.key("o-1"), str)


def a_method_of_the_class_keeps_self() -> None:
    assert_type(Till.take(Till(), "o-1"), int)
    assert_type(Till.take.outcome(Till(), "o-1"), Outcome[int])


async def an_async_method_is_awaited() -> None:
    till = Till()
    assert_type(await till.take_later("o-1"), int)
    assert_type(await till.take_later.outcome("o-1"), Outcome[int])
    assert_type(till.take_later.key("o-1"), str)


def wrong_arguments_are_found() -> None:
    till = Till()
    till.take(5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    till.take()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    till.take.outcome("o-1", euros=5)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
