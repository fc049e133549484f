"""Outcomes carry their handler's type, in both colours. Read by mypy and pyright in ./lint, never run."""

from dataclasses import dataclass
from typing import Any, assert_type

from effectonce import Message, Outcome, Receiver

receiver = Receiver("memory://")
message = Message("e-1")


@dataclass(frozen=True)
class Receipt:
    """What a handler returns."""

    number: str


def handle(message: Message) -> Receipt:
    """Handle in blocking code."""
    return Receipt(message.id)


async def handle_later(message: Message) -> Receipt:
    """Handle in async code."""
    return Receipt(message.id)


class Office:
    """Methods are handlers as functions are."""

    def handle(self, message: Message) -> Receipt:
        """Handle in blocking code."""
        return Receipt(message.id)

    async def handle_later(self, message: Message) -> Receipt:
        """Handle in async code."""
        return Receipt(message.id)


def blocking_outcomes_have_the_handlers_type() -> None:
    assert_type(receiver.process(message, handle), Outcome[Receipt])
    assert_type(receiver.process(message, Office().handle), Outcome[Receipt])
    assert_type(receiver.process(message, lambda m: m.id), Outcome[str])
    assert_type(receiver.process(message, handle).value, Receipt | None)
    assert_type(receiver.process(message, handle).unwrap(), Outcome[Receipt])
    assert_type(receiver.process_batch([message], handle), list[Outcome[Receipt]])


async def async_outcomes_have_the_awaited_type() -> None:
    assert_type(await receiver.aprocess(message, handle_later), Outcome[Receipt])
    assert_type(await receiver.aprocess(message, Office().handle_later), Outcome[Receipt])
    assert_type(await receiver.aprocess_batch([message], handle_later), list[Outcome[Receipt]])


def handlers_take_a_message() -> None:
    def wrong(text: str) -> str:
        return text

    receiver.process(message, wrong)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    receiver.process("e-1", handle)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def claims_have_any_value() -> None:
    with receiver.claim("k") as claim:
        assert_type(claim.first, bool)
        assert_type(claim.value, Any)
        assert_type(claim.attempt.fence, int)
