"""``effectonce demo``: its arguments, and what its figures mean."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

DESCRIPTION = """\
A payments service under a retry storm, embedded: no server, nothing to install.

Each transfer is delivered one to five times, out of order, to several worker processes. Workers are killed with
SIGKILL in the middle of a transfer (before the debit, between debit and credit, after the credit but before its
completion is recorded) and at random moments. They are replaced, and what they held is delivered again. Then the
same storm comes over the same service without protection."""

FIGURES = """\
figures:
  deliveries    messages handed to a worker, redeliveries included
  executed      protected: transfers whose handler run the store has recorded as completed
                unprotected: handler runs that came to their end
  replayed      deliveries answered with the first result
  takeovers     attempts that took over the transfer of a killed or stalled worker, as the store counted them
  refused       deliveries told to come back because another worker held the transfer
  unanswered    deliveries that were with a worker when it was killed; all were delivered again
  stopped       ledger entries that the bank refused because it had seen their key

  from the bank's books alone:
  lost          transfers without a debit or without a credit
  double        transfers with more than one debit or more than one credit
  vanished      money that was debited and credited nowhere
  overpaid      money that was credited again
  books balance every account holds what was ordered, which is also what its ledger entries add up to

exit code: 0, or 1 when the audit of the protected run fails"""


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``demo``."""
    parser = commands.add_parser(
        "demo",
        help="a payments service under a retry storm, with and without protection",
        description=DESCRIPTION,
        epilog=FIGURES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, kind, default, meaning in (
        ("--transfers", _between(1, 100_000), 3000, "how many transfers"),
        ("--workers", _between(1, 32), 4, "how many worker processes at a time"),
        ("--kills", _between(0, 1000), 16, "how many workers to kill"),
        ("--seed", int, 7, "another seed is another storm"),
    ):
        parser.add_argument(
            name, type=kind, default=default, metavar="N", help=f"{meaning} (default: {default})"
        )
    parser.add_argument(
        "--durability",
        choices=("normal", "full"),
        default="normal",
        help="of the store: normal survives every kill -9; full, which is the library's default, survives power loss "
        "too and is as fast as the disk (default: normal)",
    )
    parser.add_argument(
        "--dir", type=Path, help="keep the databases in this directory, to look at them later"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object; progress goes to stderr")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo, which nobody who asks for another command has to import."""
    from .play import play

    return play(arguments)


def _between(least: int, most: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be between {least} and {most}, not {value}")
        return value

    return number
