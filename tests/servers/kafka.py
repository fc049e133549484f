"""Kafka 4 without ZooKeeper (KRaft), one node that is broker and controller, from Maven Central; needs Java 17."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.servers.base import HOST, StartError
from tests.servers.maven import Artifact, java
from tests.servers.ports import reserve_port
from tests.servers.process import ProcessServer

KAFKA = Artifact("kafka", "org.apache.kafka", "kafka_2.13", "4.1.0")
CLUSTER = "ZWZmZWN0b25jZS10ZXN0cw"
DEFAULTS = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "controller.listener.names": "CONTROLLER",
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "1",
    "group.initial.rebalance.delay.ms": "0",
    "num.partitions": "3",
}


class Kafka(ProcessServer):
    """Kafka 4, from Maven Central; needs Java 17."""

    name = "kafka"
    patience = 1.8

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)
        self._controller_port, self._controller_reservation = reserve_port()

    @classmethod
    def get(cls) -> None:
        java()
        KAFKA.libraries()

    def prepare(self) -> None:
        """Nothing yet: the files of a node name its port."""

    def command(self) -> list[str]:
        self._configure()
        return [*self._java("-Xmx256m"), "kafka.Kafka", str(self._configuration)]

    def _configure(self) -> None:
        controller = f"{HOST}:{self._controller_port}"
        here = {
            "listeners": f"PLAINTEXT://{HOST}:{self.port},CONTROLLER://{controller}",
            "advertised.listeners": f"PLAINTEXT://{HOST}:{self.port}",
            "controller.quorum.voters": f"1@{controller}",
            "log.dirs": str(self.folder / "data"),
        }
        settings = {name.replace("_", "."): value for name, value in self.settings.items()}
        lines = [f"{name}={value}\n" for name, value in (here | DEFAULTS | settings).items()]
        self._configuration.write_text("".join(lines))
        if (self.folder / "data").exists():
            return
        format = ["kafka.tools.StorageTool", "format", "-t", CLUSTER, "-c", str(self._configuration)]
        run = subprocess.run([*self._java("-Xmx128m"), *format], capture_output=True, text=True)
        if run.returncode:
            raise StartError(f"Kafka's storage tool failed:\n{run.stdout}{run.stderr}")

    def ask(self) -> None:
        from confluent_kafka.admin import AdminClient

        client = AdminClient({"bootstrap.servers": f"{HOST}:{self.port}", "log_level": 0})
        if not client.list_topics(timeout=2).brokers:
            raise ConnectionError("no broker has registered yet")

    def stop(self) -> None:
        super().stop()
        self._controller_reservation.close()

    @property
    def url(self) -> str:
        return f"kafka://{HOST}:{self.port}"

    @property
    def _configuration(self) -> Path:
        return self.folder / "server.properties"

    def _java(self, memory: str) -> list[str]:
        quick = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xshare:auto", memory]
        return [str(java()), *quick, "-cp", f"{KAFKA.libraries()}/*"]
