"""The examples as readers run them: a copy of the folder, the commands of its README, real processes and ports."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

from tests.servers.base import HOST
from tests.servers.process import ASK_SECONDS, ProcessServer

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PORT = "8000"
"""The port in every README, for which a free one stands here."""
COMMAND_SECONDS = 250
"""Storms start a dozen processes; on a machine with much else to do that takes its time."""
ENVIRONMENT = {
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "PYTHONPATH": str(ROOT / "src"),
    "PYTHONDONTWRITEBYTECODE": "1",
    # What a README has its reader install is here already; nothing may change the environment of the tests.
    "PIP_NO_INDEX": "1",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_ROOT_USER_ACTION": "ignore",
}


class Example:
    """A copy of an example, to make files in."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder / name
        shutil.copytree(EXAMPLES / name, self.folder, ignore=shutil.ignore_patterns("*.db*", "__pycache__"))

    @property
    def commands(self) -> list[str]:
        """The commands of the README, in their order."""
        text = (self.folder / "README.md").read_text()
        blocks = re.findall(r"^```console\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        return [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]

    def run(self, command: str, url: str = "", status: int = 0, **environment: str) -> str:
        """Run a command that ends, and give what it prints."""
        words = shlex.split(command.replace(f"http://127.0.0.1:{PORT}", url))
        ran = subprocess.run(
            words,
            cwd=self.folder,
            env=os.environ | ENVIRONMENT | environment,
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
        )
        assert ran.returncode == status, f"{command}\n{ran.stdout}\n{ran.stderr}"
        return ran.stdout

    @contextmanager
    def background(self, command: str) -> Iterator[subprocess.Popen[bytes]]:
        """Something that runs beside, without a port, and is killed at the end."""
        with subprocess.Popen(
            shlex.split(command), cwd=self.folder, env=os.environ | ENVIRONMENT, stdout=subprocess.DEVNULL
        ) as running:
            try:
                yield running
            finally:
                running.kill()

    def serve(self, command: str, environment: Mapping[str, str] | None = None) -> ExampleServer:
        """Start a command that serves, in place of a reader who writes ``&`` behind it. It is ready on return."""
        return ExampleServer(self, command, environment or {}).start()


class ExampleServer(ProcessServer):
    """A server of an example, on a free port."""

    name = "example"

    def __init__(self, example: Example, command: str, environment: Mapping[str, str]) -> None:
        super().__init__()
        self._example, self._command, self._environment = example, command, environment

    @classmethod
    def get(cls) -> None:
        """Nothing: it is in the environment."""

    def prepare(self) -> None:
        """Nothing: it is in the example's folder."""

    def command(self) -> list[str]:
        words = shlex.split(self._command.rstrip(" &").replace(PORT, str(self.port)))
        return ["sh", "-c", 'cd "$0" && exec "$@"', str(self._example.folder), *words]

    def environment(self) -> dict[str, str]:
        return {**ENVIRONMENT, **self._environment}

    def ask(self) -> None:
        connection = HTTPConnection(HOST, self.port, timeout=ASK_SECONDS)
        try:
            connection.request("GET", "/")
            connection.getresponse()
        finally:
            connection.close()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def __exit__(self, kind: object = None, error: BaseException | None = None, trace: object = None) -> None:
        if error is not None:
            error.add_note(self._report("was running"))
        super().__exit__(kind, error, trace)
