"""What every server can do, whether it is one process or several. How a process is run is in ``process.py``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Self

HOST = "127.0.0.1"


class Unavailable(Exception):
    """This server can't be had on this machine; the message says why."""


class StartError(Exception):
    """The server was there but did not start; the message ends with the tail of its log."""


class Server(ABC):
    """A server that runs from ``start`` to ``stop``. Use it in a ``with`` block, or stop it yourself."""

    name: ClassVar[str]
    """What ``start`` and the command line call it."""
    client_environment: ClassVar[dict[str, str]] = {}
    """What must be in the environment of its clients."""
    port: int
    pid: int

    @classmethod
    @abstractmethod
    def get(cls) -> None:
        """Get the programs it needs when they are missing; Unavailable when they can't be had."""

    @property
    @abstractmethod
    def url(self) -> str:
        """What ``effectonce`` opens a store with."""

    @abstractmethod
    def start(self) -> Self:
        """Start it on a free port and return when it has answered a request."""

    @abstractmethod
    def stop(self) -> None:
        """End it in good order and remove its folder. Safe to call twice."""

    @abstractmethod
    def kill(self) -> None:
        """End it as a crash would: SIGKILL, its children too. ``restart`` brings it back."""

    @abstractmethod
    def restart(self) -> None:
        """Start it again, on the same port with the same data; end it first when it runs."""

    @abstractmethod
    def pause(self) -> None:
        """Stop it from answering: connections stay open, new ones are made, and nothing comes back."""

    @abstractmethod
    def resume(self) -> None:
        """Let it go on after ``pause``."""

    @abstractmethod
    def log(self) -> str:
        """What it has written so far."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()
