"""Programs from Debian, when they aren't on the machine.

Servers are unpacked, not installed: installed, they would be started as services. That needs no root either. Tools
that are no services are installed, when we are root.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

from tests.servers.base import Unavailable
from tests.servers.fetching import CACHE, Program, cached, locked, run

SERVER_FOLDERS = "/usr/local/sbin:/usr/sbin"
"""Where servers are, off the PATH of whoever isn't root."""


def unpacked(program: str, *, package: str) -> Program:
    """A program of the machine's, or else from a package that is unpacked into the cache."""
    if found := shutil.which(program) or shutil.which(program, path=SERVER_FOLDERS):
        return Program(Path(found))
    root = folder(package)
    libraries = [str(folder) for folder in [*root.glob("usr/lib/*-linux-*"), *root.glob("lib/*-linux-*")]]
    return Program(next(root.glob(f"usr/*bin/{program}")), {"LD_LIBRARY_PATH": ":".join(libraries)})


def installed(program: str, *, package: str) -> Path:
    """A program of the machine's, or else from a package that is installed as usual."""
    if not shutil.which(program):
        with locked():
            install(program, package=package)
    return Path(shutil.which(program) or program)


def install(program: str, *, package: str) -> None:
    """Install a package for the program in it. Hold the lock."""
    if not shutil.which("apt-get"):
        raise Unavailable(f"{program} isn't on the PATH")
    if os.geteuid() != 0:
        raise Unavailable(f"{program} isn't on the PATH; first run: sudo apt-get install {package}")
    run("reading Debian's package lists", "apt-get", "-q", "update")
    command = ["apt-get", "-q", "--yes", "--no-install-recommends", "install", package]
    run(f"installing {package}", "env", "DEBIAN_FRONTEND=noninteractive", *command)


def folder(package: str) -> Path:
    """Where a package is unpacked, with all that it needs beyond this machine."""
    if not shutil.which("apt-get"):
        raise Unavailable(f"it isn't on the PATH, and this is no Debian to get {package} from")
    system = platform.freedesktop_os_release()
    name = f"{package}-{system['ID']}{system.get('VERSION_ID', '')}-{platform.machine()}"
    return cached(name, lambda place: _unpack(package, place))


def _unpack(package: str, folder: Path) -> None:
    """Download the package and what it needs beyond this machine, with lists and archives of our own."""
    apt = CACHE / "apt"
    archives = apt / "archives"
    shutil.rmtree(archives, ignore_errors=True)
    for needed in (apt / "lists" / "partial", archives / "partial"):
        needed.mkdir(parents=True, exist_ok=True)
    places = {"Dir::State::Lists": apt / "lists", "Dir::Cache": apt, "Dir::Cache::Archives": archives}
    options = {**places, "Debug::NoLocking": "1", "APT::Sandbox::User": ""}
    apt_get = ["apt-get", "-q", *(f"-o{name}={value}" for name, value in options.items())]
    run("reading Debian's package lists", *apt_get, "update")
    run(
        f"getting {package}",
        *apt_get,
        "--yes",
        "--no-install-recommends",
        "--download-only",
        "install",
        package,
    )
    for archive in archives.glob("*.deb"):
        subprocess.run(["dpkg", "-x", archive, folder], check=True)
