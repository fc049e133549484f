"""Gets the servers that don't come as wheels, once, into ``.venvs/servers``, and changes nothing else on the machine.

Debian packages are downloaded and unpacked, not installed: so no service is started, and root isn't needed.
"""

from __future__ import annotations

import fcntl
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from tests.servers.base import Unavailable

CACHE = Path(__file__).parents[2] / ".venvs" / "servers"
LOOK_SECONDS = 0.2
OUTPUT_TAIL_LINES = 15


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


def debian_program(program: str, *, package: str) -> Program:
    """A program that is on the machine, or from Debian's package."""
    if found := shutil.which(program) or shutil.which(program, path="/usr/sbin:/usr/local/sbin"):
        return Program(Path(found))
    root = debian_package(package)
    path = next(path for path in root.glob(f"usr/*bin/{program}"))
    libraries = [str(folder) for folder in [*root.glob("usr/lib/*-linux-*"), *root.glob("lib/*-linux-*")]]
    return Program(path, {"LD_LIBRARY_PATH": ":".join(libraries)})


def debian_package(package: str) -> Path:
    """The folder in which a package of this Debian, and what it needs beyond this machine, is unpacked."""
    if not shutil.which("apt-get"):
        raise Unavailable(f"it is neither on the PATH nor is this a Debian to get {package} from")
    system = platform.freedesktop_os_release()
    name = f"{package}-{system['ID']}{system.get('VERSION_ID', '')}-{platform.machine()}"
    return cached(name, lambda folder: _unpack_debian(package, folder))


def cached(name: str, make: Callable[[Path], None]) -> Path:
    """The folder ``name`` of the cache, made by ``make`` when it isn't there; two runs at once make it once."""
    folder = CACHE / name
    if folder.exists():
        return folder
    with _locked():
        if not folder.exists():
            partial = CACHE / f"{name}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            make(partial)
            partial.rename(folder)
    return folder


def run(what: str, *command: str) -> None:
    """Run a command that takes its time, and show how it gets on; Unavailable when it fails."""
    began = time.monotonic()
    with (CACHE / "output.log").open("w+") as output:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
        except OSError as error:
            raise Unavailable(f"{what}: {error}") from None
        with process:
            _show_progress(what, process, Path(output.name), began)
        output.seek(0)
        lines = output.read().splitlines()
    if process.returncode:
        tail = "\n".join(lines[-OUTPUT_TAIL_LINES:])
        raise Unavailable(f"{what}: {command[0]} ended with exit status {process.returncode}:\n{tail}")


def _show_progress(what: str, process: subprocess.Popen[bytes], output: Path, began: float) -> None:
    """On a terminal the last line of the output, over and over; elsewhere one line at the end."""
    while process.poll() is None:
        if sys.stderr.isatty():
            last = (output.read_text(errors="replace").splitlines() or [""])[-1]
            print(f"\r\x1b[K{what} … {last[:70]}", end="", file=sys.stderr, flush=True)
        try:
            process.wait(LOOK_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    start_of_line = "\r\x1b[K" if sys.stderr.isatty() else ""
    print(f"{start_of_line}{what} ({time.monotonic() - began:.1f} s)", file=sys.stderr, flush=True)


def _unpack_debian(package: str, folder: Path) -> None:
    """Download with lists and archives of our own, so that neither root nor the state of the machine matters."""
    apt = CACHE / "apt"
    archives = apt / "archives"
    shutil.rmtree(archives, ignore_errors=True)
    for needed in (apt / "lists" / "partial", archives / "partial"):
        needed.mkdir(parents=True, exist_ok=True)
    places = {"Dir::State::Lists": apt / "lists", "Dir::Cache": apt, "Dir::Cache::Archives": archives}
    options = [part for name, place in places.items() for part in ("-o", f"{name}={place}")]
    apt_get = ["apt-get", "-q", *options, "-o", "Debug::NoLocking=1", "-o", "APT::Sandbox::User="]
    run("reading Debian's package lists", *apt_get, "update")
    download = ["--yes", "--no-install-recommends", "--download-only", "install", package]
    run(f"getting {package} from Debian", *apt_get, *download)
    for archive in sorted(archives.glob("*.deb")):
        subprocess.run(["dpkg", "-x", archive, folder], check=True)


@contextmanager
def _locked() -> Iterator[None]:
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another run that is getting servers ...", file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
