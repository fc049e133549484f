"""Pays invoices through a connection that loses half of all requests and answers, and looks at what was paid.

    python client.py http://127.0.0.1:8000

Each invoice has a name, so that its key is in the journal before it is sent. Kill this program and start it again, or
run it twice: no invoice is paid twice.
"""

from __future__ import annotations

import random
import sys
from decimal import Decimal

import httpx

from effectonce.http.client import IdempotencyTransport, Journal, Rules, delivery

INVOICES = {f"invoice-{number}": Decimal(number) + Decimal("0.99") for number in range(1, 11)}


class Flaky(httpx.HTTPTransport):
    """A connection on which things get lost: requests on their way there, and answers on their way back."""

    chance, arrived = random.Random(7), 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if self.chance.random() < 0.25:
            raise httpx.ConnectError("lost on the way there")
        response = super().handle_request(request)
        self.arrived += request.method == "POST"
        if self.chance.random() < 0.35:
            response.close()
            raise httpx.ReadError("lost on the way back: it is done, and nobody says so")
        return response


def main(url: str = "http://127.0.0.1:8000") -> int:
    """Pay every invoice; 0 if the books have each of them once."""
    flaky, journal = Flaky(), Journal("sent.db", window="48h")
    rules = Rules(backoff="50ms", longest="500ms", retry=["GET"])
    transport = IdempotencyTransport(flaky, rules=rules, journal=journal)
    with httpx.Client(base_url=url, transport=transport, headers={"X-API-Key": "sk_acme"}) as client:
        for name, amount in INVOICES.items():
            payment = {"amount": str(amount), "reference": name}
            response = client.post("/payments", json=payment, extensions={"effectonce_name": name})
            report(name, response.raise_for_status())
        booked = client.get("/payments").raise_for_status().json()
    paid = sum(Decimal(line["amount"]) for line in booked)
    print(f"{len(INVOICES)} invoices, {flaky.arrived} requests arrived, {len(booked)} payments, {paid} paid")
    return 0 if sorted(line["reference"] for line in booked) == sorted(INVOICES) else 1


def report(name: str, response: httpx.Response) -> None:
    """Print what it took to get an answer."""
    took = delivery(response)
    if took is not None:
        how = "the first answer, again" if took.replayed else "paid now"
        print(f"{name:<10} {INVOICES[name]:>6}  {how:<23}  tries: {took.attempts}")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
