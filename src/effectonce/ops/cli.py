"""The command line: ``effectonce`` and ``python -m effectonce``.

A command group is one module with a function ``add_commands``; GROUPS lists them. A command's function takes the
parsed arguments and returns the exit code.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from .. import __version__
from ..errors import EffectOnceError
from . import migrate, relay, sweep
from .demo import command as demo

GROUPS = (demo, migrate, relay, sweep)

FAILED, REFUSED, INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and give its exit code: 2 when it could not be done, 130 after Ctrl-C."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    run: Callable[[argparse.Namespace], int] | None = getattr(arguments, "run", None)
    if run is None:
        parser.print_help(sys.stderr)
        return REFUSED
    try:
        code = run(arguments)
        sys.stdout.flush()
        return code
    except EffectOnceError as error:
        print(f"effectonce: {' '.join(str(error).split())}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print(file=sys.stderr)  # what comes next begins on a line of its own
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has left. Python would complain once more when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def make_parser() -> argparse.ArgumentParser:
    """The parser with every group's commands."""
    parser = argparse.ArgumentParser(
        prog="effectonce",
        description="A message may arrive many times; its effect happens once.",
        epilog="`effectonce COMMAND --help` explains a command.",
    )
    parser.add_argument("--version", action="version", version=f"effectonce {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for group in GROUPS:
        group.add_commands(commands)
    return parser
