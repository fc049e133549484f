"""Time for tests: a clock that moves when it is told to, and one way to wait for what moves by itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

START_SECONDS = 1_000_000.0
"""Where a ManualClock begins: a whole number, so that sums stay exact, and far from any machine's own time."""
LOOK_SECONDS = 0.002
"""How often ``wait_until`` looks."""


class ManualClock:
    """A clock that stands still until ``advance``. Give it to a store as its ``clock=``."""

    def __init__(self, start: float = START_SECONDS) -> None:
        self._now = start
        self._lock = threading.Lock()

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Let time pass; a negative number sets the clock back."""
        with self._lock:
            self._now += seconds


def wait_until(condition: Callable[[], object], *, seconds: float = 20.0, what: str = "") -> None:
    """Wait until a condition holds, looking often; AssertionError when it does not in ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            raise AssertionError(f"{what or 'The condition'} did not come true in {seconds} s.")
        time.sleep(LOOK_SECONDS)
