"""What the tasks of every framework do in the tests, and what a worker process notes of it.

A worker finds its folder in EFFECTONCE_FOLDER: the store, the books, and a file for each thing to be seen from outside.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.integration.consumers_helpers import LEASE, Books

from effectonce import Policy, Receiver, current
from effectonce.hooks import Event
from effectonce.testing.clocks import wait_until

FOLDER = Path(os.environ["EFFECTONCE_FOLDER"])
PAUSES = ("100ms", "1s")


class Declined(Exception):
    """A refusal that is an answer: the policy remembers it."""


def first(name: str) -> bool:
    """Whether this is asked for the first time, in whatever process."""
    try:
        (FOLDER / f"first-{name}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def note(kind: str, text: str) -> None:
    """One line in a file, whole, also beside other processes and before a kill."""
    with (FOLDER / kind).open("a") as file:
        file.write(f"{text}\n")


def hear(event: Event) -> None:
    """Note every event; and die, the first time, when the result of a task called fatal has just been recorded."""
    note("events", f"{event.kind} {event.key} {event.attempt}")
    if event.kind == "completed" and "fatal" in event.key and first("fatal"):
        os.kill(os.getpid(), signal.SIGKILL)


books = Books(FOLDER / "books.db")
receiver = Receiver(
    f"sqlite:///{FOLDER / 'store.db'}",
    consumer="billing",
    policy=Policy(lease=LEASE, remember=(Declined,), max_attempts=4),
    hooks=[hear],
)
FRAGILE = receiver.policy.but(busy="reject", max_attempts=2)
"""Of a task that is given up soon."""


def deliver(order: str) -> str:
    """Write an order's effect. Who is to be killed waits for it when most is done, however late it comes."""
    most = FOLDER / "most"
    wait_until(lambda: not most.exists() or len(books.effects()) < int(most.read_text()), seconds=60)
    return books.apply(order)


def add(a: int, b: int) -> int:
    note("runs", f"add {a} {b}")
    return a + b


def hold(name: str) -> str:
    """Run until the test says so."""
    note("runs", name)
    wait_until((FOLDER / "go").exists, seconds=60)
    return f"{name} held"


def outlive(name: str) -> str:
    """Run for longer than two leases; what shows it is that the keeper has renewed this one so often."""
    note("runs", name)
    attempt = current()
    until = attempt.deadline + 2 * attempt.claim.lease
    wait_until(lambda: attempt.deadline >= until)
    return f"{name} outlived"


def fail_once(name: str) -> str:
    note("runs", name)
    if first(name):
        raise ValueError("not today")
    return f"{name} done"


def decline(name: str) -> str:
    note("runs", name)
    raise Declined(f"{name} was declined")


def crash(name: str) -> None:
    """Take the worker along, every time."""
    note("runs", name)
    os.kill(os.getpid(), signal.SIGKILL)
