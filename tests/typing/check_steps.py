"""Steps give what their functions give, in both colours. Read by mypy and pyright in ./lint, never run."""

from dataclasses import dataclass
from typing import Any, assert_type

from effectonce import Message, current


@dataclass(frozen=True)
class Receipt:
    """What a step returns."""

    number: str


def charge(cents: int) -> Receipt:
    """A step in blocking code."""
    return Receipt(str(cents))


async def charge_later(cents: int) -> Receipt:
    """A step in async code."""
    return Receipt(str(cents))


def handle(message: Message) -> Receipt:
    """Ask for steps in blocking code."""
    attempt = current()
    assert_type(attempt.step("charge", charge, 500), Receipt)
    assert_type(attempt.step("again", charge, 500, version=2), Receipt)
    assert_type(attempt.step("in a transaction", charge, 500, on=object()), Receipt)
    with attempt.stepping("mail") as step:
        if step.first:
            step.complete(1)
    assert_type(step.first, bool)
    assert_type(step.key, str)
    assert_type(step.value, Any)
    return Receipt(message.id)


async def handle_later(message: Message) -> Receipt:
    """Ask for steps in async code: of either colour."""
    attempt = current()
    assert_type(await attempt.astep("charge", charge_later, 500), Receipt)
    assert_type(await attempt.astep("again", charge, 500), Receipt)
    assert_type(await attempt.astep("in a transaction", charge_later, 500, on=object(), version=2), Receipt)
    async with attempt.stepping("mail") as step:
        if step.first:
            await step.acomplete(1)
    return Receipt(message.id)
