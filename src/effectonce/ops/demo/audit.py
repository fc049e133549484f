"""The audit: the bank's books compared with what was ordered. It trusts no counter of the library."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from .bank import Bank, Entry
from .storm import ACCOUNTS, OPENING_CENTS, Storm


class Audit(NamedTuple):
    """The findings."""

    lost: int
    """Transfers without their debit or without their credit."""
    double: int
    """Transfers with more than one debit or more than one credit."""
    vanished_cents: int
    """Money that left an account and arrived in none."""
    overpaid_cents: int
    """Money that was credited again."""
    books_balance: bool
    """Every account holds what the orders say, what its own ledger entries say, and no entry is unknown."""

    @property
    def passed(self) -> bool:
        """Whether every transfer took effect exactly once."""
        return self.books_balance and not any(
            (self.lost, self.double, self.vanished_cents, self.overpaid_cents)
        )


def audit(storm: Storm, bank: Bank) -> Audit:
    """Read the ledger and the balances, and compare them with the orders."""
    ledger = bank.entries()
    posted = Counter(ledger)
    lost = double = overpaid = 0
    for transfer in storm.transfers:
        debited = posted.pop(Entry(transfer.id, transfer.payer, -transfer.cents), 0)
        credited = posted.pop(Entry(transfer.id, transfer.payee, transfer.cents), 0)
        lost += min(debited, credited) == 0
        double += max(debited, credited) > 1
        overpaid += transfer.cents * max(credited - 1, 0)
    moved: Counter[int] = Counter()
    for entry in ledger:
        moved[entry.account] += entry.cents
    booked = [OPENING_CENTS + moved[account] for account in range(ACCOUNTS)]
    return Audit(
        lost=lost,
        double=double,
        vanished_cents=-sum(entry.cents for entry in ledger),
        overpaid_cents=overpaid,
        books_balance=not posted and bank.balances() == booked == storm.closing_balances(),
    )
