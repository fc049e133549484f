"""The plan of a storm: what is to be paid, how often each order arrives, and who is killed where. Pure and seeded."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import Final, Literal, NamedTuple, get_args

Place = Literal["before the debit", "between debit and credit", "after the credit"]
"""Where a worker is killed: claimed but nothing done, half done, done but not recorded."""
PLACES: Final[tuple[Place, ...]] = get_args(Place)

ACCOUNTS: Final = 100
OPENING_CENTS: Final = 1_000_00
MOST_DELIVERIES: Final = 5
NEAR: Final = 6.0
"""A client that retries in haste: its repeats arrive within about so many other transfers."""


class Transfer(NamedTuple):
    """An order to move money."""

    id: str
    payer: int
    payee: int
    cents: int


@dataclass(frozen=True, slots=True)
class Storm:
    """Everything that will happen, the moment of the random kills apart."""

    transfers: tuple[Transfer, ...]
    deliveries: tuple[int, ...]
    """The transfer that each delivery asks for, in order of arrival."""
    kills_at: dict[int, Place]
    """Transfers whose first worker is killed, and where."""
    kills_after: tuple[int, ...]
    """Numbers of acknowledgements after which some worker is killed wherever it is."""

    @property
    def kills(self) -> int:
        """How many workers will be killed."""
        return len(self.kills_at) + len(self.kills_after)

    def closing_balances(self) -> list[int]:
        """What each account must hold in the end."""
        moved: Counter[int] = Counter()
        for transfer in self.transfers:
            moved[transfer.payer] -= transfer.cents
            moved[transfer.payee] += transfer.cents
        return [OPENING_CENTS + moved[account] for account in range(ACCOUNTS)]


def plan(transfers: int, kills: int, seed: int) -> Storm:
    """Make a storm. The same arguments make the same one."""
    random = Random(seed)
    orders = tuple(_transfer(random, number) for number in range(transfers))
    arrivals = [
        (_arrival(random, index, transfers, repeat), index)
        for index in range(transfers)
        for repeat in range(random.randint(1, MOST_DELIVERIES))
    ]
    aimed = min(kills - kills // 4, transfers)
    victims = random.sample(range(transfers), aimed)
    blind = sorted(random.randrange(len(arrivals)) for _ in range(kills - aimed))
    return Storm(
        transfers=orders,
        deliveries=tuple(index for _, index in sorted(arrivals)),
        kills_at={victim: PLACES[number % len(PLACES)] for number, victim in enumerate(victims)},
        kills_after=tuple(blind),
    )


def _transfer(random: Random, number: int) -> Transfer:
    payer, payee = random.sample(range(ACCOUNTS), 2)
    return Transfer(f"transfer-{number:05d}", payer, payee, random.randint(1_00, 250_00))


def _arrival(random: Random, index: int, transfers: int, repeat: int) -> float:
    """When a delivery arrives. Half of the repeats come at once, beside the first; half at any later time."""
    if repeat == 0 or random.random() < 0.5:
        return index + random.uniform(0.0, NEAR)
    return random.uniform(index, transfers)
