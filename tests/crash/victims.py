"""What victims share: a process that forks one an order, points to die at, and a store whose commands are points.

The process has imported everything and opened nothing. A victim dies by SIGKILL, at its own hand when it has come to a
point, or after some microseconds, wherever that is. Orders come one a line from stdin, in JSON; each is answered with
one line.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from itertools import count
from typing import Any

from effectonce import Receiver

Order = dict[str, Any]
Tick = Callable[..., None]


class Ticks:
    """Counts points, and dies at one of them."""

    def __init__(self, at: int | None) -> None:
        self.at, self.counted = at, count(1)

    def __call__(self, *_: object) -> None:
        if next(self.counted) == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def fork_victims(live: Callable[[Order, Tick], None]) -> None:
    """Carry out orders until there are none."""
    for line in sys.stdin:
        print(json.dumps(execute(live, json.loads(line))), flush=True)


def execute(live: Callable[[Order, Tick], None], order: Order) -> Order:
    """Fork a victim and see it die."""
    heard, told = os.pipe()
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        ticks = Ticks(order["at"] if order["by"] == "statement" else None)
        try:
            live(order, ticks)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os.write(told, str(next(ticks.counted) - 1).encode())
        os._exit(0)
    os.close(told)
    if order["by"] == "time":
        time.sleep(order["at"] / 1e6)
        os.kill(pid, signal.SIGKILL)
    with os.fdopen(heard) as pipe:
        reached = int(pipe.read() or 0)
    status = os.waitpid(pid, 0)[1]
    return {
        "killed": os.WIFSIGNALED(status),
        "count": reached,
        "seconds": time.monotonic() - began,
        "failed": os.WIFEXITED(status) and status != 0,
    }


def count_commands(receiver: Receiver, tick: Tick) -> None:
    """Make points of what a receiver asks its store."""
    for colour in (receiver.blocking, receiver.asyncio):
        colour.store = _Ticking(colour.store, tick)  # type: ignore[assignment]


class _Ticking:
    """A store whose commands are points."""

    def __init__(self, store: Any, tick: Tick) -> None:
        self._store, self._tick = store, tick

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._store, name)
        if name not in ("claim", "renew", "complete"):
            return verb

        async def ticking(command: Any) -> Any:
            self._tick()
            answer = await verb(command)
            self._tick()
            return answer

        return ticking
