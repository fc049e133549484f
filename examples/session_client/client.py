"""Pays invoices, each once, however often this program is killed and started again."""

from __future__ import annotations

import sys

import httpx

from effectonce.http.sessions import SessionTransport, http_session
from effectonce.sessions import Journal

INVOICES = {f"invoice-{number:02d}": number * 100 for number in range(1, 21)}
WHO = {"x-merchant": "corner-shop"}


def main(url: str) -> None:
    """Go on where the last run was killed."""
    journal = Journal("session.db")
    with httpx.Client(headers=WHO) as plain:
        try:
            session = http_session(f"{url}/session", plain, journal=journal)
        except httpx.HTTPStatusError as refused:
            if refused.response.status_code != 410:
                raise
            print(
                "The session is over. Look into these, say journal.settle(…) of each, and journal.forget():"
            )
            sys.exit("\n".join(entry.name or "" for entry in journal.in_doubt()))
    for entry in session.in_doubt():
        print(f"in doubt {entry.name}", flush=True)
    with httpx.Client(transport=SessionTransport(session), headers=WHO, base_url=url) as client:
        for invoice, cents in INVOICES.items():
            try:
                if (status := session.answer_to(invoice)) != 201:
                    print(f"refused {invoice}: {status}")  # an answer, too, and never another one
                continue
            except KeyError:
                pass
            print(f"sending {invoice}", flush=True)
            payment = {"invoice": invoice, "cents": cents}
            response = client.post("/payments", json=payment, extensions={"effectonce_name": invoice})
            response.raise_for_status()
            print(f"paid {invoice}", flush=True)


def show_books(url: str) -> None:
    """What the server has booked."""
    for invoice, lines in httpx.get(f"{url}/books").json().items():
        print(f"{invoice} {lines}")


if __name__ == "__main__":
    place, *words = sys.argv[1:]
    show_books(place) if words == ["--books"] else main(place)
