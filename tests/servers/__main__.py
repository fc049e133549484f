"""Servers by hand: ``python -m tests.servers up postgres valkey``."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from contextlib import ExitStack

from tests.servers import SERVERS, Server, StartError, Unavailable, kind, start, variable

ENDS = {signal.SIGINT, signal.SIGTERM}


def main() -> None:
    arguments = _parser().parse_args()
    try:
        arguments.run(arguments)
    except (Unavailable, StartError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.servers", description="Real servers, to try things on."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    up = commands.add_parser("up", help="start servers and keep them until Ctrl-C")
    up.add_argument("servers", nargs="+", choices=SERVERS, metavar="SERVER", help=", ".join(SERVERS))
    up.set_defaults(run=_up)
    commands.add_parser("list", help="name the servers there are").set_defaults(run=_list)
    return parser


def _list(arguments: argparse.Namespace) -> None:
    for name in SERVERS:
        print(f"{name:16}{(kind(name).__doc__ or '').splitlines()[0]}")


def _up(arguments: argparse.Namespace) -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(_start(name)) for name in arguments.servers]
        for server in servers:
            print(f"{server.name:16}{server.url}")
        print("\nTo run the tests on them:")
        for line in _export_lines(servers):
            print(f"  {line}")
        # Blocked before it is asked for, so that it isn't missed however soon it comes.
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
        print("\nCtrl-C ends them.", flush=True)
        signal.sigwait(ENDS)


def _start(name: str) -> Server:
    began = time.monotonic()
    server = start(name)
    print(f"started {name} ({time.monotonic() - began:.1f} s)", file=sys.stderr, flush=True)
    return server


def _export_lines(servers: list[Server]) -> list[str]:
    environment = {variable(server.name): server.url for server in servers}
    for server in servers:
        environment |= server.client_environment
    return [f"export {name}='{value}'" for name, value in environment.items()]


if __name__ == "__main__":
    main()
