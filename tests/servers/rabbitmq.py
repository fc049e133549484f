"""RabbitMQ 3.10 from Debian, with the Erlang that it needs. It keeps what is confirmed on disk, as in production.

Erlang's scripts know where they were meant to be installed; ours say where they are. A node of Erlang's looks for
others through a daemon, epmd, which would outlive it: a private one is started as its child instead.
"""

from __future__ import annotations

import socket
from pathlib import Path

from tests.servers import debian
from tests.servers.base import HOST
from tests.servers.ports import reserve_port
from tests.servers.process import ASK_SECONDS, ProcessServer

HEADER = b"AMQP\x00\x00\x09\x01"
# Plugins would cost seconds, and the guest may do everything, but only from this machine.
CONFIGURATION = """\
listeners.tcp.1 = {host}:{port}
log.console = true
log.console.level = warning
log.file = false
vm_memory_high_watermark.relative = 0.2
disk_free_limit.absolute = 50MB
"""
ERL = """\
#!/bin/sh
export EMU=beam PROGNAME=erl ROOTDIR='{root}' BINDIR='{programs}'
exec "$BINDIR/erlexec" "$@"
"""
# The shell passes the word to end on to the server, and ends the daemon after it.
RUN = """\
"$0" -port "$ERL_EPMD_PORT" & names=$!
"$@" & server=$!
trap 'kill "$server"' TERM
wait "$server"
while kill -0 "$server" 2>/dev/null; do wait "$server"; done
kill "$names"; wait "$names"
"""


def root() -> Path:
    """Where the package and what it needs were unpacked."""
    return debian.folder("rabbitmq-server")


class RabbitMQ(ProcessServer):
    """RabbitMQ 3.10, from Debian."""

    name = "rabbitmq"
    patience = 1.8  # Erlang takes ten seconds of a processor to begin with

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)
        # Two more ports, for nodes that will never call.
        self._names_port, self._names_reservation = reserve_port()
        self._nodes_port, self._nodes_reservation = reserve_port()

    @classmethod
    def get(cls) -> None:
        root()

    def prepare(self) -> None:
        """Write the scripts that find Erlang, and say that no plugin is wanted."""
        erlang = root() / "usr/lib/erlang"
        erl = self.folder / "bin" / "erl"
        erl.parent.mkdir()
        erl.write_text(ERL.format(root=erlang, programs=self._erlang_programs))
        erl.chmod(0o755)
        (self.folder / "plugins").write_text("[].\n")

    def command(self) -> list[str]:
        text = CONFIGURATION.format(host=HOST, port=self.port)
        text += "".join(f"{name} = {value}\n" for name, value in self.settings.items())
        (self.folder / "rabbitmq.conf").write_text(text)
        server = next(root().glob("usr/lib/rabbitmq/lib/*/sbin/rabbitmq-server"))
        return ["sh", "-c", RUN, str(self._erlang_programs / "epmd"), str(server)]

    def environment(self) -> dict[str, str]:
        libraries = [str(folder) for folder in root().glob("*/lib/*-linux-*")]
        return {
            "PATH": f"{self.folder / 'bin'}:/usr/local/bin:/usr/bin:/bin",
            "LD_LIBRARY_PATH": ":".join([*libraries, str(root() / "usr/lib/x86_64-linux-gnu")]),
            "HOME": str(self.folder),  # the cookie of the node is there
            "ERL_EPMD_PORT": str(self._names_port),
            "ERL_EPMD_ADDRESS": HOST,
            "RABBITMQ_NODENAME": f"test{self.port}@localhost",
            "RABBITMQ_DIST_PORT": str(self._nodes_port),
            "RABBITMQ_CONFIG_FILE": str(self.folder / "rabbitmq.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.folder / "plugins"),
            "RABBITMQ_MNESIA_BASE": str(self.folder / "data"),
            "RABBITMQ_LOG_BASE": str(self.folder / "log"),
            "RABBITMQ_PID_FILE": str(self.folder / "pid"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 2:2 +sbwt none",
        }

    def ask(self) -> None:
        """A broker answers a client's first bytes with what it can do."""
        with socket.create_connection((HOST, self.port), ASK_SECONDS) as connection:
            connection.sendall(HEADER)
            if not connection.recv(8).startswith(b"\x01\x00\x00"):
                raise ConnectionError("it does not speak AMQP yet")

    def stop(self) -> None:
        super().stop()
        self._names_reservation.close()
        self._nodes_reservation.close()

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@{HOST}:{self.port}/"

    @property
    def _erlang_programs(self) -> Path:
        return next((root() / "usr/lib/erlang").glob("erts-*/bin"))
