"""SQL lives in ``.sql`` files, each statement under a ``-- name:`` line."""

from __future__ import annotations

import re
from pathlib import Path


def statements(file: str, beside: str = __file__) -> dict[str, str]:
    """The statements of a file in the folder ``sql`` beside a module, by name."""
    text = (Path(beside).parent / "sql" / file).read_text(encoding="utf-8")
    # Comments before a name are about what follows it, and may speak of its parameters: they go with neither statement.
    parts = re.split(r"(?:^--.*\n)*^-- name: (\w+)\n", text, flags=re.MULTILINE)
    return {name: body.strip() for name, body in zip(parts[1::2], parts[2::2], strict=True)}
