"""Finds the servers that came as wheels, and gets the others once, into ``.venvs/servers``."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from tests.servers.base import Unavailable

CACHE = Path(__file__).parents[2] / ".venvs" / "servers"
LOOK_SECONDS = 0.2
"""How often to show how a download gets on."""
OUTPUT_TAIL_LINES = 15
TERMINAL_COLUMNS = 78


@dataclass(frozen=True)
class Program:
    """An executable, and what its environment needs for it to run from where it is."""

    path: Path
    environment: dict[str, str] = field(default_factory=dict)


def wheel(package: str) -> Path:
    """The folder of an installed package that brings a server along. Importing it might do more than we want."""
    spec = find_spec(package.replace("-", "_"))
    if spec is None or spec.origin is None:
        raise Unavailable(f"the Python package {package} isn't installed")
    return Path(spec.origin).parent


def cached(name: str, make: Callable[[Path], None]) -> Path:
    """The folder ``name`` of the cache, filled by ``make`` when it isn't there; two runs at once fill it once."""
    folder = CACHE / name
    if folder.exists():
        return folder
    with locked():
        if not folder.exists():
            partial = CACHE / f"{name}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            make(partial)
            partial.rename(folder)
    return folder


@contextmanager
def locked() -> Iterator[None]:
    """One run at a time downloads and installs."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another run that is getting servers ...", file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run(what: str, *command: str) -> None:
    """Run a command that takes its time, and show how it gets on; Unavailable when it fails."""
    with (CACHE / "output.log").open("w+") as output:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
        except OSError as error:
            raise Unavailable(f"{what}: {error}") from None
        with process:
            _show_progress(what, process, Path(output.name))
        output.seek(0)
        tail = "".join(output.readlines()[-OUTPUT_TAIL_LINES:])
    if process.returncode:
        raise Unavailable(f"{what}: {command[0]} ended with exit status {process.returncode}:\n{tail}")


def _show_progress(what: str, process: subprocess.Popen[bytes], output: Path) -> None:
    """On a terminal the last line of the output while it runs; everywhere one line when it has ended."""
    began = time.monotonic()
    rewrite = "\r\x1b[K" if sys.stderr.isatty() else ""
    while process.poll() is None:
        if rewrite:
            last = "".join(output.read_text(errors="replace").splitlines()[-1:])
            print(rewrite + f"{what} … {last}"[:TERMINAL_COLUMNS], end="", file=sys.stderr, flush=True)
        with suppress(subprocess.TimeoutExpired):
            process.wait(LOOK_SECONDS)
    print(f"{rewrite}{what} ({time.monotonic() - began:.1f} s)", file=sys.stderr, flush=True)
