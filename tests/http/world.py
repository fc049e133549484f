"""The world outside the servers under test: what handlers did to it is counted here, and it can make them wait.

A handler calls ``effect(name)``, in whatever process it runs. ``World`` is the other end, in the test's process: it
counts, and while a name is held, whoever causes the effect waits. So tests wait for conditions, never for time to pass.
"""

from __future__ import annotations

import os
import socket
import socketserver
import threading
from collections import Counter
from pathlib import Path

ADDRESS, FOLDER = "EFFECTONCE_TEST_WORLD", "EFFECTONCE_TEST_WORLD_FOLDER"
PATIENCE_SECONDS = 30.0
"""Nothing here takes a second; what takes this long is broken."""


class World:
    """Counts effects by name. Its folder is where the servers under test keep their store."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._changed = threading.Condition()
        self._effects: Counter[str] = Counter()
        self._held: set[str] = set()
        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @property
    def environment(self) -> dict[str, str]:
        """What a server under test needs to know."""
        host, port = self._server.server_address[:2]
        return {ADDRESS: f"{host!s}:{port}", FOLDER: str(self.folder)}

    def count(self, name: str) -> int:
        """How often an effect has happened."""
        with self._changed:
            return self._effects[name]

    def wait_for(self, name: str, count: int = 1) -> None:
        """Wait until an effect has happened so often; a held one has happened, too."""
        with self._changed:
            happened = self._changed.wait_for(lambda: self._effects[name] >= count, PATIENCE_SECONDS)
            assert happened, f"{name} happened {self._effects[name]} times, not {count}"

    def hold(self, name: str) -> None:
        """Make whoever causes this effect wait, right after it."""
        with self._changed:
            self._held.add(name)

    def let_go(self, name: str) -> None:
        """Let them go on."""
        with self._changed:
            self._held.discard(name)
            self._changed.notify_all()

    def break_store(self, verb: str) -> None:
        """Have the store refuse a verb, ``claim`` or ``complete``."""
        (self.folder / f"no-{verb}").touch()

    def mend_store(self) -> None:
        """Have it refuse nothing any more."""
        for path in self.folder.glob("no-*"):
            path.unlink()

    def close(self) -> None:
        """End it; whoever waits goes on."""
        with self._changed:
            self._held.clear()
            self._changed.notify_all()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _happen(self, name: str) -> int:
        with self._changed:
            self._effects[name] += 1
            count = self._effects[name]
            self._changed.notify_all()
            self._changed.wait_for(lambda: name not in self._held, PATIENCE_SECONDS)
        return count

    def _handler(self) -> type[socketserver.BaseRequestHandler]:
        world = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                name = self.rfile.readline().decode().rstrip("\n")
                count = world._happen(name)
                self.wfile.write(b"%d\n" % count)

        return Handler


def effect(name: str) -> int:
    """Cause an effect: how often it has happened now. Blocks while it is held."""
    host, _, port = os.environ[ADDRESS].rpartition(":")
    with socket.create_connection((host, int(port)), PATIENCE_SECONDS) as connection:
        connection.sendall(f"{name}\n".encode())
        answer = connection.makefile("rb").readline()
    return int(answer)


def refuses(verb: str) -> bool:
    """Whether the store is to refuse a verb."""
    return (Path(os.environ[FOLDER]) / f"no-{verb}").exists()
