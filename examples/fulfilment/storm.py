"""A storm over the shop: clients and sweepers that are killed with ``kill -9`` at work, and then the audit.

``python storm.py [ORDERS] [KILLS]``. Nobody repairs anything by hand: what clients leave behind, sweepers go on with.
"""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing

LEASE = "2s"
os.environ.setdefault("FULFILMENT_LEASE", LEASE)

import shop  # noqa: E402 - it reads the lease

from effectonce.errors import Compensated, InProgress  # noqa: E402
from effectonce.saga import SagaState  # noqa: E402

CLIENTS, SWEEPERS = 4, 2
SWEEP = "from effectonce.ops.cli import main; main(['sweep', 'shop:sweeper', '--every', '200ms'])"


def order(number: int) -> shop.Order:
    """Some want what is sold out soon, some can't pay, and some live where no carrier goes."""
    item = ("umbrella", "lantern", "compass")[number % 3]
    cents, city = (99_900 if number % 7 == 0 else 1250), ("Atlantis" if number % 5 == 0 else "Paris")
    return shop.Order(f"o-{number}", item, cents, city)


def place(numbers: range) -> None:
    """A client: places orders, and does not mind how they end."""
    for number in numbers:
        wanted = order(number)
        while True:
            try:
                shop.fulfil.run(wanted.id, wanted)
            except Compensated:
                pass
            except InProgress:
                continue  # somebody is at it
            break


def start(*arguments: str) -> subprocess.Popen[bytes]:
    """A process of its own."""
    quiet = subprocess.DEVNULL
    return subprocess.Popen([sys.executable, *arguments], stdout=quiet, stderr=quiet)


def main(orders: int, kills: int) -> None:
    """Let it rage, then look."""
    shop.prepare()

    def sweep(_: int) -> subprocess.Popen[bytes]:
        return start("-c", SWEEP)

    def client(number: int) -> subprocess.Popen[bytes]:
        return start(
            __file__, "place", str(number * orders // CLIENTS), str((number + 1) * orders // CLIENTS)
        )

    sweepers, clients = [sweep(n) for n in range(SWEEPERS)], [client(n) for n in range(CLIENTS)]
    for _ in range(kills):
        time.sleep(random.uniform(0.05, 0.4))
        processes, begin = random.choice([(clients, client), (clients, client), (sweepers, sweep)])
        number = random.randrange(len(processes))
        processes[number].send_signal(signal.SIGKILL)
        processes[number].wait()
        processes[number] = begin(number)
    for process in clients:
        process.wait()
    finish(orders)
    for process in sweepers:
        process.terminate()
        process.wait()
    audit(orders, kills)


def finish(orders: int) -> None:
    """Wait until the sweepers have brought every order to its end."""
    ended = ("completed", "compensated")
    while any(state is None or state.status not in ended for state in states_of(orders)):
        time.sleep(0.1)


def states_of(orders: int) -> list[SagaState | None]:
    """Where every order is."""
    return [shop.fulfil.state(order(number).id) for number in range(orders)]


def audit(orders: int, kills: int) -> None:
    """Count what is there, in the shop's own tables and in the book of the bank and the carrier."""
    states = states_of(orders)
    shipped = {state.input.id for state in states if state is not None and state.status == "completed"}
    undone = {state.input.id for state in states if state is not None and state.status == "compensated"}
    with closing(sqlite3.connect("shop.db")) as connection:
        reserved = {order for (order,) in connection.execute("SELECT order_id FROM reservations")}
        mailed = [order for (order,) in connection.execute("SELECT order_id FROM mails")]
        left = dict(connection.execute("SELECT item, left FROM stock"))
    with closing(sqlite3.connect("outside.db")) as connection:
        lines = list(connection.execute("SELECT what, order_id, cents FROM lines"))
    charged = [order for what, order, _ in lines if what == "charge"]
    refunded = [order for what, order, _ in lines if what == "refund"]
    parcels = [order for what, order, _ in lines if what == "parcel"]
    assert len(shipped) + len(undone) == orders, "an order is neither shipped nor undone"
    assert reserved == shipped == set(parcels) == set(mailed), "the shelf, the carrier and the mails disagree"
    assert len(parcels) == len(mailed) == len(shipped), "something was sent twice"
    assert len(charged) == len(set(charged)) and len(refunded) == len(set(refunded)), (
        "a card was charged twice"
    )
    assert set(charged) - set(refunded) == shipped, "somebody paid for nothing, or nothing for something"
    assert sum(left.values()) + len(reserved) == 2 * shop.STOCK + 3, "goods were lost, or found"
    print(f"{orders} orders, {kills} processes killed: {len(shipped)} shipped, {len(undone)} undone")
    print(
        f"{len(charged)} charges, {len(refunded)} of them refunded, {sum(cents for *_, cents in lines)} cents kept"
    )
    print("the books balance")


if __name__ == "__main__":
    if sys.argv[1:2] == ["place"]:
        place(range(int(sys.argv[2]), int(sys.argv[3])))
    else:
        numbers = [int(argument) for argument in sys.argv[1:3]]
        main(*(numbers + [40, 8][len(numbers) :]))
