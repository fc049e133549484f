"""``effectonce migrate``: makes a store's table, for roles that may, so that applications need not be allowed to."""

from __future__ import annotations

import argparse
import inspect
from contextlib import closing

from .._blocking import run
from ..errors import UsageError
from ..stores import kind_of, open_store
from ..stores._urls import shown
from . import _tables

DESCRIPTION = """\
Make what a store needs in its database (a table, and what belongs to it), or bring it up to date. Safe to repeat: what
is there stays. Afterwards applications may say create=no in their URL and need only the right to read and write."""


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``migrate``."""
    parser = commands.add_parser(
        "migrate",
        help="make a store's table, or bring it up to date",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("url", metavar="URL", help="such as postgresql://user:password@host/database")
    parser.add_argument("--print", action="store_true", help="print the statements instead of executing them")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--outbox", action="store_true", help="make the table of an outbox instead")
    instead.add_argument(
        "--versions", action="store_true", help="make the tables of effectonce.versions instead"
    )
    instead.add_argument(
        "--cursors", action="store_true", help="make the table of consumers' cursors instead"
    )
    parser.add_argument(
        "--table",
        default="effectonce_outbox",
        metavar="NAME",
        help="the outbox's name (default: %(default)s); a store's stands in its URL",
    )
    parser.set_defaults(run=_migrate)


def _migrate(arguments: argparse.Namespace) -> int:
    if arguments.outbox:
        return _migrate_outbox(arguments)
    if arguments.versions:
        from ..versions import schema

        return _make_tables(arguments, schema)
    if arguments.cursors:
        from ..messaging import cursors

        return _make_tables(arguments, cursors.schema)
    verb = "ddl" if arguments.print else "migrate"
    if not hasattr(kind_of(arguments.url), verb):  # before a file is made of its name
        what = "print" if arguments.print else "migrate"
        unneeded = f"{shown(arguments.url)} has nothing to {what}: this store makes what it needs by itself."
        if arguments.print:
            raise UsageError(unneeded)
        print(unneeded)
        return 0
    with open_store(arguments.url) as store:
        made = getattr(store, verb)()
        if arguments.print:
            print(made, end="")
            return 0
        if inspect.iscoroutine(made):
            made = run(made)
        print(f"{shown(arguments.url)} {'has just been made ready' if made else 'is ready'}.")
        return 0


def _migrate_outbox(arguments: argparse.Namespace) -> int:
    from ..outbox._database import open_database

    with closing(open_database(arguments.url, arguments.table)) as database:
        if arguments.print:
            print(database.ddl(), end="")
            return 0
        made = database.migrate()
        print(f"{shown(arguments.url)} {'has just been made ready' if made else 'is ready'}.")
        return 0


def _make_tables(arguments: argparse.Namespace, schema: _tables.Schema) -> int:
    if arguments.print:
        print(_tables.ddl(arguments.url, schema), end="")
        return 0
    _tables.make(arguments.url, schema)
    print(f"{shown(arguments.url)} is ready.")
    return 0
