"""The whole of it, each part in two processes, while ``kill -9`` goes round: shop, relay and shipping. Then an audit.

    python storm.py [ORDERS] [KILLS]

Each order arrives one to five times; whoever gets no answer asks again. At the end every order has to be there once,
its event published with one id, and shipped once.
"""

from __future__ import annotations

import asyncio
import random
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import events
import httpx
import shipping
import shop
from sqlalchemy import select, text

from effectonce.http.client import AsyncIdempotencyTransport, Rules

RULES = Rules(backoff="50ms", longest="500ms", poll="100ms")
AT_ONCE = 12
PATIENCE_SECONDS = 90.0
PYTHON = [sys.executable, "-m"]
RELAY = [*PYTHON, "effectonce", "relay", "--lease", "2s", shop.DATABASE, events.BROKER]

Answers = dict[str, Counter[tuple[int, str]]]
"""What was said of each order, and how often."""


class Process:
    """Something that runs, and is started again when it is killed."""

    def __init__(self, *command: str, fds: tuple[int, ...] = ()) -> None:
        self.command, self.fds = command, fds
        self.start()

    def start(self) -> None:
        self.running = subprocess.Popen(self.command, stdout=subprocess.DEVNULL, pass_fds=self.fds)

    def kill(self) -> None:
        self.running.kill()
        self.running.wait()


async def storm(count: int, kills: int, urls: list[str], processes: list[Process]) -> Answers:
    """Order, as often as it takes, and kill something every now and then."""
    chance, answers, came = random.Random(7), Answers(), 0
    asked = [reference for number in range(count) for reference in [f"o-{number}"] * chance.randint(1, 5)]
    chance.shuffle(asked)
    every, slots = len(asked) // (kills + 1), asyncio.Semaphore(AT_ONCE)

    async def order(client: httpx.AsyncClient, reference: str) -> None:
        nonlocal came
        async with slots:
            number = int(reference.removeprefix("o-"))
            body = {"item": sorted(shipping.STOCK)[number % 3], "quantity": 1 + number % 7}
            response = await client.post(
                chance.choice(urls), json=body, headers={"Idempotency-Key": reference}
            )
        answers.setdefault(reference, Counter())[response.status_code, response.text] += 1
        came += 1
        if came % every == 0 and came // every <= kills:
            victim = chance.choice(processes)
            victim.kill()
            victim.start()

    transport = AsyncIdempotencyTransport(rules=RULES)
    async with httpx.AsyncClient(transport=transport, headers={"X-Customer": "ada"}, timeout=60) as client:
        await asyncio.gather(*(order(client, reference) for reference in asked))
    return answers


def placed() -> list[Any]:
    """All orders."""
    with shop.engine.connect() as connection:
        return list(connection.execute(select(shop.orders)).mappings())


def shipped(statement: str = "SELECT number FROM shipments") -> list[Any]:
    """What shipping has noted."""
    with shipping.transaction() as connection:
        return connection.execute(statement).fetchall()


def unsent() -> int:
    """Events that wait in the outbox. A relay that was killed may have published some of them already."""
    with shop.engine.connect() as connection:
        return int(connection.execute(text("SELECT count(*) FROM effectonce_outbox")).scalar_one())


def settle(orders: int) -> None:
    """Wait until every order is shipped, and nothing is left to tell; or long enough."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (len(shipped()) < orders or unsent()) and time.monotonic() < deadline:
        time.sleep(0.1)


def complaints(answers: Answers) -> Iterable[str]:
    """What is wrong; nothing, if all is well."""
    orders, told = placed(), events.published()
    references = Counter(row["reference"] for row in orders)
    for reference, said in answers.items():
        if len(said) != 1 or {status for status, _ in said} != {201}:
            yield f"{reference} was answered {dict(said)}"
        if references[reference] != 1:
            yield f"{reference} is there {references[reference]} times"
    numbers = {row["number"] for row in orders}
    ids = {number: {each.id for each in told if each.payload["order"] == number} for number in numbers}
    if {each.payload["order"] for each in told} != numbers or any(len(same) != 1 for same in ids.values()):
        yield "an order was not told of under one id, or something else was"
    for message in told:
        shipping.receive(message)  # everything is delivered once more, and nothing may come of it
    if sorted(number for (number,) in shipped()) != sorted(numbers):
        yield "an order was not shipped once"
    for item, left in shipped("SELECT item, left FROM stock"):
        gone = sum(row["quantity"] for row in orders if row["item"] == item)
        if left != shipping.STOCK[item] - gone:
            yield f"{gone} of {item} were sold, and {shipping.STOCK[item] - left} are gone"


def main(count: str = "100", kills: str = "6") -> int:
    """0 if every order is there once, told of under one id and shipped once."""
    shop.prepare()
    shipping.prepare()
    # Held here, so that a port stays the shop's while its process is killed and started again.
    sockets = [socket.create_server(("127.0.0.1", 0), backlog=128) for _ in range(2)]
    urls = [f"http://127.0.0.1:{each.getsockname()[1]}/orders" for each in sockets]
    relay = RELAY if events.IS_REDIS else [sys.executable, "events.py"]
    serve = [*PYTHON, "uvicorn", "shop:app", "--log-level", "error", "--fd"]
    consume = [sys.executable, "shipping.py"]
    processes = [Process(*serve, str(each.fileno()), fds=(each.fileno(),)) for each in sockets]
    processes += [Process(*command) for command in (relay, relay, consume, consume)]
    try:
        answers = asyncio.run(storm(int(count), int(kills), urls, processes))
        settle(int(count))
    finally:
        for process in processes:
            process.kill()
    arrived = sum(said.total() for said in answers.values())
    print(
        f"{count} orders arrived {arrived} times, {kills} kills: {len(events.published())} events published,"
    )
    wrong = list(complaints(answers))
    print(*wrong or [f"{count} orders placed, {len(shipped())} shipped. All is well."], sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
