"""Disks that are soon full, where root may make them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PIECE = bytes(65_536)


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """A disk of so many megabytes that everybody may write to."""
    folder.mkdir()
    mount = shutil.which("mount")
    if mount is None or os.geteuid() != 0:
        pytest.skip("only root can make a small disk")
    for parent in [folder, *folder.parents][:4]:
        parent.chmod(0o755)
    options = f"size={megabytes}m,mode=777"
    done = subprocess.run([mount, "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True)
    if done.returncode:
        pytest.skip("this system lets nobody mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def filled(disk: Path) -> Iterator[None]:
    """Leave no room on a disk for as long as this lasts."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        size = len(PIECE)
        while size:
            try:
                file.write(PIECE[:size])
            except OSError:
                size //= 2
    try:
        yield
    finally:
        ballast.unlink()
