"""Plays Stripe and GitHub: sends every event several times, in any order, signed as they do, until it is accepted."""

from __future__ import annotations

import hashlib
import hmac
import json
import random
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

EVENTS = 20
PATIENCE_SECONDS = 60


def stripe(number: int, secret: str = "whsec_example") -> tuple[str, bytes, dict[str, str]]:
    """An event of Stripe's: its id is in the body, and the signature has a time."""
    body = json.dumps(
        {"id": f"evt_{number:02d}", "type": "invoice.paid", "data": {"cents": number * 100}}
    ).encode()
    now = int(time.time())
    mac = hmac.digest(secret.encode(), f"{now}.".encode() + body, hashlib.sha256).hex()
    return "/hooks/stripe", body, {"Stripe-Signature": f"t={now},v1={mac}"}


def github(number: int, secret: str = "example") -> tuple[str, bytes, dict[str, str]]:
    """An event of GitHub's: its id is in a header."""
    body = json.dumps({"action": "opened", "number": number}).encode()
    mac = hmac.digest(secret.encode(), body, hashlib.sha256).hex()
    delivery = f"72d3162e-cc78-11e3-81ab-4c9367dc{number:04d}"
    headers = {
        "X-GitHub-Delivery": delivery,
        "X-GitHub-Event": "issues",
        "X-Hub-Signature-256": f"sha256={mac}",
    }
    return "/hooks/github", body, headers


def send(url: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bool]:
    """Deliver once; the status, and whether it was a repeat that got the first answer."""
    request = urllib.request.Request(url + path, body, headers | {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, response.headers["X-Replayed"] == "true"
    except urllib.error.HTTPError as refused:
        return refused.code, False
    except OSError:  # nobody there, or hung up in the middle
        return 0, False


def deliver(url: str, provider: str, number: int) -> bool:
    """Send an event until it is accepted, as providers do, each time with a new signature; whether it was a repeat."""
    give_up = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < give_up:
        status, replayed = send(url, *(stripe(number) if provider == "stripe" else github(number)))
        if status == 200:
            return replayed
        time.sleep(0.2)
    sys.exit(f"{provider} event {number} was not accepted.")


def main(url: str) -> None:
    """Deliver every event one to four times at once, then one that somebody else has signed."""
    events = [(provider, number) for provider in ("stripe", "github") for number in range(1, EVENTS + 1)]
    deliveries = [event for event in events for _ in range(random.randint(1, 4))]
    random.shuffle(deliveries)
    with ThreadPoolExecutor(8) as threads:
        replayed = sum(threads.map(lambda event: deliver(url, *event), deliveries))
    print(f"{len(events)} events in {len(deliveries)} deliveries: {replayed} got the first answer again")
    forged, _ = send(url, *stripe(99, secret="whsec_guessed"))
    print(f"forged: {forged}")


def show_books(url: str) -> None:
    """What the server has booked."""
    with urllib.request.urlopen(f"{url}/books") as response:
        for event, lines in json.load(response).items():
            print(f"{event} {lines}")


if __name__ == "__main__":
    place, *words = sys.argv[1:]
    show_books(place) if words == ["--books"] else main(place)
