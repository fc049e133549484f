"""Ends the servers of a test process that can't do it any more, whatever killed it.

Run as a script this is the watcher: a process that reads from a pipe which server processes and folders there are.
When the pipe ends, because the process at its other end is gone, it kills and removes what is still on its list.
Imported it is the other end: ``watch`` and ``forget``.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

GONE_SECONDS = 10.0
"""How long a killed process may take to be gone."""

_lock = threading.Lock()
_watcher: subprocess.Popen[bytes] | None = None
_owner = 0


def watch(thing: int | Path) -> None:
    """Have the process with this id killed, or this folder removed, when this process ends."""
    _tell("+", thing)


def forget(thing: int | Path) -> None:
    """It is gone; its name may come to mean something else."""
    _tell("-", thing)


def signal_tree(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process and its children, parent first. PostgreSQL's are in no common group."""
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        parent.send_signal(number)
        for child in parent.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.send_signal(number)


def freeze_tree(pid: int) -> None:
    """SIGSTOP for a process and its children. Returns when every thread stands still: until then some go on."""
    signal_tree(pid, signal.SIGSTOP)
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            _wait_until(lambda pid=process.pid: _stands_still(pid))


def _stands_still(pid: int) -> bool:
    states: list[str] = []
    for thread in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            states.append(thread.read_text(errors="replace").rpartition(")")[2].split()[0])
    return set(states) <= set("TtZX")


def kill_tree(pid: int) -> None:
    """SIGKILL for a process and its children; stopped first, so that none is born meanwhile.

    Returns when they have let go of everything: PostgreSQL does not start again while an old child of its is there.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        parent.suspend()
        _wait_until(lambda: parent.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE))
        processes = [*parent.children(recursive=True), parent]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        _wait_until(lambda: all(map(_is_dead, processes)))


def _is_dead(process: psutil.Process) -> bool:
    """A zombie holds nothing any more, and who reaps it may take his time."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + GONE_SECONDS
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.001)


def _tell(sign: str, thing: int | Path) -> None:
    line = f"{sign}{thing}\n".encode()
    with _lock:
        pipe = _started().stdin
        assert pipe is not None
        pipe.write(line)
        pipe.flush()


def _started() -> subprocess.Popen[bytes]:
    """The watcher of this process, not of one that this was forked from. Its own session keeps Ctrl-C away from it."""
    global _watcher, _owner
    if _watcher is None or _owner != os.getpid():
        command = [sys.executable, "-P", __file__]
        _watcher = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        _owner = os.getpid()
        atexit.register(_end, _watcher)
    return _watcher


def _end(watcher: subprocess.Popen[bytes]) -> None:
    """Let it clean up before this process ends; a process forked from this one has nothing to say in that."""
    if _owner == os.getpid():
        watcher.communicate()


def main() -> None:
    """Keep the list until the pipe ends; then clean up."""
    things: dict[str, None] = {}
    for line in sys.stdin:
        sign, thing = line[0], line[1:-1]
        if sign == "+":
            things[thing] = None
        else:
            things.pop(thing, None)
    for thing in reversed(things):
        if thing.isdigit():
            kill_tree(int(thing))
    for thing in things:
        if not thing.isdigit():
            shutil.rmtree(thing, ignore_errors=True)


if __name__ == "__main__":
    main()
