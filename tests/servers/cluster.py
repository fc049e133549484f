"""A Valkey cluster of three primaries that share the slots, with a replica each where a test asks for them.

Settings go to each node, as in ``redis.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from socket import socket
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
    _bus_reservation: socket | None = None

    def prepare(self) -> None:
        bus_port, self._bus_reservation = reserve_port()
        self.settings |= {"cluster-enabled": "yes", "cluster-port": str(bus_port)}

    def stop(self) -> None:
        super().stop()
        if self._bus_reservation is not None:
            self._bus_reservation.close()

    def serves_all_slots(self, nodes: int) -> bool:
        """Whether this node knows so many, and where every slot is."""
        with self.client() as client:
            state = client.execute_command("CLUSTER INFO")
        known = (state["cluster_known_nodes"], state["cluster_slots_ok"]) == (str(nodes), str(SLOTS))
        return state["cluster_state"] == "ok" and known

    def follows_its_primary(self) -> bool:
        """Whether this node is a replica that gets what its primary is told."""
        with self.client() as client:
            return client.info("replication").get("master_link_status") == "up"


class ValkeyCluster(Server):
    """Three primaries of Valkey 9. Tests that need one of them to fail find it in ``nodes``, and with
    ``replicas=True`` its replica at the same place of ``replicas``.
    """

    name = "valkey-cluster"

    def __init__(self, *, replicas: bool = False, **settings: object) -> None:
        self.nodes = [ClusterNode(**settings) for _ in range(NODES)]
        self.replicas = [ClusterNode(**settings) for _ in range(NODES if replicas else 0)]
        self._all = [*self.nodes, *self.replicas]

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
            for node in self._all:
                node.start()
            self._introduce()
            self._wait_until_ready()
            self._have_followers()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        for node in self._all:
            node.stop()

    def kill(self) -> None:
        for node in self._all:
            node.kill()

    def restart(self) -> None:
        for node in self._all:
            node.restart()
        self._wait_until_ready()

    def pause(self) -> None:
        for node in self._all:
            node.pause()

    def resume(self) -> None:
        for node in self._all:
            node.resume()

    def log(self) -> str:
        return "\n".join(node.log() for node in self._all)

    def _introduce(self) -> None:
        """Share out the slots and have the nodes meet. Different epochs spare them a quarrel about who is older."""
        first = self.nodes[0]
        bounds = [SLOTS * i // NODES for i in range(NODES + 1)]
        for i, node in enumerate(self._all):
            with node.client() as client:
                client.execute_command("CLUSTER SET-CONFIG-EPOCH", i + 1)
                if node in self.nodes:
                    client.execute_command("CLUSTER ADDSLOTSRANGE", bounds[i], bounds[i + 1] - 1)
                if node is not first:
                    bus_port = first.settings["cluster-port"]
                    client.execute_command("CLUSTER MEET", HOST, first.port, bus_port)

    def _have_followers(self) -> None:
        for node, replica in zip(self.nodes, self.replicas, strict=False):
            with node.client() as primary, replica.client() as client:
                client.execute_command("CLUSTER REPLICATE", primary.execute_command("CLUSTER MYID"))
        self._wait_until(lambda: all(replica.follows_its_primary() for replica in self.replicas))

    def _wait_until_ready(self) -> None:
        self._wait_until(lambda: all(node.serves_all_slots(len(self._all)) for node in self._all))

    def _wait_until(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not is_so():
            if time.monotonic() > deadline:
                raise StartError(f"the cluster did not come together. The nodes' logs:\n{self.log()}")
            time.sleep(LOOK_SECONDS)
