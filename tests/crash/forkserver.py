"""The executioner: a process that has imported everything and opened nothing, and forks one victim per kill point.

Three ways to die, all by SIGKILL:

step     before the n-th step, counted over every line of effectonce and every instruction of SQLite's machine.
         Reaches every thread, on every platform.
syscall  at the n-th stop of the main thread at the entry to or the exit from a system call (ptrace). Between two of
         these a process changes no file, the memory-mapped WAL index apart. Linux only.
time     after n microseconds.

Reads one JSON order a line from stdin, answers each with one line.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import sys
import threading
import time
import traceback
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

from tests.crash import tracing, workloads

import effectonce

PACKAGE = str(Path(effectonce.__file__).parent)

Order = dict[str, Any]


def main() -> None:
    """Carry out orders until there are none."""
    say({"ptrace": tracing.can_trace()})
    for line in sys.stdin:
        order = json.loads(line)
        say({"step": step, "syscall": syscall, "time": after, "watch": watch}[order["by"]](order))


def say(words: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


def verdict(status: int, reached: int) -> dict[str, Any]:
    """What became of a victim. One that ended in any way but these has a bug to show."""
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    return {"killed": killed, "count": reached, "failed": os.WIFEXITED(status) and status != 0}


# Ways to die


def step(order: Order) -> dict[str, Any]:
    """The victim counts its own steps and kills itself."""
    heard, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(heard)
        steps = Steps(order["at"])
        live(order, steps.watch)
        os.write(told, str(next(steps.taken)).encode())
        os._exit(0)
    os.close(told)
    with os.fdopen(heard) as pipe:
        reached = int(pipe.read() or order["at"] or 0)
    return verdict(os.waitpid(pid, 0)[1], reached)


class Steps:
    """Counts lines of effectonce and instructions of SQLite in every thread, and dies when there have been ``at``."""

    def __init__(self, at: int | None) -> None:
        self.at, self.taken = at, count(1)
        self.watching = False
        self.plain_connect = sqlite3.connect
        sqlite3.connect = self.connect  # type: ignore[assignment]

    def watch(self) -> None:
        self.watching = True
        threading.settrace(self.trace)
        sys.settrace(self.trace)

    def tick(self) -> None:
        if self.watching and next(self.taken) == self.at:
            os.kill(os.getpid(), signal.SIGKILL)

    def trace(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            self.tick()
        return self.trace if frame.f_code.co_filename.startswith(PACKAGE) else None

    def connect(self, *args: Any, **kwargs: Any) -> sqlite3.Connection:
        connection = self.plain_connect(*args, **kwargs)
        connection.set_progress_handler(self.tick, 1)
        return connection


def syscall(order: Order) -> dict[str, Any]:
    """The victim is stopped at every system call, and killed at one."""
    return verdict(*tracing.follow(traced(order), lambda stops: stops == order["at"]))


def watch(order: Order) -> dict[str, Any]:
    """Nobody is killed; the files that were written and synced are told, in order."""
    pid = traced(order)
    calls: list[tuple[str, str]] = []

    def note(_: int) -> bool:
        if call := tracing.entered(pid):
            calls.append(call)
        return False

    return verdict(*tracing.follow(pid, note)) | {"calls": calls}


def traced(order: Order) -> int:
    pid = os.fork()
    if pid == 0:
        live(order, tracing.be_traced)
        os._exit(0)
    return pid


def after(order: Order) -> dict[str, Any]:
    """The victim is killed at a moment that nobody chose."""
    pid = os.fork()
    if pid == 0:
        live(order, lambda: None)
        os._exit(0)
    time.sleep(order["at"] / 1e6)
    os.kill(pid, signal.SIGKILL)
    return verdict(os.waitpid(pid, 0)[1], order["at"])


def live(order: Order, begin: Callable[[], object]) -> None:
    """A victim's life; from ``begin`` on it may be cut short."""
    options = {name: order[name] for name in ("once", "fault", "durability")}
    try:
        workloads.perform(order["workload"], Path(order["directory"]), begin, **options)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
