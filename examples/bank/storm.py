"""Two processes of the bank, transfers that each arrive one to five times, ``kill -9`` in between, and an audit.

    python storm.py [TRANSFERS] [KILLS]

Whoever gets no answer asks again, with the same key. A process is killed whenever so many answers have come, while
others are on their way, and is started again. At the end the books have to balance.
"""

from __future__ import annotations

import asyncio
import random
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from functools import partial
from typing import Any, NamedTuple

import books
import httpx

from effectonce.http.client import IdempotencyTransport, Rules

RULES = Rules(backoff="50ms", longest="500ms", poll="100ms", retry=["GET"])
CALLERS = 12


class Server:
    """A process of the bank. Its port stays its own: the socket is held here, and whoever calls meanwhile waits."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.start()

    def start(self) -> None:
        """Start it."""
        fd = self.socket.fileno()
        command = [sys.executable, "-m", "uvicorn", "app:app", "--log-level", "error", "--fd", str(fd)]
        self.process = subprocess.Popen(command, pass_fds=[fd])

    def kill(self) -> None:
        """End it in the middle of whatever it does."""
        self.process.kill()
        self.process.wait()


class Answer(NamedTuple):
    """What one delivery of a transfer was told."""

    reference: str
    status: int
    body: str


def planned(chance: random.Random, count: int) -> list[dict[str, str]]:
    """Transfers of a few cents or of more than there is, each one to five times, in no order."""
    names, deliveries = sorted(books.OPENING), []
    for number in range(count):
        sender, recipient = chance.sample(names, 2)
        amount = Decimal(chance.randrange(1, 20_000)).scaleb(-2)
        asked = {"sender": sender, "recipient": recipient, "amount": str(amount), "reference": f"t-{number}"}
        deliveries += [asked] * chance.randint(1, 5)
    chance.shuffle(deliveries)
    return deliveries


def deliver(client: httpx.Client, url: str, asked: dict[str, str]) -> Answer:
    """Ask for a transfer until there is an answer."""
    key = {"Idempotency-Key": f'"{asked["reference"]}"'}
    response = client.post(f"{url}/transfers", json=asked, headers=key)
    return Answer(asked["reference"], response.status_code, response.text)


def storm(
    servers: list[Server], deliveries: list[dict[str, str]], kills: int, chance: random.Random
) -> list[Answer]:
    """Deliver everything, and kill a process every now and then."""
    transport = IdempotencyTransport(
        httpx.HTTPTransport(limits=httpx.Limits(max_connections=None)), rules=RULES
    )
    every, answers = len(deliveries) // (kills + 1), []
    with (
        httpx.Client(transport=transport, headers={"X-API-Key": "sk_counter"}, timeout=60) as client,
        ThreadPoolExecutor(CALLERS) as callers,
    ):
        urls = [chance.choice(servers).url for _ in deliveries]
        for answer in callers.map(partial(deliver, client), urls, deliveries):
            answers.append(answer)
            if len(answers) % every == 0 and len(answers) // every <= kills:
                victim = chance.choice(servers)
                victim.kill()
                victim.start()
    return answers


async def complaints(answers: list[Answer]) -> list[str]:
    """What is wrong with the books; nothing, if all is well."""
    engine = books.open_engine()
    async with engine.connect() as connection:
        accounts = await books.rows_of(connection, books.accounts)
        transfers = await books.rows_of(connection, books.transfers)
    await engine.dispose()
    return [*_told(answers), *_made(answers, transfers), *_balanced(accounts, transfers)]


def _told(answers: list[Answer]) -> list[str]:
    told: dict[str, set[tuple[int, str]]] = {}
    for answer in answers:
        told.setdefault(answer.reference, set()).add((answer.status, answer.body))
    different = [
        f"{reference} has different answers: {said}" for reference, said in told.items() if len(said) > 1
    ]
    odd = [
        f"{each.reference} was answered {each.status}: {each.body}"
        for each in answers
        if each.status not in (201, 402)
    ]
    return different + odd


def _made(answers: list[Answer], transfers: list[dict[str, Any]]) -> list[str]:
    found = sorted(row["reference"] for row in transfers)
    expected = sorted({answer.reference for answer in answers if answer.status == 201})
    lost, invented = set(expected) - set(found), set(found) - set(expected)
    twice = {reference for reference in found if found.count(reference) > 1}
    named = {"lost": lost, "not promised": invented, "made twice": twice}
    return [f"{what}: {sorted(which)}" for what, which in named.items() if which]


def _balanced(accounts: list[dict[str, Any]], transfers: list[dict[str, Any]]) -> list[str]:
    wrong = []
    for row in accounts:
        out = sum(each["amount"] for each in transfers if each["sender"] == row["name"])
        into = sum(each["amount"] for each in transfers if each["recipient"] == row["name"])
        if row["balance"] != row["opened_with"] - out + into:
            wrong.append(
                f"{row['name']} has {row['balance']}, {row['opened_with']} - {out} + {into} expected"
            )
    return wrong


def main(count: str = "100", kills: str = "4") -> int:
    """0 if the books balance, each transfer was made once, and none was lost."""
    chance = random.Random(7)
    books.main()
    deliveries = planned(chance, int(count))
    servers = [Server(), Server()]
    try:
        answers = storm(servers, deliveries, int(kills), chance)
    finally:
        for server in servers:
            server.kill()
    made = len({answer.reference for answer in answers if answer.status == 201})
    print(
        f"{count} transfers arrived {len(answers)} times, {kills} kills: {made} made, {int(count) - made} refused"
    )
    wrong = asyncio.run(complaints(answers))
    print(*wrong or ["The books balance."], sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
