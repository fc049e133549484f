"""A second machine, as far as the network goes: a network namespace with one cable to this one, which can be pulled."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


class Elsewhere:
    """The other side of a cable."""

    def __init__(self) -> None:
        name = secrets.token_hex(3)
        subnet = f"10.{200 + secrets.randbelow(50)}.{secrets.randbelow(256)}"
        self.name, self._cable = f"eo-{name}", f"eo-{name}"
        self.address = f"{subnet}.1"
        """Of this machine, as seen from there."""
        self._far_end, self._far_address = f"eo-{name}-far", f"{subnet}.2"
        self.within = ("ip", "netns", "exec", self.name)
        """What goes before a command that is to run there."""

    def make(self) -> None:
        """Lay the cable."""
        _ip("netns", "add", self.name)
        _ip("link", "add", self._cable, "type", "veth", "peer", "name", self._far_end, "netns", self.name)
        _ip("address", "add", f"{self.address}/24", "dev", self._cable)
        self.mend()
        _ip("-n", self.name, "address", "add", f"{self._far_address}/24", "dev", self._far_end)
        _ip("-n", self.name, "link", "set", self._far_end, "up")

    def cut(self) -> None:
        """Pull the cable: whatever is sent is lost, and nobody is told."""
        _ip("link", "set", self._cable, "down")

    def mend(self) -> None:
        """Plug it in."""
        _ip("link", "set", self._cable, "up")

    def remove(self) -> None:
        """Remove everything."""
        subprocess.run(["ip", "netns", "delete", self.name], capture_output=True)
        subprocess.run(["ip", "link", "delete", self._cable], capture_output=True)


@contextmanager
def elsewhere() -> Iterator[Elsewhere]:
    """A place to run programs in that can be cut off, where root may make one."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("only root, with the command ip, can make a network")
    place = Elsewhere()
    try:
        try:
            place.make()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this system lets nobody make a network: {error.stderr.strip()}")
        yield place
    finally:
        place.remove()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
