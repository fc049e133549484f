"""``effectonce relay``: publishes the events of an outbox, and looks after those that were given up."""

from __future__ import annotations

import argparse
import logging
from contextlib import closing
from typing import TYPE_CHECKING

from ..errors import UsageError
from ..stores._urls import shown
from ._signals import ended_by_signals

if TYPE_CHECKING:
    from ..outbox._database import Database

DESCRIPTION = """\
Publish the events that applications commit to an outbox, at least once and in order per key, until SIGTERM or Ctrl-C.
Any number of relays may run at once. `effectonce migrate --outbox DATABASE` makes the table.

brokers:
  redis://host:6379/0?prefix=…&maxlen=…         a stream for each topic (also rediss://, valkey://)
  amqp://user:password@host/vhost?exchange=…    the topic is the routing key
  nats://host:4222                              the topic is the subject; JetStream
  kafka://host:9092?security.protocol=…         options are librdkafka's
  sqs://?region=…&prefix=…&endpoint=…           the topic is the queue
  https://host/hooks/{topic}                    a POST with an Idempotency-Key"""

SHOWN = 100
"""How many dead letters are listed."""


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``relay``."""
    parser = commands.add_parser(
        "relay",
        help="publish the events of an outbox to a broker",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("database", metavar="DATABASE", help="such as postgresql://user:password@host/database")
    add("broker", metavar="BROKER", nargs="?", help="where to publish: see above")
    add("--table", default="effectonce_outbox", metavar="NAME", help="the outbox (default: %(default)s)")
    add("--batch", type=int, default=1000, metavar="N", help="events leased at a time (default: %(default)s)")
    add("--lease", default="30s", help="how long a dead relay's events wait (default: %(default)s)")
    add("--max-attempts", type=int, default=10, metavar="N", help="before giving up (default: %(default)s)")
    add(
        "--poison",
        choices=("block", "skip"),
        default="block",
        help="whether an event that was given up holds up its key (default: %(default)s)",
    )
    add("--keep", metavar="TIME", help="keep published events so long, such as 7d (default: delete them)")
    add("--once", action="store_true", help="publish what is there and end")
    looks = parser.add_argument_group("instead of publishing").add_mutually_exclusive_group()
    looks.add_argument("--lag", action="store_true", help="say how far behind the relays are")
    looks.add_argument("--dead", action="store_true", help="list the events that were given up, and why")
    looks.add_argument("--replay", metavar="ID", help="publish one of them after all, or `all`")
    looks.add_argument("--forget", metavar="ID", help="delete one of them; what it holds up goes on")
    parser.set_defaults(run=_relay)


def _relay(arguments: argparse.Namespace) -> int:
    if arguments.lag or arguments.dead or arguments.replay or arguments.forget:
        from ..outbox._database import open_database

        with closing(open_database(arguments.database, arguments.table)) as database:
            return _look(arguments, database)
    if arguments.broker is None:
        raise UsageError("Name a BROKER to publish to, such as redis://localhost:6379/0.")
    return _publish(arguments)


def _publish(arguments: argparse.Namespace) -> int:
    from ..outbox import Relay

    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    with (
        Relay(
            arguments.database,
            arguments.broker,
            table=arguments.table,
            batch=arguments.batch,
            lease=arguments.lease,
            max_attempts=arguments.max_attempts,
            poison=arguments.poison,
            keep=arguments.keep,
        ) as relay,
        ended_by_signals(relay.stop),
    ):
        # Whatever is wrong for good, such as a missing table, is said now and not in a loop.
        relay.lag()
        print(f"relaying from {shown(arguments.database)} to {shown(arguments.broker)}", flush=True)
        if arguments.once:
            relay.run_once()
        else:
            relay.run()
        print(f"published {relay.figures.published} events, gave up {relay.figures.given_up}")
    return 0


def _look(arguments: argparse.Namespace, database: Database) -> int:
    if arguments.lag:
        lag = database.lag()
        print(f"{lag.waiting} events wait, the oldest for {lag.seconds:.1f} s; {lag.dead} were given up")
    elif arguments.dead:
        for event, reason, blocks in database.dead(SHOWN):
            holds = f", holds up {event.key!r}" if blocks and event.key is not None else ""
            print(f"{event.id}  {event.topic}  after {event.attempts} attempts{holds}: {reason}")
    elif arguments.replay:
        replayed = database.replay(None if arguments.replay == "all" else arguments.replay)
        print(f"{replayed} events will be published after all")
        return 0 if replayed or arguments.replay == "all" else 1
    else:
        forgotten = database.forget(arguments.forget)
        print("forgotten" if forgotten else f"no event {arguments.forget} was given up")
        return 0 if forgotten else 1
    return 0
