"""A bank. A transfer that is asked for twice is made once, and both callers get the same answer.

Each POST is one transaction: it claims the request's key, moves the money, records the answer, and commits. A process
that is killed anywhere in it leaves nothing behind, no half of a transfer and no key that somebody has to wait for.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from decimal import Decimal
from typing import Annotated, Any

import books
from fastapi import Depends, FastAPI, HTTPException, Request
from pydantic import BaseModel, Field

from effectonce import Receiver, current
from effectonce.http.atomic import AtomicMiddleware, connection

TELLERS = {
    hashlib.sha256(b"sk_counter").hexdigest(): "counter",
    hashlib.sha256(b"sk_online").hexdigest(): "online",
}
"""Who may ask, by the digest of an API key."""

engine = books.open_engine()
receiver = Receiver(books.RECEIVER)


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    """Connections end with the app."""
    yield
    await receiver.aclose()
    await engine.dispose()


def teller(request: Any) -> str | None:
    """Whose keys these are. Without one of ours, the boundary refuses with 403."""
    api_key = request.headers.get("x-api-key", "")
    return TELLERS.get(hashlib.sha256(api_key.encode()).hexdigest())


def known_teller(request: Request) -> str:
    """The same for what is only read, which the boundary does not touch."""
    name = teller(request)
    if name is None:
        raise HTTPException(403, "This API key is not known.")
    return name


app = FastAPI(title="Bank", lifespan=lifespan)
app.add_middleware(AtomicMiddleware, receiver=receiver, begin=engine.begin, scope=teller)

Name = Annotated[str, Field(min_length=1, max_length=40)]


class Transfer(BaseModel):
    """What is asked for, and what was done."""

    sender: Name
    recipient: Name
    amount: Annotated[Decimal, Field(gt=0, max_digits=12, decimal_places=2)]
    reference: Annotated[str, Field(min_length=1, max_length=140)]


@app.post("/transfers", status_code=201)
async def create_transfer(asked: Transfer) -> Transfer:
    """Move money. A refusal is an answer too: every repeat gets it."""
    try:
        # connection() is in the transaction of this request's record: both are committed, or neither is.
        await books.transfer(connection(), current().key_for("transfer"), asked.model_dump())
    except books.Refused as refused:
        raise HTTPException(402, str(refused)) from None
    return asked


@app.get("/accounts", dependencies=[Depends(known_teller)])
async def list_accounts() -> list[dict[str, Any]]:
    """All accounts. A GET needs no key and is not touched."""
    async with engine.connect() as reading:
        return await books.rows_of(reading, books.accounts)


@app.get("/transfers", dependencies=[Depends(known_teller)])
async def list_transfers() -> list[dict[str, Any]]:
    """All transfers, oldest first."""
    async with engine.connect() as reading:
        return await books.rows_of(reading, books.transfers)
