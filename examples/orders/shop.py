"""A shop. An order and the event that tells of it are one transaction: nobody hears of an order that is not there.

``place`` is claimed, done and recorded in that transaction, too. So an order that is asked for twice is placed once,
its event has one id, and a process that is killed anywhere in it leaves nothing behind.

    python shop.py                              makes the tables; what is there stays
    uvicorn shop:app --port 8000                serves
"""

from __future__ import annotations

import os
from typing import Annotated, Any

from fastapi import FastAPI, Header, HTTPException
from pydantic import BaseModel, Field
from sqlalchemy import Column, Connection, Integer, MetaData, String, Table, create_engine, insert

from effectonce import Receiver
from effectonce.errors import InProgress, KeyReused
from effectonce.ops.cli import main as effectonce
from effectonce.outbox import Outbox
from effectonce.transactions import retrying

DATABASE = os.environ.get("ORDERS_DATABASE", "sqlite:///shop.db")
IS_SQLITE = DATABASE.startswith("sqlite:")

engine = create_engine(
    DATABASE if IS_SQLITE else DATABASE.replace("://", "+psycopg://", 1),
    # SQLite: a transaction takes the lock when it begins, and waits for it.
    connect_args={"isolation_level": "IMMEDIATE", "timeout": 30} if IS_SQLITE else {},
)
receiver = Receiver(f"{DATABASE}?beside=yes" if IS_SQLITE else DATABASE)
outbox = Outbox()

tables = MetaData()
orders = Table(
    "orders",
    tables,
    Column("number", Integer, primary_key=True),
    Column("customer", String(40), nullable=False),
    Column("reference", String(255), nullable=False),
    Column("item", String(40), nullable=False),
    Column("quantity", Integer, nullable=False),
)


@receiver.idempotent(key=("customer", "reference"), on="connection")
def place(connection: Connection, customer: str, reference: str, item: str, quantity: int) -> dict[str, Any]:
    """Place an order, in the transaction that the connection is in."""
    row = {"customer": customer, "reference": reference, "item": item, "quantity": quantity}
    number = connection.execute(insert(orders).values(row).returning(orders.c.number)).scalar_one()
    order = {"order": number, "item": item, "quantity": quantity}
    # The key is the order's: all that is told of it arrives in the order in which it happened.
    outbox.on(connection).add("orders", order, key=f"order-{number}")
    return order


app = FastAPI(title="Shop")


class NewOrder(BaseModel):
    """What is asked for."""

    item: Annotated[str, Field(min_length=1, max_length=40)]
    quantity: Annotated[int, Field(gt=0, le=100)]


@app.post("/orders", status_code=201)
def create_order(
    asked: NewOrder,
    customer: Annotated[str, Header(alias="X-Customer", pattern="^[a-z]{1,40}$")],
    key: Annotated[str, Header(alias="Idempotency-Key", min_length=1, max_length=255)],
) -> dict[str, Any]:
    """Place an order once. Who the customer is has been found out by the gateway in front of this service."""
    try:
        return retrying(engine.begin, lambda on: place(on, customer, key, asked.item, asked.quantity))
    except KeyReused:
        raise HTTPException(422, "This key was used for another order.") from None
    except InProgress:
        raise HTTPException(409, "This order is being placed.", {"Retry-After": "1"}) from None


def prepare() -> None:
    """The tables of orders, of the receiver and of the outbox."""
    tables.create_all(engine)
    receiver.get("nothing")  # its first command makes its table
    effectonce(["migrate", "--outbox", DATABASE])


if __name__ == "__main__":
    prepare()
