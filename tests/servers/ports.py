"""Free ports, with no race between two runs at once and none when a server comes back to its port."""

from __future__ import annotations

import random
import socket

from tests.servers.base import HOST

# Below 32768, from where systems take ports for outgoing connections: so nobody gets the port of a server that is
# down for a moment by chance.
PORTS = range(15_000, 32_000)
# Tests seed the shared generator; two runs with the same seed would want the same ports.
_random = random.SystemRandom()


def reserve_port() -> tuple[int, socket.socket]:
    """A TCP port nobody listens on, and a socket to keep open as long as the port is wanted.

    The socket is a UDP one of the same number. The servers don't use UDP, so it is in nobody's way, but no other
    launcher can reserve the port while it is open, and it closes by itself when this process ends.
    """
    while True:
        port = _random.choice(PORTS)
        reservation = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            reservation.bind((HOST, port))
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((HOST, port))
        except OSError:
            reservation.close()
        else:
            return port, reservation
