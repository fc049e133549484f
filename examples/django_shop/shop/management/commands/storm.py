"""``python manage.py storm``: shoppers who click five times, and an audit of what they bought."""

from __future__ import annotations

import re
import time
from argparse import ArgumentParser
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal

import httpx
from django.core.management.base import BaseCommand, CommandError
from shop.models import Item, Order

from effectonce.http.client import replayed

SHOPPERS, CLICKS, STOCK, PRICE = 12, 5, 1_000, Decimal("19.90")
PATIENCE_SECONDS = 30.0


class Command(BaseCommand):
    """Sends the storm and audits the shop."""

    help = "Send a storm of double-clicks to running servers, and audit what was bought."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("servers", nargs="*", default=["http://127.0.0.1:8000"])

    def handle(self, *, servers: list[str], **_: object) -> None:
        """Each shopper buys two lamps: one by the form, and one by the app."""
        item, _ = Item.objects.update_or_create(name="lamp", defaults={"price": PRICE, "stock": STOCK})
        before = Order.objects.count()
        with ThreadPoolExecutor(SHOPPERS) as pool:
            answers = [each for some in pool.map(shop, [servers] * SHOPPERS) for each in some]
        item.refresh_from_db()
        again, sold = sum(map(replayed, answers)), STOCK - item.stock
        shown, placed = len(set(map(number_in, answers))), Order.objects.count() - before
        self.stdout.write(f"{SHOPPERS} shoppers, {len(answers)} requests, {again} got the first answer again")
        self.stdout.write(f"orders: {placed} placed, {shown} shown; lamps: {sold} sold for {sold * PRICE}")
        if not placed == shown == sold == 2 * SHOPPERS:
            raise CommandError(f"The books don't balance: it should be {2 * SHOPPERS} of each.")
        self.stdout.write(self.style.SUCCESS("Each order was placed once."))


def shop(servers: list[str]) -> list[httpx.Response]:
    """Buy two lamps with an impatient hand: what was answered to each click."""
    with httpx.Client(timeout=60) as client, ThreadPoolExecutor(CLICKS) as hand:
        page = until_answered(servers, 0, client.get).text
        form = dict(re.findall(r'name="(\w+)" value="([^"]*)"', page))
        basket, key = {"item": "lamp", "quantity": 1}, {"Idempotency-Key": f'"{form["key"]}-app"'}

        def click(number: int) -> httpx.Response:
            return until_answered(servers, number, lambda url: client.post(f"{url}/checkout", data=form))

        def send(number: int) -> httpx.Response:
            return until_answered(
                servers, number, lambda url: client.post(f"{url}/api/orders", json=basket, headers=key)
            )

        return [*hand.map(click, range(CLICKS)), *hand.map(send, range(CLICKS))]


def until_answered(servers: list[str], turn: int, ask: Callable[[str], httpx.Response]) -> httpx.Response:
    """Ask one server after the other until one answers: a click that brings nothing is followed by another."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        server = servers[turn % len(servers)]
        try:
            response = ask(server)
        except httpx.TransportError:
            turn += 1
            time.sleep(0.1)
            continue
        if response.status_code >= 400:
            raise CommandError(f"{server} answered with {response.status_code}: {response.text[:200]}")
        return response
    raise CommandError(f"No answer from {', '.join(servers)}.")


def number_in(response: httpx.Response) -> str:
    """The number of the order that an answer shows."""
    place = response.headers.get("location", "")
    return place.rpartition("/")[2] or str(response.json()["number"])
