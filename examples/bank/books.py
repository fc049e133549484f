"""The books: accounts that can't go below nothing, and transfers each of which is written once.

Three rules are the database's own, so that no program can break them: a balance is not negative, an amount is positive,
and no two transfers have the same ``effect_key``. The last one is the second line of defence: it holds even if the
receiver has lost its memory, or is left out.

    python books.py         makes the tables and a few accounts; what is there stays
"""

from __future__ import annotations

import asyncio
import os
from decimal import Decimal
from typing import Any

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Connection,
    Dialect,
    Integer,
    MetaData,
    String,
    Table,
    TypeDecorator,
    event,
    insert,
    select,
    update,
)
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from effectonce import Receiver
from effectonce.versions import UniqueEffect

DATABASE = os.environ.get("BANK_DATABASE", "sqlite:///bank.db")
# On SQLite the receiver says that it shares the file with tables that are not its own.
RECEIVER = f"{DATABASE}?beside=yes" if DATABASE.startswith("sqlite:") else DATABASE
OPENING = {
    "ada": Decimal("1000.00"),
    "bob": Decimal("1000.00"),
    "cyd": Decimal("50.00"),
    "dot": Decimal("0.00"),
}


class Money(TypeDecorator[Decimal]):
    """An amount is a Decimal here and whole cents in the database: exact on every engine."""

    impl = BigInteger
    cache_ok = True

    def process_bind_param(self, value: Decimal | None, dialect: Dialect) -> int | None:
        return None if value is None else cents(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> Decimal | None:
        return None if value is None else Decimal(value).scaleb(-2)


def cents(amount: Decimal) -> int:
    """An amount of money in cents; ValueError if there are parts of a cent."""
    if amount != amount.quantize(Decimal("0.01")):
        raise ValueError(f"{amount} has parts of a cent.")
    return int(amount.scaleb(2))


tables = MetaData()
accounts = Table(
    "accounts",
    tables,
    Column("name", String(40), primary_key=True),
    Column("opened_with", Money, nullable=False),
    Column("balance", Money, CheckConstraint("balance >= 0", name="no_overdraft"), nullable=False),
)
transfers = Table(
    "transfers",
    tables,
    Column("number", BigInteger().with_variant(Integer, "sqlite"), primary_key=True),
    Column("effect_key", String(255), unique=True),
    Column("reference", String(140), nullable=False),
    Column("sender", String(40), nullable=False),
    Column("recipient", String(40), nullable=False),
    Column("amount", Money, CheckConstraint("amount > 0"), nullable=False),
)
once = UniqueEffect("transfers")


class Refused(Exception):
    """The books don't allow it. Nothing was moved."""


async def transfer(connection: AsyncConnection, key: str, row: dict[str, Any]) -> None:
    """Write a transfer and move its money, unless the books have it already."""
    sender, recipient, amount = row["sender"], row["recipient"], row["amount"]
    try:
        async with connection.begin_nested():
            if not await once.on(connection).ainsert({**row, "amount": cents(amount)}, key=key):
                return
            # Always in the same order, so that transfers there and back don't wait for each other.
            for name, change in sorted([(sender, -amount), (recipient, amount)]):
                await _add(connection, name, change)
    except IntegrityError:
        raise Refused(f"{sender} has less than {amount}.") from None


async def _add(connection: AsyncConnection, name: str, change: Decimal) -> None:
    new = accounts.c.balance + change
    changed = await connection.execute(update(accounts).where(accounts.c.name == name).values(balance=new))
    if changed.rowcount == 0:
        raise Refused(f"There is no account {name}.")


async def rows_of(connection: AsyncConnection, table: Table) -> list[dict[str, Any]]:
    """All rows of a table, oldest first."""
    found = await connection.execute(select(table).order_by(*table.primary_key))
    return [dict(row) for row in found.mappings()]


def open_engine() -> AsyncEngine:
    """The database that BANK_DATABASE names: SQLite by default, or postgresql://…"""
    driver = {"sqlite": "aiosqlite", "postgresql": "psycopg"}[DATABASE.partition(":")[0]]
    engine = create_async_engine(DATABASE.replace("://", f"+{driver}://", 1), pool_size=10)
    if driver == "aiosqlite":
        # Whoever reads first and then writes may find that another has written: so the lock is taken at the beginning.
        event.listen(engine.sync_engine, "connect", _leave_it_to_us)
        event.listen(engine.sync_engine, "begin", _begin)
    return engine


def _leave_it_to_us(connection: Any, _: object) -> None:
    connection.isolation_level = None
    connection.cursor().execute("PRAGMA busy_timeout = 30000")


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


async def set_up() -> None:
    """Make the tables and open the accounts, unless they are there."""
    engine = open_engine()
    async with engine.begin() as connection:
        await connection.run_sync(tables.create_all)
        there = {row["name"] for row in await rows_of(connection, accounts)}
        new = [
            {"name": name, "opened_with": amount, "balance": amount}
            for name, amount in OPENING.items()
            if name not in there
        ]
        if new:
            await connection.execute(insert(accounts), new)
    await engine.dispose()


def main() -> None:
    """The tables of the bank, and that of its receiver: nothing is created inside a transaction of the app's."""
    asyncio.run(set_up())
    with Receiver(RECEIVER) as receiver:
        # A receiver's first command makes its table. Where the role may not, `effectonce migrate` does it.
        receiver.get("nothing")


if __name__ == "__main__":
    main()
