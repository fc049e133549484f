"""A payments service. A payment that is asked for twice is made once, and both callers get the same receipt.

Whoever calls is known first, by an API key; then the Idempotency-Key is claimed in the name of that merchant; then the
handler runs. What it answers is recorded before it is sent. A process that is killed in between leaves a claim behind,
which a retry takes over when its lease is over; it books the same line of the ledger, and so nothing (see ledger.py).
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from decimal import Decimal
from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.security import APIKeyHeader
from ledger import Entry, Ledger
from pydantic import BaseModel, Field

from effectonce import Policy, Receiver, current
from effectonce.http.fastapi import idempotent, install
from effectonce.http.webhooks import Event, StandardWebhooks, WebhookRefused, Webhooks

# redis://…, postgresql://… and others work as well: then many machines may share it, if they share a ledger, too.
STORE = os.environ.get("EFFECTONCE_STORE", "sqlite:///effects.db")
BANK_SECRET = os.environ.get("BANK_WEBHOOK_SECRET", "whsec_dGhlIGJhbmsncyBzZWNyZXQsIGZvciBkZW1vcw==")
LIMIT = Decimal(1000)


def digest(api_key: str) -> str:
    """What is kept of an API key."""
    return hashlib.sha256(api_key.encode()).hexdigest()


MERCHANTS = {digest("sk_acme"): "acme", digest("sk_globex"): "globex"}

ledger = Ledger("ledger.db")
# The lease is renewed while a handler runs. It is how long the key of a killed process is blocked.
receiver = Receiver(STORE, policy=Policy.payments(lease="5s"))

app = FastAPI(title="Payments")
install(app, receiver)


class NewPayment(BaseModel):
    """What is asked for."""

    amount: Annotated[Decimal, Field(gt=0, max_digits=12, decimal_places=2)]
    reference: Annotated[str, Field(min_length=1, max_length=140)]


class Payment(BaseModel):
    """What was paid: the receipt, the same for every repeat."""

    id: str
    amount: Decimal
    reference: str


def merchant(api_key: Annotated[str, Depends(APIKeyHeader(name="X-API-Key"))]) -> str:
    """Who is calling: whose payments these are, and whose idempotency keys."""
    name = MERCHANTS.get(digest(api_key))
    if name is None:
        raise HTTPException(401, "This API key is not known.")
    return name


Merchant = Annotated[str, Depends(merchant)]
REFUSALS: dict[int | str, dict[str, Any]] = {
    401: {"description": "Not known"},
    402: {"description": "Declined"},
}


@app.post("/payments", status_code=201, dependencies=[idempotent(merchant)], responses=REFUSALS)
def create_payment(asked: NewPayment, merchant: Merchant) -> Payment:
    """Make a payment. A refusal is an answer too: every repeat gets it."""
    if asked.amount > LIMIT:
        raise HTTPException(402, f"Payments are limited to {LIMIT}.")
    # The same on every attempt. Hand such a key to your payment provider; here it names the line of the ledger.
    entry = Entry(current().key_for("payment"), merchant, asked.amount, asked.reference)
    ledger.book(entry)
    return shown(entry)


@app.get("/payments")
def list_payments(merchant: Merchant) -> list[Payment]:
    """All payments of a merchant. A GET needs no key and is not touched."""
    return [shown(entry) for entry in ledger.of(merchant)]


def shown(entry: Entry) -> Payment:
    """A line of the ledger as its merchant sees it."""
    return Payment(id=entry.id, amount=entry.amount, reference=entry.reference)


# -- The bank calls back, with a signature of its own and as often as it likes ---------------------------------------

bank = Webhooks(receiver, StandardWebhooks(BANK_SECRET, provider="bank"), endpoint="/webhooks/bank")


@app.post("/webhooks/bank")
async def bank_calls(request: Request) -> dict[str, str] | None:
    """Take an event of the bank's. After an error it comes again."""
    try:
        outcome = await bank.aprocess(request.headers, await request.body(), take_event)
    except WebhookRefused as refused:
        raise HTTPException(refused.status, str(refused)) from None
    return outcome.value


async def take_event(event: Event) -> dict[str, str]:
    """Runs once for each event."""
    if event.kind != "chargeback":
        return {"event": "ignored"}
    return await asyncio.to_thread(take_back, event.payload["payment"])


def take_back(id: str) -> dict[str, str]:
    """Book a payment back."""
    payment = ledger.get(id)
    line = Entry(current().key_for("chargeback"), payment.merchant, -payment.amount, f"chargeback of {id}")
    ledger.book(line)
    return {"booked": line.id}
