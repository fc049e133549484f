"""What a server's processes have used of the cores, and which cores they may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def cpu_seconds(pid: int) -> float:
    """What a process, its threads and its children have used so far, to the nanosecond."""
    total = 0
    for thread in _threads(pid):
        with suppress(OSError):
            total += int((thread / "schedstat").read_text().split()[0])
    return total / 1e9


def pin(pid: int, cores: set[int]) -> None:
    """Keep a process, its threads and its children on some cores."""
    for thread in _threads(pid):
        with suppress(OSError):
            os.sched_setaffinity(int(thread.name), cores)


def _threads(pid: int) -> Iterator[Path]:
    with suppress(OSError):
        for thread in list(Path(f"/proc/{pid}/task").iterdir()):
            yield thread
            for child in (thread / "children").read_text().split():
                yield from _threads(int(child))
