"""A Valkey cluster of three primaries that share the slots. Settings go to each node, as in ``redis.py``."""

from __future__ import annotations

import time
from typing import Self

from tests.servers.base import HOST, Server, StartError
from tests.servers.ports import reserve_port
from tests.servers.process import LOOK_SECONDS, START_SECONDS
from tests.servers.redis import Valkey

NODES = 3
SLOTS = 16_384


class ClusterNode(Valkey):
    """One node. The port on which it talks to the other nodes is reserved as the other is."""

    name = "valkey-cluster"

    def prepare(self) -> None:
        bus_port, self._bus_reservation = reserve_port()
        self.settings |= {"cluster-enabled": "yes", "cluster-port": str(bus_port)}

    def stop(self) -> None:
        super().stop()
        self._bus_reservation.close()

    def serves_all_slots(self) -> bool:
        """Whether this node knows the others and where every slot is."""
        with self.client() as client:
            state = client.execute_command("CLUSTER INFO")
        known = (state["cluster_known_nodes"], state["cluster_slots_ok"]) == (str(NODES), str(SLOTS))
        return state["cluster_state"] == "ok" and known


class ValkeyCluster(Server):
    """Three primaries of Valkey 9. Tests that need one of them to fail find it in ``nodes``."""

    name = "valkey-cluster"

    def __init__(self, **settings: object) -> None:
        self.nodes = [ClusterNode(**settings) for _ in range(NODES)]

    @classmethod
    def get(cls) -> None:
        ClusterNode.get()

    @property
    def url(self) -> str:
        return f"redis+cluster://{HOST}:{self.port}"

    @property
    def port(self) -> int:
        """The first node's; it tells clients of the others."""
        return self.nodes[0].port

    @property
    def pid(self) -> int:
        """The first node's."""
        return self.nodes[0].pid

    def start(self) -> Self:
        try:
            for node in self.nodes:
                node.start()
            self._introduce()
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()

    def restart(self) -> None:
        for node in self.nodes:
            node.restart()
        self._wait_until_ready()

    def pause(self) -> None:
        for node in self.nodes:
            node.pause()

    def resume(self) -> None:
        for node in self.nodes:
            node.resume()

    def log(self) -> str:
        return "\n".join(node.log() for node in self.nodes)

    def _introduce(self) -> None:
        """Share out the slots and have the nodes meet. Different epochs spare them a quarrel about who is older."""
        first = self.nodes[0]
        bounds = [SLOTS * i // NODES for i in range(NODES + 1)]
        for i, node in enumerate(self.nodes):
            with node.client() as client:
                client.execute_command("CLUSTER SET-CONFIG-EPOCH", i + 1)
                client.execute_command("CLUSTER ADDSLOTSRANGE", bounds[i], bounds[i + 1] - 1)
                if node is not first:
                    bus_port = first.settings["cluster-port"]
                    client.execute_command("CLUSTER MEET", HOST, first.port, bus_port)

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not all(node.serves_all_slots() for node in self.nodes):
            if time.monotonic() > deadline:
                raise StartError(f"the cluster did not come together. The nodes' logs:\n{self.log()}")
            time.sleep(LOOK_SECONDS)
