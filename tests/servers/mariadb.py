"""MariaDB 10.11 from Debian. Settings: ``start("mariadb", max_connections=5)``."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.servers import debian, fetching
from tests.servers.base import HOST, StartError
from tests.servers.process import ASK_SECONDS, ProcessServer

USER, PASSWORD, DATABASE = "effectonce", "secret", "effectonce"
SYSTEM_TABLES = ["system_tables", "performance_tables", "system_tables_data"]
PROLOGUE = "CREATE DATABASE mysql;\nUSE mysql;\nSET @auth_root_socket=NULL;\nSET @skip_auth_anonymous=1;\n"
FIRST_STATEMENTS = f"""\
CREATE DATABASE IF NOT EXISTS {DATABASE};
CREATE USER IF NOT EXISTS {USER}@'%' IDENTIFIED BY '{PASSWORD}';
GRANT ALL ON *.* TO {USER}@'%' WITH GRANT OPTION;
"""
# What Debian's own configuration says; we read none, since a machine's may say anything.
DEFAULTS = {"character_set_server": "utf8mb4", "collation_server": "utf8mb4_general_ci"}


def program() -> fetching.Program:
    """The server's program."""
    return debian.unpacked("mariadbd", package="mariadb-server-core")


class MariaDB(ProcessServer):
    """MariaDB 10.11, from Debian. What is committed is on disk, as in production."""

    name = "mariadb"

    @classmethod
    def get(cls) -> None:
        program()

    def prepare(self) -> None:
        """Make the system tables, as Debian's script does with tools of other packages."""
        (self.folder / "data").mkdir()
        (self.folder / "first.sql").write_text(FIRST_STATEMENTS)
        share = self._base / "share" / "mysql"
        tables = "".join((share / f"mysql_{name}.sql").read_text() for name in SYSTEM_TABLES)
        run = subprocess.run(
            [*self._command(), "--bootstrap", "--innodb-flush-method=nosync"],
            input=PROLOGUE + tables,
            env={**os.environ, **self.environment()},
            capture_output=True,
            text=True,
        )
        if run.returncode:
            raise StartError(f"mariadbd --bootstrap failed:\n{run.stdout}{run.stderr}")

    def command(self) -> list[str]:
        here = {"bind_address": HOST, "port": self.port, "init_file": self.folder / "first.sql"}
        return [
            *self._command(),
            *(f"--{name}={value}" for name, value in (here | DEFAULTS | self.settings).items()),
        ]

    def environment(self) -> dict[str, str]:
        return program().environment

    def ask(self) -> None:
        import pymysql

        login = {"user": USER, "password": PASSWORD, "database": DATABASE}
        timeouts = {"connect_timeout": ASK_SECONDS, "read_timeout": ASK_SECONDS}
        with pymysql.connect(host=HOST, port=self.port, **login, **timeouts) as connection:
            connection.ping(reconnect=False)

    @property
    def url(self) -> str:
        return f"mariadb://{USER}:{PASSWORD}@{HOST}:{self.port}/{DATABASE}"

    @property
    def _base(self) -> Path:
        return program().path.parents[1]

    def _command(self) -> list[str]:
        """The socket's path is short since it is relative to the data: systems allow about 100 characters."""
        places = {"basedir": self._base, "datadir": self.folder / "data", "tmpdir": self.folder}
        options = {**places, "socket": "socket", "pid_file": "pid", "innodb_log_file_size": "8M"}
        as_root = ["--user=root"] if os.geteuid() == 0 else []
        command = [str(program().path), "--no-defaults"]
        return [*command, *(f"--{name}={value}" for name, value in options.items()), *as_root]
