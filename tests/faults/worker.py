"""A worker process: processes every message it is given until each is answered, however often it is interrupted.

``python -m tests.faults.worker URL DIRECTORY LEASE SEED ID…`` prints a line of JSON for each answer. With the seed
``pause`` it stops in the middle of its first handler, after touching ``DIRECTORY/entered``, until ``DIRECTORY/leave``
is there. ``EFFECTONCE_SKEW`` shifts its wall clock by so many seconds.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path

from tests.crash.sink import Sink, Stale

from effectonce import InProgress, LeaseLost, Message, Policy, Receiver, StoreUnavailable, current
from effectonce.testing.clocks import wait_until

NOT_YET = (InProgress, LeaseLost, StoreUnavailable, Stale)
"""Whatever else happens ends the worker, and fails the test."""


def skew_clock(seconds: float) -> None:
    """Have the wall clock of this process be wrong."""
    true_time = time.time
    time.time = lambda: true_time() + seconds


def main(url: str, folder: str, lease: str, seed: str, *ids: str) -> None:
    """Process the messages, in an order of this worker's own."""
    skew_clock(float(os.environ.get("EFFECTONCE_SKEW", "0")))
    directory, chance = Path(folder), random.Random(seed)
    sink = Sink(directory / "sink.db")
    # Who waits for a worker that was killed waits for its lease, and is to see a store that comes back.
    policy = Policy(lease=float(lease), keep="1h", wait=4 * float(lease))
    receiver = Receiver(url, policy=policy, breaker=None)

    def handle(message: Message) -> str:
        if seed == "pause":
            (directory / "entered").touch()
            wait_until((directory / "leave").exists, seconds=60, what="The word to go on")
        else:
            time.sleep(chance.random() * 0.01)  # what the work takes
        return sink.apply(message.id, current().fence, f"{message.id} by {os.getpid()}")

    left = list(ids)
    chance.shuffle(left)
    while left:
        id = left.pop(0)
        try:
            outcome = receiver.process(Message(id), handle)
        except NOT_YET as error:
            print(json.dumps([id, type(error).__name__, None]), flush=True)
            left.append(id)
            continue
        print(json.dumps([id, outcome.status, outcome.value]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
