"""One process of the payments service: reads orders from stdin, pays, answers on stdout. One JSON object a line.

in    {"n": 7, "transfer": [id, payer, payee, cents], "halt": place or null}    a delivery
      {"go": true}                                                              go on after a halt
out   {"ready": true}                                                           once
      {"n": 7, "at": place}                     standing still in the middle of a transfer, to be killed there
      {"n": 7, "did": "executed"}               an acknowledgement; also "replayed"
      {"n": 7, "did": "refused", "after": 0.4}  not acknowledged: deliver it again
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ... import InProgress, LeaseLost, Message, Policy, Receiver, StoreUnavailable, current
from .bank import Bank, Entry
from .storm import PLACES, Place, Transfer

OPERATION = "transfer"
LEASE = "750ms"
"""Short, so that a killed worker's transfers are taken over while the storm lasts."""

Halt = Callable[[Place], None]


def pay(bank: Bank, transfer: Transfer, key_for: Callable[[str], str | None], halt: Halt) -> str:
    """Move the money: two entries, and three places where a worker can die."""
    before, between, after = PLACES
    halt(before)
    bank.post(Entry(transfer.id, transfer.payer, -transfer.cents), key_for("debit"))
    halt(between)
    bank.post(Entry(transfer.id, transfer.payee, transfer.cents), key_for("credit"))
    halt(after)
    return f"receipt for {transfer.id}"


def pay_protected(receiver: Receiver, bank: Bank, transfer: Transfer, halt: Halt) -> dict[str, Any]:
    """Pay once, however often this transfer arrives."""

    def handler(_: Message) -> str:
        return pay(bank, transfer, current().key_for, halt)

    message = Message(id=transfer.id, payload=transfer._asdict())
    try:
        outcome = receiver.process(message, handler, operation=OPERATION)
    except (InProgress, StoreUnavailable) as error:
        return {"did": "refused", "after": error.retry_after}
    except LeaseLost:
        return {"did": "refused", "after": 0.0}
    return {"did": outcome.status}


def pay_unprotected(bank: Bank, transfer: Transfer, halt: Halt) -> dict[str, Any]:
    """Pay each time this transfer arrives, as a handler does that trusts its broker."""
    pay(bank, transfer, lambda _: None, halt)
    return {"did": "executed"}


class Wire:
    """The line to the broker."""

    def __init__(self) -> None:
        self._waiting: deque[dict[str, Any]] = deque()

    def say(self, **words: Any) -> None:
        """Tell the broker at once: a killed process flushes nothing."""
        sys.stdout.write(json.dumps(words) + "\n")
        sys.stdout.flush()

    def deliveries(self) -> Iterator[dict[str, Any]]:
        """Every delivery, until the broker hangs up."""
        while self._waiting or self._read():
            yield self._waiting.popleft()

    def halt(self, delivery: dict[str, Any], place: Place) -> None:
        """Stand still where the broker wants to kill, until it has or says to go on."""
        if delivery["halt"] != place:
            return
        self.say(n=delivery["n"], at=place)
        while self._read():
            if "go" in self._waiting[-1]:
                self._waiting.pop()
                return
        sys.exit(0)

    def _read(self) -> bool:
        line = sys.stdin.readline()
        if line:
            self._waiting.append(json.loads(line))
        return bool(line)


def main() -> None:
    """Work until the broker hangs up, or kills."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--bank", type=Path, required=True)
    parser.add_argument("--store", help="URL of the store; without it there is no protection")
    arguments = parser.parse_args()
    wire, bank = Wire(), Bank(arguments.bank)
    policy = Policy.payments(lease=LEASE, busy="reject")
    receiver = Receiver(arguments.store, policy=policy) if arguments.store else None
    wire.say(ready=True)
    for delivery in wire.deliveries():
        transfer = Transfer(*delivery["transfer"])

        def halt(place: Place, delivery: dict[str, Any] = delivery) -> None:
            wire.halt(delivery, place)

        if receiver is None:
            answer = pay_unprotected(bank, transfer, halt)
        else:
            answer = pay_protected(receiver, bank, transfer, halt)
        wire.say(n=delivery["n"], **answer)
    if receiver is not None:
        receiver.close()
    bank.close()


if __name__ == "__main__":
    main()
