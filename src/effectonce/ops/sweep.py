"""``effectonce sweep``: goes on with sagas and other work that was left behind."""

from __future__ import annotations

import argparse
import logging
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .._durations import seconds
from ..errors import UsageError
from ..stores._urls import shown
from ._signals import ended_by_signals

if TYPE_CHECKING:
    from ..sweeper import Sweeper

DESCRIPTION = """\
Go on with what was left behind by processes that died, until SIGTERM or Ctrl-C: sagas are completed or undone,
registered handlers are called again, and what was claimed at most once is marked as in doubt. Any number of sweepers
may run at once.

WHAT is either
  module:name   a Sweeper of yours, such as shop.fulfilment:sweeper
  a store       such as postgresql://user:password@host/database: nothing but doubts are found then"""


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``sweep``."""
    parser = commands.add_parser(
        "sweep",
        help="go on with sagas and other work that was left behind",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", metavar="WHAT", help="module:name of a Sweeper, or a store: see above")
    parser.add_argument(
        "--every", metavar="TIME", help="the time between two looks (default: the sweeper's, 30s)"
    )
    parser.add_argument("--once", action="store_true", help="look once, go on with what is there, and end")
    parser.set_defaults(run=_sweep)


def _sweep(arguments: argparse.Namespace) -> int:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    sweeper = _found(arguments.what)
    if arguments.every is not None:
        sweeper.every = seconds(arguments.every, "--every")
    try:
        with ended_by_signals(sweeper.stop):
            # Any question will do: what is wrong for good, such as a wrong URL, is said now.
            sweeper.receiver.get("effectonce sweep")
            print(
                f"sweeping {shown(arguments.what) if '://' in arguments.what else arguments.what}", flush=True
            )
            if arguments.once:
                sweeper.run_once()
            else:
                sweeper.run()
    finally:
        sweeper.receiver.close()
    done = sweeper.figures
    print(
        f"completed {done.completed}, compensated {done.compensated}, called {done.redriven} handlers, "
        f"in doubt {done.in_doubt}, settled {done.settled}, failed {done.failed}"
    )
    return 0


def _found(what: str) -> Sweeper:
    from ..sweeper import Sweeper

    if "://" in what:
        from .._receiver import Receiver

        return Sweeper(Receiver(what))
    module, _, name = what.partition(":")
    if not name:
        raise UsageError(
            f"{what!r} names no Sweeper. Write module:name, such as shop.fulfilment:sweeper, or a URL."
        )
    sys.path.insert(0, "")  # as `python -m` has it
    try:
        found: Any = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (f"{module}.").startswith(f"{error.name}."):
            raise
        raise UsageError(
            f"There is no module {module!r} here. Run this where `python -m {module}` works."
        ) from error
    for part in name.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, Sweeper):
        raise UsageError(
            f"{what} is {type(found).__name__}, not a Sweeper. Write {name} = Sweeper(receiver, saga, …)."
        )
    return found
