"""The table's statements, by engine: what stands in ``sql/``, with the table's name filled in."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from ..errors import StoreMismatch, UsageError
from ..stores._named import statements
from ..transactions import Dialect

DEFAULT: Final = "effectonce_outbox"
FILES: Final[dict[Dialect, str]] = {
    "postgresql": "postgres.sql",
    "mysql": "mysql.sql",
    "sqlite": "sqlite.sql",
}
QUOTES: Final[dict[Dialect, str]] = {"postgresql": '"', "mysql": "`", "sqlite": '"'}
OURS: Final = "effectonce outbox schema 1"
"""How the table's comment begins, where tables have comments."""


def checked(table: str) -> str:
    """A table's name that is safe in a statement, on every engine."""
    if not re.fullmatch(r"[a-z_][a-z0-9_]{0,47}", str(table)):
        raise UsageError(f"table={table!r} must be a name of at most 48 characters out of a-z, 0-9 and _.")
    return table


def check_ours(comment: str | None, table: str, place: str) -> None:
    """Raise if the comment of a table is not that of an outbox that is known here."""
    if not (comment or "").startswith(OURS):
        raise StoreMismatch(
            f"The table {table} in {place} belongs to another program, or to another effectonce. Nothing was changed. "
            "Choose another name with table=."
        )


@lru_cache
def named(dialect: Dialect, table: str) -> dict[str, str]:
    """The statements for a table. Braces stand for names only, so plain replacement will do."""
    quote = QUOTES[dialect]
    names = {"{table}": f"{quote}{table}{quote}", "{name}": table, "{ears}": f"{quote}{table}_ears{quote}"}
    filled = statements(FILES[dialect], __file__)
    for mark, name in names.items():
        filled = {key: text.replace(mark, name) for key, text in filled.items()}
    return filled
