"""A server that is one process, on a port of its own, in a temporary folder of its own.

A kind of server says what to run (``command``), what to make before (``prepare``) and what to ask to see that it works
(``ask``). The rest is the same for all of them and lives here.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from abc import abstractmethod
from pathlib import Path
from typing import ClassVar, Self

from tests.servers import watcher
from tests.servers.base import Server, StartError
from tests.servers.ports import reserve_port

START_SECONDS = 60.0
"""A loaded machine isn't a broken server; one that has not answered for this long is."""
STOP_SECONDS = 10.0
"""How long a server may take to end in good order before it is killed."""
LOOK_SECONDS = 0.01
"""How often to ask whether a server is ready."""
ASK_SECONDS = 2.0
"""How long to wait for one answer: whoever else is on the port may never give any."""
PORT_ATTEMPTS = 10
LOG_TAIL_LINES = 30


class ProcessServer(Server):
    """A process behind a port. Settings are the server's own; each kind says how it takes them."""

    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    patience: ClassVar[float] = 1.0
    """How much longer than others it may take to start."""

    def __init__(self, **settings: object) -> None:
        self.settings = {name: str(value) for name, value in settings.items()}
        self.folder = Path(tempfile.gettempdir()) / f"effectonce-{self.name}-{secrets.token_hex(6)}"
        self.port = 0
        self._reservation: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def prepare(self) -> None:
        """Make what must be in the folder before the first start."""

    @abstractmethod
    def command(self) -> list[str]:
        """What to run, now that the folder and the port are known."""

    @abstractmethod
    def ask(self) -> None:
        """Send a real request, waiting for ASK_SECONDS; any exception means that the server isn't ready."""

    def environment(self) -> dict[str, str]:
        """What to add to the environment of the process."""
        return {}

    def start(self) -> Self:
        self.get()
        watcher.watch(self.folder)
        try:
            self.folder.mkdir(mode=0o700)
            self.prepare()
            self._launch_on_a_free_port()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        self._end()
        if self._reservation is not None:
            self._reservation.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        watcher.forget(self.folder)

    def kill(self) -> None:
        if self._process is not None:
            watcher.kill_tree(self._process.pid)
            self._reap(self._process)

    def restart(self) -> None:
        self._end()
        self._launch()

    def pause(self) -> None:
        watcher.freeze_tree(self.pid)

    def resume(self) -> None:
        watcher.signal_tree(self.pid, signal.SIGCONT)

    @property
    def pid(self) -> int:
        """The id of the process; RuntimeError while there is none."""
        if self._process is None:
            raise RuntimeError(f"{self.name} isn't running")
        return self._process.pid

    def log(self) -> str:
        return self._log_path.read_text(errors="replace") if self._log_path.exists() else ""

    @property
    def _log_path(self) -> Path:
        return self.folder / "server.log"

    def _launch_on_a_free_port(self) -> None:
        """Whoever takes the port between our look and the server's own costs another attempt, nothing more."""
        for attempt in range(1, PORT_ATTEMPTS + 1):
            self.port, self._reservation = reserve_port()
            try:
                self._launch()
                break
            except StartError:
                if "already in use" not in self.log().lower() or attempt == PORT_ATTEMPTS:
                    raise
                self._reservation.close()
                self._log_path.unlink()

    def _launch(self) -> None:
        """Run the command behind a gate, opened when the watcher knows the process: no moment to be orphaned in."""
        gate = ["sh", "-c", 'read -r go && exec "$@" </dev/null', "sh"]
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                gate + self.command(),
                cwd=self.folder,
                env={**os.environ, **self.environment()},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        watcher.watch(self._process.pid)
        assert self._process.stdin is not None
        with self._process.stdin as gate_input:
            gate_input.write(b"go\n")
        self._wait_until_ready(self._process)

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        seconds = START_SECONDS * self.patience
        deadline = time.monotonic() + seconds
        problem: Exception | None = None
        while time.monotonic() < deadline:
            if process.poll() is not None:
                self._reap(process)
                raise StartError(self._report(f"ended with exit status {process.returncode}"))
            try:
                self.ask()
                return
            except Exception as exception:  # each driver has errors of its own for "not yet"
                problem = exception
            time.sleep(LOOK_SECONDS)
        self.kill()
        raise StartError(self._report(f"did not answer in {seconds:.0f} s: {problem!r}"))

    def _report(self, what: str) -> str:
        tail = "\n".join(self.log().splitlines()[-LOG_TAIL_LINES:])
        return f"{self.name} {what}. The end of its log:\n{tail}"

    def _end(self) -> None:
        if (process := self._process) is None:
            return
        self.resume()
        process.send_signal(self.stop_signal)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
        else:
            self._reap(process)

    def _reap(self, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        watcher.forget(process.pid)
        self._process = None
