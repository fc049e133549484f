"""A saga's journal as bytes: every entry for itself while it runs, and all of them together when it has ended.

What was asked for and what steps return keep their types, by the annotations of the functions, as results do.
"""

from __future__ import annotations

from typing import Any, TypedDict

from .. import _progress, codec
from .._handlers import hint_of
from ._decisions import BEGIN, Entry, Trail
from ._definition import parameters_of
from ._outline import Outline

_typed_dict: Any = TypedDict  # made at run time, of hints that only exist then


class Form:
    """How the entries of one saga are written and read."""

    def __init__(self, outline: Outline) -> None:
        first = outline.tasks[0].action
        asked = hint_of(first, parameters_of(first)[0].name)
        self._hints: dict[str, Any] = {BEGIN: _typed_dict("Begin", {"input": asked})}
        for task in outline.tasks:
            self._hints[f"do:{task.name}"] = _typed_dict("Done", {"value": hint_of(task.action)})
        self._whole = _typed_dict("Journal", self._hints)

    def hint(self, name: str) -> Any:
        """The type of an entry."""
        return self._hints.get(name, Any)

    def write_entry(self, name: str, entry: Entry) -> bytes:
        """One entry. Raises ``Unencodable``."""
        return codec.encode(entry, self.hint(name))

    def read_journal(self, journal: bytes | None, key: str) -> Trail:
        """The trail of a saga that is under way."""
        entries = _progress.read(journal, key)
        return Trail({each.name: each.value(self.hint(each.name), key) for each in entries})

    def write(self, trail: Trail) -> bytes:
        """All of them."""
        return codec.encode(trail.entries, self._whole)

    def read(self, data: bytes) -> Trail:
        """The trail of a saga that has ended."""
        return Trail(codec.decode(data, self._whole))
