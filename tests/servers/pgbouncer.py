"""PgBouncer from Debian, in front of a PostgreSQL: ``PgBouncer(postgres.url, default_pool_size=1).start()``.

Other settings are those of its configuration file. It lends its sessions for a transaction unless ``pool_mode`` says
otherwise.
"""

from __future__ import annotations

import os
import shutil
from urllib.parse import urlsplit

from tests.servers import debian, fetching
from tests.servers.base import HOST
from tests.servers.process import ASK_SECONDS, ProcessServer

# PgBouncer refuses to run as root.
DROP_ROOT = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"]


def program() -> fetching.Program:
    """The pooler's program."""
    return debian.unpacked("pgbouncer", package="pgbouncer")


class PgBouncer(ProcessServer):
    """PgBouncer, from Debian. Its users and databases are those of its server."""

    name = "pgbouncer"

    def __init__(self, upstream: str, **settings: object) -> None:
        super().__init__(**settings)
        self._upstream = urlsplit(upstream)

    @classmethod
    def get(cls) -> None:
        program()

    def prepare(self) -> None:
        (self.folder / "users").write_text(f'"{self._upstream.username}" "{self._upstream.password}"\n')
        if os.geteuid() == 0:
            shutil.chown(self.folder, "nobody", "nogroup")

    def command(self) -> list[str]:
        here = {
            "listen_addr": HOST,
            "listen_port": self.port,
            "unix_socket_dir": "",
            "pool_mode": "transaction",
        }
        users = {"auth_type": "scram-sha-256", "auth_file": self.folder / "users"}
        settings = "".join(f"{name} = {value}\n" for name, value in (here | users | self.settings).items())
        server = f"* = host={self._upstream.hostname} port={self._upstream.port}"
        configuration = self.folder / "pgbouncer.ini"
        configuration.write_text(f"[databases]\n{server}\n[pgbouncer]\n{settings}")
        drop = DROP_ROOT if os.geteuid() == 0 else []
        return [*drop, str(program().path), str(configuration)]

    def environment(self) -> dict[str, str]:
        return program().environment

    def ask(self) -> None:
        import psycopg

        with psycopg.connect(self.url, connect_timeout=int(ASK_SECONDS)) as connection:
            connection.execute("SELECT 1")

    @property
    def url(self) -> str:
        login = f"{self._upstream.username}:{self._upstream.password}"
        return f"postgresql://{login}@{HOST}:{self.port}{self._upstream.path}"
