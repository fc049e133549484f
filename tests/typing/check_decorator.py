"""The decorator keeps what type checkers know of a function. Read by mypy and pyright in ./lint, never run."""

from dataclasses import dataclass
from typing import assert_type

from effectonce import Receiver

receiver = Receiver("memory://")


@dataclass(frozen=True)
class Receipt:
    """What a charge returns."""

    number: str


@receiver.idempotent(key="order_id")
def charge(order_id: str, cents: int) -> Receipt:
    """Charge in blocking code."""
    return Receipt(f"{order_id}-{cents}")


@receiver.idempotent(key=lambda order_id, cents: order_id)
async def charge_later(order_id: str, cents: int) -> Receipt:
    """Charge in async code."""
    return Receipt(f"{order_id}-{cents}")


class Till:
    """Methods are decorated as functions are."""

    @receiver.idempotent
    def take(self, order_id: str) -> int:
        """Take the money of one order."""
        return len(order_id)


def blocking_results_keep_their_type() -> None:
    assert_type(charge("o-1", 500), Receipt)
    assert_type(charge.outcome("o-1", 500).replayed, bool)


async def async_results_keep_their_type() -> None:
    assert_type(await charge_later("o-1", 500), Receipt)


def methods_lose_only_self() -> None:
    assert_type(Till().take("o-1"), int)


def wrong_arguments_are_found() -> None:
    charge("o-1", "500")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    charge("o-1")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
